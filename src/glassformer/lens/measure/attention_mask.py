"""Who may look where: the masks of a pass as one matrix a kind of attention."""

import torch
from torch import Tensor

from glassformer.lens.measure.head_names import Kind
from glassformer.models.inputs import Inputs
from glassformer.nn.mask import build_mask
from glassformer.spec.model import Attention

# T queries (rows), S keys (columns)


def allowed_of(attention: Attention, kind: Kind, inputs: Inputs) -> Tensor:
    """(T, S): which cells may be attended to, empty rows included as they are: empty."""
    T = inputs.tokens_BT.shape[1]
    S = T if inputs.source_BS is None else inputs.source_BS.shape[1]
    queries, keys = {"self": (T, T), "encoder": (S, S), "cross": (T, S)}[kind]
    sides = {"tokens": inputs.valid_BT, "source": inputs.source_valid_BS}
    valid_q = sides["source" if kind == "encoder" else "tokens"]
    valid_k = sides["tokens" if kind == "self" else "source"]
    device = inputs.tokens_BT.device
    if valid_q is not None or valid_k is not None:
        ones = torch.ones(1, max(queries, keys), dtype=torch.bool, device=device)
        valid_q = ones[:, :queries] if valid_q is None else valid_q
        valid_k = ones[:, :keys] if valid_k is None else valid_k
    segments = inputs.segments_BT if kind == "self" else None
    mask = build_mask(
        queries,
        keys,
        causal=attention.causal,
        window=attention.window,
        valid_q_BT=valid_q,
        valid_k_BS=valid_k,
        segments_q_BT=segments,
        segments_k_BS=segments,
        device=device,
    )
    if mask.causal:
        allow = mask.explicit(queries, device)
    else:
        allow = mask.allow
    if allow is None:
        allow = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if mask.empty is not None:
        allow = allow & ~mask.empty
    return allow.reshape(queries, keys).cpu()
