"""The page Model: a picture of the model, a part of it in detail, one token's way through it.

Pictures and tables are made here, as trees of elements: the page only builds their nodes. What a
click or a choice changes in the address stands in `data-go` and `data-param` of an element.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from glassformer.lab.runs.record import load_run_spec
from glassformer.lens.show.block_picture import inside_picture
from glassformer.lens.show.diagram import Diagram
from glassformer.lens.show.element import Element, el
from glassformer.lens.show.outline import Attending, Layer, Part, outline
from glassformer.lens.show.text import shown
from glassformer.spec.errors import FileError, InputError, nearest
from glassformer.spec.manifest import Parameter
from glassformer.spec.model import ModelSpec, tap_shapes
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import Workspace, kind_of, written_at
from glassformer.web.pages.inspect import (
    example_of,
    first_prompt,
    inspect_example,
    requested_example,
    task_of,
)

if TYPE_CHECKING:
    from glassformer.lens.inspection import Inspection

#: Parameters that a table lists.
LISTED = 40


def model(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the picture of a model, with one part chosen, and that part in detail."""
    query.only("part", "layer", "wide")
    name = query.text("id")
    spec = _spec(name, workspace)
    columns = outline(spec)
    parts = {part.key: part for column in columns for part in column.parts()}
    layers = {part.key: each for column in columns for each in column.layers for part in each.parts}
    chosen = query.text("part", default="", most=80)
    if not chosen:
        chosen = next(key for key, part in parts.items() if part.kind == "attn")
    if chosen not in parts:
        raise InputError(f"this model has no part '{chosen}'", hint=nearest(chosen, parts))
    two = spec.encoder is not None and query.flag("wide")
    picture = Diagram(
        spec,
        layout="wide" if two else "narrow",
        insides=False,
        chosen=chosen,
        title=name,
    )
    layer = layers.get(chosen)
    at = _chosen_layer(layer, query)
    return {
        "run": name,
        "two": two,
        "picture": picture.element().tree(),
        "part": [each.tree() for each in _detail(spec, parts[chosen], layer, at, run=name)],
    }


def _spec(name: str, workspace: Workspace) -> ModelSpec:
    folder = workspace.folder(name)
    if kind_of(folder) == "run":
        return load_run_spec(workspace.run(name)).model
    from glassformer.adapters.load import read_model_spec  # imports torch

    return read_model_spec(folder)[0]


def _chosen_layer(layer: Layer | None, query: Query) -> int:
    if layer is None:
        return 0
    last = layer.first + layer.count - 1
    return query.integer("layer", low=0, high=1 << 20, default=layer.first) if last else 0


def _detail(
    spec: ModelSpec, part: Part, layer: Layer | None, at: int, *, run: str
) -> list[Element]:
    """Return the panel of one part: what it does, its inside, heads, parameters, taps."""
    words = [el("h2", part.title), el("p", _sentence(part.note))]
    key = part.key
    if layer is not None:
        last = layer.first + layer.count - 1
        at = min(max(at, layer.first), last)
        key = f"{layer.prefix}blocks.{at}.{key.rpartition('.')[2]}"
        if layer.count > 1:
            words.append(_layer_choice(layer, at))
        if part.kind in ("attn", "cross", "ffn"):
            words.append(inside_picture(part))
        if part.kind in ("attn", "cross"):
            words.append(_head_links(layer, part, at, run))
    tables = [*_parameter_table(_at_key(spec, part, key)), *_tap_table(spec, key)]
    return [el("div", *words), el("div", *tables)]


def _at_key(spec: ModelSpec, part: Part, key: str) -> Part:
    """Return the same part of another layer."""
    if key == part.key:
        return part
    every = (each for column in outline(spec, every_block=True) for each in column.parts())
    return next(each for each in every if each.key == key)


def _layer_choice(layer: Layer, at: int) -> Element:
    options = (
        el("option", str(i), value=i, **({"selected": "selected"} if i == at else {}))
        for i in range(layer.first, layer.first + layer.count)
    )
    chooser = el("select", *options, id="model-layer", data_param="layer")
    return el("div", el("label", "Layer", for_="model-layer"), chooser, class_="field")


def _head_links(layer: Layer, part: Part, at: int, run: str) -> Element:
    kind = (
        "cross" if part.kind == "cross" else ("encoder" if layer.prefix == "encoder." else "self")
    )
    assert isinstance(part.inside, Attending)
    prefix = "" if kind == "self" else f"{kind}."
    where = f"#/inspect?run={run}" + ("" if kind == "self" else f"&kind={kind}")
    links = []
    for head in range(part.inside.op.heads):
        links.append(el("a", f"{prefix}L{at}H{head}", href=f"{where}&L={at}&H={head}"))
        links.append(el("span", " "))
    label = el("span", "What each head attends to: ", class_="muted")
    return el("p", label, *links, class_="heads")


