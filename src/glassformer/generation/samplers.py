"""Choose tokens from logits: pure functions, and the chain of them that a `DecodeSpec` describes.

They take NumPy arrays and tensors alike, through the names that both libraries have, and need no
torch for arrays. In the decoding loop a CPU's logits are arrays, whatever made them, and a GPU's
stay there.

A dropped token has a logit of -inf. Ties are kept or dropped together, so that no rule depends on
the order of the vocabulary. Each rule keeps at least one token: the likeliest, or of `keep_typical`
the most typical. Where no token can be chosen, because all are dropped or logits are not numbers,
the result is NOTHING.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from glassformer.generation.choosing import (
    NOTHING,
    Chooser,
    Chosen,
    Likeliest,
    LikeliestChooser,
    is_plain,
    uniforms,
)
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import GREEDY, DecodeSpec

# B batch, V vocab, K some of them

#: A NumPy array or a tensor.
Array = Any

_FEW, _MORE = 128, 16  # likeliest tokens that a nucleus is looked for among first, then times more
_SMALL = 4096  # a vocabulary that a GPU sorts whole, as a recorded step does: no other kernels
_HOTTEST = float(np.finfo(np.float32).max)  # beyond it -inf / temperature is no number
_LEAST = float(np.finfo(np.float32).tiny)  # a divisor below it may be 0

_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")  # logits may be no numbers


@_quiet
def scale_by_temperature(logits_BV: Array, temperature: float) -> Array:
    """Divide by the temperature; at 1e-5 or less keep only the first of the likeliest tokens."""
    if temperature > GREEDY:
        return logits_BV / min(temperature, _HOTTEST)
    return _drop(logits_BV, _ids(logits_BV) != greedy(logits_BV)[:, None])


def keep_top_k(logits_BV: Array, k: int) -> Array:
    """Keep the tokens that fewer than k others beat."""
    if k >= logits_BV.shape[-1]:
        return logits_BV
    return _drop(logits_BV, logits_BV < _largest(logits_BV, k)[:, -1:])


@_quiet
def keep_top_p(logits_BV: Array, p: float, *, few: int = _FEW) -> Array:
    """Keep tokens whose strictly likelier ones together have a probability below p (nucleus).

    They are looked for among the `few` likeliest first, which on a GPU waits for the answer; there
    a small vocabulary is sorted at once.
    """
    if p >= 1.0:
        return logits_BV
    xp, vocab, count = _of(logits_BV), logits_BV.shape[-1], few
    if vocab <= _SMALL and not _is_here(logits_BV):
        count = vocab
    total_B1 = _log_sums(logits_BV)
    while True:  # the likeliest are mostly enough, and sorting all takes milliseconds
        count = min(count, vocab)
        sorted_BK = _largest(logits_BV, count)
        chance_BK = xp.exp(sorted_BK - total_B1)
        before_BK = chance_BK.cumsum(-1) - chance_BK
        before_BK[:, 0] = 0.0  # the difference may round to something
        dropped_BK = before_BK >= p
        if count == vocab or bool(dropped_BK[:, -1].all()):
            break
        count *= _MORE
    least_B1 = xp.amin(xp.where(dropped_BK, math.inf, sorted_BK), axis=-1, keepdims=True)
    return _drop(logits_BV, logits_BV < least_B1)


def keep_min_p(logits_BV: Array, p: float) -> Array:
    """Keep the tokens at least p times as likely as the likeliest."""
    if p <= 0.0:
        return logits_BV
    most_B1 = _of(logits_BV).amax(logits_BV, axis=-1, keepdims=True)
    return _drop(logits_BV, logits_BV < most_B1 + math.log(p))


@_quiet
def keep_typical(logits_BV: Array, p: float) -> Array:
    """Keep the tokens whose surprise, -log(probability), is nearest to the entropy.

    As many as together have probability p: locally typical sampling (Meister and others, 2022).
    The likeliest token may be dropped.
    """
    if p >= 1.0:
        return logits_BV
    xp = _of(logits_BV)
    logprob_BV = logits_BV - _log_sums(logits_BV)
    chance_BV = xp.exp(logprob_BV)
    # What has no chance adds nothing, though 0 times -inf is no number.
    entropy_B1 = -xp.where(chance_BV == 0, 0.0, chance_BV * logprob_BV).sum(-1)[:, None]
    distance_BV = xp.abs(-logprob_BV - entropy_B1)
    order_BV = xp.argsort(distance_BV, stable=True)
    sorted_BV, chance_BV = _take(distance_BV, order_BV), _take(chance_BV, order_BV)
    before_BV = chance_BV.cumsum(-1) - chance_BV
    before_BV[:, 0] = 0.0  # the difference may round to something
    kept_BV = xp.where(before_BV >= p, -math.inf, sorted_BV)
    return _drop(logits_BV, distance_BV > xp.amax(kept_BV, axis=-1, keepdims=True))


@_quiet
def penalise_repetition(logits_BV: Array, seen_BV: Array, penalty: float) -> Array:
    """Divide positive logits of seen tokens, multiply negative ones (Keskar and others, 2019).

    A finite logit stays finite, whatever the penalty.
    """
    xp, factor = _of(logits_BV), min(max(penalty, _LEAST), _HOTTEST)
    lowered_BV = xp.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
    changed_BV = _beside(seen_BV, logits_BV) & xp.isfinite(logits_BV)
    return xp.where(changed_BV, lowered_BV.clip(-_HOTTEST, _HOTTEST), logits_BV)


def forbid(logits_BV: Array, tokens: Sequence[int]) -> Array:
    """Drop these tokens."""
    if not len(tokens):
        return logits_BV
    xp = _of(logits_BV)
    open_BV = xp.asarray(logits_BV, copy=True)
    open_BV[:, _beside(tokens, logits_BV)] = -math.inf
    return open_BV


def force(logits_BV: Array, token: int) -> Array:
    """Keep only this token."""
    xp = _of(logits_BV)
    return xp.where(_ids(logits_BV) == token, xp.zeros_like(logits_BV), -math.inf)


def greedy(logits_BV: Array) -> Array:
    """Return the likeliest token of each row; the first of equal ones."""
    return logits_BV.argmax(-1)


def draw(logits_BV: Array, *, seed: int, rows: Sequence[int], step: int) -> Array:
    """Sample one token per row from softmax(logits), by inverting the cumulative sum.

    `rows` are the rows' names; a row with the same name samples the same token in any batch.
    """
    share_B = np.array(uniforms([seed] * len(rows), rows, [step] * len(rows)))
    return draw_at(logits_BV, _beside(share_B[:, None], logits_BV))


@_quiet
def draw_at(logits_BV: Array, share_B1: Array) -> Array:
    """Return the token at which the cumulative probability of each row passes its share."""
    xp, ids_K = _of(logits_BV), None
    if xp is np:  # looking costs less than exponentials of those dropped, mostly all but a few
        kept_V = (logits_BV != -math.inf).any(0)
        if not kept_V.any():
            return np.full(len(logits_BV), NOTHING)
        if 2 * np.count_nonzero(kept_V) < len(kept_V):
            (ids_K,) = kept_V.nonzero()
            logits_BV = logits_BV[:, ids_K]
    most_B1 = xp.asarray(xp.amax(logits_BV, axis=-1, keepdims=True), dtype=xp.float64)
    above_BK = logits_BV - most_B1
    sum_BK = xp.exp(above_BK, out=above_BK).cumsum(-1)
    total_B1 = sum_BK[:, -1:]
    below_total_B1 = xp.nextafter(total_B1, xp.zeros_like(total_B1))
    point_B1 = xp.minimum(share_B1 * total_B1, below_total_B1)
    # The first token whose sum is above the point: never one of probability 0.
    found_B = (sum_BK <= point_B1).sum(-1)
    if ids_K is not None:
        found_B = ids_K[found_B]
    return xp.where(xp.isnan(total_B1[:, 0]), NOTHING, found_B)


def likeliest(logits_BV: Array) -> Array:
    """Return `greedy`, or NOTHING where its logit is not finite: argmax prefers NaN."""
    best_B, xp = greedy(logits_BV), _of(logits_BV)
    return xp.where(xp.isfinite(_take(logits_BV, best_B[:, None])[:, 0]), best_B, NOTHING)


# --- what both libraries say, each in its own words -----------------------------------------------


def _of(numbers: Array) -> Any:
    """The library that these numbers belong to."""
    return np if isinstance(numbers, np.ndarray) else sys.modules["torch"]


def _is_here(numbers: Array) -> bool:
    return isinstance(numbers, np.ndarray) or numbers.device.type == "cpu"


def as_array(logits_BV: Array) -> Array:
    """Return logits of a CPU as an array, in float32 at least; those of a GPU as they are."""
    if isinstance(logits_BV, np.ndarray) or not _is_here(logits_BV):
        return logits_BV
    return _wide(logits_BV.detach()).numpy()


def _wide(numbers: Array) -> Array:
    """In float32 if it was in half precision."""
    return numbers if numbers.itemsize >= 4 else numbers.float()


def _beside(values: Any, numbers: Array) -> Array:
    """These values where the numbers are, and of their kind."""
    return _of(numbers).asarray(values, device=numbers.device)


def _ids(logits_BV: Array) -> Array:
    return _of(logits_BV).arange(logits_BV.shape[-1], device=logits_BV.device)


def _take(numbers_BV: Array, ids_BK: Array) -> Array:
    """The numbers of these tokens, row by row."""
    if isinstance(numbers_BV, np.ndarray):
        return np.take_along_axis(numbers_BV, ids_BK, -1)
    return numbers_BV.gather(-1, ids_BK)


def _drop(logits_BV: Array, dropped_BV: Array) -> Array:
    return _of(logits_BV).where(dropped_BV, -math.inf, logits_BV)


def _largest(logits_BV: Array, count: int) -> Array:
    """Return the `count` largest logits of each row, the largest first; NaN counts as largest."""
    if not isinstance(logits_BV, np.ndarray):
        return logits_BV.topk(count).values
    vocab = logits_BV.shape[-1]
    if count < vocab:
        logits_BV = np.partition(logits_BV, vocab - count, axis=-1)[:, vocab - count :]
    return np.sort(logits_BV, axis=-1)[:, ::-1]


@_quiet
def _log_sums(logits_BV: Array) -> Array:
    """Return the logarithm of each row's sum of exponentials (B, 1), in float64."""
    xp = _of(logits_BV)
    most_B1 = xp.asarray(xp.amax(logits_BV, axis=-1, keepdims=True), dtype=xp.float64)
    base_B1 = xp.where(xp.isfinite(most_B1), most_B1, 0.0)
    return base_B1 + xp.log(xp.exp(logits_BV - base_B1).sum(-1)[:, None])


