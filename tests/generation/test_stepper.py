"""Steppers: cached = uncached at every step, a batch = its rows alone, work is counted."""

import numpy as np
import pytest
import torch

from glassformer.byhand.model import Model as HandModel
from glassformer.checks.preset_subjects import NARROW, perturb
from glassformer.generation.stepper import HandStepper, NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.derived_step import lacks
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.models.weights import weights_of
from glassformer.spec import presets
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from tests.generation import checks
from tests.tiny import built

DECODING = [name for name in presets.PRESETS if name != "digits"]


@pytest.mark.parametrize("stepper", checks.STEPPERS)
@pytest.mark.parametrize("spec", checks.SPECS)
def test_cached_is_uncached_at_every_step(spec, stepper):
    checks.cached_is_uncached(steppers=(stepper,), specs=(spec,))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", DECODING)
def test_every_preset_decodes_alike_with_and_without_a_cache(name, dtype, limit):
    spec = NARROW.get(name) or presets.preset(name)
    model = perturb(build(spec), dtype=dtype, seed=3)
    sources = None if spec.encoder is None else checks.SOURCES
    prompts = Prompts(((3, 1, 4, 1, 5), (2, 2), (6, 5, 3)), sources)
    for make in (TorchStepper,) if lacks(spec) else (TorchStepper, RecordedStepper):
        assert max(checks.paired_logits(make, model, prompts, steps=8)) <= limit


def test_what_is_left_in_memory_is_masked():
    checks.used_memory_is_masked()


def test_a_batch_is_its_rows_alone_padded_on_either_side():
    checks.batch_is_singles()


def test_one_token_a_step_and_one_run_of_the_encoder():
    checks.steps_are_counted()


@pytest.mark.parametrize("name", checks.SPECS)
def test_the_by_hand_engine_is_one_more_stepper(name):
    model = built(checks.SPECS[name])
    hand = HandStepper(HandModel(model.spec, params=weights_of(model)))
    prompts = checks.prompts_for(model)
    worst = max(checks.paired_logits(lambda _: hand, model, prompts, steps=6))
    assert worst <= 1e-11
    spec = DecodeSpec(max_new_tokens=8, temperature=0.9, seed=4, eos=(1,))
    ours, theirs = (generate_batch(s, prompts, spec=spec) for s in (hand, NaiveStepper(model)))
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]


def test_the_by_hand_engine_says_that_it_counts_padding():
    model = built(checks.SPECS["learned"])
    hand = HandStepper(HandModel(model.spec, params=weights_of(model)))
    with pytest.raises(InputError, match="counts padding"):
        generate_batch(hand, [[1] * 20, [2]], spec=DecodeSpec(max_new_tokens=20))


@pytest.mark.parametrize("make", [TorchStepper, NaiveStepper, RecordedStepper])
def test_models_that_cannot_decode_are_refused(make):
    with pytest.raises(InputError, match="no next-token head"):
        make(build(presets.digits()))
    with pytest.raises(InputError, match="training mode"):
        make(built(checks.SPECS["learned"]).train())


def test_rows_fill_the_context_each_for_itself():
    model = built(checks.SPECS["learned"])  # max_seq_len 29
    for stepper in (TorchStepper(model), RecordedStepper(model)):
        got = generate_batch(
            stepper, [[1] * 28, [2] * 3, [3] * 20], spec=DecodeSpec(max_new_tokens=99)
        )
        assert [len(g.tokens) for g in got] == [1, 26, 9]
        (alone,) = generate_batch(
            NaiveStepper(model), [[2] * 3], spec=DecodeSpec(max_new_tokens=99)
        )
        assert alone.tokens == got[1].tokens


def test_prompts_come_from_batches_and_arrays():
    tokens, valid = np.array([[0, 5, 6], [7, 8, 9]]), np.array([[0, 1, 1], [1, 1, 1]], bool)
    assert Prompts.of(tokens, valid=valid).tokens == ((5, 6), (7, 8, 9))
    assert Prompts.of(torch.from_numpy(tokens)).tokens == ((0, 5, 6), (7, 8, 9))
    with pytest.raises(InputError, match="mask of shape"):
        Prompts.of(tokens, valid=valid[:1])
    with pytest.raises(InputError, match="cannot be read"):
        Prompts.of([[0.5]])
