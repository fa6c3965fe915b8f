"""Names of attention heads: `L1H3` in the decoder, `encoder.L0H2`, `cross.L1H0`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import Attention, ModelSpec

#: What a head attends to: the decoder's own sequence, the encoder's within the encoder, or the
#: encoder's output from the decoder.
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
        """Parse `L1H3` (self-attention), `encoder.L0H2` or `cross.L1H0`."""
        if isinstance(text, HeadName):
            return text
        found = _NAME.fullmatch(str(text).strip())
        if found is None:
            raise InputError(
                f"'{str(text)[:60]}' is not the name of a head",
                hint="write L1H3, encoder.L0H2 or cross.L1H0",
            )
        return cls(kind_of(found[1] or "self"), int(found[2]), int(found[3]))

    def __str__(self) -> str:
        at = "" if self.kind == "self" else f"{self.kind}."
        return f"{at}L{self.layer}H{self.head}"

    def check(self, spec: ModelSpec) -> "HeadName":
        """Return self if this model has such a head; raise InputError otherwise."""
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
        """Return the tap of this head's attention: `blocks.1.attn.heads`."""
        return f"{prefix_of(spec, self.kind)}blocks.{self.layer}.{part_of(self.kind)}.{leaf}"


def kind_of(text: str) -> Kind:
    """Return a checked kind of attention, in any case of letters."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if kind == text.lower():
            return kind
    raise InputError(f"no heads of kind '{text[:40]}'", hint=nearest(text, kinds))


def kinds_of(spec: ModelSpec) -> tuple[Kind, ...]:
    """Return the kinds of attention that a model has, in the order of the computation."""
    return ("self",) if spec.encoder is None else ("encoder", "self", "cross")


def attentions(spec: ModelSpec, kind: str) -> tuple[Attention, ...]:
    """Return the spec of each layer's attention of one kind."""
    if kind not in kinds_of(spec):
        raise InputError(
            f"this model has no attention of kind '{kind}'", hint=nearest(kind, kinds_of(spec))
        )
    stack = spec.encoder if kind == "encoder" else spec.decoder
    assert stack is not None
    layers = [block.cross if kind == "cross" else block.attention for block in stack.blocks()]
    return tuple(attention for attention in layers if attention is not None)


def prefix_of(spec: ModelSpec, kind: str) -> str:
    """Return the prefix of the names of taps of this kind."""
    if spec.encoder is None:
        return ""
    return "encoder." if kind == "encoder" else "decoder."


def part_of(kind: str) -> str:
    """Return the part of a block that holds this kind: `attn` or `cross`."""
    return "cross" if kind == "cross" else "attn"


def heads_of(spec: ModelSpec) -> list[HeadName]:
    """Return every head of a model, in the order of the computation."""
    return [
        HeadName(kind, layer, head)
        for kind in kinds_of(spec)
        for layer, attention in enumerate(attentions(spec, kind))
        for head in range(attention.n_heads)
    ]


def checked_heads(spec: ModelSpec, names: "Iterable[str | HeadName]") -> tuple[HeadName, ...]:
    """Parse names of heads and check that the model has them; each once, in the order given."""
    if isinstance(names, (str, HeadName)):
        names = (names,)
    return tuple(dict.fromkeys(HeadName.parse(name).check(spec) for name in names))
