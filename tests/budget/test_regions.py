"""Depths and d_ffs of one frame, against trying every pair."""

import random

from glassformer.budget.counting import Frame
from glassformer.budget.regions import Allowed, Region


def one_frame_regions():
    """Frames with few and with many counts allowed, and more depths than d_ffs or fewer."""
    draw = random.Random(1)
    for _ in range(300):
        d = draw.randrange(1, 9)
        shared = draw.choice([1, d])
        frame = Frame(
            d_model=d, n_heads=1, d_head=d, rank=None, outside=draw.randrange(50),
            covered=d, base=shared * draw.randrange(1, 9), column=shared * draw.randrange(1, 5),
            step=0,
        )  # fmt: skip
        step = draw.choice([1, 3])
        target = draw.randrange(300, 1200)
        high = target + draw.randrange(draw.choice([frame.column, 40]))
        allowed = Allowed(target, high, step, draw.choice([None, 12, 40]), step)
        yield Region(frame, frame, draw.randrange(1, 4), draw.randrange(5, 400), allowed, True)


def test_runs_are_every_allowed_pair_once():
    seen, deep, wide = 0, 0, 0
    for region in one_frame_regions():
        frame, allowed = region.small, region.allowed
        d_ffs = range(allowed.ffn_step, (allowed.most_ffn or allowed.high) + 1, allowed.ffn_step)
        expected = [
            (n_layers, d_ff)
            for n_layers in region.depths
            for d_ff in d_ffs
            if allowed.low <= frame.count(n_layers, d_ff) <= allowed.high
        ]
        found = []
        for depths, at_depth in region.runs():
            assert min(len(depths), len(at_depth)) == 1
            deep, wide = deep + (len(depths) > 1), wide + (len(at_depth) > 1)
            found += [(n_layers, d_ff) for n_layers in depths for d_ff in at_depth]
        assert sorted(found) == expected
        if region.is_tight:
            assert len({n for n, _ in expected}) == len({f for _, f in expected}) == len(expected)
        seen += len(expected)
    assert seen > 500
    assert deep > 5
    assert wide > 5
