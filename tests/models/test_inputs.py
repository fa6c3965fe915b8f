"""The border: bad input gets an error that names it, never a wrong answer or torch's traceback."""

import numpy as np
import pytest
import torch

from glassformer.data.batch import Batch, Source
from glassformer.models.inputs import Inputs, packed_runs
from glassformer.nn.cache import FixedCache, GrowingCache
from glassformer.nn.mask import build_mask
from glassformer.spec.errors import InputError
from glassformer.spec.model import AnswerHead
from tests.tiny import MAX_SEQ_LEN, VOCAB, built, tiny, token_ids

B, T, S = 3, 5, 7
TOKENS = token_ids(B, T)
VALID = torch.ones(B, T, dtype=torch.bool)
SOURCE = token_ids(B, S, seed=3)


@pytest.fixture(scope="module")
def decoder():
    return built(tiny())


@pytest.fixture(scope="module")
def pair():
    return built(tiny(encoder=True))


def with_token(value):
    tokens = TOKENS.clone()
    tokens[2, 3] = value
    return tokens


BAD = {
    "id too high": (with_token(VOCAB), [f"token id {VOCAB}", "tokens[2, 3]", f"to {VOCAB - 1}"]),
    "id below 0": (with_token(-1), ["token id -1", "tokens[2, 3]"]),
    "too long": (token_ids(2, MAX_SEQ_LEN + 1), [f"{MAX_SEQ_LEN + 1}", "max_seq_len", "shorten"]),
    "empty batch": (TOKENS[:0], ["tokens is empty", "(0, 5)", "at least one"]),
    "no tokens": (TOKENS[:, :0], ["tokens is empty", "(3, 0)", "at least one"]),
    "one dimension": (TOKENS[0], ["tokens has shape (5,)", "(batch, length)"]),
    "three dimensions": (TOKENS[None], ["tokens has shape (1, 3, 5)"]),
    "no dimension": (TOKENS[0, 0], ["tokens has shape ()"]),
    "floats": (TOKENS.float(), ["dtype torch.float32", "whole numbers"]),
    "bools": (TOKENS.bool(), ["dtype torch.bool", "whole numbers"]),
    "complex": (TOKENS.to(torch.complex64), ["dtype torch.complex64", "whole numbers"]),
    "text": (np.array([["a", "b"]]), ["tokens", "whole numbers"]),
    "ragged": ([[1, 2], [3]], ["tokens", "whole numbers"]),
    "mask too short": (Inputs(TOKENS, VALID[:, :4]), ["(3, 4)", "(3, 5)", "each token"]),
    "mask of one row": (Inputs(TOKENS, VALID[:1]), ["(1, 5)", "(3, 5)"]),
    "mask of numbers": (Inputs(TOKENS, VALID.long()), ["torch.int64", "True = real token"]),
    "mask of floats": (Inputs(TOKENS, VALID.float()), ["torch.float32", "True = real token"]),
    "segments": (Inputs(TOKENS, segments_BT=TOKENS[:, :2]), ["segments", "(3, 2)"]),
    "a source": (Inputs(TOKENS, source_BS=SOURCE), ["source", "without an encoder"]),
}
BAD_SOURCE = {
    "none": (TOKENS, ["needs a source"]),
    "id": (Inputs(TOKENS, source_BS=SOURCE + VOCAB), ["outside the vocabulary", "source[0, 0]"]),
    "rows": (Inputs(TOKENS, source_BS=SOURCE[:2]), ["2 source sequences for 3"]),
    "empty": (Inputs(TOKENS, source_BS=SOURCE[:, :0]), ["source is empty"]),
    "no dimension": (Inputs(TOKENS, source_BS=SOURCE[0, 0]), ["source has shape ()"]),
    "long": (Inputs(TOKENS, source_BS=token_ids(B, MAX_SEQ_LEN + 1)), ["source: length 30"]),
    "mask": (Inputs(TOKENS, source_BS=SOURCE, source_valid_BS=VALID), ["(3, 5)", "(3, 7)"]),
    "mask dtype": (
        Inputs(TOKENS, source_BS=SOURCE, source_valid_BS=torch.ones(B, S)),
        ["torch.float32"],
    ),
    "segments": (
        Inputs(TOKENS, segments_BT=torch.zeros_like(TOKENS), source_BS=SOURCE),
        ["segments", "encoder"],
    ),
}


def message(model, given, **options):
    with pytest.raises(InputError) as caught:
        model(given, **options)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(decoder, case):
    given, words = BAD[case]
    text = message(decoder, given)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("case", BAD_SOURCE)
def test_a_bad_source_is_named(pair, case):
    given, words = BAD_SOURCE[case]
    text = message(pair, given)
    assert all(word in text for word in words), text


def test_a_padded_place_must_hold_an_id_too(decoder):
    valid = VALID.clone()
    valid[2, 3] = False
    assert "token id 99" in message(decoder, Inputs(with_token(99), valid))


