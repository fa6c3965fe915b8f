"""One pass of either engine's model with its taps, as NumPy arrays, and its way to an answer.

`snapshot`: one pass over a few examples, kept as `Probes`. Either engine's model will do.

What is kept is bounded: 64 tokens, five answers a place, and fewer examples and tokens where a
model has many heads. The numbers are those of the whole example where that is possible: a causal
model does not know what was cut off; of another, an example that was cut has no loss.
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
from glassformer.lens.measure.batch_attention import allowed_maps
from glassformer.lens.measure.capture import at_rest, residual_rows
from glassformer.lens.measure.head_names import HeadName, attentions, kinds_of, prefix_of
from glassformer.lens.measure.predictions import final_norm
from glassformer.lens.measure.probes import FULL, LETTERS, MASKED, NAMED, Probes, named
from glassformer.lens.show.token_text import Names
from glassformer.models.inputs import Inputs, as_inputs
from glassformer.models.model import Model
from glassformer.nn.taps import Taps
from glassformer.spec.model import ModelSpec

# B examples, T length, D d_model, V answers, M rows of any kind


class Pass(NamedTuple):
    """What one pass left, in NumPy, whichever engine made it."""

    taps: Mapping[str, NDArray[Any]]
    hidden_BTD: NDArray[Any]
    logits: NDArray[Any]  # of the head looked at: (B, T, V), or (B, V)
    normed: Callable[[NDArray[Any]], NDArray[Any]]
    project: Callable[[NDArray[Any]], NDArray[Any]]  # (M, D) to (M, V)


def one_pass(model: Model | HandModel, batch: Batch, head: str) -> Pass:
    """Attention and residual of these examples, and the logits of one head."""
    if isinstance(model, HandModel):
        return _by_hand(model, batch, head)
    return _torch(model, batch, head)


def _torch(model: Model, batch: Batch, head: str) -> Pass:
    spec = model.spec
    read = ["*.attn.weights", *(tap for _, tap in residual_rows(spec))]
    taps = Taps(read=read if spec.encoder is None else [*read, "*.cross.weights"])
    norm = final_norm(model)

    def array(x: torch.Tensor) -> NDArray[Any]:
        return (x if x.dtype == torch.float64 else x.float()).cpu().numpy()

    def through(part: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., NDArray[Any]]:
        def call(x: NDArray[Any]) -> NDArray[Any]:
            with at_rest(model):
                return array(part(torch.from_numpy(x).to(hidden_BTD)))

        return call

    with at_rest(model):
        inputs = model.inputs(batch)
        hidden_BTD = model.hidden(inputs, taps=taps)
        logits = model.logits(hidden_BTD, head, valid_BT=inputs.valid_BT)
    return Pass(
        {name: array(x) for name, x in taps.seen.items()},
        array(hidden_BTD),
        array(logits),
        (lambda x: x) if norm is None else through(norm),
        through(lambda rows: model.project(rows, head)),
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

    # A row is a sequence of one token: there even a head that answers once reads every one of them.
    return Pass(
        taps,
        taps[f"{at}final"],
        logits[head],
        normed,
        lambda rows: model.logits(rows[:, None], head=head).reshape(len(rows), -1),
    )


# B examples, N heads, T queries, S keys, D d_model, V answers, R rows of the residual

EXAMPLES, TOKENS, TOP = 8, 64, 5
#: Attention of one snapshot, in bytes: beyond it, fewer examples, then fewer tokens are kept.
MAPS = 1_000_000
#: Logits made at once by the lens: numbers, not bytes.
PIECE = 1 << 22
#: A letter of a word in a file's header, escaped twice, at worst.
LETTER = 12


def room(spec: ModelSpec) -> tuple[int, int]:
    """How many examples and how many tokens of each are kept of such a model."""
    heads = sum(each.n_heads for kind in kinds_of(spec) for each in attentions(spec, kind))
    examples, tokens = EXAMPLES, TOKENS
    while examples * heads * tokens**2 > MAPS and examples > 1:
        examples //= 2
    while heads * tokens**2 > MAPS and tokens > 8:
        tokens //= 2
    return examples, tokens


def cut(batch: Batch, tokens: int) -> Batch:
    """The first so many places of each example."""
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
    """Attention, lens, norms and losses of these examples, as the model is now."""
    spec = model.spec
    tokens = room(spec)[1]
    kept = cut(batch, tokens)
    whole_B = _lengths(batch) <= tokens
    head = next((name for name in spec.head_names() if name in batch.targets), spec.head_names()[0])
    inputs = as_inputs(kept, spec, device=torch.device("cpu"))
    seen = one_pass(model, kept, head)
    rows = residual_rows(spec)
    norms = [np.linalg.norm(seen.taps[tap], axis=-1) for _, tap in rows]
    norms_BRT = np.where(kept.valid[:, None], np.stack(norms, axis=1), 0.0).astype(np.float32)
    ends = [seen.normed(seen.taps[tap]) for _, tap in rows]
    ids, shares = _lens(seen, [*ends, seen.hidden_BTD])
    losses_BT, counted_BT = _losses(spec, kept, head, seen.logits, whole_B)
    return Probes(
        step=step,
        head=head,
        examples=tuple((np.arange(len(whole_B)) if examples is None else examples).tolist()),
        whole=tuple(whole_B.tolist()),
        words=_words(kept.tokens, kept.valid, names),
        source_words=kept.source and _words(kept.source.tokens, kept.source.valid, names),
        attention=_maps(spec, seen.taps, inputs),
        row_names=tuple(name for name, _ in rows),
        norms_BRT=norms_BRT,
        lens_ids=ids,
        lens_shares=shares,
        names=named(ids, names),
        losses_BT=losses_BT,
        counted_BT=counted_BT,
    )


def largest(found: Probes, vocab_size: int) -> int:
    """Bytes that no snapshot of these examples exceeds, whatever the lens may come to say."""
    texts = sum(map(len, found.words + (found.source_words or ())))
    answers = min(vocab_size, NAMED, found.lens_ids.size)
    header = 1_000 + 200 * (len(found.attention) + len(found.row_names) + 8)
    said = (texts + answers) * (LETTERS * LETTER + 24)
    maps = sum(each.nbytes for each in found.attention.values())
    lens = found.lens_ids.nbytes + found.lens_shares.nbytes
    per_place = found.norms_BRT.nbytes + found.losses_BT.nbytes + found.counted_BT.nbytes
    return header + said + maps + lens + per_place + 16 * len(found.words)


def _maps(
    spec: ModelSpec, taps: Mapping[str, NDArray[Any]], inputs: Inputs
) -> dict[str, NDArray[np.uint8]]:
    """Weights as bytes, masked cells marked."""
    found = {}
    for (kind, layer), allowed_BTS in allowed_maps(spec, inputs).items():
        weights_BNTS = taps[HeadName(kind, layer, 0).tap(spec, "weights")]
        bytes_BNTS = np.rint(weights_BNTS * FULL).astype(np.uint8)
        allowed_B1TS = allowed_BTS[:, None].numpy()
        found[f"{kind}.{layer}"] = np.where(allowed_B1TS, bytes_BNTS, np.uint8(MASKED))
    return found


def _lens(seen: Pass, ends: list[NDArray[Any]]) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """The likeliest answers (B, R, T, K) of every row of the residual, and their probabilities."""
    rows_BRTD = np.stack(ends, axis=1)
    B, R, T, D = rows_BRTD.shape
    rows_MD = np.ascontiguousarray(rows_BRTD.reshape(-1, D))
    V = seen.logits.shape[-1]
    top, step = min(TOP, V), max(1, PIECE // V)
    ids, shares = [], []
    for start in range(0, len(rows_MD), step):
        logits_MV = torch.from_numpy(seen.project(rows_MD[start : start + step]))
        best = torch.softmax(logits_MV, dim=-1).topk(top)
        ids.append(best.indices.numpy())
        shares.append(best.values.numpy())
    shape = (B, R, T, top)
    made_ids = np.concatenate(ids).reshape(shape).astype(np.int32)
    return made_ids, np.concatenate(shares).reshape(shape).astype(np.float16)


def _losses(
    spec: ModelSpec,
    batch: Batch,
    head: str,
    logits: NDArray[Any],
    whole_B: NDArray[np.bool_],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """-log p(target) (B, T) and where it was asked for; an answer's stands where it is read."""
    losses_BT = np.zeros(batch.tokens.shape, dtype=np.float32)
    counted_BT = np.zeros(batch.tokens.shape, dtype=np.bool_)
    if head not in batch.targets:
        return losses_BT, counted_BT
    target = np.asarray(batch.targets[head])
    logp = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    weights = batch.weights
    asked = np.ones(target.shape, bool) if target.ndim == 1 else batch.valid
    if weights is not None and weights.shape == target.shape:
        asked = asked & (weights > 0)
    chosen = np.where(asked, target, 0)[..., None]
    nll = -np.take_along_axis(logp, chosen, -1)[..., 0]
    if target.ndim == 1:
        kind = spec.head(head)
        first = kind.readout == "first"
        T = batch.tokens.shape[1]
        place_B = batch.valid.argmax(1) if first else T - 1 - batch.valid[:, ::-1].argmax(1)
        at = np.arange(len(target)), place_B
        losses_BT[at], counted_BT[at] = np.where(asked, nll, 0.0), asked
    else:
        losses_BT, counted_BT = np.where(asked, nll, 0.0).astype(np.float32), asked.copy()
    causal = target.ndim == 2 and all(attention.causal for attention in attentions(spec, "self"))
    if not causal or spec.encoder is not None:
        counted_BT &= whole_B[:, None]
    return np.where(counted_BT, losses_BT, 0.0).astype(np.float32), counted_BT


def _lengths(batch: Batch) -> NDArray[np.int64]:
    """Places that each example needs, padding before it included."""

    def used(valid: NDArray[np.bool_]) -> NDArray[np.int64]:
        return valid.shape[1] - valid[:, ::-1].argmax(1)

    own = used(batch.valid)
    return own if batch.source is None else np.maximum(own, used(batch.source.valid))


def _words(
    tokens_BT: NDArray[np.integer[Any]], valid_BT: NDArray[np.bool_], names: Names
) -> tuple[tuple[str, ...], ...]:
    """Words up to each example's end."""
    ends = valid_BT.shape[1] - valid_BT[:, ::-1].argmax(1)
    return tuple(
        tuple(names(int(i))[:LETTERS] for i in row[:end])
        for row, end in zip(tokens_BT, ends, strict=True)
    )
