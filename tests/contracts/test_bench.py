"""The benchmarks run and give rows of the promised form; memory is asserted, time never."""

import torch
from bench.clock import interleave, rows
from bench.layer import B, D, T, capture, memory, ours

from glassformer.nn.mask import Mask

FIELDS = {"bench", "case", "name", "median_ms", "ratio", "of_limit"}


def test_the_layer_benchmark_gives_rows():
    x = torch.zeros(B, T, D)
    for row in capture(x, rounds=2):
        assert set(row) == FIELDS


def test_memory_is_flat_over_a_hundred_forwards():
    block, x = ours().eval(), torch.zeros(2, 5, D)

    @torch.no_grad()
    def forward():
        block(x, mask=Mask(causal=True))

    assert "growth: 0 tensors" in memory(forward)["name"]


def test_ratios_are_medians_of_rounds():
    times = interleave({"a": lambda: None, "b": lambda: None}, rounds=3, inner=1)
    assert [len(values) for values in times.values()] == [3, 3]
    made = list(rows({"a": [2.0, 4.0], "b": [1.0, 1.0]}, bench="x", case="y", baseline="b"))
    assert [row["ratio"] for row in made] == [3.0, 1.0]
