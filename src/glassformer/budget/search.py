"""A grid over width, rank and depth, a closed form for d_ff: of all designs the best one.

A width with its heads and rank (a `Frame`) and a depth leave one number open, d_ff, and the total
is linear in it: so what the limits allow there is a range, exactly, and the wishes name the few
members worth comparing. `Limits` turns the hard limits into such ranges, in integers. `Ordering`
compares what is left by a key: both wishes nearly met (ratio within a point, expansion within 5 %);
least drift from the wishes, in levels; the most usual shape; multiples that hardware likes; then
exact drift, distance from the total, and the sizes themselves, so that no two designs tie.

A search looks at some widths first, each at the depth that its wishes ask for. What is found there
narrows the grid: a depth that drifts further, or is less usual, is left out unseen. Then it goes
through the rest, every width and every depth that is left, so its answer is the best of all.

`Effort` limits a search. Evaluations are counted rather than timed, so the same budget gives the
same answer on every machine. If the effort is spent before the end, the result is the best so far
and `is_proven` is False. A caller with a deadline passes `stop`; this package reads no clock.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, assert_never

from glassformer.budget.counting import HABITUAL_HEAD, Frame, Widths, heads_of
from glassformer.budget.question import MOST_LAYERS, Budget, Wish
from glassformer.spec.errors import MachineError

Stop = Callable[[], bool]


class SearchStopped(MachineError):
    """The caller's `stop` ended a search before it had a result."""


