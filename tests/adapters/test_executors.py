"""The default stepper: which one a model gets on a CPU and on a GPU, and which keep the plain one.

A GPU's own tests are in tests/gpu; what is chosen for a device needs none.
"""

import pytest
import torch

from glassformer.adapters.executors import (
    fastest_stepper,
    make_slots,
    not_recorded,
    rewinding_stepper,
)
from glassformer.adapters.generate import make_stepper
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.slots import OneByOneSlots
from glassformer.generation.stepper import TorchStepper
from glassformer.gpu import derived_step
from glassformer.quant.convert import quantize_model
from glassformer.spec import presets
from glassformer.spec.decoding import StepSpec
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int8
from tests.generation import checks
from tests.tiny import built

GPU, PLENTY = torch.device("cuda"), 1 << 40


def on_gpu(model, spare_bytes=PLENTY):
    return not_recorded(model, device=GPU, spare_bytes=spare_bytes)


@pytest.mark.parametrize("name", checks.SPECS)
def test_on_a_gpu_what_the_fast_step_computes_is_recorded(name):
    reason = on_gpu(built(checks.SPECS[name]))
    expected = derived_step.lacks(checks.SPECS[name])
    assert expected in reason and bool(reason) == bool(expected)


def test_on_a_cpu_nothing_is_recorded():
    model = checks.single("rotary")
    assert "is on cpu" in not_recorded(model, device=torch.device("cpu"), spare_bytes=PLENTY)
    assert isinstance(fastest_stepper(model), NativeStepper)


def test_what_would_be_passed_over_keeps_the_plain_step():
    class Odd(torch.nn.Dropout):
        pass

    plain, hooked, changed = (checks.single("rotary") for _ in range(3))
    assert not on_gpu(plain)
    hooked.blocks[0].ffn.register_forward_hook(lambda *_: None)
    assert "hook would not be called" in on_gpu(hooked)
    changed.blocks[0].dropout = Odd()
    assert "no Odd, as in blocks.0.dropout" in on_gpu(changed)
    small = quantize_model(checks.single("rotary"), QuantSpec(scheme=Int8()))
    assert "the step has no Quantized" in on_gpu(small)
    mixed = checks.single("rotary")
    mixed.blocks[0].attn_norm.bfloat16()
    assert "torch.bfloat16 and torch.float32" in on_gpu(mixed)


def test_weights_of_its_own_need_room():
    model = checks.single("rotary")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert not on_gpu(model, spare_bytes=weights)
    assert f"its weights are {weights:,}" in on_gpu(model, spare_bytes=weights - 1)


def test_guesses_and_slots_need_steps_that_can_be_taken_back():
    """A recorded step is one decoding at a time, and reads one token."""
    model = checks.single("rotary")
    assert not make_stepper(model, StepSpec(speculate=True)).inner.forward_only
    assert isinstance(rewinding_stepper(built(checks.SPECS["rotary"])), TorchStepper)  # float64
    both = built(presets.seq2seq(d_model=64, n_heads=4, n_layers=2, vocab_size=97))
    slots = make_slots(both, lambda: pytest.fail("not ours"), both.spec, slots=2)
    assert isinstance(slots, OneByOneSlots) and not slots.stepper.forward_only
