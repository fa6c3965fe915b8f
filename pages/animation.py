"""The moving picture of the README: a model learns to reverse sequences, step by step.

A real run of the `reverse` recipe; at growing intervals the model answers one held-out sequence by
greedy decoding, and its cross-attention is read. One SVG file, animated by CSS, without a script;
whoever prefers reduced motion sees the last frame.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glassformer.data.build_task import build_task
from glassformer.generation.beam import beam_search
from glassformer.generation.native.stepper import NativeStepper
from glassformer.lab.recipes import recipe
from glassformer.lens.inspection import inspect
from glassformer.models.prompts import Prompts
from glassformer.spec.decoding import BeamSpec
from glassformer.training.fit import fit
from glassformer.training.torch_engine import TorchEngine
from pages.quotes import ROOT
from pages.runs import one_thread

PATH = ROOT / "docs" / "images" / "learning.svg"
#: Steps at which the model is looked at: close together while it learns most.
STEPS = (1, *range(20, 300, 20), 300, 330, 360, 400, 450, 500, 600, 700, 850, 1000)
SECONDS = 0.45  # a frame; the last one stays for eight
STAY = 8
CELL = 26
EXAMPLE = 0


@dataclass(frozen=True)
class Frame:
    """The model at one step: its loss, what it answers, where its answers read the source."""

    step: int
    loss: float
    answer: tuple[str, ...]
    weights_TS: np.ndarray


@dataclass(frozen=True)
class Film:
    """A held-out source, the right answer, and the frames."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    frames: tuple[Frame, ...]
    losses: tuple[float, ...]


