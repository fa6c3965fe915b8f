"""Next-token prediction over text: a corpus becomes one long row of ids, read in windows.

A corpus is the files of a folder, or the manuals that every Python includes. A seed shuffles the
documents by name, so that the end of the corpus, held out as `val`, is a mixture. The cut is made
in the text, before any tokenizer is trained, so pieces are learned from the training part alone.
Bits per byte = nats per token / ln 2 / bytes per token: it compares across tokenizers.
"""

import ast
import functools
import hashlib
import platform
import sys
import sysconfig
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints
from glassformer.data.task import Task, checked, pick
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.own import Own, tokenizer_from_json
from glassformer.data.tokenizers.vocab import Bytes, Characters, Tokenizer
from glassformer.spec import presets
from glassformer.spec.disk import folder_beside, make_folder, rename, sync_tree
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnTokenizer
from glassformer.spec.tasks import TextTask
from glassformer.spec.train import CosineSchedule, TrainSpec

#: Not manuals: tests, other people's code, tables, jokes.
SKIPPED = {
    "antigravity", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "msilib",
    "pydoc_data", "test", "this", "turtledemo",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A file's bytes under a name relative to the corpus."""

    name: str
    content: bytes

    def text(self) -> str:
        """Return the content as UTF-8; report an invalid byte with its position."""
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"byte 0x{self.content[error.start]:02x} at offset {error.start} is not UTF-8",
                where=self.name,
                hint="convert the file to UTF-8, or use tokenizer=bytes, which reads anything",
            ) from error


def read_corpus(path: str, *, seed: int) -> list[Document]:
    """Return the documents of a file or folder, or Python's manuals for an empty path."""
    documents = list(_files(Path(path)) if path else _manuals())
    documents = [document for document in documents if document.content.strip()]
    if not documents:
        raise InputError(
            "the corpus is empty", where=path or "Python's manuals", hint="name a file with text"
        )
    return sorted(documents, key=lambda document: _draw(seed, document.name))


def _draw(seed: int, name: str) -> tuple[bytes, str]:
    text = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).digest(), name


def _files(path: Path) -> Iterator[Document]:
    """Yield every file below, by name; skip hidden files and folders."""
    if not path.exists():
        hint = "paths are relative to the current folder"
        raise InputError("there is no such file or folder", where=str(path), hint=hint)
    try:
        if path.is_file():
            yield Document(name=path.name, content=path.read_bytes())
            return
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in inside.parts):
                yield Document(name=inside.as_posix(), content=file.read_bytes())
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", where=str(error.filename or path)
        ) from error


@functools.cache  # a second, and a sweep builds its task for each run
def _manuals() -> tuple[Document, ...]:
    """Return docstrings of the standard library, and the topics of Python's own `help()`."""
    from pydoc_data.topics import topics

    found = [
        Document(name=f"topic {topic}", content=topics[topic].encode()) for topic in sorted(topics)
    ]
    library = Path(sysconfig.get_path("stdlib"))
    for module in sorted(sys.stdlib_module_names - SKIPPED):
        if module.startswith("_"):
            continue
        for file in (library / f"{module}.py", library / module / "__init__.py"):
            if file.is_file():
                written = "\n\n".join(_docstrings(ast.parse(file.read_bytes())))
                found.append(Document(name=f"module {module}", content=written.encode()))
    return tuple(found)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings of the module, its classes and functions, in source order."""
    waiting: list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [tree]
    while waiting:
        node = waiting.pop()
        said = ast.get_docstring(node)
        if said:
            yield said
        waiting += [
            child
            for child in reversed(node.body)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]


# B batch, T length

FORMAT = 1  # version of the files in the cache; another number makes new ones
LONGEST_LINE = 1_000  # characters that pieces are learned from at once


@dataclass(frozen=True, slots=True)
class _Part:
    """One split: its ids, as a memory-mapped file, and how many bytes of text they stand for."""

    ids: NDArray[np.unsignedinteger[Any]]
    text_bytes: int


class RunningText(Task):
    """Windows of `length` tokens, one after another; head `next`. The truth is unknown.

    What is left at a part's end, shorter than a window, is unused.
    """

    is_running_text = True
    name = "text"
    spec: TextTask
    #: The number of pieces that were to be learned; 0 where none are.
    wished_pieces = 0

    @abstractmethod
    def windows(self, split: str, rows: Ints) -> NDArray[np.int64]:
        """Return (B, T + 1): windows and the token after each."""

    def model(self) -> ModelSpec:
        """Return a language model: 0.3 M parameters with 2,000 tokens."""
        return presets.budget_lm(
            vocab_size=self.tokenizer.vocab_size,
            d_model=64,
            d_ff=172,
            n_layers=3,
            n_heads=4,
            max_seq_len=self.spec.length,
        )

    def training(self) -> TrainSpec:
        """Return a short training; the recipe `lm` trains for longer."""
        return TrainSpec(steps=600, batch_size=16, lr=3e-3, schedule=CosineSchedule(warmup=50))

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return equal lengths, which take no memory."""
        return np.broadcast_to(np.int64(self.spec.length), (pick(self.sizes(), split),))

    def longest(self) -> int:
        """Return the length of every window."""
        return self.spec.length

    def groups(self, split: str, rows: Ints) -> dict[str, list[str]]:
        """Return no groups: text is not broken down."""
        checked(rows, size=pick(self.sizes(), split), split=split)
        return {}

    def oracle(self, split: str, rows: Ints) -> None:
        """Return None: the true distribution of text is unknown."""
        checked(rows, size=pick(self.sizes(), split), split=split)

    def describe(self, split: str, row: int) -> str:
        """Return the window's text."""
        return self.tokenizer.decode(self.windows(split, np.array([row]))[0, :-1].tolist())

    def notes(self) -> list[str]:
        """Return what people should know before they train on it."""
        wished, made = self.wished_pieces, self.tokenizer.vocab_size
        if made >= wished:
            return []
        return [
            f"the text is too short for {wished:,} different pieces: the vocabulary has {made:,}"
        ]


