"""Token shards on disk: how they are written, what the index says of them, how they are read.

A prepared corpus is a folder:

    index.json          the request, and counts and SHA-256 of each shard; written last
    tokenizer.json      the tokenizer, as in a checkpoint
    train-00000.bin     token ids, uint16 or uint32, little-endian, one document after another
    train-00000.ends    uint64: where in them each document ends
    train-00000.sums    16 bytes of SHA-256 for every 64 KiB of the .bin
    val-00000.bin       the documents that are held out, and so on

Opening reads the index and compares the size of every file. The two small files of a shard are
hashed when the shard is first read, and each 64 KiB of token ids when they are first read: no token
is used that was not verified, and opening takes no longer for a larger corpus. `verify` hashes all.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.own import tokenizer_from_json
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.disk import create, open_own, sync_folder
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.serialize import unique_keys

FORMAT = 1
INDEX, TOKENIZER = "index.json", "tokenizer.json"
SPLITS = ("train", "val")
#: Bytes of token ids that are verified at once, and bytes of the sum of each such block.
BLOCK, SUM = 1 << 16, 16
INDEX_LIMIT = 1 << 30
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Ids = NDArray[np.unsignedinteger[Any]]


def dtype_for(vocab_size: int) -> str:
    """Return the name of the smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The record of one shard: counts, and the SHA-256 of its three files by their endings."""

    name: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: Mapping[str, str]

    @classmethod
    def from_dict(cls, data: Any) -> "Shard":
        """Read JSON values; raise a ValueError, TypeError or KeyError for others."""
        counts = [data[key] for key in ("tokens", "documents", "text_bytes")]
        if not all(type(count) is int and 0 <= count < 1 << 48 for count in counts):
            raise ValueError("a count is no count")
        name, hashes = data["name"], {end: str(data["sha256"][end]) for end in ENDINGS}
        split, _, number = str(name).partition("-")
        if split not in SPLITS or not number.isdigit():
            raise ValueError(f"{str(name)[:40]!r} is no shard's name")
        tokens, documents, text_bytes = counts
        return cls(
            name=name, tokens=tokens, documents=documents, text_bytes=text_bytes, sha256=hashes
        )

    def sizes(self, width: int) -> dict[str, int]:
        """Return the bytes of each file, by its ending."""
        data = self.tokens * width
        return {"bin": data, "ends": 8 * self.documents, "sums": SUM * -(-data // BLOCK)}


ENDINGS = ("bin", "ends", "sums")


# --- writing --------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one shard to temporary files, in pieces; `close` makes them final."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._folder, self.name, self._dtype = folder, name, _DTYPES[dtype]
        self._file: IO[bytes] = create(folder / f".{name}.bin.tmp")
        self._hash, self._waiting = hashlib.sha256(), bytearray()
        self._ends = array("Q")  # eight bytes each: a shard may hold millions
        self._sums: list[bytes] = []
        self.tokens = self.text_bytes = 0

    def add(self, ids: Ids, *, text_bytes: int) -> None:
        """Append a document."""
        data = ids.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._waiting += data
        while len(self._waiting) >= BLOCK:
            self._sums.append(block_sum(bytes(self._waiting[:BLOCK])))
            del self._waiting[:BLOCK]
        self.tokens += len(ids)
        self.text_bytes += text_bytes
        self._ends.append(self.tokens)

    def close(self) -> Shard:
        """Sync the files and give them their names."""
        if self._waiting:
            self._sums.append(block_sum(bytes(self._waiting)))
        _sync(self._file)
        self._file.close()
        hashes = {"bin": self._hash.hexdigest()}
        ends = np.array(self._ends, dtype="<u8").tobytes()
        for ending, data in (("ends", ends), ("sums", b"".join(self._sums))):
            hashes[ending] = hashlib.sha256(data).hexdigest()
            with create(self._folder / f".{self.name}.{ending}.tmp") as file:
                file.write(data)
                _sync(file)
        for ending in ENDINGS:
            beside = self._folder / f".{self.name}.{ending}.tmp"
            beside.rename(self._folder / f"{self.name}.{ending}")
        sync_folder(self._folder)
        return Shard(
            name=self.name,
            tokens=self.tokens,
            documents=len(self._ends),
            text_bytes=self.text_bytes,
            sha256=hashes,
        )

    def abandon(self) -> None:
        """Close the file; what was written of it is removed when preparing goes on."""
        self._file.close()


def block_sum(data: bytes) -> bytes:
    """Return what the .sums file holds of one block of token ids."""
    return hashlib.sha256(data).digest()[:SUM]


def append_line(path: Path, text: str) -> None:
    """Append a line to a file; it is on the disk when this returns."""
    is_new = not path.exists()
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(text.encode("utf-8") + b"\n")
        _sync(file)
    if is_new:
        sync_folder(path.parent)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


# --- the index ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What index.json says: the request, the tokenizer's ends, and the shards by split."""

    request: Mapping[str, Any]
    dtype: str
    vocab_size: int
    bos: int | None
    eos: int | None
    tokenizer_sha256: str
    sample: Mapping[str, Any]
    shards: Mapping[str, tuple[Shard, ...]]

    @property
    def sha256(self) -> str:
        """A hash of all tokens and of what they mean; not of where the text came from."""
        total = hashlib.sha256(f"{self.tokenizer_sha256}/{self.bos}/{self.eos}".encode())
        for split in SPLITS:
            for shard in self.shards[split]:
                total.update(f"{shard.name}/{shard.sha256['bin']}/{shard.sha256['ends']}".encode())
        return total.hexdigest()

    def tokens(self, split: str) -> int:
        """Return the number of tokens of a split."""
        return sum(shard.tokens for shard in self.shards[split])

    def documents(self, split: str) -> int:
        """Return the number of documents of a split."""
        return sum(shard.documents for shard in self.shards[split])

    def text_bytes(self, split: str) -> int:
        """Return the bytes of text of a split."""
        return sum(shard.text_bytes for shard in self.shards[split])

    def to_json(self) -> str:
        """Return the text of index.json, with a hash of the rest of it."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "sha256": _body_hash(body)}, indent=1) + "\n"


def _body_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def is_prepared(folder: Path) -> bool:
    """Return True if a folder holds a corpus that was prepared to the end."""
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> Index:
    """Read index.json, and compare the size of every file with it."""
    path = folder / INDEX
    try:
        if path.stat().st_size > INDEX_LIMIT:
            raise ValueError("it is too large")
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        number = data["format"]
        if number != FORMAT:
            raise FileError(
                f"corpus format {number!r}; this version reads format {FORMAT}", where=str(path)
            )
        stated = data.pop("sha256")
        if stated != _body_hash(data):
            raise ValueError("it was changed after it was written: its SHA-256 differs")
        index = Index(
            request=dict(data["request"]),
            dtype=data["dtype"],
            vocab_size=int(data["vocab_size"]),
            bos=data["bos"],
            eos=data["eos"],
            tokenizer_sha256=data["tokenizer_sha256"],
            sample=dict(data["sample"]),
            shards={
                split: tuple(Shard.from_dict(each) for each in data["shards"][split])
                for split in SPLITS
            },
        )
        width = _DTYPES[index.dtype].itemsize
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "there is no index.json, so this is no prepared corpus",
            where=str(folder),
            hint="glass prepare PATH -o FOLDER makes one, or goes on making it",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"the index cannot be read: {str(error)[:200]}",
            where=str(path),
            hint="prepare the corpus again",
        ) from error
    for split in SPLITS:
        for shard in index.shards[split]:
            for ending, size in shard.sizes(width).items():
                _check_size(folder / f"{shard.name}.{ending}", size)
    return index


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise FileError(
            "a file of the corpus is missing", where=str(path), hint="prepare the corpus again"
        ) from error
    if found != size:
        raise FileError(
            f"a file of the corpus has {found:,} bytes, not {size:,} as when it was written",
            where=str(path),
            hint="prepare the corpus again",
        )


def read_tokenizer_file(folder: Path, index: Index) -> Tokenizer:
    """Return the tokenizer of a prepared corpus, which ends a document as it did there."""
    path = folder / TOKENIZER
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the tokenizer cannot be read: {error}", where=str(path)) from error
    if hashlib.sha256(text.encode("utf-8")).hexdigest() != index.tokenizer_sha256:
        raise FileError(
            "the tokenizer was changed after the corpus was prepared: its SHA-256 differs",
            where=str(path),
            hint="its ids mean something else now; prepare the corpus again",
        )
    tokenizer = tokenizer_from_json(text)
    if isinstance(tokenizer, BytePairs):
        tokenizer = tokenizer.with_ends(bos=index.bos, eos=index.eos)
    return tokenizer


# --- reading --------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenShard:
    """A shard that was read from: memory maps, and which of its blocks are verified."""

    path: Path
    ids: Ids
    ends: NDArray[np.uint64]
    sums: bytes
    seen: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = np.zeros(len(self.sums) // SUM, dtype=np.bool_)

    def read(self, first: int, last: int) -> Ids:
        """Return ids `first` to `last`, verified, without `last` itself."""
        width = self.ids.itemsize
        for block in range(first * width // BLOCK, -(-last * width // BLOCK)):
            if not self.seen[block]:
                self._verify(block)
        return self.ids[first:last]

    def _verify(self, block: int) -> None:
        each = BLOCK // self.ids.itemsize
        data = self.ids[block * each : (block + 1) * each].tobytes()
        if block_sum(data) != self.sums[block * SUM : (block + 1) * SUM]:
            raise FileError(
                f"bytes {block * BLOCK:,} to {block * BLOCK + len(data):,} of a shard were "
                "changed after it was written: their SHA-256 differs",
                where=str(self.path),
                hint="prepare the corpus again; nothing was trained on these bytes",
            )
        self.seen[block] = True


class ShardReader:
    """The tokens of one split of a prepared corpus, through memory maps, verified when read."""

    def __init__(self, folder: Path, index: Index, split: str) -> None:
        self.folder = folder
        self.shards: Sequence[Shard] = index.shards[split]
        self._dtype = _DTYPES[index.dtype]
        self._open: dict[int, OpenShard] = {}

    def shard(self, number: int) -> OpenShard:
        """Return a shard; its two small files are verified when it is first requested."""
        if number not in self._open:
            self._open[number] = self._opened(self.shards[number])
        return self._open[number]

    def _opened(self, shard: Shard) -> OpenShard:
        path = self.folder / f"{shard.name}.bin"
        small = {ending: self._small(shard, ending) for ending in ("ends", "sums")}
        try:
            ids: Ids = np.memmap(path, dtype=self._dtype, mode="r", shape=(shard.tokens,))
        except (OSError, ValueError) as error:
            raise FileError(f"a shard cannot be read: {error}", where=str(path)) from error
        ends = np.frombuffer(small["ends"], dtype="<u8")
        return OpenShard(path=path, ids=ids, ends=ends, sums=small["sums"])

    def _small(self, shard: Shard, ending: str) -> bytes:
        path = self.folder / f"{shard.name}.{ending}"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FileError(f"a shard cannot be read: {error}", where=str(path)) from error
        _check_hash(path, hashlib.sha256(data).hexdigest(), shard.sha256[ending])
        return data


def _check_hash(path: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise FileError(
            "a file of the corpus was changed after it was written: its SHA-256 differs",
            where=str(path),
            hint="prepare the corpus again",
        )


def verify_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Hash every file of these shards from beginning to end; name one that was changed."""
    for shard in shards:
        for ending in ENDINGS:
            path = folder / f"{shard.name}.{ending}"
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise FileError(f"a shard cannot be read: {error}", where=str(path)) from error
            _check_hash(path, found, shard.sha256[ending])
