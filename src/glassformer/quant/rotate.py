"""Rotating a model's channels before it is quantized, by matrices that neighbours absorb.

An orthogonal matrix mixes all channels, so that none is far larger than the others, and its
inverse is its transpose. `rotate` folds such matrices into weights: the rotated float model is the
same function, up to rounding, with weights and activations that have no outlier channels.

    values, in each head     v_proj rows  R W       o_proj columns  W R^T
    the residual stream      embedding    E Q       readers  W diag(gain) Q       writers  Q^T W

A norm's gain is folded into the layers that read it first: x / rms(x) does not change when x is
rotated, a gain of its own for each channel would. Rotations are Hadamard matrices times random
signs where one of the width is known, else random orthogonal matrices. (QuaRot, Ashkboos et al.,
2024. What lies between gate, up and down is not linear, and is left as it is.)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor, nn

from glassformer.models.model import DecoderLM, Holder, Model, model_of
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.experts import MixtureOfExperts
from glassformer.nn.ffn import MLP, SwiGLU
from glassformer.nn.heads import TiedHead
from glassformer.nn.linear import Linear
from glassformer.nn.norm import RMSNorm
from glassformer.nn.position import LearnedPosition
from glassformer.quant.convert import untie
from glassformer.spec.errors import InputError
from glassformer.spec.model import Placement
from glassformer.spec.quantization import Rotation

# O outputs, I inputs, D d_model, K key-value heads, H d_head, W any width


@dataclass(frozen=True, slots=True)
class Rotated:
    """What was rotated: attentions whose values were, the stream's width, a head that was untied.

    `stream` is 0 where the residual stream was left as it is.
    """

    values: int
    stream: int = 0
    untied: bool = False


@torch.no_grad()
def rotate(model: Model | Holder, what: Rotation, *, seed: int = 0) -> Rotated:
    """Rotate the values of every attention, and with "all" the residual stream; change the model.

    Refuse, by name, what a rotation cannot be folded into; the model is then as it was.
    """
    bare = model_of(model)
    if what == "all":
        reason = why_not_stream(bare)
        if reason:
            raise InputError(
                f"the residual stream cannot be rotated: {reason}",
                hint="{--rotate values|rotate='values'} rotates within heads alone",
            )
    attentions = {
        path: part for path, part in bare.named_modules() if isinstance(part, MultiHeadAttention)
    }
    for path, part in attentions.items():
        _check_plain({f"{path}.v_proj": part.v_proj, f"{path}.o_proj": part.o_proj})
    generator = torch.Generator().manual_seed(seed)
    for part in attentions.values():
        _rotate_values(part, rotation_of(part.d_head, generator))
    if what == "values":
        return Rotated(len(attentions))
    assert isinstance(bare, DecoderLM)
    loose = _must_untie(bare)
    if loose:
        untie(bare)
    _rotate_stream(bare, rotation_of(bare.spec.d_model, generator))
    return Rotated(len(attentions), bare.spec.d_model, loose)


# --- rotations ------------------------------------------------------------------------------------


def rotation_of(width: int, generator: torch.Generator) -> Tensor:
    """Return an orthogonal matrix in float64: Hadamard times random signs, or a random one."""
    made_WW = hadamard(width)
    if made_WW is None:
        noise_WW = torch.randn(width, width, dtype=torch.float64, generator=generator)
        factor_WW, rest_WW = torch.linalg.qr(noise_WW)
        uniform_WW: Tensor = factor_WW * rest_WW.diagonal().sign()
        return uniform_WW
    signs_W = 2.0 * torch.randint(2, (width,), generator=generator).double() - 1.0
    return made_WW * signs_W / math.sqrt(width)


def hadamard(order: int) -> Tensor | None:
    """Return a matrix of +1 and -1 with orthogonal rows, by Sylvester's and Paley's constructions.

    None where they give none of this order: those that are no multiple of 4, and a few others.
    """
    if order in (1, 2):
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:order, :order]
    if order < 1 or order % 4:
        return None
    half = hadamard(order // 2)
    if half is not None:
        return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))
    if _is_prime(order - 1):
        return _paley(order - 1)
    if _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
        return _paley(order // 2 - 1)
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % other for other in range(2, math.isqrt(number) + 1))


def _paley(q: int) -> Tensor:
    """Return Paley's matrix of a prime: of order q + 1 where q = 3 mod 4, else of 2 (q + 1)."""
    squares = {i * i % q for i in range(1, q)}
    sign = [0.0 if not i else 1.0 if i in squares else -1.0 for i in range(q)]
    jacobsthal = [[sign[(i - j) % q] for j in range(q)] for i in range(q)]
    side = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    side[1:, 1:] = torch.tensor(jacobsthal, dtype=torch.float64)
    eye = torch.eye(q + 1, dtype=torch.float64)
    side[0, 1:] = 1.0
    if q % 4 == 3:  # side + side^T = 0
        side[1:, 0] = -1.0
        return side + eye
    side[1:, 0] = 1.0  # side = side^T
    plus, minus = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]]).double()
    return torch.kron(side, plus) + torch.kron(eye, minus)


