"""`RecordedStepper` keeps what it built, notices new weights, shares memory with nobody."""

import gc

import pytest
import torch

from glassformer.costs.estimates import cache_bytes
from glassformer.generation.loop import decode
from glassformer.generation.stepper import NaiveStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from tests.generation import checks
from tests.tiny import built

SPEC = DecodeSpec(max_new_tokens=8)


def tokens_of(stepper, prompts=checks.PROMPTS):
    return [g.tokens for g in generate_batch(stepper, prompts, spec=SPEC)]


def test_new_weights_are_noticed() -> None:
    """Derived forms follow the model: trained on, loaded into, cast."""
    model = built(checks.SPECS["rotary"])
    decoder = RecordedStepper(model)
    tokens_of(decoder)
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.neg_()
    assert tokens_of(decoder) == tokens_of(NaiveStepper(model))
    model.load_state_dict(built(checks.SPECS["rotary"], seed=9).state_dict())
    assert tokens_of(decoder) == tokens_of(NaiveStepper(model))
    model.float()
    assert tokens_of(decoder) == tokens_of(NaiveStepper(model))


def test_the_memory_is_the_size_that_the_spec_predicts_and_is_kept():
    model = built(checks.SPECS["window"])
    decoder = RecordedStepper(model)
    tokens_of(decoder)
    length = max(map(len, checks.PROMPTS)) + 8
    want = cache_bytes(model.spec, batch=3, length=length, itemsize=8)
    assert decoder.memory_bytes == want
    before = [kv.data_ptr() for kv in decoder._kvs]
    tokens_of(decoder, [[1, 2]])
    tokens_of(decoder)
    assert [kv.data_ptr() for kv in decoder._kvs] == before


def test_memory_is_flat_over_many_generations():
    decoder = RecordedStepper(built(checks.SPECS["encoder"]))
    prompts = checks.prompts_for(decoder.model)

    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    generate_batch(decoder, prompts, spec=DecodeSpec(max_new_tokens=2))
    before = tensors()
    for _ in range(50):
        generate_batch(decoder, prompts, spec=DecodeSpec(max_new_tokens=2))
    assert tensors() == before


def test_one_decoding_at_a_time() -> None:
    """A second decoding takes the memory; the first is told instead of answering nonsense."""
    decoder = RecordedStepper(built(checks.SPECS["learned"]))
    first = decode(decoder, [[1, 2]], spec=SPEC)
    next(first)
    assert len(list(decode(decoder, [[3]], spec=SPEC))) == 8
    with pytest.raises(InputError, match="another decoding"):
        next(first)


def test_layers_of_another_kind_are_refused():
    class Adapted(torch.nn.Linear):
        pass

    model = built(checks.SPECS["learned"])
    model.blocks[0].attn.o_proj = Adapted(12, 13).double()
    with pytest.raises(InputError, match=r"plain linear layers, and found Adapted"):
        tokens_of(RecordedStepper(model))
