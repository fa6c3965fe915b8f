"""Mistakes in what is predicted from what: the loss at the start, shifts, masks, answers in reach.

All are read from the targets and weights that the loss really uses, and from how the logits move
when tokens elsewhere are changed.
"""

import math
import statistics
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from glasscheck.foreign import looks_fresh
from glasscheck.measure import NotOffered, seeded
from glasscheck.patients import Call, Patient, Rows, View
from glasscheck.setups import Symptom, cut, ids_in, mistake, passed, shown

# B batch, T length, V classes


def initial_loss(p: Patient) -> Symptom:
    """A model that knows nothing has ln V, and half the variance of its logits more.

    Independent of the targets, logits z give E[logsumexp(z)] - E[z], about ln V + var(z) / 2: the
    mean over targets of the batch's own frequencies is that number for these very logits.
    """
    views = p.views()
    if not views:
        raise NotOffered("the targets cannot be read from the loss")
    said = []
    for head in dict.fromkeys(v.head for v in views):
        own = [v for v in views if v.head == head]
        found = _initial(p, own)
        if isinstance(found, Symptom):
            return found
        said.append(f"{head}: {found}" if head else found)
    return passed("; ".join(said))


def _initial(p: Patient, views: list[View]) -> Symptom | str:
    V = views[0].logits.shape[-1]
    logits = torch.cat([v.logits[v.counted] for v in views])
    targets = torch.cat([v.targets[v.counted] for v in views])
    if not len(targets):
        return mistake("no target counts", "labels other than -100, weights above 0")
    known, spread = math.log(V), float(logits.var(-1).mean())
    rows = logits.sum(-1)
    if V > 2 and float(logits.min()) >= 0 and float((rows - 1).abs().max()) < 1e-3:
        return mistake(
            "the model returns probabilities (each row sums to 1), and the loss takes their "
            "softmax again",
            "return the logits, without softmax",
        )
    logp = logits.log_softmax(-1)
    own = -logp.gather(-1, targets[:, None])[:, 0]
    error = float(own.std(correction=0)) / math.sqrt(len(own))
    frequency = torch.bincount(targets, minlength=V).float() / len(targets)
    loss, chance = float(own.mean()), float(-(logp.mean(0) * frequency).sum())
    fresh = looks_fresh(p.model)
    if not fresh and loss < chance - max(5 * error, 0.05 * known):
        raise NotOffered(f"the weights are trained: loss {loss:.3g}, by chance {chance:.3g}")
    if (scaled := _reduction(p, views)) is not None:
        return scaled
    # Xavier's head on normed states gives logits of std sqrt(2): half their variance is 1 nat. Rows
    # of a fresh model are alike, so that only V numbers are drawn: two deviations of their mean.
    allowed = 1.0 + 2 * math.sqrt(2) * math.sqrt(2 / V)
    text = f"loss {loss:.3g}, ln {V} = {known:.3g}, logits' std {math.sqrt(spread):.2g}"
    if chance > known + allowed + 3 * error:
        return mistake(
            f"{text}: {chance - known:.2g} nats above a model that knows nothing",
            "smaller initial weights in the output layer: std 0.02; tied: d_model ** -0.5",
        )
    if fresh and loss < chance - max(5 * error, 0.3 * known):
        return mistake(
            f"{text}: below chance ({chance:.3g}) before any training",
            "look for the answer in the input",
        )
    return text


def _reduction(p: Patient, views: list[View]) -> Symptom | None:
    """Compare the loss with the mean over its targets: a sum, a base, a factor."""
    ratios, misfits = [], []
    for v in views:
        counted = v.counted
        logp = v.logits[counted].log_softmax(-1)
        own = -logp.gather(-1, v.targets[counted][:, None])[:, 0]
        weights = v.weights[counted]
        mean = float((own * weights).sum() / weights.sum())
        ratios.append(v.loss / mean)
        misfits.append(v.misfit)
    ratio, count = statistics.median(ratios), views[0].counted.sum().item()
    total = float(views[0].weights.sum())
    # Smoothing, z-loss and balancing terms change a few per cent; 1 / accumulate is a choice.
    fine = 0.75 < ratio < 1.35 or abs(ratio * p.accumulate - 1) < 0.2
    if fine and not (views[0].recovered and total < 0.2 / p.accumulate):
        return None
    if fine:
        return mistake(
            f"the loss is {views[0].loss:.3g}, but its gradient by the logits is {total:.2g} of a "
            "cross-entropy's: a softmax is applied twice, or the logits are scaled",
            "F.cross_entropy(logits, targets)  # logits, neither probabilities nor divided",
        )
    what = (
        "the sum over targets, not their mean"
        if abs(ratio / count - 1) < 0.2
        else f"{ratio:.3g} times the mean over the {count} targets that count"
    )
    return mistake(
        f"the loss is {views[0].loss:.4g}: {what}",
        "F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)  # mean",
    )


