"""Reading `tokenizer.json` of any of the tokenizers."""

import json
from typing import Any

from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.own import own_from_json
from glassformer.data.tokenizers.vocab import Bytes, Characters, Tokenizer, Vocab
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.serialize import unique_keys

KINDS = ("vocab", "characters", "bytes", "own")


def tokenizer_from_json(text: str) -> Tokenizer:
    """Return the tokenizer that `to_json` wrote."""
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the tokenizer is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"the tokenizer is a {type(data).__name__}, not an object")
    match data.get("kind"):
        case "vocab":
            names = _only(data, "tokens", list)
            if not all(isinstance(name, str) for name in names):
                raise InputError("tokens holds more than names")
            return Vocab(tuple(names))
        case "characters":
            return Characters(_only(data, "alphabet", str))
        case "bytes":
            return Bytes()
        case "own":
            return own_from_json(data)
        case None if "model" in data:
            return BytePairs.from_json(text)
        case kind:
            raise InputError(
                f"a tokenizer of kind {kind!r} is not known", hint=nearest(str(kind), KINDS)
            )


def _only(data: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(data.get(key), kind):
        raise InputError(f"the tokenizer's '{key}' is missing, or not a {kind.__name__}")
    return data[key]
