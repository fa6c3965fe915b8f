"""`snapshot`: one pass over a few examples, kept as `Probes`, by the torch or the NumPy model.

The size is bounded: 64 tokens, five predictions per position, and fewer examples and tokens for a
model with many heads. The numbers are those of the complete example where that is possible: a
causal model does not see what was truncated; in another, a truncated example has no loss.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.byhand.model import Model as HandModel
from glassformer.data.batch import Batch, Source
from glassformer.lens.capture import eval_mode, residual_rows
from glassformer.lens.heads import HeadName, attentions, kinds_of, prefix_of
from glassformer.lens.measure.attention import allowed_maps
from glassformer.lens.measure.predictions import final_norm
from glassformer.lens.measure.probes import FULL, LETTERS, MASKED, NAMED, Probes, named
from glassformer.lens.show.text import Names
from glassformer.models.inputs import Inputs, as_inputs
from glassformer.models.model import Model
from glassformer.nn.norm import as_float
from glassformer.nn.taps import Taps
from glassformer.spec.model import ModelSpec

# B examples, N heads, T queries, S keys, D d_model, V vocabulary, R rows of the residual, M rows

EXAMPLES, TOKENS, TOP = 8, 64, 5
#: The most bytes of attention in one snapshot: beyond it, fewer examples, then fewer tokens.
MAPS = 1_000_000
#: Logits computed at once by the lens, on a CPU and on a GPU: numbers, not bytes.
PIECE, GPU_PIECE = 1 << 22, 1 << 27
#: Bytes of one letter in a file's header, at worst: escaped twice.
LETTER = 12


class Pass(NamedTuple):
    """The results of one pass, on the model's device; by hand they are arrays in tensors."""

    taps: Mapping[str, Tensor]
    hidden_BTD: Tensor
    logits: Tensor  # of one output head: (B, T, V), or (B, V)
    normed: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]  # (B, ..., D) to (B, ..., V)


def one_pass(model: Model | HandModel, batch: Batch, head: str) -> Pass:
    """Run these examples; keep attention, residual, and the logits of one output head."""
    if isinstance(model, HandModel):
        return _by_hand(model, batch, head)
    spec = model.spec
    read = ["*.attn.weights", *(tap for _, tap in residual_rows(spec))]
    taps = Taps(read=read if spec.encoder is None else [*read, "*.cross.weights"])
    norm = final_norm(model)
    inputs = model.inputs(batch)
    hidden_BTD = model.hidden(inputs, taps=taps)
    logits = model.logits(hidden_BTD, head, valid_BT=inputs.valid_BT)
    return Pass(
        {name: as_float(x) for name, x in taps.seen.items()},
        hidden_BTD,
        as_float(logits),
        lambda x: x if norm is None else norm(x.to(hidden_BTD)),
        lambda x: as_float(model.project(x.to(hidden_BTD), head)),
    )


def _by_hand(model: HandModel, batch: Batch, head: str) -> Pass:
    taps: dict[str, NDArray[Any]] = {}
    source = batch.source
    logits = model.forward(
        batch.tokens,
        valid_BT=None if batch.valid.all() else batch.valid,
        segments_BT=batch.segments,
        source_tokens_BS=None if source is None else source.tokens,
        source_valid_BS=None if source is None or source.valid.all() else source.valid,
        taps=taps,
    )
    at = prefix_of(model.spec, "self")

    def normed(x: Tensor) -> Tensor:
        return torch.from_numpy(model.final_norm(x.numpy(), prefix=at))

    def project(x_BTD: Tensor) -> Tensor:
        # Each row becomes a sequence of one token, so that an answer head reads every one of them.
        rows_MD = x_BTD.reshape(-1, x_BTD.shape[-1]).numpy()
        made = model.logits(rows_MD[:, None], head=head)
        return torch.from_numpy(made.reshape(*x_BTD.shape[:-1], -1))

    tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in taps.items()}
    return Pass(tensors, tensors[f"{at}final"], torch.from_numpy(logits[head]), normed, project)


def size_limits(spec: ModelSpec) -> tuple[int, int]:
    """Return the number of examples, and of tokens of each, kept for such a model."""
    heads = sum(each.n_heads for kind in kinds_of(spec) for each in attentions(spec, kind))
    examples, tokens = EXAMPLES, TOKENS
    while examples * heads * tokens**2 > MAPS and examples > 1:
        examples //= 2
    while heads * tokens**2 > MAPS and tokens > 8:
        tokens //= 2
    return examples, tokens