def target_shift(p: Patient) -> Symptom:
    """The target at a position is the token after it, no other."""
    views = [v for v in p.views() if v.per_position and v.tokens is not None]
    if not views:
        raise NotOffered("no target at each position")
    shifts = [v.shift() for v in views]
    k, share = max(shifts, key=lambda found: found[1])
    if share < 0.8 and (other := max(_of_other_rows(v) for v in views)) > 0.8:
        return mistake(
            f"{other:.1%} of the targets are the next tokens of another row: ids and labels were "
            "shuffled or collated apart",
            "labels = ids.clone()  # from the same rows, in the same order",
        )
    if share < 0.8:
        raise NotOffered("the targets are no tokens of the input")
    if k == 1:
        return passed(f"{share:.1%} of the targets are the next token")
    if influence(p).future:
        raise NotOffered("the model reads both ways")
    what = {0: "the token itself", 2: "the token after the next"}.get(k, f"the token at {k:+d}")
    why = {0: "nothing is shifted", 2: "shifted twice, by the data and by the loss"}.get(k, "")
    return mistake(
        f"{share:.1%} of the targets are {what}{f': {why}' if why else ''}",
        "F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())",
    )


def _of_other_rows(view: View) -> float:
    """Return the share of targets that are the next tokens of the best fitting other row."""
    tokens, counted = view.tokens, view.counted[:, :-1]
    if tokens is None or tokens.shape != view.targets.shape or int(counted.sum()) < 8:
        return 0.0
    best = torch.zeros(len(tokens))
    for other in range(len(tokens)):
        same = (view.targets[:, :-1] == tokens[other, 1:]) & counted
        fits = same.sum(1) / counted.sum(1).clamp(min=1)
        fits[other] = 0.0
        best = torch.maximum(best, fits)
    return float(best[counted.any(1)].mean())


def loss_mask(p: Patient) -> Symptom:
    """Padding and prompts do not count, the end of a text does."""
    views = [v for v in p.views() if v.per_position]
    if not views:
        raise NotOffered("no target at each position")
    if views[0].tokens is None:
        return _padding_in_targets(p, views)
    views = [v for v in views if v.tokens is not None]
    total = padded = prompted = ends = learned = holes = 0
    taken: set[int] = set()
    eos = p.special("eos")
    for v, batch in zip(views, p.batches, strict=False):
        assert v.tokens is not None
        counted, (distance, share) = v.counted, v.shift()
        is_next = distance == 1 and share > 0.8  # by head: states and classes are no tokens
        total += int(counted.sum())
        if v.valid is not None and v.valid.shape == counted.shape:
            pads = ~v.valid
            begun, goes_on = v.valid.cumsum(1) > 0, v.valid.flip(1).cumsum(1).flip(1) > 0
            inside_row = pads & begun & goes_on
            holes += int(inside_row.sum())
            taken |= set(v.tokens[inside_row].tolist())
            if is_next:  # the target of a position is the token behind it
                pads = F.pad(pads, (0, 1), value=False)[:, 1:] | pads
                last = v.targets != F.pad(v.tokens, (0, 1), value=-1)[:, 1:]
                pads &= ~(last & v.valid)
            padded += int((counted & pads).sum())
        prompt = _prompt(p, batch, v)
        if prompt is not None and prompt.shape == counted.shape:
            behind = F.pad(prompt, (0, 1), value=False)[:, 1:]
            prompted += int((counted & (behind if is_next else prompt)).sum())
        if eos is not None and is_next:
            inside = v.tokens[:, 1:] == eos
            if v.valid is not None:
                inside &= v.valid[:, 1:]
            ends += int(inside.sum())
            learned += int((v.targets == eos)[counted].sum())
    if holes and len(taken) == 1:  # a mask made of ids, where the id of padding is a word too
        return mistake(
            f"{holes} tokens between others are masked, all of them the id {min(taken)}: "
            "a token is taken for PAD",
            "attention_mask = positions < lengths[:, None]  # by length, not tokens != pad_id",
        )
    if total and padded > 0.005 * total:
        return mistake(
            f"{padded} of {total} targets that count are padding ({padded / total:.0%})",
            "labels[attention_mask == 0] = -100  # or ignore_index=pad_id",
        )
    if total and prompted > 0.01 * total:
        return mistake(
            f"{prompted} of {total} targets that count are of the prompt ({prompted / total:.0%})",
            "labels[prompt_mask] = -100",
        )
    if ends >= 3 and not learned:
        return mistake(
            f"the end token (id {eos}) stands {ends} times in the input and counts never: the "
            "model cannot learn to stop",
            "a padding token of its own, or labels[attention_mask == 0] = -100 instead of by id",
        )
    return passed(f"none of {total} targets that count is padding")


