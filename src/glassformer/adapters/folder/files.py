"""The small files of a model folder: found by fixed names, read within limits, never trusted.

Only regular files are opened, and their size is checked first. A native checkpoint keeps the files
of the model that it was imported from in `origin/`, which is searched second. The sampling settings
of `generation_config.json` are those that the fields of `DecodeSpec` declare (`hf`); end ids are
there or in `config.json`, and callers fall back on the tokenizer's own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glassformer.adapters.gguf.header import is_gguf
from glassformer.adapters.gguf.hf_files import small_file
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.options import Option, options_of
from glassformer.spec.serialize import unique_keys

ORIGIN = "origin"
SIDECAR_LIMIT = 10_000_000


def find_sidecar(folder: Path, name: str) -> Path | None:
    """Return the regular file of that name in the folder, or in its `origin/`."""
    for place in (folder / name, folder / ORIGIN / name):
        if place.is_file():
            return place
    return None


def read_sidecar(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object by its file name; empty if there is no such file."""
    if is_gguf(folder):
        return small_file(folder, name)
    path = find_sidecar(folder, name)
    return {} if path is None else read_object(path, limit=SIDECAR_LIMIT)


def read_object(path: Path, *, limit: int) -> dict[str, Any]:
    """Read a file that holds one JSON object, with no key twice."""
    text = read_text(path, limit=limit)
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
        if "\\ud" in text.lower():  # half of a character can be spelled, and is no text
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path.name} is not JSON: {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise FileError(f"{path.name} holds no JSON object", where=str(path))
    return found


def read_text(path: Path, *, limit: int) -> str:
    """Read a text file of at most `limit` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise FileError(
                f"{path.name} has {size:,} bytes, more than the {limit:,} that are read",
                where=str(path),
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path.name} is not UTF-8 text", where=str(path)) from error
    except OSError as error:
        raise FileError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


def need_folder(folder: Path) -> None:
    """Refuse a path that is neither a folder nor a GGUF file."""
    if not folder.is_dir() and not is_gguf(folder):
        raise InputError(f"there is no folder {folder}", hint="give a folder with a model's files")


NAME = "generation_config.json"
MOST_ENDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """The folder's suggestions: `settings` by the names of `DecodeSpec`'s fields.

    `do_sample` False means greedy; None if the file does not say.
    """

    eos: tuple[int, ...] = ()
    do_sample: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return the settings as decoding options; without any of them, greedy."""
        given = self.settings.get("temperature")
        drawn = self.do_sample or (self.do_sample is None and given is not None)
        temperature = 1.0 if given is None else given
        return {**self.settings, "temperature": temperature if drawn else 0.0}

    def decode_spec(
        self, *, max_new_tokens: int = 100, forbidden: tuple[int, ...] = (), seed: int = 0
    ) -> DecodeSpec:
        """Return these settings as a `DecodeSpec`."""
        return DecodeSpec(
            max_new_tokens=max_new_tokens,
            eos=self.eos,
            forbidden=forbidden,
            seed=seed,
            **self.options(),
        )


def generation_defaults(folder: Path) -> GenerationDefaults:
    """Read and check a model folder's settings; without the file there are none."""
    found = read_sidecar(folder, NAME)
    where = str(folder / NAME)
    sampled = found.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise FileError(f"do_sample is {str(sampled)[:40]!r}, not true or false", where=where)
    settings = {}
    for each in options_of(DecodeSpec):
        value = None if each.hf is None else _value(each, found.get(each.hf), where=where)
        if value is not None:
            settings[each.name] = value
    made = GenerationDefaults(eos=read_eos(folder), do_sample=sampled, settings=settings)
    try:
        made.decode_spec()
    except InputError as error:
        raise FileError(error.what, where=where, hint=error.hint) from error
    return made


def read_eos(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence, from the first file that names any."""
    for name in (NAME, "config.json"):
        given = read_sidecar(folder, name).get("eos_token_id")
        if given is None or given == []:
            continue
        ids = given if isinstance(given, list) else [given]
        if len(ids) > MOST_ENDS or not all(type(i) is int and i >= 0 for i in ids):
            raise FileError(
                f"eos_token_id is {str(given)[:60]}, not a token id or a short list of them",
                where=str(folder / name),
            )
        return tuple(dict.fromkeys(ids))
    return ()


def _value(each: Option, value: Any, *, where: str) -> Any:
    """The value of a setting; None where it is missing or, as a 0 for a count, switched off."""
    if value is None or (each.optional and value == 0):
        return None
    if each.type is int and type(value) is int:
        return value
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    if each.type is not float or isinstance(value, bool) or not finite:
        raise FileError(f"{each.hf} is {str(value)[:40]!r}, not a number", where=where)
    return float(value)
