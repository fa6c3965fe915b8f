"""The header of a GGUF file: settings and the list of tensors, read within limits, nothing mapped.

It is not read by the `gguf` library, which trusts every count and length that it finds: a file of
forty bytes can keep it busy for hours. Types and unpacking of the tensors are in `dtypes`.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from glassformer.spec.errors import FileError
from glassformer.spec.position import single

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32

MOST_KEYS = 10_000
MOST_TENSORS = 100_000
MOST_ITEMS = 2_000_000  # of one array
#: Of all arrays and of all texts together. The largest vocabularies have 262,144 tokens: with their
#: scores, types and merges 1.3 million items, and 15 MB of text.
ALL_ITEMS = 3_000_000
ALL_TEXT = 64_000_000
MOST_NUMBERS = 2**40  # of one tensor
MOST_DIMS = 4
LONGEST_NAME = 256
LONGEST_TEXT = 4_000_000
HEAD_LIMIT = 256_000_000

#: The format's numbers for kinds of values, as struct spells them.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
FLOAT, TEXT, ARRAY = 6, 8, 9
LENGTH = struct.Struct("<Q")  # of a text


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: the number of its type, its shape in torch's order, its offset in the data."""

    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The header; `data` is the offset of the tensor data, `size` that of the file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    alignment: int
    data: int
    size: int
    where: str


def is_gguf(path: Path) -> bool:
    """Return whether this is a file that begins like GGUF."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def read_head(path: Path) -> Head:
    """Read the header of a file; the last one is cached while the file is unchanged."""
    try:
        status = path.stat()
        return _read_head(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise FileError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


@lru_cache(maxsize=1)
def _read_head(path: Path, size: int, _changed: int) -> Head:
    where = str(path)
    if size < 24:
        raise FileError("a GGUF file of fewer than 24 bytes", where=where)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(data, min(size, HEAD_LIMIT), where).head(size)


class _Cursor:
    """A position in the header that only moves forward, and never beyond its end."""

    def __init__(self, data: mmap.mmap, end: int, where: str) -> None:
        self.data = data
        self.end = end
        self.where = where
        self.at = 0
        self.items = 0  # of the arrays so far
        self.letters = 0  # bytes of the texts so far

    def head(self, size: int) -> Head:
        if self.data[:4] != MAGIC:
            raise self.bad("this is no GGUF file: it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            hint = "it was written for the other byte order" if swapped else "versions 2 and 3 are"
            raise self.bad(f"version {version} of GGUF is not read here", hint=hint)
        n_tensors, n_keys = self.number("Q"), self.number("Q")
        self.bounded("tensors", n_tensors, MOST_TENSORS, each=8)
        self.bounded("keys", n_keys, MOST_KEYS, each=8)
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.text(LONGEST_NAME)
            if key in metadata:
                raise self.bad(f"the key {key[:80]!r} is there twice")
            metadata[key] = self.value(self.number("I"))
        tensors: dict[str, Stored] = {}
        for _ in range(n_tensors):
            name = self.text(LONGEST_NAME)
            if name in tensors:
                raise self.bad(f"the tensor {name[:80]!r} is there twice")
            tensors[name] = self.stored(name)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self.bad(f"general.alignment is {str(alignment)[:40]}, not a power of two")
        data = -(-self.at // alignment) * alignment
        return Head(metadata, tensors, alignment, data, size, self.where)

    def stored(self, name: str) -> Stored:
        dims = self.number("I")
        if not 1 <= dims <= MOST_DIMS:
            raise self.bad(f"tensor {name[:80]} has {dims} dimensions")
        # The format counts from the innermost dimension.
        shape = tuple(reversed([self.number("Q") for _ in range(dims)]))
        if not all(shape) or math.prod(shape) > MOST_NUMBERS:
            raise self.bad(f"tensor {name[:80]} has the shape {shape}")
        return Stored(self.number("I"), shape, self.number("Q"))

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text(LONGEST_TEXT)
        if kind == ARRAY:
            return self.array()
        found = self.number(self.code(kind))
        return shortest(found) if kind == FLOAT else found

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == ARRAY:
            raise self.bad("lists within lists are not read here")
        if kind == TEXT:
            self.listed("texts in a list", count, each=8)
            return self.texts(count)
        form = f"<{count}{self.code(kind)}"
        self.listed("numbers in a list", count, each=struct.calcsize(form[-1]))
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return list(found)

    def code(self, kind: int) -> str:
        if kind not in NUMBERS:
            raise self.bad(f"a value of the unknown kind {kind}")
        return NUMBERS[kind]

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        self.need(size)
        (found,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += size
        return found

    def text(self, most: int) -> str:
        length = self.number("Q")
        if length > most:
            raise self.bad(f"a text of {length:,} bytes, more than the {most:,} that are read")
        self.need(length)
        self.spelled(length)
        found = self.data[self.at : self.at + length]
        self.at += length
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(f"a text that is not UTF-8: {found[:40]!r}") from error

    def texts(self, count: int) -> list[str]:
        """Read texts that follow each other; vocabularies have a hundred thousand of them."""
        found, begin, end, length = [], self.at, self.end, LENGTH.unpack_from
        for _ in range(count):
            if begin + 8 > end:
                break
            (size,) = length(self.data, begin)
            if size > LONGEST_TEXT or begin + 8 + size > end:
                break
            found.append(self.data[begin + 8 : begin + 8 + size])
            begin += 8 + size
            if begin - self.at > ALL_TEXT + 8 * count:
                break
        if len(found) == count:
            self.spelled(begin - self.at - 8 * count)
        try:
            made = [each.decode("utf-8") for each in found]
        except UnicodeDecodeError:
            made = []
        if len(made) < count:  # one by one, for the error that names the place
            return [self.text(LONGEST_TEXT) for _ in range(count)]
        self.at = begin
        return made

    def spelled(self, size: int) -> None:
        """Count the bytes of a text: of all texts together only so many are read."""
        self.letters += size
        if self.letters > ALL_TEXT:
            raise self.bad(f"texts of more than {ALL_TEXT:,} bytes together")

    def bounded(self, what: str, count: int, most: int, *, each: int) -> None:
        """Refuse a count above a limit, or above what the file has room for."""
        if count > most:
            raise self.bad(f"{count:,} {what}, more than the {most:,} that are read")
        self.need(count * each)

    def listed(self, what: str, count: int, *, each: int) -> None:
        """Bound a list, and all lists together."""
        self.bounded(what, count, MOST_ITEMS, each=each)
        self.items += count
        if self.items > ALL_ITEMS:
            raise self.bad(f"lists of more than {ALL_ITEMS:,} values together")

    def need(self, size: int) -> None:
        if self.at + size > self.end:
            raise self.bad("the file is truncated: its header extends beyond its end")

    def bad(self, what: str, *, hint: str = "") -> FileError:
        return FileError(what, where=f"{self.where}, byte {self.at}", hint=hint)


def shortest(number: float) -> float:
    """Return the shortest decimal of a float32: 1e-06, which is stored as 9.99999997e-07.

    Written in single precision again, it gives the same bits.
    """
    if not math.isfinite(number):
        return number
    for digits in range(1, 10):
        found = float(f"{number:.{digits}g}")
        if single(found) == number:
            return found
    return number
