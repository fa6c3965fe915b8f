"""Choose tokens from logits: pure functions, and the chain of them that a `DecodeSpec` describes.

A dropped token has a logit of -inf. Ties are kept or dropped together, so that no rule depends on
the order of the vocabulary. Each rule keeps at least one token: the likeliest, or of `keep_typical`
the most typical. Where no token can be chosen, because all are dropped or logits are not numbers,
the result is NOTHING.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.generation.choosing import NOTHING, Chooser, Chosen, is_plain, uniform
from glassformer.generation.prompts import Prompts
from glassformer.nn.norm import as_float
from glassformer.spec.decoding import GREEDY, DecodeSpec

# B batch, V vocab, K some of them

_FEW = 128  # likeliest tokens that a nucleus is first looked for among
_SMALL = 4096  # a vocabulary that a GPU sorts whole, as a recorded step does: no other kernels
_HOTTEST = torch.finfo(torch.float32).max  # beyond it -inf / temperature is no number
_LEAST = torch.finfo(torch.float32).tiny  # a divisor below it may be 0


def scale_by_temperature(logits_BV: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature; at 1e-5 or less keep only the first of the likeliest tokens."""
    if temperature > GREEDY:
        return logits_BV / min(temperature, _HOTTEST)
    best_B1 = greedy(logits_BV)[:, None]
    alone_BV = torch.full_like(logits_BV, -math.inf)
    return alone_BV.scatter_(1, best_B1, logits_BV.gather(1, best_B1))


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Keep the tokens that fewer than k others beat."""
    if k >= logits_BV.shape[-1]:
        return logits_BV
    kth_B1 = logits_BV.topk(k).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)


def keep_top_p(logits_BV: Tensor, p: float, *, few: int = _FEW) -> Tensor:
    """Keep tokens whose strictly likelier ones together have a probability below p (nucleus).

    They are looked for among the `few` likeliest first, which on a GPU waits for the answer; there
    a small vocabulary is sorted at once.
    """
    if p >= 1.0:
        return logits_BV
    vocab, count = logits_BV.shape[-1], few
    if logits_BV.is_cuda and vocab <= _SMALL:
        count = vocab
    while True:  # the likeliest are mostly enough, and sorting all takes a millisecond
        count = min(count, vocab)
        every = count == vocab
        if every:
            sorted_BK = logits_BV.sort(descending=True).values
            chance_BK = sorted_BK.double().softmax(-1)
        else:
            sorted_BK = logits_BV.topk(count).values
            total_B1 = logits_BV.double().logsumexp(-1, keepdim=True)
            chance_BK = (sorted_BK.double() - total_B1).exp()
        before_BK = chance_BK.cumsum(-1) - chance_BK
        before_BK[:, 0] = 0.0  # the difference may round to something
        dropped_BK = before_BK >= p
        if every or bool(dropped_BK[:, -1].all()):
            break
        count = vocab
    least_B1 = sorted_BK.masked_fill(dropped_BK, math.inf).amin(-1, keepdim=True)
    return logits_BV.masked_fill(logits_BV < least_B1, -math.inf)


def keep_min_p(logits_BV: Tensor, p: float) -> Tensor:
    """Keep the tokens at least p times as likely as the likeliest."""
    if p <= 0.0:
        return logits_BV
    least_B1 = logits_BV.amax(-1, keepdim=True) + math.log(p)
    return logits_BV.masked_fill(logits_BV < least_B1, -math.inf)


def keep_typical(logits_BV: Tensor, p: float) -> Tensor:
    """Keep the tokens whose surprise, -log(probability), is nearest to the entropy.

    As many as together have probability p: locally typical sampling (Meister and others, 2022).
    The likeliest token may be dropped.
    """
    if p >= 1.0:
        return logits_BV
    logprob_BV = logits_BV.double().log_softmax(-1)
    entropy_B1 = torch.special.entr(logprob_BV.exp()).sum(-1, keepdim=True)
    distance_BV = (-logprob_BV - entropy_B1).abs()
    sorted_BV, order_BV = distance_BV.sort(dim=-1)
    chance_BV = logprob_BV.exp().gather(1, order_BV)
    before_BV = chance_BV.cumsum(-1) - chance_BV
    before_BV[:, 0] = 0.0  # the difference may round to something
    farthest_B1 = sorted_BV.masked_fill(before_BV >= p, -math.inf).amax(-1, keepdim=True)
    return logits_BV.masked_fill(distance_BV > farthest_B1, -math.inf)


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens, multiply negative ones (Keskar and others, 2019).

    A finite logit stays finite, whatever the penalty.
    """
    factor = min(max(penalty, _LEAST), _HOTTEST)
    lowered_BV = torch.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
    changed_BV = seen_BV & logits_BV.isfinite()
    return torch.where(changed_BV, lowered_BV.clamp(-_HOTTEST, _HOTTEST), logits_BV)


