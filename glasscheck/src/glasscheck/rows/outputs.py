"""Rows about what a forward returns and reads beside the logits.

Attention weights, hidden states, positions with gaps, segments, and the window that a config names.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from glasscheck.foreign import (
    config_of,
    number,
    parts_of,
    position_tables,
)
from glasscheck.measure import Measure, NotOffered, relative_gap
from glasscheck.rows.invariants import (
    LENGTH,
    _lengths,
    _padded,
    long_of,
    other_tokens,
    tokens_of,
    tolerance_of,
)
from glasscheck.subject import Subject

# B batch, N heads, T query, S key, D width

#: How far the sum of a row of weights may be from 1.
SUM = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
SEGMENTS = ("segment_ids", "segments", "seq_ids", "document_ids", "doc_ids", "sequence_ids")
#: A window of this many positions: a position, and those before it.
WINDOWS = ("sliding_window", "sliding_window_size")
#: What a config says of layers of which not all have the window.
PATTERNS = ("layer_types", "attention_layers", "pattern", "max_window_layers", "every", "interval")


def _returned(
    subject: Subject, name: str, ask: str, tokens: Tensor, valid: Tensor | None = None
) -> tuple[Any, list[Tensor]]:
    foreign = subject.stranger()
    asked = {ask: True} if foreign.offers(ask) or foreign.any_argument else {}
    try:
        result = foreign.call(tokens, valid, **asked)
    except TypeError as error:  # what takes any argument may pass on what nobody takes
        raise NotOffered(f"its forward takes no {ask}") from error
    found = parts_of(result).get(name)
    if not isinstance(found, (tuple, list)) or not all(isinstance(t, Tensor) for t in found):
        raise NotOffered(f"its result holds no {name}")
    return result, list(found)


@torch.no_grad()
def attention_sums(subject: Subject) -> Measure:
    """Returned attention weights sum to 1 in each row, with nothing in the future or on padding."""
    foreign = subject.stranger()
    if foreign.kind == "encoder-decoder":
        raise NotOffered("it returns the weights of two stacks")
    tokens = tokens_of(subject, 3, LENGTH, seed=171)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    if foreign.mask_name is not None:
        tokens, valid = _padded(subject, tokens, _lengths(tokens), left=False)
    masked = None if foreign.mask_name is None else valid
    _, read = _returned(subject, "attentions", "output_attentions", tokens, masked)
    B, T = tokens.shape
    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
    worst, note, limit, bar = 0.0, "", "", 0.0
    for layer, weights in enumerate(t.detach().cpu() for t in read):
        if weights.ndim != 4 or weights.shape[0] != B or weights.shape[-2:] != (T, T):
            raise NotOffered(f"its attentions have the shape {tuple(weights.shape)}")
        bar = SUM.get(weights.dtype, 1e-4)
        rows_NX = weights.transpose(0, 1)[:, valid]  # of queries that are real
        sums = rows_NX.sum(-1)
        below = bool((rows_NX >= 0).all()) and bool((sums <= 1 + bar).all())
        if float((sums - 1).abs().max()) > bar:
            worst, note = float((sums - 1).abs().max()), f"layer {layer}: sums are not 1"
            limit = "a share goes elsewhere: to a sink, or through a gate" if below else ""
            if not below:
                return Measure(worst, bar, subject.size, note)
        forbidden = ~valid[:, None, :] | (ahead if subject.causal else torch.zeros_like(ahead))
        leaked = weights.masked_select(forbidden[:, None] & valid[:, None, :, None])
        if leaked.numel() and float(leaked.abs().max()) > bar:
            place = "the future, or on padding" if subject.causal else "padding"
            return Measure(float(leaked.abs().max()), 0.0, subject.size, f"layer {layer}: {place}")
    return Measure(worst, bar, subject.size, note, limit=limit)


@torch.no_grad()
def hidden_states_end(subject: Subject) -> Measure:
    """The last of the returned hidden states is what the head reads, and no two are the same."""
    foreign = subject.stranger()
    if foreign.kind == "encoder-decoder":
        raise NotOffered("it returns the states of two stacks")
    tokens = tokens_of(subject, 2, LENGTH, seed=172)
    later: list[tuple[str, Tensor, Tensor]] = []
    stacks = _stacks(foreign.module)
    ends = {id(one[-1]) for one in stacks if len(one) == len(stacks[0])}
    blocks_out: list[Tensor] = []
    names = {id(part): name for name, part in foreign.module.named_modules()}

    def note(part: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if id(part) in ends and isinstance(first, Tensor):
            blocks_out.append(first)
        if args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            later.append((names.get(id(part), ""), args[0], result))

    handles = [part.register_forward_hook(note) for part in foreign.module.modules()]
    try:
        result, states = _returned(subject, "hidden_states", "output_hidden_states", tokens)
    finally:
        for handle in handles:
            handle.remove()
    logits = foreign.read(result)
    made = [(given, result) for _, given, result in later if result.shape == logits.shape]
    exact = [given for given, result in made if torch.equal(result, logits)]
    heads = exact or [given for given, _ in made]
    if not heads or len(states) < 2:
        raise NotOffered("nothing shows what its head reads")
    read, last = heads[-1], states[-1]
    if read.shape != last.shape:
        raise NotOffered("its states have another shape than what its head reads")
    bar = subject.tolerance(read.dtype)
    for i, state in enumerate(states[1:]):
        if state.shape == states[i].shape and torch.equal(state, states[i]):
            return Measure(math.inf, bar, subject.size, f"states {i} and {i + 1} are the same")
    apart = relative_gap(last, read)
    if apart <= bar:
        return Measure(apart, bar, subject.size)
    for name, given, result in later:  # a norm, or a projection, between the last state and it
        both = given.shape == last.shape and result.shape == read.shape
        if both and max(relative_gap(given, last), relative_gap(result, read)) <= bar:
            return Measure(apart, bar, subject.size, limit=f"the last state is read before {name}")
    ratio = float((read * last).sum() / last.square().sum().clamp(min=1e-30))
    if relative_gap(last * ratio, read) <= bar:
        return Measure(apart, bar, subject.size, limit=f"the head reads {ratio:.4g} times it")
    if any(t.shape == last.shape and relative_gap(t, last) <= bar for t in blocks_out):
        limit = "the last state is the last block's, and the head has layers of its own"
        return Measure(apart, bar, subject.size, limit=limit)
    return Measure(apart, bar, subject.size, "the last state is not what the head reads")


@torch.no_grad()
def gaps_count(subject: Subject) -> Measure:
    """Positions with a gap in them change the logits: they are read, not counted again."""
    foreign = subject.stranger()
    foreign.needs("position_ids")
    if foreign.kind == "encoder-decoder" or not subject.per_position:
        raise NotOffered("it does not continue text")
    tokens = tokens_of(subject, 2, min(LENGTH, max(3, subject.max_length - 5)), seed=173)
    T = tokens.shape[1]
    if subject.max_length < T + 4:
        raise NotOffered(f"a context of {subject.max_length} has no room for a gap")
    ones = torch.ones_like(tokens, dtype=torch.bool)
    counted = foreign.positions(ones)
    apart = counted + 3 * (torch.arange(T) >= T // 2)
    plain = foreign.logits(tokens, position_ids=counted)
    moved = relative_gap(foreign.logits(tokens, position_ids=apart), plain)
    bar = tolerance_of(plain, subject)
    if moved > bar:
        return Measure(0.0, 0.0, subject.size, f"they change by {moved:.1e}")
    tables = position_tables(foreign, tokens, ones) if foreign.mask_name is not None else []
    if not tables:
        note = "position_ids are taken and change nothing"
        return Measure(1.0, 0.0, subject.size, note, limit=note)
    names = {id(part): name for name, part in foreign.module.named_modules()}
    note = f"position_ids are taken, and {names[id(tables[0])]} is not read at them"
    return Measure(1.0, 0.0, subject.size, note)


@torch.no_grad()
def segments_apart(subject: Subject) -> Measure:
    """What one segment of a row holds changes no logit of another."""
    foreign = subject.stranger()
    name = next((n for n in SEGMENTS if foreign.offers(n)), "")
    if not name:
        raise NotOffered("its forward takes no segments")
    tokens = tokens_of(subject, 2, LENGTH, seed=174)
    T = tokens.shape[1]
    half = T // 2
    ids = (torch.arange(T) >= half).long().expand_as(tokens)
    worst, places = 0.0, []
    for kept in (slice(half, T), slice(0, half)):
        changed = tokens.clone()
        rest = slice(0, half) if kept.start else slice(half, T)
        changed[:, rest] = other_tokens(subject, tokens[:, rest])
        plain, after = (
            foreign.logits(t, None, **{name: foreign._laid(ids)}) for t in (tokens, changed)
        )
        found = relative_gap(after[:, kept], plain[:, kept])
        if found > worst:
            worst = found
            places.append("an earlier segment is read" if kept.start else "a later one is read")
    return Measure(worst, tolerance_of(plain, subject), subject.size, "; ".join(places))


@torch.no_grad()
def window_in_effect(subject: Subject) -> Measure:
    """The window that the config names is how far back the layers read: no more, and no less."""
    foreign = subject.stranger()
    if foreign.kind != "decoder" or not subject.per_position:
        raise NotOffered("it does not continue text")
    config = config_of(foreign.module)
    window = number(config, *WINDOWS)
    layers = number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    stacks = _stacks(foreign.module)
    layers = layers or (len(stacks[0]) if stacks else None)
    if window is None or layers is None:
        raise NotOffered("its config names no window" if layers else "its layers are not counted")
    said = [n for n in vars(config) if any(word in n for word in PATTERNS)] if config else []
    if (
        any(getattr(config, name) for name in said)
        or getattr(config, "use_sliding_window", 1) is False
    ):
        raise NotOffered("its config gives the window to some layers alone")
    reach, T = layers * (window - 1), long_of(subject)
    if reach + 3 > T:
        raise NotOffered(f"{layers} layers with a window of {window} read {reach} tokens back")
    tokens = tokens_of(subject, 1, T, seed=175)
    changed = tokens.clone()
    changed[:, 0] = other_tokens(subject, tokens[:, :1])[:, 0]
    apart_T = (foreign.logits(changed) - foreign.logits(tokens)).abs().amax(-1)[0]
    seen = int(apart_T.nonzero().max()) if bool(apart_T.any()) else 0
    if seen <= reach and seen > reach - window:
        return Measure(0.0, 0.0, subject.size, f"reach {seen}")
    note = f"{layers} layers with a window of {window} reach {reach} tokens back, and read {seen}"
    return Measure(float(abs(seen - reach)), 0.0, subject.size, note)


def _stacks(module: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of modules, the longest first."""
    found = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part)]
    return sorted(found, key=len, reverse=True)
