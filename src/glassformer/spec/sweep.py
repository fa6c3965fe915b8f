"""A sweep as a value: what is varied, by which search, with how many seeds, stopped at which rungs.

A value is kept as the text that stands behind `=` in `train.lr=1e-3`, so that a sweep reads the
same on the command line, in a TOML file and in Python. Nothing is resolved here: `lab.sweeps.plan`
makes the runs.
"""

import json
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, assert_never

from glassformer.spec.checks import at_least, one_of, spec
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.options import check_options, option
from glassformer.spec.units import parse_count

#: More runs than this are begun only if the number is confirmed.
MANY_RUNS = 2_000
#: The most cells that are ever listed: more are a mistake in a range.
MOST_CELLS = 1_000_000
SAMPLERS = ("grid", "random", "tpe", "gp", "cmaes")
Sampler = Literal["grid", "random", "tpe", "gp", "cmaes"]


@spec
class Choices:
    """Values that are listed: `train.lr=1e-3,3e-3`."""

    values: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.values or "" in self.values:
            raise InputError("a list of values is empty", hint="train.lr=1e-3,3e-3")
        twice = {value for value in self.values if self.values.count(value) > 1}
        if twice:
            raise InputError(f"{min(twice)} is listed twice", hint="each value once")

    def typed(self) -> str:
        """Return the values as they are typed behind `=`."""
        return ",".join(self.values)


@spec
class Range:
    """Values between two numbers, to be sampled: `0.0..0.3`, `log:1e-4..1e-2`, `32..128/16`.

    Both ends are included. With a step, or where both ends are whole, values are whole numbers.
    """

    low: float
    high: float
    step: int = 0
    log: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.low) or not math.isfinite(self.high) or self.low >= self.high:
            raise InputError(
                f"{self.low:g}..{self.high:g} is not a range", hint="LOW..HIGH, such as 0.0..0.3"
            )
        if self.log and self.low <= 0:
            raise InputError(f"log:{self.low:g}.. has no logarithm", hint="LOW above 0")
        at_least("step", self.step, 0)
        if self.step and self.high - self.low < self.step:
            raise InputError(f"the step {self.step} is wider than the range", hint="LOW..HIGH/STEP")

    @property
    def is_whole(self) -> bool:
        """True if the values are whole numbers."""
        return self.step > 0

    def typed(self) -> str:
        """Return the range as it is typed behind `=`."""
        step = f"/{self.step}" if self.step > 1 else ""
        return f"{'log:' if self.log else ''}{self.low:g}..{self.high:g}{step}"

    def at(self, share: float) -> str:
        """Return the value at a share of the way, 0 to 1, as text."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return f"{math.exp(low + share * (high - low)):.4g}"
        if not self.is_whole:
            return f"{self.low + share * (self.high - self.low):.4g}"
        count = int((self.high - self.low) // self.step) + 1
        return str(int(self.low) + self.step * min(count - 1, int(share * count)))


Values = Choices | Range


@spec
class Factor:
    """A field that a sweep varies, by its path in the run's spec or its name in a budget."""

    path: str
    values: Values

    @property
    def short(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]


def _rungs(name: str, text: Any) -> tuple[int, ...]:
    return tuple(parse_count(name, one) for one in split_values(str(text)))


