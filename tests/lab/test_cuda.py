"""What a GPU keeps and how it attends at odd widths; skipped where there is none."""

import time

import pytest
import torch
from bench.budget import batch_for
from bench.footprint import saved_bytes

from glassformer.costs.activations import activations
from glassformer.costs.timing import step_time
from glassformer.lab.measure.machine_rates import calibrate
from glassformer.nn.attention import attend
from glassformer.nn.mask import Mask
from glassformer.spec.presets import budget_lm, qwen
from glassformer.spec.train import TrainSpec
from glassformer.training.torch_engine import TorchEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SPECS = {
    "odd heads": budget_lm(d_model=56, n_heads=8, d_ff=140, n_layers=2, max_seq_len=64),
    "even heads": budget_lm(d_model=64, n_heads=8, d_ff=140, n_layers=2, max_seq_len=64),
    "grouped, rotary": qwen(),
}


@pytest.mark.parametrize("name", SPECS)
def test_activations_are_what_autograd_keeps_on_a_gpu(name):
    spec = SPECS[name]
    engine = TorchEngine.fresh(spec, TrainSpec(compile="off"), device="cuda")
    kept = saved_bytes(engine, batch_for(spec, batch=4, length=32))
    said = activations(spec, batch=4, length=32, device="cuda").kept
    assert said == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize(("width", "groups"), [(7, 8), (27, 2), (16, 4), (5, 1)])
def test_odd_and_grouped_heads_attend_as_in_float64(width, groups):
    draw = torch.Generator().manual_seed(width)
    shapes = ((2, 8, 33, width), (2, groups, 33, width), (2, groups, 33, width))
    wide = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    results = {}
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to("cuda", dtype).requires_grad_() for x in wide]
        out = attend(*leaves, mask=Mask(causal=True))
        results[dtype] = (out, *torch.autograd.grad(out.square().sum(), leaves))
    for narrow, exact in zip(*results.values(), strict=True):
        assert (narrow - exact).abs().max() < 1e-4


def test_a_gpu_is_calibrated_apart_from_its_host():
    rates = calibrate(device="cuda", seconds=0.1, clock=time.perf_counter)
    said = step_time(SPECS["even heads"], rates, batch=4, length=32)
    assert said.overlapped
    assert 0 < said.total < 1