def test_the_cache_counts_towards_the_length(decoder):
    cache = GrowingCache()
    decoder(token_ids(1, MAX_SEQ_LEN - 2), cache=cache)
    assert f"length {MAX_SEQ_LEN + 1} exceeds" in message(decoder, token_ids(1, 3), cache=cache)
    decoder(token_ids(1, 2), cache=cache)
    assert cache.length == MAX_SEQ_LEN


def test_a_full_fixed_cache_is_named(decoder):
    assert "the cache holds 4 positions" in message(decoder, TOKENS, cache=FixedCache(4))


@pytest.mark.parametrize("make", [GrowingCache, lambda: FixedCache(11)], ids=["grow", "fix"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_of_another_batch_is_named(decoder, make, rows):
    cache = make()
    decoder(TOKENS, cache=cache)
    text = message(decoder, TOKENS[:rows], cache=cache)
    assert f"the cache holds 3 sequences, and {rows} were given" in text


def test_packed_segments_and_a_cache_exclude_each_other(decoder):
    given = Inputs(TOKENS, segments_BT=torch.zeros_like(TOKENS))
    assert "packed segments" in message(decoder, given, cache=GrowingCache())


def test_a_cache_cannot_continue_bidirectional_attention():
    model = built(tiny(attention={"causal": False}, heads=(AnswerHead(),)))
    cache = GrowingCache()
    first = model(TOKENS, cache=cache)["answer"]
    assert torch.equal(first, model(TOKENS)["answer"])
    assert "causal" in message(model, TOKENS[:, :1], cache=cache)


def test_an_unknown_head_is_named(decoder):
    with pytest.raises(InputError, match=r"no head 'nxt'(.|\n)*did you mean 'next'"):
        decoder.logits(torch.zeros(1, 1, 13).double(), "nxt")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_whole_numbers_of_every_width_are_ids(decoder, dtype):
    got = decoder(TOKENS.numpy().astype(dtype))["next"]
    assert torch.equal(got, decoder(TOKENS)["next"])


def test_all_forms_of_a_batch_mean_the_same(pair):
    valid, source_valid = VALID.clone(), torch.ones(B, S, dtype=torch.bool)
    valid[1, 3:], source_valid[2, :4] = False, False
    batch = Batch(
        tokens=TOKENS.numpy(),
        valid=valid.numpy(),
        source=Source(tokens=SOURCE.numpy(), valid=source_valid.numpy()),
    )
    as_tensors = Inputs(TOKENS, valid, source_BS=SOURCE, source_valid_BS=source_valid)
    assert torch.equal(pair(batch)["next"], pair(as_tensors)["next"])


def test_a_mask_that_says_nothing_is_dropped(decoder):
    assert decoder.inputs(Inputs(TOKENS, VALID)).valid_BT is None
    assert torch.equal(decoder(Inputs(TOKENS, VALID))["next"], decoder(TOKENS)["next"])


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_a_packed_batch_allow_what_its_mask_allows(seed):
    rng = np.random.default_rng(seed)
    rows, length, window = 3, 29, 5
    segments = np.sort(rng.integers(0, 5, (rows, length)), axis=1)
    valid = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
    runs = packed_runs(segments, valid)
    assert runs is not None and runs[0] == 0 and runs[-1] == rows * length
    assert (len(runs) - 1).bit_count() == 1 and (np.diff(runs) >= 0).all()
    of = np.searchsorted(runs, np.arange(rows * length), side="right")
    together = of[:, None] == of
    apart = np.arange(rows * length)[:, None] - np.arange(rows * length)
    for causal, reach in ((True, None), (True, window), (False, None), (False, window)):
        mask = build_mask(
            length,
            length,
            causal=causal,
            window=reach,
            valid_q_BT=torch.from_numpy(valid),
            valid_k_BS=torch.from_numpy(valid),
            segments_q_BT=torch.from_numpy(segments),
            segments_k_BS=torch.from_numpy(segments),
            runs_R=torch.from_numpy(runs),
        )
        packed = mask.packed
        left, right = (rows * length if n < 0 else n for n in (packed.left, packed.right))
        kernel = together & (apart <= left) & (-apart <= right)
        for row in range(rows):
            own = slice(row * length, (row + 1) * length)
            real = valid[row]
            assert not kernel[own, : own.start].any() and not kernel[own, own.stop :].any()
            expected = mask.allow[row, 0].numpy()[real]
            assert (kernel[own, own][real] == expected).all()


def test_a_segment_in_two_pieces_has_no_runs():
    valid = np.ones((1, 6), dtype=np.bool_)
    assert packed_runs(np.array([[0, 0, 1, 1, 0, 0]]), valid) is None
    hole = np.array([[True, True, False, True, True, True]])
    assert packed_runs(np.zeros((1, 6), dtype=np.int64), hole) is None
