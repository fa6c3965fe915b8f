"""Decoding options: sampling, beam search, constraints, and how a step is computed.

Each field that a user may set is declared here once (`spec.options`): the command line, the chat,
the web page, `generation_config.json` and the tables of the docs are made from these fields.
Lengths count new tokens, the end among them; the prompt is not counted.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from glassformer.spec.checks import divides, spec
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.options import Option, check_options, option, options_of

#: A temperature at or below this is greedy: dividing by it would only overflow.
GREEDY = 1e-5

#: An alpha beyond this would overflow for lengths that models have.
STEEPEST = 40

#: The widest beam search: beyond this, memory and time are those of a mistake.
WIDEST_BEAM = 1024

#: The most tokens of an answer in a chat, unless an option or the model's folder says otherwise.
LONGEST_ANSWER = 1_024

LengthPenalty = Literal["gnmt", "power"]

#: The form in which keys and values are kept: as they were computed, or in 8 bits.
KVCache = Literal["float", "int8"]


def _token_ids(name: str, ids: tuple[int, ...]) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{name} holds {token!r}, which is no token id", hint="0 or more")


def _lengths(least: int, most: int) -> None:
    if least > most:
        raise InputError(
            f"{{--min-new|min_new_tokens}} {least} is above {{--max-new|max_new_tokens}} {most}",
            hint=f"the nearest valid {{--min-new|min_new_tokens}} is {most}",
        )


def _max_new() -> int:
    return option(
        100,
        help="Maximum number of new tokens.",
        flag="--max-new",
        label="New tokens at most",
        at_least=1,
    )


def _min_new() -> int:
    return option(
        0,
        help="Minimum number of new tokens, the end counted.",
        flag="--min-new",
        label="New tokens at least",
        at_least=0,
    )


def _forbidden() -> tuple[int, ...]:
    return option(
        (),
        help="Never generate a token of this text.",
        flag="--forbid",
        metavar="TEXT",
        typed=tuple[str, ...],
    )


@spec
class DecodeSpec:
    """Greedy decoding by default; sampling with a temperature above 0.

    The rules apply in this order: `forced` first tokens, `repetition_penalty` on tokens already
    there, `forbidden` tokens, no `eos` before `min_new_tokens`, `temperature`, `top_k`, `top_p`,
    `min_p`, `typical_p`. A sequence ends with any `eos`, before any `stop` string, or at
    `max_new_tokens`.
    """

    max_new_tokens: int = _max_new()
    min_new_tokens: int = _min_new()
    temperature: float = option(
        0.0,
        help="0 is greedy; 1 samples from the model's own distribution.",
        at_least=0,
        hint="0 is greedy, 1 the model's own distribution",
        group="sampling",
        hf="temperature",
    )
    top_k: int | None = option(
        None,
        help="Sample from the k likeliest tokens.",
        label="Top-k",
        at_least=1,
        group="sampling",
        hf="top_k",
    )
    top_p: float = option(
        1.0,
        help="Sample from the likeliest tokens that together have this probability (nucleus).",
        label="Top-p",
        above=0,
        at_most=1,
        off=1,
        hint="1 keeps every token; the likeliest alone is temperature 0",
        group="sampling",
        hf="top_p",
    )
    min_p: float = option(
        0.0,
        help="Drop tokens less likely than this share of the likeliest one's probability.",
        label="Min-p",
        at_least=0,
        at_most=1,
        off=0,
        hint="0 keeps every token",
        group="sampling",
        hf="min_p",
    )
    typical_p: float = option(
        1.0,
        help="Sample from the tokens nearest to the expected surprise, of this probability.",
        label="Typical-p",
        above=0,
        at_most=1,
        off=1,
        hint="1 keeps every token",
        group="sampling",
        hf="typical_p",
    )
    repetition_penalty: float = option(
        1.0,
        help="Above 1, tokens that came before are less likely.",
        above=0,
        off=1,
        hf="repetition_penalty",
    )
    forbidden: tuple[int, ...] = _forbidden()
    forced: tuple[int, ...] = option(
        (), help="Begin the output with this text.", flag="--force", metavar="TEXT", typed=str
    )
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = option((), help="End before this text.", metavar="TEXT")
    seed: int = option(0, help="Seed of the random numbers.", at_least=0, group="sampling")

    def __post_init__(self) -> None:
        check_options(self, has_flags=True)
        _lengths(self.min_new_tokens, self.max_new_tokens)
        for name in ("forbidden", "forced", "eos"):
            _token_ids(name, getattr(self, name))
        if "" in self.stop:
            raise InputError("an empty stop string ends everything", hint="leave it out")
        self._check_forced()

    def _check_forced(self) -> None:
        if len(self.forced) > self.max_new_tokens:
            raise InputError(
                f"{len(self.forced)} forced tokens in {self.max_new_tokens} new ones",
                hint=f"the nearest valid {{--max-new|max_new_tokens}} is {len(self.forced)}",
            )
        both = set(self.forced) & set(self.forbidden)
        if both:
            raise InputError(f"token {min(both)} is both forced and forbidden")
        for count, token in enumerate(self.forced, start=1):
            if token in self.eos and count < max(self.min_new_tokens, len(self.forced)):
                raise InputError(
                    f"forced token {count} ends the sequence too early: {token}",
                    hint="an end may only be forced last, and not before min_new_tokens",
                )

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always chosen."""
        return self.temperature <= GREEDY


