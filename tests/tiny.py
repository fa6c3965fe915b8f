"""Tiny models and inputs: sizes are distinct primes wherever the architecture lets them be."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from glassformer.models.model import DecoderLM, EncoderDecoder, build
from glassformer.spec.model import (
    MLP,
    Attention,
    Block,
    LayerNorm,
    Layers,
    ModelSpec,
    NextHead,
    Stack,
)

M = TypeVar("M", bound=nn.Module)

B, T, S = 3, 7, 11
D_MODEL, D_FF, VOCAB, MAX_SEQ_LEN = 13, 17, 19, 29


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Unit normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def token_ids(*shape: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """Ids below `vocab` that depend on the seed alone."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def filled(module: M, *, seed: int = 1) -> M:
    """The module in float64 with every parameter drawn anew, gains and biases too."""
    module = module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return module


def tiny(
    *,
    attention: dict[str, Any] | None = None,
    ffn: Any = None,
    norm: Any = None,
    placement: Any = "pre",
    layers: int = 2,
    encoder: bool = False,
    final_norm: Any = None,
    dropout: Any = None,
    **model: Any,
) -> ModelSpec:
    """A small spec; `attention` changes fields of every self-attention, `model` of the model."""
    heads = {"n_heads": 3, "d_head": 4, "bias": "all"} | (attention or {})
    shared = {
        "ffn": MLP(d_ff=D_FF) if ffn is None else ffn,
        "norm": LayerNorm() if norm is None else norm,
        "placement": placement,
    }
    blind = Attention(**{**heads, "causal": False, "window": None})
    rest = {"final_norm": final_norm} | ({} if dropout is None else {"dropout": dropout})
    block = Block(attention=Attention(**heads), cross=blind if encoder else None, **shared)
    sizes = {"vocab_size": VOCAB, "d_model": D_MODEL, "max_seq_len": MAX_SEQ_LEN}
    if encoder:
        run = Layers(count=layers, block=Block(attention=blind, **shared))
        model = {"encoder": Stack(layers=(run,), **rest)} | model
    return ModelSpec(
        **{
            **sizes,
            "decoder": Stack(layers=(Layers(count=layers, block=block),), **rest),
            "heads": (NextHead(tied=False, bias=True),),
            **model,
        }
    )


def built(spec: ModelSpec, *, seed: int = 1) -> DecoderLM | EncoderDecoder:
    """A float64 model in eval mode in which no gain is 1 and no bias 0."""
    return filled(build(spec), seed=seed)
