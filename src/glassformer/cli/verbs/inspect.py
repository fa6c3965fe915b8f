"""`glass inspect`: look inside a model while it reads a text; print it, or write a picture."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell import resolve, terminal
from glassformer.cli.shell.options import AnyModel, AsJson, Device, Runs, out_file
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import end, target_of, write_file
from glassformer.spec.errors import InputError
from glassformer.spec.options import option
from glassformer.spec.serialize import json_numbers
from glassformer.spec.units import plain_digits

if TYPE_CHECKING:
    from glassformer.lens.heads import HeadName
    from glassformer.lens.inspection import Ablation, Comparison, Inspection
    from glassformer.lens.measure.ablation import Ranking
    from glassformer.lens.show.attention_map import AttentionMap, Difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to show of the pass, and what to compare it with."""

    layer: int | None = option(None, help="The layer whose attention is shown, from 0.")
    head: str | None = option(None, help="A number, mean, or a name such as L1H3 or cross.L0H2.")
    kind: str | None = option(None, help="self, or of an encoder-decoder encoder or cross.")
    position: int | None = option(
        None, flag="--pos", help="The position whose predictions are shown; -1 is the last."
    )
    top: int = option(5, help="How many predictions to list.")
    ablate: tuple[str, ...] = option((), metavar="HEAD", help="Ablate a head, such as L1H3.")
    target: str | None = option(None, help="The expected continuation; losses are then of this.")
    against: str | None = option(
        None, metavar="MODEL", help="Another model at the same text: what differs."
    )


