"""The figures of docs/learn, one a chapter, each drawn from a run made here.

A picture's bytes depend on its numbers and on matplotlib alone: no date, no version inside.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glassformer.byhand.embedding import sinusoids
from glassformer.data.batch import Batch
from glassformer.lens.show.block_picture import inside_picture
from glassformer.lens.show.diagram import diagram
from glassformer.lens.show.outline import outline
from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.spec.model import ModelSpec
from glassformer.spec.presets import core, preset
from glassformer.spec.serialize import override
from pages import runs
from pages.quotes import ROOT

FOLDER = ROOT / "docs" / "images" / "learn"
BLUE, RED, GREY = "#2a6f97", "#c1443c", "#8a8a8a"


def attention() -> Figure:
    """How sharp a fresh row is, and what passes back through it, with and without the scale."""
    figure, (sharp, back) = _panels(2)
    widths = [2**power for power in range(1, 10)]
    for scaled, colour, name in ((False, RED, "q·k"), (True, BLUE, "q·k / √d_k")):
        found = [runs.saturation(width, scaled=scaled) for width in widths]
        sharp.plot(widths, [largest for largest, _ in found], "o-", color=colour, label=name)
        back.plot(widths, [size for _, size in found], "o-", color=colour, label=name)
    for axes, title in ((sharp, "mean largest weight of 32"), (back, "mean sum of p (1 - p)")):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="d_k", title=title, ylim=(0, 1))
    sharp.legend(frameon=False)
    return figure


def heads() -> Figure:
    """The four heads of the last cross-attention of a model that has learned to reverse."""
    run = runs.reverse("train.steps=600")
    words = [3, 11, 0, 5, 9, 8, 1]
    ids = [3 + word for word in words]
    answer = [1, *reversed(ids)]
    asked = Inputs(torch.tensor([answer]), None, source_BS=torch.tensor([[*ids, 2]]))
    weights_NTS = runs.weights_of(
        run.model, "decoder.blocks.1.cross.weights", lambda model: model(asked)
    )[0]
    figure, panels = _panels(len(weights_NTS), height=2.6)
    for number, (axes, weights_TS) in enumerate(zip(panels, weights_NTS, strict=True)):
        axes.imshow(weights_TS, cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"head {number}")
        axes.set_xticks(range(len(ids) + 1), [*map(str, words), "EOS"])
        axes.set_yticks(range(len(answer)), [*map(str, reversed(words)), "EOS"])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    panels[0].set_ylabel("says")
    figure.supxlabel("reads", fontsize=9)
    return figure


def positions() -> Figure:
    """The table, how alike two places are, and what happens to `reverse` without it."""
    figure, (table, alike, losses) = _panels(3)
    values = sinusoids(64, d_model=64)
    table.imshow(values, cmap="RdBu", aspect="auto", interpolation="nearest", vmin=-1, vmax=1)
    table.set(title="PE, d_model 64", xlabel="column", ylabel="position")
    for place, colour in ((20, BLUE), (40, RED)):
        alike.plot(values @ values[place], color=colour, label=f"with {place}")
    alike.set(title="PE(p) · PE(q)", xlabel="p")
    alike.legend(frameon=False)
    for name, extra, colour in (
        ("sinusoids", (), BLUE),
        ("none", ("model.position=NoPosition",), RED),
    ):
        run = runs.reverse("train.steps=300", *extra)
        _curve(losses, [record.loss for record in run.records], color=colour, label=name)
    losses.set(title="reverse, training loss", xlabel="step", ylim=(0, 3.7))
    losses.legend(frameon=False)
    return figure


def layers() -> Figure:
    """Gradients of the decoder's layers before the first step, norm before and after."""
    figure, (axes,) = _panels(1, width=5.2)
    for pre, colour, name in ((False, RED, "post-norm"), (True, BLUE, "pre-norm")):
        sizes = runs.gradients_at_init(pre_norm=pre)
        axes.plot(range(1, len(sizes) + 1), sizes, "o-", color=colour, label=name)
    axes.set(
        xlabel="decoder layer (12 is next to the loss)",
        ylabel="length of the gradient",
        title="down_proj at initialisation, 12 + 12 layers",
        yscale="log",
    )
    axes.legend(frameon=False)
    return figure


def masks() -> Figure:
    """Where attention of real models falls: all it may see, and nothing else."""
    figure, panels = _panels(4, height=2.6)
    batch = Batch.of([[5, 6, 7, 8, 9, 10, 11, 12], [9, 10, 11, 12, 13]], side="left")
    window = override(preset("qwen-sliding"), ["decoder.layers.1.block.attention.window=3"])
    model = _fresh(core(vocab_size=20, d_model=16))
    shown = (
        ("causal", model, "blocks.0.attn.weights", 0),
        ("causal, padded left", model, "blocks.0.attn.weights", 1),
        ("window of 3", _fresh(window), "blocks.2.attn.weights", 0),
        ("both ways, padded left", _fresh(preset("digits")), "blocks.0.attn.weights", 1),
    )
    for axes, (title, asked, tap, row) in zip(panels, shown, strict=True):
        weights_TS = runs.weights_of(asked, tap, lambda model: model(batch))[row, 0]
        axes.imshow(weights_TS, cmap="Blues", vmin=0, vmax=0.6)
        axes.set(title=title, xlabel="key", xticks=[], yticks=[])
    panels[0].set_ylabel("query")
    return figure


