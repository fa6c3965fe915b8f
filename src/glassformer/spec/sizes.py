"""Depth and d_ff of one frame: every pair whose count is within the limits, or nearest to a target.

A count is what stands outside and depth times layer. So the pairs are found along the depths, along
the values of d_ff, or, where the counts are few, from the divisors of each: whichever are fewer.
"""

import math
from collections.abc import Iterator

from glassformer.spec.boxes import Box
from glassformer.spec.divisors import divisors_between
from glassformer.spec.limits import ffns

#: Finding the divisors of one count takes as long as so many depths.
DIVIDING = 400
#: So many depths, or values of d_ff, take as long as one box; so many with the nearest count.
GLANCES, NEAREST = 64, 8


def is_tight(box: Box) -> bool:
    """Whether its one frame has at most one d_ff at each depth, and one depth with each d_ff."""
    frame, room = box.small, box.room
    step = min(frame.column * box.shallow, frame.base + frame.column * room.narrow)
    return box.is_frame and room.high - room.low < step


def looks(box: Box) -> int:
    """How many looks `sizes` takes at most."""
    fewer = min(box.deep - box.shallow + 1, len(box.d_ffs))
    if is_tight(box):
        fewer = min(fewer, DIVIDING * len(_shared_counts(box)))
    return 1 + fewer // GLANCES


def nearest_looks(box: Box) -> int:
    """How many looks `nearest` takes at most."""
    if is_tight(box):  # most depths have no count at all
        return looks(box)
    return 1 + min(box.deep - box.shallow + 1, len(box.d_ffs)) // NEAREST


def sizes(box: Box) -> Iterator[tuple[int, range]]:
    """Every depth of the one frame of a box, and each d_ff that it may have there."""
    if not is_tight(box):
        yield from _by_depth(box)
        return
    depths, d_ffs = box.deep - box.shallow + 1, len(box.d_ffs)
    if DIVIDING * len(_shared_counts(box)) < min(depths, d_ffs):
        yield from _by_divisor(box)
    elif d_ffs >= depths:
        yield from _by_depth(box)
    else:
        yield from _by_ffn(box)


def _by_depth(box: Box) -> Iterator[tuple[int, range]]:
    frame, room = box.small, box.room
    outside, base, column, low, high = frame.outside, frame.base, frame.column, room.low, room.high
    for n_layers in range(box.shallow, box.deep + 1):
        fixed, slope = outside + n_layers * base, n_layers * column * room.multiple
        if high - (high - fixed) % slope >= low:
            at_depth = ffns(frame, room, n_layers)
            if at_depth:
                yield n_layers, at_depth


def _by_ffn(box: Box) -> Iterator[tuple[int, range]]:
    frame, room = box.small, box.room
    outside, base, column, low, high = frame.outside, frame.base, frame.column, room.low, room.high
    for d_ff in box.d_ffs:
        layer = base + column * d_ff
        n_layers = (high - outside) // layer
        if outside + n_layers * layer >= low and box.shallow <= n_layers <= box.deep:
            yield n_layers, range(d_ff, d_ff + 1)


def shared(box: Box) -> int:
    """What divides every layer of its one frame."""
    return math.gcd(box.small.base, box.small.column * box.room.multiple)


def _shared_counts(box: Box) -> range:
    """All layers together, in units of what each of them is a multiple of."""
    unit, outside = shared(box), box.small.outside
    least = max(1, -((outside - box.room.low) // unit))
    return range(least, (box.room.high - outside) // unit + 1)


def _by_divisor(box: Box) -> Iterator[tuple[int, range]]:
    frame, d_ffs, unit = box.small, box.d_ffs, shared(box)
    for count in _shared_counts(box):
        for n_layers in divisors_between(count, box.shallow, box.deep):
            d_ff, rest = divmod(count // n_layers * unit - frame.base, frame.column)
            if rest == 0 and d_ff in d_ffs:
                yield n_layers, range(d_ff, d_ff + 1)


def nearest(box: Box, target: int) -> Iterator[tuple[int, int]]:
    """Depth and d_ff of one frame's counts around the target: for each depth, or each d_ff."""
    frame, room, d_ffs = box.small, box.room, box.d_ffs
    if len(d_ffs) > box.deep - box.shallow:
        for n_layers, at_depth in _by_depth(box):
            fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
            below = (target - fixed) // slope // room.multiple * room.multiple
            near = {min(max(f, at_depth[0]), at_depth[-1]) for f in (below, below + room.multiple)}
            yield from ((n_layers, d_ff) for d_ff in near)
        return
    for d_ff in d_ffs:
        layer = frame.base + frame.column * d_ff
        least = max(box.shallow, -(-(room.low - frame.outside) // layer))
        most = min(box.deep, (room.high - frame.outside) // layer)
        if least <= most:
            below = (target - frame.outside) // layer
            near = {min(max(n, least), most) for n in (below, below + 1)}
            yield from ((n_layers, d_ff) for n_layers in near)