# --- the chain ------------------------------------------------------------------------------------


class Sampler(Protocol):
    """Choose tokens from logits."""

    def __call__(
        self,
        logits_BV: Array,
        *,
        step: int,
        rows: Sequence[int],
        seen_BV: Array | None = None,
        allow_BV: Array | None = None,
    ) -> Array:
        """Return the tokens (B,) at new position `step`, from 0; NOTHING where none can be chosen.

        `allow_BV` are the tokens that a constraint allows.
        """


def make_sampler(spec: DecodeSpec) -> Sampler:
    """Return the chain of rules that the spec describes, in its order."""

    def sample(
        logits_BV: Array,
        *,
        step: int,
        rows: Sequence[int],
        seen_BV: Array | None = None,
        allow_BV: Array | None = None,
    ) -> Array:
        if step < len(spec.forced):
            return _beside([spec.forced[step]] * len(logits_BV), logits_BV)
        untouched = spec.repetition_penalty == 1.0 and not spec.forbidden and allow_BV is None
        if spec.greedy and untouched and step + 1 >= spec.min_new_tokens:
            return likeliest(logits_BV)
        x_BV = _wide(logits_BV)
        if spec.repetition_penalty != 1.0 and seen_BV is not None:
            x_BV = penalise_repetition(x_BV, seen_BV, spec.repetition_penalty)
        x_BV = forbid(x_BV, spec.forbidden)
        if step + 1 < spec.min_new_tokens:
            x_BV = forbid(x_BV, spec.eos)
        if allow_BV is not None:
            x_BV = _drop(x_BV, ~_beside(allow_BV, x_BV))
        if spec.greedy:
            return likeliest(x_BV)
        return draw(_kept(x_BV, spec), seed=spec.seed, rows=rows, step=step)

    return sample