def forbid(logits_BV: Tensor, tokens: Sequence[int]) -> Tensor:
    """Drop these tokens."""
    if not tokens:
        return logits_BV
    ids = torch.tensor(tokens, device=logits_BV.device)
    return logits_BV.index_fill(1, ids, -math.inf)


def force(logits_BV: Tensor, token: int) -> Tensor:
    """Keep only this token."""
    forced_BV = torch.full_like(logits_BV, -math.inf)
    forced_BV[:, token] = 0.0
    return forced_BV


def greedy(logits_BV: Tensor) -> Tensor:
    """Return the likeliest token of each row; the first of equal ones."""
    return logits_BV.argmax(-1)


def draw(logits_BV: Tensor, *, seed: int, rows: Sequence[int], step: int) -> Tensor:
    """Sample one token per row from softmax(logits), by inverting the cumulative sum.

    `rows` are the rows' names; a row with the same name samples the same token in any batch.
    """
    share_B1 = torch.tensor([[uniform(seed, row, step)] for row in rows], dtype=torch.float64)
    return draw_at(logits_BV, share_B1.to(logits_BV.device))


def draw_at(logits_BV: Tensor, share_B1: Tensor) -> Tensor:
    """Return the token at which the cumulative probability of each row passes its share."""
    sum_BV = logits_BV.double().softmax(-1).cumsum(-1)
    total_B1 = sum_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    point_B1 = torch.minimum(share_B1 * total_B1, below_total_B1)
    # The first token whose sum is above the point: never one of probability 0.
    found_B1 = torch.searchsorted(sum_BV, point_B1, right=True)
    return found_B1.masked_fill(total_B1.isnan(), NOTHING)[:, 0]


def likeliest(logits_BV: Tensor) -> Tensor:
    """Return `greedy`, or NOTHING where its logit is not finite: argmax prefers NaN."""
    best_B1 = greedy(logits_BV)[:, None]
    return best_B1.masked_fill(~logits_BV.gather(1, best_B1).isfinite(), NOTHING)[:, 0]