class Effort:
    """The evaluations left to one search or several; unlimited by default.

    One is about ten microseconds. A share has a limit of its own, and what it spends is also
    charged to the effort it came from.
    """

    __slots__ = ("_parent", "_stop", "left", "spent")

    def __init__(
        self,
        limit: float = math.inf,
        *,
        parent: "Effort | None" = None,
        stop: Stop | None = None,
    ) -> None:
        self.left: float = limit if parent is None else min(limit, parent.left)
        self.spent = 0
        self._parent = parent
        self._stop: Stop | None = stop if parent is None else parent._stop

    def share(self, parts: int) -> "Effort":
        """Return one of `parts` equal shares of what is left."""
        return Effort(self.left if self.left == math.inf else self.left // parts, parent=self)

    def spend(self, evaluations: int) -> None:
        """Charge this effort and its parents; raise `SearchStopped` if the caller says stop."""
        effort: Effort | None = self
        while effort is not None:
            effort.spent += evaluations
            effort.left -= evaluations
            effort = effort._parent
        if self._stop is not None and self._stop():
            raise SearchStopped("the search was stopped before it had a result")

    @property
    def is_spent(self) -> bool:
        """True once no evaluation is left."""
        return self.left <= 0


# --- the order of designs -----------------------------------------------------------------------

#: One unit of drift: a point of the embedding ratio, or 5 % of the expansion.
RATIO_UNIT, GLU_UNIT = 0.01, 0.05
#: The usual d_model / n_layers (256 wide and 8 deep, 128 and 4), and the usual expansion.
ASPECT, EXPANSION = 32.0, 8 / 3
#: Allowance for rounding errors in a bound.
SLACK = 1e-9
#: The lowest level of drift: up to a quarter of a unit.
LEAST = 1
#: A drift that is farther, or infinite, counts as this: what is wished is all but zero.
FARTHEST = 1e300

Key = tuple[float, ...]
#: What is compared before the key.
Goal = Literal["nearest to the wishes", "deepest", "widest"]
#: Index of the level, of the shape and of the exact drift in a key.
LEVEL, SHAPE, DRIFT = 1, 2, 4


def level(units: float) -> int:
    """Return drift as a level: quarters of a unit up to 1, then steps of 10 %.

    Drifts of one level count as equal, so that shape and multiples decide between them.
    """
    if units <= 1.0:
        return max(LEAST, math.ceil(units * 4 - 1e-9))
    return 4 + math.ceil(math.log(min(units, FARTHEST), 1.1) - 1e-9)


def most_drift(level: float) -> float:
    """Return the upper bound of all drifts of this level."""
    return (level / 4 if level <= 4 else float(1.1 ** min(level - 4, 7000))) * (1 + SLACK) + SLACK


class Ordering:
    """The order of the designs of one budget with counts between two bounds."""

    def __init__(self, budget: Budget, *, low: int, high: int) -> None:
        self.budget = budget
        self.low, self.high = low, high
        self.ratio = None if budget.ratio is None else budget.ratio.value
        self.glu = None if budget.expansion is None else budget.expansion.value

    def wished_ffn(self, frame: Frame) -> float:
        """Return the d_ff, not rounded, of the wished expansion, or of the usual one."""
        return (EXPANSION if self.glu is None else self.glu) * frame.d_model

    def key(self, frame: Frame, n_layers: int, d_ff: int) -> Key:
        """Return the key of a design; the smallest is the best."""
        ratio = glu = 0.0
        count = frame.outside + n_layers * (frame.base + frame.column * d_ff)
        if self.ratio is not None:
            ratio = abs(frame.covered / count - self.ratio) / RATIO_UNIT
        if self.glu is not None:
            glu = abs(d_ff / (self.glu * frame.d_model) - 1.0) / GLU_UNIT
        sizes = (frame.d_model, d_ff, frame.d_head)
        away = self.unusual(frame) + abs(math.log2(frame.d_model / n_layers / ASPECT))
        if self.glu is None:
            away += abs(math.log2(d_ff / frame.d_model / EXPANSION))
        return (
            float(max(ratio, glu) > 1.0),
            level(ratio + glu),
            math.ceil(2 * away - 1e-9),
            sum(map(_unfriendly, sizes)),
            round(ratio + glu, 9),
            abs(2 * count - self.low - self.high),
            n_layers,
            *sizes,
            frame.n_heads,
            frame.rank or 0,
        )

    def unusual(self, frame: Frame) -> float:
        """Return how unusual heads are that were left free, in powers of two."""
        away = 0.0
        if self.budget.free_head_width:
            away += abs(math.log2(frame.n_heads * frame.d_head / frame.d_model))
        if self.budget.heads == "any":
            away += abs(math.log2(frame.d_head / HABITUAL_HEAD))
        return away

    def unfriendly(self, frame: Frame) -> int:
        """Return how far width and heads are from the multiples that hardware likes."""
        return _unfriendly(frame.d_model) + _unfriendly(frame.d_head)

    def ratio_drift(self, least: int, most: int, low: int, high: int) -> float:
        """Return the least drift of the ratio of so many covered in counts from `low` to `high`."""
        if self.ratio is None:
            return 0.0
        away = max(least / high - self.ratio, self.ratio - most / low, 0.0)
        return away / RATIO_UNIT * (1 - SLACK)

    def at_least(self, frame: Frame, depths: range, drift: float) -> Key:
        """Return a lower bound of shape, friendliness and drift of the keys at these depths."""
        usual = frame.d_model / ASPECT
        near = (_within(depths, math.floor(usual) + i) for i in (0, 1))
        away = self.unusual(frame) + min(abs(math.log2(usual / n_layers)) for n_layers in near)
        return math.ceil(2 * away - 1e-9 - SLACK), self.unfriendly(frame), round(drift - SLACK, 9)

    def bound(self, frame: Frame, n_layers: int, least: int, most: int) -> Key:
        """Return a lower bound of the first entries of the keys with a d_ff between two."""
        low, high = frame.count(n_layers, least), frame.count(n_layers, most)
        ratio, glu = self.ratio_drift(frame.covered, frame.covered, low, high), 0.0
        away = self.unusual(frame) + abs(math.log2(frame.d_model / n_layers / ASPECT))
        if self.glu is not None:
            wished = self.glu * frame.d_model
            glu = max(least / wished - 1.0, 1.0 - most / wished, 0.0) / GLU_UNIT * (1 - SLACK)
        else:
            usual = EXPANSION * frame.d_model
            away += max(0.0, math.log2(least / usual), -math.log2(most / usual))
        return (
            float(max(ratio, glu) > 1.0),
            level(max(0.0, ratio + glu - SLACK)),
            math.ceil(2 * away - 1e-9 - SLACK),
            self.unfriendly(frame),
            round(ratio + glu - SLACK, 9),
        )


def _unfriendly(size: int) -> int:
    """Return 0 for a multiple of 64, 1 of 8, 2 of 2, and 3 for the rest: what hardware likes."""
    return 3 if size % 2 else 2 if size % 8 else 1 if size % 64 else 0


# --- hard limits --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """What is left at one frame: counts, d_ffs (`most_ffn` None is no limit) and depths."""

    low: int
    high: int
    least_ffn: int
    most_ffn: int | None
    depths: range

    def ffns(self, frame: Frame, n_layers: int, step: int) -> range:
        """Return every d_ff that is allowed at this depth, exactly."""
        fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
        least = max(self.least_ffn, -((fixed - self.low) // slope))
        most = (self.high - fixed) // slope
        if self.most_ffn is not None and self.most_ffn < most:
            most = self.most_ffn
        return range(-(-least // step) * step, most + 1, step)


class Limits:
    """The hard limits of a budget between two counts, and what an earlier design makes of them.

    Shares are numerators and denominators of the decimals as they were written, so that limits are
    exact.
    """

    def __init__(self, budget: Budget, ordering: Ordering, *, low: int, high: int) -> None:
        self.budget, self.ordering = budget, ordering
        self.low, self.high = low, high
        ratio, within = _decimals(budget.ratio)
        self._has_ratio = within is not None
        self._ratio = ratio.as_integer_ratio()
        self._most_ratio = (ratio + (within or 0)).as_integer_ratio()
        self._least_ratio = (ratio - (within or 0)).as_integer_ratio()
        glu, relative = _decimals(budget.expansion)
        self._has_glu = relative is not None
        self._glu = glu.as_integer_ratio()
        self._least_glu = (glu * (1 - (relative or 0))).as_integer_ratio()
        self._most_glu = (glu * (1 + (relative or 0))).as_integer_ratio()
        self._min_aspect = Fraction(repr(budget.min_aspect)).as_integer_ratio()
        self._max_aspect = Fraction(repr(budget.max_aspect or 0.0)).as_integer_ratio()

    def shares(self, best: Key) -> tuple[float, float]:
        """Return the least and the largest ratio that designs as good as `best` may have."""
        wish = self.budget.ratio
        if wish is None:
            return 0.0, math.inf
        away = math.inf if wish.within is None else wish.within
        away = min(away, _reach(best) * RATIO_UNIT) * (1 + SLACK) + SLACK
        return wish.value - away, wish.value + away

    def window(self, frame: Frame, best: Key, *, to: Frame | None = None) -> Window | None:
        """Return what the limits leave for designs as good as `best` at one frame, if any is.

        `to`: or at any frame from one to another, of the same width and a higher rank.
        """
        large = frame if to is None else to
        low, high = self._counts(frame, large)
        least_ffn, most_ffn = self.ffns(frame)
        away = math.inf
        ordering = self.ordering
        if best:
            reach = _reach(best)
            if ordering.ratio is not None:
                least, most = self.shares(best)
                low = max(low, math.floor(frame.covered / most))
                high = high if least <= 0.0 else min(high, math.ceil(large.covered / least))
                if low > high:
                    return None
            ratio = ordering.ratio_drift(frame.covered, large.covered, low, high)
            if ordering.glu is not None:
                wished, reach = ordering.wished_ffn(frame), (reach - ratio) * GLU_UNIT + SLACK
                least_ffn = max(least_ffn, math.floor(wished * (1.0 - reach)))
                widest = math.ceil(wished * (1.0 + min(reach, FARTHEST)))
                most_ffn = widest if most_ffn is None else min(most_ffn, widest)
            # Where no level can be lower, no shape may be rarer.
            is_least = level(max(0.0, ratio - SLACK)) >= best[LEVEL]
            if is_least and (ratio > 1.0 or not best[0]):
                is_less_friendly = ordering.unfriendly(frame) > best[SHAPE + 1]
                away = (best[SHAPE] - is_less_friendly) / 2 - ordering.unusual(frame) + SLACK
        # A count is what is outside the blocks, and a multiple of what divides block and column.
        shared = math.gcd(frame.base, frame.column * self.budget.ffn_step)
        if to is None and high - (high - frame.outside) % shared < low:
            return None
        depths = self._depths(frame, large, low, high, least_ffn, most_ffn)
        if depths and away < math.inf:
            usual = frame.d_model / ASPECT
            least, most = math.ceil(usual * 2.0**-away), math.floor(usual * 2.0**away)
            depths = range(max(depths[0], least), min(depths[-1], most) + 1)
            if depths and ordering.at_least(frame, depths, ratio) > best[SHAPE : DRIFT + 1]:
                return None
        return Window(low, high, least_ffn, most_ffn, depths) if depths else None

    def _counts(self, frame: Frame, large: Frame) -> tuple[int, int]:
        """Return the counts with which some of the frames keep the limit of the ratio."""
        low, high = self.low, self.high
        if self.budget.exact_ratio:  # within half a step of what is covered
            over, under = self._ratio
            low = max(low, _ceil_div((2 * frame.covered - large.step) * under, 2 * over))
            high = min(high, (2 * large.covered + large.step) * under // (2 * over))
        elif self._has_ratio:
            over, under = self._most_ratio
            low = max(low, _ceil_div(frame.covered * under, over))
            over, under = self._least_ratio
            if over > 0:
                high = min(high, large.covered * under // over)
        return low, high

    def ffns(self, frame: Frame) -> tuple[int, int | None]:
        """Return the least and the most d_ff that the expansion's limit leaves."""
        step = self.budget.ffn_step
        if self.budget.exact_expansion:  # within half a step of d_ff
            over, under = self._glu
            twice = 2 * over * frame.d_model
            least = _ceil_div(twice - step * under, 2 * under)
            return max(step, least), (twice + step * under) // (2 * under)
        if not self._has_glu:
            return step, None
        over, under = self._least_glu
        least = _ceil_div(over * frame.d_model, under)
        over, under = self._most_glu
        return max(step, least), over * frame.d_model // under

    def _depths(
        self,
        frame: Frame,
        large: Frame,
        low: int,
        high: int,
        least_ffn: int,
        most_ffn: int | None,
    ) -> range:
        """Return the depths that these counts and d_ffs leave, and the limits of depth."""
        budget, least, step = self.budget, self.budget.min_layers, self.budget.ffn_step
        if low > high:
            return range(0)
        if most_ffn is not None:
            if most_ffn // step * step < least_ffn:
                return range(0)
            layer = frame.base + frame.column * most_ffn
            least = max(least, _ceil_div(low - large.outside, layer))
        most = (high - frame.outside) // (frame.base + frame.column * least_ffn)
        most = min(most, budget.max_layers or MOST_LAYERS)
        over, under = self._min_aspect
        if over:
            most = min(most, frame.d_model * under // over)
        over, under = self._max_aspect
        if over:
            least = max(least, _ceil_div(frame.d_model * under, over))
        return range(least, most + 1)


def _reach(best: Key) -> float:
    """Return the most that a design as good as `best` may drift, in either wish."""
    return math.inf if not best else max(most_drift(best[LEVEL]), 2.0 if best[0] else 0.0)


def _decimals(wish: Wish | None) -> tuple[Fraction, Fraction | None]:
    """Return value and limit of a wish as the decimals that were written."""
    if wish is None:
        return Fraction(0), None
    return Fraction(repr(wish.value)), None if wish.within is None else Fraction(repr(wish.within))


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _first(goal: Goal, n_layers: int, d_model: int) -> float:
    match goal:
        case "nearest to the wishes":
            return 0.0
        case "deepest":
            return -n_layers
        case "widest":
            return -d_model
        case _ as unreachable:
            assert_never(unreachable)


# --- the search ---------------------------------------------------------------------------------

#: So many widths are looked at first, then so many around the best of them, and so on.
SAMPLED = 48
#: So many depths are one evaluation.
DEPTHS = 4
#: Up to this many values of d_ff are all compared; of more, those where the key turns.
FEW = 64
#: Multiples of d_ff that are tried next to such a turn.
FRIENDLY = (1, 8, 64)

Choices = Callable[[Frame, int, range], Iterator[int]]


@dataclass(frozen=True, slots=True)
class Found:
    """A design as the search sees it: a frame with depth and d_ff, and its key."""

    key: Key
    frame: Frame
    n_layers: int
    d_ff: int

    @property
    def count(self) -> int:
        """The number of parameters."""
        return self.frame.count(self.n_layers, self.d_ff)

    @property
    def drift(self) -> float:
        """The drift from both wishes, in units of the ordering."""
        return self.key[DRIFT]


class Search:
    """A search through the designs of a budget, between its own bounds or other counts.

    After a search that is not proven, `least` is a lower bound of the drift of all designs.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        low: int | None = None,
        high: int | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.budget = budget
        least, most = budget.bounds
        self.low = least if low is None else low
        self.high = most if high is None else high
        self.widths = Widths(budget)
        self.ordering = Ordering(budget, low=self.low, high=self.high)
        self.effort = Effort() if effort is None else effort
        self.is_proven = True
        self.least = 0.0
        self._begun = self.effort.spent

    @property
    def evaluations(self) -> int:
        """The number of evaluations so far."""
        return self.effort.spent - self._begun

    def _limits(self) -> Limits:
        return Limits(self.budget, self.ordering, low=self.low, high=self.high)

    # --- the grid -----------------------------------------------------------------------------

    def _widths(self, limits: Limits, best: Key, *, min_layers: int = 1) -> range:
        """Return the widths at which a design as good as `best` is possible, at so many layers."""
        budget, free, widths = self.budget, self.budget.rank == "any", self.widths
        aspect = budget.max_aspect or math.inf
        least, most = limits.shares(best)
        if self.ordering.ratio is not None and budget.exact_ratio:
            least = most = self.ordering.ratio  # half a step away, at most: the next width
        next_width = 2 * widths.step if budget.exact_ratio else 0

        def fits(d_model: int) -> bool:
            """Return True if the smallest model of this width has few parameters enough."""
            frame, high = widths.smallest(d_model), limits.high
            layers = max(budget.min_layers, min_layers, math.floor(d_model / aspect))
            if least > 0.0 and not free:  # what is covered grows less than a layer does
                covered = widths.covered(d_model + next_width, frame.rank)
                high = min(high, math.ceil(covered / least))
            return frame.count(layers, limits.ffns(frame)[0]) <= high

        def covered(d_model: int) -> int:  # the most that any rank covers
            return widths.covered(d_model, d_model if free else widths.fixed_rank)

        found = widths.up_to(fits)
        if best and found and level(self._least_drift(found)) >= best[LEVEL]:
            # No drift is less, so no shape may be rarer.
            aspect = min(aspect, ASPECT * 2.0 ** (best[SHAPE] / 2 + SLACK))
            found = widths.up_to(fits)
        begin = bisect.bisect_left(found, least * limits.low, key=covered)
        end = len(found)
        if not free and most < math.inf:
            end = bisect.bisect_right(found, most * limits.high, key=covered)
        return found[max(0, begin - 1) : end + 1]

    def _samples(self, widths: range, nearest: Callable[[], Found | None]) -> Iterator[int]:
        """Yield widths, evenly on a logarithmic scale, then some around the best, and so on."""
        while True:
            growth = max(1.0, len(widths) ** (1 / SAMPLED))
            chosen = sorted({round(growth**i) - 1 for i in range(SAMPLED + 1)})
            if len(widths) <= SAMPLED:
                chosen = list(range(len(widths)))
            yield from (widths[i] for i in chosen)
            found = nearest()
            if len(widths) <= SAMPLED or found is None or found.frame.d_model not in widths:
                return
            at = bisect.bisect_left(chosen, widths.index(found.frame.d_model))
            widths = widths[chosen[max(0, at - 1)] : chosen[min(at + 1, len(chosen) - 1)] + 1]

    def _frames(
        self, widths: Iterable[int], limits: Limits, best: Callable[[], Key]
    ) -> Iterator[Frame]:
        """Yield every frame of these widths that may have a design as good as the best so far."""
        for d_model in widths:
            for heads in heads_of(self.budget, d_model):
                least, most = self.widths.ranks(d_model)
                small = self.widths.frame(d_model, heads, least)
                large = small if least == most else self.widths.frame(d_model, heads, most)
                yield from self._between(small, large, limits, best)
                if not self.is_proven:
                    return

    def _between(
        self, small: Frame, large: Frame, limits: Limits, best: Callable[[], Key]
    ) -> Iterator[Frame]:
        """Yield the frames of all ranks between two, those nearer to the wish first."""
        if self.effort.is_spent:
            self.is_proven = False
            return
        self.effort.spend(1)
        if small is large:
            yield small
        elif limits.window(small, best(), to=large) is not None:
            assert small.rank is not None and large.rank is not None
            middle = (small.rank + large.rank) // 2
            below = small if middle == small.rank else self._with_rank(small, middle)
            above = large if middle + 1 == large.rank else self._with_rank(small, middle + 1)
            wished = (self.ordering.ratio or 0.0) * (self.low + self.high) / 2
            halves = [(small, below), (above, large)]
            for half in halves if below.covered >= wished else halves[::-1]:
                yield from self._between(*half, limits, best)

    def _with_rank(self, frame: Frame, rank: int) -> Frame:
        return self.widths.frame(frame.d_model, (frame.n_heads, frame.d_head), rank)

    def _each(self, depths: Iterable[int]) -> Iterator[int]:
        """Yield depths while there is effort left."""
        for i, n_layers in enumerate(depths):
            if not i % DEPTHS:
                if i and self.effort.is_spent:
                    self.is_proven = False
                    return
                self.effort.spend(1)
            yield n_layers

    # --- the best design --------------------------------------------------------------------------

    def best(self, *, than: Found | None = None) -> Found | None:
        """Return the design with the least key, or `than` if none has a smaller one."""
        return self._least("nearest to the wishes", self._choices, found=than)

    def deepest(self) -> Found | None:
        """Return the design with the most layers, then the least key."""
        return self._least("deepest", self._few)

    def widest(self) -> Found | None:
        """Return the design with the largest d_model, then the least key."""
        return self._least("widest", self._few)

    def _least(self, goal: Goal, choices: Choices, *, found: Found | None = None) -> Found | None:
        limits, step = self._limits(), self.budget.ffn_step
        best: Key = (math.inf,) if found is None else (0.0, *found.key)

        def narrowing() -> Key:
            return best[1:] if best[0] == 0.0 else ()

        def compare(frame: Frame, window: Window, depths: Iterable[int]) -> None:
            nonlocal best, found
            for n_layers in self._each(depths):
                first = _first(goal, n_layers, frame.d_model)
                if first > best[0]:
                    break
                d_ffs = window.ffns(frame, n_layers, step)
                if not d_ffs:
                    continue
                if (first, *self.ordering.bound(frame, n_layers, d_ffs[0], d_ffs[-1])) > best:
                    continue
                for d_ff in choices(frame, n_layers, d_ffs):
                    key = (first, *self.ordering.key(frame, n_layers, d_ff))
                    if key < best:
                        best, found = key, Found(key[1:], frame, n_layers, d_ff)

        widths = self._widths(limits, narrowing())
        for d_model in self._samples(widths, lambda: found):
            if self.effort.is_spent:
                break
            for heads in heads_of(self.budget, d_model):
                self.effort.spend(1)
                frame = self.widths.frame(d_model, heads, self._wished_rank(d_model))
                window = limits.window(frame, ())
                if window is not None:
                    compare(frame, window, self._wished_depths(frame, window))
        min_layers = max(1, -int(max(best[0], -FARTHEST))) if goal == "deepest" and found else 1
        rest: Sequence[int] = self._widths(limits, narrowing(), min_layers=min_layers)
        if goal == "widest":
            rest = rest[::-1]
        elif found is not None:  # what is most like it first
            width = found.frame.d_model
            rest = sorted(rest, key=lambda d_model: abs(width - d_model))
        for frame in self._frames(rest, limits, narrowing):
            if goal == "widest" and -frame.d_model > best[0]:
                break
            near = limits.window(frame, narrowing())
            window = None if near is None else limits.window(frame, ())
            if near is not None and window is not None:  # every d_ff, at depths that may be as good
                compare(frame, window, near.depths[::-1])
        if not self.is_proven:
            self.least = self._least_drift(widths)
        return found

    def _least_drift(self, widths: range) -> float:
        """Return a lower bound of the drift of every design of these widths."""
        fixed, free = self.widths.fixed_rank, self.budget.rank == "any"
        least = self.widths.covered(widths[0], 1 if free else fixed)
        most = self.widths.covered(widths[-1], widths[-1] if free else fixed)
        wish = self.ordering.ratio
        if wish is None:
            return 0.0
        away = max(0.0, least / self.high - wish, wish - most / self.low)
        return away / RATIO_UNIT * (1 - SLACK)

    def _wished_rank(self, d_model: int) -> int | None:
        """Return the rank whose ratio is the wished one, as nearly as the width allows."""
        if self.budget.rank != "any":
            return self.widths.fixed_rank
        one, two = self.widths.covered(d_model, 1), self.widths.covered(d_model, 2)
        wished = (self.ordering.ratio or 0.0) * (self.low + self.high) / 2
        return min(d_model, max(1, 1 + round((wished - one) / (two - one))))

    def _wished_depths(self, frame: Frame, window: Window) -> Iterator[int]:
        """Yield the depths around those of the wishes, and of a usual shape."""
        depths = window.depths
        each = frame.base + frame.column * self.ordering.wished_ffn(frame)
        wished = ((self.low + self.high) / 2 - frame.outside) / each
        seen = set()
        for near in (wished, frame.d_model / ASPECT):
            for n_layers in (math.floor(near), math.floor(near) + 1):
                seen.add(min(max(n_layers, depths[0]), depths[-1]))
        yield from sorted(seen, reverse=True)

    def _choices(self, frame: Frame, n_layers: int, d_ffs: range) -> Iterator[int]:
        """Yield every d_ff if they are few, otherwise those where the key turns."""
        yield from d_ffs if len(d_ffs) <= FEW else self._turns(frame, n_layers, d_ffs, FRIENDLY)

    def _few(self, frame: Frame, n_layers: int, d_ffs: range) -> Iterator[int]:
        return self._turns(frame, n_layers, d_ffs, (1,))

    def _turns(
        self, frame: Frame, n_layers: int, d_ffs: range, friendly: tuple[int, ...]
    ) -> Iterator[int]:
        """Yield the ends, the d_ffs that meet a wish or the total, and multiples nearby."""
        fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
        turns = [((self.low + self.high) / 2 - fixed) / slope, float(d_ffs[0]), float(d_ffs[-1])]
        turns.append(self.ordering.wished_ffn(frame))
        if self.ordering.ratio is not None:
            turns.append((frame.covered / self.ordering.ratio - fixed) / slope)
        seen = set()
        for turn in turns:
            for multiple in friendly:
                unit = math.lcm(multiple, d_ffs.step)
                for chosen in (math.floor(turn / unit) * unit, math.ceil(turn / unit) * unit):
                    if chosen in d_ffs and chosen not in seen:
                        seen.add(chosen)
                        yield chosen

    # --- any design, and the nearest count --------------------------------------------------------

    def is_feasible(self) -> bool:
        """Return True if some design keeps every limit."""
        return self.first() is not None

    def first(self) -> Found | None:
        """Return any design that keeps every limit."""
        for frame, depths, d_ffs in self._runs(self._limits()):
            near = self._few(frame, depths[0], d_ffs)
            key, d_ff = min((self.ordering.key(frame, depths[0], f), f) for f in near)
            return Found(key, frame, depths[0], d_ff)
        return None

    def closest(self, target: int) -> Found | None:
        """Return the design whose count is nearest to `target`, and among equals the best one.

        `nearest` finds the least distance `away`. A design at this distance has one of two counts,
        target - away or target + away, so a search for the best at each of them, with the same
        ordering, finds the best of all. Neither can return nothing that `nearest` has found:
        `best(than=found)` keeps `found` unless it finds a smaller key.
        """
        found = self.nearest(target)
        if found is None or not self.is_proven:
            return found
        away = abs(found.count - target)
        for count in sorted({target - away, target + away}):
            if self.low <= count <= self.high:
                at_count = Search(self.budget, low=count, high=count, effort=self.effort.share(2))
                at_count.ordering = self.ordering
                found = at_count.best(than=found)
                self.is_proven &= at_count.is_proven
        return found

    def nearest(self, target: int) -> Found | None:
        """Return one design whose count is nearest to `target`.

        Once a design is found at distance `away`, the limits are narrowed to counts strictly
        nearer, so when the grid is at its end no count is nearer.
        """
        limits, found = self._limits(), None
        for frame, depths, d_ffs in self._runs(limits):
            if len(depths) == 1:
                fixed, slope = frame.outside + depths[0] * frame.base, depths[0] * frame.column
                below = (target - fixed) // slope // d_ffs.step * d_ffs.step
                near = [(depths[0], below), (depths[0], below + d_ffs.step)]
            else:
                below = (target - frame.outside) // (frame.base + frame.column * d_ffs[0])
                near = [(below, d_ffs[0]), (below + 1, d_ffs[0])]
            pairs = [(_within(depths, n), _within(d_ffs, f)) for n, f in near]
            away, n_layers, d_ff = min((abs(frame.count(n, f) - target), n, f) for n, f in pairs)
            found = Found(self.ordering.key(frame, n_layers, d_ff), frame, n_layers, d_ff)
            if not away:
                break
            limits.low = max(self.low, target - away + 1)
            limits.high = min(self.high, target + away - 1)
        return found

    def _runs(self, limits: Limits) -> Iterator[tuple[Frame, range, range]]:
        """Yield (frame, depths, d_ffs), one of both a single value: all that the limits allow.

        Depth and d_ff are linked by the count, so few layers are solved for d_ff, and the few
        d_ffs that more layers have for depth. The caller may narrow the limits meanwhile.
        """
        step = self.budget.ffn_step
        for frame in self._frames(self._left(limits), limits, tuple):
            window = limits.window(frame, ())
            if window is None:
                continue
            depths, base, column = window.depths, frame.base, frame.column
            few = max(depths[0], math.isqrt((window.high - frame.outside) // (column * step)) + 1)
            for n_layers in self._each(depths[: few - depths[0] + 1]):
                d_ffs = window.ffns(frame, n_layers, step)
                if d_ffs:
                    yield frame, range(n_layers, n_layers + 1), d_ffs
                    window = limits.window(frame, ())
                    if window is None:
                        break
            if window is None or depths[-1] <= few:
                continue
            least = _ceil_div(window.least_ffn, step) * step
            most = ((window.high - frame.outside) // (few + 1) - base) // column
            most = most if window.most_ffn is None else min(most, window.most_ffn)
            for d_ff in self._each(range(least, most + 1, step)):
                layer = base + column * d_ff
                shallow = max(few + 1, _ceil_div(window.low - frame.outside, layer))
                deep = min(depths[-1], (window.high - frame.outside) // layer)
                if shallow <= deep:
                    yield frame, range(shallow, deep + 1), range(d_ff, d_ff + 1)
                    window = limits.window(frame, ())
                    if window is None:
                        break

    def _left(self, limits: Limits) -> Iterator[int]:
        """Yield the widths that are left, while the caller narrows the limits."""
        high, widths = limits.high, self._widths(limits, ())
        most = widths[-1] if widths else 0
        for d_model in widths:
            if limits.high < high:
                high, widths = limits.high, self._widths(limits, ())
                most = widths[-1] if widths else 0
            if d_model > most:
                break
            yield d_model


def _within(values: range, value: int) -> int:
    return min(max(value, values[0]), values[-1])