def _kept(x_BV: Array, spec: DecodeSpec) -> Array:
    """Apply the temperature and the rules after it."""
    x_BV = scale_by_temperature(x_BV, spec.temperature)
    if spec.top_k is not None:
        x_BV = keep_top_k(x_BV, spec.top_k)
    x_BV = keep_min_p(keep_top_p(x_BV, spec.top_p), spec.min_p)
    return keep_typical(x_BV, spec.typical_p)


#: Fields that concern one sequence alone: its random numbers, and when it ends.
_OF_ONE_SEQUENCE = {"max_new_tokens", "min_new_tokens", "eos", "stop", "seed"}
_SETTINGS = attrgetter(
    *(each.name for each in fields(DecodeSpec) if each.name not in _OF_ONE_SEQUENCE)
)


def settings_of(spec: DecodeSpec) -> tuple[object, ...]:
    """Return what two plain specs must have in common to be sampled together.

    These are all fields but those of one sequence: a new rule is among them.
    """
    settings: tuple[object, ...] = _SETTINGS(spec)
    return settings


class Together:
    """The sampler of a plain spec for rows of several sequences at once, seeds and steps apart.

    Nothing here waits for a GPU, except a nucleus (`keep_top_p`).
    """

    def __init__(self, spec: DecodeSpec) -> None:
        assert is_plain(spec)
        self.spec = spec
        self._closed: Array = spec.forbidden  # then on the logits' device: no copy at each step

    def __call__(self, logits_BV: Array, share_B1: Array | None) -> Array:
        """Return the token of each row; `share_B1` are their random numbers, unless greedy."""
        if self.spec.forbidden:
            self._closed = _beside(self._closed, logits_BV)
        logits_BV = forbid(logits_BV, self._closed)
        if self.spec.greedy:
            return likeliest(logits_BV)
        assert share_B1 is not None
        return draw_at(_kept(_wide(logits_BV), self.spec), share_B1)


