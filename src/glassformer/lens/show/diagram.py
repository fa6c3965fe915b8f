"""A picture of a model, drawn from its spec: from tokens to probabilities, as SVG.

The residual stream is a vertical line; sublayers branch off it and are added back. An encoder
stands beside its decoder, or above it in the narrow layout. Equal blocks are drawn once.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from glassformer.lens.show.block_picture import INSIDE, TALL, inside_of, sheet
from glassformer.lens.show.element import Element, down_tip, path, rect, short, text
from glassformer.lens.show.outline import Column, Layer, Part, counted, format_count, outline
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec

Layout = Literal["wide", "narrow"]

# --- the stack ------------------------------------------------------------------------------------

WIDTH = 362  # of a column
_STREAM, _BRANCH, _RIGHT = 36, 66, 332  # x of the stream, of branched boxes, of their right edge
_GAP = 16  # between a box and the next
_LOW = 28  # height of a norm's box


class _Pen:
    """Draws one column from top to bottom; `flip` puts the stream on the right side."""

    def __init__(self, x: float, y: float, *, flip: bool, chosen: str | None) -> None:
        self.left, self.y, self.flip, self.chosen = x, y, flip, chosen
        self.drawn: list[Element] = []
        self.lines: list[Element] = []  # under everything else
        self.edges: dict[str, tuple[float, float]] = {}  # y of top and bottom, by key

    def x(self, offset: float) -> float:
        """Return the x of an offset from the side of the stream."""
        return self.left + (WIDTH - offset if self.flip else offset)

    def stream(self, length: float, *, tip: bool = False) -> None:
        """Continue the residual stream downwards."""
        x = self.x(_STREAM)
        self.lines.append(path(f"M{x:g} {self.y:g}v{length:g}", "stream"))
        if tip:
            self.drawn.append(down_tip(x, self.y + length, "stream"))
        self.y += length

    def box(self, part: Part, *, branched: bool) -> None:
        """Draw a part, on the stream or beside it."""
        first, last = sorted((self.x(_BRANCH if branched else 20), self.x(_RIGHT)))
        tall = _LOW if part.kind == "norm" else TALL
        if not branched and part.kind == "norm":
            self.lines.append(
                path(f"M{self.x(_STREAM):g} {self.y:g}v{tall:g}", "stream")
            )  # through it
        y = self.y
        right = format_count(part.count)
        if part.tied:
            right = f"tied + {right}" if part.count else f"= {part.tied}"
        inset = 26 if not branched and not self.flip else 12
        end = 26 if not branched and self.flip else 12
        inside = [
            rect(first, y, last - first, tall, "paper"),
            rect(first, y, last - first, tall, "box"),
            text(first + inset, y + (18 if tall == _LOW else 19), part.title, kind="name"),
            text(last - end, y + 18, right, kind="number", anchor="end"),
        ]
        if part.kind != "norm":
            note = short(part.note, last - first - inset - end)
            inside.append(text(first + inset, y + 36, note))
        self.drawn.append(_group(part, inside, chosen=self.chosen))
        self.edges[part.key] = (y, y + tall)
        self.y += tall

    def add(self) -> None:
        """Draw the sum that brings a branch back into the stream."""
        x, y = self.x(_STREAM), self.y
        self.drawn.append(
            Element("circle", {"cx": f"{x:g}", "cy": f"{y:g}", "r": "8", "class": "sum"})
        )
        self.drawn.append(path(f"M{x - 4:g} {y:g}h8M{x:g} {y - 4:g}v8", "plus"))

    def sublayer(self, parts: Sequence[Part]) -> None:
        """Branch off the stream, through these parts, and back by a sum."""
        x, turn = self.x(_STREAM), self.x(_BRANCH + 22)
        top = self.y
        reach = 9 if turn > x else -9
        self.lines.append(
            path(f"M{x:g} {top:g}H{turn - reach:g}q{reach} 0 {reach} 9V{top + _GAP:g}")
        )
        self.drawn.append(down_tip(turn, top + _GAP))
        self.y += _GAP
        for number, part in enumerate(parts):
            if number:
                self.lines.append(path(f"M{turn:g} {self.y:g}v{_GAP - 4:g}"))
                self.drawn.append(down_tip(turn, self.y + _GAP - 4))
                self.y += _GAP - 4
            self.box(part, branched=True)
        bottom = self.y
        self.y += _GAP + 2
        back = x + (14 if turn > x else -14)
        side = -6 if turn > x else 6
        self.lines.append(
            path(
                f"M{turn:g} {bottom:g}V{self.y - 9:g}q0 9 {-reach} 9H{back:g}",
            )
        )
        self.drawn.append(path(f"M{back - side:g} {self.y - 4:g}v8l{side * 1.0:g} -4z", "tip"))
        x_end = self.y
        self.lines.append(path(f"M{x:g} {top:g}V{x_end:g}", "stream"))
        self.add()

    def layer(self, layer: Layer) -> None:
        """Draw a block in its frame."""
        top = self.y
        self.stream(34)
        for branch in layer.branches:
            self.sublayer([part for part in branch if not part.on_stream])
            self.stream(_GAP)
            for part in (part for part in branch if part.on_stream):
                self.box(part, branched=False)
                self.stream(_GAP - 4)
        bottom = self.y
        first_x, last_x = sorted((self.x(6), self.x(WIDTH - 18)))
        width = last_x - first_x
        shift = [] if layer.count == 1 else [6, 3]
        for more in shift:  # the blocks behind
            self.lines.insert(0, rect(first_x + more, top - more, width, bottom - top, "back"))
        self.lines.insert(len(shift), rect(first_x, top, width, bottom - top, "paper"))
        self.lines.insert(len(shift) + 1, rect(first_x, top, width, bottom - top, "frame"))
        name = f"Block {layer.first}" if layer.count == 1 else f"Block  × {layer.count}"
        if layer.together:
            name += ", both parts read its input"
        inset = 24 if self.flip else 58
        self.drawn.append(text(first_x + inset - 10, top + 19, name, kind="name"))
        each = "" if layer.count == 1 else " each"
        note = f"{format_count(layer.parameters)}{each}"
        end = last_x - (44 if self.flip else 14)
        self.drawn.append(text(end, top + 19, note, kind="number", anchor="end"))
        if layer.count > 1:
            last = layer.first + layer.count - 1
            middle = first_x + inset - 10 + 7.6 * len(name) + 6
            self.drawn.append(text(middle, top + 19, f"layers {layer.first} to {last}"))


def _group(part: Part, inside: list[Element], *, chosen: str | None) -> Element:
    """Join what is drawn of a part; it is a button unless `chosen` is None."""
    words = f"{part.title}: {part.note}; {counted(part.count, 'parameter')}"
    if part.tied:
        words += f", the weights of {part.tied} again"
    props = {"class": f"part {part.kind}", "data-part": part.key}
    if chosen is not None:
        pressed = "true" if part.key == chosen else "false"
        props |= {"role": "button", "tabindex": "0", "aria-label": words, "aria-pressed": pressed}
        props |= {"id": f"part-{part.key}", "data-go": json.dumps({"part": part.key})}
        return Element("g", props, tuple(inside))
    return Element("g", props, (Element("title", {}, (words,)), *inside))


def _column(pen: _Pen, column: Column, model: ModelSpec) -> None:
    """Draw a stack: its tokens, what comes before the layers, the layers, what follows."""
    source = column.prefix == "encoder."
    vocab = model.source_vocab if source else model.vocab_size
    length = "S" if source else "T"
    title = "Source tokens" if source else "Tokens"
    _tokens(pen, title, f"{length} ids out of a vocabulary of {vocab:,}")
    pen.stream(_GAP, tip=True)
    embed, *placed = column.before
    pen.box(embed, branched=False)
    for part in placed:
        if part.kind == "norm":
            pen.stream(_GAP)
            pen.box(part, branched=False)
        else:
            pen.stream(_GAP - 6)
            _added(pen, part)
    pen.stream(_GAP)
    _shape(pen, f"residual stream: {length} × {model.d_model}")
    for number, layer in enumerate(column.layers):
        if number:
            pen.stream(_GAP)
        pen.layer(layer)
    for part in column.after:
        if part.kind == "head":
            continue
        pen.stream(_GAP)
        pen.box(part, branched=False)
    if source:
        pen.stream(_GAP)
        _shape(pen, f"encoder output: S × {model.d_model}")
        return
    heads = [part for part in column.after if part.kind == "head"]
    for part in heads:
        if len(heads) == 1:
            pen.stream(_GAP, tip=True)
            pen.box(part, branched=False)
            pen.stream(_GAP, tip=True)
        else:
            pen.stream(_GAP - 6)
            _read(pen, part, last=part is heads[-1])
    if len(heads) > 1:
        pen.y += 10
    _probabilities(pen, ", ".join(_sizes(model)))


def _sizes(model: ModelSpec) -> Iterator[str]:
    for head, name in zip(model.heads, model.head_names(), strict=True):
        size = f"{model.head_size(name):,}"
        yield f"1 × {size}" if head.readout is not None else f"T × {size}"


def _tokens(pen: _Pen, title: str, note: str) -> None:
    """Draw a row of tokens, the first of them above the stream."""
    for number in range(5):
        x = pen.x(_STREAM) + (-1 if pen.flip else 1) * 27 * number
        pen.drawn.append(
            Element(
                "g",
                {"class": "embed"},
                (rect(x - 11, pen.y, 22, 20, "box" if number < 4 else "faint", round_=4),),
            )
        )
    end = pen.x(_STREAM + 27 * 4 + 20)
    anchor = "end" if pen.flip else "start"
    pen.drawn.append(text(end, pen.y + 9, title, kind="name", anchor=anchor))
    pen.drawn.append(text(end, pen.y + 23, note, anchor=anchor))
    pen.y += 22


def _added(pen: _Pen, part: Part) -> None:
    """Draw positions: a box beside the stream; its rows are added, unless they are for scores."""
    x, top = pen.x(_STREAM), pen.y
    middle = top + TALL / 2
    pen.box(part, branched=True)
    pen.lines.append(path(f"M{x:g} {top:g}V{pen.y:g}", "stream"))
    if not part.on_stream:
        return
    near, far = pen.x(_STREAM + 14), pen.x(_BRANCH)
    pen.lines.append(path(f"M{far:g} {middle:g}H{near:g}"))
    bottom, pen.y = pen.y, middle
    pen.add()
    pen.y = bottom


def _read(pen: _Pen, part: Part, *, last: bool) -> None:
    """Draw one of several heads: a box beside the stream that reads it."""
    x, top, level = pen.x(_STREAM), pen.y, pen.y + TALL / 2
    pen.lines.append(path(f"M{x:g} {top:g}V{level:g}", "stream"))
    pen.box(part, branched=True)
    edge = pen.x(_BRANCH)
    back = -6 if edge > x else 6
    pen.lines.append(path(f"M{x:g} {level:g}H{edge + back:g}"))
    pen.drawn.append(path(f"M{edge + back:g} {level - 4:g}v8l{-back:g} -4z", "tip"))
    if not last:
        pen.lines.append(path(f"M{x:g} {level:g}V{pen.y:g}", "stream"))


def _shape(pen: _Pen, words: str) -> None:
    """Write the shape of what flows beside the stream."""
    anchor = "end" if pen.flip else "start"
    pen.drawn.append(text(pen.x(_STREAM + 12), pen.y + 3, words, anchor=anchor))
    pen.stream(_GAP)


def _probabilities(pen: _Pen, note: str) -> None:
    """Draw bars for a distribution over the vocabulary."""
    for number, share in enumerate((0.12, 0.3, 1.0, 0.2, 0.42, 0.08, 0.16, 0.05)):
        x = pen.x(_STREAM) + (-1 if pen.flip else 1) * 14 * number - 4
        tall = 4 + 20 * share
        bar = rect(x, pen.y + 28 - tall, 9, tall, "solid", round_=2)
        pen.drawn.append(Element("g", {"class": "head"}, (bar,)))
    end = pen.x(_STREAM + 14 * 8 + 12)
    anchor = "end" if pen.flip else "start"
    pen.drawn.append(text(end, pen.y + 13, "Softmax: probabilities", kind="name", anchor=anchor))
    pen.drawn.append(text(end, pen.y + 28, note, anchor=anchor))
    pen.y += 30


# --- what joins the columns -----------------------------------------------------------------------


def _tie(pen: _Pen, first: str, second: str) -> Element:
    """Join two boxes of a column that share their weights, along its outer edge."""
    ends = [sum(pen.edges[key]) / 2 for key in (first, second)]
    inner = pen.x(_RIGHT) if not pen.flip else pen.x(20)
    outer = pen.x(WIDTH - 6) if not pen.flip else pen.x(2)
    return path(f"M{inner:g} {ends[0]:g}H{outer:g}V{ends[1]:g}H{inner:g}", "tie")


def _memory(
    encoder: _Pen, start: float, decoder: _Pen, keys: Sequence[str], lane: float
) -> Iterator[Element]:
    """Yield the lines from the encoder's output to every cross-attention."""
    beside = decoder.x(_RIGHT)  # the edge away from the stream
    inward = -6 if lane > beside else 6
    levels = [sum(decoder.edges[key]) / 2 for key in keys]
    yield path(f"M{encoder.x(_STREAM):g} {start:g}H{lane:g}V{levels[-1]:g}", "wire cross")
    if levels[0] < start:
        yield path(f"M{lane:g} {start:g}V{levels[0]:g}", "wire cross")
    for level in levels:
        yield path(f"M{lane:g} {level:g}H{beside - inward:g}", "wire cross")
        yield path(f"M{beside - inward:g} {level - 4:g}v8l{inward:g} -4z", "tip cross")


