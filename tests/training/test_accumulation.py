"""Some small batches are one large one: every token weighs alike, in both engines."""

import numpy as np
import pytest

from glassformer.data.build_task import build_task
from tests.planting import Binary, catches
from tests.training.samples import ENGINES, RUNS, engine_of, gradients, machine, worst_relative

#: Worst seen: 5.7e-7 and 8.0e-16, relative to the largest entry of the gradient.
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


def four_of_eight_and_one_of_thirty_two(run):
    """Sorted by length, so that the four differ in length and in how many tokens count."""
    task = build_task(run.task)
    rows = np.argsort(task.lengths("train")[:32], kind="stable")
    small = [task.batch("train", rows[i : i + 8]) for i in range(0, 32, 8)]
    assert len({batch.tokens.shape for batch in small}) > 1
    return small, [task.batch("train", rows)]


def accumulation_gap(name: str, kind: str, precision: str, *changes: str) -> tuple[float, float]:
    """The worst relative difference of a gradient, and of the losses."""
    run = RUNS[name]("train.clip=0", f"train.precision={precision}", *changes)
    small, large = four_of_eight_and_one_of_thirty_two(run)
    one, other = engine_of(run, kind), engine_of(run, kind)
    found, wanted = one.step(small, lr=0.0, seed=0), other.step(large, lr=0.0, seed=0)
    assert found.tokens == wanted.tokens
    assert found.nll.keys() == wanted.nll.keys()
    losses = [(found.loss, wanted.loss), *((found.nll[h], wanted.nll[h]) for h in wanted.nll)]
    return (
        worst_relative(gradients(one), gradients(other)),
        max(abs(a - b) / abs(b) for a, b in losses),
    )


@catches(
    "mean of means",
    "training.torch_engine:TorchEngine._loss",
    Binary("+"),
    part="right",
    to="{left} / float(loss_weights(batch, head).sum()) / 4",
    case="machine",
)
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", RUNS)
def test_small_batches_are_a_large_one(name: str, kind: str, precision: str) -> None:
    gap, loss_gap = accumulation_gap(name, kind, precision, "train.label_smoothing=0.1")
    assert gap <= TOLERANCE[precision]
    assert loss_gap <= TOLERANCE[precision]


@pytest.mark.parametrize("kind", ENGINES)
def test_the_penalty_counts_once(kind: str) -> None:
    """Loss and slope of the L1 term are those of one batch, however many there are."""
    gap, loss_gap = accumulation_gap(
        "machine", kind, "float64", "model.embedding.l1=10.0", "train.head_weights=[]"
    )
    assert gap <= TOLERANCE["float64"]
    assert loss_gap <= TOLERANCE["float64"]


@pytest.mark.parametrize("kind", ENGINES)
def test_the_loss_is_the_weighted_sum_over_heads_and_the_penalty(kind):
    run = machine("train.precision=float64")
    small, _ = four_of_eight_and_one_of_thirty_two(run)
    engine = engine_of(run, kind)
    u = next(array for name, array in engine.weights().items() if name.endswith("embed.u"))
    found = engine.step(small, lr=0.0, seed=0)
    by_hand = found.nll["next"] + 0.3 * found.nll["class"] + 0.7 * found.nll["state"]
    assert found.loss - by_hand == pytest.approx(1e-2 * np.abs(u).sum(), rel=1e-9)
