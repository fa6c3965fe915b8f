"""The native engine beside the torch engine's on a CPU: time of a step, gradients, loss curves.

Times are interleaved, in float32, of the same batches in the same order. `--gradients`: every
gradient of every preset, by hand in float64 beside torch's in float64, and the native engine's in
float32 beside those, with torch's own in float32 as the yardstick. `--curves`: the losses of every
recipe, step by step, of engines that begin with the same weights, nothing dropped.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np

from bench.clock import Row, interleave, rows, said
from glassformer.byhand.c_table import C
from glassformer.byhand.model import Model
from glassformer.checks.preset_subjects import sample_subject
from glassformer.checks.rows.training_step import step_batches, with_fewer_tokens
from glassformer.data.batch import Batch
from glassformer.data.build_task import build_task
from glassformer.kernels.threads import taking
from glassformer.lab.recipes import RECIPES, recipe
from glassformer.models.weights import weights_of
from glassformer.spec import presets
from glassformer.spec.block import Dropout
from glassformer.spec.model import ModelSpec, VectorHead
from glassformer.spec.train import RunSpec, TrainSpec
from glassformer.training.engine import Array, Arrays, Engine, balance_shares, totals
from glassformer.training.fit import fit
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine

#: Recipe, its changes, threads, steps of each engine.
CASES = (
    ("digits", (), 1, 150),
    ("reverse", (), 1, 150),
    ("lm-10m", ("train.batch_size=4",), 2, 20),
)
BATCHES = 8
#: Steps of a curve, and of the recipes of large models the batch, as four engines train them.
STEPS, LARGE = 200, {"lm": 4, "lm-modern": 4, "lm-moe": 4, "lm-10m": 1, "text": 8, "translate": 8}
#: How often a torch run's distance from float64 the native run's may be: chosen, not derived.
UNITS = 4.0
#: Rounding of a loss in float32, relative: what any two orders of its sum may differ by.
LEAST = 2e-6
#: Below this share of a model's largest gradient a tensor is compared absolutely.
FLOOR = 1e-4


def options(parser: argparse.ArgumentParser) -> None:
    """What is compared, and which recipes."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--gradients", action="store_true", help="every gradient of every preset")
    what.add_argument("--curves", action="store_true", help="200 losses of every recipe")
    parser.add_argument("--only", nargs="+", help="these presets or recipes alone")


def run(*, asked: argparse.Namespace, quick: bool = False) -> Iterator[Row]:
    """Times by default: two rows for each recipe; `ratio` is over torch's time."""
    if asked.gradients:
        for name in asked.only or (["core"] if quick else presets.PRESETS):
            yield gradients(name)
    elif asked.curves:
        steps = 12 if quick else STEPS
        for name in asked.only or (["digits"] if quick else RECIPES):
            changes = [f"train.batch_size={LARGE[name]}"] if name in LARGE else []
            spec = recipe(name, [*changes, f"train.steps={steps}"])
            told = verdict(curves(spec, steps=steps))
            yield said("engines", f"{name}, {steps} losses", told.sentence)
    else:
        yield from times(quick=quick)


# --- gradients ------------------------------------------------------------------------------------


def gradients(name: str) -> Row:
    """Compare every gradient of a preset."""
    own = with_fewer_tokens(sample_subject(name).ours())
    spec = without_dropout(own.spec)
    if any(isinstance(head, VectorHead) for head in spec.heads):
        return said("engines", name, "a vector has no loss")
    weights, batches = weights_of(own), step_batches(spec, seed=101)
    exact = gradients_of_torch(spec, weights, batches, precision="float64")
    sides = {
        "by hand, float64": gradients_of_arrays(spec, weights, batches, wide=True),
        "native, float32": gradients_of_arrays(spec, weights, batches, wide=False),
        "torch, float32": gradients_of_torch(spec, weights, batches, precision="float32"),
    }
    largest = max(float(np.abs(grad).max()) for grad in exact.values())
    told = []
    for side, found in sides.items():
        assert found.keys() == exact.keys()
        worst = max(
            float(np.abs(found[key] - grad).max())
            / (max(float(np.abs(grad).max()), FLOOR * largest) or 1.0)
            for key, grad in exact.items()
        )
        told.append(f"{side} {worst:.1e}")
    return said("engines", f"{name}, {len(exact)} gradients", "; ".join(told))


def gradients_of_arrays(
    spec: ModelSpec, weights: Arrays, batches: Sequence[Batch], *, wide: bool
) -> Arrays:
    """Return the gradients by hand: in NumPy in float64, else in C."""
    train = TrainSpec(precision="float64" if wide else "float32", label_smoothing=0.1)
    if wide:
        engine = NumpyEngine(Model(spec, params=weights, dtype=np.float64), train)
    else:
        engine = NumpyEngine(Model(spec, params=weights, dtype=np.float32, table=C), train)
    engine.gradients(batches, seed=0)
    return engine.model.grads


