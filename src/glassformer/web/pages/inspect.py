"""The page Inspect: what there is to look at, one look, and its parts.

A look is asked for with POST and kept under a key; maps, thumbnails, positions and the ranking of
heads are fetched by that key when the page shows them.
"""

from typing import TYPE_CHECKING, Any

from glassformer.lab.runs.record import load_run_spec
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.schemes import NAMES
from glassformer.spec.units import plain_digits
from glassformer.web.app import limits
from glassformer.web.app.query import Bytes, Query, Route, TooLarge, Unknown
from glassformer.web.app.workspace import Lab, kind_of
from glassformer.web.pages.examples import Asked, listed, task_of, written

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.lens.inspection import Inspection
    from glassformer.web.pages.kept_look import Maps

PRECISIONS = ("float32", *NAMES)
ABLATED = 64
TOP = 32
TWIN = "inspect: the quantized twin"


def about(query: Query, lab: Lab) -> dict[str, Any]:
    """What can be looked at in a run: its checkpoints, its splits, the first examples of one.

    `note`: why a run's own examples cannot be shown, where its data is not here or not its own.
    """
    query.only("split")
    name = query.text("id")
    nothing: dict[str, Any] = {"run": name, "checkpoints": [], "snapshots": [], "watched": []}
    if kind_of(lab.folder(name)) != "run":
        nothing["precisions"] = PRECISIONS
        return nothing | {"splits": {}, "split": None, "examples": [], "note": ""}
    from glassformer.lab.runs.probing import probe_files
    from glassformer.web.pages.training_snapshot import SPLIT, watched

    directory = lab.run(name)
    split, note = query.text("split", default=""), ""
    try:
        task = task_of(name, lab)
    except (InputError, FileError) as error:
        task, note = None, error.what
    splits = dict(task.sizes()) if task is not None else {}
    if split not in splits:
        split = SPLIT if SPLIT in splits else next(iter(splits), "")
    first = watched(directory) if split == SPLIT else []
    return {
        "run": name,
        "precisions": PRECISIONS,
        "checkpoints": directory.steps(),
        "best": directory.pointed("best"),
        "last": directory.pointed("last"),
        "snapshots": list(probe_files(directory)),
        "watched": first,
        "splits": splits,
        "split": split or None,
        "examples": listed(task, split, first=first) if task is not None and split else [],
        "note": note,
    }


def inspect(query: Query, lab: Lab) -> dict[str, Any]:
    """One look: a text, or an example of the run's task; with heads silenced, if asked for."""
    query.only("run", "step", "precision", "text", "target", "split", "row", "ablate")
    from glassformer.spec.manifest import count_parameters
    from glassformer.web.pages.kept_look import KeptInspection

    run, step = query.text("run"), query.text("step", default="best", most=20)
    if kept := _snapshot(run, step, query, lab):
        return kept
    precision = query.choice("precision", PRECISIONS, default="float32")
    asked = _asked(query, lab)
    with lab.working(run, step) as adapter:
        seen = _look(_rounded(adapter, run, step, precision, lab), asked)
        heads = query.texts("ablate", most=ABLATED, characters=40)
        ablation = seen.ablate(*heads) if heads else None
        made = KeptInspection(
            look=seen if ablation is None else ablation.after,
            run=run,
            step=step,
            precision=precision,
            parameters=count_parameters(adapter.spec),  # a quantized layer's are no parameters
            ablation=ablation,
        )
        told = {"text": asked.text, "target": asked.target, "grown": _grown(adapter, seen)}
    return {"key": lab.keep(made, size=made.size(), holds=adapter), **told, **made.header()}


def _snapshot(run: str, step: str, query: Query, lab: Lab) -> dict[str, Any] | None:
    """A step of which only probes are left; None where there is a checkpoint."""
    number = plain_digits(step)
    if number is None or kind_of(lab.folder(run)) != "run":
        return None
    directory = lab.run(run)
    if number in directory.steps():
        return None
    from glassformer.spec.manifest import count_parameters
    from glassformer.web.pages.training_snapshot import snapshot

    row = query.integer("row", low=0, high=1 << 40) if query.has("row") else None
    split = query.text("split", default="val")
    made = snapshot(directory, number, split, row)
    precision = query.choice("precision", PRECISIONS, default="float32")
    if query.texts("ablate", most=ABLATED, characters=40) or precision in NAMES:
        raise InputError(
            f"of step {step} only a snapshot is kept: there is no model to change",
            hint="choose a step with a checkpoint",
        )
    asked = written(task_of(run, lab), split, row or 0)
    told = {"text": asked.text, "target": asked.target, "grown": None}
    parameters = count_parameters(load_run_spec(directory).model)
    return {"key": lab.keep(made), **told, **made.header(), "parameters": parameters}


