"""Invariants of every model, ours or not, checked through the `Subject`.

Each check takes a subject and gives a `Measure`, or raises `NotOffered`. Rows where a model may
have its own rounding (another batch, another length) have a tolerance; where the arithmetic is the
same, bits must be equal.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from glasscheck.foreign import (
    Foreign,
    counted_alone,
    counting_real_tokens,
    position_tables,
    precision_of,
    seed_what_is_unseeded,
    training,
)
from glasscheck.measure import (
    EXACT,
    TOLERANCE,
    Gaps,
    Measure,
    NotOffered,
    gap,
    relative_gap,
    seeded,
)
from glasscheck.subject import Subject

# B batch, T length

LENGTH = 11
#: A long row: it crosses every power of two up to 256.
LONG = 271
#: Seeds that are compared with each other where a model computes with random numbers.
SEEDS = 8
WITH_POSITIONS = "it holds when position_ids are given"


def tokens_of(subject: Subject, batch: int, length: int, *, seed: int) -> Tensor:
    """Return random tokens within the subject's vocabulary and context."""
    return subject.draw(batch, length, seed=seed)


def long_of(subject: Subject) -> int:
    """Return the length of a long row: past 256 tokens, as far as the context goes."""
    return min(LONG, subject.max_length)


def other_tokens(subject: Subject, tokens: Tensor) -> Tensor:
    """Return a different token at every position, none of them special."""
    allowed = torch.tensor([i for i in range(subject.vocab_size) if i not in subject.specials])
    at = torch.searchsorted(allowed, tokens.contiguous()).clamp(max=len(allowed) - 1)
    shift = torch.randint(1, max(2, len(allowed)), tokens.shape, generator=seeded(61))
    return allowed[(at + shift) % len(allowed)]


def tolerance_of(logits: Tensor, subject: Subject) -> float:
    """Return how far apart two computations of these logits may be, relative to the largest."""
    return subject.tolerance(logits.dtype)


@torch.no_grad()
def causality(subject: Subject) -> Measure:
    """Changing tokens from t on leaves every logit before t bit for bit the same."""
    if not subject.causal:
        raise NotOffered("it attends in both directions")
    if not subject.per_position:
        raise NotOffered("it returns one result for a sequence")
    if subject.vocab_size < 2:
        raise NotOffered("its vocabulary has one token")
    tokens = tokens_of(subject, 3, LENGTH, seed=62)
    before, gaps = subject.logits(tokens, None), Gaps()
    moved = False
    for t in range(1, tokens.shape[1]):
        changed = torch.cat((tokens[:, :t], other_tokens(subject, tokens[:, t:])), 1)
        after = subject.logits(changed, None)
        gaps.compare(after[:, :t], before[:, :t], f"tokens from {t} on changed")
        moved |= not torch.equal(after[:, t:], before[:, t:])
    if not moved:
        return Measure(math.inf, EXACT, subject.size, "the logits do not depend on the tokens")
    bar = tolerance_of(before, subject)
    limit = _holds_with_order(subject, tokens, bar) if gaps.worst > bar else ""
    measure = gaps.measure(bar, subject.size, exact=True, limit=limit)
    if gaps.worst > bar and not limit and subject.foreign is not None:
        hint = "if it is meant to read both ways, say so: causal=False, --bidirectional"
        measure = replace(measure, note=f"{measure.note}; {hint}")
    return replace(measure, explains=bool(limit))


def _holds_with_order(subject: Subject, tokens: Tensor, bar: float) -> str:
    """Return the condition under which a model that takes an order of reading is causal."""
    foreign = subject.foreign
    if foreign is None or not foreign.offers("perm_mask"):
        return ""
    B, T = tokens.shape
    order_BTT = torch.ones(T, T).triu(1).expand(B, T, T)  # 1: may not attend
    before, gaps = foreign.logits(tokens, None, perm_mask=order_BTT), Gaps()
    for t in range(1, T):
        changed = torch.cat((tokens[:, :t], other_tokens(subject, tokens[:, t:])), 1)
        gaps.compare(foreign.logits(changed, None, perm_mask=order_BTT)[:, :t], before[:, :t])
    return "it reads both ways; it holds when perm_mask is given" if gaps.worst <= bar else ""


