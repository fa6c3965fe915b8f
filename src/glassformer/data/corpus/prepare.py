"""Preparing a corpus: documents are encoded on all cores and written as token shards.

Documents are read in a fixed order and grouped into shards by their bytes, so every shard is a
function of the text and the request alone. When a shard is on the disk, a line of `preparing.jsonl`
says where reading goes on; a kill costs the shard that was being written, and the same call goes on
to the same bits. `index.json` is written last, and replaces that file.

Which documents are held out is decided by a hash of seed and text: equal documents are on the same
side, whatever file they are in, and a document stays where it is when the corpus grows.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from glassformer.data.corpus.readers import Document, Found, Position, find_sources, read_documents
from glassformer.data.corpus.shards import (
    ENDINGS,
    INDEX,
    SPLITS,
    TOKENIZER,
    Ids,
    Index,
    Shard,
    ShardWriter,
    append_line,
    dtype_for,
    is_prepared,
    read_index,
    verify_shards,
)
from glassformer.data.tasks.text import learning_lines
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.own import tokenizer_from_json
from glassformer.data.tokenizers.vocab import Bytes, Characters, Tokenizer
from glassformer.spec.disk import make_folder, replace_file
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.serialize import to_dict
from glassformer.spec.tasks import OWN_TOKENIZERS, PrepareSpec
from glassformer.spec.units import format_bytes

JOURNAL = "preparing.jsonl"
#: The stage of the work that takes the time.
ENCODING = "encoding"
#: Bytes of text that are encoded by one call, at least, and for every core; calls at a time.
GROUP, GROUP_PER_CORE, AHEAD = 1 << 20, 1 << 17, 3
#: A corpus of at most so many bytes is read once before, to be sure that something is held out.
SCANNED = 1 << 25
#: How much longer a text is than a compressed file of it, about; to choose a sample's files.
UNPACKED = 4
#: Bytes of a file that a sample takes at least, of those files that it takes anything of, or this
#: share of the sample where it is small.
SAMPLED, FEW_FILES = 1 << 16, 16
_WHOLE = 1 << 64  # of the hashes that decide what is held out


class Progress(NamedTuple):
    """How far preparing is, in bytes of the files, and what has become of them."""

    stage: str
    done: int
    total: int
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """All that the shards depend on: the first line of the journal."""

    request: Mapping[str, Any]
    threshold: int
    sample: Mapping[str, Any]
    bos: int | None
    eos: int | None


def preparing(
    paths: Sequence[str | Path],
    folder: Path,
    spec: PrepareSpec,
    *,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> Iterator[Progress]:
    """Write a corpus as token shards into a folder, yielding how far it is.

    A folder in which the same was begun is gone on with; one in which it was completed is left as
    it is; one with anything else is refused, or cleared with `overwrite`. `tokenizer` is that of a
    model, where the spec names one.
    """
    assert (tokenizer is not None) == (spec.tokenizer not in OWN_TOKENIZERS)
    found = find_sources(paths)
    request = _request(found, spec, tokenizer)
    with _locked(folder):
        if overwrite:
            _clear(folder)
        if is_prepared(folder):
            _check_request(read_index(folder).request, request, folder)
            _remove_strays(folder)
            return
        plan, units = _begun(folder, request)
        if plan is None:
            _check_empty(folder)
            tokenizer, plan = yield from _planned(found, spec, request, tokenizer)
            replace_file(folder / TOKENIZER, tokenizer.to_json().encode())
            append_line(folder / JOURNAL, json.dumps(asdict(plan)))
        else:
            tokenizer = _chosen(folder, plan)
        _remove_strays(folder)
        for shard in (shard for unit in units for shard in unit.shards):
            verify_shards(folder, [shard])
        yield from _units(found, spec, plan, tokenizer, folder, units)
        _finish(folder, plan, tokenizer, units)


def note_lines(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Return what people should know about the files: what is left out of them."""
    return find_sources(paths).notes


# --- the folder, and what was begun in it ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """The shards of one stretch of the corpus, and where the next begins."""

    shards: tuple[Shard, ...]
    source: int
    position: Position


def _request(found: Found, spec: PrepareSpec, tokenizer: Tokenizer | None) -> dict[str, Any]:
    given = to_dict(spec)
    if tokenizer is not None:  # another folder with the same tokens gives the same shards
        given["tokenizer"] = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    sources = [[source.name, source.size, source.modified] for source in found.sources]
    return {**given, "sources": sources}


