"""Large numbers, empty rows, single tokens, padding and bad input: finite, right, or refused."""

from typing import Any

import numpy as np
import pytest

from glassformer.byhand.layers import scaled_dot_product_attention
from glassformer.byhand.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec, NextHead
from tests.byhand.witness import PRESETS, case_for

every_preset = pytest.mark.parametrize("spec", PRESETS.values(), ids=PRESETS.keys())


def made(spec: ModelSpec, dtype: Any = np.float64) -> Model:
    return Model(spec, rng=np.random.default_rng(3), dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_preset
def test_huge_logits_stay_finite(spec: ModelSpec, dtype: Any) -> None:
    model, case = made(spec, dtype), case_for(spec)
    for name, param in model.params.items():
        if name.startswith("heads.") or "q_proj" in name or "embed" in name:
            param *= 1e4
    losses = model.loss_and_grads(case.inputs(model), targets=case.targets)
    assert np.isfinite(losses.total)
    cap = next((head.softcap for head in spec.heads if isinstance(head, NextHead)), None)
    least = 1e3 if cap is None else 0.99 * cap
    assert max(np.abs(logits).max() for logits in losses.logits.values()) > least
    assert np.isfinite(model.grad_vector).all()


def test_scores_of_1e4_pick_the_largest() -> None:
    q, k = np.full((1, 1, 1, 4), 100.0), np.arange(3.0)[None, None, :, None] * np.full(4, 50.0)
    mask = np.array([[[[True, True, False]]]])
    out, weights, _ = scaled_dot_product_attention(q, k, k, mask=mask)
    np.testing.assert_array_equal(weights[0, 0, 0], [0, 1, 0])
    np.testing.assert_array_equal(out, np.full((1, 1, 1, 4), 50.0))


@every_preset
def test_all_masked_rows_are_finite_and_alone(spec: ModelSpec) -> None:
    """A row of the batch without one real token changes nothing for the others."""
    model, case = made(spec), case_for(spec)
    case.valid[2] = False
    if case.source_valid is not None:
        case.source_valid[2] = False
    counted = {
        head: (case.valid[:, 0] if target.ndim == 1 else case.valid).astype(np.float64)
        for head, target in case.targets.items()
    }
    losses = model.loss_and_grads(case.inputs(model), targets=case.targets, weights=counted)
    assert np.isfinite(losses.total)
    assert np.isfinite(model.grad_vector).all()
    whole = model.grad_vector.copy()
    first_two: dict[str, Any] = {"valid_BT": case.valid[:2]}
    if case.source is not None and case.source_valid is not None:
        first_two["source_tokens_BS"] = case.source[:2]
        first_two["source_valid_BS"] = case.source_valid[:2]
    targets = {head: target[:2] for head, target in case.targets.items()}
    again = model.loss_and_grads(model.inputs(case.tokens[:2], **first_two), targets=targets)
    assert again.total == pytest.approx(losses.total, abs=1e-13)
    np.testing.assert_allclose(model.grad_vector, whole, atol=1e-13)


@every_preset
def test_one_token_and_one_row(spec: ModelSpec) -> None:
    model = made(spec)
    source = None if spec.encoder is None else np.ones((1, 1), np.int64)
    inputs = model.inputs(np.ones((1, 1), np.int64), source_tokens_BS=source)
    targets = {
        head: np.zeros((1,) if head == "answer" else (1, 1), np.int64) for head in spec.head_names()
    }
    losses = model.loss_and_grads(inputs, targets=targets)
    assert np.isfinite(losses.total)
    assert np.isfinite(model.grad_vector).all()


@every_preset
def test_what_padding_holds_is_never_read(spec: ModelSpec) -> None:
    model, case = made(spec), case_for(spec)
    before = model.loss_and_grads(case.inputs(model), targets=case.targets).total
    grads = model.grad_vector.copy()
    case.tokens[~case.valid] = (case.tokens[~case.valid] + 1) % spec.vocab_size
    for target in case.targets.values():
        if target.ndim == 2:
            target[~case.valid] = -100
    after = model.loss_and_grads(case.inputs(model), targets=case.targets).total
    assert after == before
    np.testing.assert_allclose(model.grad_vector, grads, atol=1e-15)


@pytest.mark.parametrize("name", ["budget-lm", "core", "qwen", "qwen-sliding", "fsm-probe"])
def test_the_future_is_not_read_bit_for_bit(name: str) -> None:
    spec = PRESETS[name]
    model = made(spec)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (2, 9))
    before = model.forward(tokens)["next"]
    tokens[:, 5:] = (tokens[:, 5:] + 1) % spec.vocab_size
    after = model.forward(tokens)["next"]
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_results_are_the_callers() -> None:
    model = made(PRESETS["core"])
    tokens = np.arange(6).reshape(2, 3)
    first = model.forward(tokens)["next"]
    kept = first.copy()
    model.forward(tokens + 1)
    model.loss_and_grads(model.inputs(tokens + 2), targets={"next": tokens})
    np.testing.assert_array_equal(first, kept)