def record() -> Film:
    """Train, and look at the model from time to time."""
    spec = recipe("reverse", ())
    task = build_task(spec.task)
    engine = TorchEngine.fresh(spec.model, spec.train)
    sizes = task.lengths("val")
    row = int(np.flatnonzero(sizes == np.sort(sizes)[len(sizes) // 2])[EXAMPLE])
    batch = task.batch("val", np.array([row]))
    assert batch.source is not None
    word = task.tokenizer.decode
    source = tuple(word([int(i)]) for i in batch.source.tokens[0])
    right = [int(i) for i in batch.targets["next"][0]]
    prompts = Prompts.of([[task.tokenizer.bos]], sources=batch.source.tokens)
    greedy = BeamSpec(width=1, n_best=1, max_new_tokens=len(right) + 2, eos=(task.tokenizer.eos,))
    frames, losses = [], []
    for seen in fit(engine, task, spec.train):
        losses.append(float(seen.loss))
        if seen.step not in STEPS:
            continue
        model = engine.model.eval()
        found = beam_search(NativeStepper(model), prompts, spec=greedy)[0].hypotheses[0].tokens
        looked = inspect(model, batch).attention.of("cross")
        last = len(looked.weights) - 1
        weights = looked.mean(last).tensor.float().numpy()
        mean = float(np.mean(losses[-20:]))
        frames.append(Frame(seen.step, mean, tuple(word([int(i)]) for i in found), weights))
        model.train()
    target = tuple(word([i]) for i in right)
    return Film(source, target, tuple(frames), tuple(losses))


def picture(film: Film) -> str:
    """Return the film as one animated SVG."""
    count = len(film.frames)
    total = (count - 1 + STAY) * SECONDS
    shown = 100 * SECONDS / total
    left, top = 64, 92
    S, T = len(film.source), len(film.target)
    width, height = 760, top + CELL * T + 46
    right = left + CELL * S + 70
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" aria-label="a model learns to reverse a sequence">',
        "<style>",
        ":root{--paper:#fff;--ink:#15181c;--muted:#59616b;--line:#c9ced5;--accent:#2b50d6;"
        "--good:#0b6b40;--bad:#b3261e}"
        "@media(prefers-color-scheme:dark){:root{--paper:#181b1f;--ink:#e8eaed;--muted:#9ba5b0;"
        "--line:#434b55;--accent:#8fb0ff;--good:#72d6a4;--bad:#ff9a90}}"
        "text{font:13px ui-monospace,'DejaVu Sans Mono',Menlo,monospace;fill:var(--ink)}"
        ".m{fill:var(--muted)}.b{font-weight:700;font-size:15px}"
        ".g{fill:var(--good)}.r{fill:var(--bad)}.c{fill:var(--accent)}"
        ".l{fill:none;stroke:var(--accent);stroke-width:1.8}.a{fill:none;stroke:var(--line)}"
        f".f{{opacity:0;animation:s {total:g}s linear infinite}}"
        f".z{{opacity:0;animation:z {total:g}s linear infinite}}"
        f"@keyframes s{{0%,{shown:.3f}%{{opacity:1}}{shown + 0.001:.3f}%,100%{{opacity:0}}}}"
        f"@keyframes z{{0%,{100 - shown * STAY:.3f}%{{opacity:0}}"
        f"{100 - shown * STAY + 0.001:.3f}%,100%{{opacity:1}}}}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none}.z{animation:none;opacity:1}}",
        "</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="var(--paper)"/>',
        '<text x="20" y="30" class="b">glass train reverse</text>',
        f'<text x="{left}" y="{top - 30}" class="m">the source</text>',
        f'<text x="{right}" y="{top - 30}" class="m">asked&#160;&#160;&#160;&#160;'
        f"{' '.join(film.source[:-1])}</text>",
        f'<rect x="{left}" y="{top}" width="{CELL * S}" height="{CELL * T}" class="a"/>',
    ]
    for s, name in enumerate(film.source):
        x = left + CELL * (s + 0.5)
        out.append(f'<text x="{x:g}" y="{top - 9}" text-anchor="middle">{_short(name)}</text>')
    for t, name in enumerate(film.target):
        y = top + CELL * (t + 0.5) + 5
        out.append(f'<text x="{left - 9}" y="{y:g}" text-anchor="end">{_short(name)}</text>')
    below = top + CELL * T + 26
    out.append(
        f'<text x="{left}" y="{below}" class="m">where each answer reads it: cross-attention, '
        "last layer</text>"
    )
    out += _axes(film, right, top + 20, width - right - 24, CELL * T - 44)
    for number, frame in enumerate(film.frames):
        last = number == count - 1
        delay = "" if last else f' style="animation-delay:{number * SECONDS:g}s"'
        kind = "z" if last else "f"
        inside = "".join(_frame(film, frame, left, top, right, width))
        out.append(f'<g class="{kind}"{delay}>{inside}</g>')
    return "".join(out) + "</svg>\n"


def _short(word: str) -> str:
    return {"EOS": "end", "BOS": "", "PAD": ""}.get(word, word)


def _axes(film: Film, x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield f'<path d="M{x} {y}V{y + height}H{x + width:g}" class="a"/>'
    yield f'<text x="{x + 6}" y="{y + 12}" class="m">loss</text>'
    steps = f"{len(film.losses):,} steps"
    below = y + height + 18
    yield f'<text x="{x + width:g}" y="{below}" class="m" text-anchor="end">{steps}</text>'


def _point(film: Film, step: int, x: float, y: float, width: float, height: float) -> str:
    """Return where the mean loss of the last twenty steps lies."""
    mean = float(np.mean(film.losses[max(0, step - 20) : step]))
    return (
        f"{x + width * step / len(film.losses):.1f} "
        f"{y + height * (1 - mean / max(film.losses[0], 1e-9)):.1f}"
    )


def _frame(
    film: Film, frame: Frame, left: float, top: float, right: float, width: float
) -> Iterator[str]:
    for t, row in enumerate(frame.weights_TS):
        for s, weight in enumerate(row):
            if weight >= 0.03:
                yield (
                    f'<rect x="{left + CELL * s + 1}" y="{top + CELL * t + 1}" '
                    f'width="{CELL - 2}" height="{CELL - 2}" rx="3" class="c" '
                    f'fill-opacity="{weight:.2f}"/>'
                )
    yield f'<text x="230" y="30">step {frame.step:,}, loss {frame.loss:.3f}</text>'
    said = []
    for number, word in enumerate(word for word in frame.answer if word != "EOS"):
        good = number < len(film.target) and word == film.target[number]
        said.append(f'<tspan class="{"g" if good else "r"}">{word}</tspan>')
    complete = frame.answer == film.target or frame.answer == film.target[:-1]
    words = " ".join(said) or '<tspan class="m">(nothing)</tspan>'
    yield f'<text x="{right}" y="{top - 9}"><tspan class="m">answered </tspan>{words}'
    yield ('<tspan class="g"> ✓</tspan>' if complete else "") + "</text>"
    box = (right, top + 20, width - right - 24, CELL * len(film.target) - 44)
    steps = range(10, frame.step + 1, 10) if frame.step >= 10 else (frame.step,)
    yield f'<path d="M{"L".join(_point(film, step, *box) for step in steps)}" class="l"/>'


def draw(path: Path = PATH) -> Path:
    """Train and write the file."""
    with one_thread():
        film = record()
    path.write_text(picture(film), encoding="utf-8")
    return path