class Text(RunningText):
    """Windows of a text that is held in memory.

    `cache` is a folder for the token files, found again by the hash of the text; without one they
    are nameless temporary files.
    """

    def __init__(self, spec: TextTask, *, cache: Path | None = None) -> None:
        self.spec = spec
        self.wished_pieces = spec.vocab_size if spec.tokenizer == "bpe" else 0
        documents = read_corpus(spec.path, seed=spec.seed)
        if spec.tokenizer != "bytes":
            for document in documents:
                document.text()  # reports an invalid byte with file and offset
        whole = _joined(documents)
        cut = _cut(whole, held_out=spec.held_out)
        self._documents = len(documents)
        self._sha256 = hashlib.sha256(whole).hexdigest()
        self._text_bytes = len(whole)
        self.tokenizer, self._parts = self._tokens(
            {"train": whole[:cut], "val": whole[cut:]}, cache
        )
        self.heads: Mapping[str, int] = {"next": self.tokenizer.vocab_size}
        for split, part in self._parts.items():
            if len(part.ids) <= spec.length:
                raise InputError(
                    f"the {split} part of the corpus has {len(part.ids)} tokens, "
                    f"one sequence needs {spec.length + 1}",
                    where=spec.path or "Python's manuals",
                    hint=f"use a text of {-(-(spec.length + 1) * len(whole) // len(part.ids))} "
                    "bytes or more, or a smaller length",
                )

    def sizes(self) -> dict[str, int]:
        """Return the number of windows of each part; a window's last target follows it."""
        return {
            split: (len(part.ids) - 1) // self.spec.length for split, part in self._parts.items()
        }

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return windows, and the same one token later as the target of head `next`."""
        window_BT = self.windows(split, rows)
        tokens_BT = window_BT[:, :-1]
        return Batch(
            tokens=tokens_BT,
            valid=np.ones(tokens_BT.shape, dtype=np.bool_),
            targets={"next": window_BT[:, 1:]},
            weights=np.ones(tokens_BT.shape, dtype=np.float32),
        )

    def facts(self) -> dict[str, Any]:
        """Return the text's origin, size and hash, tokens and bytes per token of each part."""
        own, source = self.spec.tokenizer, "files"
        if not self.spec.path:
            source = f"manuals of {platform.python_implementation()} {platform.python_version()}"
        return {
            "task": self.name,
            "corpus": source,
            "documents": self._documents,
            "bytes": self._text_bytes,
            "sha256": self._sha256,
            "tokenizer": own.source if isinstance(own, OwnTokenizer) else own,
            "vocab_size": self.tokenizer.vocab_size,
            "sizes": self.sizes(),
            "tokens": {split: len(part.ids) for split, part in self._parts.items()},
            "bytes_per_token": {
                split: part.text_bytes / len(part.ids) for split, part in self._parts.items()
            },
        }

    def windows(self, split: str, rows: Ints) -> NDArray[np.int64]:
        """Return (B, T + 1): windows and the token after each."""
        part = pick(self._parts, split)
        rows = checked(rows, size=self.sizes()[split], split=split)
        places = rows[:, None] * self.spec.length + np.arange(self.spec.length + 1)
        window_BT: NDArray[np.int64] = part.ids[places].astype(np.int64)
        return window_BT

    def _tokens(
        self, texts: Mapping[str, bytes], cache: Path | None
    ) -> tuple[Tokenizer, dict[str, _Part]]:
        """Return the tokenizer and the parts, from the cache if they are there."""
        spec = self.spec
        size = spec.vocab_size if spec.tokenizer == "bpe" else 0
        words = f"{FORMAT}/{spec.tokenizer}/{size}/{spec.held_out}/{self._sha256}"
        key = hashlib.sha256(words.encode()).hexdigest()[:24]
        stored = None if cache is None else cache / f"text-{key}"
        if stored is not None and (stored / "tokenizer.json").is_file():
            tokenizer, ids = _found(stored, tuple(texts))
        else:
            tokenizer = _tokenizer(spec, texts)
            made = {split: _encoded(tokenizer, text) for split, text in texts.items()}
            if stored is None:
                ids = {split: _mapped(array) for split, array in made.items()}
            else:
                ids = _stored(stored, tokenizer, made)
        return tokenizer, {split: _Part(ids[split], len(text)) for split, text in texts.items()}


