"""Language models: bits per byte beside yardsticks, SmallBench beside chance.

The yardsticks read the same held-out manuals as the `lm` recipes: uniform and unigram over the same
tokens, and two compressors that have seen the training text before. Random models show that chance
is chance. Rows have no ratio. `--device cuda` adds `lm-10m`.
"""

import bz2
import lzma
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.clock import said
from glassformer.adapters.load import load
from glassformer.data.tasks.text import Text, held_out_text, read_corpus
from glassformer.data.tokenizers.vocab import Bytes, Tokenizer
from glassformer.lab.measure.evaluate import evaluate
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import TrainingRun
from glassformer.lab.smallbench.question import examinee_of, mark
from glassformer.lab.smallbench.suite import BITS, EXAMS, ITEMS, interval, questions_of, smallbench
from glassformer.models.model import build
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec
from glassformer.spec.presets import budget_lm, core, modern_lm
from glassformer.spec.tasks import TextTask

RANDOM = 5


row = partial(said, "language")


def yardsticks(task: Text) -> Iterator[dict[str, object]]:
    """What the held-out part costs those who have learned nothing but counts, or repetitions."""
    facts, size = task.facts(), task.tokenizer.vocab_size
    width = facts["bytes_per_token"]["val"]
    parts = {split: _ids(task, split) for split in ("train", "val")}
    counts = np.bincount(parts["train"], minlength=size) + 1.0  # one more each: none is impossible
    unigram = -np.log2(counts / counts.sum())[parts["val"]].mean() / width
    yield row("held-out manuals", f"uniform over {size:,} tokens {math.log2(size) / width:.3f}")
    yield row("held-out manuals", f"unigram {unigram:.3f}")
    held_out = held_out_text(task.spec).encode()
    whole = b"\n\n".join(
        document.content.strip(b"\n")
        for document in read_corpus(task.spec.path, seed=task.spec.seed)
    )
    before = whole[: len(whole) + 1 - len(held_out)]
    squeezers: dict[str, Callable[[bytes], bytes]] = {
        "bz2": lambda data: bz2.compress(data, 9),
        "xz": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    for name, squeeze in squeezers.items():
        alone = 8 * len(squeeze(held_out)) / len(held_out)
        after = 8 * (len(squeeze(before + held_out)) - len(squeeze(before))) / len(held_out)
        yield row("held-out manuals", f"{name} {alone:.3f}, after the training text {after:.3f}")


def _ids(task: Text, split: str) -> np.ndarray:
    windows = task.batch(split, np.arange(task.sizes()[split]))
    return windows.targets["next"].ravel()


def trained(name: str, device: str) -> Iterator[dict[str, object]]:
    """A recipe from fresh weights; its held-out bits per byte and its SmallBench."""
    with tempfile.TemporaryDirectory() as place:
        run = TrainingRun(recipe(name), Path(place) / "run", device=device)
        run.prepare()
        began, clock = time.process_time(), time.perf_counter()
        for _ in run.events():
            pass
        spent = f"{time.process_time() - began:.0f} CPU s, {time.perf_counter() - clock:.0f} s"
        adapter = load(Path(place) / "run", device=device)
        run.engine.load_weights({n: p.detach().cpu().numpy() for n, p in _own(adapter.model)})
        found = evaluate(run.engine, run.task, split="val")
        size = f"{count_parameters(run.spec.model):,} parameters"
        bits = f"bits per byte {found.oracle['bits_per_byte']:.3f}"
        yield row(name, f"{size}, {bits}, best step {run.progress.best_step}, {spent}")
        examinee = examinee_of(adapter.model, adapter.tokenizer, name=name)
        for score in smallbench(examinee).scores:
            said = "" if score.exact is None else f", said {score.exact:.1%}"
            scale = 1 if score.exam == BITS else 100
            found_ = (
                f"{scale * score.score:.3f} ({scale * score.low:.3f} to {scale * score.high:.3f})"
            )
            yield row(f"{name}, {score.exam}", f"{found_}, chance {scale * score.chance:.3f}{said}")


def taught() -> Iterator[dict[str, object]]:
    """An exam can be passed: a small model that reads right sentences of the grammar, no others."""
    exam = EXAMS["agreement"]
    questions = [
        one for group in questions_of(exam, items=4_000, seed=99) for one in group.questions
    ]
    order = np.random.default_rng(0).permutation(len(questions))
    lines = [questions[i].context + questions[i].answer for i in order]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "sentences.txt").write_text("\n".join(lines) + "\n")
        overrides = (
            f"task.path={Path(place) / 'sentences.txt'}",
            "engine=torch",
            "task.vocab_size=400",
            "task.length=24",
            "train.steps=1000",
            "train.batch_size=32",
            "model.decoder.layers.count=2",
        )
        run = TrainingRun(recipe("lm", overrides), Path(place) / "run")
        run.prepare()
        began = time.process_time()
        for _ in run.events():
            pass
        spent = f"{time.process_time() - began:.0f} CPU s"
        examinee = examinee_of(run.engine.model, run.task.tokenizer, name="taught")
        for score in smallbench(examinee, only=["induction", "agreement"]).scores:
            found = f"{score.score:.1%} ({score.low:.1%} to {score.high:.1%})"
            yield row(f"taught agreement: {score.exam}", f"{found}, {spent}")


