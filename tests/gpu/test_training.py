"""On a GPU: the recorded step against the plain one, and a run that uses it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.gpu.operations import gpu_operations
from glassformer.gpu.training_graphs import Graphs
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import TrainingRun
from glassformer.nn.operations import loss_rows
from glassformer.training import losses
from glassformer.training.fit import fit
from glassformer.training.torch_engine import TorchEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RUNS = {
    "text": ["text"],
    "odd widths": ["lm-10m", "model.decoder.layers.0.count=2", "train.precision=float32"],
    "answers": ["digits", "model.decoder.dropout=0"],
    "pairs": ["reverse", "train.label_smoothing=0.1"],
    "machine": ["parity", "train.optimizer=SGD"],
    "several batches": ["digits", "train.accumulate=3", "model.decoder.dropout=0"],
    "checkpointing": ["copy", "train.gradient_checkpointing=true"],
    "rotary, grouped": ["lm-modern"],
}


def pair(name, *more, steps):
    run = recipe(name, [f"train.steps={steps}", "train.batch_size=8", *more])
    engines = []
    for compile in ("auto", "off"):
        train = recipe(name, [f"train.steps={steps}", "train.batch_size=8", *more,
                              f"train.compile={compile}"]).train  # fmt: skip
        engines.append(TorchEngine.fresh(run.model, train, device="cuda", graphs=Graphs))
    return run, build_task(run.task), engines


@pytest.mark.parametrize("case", RUNS)
def test_the_recorded_step_is_the_plain_step(case):
    name, *more = RUNS[case]
    run, task, (recorded, plain) = pair(name, "model.decoder.dropout=0", *more, steps=30)
    assert recorded.recorded is not None and plain.recorded is None
    for ours, theirs in zip(
        fit(recorded, task, run.train), fit(plain, task, run.train), strict=True
    ):
        assert ours.step == theirs.step and ours.tokens == theirs.tokens
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-3)
    assert recorded.recorded.launcher.graphs and recorded.steps == plain.steps == 30


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it compiles
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("name", ["lm-modern", "text", "parity", "reverse"])
def test_the_compiled_step_is_the_plain_step(name, monkeypatch):
    """The compiled kernels: rotated heads, gates, GELU, losses."""
    monkeypatch.setattr(losses, "FUSED_PIECE", 1)
    run, task, (_, plain) = pair(name, "model.decoder.dropout=0", steps=12)
    compiled = TorchEngine.fresh(
        run.model,
        replace(run.train, compile="on"),
        device="cuda",
        operations=gpu_operations(),
        graphs=Graphs,
    )
    for ours, theirs in zip(
        fit(compiled, task, run.train), fit(plain, task, run.train), strict=True
    ):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("held", [True, False])
def test_the_loss_kernel_is_the_formula(dtype, smoothing, held, monkeypatch):
    """Rows that one program holds, and those that it reads in pieces."""
    from glassformer.gpu import triton_loss

    monkeypatch.setattr(triton_loss, "HELD", 16_384 if held else 0)
    torch.manual_seed(0)
    logits = (3 * torch.randn(37, 5120, device="cuda")).to(dtype)
    targets, weights = torch.randint(5003, (37,), device="cuda"), torch.rand(37, device="cuda")
    kind = {"classes": 5003, "smoothing": smoothing}
    sums, gradient = loss_rows(logits.double().cpu(), targets.cpu(), weights.double().cpu(), **kind)
    ours, found = gpu_operations().loss_rows(logits.clone(), targets, weights, **kind)
    assert torch.allclose(ours.double().cpu(), sums, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.double().cpu(), gradient, rtol=1e-2, atol=1e-6)
    assert not found[:, 5003:].any()


def test_large_logits_in_chunks(monkeypatch):
    monkeypatch.setattr(losses, "RECORDED_PIECE", 1 << 18)
    run, task, (recorded, plain) = pair("text", "model.decoder.dropout=0", steps=10)
    for ours, theirs in zip(
        fit(recorded, task, run.train), fit(plain, task, run.train), strict=True
    ):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_dropout_follows_the_seed_and_leaves_torch_alone():
    _, task, (engine, _) = pair("text", "model.decoder.dropout=0.3", steps=10)
    batch = task.batch("train", np.arange(8))
    for seed in range(3):
        engine.step([batch], lr=0.0, seed=seed)
    torch.manual_seed(5)
    before = torch.cuda.get_rng_state()
    losses_ = [engine.step([batch], lr=0.0, seed=seed).loss for seed in (7, 7, 8)]
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert losses_[0] == losses_[1] != losses_[2]


def test_a_step_that_is_not_finite_changes_nothing():
    _, task, (engine, _) = pair("text", steps=10)
    batch = task.batch("train", np.arange(8))
    for seed in range(3):
        assert engine.step([batch], lr=1e-3, seed=seed).applied
    weight = engine.model.get_parameter("embed.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    state = engine.state()
    assert not engine.step([batch], lr=1e-3, seed=3).applied
    later = engine.state()
    assert all(np.array_equal(state[name], later[name]) for name in state)
    with torch.no_grad():
        weight.copy_(kept)
    assert engine.step([batch], lr=1e-3, seed=4).applied and engine.steps == 4


def test_a_run_stops_and_goes_on(tmp_path):
    """Stopped at a step that is neither evaluated nor saved, resumed: the same lines of metrics."""
    spec = recipe(
        "text", ["train.steps=40", "train.evaluate_every=20", "train.checkpoint_every=20"]
    )

    def lines(run):
        text = run.directory.metrics.read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text]

    straight = TrainingRun(spec, tmp_path / "one", device="cuda")
    straight.prepare()
    list(straight.events())
    broken = TrainingRun(spec, tmp_path / "two", device="cuda")
    broken.prepare()
    for event in broken.events():
        if getattr(event, "step", 0) == 7:
            broken.stop_requested = True
    assert broken.stopped and 7 <= broken.progress.step <= 12
    again = TrainingRun(spec, tmp_path / "two", device="cuda")
    again.resume()
    list(again.events())
    one, two = lines(straight), lines(again)
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for ours, theirs in zip(one, two, strict=True):
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
