"""The search: every design that keeps the hard limits and could be best, and the best of them.

Hard are the count, the limits of ratio and expansion, depth and aspect; `preference` orders what is
left. Widths come with the least possible drift first and depths from the wished one outwards, so
that a search ends when nothing farther on can be better.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from glassformer.spec.budget import HEAD_SLACK, Budget, Exact, Target, Wish
from glassformer.spec.counting import Frame
from glassformer.spec.patience import Clock
from glassformer.spec.preference import ASPECT, LEAST, RATIO_UNIT, Key, Preference
from glassformer.spec.widths import Widths

#: So many values of d_ff are all looked at; of more, those where something turns.
FEW = 64
#: How the key of a design without drift begins.
NO_DRIFT = (0.0, LEAST)

#: Something of a design that should be small.
Measure = Callable[[Frame, int, int], float]


@dataclass(frozen=True, slots=True)
class Found:
    """A frame with its depth and d_ff, and the key by which it was preferred."""

    key: Key
    frame: Frame
    n_layers: int
    d_ff: int


@dataclass(frozen=True, slots=True)
class Room:
    """What the limits leave a frame: its counts, and its d_ff (None: as wide as it goes)."""

    low: int
    high: int
    narrow: int
    wide: int | None


class Search:
    """One budget between two counts, which are its own unless others are given."""

    def __init__(self, budget: Budget, *, low: int | None = None, high: int | None = None) -> None:
        self.budget = budget
        least, most = budget.bounds
        self.low = least if low is None else low
        self.high = most if high is None else high
        self.widths = Widths(budget)
        self._clock = Clock()
        self.preference = Preference(budget, low=self.low, high=self.high)
        ratio, within = _decimals(budget.embedding_ratio)
        self._ratio_within = within
        self._ratio = _parts(ratio)
        self._most_ratio = _parts(ratio + (within or 0))
        self._least_ratio = _parts(ratio - (within or 0))
        glu, relative = _decimals(budget.glu_expansion)
        self._glu_within = relative
        self._glu = _parts(glu)
        self._least_glu = _parts(glu * (1 - (relative or 0)))
        self._most_glu = _parts(glu * (1 + (relative or 0)))
        self._min_aspect = _parts(Fraction(repr(budget.min_aspect)))
        self._max_aspect = _parts(Fraction(repr(budget.max_aspect or 0.0)))

    # --- hard limits ------------------------------------------------------------------------------

    def room(self, frame: Frame) -> Room:
        """What count, ratio and expansion may be: the limits that do not ask for the depth."""
        low, high, multiple = self.low, self.high, self.budget.ffn_multiple
        d_model, covered = frame.d_model, frame.covered
        if isinstance(self.budget.embedding_ratio, Exact):  # within half a step
            over, under = self._ratio
            low = max(low, _up((2 * covered - frame.step) * under, 2 * over))
            high = min(high, (2 * covered + frame.step) * under // (2 * over))
        elif self._ratio_within is not None:
            over, under = self._most_ratio
            low = max(low, _up(covered * under, over))
            over, under = self._least_ratio
            if over > 0:
                high = min(high, covered * under // over)
        narrow, wide = multiple, None
        if isinstance(self.budget.glu_expansion, Exact):
            over, under = self._glu
            narrow = max(narrow, _up(2 * over * d_model - multiple * under, 2 * under))
            wide = (2 * over * d_model + multiple * under) // (2 * under)
        elif self._glu_within is not None:
            narrow = max(narrow, _up(self._least_glu[0] * d_model, self._least_glu[1]))
            wide = self._most_glu[0] * d_model // self._most_glu[1]
        return Room(low, high, narrow, wide)

    def depths_of(self, frame: Frame, room: Room) -> range:
        """The depths at which this frame may keep every limit."""
        least = self.budget.min_layers
        if room.wide is not None:
            if room.wide < room.narrow:
                return range(0)
            least = max(least, _up(room.low - frame.outside, frame.base + frame.column * room.wide))
        most = (room.high - frame.outside) // (frame.base + frame.column * room.narrow)
        if self.budget.max_layers is not None:
            most = min(most, self.budget.max_layers)
        over, under = self._min_aspect
        if over:
            most = min(most, frame.d_model * under // over)
        over, under = self._max_aspect
        if over:
            least = max(least, _up(frame.d_model * under, over))
        return range(least, most + 1)

    def ffns_of(self, frame: Frame, room: Room, n_layers: int) -> range:
        """Every d_ff with which this frame and depth keep every limit."""
        self._clock.check()
        fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
        multiple = self.budget.ffn_multiple
        least = max(room.narrow, _up(room.low - fixed, slope))
        most = (room.high - fixed) // slope
        if room.wide is not None:
            most = min(most, room.wide)
        return range(_up(least, multiple) * multiple, most + 1, multiple)

    # --- frames and sizes -------------------------------------------------------------------------

    @property
    def ordered(self) -> bool:
        """Whether the width decides the ratio."""
        return self.preference.ratio is not None and self.budget.rank != "any"

    def by_width(self) -> Iterator[tuple[float, Iterator[tuple[float, Frame]]]]:
        """How unusual a width is, and its frames with the least ratio drift that they can have.

        Where the width decides the ratio, the least drift comes first and nothing is unusual; else
        the least unusual width. Ranks within a width come with the least drift first.
        """
        drift, widths = self.preference.least_ratio_drift, self.widths.within(self.high)
        if self.ordered:
            order = [(0.0, d) for d in sorted(widths, key=lambda d: drift(self.widths.covered(d)))]
        else:
            order = sorted((self._unusual(d), d) for d in widths)
        for unusual, d_model in order:
            frames = self.widths.frames(d_model, drift)
            yield unusual, ((drift(frame.covered), frame) for frame in frames)

    def _unusual(self, d_model: int) -> float:
        """How far, in powers of two, from the habitual aspect at the wished depth."""
        self._clock.check()
        away = math.inf
        frames = self.widths.frames(d_model, self.preference.least_ratio_drift)
        for count, frame in enumerate(frames):
            depth = max(1.0, self.preference.wished_depth(frame))
            away = min(away, abs(math.log2(d_model / depth / ASPECT)))
            if count >= 2 * HEAD_SLACK:
                break
        return away

    def frames(self) -> Iterator[Frame]:
        """Every frame that can keep the ratio's limit."""
        for _, frames in self.by_width():
            for drift, frame in frames:
                if self._leaves(drift * RATIO_UNIT, frame):
                    if self.ordered:
                        return
                    break
                yield frame

    def _leaves(self, drift: float, frame: Frame) -> bool:
        if isinstance(self.budget.embedding_ratio, Exact):
            return drift * self.low > frame.step / 2 + 1
        return self._ratio_within is not None and drift > self._ratio_within + 1e-9

    def _choices(self, frame: Frame, n_layers: int, d_ffs: range) -> Iterator[int]:
        """All of them if they are few, else the places where a preference turns."""
        friendly = (1, 8, 64)
        yield from d_ffs if len(d_ffs) <= FEW else self._turns(frame, n_layers, d_ffs, friendly)

    def _turns(
        self, frame: Frame, n_layers: int, d_ffs: range, friendly: tuple[int, ...]
    ) -> Iterator[int]:
        """Ends, the wishes, the total; and the friendly values around them."""
        if not d_ffs:
            return
        fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
        turns = [((self.low + self.high) / 2 - fixed) / slope, float(d_ffs[0]), float(d_ffs[-1])]
        turns.append(self.preference.wished_ffn(frame))
        if self.preference.ratio is not None:
            turns.append((frame.covered / self.preference.ratio - fixed) / slope)
        seen = set()
        for turn in turns:
            for multiple in friendly:
                unit = math.lcm(multiple, d_ffs.step)
                for chosen in (math.floor(turn / unit) * unit, math.ceil(turn / unit) * unit):
                    if chosen in d_ffs and chosen not in seen:
                        seen.add(chosen)
                        yield chosen

    # --- searching --------------------------------------------------------------------------------

    def best(self) -> Found | None:
        """The least key, or nothing where no design keeps the limits."""
        found: Found | None = None
        for unusual, frames in self.by_width():
            # With the least drift, a depth is the wished one but for a few per cent: no wider or
            # narrower model can then be less unusual.
            if found is not None and (*NO_DRIFT, 2 * unusual - 1) > found.key:
                return found
            for ratio, frame in frames:
                if found is not None and self.preference.bound_of_ratio(ratio) > found.key:
                    if self.ordered:
                        return found
                    break
                if self._leaves(ratio * RATIO_UNIT, frame):
                    if self.ordered:
                        return found
                    break
                found = self._best_of(frame, ratio, found)
        return found

    def _best_of(self, frame: Frame, ratio: float, found: Found | None) -> Found | None:
        """Depths from the wished one, both ways, until none can be better."""
        prefer, room = self.preference, self.room(frame)
        depths = self.depths_of(frame, room)
        if not depths:
            return found
        # Up to the wished depth d_ff is wider than wished, beyond it narrower: each way, the drift
        # of the expansion only grows.
        middle = math.floor(prefer.wished_depth(frame))
        shallower = range(min(middle, depths[-1]), depths[0] - 1, -1)
        deeper = range(max(middle + 1, depths[0]), depths[-1] + 1)
        for way in (shallower, deeper):
            for n_layers in way:
                if found is not None and prefer.hopeless(frame, n_layers, ratio, found.key):
                    break
                d_ffs = self.ffns_of(frame, room, n_layers)
                if not d_ffs:
                    continue
                if found is not None and prefer.bound(frame, n_layers, d_ffs, ratio) > found.key:
                    continue
                for d_ff in self._choices(frame, n_layers, d_ffs):
                    key = prefer.key(frame, n_layers, d_ff)
                    if found is None or key < found.key:
                        found = Found(key, frame, n_layers, d_ff)
        return found

    def preferred(self, measures: Mapping[str, Measure]) -> dict[str, Found]:
        """The design within the limits that is best by each measure, then by the usual key."""
        found: dict[str, Found] = {}
        for frame in self.frames():
            room = self.room(frame)
            for n_layers in self.depths_of(frame, room):
                d_ffs = self.ffns_of(frame, room, n_layers)
                for d_ff in self._turns(frame, n_layers, d_ffs, (1,)):
                    for name, measure in measures.items():
                        first = measure(frame, n_layers, d_ff)
                        if name in found and first > found[name].key[0]:
                            continue
                        key = (first, *self.preference.key(frame, n_layers, d_ff))
                        if name not in found or key < found[name].key:
                            found[name] = Found(key, frame, n_layers, d_ff)
        return found

    def feasible(self) -> bool:
        """Whether any design keeps every limit."""
        for frame in self.frames():
            room = self.room(frame)
            if any(self.ffns_of(frame, room, n) for n in self.depths_of(frame, room)):
                return True
        return False


def _decimals(wish: Wish) -> tuple[Fraction, Fraction | None]:
    """The value and its limit as the decimals that were written: bounds are exact."""
    within = wish.within if isinstance(wish, Target) else None
    value = wish.value if isinstance(wish, (Exact, Target)) else 0.0
    return Fraction(repr(value)), None if within is None else Fraction(repr(within))


def _parts(share: Fraction) -> tuple[int, int]:
    """Numerator and denominator: whole numbers are much faster to divide than fractions."""
    return share.numerator, share.denominator


def _up(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)
