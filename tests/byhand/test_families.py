"""Every family's model in NumPy: logits' loss and every gradient are autograd's."""

from dataclasses import replace

import pytest
from bench.families import CASES, module_of

from glassformer.adapters.config import Config
from glassformer.adapters.registry import adapter_for
from glassformer.adapters.table import Family
from glassformer.spec.model import Dropout, ModelSpec
from tests.byhand.test_model_parity import assert_same_gradients

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def spec_of(name: str) -> ModelSpec:
    """Return the spec of a family's tiny model, without dropout."""
    module = module_of(CASES[name])
    config = Config(module.config.to_dict() | {"architectures": [type(module).__name__]})
    family = Family.of(adapter_for(config)[0].families, config)
    assert family is not None
    spec = family.spec_of(config)
    stacks = {
        side: replace(stack, dropout=Dropout())
        for side, stack in (("encoder", spec.encoder), ("decoder", spec.decoder))
        if stack is not None
    }
    return replace(spec, **stacks)


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_of_a_family_is_autograds(name: str) -> None:
    assert_same_gradients(spec_of(name))