def truncate(batch: Batch, tokens: int) -> Batch:
    """Return the first `tokens` positions of each example."""
    if tokens >= batch.tokens.shape[1] and (
        batch.source is None or tokens >= batch.source.tokens.shape[1]
    ):
        return batch

    def some(array: Any) -> Any:
        return array if array is None or array.ndim == 1 else array[:, :tokens]

    source = batch.source
    return replace(
        batch,
        tokens=some(batch.tokens),
        valid=some(batch.valid),
        targets={head: some(target) for head, target in batch.targets.items()},
        weights=some(batch.weights),
        segments=some(batch.segments),
        source=source and Source(tokens=some(source.tokens), valid=some(source.valid)),
    )


def snapshot(
    model: Model | HandModel,
    batch: Batch,
    *,
    names: Names = str,
    examples: NDArray[np.integer[Any]] | None = None,
    step: int = 0,
) -> Probes:
    """Return attention, lens, norms and losses of these examples, as the model is now."""
    spec = model.spec
    tokens = size_limits(spec)[1]
    kept = truncate(batch, tokens)
    complete_B = _lengths(batch) <= tokens
    head = next((name for name in spec.head_names() if name in batch.targets), spec.head_names()[0])
    inputs = as_inputs(kept, spec, device=torch.device("cpu"))
    rows = residual_rows(spec)
    with eval_mode(model) if isinstance(model, Model) else torch.no_grad():
        passed = one_pass(model, kept, head)
        residual = [passed.taps[tap] for _, tap in rows]
        norms_BRT = torch.stack([x.norm(dim=-1) for x in residual], dim=1).float()
        ends = [*map(passed.normed, residual), passed.hidden_BTD]
        ids, shares = _lens(passed, ends)
        maps = _maps(spec, passed.taps, inputs)
        nll = _nll(passed.logits, kept, head).cpu().numpy()
    words = _words(kept.tokens, kept.valid, names)
    source = kept.source
    source_words = None if source is None else _words(source.tokens, source.valid, names)

    losses_BT, counted_BT = _losses(spec, kept, head, nll, complete_B)
    lens_ids = ids.cpu().numpy()
    numbers = np.arange(len(complete_B)) if examples is None else examples
    return Probes(
        step=step,
        head=head,
        examples=tuple(numbers.tolist()),
        complete=tuple(complete_B.tolist()),
        words=words,
        source_words=source_words,
        attention={name: x.cpu().numpy() for name, x in maps.items()},
        row_names=tuple(name for name, _ in rows),
        norms_BRT=np.where(kept.valid[:, None], norms_BRT.cpu().numpy(), np.float32(0)),
        lens_ids=lens_ids,
        lens_shares=shares.cpu().numpy(),
        names=named(lens_ids, functools.cache(names)),
        losses_BT=losses_BT,
        counted_BT=counted_BT,
    )


def max_bytes(probes: Probes, vocab_size: int) -> int:
    """Return a bound on the bytes of any snapshot of these examples, whatever the lens predicts."""
    texts = sum(map(len, probes.words + (probes.source_words or ())))
    named_ids = min(vocab_size, NAMED, probes.lens_ids.size)
    header = 1_000 + 200 * (len(probes.attention) + len(probes.row_names) + 8)
    strings = (texts + named_ids) * (LETTERS * LETTER + 24)
    maps = sum(each.nbytes for each in probes.attention.values())
    lens = probes.lens_ids.nbytes + probes.lens_shares.nbytes
    per_position = probes.norms_BRT.nbytes + probes.losses_BT.nbytes + probes.counted_BT.nbytes
    return header + strings + maps + lens + per_position + 16 * len(probes.words)


