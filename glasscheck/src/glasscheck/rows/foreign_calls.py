"""Rows for modules of other libraries: ways of calling one forward that must agree.

What is asked for besides the logits, how tokens and positions are given, which attention kernel
and which precision computes, what was called before: none of it may change the answer.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from glasscheck.errors import InputError
from glasscheck.foreign import SOURCE_LENGTH, Foreign, copied, inner, training
from glasscheck.measure import (
    UNITS,
    Gaps,
    Measure,
    NotOffered,
    gap,
    nudged,
    relative_gap,
    scale_of,
    short,
)
from glasscheck.rows.invariants import LENGTH, _lengths, _padded, tokens_of, tolerance_of
from glasscheck.subject import Subject

# B batch, T length, S source length, D width, V vocab

#: Results that a forward may be asked for besides the logits.
EXTRAS: tuple[tuple[str, object], ...] = (
    ("output_attentions", True),
    ("output_hidden_states", True),
    ("use_cache", True),
    ("return_dict", False),
)


def _case(subject: Subject, seed: int) -> tuple[Foreign, Tensor, Tensor]:
    """Return the module, tokens, and their logits as they come by default."""
    foreign = subject.stranger()
    tokens = tokens_of(subject, 3, LENGTH, seed=seed)
    with torch.no_grad():  # other kernels may run where gradients are wanted
        return foreign, tokens, foreign.logits(tokens)


@torch.no_grad()
def extras_change_nothing(subject: Subject) -> Measure:
    """Asking for attentions, hidden states, a cache or a tuple leaves the logits as they are."""
    foreign, tokens, plain = _case(subject, 101)
    gaps = Gaps()
    # behind a causal model's tokens no mask is missed, so that it is padded before them
    left, masked = foreign.kind == "decoder", None
    padded, valid = _padded(subject, tokens, _lengths(tokens), left=left)
    if foreign.mask_name is not None and subject.per_position:
        masked = foreign.logits(padded, valid)[valid]
    for name, value in EXTRAS:
        if foreign.offers(name) or (foreign.any_argument and name.startswith("output_")):
            with gaps.attempt(name):
                result = foreign.call(tokens, None, **{name: value})
                logits = _logits_in(foreign, result)
                gaps.compare(foreign.cut(logits, tokens), plain, f"{name}={value}")
                if masked is not None:
                    result = foreign.call(padded, valid, **{name: value})
                    logits = _logits_in(foreign, result)
                    logits = foreign.cut(logits, padded)[valid]
                    gaps.compare(logits, masked, f"{name}={value}, padded")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


def _logits_in(foreign: Foreign, result: Any) -> Tensor:
    try:
        return foreign.read(result)
    except InputError as error:
        raise NotOffered("its result has no logits") from error


@torch.no_grad()
def ones_are_no_mask(subject: Subject) -> Measure:
    """A mask of ones is no mask, at once and through the cache."""
    foreign, tokens, plain = _case(subject, 102)
    if foreign.mask_name is None:
        raise NotOffered("its forward takes no mask")
    ones, gaps = torch.ones_like(tokens, dtype=torch.bool), Gaps()
    gaps.compare(foreign.logits(tokens, ones), plain)
    if foreign.cache_name is not None:
        T = tokens.shape[1]
        pieces = [max(1, T - 4)] + [1] * min(4, T - 1)
        with gaps.attempt("through the cache"):
            without = foreign.in_pieces(tokens, pieces)
            if relative_gap(without, plain) <= tolerance_of(
                plain, subject
            ):  # else a row of its own
                gaps.compare(foreign.in_pieces(tokens, pieces, ones), without, "through the cache")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def positions_are_counted(subject: Subject) -> Measure:
    """Positions given one by one are those that the model counts by itself."""
    foreign, tokens, plain = _case(subject, 103)
    foreign.needs("position_ids")
    ones = torch.ones_like(tokens)
    gaps = Gaps()
    gaps.compare(foreign.logits(tokens, position_ids=foreign.positions(ones)), plain)
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def embeddings_are_tokens(subject: Subject) -> Measure:
    """Embeddings looked up by the caller give what their token ids give."""
    foreign, tokens, plain = _case(subject, 104)
    both = foreign.kind == "encoder-decoder"
    name = "decoder_inputs_embeds" if both else "inputs_embeds"
    foreign.needs(name)
    if foreign.multiple > 1:
        raise NotOffered(f"it takes multiples of {foreign.multiple} tokens alone")
    owner: Any = inner(foreign.module)
    owner = owner.get_decoder() if both and hasattr(owner, "get_decoder") else owner
    if not hasattr(owner, "get_input_embeddings"):
        raise NotOffered("it does not show its input embedding")
    table = owner.get_input_embeddings()
    embedded_BTD = table(tokens.to(foreign.device))
    gaps = Gaps()
    extra: dict[str, Any] = {name: embedded_BTD}
    if both:
        extra |= foreign.source(len(tokens))
    given = foreign.call(None, **extra)
    gaps.compare(foreign.cut(_logits_in(foreign, given), tokens), plain)
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def last_logits_alone(subject: Subject) -> Measure:
    """The logits of the last positions alone are those of all positions, cut."""
    foreign, tokens, plain = _case(subject, 105)
    name = next((n for n in ("logits_to_keep", "num_logits_to_keep") if foreign.offers(n)), "")
    if not name or foreign.multiple > 1:
        raise NotOffered("its forward cannot keep the last logits alone")
    gaps = Gaps()
    for kept in (1, 3):
        gaps.compare(foreign.logits(tokens, None, **{name: kept}), plain[:, -kept:], f"{kept} kept")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


def nothing_is_left_behind(subject: Subject) -> Measure:
    """A call gives the same bits after others: another batch, a cache, a mask, a training step."""
    foreign, tokens, plain = _case(subject, 106)
    before = {name: b.clone() for name, b in foreign.module.named_buffers()}
    gaps = Gaps()

    def again(what: str) -> None:
        with torch.no_grad():
            gaps.compare(foreign.logits(tokens), plain, f"after {what}")

    other = tokens_of(subject, 2, min(17, subject.max_length), seed=107)
    with torch.no_grad():
        foreign.logits(other)
        again("a longer batch of other rows")
        if foreign.cache_name is not None:
            with gaps.attempt("after a cache"):
                foreign.in_pieces(other[:1, :4], [2, 1, 1])
                again("steps through a cache")
        if foreign.mask_name is not None:
            with gaps.attempt("after a mask"):
                foreign.logits(*_padded(subject, tokens, [4, 3, 5], left=False))
                again("a padded batch")
    if any(p.requires_grad for p in foreign.module.parameters()):
        with gaps.attempt("after a backward pass"):
            foreign.logits(other).float().square().mean().backward()
            again("a backward pass")
    for parameter in foreign.module.parameters():
        parameter.grad = None
    for name, buffer in foreign.module.named_buffers():
        same = name in before and before[name].shape == buffer.shape
        if same and gap(buffer.double(), before[name].double()) > 0:
            return Measure(math.inf, 0.0, subject.size, f"buffer {name} changed in eval mode")
    return gaps.measure(tolerance_of(plain, subject), subject.size, exact=True)


def gradients_change_nothing(subject: Subject) -> Measure:
    """Logits with gradients on are those without, and under inference mode."""
    foreign, tokens, plain = _case(subject, 120)
    gaps = Gaps()
    with torch.enable_grad():
        gaps.compare(foreign.logits(tokens), plain, "with gradients")
    with gaps.attempt("inference mode"), torch.inference_mode():
        gaps.compare(foreign.logits(tokens).clone(), plain, "inference mode")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def layout_of_ids(subject: Subject) -> Measure:
    """Ids that are a part of a larger table give what the same ids give, laid out densely."""
    foreign, tokens, plain = _case(subject, 121)
    B, T = tokens.shape
    table = torch.zeros(B + 1, 2 * T, dtype=tokens.dtype)
    table[1:, ::2] = tokens
    gaps = Gaps()
    gaps.compare(foreign.logits(table[1:, ::2]), plain, "every other column of a table")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def copies_agree(subject: Subject) -> Measure:
    """A deep copy gives the same bits, and has weights of its own."""
    foreign, tokens, plain = _case(subject, 122)
    twin = foreign.twin(copied(foreign.module))
    held = {p.data_ptr() for p in foreign.module.parameters() if p.numel()}
    shared = [name for name, p in twin.module.named_parameters() if p.data_ptr() in held]
    if shared:
        return Measure(math.inf, 0.0, subject.size, f"the copy shares {shared[0]}")
    gaps = Gaps()
    gaps.compare(twin.logits(tokens), plain, "a copy")
    return gaps.measure(tolerance_of(plain, subject), subject.size, exact=True)


@torch.no_grad()
def double_precision(subject: Subject) -> Measure:
    """float64 gives the logits of float32 within float32's rounding."""
    foreign, tokens, plain = _case(subject, 123)
    if plain.dtype != torch.float32:
        raise NotOffered("it is not in float32")
    try:
        wide = foreign.twin(copied(foreign.module).double()).logits(tokens)
    except Exception as error:  # a stranger's model may raise anything
        raise NotOffered(f"no float64 copy: the model raised {short(error)}") from error
    gaps = Gaps()
    gaps.compare(plain.double(), wide.double())
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def training_mode_without_dropout(subject: Subject) -> Measure:
    """Training mode with every dropout rate at 0 computes what eval mode computes."""
    foreign, tokens, plain = _case(subject, 108)
    gaps = Gaps()
    with training(foreign.module):
        gaps.compare(foreign.logits(tokens), plain)
    bar = tolerance_of(plain, subject)
    limit = "training mode computes something else, besides dropout" if gaps.worst > bar else ""
    return gaps.measure(bar, subject.size, limit=limit)


