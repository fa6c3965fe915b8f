"""The rules of `samplers` over NumPy arrays, and the chooser of a CPU that has every rule.

Sampling without torch: a command that answers at once has no time to import it. The functions have
the names and the arguments of their twins, and give what those give; only the last bits of a sum
may differ. Imports no torch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.generation.choosing import NOTHING, Chooser, Chosen, Likeliest, uniforms
from glassformer.generation.prompts import Prompts
from glassformer.spec.decoding import DecodeSpec

# B batch, V vocab, K some of them

Floats = NDArray[np.float32]

_FEW, _MORE = 128, 16  # likeliest tokens that a nucleus is looked for among first, then times more
_HOTTEST = float(np.finfo(np.float32).max)  # beyond it -inf / temperature is no number
_LEAST = float(np.finfo(np.float32).tiny)  # a divisor below it may be 0


def keep_top_k(logits_BV: Floats, k: int) -> Floats:
    """Keep the tokens that fewer than k others beat."""
    if k >= logits_BV.shape[-1]:
        return logits_BV
    return _drop(logits_BV, logits_BV < _likeliest_values(logits_BV, k)[:, -1:])


def keep_top_p(logits_BV: Floats, p: float) -> Floats:
    """Keep tokens whose strictly likelier ones together have a probability below p (nucleus)."""
    if p >= 1.0:
        return logits_BV
    vocab, count = logits_BV.shape[-1], _FEW
    total_B1 = _log_sums(logits_BV)
    while True:  # the likeliest are mostly enough, and sorting all takes milliseconds
        count = min(count, vocab)
        sorted_BK = _likeliest_values(logits_BV, count)
        chance_BK = np.exp(sorted_BK - total_B1)
        before_BK = chance_BK.cumsum(-1) - chance_BK
        before_BK[:, 0] = 0.0  # the difference may round to something
        dropped_BK = before_BK >= p
        if count == vocab or dropped_BK[:, -1].all():
            break
        count *= _MORE
    least_B1 = np.where(dropped_BK, np.inf, sorted_BK).min(-1, keepdims=True)
    return _drop(logits_BV, logits_BV < least_B1)


def keep_min_p(logits_BV: Floats, p: float) -> Floats:
    """Keep the tokens at least p times as likely as the likeliest."""
    if p <= 0.0:
        return logits_BV
    return _drop(logits_BV, logits_BV < logits_BV.max(-1, keepdims=True) + math.log(p))


def keep_typical(logits_BV: Floats, p: float) -> Floats:
    """Keep the tokens whose surprise is nearest to the entropy, of this probability together."""
    if p >= 1.0:
        return logits_BV
    logprob_BV = logits_BV - _log_sums(logits_BV)
    chance_BV = np.exp(logprob_BV)
    with np.errstate(invalid="ignore"):  # 0 times -inf counts as 0
        entropy_B1 = np.where(chance_BV == 0, 0.0, -chance_BV * logprob_BV).sum(-1, keepdims=True)
    distance_BV = np.abs(-logprob_BV - entropy_B1)
    order_BV = distance_BV.argsort(-1, kind="stable")
    sorted_BV, chance_BV = (
        np.take_along_axis(numbers, order_BV, -1) for numbers in (distance_BV, chance_BV)
    )
    before_BV = chance_BV.cumsum(-1) - chance_BV
    before_BV[:, 0] = 0.0  # the difference may round to something
    farthest_B1 = np.where(before_BV >= p, -np.inf, sorted_BV).max(-1, keepdims=True)
    return _drop(logits_BV, distance_BV > farthest_B1)


def penalise_repetition(logits_BV: Floats, seen_BV: NDArray[np.bool_], penalty: float) -> Floats:
    """Divide positive logits of seen tokens, multiply negative ones."""
    factor = np.float32(min(max(penalty, _LEAST), _HOTTEST))
    with np.errstate(over="ignore"):
        lowered_BV = np.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
    changed_BV = seen_BV & np.isfinite(logits_BV)
    return np.where(changed_BV, lowered_BV.clip(-_HOTTEST, _HOTTEST), logits_BV).astype(np.float32)


def draw_at(logits_BV: Floats, share_B: Sequence[float]) -> NDArray[np.int64]:
    """Return the token at which the cumulative probability of each row passes its share."""
    found_B = np.full(len(logits_BV), NOTHING)
    for row, (logits_V, share) in enumerate(zip(logits_BV, share_B, strict=True)):
        kept_K = np.flatnonzero(logits_V != -np.inf)  # NaN is kept, and makes the sum NaN
        if not len(kept_K):
            continue
        wide_K = logits_V[kept_K].astype(np.float64)
        weight_K = np.exp(wide_K - wide_K.max())
        sum_K = (weight_K / weight_K.sum()).cumsum()
        if not math.isnan(sum_K[-1]):
            point = min(share * sum_K[-1], math.nextafter(sum_K[-1], 0.0))
            # The first token whose sum is above the point: never one of probability 0.
            found_B[row] = kept_K[sum_K.searchsorted(point, side="right")]
    return found_B


def likeliest(logits_BV: Floats) -> NDArray[np.int64]:
    """Return the likeliest token of each row, the first of equal ones; NOTHING if not finite."""
    best_B = logits_BV.argmax(-1)
    top_B = np.take_along_axis(logits_BV, best_B[:, None], -1)[:, 0]
    return np.where(np.isfinite(top_B), best_B, NOTHING)


def logprobs_of(logits_BV: Floats, tokens_B: NDArray[np.int64]) -> list[float]:
    """Return the log-probability of one token in each row."""
    chosen_B1 = np.take_along_axis(logits_BV, tokens_B[:, None], -1)
    values: list[float] = (chosen_B1 - _log_sums(logits_BV))[:, 0].astype(np.float32).tolist()
    return values


def _drop(logits_BV: Floats, dropped_BV: NDArray[np.bool_]) -> Floats:
    return np.where(dropped_BV, np.float32(-np.inf), logits_BV)


def _likeliest_values(logits_BV: Floats, count: int) -> Floats:
    """Return the `count` largest logits of each row, the largest first; NaN counts as largest."""
    vocab = logits_BV.shape[-1]
    top_BK = logits_BV
    if count < vocab:
        top_BK = np.partition(logits_BV, vocab - count, axis=-1)[:, vocab - count :]
    return np.sort(top_BK, axis=-1)[:, ::-1]


def _log_sums(logits_BV: Floats) -> NDArray[np.float64]:
    """Return the logarithm of each row's sum of exponentials (B, 1)."""
    most_B1 = logits_BV.max(-1, keepdims=True).astype(np.float64)
    base_B1 = np.where(np.isfinite(most_B1), most_B1, 0.0)
    sums_B1 = np.exp(logits_BV - base_B1).sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):  # nothing is left
        total_B1: NDArray[np.float64] = base_B1 + np.log(sums_B1)
    return total_B1


