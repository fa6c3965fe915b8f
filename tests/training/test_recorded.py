"""The recorded form of a step: the same losses and weights as the plain one, on any device.

Here it is computed without a compiler or a graph; tests/gpu/test_training.py records it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.lab.recipes import plan_run, recipe
from glassformer.models.model import build
from glassformer.spec.errors import MachineError
from glassformer.training import losses
from glassformer.training.engine import loss_weights
from glassformer.training.fit import fit
from glassformer.training.losses import fixed_loss, head_loss
from glassformer.training.recorded import RecordedSteps, kind_of, pack, pays_to_compile
from glassformer.training.torch_engine import TorchEngine

STEPS = 6
#: A batch that is filled up draws other dropout masks, so only text has dropout here.
DRY = "model.decoder.dropout=0"
#: The optimizer's kernel takes the rate and the clipping in float32: this rate is exact there.
EXACT = ("train.precision=float64", "train.lr=0.001953125", "train.schedule=ConstantSchedule")
RUNS = {
    "text": ["text"],
    "answers": ["digits", DRY],
    "pairs": ["reverse", "train.label_smoothing=0.1"],
    "machine": ["parity", "train.optimizer=SGD"],
    "several batches": ["digits", DRY, "train.accumulate=3"],
    "checkpointing": ["copy", "train.gradient_checkpointing=true"],
    "a short batch each epoch": ["digits", DRY, "train.batch_size=7", "task.examples=30"],
    "dropout": ["text", "model.decoder.dropout.residual=0.1"],
}


@pytest.fixture(scope="module")
def token_files(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


def engines(token_files, name, *more):
    settings = [f"train.steps={STEPS}", "train.batch_size=8", *EXACT, *more]
    planned = plan_run(name, settings, cache=token_files)
    run, task = planned.spec, planned.task
    plain, recorded = (TorchEngine.fresh(run.model, run.train) for _ in range(2))
    ((optimizer, _),) = recorded.optimizers
    if isinstance(optimizer, torch.optim.SGD):  # as on a GPU
        optimizer = torch.optim.SGD(recorded.parameters, fused=True)
        recorded.optimizers = [(optimizer, 1.0)]
    recorded.recorded = RecordedSteps(
        recorded.model, run.train, optimizer, random=recorded.random, compiled=False
    )
    return run, task, plain, recorded


def gap(ours, theirs):
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)


@pytest.mark.parametrize("case", RUNS)
def test_the_recorded_step_is_the_plain_step(case, token_files):
    name, *more = RUNS[case]
    run, task, plain, recorded = engines(token_files, name, "train.clip=0", *more)
    for ours, theirs in zip(
        fit(recorded, task, run.train), fit(plain, task, run.train), strict=True
    ):
        assert ours.step == theirs.step and ours.tokens == theirs.tokens
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-10)
        assert ours.nll == pytest.approx(theirs.nll, rel=1e-10)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)
    assert gap(recorded.weights(), plain.weights()) < 1e-9
    assert recorded.steps == plain.steps == STEPS


def test_clipping_and_its_norm(token_files):
    run, task, plain, recorded = engines(token_files, "digits", DRY, "train.clip=0.3")
    for ours, theirs in zip(
        fit(recorded, task, run.train), fit(plain, task, run.train), strict=True
    ):
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
        assert ours.grad_norm > 0.3
    assert gap(recorded.weights(), plain.weights()) < 1e-6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing(accumulate, token_files):
    _, task, _, engine = engines(token_files, "digits", f"train.accumulate={accumulate}")
    batches = [task.batch("train", np.arange(8)) for _ in range(accumulate)]
    assert engine.step(batches, lr=0.01, seed=0).applied
    scale = engine.model.get_parameter("embed.weight")
    kept = scale.detach().clone()
    with torch.no_grad():
        scale[:] = float("nan")
    before, state = engine.weights(), engine.state()
    result = engine.step(batches, lr=0.01, seed=1)
    assert not result.applied and engine.steps == 1
    after, later = engine.weights(), engine.state()
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before)
    assert all(np.array_equal(state[name], later[name]) for name in state)
    with torch.no_grad():
        scale.copy_(kept)
    assert engine.step(batches, lr=0.01, seed=2).applied and engine.steps == 2


def test_large_logits_are_never_all_there(monkeypatch, token_files):
    """In chunks, with and without bias and smoothing: the value and gradients of one piece."""
    settings = ["train.precision=float64", "model.heads.0.bias=true"]
    run = recipe("text", settings, cache=token_files)
    model = build(run.model).double()
    hidden = torch.randn(3, 5, run.model.d_model, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(run.model.vocab_size, (15,))
    weights = torch.rand(15, dtype=torch.float64)
    for smoothing in (0.0, 0.1):
        found = []
        for piece in (1 << 28, 4 * run.model.vocab_size):
            monkeypatch.setattr(losses, "RECORDED_PIECE", piece)
            loss = fixed_loss(model, hidden, "next", targets, weights, label_smoothing=smoothing)
            wanted = [
                hidden,
                *(p for n, p in model.named_parameters() if "head" in n or "embed" in n),
            ]
            gradients = torch.autograd.grad(3 * loss.smoothed, wanted, allow_unused=True)
            found.append((loss, gradients))
        (one, first), (other, second) = found
        assert one.smoothed.item() == pytest.approx(other.smoothed.item(), rel=1e-12)
        assert one.nll.item() == pytest.approx(other.nll.item(), rel=1e-12)
        for a, b in zip(first, second, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-10, atol=1e-12)
        plain = head_loss(
            model, hidden, "next", targets.view(3, 5), weights.view(3, 5), label_smoothing=smoothing
        )
        assert one.smoothed.item() == pytest.approx(plain.smoothed.item(), rel=1e-12)
        frozen = model.requires_grad_(False)  # as under LoRA: the rows' gradient alone, the same
        loss = fixed_loss(frozen, hidden, "next", targets, weights, label_smoothing=smoothing)
        (rows,) = torch.autograd.grad(3 * loss.smoothed, [hidden])
        assert torch.equal(rows, second[0])
        model.requires_grad_(True)


def test_batches_are_filled_up_to_few_shapes():
    """Every length and the short batch of an epoch; what is filled up counts for nothing."""
    run = recipe("digits")
    task = build_task(run.task)
    kinds = set()
    for start in range(0, 400, 7):
        batch = task.batch("train", np.arange(start, start + (3 if start % 2 else 8)))
        arrays = pack(batch, run.model, dict.fromkeys(batch.targets, 1.0), rows=8)
        assert len(arrays["tokens"]) == 8
        for head in batch.targets:
            assert arrays[f"weights.{head}"].sum() == loss_weights(batch, head).sum()
        kinds.add(kind_of(arrays))
    assert len(kinds) <= 16


def test_compiling_is_chosen_by_the_length_of_the_run():
    text = [f"task.path={__file__}", "task.vocab_size=300"]  # its size is that of its budget
    small, large = recipe("digits"), recipe("lm-10m", text)
    assert not pays_to_compile(small.model, small.train, parameters=20_000)
    assert pays_to_compile(large.model, replace(large.train, steps=50_000), parameters=10_000_000)


def test_a_step_that_cannot_be_compiled_is_told(token_files):
    _, task, _, engine = engines(token_files, "digits")

    def fails(views):
        raise torch._dynamo.exc.Unsupported("no such operation\nand much more")

    engine.recorded.objective, engine.recorded.compiled = fails, True
    with pytest.raises(MachineError, match=r"could not compile.*: no such operation\n") as caught:
        engine.step([task.batch("train", np.arange(8))], lr=0.01, seed=0)
    assert "train.compile=off" in caught.value.hint
