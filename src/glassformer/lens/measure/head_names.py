"""Names of attention heads: `L1H3` in the stack that answers, `encoder.L0H2`, `cross.L1H0`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import Attention, ModelSpec

#: Where a head reads: its own sequence, the encoder's within the encoder, the source from outside.
Kind = Literal["self", "encoder", "cross"]
_NAME = re.compile(r"(?:(\w+)\.)?L(\d{1,4})H(\d{1,4})", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class HeadName:
    """One head of one layer; `str()` and `parse` are inverses."""

    kind: Kind
    layer: int
    head: int

    @classmethod
    def parse(cls, text: "str | HeadName") -> "HeadName":
        """`L1H3` is a head of self-attention; `encoder.` and `cross.` before it say otherwise."""
        if isinstance(text, HeadName):
            return text
        found = _NAME.fullmatch(str(text).strip())
        if found is None:
            raise InputError(
                f"'{str(text)[:60]}' is no head", hint="write L1H3, encoder.L0H2 or cross.L1H0"
            )
        kind = (found[1] or "self").lower()
        if kind not in get_args(Kind):
            raise InputError(f"no heads of kind '{kind}'", hint=nearest(kind, get_args(Kind)))
        return cls(kind, int(found[2]), int(found[3]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        at = "" if self.kind == "self" else f"{self.kind}."
        return f"{at}L{self.layer}H{self.head}"

    def check(self, spec: ModelSpec) -> "HeadName":
        """Itself, if this model has such a head."""
        layers = attentions(spec, self.kind)
        if self.layer >= len(layers):
            raise InputError(
                f"no head {self}: there are {len(layers)} layers",
                hint=f"layers run from 0 to {len(layers) - 1}",
            )
        count = layers[self.layer].n_heads
        if self.head >= count:
            raise InputError(
                f"no head {self}: layer {self.layer} has {count} heads",
                hint=f"heads run from 0 to {count - 1}",
            )
        return self

    def tap(self, spec: ModelSpec, leaf: str = "heads") -> str:
        """The tap of this head's attention: `blocks.1.attn.heads`."""
        return f"{prefix_of(spec, self.kind)}blocks.{self.layer}.{part_of(self.kind)}.{leaf}"


def kinds_of(spec: ModelSpec) -> tuple[Kind, ...]:
    """The kinds of attention that a model has, in the order of the computation."""
    return ("self",) if spec.encoder is None else ("encoder", "self", "cross")


def attentions(spec: ModelSpec, kind: str) -> tuple[Attention, ...]:
    """The attention of each layer, of one kind."""
    if kind not in kinds_of(spec):
        raise InputError(
            f"this model has no attention of kind '{kind}'", hint=nearest(kind, kinds_of(spec))
        )
    stack = spec.encoder if kind == "encoder" else spec.decoder
    assert stack is not None
    found = [block.cross if kind == "cross" else block.attention for block in stack.blocks()]
    return tuple(each for each in found if each is not None)


def prefix_of(spec: ModelSpec, kind: str) -> str:
    """What the names of taps of this kind begin with."""
    if spec.encoder is None:
        return ""
    return "encoder." if kind == "encoder" else "decoder."


def part_of(kind: str) -> str:
    """`attn` or `cross`: the part of a block that holds this kind."""
    return "cross" if kind == "cross" else "attn"


def heads_of(spec: ModelSpec) -> list[HeadName]:
    """Every head of a model, in the order of the computation."""
    return [
        HeadName(kind, layer, head)
        for kind in kinds_of(spec)
        for layer, attention in enumerate(attentions(spec, kind))
        for head in range(attention.n_heads)
    ]


def checked_heads(spec: ModelSpec, names: "Iterable[str | HeadName]") -> tuple[HeadName, ...]:
    """Parsed, known to the model, each once, in the order given."""
    if isinstance(names, (str, HeadName)):
        names = (names,)
    return tuple(dict.fromkeys(HeadName.parse(name).check(spec) for name in names))
