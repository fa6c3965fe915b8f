"""`PromptCache`: what the native step computed from prompts, kept in a folder for later processes.

An entry is a safetensors file: the full pages of keys and values of one prompt, and their token
ids. Its name begins with a digest of all that these numbers depend on: spec, weights and their
types, the form of keys and values (pages with some of 8 bits are written as bytes), the C code
and the instructions in use; other entries are not opened. A position's
keys and values have the same bits however its prompt was read, so an entry changes no bit of an
answer.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.generation.native.lowering import PAGE
from glassformer.kernels import c_library
from glassformer.kernels.build import digest
from glassformer.models.model import Model
from glassformer.models.prompts import shared_length
from glassformer.spec.decoding import KVCache
from glassformer.spec.disk import make_folder, replace_file
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.serialize import to_json
from glassformer.store.tensors import read_metadata, read_tensors, tensor_bytes

FORMAT = "glassformer-prompt-1"
SUFFIX = ".safetensors"
#: Entries of one model that are kept, the last used ones.
MOST = 32
#: Pages that must be new before a prompt is worth an entry.
LEAST = 1

Pages = NDArray[np.float32]


def model_digest(model: Model, *, kv_cache: KVCache = "float") -> str:
    """Return a digest of everything that the keys and values of a prompt depend on."""
    made = hashlib.sha256(f"{FORMAT} {kv_cache} {digest()} {c_library.variant()}".encode())
    made.update(to_json(model.spec).encode())
    for name, part in model.named_modules():
        made.update(f"{name} {type(part).__qualname__}\n".encode())
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        made.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()[:32]


class PromptCache:
    """A folder of prompts that one model has read; it is made when the first is kept."""

    def __init__(
        self, folder: Path, model: Model, *, page: int, kv_cache: KVCache = "float"
    ) -> None:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is not a folder", hint="prompts are kept in a folder")
        self.folder = folder
        self.model = model_digest(model, kv_cache=kv_cache)
        self.page, self.positions = page, model.spec.max_seq_len
        #: What the numbers of a file are: codes of 8 bits and their scales are bytes together.
        self.kind = np.dtype(np.float32 if kv_cache == "float" else np.uint8)

    def find(self, prompt: Sequence[int]) -> tuple[int, Pages] | None:
        """Return the longest beginning of a prompt that is here: its length and its pages.

        The last token of the prompt is never among them: reading it gives the next one's logits.
        """
        best, path = self.longest(prompt)
        if path is None:
            return None
        pages = self._pages(path)
        with contextlib.suppress(OSError):
            os.utime(path)  # the last used are kept longest
        return best, pages[: -(-best // PAGE)]

    def longest(self, prompt: Sequence[int]) -> tuple[int, Path | None]:
        """Return the length of that beginning, and the entry that has it."""
        best, path = 0, None
        for entry in self._entries():
            shared = shared_length(self._tokens(entry), prompt[:-1])
            if shared > best:
                best, path = shared, entry
        return best, path

    def keep(self, prompt: Sequence[int], pages: Pages) -> None:
        """Write an entry, complete or not at all; shorter ones that it contains are removed."""
        assert len(prompt) == len(pages) * PAGE
        ids = " ".join(map(str, prompt))
        name = f"{self.model}-{hashlib.sha256(ids.encode()).hexdigest()[:32]}{SUFFIX}"
        about = {"format": FORMAT, "model": self.model, "tokens": ids, "sha256": _digest(pages)}
        before = self._entries()
        try:
            make_folder(self.folder)
            data = tensor_bytes({"pages": pages.view(self.kind)}, metadata=about)
            replace_file(self.folder / name, data)
        except OSError as error:
            raise MachineError(
                f"the prompt cannot be kept: {error.strerror}", where=str(self.folder / name)
            ) from error
        contained = [
            entry
            for entry in before
            if (held := self._tokens(entry)) == list(prompt[: len(held)]) and entry.name != name
        ]
        others = [entry for entry in before if entry not in contained]
        for entry in contained + others[: max(0, len(others) + 1 - MOST)]:
            entry.unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        """Return the entries of this model, the last used one last."""
        found = []
        for path in self.folder.glob(f"{self.model}-*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                if path.is_file() and not path.is_symlink():
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _tokens(self, path: Path) -> list[int]:
        about = self._about(path)
        try:
            tokens = [int(each) for each in about.get("tokens", "").split()]
        except ValueError as error:
            raise self._bad(path, "its token ids are not numbers") from error
        if not 0 < len(tokens) <= self.positions or len(tokens) % PAGE:
            raise self._bad(path, f"it has {len(tokens)} tokens")
        return tokens

    def _about(self, path: Path) -> dict[str, str]:
        about = read_metadata(path)
        if about.get("format") != FORMAT or about.get("model") != self.model:
            raise self._bad(path, "it is of another model or format than its name says")
        return about

    def _pages(self, path: Path) -> Pages:
        found: dict[str, NDArray[Any]] = read_tensors(path)
        pages, count = found.get("pages"), len(self._tokens(path))
        width = self.page * 4 // self.kind.itemsize
        if pages is None or pages.dtype != self.kind or pages.shape != (count // PAGE, width):
            raise self._bad(path, f"it does not have {count // PAGE} pages of {width} numbers")
        pages = pages.view(np.float32)
        if _digest(pages) != self._about(path).get("sha256"):
            raise self._bad(path, "its bytes have changed since it was written")
        return pages

    def _bad(self, path: Path, what: str) -> FileError:
        return FileError(
            f"a kept prompt cannot be used: {what}", where=str(path), hint="remove the file"
        )


def _digest(pages: Pages) -> str:
    return hashlib.sha256(np.ascontiguousarray(pages).tobytes()).hexdigest()