@spec
class BeamSpec:
    """Beam search with `width` hypotheses; a complete one keeps its beam, so width 1 is greedy.

    score = log-probability / penalty(length), with length counting the end:
    gnmt: ((5 + length) / 6)^alpha (Wu and others, 2016); power: length^alpha. A positive alpha
    favours long hypotheses, a negative one short ones, 0 neither. With `groups`, later groups pay
    `diversity` for each earlier group's choice of the same token (Vijayakumar and others, 2016).
    `n_best` None returns all of the width; fewer let the search end earlier.
    """

    width: int = option(
        4,
        help="Beam search of this width.",
        flag="--beams",
        label="Beams",
        at_least=1,
        at_most=WIDEST_BEAM,
        show_default=False,
    )
    n_best: int | None = option(
        None, help="Beams: number of hypotheses to return; all by default.", at_least=1
    )
    groups: int = option(1, help="Beams: groups that differ from each other.", at_least=1)
    diversity: float = option(
        0.0,
        help="Beams: penalty for a token that an earlier group chose.",
        at_least=0,
        off=0,
    )
    penalty: LengthPenalty = option(
        "gnmt", help="Beams: formula of the length penalty.", label="Formula of the penalty"
    )
    alpha: float = option(
        0.6,
        help="Beams: exponent of the length penalty.",
        flag="--length-penalty",
        label="Length penalty",
        at_least=-STEEPEST,
        at_most=STEEPEST,
        off=0,
    )
    max_new_tokens: int = _max_new()
    min_new_tokens: int = _min_new()
    forbidden: tuple[int, ...] = _forbidden()
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_options(self, has_flags=True)
        divides("{--beams|width}", self.width, "{--groups|groups}", self.groups)
        _lengths(self.min_new_tokens, self.max_new_tokens)
        for name in ("forbidden", "eos"):
            _token_ids(name, getattr(self, name))
        if self.diversity and self.groups == 1:
            raise InputError(
                "{--diversity|diversity} keeps groups apart, and there is one",
                hint="{--groups 2|groups=2}",
            )
        if self.n_best is not None and self.n_best > self.width:
            raise InputError(
                f"{{--n-best|n_best}} {self.n_best} is above {{--beams|width}} {self.width}",
                hint=f"the nearest valid {{--n-best|n_best}} is {self.width}",
            )

    @property
    def kept(self) -> int:
        """The number of hypotheses that are returned."""
        return self.width if self.n_best is None else self.n_best

    def length_penalty(self, length: int) -> float:
        """The number above 0 that divides the log-probability of a hypothesis of this length."""
        base = (5 + length) / 6 if self.penalty == "gnmt" else float(length)
        return float(base**self.alpha)

    def score(self, logprob: float, length: int) -> float:
        """The score of a complete hypothesis."""
        return logprob / self.length_penalty(length)

    def bound(self, logprob: float, *, shortest: int, longest: int) -> float:
        """An upper bound on the score of any completion of `shortest` to `longest` tokens.

        More tokens only lower a log-probability, and a number below 0 is best divided by the
        largest penalty; the penalty is monotonic in the length, so that is at one of the two ends.
        """
        return max(self.score(logprob, shortest), self.score(logprob, longest))


@spec
class ConstraintSpec:
    """A language that the output must belong to: a regular expression, or a machine by name."""

    regex: str | None = option(
        None,
        help="The output must match this regular expression.",
        flag="--constrain",
        metavar="REGEX",
    )
    machine: str | None = option(
        None, help="A machine that must accept the output: parity, brackets-4, ..."
    )

    def __post_init__(self) -> None:
        if self.regex is not None and self.machine is not None:
            raise InputError(
                "{--constrain|regex} and {--machine|machine} are two constraints",
                hint="give one of them",
            )


