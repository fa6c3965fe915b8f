"""Text to train on: the files of a folder, or the manuals that every Python carries with it.

A corpus is documents with names. Their order is drawn by a seed from their names, so that the end
of the corpus, which is held out, is a mixture of them.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glassformer.spec.errors import InputError

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
        """The content as UTF-8; a byte that is no text is reported with its place."""
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"byte 0x{self.content[error.start]:02x} at offset {error.start} is not UTF-8",
                where=self.name,
                hint="convert the file to UTF-8, or use tokenizer=bytes, which reads anything",
            ) from error


def read_corpus(path: str, *, seed: int) -> list[Document]:
    """Documents of a file or folder, or Python's manuals for an empty path, in their order."""
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
    """Every file below, by name; hidden files and folders are passed over."""
    if not path.exists():
        raise InputError("there is no such file or folder", where=str(path))
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


def _manuals() -> Iterator[Document]:
    """Docstrings of the standard library's modules, and the topics of Python's own `help()`."""
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield Document(name=f"topic {topic}", content=topics[topic].encode())
    library = Path(sysconfig.get_path("stdlib"))
    for module in sorted(sys.stdlib_module_names - SKIPPED):
        if module.startswith("_"):
            continue
        for file in (library / f"{module}.py", library / module / "__init__.py"):
            if file.is_file():
                written = "\n\n".join(_docstrings(ast.parse(file.read_bytes())))
                yield Document(name=f"module {module}", content=written.encode())


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Of the module, its classes and functions, in the order of the source."""
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
