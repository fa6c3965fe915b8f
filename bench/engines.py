"""A training step of the native engine beside the torch engine's: interleaved, float32, on a CPU.

Both see the same batches in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from bench.clock import Row, interleave, rows
from glassformer.byhand.c_table import C
from glassformer.data.batch import Batch
from glassformer.data.build_task import build_task
from glassformer.kernels.threads import taking
from glassformer.lab.recipes import recipe
from glassformer.training.engine import Engine
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine

#: Recipe, its changes, threads, steps of each engine.
CASES = (
    ("digits", (), 1, 150),
    ("reverse", (), 1, 150),
    ("lm-10m", ("train.batch_size=4",), 2, 20),
)
BATCHES = 8


def steps(engine: Engine, batches: Sequence[Batch]) -> Callable[[], object]:
    """Return a function that makes the engine's next step."""
    given = cycle(batches)
    return lambda: engine.step([next(given)], lr=1e-3, seed=0)


def run(*, quick: bool = False) -> Iterator[Row]:
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
            times = interleave(sides, rounds=6 if quick else rounds, inner=1, warmup=3)
        case = ", ".join((name, *changes, f"{threads} thread{'s' if threads > 1 else ''}"))
        yield from rows(times, bench="engines", case=case, baseline="torch engine")