# --- kernels, precisions, devices ---------------------------------------------------------------


def under(foreign: Foreign, kernel: str, ask: Callable[[Foreign], Tensor]) -> Tensor:
    """Compute with another attention implementation: switched and back, or built anew with it."""
    module: Any = inner(foreign.module)
    before = getattr(getattr(module, "config", None), "_attn_implementation", None)
    switch = getattr(module, "set_attn_implementation", None)
    if before is None:
        raise NotOffered("its attention implementation cannot be chosen")
    try:
        if not callable(switch):
            return ask(foreign.rebuilt(_attn_implementation=kernel))
        switch(kernel)
    except (ValueError, ImportError) as error:
        raise NotOffered(f"{kernel} attention is refused: {short(error)}") from error
    try:
        return ask(foreign)
    finally:
        switch(before)


@torch.no_grad()
def kernels_agree(subject: Subject) -> Measure:
    """Explicit attention and the fused kernel give the same logits, padded too."""
    foreign, tokens, plain = _case(subject, 109)
    gaps = Gaps()

    def compare(tokens: Tensor, valid: Tensor | None, what: str, **extra: Any) -> None:
        eager = under(foreign, "eager", lambda twin: twin.logits(tokens, valid, **extra))
        fused = under(foreign, "sdpa", lambda twin: twin.logits(tokens, valid, **extra))
        if valid is not None and subject.per_position:
            eager, fused = eager[valid], fused[valid]
        gaps.compare(fused, eager, what)

    compare(tokens, None, "no mask")
    if foreign.mask_name is not None:
        for left in (False,) if foreign.kind == "encoder-decoder" else (False, True):
            with gaps.attempt("left" if left else "right"):
                padded, valid = _padded(subject, tokens, [9, 5, 6], left=left)
                extra = (
                    {"position_ids": foreign.positions(valid)}
                    if _with_positions(foreign, left)
                    else {}
                )
                compare(padded, valid, f"padded on the {'left' if left else 'right'}", **extra)
    return gaps.measure(tolerance_of(plain, subject), subject.size)


