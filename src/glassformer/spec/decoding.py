"""How sequences are made of a model's logits: one token after another by chance, or by beams.

Lengths count new tokens, the end among them; the prompt is not counted.
"""

import math
from typing import Literal, get_args

from glassformer.spec.checks import at_least, divides, one_of, positive, spec
from glassformer.spec.errors import InputError

#: At or below this a temperature is greedy: dividing by it would only overflow.
GREEDY = 1e-5

#: An alpha beyond this would overflow for lengths that models have.
STEEPEST = 40

LengthPenalty = Literal["gnmt", "power"]


def _token_ids(name: str, ids: tuple[int, ...]) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{name} holds {token!r}, which is no token id", hint="0 or more")


def _lengths(least: int, most: int) -> None:
    at_least("max_new_tokens", most)
    at_least("min_new_tokens", least, 0)
    if least > most:
        raise InputError(
            f"min_new_tokens {least} is above max_new_tokens {most}",
            hint=f"the nearest valid min_new_tokens is {most}",
        )


@spec
class DecodeSpec:
    """Greedy by default; sampling with a temperature, and tokens left out before the draw.

    In order: `forced` first tokens, `repetition_penalty` on tokens already there, `forbidden`
    tokens, no `eos` before `min_new_tokens`, `temperature`, `top_k`, `top_p`, `min_p`. A sequence
    ends with any `eos`, before any `stop` string, or at `max_new_tokens`.
    """

    max_new_tokens: int = 100
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    forbidden: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _lengths(self.min_new_tokens, self.max_new_tokens)
        if not 0.0 <= self.temperature < math.inf:
            raise InputError(
                f"temperature {self.temperature} is not a finite number of 0 or more",
                hint="0 is greedy, 1 the model's own distribution",
            )
        if self.top_k is not None:
            at_least("top_k", self.top_k)
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(
                f"top_p {self.top_p} is outside (0, 1]",
                hint="1 keeps every token; the likeliest alone is temperature 0",
            )
        if not 0.0 <= self.min_p <= 1.0:
            raise InputError(f"min_p {self.min_p} is outside [0, 1]", hint="0 keeps every token")
        positive("repetition_penalty", self.repetition_penalty)
        at_least("seed", self.seed, 0)
        for name in ("forbidden", "forced", "eos"):
            _token_ids(name, getattr(self, name))
        if "" in self.stop:
            raise InputError("an empty stop string ends everything", hint="leave it out")
        self._check_forced()

    def _check_forced(self) -> None:
        if len(self.forced) > self.max_new_tokens:
            raise InputError(
                f"{len(self.forced)} forced tokens in {self.max_new_tokens} new ones",
                hint=f"the nearest valid max_new_tokens is {len(self.forced)}",
            )
        both = set(self.forced) & set(self.forbidden)
        if both:
            raise InputError(f"token {min(both)} is both forced and forbidden")
        for place, token in enumerate(self.forced):
            if token in self.eos and place + 1 < max(self.min_new_tokens, len(self.forced)):
                raise InputError(
                    f"forced token {place + 1} ends the sequence too early: {token}",
                    hint="an end may only be forced last, and not before min_new_tokens",
                )

    @property
    def greedy(self) -> bool:
        """Is the likeliest token always taken?"""
        return self.temperature <= GREEDY


@spec
class BeamSpec:
    """`width` hypotheses side by side; an ended one keeps its place, so that width 1 is greedy.

    score = log-probability / penalty(length), with length counting the end:
    gnmt: ((5 + length) / 6)^alpha (Wu and others, 2016); power: length^alpha. A positive alpha
    favours long hypotheses, a negative one short ones, 0 neither. With `groups`, later groups pay
    `diversity` for each earlier group's choice of the same token (Vijayakumar and others, 2016).
    `n_best` None means all of the width; fewer let the search end earlier.
    """

    width: int = 4
    n_best: int | None = None
    groups: int = 1
    diversity: float = 0.0
    penalty: LengthPenalty = "gnmt"
    alpha: float = 0.6
    max_new_tokens: int = 100
    min_new_tokens: int = 0
    forbidden: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least("width", self.width)
        at_least("groups", self.groups)
        divides("width", self.width, "groups", self.groups)
        _lengths(self.min_new_tokens, self.max_new_tokens)
        one_of("penalty", self.penalty, get_args(LengthPenalty))
        for name in ("forbidden", "eos"):
            _token_ids(name, getattr(self, name))
        if not abs(self.alpha) <= STEEPEST:
            raise InputError(
                f"alpha {self.alpha} is outside [-{STEEPEST}, {STEEPEST}]", hint="0 turns it off"
            )
        if not 0.0 <= self.diversity < math.inf:
            raise InputError(f"diversity {self.diversity} is negative", hint="0 turns it off")
        if self.diversity and self.groups == 1:
            raise InputError("diversity keeps groups apart, and there is one", hint="groups=2")
        if self.n_best is not None:
            at_least("n_best", self.n_best)
            if self.n_best > self.width:
                raise InputError(
                    f"n_best {self.n_best} is above the width {self.width}",
                    hint=f"the nearest valid n_best is {self.width}",
                )

    @property
    def kept(self) -> int:
        """How many hypotheses come back, resolved."""
        return self.width if self.n_best is None else self.n_best

    def length_penalty(self, length: int) -> float:
        """What a hypothesis of this length is divided by; above 0."""
        base = (5 + length) / 6 if self.penalty == "gnmt" else float(length)
        return float(base**self.alpha)

    def score(self, logprob: float, length: int) -> float:
        """Of a complete hypothesis."""
        return logprob / self.length_penalty(length)

    def bound(self, logprob: float, *, shortest: int, longest: int) -> float:
        """No completion of `shortest` to `longest` tokens scores above this.

        More tokens only lower a log-probability, and a number below 0 is best divided by the
        largest penalty; the penalty is monotonic in the length, so that is at one of the two ends.
        """
        return max(self.score(logprob, shortest), self.score(logprob, longest))