def inspect(
    model: AnyModel,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads.")],
    options: Options,
    out: Annotated[str | None, out_file("Write a .png, .svg, .html or .json.")] = None,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Look inside a model while it reads a text.

    Attention, the logit lens, norms, and what ablating each head changes. Without --layer and
    --head the map is of the head whose ablation changes most. Examples:

      glass inspect digits "SECOND 7 3 9"

      glass inspect digits "SECOND 7 3 9" --target 3 --ablate L1H3

      glass inspect digits "SECOND 7 3 9" --head L1H3 --against digits@80

      glass inspect reverse "3 1 4 15 9" --kind cross --layer 1 -o cross.png
    """
    place = resolve.find_model(model, runs=Path(runs))
    second = options.against and resolve.find_model(options.against, runs=Path(runs))
    from glassformer.adapters.load import load
    from glassformer.lab.next_steps import after_inspecting

    target, device = target_of(out, ENDINGS), check_device(device)
    adapter = load(place, device=device).eval()
    other = load(second, device=device).eval() if second else None
    result = look(adapter, text, options, other=other)
    if target is not None:
        write_file(target, encoded(result, target.suffix.lower().removeprefix("."), options))
    if as_json:
        print(json.dumps(record(result), allow_nan=False))
        return
    print(terminal.printable(result_text(result)), flush=True)
    end("", after_inspecting(place, text))


@dataclass(frozen=True, slots=True)
class Against:
    """Another model at the same text: the difference of the chosen map, and its predictions."""

    name: str
    difference: "Difference"
    comparison: "Comparison"


@dataclass(frozen=True, slots=True)
class Shown:
    """One inspection, and what was chosen to show of it."""

    inspection: "Inspection"
    map: "AttentionMap"
    why: str
    ranking: "Ranking | None"  # None where every head is ablated
    ablation: "Ablation | None"
    position: int
    top: int
    against: Against | None = None


def look(adapter: Any, text: str, options: Options, *, other: Any = None) -> Shown:
    """Run the pass, a second one if heads are ablated, and that of another model."""
    from glassformer.lens.heads import heads_of

    names = [_head_of(adapter.spec, name) for name in options.ablate]
    _chosen(adapter.spec, options)  # refused before the work is done
    first: Inspection = adapter.inspect(text, target=options.target)
    ablation = first.ablate(*names) if names else None
    inspection = first if ablation is None else ablation.after
    position = inspection.lens.position(options.position)
    inspection.next(position, options.top)  # refuses a number that is not kept
    left = set(heads_of(adapter.spec)) - {*inspection.ablated}
    ranking = inspection.ranking() if left else None
    chosen, why = _map_to_show(inspection, options, ranking)
    result = Shown(inspection, chosen, why, ranking, ablation, position, options.top)
    if other is None:
        return result
    there: Inspection = other.inspect(text, target=options.target)
    which, name = _chosen(adapter.spec, options) or chosen.head, options.against or ""
    assert which is not None, "a map that no option names is one head's"
    difference = replace(chosen - _map(there, which), title=f"{chosen.title} minus {name}'s")
    comparison = inspection.compare(there, position, options.top)
    return replace(result, against=Against(name, difference, comparison))


def _map(inspection: "Inspection", which: "HeadName | tuple[str, int]") -> "AttentionMap":
    """Return the map of a head, or the mean of a layer's."""
    from glassformer.lens.heads import HeadName

    if isinstance(which, HeadName):
        _head_of(inspection.model.spec, str(which))
        return inspection.attention.of(which.kind)[which.layer, which.head]
    return inspection.attention.of(which[0]).mean(which[1])


# --- which head -----------------------------------------------------------------------------------


def _head_of(spec: Any, text: str) -> "HeadName":
    """Parse a head, and check that this model has it."""
    from glassformer.lens.heads import HeadName, heads_of

    name = HeadName.parse(text)
    known = heads_of(spec)
    if name not in known:
        same = [head for head in known if head.kind == name.kind] or known
        raise InputError(f"this model has no head {name}", hint=f"{same[0]} to {same[-1]}")
    return name


def _chosen(spec: Any, options: Options) -> "HeadName | tuple[str, int] | None":
    """Return the head, or (kind, layer) for a layer's mean, that the options name; else None."""
    from glassformer.lens.heads import HeadName, heads_of

    number = plain_digits(options.head or "")
    if options.head is not None and number is None and options.head != "mean":
        name = _head_of(spec, options.head)
        if options.layer is not None or options.kind is not None:
            raise InputError(
                f"--head {options.head} names the layer and the kind already",
                hint=f"leave out --layer and --kind, or write --head {name.head}",
            )
        return name
    known = heads_of(spec)
    kinds = list(dict.fromkeys(head.kind for head in known))
    if options.kind is not None and options.kind not in kinds:
        raise InputError(
            f"this model has no attention of kind '{options.kind}'", hint=" or ".join(kinds)
        )
    if options.layer is None:
        if options.head is not None:
            raise InputError(
                f"--head {options.head} of which layer?", hint=f"--layer 0, or --head {known[0]}"
            )
        return None
    kind = options.kind or "self"
    if number is None:
        _head_of(spec, str(HeadName(kind, options.layer, 0)))
        return kind, options.layer
    return _head_of(spec, str(HeadName(kind, options.layer, number)))


def _map_to_show(
    inspection: "Inspection", options: Options, ranking: "Ranking | None"
) -> "tuple[AttentionMap, str]":
    """Return the map to show, and why that one."""
    from glassformer.lens.heads import HeadName

    which = _chosen(inspection.model.spec, options)
    if which is not None:
        one = isinstance(which, HeadName)
        return _map(inspection, which), "as requested" if one else "the mean of the layer's heads"
    ranked = () if ranking is None else zip(ranking.heads, ranking.effects, strict=True)
    best = next((pair for pair in ranked if options.kind in (None, pair[0].kind)), None)
    if best is None:  # every head of that kind is ablated
        kind = options.kind or "self"
        return inspection.attention.of(kind)[0, 0], "the first: every head is ablated"
    name, effect = best
    change = (
        f"the predictions by KL {effect:.4f}"
        if inspection.loss is None
        else f"the loss by {effect:+.4f}"
    )
    of_kind = "" if options.kind is None else f" of kind {options.kind}"
    why = f"of all heads{of_kind}, ablating it changes most: {change}"
    return _map(inspection, name), why


ENDINGS = ("png", "svg", "html", "json")
#: Characters of the longest bar.
BAR = 30


# --- text -----------------------------------------------------------------------------------------


def result_text(result: Shown) -> str:
    """Return everything for a terminal, each part under its heading."""
    return "\n".join(_lines(result, width=terminal.columns()))


def _lines(result: Shown, *, width: int) -> Iterator[str]:
    from glassformer.lens.show.text import ASCII_SHADES, SHADES, legend, shown

    inspection, unicode = result.inspection, terminal.is_unicode()
    shades = SHADES if unicode else ASCII_SHADES
    yield inspection.summary()
    if inspection.source_words is not None:
        yield f"source    {' '.join(shown(word) for word in inspection.source_words)}"
    yield f"tokens    {' '.join(f'{i}:{shown(word)}' for i, word in enumerate(inspection.words))}"
    if result.ablation is not None:
        yield ""
        yield result.ablation.text()
    yield ""
    yield f"attention {result.map.title} ({result.why})"
    yield f"each row shows what that token attends to: {legend(shades)}"
    yield result.map.drawn(width=width, shades=shades)
    if result.against is not None:
        yield ""
        yield from _against(result.against, inspection, result.position)
    word = shown(inspection.words[result.position])
    yield ""
    elsewhere = inspection.head == "answer" and result.position != inspection.readout.position
    note = (
        f"; it answers at {inspection.readout.position}, here is what it would predict"
        if elsewhere
        else ""
    )
    yield f"predictions at position {result.position} ({word}{note})"
    yield from _bars(inspection, result.position, result.top, sign="█" if unicode else "#")
    target = inspection.target(result.position)
    if target is not None:
        loss = float(inspection.losses[result.position])
        yield f"  target {shown(target[1])}: loss {loss:.4f}"
    yield ""
    yield f"logit lens at position {result.position}: what it would predict after each sublayer"
    yield from inspection.lens.lines(result.position)
    yield ""
    yield f"norms at position {result.position}"
    yield from _norms(inspection, result.position)
    if inspection.experts is not None:
        yield ""
        yield from inspection.experts.text().splitlines()
    yield ""
    none = "every head is ablated: there is none left to rank"
    yield none if result.ranking is None else result.ranking.text()


def _against(against: Against, inspection: "Inspection", position: int) -> Iterator[str]:
    """Yield the difference of the maps, and what the other model predicts at the position."""
    from glassformer.lens.show.text import shown

    compared, word = against.comparison, shown(against.comparison.top[1])
    yield f"against {against.name}, at position {position}: predicts {word} {compared.top[2]:.2%}"
    loss = "" if compared.loss != compared.loss else f"loss there {compared.loss:.4f}   "
    yield f"  {loss}KL(there || here) {compared.kl:.4f}"
    yield against.difference.text()


def _bars(inspection: "Inspection", position: int, top: int, *, sign: str) -> Iterator[str]:
    from glassformer.lens.show.text import shown

    for _, word, share in inspection.next(position, top):
        yield f"  {shown(word, most=16):>16} {share:7.2%} {sign * round(BAR * share)}".rstrip()


def _norms(inspection: "Inspection", position: int) -> Iterator[str]:
    residual = inspection.norms.residual[:, position].tolist()
    pairs = zip(inspection.norms.row_names, residual, strict=True)
    yield "  residual  " + "  ".join(f"{name} {value:.2f}" for name, value in pairs)
    for part, values_LT in inspection.norms.parts_by_name().items():
        values = values_LT[:, position].tolist()
        yield f"  {part:<9} " + "  ".join(f"L{i} {value:.2f}" for i, value in enumerate(values))


# --- for scripts and files ------------------------------------------------------------------------


def record(result: Shown) -> Any:
    """Return what `--json` prints: of the maps only the chosen one."""
    data = result.inspection.record()
    data["attention"] = {"head": result.map.title, "why": result.why}
    data["attention"]["weights"] = result.map.tensor.tolist()
    return json_numbers(data | _chosen_parts(result), not_finite="null")


def _chosen_parts(result: Shown) -> dict[str, Any]:
    likeliest = result.inspection.next(result.position, result.top)
    ablation = result.ablation
    return {
        "position": result.position,
        "next": [{"id": i, "word": word, "probability": share} for i, word, share in likeliest],
        "ranking": [] if result.ranking is None else result.ranking.rows(),
        "ablation": None
        if ablation is None
        else {
            "heads": [str(head) for head in ablation.heads],
            "loss_change": ablation.loss_change,
            "kl": ablation.kl.tolist(),
            "rows": ablation.rows(),
        },
        "against": None if result.against is None else _against_record(result.against),
    }


def _against_record(against: Against) -> dict[str, Any]:
    compared = against.comparison
    i, word, share = compared.top
    return {
        "model": against.name,
        "head": against.difference.title,
        "difference": against.difference.tensor.tolist(),
        "shares": compared.shares,
        "top": {"id": i, "word": word, "probability": share},
        "loss": compared.loss,
        "mean_loss": compared.mean_loss,
        "kl": compared.kl,
    }


def encoded(result: Shown, ending: str, options: Options) -> bytes:
    """Return the bytes of a file: JSON and HTML hold everything, a picture the map or overview."""
    from glassformer.lens.show import html

    if ending == "json":
        facts = result.inspection.record() | _chosen_parts(result)
        record = json_numbers(facts, not_finite="null")
        return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if ending == "html":
        parts = [html.heading(f"{result.map.title}: {result.why}"), *result.map.parts()]
        parts += [] if result.against is None else list(result.against.difference.parts())
        parts += [] if result.ablation is None else list(result.ablation.parts())
        parts += result.inspection.parts()
        parts += [] if result.ranking is None else result.ranking.parts()
        return html.page(result.inspection.summary(), "".join(parts)).encode()
    if result.against is not None:
        return result.against.difference.encoded(ending)
    one = options.layer is not None or options.head is not None or options.kind is not None
    return result.map.encoded(ending) if one else result.inspection.encoded(ending)