def _asked(query: Query, lab: Lab) -> Asked:
    if query.has("row"):
        task = task_of(query.text("run"), lab)
        row = query.integer("row", low=0, high=1 << 40)
        return written(task, query.text("split", default="val"), row)
    text = query.text("text", most=limits.PROMPT_CHARACTERS)
    target = query.text("target", most=limits.PROMPT_CHARACTERS, default="")
    return Asked(text=text, target=target or None)


def _look(adapter: "BaseAdapter", asked: Asked) -> "Inspection":
    from glassformer.adapters.text_inputs import Words
    from glassformer.lens.inspection import inspect

    if asked.batch is None:
        length = len(adapter.tokenizer.encode(asked.text))
        if length > limits.PROMPT_TOKENS:
            raise TooLarge(f"{length:,} tokens, at most {limits.PROMPT_TOKENS:,} are looked at")
        return adapter.inspect(asked.text, target=asked.target)
    names = Words(adapter.tokenizer)
    source = asked.batch.source
    words = None if source is None else [names(int(i)) for i in source.tokens[0]]
    return inspect(adapter.model, asked.batch, source_words=words, names=names)


def _rounded(
    adapter: "BaseAdapter", run: str, step: str, precision: str, lab: Lab
) -> "BaseAdapter":
    """The model itself, or a copy in fewer bits; the newest copy is kept."""
    if precision not in NAMES:
        return adapter
    from glassformer.adapters.quantize import quantize

    name = (run, step, precision)
    kept = lab.remembered(TWIN)
    if kept is None or kept[0] != name or kept[1] is not adapter:
        kept = (name, adapter, quantize(adapter, scheme=precision, indivisible="int8"))
        lab.remember(TWIN, kept)
    return kept[2]


def _grown(adapter: "BaseAdapter", seen: "Inspection") -> str | None:
    """The text with the likeliest next token behind it; None where nothing can follow."""
    longer = len(seen.ids) + 1
    if seen.head != "next" or seen.source_words is not None or longer > adapter.spec.max_seq_len:
        return None
    text: str = adapter.tokenizer.decode([*seen.ids, seen.next(None, 1)[0][0]])
    return text


# --- parts of a look ------------------------------------------------------------------------------


def position(query: Query, lab: Lab) -> dict[str, Any]:
    """Answers, lens and norms at one position; beside another inspection's with `against`."""
    query.only("position", "top", "against")
    seen = _kept(query, lab, "key")
    against = _kept(query, lab, "against") if query.has("against") else None
    at = query.integer("position", low=0, high=1 << 30)
    top = query.integer("top", low=1, high=TOP, default=8)
    return seen.position(at, top=top, against=against)


def attention(query: Query, lab: Lab) -> Bytes:
    """One map; less that of another inspection with `minus`."""
    query.only("kind", "layer", "head", "minus")
    seen = _kept(query, lab, "key")
    minus = _kept(query, lab, "minus") if query.has("minus") else None
    layer = query.integer("layer", low=0, high=1 << 20)
    kind = query.text("kind", default="self", most=20)
    return seen.map(kind, layer, query.text("head", most=20), minus=minus)


def thumbnails(query: Query, lab: Lab) -> Bytes:
    """Every head of a kind, small."""
    query.only("kind")
    return _kept(query, lab, "key").thumbnails(query.text("kind", default="self", most=20))


def ranking(query: Query, lab: Lab) -> dict[str, Any]:
    """Every head by what silencing it does, on top of those that are silent already."""
    query.only()
    from glassformer.web.pages.kept_look import KeptInspection

    seen = _kept(query, lab, "key")
    if not isinstance(seen, KeptInspection):
        raise InputError("a snapshot holds no model, so no head of it can be silenced")
    with lab.heavy():
        found = seen.look.ranking()
    by = "loss" if found.loss_changes and found.loss_changes[0] is not None else "kl"
    return {"by": by, "rows": found.rows()}


def _kept(query: Query, lab: Lab, name: str) -> "Maps":
    from glassformer.web.pages.kept_look import Maps

    found = lab.kept(query.text(name, most=40))
    if not isinstance(found, Maps):
        raise Unknown("this key is of another page's result")
    return found


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/runs/{id}/inspect", about),
    ("POST", "/api/inspect", inspect),
    ("GET", "/api/inspect/{key}/position", position),
    ("GET", "/api/inspect/{key}/attention", attention),
    ("GET", "/api/inspect/{key}/thumbnails", thumbnails),
    ("GET", "/api/inspect/{key}/ranking", ranking),
)
