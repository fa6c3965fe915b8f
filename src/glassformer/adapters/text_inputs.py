"""Inspect a text: its tokens as the model expects them, and the text of each token."""

from collections.abc import Callable, Sequence

import torch

from glassformer.data.tokenizers.vocab import Tokenizer, Translates, Vocab
from glassformer.generation.streaming import generate_batch
from glassformer.generation.text_stream import BROKEN
from glassformer.lens.capture import eval_mode
from glassformer.lens.heads import HeadName
from glassformer.lens.inspection import Inspection, inspect
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts, text_prompt
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError


class Words:
    """The text of each token id; an id without a text is shown as `<id 7>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, i: int) -> str:
        try:
            word = self.tokenizer.decode([i])
        except InputError:
            word = ""  # the model's table is larger than its vocabulary
        return f"<id {i}>" if not word or BROKEN in word else word


def question(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text for a model with an answer head, with a final SEP if the vocabulary has one."""
    ids = tokenizer.encode(text)
    if isinstance(tokenizer, Vocab) and tokenizer.sep is not None and ids[-1:] != [tokenizer.sep]:
        ids = [*ids, tokenizer.sep]
    return ids


def inspect_text(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    *,
    target: str | None,
    ablate: Sequence[str | HeadName],
    stepper: Callable[[], Stepper],
    greedy: DecodeSpec,
) -> Inspection:
    """Inspect one pass over a text. `BaseAdapter.inspect` explains `target`."""
    spec, words = model.spec, Words(tokenizer)
    if spec.encoder is not None:
        return _translated(
            model, words, text, target=target, ablate=ablate, stepper=stepper, greedy=greedy
        )
    if "next" in spec.head_names():
        prompt = list(text_prompt(spec, tokenizer, text).tokens[0])
        if target is None:
            return inspect(model, prompt, names=words, ablate=ablate)
        wanted = _ids(tokenizer, target)
        asked = [*[None] * (len(prompt) - 1), *wanted]
        return inspect(model, [*prompt, *wanted[:-1]], names=words, targets=asked, ablate=ablate)
    ids = question(tokenizer, text)
    if isinstance(tokenizer, Translates):  # an encoder reads the marks around a text too
        ids = tokenizer.encode_source(text)
    if not ids:
        raise InputError("an empty text", hint="give at least one token")
    if target is None:
        return inspect(model, ids, names=words, ablate=ablate)
    if "answer" in spec.head_names() and not spec.predicts_tokens("answer"):
        answer = _number(target, spec.head_size("answer"))
        return inspect(model, ids, names=words, targets=answer, ablate=ablate)
    wanted = _ids(tokenizer, target)
    if "answer" not in spec.head_names() or len(wanted) != 1:
        raise InputError(
            f"a target of {len(wanted)} tokens for a model with the heads "
            f"{', '.join(spec.head_names())}",
            hint="an answer is one token; glassformer.inspect takes targets by position",
        )
    return inspect(model, ids, names=words, targets=wanted[0], ablate=ablate)


def _translated(
    model: Model,
    words: Words,
    text: str,
    *,
    target: str | None,
    ablate: Sequence[str | HeadName],
    stepper: Callable[[], Stepper],
    greedy: DecodeSpec,
) -> Inspection:
    """Inspect an encoder-decoder: the text is the source; the target is given or decoded."""
    tokenizer = words.tokenizer
    prompt: Prompts = text_prompt(model.spec, tokenizer, text)
    assert prompt.sources is not None
    if target is None:
        with eval_mode(model):
            wanted = list(generate_batch(stepper(), prompt, spec=greedy, logprobs=False)[0].tokens)
    else:
        ended = [] if tokenizer.eos is None else [tokenizer.eos]
        wanted = [*(tokenizer.encode(target) if target else []), *ended]
    if not wanted:
        raise InputError("an empty target", hint="give at least one token")
    begin, source = list(prompt.tokens[0]), list(prompt.sources[0])
    inputs = Inputs(torch.tensor([[*begin, *wanted[:-1]]]), source_BS=torch.tensor([source]))
    asked = [*[None] * (len(begin) - 1), *wanted]
    return inspect(
        model,
        inputs,
        names=words,
        source_words=[words(i) for i in source],
        targets=asked,
        ablate=ablate,
    )


def _number(target: str, count: int) -> int:
    """Return the class that a target names: `3`, or `answer 3` as it is shown."""
    word = target.strip().removeprefix("answer ").strip()
    if not (word.isascii() and word.isdigit()) or int(word[:20]) >= count:
        raise InputError(
            f"the target {target[:80]!r} is no answer of this model",
            hint=f"write its number: 0 to {count - 1}",
        )
    return int(word)


def _ids(tokenizer: Tokenizer, target: str) -> list[int]:
    ids = tokenizer.encode(target)
    if not ids:
        raise InputError("an empty target", hint="give at least one token, or leave it out")
    return ids
