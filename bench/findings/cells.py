"""What is varied: every cell is one change to a recipe, and one change only.

A change is to the spec where the spec can say it. What no sensible model lacks (a residual, the
scale of the scores, the feed-forward's contribution, the norms) the spec cannot leave out: those
are taken out of the built model, by an edit at a tap or a part put in another's place.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from glassformer.lab.recipes import recipe
from glassformer.spec.model import (
    MLP,
    Block,
    LayerNorm,
    Learned,
    ModelSpec,
    NoPosition,
    Position,
    Rotary,
    Stack,
)
from glassformer.spec.serialize import override
from glassformer.spec.train import CosineSchedule, RunSpec, TrainSpec

TASKS = ("digits", "reverse")
SEEDS = (0, 1, 2)
#: Steps and batch of every cell: short, so that a baseline leaves something to improve.
LENGTHS = {"digits": (500, 128), "reverse": (400, 64)}
WARMUP = 0.1  # of the steps

#: What is done to a built model; `surgery` knows how.
WITHOUT = ("residual", "norm", "ffn", "scale")


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of one group, beside the setting that it is compared with."""

    group: str
    name: str
    change: Callable[[RunSpec], RunSpec]
    without: tuple[str, ...] = ()
    #: The setting in the same group that this one is held against; empty: it is the baseline.
    against: str = ""


def same(run: RunSpec) -> RunSpec:
    """No change."""
    return run


def each_block(model: ModelSpec, change: Callable[[Block], Block]) -> ModelSpec:
    """The model with every block of every stack changed."""

    def stack(old: Stack) -> Stack:
        runs = tuple(replace(run, block=change(run.block)) for run in old.layers)
        return replace(old, layers=runs)

    encoder = None if model.encoder is None else stack(model.encoder)
    return replace(model, decoder=stack(model.decoder), encoder=encoder)


def each_stack(model: ModelSpec, change: Callable[[Stack], Stack]) -> ModelSpec:
    """The model with both stacks changed."""
    encoder = None if model.encoder is None else change(model.encoder)
    return replace(model, decoder=change(model.decoder), encoder=encoder)


def heads(number: int) -> Callable[[RunSpec], RunSpec]:
    """Give a model this many heads at the same width: each is d_model / number wide."""

    def block(old: Block) -> Block:
        cross = None if old.cross is None else replace(old.cross, n_heads=number)
        return replace(old, mixer=replace(old.attention, n_heads=number), cross=cross)

    return lambda run: replace(run, model=each_block(run.model, block))


def position(kind: Position) -> Callable[[RunSpec], RunSpec]:
    """Another way to tell places apart."""
    return lambda run: replace(run, model=replace(run.model, position=kind))


def pre_norm(run: RunSpec) -> RunSpec:
    """Norms before the parts, and one at the end of each stack."""
    model = each_block(run.model, lambda block: replace(block, placement="pre"))
    return replace(
        run, model=each_stack(model, lambda stack: replace(stack, final_norm=LayerNorm()))
    )


def feed_forward(times: float) -> Callable[[RunSpec], RunSpec]:
    """A feed-forward of so many times the width."""

    def block(old: Block) -> Block:
        assert isinstance(old.ffn, MLP)
        return replace(old, ffn=replace(old.ffn, d_ff=round(old.ffn.d_ff * times)))

    return lambda run: replace(run, model=each_block(run.model, block))


def width(d_model: int) -> Callable[[RunSpec], RunSpec]:
    """Another width, the feed-forward four times as wide; four heads as before."""

    def change(run: RunSpec) -> RunSpec:
        scaled = feed_forward(d_model / run.model.d_model)(run)
        return replace(scaled, model=replace(scaled.model, d_model=d_model))

    return change


def layers(number: int) -> Callable[[RunSpec], RunSpec]:
    """Give each stack this many blocks."""

    def stack(old: Stack) -> Stack:
        return replace(old, layers=tuple(replace(run, count=number) for run in old.layers))

    return lambda run: replace(run, model=each_stack(run.model, stack))


def train(*overrides: str) -> Callable[[RunSpec], RunSpec]:
    """Other settings of the training."""
    return lambda run: override(run, [f"train.{text}" for text in overrides])


def rate(times: float) -> Callable[[RunSpec], RunSpec]:
    """The recipe's learning rate, so many times."""
    return lambda run: replace(run, train=replace(run.train, lr=run.train.lr * times))


def warmup(share: float) -> Callable[[RunSpec], RunSpec]:
    """A warmup of this share of the steps."""
    return lambda run: replace(run, train=warmed(run.train, share))


