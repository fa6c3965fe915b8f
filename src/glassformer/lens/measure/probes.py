"""`Probes`: attention, lens, norms and losses of a few fixed examples at one training step.

They are stored as one safetensors file, so that other tools can open it; words and names are its
metadata. Attention is stored as bytes: 0 to 254 are weights in equal steps, 255 is a masked cell.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.lens.heads import HeadName, kind_of
from glassformer.lens.show import html
from glassformer.lens.show.attention_map import AttentionMap, maps_chart
from glassformer.lens.show.chart import Panels
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import Names, shown
from glassformer.spec.errors import FileError, InputError
from glassformer.store.tensors import read_metadata, read_tensors, tensor_bytes

# B examples, N heads, T queries, S keys, R rows of the residual, K likeliest ids

FORMAT = "glassformer probes 1"
#: The byte of a weight of 1, and of a cell that is masked.
FULL, MASKED = 254, 255
#: Letters kept of a word, and the number of different predicted ids named in a file.
LETTERS, NAMED = 24, 512
#: The largest file that will be read: many times what the largest model writes.
LIMIT = 1 << 28
#: Exceptions that a damaged or hostile file can cause before it is recognised as one.
FAULTS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, eq=False, repr=False)
class Probes(Displayable):
    """`map(example, "L1H3")`, `top(example, position)`, `norms_BRT`, `losses_BT` of one step.

    `examples` are rows of the validation split. `complete` is False for an example that was
    truncated. `counted_BT` is True where there is a target; elsewhere the loss is 0.
    """

    step: int
    head: str
    examples: tuple[int, ...]
    complete: tuple[bool, ...]
    words: tuple[tuple[str, ...], ...]
    source_words: tuple[tuple[str, ...], ...] | None
    attention: Mapping[str, NDArray[np.uint8]]  # "self.0": (B, N, T, S)
    row_names: tuple[str, ...]
    norms_BRT: NDArray[np.float32]
    lens_ids: NDArray[np.int32]  # (B, R + 1, T, K); the last row is the model's own prediction
    lens_shares: NDArray[np.float16]
    names: Mapping[int, str]
    losses_BT: NDArray[np.float32]
    counted_BT: NDArray[np.bool_]

    @property
    def title(self) -> str:
        """The step at which they were taken."""
        return f"probes at step {self.step}"

    @property
    def tensor(self) -> Tensor:
        """The norms of the residual (B, R, T); 0 beyond an example's end."""
        return torch.from_numpy(np.array(self.norms_BRT))

    @property
    def loss(self) -> float | None:
        """The mean over all positions with a target; None without any."""
        counted = self.losses_BT[self.counted_BT]
        return float(counted.mean(dtype=np.float64)) if counted.size else None

    def heads(self) -> list[HeadName]:
        """Return every head, in the order of the computation."""
        heads = []
        for name, maps in self.attention.items():
            kind, _, layer = name.partition(".")
            heads += [HeadName(kind_of(kind), int(layer), head) for head in range(maps.shape[1])]
        return heads

    def map(self, example: int, head: str | HeadName) -> AttentionMap:
        """Return one head's map of one example, in steps of 1/254."""
        name = HeadName.parse(head)
        if name not in self.heads():
            raise InputError(f"no head {name} in these probes", hint="`heads()` lists them")
        rows = self._words(example, of_source=name.kind == "encoder")
        columns = self._words(example, of_source=name.kind != "self")
        bytes_TS = self.attention[f"{name.kind}.{name.layer}"][example, name.head]
        bytes_TS = bytes_TS[: len(rows), : len(columns)]
        allowed_TS = bytes_TS != MASKED
        weights_TS = np.where(allowed_TS, bytes_TS, 0).astype(np.float32) / FULL
        return AttentionMap(
            torch.from_numpy(weights_TS),
            torch.from_numpy(allowed_TS),
            rows,
            columns,
            title=f"{name} at step {self.step}",
            head=name,
        )

    def mean(self, example: int, layer: int, *, kind: str = "self") -> AttentionMap:
        """Return the average of a layer's heads."""
        names = [name for name in self.heads() if (name.kind, name.layer) == (kind, layer)]
        every = [self.map(example, name) for name in names]
        if not every:
            raise InputError(f"no layer {layer} of kind '{kind[:20]}' in these probes")
        mean_TS = torch.stack([each.tensor for each in every]).mean(0)
        title = f"L{layer} mean at step {self.step}"
        return replace(every[0], weights_TS=mean_TS, title=title, head=None)

    def _words(self, example: int, *, of_source: bool) -> tuple[str, ...]:
        if not 0 <= example < len(self.words):
            raise InputError(f"no example {example}", hint=f"0 to {len(self.words) - 1}")
        if not of_source:
            return self.words[example]
        assert self.source_words is not None, "only heads of an encoder-decoder read a source"
        return self.source_words[example]

    def top(self, example: int, position: int, *, row: str = "final") -> list[tuple[str, float]]:
        """Return the likeliest predictions of a row of the lens, with their probabilities."""
        rows = (*self.row_names, "final")
        if row not in rows:
            raise InputError(f"no row '{row}'", hint=f"known: {', '.join(rows)}")
        words = self._words(example, of_source=False)
        if not 0 <= position < len(words):
            raise InputError(f"no position {position}", hint=f"0 to {len(words) - 1}")
        at = example, rows.index(row), position
        pairs = zip(self.lens_ids[at].tolist(), self.lens_shares[at].tolist(), strict=True)
        return [(self.names.get(i, f"#{i}"), share) for i, share in pairs]

    def rows(self) -> list[Row]:
        """One row per token: loss if it has a target, prediction, norm of the last residual."""
        return [
            {
                "step": self.step,
                "example": self.examples[b],
                "position": t,
                "word": word,
                "loss": float(self.losses_BT[b, t]) if self.counted_BT[b, t] else None,
                "top": self.top(b, t)[0][0],
                "probability": self.top(b, t)[0][1],
                "norm": float(self.norms_BRT[b, -1, t]),
            }
            for b, words in enumerate(self.words)
            for t, word in enumerate(words)
        ]

    def text(self) -> str:
        """One line per example: its words, its loss, the prediction at its end."""
        mean = "" if self.loss is None else f", loss {self.loss:.4f}"
        lines = [f"{self.title}: {len(self.words)} examples, {len(self.heads())} heads{mean}"]
        for b, words in enumerate(self.words):
            counted = self.losses_BT[b][self.counted_BT[b]]
            loss = f"loss {counted.mean():8.4f}" if counted.size else " " * 13
            top, share = self.top(b, len(words) - 1)[0]
            text = " ".join(shown(word) for word in words[-12:])
            lines.append(f"  {self.examples[b]:>6}  {loss}  {text} -> {shown(top)} {share:.3f}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Every head's map of the first example, then the table."""
        yield html.heading(self.title)
        for head in self.heads():
            each = self.map(0, head)
            yield html.captioned(each.svg(side=160), each.title)
        yield self.table()

    def chart(self) -> Panels:
        """Every head's map of the first example."""
        every = [self.map(0, head) for head in self.heads()]
        return maps_chart(every, columns=max(maps.shape[1] for maps in self.attention.values()))

    def to_bytes(self) -> bytes:
        """Return the file's bytes; equal probes give equal bytes."""
        arrays: dict[str, NDArray[Any]] = {
            "examples": np.array(self.examples, dtype=np.int64),
            "whole": np.array(self.complete, dtype=np.bool_),
            "norms": self.norms_BRT,
            "lens.ids": self.lens_ids,
            "lens.shares": self.lens_shares,
            "losses": self.losses_BT,
            "counted": self.counted_BT,
            **{f"attention.{name}": maps for name, maps in self.attention.items()},
        }
        header = {
            "format": FORMAT,
            "step": self.step,
            "head": self.head,
            "rows": self.row_names,
            "words": self.words,
            "source_words": self.source_words,
            "names": self.names,
        }
        return tensor_bytes(arrays, metadata={"probes": json.dumps(header, ensure_ascii=False)})


def named(ids: NDArray[np.int32], names: Names) -> dict[int, str]:
    """Return the words of the most frequent ids, as many as a file names; ties by smaller id."""
    found, counts = np.unique(ids, return_counts=True)
    frequent = found[np.argsort(-counts, kind="stable")[:NAMED]]
    return {i: names(i)[:LETTERS] for i in sorted(frequent.tolist())}


def read_probes(path: str | Path) -> Probes:
    """Read one file, `runs/digits/probes/step-000200.safetensors`."""
    file = Path(path)
    if not file.is_file():
        raise InputError("no such file of probes", where=str(path))
    if (size := file.stat().st_size) > LIMIT:
        raise FileError(f"a file of probes of {size:,} bytes", where=file.name)
    try:
        header = json.loads(read_metadata(file).get("probes", "{}"))
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise FileError("this tensor file holds no probes", where=file.name)
        probes = _probes(header, read_tensors(file))
        _check(probes)
    except FAULTS as error:
        raise FileError(f"a damaged file of probes: {error}", where=file.name) from error
    return probes


def _probes(header: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Probes:
    def words(name: str) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(str(word) for word in row) for row in header[name])

    maps = {
        n.removeprefix("attention."): a for n, a in arrays.items() if n.startswith("attention.")
    }
    order = ("encoder", "self", "cross")
    names = sorted(maps, key=lambda n: (order.index(n.split(".")[0]), int(n.split(".")[1])))
    return Probes(
        step=int(header["step"]),
        head=str(header["head"]),
        examples=tuple(arrays["examples"].tolist()),
        complete=tuple(arrays["whole"].tolist()),
        words=words("words"),
        source_words=None if header["source_words"] is None else words("source_words"),
        attention={name: maps[name] for name in names},
        row_names=tuple(map(str, header["rows"])),
        norms_BRT=arrays["norms"],
        lens_ids=arrays["lens.ids"],
        lens_shares=arrays["lens.shares"],
        names={int(i): str(word) for i, word in header["names"].items()},
        losses_BT=arrays["losses"],
        counted_BT=arrays["counted"],
    )


def _check(probes: Probes) -> None:
    """Raise ValueError unless all shapes agree: a foreign file may hold anything."""
    B, T = probes.losses_BT.shape
    R = len(probes.row_names)
    sides = {"self": (T, T)}
    if probes.source_words is not None:
        longest = max(map(len, probes.source_words))
        sides |= {"encoder": (longest, longest), "cross": (T, longest)}
    fits = (
        len(probes.words) == len(probes.examples) == len(probes.complete) == B
        and max(map(len, probes.words)) <= T
        and min(map(len, probes.words)) > 0
        and all(type(row) is int and row >= 0 for row in probes.examples)
        and 0 <= probes.step < 1 << 62
        and _is(probes.counted_BT, np.bool_, (B, T))
        and _is(probes.losses_BT, np.float32, (B, T))
        and _is(probes.norms_BRT, np.float32, (B, R, T))
        and _is(probes.lens_ids, np.int32, (B, R + 1, T, probes.lens_ids.shape[-1]))
        and _is(probes.lens_shares, np.float16, probes.lens_ids.shape)
        and R > 0
        and probes.lens_ids.shape[-1] > 0
        and (probes.source_words is None or len(probes.source_words) == B)
        and all(
            _is(maps, np.uint8, (B, maps.shape[1], *sides[kind])) and maps.shape[1] > 0
            for (kind, _), maps in zip(_layers(probes), probes.attention.values(), strict=True)
        )
    )
    if not fits or not probes.attention:
        raise ValueError("its tensors do not have matching shapes")


def _is(array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> bool:
    return array.dtype == dtype and array.shape == shape


def _layers(probes: Probes) -> list[tuple[str, int]]:
    """Return kind and layer of each entry of `attention`; layers must run from 0, in order."""
    counts: Counter[str] = Counter()
    layers = []
    for name in probes.attention:
        kind, _, layer = name.partition(".")
        if layer != str(counts[kind]):
            raise ValueError(f"attention of layer {layer[:20]!r} of kind {kind!r}")
        layers.append((kind, counts[kind]))
        counts[kind] += 1
    return layers
