"""Vocabularies and tokenizers: exact round trips, stored as text and read again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.own import tokenizer_from_json
from glassformer.data.tokenizers.vocab import Bytes, Characters, Vocab
from glassformer.spec.errors import InputError

CORPUS = ["the cat sat on the mat\n", "the naïve café — 東京 🙂\n", "  spaces   and\ttabs\r\n"] * 20
BPE = BytePairs.train(CORPUS, vocab_size=300)
NAMES = Vocab(("PAD", "BOS", "EOS", "SEP", "a", "b", "fox"))
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(st.integers(0, 6)))
def test_names_round_trip(ids):
    assert NAMES.tokenize(NAMES.detokenize(ids)) == ids
    assert NAMES.encode(NAMES.decode(ids)) == ids


def test_special_ids_are_there_or_none():
    assert (NAMES.pad, NAMES.bos, NAMES.eos, NAMES.sep) == (0, 1, 2, 3)
    bare = Vocab(("x", "EOS"))
    assert (bare.pad, bare.bos, bare.eos, bare.sep) == (None, None, 1, None)
    assert Bytes().eos is BPE.eos is Characters("a").eos is None


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE], ids=["bytes", "bpe"])
@given(text=UNICODE)
def test_any_unicode_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(UNICODE)
def test_characters_round_trip(text):
    letters = Characters.of([text, "a"])
    assert letters.decode(letters.encode(text)) == text
    assert letters.vocab_size == len(set(text) | {"a"})


@given(st.lists(UNICODE, max_size=5))
def test_many_texts_at_once_are_each_alone(texts):
    assert BPE.encode_many(texts) == [BPE.encode(text) for text in texts]


def test_bpe_merges_what_is_frequent_and_is_trained_alike_twice():
    assert BPE.vocab_size == 300
    assert len(BPE.encode("the cat")) < len("the cat")
    assert BytePairs.train(CORPUS, vocab_size=300).to_json() == BPE.to_json()
    assert BytePairs.train(["ab"], vocab_size=1000).vocab_size == 257  # no more pairs


@pytest.mark.parametrize("tokenizer", [NAMES, Bytes(), Characters.of(CORPUS), BPE])
def test_stored_and_read_again(tokenizer):
    again = tokenizer_from_json(tokenizer.to_json())
    assert type(again) is type(tokenizer)
    assert again.to_json() == tokenizer.to_json()
    assert again.vocab_size == tokenizer.vocab_size
    if tokenizer is not NAMES:
        assert again.encode(CORPUS[1]) == tokenizer.encode(CORPUS[1])


def test_bpe_is_stored_as_other_tools_read_it():
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(BPE.to_json())
    assert theirs.encode(CORPUS[1]).ids == BPE.encode(CORPUS[1])


def test_half_a_character_is_marked_not_lost():
    ids = Bytes().encode("é")
    assert Bytes().decode(ids[:1]) == "\ufffd"
    assert Bytes().decode(ids) == "é"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NAMES.tokenize("a foy b"), "'foy' is not in the vocabulary"),
        (lambda: NAMES.tokenize("a foy b"), "token 2 of 3"),
        (lambda: NAMES.tokenize("a foy b"), "did you mean 'fox'?"),
        (lambda: NAMES.id("BSO"), "did you mean 'BOS'?"),
        (lambda: NAMES.detokenize([-1]), "-1 is no token's id"),
        (lambda: NAMES.detokenize([7]), "ids are 0 to 6"),
        (lambda: Vocab(()), "a vocabulary without tokens"),
        (lambda: Vocab(("a", "b", "a")), "token 'a' occurs twice"),
        (lambda: Vocab(("a b",)), "is not one word"),
        (lambda: Vocab(("",)), "is not one word"),
        (lambda: Characters(""), "without characters"),
        (lambda: Characters("ba"), "not in order"),
        (lambda: Characters("aa"), "not in order"),
        (lambda: Characters("ac").encode("acb"), "character 'b' does not occur"),
        (lambda: Characters("ac").encode("acz"), "character 2"),
        (lambda: Characters("ac").decode([2]), "2 is no token's id"),
        (lambda: Bytes().decode([256]), "256 is no token's id"),
        (lambda: Bytes().encode("ab\ud800"), "no Unicode character"),
        (lambda: BPE.encode("ab\ud800"), "character 2"),
        (lambda: BPE.decode([300]), "300 is no token's id"),
        (lambda: BPE.decode([-1]), "-1 is no token's id"),
        (lambda: BytePairs.train(CORPUS, vocab_size=255), "the nearest valid vocab_size is 256"),
        (lambda: tokenizer_from_json("{"), "not JSON"),
        (lambda: tokenizer_from_json("[" * 100_000), "not JSON"),
        (lambda: tokenizer_from_json('{"kind": "bytes", "kind": "vocab"}'), "occurs twice"),
        (lambda: tokenizer_from_json("[]"), "is a list"),
        (lambda: tokenizer_from_json("{}"), "kind None is not known"),
        (lambda: tokenizer_from_json('{"kind": "byte"}'), "did you mean 'bytes'?"),
        (lambda: tokenizer_from_json('{"kind": "vocab"}'), "'tokens' is missing"),
        (lambda: tokenizer_from_json('{"kind": "vocab", "tokens": [1]}'), "more than names"),
        (lambda: tokenizer_from_json('{"kind": "characters", "alphabet": 3}'), "not a str"),
        (lambda: tokenizer_from_json('{"model": {"type": "nonsense"}}'), "not a tokenizer of"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


def test_a_damaged_bpe_file_is_refused():
    data = json.loads(BPE.to_json())
    del data["model"]["vocab"]
    with pytest.raises(InputError, match="not a tokenizer of"):
        tokenizer_from_json(json.dumps(data))
