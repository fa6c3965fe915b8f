"""Triton kernels that choose tokens on a GPU: the likeliest of each row, or the next beams.

Each row's logits are read once, in parts by many programs; one more kernel puts the parts together.
Everything that changes from step to step lies in the GPU's memory (`Counters`), so that the choice,
like the step before it, belongs to one CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glassformer.gpu.triton_decode import await_inputs, overlaps

# B rows, I items (searches), V vocab, P parts of the vocabulary, W beams, S positions of the cache,
# C steps whose choices are kept

PART = 4096  # tokens that a program looks through, for those of beams
#: For the likeliest token a program looks through chunks of lines, so many that this many programs
#: are run: as many as there is room for on an H200, of one warp each.
LINES, LINE, PROGRAMS = 32, 16, 4_224
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest float32 number
WIDEST = 16  # beams of a search that is done here
#: What a token is not, by the bits of its flag; the flag after the last is 1 if any is closed.
CLOSED, END = 1, 2
#: The numbers in `counters`: tokens read so far, 1 if the last choice is to be read next, choices
#: made, choices to make, and 1 if a choice is not the GPU's to make.
LENGTH, GO, MADE, LIMIT, STOP = range(5)


@triton.jit
def _begin(
    counter_ptr, pad_ptr, place_ptr, line_ptr, n_rows, n_places,
    BLOCK: tl.constexpr,
):  # fmt: skip
    go = tl.load(counter_ptr + 1)
    length = tl.load(counter_ptr) + go
    made = tl.load(counter_ptr + 2) + go
    tl.store(counter_ptr, length)
    tl.store(counter_ptr + 2, made)
    tl.store(counter_ptr + 4, 0)
    for first in range(0, n_rows, BLOCK):
        b = first + tl.arange(0, BLOCK)
        ok = b < n_rows
        pad = tl.load(pad_ptr + b, ok, 0)
        tl.store(place_ptr + b, length - 1 - pad, ok)
        if line_ptr is not None:
            tl.store(line_ptr + b.to(tl.int64) * n_places + length - 1, b, ok)


def begin(counters: Tensor, pads_B: Tensor, places_B: Tensor, lines_BS: Tensor | None) -> None:
    """Begin a step: count the token that is read, and set the rows' positions and lines."""
    n_places = 0 if lines_BS is None else lines_BS.shape[1]
    _begin[(1,)](counters, pads_B, places_B, lines_BS, len(pads_B), n_places, BLOCK=256)


