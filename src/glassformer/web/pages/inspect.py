"""The page Inspect: what can be inspected, one inspection, and its parts.

POST /api/inspect runs one pass and keeps the result under a key; maps, thumbnails, positions and
the ranking of heads are fetched by that key when the page shows them. POST
/api/inspect/{key}/ablate compares the kept pass with one in which heads are ablated: one more pass,
not two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from glassformer.data.batch import Batch
from glassformer.data.build_task import build_task
from glassformer.data.task import Task
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.lab.runs.record import check_data, load_run_spec, recorded_hash
from glassformer.lens.show.text import shown
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import coverage
from glassformer.spec.schemes import NAMES, SCHEMES
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.units import plain_digits
from glassformer.store.rundir import cache_folder
from glassformer.web.app import limits
from glassformer.web.app.query import Bytes, Query, Route, TooLarge, Unknown, page_hint
from glassformer.web.app.workspace import Workspace, kind_of, written_at

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.adapters.native import NativeAdapter
    from glassformer.lens.inspection import Inspection
    from glassformer.web.pages.inspect_results import InspectionResult, Result

PRECISIONS = ("float32", *NAMES)
#: The most heads ablated at once, and predictions of one position.
ABLATED = 64
TOP = 32
#: The key of the quantized copy that was used last.
QUANTIZED = "inspect: quantized copy"
#: Examples that the page offers of a split, and characters of each that it shows.
OFFERED, CHARACTERS = 40, 80
#: Tokens of a text that are offered as its beginning.
OPENING = 64


# --- examples of a run's task ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Example:
    """An input to inspect: a text with its target, or one row of a task, which has both."""

    text: str
    target: str | None
    batch: Batch | None = None


def task_of(run: str, workspace: Workspace) -> Task | None:
    """Return the task of a run, built once; None for a fine-tuned run, whose data is chats."""
    directory = workspace.run(run)
    spec = load_run_spec(directory).task
    if isinstance(spec, FinetuneTask):
        return None
    recorded = recorded_hash(directory.folder, spec)
    key = ("task", spec)
    task: Task | None = workspace.results.find(key)
    if task is None:
        cache = cache_folder(directory.folder.parent)
        task = build_task(spec, cache=cache if cache.is_dir() else None)
        workspace.results.put(task, key=key)
    check_data(task, recorded)
    return task


def offered(task: Task, split: str, *, first: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return some examples of a split, row and text: those of `first`, then from the beginning."""
    size = task.sizes()[split]
    rows = dict.fromkeys([*(row for row in first if row < size), *range(min(OFFERED, size))])
    return [
        {
            "row": row,
            "text": one_line(task.describe(split, row), most=CHARACTERS),
            "prompt": opening(example_of(task, split, row), task.tokenizer),
        }
        for row in rows
    ]