# --- in the decoding loop -------------------------------------------------------------------------


class SamplingChooser(Chooser):
    """Every rule of a `DecodeSpec`, where the logits are; results are fetched when it has them.

    `array` makes what the stepper takes of an array; `count` likeliest tokens are reported, too.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        prompts: Prompts,
        *,
        vocab_size: int,
        logprobs: bool,
        count: int,
        array: Callable[[NDArray[Any]], Array],
    ) -> None:
        self.sample, self._array = make_sampler(spec), array
        self.logprobs, self.count = logprobs, count
        self.seen_BV: NDArray[np.bool_] | None = None
        if spec.repetition_penalty != 1.0:
            self.seen_BV = seen_in(prompts, vocab_size)

    def choose(
        self,
        logits_BV: Array,
        *,
        step: int,
        rows: Sequence[int],
        allow_BV: NDArray[np.bool_] | None,
    ) -> Chosen:
        x_BV = as_array(logits_BV)
        found_B = self.sample(x_BV, step=step, rows=rows, seen_BV=self.seen_BV, allow_BV=allow_BV)
        tokens_B = found_B.clip(0)  # NOTHING raises below, once a GPU is busy again
        values_B = logprobs_of(x_BV, tokens_B) if self.logprobs else None
        is_remote = not _is_here(x_BV)
        fetch = _start_fetch(found_B, values_B)
        best = likeliest_of(x_BV, self.count) if self.count else []
        return Chosen(
            tokens_B if is_remote else self.array(tokens_B), is_remote, lambda: (*fetch(), best)
        )

    def note(self, tokens: Sequence[int]) -> None:
        if self.seen_BV is not None:
            self.seen_BV[np.arange(len(tokens)), tokens] = True

    def keep(self, lines: Array) -> None:
        self.seen_BV = None if self.seen_BV is None else self.seen_BV[np.asarray(lines)]

    def lines(self, logits_BV: Array, lines: Array) -> Array:
        return logits_BV[lines]

    def array(self, numbers: NDArray[Any]) -> Array:
        return self._array(numbers)


def seen_in(prompts: Prompts, vocab_size: int) -> NDArray[np.bool_]:
    """Return the tokens that each prompt has, as a mask (B, V)."""
    seen_BV = np.zeros((len(prompts), vocab_size), dtype=np.bool_)
    for row, tokens in enumerate(prompts.tokens):
        seen_BV[row, list(tokens)] = True
    return seen_BV


def _start_fetch(
    tokens_B: Array, values_B: Array | None
) -> Callable[[], tuple[list[int], list[float]]]:
    """Start copying from a GPU; return a function that waits and returns lists."""
    here_B, there_B = tokens_B, values_B
    arrived = None
    if not _is_here(tokens_B):
        here_B = tokens_B.to("cpu", non_blocking=True)
        there_B = None if values_B is None else values_B.to("cpu", non_blocking=True)
        arrived = _of(tokens_B).cuda.Event()
        arrived.record()

    def fetch() -> tuple[list[int], list[float]]:
        if arrived is not None:
            arrived.synchronize()
        tokens = here_B.tolist()
        values = [math.nan] * len(tokens) if there_B is None else there_B.tolist()
        return tokens, values

    return fetch


@_quiet
def logprobs_of(logits_BV: Array, tokens_B: Sequence[int]) -> Array:
    """Return the log-probability of one token in each row, in float64."""
    tokens_B1 = _beside(tokens_B, logits_BV)[:, None]
    return (_take(logits_BV, tokens_B1) - _log_sums(logits_BV))[:, 0]


@_quiet
def likeliest_of(logits_BV: Array, count: int) -> list[Likeliest]:
    """Return the `count` likeliest tokens of each row with log-probabilities, best first."""
    if not _is_here(logits_BV):
        logits_BV = logits_BV.cpu()
    x_BV, best = as_array(logits_BV), []
    value_BV = x_BV - _log_sums(x_BV)
    for value_V, least in zip(value_BV, _largest(value_BV, count)[:, -1], strict=True):
        ids = np.flatnonzero(~(value_V < least))
        ids = ids[np.argsort(-value_V[ids], kind="stable")][:count]
        best.append(tuple(zip(ids.tolist(), value_V[ids].tolist(), strict=True)))
    return best


def make_chooser(
    stepper: Stepper, spec: DecodeSpec, prompts: Prompts, *, logprobs: bool, count: int
) -> Chooser:
    """Return what chooses tokens in one decoding; `count` likeliest are reported, too."""
    if stepper.finds_likeliest_in_c and not count and LikeliestChooser.covers(spec):
        return LikeliestChooser(spec, logprobs=logprobs, array=stepper.array)
    return SamplingChooser(
        spec,
        prompts,
        vocab_size=stepper.vocab_size,
        logprobs=logprobs,
        count=count,
        array=stepper.array,
    )
