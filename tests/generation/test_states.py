"""Random sequences of operations on states, and a planted fault for each operation."""

import random

import pytest
import torch
from bench.states import KINDS, STEPPERS, run_sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import HandStepper, NaiveStepper, TorchStepper
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.spec import presets
from glassformer.spec.errors import FileError, GlassError, InputError
from tests.generation.state_faults import FAULTS
from tests.planting import planted

CASES = [(kind, name) for kind in KINDS for name in STEPPERS if STEPPERS[name](kind) is not None]


@pytest.mark.parametrize(("kind", "name"), CASES)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.randoms(use_true_random=False))
def test_every_sequence_gives_what_a_fresh_computation_gives(kind, name, draw):
    run_sequence(STEPPERS[name](kind), draw, operations=8)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    kind, _, name = fault.caught_by.rpartition(", ")

    def twelve():
        for seed in range(12):
            run_sequence(STEPPERS[name](kind), random.Random(seed))

    with planted(fault), pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)):
        twelve()


def test_a_state_of_another_model_is_refused_by_its_file(tmp_path):
    path, prompts = tmp_path / "held.safetensors", Prompts(((3, 1, 4),))
    spec = presets.core(vocab_size=23, d_model=32, n_heads=2)
    one, other = (build(spec, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    stepper = TorchStepper(one)
    stepper.save(path, past=stepper.start(prompts, room=4)[1], tokens=prompts.tokens[0])
    assert stepper.load(path, room=4).lengths == [3]
    for stranger in (TorchStepper(other), NativeStepper(one), TorchStepper(one, kv_cache="int8")):
        with pytest.raises(FileError, match="of another model") as caught:
            stranger.load(path, room=4)
        assert "held.safetensors" in str(caught.value)


def test_a_state_says_what_it_cannot_do():
    model = build(presets.core(vocab_size=23, d_model=32, n_heads=2))
    stepper = NaiveStepper(model)
    _, past = stepper.start(Prompts(((3, 1, 4),)), room=4)
    with pytest.raises(InputError, match="a Text cannot be saved"):
        past.arrays()
    with pytest.raises(GlassError, match="NaiveStepper reads one token at a time"):
        stepper.extend([1, 2], past=past)
    assert HandStepper.forward_only == TorchStepper.forward_only == ""
