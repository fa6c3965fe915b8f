"""The step by C kernels is the plain one: float32 by kernels, beside float64 by torch alone."""

import numpy as np
import pytest
import torch

from glassformer.data.batch import Batch
from glassformer.kernels import c_library, train_kernels
from glassformer.nn.norm import RMSNorm
from glassformer.spec import presets
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import TrainSpec
from glassformer.training import losses
from glassformer.training.torch_engine import TorchEngine
from tests.training.samples import (
    digits,
    engine_of,
    gradients,
    machine,
    reverse,
    uneven,
    worst_relative,
)

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
#: The worst seen: 4e-6 of a gradient's largest number, 3e-7 of a loss.
SLOPES, LOSSES = 2e-5, 2e-6


def batch_of(spec: ModelSpec) -> Batch:
    """Rows of uneven length, with a target for every head."""
    run = {SPECS["digits"]: digits, SPECS["machine"]: machine, SPECS["reverse"]: reverse}.get(spec)
    if run is not None:
        return uneven(run(), 8)
    rng = np.random.default_rng(0)
    ids, valid = rng.integers(0, spec.vocab_size, (5, 12)), np.ones((5, 11), dtype=np.bool_)
    valid[1, 7:] = valid[3, 2:] = False
    weights = np.where(valid, rng.random(valid.shape), 0.0).astype(np.float32)
    return Batch(tokens=ids[:, :-1], valid=valid, targets={"next": ids[:, 1:]}, weights=weights)


def engine(spec: ModelSpec, precision: str) -> TorchEngine:
    return TorchEngine.fresh(spec, TrainSpec(precision=precision, lr=1e-2, clip=0.5))  # type: ignore[arg-type]


def gaps(spec: ModelSpec) -> tuple[float, float]:
    """The largest differences of a gradient and of a loss, over some steps."""
    ours, plain, batch = engine(spec, "float32"), engine(spec, "float64"), batch_of(spec)
    worst = slopes = 0.0
    for step in range(3):
        one, other = (e.step([batch], lr=1e-3, seed=step) for e in (ours, plain))
        worst = max(worst, abs(one.loss - other.loss) / abs(other.loss))
        worst = max(worst, abs(one.grad_norm - other.grad_norm) / other.grad_norm)
        if step:
            continue
        # The plain update has clipped its gradients in place.
        scale = min(1.0, 0.5 / (one.grad_norm + 1e-6))
        mine = {name: scale * array for name, array in gradients(ours).items()}
        slopes = worst_relative(mine, gradients(plain))
    return slopes, worst


@pytest.mark.parametrize("name", SPECS)
def test_a_step_is_the_plain_one(name, monkeypatch):
    monkeypatch.setattr(losses, "KERNEL_PIECE", 1)
    slopes, worst = gaps(SPECS[name])
    assert slopes <= SLOPES and worst <= LOSSES


def test_a_gain_with_an_offset_is_one_more():
    x, made = torch.randn(5, 7), RMSNorm(7, eps=1e-3, offset=True)
    torch.nn.init.normal_(made.weight)
    with train_kernels.training_kernels():
        ours = made(x)
    assert torch.allclose(ours, made(x), atol=1e-6)


def test_the_kernels_are_used(monkeypatch):
    called = []
    plain = train_kernels._call
    monkeypatch.setattr(
        train_kernels, "_call", lambda name, job: (called.append(name), plain(name, job))
    )
    monkeypatch.setattr(losses, "KERNEL_PIECE", 1)
    gaps(SPECS["modern"])
    assert {name.removeprefix("glass_") for name in called} == set(c_library.TRAINING) - {"adamw"}