@triton.jit
def _sortable(x):
    """Integers in the order of these float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _look(
    logit_ptr, flag_ptr, most_ptr, sum_ptr, best_ptr, n_vocab, n_parts,
    WIDTH: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.program_id(1)
    v = part * PART + tl.arange(0, PART)
    inside = v < n_vocab
    closed = (tl.load(flag_ptr + v, inside, 1) & 1) != 0
    await_inputs(EARLY)
    x = tl.load(logit_ptr + b.to(tl.int64) * n_vocab + v, inside, float("-inf")).to(tl.float32)
    # NaN counts as larger than anything, and is found again by whoever puts the parts together.
    x = tl.where(x == x, x, float("inf"))
    most = tl.max(x, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    at = b * n_parts + part
    tl.store(most_ptr + at, most)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - base), 0))
    # The larger number first, and of equal ones the first token.
    x = tl.where(closed, float("-inf"), x)
    order = (_sortable(x).to(tl.int64) << 32) | (0x7FFFFFFF - v)
    for w in tl.static_range(WIDTH):
        best = tl.max(order, 0)
        tl.store(best_ptr + at * WIDTH + w, best)
        if w + 1 < WIDTH:
            order = tl.where(order == best, -0x7FFFFFFFFFFFFFFF, order)


@triton.jit
def _look_for_one(
    logit_ptr, flag_ptr, most_ptr, sum_ptr, best_ptr, n_vocab, n_parts, n_chunks,
    LINES: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`_look` for the likeliest token, over several chunks; each line of a chunk by itself.

    Nothing is done for a single number but its share of the sum and of its line's largest number:
    where that was is found at the end. NaN makes the sum NaN.
    """
    b = tl.program_id(0)
    part = tl.program_id(1)
    within = tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    first = part * n_chunks * (LINES * LINE)
    v = first + within
    row_ptr = logit_ptr + b.to(tl.int64) * n_vocab
    any_closed = tl.load(flag_ptr + n_vocab)
    await_inputs(EARLY)
    next_x = tl.load(row_ptr + v, v < n_vocab, float("-inf"))
    most = tl.full((LINES,), LOWEST, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    top = tl.full((LINES,), float("-inf"), tl.float32)
    where = tl.zeros((LINES,), tl.int32)
    for chunk in range(n_chunks):
        x = next_x.to(tl.float32)
        v += LINES * LINE
        next_x = tl.load(row_ptr + v, (v < n_vocab) & (chunk + 1 < n_chunks), float("-inf"))
        here = tl.max(x, 1)
        larger = tl.maximum(most, here)
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)
        most = larger
        if any_closed != 0:
            now = v - LINES * LINE
            closed = tl.load(flag_ptr + now, now < n_vocab, 1) & 1
            here = tl.max(tl.where(closed != 0, float("-inf"), x), 1)
        where = tl.where(here > top, chunk, where)
        top = tl.maximum(top, here)
    at = b * n_parts + part
    whole = tl.max(most, 0)
    tl.store(most_ptr + at, whole)
    tl.store(sum_ptr + at, tl.sum(total * tl.exp(most - whole), 0))
    # The larger number first, and of equal ones the first token.
    best = tl.max(top, 0)
    v = first + where[:, None] * (LINES * LINE) + within
    x = tl.load(row_ptr + v, v < n_vocab, float("-inf")).to(tl.float32)
    open = (tl.load(flag_ptr + v, v < n_vocab, 1) & 1) == 0
    token = tl.min(tl.min(tl.where((x == best) & open, v, 0x7FFFFFFF), 1), 0)
    tl.store(best_ptr + at, (_sortable(best).to(tl.int64) << 32) | (0x7FFFFFFF - token))


@triton.jit
def _number_of(order):
    """The number and the token of what `_look` has found."""
    token = 0x7FFFFFFF - (order & 0x7FFFFFFF)
    bits = (order >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True), token


