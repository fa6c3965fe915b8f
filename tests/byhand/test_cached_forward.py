"""Decoding with a cache gives what the whole forward gives: every step, padding, reordering."""

import numpy as np
import pytest

from glassformer.byhand.cached_forward import start, step
from glassformer.byhand.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from tests.byhand.witness import OSS, PRESETS, T5
from tests.planting import Keyword, catches

DECODERS = {name: spec for name, spec in PRESETS.items() if "next" in spec.head_names()}
DECODERS |= {"t5": T5, "gpt-oss": OSS}
B, T, S, STEPS = 3, 4, 5, 5


@catches(
    "cache off by one",
    "byhand.cached_forward:_advance",
    Keyword("past"),
    to="max({it} - 1, 0)",
    case="left",
)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("spec", DECODERS.values(), ids=DECODERS.keys())
def test_cached_is_uncached(spec: ModelSpec, side: str) -> None:
    rng = np.random.default_rng(2)
    model = Model(spec, rng=rng)
    tokens, valid = rng.integers(0, spec.vocab_size, (B, T)), np.ones((B, T), np.bool_)
    if side != "none":
        valid[1, slice(0, 2) if side == "left" else slice(2, 4)] = False
    source: dict[str, np.ndarray] = {}
    if spec.encoder is not None:
        source_valid = np.ones((B, S), np.bool_)
        source_valid[0, 3:] = False
        source_tokens = rng.integers(0, spec.source_vocab, (B, S))
        source = {"source_tokens_BS": source_tokens, "source_valid_BS": source_valid}
    found, state = start(model, tokens, valid_BT=valid, **source)
    last = T - 1 - np.argmax(valid[:, ::-1], axis=1)
    whole = model.forward(tokens, valid_BT=valid, **source)["next"][np.arange(B), last]
    np.testing.assert_allclose(found, whole, atol=1e-12)
    for taken in range(STEPS):
        if taken == 2:
            rows = np.array([2, 1, 1])
            state.reorder(rows)
            tokens, valid = tokens[rows], valid[rows]
            source = {name: array[rows] for name, array in source.items()}
        new = rng.integers(0, spec.vocab_size, B)
        tokens = np.concatenate([tokens, new[:, None]], axis=1)
        valid = np.concatenate([valid, np.ones((B, 1), np.bool_)], axis=1)
        found = step(model, new, state=state)
        whole = model.forward(tokens, valid_BT=valid, **source)["next"][:, -1]
        np.testing.assert_allclose(found, whole, atol=1e-12)


@pytest.mark.parametrize("name", ["budget-lm", "qwen", "alibi-lm"])
def test_padding_between_prompt_and_answer_moves_no_position(name: str) -> None:
    """A row padded on the right continues as the same row without padding does."""
    rng = np.random.default_rng(3)
    model = Model(PRESETS[name], rng=rng)
    tokens, valid = rng.integers(0, PRESETS[name].vocab_size, (1, 5)), np.ones((1, 5), np.bool_)
    valid[0, 3:] = False
    _, padded = start(model, tokens, valid_BT=valid)
    _, alone = start(model, tokens[:, :3])
    for new in rng.integers(0, PRESETS[name].vocab_size, (4, 1)):
        found, want = step(model, new, state=padded), step(model, new, state=alone)
        np.testing.assert_allclose(found, want, atol=1e-12)


def test_the_context_ends() -> None:
    model = Model(PRESETS["budget-lm"], rng=np.random.default_rng(0))
    _, state = start(model, np.zeros((1, 13), np.int64))
    with pytest.raises(InputError, match="length 14 exceeds max_seq_len 13"):
        step(model, np.zeros(1, np.int64), state=state)


def test_nothing_to_decode_with() -> None:
    model = Model(PRESETS["digits"], rng=np.random.default_rng(0))
    with pytest.raises(InputError, match="no next-token head"):
        start(model, np.zeros((1, 3), np.int64))
