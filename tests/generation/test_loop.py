"""`decode`: when it stops, what it reports, what it refuses before any work."""

import math

import numpy as np
import pytest
import torch

from glassformer.data.tokenizers.vocab import Characters
from glassformer.generation.beam import beam_search
from glassformer.generation.loop import NOTHING, decode
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.models.prompts import Prompts
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import DivergedError, InputError
from tests.generation import checks
from tests.generation.checks import PROMPTS, SPECS
from tests.planting import Compare, catches
from tests.tiny import MAX_SEQ_LEN, VOCAB, built


def stepper_of(name="learned"):
    return TorchStepper(built(checks.SPECS[name]))


@catches("finished rows sampled on", "generation.loop:_columns", Compare("is"), to="True")
def test_rows_end_alone() -> None:
    """A row ends with its first eos, gives nothing afterwards, and leaves the batch."""
    model = built(SPECS["rotary"], seed=7)
    stepper = TorchStepper(model)
    free = generate_batch(stepper, PROMPTS, spec=DecodeSpec(max_new_tokens=12))
    eos = (free[0].tokens[2],)
    assert all(eos[0] not in other.tokens[:5] for other in free[1:]), "the first row ends first"
    sizes = []
    take = stepper.step

    def counted(tokens_B, *, past):
        sizes.append(len(tokens_B))
        return take(tokens_B, past=past)

    stepper.step = counted
    columns = list(decode(stepper, PROMPTS, spec=DecodeSpec(max_new_tokens=12, eos=eos)))
    for row, whole in enumerate(free):
        got = [int(column.tokens_B[row]) for column in columns]
        want = list(whole.tokens)
        if eos[0] in want:
            want = want[: want.index(eos[0]) + 1]
        assert got == want + [NOTHING] * (len(columns) - len(want))
        ends = [bool(column.finished_B[row]) for column in columns]
        assert ends == [place >= len(want) - 1 for place in range(len(columns))]
        assert columns[-1].finish[row] == ("eos" if want[-1] == eos[0] else "length")
    assert sizes == [sum(not f for f in column.finished_B) for column in columns[:-1]]
    assert sizes[-1] < len(PROMPTS)


def test_lengths_are_kept() -> None:
    """No end before min_new_tokens, none after max_new_tokens."""
    stepper = stepper_of()
    for least in (0, 1, 4, 6):
        spec = DecodeSpec(min_new_tokens=least, max_new_tokens=6, eos=tuple(range(0, VOCAB, 2)))
        for sequence in generate_batch(stepper, checks.PROMPTS, spec=spec):
            assert max(least, 1) <= len(sequence.tokens) <= 6
            assert not set(sequence.tokens[: least - 1 if least else 0]) & set(spec.eos)
            assert (sequence.finish == "eos") == (sequence.tokens[-1] in spec.eos)


def test_forced_and_forbidden_tokens():
    spec = DecodeSpec(max_new_tokens=6, forced=(8, 8, 1), forbidden=tuple(range(9, VOCAB)))
    for sequence in generate_batch(stepper_of(), checks.PROMPTS, spec=spec):
        assert sequence.tokens[:3] == (8, 8, 1)
        assert max(sequence.tokens) < 9


def test_a_repetition_penalty_counts_the_prompt_and_what_was_made() -> None:
    """The prompt and what was made: greedy decoding, written down again."""
    model = built(checks.SPECS["learned"])
    spec = DecodeSpec(max_new_tokens=12, repetition_penalty=2.0)
    for row, got in enumerate(generate_batch(TorchStepper(model), checks.PROMPTS, spec=spec)):
        whole = list(checks.PROMPTS[row])
        for token in got.tokens:
            values = model(torch.tensor([whole]))["next"][0, -1].tolist()
            for seen in set(whole):
                values[seen] *= 0.5 if values[seen] > 0 else 2.0
            assert token == max(range(VOCAB), key=values.__getitem__)
            whole.append(token)


def test_several_native_steps_in_one_call_leave_no_penalty_out():
    """C takes the likeliest tokens of several steps by itself, but for penalties."""
    model = checks.single("learned")
    for penalty in (1.5, 2.0):
        spec = DecodeSpec(max_new_tokens=12, repetition_penalty=penalty)
        found = generate_batch(NativeStepper(model), checks.PROMPTS, spec=spec)
        wanted = generate_batch(TorchStepper(model), checks.PROMPTS, spec=spec)
        assert [row.tokens for row in found] == [row.tokens for row in wanted]


