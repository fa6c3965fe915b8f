"""Files to documents: text, JSON lines, gzip and zstd, Parquet, Arrow and saved datasets.

A document is one line of JSON, one row of a table, or a file of text; a long file of text is cut
at empty lines, so that a part of it can be held out. Nothing but the current piece is in memory.
Reading goes on from the position behind any document, which makes preparing resumable.
"""

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, assert_never

from glassformer.spec.errors import FileError, InputError, MachineError, nearest

Kind = Literal["text", "jsonl", "parquet", "arrow"]
Packed = Literal["", "gzip", "zstd"]
#: A position in a source: bytes and lines of its text, or rows.
Position = tuple[int, ...]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_PACKED: dict[str, Packed] = {".gz": "gzip", ".zst": "zstd"}
#: Bytes read at once; bytes of the longest line of JSON; rows of a table read at once.
BLOCK, LONGEST_LINE, ROWS = 1 << 18, 1 << 26, 64
#: A file of text longer than this becomes several documents of a quarter of it or more; less where
#: the corpus is small, so that there are documents to hold out.
LONGEST_TEXT, SHORTEST_TEXT, SHARE_OF_TEXT = 1 << 18, 1 << 14, 20
#: Bytes at the beginning of a file in which a zero byte means that it is no text.
SNIFFED = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of a corpus: its name there, its path, and how it is read."""

    name: str
    path: Path
    kind: Kind
    packed: Packed
    size: int
    modified: int


class Document(NamedTuple):
    """A text, where reading goes on behind it, and how much of the file that is.

    `ends` is False for a piece of a longer text that goes on in the next document.
    """

    text: str
    position: Position
    consumed: int
    ends: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The files of a corpus, in order, and what was left out, for people."""

    sources: tuple[Source, ...]
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(source.size for source in self.sources)

    @property
    def longest_text(self) -> int:
        """Bytes above which a file of text is cut."""
        return min(LONGEST_TEXT, max(SHORTEST_TEXT, self.size // SHARE_OF_TEXT))


# --- which files ----------------------------------------------------------------------------------


def find_sources(paths: Sequence[str | Path]) -> Found:
    """Return the files of some files, folders and saved datasets, each folder's by name.

    In a folder, hidden files are left out, and so are files that are no text; a file that is named
    itself is read whatever it is.
    """
    sources: list[Source] = []
    notes: list[str] = []
    for given in paths:
        path = Path(given)
        with _named_errors(path):
            if path.is_dir():
                sources += _in_folder(path, notes)
            elif path.exists():
                sources.append(_source(path, path.name))
            else:
                hint = "paths are relative to the current folder"
                raise InputError("there is no such file or folder", where=str(path), hint=hint)
    if not sources:
        where = ", ".join(str(path) for path in paths)
        raise InputError("there is nothing to read", where=where, hint="name a file with text")
    return Found(sources=tuple(sources), notes=tuple(notes))


def _in_folder(folder: Path, notes: list[str]) -> Iterator[Source]:
    if (folder / "dataset_dict.json").is_file():
        splits = _strings(folder / "dataset_dict.json", "splits")
        if "train" not in splits:
            raise InputError(
                f"the dataset has no split 'train', but {', '.join(splits)}",
                where=str(folder),
                hint=f"name the folder of one: {folder / (splits or ['SPLIT'])[0]}",
            )
        notes.append(f"{folder}: of its splits {', '.join(splits)}, 'train' is read")
        folder = folder / "train"
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        for name in _strings(folder / "state.json", "_data_files", key="filename"):
            if Path(name).name != name:
                raise FileError(f"names a file elsewhere: {name[:80]!r}", where=str(folder))
            yield _source(folder / name, name)
        return
    skipped: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        source = _source(path, inside.as_posix())
        if source.kind == "text" and not source.packed and _is_binary(path):
            skipped[path.suffix or path.name] = skipped.get(path.suffix or path.name, 0) + 1
        else:
            yield source
    if skipped:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(skipped.items()))
        notes.append(f"{folder}: left out what is no text: {kinds}")


def _source(path: Path, name: str) -> Source:
    packed = _PACKED.get(path.suffix.lower(), "")
    inner = path.with_suffix("") if packed else path
    kind = _KINDS.get(inner.suffix.lower(), "text")
    if packed and kind in ("parquet", "arrow"):
        raise InputError(
            f"a {kind} file inside {packed} cannot be read in pieces",
            where=str(path),
            hint="unpack it first; the format compresses its columns itself",
        )
    found = path.stat()
    return Source(
        name=name,
        path=path,
        kind=kind,
        packed=packed,
        size=found.st_size,
        modified=found.st_mtime_ns,
    )


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(SNIFFED)


def _strings(path: Path, name: str, *, key: str = "") -> list[str]:
    """Return a list of texts from a small JSON file of a saved dataset."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))[name]
        found = [value[key] if key else value for value in values]
        if not all(isinstance(value, str) for value in found):
            raise TypeError(f"'{name}' holds more than names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(f"not the file of a saved dataset: {error}", where=str(path)) from error
    return found


# --- documents ------------------------------------------------------------------------------------


def read_documents(
    source: Source, *, text_field: str, longest_text: int, start: Position = ()
) -> Iterator[Document]:
    """Yield the documents of one file, from behind an earlier one; blank ones are left out."""
    with _named_errors(source.path):
        match source.kind:
            case "text":
                yield from _text(source, longest_text, start)
            case "jsonl":
                yield from _lines(source, text_field, start)
            case "parquet":
                yield from _parquet(source, text_field, start)
            case "arrow":
                yield from _arrow(source, text_field, start)
            case _ as unreachable:
                assert_never(unreachable)


def _text(source: Source, longest: int, start: Position) -> Iterator[Document]:
    """Cut a file at the first empty line behind a quarter of `longest`, while more than that is
    left; at a line's end, or between two characters, where there is no such line.
    """
    offset = start[0] if start else 0
    with _opened(source) as (read, consumed):
        _skip(read, offset)
        waiting, more = b"", True
        while more or waiting:
            while more and len(waiting) <= longest:
                block = read(BLOCK)
                waiting, more = waiting + block, bool(block)
            end = len(waiting) if len(waiting) <= longest else _cut(waiting, longest)
            piece, waiting = waiting[:end], waiting[end:]
            text = _decoded(piece, source, offset)
            offset += end
            if text.strip():
                yield Document(text, (offset,), consumed(), ends=not (waiting or more))


def _cut(waiting: bytes, longest: int) -> int:
    for mark in (b"\n\n", b"\n"):
        found = waiting.find(mark, longest // 4, longest)
        if found >= 0:
            return found + len(mark)
    end = longest
    while end > longest - 4 and waiting[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


def _lines(source: Source, text_field: str, start: Position) -> Iterator[Document]:
    offset, number = start or (0, 0)
    with _opened(source) as (read, consumed):
        _skip(read, offset)
        waiting, more = b"", True
        while more:
            block = read(BLOCK)
            more = bool(block)
            *whole, waiting = (waiting + block).split(b"\n")
            if len(waiting) > LONGEST_LINE:
                raise InputError(
                    f"line {number + len(whole) + 1} is longer than {LONGEST_LINE:,} bytes",
                    where=str(source.path),
                    hint="JSON lines have one document a line",
                )
            for line in whole if more else [*whole, waiting]:
                number, at, offset = number + 1, offset, offset + len(line) + 1
                if line.strip():
                    text = _line_text(_decoded(line, source, at), text_field, source, number)
                    if text.strip():
                        yield Document(text, (offset, number), consumed())


def _line_text(line: str, text_field: str, source: Source, number: int) -> str:
    where = f"{source.path}, line {number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where=where) from error
    fields = data if isinstance(data, dict) else {}
    text = fields.get(text_field)
    if not isinstance(text, str):
        keys = [key for key, value in fields.items() if isinstance(value, str)]
        raise InputError(
            f"no text under '{text_field}'", where=where, hint=_which_field(text_field, keys)
        )
    return _whole_characters(text, where)


def _which_field(text_field: str, known: Sequence[str]) -> str:
    if not known:
        return 'a line is an object with a text: {"text": "..."}'
    return f"{{--text-field|text_field=}} names it: {nearest(text_field, known)}"


def _whole_characters(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"half of a character: {error.reason}", where=where, hint="leave that document out"
        ) from error
    return text


def _parquet(source: Source, text_field: str, start: Position) -> Iterator[Document]:
    _library("Parquet")
    from pyarrow import parquet

    row, done = start[0] if start else 0, 0
    with parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=BLOCK) as file:
        _check_column(file.schema_arrow, text_field, source)
        total = max(1, file.metadata.num_rows)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if done + rows > row:
                batches = file.iter_batches(ROWS, row_groups=[group], columns=[text_field])
                yield from _rows(batches, source, done, row, total)
            done += rows


def _arrow(source: Source, text_field: str, start: Position) -> Iterator[Document]:
    _library("Arrow")
    import pyarrow
    from pyarrow import ipc

    row = start[0] if start else 0
    with pyarrow.OSFile(str(source.path)) as file:
        try:
            reader: Any = ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            reader = ipc.open_file(file)
            tables = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            tables = iter(reader)
        _check_column(reader.schema, text_field, source)
        done = 0
        for table in tables:
            batches = [table.select([text_field])]
            for each in _rows(batches, source, done, row, None):
                yield each._replace(consumed=min(source.size, file.tell()))
            done += table.num_rows


def _rows(
    batches: Any, source: Source, done: int, start: int, total: int | None
) -> Iterator[Document]:
    """Yield the rows of batches, the first of which is row `done`, from row `start` on."""
    for batch in batches:
        if done + batch.num_rows > start:
            first = max(0, start - done)
            values = batch.column(0).slice(first).to_pylist()
            for number, text in enumerate(values, start=done + first + 1):
                if text is not None and text.strip():
                    consumed = 0 if total is None else source.size * number // total
                    yield Document(text, (number,), consumed)
        done += batch.num_rows


def _check_column(schema: Any, text_field: str, source: Source) -> None:
    from pyarrow import types

    kinds = {field.name: field.type for field in schema}
    values = {
        name: kind.value_type if types.is_dictionary(kind) else kind for name, kind in kinds.items()
    }
    texts = [
        name
        for name, kind in values.items()
        if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    ]
    if text_field in texts:
        return
    what = f"holds {kinds[text_field]}, no text" if text_field in kinds else "is not there"
    hint = f"{{--text-field|text_field=}} names it: {', '.join(texts)}" if texts else ""
    raise InputError(
        f"the column '{text_field}' {what}; the columns are {', '.join(kinds) or 'none'}",
        where=str(source.path),
        hint=hint or "no column of it holds text",
    )


# --- bytes ----------------------------------------------------------------------------------------

Read = Callable[[int], bytes]


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[tuple[Read, Callable[[], int]]]:
    """Yield functions that read unpacked bytes, and tell how many of the file's were consumed."""
    with source.path.open("rb") as raw:
        match source.packed:
            case "":
                yield raw.read, raw.tell
            case "gzip":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield file.read, raw.tell
            case "zstd":
                with _unpacked_zstd(raw) as read:
                    yield read, raw.tell
            case _ as unreachable:
                assert_never(unreachable)


@contextlib.contextmanager
def _unpacked_zstd(raw: IO[bytes]) -> Iterator[Read]:
    _library("zstd")
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd") as file:
        yield file.read


def _skip(read: Read, count: int) -> None:
    """Read past what was prepared before; a packed file has no other way to its middle."""
    while count > 0:
        block = read(min(count, 1 << 20))
        if not block:
            raise FileError("is shorter than it was when it was read first")
        count -= len(block)


def _decoded(piece: bytes, source: Source, offset: int) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte 0x{piece[error.start]:02x} at offset {offset + error.start} is not UTF-8",
            where=str(source.path),
            hint="convert the file to UTF-8, or leave it out",
        ) from error


def _library(what: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MachineError(
            f"reading {what} needs the library pyarrow, which is not installed",
            hint="pip install pyarrow",
        ) from error


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Report what the libraries find wrong with a file as an error that names it."""
    try:
        yield
    except (InputError, MachineError):
        raise
    except FileError as error:
        raise error if error.where else FileError(error.what, where=str(path)) from error
    except EOFError as error:
        raise FileError(
            "the packed file ends early: it was cut off",
            where=str(path),
            hint="copy it again, or leave it out",
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FileError(
            f"the packed file is damaged: {error}",
            where=str(path),
            hint="copy it again, or leave it out",
        ) from error
    except PermissionError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", where=str(error.filename or path)
        ) from error
    except (OSError, ValueError) as error:  # also what pyarrow raises
        system = error.strerror if isinstance(error, OSError) else None
        what = f"cannot be read: {system}" if system else f"is damaged: {str(error)[:200]}"
        raise FileError(what, where=str(path), hint="copy it again, or leave it out") from error