def held_out_text(spec: TextTask) -> str:
    """Return the held-out part of a task of this spec as text, without making any tokens."""
    documents = read_corpus(spec.path, seed=spec.seed)
    for document in documents:
        document.text()
    whole = _joined(documents)
    return whole[_cut(whole, held_out=spec.held_out) :].decode("utf-8")


def _joined(documents: Sequence[Document]) -> bytes:
    """Join all documents with an empty line between them."""
    return b"\n\n".join(document.content.strip(b"\n") for document in documents) + b"\n"


def _cut(whole: bytes, *, held_out: float) -> int:
    """Return the start of the held-out end: the start of a line, if one is near."""
    place = min(int(len(whole) * (1.0 - held_out)), len(whole) - 1)
    line = whole.find(b"\n", place) + 1
    if 0 < line < len(whole) - (len(whole) - place) // 2:
        return line
    while place < len(whole) and whole[place] & 0xC0 == 0x80:  # inside a character
        place += 1
    return place


def _tokenizer(spec: TextTask, texts: Mapping[str, bytes]) -> Tokenizer:
    match spec.tokenizer:
        case "bytes":
            return Bytes()
        case "characters":
            return Characters.of(text.decode("utf-8") for text in texts.values())
        case "bpe":
            return BytePairs.train(
                learning_lines(texts["train"].decode("utf-8")), vocab_size=spec.vocab_size
            )
        case OwnTokenizer() as own:
            return Own.trained(own, [texts["train"].decode("utf-8")])
        case _ as unreachable:
            assert_never(unreachable)


def learning_lines(text: str) -> Iterator[str]:
    """Yield lines to learn pieces from; a long one in parts, at a space if it has one.

    The trainer's time for a word grows with the square of its length: a megabyte without a space
    would never finish.
    """
    for line in text.splitlines(keepends=True):
        start = 0
        while len(line) - start > LONGEST_LINE:
            end = line.rfind(" ", start + 1, start + LONGEST_LINE)
            end = start + LONGEST_LINE if end < 0 else end
            yield line[start:end]
            start = end
        yield line[start:]


def _encoded(tokenizer: Tokenizer, text: bytes) -> NDArray[np.unsignedinteger[Any]]:
    """Return ids in the smallest type that holds them."""
    kind = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    if isinstance(tokenizer, Bytes):
        return np.frombuffer(text, dtype=np.uint8).astype(kind)
    if isinstance(tokenizer, BytePairs):
        pieces = tokenizer.encode_many(_paragraphs(text.decode("utf-8")))
        return np.concatenate([np.array(piece, dtype=kind) for piece in pieces])
    return np.array(tokenizer.encode(text.decode("utf-8")), dtype=kind)


def _paragraphs(text: str) -> list[str]:
    """Return pieces of a few thousand characters, for all cores; a piece ends with a line."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start + 10_000) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces


def _mapped(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same numbers in a nameless file, which is deleted after its last use."""
    with tempfile.TemporaryFile() as file:
        array.tofile(file)
        file.flush()
        mapped: NDArray[Any] = np.memmap(file, dtype=array.dtype, mode="r", shape=array.shape)
    return mapped


def _found(folder: Path, splits: Sequence[str]) -> tuple[Tokenizer, dict[str, NDArray[Any]]]:
    """Return what the cache holds, which is intact unless someone damaged it."""
    try:
        tokenizer = tokenizer_from_json((folder / "tokenizer.json").read_text("utf-8"))
        ids = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in splits}
        if any(part.ndim != 1 or part.dtype.kind != "u" for part in ids.values()):
            raise ValueError("a file of it holds no token ids")
    except (OSError, ValueError, EOFError) as error:
        raise FileError(
            f"the cache of tokens is damaged: {error}",
            where=folder.name,
            hint="delete this folder of the cache; it is made anew",
        ) from error
    return tokenizer, ids


def _stored(
    folder: Path, tokenizer: Tokenizer, arrays: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Write a folder beside and rename it, so that a folder that exists is complete."""
    try:
        make_folder(folder.parent, below=folder.parent)
        with folder_beside(folder) as beside:
            for split, array in arrays.items():
                np.save(beside / f"{split}.npy", array, allow_pickle=False)
            (beside / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
            if not folder.exists():  # else another process was faster; its folder is the same
                sync_tree(beside)
                rename(beside, folder)
    except OSError as error:
        if not (folder / "tokenizer.json").is_file():  # no other process wrote it
            raise MachineError(
                f"could not write the tokens: {error.strerror or error}",
                where=str(folder.parent),
                hint="make room there, or choose another folder",
            ) from error
    return {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in arrays}
