"""The first values of parameters: sampled by the manifest's rules, from a given generator."""

from typing import assert_never

import torch
from torch import nn

from glassformer.spec.init import Constant, Gaussian, Uniform
from glassformer.spec.manifest import Parameter


@torch.no_grad()
def initialise(
    module: nn.Module,
    parameters: tuple[Parameter, ...],
    *,
    generator: torch.Generator | None = None,
) -> None:
    """Initialise each named parameter in the manifest's order; the default is torch's generator.

    The order and the rules come from the spec, so that the same seed gives the same weights however
    the module was assembled.
    """
    own = dict(module.named_parameters())
    for parameter in parameters:
        if parameter.tied_to is not None:
            continue
        match parameter.init:
            case Constant(value=value):
                own[parameter.name].fill_(value)
            case Uniform(bound=bound):
                own[parameter.name].uniform_(-bound, bound, generator=generator)
            case Gaussian(std=std):
                own[parameter.name].normal_(0.0, std, generator=generator)
            case _ as unreachable:
                assert_never(unreachable)