def _with_positions(foreign: Foreign, left: bool) -> bool:
    return left and foreign.offers("position_ids")


@torch.no_grad()
def half_precision(subject: Subject) -> Measure:
    """bfloat16 and float16 give the logits of float32 within what their bits allow.

    Judged at the median position: a token that goes to another expert is no mistake of a dtype.
    """
    foreign, tokens, plain = _case(subject, 110)
    if plain.dtype != torch.float32:
        raise NotOffered("it is not in float32")

    def apart(logits: Tensor) -> float:
        gaps_BT = torch.where(plain.abs() < 1e30, (logits - plain).abs(), 0.0).amax(-1)
        return float(gaps_BT.median()) / (scale_of(plain) or 1.0)

    parameters, eps = list(foreign.module.parameters()), torch.finfo(torch.float32).eps
    changes = []
    for seed in (1, 2, 3):
        with nudged(parameters, seed=seed):
            changes.append(apart(foreign.logits(tokens)))
    noise = max(eps, statistics.median(changes))
    worst, bar, place, missing = 0.0, 0.0, "", []
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        allowed = UNITS[dtype] * noise * torch.finfo(dtype).eps / eps
        try:
            twin = foreign.twin(copied(foreign.module).to(dtype))
            logits = twin.logits(tokens).float()
        except Exception as error:  # a stranger's model may raise anything
            missing.append(f"{name}: the model raised {short(error)}")
            continue
        relative = apart(logits)
        if not math.isfinite(relative):
            limit = "float16 has no room for its values" if dtype == torch.float16 else ""
            return Measure(math.inf, allowed, subject.size, f"{name}: not finite", limit=limit)
        if relative / allowed > worst / (bar or 1.0):
            worst, bar, place = relative, allowed, name
    if not bar:
        raise NotOffered("; ".join(missing) or "nothing to compare")
    limit = f"{place} loses more than the rounding of weights explains" if worst > bar else ""
    return Measure(worst, bar, subject.size, dtype=place, limit=limit)


