"""The torch engine is plain torch: its steps are those of a loop that is written out here."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from glassformer.data.batch import Batch
from glassformer.models.model import Model
from glassformer.nn.operations import TORCH, Operations, Part, use
from glassformer.spec import presets
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import TrainSpec
from glassformer.training.engine import loss_weights
from glassformer.training.torch_engine import TorchEngine
from tests.training.samples import digits, machine, reverse, uneven

SMALL = {
    "vocab_size": 37,
    "d_model": 24,
    "n_heads": 2,
    "d_ff": 29,
    "n_layers": 2,
    "max_seq_len": 16,
}
SPECS: dict[str, ModelSpec] = {
    "modern": presets.modern_lm(**SMALL, n_kv_heads=1),
    "core": presets.core(**SMALL),
    "qwen": presets.qwen(**SMALL, n_kv_heads=2, d_head=10, qk_norm=True),
    "digits": digits().model,
    "machine": machine().model,
    "reverse": reverse().model,
}
CLIP, RATE = 0.5, 1e-3


def batch_of(name: str) -> Batch:
    """Rows of uneven length, with a target for every head."""
    run = {"digits": digits, "machine": machine, "reverse": reverse}.get(name)
    if run is not None:
        return uneven(run(), 8)
    spec, rng = SPECS[name], np.random.default_rng(0)
    ids, valid = rng.integers(0, spec.vocab_size, (5, 12)), np.ones((5, 11), dtype=np.bool_)
    valid[1, 7:] = valid[3, 2:] = False
    weights = np.where(valid, rng.random(valid.shape), 0.0).astype(np.float32)
    return Batch(tokens=ids[:, :-1], valid=valid, targets={"next": ids[:, 1:]}, weights=weights)


def written_out(
    model: Model, batch: Batch, optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """One step: the loss and the norm of its gradient."""
    model.train()
    optimizer.zero_grad()
    answers, loss = model(batch), torch.zeros(())
    for head, logits in answers.items():
        weights = torch.from_numpy(loss_weights(batch, head)).flatten()
        rows = logits.flatten(0, -2)[weights > 0]
        rows = rows if rows.dtype == torch.float64 else rows.float()
        target = torch.from_numpy(batch.targets[head].astype(np.int64)).flatten()[weights > 0]
        each = F.cross_entropy(rows, target, reduction="none") * weights[weights > 0]
        loss = loss + each.sum() / float(weights.double().sum())
    loss = loss + model.penalty()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), CLIP)
    optimizer.step()
    model.eval()
    return loss.item(), norm.item()


def pair(name: str, precision: str) -> tuple[TorchEngine, Model, torch.optim.Optimizer]:
    train = TrainSpec(precision=precision, lr=RATE, clip=CLIP)  # type: ignore[arg-type]
    engine, plain = (TorchEngine.fresh(SPECS[name], train) for _ in range(2))
    own, rules = dict(plain.model.named_parameters()), stored(plain.spec)
    adam = train.optimizer
    groups = [
        {
            "params": [p for key, p in own.items() if rules[key].decay is decays],
            "weight_decay": adam.weight_decay if decays else 0.0,  # type: ignore[union-attr]
        }
        for decays in (True, False)
    ]
    betas = (adam.beta1, adam.beta2)  # type: ignore[union-attr]
    return (
        engine,
        plain.model,
        torch.optim.AdamW(groups, lr=RATE, betas=betas, eps=adam.eps, fused=True),  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_steps_are_the_plain_loop(name, precision):
    """Losses, norms and weights over three steps; rows are gathered before the product there."""
    engine, model, optimizer = pair(name, precision)
    batch, near = batch_of(name), 1e-12 if precision == "float64" else 2e-5
    for step in range(3):
        found = engine.step([batch], lr=RATE, seed=step)
        loss, norm = written_out(model, batch, optimizer)
        assert found.loss == pytest.approx(loss, rel=near)
        assert found.grad_norm == pytest.approx(norm, rel=near)
    for key, weight in dict(model.named_parameters()).items():
        ours = engine.weights()[key]
        assert np.abs(ours - weight.detach().numpy()).max() <= near, key


def test_resuming_is_exact():
    """Weights and state after four steps are those after two and two, bit for bit."""
    train = TrainSpec(lr=RATE, clip=CLIP)
    whole, first, second = (TorchEngine.fresh(SPECS["reverse"], train) for _ in range(3))
    batch = batch_of("reverse")
    for step in range(4):
        whole.step([batch], lr=1e-2, seed=step)
    for step in range(2):
        first.step([batch], lr=1e-2, seed=step)
    second.load_weights(first.weights())
    second.load_state(first.state())
    for step in range(2, 4):
        second.step([batch], lr=1e-2, seed=step)
    for kind in ("weights", "state"):
        left, right = getattr(whole, kind)(), getattr(second, kind)()
        assert left.keys() == right.keys()
        for name, array in left.items():
            assert np.array_equal(array, right[name]), name


def test_an_engine_gives_its_table_to_every_part():
    called: list[str] = []

    def noted(gate, up, activation):
        called.append(activation)
        return TORCH.gate(gate, up, activation)

    table, train = Operations(name="noted", gate=noted), TrainSpec(lr=RATE, clip=CLIP)
    engine = TorchEngine.fresh(SPECS["modern"], train, operations=table)
    plain = TorchEngine.fresh(SPECS["modern"], train)
    parts = [part for part in engine.model.modules() if isinstance(part, Part)]
    assert all(part.operations is table for part in parts) and Part.operations is TORCH
    one, other = (e.step([batch_of("modern")], lr=RATE, seed=0) for e in (engine, plain))
    assert one.loss == other.loss and called == ["silu"] * 2
    use(engine.model, TORCH)
    assert all(part.operations is TORCH for part in parts)
