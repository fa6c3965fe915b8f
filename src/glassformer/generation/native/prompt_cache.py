"""`PromptCache`: states of prompts that the native step has read, in a folder for later processes.

An entry is a state file (`store.states`) of one row: the full pages of a prompt, and its token ids.
Its name begins with the digest of all that these numbers depend on; other entries are not opened. A
position's keys and values have the same bits however its prompt was read, so an entry changes no
bit of an answer.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from glassformer.generation.native.arrays import NativePast
from glassformer.generation.native.lowering import PAGE
from glassformer.models.prompts import shared_length
from glassformer.spec.errors import InputError
from glassformer.store.states import read_state, read_tokens, unusable, write_state

SUFFIX = ".safetensors"
#: Entries of one model that are kept, the last used ones.
MOST = 32
#: Pages that must be new before a prompt is worth an entry.
LEAST = 1


class PromptCache:
    """A folder of prompts that one model has read; it is made when the first is kept."""

    def __init__(self, folder: Path, *, model: str, positions: int) -> None:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is not a folder", hint="prompts are kept in a folder")
        self.folder, self.model, self.positions = folder, model, positions

    def find(self, prompt: Sequence[int], *, past: NativePast) -> int:
        """Let the only row of an empty state begin as the prompt does; return how much it has.

        The last token of the prompt is never read here: reading it gives the next one's logits.
        """
        best, path = self.longest(prompt)
        if path is None:
            return 0
        arrays, count = read_state(path, model=self.model), len(self._tokens(path))
        width = 4 * past.own.pages.page
        pages = arrays.get("own.pages")
        if pages is None or pages.shape != (count // PAGE, width):
            raise unusable(path, f"it does not have {count // PAGE} pages of {width} bytes")
        past.fill(arrays)
        with contextlib.suppress(OSError):
            os.utime(path)  # the last used are kept longest
        (found,) = past.rewind([best])
        return found

    def longest(self, prompt: Sequence[int]) -> tuple[int, Path | None]:
        """Return the length of the longest beginning that is here, and the entry that has it."""
        best, path = 0, None
        for entry in self._entries():
            shared = shared_length(self._tokens(entry), prompt[:-1])
            if shared > best:
                best, path = shared, entry
        return best, path

    def keep(self, prompt: Sequence[int], *, past: NativePast, row: int, length: int) -> None:
        """Write the full pages of a prompt that a row has read; `length` of it are here already.

        Shorter entries that it contains are removed.
        """
        full = len(prompt) // PAGE * PAGE
        if full < length // PAGE * PAGE + LEAST * PAGE:
            return
        prompt, state = prompt[:full], past.fork([row])
        state.rewind([full])
        ids = " ".join(map(str, prompt))
        path = self.folder / f"{self.model}-{hashlib.sha256(ids.encode()).hexdigest()[:32]}{SUFFIX}"
        before = self._entries()
        write_state(path, state.arrays(), model=self.model, tokens=prompt)
        contained = [
            entry
            for entry in before
            if (held := self._tokens(entry)) == list(prompt[: len(held)]) and entry != path
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
        tokens = read_tokens(path, model=self.model)
        if not 0 < len(tokens) <= self.positions or len(tokens) % PAGE:
            raise unusable(path, f"it has {len(tokens)} tokens")
        return tokens