@spec
class SweepSpec:
    """Everything that decides what a sweep runs and how it is ranked, except the machine it uses.

    `fixed` are settings that all cells share. `designs` are options of a parameter budget: with
    them, the model of every cell is the solver's.
    """

    what: str
    factors: tuple[Factor, ...] = ()
    fixed: tuple[str, ...] = ()
    designs: tuple[Factor, ...] = ()
    seeds: int = option(5, help="Seeds of every cell; the same ones in each.", at_least=1)
    sampler: Sampler = option(
        "grid",
        help="grid: every combination. random: sampled ones. tpe, gp, cmaes: Optuna's samplers, "
        "which choose by the results so far.",
        choices=SAMPLERS,
    )
    draws: int = option(
        0, help="Number of cells that are sampled; for every sampler but grid.", at_least=0
    )
    draw_seed: int = option(0, help="Seed of the sampler.", at_least=0)
    batch: int = option(
        4, help="Cells that an Optuna sampler chooses before it is given results.", at_least=1
    )
    rungs: tuple[int, ...] = option(
        (),
        help="Successive halving: steps at which cells are compared and the worse ones stopped: "
        "250,500,1000.",
        metavar="STEPS",
        parse=_rungs,
    )
    keep: float = option(
        1 / 3, help="Share of the cells that go on after a rung.", above=0, below=1
    )
    metric: str = option(
        "",
        help="The score: loss, best_loss, bits_per_byte, accuracy, exact_match or excess. By "
        "default bits_per_byte where the task has bytes, else loss.",
    )
    baseline: str = option(
        "",
        help="The cell that all others are compared with, by its settings: train.lr=1e-3.",
        metavar="SETTINGS",
    )
    difference: float = option(
        0.01, help="The difference for which the seeds needed to see it are computed.", above=0
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.what:
            raise InputError("nothing to sweep over", hint="glass sweep digits train.lr=1e-3,3e-3")
        one_of("metric", self.metric or "loss", METRICS)
        paths = [factor.path for factor in (*self.factors, *self.designs)]
        paths += [text.partition("=")[0] for text in self.fixed]
        twice = {path for path in paths if paths.count(path) > 1}
        if twice:
            raise InputError(f"{min(twice)} is given twice", hint="all its values behind one =")
        if self.sampler == "grid":
            if self.draws:
                raise InputError("a grid has every combination", hint="sampler random with draws")
            ranges = [f.path for f in (*self.factors, *self.designs) if isinstance(f.values, Range)]
            if ranges:
                raise InputError(
                    f"{ranges[0]} is a range, of which a grid has no end",
                    hint="{--sampler random --draws 20|sampler='random', draws=20}, or a list "
                    "of values",
                )
        elif not self.draws:
            raise InputError(
                f"the sampler {self.sampler} needs a number of cells",
                hint="{--draws 20|draws=20}",
            )
        if self.rungs and (list(self.rungs) != sorted(set(self.rungs)) or self.rungs[0] < 1):
            raise InputError(f"the rungs {self.rungs} do not rise", hint="250,500,1000")
        if self.rungs and self.is_adaptive:
            raise InputError(
                "rungs and an Optuna sampler are two searches", hint="one of them, or random"
            )

    @property
    def is_adaptive(self) -> bool:
        """True if later cells depend on the results of earlier ones."""
        return self.sampler not in ("grid", "random")

    def count(self) -> int:
        """Return the number of cells, without listing them."""
        if self.sampler != "grid":
            return self.draws
        every = (*self.factors, *self.designs)
        return math.prod(len(f.values.values) for f in every if isinstance(f.values, Choices))

    def check_size(self, *, confirmed: bool) -> None:
        """Refuse more runs than anyone means by accident, unless the number is confirmed."""
        cells = self.count()
        runs = cells * self.seeds
        if cells > MOST_CELLS:
            raise InputError(f"{cells:,} cells are too many to list", hint="sample some: draws")
        if runs > MANY_RUNS and not confirmed:
            raise InputError(
                f"{cells:,} cells with {self.seeds} seeds are {runs:,} runs",
                hint="{--yes|yes=True} if that is meant; {--sampler random --draws 50|"
                "sampler='random', draws=50} samples some",
            )

    def cells(self) -> Iterator[dict[str, str]]:
        """Yield the settings of every cell, by path; those of an Optuna sampler are not known."""
        every = (*self.factors, *self.designs)
        match self.sampler:
            case "grid":
                lists = [f.values.values for f in every if isinstance(f.values, Choices)]
                for values in product(*lists):
                    yield dict(zip((f.path for f in every), values, strict=True))
            case "random":
                rng = random.Random(self.draw_seed)
                seen: set[tuple[str, ...]] = set()
                tries = 0
                while len(seen) < self.draws:
                    tries += 1
                    values = tuple(sampled(f.values, rng) for f in every)
                    if values not in seen:
                        seen.add(values)
                        yield dict(zip((f.path for f in every), values, strict=True))
                    elif tries > 100 * self.draws:
                        raise InputError(
                            f"there are only {len(seen)} different cells",
                            hint=f"{{--draws|draws}} {len(seen)}, or {{--sampler grid|a grid}}",
                        )
            case "tpe" | "gp" | "cmaes":
                raise AssertionError("an Optuna sampler is asked, not listed")
            case _ as unreachable:
                assert_never(unreachable)


#: Scores by name: whether smaller is better, and the unit in words.
METRICS: Mapping[str, tuple[bool, str]] = {
    "loss": (True, "nats"),
    "best_loss": (True, "nats"),
    "bits_per_byte": (True, "bits"),
    "accuracy": (False, ""),
    "exact_match": (False, ""),
    "excess": (True, "nats"),
}


def sampled(values: Values, rng: random.Random) -> str:
    """Sample one value as text."""
    match values:
        case Choices():
            return rng.choice(values.values)
        case Range():
            return values.at(rng.random())
        case _ as unreachable:
            assert_never(unreachable)


# --- reading --------------------------------------------------------------------------------------


def split_values(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes: `a,{"x": [1, 2]}` has two values."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def parse_values(path: str, text: str) -> Values:
    """Read `1e-3,3e-3`, `0.0..0.3`, `log:1e-4..1e-2` or `32..128/16`."""
    words = text.removeprefix("log:")
    low, dots, high = words.partition("..")
    if dots:
        end, slash, step = high.partition("/")
        try:
            whole = low.lstrip("-").isdigit() and end.lstrip("-").isdigit()
            each = int(step) if slash else int(whole and not text.startswith("log:"))
            return Range(low=float(low), high=float(end), step=each, log=text.startswith("log:"))
        except ValueError as error:
            if isinstance(error, InputError):
                raise InputError(f"{path}: {error.what}", hint=error.hint) from error
            raise InputError(
                f"{path}={text} is not a range", hint="0.0..0.3, log:1e-4..1e-2 or 32..128/16"
            ) from error
    try:
        return Choices(values=tuple(split_values(text)))
    except InputError as error:
        raise InputError(f"{path}={text}: {error.what}", hint=error.hint) from error


def split_settings(settings: Sequence[str]) -> tuple[tuple[Factor, ...], tuple[str, ...]]:
    """Tell `train.lr=1e-3,3e-3`, which varies, from `train.steps=500`, which all cells share."""
    factors, fixed = [], []
    for text in settings:
        path, equals, values = text.partition("=")
        if not equals or not path:
            raise InputError(f"'{text}' is not a setting", hint="write path=value,value")
        found = parse_values(path, values)
        if isinstance(found, Choices) and len(found.values) == 1:
            fixed.append(text)
        else:
            factors.append(Factor(path=path, values=found))
    return tuple(factors), tuple(fixed)


def design_factors(options: Mapping[str, str]) -> tuple[Factor, ...]:
    """Return the options of a budget, each with one value or several."""
    return tuple(Factor(path=name, values=parse_values(name, v)) for name, v in options.items())


def read_sweep(text: str, *, where: str = "") -> SweepSpec:
    """Read a sweep from TOML: `what`, options, and the tables `vary`, `set` and `design`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the file cannot be read as TOML: {error}", where=where) from error
    tables = {name: data.pop(name, {}) for name in ("vary", "set", "design")}
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise InputError(f"{name} is not a table", where=where, hint=f"[{name}]")
    plain = {name for name in SweepSpec.__dataclass_fields__ if name not in NOT_IN_FILES}
    unknown = sorted(data.keys() - plain)
    if unknown:
        hint = nearest(unknown[0], [*plain, *tables])
        raise InputError(f"a sweep has no '{unknown[0]}'", where=where, hint=hint)
    try:
        given = {path: _texts(path, value) for path, value in _flat(tables["vary"])}
        factors, fixed = split_settings([f"{path}={value}" for path, value in given.items()])
        fixed += tuple(f"{path}={_text(value)}" for path, value in _flat(tables["set"]))
        designs = design_factors({name: _texts(name, v) for name, v in tables["design"].items()})
        if "rungs" in data:
            data["rungs"] = tuple(data["rungs"])
        return SweepSpec(**{"what": "", **data}, factors=factors, fixed=fixed, designs=designs)
    except (TypeError, InputError) as error:
        hint = error.hint if isinstance(error, InputError) else ""
        raise InputError(getattr(error, "what", str(error)), where=where, hint=hint) from error


#: Fields that a file has as tables.
NOT_IN_FILES = ("factors", "fixed", "designs")


def is_sweep(text: str) -> bool:
    """Return True if a TOML file is a sweep, not the config of a run."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return "what" in data or "vary" in data


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted paths: TOML reads `train.lr = [...]` as a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _texts(path: str, value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InputError(f"{path} has no values", hint=f"{path} = [1, 2, 3]")
    return ",".join(_text(one) for one in values)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def with_settings(sweep: SweepSpec, settings: Sequence[str]) -> SweepSpec:
    """Return a sweep with settings changed or added, as they are typed behind a file's name."""
    factors, fixed = split_settings(settings)
    paths = {text.partition("=")[0] for text in settings}
    return replace(
        sweep,
        factors=(*(f for f in sweep.factors if f.path not in paths), *factors),
        fixed=(*(t for t in sweep.fixed if t.partition("=")[0] not in paths), *fixed),
    )
