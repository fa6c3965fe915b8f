"""Tiny models for the lens: every kind of stack whose parts it must name rightly."""

from functools import cache

import torch

from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.spec.model import (
    AnswerHead,
    ClassHead,
    LayerNorm,
    NextHead,
    RMSNorm,
    Rotary,
    StateHead,
    SwiGLU,
)
from tests.tiny import S, T, built, tiny, token_ids

GROUPED = {"n_heads": 6, "n_kv_heads": 2, "d_head": 4, "bias": "none", "qk_norm": RMSNorm()}

SPECS = {
    "decoder": {"final_norm": LayerNorm()},
    "post-norm": {"placement": "post", "layers": 3},
    "grouped": {
        "attention": GROUPED,
        "ffn": SwiGLU(d_ff=17),
        "norm": RMSNorm(),
        "final_norm": RMSNorm(),
        "position": Rotary(),
    },
    "window": {"attention": {"window": 3}, "final_norm": LayerNorm()},
    "bare": {},
    "encoder-decoder": {"encoder": True, "final_norm": LayerNorm()},
    "post encoder-decoder": {"encoder": True, "placement": "post"},
    "answer": {
        "attention": {"causal": False},
        "placement": "post",
        "heads": (AnswerHead(),),
    },
    "first": {"attention": {"causal": False}, "heads": (AnswerHead(readout="first"),)},
    "mean": {"attention": {"causal": False}, "heads": (AnswerHead(readout="mean"),)},
    "several heads": {
        "final_norm": LayerNorm(),
        "heads": (NextHead(tied=True), ClassHead(num_classes=5), StateHead(num_states=7)),
    },
}
DECODERS = ("decoder", "post-norm", "grouped", "window", "bare")
ENCODED = ("encoder-decoder", "post encoder-decoder")
ANSWERING = ("answer", "first", "mean")


@cache
def model_of(name: str) -> Model:
    """In float64, every weight drawn anew; small, so that no softmax is a single word."""
    model = built(tiny(**SPECS[name]), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    return model


def inputs_of(name: str, *, seed: int = 0, padded: bool = False) -> Inputs:
    """One sequence, with a source where there is an encoder; padded ones end early."""
    tokens_1T = token_ids(1, T, seed=seed)
    valid = torch.ones(1, T, dtype=torch.bool)
    if padded:
        valid[0, T - 2 :] = False
    if "encoder" not in SPECS[name]:
        return Inputs(tokens_1T, valid if padded else None)
    source_valid = torch.ones(1, S, dtype=torch.bool)
    if padded:
        source_valid[0, S - 3 :] = False
    source_1S = token_ids(1, S, seed=seed + 1)
    if not padded:
        return Inputs(tokens_1T, source_BS=source_1S)
    return Inputs(tokens_1T, valid, source_BS=source_1S, source_valid_BS=source_valid)


EXACT = 1e-12  # float64: the same sums in another order


def by_hand(model, inputs, head):
    """log p of every position, from the model's own forward."""
    with torch.no_grad():
        return torch.log_softmax(model(inputs)[head][0], dim=-1)
