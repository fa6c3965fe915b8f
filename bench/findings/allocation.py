"""Where the parameters go: embedding share, gated width and tying at one size, by `gf.sweep`.

`python -m bench findings --sweep NAME --device cuda` trains one question's cells and keeps its
ranking in docs/findings-sweeps.json, which the page is made of. Each cell goes through the budget's
solver, so that all have the same number of parameters; a run that is there is not trained again.
At the `--deadline` all runs are saved, and the same command goes on; `--quick` does the same with
two cells, two seeds and six steps each, and keeps nothing.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import glassformer as gf
from bench.findings.tables import table
from glassformer.adapters.load import load_native
from glassformer.lab.smallbench.question import examinee_of
from glassformer.lab.smallbench.suite import BITS, exams, smallbench
from glassformer.lab.sweeps.ranking import main_effects, rank
from glassformer.lab.sweeps.sweep import Sweep
from glassformer.spec.model import ModelSpec
from glassformer.spec.serialize import json_numbers

FILE = Path("docs/findings-sweeps.json")
FOLDER = Path("build/sweeps")
SEEDS = 5
GRID = {
    "embedding_ratio": [0.25, 0.35, 0.45],
    "glu_expansion": [2, 2.66, 3, 4],
    "tied": ["true", "false"],
    "heads": 4,
    "multiple": 1,
}
#: Questions of each exam of SmallBench that every run is asked.
ITEMS = 100
QUESTIONS: dict[str, dict[str, Any]] = {
    "300k": {
        "what": "text",
        "design": {"params": "300k", **GRID},
        "overrides": ["train.steps=2000", "task.vocab_size=1000"],
    },
    "3m": {
        "what": "text",
        "design": {"params": "3m", **GRID},
        "overrides": [
            "train.steps=1000",
            "task.vocab_size=4000",
            "train.batch_size=32",
            "train.precision=bf16",
        ],
    },
    "rates": {
        "what": "text",
        "vary": {
            "model.d_model": [32, 64, 128],
            "train.lr": ["1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2"],
        },
        "overrides": ["train.steps=1000", "task.vocab_size=1000"],
    },
}


def small(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return a question with two cells of six steps: does it run?"""
    made = dict(question)
    for kind in ("design", "vary"):
        if kind in question:
            lists = [key for key, value in question[kind].items() if isinstance(value, list)]
            made[kind] = {
                key: value if key not in lists else value[: 2 if key == lists[-1] else 1]
                for key, value in question[kind].items()
            }
    fewer = {"train.steps": "6", "train.evaluate_every": "3", "train.batch_size": "2"}
    given = dict(setting.split("=", 1) for setting in question["overrides"])
    made["overrides"] = [f"{key}={value}" for key, value in {**given, **fewer}.items()]
    return made


def answer(
    name: str,
    *,
    device: str,
    seeds: int = SEEDS,
    folder: Path = FOLDER,
    jobs: int | None = None,
    quick: bool = False,
    deadline: float | None = None,
) -> dict[str, Any] | str:
    """Train what is missing of one question, ask SmallBench of every run, and return both ranks;
    where the deadline came first, how far it is.
    """
    began = time.monotonic()
    asked = small(QUESTIONS[name]) if quick else QUESTIONS[name]
    name = f"{name}-quick" if quick else name
    with stopped_after(deadline):
        done = gf.sweep(
            asked["what"],
            design=asked.get("design"),
            vary=asked.get("vary"),
            overrides=asked["overrides"],
            seeds=2 if quick else seeds,
            device=device,
            jobs=jobs,
            name=name,
            sweeps=folder,
            resume=(folder / name / "sweep.json").is_file(),
            yes=True,
        )
    seconds = time.monotonic() - began
    if done.stopped:
        ended = sum(result.has_ended for result in done.results.values())
        runs = len(done.plan.cells) * done.plan.sweep.seeds
        return f"the deadline came first: {ended} of {runs} runs; the same command goes on"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": str(torch.__version__).partition("+")[0],
        "seconds": round(seconds),
        "steps": done.plan.cells[0].spec.train.steps,
        "shapes": {str(cell.index): shape_of(cell.spec.model) for cell in done.plan.cells},
        "bits": json_numbers(done.ranking.to_dict()),
        "exams": json_numbers(examined(done, items=1 if quick else ITEMS)),
    }


