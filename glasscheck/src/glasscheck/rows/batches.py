"""Rows about batches without masks, prefixes and long rows: what mixes rows, and what begins late.

A short row cannot see what begins at 16, 64 or 256 tokens, and a mask hides what a batch without
one shows. A long row crosses every power of two up to 256, as far as the stated context goes.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glasscheck.foreign import Foreign
from glasscheck.measure import Gaps, Measure, NotOffered, relative_gap
from glasscheck.rows.invariants import LENGTH, _padded, long_of, tokens_of, tolerance_of
from glasscheck.subject import Subject

# B batch, T length, V vocab

#: Sizes of a batch at which kernels and authors branch.
SIZES = (1, 2, 8, 9)
#: Lengths at which they do.
POWERS = (16, 32, 64, 128, 256)
#: Rows of more weights than this are long at the two largest powers alone.
LARGE = 30_000_000


@torch.no_grad()
def without_a_mask(subject: Subject) -> Measure:
    """Batches of 1, 2, 8 and 9 rows of one length, no mask given, are each row alone."""
    tokens, gaps = tokens_of(subject, max(SIZES), LENGTH, seed=161), Gaps()
    alone = torch.cat([subject.logits(tokens[row : row + 1], None) for row in range(len(tokens))])
    for size in SIZES[1:]:
        gaps.compare(subject.logits(tokens[:size], None), alone[:size], f"a batch of {size}")
    if subject.foreign is not None and subject.foreign.labels_for_all:
        bare = replace(subject.foreign, labels_for_all=False).logits(tokens)
        gaps.compare(bare, alone[:, -bare.shape[1] :], "no labels given")
    return gaps.measure(tolerance_of(alone, subject), subject.size)


@torch.no_grad()
def permuted(subject: Subject) -> Measure:
    """A batch in another order has its logits in that order, and equal rows have equal logits."""
    tokens, gaps = tokens_of(subject, 5, LENGTH, seed=162), Gaps()
    order = torch.tensor([3, 0, 4, 1, 2])
    whole = subject.logits(tokens, None)
    gaps.compare(subject.logits(tokens[order], None), whole[order], "permuted")
    twice = torch.tensor([0, 1, 1, 0])
    gaps.compare(subject.logits(tokens[twice], None), whole[twice], "with equal rows")
    return gaps.measure(tolerance_of(whole, subject), subject.size)


@torch.no_grad()
def prefixes(subject: Subject) -> Measure:
    """The logits of every prefix are the beginning of the logits: of all lengths from 1."""
    _reads_forward(subject)
    tokens, gaps = tokens_of(subject, 2, min(17, subject.max_length), seed=163), Gaps()
    whole = subject.logits(tokens, None)
    for length in range(1, tokens.shape[1]):
        gaps.compare(subject.logits(tokens[:, :length], None), whole[:, :length], f"T{length}")
    return gaps.measure(tolerance_of(whole, subject), subject.size)


def _reads_forward(subject: Subject) -> None:
    if not subject.causal:
        raise NotOffered("it attends in both directions")
    if not subject.per_position:
        raise NotOffered("it returns one result for a sequence")


def _powers(subject: Subject) -> Iterator[int]:
    """Return the powers of two that a long row crosses."""
    length = long_of(subject)
    inside = [power for power in POWERS if power + 3 <= length]
    if not inside:
        raise NotOffered(f"a context of {subject.max_length} tokens is a short row")
    yield from inside[-2:] if (subject.parameter_count() or 0) > LARGE else inside


@torch.no_grad()
def long_prefixes(subject: Subject) -> Measure:
    """Prefixes of a long row, cut around powers of two, have the row's first logits."""
    _reads_forward(subject)
    gaps, powers = Gaps(), list(_powers(subject))
    tokens = tokens_of(subject, 2, long_of(subject), seed=164)
    whole = subject.logits(tokens, None)
    for power in powers:
        for length in (power - 1, power, power + 1):
            gaps.compare(subject.logits(tokens[:, :length], None), whole[:, :length], f"T{length}")
    size = f"{subject.size}, T{tokens.shape[1]}"
    return gaps.measure(tolerance_of(whole, subject), size)


