"""The look that `glass inspect` shows: which head, what is silenced, beside which other model."""

from dataclasses import dataclass, replace
from typing import Any

from glassformer.lens.ablation import Ablation, Ranking
from glassformer.lens.attention import Heat
from glassformer.lens.beside import Beside
from glassformer.lens.difference import Difference
from glassformer.lens.headname import HeadName, heads_of
from glassformer.lens.look import Look
from glassformer.spec.errors import InputError
from glassformer.spec.quantity import plain_digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The options, as they were typed."""

    layer: int | None = None
    head: str | None = None
    kind: str | None = None
    position: int | None = None
    top: int = 5
    ablate: tuple[str, ...] = ()
    target: str | None = None
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Against:
    """Another model at the same text: the chosen map less its own, and what it says."""

    name: str
    difference: Difference
    beside: Beside


@dataclass(frozen=True, slots=True)
class Seen:
    """One look, and what was chosen to show of it."""

    look: Look
    heat: Heat
    why: str
    ranking: Ranking | None  # None where every head is silent
    ablation: Ablation | None
    position: int
    top: int
    against: Against | None = None


def inspect(adapter: Any, text: str, asked: Asked, *, other: Any = None) -> Seen:
    """The pass, a second one where heads are to be silent, and that of another model."""
    names = [_head_of(adapter.spec, name) for name in asked.ablate]
    _chosen(adapter.spec, asked)  # refused before the work is done
    look: Look = adapter.inspect(text, target=asked.target)
    ablation = look.ablate(*names) if names else None
    shown_look = look if ablation is None else ablation.after
    position = shown_look.lens.position(asked.position)
    shown_look.next(position, asked.top)  # refuses a number that is not kept
    left = set(heads_of(adapter.spec)) - {*shown_look.ablated}
    ranking = shown_look.ranking() if left else None
    heat, why = _heat(shown_look, asked, ranking)
    found = Seen(shown_look, heat, why, ranking, ablation, position, asked.top)
    if other is None:
        return found
    there: Look = other.inspect(text, target=asked.target)
    place, name = _chosen(adapter.spec, asked) or HeadName.parse(heat.title), asked.against or ""
    difference = replace(heat - _map(there, place), title=f"{heat.title} less {name}'s")
    said = shown_look.beside(there, position, asked.top)
    return replace(found, against=Against(name, difference, said))


def _map(look: Look, place: HeadName | tuple[str, int]) -> Heat:
    """Of a head, or the mean of a layer's."""
    if isinstance(place, HeadName):
        _head_of(look.model.spec, str(place))
        return look.attention.of(place.kind)[place.layer, place.head]
    return look.attention.of(place[0]).mean(place[1])


# --- which head -----------------------------------------------------------------------------------


def _head_of(spec: Any, text: str) -> HeadName:
    """A head that this model has."""
    name = HeadName.parse(text)
    known = heads_of(spec)
    if name not in known:
        same = [head for head in known if head.kind == name.kind] or known
        raise InputError(f"this model has no head {name}", hint=f"{same[0]} to {same[-1]}")
    return name


def _chosen(spec: Any, asked: Asked) -> HeadName | tuple[str, int] | None:
    """The head, or (kind, layer) for a layer's mean, that the options name; None without them."""
    number = plain_digits(asked.head or "")
    if asked.head is not None and number is None and asked.head != "mean":
        name = _head_of(spec, asked.head)
        if asked.layer is not None or asked.kind is not None:
            raise InputError(
                f"--head {asked.head} says the layer and the kind itself",
                hint=f"leave out --layer and --kind, or write --head {name.head}",
            )
        return name
    known = heads_of(spec)
    kinds = list(dict.fromkeys(head.kind for head in known))
    if asked.kind is not None and asked.kind not in kinds:
        raise InputError(
            f"this model has no attention of kind '{asked.kind}'", hint=" or ".join(kinds)
        )
    if asked.layer is None:
        if asked.head is not None:
            raise InputError(
                f"--head {asked.head} of which layer?", hint=f"--layer 0, or --head {known[0]}"
            )
        return None
    kind = asked.kind or "self"
    if number is None:
        _head_of(spec, str(HeadName(kind, asked.layer, 0)))  # type: ignore[arg-type]
        return kind, asked.layer
    return _head_of(spec, str(HeadName(kind, asked.layer, number)))  # type: ignore[arg-type]


def _heat(look: Look, asked: Asked, ranking: Ranking | None) -> tuple[Heat, str]:
    """The map to show, and why that one."""
    place = _chosen(look.model.spec, asked)
    if place is not None:
        one = isinstance(place, HeadName)
        return _map(look, place), "as asked" if one else "the mean of the layer's heads"
    ranked = () if ranking is None else zip(ranking.heads, ranking.effects, strict=True)
    best = next((pair for pair in ranked if asked.kind in (None, pair[0].kind)), None)
    if best is None:  # every head of that kind is silent
        kind = asked.kind or "self"
        return look.attention.of(kind)[0, 0], "the first: every head is silent"
    name, effect = best
    change = (
        f"the answers by KL {effect:.4f}" if look.loss is None else f"the loss by {effect:+.4f}"
    )
    of_kind = "" if asked.kind is None else f" of kind {asked.kind}"
    why = f"of all heads{of_kind} its silence changes most: {change}"
    return _map(look, name), why