def test_logprobs_are_the_models_own():
    model = built(checks.SPECS["rotary"])
    spec = DecodeSpec(max_new_tokens=5, temperature=0.5, top_k=3, seed=1)
    (got,) = generate_batch(TorchStepper(model), [[1, 2, 3]], spec=spec)
    tokens = torch.tensor([[1, 2, 3, *got.tokens]])
    own = model(tokens)["next"].log_softmax(-1)[0, 2:-1]
    want = own[torch.arange(5), torch.tensor(got.tokens)].tolist()
    np.testing.assert_allclose(got.logprobs, want, atol=1e-12)
    (without,) = generate_batch(TorchStepper(model), [[1, 2, 3]], spec=spec, logprobs=False)
    assert without.tokens == got.tokens
    assert all(map(math.isnan, without.logprobs))


def test_the_caller_may_stop():
    stepper = stepper_of()
    columns = decode(stepper, [[1]], spec=DecodeSpec(max_new_tokens=20))
    first = next(columns)
    assert first.tokens_B.shape == first.logprobs_B.shape == first.finished_B.shape == (1,)
    columns.close()
    assert stepper.positions == 1


def test_seeds_repeat_and_differ():
    stepper = stepper_of()

    def made(seed):
        spec = DecodeSpec(max_new_tokens=20, temperature=2.0, seed=seed)
        return generate_batch(stepper, checks.PROMPTS, spec=spec)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_text_without_the_end():
    letters = Characters("".join(chr(97 + i) for i in range(VOCAB)))
    (free,) = generate_batch(stepper_of(), [[1, 2]], spec=DecodeSpec(max_new_tokens=5))
    spec = DecodeSpec(max_new_tokens=20, eos=(free.tokens[-1],))
    (got,) = generate_batch(stepper_of(), [[1, 2]], spec=spec, tokenizer=letters)
    assert got.finish == "eos"
    assert got.text == letters.decode(got.tokens[:-1])


