"""Small models to quantize, and matrices whose rows and columns differ in size."""

import torch

from glassformer.models.model import Model, build
from glassformer.spec import presets
from glassformer.spec.model import ModelSpec


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(outputs: int = 37, inputs: int = 256) -> torch.Tensor:
    """Rows of very different sizes, columns too, and not around 0."""
    weight = noise(outputs, inputs) + 0.3
    weight *= torch.logspace(-2, 1, outputs)[:, None]
    weight[:, inputs // 2 :] *= 5.0
    weight[3] = 0.0
    weight[5] = weight[5].abs() + 2.0  # far from 0
    return weight


def model(of: str | ModelSpec = "qwen") -> Model:
    spec = presets.preset(of) if isinstance(of, str) else of
    made = build(spec, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            if p.ndim == 1:
                p.add_(0.1 * noise(*p.shape, seed=i))
    return made


def tokens(of: Model, rows: int = 3, length: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(of.spec.vocab_size, (rows, length), generator=generator)


@torch.no_grad()
def logits(of: Model) -> torch.Tensor:
    return of(tokens(of))["next"]