def gradients_of_torch(
    spec: ModelSpec, weights: Arrays, batches: Sequence[Batch], *, precision: str
) -> Arrays:
    """Return the torch engine's; zeros where nothing reads a parameter."""
    train = TrainSpec(precision=precision, label_smoothing=0.1)  # type: ignore[arg-type]
    engine = TorchEngine.fresh(spec, train)
    engine.load_weights(weights)
    shares = balance_shares(batches, spec) if engine.routed else []
    engine.gradients(batches, totals(batches, spec), shares=shares, seed=0)
    return {
        name: np.zeros(p.shape) if p.grad is None else p.grad.numpy()
        for name, p in engine.model.named_parameters()
    }


def without_dropout(model: ModelSpec) -> ModelSpec:
    """Return a model that drops nothing."""
    model = replace(model, decoder=replace(model.decoder, dropout=Dropout()))
    if model.encoder is not None:
        model = replace(model, encoder=replace(model.encoder, dropout=Dropout()))
    return model


# --- curves ---------------------------------------------------------------------------------------


class Verdict:
    """How far the native engine's losses are from float64's, and how far torch's own are."""

    def __init__(self, *, apart: float, allowed: float, step: int, end: float) -> None:
        self.apart, self.allowed, self.step, self.end = apart, allowed, step, end

    @property
    def passed(self) -> bool:
        """True if rounding explains the distance."""
        return self.apart <= self.allowed

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return (
            f"{'within rounding' if self.passed else 'FURTHER APART'}: {self.apart:.1e} of "
            f"{self.allowed:.1e} allowed at step {self.step}, loss {self.end:.4f} at the end"
        )


def curves(run: RunSpec, *, steps: int) -> dict[str, list[float]]:
    """Return the losses of engines that train side by side from the same weights.

    `another` is torch where every first weight is one rounding further, up or down.
    """
    model, task = without_dropout(run.model), build_task(run.task)
    train = replace(run.train, precision="float32", steps=steps)
    exact = replace(train, precision="float64")
    sides: dict[str, tuple[Engine, TrainSpec]] = {
        "native": (NumpyEngine.fresh(model, train, table=C), train),
        "float64": (TorchEngine.fresh(model, exact), exact),
        "torch": (TorchEngine.fresh(model, train), train),
        "another": (TorchEngine.fresh(model, train), train),
    }
    first = sides["native"][0].weights()
    for name, (engine, _) in sides.items():
        engine.load_weights(rounded_otherwise(first) if name == "another" else first)
    return {
        name: [record.objective for record in fit(engine, task, given)]
        for name, (engine, given) in sides.items()
    }


def rounded_otherwise(weights: Mapping[str, Array]) -> Arrays:
    """Return weights that are the next float32 above or below."""
    rng = np.random.default_rng(5)
    ways = np.array([-np.inf, np.inf], np.float32)
    return {
        name: np.nextafter(array, ways[rng.integers(0, 2, array.shape)])
        for name, array in weights.items()
    }


def verdict(losses: Mapping[str, Sequence[float]]) -> Verdict:
    """Compare distances from float64, each the largest so far; the worst step decides.

    Rounding grows from step to step, at a rate that is the model's own. So the yardstick is torch's
    own distance, of two runs.
    """
    exact = np.array(losses["float64"])
    far = {
        name: np.maximum.accumulate(np.abs(np.array(losses[name]) - exact))
        for name in ("native", "torch", "another")
    }
    allowed = UNITS * np.maximum(far["torch"], far["another"]) + LEAST * np.abs(exact)
    worst = int(np.argmax(far["native"] / allowed))
    return Verdict(
        apart=float(far["native"][worst]),
        allowed=float(allowed[worst]),
        step=worst + 1,
        end=float(exact[-1]),
    )


# --- times ----------------------------------------------------------------------------------------


def steps(engine: Engine, batches: Sequence[Batch]) -> Callable[[], object]:
    """Return a function that makes the engine's next step."""
    given = cycle(batches)
    return lambda: engine.step([next(given)], lr=1e-3, seed=0)


def times(*, quick: bool) -> Iterator[Row]:
    """Two rows for each recipe; `ratio` is over torch's time."""
    for name, changes, threads, rounds in CASES[: 2 if quick else None]:
        spec = recipe(name, changes)
        train, task = replace(spec.train, precision="float32"), build_task(spec.task)
        order = task.order(batch_size=train.batch_size, seed=0)
        batches = [task.batch("train", order.rows(i)) for i in range(BATCHES)]
        with taking(threads):
            sides = {
                "native engine": steps(NumpyEngine.fresh(spec.model, train, table=C), batches),
                "torch engine": steps(TorchEngine.fresh(spec.model, train), batches),
            }
            found = interleave(sides, rounds=6 if quick else rounds, inner=1, warmup=3)
        case = ", ".join((name, *changes, f"{threads} thread{'s' if threads > 1 else ''}"))
        yield from rows(found, bench="engines", case=case, baseline="torch engine")
