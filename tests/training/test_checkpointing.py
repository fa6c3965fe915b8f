"""Gradient checkpointing: the same bits of losses, gradients and weights, and less that is kept."""

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.models.model import build
from glassformer.nn.lora import apply_lora
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import override
from glassformer.spec.train import LoRA, TrainSpec
from glassformer.training.fit import fit
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine
from tests.planting import Call, catches
from tests.tiny import token_ids
from tests.training.samples import RUNS, gradients

ON = "train.gradient_checkpointing=true"
DROPOUT = {
    "digits": ("model.decoder.dropout=0.2",),
    "machine": ("model.decoder.dropout=0.2",),
    "reverse": ("model.decoder.dropout=0.2", "model.encoder.dropout=0.2"),
}
LONG = presets.qwen(
    vocab_size=61, d_model=24, n_heads=3, n_kv_heads=1, d_head=8, d_ff=64, n_layers=8
)


def three_steps(run, *, lora: LoRA | None = None):
    """Losses and gradients of three steps, and the weights that they lead to."""
    engine = TorchEngine.fresh(run.model, run.train)
    if lora is not None:
        model = build(run.model, generator=torch.Generator().manual_seed(0))
        apply_lora(model, lora, generator=torch.Generator().manual_seed(1))
        engine = TorchEngine(model, run.train, lora=lora)
    seen = []
    for record in fit(engine, build_task(run.task), run.train):
        names = gradients(engine)
        seen.append((record.loss, record.grad_norm, {k: v.tobytes() for k, v in names.items()}))
    return seen, {name: array.tobytes() for name, array in engine.weights().items()}


def the_bits_are_the_same(name: str = "machine", *changes: str, lora: LoRA | None = None) -> None:
    off = RUNS[name]("train.steps=3", "train.accumulate=2", *changes)
    on = override(off, [ON])
    torch.manual_seed(12)  # torch's own generator must not matter, nor move
    before = torch.get_rng_state()
    want, got = three_steps(off, lora=lora), three_steps(on, lora=lora)
    assert torch.equal(torch.get_rng_state(), before)
    assert got == want


@pytest.mark.parametrize("name", RUNS)
def test_the_bits_are_the_same(name):
    the_bits_are_the_same(name)


@catches(
    "dropout drawn anew",
    "models.stack:run_stack",
    Call("partial"),
    to="{func}({args[0]}, {args[1]}, use_reentrant=False, preserve_rng_state=False)",
    case="machine",
)
@pytest.mark.parametrize("name", RUNS)
def test_the_bits_are_the_same_with_dropout(name):
    the_bits_are_the_same(name, *DROPOUT[name])
    plain = three_steps(RUNS[name]("train.steps=3"))
    assert plain != three_steps(RUNS[name]("train.steps=3", *DROPOUT[name])), "dropout acts"


def test_the_bits_are_the_same_in_half_precision():
    the_bits_are_the_same("digits", "train.precision=bf16", *DROPOUT["digits"])


def test_the_bits_are_the_same_with_lora_and_its_dropout():
    the_bits_are_the_same("machine", lora=LoRA(rank=2, dropout=0.3))


# --- memory ---------------------------------------------------------------------------------------


def kept_bytes(*, recompute: bool) -> int:
    """Bytes of the tensors that a forward keeps for its backward, parameters left out.

    What a recomputed block keeps is its input, which autograd does not count: it is added.
    """
    model = build(LONG, generator=torch.Generator().manual_seed(0))
    tokens = token_ids(2, 128, vocab=61)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_BTD = model.hidden(model.inputs(tokens), recompute=recompute)
    hidden_BTD.sum().backward()
    inputs = LONG.n_layers * hidden_BTD.untyped_storage().nbytes() if recompute else 0
    return sum(kept.values()) + inputs


def test_less_is_kept() -> None:
    assert kept_bytes(recompute=True) * 8 < kept_bytes(recompute=False)  # 10.5 times less was seen


# --- who may --------------------------------------------------------------------------------------


def test_the_by_hand_engine_refuses():
    run = RUNS["digits"]()
    with pytest.raises(InputError, match=r"NumPy engine has no train\.gradient_checkpointing=True"):
        override(run, ["engine=numpy", ON])
    with pytest.raises(InputError, match=r"NumPy engine has no train\.gradient_checkpointing=True"):
        NumpyEngine.fresh(run.model, TrainSpec(gradient_checkpointing=True))


def test_evaluation_is_untouched():
    run = RUNS["digits"](ON)
    engine, plain = (TorchEngine.fresh(run.model, r.train) for r in (run, RUNS["digits"]()))
    batch = build_task(run.task).batch("val", np.arange(4))
    assert (engine.logits(batch)["answer"] == plain.logits(batch)["answer"]).all()


def test_the_engine_recomputes() -> None:
    run = RUNS["digits"](ON)
    engine = TorchEngine.fresh(run.model, run.train)
    passes = []
    engine.model.blocks[0].register_forward_pre_hook(lambda *_: passes.append(1))
    batch = build_task(run.task).batch("train", np.arange(4))
    engine.step([batch], lr=1e-3, seed=0)
    assert len(passes) == 2
