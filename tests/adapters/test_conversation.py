"""Conversations: what is asked is what the template says, within the context, and kept."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from glassformer.adapters.chat.template import Conversation, read_chat
from glassformer.adapters.load import load
from glassformer.generation.loop import decode
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.generation.turns import Turns
from glassformer.models.prompts import Prompts
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError, MachineError
from tests.adapters import folders

SPEC = DecodeSpec(max_new_tokens=9, eos=(312, 310), forbidden=tuple(range(313, 320)))


def plain_turns(model):
    return Turns(TorchStepper(model, cache="growing"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(folders.write_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def talk(model):
    return Conversation(
        plain_turns(model.model),
        model.tokenizer,
        read_chat(model.origin),
        spec=SPEC,
    )


def said(talk, text):
    return "".join(talk.ask(text))


def test_an_answer_is_what_decoding_gives(model, talk):
    """Turn by turn, with a warm past, the answers are those of a cold start on the whole text."""
    template, stepper = read_chat(model.origin), TorchStepper(model.model)
    history = []
    for question in ("the cat", "你好", "def f(x):"):
        history.append({"role": "user", "content": question})
        ids = model.tokenizer.encode(template.render(history))
        seeded = replace(SPEC, seed=len(history) // 2)
        (wanted,) = generate_batch(stepper, [ids], spec=seeded, tokenizer=model.tokenizer)
        assert said(talk, question) == wanted.text
        assert talk.last.tokens == wanted.tokens
        assert talk.last.finish == wanted.finish
        history.append({"role": "assistant", "content": wanted.text})
        assert talk.last.dropped == 0
    assert talk.messages == history
    assert talk.stepper.reused > 0


def test_draws_differ_from_turn_to_turn_and_repeat_with_the_seed(model):
    def run(seed):
        spec = replace(SPEC, temperature=2.0, seed=seed)
        talk = Conversation(
            plain_turns(model.model),
            model.tokenizer,
            read_chat(model.origin),
            spec=spec,
        )
        first = said(talk, "the cat")
        talk.reset()
        return first, said(talk, "the cat")

    assert run(1) == run(1)
    assert run(1)[0] != run(1)[1]
    assert run(1) != run(2)


def test_the_oldest_turns_go_out_of_sight(model, talk):
    seen = []
    for number in range(8):
        said(talk, f"the cat sat {number}" + " mat" * (3 * number % 7))
        seen.append(talk.last.dropped)
        # No answer is cut short by the context, and the model sees questions with their answers.
        assert len(talk.last.tokens) == 9 or talk.last.finish == "eos"
        assert talk.messages[sum(seen)]["role"] == "user"
    assert len(talk.messages) == 16  # nothing is forgotten
    assert sum(seen) > 0
    assert all(dropped % 2 == 0 for dropped in seen)
    ids, hidden = talk._fitting(talk.messages[:-1])
    text = model.tokenizer.decode(ids)
    assert "cat sat 7" in text
    assert "cat sat 0" not in text
    assert hidden == sum(seen)
    for length in range(1, 25):
        question = {"role": "user", "content": "mat " * length + "x"}
        ids, _ = talk._fitting([*talk.messages, question])
        assert len(ids) + 9 <= model.spec.max_seq_len


def test_the_systems_words_stay(model, talk):
    talk.instruct("Be kind.")
    for number in range(8):
        said(talk, f"the cat sat {number}")
    ids, hidden = talk._fitting(talk.messages[:-1])
    assert hidden > 0
    assert model.tokenizer.decode(ids).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    talk.instruct(None)
    assert "Be kind" not in model.tokenizer.decode(talk._fitting(talk.messages[:-1])[0])


def test_a_question_that_cannot_fit_changes_nothing(talk):
    said(talk, "the cat")
    before = list(talk.messages)
    with pytest.raises(InputError, match="of a context of 160"):
        talk.ask("你好" * 90)
    with pytest.raises(InputError, match="an empty question"):
        talk.ask("  ")
    assert talk.messages == before
    said(talk, "the mat")


def test_who_stops_listening_ends_the_answer(talk):
    pieces = talk.ask("the cat")
    heard = next(pieces) + next(pieces)
    pieces.close()
    assert talk.last.finish == "stopped"
    assert len(talk.last.tokens) == 2
    assert talk.messages[-1] == {"role": "assistant", "content": heard}
    again = said(talk, "and then?")  # the past that was cut short still serves
    assert talk.messages[-1]["content"] == again


def test_stop_strings_are_not_shown(model, talk):
    whole = said(talk, "the cat")
    assert len(whole) > 4
    stop = whole[2:4]
    short = Conversation(
        plain_turns(model.model),
        model.tokenizer,
        read_chat(model.origin),
        spec=replace(SPEC, stop=(stop,)),
    )
    assert said(short, "the cat") == whole[: whole.index(stop)]
    assert short.last.finish == "stop"


def test_half_a_stop_string_is_shown(model, talk):
    """What could have begun one, and did not, is part of the answer."""
    whole = said(talk, "the cat")
    other = Conversation(
        plain_turns(model.model),
        model.tokenizer,
        read_chat(model.origin),
        spec=replace(SPEC, stop=(whole[-1] + "zzz",)),
    )
    assert said(other, "the cat") == whole


def test_the_end_is_not_said(model, talk):
    whole = said(talk, "the cat")
    end = talk.last.tokens[3]
    before = talk.last.tokens[: talk.last.tokens.index(end)]
    other = Conversation(
        plain_turns(model.model),
        model.tokenizer,
        read_chat(model.origin),
        spec=replace(SPEC, eos=(end,)),
    )
    assert said(other, "the cat") == model.tokenizer.decode(before) != whole
    assert other.last.finish == "eos"
    assert other.last.tokens == (*before, end)


def test_a_saved_conversation_is_a_line_of_training_data(talk, tmp_path):
    talk.instruct("Be kind.")
    said(talk, "the cat 你好")
    file = tmp_path / "talk.jsonl"
    talk.save(file)
    talk.reset()
    said(talk, "again")
    talk.save(file)
    first, second = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant"]
    assert first["messages"][1]["content"] == "the cat 你好"
    assert second["messages"][1]["content"] == "again"
    with pytest.raises(MachineError, match="cannot be saved"):
        talk.save(tmp_path / "nowhere" / "x.jsonl")


# --- the warm past ------------------------------------------------------------------------------


def test_a_warm_start_is_a_cold_start(model):
    """Whatever two prompts share, logits are those of reading everything again."""
    double = copy.deepcopy(model.model).double()
    warm, cold = plain_turns(double), TorchStepper(double)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(313, (40,), generator=generator).tolist()
    prompts = [ids[:10], ids[:25], ids[:25], [*ids[:12], 7, 8], ids[5:9], ids]
    for row in prompts:
        found, past = warm.start(Prompts.of([row]), room=4)
        wanted, other = cold.start(Prompts.of([row]), room=4)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
        for token in (3, 5):
            new = torch.tensor([token])
            found, wanted = warm.step(new, past=past), cold.step(new, past=other)
            torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    assert warm.reused == 10 + 24 + 12 + 0 + 0
    assert warm.positions < cold.positions


def test_a_warm_past_has_one_row_and_one_owner(model):
    warm = plain_turns(model.model)
    with pytest.raises(InputError, match="2 prompts at once"):
        list(decode(warm, [[1, 2], [3]], spec=SPEC))
    _, first = warm.start(Prompts.of([[1, 2, 3]]), room=4)
    warm.start(Prompts.of([[1, 2, 4]]), room=4)
    with pytest.raises(InputError, match="cut by a later prompt"):
        warm.step(torch.tensor([1]), past=first)


def test_an_error_in_the_middle_leaves_no_half_past(model, monkeypatch):
    warm = plain_turns(model.model)
    wanted, _ = warm.start(Prompts.of([[1, 2, 3, 4]]), room=4)
    body = type(model.model).hidden

    def fails(self, *arguments, **options):
        body(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(model.model), "hidden", fails)
        with pytest.raises(KeyboardInterrupt):
            warm.start(Prompts.of([[1, 2, 9]]), room=4)
    found, _ = warm.start(Prompts.of([[1, 2, 3, 4]]), room=4)
    assert torch.equal(found, wanted)


# --- the native step ----------------------------------------------------------------------------


def test_a_chat_decodes_by_the_native_step(model):
    assert isinstance(model.chat().stepper.inner, NativeStepper)
    double = load(model.origin, dtype=torch.float64)
    assert isinstance(double.chat().stepper.inner, TorchStepper)


def test_a_warm_native_start_is_a_cold_start_bit_for_bit(model, tmp_path):
    """What prompts share, who chose the tokens between, and a folder make no difference."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(313, (60,), generator=generator).tolist()
    prompts = [ids[:10], ids[:45], ids[:45], [*ids[:45], 3, 5, 9], [*ids[:33], 7, 8], ids[5:9], ids]
    for folder, reused in ((None, 10 + 44 + 47 + 33), (tmp_path, 10 + 44 + 47 + 33 + 45)):
        warm, cold = (
            Turns(NativeStepper(model.model, prompt_cache=folder)),
            NativeStepper(model.model),
        )
        for row in prompts:
            found, past = warm.start(Prompts.of([row]), room=4)
            wanted, other = cold.start(Prompts.of([row]), room=4)
            assert torch.equal(found, wanted)
            for token in (3, 5):
                new = torch.tensor([token])
                assert torch.equal(warm.step(new, past=past), cold.step(new, past=other))
        assert warm.reused == reused


