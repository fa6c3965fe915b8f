"""A by-hand model beside the torch model of the same spec: same weights, same batch, same loss."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.byhand.inputs import Inputs
from glassformer.byhand.model import Model
from glassformer.data.batch import Batch, Source
from glassformer.models.model import build
from glassformer.nn.experts import BalanceLosses
from glassformer.nn.taps import Taps
from glassformer.spec import model, presets
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec

#: The presets, shrunk: what a preset decides is kept, its widths are not.
PRESETS: dict[str, ModelSpec] = {
    "digits": presets.digits(d_model=12, n_heads=3, d_ff=17),
    "fsm-probe": presets.fsm_probe(d_model=12, n_heads=3, d_ff=17),
    "fsm-factorized": presets.fsm_probe(d_model=12, n_heads=3, d_ff=17, rank=5, l1=1e-2),
    "budget-lm": presets.budget_lm(
        vocab_size=151, d_model=12, d_ff=17, n_layers=2, n_heads=3, max_seq_len=13
    ),
    "modern-lm": presets.modern_lm(
        vocab_size=31, d_model=12, d_ff=17, n_layers=2, n_heads=6, n_kv_heads=2, max_seq_len=13
    ),
    "alibi-lm": presets.alibi_lm(
        vocab_size=31, d_model=18, d_ff=17, n_layers=2, n_heads=6, max_seq_len=13
    ),
    "core": presets.core(vocab_size=31, d_model=12, n_heads=3, d_ff=17, max_seq_len=13),
    "qwen": presets.qwen(vocab_size=31, d_model=11, n_heads=6, n_kv_heads=2, d_head=4, d_ff=17),
    "qwen-sliding": presets.qwen(
        vocab_size=31,
        d_model=11,
        n_heads=6,
        n_kv_heads=2,
        d_head=4,
        d_ff=17,
        window=3,
        qk_norm=False,
    ),
    "moe": presets.moe(
        vocab_size=31,
        d_model=12,
        n_heads=6,
        n_kv_heads=2,
        n_experts=5,
        d_ff=7,
        shared_d_ff=11,
        n_layers=2,
        max_seq_len=13,
        balance=0.7,
    ),
    "gemma": presets.gemma(
        vocab_size=31, d_model=11, n_heads=6, n_kv_heads=2, d_head=4, d_ff=17, window=3
    ),
    "neox": presets.neox(vocab_size=31, d_model=12, n_heads=3, d_ff=17, n_layers=2, max_seq_len=13),
    "seq2seq": presets.seq2seq(
        vocab_size=31, source_vocab_size=23, d_model=12, n_heads=3, d_ff=17, n_layers=2
    ),
    "seq2seq-pre": presets.seq2seq(
        vocab_size=31, d_model=12, n_heads=3, d_ff=17, n_layers=2, pre_norm=True, activation="gelu"
    ),
}
#: T5's parts: learned biases by distance in both stacks, no scale, gates, one scaled table.
_SELF = model.Attention(n_heads=3, d_head=5, scale=1.0, causal=False)
_FEED = {"ffn": model.SwiGLU(d_ff=17, activation="gelu_tanh"), "norm": model.RMSNorm()}
T5 = replace(
    PRESETS["seq2seq"],
    d_model=14,
    source_vocab_size=None,
    position=model.RelativeBias(buckets=8, max_distance=5),
    encoder=model.Stack(
        layers=(model.Layers(count=2, block=model.Block(attention=_SELF, **_FEED)),),
        final_norm=model.RMSNorm(),
    ),
    decoder=model.Stack(
        layers=(
            model.Layers(
                count=2,
                block=model.Block(attention=replace(_SELF, causal=True), cross=_SELF, **_FEED),
            ),
        ),
        final_norm=model.RMSNorm(),
    ),
    share_embedding=True,
    heads=(model.NextHead(scale=14**-0.5),),
)

#: ModernBERT's parts: no norm before the first attention, GeGLU, windows to both sides, two
#: rotations, a transform before the logits; and gpt-oss's: clamped experts, sinks, a router's bias.
_WIDE = model.Attention(n_heads=3, d_head=4, causal=False)
_NEAR = replace(_WIDE, window=2, position=model.Rotary(base=100.0))
_PLAIN = model.LayerNorm(bias=False)
_GATES = {"ffn": model.SwiGLU(d_ff=17, activation="gelu"), "norm": _PLAIN}
MODERN = model.ModelSpec(
    vocab_size=29,
    d_model=12,
    max_seq_len=13,
    position=model.Rotary(),
    decoder=model.Stack(
        layers=(
            model.Layers(
                count=1, block=model.Block(attention=_WIDE, placement="pre_ffn", **_GATES)
            ),
            model.Layers(count=2, block=model.Block(attention=_NEAR, **_GATES)),
        ),
        embed_norm=_PLAIN,
        final_norm=_PLAIN,
    ),
    heads=(model.MaskedHead(transform=model.HeadTransform(bias=False, norm=_PLAIN)),),
)
_CLAMPED = model.SwiGLU(d_ff=7, bias=True, clamp=model.Clamp(limit=0.6, slope=1.3))
OSS = replace(
    PRESETS["qwen"],
    decoder=model.Stack(
        layers=(
            model.Layers(
                count=2,
                block=model.Block(
                    attention=model.Attention(
                        n_heads=6, n_kv_heads=2, d_head=4, bias="all", sinks=True, window=3
                    ),
                    ffn=model.MoE(
                        n_experts=5, experts_per_token=2, expert=_CLAMPED, router_bias=True
                    ),
                    norm=model.RMSNorm(),
                ),
            ),
        ),
        final_norm=model.RMSNorm(),
    ),
)

B, T, S = 3, 7, 5
ONE = ("answer", "vector")  # heads with one result for a sequence


@dataclass(frozen=True)
class Case:
    """Arrays of one batch."""

    tokens: np.ndarray
    valid: np.ndarray
    targets: dict[str, np.ndarray]
    segments: np.ndarray | None = None
    source: np.ndarray | None = None
    source_valid: np.ndarray | None = None

    def batch(self) -> Batch:
        source = None
        if self.source is not None and self.source_valid is not None:
            source = Source(tokens=self.source, valid=self.source_valid)
        return Batch(tokens=self.tokens, valid=self.valid, segments=self.segments, source=source)

    def inputs(self, model: Model) -> Inputs:
        return model.inputs(
            self.tokens,
            valid_BT=self.valid,
            segments_BT=self.segments,
            source_tokens_BS=self.source,
            source_valid_BS=self.source_valid,
        )


def case_for(spec: ModelSpec, *, seed: int = 0, segments: bool = False) -> Case:
    """A batch padded on the right in one row and on the left in another."""
    rng = np.random.default_rng(seed)
    length = min(T, spec.max_seq_len)
    valid = np.ones((B, length), np.bool_)
    valid[1, max(1, length - 2) :] = False
    valid[2, : length // 2] = False
    targets = {
        head: rng.integers(0, spec.head_size(head), (B,) if head in ONE else (B, length))
        for head in spec.head_names()
    }
    tokens = rng.integers(0, spec.vocab_size, (B, length))
    packed = np.sort(rng.integers(0, 3, (B, length)), axis=1) if segments else None
    if spec.encoder is None:
        return Case(tokens, valid, targets, packed)
    source_length = min(S, spec.max_seq_len)
    source_valid = np.ones((B, source_length), np.bool_)
    source_valid[0, source_length - 1 :] = False
    source = rng.integers(0, spec.source_vocab, (B, source_length))
    return Case(tokens, valid, targets, packed, source, source_valid)


def torch_twin(spec: ModelSpec, *, seed: int = 1) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """A float64 torch model in which no gain is 1 and no bias 0, and its weights by owner."""
    model = build(spec).double()
    generator = torch.Generator().manual_seed(seed)
    named = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    owned = {p.name: named[p.name].detach().numpy().copy() for p in manifest(spec) if not p.tied_to}
    return model, owned


def torch_gradients(model: torch.nn.Module, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Gradients by owner's name; zeros where the loss does not reach."""
    named = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for parameter in manifest(spec):
        if parameter.tied_to is None:
            tensor = named[parameter.name]
            grad = tensor.grad
            found[parameter.name] = np.zeros(tensor.shape) if grad is None else grad.numpy()
    return found


def torch_loss(
    model: Any,
    case: Case,
    *,
    label_smoothing: float = 0.1,
    head_weights: dict[str, float] | None = None,
    taps: Taps | None = None,
) -> Tensor:
    """The loss that `Model.loss_and_grads` describes, written with torch's own functions."""
    balance = BalanceLosses()
    total = model.penalty()
    inputs = model.inputs(case.batch())
    hidden = model.hidden(inputs, taps=taps, balance=balance)
    if balance.losses:
        total = total + balance.weighted()[1]
    for head in model.spec.head_names():
        logits = model.logits(hidden, head, valid_BT=inputs.valid_BT)
        logits = logits if taps is None else taps.visit(f"logits.{head}", logits)
        losses = F.cross_entropy(
            logits.flatten(0, -2),
            torch.tensor(case.targets[head]).flatten(),
            reduction="none",
            label_smoothing=label_smoothing,
        )
        counted = torch.ones(B) if head in ONE else torch.tensor(case.valid).flatten()
        mean = (losses * counted).sum() / counted.sum()
        total = total + (head_weights or {}).get(head, 1.0) * mean
    return total