def _padding_in_targets(p: Patient, views: list[View]) -> Symptom:
    """Count padding among the targets of an encoder-decoder that makes its own inputs of them."""
    pad = p.special("pad")
    if pad is None or pad == p.special("eos"):
        raise NotOffered("no padding token of its own")
    total = sum(int(v.counted.sum()) for v in views)
    padded = sum(int((v.counted & (v.targets == pad)).sum()) for v in views)
    if padded > 0.005 * total:
        return mistake(
            f"{padded} of {total} targets that count are padding ({padded / total:.0%})",
            "labels[labels == pad_id] = -100",
        )
    return passed(f"none of {total} targets that count is padding")


PROMPT_KEYS = ("prompt_mask", "prompt_length", "prompt_lengths", "prompt_len")


ANSWER_KEYS = ("completion_mask", "assistant_masks", "answer_mask", "response_mask")


def _prompt(p: Patient, batch: Any, view: View) -> Tensor | None:
    """Return True at tokens of the prompt, where the set-up or the batch says which they are."""
    if p.setup.prompt is not None:
        return p.setup.prompt(batch).bool().cpu()[: len(view.targets)]
    if not isinstance(batch, dict) or view.tokens is None:
        return None
    for key in PROMPT_KEYS + ANSWER_KEYS:
        found = batch.get(key)
        if isinstance(found, Tensor):
            found = found.cpu()[: len(view.targets)]
            if found.ndim == 1:
                return torch.arange(view.tokens.shape[1]) < found[:, None]
            mask = found.bool() if key in PROMPT_KEYS else ~found.bool()
            valid = torch.ones_like(mask) if view.valid is None else view.valid
            return mask & valid if mask.shape == valid.shape else None
    return None


class Influence(NamedTuple):
    """How much logits change with tokens elsewhere, as a part of their spread."""

    future: float  # tokens behind
    past: float  # tokens before
    padding: float | None  # tokens that are not real; None if there are none
    masked: bool  # a mask is given


#: Below this part of the spread a change is rounding: 24 bits, some layers of sums.
ROUNDING = 1e-5