# --- the picture ----------------------------------------------------------------------------------


class HasSpec(Protocol):
    """A model, a loaded model, or anything else that knows its spec."""

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model."""


@dataclass(frozen=True)
class Diagram:
    """A picture of a model. A notebook shows it; `save` writes an SVG file; `print` lists it.

    `layout` "wide" (about 870 pixels) has the insides of a block beside the stack; "narrow" (384
    pixels) is the stack alone, as is a picture without `insides`. Equal blocks are drawn once
    unless `every_block`. With a part `chosen`, or "", parts are buttons for the explorer's page.
    """

    spec: ModelSpec
    layout: Layout = "wide"
    every_block: bool = False
    title: str = ""
    insides: bool = True
    chosen: str | None = None

    def __post_init__(self) -> None:
        one_of("layout", self.layout, get_args(Layout))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The parts that are drawn."""
        return outline(self.spec, every_block=self.every_block)

    def svg(self) -> str:
        """Return the picture as SVG text, complete in itself."""
        return self.element(style=True).svg()

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> Path:
        """Write an SVG file."""
        target = Path(path)
        if target.suffix.lower() != ".svg":
            raise InputError(
                f"cannot save a diagram as '{target.suffix}'", hint=f"{target.stem or 'model'}.svg"
            )
        try:
            target.write_text(self.svg() + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", where=str(path)) from error
        return target

    def element(self, *, style: bool = False) -> Element:
        """Return the picture as a tree; `style`: with its own style sheet inside."""
        drawn, width, height = self._drawn()
        label = self.title or self._heading()[0]
        role = "img" if self.chosen is None else "group"
        box = 0.0, 0.0, width, height
        words = f"diagram of the model: {label}"
        return sheet(drawn, box, label=words, style=style, paper=True, role=role)

    def _heading(self) -> tuple[str, str]:
        spec = self.spec
        total = count_parameters(spec)
        stacks = [counted(stack.n_layers, "layer") for stack in spec.stacks().values()]
        layers = stacks[0] if len(stacks) == 1 else f"{stacks[0]} + {stacks[1]}"
        facts = f"{layers}, d_model {spec.d_model}, up to {spec.max_seq_len:,} tokens"
        return f"{total:,} parameters", facts

    def _lines(self) -> Iterator[str]:
        first, second = self._heading()
        yield f"{self.title or 'model'}: {first}, {second}"
        for column in self.columns:
            indent = 2
            if column.prefix:
                yield f"  {column.prefix.removesuffix('.')}"
                indent = 4
            for part in column.before:
                yield _line(part, indent)
            for layer in column.layers:
                name = f"block {layer.first}"
                if layer.count > 1:
                    name = f"blocks {layer.first} to {layer.first + layer.count - 1}, each"
                yield f"{' ' * indent}{name:<{30 - indent}}{layer.parameters:>14,}"
                yield from (_line(part, indent + 2) for part in layer.parts)
            yield from (_line(part, indent) for part in column.after)

    def _drawn(self) -> tuple[list[Element], float, float]:
        columns, two = self.columns, self.spec.encoder is not None
        pad, top = 8.0 if self.layout == "narrow" else 16.0, 62.0
        first, second = self._heading()
        heading = [
            text(pad + 6, 28, f"{self.title}: {first}" if self.title else first, kind="big"),
            text(pad + 6, 47, second),
        ]
        if self.layout == "narrow" or not (two or self.insides):
            drawn, bottom = self._narrow(columns, pad, top)
            return [*heading, *drawn], WIDTH + 2 * pad, bottom + pad
        if two:
            drawn, bottom = self._two(columns, pad, top)
            width = 2 * WIDTH + 60 + 2 * pad - 10
            left, start = pad + 6, bottom + 30
        else:
            drawn, bottom = self._narrow(columns, pad, top)
            width = WIDTH + 46 + INSIDE + 2 * pad
            left, start = pad + WIDTH + 34, top
        panels: list[tuple[Element, float]] = []
        if self.insides:  # of the first block
            parts = {part.kind: part for part in columns[-1].layers[0].parts}
            panels = [inside_of(parts["attn"]), inside_of(parts["ffn"])]
        for panel, tall in panels:
            move = {"transform": f"translate({left:g} {start:g})"}
            drawn.append(Element("g", move, (panel,)))
            if two:
                left += INSIDE + 34
                bottom = max(bottom, start + tall)
            else:
                start += tall + 34
        if not two:
            bottom = max(bottom, start - 34)
        if two and panels:
            width = max(width, left - 34 + pad)
        return [*heading, *drawn], width, bottom + pad

    def _narrow(self, columns: Sequence[Column], x: float, y: float) -> tuple[list[Element], float]:
        """Draw the stacks one under the other."""
        under: list[Element] = []
        over: list[Element] = []
        source: tuple[_Pen, float] | None = None
        for column in columns:
            pen = _Pen(x, y, flip=False, chosen=self.chosen)
            _column(pen, column, self.spec)
            if source is not None:
                lane = pen.x(WIDTH - 12)
                over += _memory(source[0], source[1], pen, _crossings(column), lane)
            over += self._ties(pen, column)
            under += pen.lines
            over += pen.drawn
            if column.prefix == "encoder.":
                source = (pen, pen.y)
            y = pen.y + 40
        return [*under, *over], y - 40

    def _two(self, columns: Sequence[Column], x: float, y: float) -> tuple[list[Element], float]:
        """Draw encoder and decoder side by side, the decoder's stream on the far side."""
        left = _Pen(x, y, flip=False, chosen=self.chosen)
        right = _Pen(x + WIDTH + 60, y, flip=True, chosen=self.chosen)
        for pen, column in zip((left, right), columns, strict=True):
            _column(pen, column, self.spec)
        lane = x + WIDTH + 30
        lines = [*_memory(left, left.y, right, _crossings(columns[1]), lane)]
        lines += self._ties(right, columns[1])
        bottom = max(left.y, right.y)
        return [*left.lines, *right.lines, *lines, *left.drawn, *right.drawn], bottom

    def _ties(self, pen: _Pen, column: Column) -> list[Element]:
        embed = column.before[0].key
        return [_tie(pen, embed, part.key) for part in column.after if part.tied]


def _line(part: Part, indent: int) -> str:
    tied = f" (the weights of {part.tied})" if part.tied else ""
    return f"{' ' * indent}{part.title:<{30 - indent}}{part.count:>14,}  {part.note}{tied}"


def _crossings(column: Column) -> list[str]:
    return [part.key for part in column.parts() if part.kind == "cross"]


def diagram(
    model: ModelSpec | HasSpec,
    *,
    layout: Layout = "wide",
    every_block: bool = False,
    title: str = "",
) -> Diagram:
    """Return a picture of a model, or of a spec: from tokens to probabilities.

    A notebook shows it; `.save("model.svg")` writes a file; `print` lists the same parts.
    """
    spec = model if isinstance(model, ModelSpec) else getattr(model, "spec", None)
    if not isinstance(spec, ModelSpec):
        raise InputError(
            f"{type(model).__name__} has no spec to draw",
            hint='give a ModelSpec or a model: gf.diagram(gf.load("runs/digits"))',
        )
    return Diagram(spec, layout=layout, every_block=every_block, title=title)
