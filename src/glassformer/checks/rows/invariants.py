"""Invariants of every model, ours or not, checked through the `Subject`.

Each check takes a subject and gives a `Measure`, or raises `NotOffered`. Rows where a model may
have its own rounding (another batch, another length) have a tolerance; where the arithmetic is the
same, bits must be equal.
"""

import math

import torch
from torch import Tensor

from glassformer.checks.measure import EXACT, TOLERANCE, Measure, NotOffered, gap, seeded
from glassformer.checks.subject import Subject

# B batch, T length

LENGTH = 11


def tokens_of(subject: Subject, batch: int, length: int, *, seed: int) -> Tensor:
    """Return random tokens within the subject's vocabulary and context."""
    length = min(length, subject.max_length)
    return torch.randint(0, subject.vocab_size, (batch, length), generator=seeded(seed))


def other_tokens(subject: Subject, tokens: Tensor) -> Tensor:
    """Return a different token at every position."""
    shift = torch.randint(1, max(2, subject.vocab_size), tokens.shape, generator=seeded(61))
    return (tokens + shift) % subject.vocab_size


def scaled_gap(ours: Tensor, reference: Tensor) -> float:
    """Return the gap: absolute, or relative to the largest logit if that exceeds 1."""
    return gap(ours, reference) / max(1.0, float(reference.detach().abs().max()))


def tolerance_of(logits: Tensor) -> float:
    """Return the tolerance for this precision."""
    return TOLERANCE[logits.dtype]


@torch.no_grad()
def causality(subject: Subject) -> Measure:
    """Changing tokens from t on leaves every logit before t bit for bit the same."""
    if not subject.causal or not subject.per_position:
        raise NotOffered("it attends in both directions")
    tokens = tokens_of(subject, 3, LENGTH, seed=62)
    before, worst = subject.logits(tokens, None), 0.0
    moved = False
    for t in range(1, tokens.shape[1]):
        changed = torch.cat((tokens[:, :t], other_tokens(subject, tokens[:, t:])), 1)
        after = subject.logits(changed, None)
        worst = max(worst, gap(after[:, :t], before[:, :t]))
        moved |= not torch.equal(after[:, t:], before[:, t:])
    if not moved:
        return Measure(math.inf, EXACT, subject.size, "the logits do not depend on the tokens")
    return Measure(worst, EXACT, subject.size)


def _at_valid(subject: Subject, logits: Tensor, valid: Tensor) -> Tensor:
    return logits[valid] if subject.per_position else logits


def _padded(
    tokens: Tensor, lengths: list[int], *, left: bool, extra: int = 0
) -> tuple[Tensor, Tensor]:
    """Row b keeps its first lengths[b] tokens; the rest, and `extra` more, is padding."""
    B, T = tokens.shape
    padded = torch.zeros(B, T + extra, dtype=torch.long)
    valid = torch.zeros(B, T + extra, dtype=torch.bool)
    for row, length in enumerate(lengths):
        place = slice(T + extra - length, None) if left else slice(0, length)
        padded[row, place] = tokens[row, :length]
        valid[row, place] = True
    return padded, valid


