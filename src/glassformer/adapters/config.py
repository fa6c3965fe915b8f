"""`Config`: a foreign config.json, read key by key.

Every key must be read, be known to change nothing, or have the value that does nothing: what is
left over could change the computation and is refused by name. Values of the wrong type are refused
too, with the path of the file.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from glassformer.adapters.folder.files import read_object
from glassformer.spec.block import Block, Stack
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.options import options_of

FILE = "config.json"
#: The page that tells how a family, a key or a tensor is added.
PAGE = "docs/adding-an-architecture.md"
#: What still works on a model that no adapter reads.
ESCAPE = (
    "generate, chat, serve, evaluate, embed and verify work on it with "
    '{--backend transformers|gf.load(folder, backend="transformers")}, which that library computes'
)
LIMIT = 10_000_000
MOST_LAYERS = 1_000
MOST_POSITIONS = 2**22  # each has a row in a table of positions

#: Keys that cannot change what a model computes from tokens: names, ids, generation defaults, and
#: what released folders still hold though no release of transformers reads it.
HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "_num_labels",
        "architectures",
        "bos_token_id",
        "cache_implementation",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_llama_config",
        "label2id",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        *(each.hf for each in options_of(DecodeSpec) if each.hf is not None),
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "suppress_tokens",
        "model_type",
        "name_or_path",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",  # how a product was cut into pieces for training
        "problem_type",
        "quantization_config",  # how weights are stored: their reader refuses what it cannot read
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "chunk_size_feed_forward",
        "use_bfloat16",
    ]
)
#: Keys that do nothing at these values, whichever family.
IDLE: dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}
#: The default of a key that must be there.
REQUIRED = object()


class Config:
    """The values of one config.json; each method reads a key and remembers that it was read."""

    def __init__(self, data: Mapping[str, Any], *, where: str = FILE, file: str = FILE) -> None:
        self.data = dict(data)
        self.where = where
        self.file = file
        self._read: set[str] = set()

    @classmethod
    def of_folder(cls, folder: Path) -> "Config":
        """Read config.json of a folder."""
        path = folder / FILE
        if not path.is_file():
            raise FileError(
                "there is no config.json, so this is no Hugging Face model", where=str(folder)
            )
        return cls(read_object(path, limit=LIMIT), where=str(path))

    @classmethod
    def of_module(cls, module: Any) -> "Config":
        """Read the config of a live transformers module."""
        if not hasattr(getattr(module, "config", None), "to_dict"):
            raise InputError(
                f"{type(module).__name__} has no config to read",
                hint="give a module of transformers, or one of glassformer's models",
            )
        data = module.config.to_dict()
        if data.get("quantization_config"):
            raise InputError(
                f"{type(module).__name__} holds quantized weights",
                hint="load it from its folder, or without quantization",
            )
        return cls(data, where=type(module).__name__)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Config":
        """Return a config with these values for keys that are missing; null is not missing."""
        full = Config({**defaults, **self.data}, where=self.where, file=self.file)
        full._read = self._read
        return full

    def whole(self, *keys: str, default: Any = REQUIRED, most: int = 2**31) -> int:
        """Return a whole number above 0, with a limit so that no huge model is tried."""
        value = self.any(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.bad(keys[0], value, f"a whole number from 1 to {most:,}")
        return value

    def number(self, *keys: str, default: Any = REQUIRED) -> float:
        """Return a finite number."""
        value = self.any(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(keys[0], value, "a number")
        if not math.isfinite(value):
            raise self.bad(keys[0], value, "a finite number")
        return float(value)

    def flag(self, *keys: str, default: Any = REQUIRED) -> bool:
        """Return true or false."""
        value = self.any(*keys, default=default)
        if not isinstance(value, bool):
            raise self.bad(keys[0], value, "true or false")
        return value

    def one_of(self, key: str, choices: Mapping[str, str], *, default: Any = REQUIRED) -> str:
        """Return the meaning of the word at a key."""
        value = self.any(key, default=default)
        if not isinstance(value, str) or value not in choices:
            raise self.bad(key, value, f"one of {', '.join(sorted(choices))}")
        return choices[value]

    def any(self, *keys: str, default: Any = REQUIRED) -> Any:
        """Return the value of the first of these keys that is present; null counts as absent."""
        self._read.update(keys)
        for key in keys:
            if self.data.get(key) is not None:
                return self.data[key]
        if default is REQUIRED:
            raise FileError(f"{self.file} has no '{keys[0]}'", where=self.where)
        return default

    def has(self, key: str) -> bool:
        """Return whether the key is present, even if null."""
        return key in self.data

    def bad(self, key: str, value: Any, wanted: str) -> FileError:
        """Return the error for an invalid value."""
        shown = json.dumps(value, default=str)[:60]
        return FileError(
            f"{self.file}: '{key}' is {shown}, not {wanted}",
            where=self.where,
            hint=f"if the model is meant so: {self._escape()}{PAGE} tells how more is read",
        )

    def _escape(self) -> str:
        """Return what still works; only transformers' own files are opened by it."""
        return f"{ESCAPE}; " if self.file == FILE else ""

    def finish(
        self, *, harmless: Iterable[str] = (), idle: Mapping[str, Any] | None = None
    ) -> None:
        """Refuse every key that was not read and could matter."""
        known = HARMLESS | set(harmless) | self._read
        still = IDLE | dict(idle or {})
        left = {key: value for key, value in self.data.items() if key not in known}
        if left.get("auto_map"):
            raise FileError(
                "config.json asks for code of its own ('auto_map'), and none is ever run",
                where=self.where,
                hint="if the model is a plain one of its model_type, remove that key",
            )
        odd = {
            key: value
            for key, value in left.items()
            if not (value == still[key] if key in still else _is_nothing(value))
        }
        if odd:
            shown = ", ".join(f"{key}={json.dumps(odd[key], default=str)[:40]}" for key in odd)
            raise FileError(
                f"{self.file} sets what is not handled here: {shown[:300]}",
                where=self.where,
                hint="these could change the computation; one that does not can be removed; "
                f"{self._escape()}{PAGE} tells how a key is added",
            )


def _is_nothing(value: Any) -> bool:
    """Return whether an unknown key is there without a value; false is one."""
    return value is None or (not isinstance(value, bool) and value in ({}, [], ""))


def block_of(stack: Stack) -> Block:
    """Return the block that a format's header describes, where it has one number for all layers.

    Layers may differ in what formats say of each: how far they see, whether they rotate, their
    feed-forward, where their norms are. A family's reader, asked again, finds what it did not.
    """
    return stack.block(but=("mixer.window", "mixer.position", "ffn", "placement"))