# --- values ---------------------------------------------------------------------------------------


def _rotate_values(part: MultiHeadAttention, rotation_HH: Tensor) -> None:
    """Values become R v in each head; the output projection turns them back."""
    for made in (part.v_proj.weight, part.v_proj.bias):
        if made is not None:
            heads_KHI = made.double().reshape(-1, part.d_head, *made.shape[1:] or (1,))
            _set(made, (rotation_HH.to(heads_KHI) @ heads_KHI).reshape(made.shape))
    columns = part.o_proj.weight.double().unflatten(1, (-1, part.d_head))
    _set(part.o_proj.weight, (columns @ rotation_HH.T.to(columns)).flatten(1))


# --- the residual stream --------------------------------------------------------------------------


def why_not_stream(model: Model) -> str:
    """Return why a rotation of the residual stream cannot be folded into weights; else nothing."""
    if not isinstance(model, DecoderLM):
        return "an encoder-decoder has two, which cross-attention joins"
    if not isinstance(model.embed, TokenEmbedding):
        return "the embedding is factorized"
    if model.position is not None and not isinstance(model.position, LearnedPosition):
        return "positions are added that are no weights"
    if model.embed_norm is not None:
        return "a norm follows the embedding, and its gain does not commute with a rotation"
    if len(model.transforms):
        return "a head transforms its vectors first"
    if set(model.heads) != set(model.spec.head_names()):
        return "a head returns the stream's vectors themselves"
    for path, part in model.named_modules():
        if isinstance(part, TransformerBlock):
            reason = _why_not_placement(part.placement)
            if reason:
                return f"{path}: {reason}"
    for path, norm in [*_norms(model), ("final_norm", model.final_norm)]:
        if norm is not None and not isinstance(norm, RMSNorm):
            return (
                f"{path} is a LayerNorm, which subtracts the mean over channels: "
                "that is another channel once they are mixed"
            )
    for path, part in _stream_layers(model):
        if type(part) is not Linear:
            return f"{path} is a {type(part).__name__}, not a plain linear layer"
    return ""


def _why_not_placement(placement: Placement) -> str:
    match placement:
        case "pre" | "parallel" | "parallel_shared":
            return ""
        case "post" | "sandwich" | "output":
            return (
                "a norm follows its parts, so that its gain writes to the stream, and a gain for "
                "each channel does not commute with a rotation"
            )
        case "pre_ffn":
            return "attention reads the stream without a norm"
        case _ as unreachable:
            assert_never(unreachable)


def _must_untie(model: DecoderLM) -> bool:
    """Return True if a tied head has to absorb a gain that the embedding must not have."""
    tied = any(isinstance(head, TiedHead) for head in model.heads.values())
    if not tied or model.final_norm is None:
        return False
    weight = model.final_norm.weight
    return bool((weight != weight[0]).any())


