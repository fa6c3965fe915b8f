"""Heads: hidden states to logits, by a projection of their own or by the transposed embedding."""

from typing import assert_never

import torch
from torch import Tensor, nn

from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.linear import Linear
from glassformer.nn.norm import build_norm
from glassformer.nn.operations import Part
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import is_tied

# B batch, T length, D d_model, V logits


class TiedHead(nn.Module):
    """embed.as_linear(x) + bias. The embedding is an argument, so the weights are stored once."""

    def __init__(self, size: int, *, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x_BTD: Tensor, embed: TokenEmbedding | FactorizedTokenEmbedding) -> Tensor:
        logits_BTV = embed.as_linear(x_BTD)
        return logits_BTV if self.bias is None else logits_BTV + self.bias


class HeadTransform(Part):
    """norm(act(dense(x)))."""

    def __init__(self, transform: spec.HeadTransform, d_model: int) -> None:
        super().__init__()
        self.activation = transform.activation
        self.dense = Linear(d_model, d_model, bias=transform.bias)
        self.norm = build_norm(transform.norm, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed_BTD: Tensor = self.norm(self.operations.activate(self.dense(x_BTD), self.activation))
        return normed_BTD


class Pooler(Linear):
    """tanh(W x + b)."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.tanh(super().forward(x_BD))


def read_out(x_BTD: Tensor, valid_BT: Tensor | None, *, readout: str) -> Tensor:
    """Return one vector per sequence: at the last or first valid position, or their mean."""
    if valid_BT is None:
        valid_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
    match readout:
        case "mean":
            share_BT = valid_BT.to(x_BTD.dtype) / valid_BT.sum(1, keepdim=True).clamp(min=1)
            return (x_BTD * share_BT.unsqueeze(-1)).sum(1)
        case "last":
            T = valid_BT.shape[1]
            index_B = T - 1 - valid_BT.flip(1).int().argmax(1)
        case "first":
            index_B = valid_BT.int().argmax(1)
        case _:
            raise InputError(f"unknown readout '{readout}'", hint="last, first or mean")
    return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), index_B]


def build_transforms(model: spec.ModelSpec) -> nn.ModuleDict:
    """Build what stands between the last block and a head, by the head's name."""
    made = nn.ModuleDict()
    for head in model.heads:
        if isinstance(head, spec.MaskedHead) and head.transform is not None:
            made["masked"] = HeadTransform(head.transform, model.d_model)
    return made


def build_heads(model: spec.ModelSpec) -> nn.ModuleDict:
    """Build the modules of the spec's heads, by name; a vector without a pooler has none."""
    heads = nn.ModuleDict()
    for head, name in zip(model.heads, model.head_names(), strict=True):
        size = model.head_size(name)
        if isinstance(head, spec.VectorHead):
            if head.pooler:
                heads[name] = Pooler(model.d_model, size, bias=True)
        elif is_tied(head):
            heads[name] = TiedHead(size, bias=head.bias)
        else:
            heads[name] = Linear(model.d_model, size, bias=head.bias)
    return heads


def finished(logits: Tensor, head: spec.Head) -> Tensor:
    """Scale and cap a head's logits, where its spec says so."""
    match head:
        case spec.NextHead():
            if head.scale != 1.0:
                logits = logits * head.scale
            if head.softcap is not None:
                logits = head.softcap * torch.tanh(logits / head.softcap)
            return logits
        case (
            spec.ClassHead()
            | spec.StateHead()
            | spec.AnswerHead()
            | spec.MaskedHead()
            | spec.VectorHead()
        ):
            return logits
        case _ as unreachable:
            assert_never(unreachable)