@spec
class StepSpec:
    """The way a step's logits are computed; the tokens are the same, but for an 8-bit cache.

    `kv_cache` "int8" rounds keys and values to 8 bits, with a scale for 32 of them: 0.28 times the
    bytes of float32 (`nn.cache` has the definition).
    """

    cached: bool = option(True, help="Recompute everything at each token.", flag="--no-cache")
    speculate: bool = option(
        False, help="Guess tokens from the text so far and read several at once."
    )
    prompt_cache: str | None = option(
        None,
        help="Keep what was computed from prompts in this folder, and begin from it.",
        metavar="DIR",
    )
    kv_cache: KVCache = option(
        "float",
        help="Keep keys and values as computed, or in 8 bits: about 0.28 of the memory of float32.",
        metavar="FORM",
        label="Keys and values",
    )

    def __post_init__(self) -> None:
        check_options(self, has_flags=True)
        if self.cached:
            return
        for given, name in (
            (self.kv_cache != "float", f"{{--kv-cache|kv_cache}} {self.kv_cache}"),
            (self.prompt_cache is not None, "{--prompt-cache|prompt_cache}"),
            (self.speculate, "{--speculate|speculate}"),
        ):
            if given:
                raise InputError(
                    f"{name} is for the default step", hint="leave out {--no-cache|cached}"
                )


# --- options by name ------------------------------------------------------------------------------

#: Every spec that declares options of decoding.
OPTIONS = (DecodeSpec, BeamSpec, ConstraintSpec, StepSpec)

#: What other libraries call an option, for suggestions.
OTHER_NAMES = {
    "num_beams": "width",
    "beam_width": "width",
    "num_return_sequences": "n_best",
    "num_beam_groups": "groups",
    "diversity_penalty": "diversity",
    "length_penalty": "alpha",
    "do_sample": "temperature",
    "use_cache": "cached",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_length": "min_new_tokens",
    "eos_token_id": "eos",
    "stop_strings": "stop",
    "bad_words_ids": "forbidden",
    "guided_regex": "regex",
}


def nearest_option(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'width'?` for a flag, another library's word, or a slip of the pen."""
    every = {each.name: each for cls in OPTIONS for each in options_of(cls)}
    flags = {each.flag.strip("-").replace("-", "_"): each.name for each in every.values()}
    meant = OTHER_NAMES.get(name) or flags.get(name)
    listed = [*known]
    return f"did you mean '{meant}'?" if meant in listed else nearest(name, listed)


def by_name(each: Option) -> str:
    """Return an option's name in errors for a caller in Python."""
    return each.name


def by_flag(each: Option) -> str:
    """Return an option's name in errors on the command line."""
    return each.flag


def chat_options() -> tuple[Option, ...]:
    """Return what a conversation takes: options of sampling, and how prompts are kept.

    Defaults that a model's folder may set are not shown: what they are depends on the model.
    """
    own = (replace(each, show_default=each.hf is None) for each in options_of(DecodeSpec))
    sampling = (
        replace(each, default=LONGEST_ANSWER) if each.name == "max_new_tokens" else each
        for each in own
    )
    kept = (each for each in options_of(StepSpec) if each.name in ("prompt_cache", "kv_cache"))
    return (*sampling, *kept)


def serving_options() -> tuple[Option, ...]:
    """Return what a server takes for all of its requests: how keys and values are kept."""
    return tuple(each for each in options_of(StepSpec) if each.name == "kv_cache")


def decoding_spec(
    options: Mapping[str, Any],
    *,
    eos: tuple[int, ...] = (),
    spell: Callable[[Option], str] = by_name,
) -> DecodeSpec | BeamSpec:
    """Make a `BeamSpec` if `width` is among the options, else a `DecodeSpec`.

    An option that only the other one has is refused, unless it has its default.
    """
    own, other = (BeamSpec, DecodeSpec) if "width" in options else (DecodeSpec, BeamSpec)
    known = {each.name: each for each in options_of(own)}
    foreign = {each.name: each for each in options_of(other) if each.name not in known}
    for name, value in options.items():
        if name not in known and name not in foreign:
            raise InputError(
                f"no option is named {name!r}", hint=nearest_option(name, known | foreign)
            )
        if name in foreign and value != foreign[name].default:
            raise _misplaced(foreign[name], spell)
    return own(eos=eos, **{name: value for name, value in options.items() if name in known})


def _misplaced(each: Option, spell: Callable[[Option], str]) -> InputError:
    (width,) = (one for one in options_of(BeamSpec) if one.name == "width")
    beams = spell(width)
    if each in options_of(BeamSpec):
        return InputError(f"{spell(each)} belongs to a beam search", hint=f"add {beams} 4")
    return InputError(
        f"{spell(each)} does not go with {beams}: a beam search samples nothing and never stops "
        "before the end",
        hint="leave out one of the two",
    )


def without_effect(options: Mapping[str, Any]) -> tuple[Option, ...]:
    """Return the given sampling options that greedy decoding ignores."""
    if options.get("temperature", 0.0) > GREEDY:
        return ()
    own = (each for each in options_of(DecodeSpec) if each.group == "sampling")
    given = (each for each in own if each.name in options and each.name != "temperature")
    return tuple(each for each in given if options[each.name] != each.default)
