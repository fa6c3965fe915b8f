"""`Probes`: what a model did with a few fixed examples at one step of its training, in one file.

A safetensors file, so that other tools open it; words and names are its metadata. Attention is kept
as bytes: 0 to 254 are weights in equal steps, 255 is a cell that may not be attended to.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.lens.measure.head_names import HeadName
from glassformer.lens.show import html
from glassformer.lens.show.attention_map import Heat
from glassformer.lens.show.displayable import Face, Row
from glassformer.lens.show.token_text import Names, shown
from glassformer.spec.errors import FileError, InputError
from glassformer.store.tensors import read_metadata, read_tensors, tensor_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# B examples, N heads, T queries, S keys, R rows of the residual, K likeliest answers

FORMAT = "glassformer probes 1"
#: The byte of a weight of 1, and of a cell that is masked.
FULL, MASKED = 254, 255
#: Letters kept of a word, and how many different answers of the lens are named in a file.
LETTERS, NAMED = 24, 512
#: Bytes of one file that will be read: many times what the largest model leaves.
LIMIT = 1 << 28
#: What a file that lies can lead to before it is known to lie.
FAULTS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, eq=False, repr=False)
class Probes(Face):
    """`heat(example, "L1H3")`, `top(example, row, position)`, `norms_BRT`, `losses_BT` of one step.

    `examples` are rows of the validation split. `whole` is False for an example that was cut.
    `counted_BT` says where a loss was asked for; elsewhere it is 0.
    """

    step: int
    head: str
    examples: tuple[int, ...]
    whole: tuple[bool, ...]
    words: tuple[tuple[str, ...], ...]
    source_words: tuple[tuple[str, ...], ...] | None
    attention: Mapping[str, NDArray[np.uint8]]  # "self.0": (B, N, T, S)
    row_names: tuple[str, ...]
    norms_BRT: NDArray[np.float32]
    lens_ids: NDArray[np.int32]  # (B, R + 1, T, K); the last row is the model's own answer
    lens_shares: NDArray[np.float16]
    names: Mapping[int, str]
    losses_BT: NDArray[np.float32]
    counted_BT: NDArray[np.bool_]

    @property
    def title(self) -> str:  # type: ignore[override]
        """With the step that they were seen at."""
        return f"probes at step {self.step}"

    @property
    def tensor(self) -> Tensor:
        """The norms of the residual (B, R, T); 0 beyond an example's end."""
        return torch.from_numpy(np.array(self.norms_BRT))

    @property
    def loss(self) -> float | None:
        """The mean over all that was asked for; None where nothing was."""
        asked = self.losses_BT[self.counted_BT]
        return float(asked.mean(dtype=np.float64)) if asked.size else None

    def heads(self) -> list[HeadName]:
        """Every head, in the order of the computation."""
        found = []
        for place, maps in self.attention.items():
            kind, _, layer = place.partition(".")
            found += [HeadName(kind, int(layer), head) for head in range(maps.shape[1])]  # type: ignore[arg-type]
        return found

    def heat(self, example: int, head: str | HeadName) -> Heat:
        """One head's map of one example, in steps of 1/254."""
        name = HeadName.parse(head)
        if name not in self.heads():
            raise InputError(f"no head {name} in these probes", hint="`heads()` lists them")
        rows = self._words(example, of_source=name.kind == "encoder")
        columns = self._words(example, of_source=name.kind != "self")
        bytes_TS = self.attention[f"{name.kind}.{name.layer}"][example, name.head]
        bytes_TS = bytes_TS[: len(rows), : len(columns)]
        allowed_TS = bytes_TS != MASKED
        weights_TS = np.where(allowed_TS, bytes_TS, 0).astype(np.float32) / FULL
        both = torch.from_numpy(weights_TS), torch.from_numpy(allowed_TS)
        return Heat(*both, rows, columns, f"{name} at step {self.step}")

    def mean(self, example: int, layer: int, *, kind: str = "self") -> Heat:
        """The average of a layer's heads."""
        names = [name for name in self.heads() if (name.kind, name.layer) == (kind, layer)]
        every = [self.heat(example, name) for name in names]
        if not every:
            raise InputError(f"no layer {layer} of kind '{kind[:20]}' in these probes")
        mean_TS = torch.stack([each.tensor for each in every]).mean(0)
        return replace(every[0], weights_TS=mean_TS, title=f"L{layer} mean at step {self.step}")

    def _words(self, example: int, *, of_source: bool) -> tuple[str, ...]:
        if not 0 <= example < len(self.words):
            raise InputError(f"no example {example}", hint=f"0 to {len(self.words) - 1}")
        if not of_source:
            return self.words[example]
        assert self.source_words is not None, "only heads of an encoder-decoder read a source"
        return self.source_words[example]

    def top(self, example: int, position: int, *, row: str = "final") -> list[tuple[str, float]]:
        """The likeliest answers of a row of the lens, with their probabilities."""
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
        """A line a token: its loss where one was asked for, the answer, the residual's end."""
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
        """A line an example: its words, its loss, what is answered at its end."""
        mean = "" if self.loss is None else f", loss {self.loss:.4f}"
        lines = [f"{self.title}: {len(self.words)} examples, {len(self.heads())} heads{mean}"]
        for b, words in enumerate(self.words):
            asked = self.losses_BT[b][self.counted_BT[b]]
            loss = f"loss {asked.mean():8.4f}" if asked.size else " " * 13
            answer, share = self.top(b, len(words) - 1)[0]
            said = " ".join(shown(word) for word in words[-12:])
            lines.append(f"  {self.examples[b]:>6}  {loss}  {said} -> {shown(answer)} {share:.3f}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Every head's map of the first example, then the table."""
        yield html.heading(self.title)
        for head in self.heads():
            heat = self.heat(0, head)
            yield html.captioned(heat.svg(side=160), heat.title)
        rows = self.rows()
        yield html.table(list(rows[0]), (row.values() for row in rows), caption=self.title)

    def figure(self) -> "Figure":
        """Every head's map of the first example."""
        from glassformer.lens.show.mpl import heat_figure

        heats = [self.heat(0, head) for head in self.heads()]
        columns = max(maps.shape[1] for maps in self.attention.values())
        return heat_figure(heats, columns=columns, words=False)

    def to_bytes(self) -> bytes:
        """The file; equal probes give equal bytes."""
        arrays: dict[str, NDArray[Any]] = {
            "examples": np.array(self.examples, dtype=np.int64),
            "whole": np.array(self.whole, dtype=np.bool_),
            "norms": self.norms_BRT,
            "lens.ids": self.lens_ids,
            "lens.shares": self.lens_shares,
            "losses": self.losses_BT,
            "counted": self.counted_BT,
            **{f"attention.{place}": maps for place, maps in self.attention.items()},
        }
        said = {
            "format": FORMAT,
            "step": self.step,
            "head": self.head,
            "rows": self.row_names,
            "words": self.words,
            "source_words": self.source_words,
            "names": self.names,
        }
        return tensor_bytes(arrays, metadata={"probes": json.dumps(said, ensure_ascii=False)})


def named(ids: NDArray[np.int32], names: Names) -> dict[int, str]:
    """Words of the ids that occur most, as many as a file names; the smaller id first."""
    counts = Counter(ids.flatten().tolist())
    often = sorted(counts, key=lambda i: (-counts[i], i))[:NAMED]
    return {i: names(i)[:LETTERS] for i in sorted(often)}


def read_probes(path: str | Path) -> Probes:
    """The probes of one file, `runs/digits/probes/step-000200.safetensors`."""
    file = Path(path)
    if not file.is_file():
        raise InputError("no such file of probes", where=str(path))
    if (size := file.stat().st_size) > LIMIT:
        raise FileError(f"a file of probes of {size:,} bytes", where=file.name)
    try:
        said = json.loads(read_metadata(file).get("probes", "{}"))
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise FileError("this tensor file holds no probes", where=file.name)
        found = _probes(said, read_tensors(file))
        _check(found)
    except FAULTS as error:
        raise FileError(f"a damaged file of probes: {error}", where=file.name) from error
    return found


def _probes(said: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Probes:
    def words(name: str) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(str(word) for word in row) for row in said[name])

    maps = {
        n.removeprefix("attention."): a for n, a in arrays.items() if n.startswith("attention.")
    }
    order = ("encoder", "self", "cross")
    places = sorted(maps, key=lambda p: (order.index(p.split(".")[0]), int(p.split(".")[1])))
    return Probes(
        step=int(said["step"]),
        head=str(said["head"]),
        examples=tuple(arrays["examples"].tolist()),
        whole=tuple(arrays["whole"].tolist()),
        words=words("words"),
        source_words=None if said["source_words"] is None else words("source_words"),
        attention={place: maps[place] for place in places},
        row_names=tuple(map(str, said["rows"])),
        norms_BRT=arrays["norms"],
        lens_ids=arrays["lens.ids"],
        lens_shares=arrays["lens.shares"],
        names={int(i): str(word) for i, word in said["names"].items()},
        losses_BT=arrays["losses"],
        counted_BT=arrays["counted"],
    )


def _check(found: Probes) -> None:
    """Shapes that belong together: a file from elsewhere may hold anything."""
    B, T = found.losses_BT.shape
    R = len(found.row_names)
    sides = {"self": (T, T)}
    if found.source_words is not None:
        longest = max(map(len, found.source_words))
        sides |= {"encoder": (longest, longest), "cross": (T, longest)}
    fits = (
        len(found.words) == len(found.examples) == len(found.whole) == B
        and max(map(len, found.words)) <= T
        and min(map(len, found.words)) > 0
        and all(type(row) is int and row >= 0 for row in found.examples)
        and 0 <= found.step < 1 << 62
        and _is(found.counted_BT, np.bool_, (B, T))
        and _is(found.losses_BT, np.float32, (B, T))
        and _is(found.norms_BRT, np.float32, (B, R, T))
        and _is(found.lens_ids, np.int32, (B, R + 1, T, found.lens_ids.shape[-1]))
        and _is(found.lens_shares, np.float16, found.lens_ids.shape)
        and R > 0
        and found.lens_ids.shape[-1] > 0
        and (found.source_words is None or len(found.source_words) == B)
        and all(
            _is(maps, np.uint8, (B, maps.shape[1], *sides[kind])) and maps.shape[1] > 0
            for (kind, _), maps in zip(_places(found), found.attention.values(), strict=True)
        )
    )
    if not fits or not found.attention:
        raise ValueError("its tensors do not fit each other")


def _is(array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> bool:
    return array.dtype == dtype and array.shape == shape


def _places(found: Probes) -> list[tuple[str, int]]:
    """Kind and layer of each map; the layers of a kind are numbered from 0, in order."""
    counts: Counter[str] = Counter()
    places = []
    for place in found.attention:
        kind, _, layer = place.partition(".")
        if layer != str(counts[kind]):
            raise ValueError(f"attention of layer {layer[:20]!r} of kind {kind!r}")
        places.append((kind, counts[kind]))
        counts[kind] += 1
    return places
