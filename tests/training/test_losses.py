"""Losses: only what counts counts, smoothing beside the plain loss, pieces = the whole."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from glassformer.data.batch import Batch
from glassformer.models.model import build
from glassformer.spec.model import AnswerHead, NextHead
from glassformer.training import losses
from glassformer.training.engine import loss_weights, totals
from glassformer.training.losses import head_loss
from tests.planting import Call, catches
from tests.tiny import D_MODEL, MAX_SEQ_LEN, VOCAB, B, T, built, noise, tiny, token_ids
from tests.training.samples import ENGINES, digits, engine_of, gradients, machine, uneven


def sample(*, seed: int = 0, dtype: torch.dtype = torch.float64):
    model = built(tiny()).to(dtype)
    hidden = noise(B, T, D_MODEL, seed=seed, dtype=dtype).requires_grad_()
    weights = torch.rand((B, T), generator=torch.Generator().manual_seed(seed))
    weights[0, 3:] = 0.0
    return model, hidden, token_ids(B, T, seed=seed), weights


def by_hand(model, hidden, targets, weights, *, smoothing: float):
    """-sum_v q_v log p_v, position by position."""
    logits = model.logits(hidden)
    smoothed, plain = hidden.new_zeros(()), hidden.new_zeros(())
    for b in range(B):
        for t in range(T):
            logp = logits[b, t] - torch.logsumexp(logits[b, t], 0)
            q = torch.full((VOCAB,), smoothing / VOCAB, dtype=hidden.dtype)
            q[targets[b, t]] += 1 - smoothing
            smoothed = smoothed - weights[b, t] * (q * logp).sum()
            plain = plain - weights[b, t] * logp[targets[b, t]]
    return smoothed, plain


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_weighted_sums(smoothing: float) -> None:
    model, hidden, targets, weights = sample()
    found = head_loss(model, hidden, "next", targets, weights, label_smoothing=smoothing)
    smoothed, plain = by_hand(model, hidden, targets, weights, smoothing=smoothing)
    assert found.smoothed.item() == pytest.approx(smoothed.item(), rel=1e-13)
    assert found.nll.item() == pytest.approx(plain.item(), rel=1e-13)
    assert not found.nll.requires_grad
    leaves = [hidden, *model.heads.parameters()]
    ours = torch.autograd.grad(found.smoothed, leaves)
    theirs = torch.autograd.grad(smoothed, leaves)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)


def test_smoothing_is_torchs_own():
    model, hidden, targets, _ = sample()
    found = head_loss(
        model, hidden, "next", targets, torch.ones(B, T), label_smoothing=0.2
    ).smoothed
    wanted = F.cross_entropy(
        model.logits(hidden).flatten(0, 1), targets.flatten(), label_smoothing=0.2, reduction="sum"
    )
    assert found.item() == pytest.approx(wanted.item(), rel=1e-13)


@pytest.mark.parametrize(
    ("classes", "floor"), [(10, 0.500), (20, 0.594), (32, 0.651), (100, 0.778), (16_000, 1.293)]
)
def test_the_smoothed_loss_has_a_floor_and_the_plain_one_has_none(classes, floor):
    """Ruling C-05: at the best logits the smoothed loss is the entropy of its own targets."""
    share = 0.1 / classes
    best = torch.full((1, 1, classes), math.log(share), dtype=torch.float64)
    best[..., 3] = math.log(0.9 + share)

    class Ready:
        def project(self, rows, head):
            return rows

    found = losses._sums(
        Ready(), best[0], "next", torch.tensor([3]), torch.ones(1, dtype=torch.float64), 0.1
    )
    entropy = -(0.9 + share) * math.log(0.9 + share) - (classes - 1) * share * math.log(share)
    assert found.smoothed.item() == pytest.approx(entropy, rel=1e-12)
    assert found.smoothed.item() == pytest.approx(floor, abs=5e-4)
    assert found.nll.item() == pytest.approx(-math.log(0.9 + share), rel=1e-12)


def test_what_a_zero_weight_hides_is_never_read() -> None:
    """Targets, even impossible ones, and hidden states of positions that do not count."""
    model, hidden, targets, weights = sample()
    before = head_loss(model, hidden, "next", targets, weights, label_smoothing=0.1)
    targets[0, 3:] = VOCAB + 5
    changed = hidden.detach().clone()
    changed[0, 3:] = math.nan
    after = head_loss(model, changed, "next", targets, weights, label_smoothing=0.1)
    assert torch.equal(before.smoothed, after.smoothed)
    assert torch.equal(before.nll, after.nll)


#: One product, whose gradient is taken at once; more than that, which the backward computes again.
HEADS = {"plain": NextHead(), "capped": NextHead(softcap=3.0)}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_pieces_are_the_whole(monkeypatch, smoothing: float, head: str) -> None:
    _, hidden, targets, weights = sample()
    model = built(tiny(heads=(HEADS[head],))).double()
    leaves = [hidden, *model.heads.parameters()]
    whole = head_loss(model, hidden, "next", targets, weights, label_smoothing=smoothing)
    want = torch.autograd.grad(whole.smoothed, leaves)
    for rows in (1, 5, 17):
        monkeypatch.setattr(losses, "PIECE", rows * VOCAB)
        parts = head_loss(model, hidden, "next", targets, weights, label_smoothing=smoothing)
        assert parts.smoothed.item() == pytest.approx(whole.smoothed.item(), rel=1e-13)
        assert parts.nll.item() == pytest.approx(whole.nll.item(), rel=1e-13)
        for mine, wanted in zip(torch.autograd.grad(parts.smoothed, leaves), want, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("head", HEADS)
def test_pieces_keep_no_logits_for_the_backward(monkeypatch, head):
    _, hidden, targets, weights = sample()
    model = built(tiny(heads=(HEADS[head],))).double()
    monkeypatch.setattr(losses, "PIECE", 4 * VOCAB)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        head_loss(model, hidden, "next", targets, weights)
    assert kept
    assert all(len(shape) == 1 or shape[-1] != VOCAB for shape in kept)  # a bias has (V,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_float64_stays_and_half_precision_is_summed_in_float32(dtype):
    model, hidden, targets, weights = sample(dtype=dtype)
    found = head_loss(model, hidden, "next", targets, weights, label_smoothing=0.1)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.smoothed.dtype == found.nll.dtype == want


@pytest.mark.parametrize("readout", ["last", "first", "mean"])
def test_answers_are_read_where_the_head_says(readout):
    spec = tiny(heads=(AnswerHead(readout=readout),))
    model, hidden = built(spec), noise(B, T, D_MODEL)
    valid = torch.arange(T) < torch.tensor([T, 2, 5])[:, None]
    targets, weights = token_ids(B), torch.tensor([1.0, 0.5, 0.0])
    found = head_loss(model, hidden, "answer", targets, weights, valid_BT=valid)
    logits = model.logits(hidden, "answer", valid_BT=valid)
    each = F.cross_entropy(logits, targets, reduction="none")
    assert found.nll.item() == pytest.approx((each * weights).sum().item(), rel=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_counted_is_nothing_lost(smoothing):
    model, hidden, targets, _ = sample()
    found = head_loss(model, hidden, "next", targets, torch.zeros(B, T), label_smoothing=smoothing)
    assert found.smoothed.item() == found.nll.item() == 0.0
    found.smoothed.backward()
    assert not hidden.grad.abs().any()


# --- what counts, by batch ------------------------------------------------------------------------


@catches(
    "PAD in the loss",
    "training.engine:loss_weights",
    Call("astype"),
    to="np.ones(target.shape, dtype={args[0]})",
)
def test_weights_are_the_batchs_else_one_where_a_token_is() -> None:
    batch = Batch.of([[1, 2, 3], [4]])
    at_tokens, answers = np.ones((2, 3), int), np.ones(2, int)
    plain = Batch(
        tokens=batch.tokens, valid=batch.valid, targets={"next": at_tokens, "answer": answers}
    )
    assert loss_weights(plain, "next").tolist() == [[1, 1, 1], [1, 0, 0]]
    assert loss_weights(plain, "answer").tolist() == [1, 1]
    given = Batch(
        tokens=batch.tokens,
        valid=batch.valid,
        targets={"next": at_tokens, "answer": answers},
        weights=np.array([[0.5, 0, 1], [2, 0, 0]]),
    )
    assert loss_weights(given, "next").tolist() == [[0.5, 0, 1], [2, 0, 0]]
    assert loss_weights(given, "answer").tolist() == [1, 1]
    spec = tiny(heads=(*tiny().heads, AnswerHead()))
    assert totals([plain, given], spec) == {"next": 4 + 3.5, "answer": 4}


def test_a_batch_without_targets_for_the_model_is_refused():
    with pytest.raises(ValueError, match="no targets for any head"):
        totals([Batch.of([[1, 2]])], build(tiny()).spec)
    assert MAX_SEQ_LEN > 2


# --- the same in a step ---------------------------------------------------------------------------


def silent(batch: Batch) -> Batch:
    """The batch with every weight 0."""
    (shape,) = {target.shape for target in batch.targets.values()}
    return Batch(
        tokens=batch.tokens,
        valid=batch.valid,
        targets=batch.targets,
        weights=np.zeros(shape, np.float32),
        source=batch.source,
    )


@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_in_which_nothing_counts_has_no_loss_and_no_nan(kind):
    run = digits()
    engine = engine_of(run, kind)
    before = engine.weights()
    found = engine.step([silent(uneven(run, 8))], lr=0.1, seed=0)
    assert (found.loss, found.nll, found.grad_norm) == (0.0, {"answer": 0.0}, 0.0)
    assert all(np.array_equal(before[name], array) for name, array in engine.weights().items())


@pytest.mark.parametrize("kind", ENGINES)
def test_only_the_penalty_is_left_when_nothing_counts(kind):
    run = machine("train.clip=0", "train.precision=float64")
    engine = engine_of(run, kind)
    found = engine.step([silent(uneven(run, 8))], lr=0.1, seed=0)
    u = next(name for name in gradients(engine) if name.endswith("embed.u"))
    others = {name: grad for name, grad in gradients(engine).items() if name != u}
    assert found.loss > 0
    assert set(found.nll.values()) == {0.0}
    assert not any(grad.any() for grad in others.values())


@pytest.mark.parametrize("kind", ENGINES)
def test_padding_is_out_of_the_loss(kind):
    """Changing the targets of PAD changes no bit, with the batch's weights and without any."""
    run = machine()
    batch = uneven(run, 8)
    for weights in (batch.weights, None):
        found = []
        for filler in (0, 1):
            targets = {
                head: np.where(batch.valid, target, filler)
                for head, target in batch.targets.items()
            }
            changed = Batch(
                tokens=batch.tokens, valid=batch.valid, targets=targets, weights=weights
            )
            engine = engine_of(run, kind)
            found.append((engine.step([changed], lr=0.1, seed=0), gradients(engine)))
        (first, one), (second, other) = found
        assert first == second
        assert all(np.array_equal(one[name], other[name]) for name in one)
