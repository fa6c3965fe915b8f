"""`begin_chat`: a conversation with a model, by its folder's template and sampling settings.

Imports no torch: the caller's stepper may, or may not.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from glassformer.adapters.chat.template import Conversation, read_chat
from glassformer.adapters.folder.files import generation_defaults
from glassformer.adapters.tokenizers.folder_tokenizer import end_ids, nameless_ids
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.request import read_request
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import LONGEST_ANSWER, DecodeSpec, StepSpec, chat_options
from glassformer.spec.errors import InputError, nearest


def begin_chat(
    origin: Path,
    tokenizer: Tokenizer,
    make_stepper: Callable[[StepSpec], Stepper],
    *,
    vocab_size: int,
    system: str | None,
    template_options: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Conversation:
    """Begin a conversation with the model of a folder; `options` of decoding override its own."""
    known = [each.name for each in chat_options()]
    for name in options:
        if name not in known:
            raise InputError(f"a chat has no option '{name}'", hint=nearest(name, known))
    template = read_chat(origin)
    own = tokenizer.eos  # any end of the model or of its tokenizer stops an answer
    ends = dict.fromkeys((*end_ids(tokenizer), *([] if own is None else [own])))
    settings = generation_defaults(origin).options()
    request = read_request(
        {"max_new_tokens": LONGEST_ANSWER, **settings, **options},
        tokenizer=tokenizer,
        eos=tuple(ends),
        forbidden=tuple(i for i in nameless_ids(tokenizer) if i < vocab_size),
    )
    assert isinstance(request.decoding, DecodeSpec)
    return Conversation(
        make_stepper(request.step),
        tokenizer,
        template,
        spec=request.decoding,
        system=system,
        options=template_options,
    )