def test_logits_that_are_no_numbers_are_reported():
    model = built(checks.SPECS["learned"])
    with torch.no_grad():
        model.heads["next"].bias.fill_(math.nan)
    with pytest.raises(DivergedError, match="not numbers"):
        beam_search(TorchStepper(model), [[1]])


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_token_is_made_of_logits_that_are_no_numbers(value, temperature, logprobs):
    model = built(checks.SPECS["learned"])
    with torch.no_grad():
        model.heads["next"].bias[3] = value
    spec = DecodeSpec(max_new_tokens=3, temperature=temperature, top_k=5)
    with pytest.raises(DivergedError, match="not numbers"):
        generate_batch(TorchStepper(model), [[1], [1, 2]], spec=spec, logprobs=logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_forbidden_token_is_never_made_even_where_all_others_are_impossible(temperature):
    model = built(checks.SPECS["learned"])
    with torch.no_grad():
        model.heads["next"].bias[3] = -math.inf
    others = tuple(token for token in range(VOCAB) if token != 3)
    spec = DecodeSpec(max_new_tokens=3, temperature=temperature, forbidden=others)
    with pytest.raises(DivergedError):
        generate_batch(TorchStepper(model), [[1]], spec=spec)


# --- refused before any work ----------------------------------------------------------------------

BAD_SPECS = {
    "temperature nan": (DecodeSpec, {"temperature": math.nan}, "temperature nan.*0 is greedy"),
    "temperature below 0": (DecodeSpec, {"temperature": -0.1}, "temperature -0.1"),
    "temperature infinite": (DecodeSpec, {"temperature": math.inf}, "temperature inf"),
    "top_p 0": (DecodeSpec, {"top_p": 0.0}, r"top_p 0.0 is outside \(0, 1\]"),
    "top_p nan": (DecodeSpec, {"top_p": math.nan}, "top_p nan"),
    "top_p above 1": (DecodeSpec, {"top_p": 1.1}, "top_p 1.1"),
    "min_p above 1": (DecodeSpec, {"min_p": 1.5}, "min_p 1.5"),
    "top_k 0": (DecodeSpec, {"top_k": 0}, "nearest valid top_k is 1"),
    "penalty 0": (DecodeSpec, {"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
    "no tokens": (DecodeSpec, {"max_new_tokens": 0}, "nearest valid max_new_tokens is 1"),
    "longer than long": (DecodeSpec, {"max_new_tokens": 3, "min_new_tokens": 4}, "nearest .* is 3"),
    "negative id": (DecodeSpec, {"forbidden": (-1,)}, "no token id"),
    "id as text": (DecodeSpec, {"eos": ("a",)}, "no token id"),
    "forced and forbidden": (DecodeSpec, {"forced": (2,), "forbidden": (2,)}, "both forced and"),
    "too many forced": (DecodeSpec, {"forced": (2, 2), "max_new_tokens": 1}, "2 forced tokens"),
    "end forced first": (DecodeSpec, {"forced": (2, 3), "eos": (2,)}, "too early"),
    "empty stop": (DecodeSpec, {"stop": ("",)}, "empty stop string"),
    "seed below 0": (DecodeSpec, {"seed": -1}, "seed -1"),
    "no beams": (BeamSpec, {"width": 0}, "nearest valid width is 1"),
    "groups do not divide": (BeamSpec, {"width": 4, "groups": 3}, "nearest valid width is 3 or 6"),
    "diversity alone": (BeamSpec, {"diversity": 1.0}, "groups=2"),
    "diversity below 0": (BeamSpec, {"diversity": -1.0, "groups": 2}, "finite number of 0 or more"),
    "unknown penalty": (BeamSpec, {"penalty": "gmnt"}, "did you mean 'gnmt'"),
    "alpha nan": (BeamSpec, {"alpha": math.nan}, "alpha nan"),
    "n_best above width": (BeamSpec, {"n_best": 5}, "nearest valid n_best is 4"),
    "no beam tokens": (BeamSpec, {"max_new_tokens": 0}, "max_new_tokens 0"),
}


@pytest.mark.parametrize(("kind", "fields", "message"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_bad_settings_are_refused(kind, fields, message):
    with pytest.raises(InputError, match="(?s)" + message):
        kind(**fields)


BAD_PROMPTS = {
    "none": ([], {}, "no prompts"),
    "empty": ([[1], []], {}, r"empty\n  at: prompts\[1\]"),
    "unknown": ([[1, VOCAB]], {}, "outside the vocabulary of 19"),
    "negative": ([[-1]], {}, "token id -1"),
    "full": ([[1] * MAX_SEQ_LEN], {}, "leaves no room.*at most 28"),
    "too long": ([[1] * 99], {}, "a prompt of 99 tokens"),
    "unknown eos": ([[1]], {"eos": (VOCAB,)}, "eos token id 19"),
    "unknown forbidden": ([[1]], {"forbidden": (99,)}, "forbidden token id 99"),
    "everything forbidden": ([[1]], {"forbidden": tuple(range(VOCAB))}, "all 19 tokens"),
    "only ends, too early": (
        [[1]],
        {"forbidden": tuple(range(1, VOCAB)), "eos": (0,), "min_new_tokens": 2},
        "all 19 tokens",
    ),
}


@pytest.mark.parametrize(("prompts", "fields", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts_are_refused_before_any_work(prompts, fields, message):
    stepper = stepper_of()
    with pytest.raises(InputError, match="(?s)" + message):
        decode(stepper, prompts, spec=DecodeSpec(**fields))
    with pytest.raises(InputError, match="(?s)" + message):
        beam_search(stepper, prompts, spec=BeamSpec(**fields))
    assert stepper.positions == stepper.encoder_calls == 0


def test_sources_are_checked():
    crossed, plain = stepper_of("encoder"), stepper_of()
    with pytest.raises(InputError, match="needs a source"):
        decode(crossed, [[1]])
    with pytest.raises(InputError, match="without an encoder"):
        decode(plain, Prompts.of([[1]], sources=[[1]]))
    with pytest.raises(InputError, match="2 sources for 1 prompts"):
        decode(crossed, Prompts.of([[1]], sources=[[1], [2]]))
    with pytest.raises(InputError, match=r"sources\[0\], token 1"):
        decode(crossed, Prompts.of([[1]], sources=[[77]]))
    with pytest.raises(InputError, match="exceeds max_seq_len"):
        decode(crossed, Prompts.of([[1]], sources=[[1] * 30]))


def test_other_arguments_are_checked():
    with pytest.raises(InputError, match="need a tokenizer"):
        decode(stepper_of(), [[1]], spec=DecodeSpec(stop=("a",)))
    with pytest.raises(InputError, match="2 row names for 1 prompts"):
        decode(stepper_of(), [[1]], rows=(0, 1))


def test_a_naive_loop_gives_the_same_tokens():
    model = built(checks.SPECS["window"])
    spec = DecodeSpec(max_new_tokens=20)
    for make in checks.STEPPERS.values():
        got = generate_batch(make(model), checks.PROMPTS, spec=spec)
        want = generate_batch(NaiveStepper(model), checks.PROMPTS, spec=spec)
        assert [g.tokens for g in got] == [g.tokens for g in want]
