"""The look that `glass inspect` shows: which head, what is silenced, beside which other model.

What `glass inspect` does: one look, the head asked for (or the one that matters), as text.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glassformer.adapters.load import load
from glassformer.cli.shell import terminal
from glassformer.cli.shell.output import target_of, write_file
from glassformer.cli.shell.resolve import find_model
from glassformer.lens.heads import HeadName, heads_of
from glassformer.lens.inspection import Ablation, Comparison, Inspection
from glassformer.lens.measure.ablation import Ranking
from glassformer.lens.show import html
from glassformer.lens.show.ascii import ASCII_SHADES, SHADES, heatmap_text, legend
from glassformer.lens.show.attention_map import AttentionMap, Difference
from glassformer.lens.show.displayable import plain
from glassformer.lens.show.token_text import shown
from glassformer.spec.errors import InputError
from glassformer.spec.units import plain_digits


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
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Seen:
    """One look, and what was chosen to show of it."""

    look: Inspection
    heat: AttentionMap
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
    look: Inspection = adapter.inspect(text, target=asked.target)
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
    there: Inspection = other.inspect(text, target=asked.target)
    place, name = _chosen(adapter.spec, asked) or heat.head, asked.against or ""
    assert place is not None, "a map that no option names is one head's"
    difference = replace(heat - _map(there, place), title=f"{heat.title} minus {name}'s")
    said = shown_look.compare(there, position, asked.top)
    return replace(found, against=Against(name, difference, said))


def _map(look: Inspection, place: HeadName | tuple[str, int]) -> AttentionMap:
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


def _heat(look: Inspection, asked: Asked, ranking: Ranking | None) -> tuple[AttentionMap, str]:
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


ENDINGS = ("png", "svg", "html", "json")
#: Characters of the longest bar; heads in the list; words of a column's name, from wide to narrow.
BAR, RANKED = 30, 8
COLUMN_WIDTHS = (12, 8, 6, 5, 4, 3, 2)


def run(
    model: str,
    text: str,
    asked: Asked,
    *,
    runs: Path,
    output: str | None,
    as_json: bool,
    said: Callable[[str], None],
) -> None:
    """Inspect, then print or write the result."""
    target = target_of(output, ENDINGS)
    adapter = load(find_model(model, runs=runs))
    other = None if asked.against is None else load(find_model(asked.against, runs=runs)).eval()
    seen = inspect(adapter.eval(), text, asked, other=other)
    if target is not None:
        write_file(target, encoded(seen, target.suffix.lower().removeprefix("."), asked))
    if as_json:
        said(json.dumps(record(seen), allow_nan=False))
    elif target is None:
        said(terminal.printable(seen_text(seen)))


# --- how it is said -------------------------------------------------------------------------------


def seen_text(seen: Seen) -> str:
    """Everything for a terminal, each part under its line."""
    return "\n".join(_lines(seen, width=terminal.columns()))


def _lines(seen: Seen, *, width: int) -> Iterator[str]:
    look, unicode = seen.look, terminal.is_unicode()
    shades = SHADES if unicode else ASCII_SHADES
    yield look.summary()
    if look.source_words is not None:
        yield f"source    {' '.join(shown(word) for word in look.source_words)}"
    yield f"tokens    {' '.join(f'{i}:{shown(word)}' for i, word in enumerate(look.words))}"
    if seen.ablation is not None:
        yield ""
        yield seen.ablation.text()
    yield ""
    yield f"attention {seen.heat.title} ({seen.why})"
    yield f"each row shows where that token looks: {legend(shades)}"
    yield _heat_text(seen.heat, shades=shades, width=width)
    if seen.against is not None:
        yield ""
        yield from _against(seen.against, look, seen.position)
    word = shown(look.words[seen.position])
    yield ""
    elsewhere = look.head == "answer" and seen.position != look.readout.position
    note = (
        f"; it answers at {look.readout.position}, here is what it would say" if elsewhere else ""
    )
    yield f"answers at position {seen.position} ({word}{note})"
    yield from _bars(look, seen.position, seen.top, sign="█" if unicode else "#")
    target = look.target(seen.position)
    if target is not None:
        loss = float(look.losses[seen.position])
        yield f"  asked for {shown(target[1])}: loss {loss:.4f}"
    yield ""
    yield f"logit lens at position {seen.position}: what it would say after each half-layer"
    for number, name in enumerate(look.lens.row_names):
        best = look.lens.top(seen.position, 1, row=name)[0]
        apart = float(look.lens.kl[number, seen.position])
        yield f"  {name:<10}{shown(best[0], most=16):>16} {best[1]:7.2%}  KL to the end {apart:.4f}"
    yield ""
    yield f"norms at position {seen.position}"
    yield from _norms(look, seen.position)
    yield ""
    yield from _ranking(seen.ranking)


def _against(against: Against, look: Inspection, position: int) -> Iterator[str]:
    """The difference of the maps, and what the other model says at the position."""
    said, word = against.comparison, shown(against.comparison.top[1])
    yield f"against {against.name}, at position {position}: says {word} {said.top[2]:.2%}"
    loss = "" if said.loss != said.loss else f"loss there {said.loss:.4f}   "
    yield f"  {loss}KL(there || here) {said.kl:.4f}"
    yield against.difference.text()


def _heat_text(heat: AttentionMap, *, shades: str, width: int) -> str:
    """The map with names as long as the line allows; its strongest cells where none does."""
    rows = [shown(word, most=12) for word in heat.rows_words]
    for most in COLUMN_WIDTHS:
        columns = [shown(word, most=most) for word in heat.columns_words]
        picture_text = heatmap_text(heat.tensor, rows=rows, columns=columns, shades=shades)
        if max(map(len, picture_text.split("\n"))) <= width:
            return picture_text
    lines = [
        f"  {weight:6.3f}  {t}:{shown(heat.rows_words[t])} -> {s}:{shown(heat.columns_words[s])}"
        for t, s, weight in heat.peaks(12)
    ]
    size = " x ".join(map(str, heat.tensor.shape))
    return "\n".join([f"the map of {size} does not fit {width} columns; its strongest:", *lines])


def _bars(look: Inspection, position: int, top: int, *, sign: str) -> Iterator[str]:
    for _, word, share in look.next(position, top):
        yield f"  {shown(word, most=16):>16} {share:7.2%} {sign * round(BAR * share)}".rstrip()


def _norms(look: Inspection, position: int) -> Iterator[str]:
    residual = look.norms.residual[:, position].tolist()
    pairs = zip(look.norms.row_names, residual, strict=True)
    yield "  residual  " + "  ".join(f"{name} {value:.2f}" for name, value in pairs)
    for part, values_LT in look.norms.parts_by_name().items():
        values = values_LT[:, position].tolist()
        yield f"  {part:<9} " + "  ".join(f"L{i} {value:.2f}" for i, value in enumerate(values))


def _ranking(ranking: Ranking | None) -> Iterator[str]:
    if ranking is None:
        yield "every head is silent: there is none left to rank"
        return
    yield ranking.title
    for row in ranking.rows()[:RANKED]:
        change = row["loss_change"]
        loss = "" if change is None else f"loss {change:+.4f}   "
        yield f"  {row['head']:<14}{loss}KL {row['kl']:.4f}"
    if len(ranking.heads) > RANKED:
        yield f"  and {len(ranking.heads) - RANKED} more with less"


# --- for scripts and files ------------------------------------------------------------------------


def record(seen: Seen) -> Any:
    """What `--json` prints: of the maps only the one that was chosen."""
    made = seen.look.record()
    made["attention"] = {"head": seen.heat.title, "why": seen.why}
    made["attention"]["weights"] = seen.heat.tensor.tolist()
    return plain(made | _chosen_parts(seen))


def _chosen_parts(seen: Seen) -> dict[str, Any]:
    likeliest = seen.look.next(seen.position, seen.top)
    ablation = seen.ablation
    return {
        "position": seen.position,
        "next": [{"id": i, "word": word, "probability": share} for i, word, share in likeliest],
        "ranking": [] if seen.ranking is None else seen.ranking.rows(),
        "ablation": None
        if ablation is None
        else {
            "heads": [str(head) for head in ablation.heads],
            "loss_change": ablation.loss_change,
            "kl": ablation.kl.tolist(),
            "rows": ablation.rows(),
        },
        "against": None if seen.against is None else _against_record(seen.against),
    }


def _against_record(against: Against) -> dict[str, Any]:
    said = against.comparison
    i, word, share = said.top
    return {
        "model": against.name,
        "head": against.difference.title,
        "difference": against.difference.tensor.tolist(),
        "shares": said.shares,
        "top": {"id": i, "word": word, "probability": share},
        "loss": said.loss,
        "mean_loss": said.mean_loss,
        "kl": said.kl,
    }


def encoded(seen: Seen, ending: str, asked: Asked) -> bytes:
    """The bytes of a file: JSON and HTML hold everything, a picture the map or the overview."""
    if ending == "json":
        whole = plain(seen.look.record() | _chosen_parts(seen))
        return (json.dumps(whole, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if ending == "html":
        parts = [html.heading(f"{seen.heat.title}: {seen.why}"), *seen.heat.parts()]
        parts += [] if seen.against is None else list(seen.against.difference.parts())
        parts += [] if seen.ablation is None else list(seen.ablation.parts())
        parts += seen.look.parts()
        parts += [] if seen.ranking is None else seen.ranking.parts()
        return html.page(seen.look.summary(), "".join(parts)).encode()
    if seen.against is not None:
        return seen.against.difference.encoded(ending)
    one = asked.layer is not None or asked.head is not None or asked.kind is not None
    return seen.heat.encoded(ending) if one else seen.look.encoded(ending)