def influence(p: Patient) -> Influence:
    """Change tokens before, behind, and in the padding; measure the logits elsewhere."""
    found = p.memory.get("influence")
    if isinstance(found, Influence):
        return found
    batch = _padded_batch(p)
    base, again = p.logits(batch), p.logits(batch)
    assert base.logits is not None and again.logits is not None
    if not bool(base.logits.isfinite().all()):
        raise NotOffered("the logits are not finite")
    if not torch.equal(base.logits, again.logits):
        raise NotOffered("two equal calls differ: see dropout in eval")
    if base.tokens is None:
        raise NotOffered("the tokens that the model receives cannot be read")
    valid = p.real(base.tokens, base.valid)
    valid = torch.ones_like(base.tokens, dtype=torch.bool) if valid is None else valid
    B, T = base.tokens.shape
    logits = base.logits.float()
    one = logits.ndim == 2 and len(logits) == B  # one answer a sequence
    if not one and logits.shape[:2] != base.tokens.shape:
        raise NotOffered("no logits at each position")
    spread = float((logits if one else logits[valid]).std()) or 1.0
    at = torch.arange(T).expand(B, T)
    count, first = valid.sum(1), valid.long().argmax(1)
    middle = (first + count // 2)[:, None]
    real = valid & (count >= 3)[:, None]
    if not bool(real.any()):
        raise NotOffered("no row of three tokens or more")

    def changed(where: Tensor, seen: Tensor) -> float:
        """Return the largest change of logits at `seen`, if the tokens at `where` are others."""
        if not bool(where.any()) or not bool(seen.any()):
            return 0.0
        other = p.logits(batch, lambda ids: _others(ids, where.to(ids.device), p)).logits
        assert other is not None
        moved = (other.float() - logits)[seen.any(1) if one else seen].abs()
        return float(moved.max()) / spread if bool(moved.isfinite().all()) else math.inf

    bound = ROUNDING if base.logits.dtype in (torch.float32, torch.float64) else 3e-2
    future = 0.0 if one else changed(real & (at > middle), real & (at <= middle))
    past = changed(real & (at < middle), real & (at > middle))
    padding = None
    if not bool(valid.all()):
        padding = changed(~valid, real) if base.valid is not None else _lengthened(p, batch, base)
    made = Influence(
        future if future > bound else 0.0,
        past if past > bound / 100 else 0.0,
        padding if padding is None or padding > bound else 0.0,
        base.valid is not None,
    )
    p.memory["influence"] = made  # for three examinations
    return made


def _lengthened(p: Patient, batch: Any, base: Call) -> float | None:
    """Return how much logits change with three more columns of padding at the end.

    A model without a mask finds padding by its id, so that another id there is no longer padding.
    """
    pad = p.special("pad")
    assert base.logits is not None and base.tokens is not None
    if pad is None:
        return None
    valid = p.real(base.tokens, None)
    try:
        other = p.logits(batch, lambda ids: F.pad(ids, (0, 3), value=pad)).logits
    except Exception:  # longer than it takes
        return None
    assert other is not None and valid is not None
    logits = base.logits.float()
    if logits.ndim == 3:
        moved, spread = (other[:, : logits.shape[1]].float() - logits)[valid], logits[valid].std()
    else:
        moved, spread = other.float() - logits, logits.std()
    return float(moved.abs().max()) / (float(spread) or 1.0)


def _padded_batch(p: Patient) -> Any:
    """Return the batch with the most padding, cut to a few rows."""

    def pads(batch: Any) -> int:
        ids = ids_in(batch)
        if ids is None or ids.shape[1] < 4:
            return -1
        real = torch.as_tensor(batch.valid) if p.ours else p.real(ids, None)
        return 0 if real is None else int((~real[:8]).sum())

    return p.smaller(cut(max(p.need_batches(), key=pads), 8))


def _others(ids: Tensor, where: Tensor, p: Patient) -> Tensor:
    """Return other tokens at `where`: some that the batch has too, none of them special."""
    special = {p.special(name) for name in ("pad", "eos", "bos")}
    known = [i for i in ids.unique().tolist() if i not in special]
    if len(known) < 2:
        known = [i for i in range(p.classes) if i not in special] or [0, 1]
    table = torch.tensor(known, device=ids.device)
    draw = torch.randint(0, len(known), ids.shape, generator=seeded(5)).to(ids.device)
    new = table[draw]
    same = new == ids
    new = torch.where(same, table[(draw + 1) % len(known)], new)
    return torch.where(where[: len(ids), : ids.shape[1]], new, ids).to(ids.dtype)


def answer_in_input(p: Patient) -> Symptom:
    """The model cannot read its target: neither ahead, nor in place, nor at a fixed position."""
    views = p.views()
    if not views:
        raise NotOffered("the targets cannot be read from the loss")
    if not views[0].per_position:
        return _label_in_text(p.rows("train"), p)
    k, share = max((v.shift() for v in views), key=lambda found: found[1])
    seen = influence(p)
    if k == 1 and share > 0.8 and seen.future and seen.past:
        return mistake(
            f"{share:.0%} of the targets are the next token, and the model reads it: changing "
            f"later tokens moves the logits by {seen.future:.1g} of their spread",
            "is_causal=True  # or mask = torch.ones(T, T).tril().bool()",
        )
    if k == 0 and share > 0.5 and seen.future:
        return mistake(
            f"{share:.0%} of the targets are the token at the same position, which the model reads",
            "labels[~masked] = -100; tokens[masked] = mask_token_id",
        )
    behind = f"{seen.future:.1g}" if seen.future else "nothing"
    return passed(f"later tokens move the logits by {behind}")


def _label_in_text(rows: Rows, p: Patient) -> Symptom:
    """Look for a position, or a token, that gives the answer away."""
    pairs = [(t, a) for t, a in zip(rows.tokens, rows.answers, strict=True) if a is not None and t]
    if len(pairs) < 40:
        raise NotOffered("fewer than 40 examples with an answer")
    answers = Counter(a for _, a in pairs)
    common = max(answers.values()) / len(pairs)
    if common > 0.9:
        raise NotOffered("nearly all answers are the same")
    shortest = min(len(t) for t, _ in pairs)
    for at in [*range(min(shortest, 32)), *range(-min(shortest, 32), 0)]:
        groups: dict[int, Counter[int]] = {}
        for tokens, answer in pairs:
            groups.setdefault(tokens[at], Counter())[answer] += 1
        pure = sum(max(group.values()) for group in groups.values()) / len(pairs)
        if pure > 0.99 and len(pairs) / len(groups) >= 3 and shortest > 1:
            place = f"{at}" if at >= 0 else f"{-at} from the end"
            return mistake(
                f"the token at position {place} alone gives the answer in {pure:.1%} of "
                f"{len(pairs)} examples ({common:.0%} by guessing)",
                "leave that field out of the text",
            )
    present = Counter(token for tokens, _ in pairs for token in set(tokens))
    within = Counter((token, a) for tokens, a in pairs for token in set(tokens))
    marked = [
        next(
            (t for t, n in present.items() if within[t, a] > 0.99 * size and n < 1.01 * size + 1),
            None,
        )
        for a, size in answers.items()
    ]
    if len(marked) > 1 and sum(token is not None for token in marked) >= len(marked) - 1:
        tokens = tuple(token for token in marked if token is not None)
        return mistake(
            f"each answer has a token of its own in the text: {shown(tokens, p.tokenizer)}",
            "leave the label's name out of the text",
        )
    return passed(f"no position and no token gives the answers of {len(pairs)} examples away")


def _rows_without_keys(p: Patient, call: Call) -> Symptom | None:
    """Find rows that attend to nothing, since they have no padding."""
    assert call.logits is not None
    if call.tokens is None or len(call.logits) != len(call.tokens):
        return None
    bad = ~call.logits.flatten(1).isfinite().all(1)
    real = p.real(call.tokens, call.valid)
    full = torch.ones_like(bad) if real is None else real.all(1)
    if not bool(bad.any()) or not torch.equal(bad, full):
        return None
    return mistake(
        f"the {int(bad.sum())} rows without padding give numbers that are not finite, the other "
        f"{int((~bad).sum())} do not: real tokens are masked",
        "mask = ~mask  # for src_key_padding_mask True = padding",
    )


def mask_polarity(p: Patient) -> Symptom:
    """Real tokens are read, padding is not."""
    calls = p.logits(_padded_batch(p))
    if (broken := _rows_without_keys(p, calls)) is not None:
        return broken
    seen = influence(p)
    if calls.valid is not None and calls.tokens is not None:
        real = p.real(calls.tokens, None)
        if real is not None and not bool(real.all()):
            inverted = float((calls.valid == ~real).float().mean())
            if inverted > 0.9:
                return mistake(
                    f"the mask is 1 at padding and 0 at real tokens ({inverted:.0%} of positions)",
                    "attention_mask = (input_ids != pad_id)  # 1 = real token",
                )
    if not seen.past and seen.future:
        return mistake(
            f"tokens before a position move its logits by 0, those behind by {seen.future:.1g}: "
            "the causal mask is the wrong way round",
            "mask = torch.ones(T, T).tril().bool()  # True = may attend; additive: triu(1) is -inf",
        )
    if seen.padding and not seen.past:
        return mistake(
            f"padding moves the logits by {seen.padding:.1g}, the real tokens before do not: the "
            "mask is inverted",
            "mask = ~mask  # for this function True = padding, or the other way round",
        )
    if seen.padding and seen.padding > 1e-3:
        return mistake(
            f"padding moves the logits of real tokens by {seen.padding:.1g} of their spread: the "
            f"mask is {'not used' if seen.masked else 'not given'}",
            "model(input_ids=ids, attention_mask=(ids != pad_id).long())",
        )
    if not seen.past:
        return mistake(
            "no token moves the logits of another position: everything is masked",
            "mask = torch.ones(T, T).tril().bool()  # True = may attend",
        )
    if seen.padding is None:
        return passed(
            f"tokens before move the logits by {seen.past:.1g}; no padding in the batches"
        )
    return passed(
        f"tokens before move the logits by {seen.past:.1g}, padding by {seen.padding:.1g}"
    )
