"""Streaming text: never half a character, never taken back, all of it in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Bytes, Characters, Vocab
from glassformer.generation.loop import decode
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.generation.text_stream import StopFilter, TextStream
from glassformer.spec.decoding import DecodeSpec
from tests.generation import checks
from tests.planting import Binary, catches
from tests.tiny import built

HARD = "naïve 你好 👩🏽\u200d🚀 é\u0301, \ufffd \U0010ffff"


def pieces_of(tokenizer, ids):
    """What each token adds, and the rest."""
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


@catches(
    "half a character shown", "generation.text_stream:TextStream.push", Binary("-"), to="{left}"
)
def test_text_streams_whole() -> None:
    """Every piece is whole characters; nothing is held longer than a character lacks bytes."""
    pieces = pieces_of(Bytes(), Bytes().encode(HARD))
    assert "".join(pieces) == HARD
    place = 0
    for character in HARD:
        bytes_of = len(character.encode())
        if character != "\ufffd":  # could be a broken one: it waits for the next token
            assert pieces[place : place + bytes_of - 1] == [""] * (bytes_of - 1)
            assert pieces[place + bytes_of - 1].endswith(character)
        place += bytes_of


@given(st.binary(max_size=40))
def test_any_bytes_stream_to_their_text(raw):
    pieces = pieces_of(Bytes(), list(raw))
    assert "".join(pieces) == Bytes().decode(list(raw))


@given(st.text(alphabet=HARD, max_size=30))
def test_pieces_of_bpe_join_to_the_text(text):
    assert "".join(pieces_of(PAIRS, PAIRS.encode(text))) == text


PAIRS = BytePairs.train([HARD * 3, "the cat sat on the mat"], vocab_size=300)


@given(st.lists(st.integers(0, 299), max_size=30))
def test_any_tokens_of_bpe_stream_to_their_text(ids):
    ids = [i % PAIRS.vocab_size for i in ids]
    assert "".join(pieces_of(PAIRS, ids)) == PAIRS.decode(ids)


@pytest.mark.parametrize("tokenizer", [Vocab(("PAD", "a", "bb")), Characters("abc")])
def test_named_tokens_and_characters(tokenizer):
    assert "".join(pieces_of(tokenizer, [1, 2, 1, 1])) == tokenizer.decode([1, 2, 1, 1])


def test_an_unused_stream_is_empty():
    assert TextStream(Bytes()).flush() == ""


def test_stop_strings_stop() -> None:
    """A row ends where a stop string is complete, and its text ends before it."""
    model = built(checks.SPECS["learned"])
    letters = Characters("".join(chr(97 + i) for i in range(19)))
    stepper = TorchStepper(model)
    (free,) = generate_batch(
        stepper, [[1, 2]], spec=DecodeSpec(max_new_tokens=12), tokenizer=letters
    )
    assert len(free.text) == 12
    stop = free.text[4:7]
    end = free.text.index(stop) + 3
    spec = DecodeSpec(max_new_tokens=12, stop=("zz", stop))
    (cut,) = generate_batch(stepper, [[1, 2]], spec=spec, tokenizer=letters)
    assert cut.finish == "stop"
    assert cut.tokens == free.tokens[:end]
    assert cut.text == free.text[: end - 3]
    assert len(list(decode(stepper, [[1, 2]], spec=spec, tokenizer=letters))) == end


def test_stops_are_held_back() -> None:
    """Nothing of a stop string is shown, and nothing else is lost."""
    stops = ("</s>", "ab")
    for text in ("one</s>two", "a<a</", "aab", "</sab", "<<</s>", "a", "xyz"):
        cuts = [text.find(stop) for stop in stops if stop in text]
        want = text[: min(cuts)] if cuts else text
        for width in (1, 2, 3):
            visible = StopFilter(stops)
            shown = ""
            for start in range(0, len(text), width):
                shown += visible.push(text[start : start + width])
                assert want.startswith(shown)
            assert shown + visible.flush() == want
            assert visible.over == bool(cuts)


def test_nothing_is_held_longer_than_it_may_be_a_stop():
    visible = StopFilter(("</s>",))
    assert [visible.push(piece) for piece in ("a<", "b", "</", "s", "x")] == [
        "a",
        "<b",
        "",
        "",
        "</sx",
    ]
    assert StopFilter(()).push("all") == "all"
