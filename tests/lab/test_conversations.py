"""Records in a base's tokens: what is an answer and what is not, whatever the template does."""

import numpy as np
import pytest

from glassformer.data.tokenizers.vocab import Bytes
from glassformer.lab.finetune import Chat, Plain, Prompted, Speech, examples_of
from glassformer.spec.errors import InputError
from tests.planting import If, catches


def said(*turns: str) -> tuple[dict[str, str], ...]:
    """Turns of user and assistant."""
    roles = ("user", "assistant")
    return tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))


def simple(messages, *, begin):
    """`<user|hi>` for each message, a line's end behind it; `<assistant|` begins a turn."""
    text = "".join(f"<{m['role']}|{m['content']}>\n" for m in messages)
    return text + "<assistant|" if begin else text


def forgetful(messages, *, begin):
    """Old thoughts are left out, as Qwen3's template does: the past is written anew."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    kept = [
        m if i > last else {**m, "content": m["content"].rpartition("}")[2]}
        for i, m in enumerate(messages)
    ]
    return simple(kept, begin=begin)


def changing(messages, *, begin):
    return ("asking:" if begin else "told:") + simple(messages, begin=begin)


class Marked(Bytes):
    """Bytes that begin with ^ and end with $."""

    bos = ord("^")
    eos = ord("$")


#: `>` ends a turn.
SPEECH = Speech(tokenizer=Bytes(), ends=(ord(">"),), render=simple)


def read(records, speech=SPEECH, **options):
    """(whole text, learned text with _ for what is only read) of each example."""
    return [
        (
            bytes(e.ids_N.tolist()).decode(),
            bytes(np.where(e.learned_N, e.ids_N, ord("_")).tolist()).decode(),
        )
        for e in examples_of(records, speech, **options)
    ]


@catches("loss on prompts", "lab.finetune:_tokens", If("learned"), to="True")
def test_answers_are_learned_up_to_their_end() -> None:
    record = Chat(where="line 1", messages=said("hi", "hello", "bye", "goodbye"))
    ((whole, learned),) = read([record])
    assert whole == "<user|hi>\n<assistant|hello>\n<user|bye>\n<assistant|goodbye>\n"
    assert learned == "_" * 21 + "hello>" + "_" * 23 + "goodbye>" + "_"


def test_a_turn_without_an_end_is_learned_whole():
    record = Chat(where="line 1", messages=said("hi", "hello"))
    ((_, learned),) = read([record], Speech(tokenizer=Bytes(), render=simple))
    assert learned.endswith("_hello>\n")


def test_a_past_that_is_written_anew_makes_another_example() -> None:
    record = Chat(where="line 1", messages=said("a", "{think}b", "c", "{more}d"))
    first, second = read([record], Speech(tokenizer=Bytes(), ends=(ord(">"),), render=forgetful))
    assert first[0] == "<user|a>\n<assistant|{think}b>\n"
    assert first[1].strip("_") == "{think}b>"
    assert second[0] == "<user|a>\n<assistant|b>\n<user|c>\n<assistant|{more}d>\n"
    assert second[1].strip("_") == "{more}d>"


def test_everything_is_learned_where_that_is_asked_for():
    record = Chat(where="line 1", messages=said("hi", "hello"))
    ((whole, learned),) = read([record], answers_only=False)
    assert learned == whole


def test_prompts_and_text():
    speech = Speech(tokenizer=Marked())
    records = [
        Prompted(where="line 1", prompt="2 + 2 = ", completion="4"),
        Plain(where="line 2", text="words"),
        Prompted(where="line 3", prompt="nothing", completion=""),
    ]
    assert read(records, speech) == [
        ("^2 + 2 = 4$", "_________4$"),
        ("^words$", "^words$"),
        ("^nothing", "________"),  # an end alone is no answer
    ]
    made = examples_of(records, speech)
    assert [e.goes_on for e in made] == [False, True, False]
    assert [e.where for e in made] == ["line 1", "line 2", "line 3"]


def test_an_answer_is_cut_into_tokens_apart_from_its_prompt():
    class Pairs(Bytes):
        """`ab` is one token."""

        def encode(self, text):
            return list(text.replace("ab", "\x01").encode())

    record = Prompted(where="line 1", prompt="xa", completion="b")
    (made,) = examples_of([record], Speech(tokenizer=Pairs()))
    assert bytes(made.ids_N.tolist()) == b"xab"  # as it is when the model goes on from "xa"


@pytest.mark.parametrize(
    ("render", "words"), [(None, "no chat template"), (changing, "writes the prompt of message 1")]
)
def test_what_cannot_be_told_apart_is_refused_by_line(render, words):
    record = Chat(where="line 7", messages=said("hi", "hello"))
    with pytest.raises(InputError, match=words) as caught:
        read([record], Speech(tokenizer=Bytes(), render=render))
    assert caught.value.where == "line 7"