def test_a_workspace_serves_batches_of_every_size() -> None:
    """Short after long after short: what an earlier batch left in the buffers is never read."""
    spec = PRESETS["seq2seq-pre"]
    used = made(spec)
    for seed, length in enumerate((5, 7, 2, 7, 3)):
        case = case_for(spec, seed=seed)
        part = slice(0, 1 + length % 3), slice(0, length)
        arguments: dict[str, Any] = {
            "valid_BT": case.valid[part],
            "source_tokens_BS": np.asarray(case.source)[part[0]],
            "source_valid_BS": np.asarray(case.source_valid)[part[0]],
        }
        targets = {"next": case.targets["next"][part]}
        fresh = made(spec)
        for model in (used, fresh):
            model.loss_and_grads(model.inputs(case.tokens[part], **arguments), targets=targets)
        assert used.grad_vector.tobytes() == fresh.grad_vector.tobytes()


def test_an_overwritten_tape_is_refused() -> None:
    model = made(PRESETS["core"])
    inputs = model.inputs(np.arange(6).reshape(2, 3))
    logits, tape = model.record(inputs)
    model.record(inputs)
    with pytest.raises(InputError, match="a later pass has overwritten"):
        model.backward(logits, tape)


@pytest.mark.parametrize("name", ["fsm-probe", "digits"])
def test_body_and_heads_compose_to_forward(name: str) -> None:
    model = made(PRESETS[name])
    tokens = np.arange(6).reshape(2, 3)
    hidden = model.hidden(model.inputs(tokens))
    for head, logits in model.forward(tokens).items():
        np.testing.assert_array_equal(model.logits(hidden, head=head), logits)


BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        "too large an id",
        {"tokens_BT": np.array([[0, 31]])},
        "token id 31 is outside the vocabulary",
    ),
    ("a negative id", {"tokens_BT": np.array([[0, -1]])}, "token id -1 is outside the vocabulary"),
    ("too long", {"tokens_BT": np.zeros((1, 14), int)}, "length 14 exceeds max_seq_len 13"),
    ("no rows", {"tokens_BT": np.zeros((0, 3), int)}, "tokens is empty"),
    ("no columns", {"tokens_BT": np.zeros((2, 0), int)}, "tokens is empty"),
    ("one dimension", {"tokens_BT": np.zeros(3, int)}, "whole numbers"),
    ("floats", {"tokens_BT": np.zeros((1, 3))}, "dtype float64"),
    (
        "a mask of another shape",
        {"tokens_BT": np.zeros((1, 3), int), "valid_BT": np.ones((1, 2), bool)},
        "the mask of tokens has shape",
    ),
    (
        "a mask of numbers",
        {"tokens_BT": np.zeros((1, 3), int), "valid_BT": np.ones((1, 3))},
        "the mask of tokens has dtype float64",
    ),
    (
        "segments of another shape",
        {"tokens_BT": np.zeros((1, 3), int), "segments_BT": np.ones((1, 2), int)},
        "segments of tokens has shape",
    ),
    (
        "a source for a decoder",
        {"tokens_BT": np.zeros((1, 3), int), "source_tokens_BS": np.zeros((1, 2), int)},
        "without an encoder",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        made(PRESETS["core"]).forward(**arguments)
    assert message in str(refusal.value)


def test_an_encoder_needs_its_source() -> None:
    model = made(PRESETS["seq2seq"])
    with pytest.raises(InputError, match="needs a source"):
        model.forward(np.zeros((1, 3), int))
    with pytest.raises(InputError, match="2 source sequences for 1 target ones"):
        model.forward(np.zeros((1, 3), int), source_tokens_BS=np.zeros((2, 3), int))
    with pytest.raises(InputError, match=r"token id 23 .* 23"):
        model.forward(np.zeros((1, 3), int), source_tokens_BS=np.full((1, 3), 23))


def test_bad_targets_and_weights_are_refused() -> None:
    model = made(PRESETS["core"])
    inputs = model.inputs(np.zeros((2, 3), int))
    with pytest.raises(InputError, match="target 31 is not one of 31 classes"):
        model.loss(inputs, targets={"next": np.full((2, 3), 31)})
    with pytest.raises(InputError, match="no head 'class'"):
        model.loss(inputs, targets={"class": np.zeros((2, 3), int)})
    with pytest.raises(InputError, match="weights of shape"):
        model.loss(inputs, targets={"next": np.zeros((2, 3), int)}, weights=np.ones(2))


def test_bad_parameters_are_refused() -> None:
    spec = PRESETS["core"]
    good = dict(made(spec).params)
    with pytest.raises(InputError, match=r"no parameter 'embed\.wieght'"):
        Model(spec, params=good | {"embed.wieght": np.ones(3)})
    with pytest.raises(InputError, match=r"'embed.weight' has shape \(3,\)"):
        Model(spec, params=good | {"embed.weight": np.ones(3)})
    del good["embed.weight"]
    with pytest.raises(InputError, match=r"'embed\.weight' is missing"):
        Model(spec, params=good)
    with pytest.raises(InputError, match="float32 or float64, not float16"):
        made(spec, np.float16)