def training() -> Figure:
    """The smoothed loss on its floor, the plain one below; and a rate that needs its warmup."""
    figure, (floor, warm) = _panels(2)
    records = runs.reverse("train.steps=600", "train.label_smoothing=0.1").records
    _curve(floor, [record.loss for record in records], color=RED, label="smoothed by 0.1")
    _curve(floor, [record.nll["next"] for record in records], color=BLUE, label="plain")
    lowest = smoothing_floor(20, 0.1)
    floor.axhline(lowest, color=GREY, ls="--", lw=1)
    floor.text(0, lowest - 0.2, f"floor {lowest:.3f}", color=GREY)
    floor.set(title="reverse: two losses of one run", xlabel="step", ylim=(0, 3.7))
    floor.legend(frameon=False)
    for steps, colour in ((0, RED), (100, BLUE)):
        changes = ("train.steps=300", "train.lr=0.01", f"train.schedule.warmup={steps}")
        losses = [record.loss for record in runs.reverse(*changes).records]
        _curve(warm, losses, color=colour, label=f"warmup {steps}")
    warm.set(title="rate 0.01, five times the recipe's", xlabel="step", ylim=(0, 3.7))
    warm.legend(frameon=False)
    return figure


def smoothing_floor(classes: int, smoothing: float) -> float:
    """The entropy of the target distribution: no model's smoothed loss is below it."""
    right = 1 - smoothing + smoothing / classes
    wrong = smoothing / classes
    return -right * math.log(right) - (classes - 1) * wrong * math.log(wrong)


def decoding() -> Figure:
    """Wider beams, emptier answers; and what a length penalty does about it."""
    figure, (empty, length) = _panels(2)
    widths = (1, 2, 4, 8, 16, 32)
    for smoothing, alpha, colour, name in (
        ("0.1", 0.0, RED, "smoothed, no penalty"),
        ("0.1", 1.0, BLUE, "smoothed, length^1"),
        ("0.0", 0.0, GREY, "not smoothed, no penalty"),
    ):
        changes = () if smoothing == "0.0" else (f"train.label_smoothing={smoothing}",)
        run = runs.reverse("train.steps=600", *changes)
        found = [runs.searched(run, width=width, alpha=alpha) for width in widths]
        empty.plot(widths, [100 * share for share, _ in found], "o-", color=colour, label=name)
        length.plot(widths, [mean for _, mean in found], "o-", color=colour, label=name)
    for axes, title in ((empty, "empty answers, %"), (length, "mean length of the answer")):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="beams", title=title)
    empty.legend(frameon=False)
    length.set_ylim(0, 13)
    return figure


def proof() -> Figure:
    """Every row of the certificate and every planted fault: rounding and bugs do not meet."""
    figure, (axes,) = _panels(1, width=8.0)
    marks = (
        ("passed, float64", runs.certificate(), "float64", 1, BLUE),
        ("passed, float32", runs.certificate(), "float32", 2, BLUE),
        ("planted faults, float64", runs.damaged(), "float64", 3, RED),
        ("planted faults, float32", runs.damaged(), "float32", 4, RED),
    )
    lowest = 1e-17
    for name, findings, dtype, height, colour in marks:
        gaps = runs.gaps(findings, dtype)
        places = np.random.default_rng(height).uniform(-0.25, 0.25, len(gaps)) + height
        axes.plot(np.maximum(gaps, lowest), places, "o", ms=3, color=colour, alpha=0.5, mew=0)
        axes.text(5e1, height, f"{name} ({len(gaps)})", va="center", fontsize=9)
    for bar, name in ((1e-12, "float64 may differ by 1e-12"), (1e-5, "float32 by 1e-5")):
        axes.axvline(bar, ymax=0.88, color=GREY, ls="--", lw=1)
        axes.text(bar, 4.55, name, ha="center", color=GREY, fontsize=8)
    axes.set(xscale="log", xlim=(lowest / 2, 2e1), ylim=(0.5, 4.9), yticks=[])
    axes.set_xlabel("largest difference (1e-17: none at all)")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "attention": attention,
    "heads": heads,
    "positions": positions,
    "layers": layers,
    "masks": masks,
    "training": training,
    "decoding": decoding,
    "proof": proof,
}


def model_picture() -> str:
    """The stack of chapter 0's model."""
    return diagram(_smallest(), layout="narrow").svg()


def attention_picture() -> str:
    """The inside of that model's attention."""
    layer = outline(_smallest())[0].layers[0]
    part = next(part for part in layer.parts if part.kind == "attn")
    return inside_picture(part, style=True).svg()


def _smallest() -> ModelSpec:
    return preset("core", vocab_size=8, d_model=32, n_heads=2, d_ff=64, max_seq_len=16)


#: Pictures that are drawn from a spec, as SVG.
PICTURES: dict[str, Callable[[], str]] = {
    "model": model_picture,
    "attention-inside": attention_picture,
}


def draw(name: str, *, folder: Path = FOLDER) -> Path:
    """One figure as a PNG file, or a picture as SVG."""
    if name in PICTURES:
        path = folder / f"{name}.svg"
        path.write_text(PICTURES[name]() + "\n", encoding="utf-8")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    with runs.one_thread():
        figure = FIGURES[name]()
    figure.savefig(path, format="png", dpi=80, metadata={"Software": None})
    return path


def _panels(count: int, *, width: float = 9.0, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(1, count)))
    for axes in panels:
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _curve(axes: Axes, values: list[float], *, color: str, label: str, every: int = 6) -> None:
    """Means of `every` steps: the noise of single batches is not what is shown."""
    means = np.reshape(values, (-1, every)).mean(1)
    axes.plot(np.arange(len(means)) * every + every / 2, means, color=color, lw=1.2, label=label)


def _fresh(spec):  # type: ignore[no-untyped-def]
    return build(spec, generator=torch.Generator().manual_seed(0)).eval()