class Sampler(Protocol):
    """Choose tokens from logits."""

    def __call__(
        self,
        logits_BV: Tensor,
        *,
        step: int,
        rows: Sequence[int],
        seen_BV: Tensor | None = None,
        allow_BV: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens (B,) at new position `step`, from 0; NOTHING where none can be chosen.

        `allow_BV` are the tokens that a constraint allows.
        """


def make_sampler(spec: DecodeSpec) -> Sampler:
    """Return the chain of rules that the spec describes, in its order."""

    def sample(
        logits_BV: Tensor,
        *,
        step: int,
        rows: Sequence[int],
        seen_BV: Tensor | None = None,
        allow_BV: Tensor | None = None,
    ) -> Tensor:
        if step < len(spec.forced):
            return torch.full((len(logits_BV),), spec.forced[step], device=logits_BV.device)
        untouched = spec.repetition_penalty == 1.0 and not spec.forbidden and allow_BV is None
        if spec.greedy and untouched and step + 1 >= spec.min_new_tokens:
            return likeliest(logits_BV)
        x_BV = as_float(logits_BV)
        if spec.repetition_penalty != 1.0 and seen_BV is not None:
            x_BV = penalise_repetition(x_BV, seen_BV, spec.repetition_penalty)
        x_BV = forbid(x_BV, spec.forbidden)
        if step + 1 < spec.min_new_tokens:
            x_BV = forbid(x_BV, spec.eos)
        if allow_BV is not None:
            x_BV = x_BV.masked_fill(~allow_BV, -math.inf)
        if spec.greedy:
            return likeliest(x_BV)
        return draw(_kept(x_BV, spec), seed=spec.seed, rows=rows, step=step)

    return sample


def _kept(x_BV: Tensor, spec: DecodeSpec) -> Tensor:
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
        self._closed: Tensor | None = None  # the forbidden ids, on the logits' device

    def __call__(self, logits_BV: Tensor, share_B1: Tensor | None) -> Tensor:
        """Return the token of each row; `share_B1` are their random numbers, unless greedy."""
        if self.spec.forbidden:
            if self._closed is None:
                self._closed = torch.tensor(self.spec.forbidden, device=logits_BV.device)
            logits_BV = logits_BV.index_fill(1, self._closed, -math.inf)
        if self.spec.greedy:
            return likeliest(logits_BV)
        assert share_B1 is not None
        return draw_at(_kept(as_float(logits_BV), self.spec), share_B1)


# --- in the decoding loop -------------------------------------------------------------------------


class TorchChooser(Chooser):
    """The chain of rules over tensors, on their device; results are fetched when it has them."""

    def __init__(
        self, spec: DecodeSpec, prompts: Prompts, *, vocab_size: int, logprobs: bool, count: int
    ) -> None:
        self.sample, self.logprobs, self.count = make_sampler(spec), logprobs, count
        self.seen_BV = _seen(prompts, vocab_size) if spec.repetition_penalty != 1.0 else None

    def choose(
        self,
        logits_BV: Tensor,
        *,
        step: int,
        rows: Sequence[int],
        allow_BV: NDArray[np.bool_] | None,
    ) -> Chosen:
        device = logits_BV.device
        found_B = self.sample(
            logits_BV,
            step=step,
            rows=rows,
            seen_BV=None if self.seen_BV is None else self.seen_BV.to(device),
            allow_BV=None if allow_BV is None else torch.from_numpy(allow_BV).to(device),
        )
        tokens_B = found_B.clamp(min=0)  # NOTHING raises below, once a GPU is busy again
        values_B = logprobs_of(logits_BV, tokens_B) if self.logprobs else None
        fetch = _start_fetch(found_B, values_B)
        best = _likeliest(logits_BV, self.count) if self.count else []
        return Chosen(tokens_B, tokens_B.is_cuda, lambda: (*fetch(), best))

    def note(self, tokens: Sequence[int]) -> None:
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, torch.tensor(tokens)[:, None], True)

    def keep(self, lines: Tensor) -> None:
        self.seen_BV = None if self.seen_BV is None else self.seen_BV[lines]

    def lines(self, logits_BV: Tensor, lines: Tensor) -> Tensor:
        return logits_BV[lines.to(logits_BV.device)]

    def array(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers)


def _start_fetch(
    tokens_B: Tensor, values_B: Tensor | None
) -> Callable[[], tuple[list[int], list[float]]]:
    """Start copying from a GPU; return a function that waits and returns lists."""
    here_B, there_B = tokens_B, values_B
    arrived = None
    if tokens_B.is_cuda:
        here_B = tokens_B.to("cpu", non_blocking=True)
        there_B = None if values_B is None else values_B.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def fetch() -> tuple[list[int], list[float]]:
        if arrived is not None:
            arrived.synchronize()
        tokens = here_B.tolist()
        values = [float("nan")] * len(tokens) if there_B is None else there_B.tolist()
        return tokens, values

    return fetch


def _likeliest(logits_BV: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the `count` likeliest tokens of each row with log-probabilities, best first."""
    best = logits_BV.double().log_softmax(-1).topk(count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(zip(ids, values, strict=True)) for ids, values in pairs]


def logprobs_of(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """Return the log-probability of one token in each row."""
    wide_BV = as_float(logits_BV)
    return wide_BV.gather(1, tokens_B[:, None])[:, 0] - wide_BV.logsumexp(-1)


def _seen(prompts: Prompts, vocab_size: int) -> Tensor:
    seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    for row, tokens in enumerate(prompts.tokens):
        seen_BV[row, list(tokens)] = True
    return seen_BV
