"""`generate` and `beam_search`: a model, a prompt and options by name in, text and tokens out.

The options are those that `spec.decoding` declares: of `DecodeSpec` or `BeamSpec`, a constraint's
`regex` or `machine`, and how a step is computed (`cached`, `speculate`, `kv_cache`). `read_request`
checks them for every caller: these functions, the command line and the models' own methods.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, overload

from glassformer.adapters.executors import (
    check_own_cache,
    fastest_stepper,
    rewinding_stepper,
)
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation import beam
from glassformer.generation.beam import Hypothesis
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.request import Request, read_request
from glassformer.generation.speculative import SpeculativeStepper
from glassformer.generation.stepper import NaiveStepper
from glassformer.generation.streaming import Collected, Generated, NewToken, stream
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts, text_prompt
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import OPTIONS, BeamSpec, StepSpec, nearest_option
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.options import options_of

#: A text, or the token ids of one sequence.
Prompt = str | Sequence[int]


class TextModel(Protocol):
    """A model as `gf.build` and `gf.load` return it, as far as decoding uses it."""

    spec: ModelSpec
    training: bool

    def eval(self) -> Any:
        """Switch dropout off."""

    def train(self, mode: bool = True) -> Any:
        """Set the mode."""

    def stepper(self) -> Stepper:
        """Return what decoding runs on."""

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that came with the model, or None."""

    def end_ids(self) -> tuple[int, ...]:
        """Return all ids at which a text of this model ends."""

    def nameless_ids(self) -> tuple[int, ...]:
        """Return the ids of the model's vocabulary that its tokenizer has no text for."""


@overload
def generate(
    model: TextModel | Model,
    prompt: Prompt,
    *,
    draft: TextModel | Model | None = None,
    **options: Any,
) -> Generated:
    """Continue one prompt."""


@overload
def generate(
    model: TextModel | Model,
    prompt: Sequence[Prompt] | Prompts,
    *,
    draft: TextModel | Model | None = None,
    **options: Any,
) -> list[Generated]:
    """Continue each of several prompts."""


def generate(
    model: TextModel | Model,
    prompt: Prompt | Sequence[Prompt] | Prompts,
    *,
    draft: TextModel | Model | None = None,
    **options: Any,
) -> Generated | list[Generated]:
    """Continue a prompt: the text, the new tokens, their log-probabilities, and why they ended.

    Greedy by default; `width=4` gives the best hypothesis of a beam search. A model without a
    tokenizer takes token ids, and the text is then empty; an encoder-decoder then reads
    `source=ids`, and the prompt is how its output begins. A list of prompts gives a list, each as
    it would be alone (and `source` has a row for each); `model.generate` computes them together.
    """
    if not isinstance(prompt, Prompts) and not _are_several(prompt):
        return _generated(model, prompt, options, draft)
    each = _each(prompt, options)
    for one, own in each:  # all are checked before any work
        prepare(model, one, own)
    return [_generated(model, one, own, draft) for one, own in each]


def _generated(
    model: TextModel | Model,
    prompt: Any,
    options: Mapping[str, Any],
    draft: TextModel | Model | None,
) -> Generated:
    if "width" in options:
        if draft is not None:
            options = {**options, "speculate": True}  # refused: beams are several
        tokenizer, request, prompts = prepare(model, prompt, options)
        return best_of_beams(model, tokenizer, request, prompts)[0]
    collected = Collected()
    stepper, new_tokens = _streamed(model, prompt, options, draft)
    for new in new_tokens:
        collected.add(new)
    return collected.result(collected.text, stepper.facts)


def _are_several(prompt: Any) -> bool:
    """Return whether these are several prompts, not the text or the ids of one."""
    if isinstance(prompt, str):
        return False
    if hasattr(prompt, "ndim"):
        return bool(prompt.ndim > 1)
    try:
        return any(isinstance(one, Sequence) or getattr(one, "ndim", 0) for one in prompt)
    except TypeError:
        return False


