"""Corpora on disk: `gf.prepare`, what it returns, and tasks whose files have to be prepared first.

torch is not imported: preparing text needs none.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.data.build_task import build_task
from glassformer.data.corpus.prepare import ENCODING, Progress, note_lines, preparing
from glassformer.data.corpus.shards import (
    SPLITS,
    Index,
    is_prepared,
    read_index,
    read_tokenizer_file,
    verify_shards,
)
from glassformer.data.corpus.windows import cached_corpus
from glassformer.data.task import Task
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.lab.bar import Bar, clock, is_watched
from glassformer.spec.errors import FileError
from glassformer.spec.tasks import OWN_TOKENIZERS, PrepareSpec, TextTask
from glassformer.spec.tasks import Task as TaskSpec
from glassformer.spec.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCorpus:
    """A prepared corpus: its folder, and what its index says. `task.path` of a text takes it."""

    path: Path
    index: Index

    @classmethod
    def open(cls, path: str | Path) -> "PreparedCorpus":
        """Open a folder that `glass prepare` wrote."""
        return cls(path=Path(path), index=read_index(Path(path)))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the shards."""
        return read_tokenizer_file(self.path, self.index)

    def verify(self) -> None:
        """Hash every file from beginning to end; raise, naming one that was changed."""
        _ = self.tokenizer
        for split in SPLITS:
            verify_shards(self.path, self.index.shards[split])

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        index = self.index
        return {
            "folder": str(self.path),
            "vocab_size": index.vocab_size,
            "documents": {split: index.documents(split) for split in SPLITS},
            "tokens": {split: index.tokens(split) for split in SPLITS},
            "text_bytes": {split: index.text_bytes(split) for split in SPLITS},
            "shards": {split: len(index.shards[split]) for split in SPLITS},
            "sha256": index.sha256,
        }

    def summary(self) -> list[str]:
        """Return the sizes in a few lines."""
        lines = [f"{self.path}: {self.index.vocab_size:,} different tokens"]
        names = {"train": "to train on", "val": "held out"}
        for split in SPLITS:
            index, text = self.index, self.index.text_bytes(split)
            documents = index.documents(split)
            lines.append(
                f"  {names[split]:<12} {documents:>10,} document{'s' if documents != 1 else ' '}"
                f"  {index.tokens(split):>14,} tokens  {format_bytes(text)} of text,"
                f" {text / index.tokens(split):.2f} bytes a token"
            )
        return lines

    def __repr__(self) -> str:
        following = f'  next: gf.train("lm", overrides=["task.path={self.path}"])'
        return "\n".join([*self.summary(), following])


def prepare(
    paths: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    sample: int | None = None,
    held_out: float | None = None,
    seed: int | None = None,
    text_field: str | None = None,
    shard_size: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> PreparedCorpus:
    """Encode files and folders of text, of any size, as token shards in the folder `out`.

    Text, Markdown, JSON lines, each also as .gz or .zst, Parquet, Arrow, and datasets that Hugging
    Face's library saved. Options that are not given have the defaults of `glass prepare`. The same
    call goes on after a kill, and leaves a corpus that is complete as it is.
    """
    given: dict[str, Any] = {
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "vocab_size": vocab_size,
        "sample": sample,
        "held_out": held_out,
        "seed": seed,
        "text_field": text_field,
        "shard_size": shard_size,
    }
    spec = PrepareSpec(**{name: value for name, value in given.items() if value is not None})
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    return prepared(
        named,
        Path(out),
        spec,
        overwrite=overwrite,
        progress=is_watched() if progress is None else progress,
    )


def prepared(
    paths: Sequence[str | Path],
    folder: Path,
    spec: PrepareSpec,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> PreparedCorpus:
    """Prepare a corpus by a spec, showing how far it is; return it."""
    model = None if spec.tokenizer in OWN_TOKENIZERS else plain_tokenizer(spec.tokenizer)
    work = preparing(paths, folder, spec, tokenizer=model, overwrite=overwrite)
    _follow(work, f"preparing {folder.name}", shown=progress, notes=note_lines(paths))
    return PreparedCorpus.open(folder)


def plain_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a prepared corpus or a model, in which text is always text.

    A model's own tokenizer turns the name of a special token inside a text into that token; in a
    corpus the name is a text like any other.
    """
    folder = Path(path)
    if is_prepared(folder):
        return read_tokenizer_file(folder, read_index(folder))
    from glassformer.adapters.folder.paths import load_tokenizer

    found = load_tokenizer(path)
    try:
        data = found.to_json()
        engine = BytePairs.from_json(data) if '"model"' in data else None
    except ValueError as error:
        raise FileError(f"the tokenizer cannot encode a corpus: {error}", where=path) from error
    return found if engine is None else engine.with_ends(bos=found.bos, eos=found.eos)


def built(spec: TaskSpec, *, cache: Path | None = None) -> Task:
    """Build a task, with a bar while the shards of its files are written, if they have to be."""
    if isinstance(spec, TextTask) and cache is not None:
        work = cached_corpus(spec, cache=cache)
        if work is not None and not is_prepared(work.folder):
            _follow(work.preparing(), f"preparing {work.path.name}", shown=is_watched())
    return build_task(spec, cache=cache)


def _follow(
    work: Iterator[Progress], title: str, *, shown: bool, notes: Sequence[str] = ()
) -> None:
    """Do the work, with a bar on a terminal or in a notebook, or with a line now and then."""
    if not shown:
        for _ in work:
            pass
        return
    with Bar(title, total=1) as bar:
        for note in notes:
            bar.tell(note)
        began = time.perf_counter()
        first: int | None = None
        for done in work:
            now = time.perf_counter()
            if done.stage != ENCODING:
                bar.drawn = 0.0  # it may take a while: shown at once
                bar.show(0, done.stage)
            elif first is None:
                first, began = done.done, now
                bar.resize(done.total)
            elif bar.live or bar.is_due():
                rate = (done.done - first) / (now - began)
                left = (done.total - done.done) / rate if rate else 0.0
                facts = (
                    f"{format_bytes(done.done)} of {format_bytes(done.total)}"
                    f"  {done.tokens:,} tokens  {format_bytes(rate)}/s  {clock(left)} left"
                )
                bar.show(done.done, facts)
                if not bar.live:
                    bar.tell(facts)