class SamplingChooser(Chooser):
    """Every rule of a `DecodeSpec`, on a CPU."""

    def __init__(
        self,
        spec: DecodeSpec,
        prompts: Prompts,
        *,
        vocab_size: int,
        logprobs: bool,
        array: Callable[[NDArray[Any]], Any],
    ) -> None:
        self.spec, self.logprobs, self._array = spec, logprobs, array
        self.seen_BV: NDArray[np.bool_] | None = None
        if spec.repetition_penalty != 1.0:
            self.seen_BV = np.zeros((len(prompts), vocab_size), dtype=np.bool_)
            for row, tokens in enumerate(prompts.tokens):
                self.seen_BV[row, list(tokens)] = True

    def choose(
        self,
        logits_BV: Any,
        *,
        step: int,
        rows: Sequence[int],
        allow_BV: NDArray[np.bool_] | None,
    ) -> Chosen:
        given_BV = np.asarray(logits_BV, dtype=np.float32)
        tokens_B = self._tokens(given_BV, step=step, rows=rows, allow_BV=allow_BV)
        real_B = np.maximum(tokens_B, 0)
        with np.errstate(invalid="ignore", over="ignore"):  # of logits that are not numbers
            values = logprobs_of(given_BV, real_B) if self.logprobs else [math.nan] * len(rows)
        made: tuple[list[int], list[float], list[Likeliest]] = (tokens_B.tolist(), values, [])
        return Chosen(self.array(real_B), False, lambda: made)

    def _tokens(
        self,
        x_BV: Floats,
        *,
        step: int,
        rows: Sequence[int],
        allow_BV: NDArray[np.bool_] | None,
    ) -> NDArray[np.int64]:
        """Apply the rules in their order, see `samplers.make_sampler`."""
        spec = self.spec
        if step < len(spec.forced):
            return np.full(len(x_BV), spec.forced[step])
        if self.seen_BV is not None:
            x_BV = penalise_repetition(x_BV, self.seen_BV, spec.repetition_penalty)
        closed = {*spec.forbidden, *(spec.eos if step + 1 < spec.min_new_tokens else ())}
        if closed:
            x_BV = x_BV.copy()
            x_BV[:, list(closed)] = -np.inf
        if allow_BV is not None:
            x_BV = _drop(x_BV, ~allow_BV)
        if spec.greedy:
            return likeliest(x_BV)
        with np.errstate(invalid="ignore", over="ignore"):  # logits that are not numbers: NOTHING
            x_BV = x_BV / np.float32(min(spec.temperature, _HOTTEST))
            x_BV = x_BV if spec.top_k is None else keep_top_k(x_BV, spec.top_k)
            x_BV = keep_min_p(keep_top_p(x_BV, spec.top_p), spec.min_p)
            x_BV = keep_typical(x_BV, spec.typical_p)
            shares = uniforms([spec.seed] * len(rows), rows, [step] * len(rows))
            return draw_at(x_BV, shares)

    def note(self, tokens: Sequence[int]) -> None:
        if self.seen_BV is not None:
            self.seen_BV[np.arange(len(tokens)), tokens] = True

    def keep(self, lines: Any) -> None:
        self.seen_BV = None if self.seen_BV is None else self.seen_BV[np.asarray(lines)]

    def lines(self, logits_BV: Any, lines: Any) -> Any:
        return logits_BV[lines]

    def array(self, numbers: NDArray[Any]) -> Any:
        return self._array(numbers)