def _own(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()


def untrained(tokenizer: Tokenizer) -> list[ModelSpec]:
    """Five specs that differ in positions, norms and ties."""
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 64, "d_ff": 172, "max_seq_len": 128}
    return [
        budget_lm(**sizes, n_layers=3, n_heads=4),
        modern_lm(**sizes, n_layers=3, n_heads=4, n_kv_heads=2),
        budget_lm(**sizes, n_layers=2, n_heads=8, tied=False),
        core(**sizes, n_layers=4, n_heads=2),
        modern_lm(**sizes, n_layers=1, n_heads=8, n_kv_heads=1, tied=False),
    ]


def chance(kind: str, tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """Random models: of all intervals, how many hold chance, and how far the worst score is off."""
    inside = {level: dict.fromkeys(EXAMS, 0) for level in (0.999, 0.95)}
    worst = dict.fromkeys(EXAMS, 0.0)
    for seed, spec in enumerate(untrained(tokenizer)):
        model = build(spec, generator=torch.Generator().manual_seed(seed))
        examinee = examinee_of(model, tokenizer, name=kind)
        for name, exam in EXAMS.items():
            groups = questions_of(exam, items=ITEMS, seed=0)
            level_of_chance = 1 / len(groups[0].questions[0].choices)
            marks = mark(examinee, groups)
            score = marks.points.sum() / marks.questions.sum()
            worst[name] = max(worst[name], abs(score - level_of_chance))
            for level, counts in inside.items():
                low, high = interval(marks.points, marks.questions, seed=0, confidence=level)
                counts[name] += low - 1e-12 <= level_of_chance <= high + 1e-12
    for level, counts in inside.items():
        held = ", ".join(f"{name} {count}" for name, count in counts.items())
        yield row(f"{RANDOM} random models, {kind}, {level:.1%} intervals holding chance", held)
    farthest = ", ".join(f"{name} {off:.1%}" for name, off in worst.items())
    yield row(f"{RANDOM} random models, {kind}, farthest from chance", farthest)


def run(device: str = "cpu") -> Iterator[dict[str, object]]:
    """Yardsticks, chance, then the recipes."""
    task = Text(TextTask())
    yield from yardsticks(task)
    yield from chance("bytes", Bytes())
    yield from chance("pieces", task.tokenizer)
    yield from taught()
    for name in ("lm", "lm-modern", *(("lm-10m",) if device == "cuda" else ())):
        yield from trained(name, device)