@torch.no_grad()
def compiled_is_eager(subject: Subject) -> Measure:
    """torch.compile gives the logits of plain execution, for two lengths."""
    foreign, tokens, plain = _case(subject, 111)
    gaps = Gaps()
    twin = foreign.twin(torch.compile(copied(foreign.module)))  # type: ignore[arg-type]
    try:
        gaps.compare(twin.logits(tokens), plain)
        short_ones = tokens[:, : max(1, tokens.shape[1] - 3)]
        gaps.compare(twin.logits(short_ones), foreign.logits(short_ones), "a shorter batch")
    finally:
        torch.compiler.reset()
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def flex_is_eager(subject: Subject) -> Measure:
    """The compiled kernel of flexible attention gives the logits of eager attention, padded too."""
    foreign, tokens, plain = _case(subject, 118)
    gaps = Gaps()

    def compare(tokens: Tensor, valid: Tensor | None, what: str) -> None:
        eager = under(foreign, "eager", lambda twin: twin.logits(tokens, valid))
        flex = under(foreign, "flex_attention", lambda twin: twin.logits(tokens, valid))
        real = slice(None) if valid is None or not subject.per_position else valid
        gaps.compare(flex[real], eager[real], what)

    try:
        compare(tokens, None, "no mask")
        if foreign.mask_name is not None:
            with gaps.attempt("padded"):
                padded, valid = _padded(subject, tokens, _lengths(tokens), left=False)
                compare(padded, valid, "padded on the right")
    finally:
        torch.compiler.reset()
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def quantized_is_dequantized(subject: Subject) -> Measure:
    """Layers that hold rounded weights compute with exactly what their `dequantize` returns."""
    foreign, tokens, plain = _case(subject, 119)
    twin = foreign.twin(copied(foreign.module))
    replaced = 0
    for part in list(twin.module.modules()):
        for name, child in list(part.named_children()):
            wide = _wide(child)
            if wide is not None:
                setattr(part, name, wide.to(foreign.device).eval())
                replaced += 1
    if not replaced:
        raise NotOffered("no layer holds rounded weights and offers dequantize")
    gaps = Gaps()
    gaps.compare(plain, twin.logits(tokens), f"{replaced} layers dequantized")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


def _wide(layer: nn.Module) -> nn.Linear | None:
    """Return a plain layer with a rounded layer's weights, if it says what they are."""
    ask: Any = getattr(layer, "dequantize", None)
    weight = getattr(layer, "weight", None)
    if not callable(ask) and isinstance(weight, Tensor):
        rounded = type(weight.data) is not Tensor or weight.is_quantized
        ask = weight.dequantize if rounded else None
    if callable(ask):
        try:
            found = ask()
        except Exception:  # a method of that name that wants more
            return None
        if isinstance(found, Tensor) and found.ndim == 2 and found.is_floating_point():
            bias = getattr(layer, "bias", None)
            wide = nn.Linear(found.shape[1], found.shape[0], bias=isinstance(bias, Tensor))
            wide.weight = nn.Parameter(found.detach().clone())
            if isinstance(bias, Tensor):
                wide.bias = nn.Parameter(bias.detach().clone())
            return wide
    return None