def _lengths(tokens: Tensor) -> list[int]:
    T = tokens.shape[1]
    return [T - 2, max(1, T // 2), max(1, T - 5)]


@torch.no_grad()
def padding_content(subject: Subject) -> Measure:
    """The content of padding changes no bit of the other positions, on either side."""
    tokens, worst = tokens_of(subject, 3, LENGTH, seed=63), 0.0
    for left in (False, True):
        padded, valid = _padded(tokens, _lengths(tokens), left=left)
        before = subject.logits(padded, valid)
        changed = torch.where(valid, padded, other_tokens(subject, padded))
        after = subject.logits(changed, valid)
        worst = max(worst, gap(_at_valid(subject, after, valid), _at_valid(subject, before, valid)))
    return Measure(worst, EXACT, subject.size)


def _padding_amount(subject: Subject, *, left: bool) -> Measure:
    room = min(4, subject.max_length - 1)
    tokens = tokens_of(subject, 3, min(LENGTH, subject.max_length - room), seed=64)
    few, few_valid = _padded(tokens, _lengths(tokens), left=left)
    many, many_valid = _padded(tokens, _lengths(tokens), left=left, extra=room)
    before = _at_valid(subject, subject.logits(few, few_valid), few_valid)
    after = _at_valid(subject, subject.logits(many, many_valid), many_valid)
    return Measure(scaled_gap(after, before), tolerance_of(before), subject.size)


@torch.no_grad()
def padding_right(subject: Subject) -> Measure:
    """More padding behind the tokens changes nothing."""
    return _padding_amount(subject, left=False)


@torch.no_grad()
def padding_left(subject: Subject) -> Measure:
    """More padding before the tokens changes nothing: positions count real tokens."""
    return _padding_amount(subject, left=True)


@torch.no_grad()
def batch_is_singles(subject: Subject) -> Measure:
    """A batch of mixed lengths gives each sequence what it gets alone, whichever side is padded."""
    tokens, worst = tokens_of(subject, 3, LENGTH, seed=65), 0.0
    for left in (False, True):
        padded, valid = _padded(tokens, _lengths(tokens), left=left)
        together = subject.logits(padded, valid)
        for row, length in enumerate(_lengths(tokens)):
            alone = subject.logits(tokens[row : row + 1, :length], None)[0]
            shared = together[row][valid[row]] if subject.per_position else together[row]
            worst = max(worst, scaled_gap(shared, alone))
    return Measure(worst, tolerance_of(together), subject.size)


@torch.no_grad()
def determinism(subject: Subject) -> Measure:
    """The same tokens twice, with torch's generator in two states: the same bits."""
    tokens = tokens_of(subject, 3, LENGTH, seed=66)
    results = []
    with torch.random.fork_rng():
        for seed in (1, 2):
            torch.manual_seed(seed)
            if subject.train is not None:  # a trip through training mode must leave nothing behind
                subject.train(True)
                subject.train(False)
            results.append(subject.logits(tokens, None))
    return Measure(gap(*results), EXACT, subject.size)


@torch.no_grad()
def cached_is_full(subject: Subject) -> Measure:
    """One token at a time through a cache, padded on either side, against all at once."""
    if subject.step is None:
        raise NotOffered("no step by step forward")
    tokens = tokens_of(subject, 3, LENGTH, seed=67)
    whole = subject.logits(tokens, None)
    worst = scaled_gap(subject.step(tokens, None), whole)
    for left in (False, True):
        padded, valid = _padded(tokens, _lengths(tokens), left=left)
        full = subject.logits(padded, valid)[valid]
        worst = max(worst, scaled_gap(subject.step(padded, valid)[valid], full))
    return Measure(worst, tolerance_of(whole), subject.size)


def gradient_flow(subject: Subject) -> Measure:
    """Every parameter gets a gradient, save those whose gradient is zero by theory."""
    if subject.parameters is None:
        raise NotOffered("no parameters")
    for parameter in subject.parameters.values():
        parameter.grad = None
    tokens = tokens_of(subject, 5, min(23, subject.max_length), seed=68)
    logits = subject.logits(tokens, None)
    push = torch.randn(logits.shape, generator=seeded(69), dtype=torch.float64).to(logits)
    (logits * push).sum().backward()
    theory = subject.zero_by_theory or {}
    largest = {
        name: 0.0 if p.grad is None else float(p.grad.abs().max())
        for name, p in subject.parameters.items()
        if p.requires_grad
    }
    for parameter in subject.parameters.values():
        parameter.grad = None
    dead = [name for name, size in largest.items() if not size > 0 and name not in theory]
    strange = [name for name, size in largest.items() if not math.isfinite(size)]
    if dead or strange:
        words = f"no gradient: {', '.join(dead)}" if dead else f"not finite: {', '.join(strange)}"
        return Measure(math.inf, EXACT, subject.size, words)
    scale = max(largest.values())
    worst = max((largest[name] / scale for name in theory if name in largest), default=0.0)
    note = f"zero by theory: {len(theory)}" if theory else ""
    return Measure(worst, tolerance_of(logits), subject.size, note)


@torch.no_grad()
def reloaded(subject: Subject) -> Measure:
    """Saved, loaded and run again: the same bits."""
    if subject.reload is None:
        raise NotOffered("no way to save it")
    tokens = tokens_of(subject, 2, LENGTH, seed=70)
    return Measure(
        gap(subject.reload().logits(tokens, None), subject.logits(tokens, None)),
        EXACT,
        subject.size,
    )


@torch.no_grad()
def like_reference(subject: Subject) -> Measure:
    """The same logits as the module it was made of, with padding and without."""
    if subject.reference is None:
        raise NotOffered("nothing to compare it with")
    tokens = tokens_of(subject, 3, 64, seed=72)
    whole = subject.logits(tokens, None)
    worst = scaled_gap(whole, subject.reference(tokens, None))
    padded, valid = _padded(tokens, _lengths(tokens), left=False)
    ours, theirs = subject.logits(padded, valid), subject.reference(padded, valid)
    real = valid if subject.per_position else slice(None)
    worst = max(worst, scaled_gap(ours[real], theirs[real]))
    return Measure(worst, tolerance_of(whole), subject.size)


@torch.no_grad()
def attention_rows(subject: Subject) -> Measure:
    """Weights of a row sum to 1, or to 0 for padding; nothing goes to PAD or to the future."""
    if subject.weights is None:
        raise NotOffered("no attention weights")
    tokens = tokens_of(subject, 3, LENGTH, seed=71)
    padded, valid = _padded(tokens, _lengths(tokens), left=False)
    worst, tolerance = 0.0, 0.0
    for name, weights_BNTS in subject.weights(padded, valid).items():
        tolerance = tolerance_of(weights_BNTS)
        sums = weights_BNTS.sum(-1)
        if "cross." in name or "encoder." in name:
            worst = max(worst, gap(sums.amax(-1), torch.ones_like(sums[..., 0])))
            continue
        worst = max(worst, gap(sums, valid[:, None].expand_as(sums).to(sums)))
        forbidden = ~(valid[:, None, :, None] & valid[:, None, None, :])
        if subject.causal:
            T = tokens.shape[1]
            forbidden = forbidden | torch.ones(T, T, dtype=torch.bool).triu(1)
        leaked = weights_BNTS.masked_select(forbidden.expand_as(weights_BNTS))
        if leaked.numel() and float(leaked.abs().max()) > 0:
            worst = math.inf
    return Measure(worst, tolerance, subject.size)