def test_a_warm_native_past_knows_the_tokens_that_c_chose(model):
    """The second prompt continues the first answer: all that was read of it is reused."""
    warm = Turns(NativeStepper(model.model))
    (first,) = generate_batch(warm, [[1, 2, 3]], spec=DecodeSpec(max_new_tokens=9))
    longer = [1, 2, 3, *first.tokens, 4, 5]
    found, past = warm.start(Prompts.of([longer]), room=2)
    wanted, _ = NativeStepper(model.model).start(Prompts.of([longer]), room=2)
    assert torch.equal(found, wanted)
    assert warm.reused == 3 + len(first.tokens) - 1
    warm.start(Prompts.of([longer]), room=2)
    with pytest.raises(InputError, match="cut by a later prompt"):
        warm.step(torch.tensor([1]), past=past)
    with pytest.raises(InputError, match="2 prompts at once"):
        warm.start(Prompts.of([[1], [2]]), room=2)


def test_an_interrupted_native_start_leaves_no_half_past(model, monkeypatch):
    warm = Turns(NativeStepper(model.model))
    wanted, _ = warm.start(Prompts.of([[1, 2, 3, 4]]), room=4)

    def fails(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NativeStepper, "read", fails)
        with pytest.raises(KeyboardInterrupt):
            warm.start(Prompts.of([[1, 2, 9]]), room=4)
    found, _ = warm.start(Prompts.of([[1, 2, 3, 4]]), room=4)
    assert torch.equal(found, wanted)


def test_a_conversation_begins_from_a_kept_prompt(model, tmp_path):
    words = "the cat sat on the mat and looked at the other cat for a long time"
    first = model.chat(prompt_cache=str(tmp_path), max_new_tokens=5, temperature=0.0)
    answer = first(words)
    again = model.chat(prompt_cache=str(tmp_path), max_new_tokens=5, temperature=0.0)
    assert again(words) == answer == model.chat(max_new_tokens=5, temperature=0.0)(words)
    assert first.stepper.reused == 0
    assert again.stepper.reused > 0
    with pytest.raises(InputError, match="there is none"):
        load(model.origin, dtype=torch.float64).chat(prompt_cache=str(tmp_path))