@contextlib.contextmanager
def stopped_after(deadline: float | None) -> Iterator[None]:
    """Send this process what Ctrl-C sends, after some seconds: a sweep saves its runs and ends."""
    if deadline is None:
        yield
        return
    timer = threading.Timer(deadline, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shape_of(spec: ModelSpec) -> dict[str, int]:
    """Return the width and the depth that a cell's budget leaves."""
    return {"width": spec.d_model, "layers": sum(1 for _ in spec.decoder.blocks())}


def examined(done: Sweep, *, items: int) -> dict[str, Any]:
    """Rank the cells of a sweep by SmallBench: the mean over exams of what is above chance."""
    names = {row.cell: row.name for row in done.ranking.rows}
    seeds = range(done.plan.sweep.seeds)
    paths = [str(done.run_path(cell, seed)) for cell in names for seed in seeds]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        found_marks = [*pool.map(functools.partial(above_chance, items=items), paths)]
    marks = np.array(found_marks).reshape(len(names), len(seeds))
    cells = [*names]
    found = rank(
        [*names.values()],
        marks,
        metric="above chance",
        unit="",
        smaller_is_better=False,
        cells=cells,
        difference=done.plan.sweep.difference,
    )
    settings = [done.plan.cells[cell].settings for cell in cells]
    return {
        **found.to_dict(),
        "effects": [asdict(e) for e in main_effects(settings, marks, done.plan.factors())],
    }


def above_chance(path: str, *, items: int) -> float:
    """Return the share of what chance leaves that a run gets right, the mean over exams."""
    torch.set_num_threads(1)
    adapter = load_native(path)
    examinee = examinee_of(adapter.model, adapter.tokenizer, name=Path(path).name)
    asked = [name for name in exams() if name != BITS]
    scores = smallbench(examinee, items=items, only=asked).scores
    shares = [
        (one.score - one.chance) / (1 - one.chance)
        for one in scores
        if one.score is not None and one.chance is not None
    ]
    return float(np.mean(shares))


# --- the page -------------------------------------------------------------------------------------


def read(path: Path = FILE) -> dict[str, Any]:
    """Return the answers that are there, by question."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def keep(name: str, found: Mapping[str, Any], path: Path = FILE) -> None:
    """Keep one question's answer."""
    every = {**read(path), name: found}
    path.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")


def part(_: Mapping[str, Any]) -> str:
    """Return the page's part: a table of the cells, groups and effects of each question."""
    return "\n\n".join(section(name, found) for name, found in read().items())


def section(name: str, found: Mapping[str, Any]) -> str:
    """Return one question's tables."""
    bits, shapes, exams_ = found["bits"], found["shapes"], found.get("exams")
    marks = {} if exams_ is None else {row["cell"]: row for row in exams_["rows"]}
    head = ["", "cell", "width x layers", bits["metric"].replace("_", " "), "behind the best"]
    rows = []
    for row in bits["rows"]:
        shape, gap = shapes[str(row["cell"])], row["best"]
        clear = gap is not None and gap["p"] < 0.05
        behind = "" if gap is None else f"{gap['difference']:+.4f}{' **worse**' if clear else ''}"
        half = (row["high"] - row["low"]) / 2
        line = [
            str(row["rank"]),
            row["name"].replace("_", " "),
            f"{shape['width']} x {shape['layers']}",
            f"{row['mean']:.4f} ± {half:.4f}",
            behind,
        ]
        if marks:
            mark = marks[row["cell"]]
            line.append(f"{mark['mean']:.1%} ± {(mark['high'] - mark['low']) / 2:.1%}")
        rows.append(line)
    cells, seeds = len(bits["rows"]), bits["seeds"]
    took = f"{found['seconds']} s on one {found['device']}, torch {found['torch']}"
    about = f"**{name}**: {cells} cells, {seeds} seeds, {found['steps']:,} steps each; {took}."
    reasoning = {} if exams_ is None else {level_of(each): each for each in exams_["effects"]}
    effects = [
        [
            each["factor"].replace("_", " "),
            each["value"],
            signed(each),
            *([signed(reasoning[level_of(each)], percent=True)] if reasoning else []),
        ]
        for each in bits["effects"]
    ]
    changed = ["change of bits", *(["change of SmallBench"] if reasoning else [])]
    return "\n\n".join(
        (
            about,
            table([*head, *(["SmallBench above chance"] if marks else [])], rows),
            "\n".join(f"- {group['text']}" for group in bits["groups"]),
            table(["main effect", "level", *changed], effects),
        )
    )


def level_of(effect: Mapping[str, Any]) -> tuple[str, str]:
    """Return which factor an effect is of, and at which of its levels."""
    return effect["factor"], effect["value"]


def signed(effect: Mapping[str, Any], *, percent: bool = False) -> str:
    """Return an effect with its interval; one that holds zero was not seen."""
    seen = effect["low"] > 0 or effect["high"] < 0
    form = "{:+.2%}" if percent else "{:+.4f}"
    middle, low, high = (form.format(effect[key]) for key in ("effect", "low", "high"))
    return f"{middle} ({low} to {high}){'' if seen else ', no effect seen'}"