def test_nothing_else_uses_them(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a kernel of training")

    monkeypatch.setattr(train_kernels, "_call", refuse)
    model = engine(SPECS["modern"], "float32").model
    model(batch_of(SPECS["modern"]))["next"].sum().backward()  # gradients, but no training step
    engine(SPECS["modern"], "float64").step([batch_of(SPECS["modern"])], lr=1e-3, seed=0)


def test_without_the_library_torch_computes(monkeypatch):
    monkeypatch.setattr(c_library, "_loaded", lambda: (None, "not compiled"))
    plain = engine(SPECS["modern"], "float32")
    assert plain.update is None and train_kernels.identity() is None
    assert plain.step([batch_of(SPECS["modern"])], lr=1e-3, seed=0).applied


def test_state_moves_between_both_updates(monkeypatch):
    """A checkpoint of one goes on in the other: the same names, the same numbers."""
    batch = batch_of(SPECS["modern"])
    ours = engine(SPECS["modern"], "float32")
    ours.step([batch], lr=1e-3, seed=0)
    with monkeypatch.context() as without:
        without.setattr(c_library, "_loaded", lambda: (None, "not compiled"))
        plain = engine(SPECS["modern"], "float32")
        plain.load_weights(ours.weights())
        plain.load_state(ours.state())
        plain.step([batch], lr=1e-3, seed=1)
    again = engine(SPECS["modern"], "float32")
    again.load_weights(ours.weights())
    again.load_state(ours.state())
    again.step([batch], lr=1e-3, seed=1)
    assert plain.state().keys() == again.state().keys()
    for name, weight in plain.weights().items():
        assert np.abs(weight - again.weights()[name]).max() <= 1e-5, name


#: What a caller of a kernel may get wrong: the function, and a damaged one in its place.
FAULTS = {
    "attention without its scale": (
        "attention_layer",
        lambda f: lambda *x, **k: f(*x, **(k | {"scale": 1.0})),
    ),
    "attention without its mask": (
        "attention_layer",
        lambda f: lambda *x, **k: f(*x, **(k | {"allow": None})),
    ),
    "keys for values": (
        "attention_layer",
        lambda f: lambda x, c, w, b, **o: f(x, c, [w[0], w[1], w[1], w[3]], b, **o),
    ),
    "another eps": ("rms_norm", lambda f: lambda *x, eps: f(*x, eps=0.1)),
    "a gain twice": ("rms_norm", lambda f: lambda x, g, eps: f(x, 2 * g, eps=eps)),
    "gate and up exchanged": ("gated", lambda f: lambda gate, up: f(up, gate)),
    "rotated backwards": (
        "_turn",
        lambda f: lambda x, cos, sin, *, back: f(x, cos, -sin, back=back),
    ),
    "products exchanged": ("products", lambda f: lambda *x: f(*x)[::-1]),
    "a sum without its half": (
        "sum_and_norm",
        lambda f: lambda x, added, *g, **k: f(x, 0.5 * added, *g, **k),
    ),
    "an embedding adds nothing": (
        "embedded",
        lambda f: lambda tokens, weight: f(tokens, weight).detach(),
    ),
    "every row counts": ("loss_rows", lambda f: lambda x, t, w, s: f(x, t, torch.ones_like(w), s)),
    "targets one further": (
        "loss_rows",
        lambda f: lambda x, t, w, s: f(x, (t + 1) % x.shape[1], w, s),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught(fault, monkeypatch):
    monkeypatch.setattr(losses, "KERNEL_PIECE", 1)
    name, damage = FAULTS[fault]
    monkeypatch.setattr(train_kernels, name, damage(getattr(train_kernels, name)))
    slopes, worst = gaps(SPECS["modern"])
    assert slopes > SLOPES or worst > LOSSES


def test_an_update_that_forgets_to_clip_is_caught(monkeypatch):
    plain = train_kernels.FusedAdamW.step
    monkeypatch.setattr(
        train_kernels.FusedAdamW, "step", lambda self, *, lr, scale: plain(self, lr=lr, scale=1.0)
    )
    slopes, worst = gaps(SPECS["modern"])
    assert slopes > SLOPES or worst > LOSSES


def test_resuming_is_exact():
    """Weights and state after four steps are those after two and two, bit for bit."""
    run = reverse()
    batch = uneven(run, 8)
    whole, first, second = (engine_of(run, "torch") for _ in range(3))
    for step in range(4):
        whole.step([batch], lr=1e-2, seed=step)
    for step in range(2):
        first.step([batch], lr=1e-2, seed=step)
    second.load_weights(first.weights())
    second.load_state(first.state())
    for step in range(2, 4):
        second.step([batch], lr=1e-2, seed=step)
    for name, array in whole.weights().items():
        assert np.array_equal(array, second.weights()[name]), name
    for name, array in whole.state().items():
        assert np.array_equal(array, second.state()[name]), name
