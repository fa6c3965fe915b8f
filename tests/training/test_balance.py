"""The load-balancing loss on its own path: beside the loss, weighed by tokens, in both engines."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.nn.experts import BalanceLosses
from glassformer.training.fit import fit
from tests.planting import Binary, catches
from tests.training.samples import ENGINES, engine_of, gradients, reverse, worst_relative

EXPERTS = (
    '{"kind": "MoE", "n_experts": 4, "experts_per_token": 2, "balance": %s,'
    ' "expert": {"kind": "SwiGLU", "d_ff": 7}}'
)


def routed(*changes: str, balance: float = 0.7):
    """Experts on both sides of an encoder-decoder, whose sides have different numbers of tokens."""
    ffn = EXPERTS % balance
    return reverse(
        f"model.encoder.layers.block.ffn={ffn}",
        f"model.decoder.layers.block.ffn={ffn}",
        "train.precision=float64",
        "train.clip=0",
        *changes,
    )


def three_uneven(run):
    task = build_task(run.task)
    rows = np.argsort(task.lengths("train")[:18], kind="stable")
    batches = [task.batch("train", rows[a:b]) for a, b in ((0, 3), (3, 5), (5, 18))]
    short = batches[0].valid.copy()
    short[:, 2:] = False  # another share of the targets' tokens than of the sources'
    return [replace(batches[0], valid=short), *batches[1:]]


def tokens_of(batch, layer: str) -> int:
    return int((batch.source.valid if layer.startswith("encoder.") else batch.valid).sum())


@catches(
    "every batch counts alike",
    "training.engine:balance_shares",
    Binary("/"),
    to="1 / len(batches)",
    case="numpy",
)
@pytest.mark.parametrize("kind", ENGINES)
def test_balance_is_weighed_by_tokens(kind: str) -> None:
    """Each batch's own losses, layer by layer, each by its share of that side's tokens."""
    run = routed()
    batches = three_uneven(run)
    found = engine_of(run, kind).step(batches, lr=0.0, seed=0)
    model = engine_of(run, "torch").model
    layers = list(run.model.mixtures())
    assert layers == ["encoder.blocks.0", "decoder.blocks.0"]
    total = 0.0
    for batch in batches:
        losses = BalanceLosses()
        with torch.no_grad():
            model.hidden(model.inputs(batch), balance=losses)
        for layer in layers:
            share = tokens_of(batch, layer) / sum(tokens_of(each, layer) for each in batches)
            total += share * float(losses.losses[layer]) / len(layers)
    assert found.balance == pytest.approx(total, rel=1e-12)
    assert found.balance_term == pytest.approx(0.7 * total, rel=1e-12)
    assert found.objective == found.loss + found.balance_term


def test_engines_agree() -> None:
    run = routed()
    batches = three_uneven(run)
    engines = [engine_of(run, kind) for kind in ENGINES]
    one, other = (engine.step(batches, lr=0.0, seed=0) for engine in engines)
    for name in ("loss", "balance", "balance_term", "objective", "grad_norm"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-10), name
    assert worst_relative(*map(gradients, engines)) <= 1e-10


@pytest.mark.parametrize("kind", ENGINES)
def test_the_loss_is_without_it(kind: str) -> None:
    """The same model with another coefficient: another objective, the same loss and balance."""
    results = []
    for balance in (0.0, 0.7):
        run = routed(balance=balance)
        results.append(engine_of(run, kind).step(three_uneven(run), lr=0.0, seed=0))
    without, with_it = results
    assert without.loss == without.objective == pytest.approx(with_it.loss, rel=1e-14)
    assert without.nll == with_it.nll
    assert without.balance == with_it.balance
    assert with_it.objective - with_it.loss == pytest.approx(0.7 * with_it.balance)
    assert without.grad_norm != with_it.grad_norm


def test_a_record_has_it_and_one_of_a_model_without_experts_has_none():
    run = routed("train.steps=2")
    task = build_task(run.task)
    for record in fit(engine_of(run, "torch"), task, run.train):
        assert record.objective - record.loss == pytest.approx(0.7 * record.balance)
    plain = reverse("train.steps=1")
    (record,) = fit(engine_of(plain, "torch"), task, plain.train)
    assert record.balance is None and record.objective == record.loss


def test_checkpointing_changes_nothing():
    run = routed()
    batches = three_uneven(run)
    plain = engine_of(run, "torch")
    want = plain.step(batches, lr=0.0, seed=0)
    saved = engine_of(routed("train.gradient_checkpointing=true"), "torch")
    found = saved.step(batches, lr=0.0, seed=0)
    assert (found.loss, found.balance) == (want.loss, want.balance)
    assert worst_relative(gradients(saved), gradients(plain)) <= 1e-14