def _each(prompts: Any, options: Mapping[str, Any]) -> list[tuple[Prompt, Mapping[str, Any]]]:
    """Return each of several prompts, with its own row of `source`."""
    given = options.get("source")
    if isinstance(prompts, Prompts):
        if given is not None and prompts.sources is not None:
            raise InputError("`source` for prompts that have sources", hint="leave one of them out")
        given = prompts.sources if given is None else given
        prompts = prompts.tokens
    each: list[Prompt] = list(prompts)
    if given is None:
        return [(one, options) for one in each]
    sources = given.tolist() if hasattr(given, "tolist") else list(given)
    if len(sources) != len(each) or not all(isinstance(row, Sequence) for row in sources):
        raise InputError(
            f"`source` is not a row for each of {len(each)} prompts",
            hint="source=[[3, 4], [5]] for two prompts",
        )
    rows = zip(each, sources, strict=True)
    return [(one, {**options, "source": list(source)}) for one, source in rows]


def stream_tokens(
    model: TextModel | Model,
    prompt: Prompt,
    *,
    draft: TextModel | Model | None = None,
    **options: Any,
) -> Iterator[NewToken]:
    """Yield what `generate` collects, token by token; bad options are refused by the call."""
    return _streamed(model, prompt, options, draft)[1]


def _streamed(
    model: TextModel | Model,
    prompt: Prompt | Prompts,
    options: Mapping[str, Any],
    draft: TextModel | Model | None,
) -> tuple[Stepper, Iterator[NewToken]]:
    if draft is not None:
        options = {**options, "speculate": True}
    tokenizer, request, prompts = prepare(model, prompt, options)
    spec = request.decoding
    if isinstance(spec, BeamSpec):
        raise InputError(
            "a beam search knows its best hypothesis at its end, so its tokens are not streamed",
            hint="gf.generate(model, prompt, width=4), or gf.beam_search for all of them",
        )
    with evaluating(model):
        stepper = make_stepper(model, request.step, draft=draft)
        new_tokens = stream(
            stepper,
            prompts,
            spec=spec,
            constraint=request.constraint,
            tokenizer=tokenizer,
        )
    return stepper, _one_row(model, new_tokens)


def beam_search(model: TextModel | Model, prompt: Prompt, **options: Any) -> tuple[Hypothesis, ...]:
    """Search for the likeliest complete continuations, best first, each with score and text."""
    options = {"width": BeamSpec().width, **options}
    tokenizer, request, prompts = prepare(model, prompt, options, several=True)
    spec = request.decoding
    assert isinstance(spec, BeamSpec)
    with evaluating(model):
        (found,) = beam.beam_search(
            make_stepper(model, request.step), prompts, spec=spec, constraint=request.constraint
        )
    return with_texts(found.hypotheses, spec=spec, tokenizer=tokenizer)


def best_of_beams(
    model: TextModel | Model, tokenizer: Tokenizer | None, request: Request, prompts: Prompts
) -> list[Generated]:
    """Return the best hypothesis of a beam search for each prompt."""
    spec = request.decoding
    assert isinstance(spec, BeamSpec)
    stepper = make_stepper(model, request.step)
    with evaluating(model):
        found = beam.beam_search(
            stepper, prompts, spec=replace(spec, n_best=1), constraint=request.constraint
        )
    best = with_texts([one.hypotheses[0] for one in found], spec=spec, tokenizer=tokenizer)
    return [Generated(one.tokens, one.logprobs, one.finish, one.text) for one in best]


def with_texts(
    hypotheses: Sequence[Hypothesis], *, spec: BeamSpec, tokenizer: Tokenizer | None
) -> tuple[Hypothesis, ...]:
    """Return the hypotheses with their texts, without the end."""
    if tokenizer is None:
        return tuple(hypotheses)
    kept = ([token for token in one.tokens if token not in spec.eos] for one in hypotheses)
    texts = map(tokenizer.decode, kept)
    return tuple(replace(one, text=text) for one, text in zip(hypotheses, texts, strict=True))


# --- options, stepper -----------------------------------------------------------------


def make_stepper(
    model: TextModel | Model, step: StepSpec, *, draft: TextModel | Model | None = None
) -> Stepper:
    """Return the stepper that the options describe; a model of another library has one only.

    `draft` is a smaller or quantized model of the same tokenizer, which guesses if `speculate` is
    set; without it guesses come from the text.
    """
    plain = _plain_stepper(model, step)
    if not step.speculate:
        return plain
    guessing = None if draft is None else _plain_stepper(draft, replace(step, prompt_cache=None))
    return SpeculativeStepper(plain, draft=guessing)


