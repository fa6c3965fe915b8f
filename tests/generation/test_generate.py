"""`generate` and `beam_search` by options: the same as by specs, with and without a tokenizer."""

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.adapters.generate import beam_search, generate, stream_tokens
from glassformer.data.tokenizers.vocab import Bytes
from glassformer.generation import beam
from glassformer.generation.request import read_request
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch, stream
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.spec.decoding import OPTIONS, BeamSpec, DecodeSpec, by_flag, without_effect
from glassformer.spec.errors import InputError
from glassformer.spec.options import options_of
from glassformer.spec.presets import budget_lm, core


@pytest.fixture(scope="module")
def model():
    return build(core(vocab_size=11), generator=torch.Generator().manual_seed(0)).eval()


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A loaded model with a tokenizer."""
    runs = tmp_path_factory.mktemp("runs")
    small = ["train.batch_size=8", "train.evaluate_every=3", "task.examples=300"]
    gf.train("reverse", steps=3, runs=runs, overrides=small)
    return gf.load(runs / "reverse")


def test_ids_give_the_tokens_of_the_spec(model):
    options = {"max_new_tokens": 7, "temperature": 1.3, "top_k": 5, "min_p": 0.01, "seed": 3}
    (want,) = generate_batch(TorchStepper(model), [[3, 1, 4]], spec=DecodeSpec(**options))
    for step in ({}, {"cached": False}):
        got = generate(model, [3, 1, 4], **options, **step)
        assert got.tokens == want.tokens
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
        assert (got.finish, got.text) == ("length", "")


@pytest.mark.parametrize(
    "prompts",
    [
        [[3, 1], [4]],
        ((3, 1, 4), (1,), (5, 9)),
        torch.tensor([[3, 1], [4, 1]]),
        [torch.tensor([3, 1]), torch.tensor([4])],
        np.array([[3, 1], [4, 1]]),
        [[2]],
        Prompts.of([[3, 1], [4]]),
    ],
)
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.4, "seed": 5}])
def test_several_prompts_give_each_as_it_would_be_alone(model, prompts, sampled):
    options = {"max_new_tokens": 5, **sampled}
    made = generate(model, prompts, **options)
    rows = prompts.tokens if isinstance(prompts, Prompts) else [list(map(int, p)) for p in prompts]
    alone = [generate(model, row, **options) for row in rows]
    assert type(made) is list
    assert [one.tokens for one in made] == [one.tokens for one in alone]
    assert [one.logprobs for one in made] == [one.logprobs for one in alone]
    assert [one.finish for one in made] == [one.finish for one in alone]


def test_several_texts_and_several_sources(reader):
    texts = ["3 1 4", "1 5"]
    assert [one.text for one in generate(reader, texts, max_new_tokens=6)] == [
        generate(reader, text, max_new_tokens=6).text for text in texts
    ]
    ids, sources = [[1], [1]], [[3, 4, 5], [6, 3]]
    made = generate(reader, ids, source=sources, max_new_tokens=4)
    alone = [generate(reader, [1], source=row, max_new_tokens=4) for row in sources]
    assert [one.tokens for one in made] == [one.tokens for one in alone]
    same = generate(reader, Prompts.of(ids, sources=sources), max_new_tokens=4)
    assert [one.tokens for one in same] == [one.tokens for one in made]
    for wrong in ([3, 4, 5], [[3, 4, 5]]):
        with pytest.raises(InputError, match="not a row for each of 2 prompts"):
            generate(reader, ids, source=wrong)
    with pytest.raises(InputError, match="leave one of them out"):
        generate(reader, Prompts.of(ids, sources=sources), source=sources)


def test_a_fault_in_one_of_several_prompts_is_raised_before_any_work(model, monkeypatch):
    monkeypatch.setattr(TorchStepper, "start", None)
    for prompts in ([[3, 1], [4.5]], [[3], 1], ["a", "b"]):
        with pytest.raises(InputError):
            generate(model, prompts)
    for call in (stream_tokens, beam_search):
        with pytest.raises(InputError, match=r"gf\.generate takes a list"):
            call(model, [[3, 1], [4]])


@pytest.mark.parametrize("prompt", [[1.5], 7, None, [None]])
def test_a_prompt_is_a_text_or_ids(model, prompt):
    with pytest.raises(InputError, match="a text, or a sequence of token ids"):
        generate(model, prompt)


def test_beams_are_those_of_the_spec(model):
    (want,) = beam.beam_search(
        TorchStepper(model), [[3, 1, 4]], spec=BeamSpec(width=3, max_new_tokens=4, eos=(2,))
    )
    got = beam_search(model, [3, 1, 4], width=3, max_new_tokens=4, eos=(2,))
    assert [one.tokens for one in got] == [one.tokens for one in want.hypotheses]


def test_text_in_text_out(reader):
    made = generate(reader, "3 1 4", max_new_tokens=6)
    assert made.text == reader.generate("3 1 4", max_new_tokens=6)
    pieces = list(stream_tokens(reader, "3 1 4", max_new_tokens=6))
    assert "".join(new.text for new in pieces) == made.text
    assert tuple(new.token for new in pieces) == made.tokens
    best, *_ = beam_search(reader, "3 1 4", width=1, max_new_tokens=6)
    assert (best.tokens, best.text) == (made.tokens, made.text)


def test_texts_become_tokens(reader):
    forced = generate(reader, "3 1", forced="7 7", max_new_tokens=4)
    assert forced.text.startswith("7 7")
    never = generate(reader, "3 1", forbidden=["7", "8"], temperature=1.0, max_new_tokens=9)
    assert not {"7", "8"} & set(never.text.split())
    only = generate(reader, "3 1", regex="(1|2)+", max_new_tokens=4)
    assert set(only.text.split()) <= {"1", "2"}


def test_the_mode_of_the_model_comes_back(reader):
    reader.train()
    generate(reader, "3 1", max_new_tokens=2)
    assert reader.training
    reader.eval()


def test_all_steps_report_the_likeliest_tokens():
    small = budget_lm(vocab_size=256, d_model=32, d_ff=64, n_layers=1, n_heads=4, max_seq_len=64)
    model = build(small, generator=torch.Generator().manual_seed(0)).eval()
    steps = stream(TorchStepper(model), [[65], [66, 67]], tokenizer=Bytes(), top_logprobs=3)
    for new in next(steps):
        ids = [[65], [66, 67]][new.row]
        with torch.no_grad():
            want = model.forward(torch.tensor([ids]))["next"][0, -1].double().log_softmax(-1)
        assert [i for i, _ in new.top] == want.topk(3).indices.tolist()
        assert [v for _, v in new.top] == pytest.approx(want.topk(3).values.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": 1}, "no decoding option 'colour'"),
        ({"max_tokens": 1}, "did you mean 'max_new_tokens'"),
        ({"num_beams": 4}, "did you mean 'width'"),
        ({"beams": 4}, "did you mean 'width'"),
        ({"do_sample": True}, "did you mean 'temperature'"),
        ({"use_cache": False}, "did you mean 'cached'"),
        ({"no_cache": True}, "did you mean 'cached'"),
        ({"fast": True}, "no decoding option 'fast'"),
        ({"width": 4, "temperature": 1.0}, "temperature does not go with width"),
        ({"n_best": 2}, "n_best belongs to a beam search"),
        ({"top_p": 0}, "top_p 0 is outside"),
        ({"forced": "text"}, "needs a tokenizer"),
        ({"regex": "a"}, "needs a tokenizer"),
    ],
)
def test_bad_options_are_refused(model, options, message):
    with pytest.raises(InputError, match=message):
        generate(model, [1], **options)


def test_every_option_that_an_error_lists_is_accepted(model):
    with pytest.raises(InputError) as error:
        generate(model, [1], xyzzy=1)
    listed = error.value.hint.removeprefix("known: ").split(", ")
    assert "width" in listed and "n_best" not in listed
    defaults = {each.name: each.default for cls in OPTIONS for each in options_of(cls)}
    defaults |= {"eos": (), "source": None, "max_new_tokens": 3}
    for name in listed:
        assert generate(model, [1], **{"max_new_tokens": 3, name: defaults[name]}).tokens


def test_a_width_gives_the_best_of_a_beam_search(model):
    best = beam_search(model, [1], width=4, max_new_tokens=5)[0]
    found = generate(model, [1], width=4, max_new_tokens=5)
    assert (found.tokens, found.logprobs, found.finish) == (best.tokens, best.logprobs, best.finish)
    with pytest.raises(InputError, match="streamed"):
        stream_tokens(model, [1], width=4)


def test_text_needs_a_tokenizer(model):
    with pytest.raises(InputError, match="no tokenizer"):
        generate(model, "text")


def test_options_of_the_other_kind_are_refused_unless_they_are_defaults():
    assert read_request({"width": 2, "temperature": 0.0}, tokenizer=None).decoding == BeamSpec(
        width=2
    )
    with pytest.raises(InputError, match="--temperature does not go with --beams"):
        read_request({"width": 2, "temperature": 1.0}, tokenizer=None, spell=by_flag)


def test_options_that_greedy_decoding_ignores_are_known():
    given = {"top_k": 3, "seed": 5, "max_new_tokens": 3, "top_p": 1.0}
    assert [each.name for each in without_effect(given)] == ["top_k", "seed"]
    assert without_effect({**given, "temperature": 1.0}) == ()