@triton.jit
def _likeliest(
    most_ptr, sum_ptr, best_ptr, counter_ptr, token_ptr, made_ptr, value_ptr, n_parts, n_rows,
    n_kept, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    p = tl.arange(0, PARTS)
    ok = p < n_parts
    await_inputs(EARLY)
    most = tl.load(most_ptr + b * n_parts + p, ok, float("-inf"))
    total = tl.load(sum_ptr + b * n_parts + p, ok, 0.0)
    best = tl.load(best_ptr + b * n_parts + p, ok, -0x7FFFFFFFFFFFFFFF)
    number, token = _number_of(tl.max(best, 0))
    top = tl.max(most, 0)
    whole = tl.sum(total * tl.exp(most - top), 0)
    value = number - top - tl.log(whole)
    finite = (whole == whole) & (top < float("inf")) & (number > float("-inf"))
    row = tl.load(counter_ptr + 2) % n_kept
    tl.store(token_ptr + b, tl.where(finite, token, 0))
    tl.store(made_ptr + row * n_rows + b, tl.where(finite, token, -1))
    tl.store(value_ptr + row * n_rows + b, tl.where(finite, value, float("nan")))


def choose_likeliest(
    logits_BV: Tensor,
    flags_V: Tensor,
    counters: Tensor,
    tokens_B: Tensor,
    made_CB: Tensor,
    values_CB: Tensor,
) -> None:
    """Set each row's likeliest open token, of equal ones the first; keep it in row MADE modulo C.

    `made_CB` gets -1 where logits are not numbers or no token is open; `values_CB` gets the model's
    log-probabilities, whatever is closed.
    """
    keep_likeliest(*_found(logits_BV, flags_V, 1), counters, tokens_B, made_CB, values_CB)


def keep_likeliest(
    most_BP: Tensor,
    total_BP: Tensor,
    best_BP: Tensor,
    counters: Tensor,
    tokens_B: Tensor,
    made_CB: Tensor,
    values_CB: Tensor,
) -> None:
    """Put together what was found in parts of the vocabulary; see `choose_likeliest`."""
    B, parts = most_BP.shape
    early = overlaps(most_BP.device)
    _likeliest[(B,)](
        most_BP, total_BP, best_BP, counters, tokens_B, made_CB, values_CB, parts, B, len(made_CB),
        PARTS=triton.next_power_of_2(parts), EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip


def _found(logits_BV: Tensor, flags_V: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of exponentials and the best tokens of each part."""
    B, V = logits_BV.shape
    assert logits_BV.is_contiguous() and len(flags_V) == V + 1
    chunks = max(1, round(B * V / (LINES * LINE * PROGRAMS)))
    parts = triton.cdiv(V, chunks * LINES * LINE if width == 1 else PART)
    early = overlaps(logits_BV.device)
    most_BP, total_BP = logits_BV.new_empty(2, B, parts, dtype=torch.float32)
    best_BPW = logits_BV.new_empty(B, parts, width, dtype=torch.long)
    operands = (logits_BV, flags_V, most_BP, total_BP, best_BPW, V, parts)
    if width == 1:
        _look_for_one[(B, parts)](
            *operands, chunks, LINES=LINES, LINE=LINE, EARLY=early, num_warps=1, launch_pdl=early
        )
    else:
        _look[(B, parts)](
            *operands, WIDTH=width, PART=PART, EARLY=early, num_warps=4, launch_pdl=early
        )
    return most_BP, total_BP, best_BPW


@triton.jit
def _search(
    most_ptr, sum_ptr, best_ptr, flag_ptr, first_ptr, total_ptr, last_ptr, short_ptr, long_ptr,
    counter_ptr, parent_ptr, chosen_ptr, score_ptr, n_parts,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row = tl.arange(0, WIDTH)[:, None]
    p = tl.arange(0, PARTS)[None, :]
    w = tl.arange(0, WIDTH)
    await_inputs(EARLY)
    begin = tl.load(first_ptr + item)
    width = tl.load(first_ptr + item + 1) - begin
    here = row < width
    ok = here & (p < n_parts)
    most = tl.load(most_ptr + (begin + row) * n_parts + p, ok, float("-inf"))
    total = tl.load(sum_ptr + (begin + row) * n_parts + p, ok, 0.0)
    top = tl.max(most, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    rest = tl.log(tl.sum(total * tl.exp(most - base[:, None]), 1))
    before = tl.load(total_ptr + begin + w, w < width, 0.0)
    # All candidates of a row, (part, place) flat: their sums, and their numbers row * 2^32 + token.
    n = tl.arange(0, PARTS * WIDTH)[None, :]
    there = here & (n // WIDTH < n_parts)
    best = tl.load(best_ptr + (begin + row) * n_parts * WIDTH + n, there, -0x7FFFFFFFFFFFFFFF)
    logit, token = _number_of(best)
    value = before[:, None] + ((logit - base[:, None]) - rest[:, None]).to(tl.float64)
    value = tl.where(there, value, float("-inf"))
    number = (row.to(tl.int64) << 32) | token
    wrong = tl.max(((top == float("inf")) & (w < width)).to(tl.int32), 0)
    highest = tl.zeros((), tl.float64)
    for place in tl.static_range(WIDTH):
        if place < width:
            score = tl.max(tl.max(value, 1), 0)
            first = tl.min(tl.where(value == score, number, 0x7FFFFFFFFFFFFFFF), 1)
            chosen = tl.min(first, 0)
            value = tl.where(number == chosen, float("-inf"), value)
            kept = score > float("-inf")
            token_id = tl.where(kept, chosen & 0x7FFFFFFF, 0)
            ends = (tl.load(flag_ptr + token_id) & 2) != 0
            wrong = wrong | ((kept == 0) | ends).to(tl.int32)
            tl.store(parent_ptr + begin + place, begin + (chosen >> 32))
            tl.store(chosen_ptr + begin + place, token_id)
            tl.store(score_ptr + begin + place, score)
            if place == 0:
                highest = score
    if width > 0:
        # Done if no beam can beat the score that counts (NaN: any can).
        made = tl.load(counter_ptr + 2)
        limit = tl.load(counter_ptr + 3)
        short = tl.load(short_ptr + made, made < limit, 1.0)
        bound = tl.maximum(highest / short, highest / tl.load(long_ptr + item))
        done = tl.load(last_ptr + item) >= bound
        if (wrong != 0) | done:
            tl.store(counter_ptr + 4, 1)


@triton.jit
def _commit(
    first_ptr, parent_ptr, chosen_ptr, score_ptr, counter_ptr, token_ptr, total_ptr, line_ptr,
    parents_ptr, tokens_ptr, totals_ptr, n_rows, n_places,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    w = tl.arange(0, WIDTH)
    await_inputs(EARLY)
    made = tl.load(counter_ptr + 2)
    go = (tl.load(counter_ptr + 4) == 0) & (made < tl.load(counter_ptr + 3))
    if item == 0:
        tl.store(counter_ptr + 1, go.to(tl.int64))
    begin = tl.load(first_ptr + item)
    ok = (w < tl.load(first_ptr + item + 1) - begin) & go
    parent = tl.load(parent_ptr + begin + w, ok, 0)
    token = tl.load(chosen_ptr + begin + w, ok, 0)
    total = tl.load(score_ptr + begin + w, ok, 0.0)
    tl.store(token_ptr + begin + w, token, ok)
    tl.store(total_ptr + begin + w, total, ok)
    kept = made * n_rows + begin + w
    tl.store(parents_ptr + kept, parent, ok)
    tl.store(tokens_ptr + kept, token, ok)
    tl.store(totals_ptr + kept, total, ok)
    length = tl.load(counter_ptr)
    for first in range(0, tl.where(go, length, 0), BLOCK):
        s = first + tl.arange(0, BLOCK)
        both = ok[:, None] & (s < length)[None, :]
        line = tl.load(line_ptr + parent[:, None] * n_places + s[None, :], both, 0)
        tl.debug_barrier()  # rows of one item are each other's parents: read all, then write
        tl.store(line_ptr + (begin + w)[:, None] * n_places + s[None, :], line, both)


def choose_beams(
    logits_BV: Tensor,
    flags_V: Tensor,
    counters: Tensor,
    tokens_B: Tensor,
    totals_B: Tensor,
    lines_BS: Tensor,
    *,
    first: Tensor,
    last_I: Tensor,
    shortest_C: Tensor,
    longest_I: Tensor,
    parents_CB: Tensor,
    tokens_CB: Tensor,
    totals_CB: Tensor,
    width: int,
) -> None:
    """Choose the next beams of every item, unless one needs more than continuing (`BeamRun`).

    Then row MADE of the histories has the rows that are continued, their tokens and sums, and GO
    is 1; otherwise it is 0, nothing is changed, and the same step can be done again.
    """
    assert width <= WIDEST
    width = max(2, triton.next_power_of_2(width))
    most_BP, total_BP, best_BPW = _found(logits_BV, flags_V, width)
    (B, parts), early = most_BP.shape, overlaps(logits_BV.device)
    parent_B, chosen_B = tokens_B.new_empty(2, B)
    score_B = torch.empty_like(totals_B)
    _search[(len(last_I),)](
        most_BP, total_BP, best_BPW, flags_V, first, totals_B, last_I, shortest_C, longest_I,
        counters, parent_B, chosen_B, score_B, parts,
        WIDTH=width, PARTS=max(2, triton.next_power_of_2(parts)), EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
    _commit[(len(last_I),)](
        first, parent_B, chosen_B, score_B, counters, tokens_B, totals_B, lines_BS,
        parents_CB, tokens_CB, totals_CB, B, lines_BS.shape[1],
        WIDTH=width, BLOCK=128, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
