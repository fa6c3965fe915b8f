"""The files of an imported model, kept verbatim: config, tokenizer, chat template, layout.

A native checkpoint holds them under `origin/`, so that an export writes the same bytes; nothing in
there is ever run.
"""

import json
from pathlib import Path

from glassformer.adapters.folder.files import ORIGIN, read_sidecar
from glassformer.adapters.folder.sentence_files import module_files
from glassformer.adapters.gguf.header import is_gguf, read_head
from glassformer.adapters.gguf.hf_files import why_no_tokenizer
from glassformer.adapters.tokenizers.files import CONFIG, FILE_LIMIT, PIECES, WORDS
from glassformer.adapters.tokenizers.folder_tokenizer import read_tokenizer
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.own import tokenizer_from_json
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.disk import small_text
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.serialize import from_json
from glassformer.store.checkpoint import MANIFEST, SPEC

#: Small files of a Hugging Face folder that are no weights and no code.
NAMES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "qwen.tiktoken",
    *PIECES,
    WORDS,
    "modules.json",
    "1_Pooling/config.json",  # where a sentence's vector is read
    "source.spm",
    "target.spm",
)
TOKENIZERS = ("tokenizer.json", "vocab.json", "qwen.tiktoken", *PIECES, WORDS)
LAYOUT = "layout.json"


def is_native(folder: Path) -> bool:
    """Return whether this is a checkpoint folder of ours."""
    return (folder / MANIFEST).is_file()


def origin_of(folder: Path) -> Path | None:
    """Return the folder of an imported model's own files: itself, its `origin/`, or None."""
    if not is_native(folder):
        return folder
    return folder / ORIGIN if (folder / ORIGIN / "config.json").is_file() else None


def read_spec(folder: Path) -> ModelSpec:
    """Read spec.json of a checkpoint of ours."""
    try:
        return from_json(ModelSpec, small_text(folder / SPEC))
    except (InputError, FileNotFoundError) as error:
        raise FileError(f"spec.json: {error}", where=str(folder)) from error


def read_origin(folder: Path, layout: dict[str, list[str]] | None = None) -> dict[str, bytes]:
    """Read the small files by name; `layout` records the weight files of a foreign folder."""
    kept = {}
    for name in dict.fromkeys((*NAMES, *module_files(folder), LAYOUT)):
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > FILE_LIMIT:
            raise FileError(f"{name} has {path.stat().st_size:,} bytes", where=str(folder))
        kept[name] = path.read_bytes()
    if layout is not None:
        kept[LAYOUT] = (json.dumps(layout, indent=0) + "\n").encode()
    return kept


def read_layout(kept: dict[str, bytes]) -> dict[str, list[str]] | None:
    """Return the tensor names of each weight file, if the import recorded them."""
    if LAYOUT not in kept:
        return None
    try:
        found = json.loads(kept[LAYOUT])
        return {str(file): [str(name) for name in names] for file, names in found.items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise FileError(f"{ORIGIN}/{LAYOUT} cannot be read: {error}") from error


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint or a Hugging Face folder, or None."""
    if is_native(folder) and (folder / "tokenizer.json").is_file():
        text = (folder / "tokenizer.json").read_bytes()
        try:
            tokenizer = tokenizer_from_json(text.decode())
            ends = read_sidecar(folder, CONFIG)
            if isinstance(tokenizer, BytePairs) and ends:
                return tokenizer.with_config(ends)
            return tokenizer
        except (InputError, UnicodeDecodeError) as error:
            raise FileError(f"tokenizer.json: {error}", where=str(folder)) from error
    place = origin_of(folder)
    if place is None or not _has_tokenizer(place):
        return None
    return read_tokenizer(place)


def _has_tokenizer(folder: Path) -> bool:
    if is_gguf(folder):
        return why_no_tokenizer(read_head(folder)) is None
    return any((folder / name).is_file() for name in TOKENIZERS) or any(folder.glob("*.tiktoken"))