def _check_request(before: Mapping[str, Any], request: Mapping[str, Any], folder: Path) -> None:
    different = sorted(key for key in request if before.get(key) != request[key])
    if not different:
        return
    text = ", ".join(
        f"{key} ({before.get(key)}, now {request[key]})" if key != "sources" else "the files"
        for key in different
    )
    raise InputError(
        f"the folder holds a corpus of another request: {text}",
        where=str(folder),
        hint="{--overwrite|overwrite=True} makes it anew; another folder leaves it as it is",
    )


def _check_empty(folder: Path) -> None:
    others = sorted(path.name for path in folder.iterdir() if not path.name.endswith(".tmp"))
    if others and others != [TOKENIZER]:  # killed before the journal's first line
        raise InputError(
            f"the folder holds something else: {', '.join(others[:5])}",
            where=str(folder),
            hint="choose a new folder, or an empty one",
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one writer; the lock is the kernel's, so a killed writer leaves none."""
    try:
        make_folder(folder)
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(
            f"the folder cannot be made: {error.strerror}",
            where=str(folder),
            hint="name a folder that is new, or yours to write to",
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise MachineError(
            "another process is preparing this corpus", where=str(folder), hint="wait for it"
        ) from error
    except OSError as error:
        raise MachineError(
            f"could not write the corpus: {error.strerror or error}",
            where=str(folder),
            hint="make room; the same command then goes on where it stopped",
        ) from error
    finally:
        os.close(handle)


def _clear(folder: Path) -> None:
    """Remove the files of a corpus, the index first; any other file stays."""
    names = [folder / INDEX, folder / JOURNAL, folder / TOKENIZER]
    shards = [
        path for split in SPLITS for end in ENDINGS for path in folder.glob(f"{split}-*.{end}")
    ]
    for path in (*names, *shards):
        path.unlink(missing_ok=True)
    _remove_strays(folder)


def _remove_strays(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    if is_prepared(folder):
        (folder / JOURNAL).unlink(missing_ok=True)


def _begun(folder: Path, request: Mapping[str, Any]) -> tuple[_Plan | None, list[_Unit]]:
    """Return what the journal says; a last line that a kill cut off does not count."""
    path = folder / JOURNAL
    try:
        *lines, torn = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return None, []
    except UnicodeDecodeError as error:
        raise FileError("the journal is damaged", where=str(path)) from error
    if not lines:
        path.unlink()
        return None, []
    try:
        plan = _Plan(**json.loads(lines[0]))
        units = [
            _Unit(
                shards=tuple(Shard.from_dict(each) for each in unit["shards"]),
                source=int(unit["source"]),
                position=tuple(map(int, unit["position"])),
            )
            for unit in map(json.loads, lines[1:])
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"the journal is damaged: {error}",
            where=str(path),
            hint="{--overwrite|overwrite=True} begins anew",
        ) from error
    _check_request(plan.request, request, folder)
    if torn:
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())
    return plan, units


def _chosen(folder: Path, plan: _Plan) -> Tokenizer:
    """Return the tokenizer that was chosen before the kill."""
    try:
        tokenizer = tokenizer_from_json((folder / TOKENIZER).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise FileError(
            f"the tokenizer cannot be read: {error}",
            where=str(folder / TOKENIZER),
            hint="{--overwrite|overwrite=True} begins anew",
        ) from error
    if isinstance(tokenizer, BytePairs):
        tokenizer = tokenizer.with_ends(bos=plan.bos, eos=plan.eos)
    return tokenizer


# --- before anything is encoded: what is held out, and the tokenizer ------------------------------


def _planned(
    found: Found, spec: PrepareSpec, request: Mapping[str, Any], tokenizer: Tokenizer | None
) -> Generator[Progress, None, tuple[Tokenizer, _Plan]]:
    """Decide what is held out, and make the tokenizer from the rest."""
    threshold = int(spec.held_out * _WHOLE)
    if found.size <= SCANNED:
        yield Progress("reading", 0, found.size)
        threshold = _dividing(found, spec, threshold)
    sample: dict[str, Any] = {}
    if tokenizer is None:
        words = f"learning a tokenizer from up to {format_bytes(spec.sample)}"
        yield Progress(words if spec.tokenizer == "bpe" else "reading", 0, found.size)
        tokenizer, sample = _made(found, spec, threshold)
    plan = _Plan(
        request=request,
        threshold=threshold,
        sample=sample,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
    )
    return tokenizer, plan


def _dividing(found: Found, spec: PrepareSpec, threshold: int) -> int:
    """Return the threshold, moved so that one document at least is on either side of it."""
    hashes = {_hash(document.text.encode(), spec.seed) for document in _all(found, spec)}
    where = ", ".join(source.name for source in found.sources[:3])
    if not hashes:
        raise InputError(
            "the corpus is empty: there is no text in it",
            where=where,
            hint="name a file with text",
        )
    if len(hashes) == 1:
        raise InputError(
            "the corpus is a single document, so none can be held out",
            where=where,
            hint="give at least two different documents",
        )
    low, high = min(hashes), max(hashes)
    return min(max(threshold, low + 1), high)


def _all(found: Found, spec: PrepareSpec) -> Iterator[Document]:
    for source in found.sources:
        yield from read_documents(
            source, text_field=spec.text_field, longest_text=found.longest_text
        )


def _hash(data: bytes, seed: int) -> int:
    """Return 64 bits that decide whether a document is held out."""
    digest = hashlib.sha256(f"{seed}/".encode())
    digest.update(data)
    return int.from_bytes(digest.digest()[:8], "little")


def _made(found: Found, spec: PrepareSpec, threshold: int) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of this text, and what it was made from."""
    if spec.tokenizer == "bytes":
        return Bytes(), {}
    if spec.tokenizer == "characters":  # an unknown one could not be encoded: all are read
        return Characters.of(document.text for document in _all(found, spec)), {}
    facts = {"documents": 0, "bytes": 0}
    total = hashlib.sha256()

    def lines() -> Iterator[str]:
        for text in sample_texts(found, spec, threshold):
            data = text.encode()
            total.update(data)
            facts["documents"] += 1
            facts["bytes"] += len(data)
            yield from learning_lines(text)

    tokenizer = BytePairs.train(lines(), vocab_size=spec.vocab_size, specials=("EOS",))
    if not facts["documents"]:
        raise InputError(
            "no document of the sample is to be trained on",
            where=", ".join(source.name for source in found.sources[:3]),
            hint="a larger {--sample|sample=}, or a smaller {--held-out|held_out=}",
        )
    return tokenizer, {**facts, "sha256": total.hexdigest()}


def sample_texts(found: Found, spec: PrepareSpec, threshold: int = 0) -> Iterator[str]:
    """Yield documents from the beginning of every file, as much of each as it is large.

    Of many small files, some are taken by a hash of their names. What is held out is not shown.
    """
    sizes = [
        source.size * (UNPACKED if source.packed or source.kind == "parquet" else 1)
        for source in found.sources
    ]
    share, left = spec.sample / max(1, sum(sizes)), spec.sample
    for source, size in zip(found.sources, sizes, strict=True):
        wanted = size * share if share < 1 else float("inf")
        least = min(size, SAMPLED, spec.sample / FEW_FILES)
        if wanted < least:
            name = source.name.encode("utf-8", "surrogateescape")
            if _hash(name, spec.seed) >= wanted / least * _WHOLE:
                continue
            wanted = least
        for document in read_documents(
            source, text_field=spec.text_field, longest_text=found.longest_text
        ):
            data = document.text.encode()
            if _hash(data, spec.seed) >= threshold:
                yield document.text
                left -= len(data)
            wanted -= len(data)
            if wanted <= 0 or left <= 0:
                break
        if left <= 0:
            return


# --- encoding -------------------------------------------------------------------------------------


class _Encoded(NamedTuple):
    """A document's ids, whether it is held out, its bytes, and where reading goes on behind it."""

    ids: Ids
    held_out: bool
    text_bytes: int
    source: int
    document: Document


def _units(
    found: Found,
    spec: PrepareSpec,
    plan: _Plan,
    tokenizer: Tokenizer,
    folder: Path,
    units: list[_Unit],
) -> Iterator[Progress]:
    """Encode what is left, a stretch of text after another; each ends in a line of the journal."""
    dtype = dtype_for(tokenizer.vocab_size)
    begins = [0, *accumulate(source.size for source in found.sources)]
    tokens = sum(shard.tokens for unit in units for shard in unit.shards)
    writers: dict[str, ShardWriter] = {}
    taken = 0
    source, position = (units[-1].source, units[-1].position) if units else (0, ())
    if source < 0:
        return  # killed between the last shard and the index

    def close(source: int, position: Position) -> None:
        shards = tuple(writers.pop(split).close() for split in SPLITS if split in writers)
        unit = _Unit(shards=shards, source=source, position=position)
        units.append(unit)
        append_line(folder / JOURNAL, json.dumps(asdict(unit)))

    yield Progress(ENCODING, begins[source], begins[-1], tokens)
    try:
        for made in _encoded(found, spec, plan, tokenizer, dtype, source, position):
            split = "val" if made.held_out else "train"
            if split not in writers:
                writers[split] = ShardWriter(folder, f"{split}-{len(units):05d}", dtype)
            writers[split].add(made.ids, text_bytes=made.text_bytes)
            taken += made.text_bytes
            tokens += len(made.ids)
            if taken >= spec.shard_size:
                close(made.source, made.document.position)
                taken = 0
            done = begins[made.source] + min(
                made.document.consumed, found.sources[made.source].size
            )
            yield Progress(ENCODING, done, begins[-1], tokens)
        close(-1, ())
    finally:
        for writer in writers.values():
            writer.abandon()


def _encoded(
    found: Found,
    spec: PrepareSpec,
    plan: _Plan,
    tokenizer: Tokenizer,
    dtype: str,
    first: int,
    start: Position,
) -> Iterator[_Encoded]:
    """Yield documents in order, encoded a few groups ahead by threads that leave Python alone."""
    ids_of = _Encoder(tokenizer, dtype)

    def encode(group: list[tuple[int, Document]]) -> list[_Encoded]:
        texts = [document.text for _, document in group]
        made = ids_of(texts, [document.ends for _, document in group])
        data = [text.encode() for text in texts]
        return [
            _Encoded(ids, _hash(each, spec.seed) < plan.threshold, len(each), source, document)
            for ids, each, (source, document) in zip(made, data, group, strict=True)
        ]

    waiting: deque[Future[list[_Encoded]]] = deque()
    with ThreadPoolExecutor(AHEAD - 1) as pool:
        for group in _groups(found, spec, first, start):
            waiting.append(pool.submit(encode, group))
            if len(waiting) == AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _groups(
    found: Found, spec: PrepareSpec, first: int, start: Position
) -> Iterator[list[tuple[int, Document]]]:
    most = max(GROUP, GROUP_PER_CORE * (os.cpu_count() or 1))
    group: list[tuple[int, Document]] = []
    size = 0
    for number, source in enumerate(found.sources[first:], start=first):
        for document in read_documents(
            source,
            text_field=spec.text_field,
            longest_text=found.longest_text,
            start=start if number == first else (),
        ):
            group.append((number, document))
            size += len(document.text)
            if size >= most:
                yield group
                group, size = [], 0
    if group:
        yield group


class _Encoder:
    """Texts to ids, with the tokenizer's own beginning and end where a document has them."""

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self._tokenizer, self._dtype = tokenizer, np.dtype(dtype)
        self._begin = [] if tokenizer.bos is None else [tokenizer.bos]
        self._end = [] if tokenizer.eos is None else [tokenizer.eos]

    def __call__(self, texts: Sequence[str], ends: Sequence[bool]) -> list[Ids]:
        """Return each text's ids; a piece that goes on in the next one has no end."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, Bytes):
            return [np.frombuffer(t.encode(), dtype=np.uint8).astype(self._dtype) for t in texts]
        if isinstance(tokenizer, BytePairs):
            encoded = tokenizer.encode_many(texts)
        else:
            encoded = [tokenizer.encode(text) for text in texts]
        return [
            np.array([*self._begin, *ids, *(self._end if ended else ())], dtype=self._dtype)
            for ids, ended in zip(encoded, ends, strict=True)
        ]


def _finish(folder: Path, plan: _Plan, tokenizer: Tokenizer, units: Sequence[_Unit]) -> None:
    """Write the index, and remove the journal."""
    shards = {
        split: tuple(
            shard for unit in units for shard in unit.shards if shard.name.startswith(f"{split}-")
        )
        for split in SPLITS
    }
    for split, words in (("val", "held out"), ("train", "left to train on")):
        if not sum(shard.tokens for shard in shards[split]):
            raise InputError(
                f"no document is {words}",
                where=str(folder),
                hint="give more documents, or another {--held-out|held_out=} or {--seed|seed=}",
            )
    text = (folder / TOKENIZER).read_text(encoding="utf-8")
    index = Index(
        request=plan.request,
        dtype=dtype_for(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        bos=plan.bos,
        eos=plan.eos,
        tokenizer_sha256=hashlib.sha256(text.encode("utf-8")).hexdigest(),
        sample=plan.sample,
        shards=shards,
    )
    replace_file(folder / INDEX, index.to_json().encode())
    _remove_strays(folder)