def _parameter_table(part: Part) -> list[Element]:
    if not part.parameters:
        return [el("p", "It has no parameters.", class_="note")]
    experts = Counter(p.expert is not None for p in part.parameters)[True]
    listed = [p for p in part.parameters if p.expert in (None, 0)]
    times = 1 + max((p.expert or 0) for p in part.parameters) if experts else 1
    rows = [_parameter_row(p, part.key, times) for p in listed[:LISTED]]
    foot = ("", "all together", f"{part.count:,}")
    table = _table(("name", "shape", "numbers"), [*rows, foot])
    return [_heading("Parameters of", part.key), table]


def _parameter_row(parameter: Parameter, key: str, times: int) -> tuple[str, str, str]:
    shape = " × ".join(f"{size:,}" for size in parameter.shape)
    size = f"{parameter.size:,}"
    if parameter.expert is not None:
        size = f"{times} × {size}"
    if parameter.tied_to is not None:
        size = f"= {parameter.tied_to}"
    return parameter.name.removeprefix(f"{key}."), shape, size


_LETTERS = {"B": "batch", "T": "length", "S": "keys", "V": "logits", "E": "experts"}


def _tap_table(spec: ModelSpec, key: str) -> list[Element]:
    """List the activations of a part that `gf.trace` can read or replace."""
    taps = {name: shape for name, shape in tap_shapes(spec).items() if name.startswith(f"{key}.")}
    if not taps:
        return []
    words = {"N": "heads", "K": "K/V heads", "H": "d_head", "D": "d_model", "F": "d_ff"} | _LETTERS
    rows = [
        (name.removeprefix(f"{key}."), " × ".join(words[letter] for letter in shape))
        for name, shape in taps.items()
    ]
    return [_heading("Activations of", key), _table(("tap", "shape"), rows)]


def _heading(words: str, key: str) -> Element:
    return el("h3", f"{words} ", el("code", key))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Element:
    def cell(tag: str, number: int, words: str) -> Element:
        props = {"class_": "n"} if len(head) == 3 and number == 2 else {}
        if tag == "th":
            props |= {"scope": "col"}
        inside = el("code", words) if number == 0 and tag == "td" else words
        return el(tag, *((inside,) if words else ()), **props)  # the last line has no name

    def line(tag: str, words: tuple[str, ...]) -> Element:
        return el("tr", *(cell(tag, i, word) for i, word in enumerate(words)))

    body = el("tbody", *(line("td", row) for row in rows))
    table = el("table", el("thead", line("th", head)), body, class_="data")
    label = f"Table: {head[0]}"
    return el("div", table, class_="scroll", tabindex=0, role="group", aria_label=label)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


# --- one token's way ------------------------------------------------------------------------------


def way(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the residual stream at one position of a prompt, after every sublayer."""
    query.only("step", "text", "split", "row", "position", "wide")
    name, step = query.text("id"), query.text("step", default="best", most=20)
    example = _first_example(query, workspace, name)
    folder = workspace.checkpoint(name, step)
    key = ("model", folder, written_at(folder), example.text, query.text("row", default=""))
    seen: Inspection | None = workspace.results.find(key)
    with workspace.working(name, step) as adapter:
        if seen is None:
            seen = inspect_example(adapter, example)
            maps = (each for kind in seen.attention.by_kind.values() for each in kind.weights)
            size = sum(each.nbytes for each in maps)
            workspace.results.put(seen, key=key, size=size, model=adapter)
        position = seen.readout.position
        if query.has("position"):
            position = query.integer("position", low=0, high=1 << 30)
        path = seen.token_path(position)
    title = f"One token's way: {path.title}"
    return {
        "text": example.text,
        "position": path.position,
        "way": [
            el("h2", title).tree(),
            _tokens(seen, path.position).tree(),
            path.element(narrow=not query.flag("wide")).tree(),
        ],
    }


def _first_example(query: Query, workspace: Workspace, name: str) -> Any:
    """Return the requested prompt or example; without one, the task's first, or some tokens."""
    if query.has("row") or query.has("text"):
        return requested_example(query, workspace, run=name)
    if kind_of(workspace.folder(name)) == "run":
        with contextlib.suppress(
            InputError, FileError
        ):  # its data is not here, or its code not run
            task = task_of(name, workspace)
            if task is not None:
                sizes = task.sizes()
                return example_of(task, "val" if "val" in sizes else next(iter(sizes)), 0)
    return requested_example(
        Query(body={"text": first_prompt(name, workspace)}), workspace, run=name
    )


def _tokens(seen: "Inspection", position: int) -> Element:
    """Return the tokens as buttons; the chosen one is pressed."""
    buttons = (
        el(
            "button",
            shown(word, most=16),
            type="button",
            id=f"model-token-{t}",
            aria_pressed="true" if t == position else "false",
            aria_label=f"position {t}, token {shown(word)}",
            data_go=json.dumps({"position": t}),
        )
        for t, word in enumerate(seen.words)
    )
    return el("div", *buttons, class_="tokens", role="group", aria_label="Position")


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/runs/{id}/model", model),
    ("GET", "/api/runs/{id}/model/way", way),
)
