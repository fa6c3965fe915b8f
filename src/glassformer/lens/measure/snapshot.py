"""`snapshot`: one pass over a few examples, kept as `Probes`, by the torch or the NumPy model.

The size is bounded: 64 tokens, five predictions per position, and fewer examples and tokens for a
model with many heads. The numbers are those of the complete example where that is possible: a
causal model does not see what was truncated; in another, a truncated example has no loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.byhand.model import Model as HandModel
from glassformer.byhand.norm import norm_forward
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
#: Logits computed at once by the lens: numbers, not bytes.
PIECE = 1 << 22
#: Bytes of one letter in a file's header, at worst: escaped twice.
LETTER = 12


class Pass(NamedTuple):
    """The results of one pass in NumPy, by either engine."""

    taps: Mapping[str, NDArray[Any]]
    hidden_BTD: NDArray[Any]
    logits: NDArray[Any]  # of one output head: (B, T, V), or (B, V)
    normed: Callable[[NDArray[Any]], NDArray[Any]]
    likeliest: Callable[[NDArray[Any], int], tuple[NDArray[Any], NDArray[Any]]]
    # (M, D) to the ids and probabilities (M, K) of the K likeliest classes


def one_pass(model: Model | HandModel, batch: Batch, head: str) -> Pass:
    """Run these examples; keep attention, residual, and the logits of one output head."""
    if isinstance(model, HandModel):
        return _by_hand(model, batch, head)
    return _torch(model, batch, head)


def _torch(model: Model, batch: Batch, head: str) -> Pass:
    spec = model.spec
    read = ["*.attn.weights", *(tap for _, tap in residual_rows(spec))]
    taps = Taps(read=read if spec.encoder is None else [*read, "*.cross.weights"])
    norm = final_norm(model)

    def array(x: torch.Tensor) -> NDArray[Any]:
        return as_float(x).cpu().numpy()

    def normed(x: NDArray[Any]) -> NDArray[Any]:
        if norm is None:
            return x
        with eval_mode(model):
            return array(norm(torch.from_numpy(x).to(hidden_BTD)))

    def likeliest(rows_MD: NDArray[Any], top: int) -> tuple[NDArray[Any], NDArray[Any]]:
        with eval_mode(model):
            logits_MV = model.project(torch.from_numpy(rows_MD).to(hidden_BTD), head)
            return _likeliest(as_float(logits_MV), top)

    with eval_mode(model):
        inputs = model.inputs(batch)
        hidden_BTD = model.hidden(inputs, taps=taps)
        logits = model.logits(hidden_BTD, head, valid_BT=inputs.valid_BT)
    return Pass(
        {name: array(x) for name, x in taps.seen.items()},
        array(hidden_BTD),
        array(logits),
        normed,
        likeliest,
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
    parts = model.stack(at)
    final = parts.stack.final_norm

    def normed(x: NDArray[Any]) -> NDArray[Any]:
        if final is None:
            return x
        return norm_forward(x, norm=final, params=parts.own, name="final_norm")[0]

    def likeliest(rows_MD: NDArray[Any], top: int) -> tuple[NDArray[Any], NDArray[Any]]:
        # Each row becomes a sequence of one token, so that an answer head reads every one of them.
        logits_MV = model.logits(rows_MD[:, None], head=head).reshape(len(rows_MD), -1)
        return _likeliest(torch.from_numpy(logits_MV), top)

    return Pass(taps, taps[f"{at}final"], logits[head], normed, likeliest)


def _likeliest(logits_MV: torch.Tensor, top: int) -> tuple[NDArray[Any], NDArray[Any]]:
    best = torch.softmax(logits_MV, dim=-1).topk(top)
    return best.indices.cpu().numpy(), best.values.cpu().numpy()


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
    passed = one_pass(model, kept, head)
    rows = residual_rows(spec)
    norms = [np.linalg.norm(passed.taps[tap], axis=-1) for _, tap in rows]
    norms_BRT = np.where(kept.valid[:, None], np.stack(norms, axis=1), 0.0).astype(np.float32)
    ends = [passed.normed(passed.taps[tap]) for _, tap in rows]
    ids, shares = _lens(passed, [*ends, passed.hidden_BTD])
    losses_BT, counted_BT = _losses(spec, kept, head, passed.logits, complete_B)
    return Probes(
        step=step,
        head=head,
        examples=tuple((np.arange(len(complete_B)) if examples is None else examples).tolist()),
        complete=tuple(complete_B.tolist()),
        words=_words(kept.tokens, kept.valid, names),
        source_words=None
        if kept.source is None
        else _words(kept.source.tokens, kept.source.valid, names),
        attention=_maps(spec, passed.taps, inputs),
        row_names=tuple(name for name, _ in rows),
        norms_BRT=norms_BRT,
        lens_ids=ids,
        lens_shares=shares,
        names=named(ids, names),
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


def _maps(
    spec: ModelSpec, taps: Mapping[str, NDArray[Any]], inputs: Inputs
) -> dict[str, NDArray[np.uint8]]:
    """Return the weights as bytes, masked cells marked."""
    maps = {}
    for (kind, layer), allowed_BTS in allowed_maps(spec, inputs).items():
        weights_BNTS = taps[HeadName(kind, layer, 0).tap(spec, "weights")]
        bytes_BNTS = np.rint(weights_BNTS * FULL).astype(np.uint8)
        allowed_B1TS = allowed_BTS[:, None].numpy()
        maps[f"{kind}.{layer}"] = np.where(allowed_B1TS, bytes_BNTS, np.uint8(MASKED))
    return maps


def _lens(passed: Pass, ends: list[NDArray[Any]]) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the likeliest ids (B, R, T, K) of every row of the residual, and probabilities."""
    rows_BRTD = np.stack(ends, axis=1)
    B, R, T, D = rows_BRTD.shape
    rows_MD = np.ascontiguousarray(rows_BRTD.reshape(-1, D))
    V = passed.logits.shape[-1]
    top, step = min(TOP, V), max(1, PIECE // V)
    ids, shares = [], []
    for start in range(0, len(rows_MD), step):
        some_ids, some_shares = passed.likeliest(rows_MD[start : start + step], top)
        ids.append(some_ids)
        shares.append(some_shares)
    shape = (B, R, T, top)
    made_ids = np.concatenate(ids).reshape(shape).astype(np.int32)
    return made_ids, np.concatenate(shares).reshape(shape).astype(np.float16)


def _losses(
    spec: ModelSpec,
    batch: Batch,
    head: str,
    logits: NDArray[Any],
    complete_B: NDArray[np.bool_],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return -log p(target) (B, T) and where there is a target; an answer's is where it is read."""
    losses_BT = np.zeros(batch.tokens.shape, dtype=np.float32)
    counted_BT = np.zeros(batch.tokens.shape, dtype=np.bool_)
    if head not in batch.targets:
        return losses_BT, counted_BT
    target = np.asarray(batch.targets[head])
    logp = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    weights = batch.weights
    targeted = np.ones(target.shape, bool) if target.ndim == 1 else batch.valid
    if weights is not None and weights.shape == target.shape:
        targeted = targeted & (weights > 0)
    chosen = np.where(targeted, target, 0)[..., None]
    nll = -np.take_along_axis(logp, chosen, -1)[..., 0]
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