@torch.no_grad()
def long_batches(subject: Subject) -> Measure:
    """Long rows in a batch, padded too where a mask is taken, are each row alone."""
    gaps = Gaps()
    list(_powers(subject))
    tokens = tokens_of(subject, 3, long_of(subject), seed=165)
    T = tokens.shape[1]
    together = subject.logits(tokens, None)
    alone = [subject.logits(tokens[row : row + 1], None) for row in range(3)]
    gaps.compare(together, torch.cat(alone), "no mask")
    if subject.per_position:
        with gaps.attempt("padded"):
            lengths = [T, T - 5, T // 2 + 1]
            padded, valid = _padded(subject, tokens, lengths, left=False)
            shared = subject.logits(padded, valid)
            for row, length in enumerate(lengths):
                single = subject.logits(tokens[row : row + 1, :length], None)
                gaps.compare(shared[row, :length], single[0], f"padded on the right, row {row}")
    bar = tolerance_of(together, subject)
    return gaps.measure(bar, f"{subject.size}, T{T}")


@torch.no_grad()
def long_cache(subject: Subject) -> Measure:
    """A long row through the cache, in chunks and steps around powers of two, is that row at once.

    Chunks of a power, one less and one more; then single tokens across each power, where windows
    slide and buffers grow.
    """
    foreign = subject.foreign
    if not subject.per_position or (foreign is None and subject.step is None):
        raise NotOffered("no step by step forward")
    if foreign is not None and foreign.cache_name is None:
        raise NotOffered("its forward takes no cache")
    gaps, powers = Gaps(), list(_powers(subject))
    tokens = tokens_of(subject, 2, long_of(subject), seed=166)
    T, whole = tokens.shape[1], subject.logits(tokens, None)
    size = f"{subject.size}, T{T}"
    if foreign is None:
        assert subject.step is not None
        gaps.compare(subject.step(tokens, None), whole)
        return gaps.measure(tolerance_of(whole, subject), size)
    for power in powers:
        pieces = [power - 3] + [1] * 6
        steps = foreign.in_pieces(tokens[:, : power + 3], pieces)
        gaps.compare(steps, whole[:, : power + 3], f"{power - 3} tokens, then one at a time")
    if gaps.worst <= tolerance_of(whole, subject):  # else chunks have nothing to add
        for chunk in dict.fromkeys((powers[0] - 1, powers[-1], powers[-1] + 1)):
            with gaps.attempt(f"chunks of {chunk}"):
                pieces = [chunk] * (T // chunk) + ([T % chunk] if T % chunk else [])
                gaps.compare(foreign.in_pieces(tokens, pieces), whole, f"chunks of {chunk}")
    return gaps.measure(tolerance_of(whole, subject), size)


# --- arguments ----------------------------------------------------------------------------------


@torch.no_grad()
def arguments_stay(subject: Subject) -> Measure:
    """A call leaves the tensors that it is given as they were."""
    foreign = subject.stranger()
    tokens = tokens_of(subject, 3, LENGTH, seed=167)
    tokens[:, -1] = 0  # an id that is often one of padding, which a call may write over
    valid = None
    if foreign.mask_name is not None:
        _, valid = _padded(subject, tokens, [tokens.shape[1], 5, 3], left=False)
    extra: dict[str, Any] = {}
    if foreign.offers("position_ids"):
        ones = torch.ones_like(tokens) if valid is None else valid
        extra["position_ids"] = foreign.positions(ones)
    if foreign.label_name is not None and not foreign.labels_for_all:
        extra[foreign.label_name] = foreign._laid(tokens % foreign.logits(tokens[:1]).shape[-1])
    log = foreign.log
    recording, log.recording = log.recording, True
    before = len(log.calls)
    try:
        given = _tensors(foreign, tokens, valid, extra)
    finally:
        log.recording = recording
        del log.calls[before:]
    changed = [name for name, was, now in given if not torch.equal(was, now)]
    note = f"the call writes into {', '.join(changed)}" if changed else ""
    return Measure(math.inf if changed else 0.0, 0.0, subject.size, note)


def _tensors(
    foreign: Foreign, tokens: Tensor, valid: Tensor | None, extra: dict[str, Any]
) -> list[tuple[str, Tensor, Tensor]]:
    """Return the tensors of a call as they were, and as they are afterwards.

    Those that the module receives may be copies of ours, so a hook looks at what it receives.
    """
    seen: list[tuple[str, Tensor, Tensor]] = []

    def note(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor) and not seen_already(value):
                seen.append((str(name), value.clone(), value))

    def seen_already(value: Tensor) -> bool:
        return any(now is value for _, _, now in seen)

    handle = foreign.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        foreign.call(tokens, valid, **extra)
    finally:
        handle.remove()
    return seen


@torch.no_grad()
def kinds_of_masks(subject: Subject) -> Measure:
    """A mask of booleans, of whole numbers and of floats means the same, where each is taken."""
    foreign = subject.stranger()
    if foreign.mask_name is None:
        raise NotOffered("its forward takes no mask")
    tokens, gaps = tokens_of(subject, 3, LENGTH, seed=168), Gaps()
    left = foreign.kind == "decoder"
    padded, valid = _padded(subject, tokens, [9, 5, 6], left=left)
    plain = foreign.logits(padded, valid)
    keep = valid if subject.per_position else slice(None)
    mask = foreign._mask(valid, foreign.mask_name)
    bar, added = tolerance_of(plain, subject), []
    for dtype in (torch.bool, torch.int64, torch.float32):
        with gaps.attempt(str(dtype)):
            given = {foreign.mask_name: mask.to(dtype)}
            found = foreign.logits(padded, None, **given)
            if dtype == torch.float32 and relative_gap(found[keep], plain[keep]) > bar:
                low = torch.where(valid.to(foreign.device), 0.0, -math.inf)  # added to scores
                other = foreign.logits(padded, None, **{foreign.mask_name: low})
                if relative_gap(other[keep], plain[keep]) <= bar:
                    added.append("floats are added to the scores, as torch's own modules do")
                    continue
            gaps.compare(found[keep], plain[keep], str(dtype).removeprefix("torch."))
    measure = gaps.measure(bar, subject.size)
    return replace(measure, note=added[0]) if added and measure.holds else measure
