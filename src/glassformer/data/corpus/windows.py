"""A prepared corpus, or a mixture of several, as a task: windows of tokens, in an endless order.

A window is `length` tokens of a shard. Documents that share one are kept apart by `segments`: they
do not attend to each other, their positions begin anew, and a document's last token never predicts
the first of the next; or they are joined, on request. The rows of a batch are a function of its
number: a mixture takes each corpus by its weight, and each goes through a permutation of its
windows, then through another one.
"""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints
from glassformer.data.corpus.prepare import JOURNAL, Progress, preparing, sample_texts
from glassformer.data.corpus.readers import find_sources
from glassformer.data.corpus.shards import (
    SPLITS,
    Index,
    OpenShard,
    ShardReader,
    is_prepared,
    read_index,
    read_tokenizer_file,
)
from glassformer.data.rng import permuted, stream
from glassformer.data.task import checked, pick
from glassformer.data.tasks.text import RunningText
from glassformer.data.tokenizers.own import Own
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnTokenizer
from glassformer.spec.tasks import SMALLEST_VOCABULARY, PrepareSpec, TextTask

# B batch, T length

#: Text of more bytes than this is never read into memory: it becomes shards in the runs' cache.
LARGEST_IN_MEMORY = 64_000_000
#: Rows among which every corpus of a mixture has exactly its share.
BLOCK = 4096
#: Fields of the task that a corpus has decided when it was prepared.
_DECIDED = ("tokenizer", "vocab_size", "held_out", "seed", "text_field")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One corpus: its readers by split, the number of windows before each shard, its weight."""

    index: Index
    readers: Mapping[str, ShardReader]
    starts: Mapping[str, NDArray[np.int64]]
    weight: float

    def windows(self, split: str) -> int:
        """Return the number of windows of a split."""
        return int(self.starts[split][-1])


class Corpus(RunningText):
    """Windows of prepared corpora, each within a shard.

    Held-out windows come in an order of their own, so that the first few are a sample of all.
    """

    def __init__(self, spec: TextTask, folders: Mapping[str, float]) -> None:
        self.spec = spec
        self.apart = spec.packing != "joined"
        indexes = {folder: read_index(Path(folder)) for folder in folders}
        first = next(iter(indexes))
        for folder, index in indexes.items():
            _check_decided(spec, index, folder)
            if _meaning(index) != _meaning(indexes[first]):
                raise InputError(
                    "two corpora of a mixture have different tokens",
                    where=f"{first} and {folder}",
                    hint=f"prepare the second with the first one's: --tokenizer {first}",
                )
        self.tokenizer: Tokenizer = read_tokenizer_file(Path(first), indexes[first])
        self.heads: Mapping[str, int] = {"next": self.tokenizer.vocab_size}
        request = indexes[first].request
        if request.get("tokenizer") == "bpe":
            self.wished_pieces = request.get("vocab_size") or 0
        self._parts = [
            self._part(Path(folder), index, folders[folder]) for folder, index in indexes.items()
        ]
        self._starts = {
            split: np.cumsum([0, *(part.windows(split) for part in self._parts)])
            for split in SPLITS
        }

    def _part(self, folder: Path, index: Index, weight: float) -> _Part:
        length = self.spec.length
        counts = {
            split: [max(0, shard.tokens - 1) // length for shard in index.shards[split]]
            for split in SPLITS
        }
        for split, each in counts.items():
            if not sum(each):
                raise InputError(
                    f"the {split} part of the corpus has {index.tokens(split)} tokens, "
                    f"one sequence needs {length + 1}",
                    where=str(folder),
                    hint="prepare more text, or use a smaller task.length",
                )
        return _Part(
            index=index,
            readers={split: ShardReader(folder, index, split) for split in SPLITS},
            starts={split: np.cumsum([0, *each]) for split, each in counts.items()},
            weight=weight,
        )

    def sizes(self) -> dict[str, int]:
        """Return the number of windows of each part; a window's last target follows it."""
        return {split: int(starts[-1]) for split, starts in self._starts.items()}

    def order(self, *, batch_size: int, seed: int) -> "WindowOrder":
        """Return the windows of every batch, by the corpora's weights."""
        windows = [part.windows("train") for part in self._parts]
        weights = [part.weight for part in self._parts]
        return WindowOrder(windows, weights, batch_size=batch_size, seed=seed)

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return windows, and the same one token later as the target of head `next`."""
        places = self._places(split, rows)
        shape = (len(places), self.spec.length)
        window_BT = np.empty((shape[0], shape[1] + 1), dtype=np.int64)
        segments_BT = np.zeros(shape, dtype=np.int64)
        weights_BT = np.ones(shape, dtype=np.float32)
        for row, (shard, first) in enumerate(places):
            last = first + self.spec.length
            window_BT[row] = shard.read(first, last + 1)
            if self.apart:
                inside = np.searchsorted(shard.ends, [first, last], side="right")
                ends = shard.ends[slice(*inside)].astype(np.int64) - first
                segments_BT[row] = np.searchsorted(ends, np.arange(shape[1]), side="right")
                weights_BT[row, ends - 1] = 0.0
        return Batch(
            tokens=window_BT[:, :-1],
            valid=np.ones(shape, dtype=np.bool_),
            targets={"next": window_BT[:, 1:]},
            weights=weights_BT,
            segments=segments_BT if segments_BT.any() else None,
        )

    def windows(self, split: str, rows: Ints) -> NDArray[np.int64]:
        """Return (B, T + 1): windows and the token after each."""
        length = self.spec.length + 1
        places = self._places(split, rows)
        return np.array([shard.read(first, first + length) for shard, first in places], np.int64)

    def facts(self) -> dict[str, Any]:
        """Return sizes and hashes of the corpora, tokens and bytes per token of each part."""
        indexes = [part.index for part in self._parts]
        tokens = {split: sum(index.tokens(split) for index in indexes) for split in SPLITS}
        text = {split: sum(index.text_bytes(split) for index in indexes) for split in SPLITS}
        total = hashlib.sha256("/".join(index.sha256 for index in indexes).encode())
        return {
            "task": self.name,
            "corpus": "prepared",
            "documents": sum(index.documents(split) for index in indexes for split in SPLITS),
            "bytes": sum(text.values()),
            "sha256": indexes[0].sha256 if len(indexes) == 1 else total.hexdigest(),
            "tokenizer": str(indexes[0].request.get("tokenizer")),
            "vocab_size": self.tokenizer.vocab_size,
            "packing": "apart" if self.apart else "joined",
            "weights": [part.weight for part in self._parts],
            "sizes": self.sizes(),
            "tokens": tokens,
            "bytes_per_token": {split: text[split] / tokens[split] for split in SPLITS},
        }

    def _places(self, split: str, rows: Ints) -> list[tuple[OpenShard, int]]:
        """Return the shard of each row, and where in it the window begins."""
        starts = pick(self._starts, split)
        rows = checked(rows, size=int(starts[-1]), split=split)
        if split == "val":
            rows = permuted(rows, int(starts[-1]), seed=0, purpose=("held out",))
        made = []
        for row, number in zip(
            rows.tolist(), np.searchsorted(starts, rows, side="right") - 1, strict=True
        ):
            part = self._parts[number]
            inside = row - int(starts[number])
            shard = int(np.searchsorted(part.starts[split], inside, side="right")) - 1
            first = (inside - int(part.starts[split][shard])) * self.spec.length
            made.append((part.readers[split].shard(shard), first))
        return made


class WindowOrder:
    """The rows of every batch, computed from its number; every batch is full.

    In every 4,096 rows, each corpus of a mixture has its share, in an order of their own. Its k-th
    row is the k-th window of a permutation of all its windows, a new one each time through.
    """

    def __init__(
        self, windows: list[int], weights: list[float], *, batch_size: int, seed: int
    ) -> None:
        at_least("batch_size", batch_size)
        self.batch_size, self.seed = batch_size, seed
        self._windows = windows
        self._starts = np.cumsum([0, *windows])
        shares = np.cumsum([0.0, *weights]) / sum(weights)
        self._shares = [float(share) for share in shares[:-1]] + [1.0]
        self._block = -1
        self._corpus_of: NDArray[np.int64] = np.zeros(BLOCK, dtype=np.int64)
        self._rank: NDArray[np.int64] = np.zeros(BLOCK, dtype=np.int64)

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the rows of the batch of this step, counted from 0."""
        at_least("step", step, 0)
        numbers = step * self.batch_size + np.arange(self.batch_size)
        corpora, ranks = self._drawn(numbers)
        made = np.empty(len(numbers), dtype=np.int64)
        for corpus in np.unique(corpora):
            size = self._windows[corpus]
            mine = np.flatnonzero(corpora == corpus)
            epochs, places = np.divmod(ranks[mine], size)
            for epoch in np.unique(epochs):
                purpose = ("windows", int(corpus), int(epoch))
                now = epochs == epoch
                found = permuted(places[now], size, seed=self.seed, purpose=purpose)
                made[mine[now]] = self._starts[corpus] + found
        return made

    def _drawn(self, numbers: Ints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the corpus of each row, and how many rows before it were of the same."""
        if len(self._windows) == 1:
            return np.zeros(len(numbers), dtype=np.int64), numbers.astype(np.int64)
        corpora = np.empty(len(numbers), dtype=np.int64)
        ranks = np.empty(len(numbers), dtype=np.int64)
        for block in np.unique(numbers // BLOCK):
            self._fill(int(block))
            mine = numbers // BLOCK == block
            corpora[mine] = self._corpus_of[numbers[mine] % BLOCK]
            ranks[mine] = self._rank[numbers[mine] % BLOCK]
        return corpora, ranks

    def _fill(self, block: int) -> None:
        if block == self._block:
            return
        before, after = self._counts(block), self._counts(block + 1)
        repeated = np.repeat(np.arange(len(before)), after - before)
        self._corpus_of = repeated[stream(self.seed, "mixture", block).permutation(BLOCK)]
        for corpus, count in enumerate(before):
            mine = self._corpus_of == corpus
            self._rank[mine] = count + np.arange(int(mine.sum()))
        self._block = block

    def _counts(self, block: int) -> NDArray[np.int64]:
        """Return how many rows of each corpus come before this block."""
        bounds = [int(block * BLOCK * share) for share in self._shares]
        return np.array([after - before for before, after in pairwise(bounds)], dtype=np.int64)


def _meaning(index: Index) -> tuple[str, int | None, int | None]:
    return index.tokenizer_sha256, index.bos, index.eos


def _check_decided(spec: TextTask, index: Index, folder: str) -> None:
    """Refuse a setting of the task that the corpus has decided otherwise."""
    defaults = {each.name: each.default for each in fields(TextTask)}
    for name in _DECIDED:
        value, there = getattr(spec, name), index.request.get(name)
        if value not in (defaults[name], there):
            raise InputError(
                f"task.{name}={value}, and the corpus was prepared with {name} {there}",
                where=folder,
                hint=f"leave it out, or prepare the corpus with {name} {value}",
            )


# --- from a task's spec ---------------------------------------------------------------------------


def is_corpus(spec: TextTask) -> bool:
    """Return True if a task reads shards: of prepared corpora, or of what is not plain text.

    Text of up to 64 MB in plain files stays in memory, unless its packing is chosen.
    """
    if spec.mixture or spec.packing is not None:
        return True
    path = Path(spec.path)
    if not spec.path or not path.exists():
        return False
    if _is_folder_of_shards(path):
        return True
    try:
        found = find_sources([path])
    except InputError:
        return False  # reading it into memory finds out what is wrong with it, if anything is
    plain = all(source.kind == "text" and not source.packed for source in found.sources)
    return not plain or found.size > LARGEST_IN_MEMORY


def _is_folder_of_shards(path: Path) -> bool:
    """Return True also if it was begun, and not ended: opening it says so."""
    return is_prepared(path) or (path / JOURNAL).is_file()


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedCorpus:
    """Files that a task names as they are, and the folder of the cache where their shards are.

    The folder is named for the files, their sizes and times, and all that is requested.
    """

    path: Path
    folder: Path
    spec: PrepareSpec
    own: OwnTokenizer | None

    def preparing(self) -> Iterator[Progress]:
        """Write the shards, unless they are there; yield how far it is."""
        if is_prepared(self.folder):
            return
        tokenizer = None
        if self.own is not None:
            texts = sample_texts(find_sources([self.path]), self.spec)
            tokenizer = Own.trained(self.own, texts)
        yield from preparing([self.path], self.folder, self.spec, tokenizer=tokenizer)


def cached_corpus(spec: TextTask, *, cache: Path) -> CachedCorpus | None:
    """Return the files of a task that become shards in the cache; None if none do."""
    path = Path(spec.path)
    if not spec.path or not is_corpus(spec) or spec.mixture or _is_folder_of_shards(path):
        return None
    found = find_sources([path])
    own = spec.tokenizer if isinstance(spec.tokenizer, OwnTokenizer) else None
    requested = PrepareSpec(
        tokenizer=str(spec.tokenizer) if own is None else own.source,
        vocab_size=spec.vocab_size if spec.tokenizer == "bpe" else SMALLEST_VOCABULARY,
        held_out=spec.held_out,
        seed=spec.seed,
        text_field=spec.text_field,
    )
    sources = [(each.name, each.size, each.modified) for each in found.sources]
    words = f"{path.resolve()}/{sources}/{requested}/{own}"
    key = hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return CachedCorpus(path=path, folder=cache / f"corpus-{key}", spec=requested, own=own)


def build_corpus(spec: TextTask, *, cache: Path | None = None) -> Corpus:
    """Return the task of prepared corpora; files that are not prepared yet become shards first.

    Without a cache these are temporary, and removed with the task.
    """
    if spec.mixture:
        return Corpus(spec, dict(spec.shares()))
    if not spec.path:
        raise InputError(
            "the manuals are one text, in which nothing is packed",
            hint="task.packing goes with task.path or task.mixture",
        )
    work = cached_corpus(spec, cache=cache or Path())
    if work is None:
        return Corpus(spec, {spec.path: 1.0})
    if cache is not None:
        return _prepared(spec, work)
    temporary = Path(tempfile.mkdtemp(prefix="glass-corpus-"))
    try:
        made = _prepared(spec, replace(work, folder=temporary / work.folder.name))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    weakref.finalize(made, shutil.rmtree, temporary, ignore_errors=True)
    return made


def _prepared(spec: TextTask, work: CachedCorpus) -> Corpus:
    for _ in work.preparing():
        pass
    return Corpus(spec, {str(work.folder): 1.0})