def _at_valid(subject: Subject, logits: Tensor, valid: Tensor) -> Tensor:
    return logits[valid] if subject.per_position else logits


def _padded(
    subject: Subject, tokens: Tensor, lengths: list[int], *, left: bool, extra: int = 0
) -> tuple[Tensor, Tensor]:
    """Row b keeps its first lengths[b] tokens; the rest, and `extra` more, is padding."""
    B, T = tokens.shape
    padded = torch.full((B, T + extra), subject.pad)
    valid = torch.zeros(B, T + extra, dtype=torch.bool)
    for row, length in enumerate(lengths):
        place = slice(T + extra - length, None) if left else slice(0, length)
        padded[row, place] = tokens[row, :length]
        valid[row, place] = True
    return padded, valid


def _lengths(tokens: Tensor) -> list[int]:
    T = tokens.shape[1]
    return [max(1, T - 2), max(1, T // 2), max(1, T - 5)]


def _sides(subject: Subject) -> tuple[bool, ...]:
    """Return the sides on which padding is checked: False right, True left.

    The targets of an encoder-decoder are padded on the right; so is what has no positions to give.
    """
    foreign = subject.foreign
    return (False,) if foreign is not None and foreign.kind == "encoder-decoder" else (False, True)


def _name(left: bool) -> str:
    return "padded on the left" if left else "padded on the right"


@torch.no_grad()
def padding_content(subject: Subject) -> Measure:
    """The content of padding changes no bit of the other positions, on either side."""
    tokens = tokens_of(subject, 3, LENGTH, seed=63)
    foreign, bar = subject.foreign, 0.0

    def measured(ask: object = None, sides: tuple[bool, ...] = _sides(subject)) -> Gaps:
        nonlocal bar
        gaps, logits = Gaps(), ask or subject.logits
        for left in sides:
            padded, valid = _padded(subject, tokens, _lengths(tokens), left=left)
            before = logits(padded, valid)  # type: ignore[operator]
            bar = tolerance_of(before, subject)
            changed = torch.where(valid, padded, other_tokens(subject, padded))
            after = logits(changed, valid)  # type: ignore[operator]
            gaps.compare(
                _at_valid(subject, after, valid), _at_valid(subject, before, valid), _name(left)
            )
        return gaps

    gaps = measured()
    limit = ""
    if gaps.worst > bar and foreign is not None:
        if foreign.offers("position_ids") and foreign.kind != "encoder-decoder":
            given = measured(foreign.at_positions)
            if given.worst <= bar:
                limit = f"positions depend on which tokens are PAD; {WITH_POSITIONS}"
        if not limit and _holds_for_pad(subject, foreign, tokens, bar):
            limit = "it holds where padding holds the pad token, whose embedding is zero"
            return replace(gaps.measure(bar, subject.size, limit=limit), explains=True)
        if not limit and not subject.per_position:
            if measured(sides=(False,)).worst <= bar:
                limit = "it holds with padding on the right: the first position is read"
            elif _finds_pad(subject, tokens, bar):
                limit = "it finds the last token by the pad token: it holds where padding holds it"
    if foreign is not None and foreign.marks_padding and gaps.worst <= bar:
        note = f"{foreign.mask_name} is inverted, True marks padding: the rows are asked like that"
        return Measure(1.0, EXACT, subject.size, limit=note)
    return gaps.measure(bar, subject.size, exact=True, limit=limit)


def _finds_pad(subject: Subject, tokens: Tensor, bar: float) -> bool:
    """True if rows padded with the pad token have the result that they have alone."""
    gaps = Gaps()
    padded, valid = _padded(subject, tokens, _lengths(tokens), left=False)
    together = subject.logits(padded, valid)
    for row, length in enumerate(_lengths(tokens)):
        gaps.compare(together[row : row + 1], subject.logits(tokens[row : row + 1, :length], None))
    return gaps.worst <= bar


def _holds_for_pad(subject: Subject, foreign: Foreign, tokens: Tensor, bar: float) -> bool:
    """True if padded rows are what they are alone, once the embedding of PAD is zero.

    That row gets no gradient (`padding_idx`), so that in a trained model it is zero; a part that
    reads a token's neighbours then finds nothing in padding, as it does behind the last token.
    """
    tables = [
        part.weight
        for part in foreign.module.modules()
        if isinstance(part, nn.Embedding) and part.padding_idx == foreign.pad
    ]
    if not tables or not subject.per_position:
        return False
    kept = [table[foreign.pad].clone() for table in tables]
    gaps = Gaps()
    try:
        for table in tables:
            table[foreign.pad] = 0.0
        for left in _sides(subject):
            padded, valid = _padded(subject, tokens, _lengths(tokens), left=left)
            given = left and foreign.offers("position_ids")
            ask: Callable[[Tensor, Tensor], Tensor]
            ask = foreign.at_positions if given else foreign.logits
            together = ask(padded, valid)
            for row, length in enumerate(_lengths(tokens)):
                single = tokens[row : row + 1, :length]
                alone = ask(single, torch.ones_like(single, dtype=torch.bool))[0]
                gaps.compare(together[row][valid[row]], alone)
    finally:
        for table, before in zip(tables, kept, strict=True):
            table[foreign.pad] = before
    return gaps.worst <= bar


def _padding_amount(subject: Subject, *, left: bool) -> Measure:
    room = min(4, subject.max_length - 1)
    tokens = tokens_of(subject, 3, min(LENGTH, subject.max_length - room), seed=64)
    foreign, bar = subject.foreign, 0.0

    def measured(ask: object = None) -> Gaps:
        nonlocal bar
        gaps, logits = Gaps(), ask or subject.logits
        few, few_valid = _padded(subject, tokens, _lengths(tokens), left=left)
        many, many_valid = _padded(subject, tokens, _lengths(tokens), left=left, extra=room)
        before = _at_valid(subject, logits(few, few_valid), few_valid)  # type: ignore[operator]
        after = _at_valid(subject, logits(many, many_valid), many_valid)  # type: ignore[operator]
        bar = tolerance_of(before, subject)
        gaps.compare(after, before, "tokens in order" if subject.per_position else "")
        return gaps

    gaps = measured()
    limit = ""
    if left and gaps.worst > bar and foreign is not None:
        if foreign.offers("position_ids"):
            given = measured(foreign.at_positions)
            limit = WITH_POSITIONS if given.worst <= bar else ""
        elif foreign.offers("seq_start_pos"):
            given = measured(lambda t, v: foreign.logits(t, None, seq_start_pos=(~v).sum(1)))
            limit = "it holds when seq_start_pos is given" if given.worst <= bar else ""
        if not limit:
            limit = _counts_padding(subject, foreign, measured, tokens)
    return gaps.measure(bar, subject.size, limit=limit)


def _counts_padding(subject: Subject, foreign: Foreign, measured: object, tokens: Tensor) -> str:
    """Return the name of the table whose positions count padding, where that is the whole cause."""
    padded, valid = _padded(subject, tokens, _lengths(tokens), left=True)
    tables = position_tables(foreign, padded, valid)
    bar = subject.tolerance(precision_of(foreign.module))
    if tables:
        given = measured(  # type: ignore[operator]
            lambda t, v: counting_real_tokens(foreign, tables, t, v)
        )
        names = {id(part): name for name, part in foreign.module.named_modules()}
        if given.worst <= bar:
            name = names[id(tables[0])]
            return f"{name} counts padding, and no position_ids are taken: pad on the right"
    gaps = Gaps()
    with contextlib.suppress(Exception):  # a stranger's model may raise anything
        for row, length in enumerate(_lengths(tokens)):
            alone = subject.logits(tokens[row : row + 1, :length], None)
            rest = counted_alone(foreign, padded[row : row + 1], valid[row : row + 1])
            gaps.compare(rest[:, -length:], alone)
        if gaps.worst <= bar:
            return "its positions count padding, and no position_ids are taken: pad on the right"
    return ""


@torch.no_grad()
def padding_right(subject: Subject) -> Measure:
    """More padding behind the tokens changes nothing."""
    return _padding_amount(subject, left=False)


@torch.no_grad()
def padding_left(subject: Subject) -> Measure:
    """More padding before the tokens changes nothing: positions count real tokens."""
    if True not in _sides(subject):
        raise NotOffered("targets are padded on the right")
    return _padding_amount(subject, left=True)


@torch.no_grad()
def batch_is_singles(subject: Subject) -> Measure:
    """A batch of mixed lengths gives each sequence what it gets alone, whichever side is padded."""
    tokens, gaps, foreign = tokens_of(subject, 3, LENGTH, seed=65), Gaps(), subject.foreign
    limit = ""
    for left in _sides(subject):
        padded, valid = _padded(subject, tokens, _lengths(tokens), left=left)
        if left and foreign is not None:  # a mask alone on the left is a row of its own
            if not foreign.offers("position_ids"):
                continue
            together = foreign.at_positions(padded, valid)
        else:
            together = subject.logits(padded, valid)
        for row, length in enumerate(_lengths(tokens)):
            single = tokens[row : row + 1, :length]
            if left and foreign is not None:
                ones = torch.ones_like(single, dtype=torch.bool)
                alone = foreign.at_positions(single, ones)[0]
            else:
                alone = subject.logits(single, None)[0]
            shared = together[row][valid[row]] if subject.per_position else together[row]
            gaps.compare(shared, alone, f"{_name(left)}, row {row}")
        if not left and not subject.per_position and gaps.worst <= tolerance_of(together, subject):
            limit = "it holds with padding on the right: the first position is read"
    bar = tolerance_of(together, subject)
    return gaps.measure(bar, subject.size, limit=limit)


@torch.no_grad()
def determinism(subject: Subject) -> Measure:
    """The same tokens twice, with torch's generator in two states: the same bits."""
    tokens = tokens_of(subject, 3, LENGTH, seed=66)

    def results_of(seeds: int) -> list[Tensor]:
        results = []
        with torch.random.fork_rng():
            for seed in range(1, seeds + 1):
                torch.manual_seed(seed)
                if subject.train is not None:  # a trip through training mode leaves nothing behind
                    subject.train(True)
                    subject.train(False)
                results.append(subject.logits(tokens, None))
        return results

    gaps, limit = Gaps(), ""
    first, second = results_of(2)
    if bool(first.isnan().any()):
        share = float(first.isnan().double().mean())
        return Measure(math.inf, EXACT, subject.size, f"{share:.0%} of the logits are NaN")
    gaps.compare(second, first)
    if gaps.worst > 0 and subject.foreign is not None:
        several = results_of(SEEDS)
        names = seed_what_is_unseeded(subject.foreign.module)
        if names and torch.equal(*results_of(2)):  # the other rows are asked with the seed
            subject.chance.extend(relative_gap(one, other) for one in several for other in several)
            limit = f"it holds when {' and '.join(names)} is set, as for the rows below"
    return gaps.measure(0.0, subject.size, exact=True, limit=limit)


@torch.no_grad()
def cached_is_full(subject: Subject) -> Measure:
    """One token at a time through a cache, padded on either side, against all at once."""
    gaps = Gaps()
    if not subject.per_position:
        raise NotOffered("it returns one result for a sequence")
    tokens = tokens_of(subject, 3, LENGTH, seed=67)
    whole = subject.logits(tokens, None)
    bar = tolerance_of(whole, subject)
    if subject.foreign is not None:
        gaps.compare(subject.foreign.in_pieces(tokens, [1] * tokens.shape[1]), whole)
        if subject.foreign.mask_name is not None and True in _sides(subject):
            with gaps.attempt("left-padded prompt, then token by token"):
                _prompt_then_steps(subject, subject.foreign, tokens, gaps)
        return gaps.measure(bar, subject.size)
    if subject.step is None:
        raise NotOffered("no step by step forward")
    gaps.compare(subject.step(tokens, None), whole)
    for left in (False, True):
        with gaps.attempt(_name(left)):
            padded, valid = _padded(subject, tokens, _lengths(tokens), left=left)
            full = subject.logits(padded, valid)[valid]
            gaps.compare(subject.step(padded, valid)[valid], full, f"{_name(left)}, real tokens")
    return gaps.measure(bar, subject.size)


def _prompt_then_steps(subject: Subject, foreign: Foreign, tokens: Tensor, gaps: Gaps) -> None:
    """Compare a left-padded prompt at once, then token by token, as text is generated."""
    T = tokens.shape[1]
    prompt = max(2, T - 4)
    padded, valid = _padded(
        subject, tokens[:, :prompt], [prompt, prompt - 1, max(1, prompt - 3)], left=True
    )
    padded = torch.cat((padded, tokens[:, prompt:]), 1)
    valid = torch.cat((valid, torch.ones(len(tokens), T - prompt, dtype=torch.bool)), 1)
    full = foreign.logits(
        padded,
        valid,
        **({"position_ids": foreign.positions(valid)} if foreign.offers("position_ids") else {}),
    )
    stepped = foreign.in_pieces(padded, [prompt] + [1] * (T - prompt), valid)
    gaps.compare(stepped[valid], full[valid], "left-padded prompt, then steps")


def gradient_flow(subject: Subject) -> Measure:
    """Every parameter gets a gradient, save those whose gradient is zero by theory."""
    if subject.parameters is None:
        raise NotOffered("no parameters")
    if not any(p.requires_grad for p in subject.parameters.values()):
        raise NotOffered("every parameter is frozen")
    if subject.foreign is not None and subject.foreign.caches_alone:
        raise NotOffered("it computes through caches alone, which are written in place")
    largest, logits = _gradients(subject)
    theory = subject.zero_by_theory or {}
    dead = [name for name, size in largest.items() if not size > 0 and name not in theory]
    unchosen = _unchosen(subject, dead)
    dead = [name for name in dead if name not in unchosen]
    strange = [name for name, size in largest.items() if not math.isfinite(size)]
    if strange:
        return Measure(math.inf, EXACT, subject.size, f"not finite: {', '.join(strange)}")
    if dead:
        listed = ", ".join(dead[:6]) + (" ..." if len(dead) > 6 else "")
        note = f"no gradient: {listed}"
        cut = [name for name in dead if _acts(subject, name)] if subject.foreign else dead
        if cut:
            if subject.foreign is not None:
                note = f"no gradient, yet the logits depend on it: {', '.join(cut[:6])}"
            return Measure(math.inf, EXACT, subject.size, note)
        limit = f"this forward does not use {len(dead)} of {len(largest)} parameters: {listed}"
        return Measure(float(len(dead)), EXACT, subject.size, note, limit=limit)
    scale = max(largest.values())
    worst = max((largest[name] / scale for name in theory if name in largest), default=0.0)
    notes = [f"zero by theory: {len(theory)}"] if theory else []
    notes += [f"of experts that no token chose: {len(unchosen)}"] if unchosen else []
    return Measure(worst, tolerance_of(logits, subject), subject.size, ", ".join(notes))


def _gradients(subject: Subject) -> tuple[dict[str, float], Tensor]:
    """Return the largest entry of each gradient; a foreign module is in training mode."""
    parameters = subject.parameters or {}
    for parameter in parameters.values():
        parameter.grad = None
    tokens = tokens_of(subject, 5, min(23, subject.max_length), seed=68)
    try:
        if subject.foreign is None:
            logits = subject.logits(tokens, None)
        else:
            try:
                with training(subject.foreign.module):
                    logits = subject.logits(tokens, None)
            except Exception:  # a model that asks for more in training is asked in eval mode
                logits = subject.logits(tokens, None)
        push = torch.randn(logits.shape, generator=seeded(69), dtype=torch.float64).to(logits)
        kept = logits.abs() < 1e30
        (torch.where(kept, logits, 0.0) * push).sum().backward()
        largest = {
            name: 0.0 if p.grad is None else float(p.grad.abs().max())
            for name, p in parameters.items()
            if p.requires_grad and p.numel()
        }
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    return largest, logits


@torch.no_grad()
def _unchosen(subject: Subject, names: list[str]) -> set[str]:
    """Return those of the parameters that belong to an expert which no token goes to.

    Whatever such a weight is, the logits keep their bits.
    """
    tokens, found = tokens_of(subject, 5, min(23, subject.max_length), seed=68), set()
    for name in (name for name in names if name in subject.routed):
        parameter = (subject.parameters or {})[name]
        kept, before = parameter.detach().clone(), subject.logits(tokens, None)
        try:
            parameter.add_(1.0)
            if torch.equal(subject.logits(tokens, None), before):
                found.add(name)
        finally:
            parameter.copy_(kept)
    return found


@torch.no_grad()
def _acts(subject: Subject, name: str) -> bool:
    """True if the logits follow a parameter smoothly: half the change, half the effect.

    A parameter that only chooses (which experts, which keys) jumps or does nothing.
    """
    parameter = (subject.parameters or {})[name]
    tokens = tokens_of(subject, 5, min(23, subject.max_length), seed=68)
    kept = parameter.detach().clone()
    before = subject.logits(tokens, None)
    noise = torch.randn(kept.shape, generator=seeded(58)).to(kept)
    for part in subject.stranger().module.modules():  # the row of PAD never gets a gradient
        if isinstance(part, nn.Embedding) and part.weight is parameter:
            noise[part.padding_idx if part.padding_idx is not None else slice(0)] = 0.0
    size = float(kept.abs().max()) or 1.0
    effects = []
    try:
        for share in (1e-2, 5e-3):
            parameter.copy_(kept + share * size * noise)
            effects.append(relative_gap(subject.logits(tokens, None), before))
    finally:
        parameter.copy_(kept)
    bar = tolerance_of(before, subject)
    return effects[1] > bar and 1.5 < effects[0] / effects[1] < 2.7


@torch.no_grad()
def reloaded(subject: Subject) -> Measure:
    """Saved, loaded and run again: the same bits."""
    if subject.reload is None:
        raise NotOffered("no way to save it")
    tokens, gaps = tokens_of(subject, 2, LENGTH, seed=70), Gaps()
    before = subject.logits(tokens, None)
    gaps.compare(subject.reload().logits(tokens, None), before)
    return gaps.measure(tolerance_of(before, subject), subject.size, exact=True)


@torch.no_grad()
def like_reference(subject: Subject) -> Measure:
    """The same logits as the module it was made of, with padding and without."""
    if subject.reference is None:
        raise NotOffered("no reference; --deep opens a Hugging Face folder with transformers too")
    tokens, gaps = tokens_of(subject, 3, 64, seed=72), Gaps()
    whole = subject.logits(tokens, None)
    gaps.compare(whole, subject.reference(tokens, None))
    padded, valid = _padded(subject, tokens, _lengths(tokens), left=False)
    ours, theirs = subject.logits(padded, valid), subject.reference(padded, valid)
    real = valid if subject.per_position else slice(None)
    gaps.compare(ours[real], theirs[real], "padded on the right, real tokens")
    return gaps.measure(tolerance_of(whole, subject), subject.size)


@torch.no_grad()
def attention_rows(subject: Subject) -> Measure:
    """Weights of a row sum to 1, or to 0 for padding; nothing goes to PAD or to the future."""
    if subject.weights is None:
        raise NotOffered("no attention weights")
    tokens = tokens_of(subject, 3, LENGTH, seed=71)
    padded, valid = _padded(subject, tokens, _lengths(tokens), left=False)
    worst, tolerance = 0.0, 0.0
    for name, weights_BNTS in subject.weights(padded, valid).items():
        tolerance = TOLERANCE[weights_BNTS.dtype]  # weights sum to 1
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
