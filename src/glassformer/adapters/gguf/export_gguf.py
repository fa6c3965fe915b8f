"""Write a GGUF file: the `gguf` library writes the header, then the tensors follow one by one.

The architecture is the one whose file, read back, gives the same spec. Vectors (norms, biases)
stay float32 in every dtype; only the tensor being written is in memory, and the file appears
complete or not at all. A tokenizer is written if a reader would split text the same way:
byte-level BPE with a pre-tokenizer that GGUF has a name for. Otherwise a note gives the reason, and
the file says that it has no tokenizer.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.adapters.chat.template import read_templates
from glassformer.adapters.folder.export_hf import Exported, Tensors
from glassformer.adapters.folder.files import GenerationDefaults, generation_defaults
from glassformer.adapters.gguf.config import (
    FACTORS,
    architecture_of,
    factors_of,
    write_settings,
)
from glassformer.adapters.gguf.header import ALIGNMENT, SUFFIX
from glassformer.adapters.gguf.hf_files import (
    ENDS,
    NAMED,
    NONE,
    PREFIX,
    TEMPLATE,
    TEMPLATES,
    name_of,
)
from glassformer.adapters.gguf.load import F16, F32, Q4_0, Q4_K, Q5_0, Q8_0, packed
from glassformer.adapters.gguf.tensors import Kind, kind_of, library
from glassformer.adapters.native import NativeAdapter
from glassformer.adapters.tokenizers.folder_tokenizer import FolderTokenizer
from glassformer.adapters.tokenizers.pieces import CONTROL, UNUSED, USER_DEFINED
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.checks import one_of
from glassformer.spec.disk import check_new
from glassformer.spec.errors import InputError
from glassformer.store.checkpoint import publishing_file

PLAIN = 1
#: Options of the library's BPE that the format cannot express.
OFF = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
)


def write_vocabulary(
    tokenizer: Tokenizer | None, *, size: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a tokenizer's metadata for a model of `size` ids, and notes on what is missing."""
    without = {f"{PREFIX}model": NONE[0]}
    if tokenizer is None:
        return without, ()
    if not isinstance(tokenizer, BytePairs | FolderTokenizer):
        return without, (f"a tokenizer of our kind {type(tokenizer).__name__} is not written",)
    data = json.loads(tokenizer.to_json())
    words = name_of(
        data["pre_tokenizer"],
        normalizer=data["normalizer"],
        whole=bool(data["model"].get("ignore_merges")),
    )
    why = _lacks(data, words, tokenizer, size)
    if why:
        return without, (f"the tokenizer is not written: {why}",)
    pieces = {i: token for token, i in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(pieces, PLAIN)
    for token in data["added_tokens"]:
        pieces[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = data["model"]["merges"]
    made: dict[str, Any] = {
        "model": "gpt2",
        "pre": words,
        # Rows of the embedding that have no token get a name, since every one needs one.
        "tokens": [pieces.get(i, f"[PAD{i}]") for i in range(size)],
        "token_type": [kinds.get(i, UNUSED) for i in range(size)],
        "merges": [each if isinstance(each, str) else " ".join(each) for each in merges],
        "add_bos_token": tokenizer.bos is not None,
    }
    notes: tuple[str, ...] = ()
    if isinstance(tokenizer, FolderTokenizer):
        by_text = {token: i for i, token in pieces.items()}
        made |= {NAMED[name]: by_text[text] for name, text in tokenizer.names.items()}
        first, *others = dict.fromkeys((made.get(ENDS[0], -1), *tokenizer.eos_ids))
        if first < 0 and others:
            made[ENDS[0]], *others = others
        if others:
            made[ENDS[1]] = others[0]
        if others[1:]:
            notes = (f"texts also end with {others[1:]}: GGUF has room for two",)
    return {PREFIX + key: value for key, value in made.items() if value != []}, notes


def write_templates(templates: dict[str, str]) -> dict[str, Any]:
    """Return the metadata of chat templates, the default one and those with a name."""
    named = {name: text for name, text in templates.items() if name != "default"}
    made: dict[str, Any] = {f"{TEMPLATE}.{name}": text for name, text in named.items()}
    if named:
        made[TEMPLATES] = sorted(named)
    return made | ({TEMPLATE: templates["default"]} if "default" in templates else {})


def _lacks(data: dict[str, Any], words: str | None, tokenizer: Tokenizer, size: int) -> str:
    """Return what GGUF lacks to say how this tokenizer cuts text; empty if nothing."""
    model, decoder = data["model"], data["decoder"] or {}
    if words is None or decoder.get("type") != "ByteLevel":
        return "it is no byte-level BPE that cuts words in a way that GGUF names"
    if any(model.get(key) for key in OFF):
        return f"it sets one of {', '.join(OFF)}"
    if tokenizer.vocab_size > size:
        return f"it has {tokenizer.vocab_size} ids, and the model {size}"
    if any(token[key] for token in data["added_tokens"] for key in ("single_word", "lstrip")) or (
        any(token["rstrip"] for token in data["added_tokens"])
    ):
        return "its marks take in the spaces beside them"
    return ""


#: Dtypes that can be written: the type of matrices, and the format's number for such a file.
DTYPES = {
    "f32": (F32, 0),
    "f16": (F16, 1),
    "q8_0": (Q8_0, 7),
    "q4_0": (Q4_0, 2),
    "q4_k": (Q4_K, 14),
}
#: What is written where the blocks of a type do not fit into a row, in turn.
SMALLER = {Q4_K: (Q5_0, F16), Q4_0: (F16,), Q8_0: (F16,)}
#: Matrices that stay float32 as vectors do: biases of all experts, learned positions.
PRECISE = (".bias", "position_embd.weight")
PACKING_VERSION = 2  # of the format's quantized kinds


def export_gguf(adapter: NativeAdapter, path: str | Path, *, dtype: str = "f32") -> Exported:
    """Write a GGUF file; an existing one is never overwritten."""
    one_of("dtype", dtype, DTYPES)
    place, spec = Path(path), adapter.spec
    check_new(place)
    if place.suffix.lower() != SUFFIX:
        raise InputError(f"{place} does not end in {SUFFIX}", hint=f"{place}{SUFFIX}")
    library()
    entry, plan = architecture_of(
        spec, first=str((adapter.imported_config or {}).get("model_type", ""))
    )
    tensors = Tensors(adapter, plan)
    wanted, number = DTYPES[dtype]
    kinds = {
        name: _kind(each.shape, F32 if name.endswith(PRECISE) else wanted)
        for name, each in plan.entries.items()
    }
    words, notes = write_vocabulary(adapter.get_tokenizer(), size=spec.vocab_size)
    templates = {} if adapter.origin is None else read_templates(adapter.origin)
    if adapter.origin is not None and _sampling(adapter.origin):
        notes = (*notes, "sampling settings (generation_config.json) are not written")
    metadata = write_settings(spec, entry) | {
        "general.name": place.stem,
        "general.file_type": number,
        "general.quantization_version": PACKING_VERSION,
    }
    shapes = {name: each.shape for name, each in plan.entries.items()}
    factors = factors_of(spec)
    if factors is not None:
        shapes[FACTORS], kinds[FACTORS] = (len(factors),), _kind((1,), F32)
    odd = Counter(
        kinds[name].name
        for name, shape in shapes.items()
        if len(shape) > 1 and kinds[name].number != wanted and not name.endswith(PRECISE)
    )
    for name, count in odd.items():
        block = _kind((1, 0), wanted).block
        what = f"{count} tensors whose rows are no multiple of {block} numbers are {name}"
        notes = (*notes, what)
    size = sum(kinds[name].bytes_of(shape) for name, shape in shapes.items())
    with publishing_file(place, size=size) as beside:
        _write_head(beside, metadata | words | write_templates(templates), shapes, kinds)
        with beside.open("ab") as file:
            file.write(bytes(-file.tell() % ALIGNMENT))
            for name in shapes:
                tensor = torch.tensor(factors) if name == FACTORS else tensors.read(name)
                for chunk in _chunks(tensor, kinds[name], name):
                    file.write(chunk)
                del tensor
            file.flush()
            os.fsync(file.fileno())
    return Exported(place, str(metadata["general.architecture"]), notes)


def _sampling(origin: Path) -> bool:
    """Return whether the model's folder has sampling settings."""
    return replace(generation_defaults(origin), eos=()) != GenerationDefaults()


def _kind(shape: tuple[int, ...], wanted: int) -> Kind:
    """Return the type of a tensor: float32 for vectors, another where blocks do not fit a row."""
    for number in (F32,) if len(shape) == 1 else (wanted, *SMALLER.get(wanted, ())):
        found = kind_of(number)
        assert found is not None
        if found.fits(shape):
            return found
    raise AssertionError(f"no type for rows of {shape[-1]} numbers")


def _chunks(tensor: Tensor, kind: Kind, name: str) -> Iterator[bytes]:
    written = 0
    for array in packed(tensor, kind, name=name):
        written += array.nbytes
        yield array.tobytes()
    yield bytes(-written % ALIGNMENT)


def _write_head(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, Kind],
) -> None:
    gguf = library()
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        match value:
            case _ if key == "general.architecture":
                continue  # the writer's own
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, shape in shapes.items():
        number = gguf.GGMLQuantizationType(kinds[name].number)
        size = kinds[name].bytes_of(shape)
        writer.add_tensor_info(name, shape, np.dtype("float32"), size, raw_dtype=number)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
