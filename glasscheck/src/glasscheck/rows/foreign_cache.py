"""Rows for modules of other libraries: caches in every form, and `generate`.

Tokens that differ are measured by the logits they were chosen by: how far, relative to the largest,
the token that was taken lies behind the one that should have been.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glasscheck.foreign import LENGTHS, Foreign, config_of, inner, number, precision_of
from glasscheck.measure import Gaps, Measure, NotOffered, scale_of, short
from glasscheck.rows.foreign_calls import under
from glasscheck.rows.invariants import (
    LENGTH,
    _padded,
    padding_left,
    tokens_of,
    tolerance_of,
)
from glasscheck.subject import Subject

# B batch, T length, V vocab

NEW = 6
#: The names of a window in configs, and the window of the rebuilt model.
WINDOWS = ("sliding_window", "attention_window_size", "window_size")
WINDOW = 4
#: A stated context longer than this is not passed: it would take too long.
AFFORDABLE = 300


def _cached(subject: Subject) -> Foreign:
    foreign = subject.stranger()
    if foreign.cache_name is None:
        raise NotOffered("its forward takes no cache")
    if not subject.per_position:
        raise NotOffered("it returns one result for a sequence")
    return foreign


@torch.no_grad()
def in_chunks(subject: Subject) -> Measure:
    """A prompt read in chunks through the cache gives the logits of one pass."""
    foreign, gaps = _cached(subject), Gaps()
    tokens = tokens_of(subject, 2, LENGTH, seed=121)
    T, whole = tokens.shape[1], foreign.logits(tokens)
    for pieces in ([T - T // 2, T // 2], [T // 3, 1, T - T // 3 - 1]):
        if min(pieces) > 0:
            chunked = foreign.in_pieces(tokens, pieces)
            gaps.compare(chunked, whole, f"pieces of {'+'.join(map(str, pieces))}")
    return gaps.measure(tolerance_of(whole, subject), subject.size)


@torch.no_grad()
def reordered(subject: Subject) -> Measure:
    """A cache whose rows are reordered, as beams do, goes on as those rows."""
    foreign, gaps = _cached(subject), Gaps()
    tokens = tokens_of(subject, 3, LENGTH, seed=122)
    prompt, rows = max(1, tokens.shape[1] - 4), torch.tensor([2, 0, 0])
    _, past = foreign.feed(tokens[:, :prompt])
    module: Any = inner(foreign.module)
    if callable(getattr(past, "reorder_cache", None)):
        past.reorder_cache(rows.to(foreign.device))
    elif callable(getattr(module, "_reorder_cache", None)):
        past = module._reorder_cache(past, rows.to(foreign.device))
    else:
        raise NotOffered("its cache cannot be reordered")
    after = torch.cat((tokens[rows, :prompt], tokens[:, prompt:]), 1)
    columns = []
    for t in range(prompt, tokens.shape[1]):
        logits, past = foreign.feed(after[:, t : t + 1], past=past)
        columns.append(logits)
    whole = foreign.logits(after)
    gaps.compare(torch.cat(columns, 1), whole[:, prompt:], f"steps after {prompt} tokens")
    return gaps.measure(tolerance_of(whole, subject), subject.size)


@torch.no_grad()
def past_the_window(subject: Subject) -> Measure:
    """Beyond a sliding window of 4: cached = uncached, and both attention kernels agree."""
    foreign, gaps = _cached(subject), Gaps()
    config = config_of(foreign.module, decoder=True)
    name = next((name for name in WINDOWS if number(config, name)), "")
    if not name:
        raise NotOffered("it has no sliding window")
    narrow = foreign.rebuilt(**{name: WINDOW})
    tokens = tokens_of(subject, 2, LENGTH, seed=123)
    T, whole = tokens.shape[1], narrow.logits(tokens)
    gaps.compare(narrow.in_pieces(tokens, [1] * T), whole, "token by token")
    with gaps.attempt("in chunks"):
        gaps.compare(narrow.in_pieces(tokens, [T - T // 2, T // 2]), whole, "in chunks")
    with gaps.attempt("kernels"):
        eager = under(narrow, "eager", lambda twin: twin.logits(tokens))
        fused = under(narrow, "sdpa", lambda twin: twin.logits(tokens))
        gaps.compare(fused, eager, "eager attention against the fused kernel")
    if narrow.offers("output_attentions"):
        with gaps.attempt("weights read"):
            gaps.compare(narrow.logits(tokens, None, output_attentions=True), whole, "weights read")
    return gaps.measure(tolerance_of(whole, subject), f"{subject.size}, window {WINDOW}")


@torch.no_grad()
def past_the_length(subject: Subject) -> Measure:
    """Beyond the stated context the model refuses, or cached = uncached still holds."""
    foreign, gaps = _cached(subject), Gaps()
    stated = number(config_of(foreign.module, decoder=True), *LENGTHS)
    if stated is None or stated > AFFORDABLE:
        raise NotOffered("no context is stated" if stated is None else f"a context of {stated}")
    if foreign.device.type != "cpu":
        raise NotOffered("an index beyond a table ends a process on this device")
    tokens = foreign.draw(1, stated + 5, seed=124)
    try:
        whole = foreign.logits(tokens)
    except Exception as error:  # a stranger's model may raise anything
        raise NotOffered(f"it refuses more than {stated} tokens: {short(error)}") from error
    gaps.compare(foreign.in_pieces(tokens, [stated] + [1] * 5), whole)
    return gaps.measure(tolerance_of(whole, subject), f"{subject.size}, T{stated + 5}")


# --- generate -----------------------------------------------------------------------------------


def _writer(subject: Subject) -> Foreign:
    foreign = subject.stranger()
    module: Any = inner(foreign.module)
    can = getattr(module, "can_generate", None)
    if not callable(getattr(module, "generate", None)) or (callable(can) and not can()):
        raise NotOffered("it has no generate")
    if foreign.kind == "encoder" or not subject.per_position:
        raise NotOffered("it continues no text")
    if getattr(module, "generation_config", None) is None:
        raise NotOffered("it has no generation config")
    if foreign.multiple > 1:
        raise NotOffered(f"it takes multiples of {foreign.multiple} tokens alone")
    if foreign.offers("perm_mask"):
        raise NotOffered("generate gives a perm_mask, without which it reads both ways")
    return foreign


def _generate(
    foreign: Foreign,
    prompt_BT: Tensor | None,
    valid_BT: Tensor | None = None,
    *,
    source: dict[str, Tensor] | None = None,
    past: Any = None,
    **settings: Any,
) -> Any:
    """Generate greedily with plain settings; return the whole result.

    The model's own generation config (penalties, forced or suppressed tokens) is set aside.
    """
    module: Any = inner(foreign.module)
    own = module.generation_config
    kind = type(own)
    start = getattr(own, "decoder_start_token_id", None)
    start = start if start is not None else getattr(module.config, "decoder_start_token_id", None)
    base = {"pad_token_id": foreign.pad, "do_sample": False}
    if foreign.kind == "encoder-decoder":
        base["decoder_start_token_id"] = start if start is not None else foreign.pad
        given = dict(source or {})
    else:
        assert prompt_BT is not None
        mask = torch.ones_like(prompt_BT) if valid_BT is None else valid_BT.long()
        given = {
            "input_ids": prompt_BT.to(foreign.device),
            "attention_mask": mask.to(foreign.device),
        }
    if past is not None:
        given["past_key_values"] = past
    try:
        module.generation_config = kind(**base)
        return module.generate(
            **given,
            generation_config=kind(
                **base,
                max_new_tokens=NEW,
                return_dict_in_generate=True,
                disable_compile=True,
                **settings,
            ),
        )
    finally:
        module.generation_config = own


def _new_tokens(foreign: Foreign, result: Any) -> Tensor:
    sequences: Tensor = result.sequences.cpu()
    return sequences[:, -NEW:]


def _start_of(foreign: Foreign, rows: int) -> Tensor:
    module: Any = inner(foreign.module)
    own = module.generation_config
    start = getattr(own, "decoder_start_token_id", None)
    start = start if start is not None else getattr(module.config, "decoder_start_token_id", None)
    return torch.full((rows, 1), foreign.pad if start is None else start)


def _behind(
    foreign: Foreign, prompt_BT: Tensor, right_BT: Tensor, other_BT: Tensor, **extra: Any
) -> tuple[float, str]:
    """Return how far the first other token lies behind the right one, relative to the largest."""
    worst, place = 0.0, ""
    if right_BT.shape != other_BT.shape:
        return float("inf"), f"{tuple(other_BT.shape)} tokens, expected {tuple(right_BT.shape)}"
    for row in range(len(right_BT)):
        differ = (right_BT[row] != other_BT[row]).nonzero()
        if not len(differ):
            continue
        t = int(differ[0])
        context = torch.cat((prompt_BT[row : row + 1], right_BT[row : row + 1, :t]), 1)
        one_row = {k: v[row : row + 1] for k, v in extra.items()}
        logits_V = foreign.logits(context, **one_row)[0, -1]
        behind = float(logits_V[right_BT[row, t]] - logits_V[other_BT[row, t]])
        relative = abs(behind) / (scale_of(logits_V) or 1.0)
        if relative > worst:
            worst = relative
            place = (
                f"row {row}, new token {t}: {int(other_BT[row, t])}, not {int(right_BT[row, t])}"
            )
    return worst, place


def _measured(subject: Subject, foreign: Foreign, worst: float, place: str) -> Measure:
    bar = subject.tolerance(precision_of(foreign.module))
    return Measure(worst, bar, f"{subject.size}, {NEW} tokens", place, rounding=bar)


@torch.no_grad()
def generates_the_likeliest(subject: Subject) -> Measure:
    """Greedy `generate` takes the likeliest token of a full forward at each step."""
    foreign = _writer(subject)
    both = foreign.kind == "encoder-decoder"
    source = foreign.source(2) if both else {}
    prompt = _start_of(foreign, 2) if both else tokens_of(subject, 2, 5, seed=131)
    made = _new_tokens(foreign, _generate(foreign, prompt, source=source))
    row = prompt
    for _ in range(NEW):
        logits_BV = foreign.logits(row, **source)[:, -1]
        row = torch.cat((row, logits_BV.argmax(-1, keepdim=True)), 1)
    worst, place = _behind(foreign, prompt, row[:, -NEW:], made, **source)
    return _measured(subject, foreign, worst, place)


@torch.no_grad()
def generates_without_cache(subject: Subject) -> Measure:
    """`generate` with and without a cache writes the same tokens."""
    foreign = _writer(subject)
    both = foreign.kind == "encoder-decoder"
    source = foreign.source(2) if both else {}
    prompt = _start_of(foreign, 2) if both else tokens_of(subject, 2, 5, seed=132)
    plain = _new_tokens(foreign, _generate(foreign, prompt, source=source, use_cache=False))
    cached = _new_tokens(foreign, _generate(foreign, prompt, source=source, use_cache=True))
    return _measured(subject, foreign, *_behind(foreign, prompt, plain, cached, **source))


@torch.no_grad()
def generates_in_a_batch(subject: Subject) -> Measure:
    """A batch of prompts of mixed lengths writes what each prompt writes alone."""
    foreign = _writer(subject)
    if foreign.kind == "encoder-decoder":
        tokens = foreign.draw(2, 7, seed=133)
        mask = torch.ones_like(tokens)
        tokens[1, 4:], mask[1, 4:] = foreign.pad, 0
        device = foreign.device
        source = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
        together = _new_tokens(foreign, _generate(foreign, None, source=source))
        worst, place = 0.0, ""
        for row, length in enumerate((7, 4)):
            single = {name: value[row : row + 1, :length] for name, value in source.items()}
            alone = _new_tokens(foreign, _generate(foreign, None, source=single))
            start = _start_of(foreign, 1)
            found = _behind(foreign, start, alone, together[row : row + 1], **single)
            if found[0] > worst:
                worst, place = found[0], f"source {row}, {found[1]}"
        return _measured(subject, foreign, worst, place)
    if foreign.mask_name is None:
        raise NotOffered("its forward takes no mask")
    tokens, lengths = tokens_of(subject, 3, 8, seed=134), [8, 5, 3]
    lengths = [min(length, tokens.shape[1]) for length in lengths]
    padded, valid = _padded(subject, tokens, lengths, left=True)
    together = _new_tokens(foreign, _generate(foreign, padded, valid))
    worst, place = 0.0, ""
    for row, length in enumerate(lengths):
        prompt = tokens[row : row + 1, :length]
        alone = _new_tokens(foreign, _generate(foreign, prompt))
        found = _behind(foreign, prompt, alone, together[row : row + 1])
        if found[0] > worst:
            worst, place = found[0], f"prompt {row} of {length} tokens, {found[1]}"
    measure = _measured(subject, foreign, worst, place)
    if not measure.holds and not foreign.offers("position_ids"):
        return replace(measure, limit=padding_left(subject).limit)
    return measure


@torch.no_grad()
def beams_without_cache(subject: Subject) -> Measure:
    """Three beams with and without a cache find hypotheses of the same score."""
    foreign = _writer(subject)
    both = foreign.kind == "encoder-decoder"
    source = foreign.source(2) if both else {}
    prompt = _start_of(foreign, 2) if both else tokens_of(subject, 2, 5, seed=135)
    results = [
        _generate(foreign, prompt, source=source, num_beams=3, use_cache=cached, output_scores=True)
        for cached in (False, True)
    ]
    plain, cached = (result.sequences_scores.float().cpu() for result in results)
    same = torch.equal(_new_tokens(foreign, results[0]), _new_tokens(foreign, results[1]))
    largest = scale_of(foreign.logits(prompt, **source)) or 1.0
    apart = (cached - plain).abs()
    place = (
        ""
        if same
        else f"beam of row {int(apart.argmax())}: other tokens, scores "
        + (f"{float(cached[apart.argmax()]):.4f} and {float(plain[apart.argmax()]):.4f}")
    )
    return _measured(subject, foreign, float(apart.max()) / largest, place)


@torch.no_grad()
def static_is_dynamic(subject: Subject) -> Measure:
    """A cache of fixed size writes the tokens that a growing one writes."""
    foreign = _writer(subject)
    both = foreign.kind == "encoder-decoder"
    source = foreign.source(2) if both else {}
    prompt = _start_of(foreign, 2) if both else tokens_of(subject, 2, 5, seed=136)
    growing = _new_tokens(foreign, _generate(foreign, prompt, source=source))
    try:
        result = _generate(foreign, prompt, source=source, cache_implementation="static")
    except (ValueError, NotImplementedError) as error:
        raise NotOffered(f"no static cache: {short(error)}") from error
    fixed = _new_tokens(foreign, result)
    return _measured(subject, foreign, *_behind(foreign, prompt, growing, fixed, **source))


@torch.no_grad()
def second_turn(subject: Subject) -> Measure:
    """`generate` from the cache of an earlier turn writes what it writes without it."""
    foreign = _writer(subject)
    if foreign.kind == "encoder-decoder" or foreign.cache_name != "past_key_values":
        raise NotOffered("it goes on from no earlier cache")
    first = _generate(foreign, tokens_of(subject, 2, 5, seed=137), use_cache=True)
    past = getattr(first, "past_key_values", None)
    if past is None:
        raise NotOffered("generate returns no cache")
    said = torch.cat((first.sequences.cpu(), tokens_of(subject, 2, 3, seed=138)), 1)
    if said.shape[1] + NEW > subject.max_length:
        raise NotOffered(f"a context of {subject.max_length} has no room for a second turn")
    anew = _new_tokens(foreign, _generate(foreign, said, use_cache=True))
    going_on = _new_tokens(foreign, _generate(foreign, said, past=past, use_cache=True))
    return _measured(subject, foreign, *_behind(foreign, said, anew, going_on))


@torch.no_grad()
def some_rows_end(subject: Subject) -> Measure:
    """Where one row of a batch has ended, it holds padding, and the others go on as before."""
    foreign = _writer(subject)
    if foreign.kind == "encoder-decoder":
        raise NotOffered("its rows begin with a source")
    prompt = tokens_of(subject, 3, 5, seed=139)
    plain = _new_tokens(foreign, _generate(foreign, prompt))
    end = int(plain[0, 1])
    made = _generate(foreign, prompt, eos_token_id=end).sequences.cpu()[:, prompt.shape[1] :]
    wanted = plain.clone()
    for row in wanted:
        at = (row == end).nonzero().flatten()
        if len(at):
            row[int(at[0]) + 1 :] = foreign.pad
    wanted = wanted[:, : made.shape[1]]
    wrong = (wanted != made).nonzero()
    note = ""
    if len(wrong):
        row, t = (int(i) for i in wrong[0])
        note = f"row {row}, new token {t}: {int(made[row, t])}, not {int(wanted[row, t])}"
        before = wanted[row, :t]
        if end not in before:  # chosen by logits, which may be as good as equal
            found = _behind(
                foreign, prompt[row : row + 1], wanted[row : row + 1], made[row : row + 1]
            )
            return _measured(subject, foreign, *found)
    return Measure(float(len(wrong)), 0.0, f"{subject.size}, {NEW} tokens", note)


#: Every penalty and processor of greedy decoding, at values that change what is written.
PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 3,
    "exponential_decay_length_penalty": (2, 1.2),
    "renormalize_logits": True,
}


@torch.no_grad()
def generates_with_processors(subject: Subject) -> Measure:
    """With every penalty at once, a cache or none gives the same tokens, and the formula's."""
    foreign = _writer(subject)
    both = foreign.kind == "encoder-decoder"
    source = foreign.source(2) if both else {}
    prompt = _start_of(foreign, 2) if both else tokens_of(subject, 2, 5, seed=140)
    banned = [int(i) for i in foreign.draw(1, 3, seed=141)[0]]
    settings = {**PROCESSORS, "suppress_tokens": banned, "eos_token_id": foreign.pad}
    made = [
        _generate(foreign, prompt, source=source, use_cache=cached, **settings).sequences.cpu()
        for cached in (False, True)
    ]
    same = made[0].shape == made[1].shape and torch.equal(made[0], made[1])
    size = f"{subject.size}, {NEW} tokens"
    if not same:
        return Measure(1.0, 0.0, size, "with a cache other tokens are written")
    if set(made[0].flatten().tolist()) & set(banned) - set(prompt.flatten().tolist()):
        return Measure(1.0, 0.0, size, f"a suppressed token was written: {banned}")
    begun = prompt.shape[1]
    for row in range(len(made[0])):
        for t in range(begun, made[0].shape[1]):
            context = made[0][row : row + 1, :t]
            if t > begun and int(context[0, -1]) == foreign.pad:
                break
            one = {k: v[row : row + 1] for k, v in source.items()}
            scores_V = _penalized(foreign.logits(context, **one)[0, -1], context[0])
            scores_V[banned] = -torch.inf
            if t - begun < PROCESSORS["min_new_tokens"]:
                scores_V[foreign.pad] = -torch.inf
            elif t - begun > PROCESSORS["exponential_decay_length_penalty"][0]:
                over = t - begun - PROCESSORS["exponential_decay_length_penalty"][0]
                power = PROCESSORS["exponential_decay_length_penalty"][1] ** over - 1
                scores_V[foreign.pad] += scores_V[foreign.pad].abs() * power
            chosen, best = int(made[0][row, t]), int(scores_V.argmax())
            behind = float(scores_V[best] - scores_V[chosen]) / (scale_of(scores_V) or 1.0)
            if behind > subject.tolerance(scores_V.dtype):
                note = f"row {row}, new token {t - begun}: {chosen}, by the formulas {best}"
                return Measure(behind, subject.tolerance(scores_V.dtype), size, note)
    return Measure(0.0, 0.0, size)


def _penalized(logits_V: Tensor, context_T: Tensor) -> Tensor:
    """Return the logits with the penalty of tokens that were read, and no pair written twice."""
    scores_V = logits_V.clone()
    seen = context_T.unique()
    penalty = PROCESSORS["repetition_penalty"]
    scores_V[seen] = torch.where(
        scores_V[seen] < 0, scores_V[seen] * penalty, scores_V[seen] / penalty
    )
    for first, second in zip(context_T[:-1].tolist(), context_T[1:].tolist(), strict=True):
        if first == int(context_T[-1]):
            scores_V[second] = -torch.inf
    return scores_V
