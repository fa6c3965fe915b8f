"""The benchmarks run and give rows of the promised form; memory is asserted, time never."""

import pytest
import torch
from bench import generate as decoding
from bench import lens, quant
from bench.bare import bare_decoder
from bench.clock import growth, interleave, rows
from bench.layer import B, D, T, capture, memory, ours

from glassformer.models.model import build
from glassformer.nn.mask import Mask
from glassformer.nn.taps import Taps
from glassformer.spec import presets

FIELDS = {"bench", "case", "name", "median_ms", "ratio", "of_limit"}


def test_the_layer_benchmark_gives_rows():
    x = torch.zeros(B, T, D)
    for row in capture(x, rounds=2):
        assert set(row) == FIELDS


@pytest.mark.alone
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


def test_the_generation_benchmark_gives_rows():
    """The naive loop beside the cached and the native one, at the sizes that the figures name."""
    assert {(64, 2), (128, 2), (256, 4)} <= set(decoding.Size().small)
    found = list(decoding.against_naive(32, 1, size=decoding.QUICK))
    assert [row["name"] for row in found] == [
        "naive loop, no cache",
        "glassformer, cached",
        "glassformer, native",
    ]
    for row in (*found, *decoding.constrained(decoding.QUICK)):
        assert set(row) == FIELDS
    assert decoding.Size().asked == 1_000
    told = list(decoding.native_is_plain(decoding.QUICK, names=("moe", "qwen")))
    assert len(told) == 6 and all(" 0 wrong" in str(row["name"]) for row in told)


@pytest.mark.alone
def test_memory_is_flat_over_generations_and_growth_is_noticed():
    generations, cache = decoding.flat(decoding.QUICK)
    assert str(generations["name"]).startswith("growth: 0 tensors, 0 KiB of Python")
    made, _, predicted = str(cache["name"]).partition(", predicted ")
    assert made == f"cache {predicted} bytes"
    kept = []
    found = growth(lambda number: kept.append(torch.zeros(9)), times=5, warmup=1)
    assert found.startswith("growth: 5 tensors")
    names = []
    found = growth(lambda number: names.append(str(number) * 999), times=20, warmup=1)
    assert found.startswith("growth: 0 tensors") and " 0 KiB of Python" not in found


def test_the_quantization_benchmark_gives_rows():
    """Float32 beside every backend that serves here."""
    found = list(quant.layers(shapes=((64, 128),), batches=(1, 3), rounds=2))
    for row in found:
        assert set(row) == FIELDS
    names = [row["name"] for row in found]
    assert names.count("float32, eager") == 2


def test_the_benchmark_of_capture_compares_with_a_build_without_taps():
    """The same bits, no hook on either side, and nothing left to look through in the bare one."""
    found = list(lens.capture(rounds=2, sizes=((16, 1, 2, 3, 5),)))
    for row in found:
        assert set(row) == FIELDS
    assert [row["name"] for row in found[:3]] == [
        "without taps",
        "capture off",
        "attention and norms captured",
    ]
    assert str(found[3]["name"]).startswith("0 hooks")
    spec = presets.budget_lm(vocab_size=20, d_model=16, d_ff=32, n_layers=1, n_heads=2)
    bare, cut = bare_decoder(spec)
    assert cut >= 20, "a renamed function would leave its taps in"
    tokens, taps = torch.arange(6)[None], Taps(read="*")
    bare(tokens, taps=taps)
    assert set(taps.seen) == {"logits.next"}, "which is the model's own, outside the stack"
    assert type(bare) is not type(build(spec))