def _plain_stepper(model: TextModel | Model, step: StepSpec) -> Stepper:
    """Return the stepper without guesses; if there will be some, one that can take them back."""
    own = model if isinstance(model, Model) else getattr(model, "model", None)
    if not isinstance(own, Model):
        assert not isinstance(model, Model)
        if step.prompt_cache is not None:
            raise InputError("prompts are kept for our own models; this one is another library's")
        check_own_cache(step.kv_cache)
        return model.stepper()
    if step.prompt_cache is not None:
        return NativeStepper(own, prompt_cache=Path(step.prompt_cache), kv_cache=step.kv_cache)
    if not step.cached:
        return NaiveStepper(own)
    make = rewinding_stepper if step.speculate else fastest_stepper
    return make(own, kv_cache=step.kv_cache)


@contextmanager
def evaluating(model: TextModel | Model) -> Iterator[None]:
    """Switch a model to eval mode, and back afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def prepare(
    model: TextModel | Model,
    prompt: Prompt | Prompts,
    options: Mapping[str, Any],
    *,
    several: bool = False,
) -> tuple[Tokenizer | None, Request, Prompts]:
    """Return the model's tokenizer, checked options with its ends, and the prompt as ids.

    Two options are not the spec's: `eos`, the ids that end a text, and `source`, the ids that an
    encoder reads, one sequence or a row for each prompt. `several`: whether `n_best` has a meaning.
    """
    if not isinstance(model, Model) and not callable(getattr(model, "get_tokenizer", None)):
        raise InputError(
            f"cannot generate with a {type(model).__name__}", hint="gf.build or gf.load a model"
        )
    known = {each.name for cls in OPTIONS for each in options_of(cls)} | {"eos", "source"}
    if not several:
        known.discard("n_best")
        if options.get("n_best") not in (None, 1):
            raise InputError(
                "n_best belongs to a beam search that returns several hypotheses",
                hint="gf.beam_search(model, prompt, n_best=2)",
            )
        options = {name: value for name, value in options.items() if name != "n_best"}
    for name in options:
        if name not in known:
            raise InputError(f"no decoding option '{name}'", hint=nearest_option(name, known))
    tokenizer = None if isinstance(model, Model) else model.get_tokenizer()
    eos: tuple[int, ...] = tuple(options.get("eos", ()))
    forbidden: tuple[int, ...] = ()
    if tokenizer is not None and not isinstance(model, Model):
        eos, forbidden = tuple(options.get("eos", model.end_ids())), model.nameless_ids()
    given = {name: value for name, value in options.items() if name not in ("eos", "source")}
    request = read_request(given, tokenizer=tokenizer, eos=eos, forbidden=forbidden)
    if isinstance(prompt, str) and "source" in options:
        raise InputError("`source` goes with token ids", hint="a text is the source itself")
    if not isinstance(prompt, str):
        if not isinstance(prompt, Prompts):
            prompt = Prompts.of([_ids(prompt)])
        return tokenizer, request, _with_source(prompt, options.get("source"))
    if tokenizer is None:
        raise InputError(
            "this model has no tokenizer, so it reads token ids and no text",
            hint="give token ids, or model.with_tokenizer(tokenizer)",
        )
    return tokenizer, request, text_prompt(model.spec, tokenizer, prompt)


def _ids(prompt: Any) -> list[int]:
    """Return a prompt's token ids; refuse what is no sequence of whole numbers."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InputError(
            "a prompt is a text, or a sequence of token ids",
            hint="[3, 1, 4]; gf.generate takes a list of several",
        ) from error


def _with_source(prompts: Prompts, source: Any) -> Prompts:
    """Return the prompts with the source ids of an encoder, given as one sequence or as rows."""
    if source is None:
        return prompts
    rows = source.tolist() if hasattr(source, "tolist") else list(source)
    rows = rows if rows and isinstance(rows[0], Sequence) else [rows]
    return Prompts.of(prompts.tokens, sources=rows)


def _one_row(model: TextModel | Model, steps: Iterator[list[NewToken]]) -> Iterator[NewToken]:
    with evaluating(model):
        for (new,) in steps:
            yield new
