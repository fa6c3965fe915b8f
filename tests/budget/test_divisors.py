"""Divisors, and the three ways to the sizes of one frame, against trying every number."""

import math
import random

import pytest

from glassformer.budget.counting import Frame
from glassformer.budget.regions import Box, Room
from glassformer.budget.search import _by_depth, _by_divisor, _by_ffn, is_tight, sizes
from glassformer.spec.divisors import divisors_between, is_prime


def test_every_divisor_is_found_and_no_other():
    for number in (*range(1, 400), 997 * 1009, 1009**2, 1009**3, 2**20, 720_720):
        expected = [d for d in range(1, min(number, 3000) + 1) if number % d == 0]
        assert divisors_between(number, 1, 3000) == expected
        assert divisors_between(number, 7, 100) == [d for d in expected if 7 <= d <= 100]


def test_a_large_number_is_divided_whole():
    """Products of two primes that no trial would find soon."""
    left, right = 1_000_003, 999_999_937
    assert is_prime(left)
    assert is_prime(right)
    assert not is_prime(left * right)
    assert divisors_between(left * right, 2, left * right - 1) == [left, right]
    draw = random.Random(0)
    for _ in range(50):
        number = draw.randrange(10**11, 10**12)
        found = divisors_between(number, 1, number)
        assert all(number % d == 0 for d in found)
        assert len(found) == len(set(found))
        assert math.prod(found) ** 2 == number ** len(found)  # d pairs with number / d


def tight_boxes():
    """Frames whose window has at most one d_ff at each depth, with and without a shared divisor."""
    draw = random.Random(1)
    for _ in range(150):
        d = draw.randrange(1, 9)
        shared = draw.choice([1, d])
        frame = Frame(
            d_model=d, n_heads=1, d_head=d, rank=None, outside=draw.randrange(50),
            covered=d, base=shared * draw.randrange(1, 9), column=shared * draw.randrange(1, 5),
            step=0,
        )  # fmt: skip
        multiple = draw.choice([1, 3])
        target = draw.randrange(300, 1200)
        high = target + draw.randrange(frame.column)
        room = Room(target, high, multiple, draw.choice([None, 40]), multiple)
        box = Box(frame, frame, draw.randrange(1, 4), draw.randrange(5, 400), room, True)
        if is_tight(box):
            yield box


def test_depths_ffns_and_divisors_lead_to_the_same_sizes():
    seen = 0
    for box in tight_boxes():
        frame, room = box.small, box.room
        expected = [
            (n_layers, range(d_ff, d_ff + 1))
            for n_layers in range(box.shallow, box.deep + 1)
            for d_ff in range(room.multiple, (room.wide or room.high) + 1, room.multiple)
            if room.low <= frame.count(n_layers, d_ff) <= room.high
        ]
        for way in (_by_depth, _by_ffn, _by_divisor, sizes):
            found = sorted((n, f[0]) for n, f in way(box))
            assert found == sorted((n, f[0]) for n, f in expected), way
        seen += len(expected)
    assert seen > 50


@pytest.mark.parametrize("number", [1, 4, 9, 49, 2047, 3_215_031_751, 1_000_003 * 3])
def test_what_looks_like_a_prime_is_not(number):
    assert not is_prime(number)