@torch.no_grad()
def devices_agree(subject: Subject) -> Measure:
    """The GPU gives the CPU's logits."""
    foreign, tokens, plain = _case(subject, 112)
    if not torch.cuda.is_available():
        raise NotOffered("no CUDA device here")
    other = "cpu" if foreign.device.type == "cuda" else "cuda"
    twin = foreign.twin(copied(foreign.module).to(other))
    gaps = Gaps()
    gaps.compare(twin.logits(tokens), plain, f"on {other}")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


# --- the source of an encoder-decoder -----------------------------------------------------------


def _both(subject: Subject) -> Foreign:
    foreign = subject.stranger()
    if foreign.kind != "encoder-decoder":
        raise NotOffered("it has no source")
    return foreign


@torch.no_grad()
def source_padding(subject: Subject) -> Measure:
    """What source PAD holds, how much there is, and other sources of the batch change nothing."""
    foreign = _both(subject)
    if foreign.source_mask is None:
        raise NotOffered("its forward takes no mask of the source")
    tokens = tokens_of(subject, 2, LENGTH, seed=113)
    plain, gaps = foreign.logits(tokens), Gaps()
    other = foreign.draw(1, 7, seed=114)
    gaps.compare(foreign.logits(tokens, **foreign.source(2, pad=other)), plain, "other content")
    gaps.compare(foreign.logits(tokens, **foreign.source(2, extra=3)), plain, "3 more")
    alone = {name: value[:, : 7 // 2 + 2] for name, value in foreign.source(2).items()}
    gaps.compare(foreign.logits(tokens, **alone), plain, "none")
    mixed = foreign.source(2)
    mixed[foreign.source_name][1, : 7 // 2 + 2] = other[0, : 7 // 2 + 2].to(foreign.device)
    both = foreign.logits(tokens, **mixed)
    gaps.compare(both[:1], plain[:1], "another source in the batch")
    second = {name: value[1:] for name, value in mixed.items()}
    if not foreign.time_first:
        gaps.compare(both[1:], foreign.logits(tokens[1:], **second), "a second source of its own")
    return gaps.measure(tolerance_of(plain, subject), subject.size)


@torch.no_grad()
def source_is_read(subject: Subject) -> Measure:
    """Another source gives other logits, at every position."""
    foreign = _both(subject)
    tokens = tokens_of(subject, 2, LENGTH, seed=115)
    plain = foreign.logits(tokens)
    source = foreign.source(2)
    source[foreign.source_name] = foreign.draw(1, SOURCE_LENGTH, seed=116).repeat(2, 1)
    after = foreign.logits(tokens, **source)
    moved_BT = (after - plain).abs().amax(-1) > tolerance_of(plain, subject) * scale_of(plain)
    still = int((~moved_BT).sum())
    note = f"{still} of {moved_BT.numel()} positions do not notice another source" if still else ""
    return Measure(float(still), 0.0, subject.size, note)


@torch.no_grad()
def encoded_once(subject: Subject) -> Measure:
    """The encoder's outputs given by the caller are those that the model computes."""
    foreign = _both(subject)
    foreign.needs("encoder_outputs")
    tokens = tokens_of(subject, 2, LENGTH, seed=117)
    plain, source = foreign.logits(tokens), foreign.source(2)
    encoder = getattr(inner(foreign.module), "get_encoder", None)
    if not callable(encoder):
        raise NotOffered("it does not show its encoder")
    outputs = encoder()(**source)
    gaps = Gaps()
    given = {"encoder_outputs": outputs}
    if foreign.source_mask is not None:
        given[foreign.source_mask] = source[foreign.source_mask]
    gaps.compare(foreign.logits(tokens, **given), plain)
    return gaps.measure(tolerance_of(plain, subject), subject.size)