def _maps(spec: ModelSpec, taps: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """Return the weights as bytes, masked cells marked."""
    maps = {}
    for (kind, layer), allowed_BTS in allowed_maps(spec, inputs).items():
        weights_BNTS = taps[HeadName(kind, layer, 0).tap(spec, "weights")]
        bytes_BNTS = (weights_BNTS * FULL).round().to(torch.uint8)
        masked_BTS = (~allowed_BTS).to(bytes_BNTS.device)
        maps[f"{kind}.{layer}"] = bytes_BNTS.masked_fill(masked_BTS[:, None], MASKED)
    return maps


def _pieces(x: Tensor, numbers: int) -> list[slice]:
    """Return runs of examples whose logits, so many numbers each, fit in memory."""
    size = max(1, (PIECE if x.device.type == "cpu" else GPU_PIECE) // numbers)
    return [slice(start, start + size) for start in range(0, len(x), size)]


def _lens(passed: Pass, ends: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the likeliest ids (B, R, T, K) of every row of the residual, and probabilities."""
    V, T = passed.logits.shape[-1], passed.hidden_BTD.shape[1]
    all_ids, all_shares = [], []
    for x_BTD in ends:
        best = [
            torch.softmax(passed.project(x_BTD[some]), dim=-1).topk(min(TOP, V))
            for some in _pieces(x_BTD, T * V)
        ]
        all_ids.append(torch.cat([one.indices for one in best]))
        all_shares.append(torch.cat([one.values for one in best]))
    return torch.stack(all_ids, dim=1).int(), torch.stack(all_shares, dim=1).half()


def _nll(logits: Tensor, batch: Batch, head: str) -> Tensor:
    """Return -log p(target) (B, T) of every target, (B,) of answers; zeros without a target."""
    if head not in batch.targets:
        return logits.new_zeros(len(logits), dtype=torch.float64)
    target = np.where(_targeted(batch, head), batch.targets[head], 0).astype(np.int64)
    target_B = torch.as_tensor(target, device=logits.device)
    found = []
    for some in _pieces(logits, logits[0].numel()):
        logp = torch.log_softmax(logits[some].double(), dim=-1)
        found.append(-logp.gather(-1, target_B[some][..., None])[..., 0])
    return torch.cat(found)


def _targeted(batch: Batch, head: str) -> NDArray[np.bool_]:
    """Return where there is a target that counts."""
    target, weights = np.asarray(batch.targets[head]), batch.weights
    targeted = np.ones(target.shape, bool) if target.ndim == 1 else batch.valid
    if weights is not None and weights.shape == target.shape:
        targeted = targeted & (weights > 0)
    return targeted


def _losses(
    spec: ModelSpec,
    batch: Batch,
    head: str,
    nll: NDArray[np.float64],
    complete_B: NDArray[np.bool_],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return -log p(target) (B, T) and where there is a target; an answer's is where it is read."""
    losses_BT = np.zeros(batch.tokens.shape, dtype=np.float32)
    counted_BT = np.zeros(batch.tokens.shape, dtype=np.bool_)
    if head not in batch.targets:
        return losses_BT, counted_BT
    target, targeted = np.asarray(batch.targets[head]), _targeted(batch, head)
    if target.ndim == 1:
        kind = spec.head(head)
        first = kind.readout == "first"
        T = batch.tokens.shape[1]
        position_B = batch.valid.argmax(1) if first else T - 1 - batch.valid[:, ::-1].argmax(1)
        at = np.arange(len(target)), position_B
        losses_BT[at], counted_BT[at] = np.where(targeted, nll, 0.0), targeted
    else:
        losses_BT, counted_BT = np.where(targeted, nll, 0.0).astype(np.float32), targeted.copy()
    causal = target.ndim == 2 and all(attention.causal for attention in attentions(spec, "self"))
    if not causal or spec.encoder is not None:
        counted_BT &= complete_B[:, None]
    return np.where(counted_BT, losses_BT, 0.0).astype(np.float32), counted_BT


def _lengths(batch: Batch) -> NDArray[np.int64]:
    """Return the positions that each example needs, padding before it included."""

    def used(valid: NDArray[np.bool_]) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = valid.shape[1] - valid[:, ::-1].argmax(1)
        return lengths

    own = used(batch.valid)
    return own if batch.source is None else np.maximum(own, used(batch.source.valid))


def _words(
    tokens_BT: NDArray[np.integer[Any]], valid_BT: NDArray[np.bool_], names: Names
) -> tuple[tuple[str, ...], ...]:
    """Return the words up to each example's end."""
    ends = valid_BT.shape[1] - valid_BT[:, ::-1].argmax(1)
    return tuple(
        tuple(names(int(i))[:LETTERS] for i in row[:end])
        for row, end in zip(tokens_BT, ends, strict=True)
    )