def opening(example: Example, tokenizer: Tokenizer) -> str:
    """Return the part of an example that a model is given as its prompt.

    The source, or the question; of a sequence the part before the first token that counts, and
    its first half where every token counts, so that something is left to predict.
    """
    batch = example.batch
    if batch is None or batch.source is not None or "next" not in batch.targets:
        return example.text
    size = int(batch.valid[0].sum())
    given = 0 if batch.weights is None else int((batch.weights[0] > 0).argmax())
    kept = given + 1 if given else min(OPENING, -(-size // 2))
    return tokenizer.decode([int(i) for i in batch.tokens[0][_begin(batch, tokenizer) : kept]])


def _begin(batch: Batch, tokenizer: Tokenizer) -> int:
    """Return 1 if a sequence begins with BOS, which is added again when its text is read."""
    return int("next" in batch.targets and batch.tokens[0][0] == tokenizer.bos)


def first_prompt(name: str, workspace: Workspace) -> str:
    """Return a prompt for a model of which no example is here: one that its tokenizer reads."""
    from glassformer.adapters.folder.paths import load_tokenizer
    from glassformer.lab.next_steps import model_prompt

    try:
        folder = workspace.checkpoint(name)
        key = ("prompt", folder, written_at(folder))
        prompt: str | None = workspace.results.find(key)
        if prompt is None:
            prompt = model_prompt(load_tokenizer(folder))
            workspace.results.put(prompt, key=key)
        return prompt
    except (InputError, FileError):  # it is told when the prompt is read
        return model_prompt(None)


def example_of(task: Task | None, split: str, row: int) -> Example:
    """Return one example, with the text and target that stand for it."""
    if task is None or split not in task.sizes():
        raise Unknown(f"this run has no examples called '{split[:40]}'")
    if not 0 <= row < task.sizes()[split]:
        raise InputError(f"no example {row}", hint=f"0 to {task.sizes()[split] - 1}")
    batch = task.batch(split, np.array([row]))
    tokenizer = task.tokenizer
    if batch.source is not None:
        source = _real(tokenizer, batch.source.tokens[0], batch.source.valid[0])
        return Example(source, _real(tokenizer, batch.targets["next"][0], batch.valid[0]), batch)
    begin = _begin(batch, tokenizer)
    text = _real(tokenizer, batch.tokens[0][begin:], batch.valid[0][begin:])
    answer = batch.targets.get("answer")
    if answer is None:
        return Example(text, None, batch)
    from glassformer.lab.measure.evaluate import token_namer

    return Example(text, token_namer(task, "answer")(int(answer[0])), batch)


def _real(tokenizer: Tokenizer, ids: Sequence[int], valid: Sequence[bool]) -> str:
    kept = [int(i) for i, real in zip(ids, valid, strict=True) if real]
    while len(kept) > 1 and kept[-1] == tokenizer.eos:
        kept.pop()
    return tokenizer.decode(kept)


def one_line(text: str, *, most: int) -> str:
    """Return a text for a list: blanks stay blanks, other control characters are escaped."""
    line = " ".join(shown(part) for part in text.split(" ") if part)
    return line if len(line) <= most else line[: most - 1] + "…"


def _fitting(model: ModelSpec) -> list[str]:
    """Return the schemes that fit every layer: none is offered that would be another in part."""
    return [scheme.name for scheme in SCHEMES if not coverage(model, scheme()).unfit]


# --- one inspection -------------------------------------------------------------------------------


def about(query: Query, workspace: Workspace) -> dict[str, Any]:
    """List what can be inspected in a run: its checkpoints, its splits, some examples of one.

    `note`: why a run's own examples cannot be shown, if its data is not here or has changed.
    `prompt`: a first text for the model.
    """
    query.only("split")
    name = query.text("id")
    if kind_of(workspace.folder(name)) != "run":
        lists = ("checkpoints", "snapshots", "watched", "examples")
        none: dict[str, Any] = {name: [] for name in lists}
        none |= {"splits": {}, "split": None, "note": "", "precisions": PRECISIONS}
        return none | {"run": name, "prompt": first_prompt(name, workspace)}
    from glassformer.lab.runs.artifacts import probe_files
    from glassformer.lab.runs.record import load_run_spec
    from glassformer.web.pages.inspect_results import SPLIT, probed_rows

    directory = workspace.run(name)
    split, note = query.text("split", default=""), ""
    try:
        task = task_of(name, workspace)
    except (InputError, FileError) as error:
        hint = page_hint(error)
        task, note = None, error.what + (f" ({hint})" if hint else "")
    splits = dict(task.sizes()) if task is not None else {}
    if split not in splits:
        split = SPLIT if SPLIT in splits else next(iter(splits), "")
    first = probed_rows(directory) if split == SPLIT else []
    examples = offered(task, split, first=first) if task is not None and split else []
    return {
        "run": name,
        "precisions": ["float32", *_fitting(load_run_spec(directory).model)],
        "checkpoints": directory.steps(),
        "best": directory.pointed("best"),
        "last": directory.pointed("last"),
        "snapshots": list(probe_files(directory)),
        "watched": first,
        "splits": splits,
        "split": split or None,
        "examples": examples,
        "prompt": examples[0]["prompt"] if examples else first_prompt(name, workspace),
        "note": note,
    }


def inspect(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Inspect a text, or an example of the run's task, in one pass."""
    query.only("run", "step", "precision", "text", "target", "split", "row")
    from glassformer.spec.manifest import count_parameters
    from glassformer.web.pages.inspect_results import InspectionResult

    run, step = query.text("run"), query.text("step", default="best", most=20)
    if snapshot := _snapshot(run, step, query, workspace):
        return snapshot
    precision = query.choice("precision", PRECISIONS, default="float32")
    example = requested_example(query, workspace, run=run)
    with workspace.working(run, step) as adapter:
        inspection = inspect_example(_quantized(adapter, run, step, precision, workspace), example)
        result = InspectionResult(
            inspection=inspection,
            loaded=adapter,
            run=run,
            step=step,
            precision=precision,
            parameters=count_parameters(adapter.spec),  # a quantized layer has none of its own
            text=example.text,
            target=example.target,
            extended=_extended(adapter, inspection),
        )
    return _kept(result, workspace)


def ablate(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Run a kept inspection again with these heads ablated, and compare: one pass."""
    query.only("ablate")
    result = _of_a_model(_find(query, workspace, "key"))
    heads = query.texts("ablate", most=ABLATED, characters=40)
    with workspace.heavy():
        ablation = result.baseline.ablate(*heads)
    return _kept(replace(result, inspection=ablation.after, ablation=ablation), workspace)


def _kept(result: "InspectionResult", workspace: Workspace) -> dict[str, Any]:
    key = workspace.results.put(result, size=result.size(), model=result.loaded)
    return {"key": key, **result.header()}


def _snapshot(run: str, step: str, query: Query, workspace: Workspace) -> dict[str, Any] | None:
    """Show a step of which only probes are left; None where there is a checkpoint."""
    number = plain_digits(step)
    if number is None or kind_of(workspace.folder(run)) != "run":
        return None
    directory = workspace.run(run)
    if number in directory.steps():
        return None
    from glassformer.spec.manifest import count_parameters
    from glassformer.web.pages.inspect_results import SnapshotResult, read_snapshot

    row = query.integer("row", low=0, high=1 << 40) if query.has("row") else None
    split = query.text("split", default="val")
    probes, at = read_snapshot(directory, number, split, row)
    if query.choice("precision", PRECISIONS, default="float32") != "float32":
        raise InputError(
            f"of step {step} only a snapshot is kept: there is no model to quantize",
            hint="choose a step with a checkpoint",
        )
    example = example_of(task_of(run, workspace), split, row or 0)
    result = SnapshotResult(
        probes,
        at=at,
        run=directory.folder.name,
        text=example.text,
        target=example.target,
        parameters=count_parameters(load_run_spec(directory).model),
    )
    return {"key": workspace.results.put(result), **result.header()}


def requested_example(query: Query, workspace: Workspace, *, run: str) -> Example:
    """Return the row of a run's task, or the text, that a request names."""
    if query.has("row"):
        task = task_of(run, workspace)
        row = query.integer("row", low=0, high=1 << 40)
        return example_of(task, query.text("split", default="val"), row)
    text = query.text("text", most=limits.PROMPT_CHARACTERS)
    target = query.text("target", most=limits.PROMPT_CHARACTERS, default="")
    return Example(text=text, target=target or None)


def inspect_example(adapter: "BaseAdapter", example: Example) -> "Inspection":
    """Run one pass over an example."""
    from glassformer.adapters.text_inputs import Words
    from glassformer.lens import inspection

    if example.batch is None:
        length = len(adapter.tokenizer.encode(example.text))
        if length > limits.PROMPT_TOKENS:
            raise TooLarge(f"{length:,} tokens, at most {limits.PROMPT_TOKENS:,} are inspected")
        return adapter.inspect(example.text, target=example.target)
    names = Words(adapter.tokenizer)
    source = example.batch.source
    words = None if source is None else [names(int(i)) for i in source.tokens[0]]
    return inspection.inspect(adapter, example.batch, source_words=words, names=names)


def _quantized(
    adapter: "BaseAdapter", run: str, step: str, precision: str, workspace: Workspace
) -> "BaseAdapter":
    """Return the model itself, or a quantized copy; the copy used last is kept."""
    if precision not in NAMES:
        return adapter
    from glassformer.adapters.any_model import quantize

    name = (run, step, precision)
    kept = workspace.results.find(QUANTIZED)
    if kept is None or kept[0] != name or kept[1] is not adapter:
        native = cast("NativeAdapter", adapter)  # another is refused by `quantize`
        kept = (name, adapter, quantize(native, scheme=precision))
        workspace.results.put(kept, key=QUANTIZED, model=adapter)
    copy: BaseAdapter = kept[2]
    return copy


def _extended(adapter: "BaseAdapter", inspection: "Inspection") -> str | None:
    """Return the text with the likeliest next token appended; None where nothing can follow."""
    longer = len(inspection.ids) + 1
    if inspection.head != "next" or inspection.source_words is not None:
        return None
    if longer > adapter.spec.max_seq_len:
        return None
    text: str = adapter.tokenizer.decode([*inspection.ids, inspection.next(None, 1)[0][0]])
    return text


# --- parts of an inspection -----------------------------------------------------------------------


def position(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return predictions, lens and norms at one position; compared with `against`, if given."""
    query.only("position", "top", "against")
    result = _find(query, workspace, "key")
    against = _find(query, workspace, "against") if query.has("against") else None
    at = query.integer("position", low=0, high=1 << 30)
    top = query.integer("top", low=1, high=TOP, default=8)
    return result.position(at, top=top, against=against)


def attention(query: Query, workspace: Workspace) -> Bytes:
    """Return one map; minus that of another inspection with `minus`."""
    query.only("kind", "layer", "head", "minus")
    result = _find(query, workspace, "key")
    minus = _find(query, workspace, "minus") if query.has("minus") else None
    layer = query.integer("layer", low=0, high=1 << 20)
    kind = query.text("kind", default="self", most=20)
    return result.map(kind, layer, query.text("head", most=20), minus=minus)


def thumbnails(query: Query, workspace: Workspace) -> Bytes:
    """Return every head of a kind, small."""
    query.only("kind")
    return _find(query, workspace, "key").thumbnails(query.text("kind", default="self", most=20))


def ranking(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Rank every head by what ablating it does, on top of those ablated already."""
    query.only()
    result = _of_a_model(_find(query, workspace, "key"))
    with workspace.heavy():
        ranked = result.inspection.ranking()
    by = "loss" if ranked.loss_changes and ranked.loss_changes[0] is not None else "kl"
    return {"by": by, "rows": ranked.rows()}


def _find(query: Query, workspace: Workspace, name: str) -> "Result":
    from glassformer.web.pages.inspect_results import Result

    result = workspace.results.get(query.text(name, most=40))
    if not isinstance(result, Result):
        raise Unknown("this key belongs to another page's result")
    return result


def _of_a_model(result: "Result") -> "InspectionResult":
    from glassformer.web.pages.inspect_results import InspectionResult

    if not isinstance(result, InspectionResult):
        raise InputError(
            "a snapshot holds no model, so no head of it can be ablated",
            hint="choose a step with a checkpoint",
        )
    return result


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/runs/{id}/inspect", about),
    ("POST", "/api/inspect", inspect),
    ("POST", "/api/inspect/{key}/ablate", ablate),
    ("GET", "/api/inspect/{key}/position", position),
    ("GET", "/api/inspect/{key}/attention", attention),
    ("GET", "/api/inspect/{key}/thumbnails", thumbnails),
    ("GET", "/api/inspect/{key}/ranking", ranking),
)