def _rotate_stream(model: DecoderLM, rotation_DD: Tensor) -> None:
    assert isinstance(model.embed, TokenEmbedding)
    for table in (model.embed, model.position, model.token_type):
        if table is not None:
            assert isinstance(table, (TokenEmbedding, LearnedPosition))
            _set(table.weight, table.weight.double() @ rotation_DD.to(table.weight.device))
    for _, norm, readers in _read_by(model):
        gain_D = _taken_gain(norm)
        for reader in readers:
            weight_OD = reader.weight.double()
            weight_OD = weight_OD if gain_D is None else weight_OD * gain_D
            _set(reader.weight, weight_OD @ rotation_DD.to(weight_OD))
    for _, writer in _writers(model):
        turn_DD = rotation_DD.T.to(writer.weight.device)
        _set(writer.weight, turn_DD @ writer.weight.double())
        if writer.bias is not None:
            _set(writer.bias, turn_DD @ writer.bias.double())


def _taken_gain(norm: nn.Module | None) -> Tensor | None:
    """Return a norm's gain, which is 1 from then on."""
    if norm is None:
        return None
    assert isinstance(norm, RMSNorm)
    gain_D = norm.weight.double()
    gain_D = 1.0 + gain_D if norm.offset else gain_D.clone()
    norm.weight.fill_(0.0 if norm.offset else 1.0)
    return gain_D


def _read_by(model: DecoderLM) -> Iterator[tuple[str, nn.Module | None, list[Linear]]]:
    """Yield each norm of the stream with the layers that read it; last the final one.

    A tied head reads the embedding, which is rotated already: then the final gain is one number,
    and stays.
    """
    for path, block in model.named_modules():
        if not isinstance(block, TransformerBlock):
            continue
        first = [block.attn.q_proj, block.attn.k_proj, block.attn.v_proj]
        second = [reader for reader, _ in _feed_forward(block.ffn) if reader is not None]
        if block.ffn_norm is None:  # one norm for both
            yield f"{path}.attn_norm", block.attn_norm, first + second
        else:
            yield f"{path}.attn_norm", block.attn_norm, first
            yield f"{path}.ffn_norm", block.ffn_norm, second
    heads = [head for head in model.heads.values() if isinstance(head, Linear)]
    if len(heads) == len(model.heads):
        yield "final_norm", model.final_norm, heads
    else:
        yield "heads", None, heads


def _feed_forward(
    part: MLP | SwiGLU | MixtureOfExperts,
) -> Iterator[tuple[Linear | None, Linear | None]]:
    """Yield the layers of a feed-forward that read the stream, and those that write to it."""
    match part:
        case MLP():
            yield part.up_proj, part.down_proj
        case SwiGLU():
            yield part.gate_proj, part.down_proj
            yield part.up_proj, None
        case MixtureOfExperts():
            yield part.gate, None
            if part.shared_expert_gate is not None:
                assert isinstance(part.shared_expert_gate, Linear)
                yield part.shared_expert_gate, None
            experts = [*part.experts, *([part.shared_expert] if part.shared_expert else [])]
            for expert in experts:
                assert isinstance(expert, (MLP, SwiGLU))
                yield from _feed_forward(expert)
        case _ as unreachable:
            assert_never(unreachable)


def _writers(model: DecoderLM) -> Iterator[tuple[str, Linear]]:
    for path, block in model.named_modules():
        if isinstance(block, TransformerBlock):
            yield f"{path}.attn.o_proj", block.attn.o_proj
            for _, writer in _feed_forward(block.ffn):
                if writer is not None:
                    yield f"{path}.ffn", writer


def _norms(model: DecoderLM) -> Iterator[tuple[str, nn.Module | None]]:
    for path, block in model.named_modules():
        if isinstance(block, TransformerBlock):
            yield f"{path}.attn_norm", block.attn_norm
            yield f"{path}.ffn_norm", block.ffn_norm


def _stream_layers(model: DecoderLM) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer that a rotation of the stream is folded into, heads that are tied aside."""
    for path, _, readers in _read_by(model):
        for reader in readers:
            yield f"a reader of {path}", reader
    yield from _writers(model)


def _check_plain(layers: dict[str, nn.Module]) -> None:
    for path, layer in layers.items():
        if type(layer) is not Linear:
            raise InputError(
                f"a {type(layer).__name__} cannot be rotated",
                where=path,
                hint="merge LoRA into the weights first; a quantized model: dequantize it",
            )


def _set(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))