def batch(times: float) -> Callable[[RunSpec], RunSpec]:
    """Larger or smaller batches; the number of examples seen stays the same."""

    def change(run: RunSpec) -> RunSpec:
        size, steps = round(run.train.batch_size * times), round(run.train.steps / times)
        changed = replace(run.train, batch_size=size, steps=steps)
        return replace(run, train=warmed(changed, WARMUP))

    return change


def warmed(old: TrainSpec, share: float) -> TrainSpec:
    """The training with a warmup of this share of its steps."""
    return replace(old, schedule=CosineSchedule(warmup=round(old.steps * share)))


BASE = "as the recipe"
PRE = "before each part"
#: What the recipes have where a group has something else.
RECIPE = {
    "heads": "4 heads",
    "positions": "sinusoidal",
    "norm": "after each part",
    "feed-forward": "256 wide",
    "attention scale": "on",
    "width": "64",
    "layers": "2",
    "learning rate": "0.002",
    "warmup": "10 % of the steps",
    "label smoothing": "none",
    "batch": "the recipe's",
}
CELLS: tuple[Cell, ...] = (
    Cell("baseline", BASE, same),
    Cell("heads", "1 head", heads(1), against=BASE),
    Cell("heads", "2 heads", heads(2), against=BASE),
    Cell("heads", "8 heads", heads(8), against=BASE),
    Cell("positions", "none", position(NoPosition()), against=BASE),
    Cell("positions", "learned", position(Learned()), against=BASE),
    Cell("positions", "rotary", position(Rotary()), against=BASE),
    Cell("norm", PRE, pre_norm, against=BASE),
    Cell("norm", "none", same, without=("norm",), against=BASE),
    Cell("residuals", "off, norm before", pre_norm, without=("residual",), against=PRE),
    Cell("feed-forward", "none", same, without=("ffn",), against=BASE),
    Cell("feed-forward", "half as wide", feed_forward(0.5), against=BASE),
    Cell("feed-forward", "twice as wide", feed_forward(2), against=BASE),
    Cell("attention scale", "off", same, without=("scale",), against=BASE),
    Cell("width", "16", width(16), against=BASE),
    Cell("width", "32", width(32), against=BASE),
    Cell("width", "128", width(128), against=BASE),
    Cell("layers", "1", layers(1), against=BASE),
    Cell("layers", "3", layers(3), against=BASE),
    Cell("learning rate", "a quarter", rate(0.25), against=BASE),
    Cell("learning rate", "half", rate(0.5), against=BASE),
    Cell("learning rate", "double", rate(2), against=BASE),
    Cell("learning rate", "four times", rate(4), against=BASE),
    Cell("warmup", "none", warmup(0.0), against=BASE),
    Cell("warmup", "30 % of the steps", warmup(0.3), against=BASE),
    Cell("label smoothing", "0.1", train("label_smoothing=0.1"), against=BASE),
    Cell("batch", "half", batch(0.5), against=BASE),
    Cell("batch", "double", batch(2), against=BASE),
    Cell("batch", "four times", batch(4), against=BASE),
)


@functools.cache
def plain(task: str, *, quick: bool) -> RunSpec:
    """The recipe as it is; to make one is to make its task, so each is made once."""
    return recipe(task, ["task.examples=500"] if quick else [])


@dataclass(frozen=True, slots=True)
class Job:
    """A cell on a task with a seed: what one process runs."""

    task: str
    cell: Cell
    seed: int
    quick: bool = False

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return f"{self.task} / {self.cell.group} / {self.cell.name} / seed {self.seed}"

    def run(self) -> RunSpec:
        """The whole spec that is trained."""
        spec = plain(self.task, quick=self.quick)
        steps, size = (20, 16) if self.quick else LENGTHS[self.task]
        short = replace(spec.train, steps=steps, batch_size=size, seed=self.seed)
        return self.cell.change(replace(spec, train=warmed(short, WARMUP)))


def jobs(*, quick: bool = False) -> Iterator[Job]:
    """Every cell, seed by seed, so that an early end leaves whole seeds behind."""
    for seed in SEEDS:
        for cell in CELLS:
            for task in TASKS:
                yield Job(task, cell, seed, quick)


def cell_named(group: str, name: str) -> Cell:
    """The cell of a group and a name."""
    return next(cell for cell in CELLS if (cell.group, cell.name) == (group, name))


def compared(cell: Cell) -> Cell | None:
    """The cell that this one is held against."""
    if not cell.against:
        return None
    group = "baseline" if cell.against == BASE else "norm"
    return cell_named(group, cell.against)
