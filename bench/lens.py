"""What looking costs, and what is seen: capture off and on, probes, positions and roles of digits.

Times are CPU times of one thread, sides in turn, medians; `ratio` is to the plain forward. The
digits model is the recipe's, trained here, and looked at on examples that no split of it holds.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from bench.bare import bare_decoder
from bench.clock import interleave, rows, said
from bench.findings.positional import COPYING, SITES, cut_accuracy, positional_attention
from bench.learning import FRESH, prompts
from glassformer.cli.shell.process import keep_freed_memory
from glassformer.data.build_task import build_task
from glassformer.data.tasks.digits import Digits
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.artifacts import take_probes
from glassformer.lab.runs.run import TrainingRun
from glassformer.lens.capture import residual_rows
from glassformer.lens.measure.roles import head_roles
from glassformer.models.model import Model, build
from glassformer.nn.taps import Taps
from glassformer.spec import presets
from glassformer.training.torch_engine import TorchEngine

#: Width, layers, heads, batch, tokens: the text recipe's model; wider; and many short rows.
SIZES = ((64, 3, 4, 1, 128), (256, 6, 8, 1, 64), (256, 6, 8, 1, 128), (256, 6, 8, 8, 64))
VOCAB = 4_096
#: The recipe as it stands, then variants of it that no figure rests on.
VARIANTS = (
    (),
    ("train.seed=1",),
    ("train.seed=2",),
    ("model.decoder.layers.count=1",),
    ("model.decoder.layers.block.attention.causal=true",),
)


def capture(
    *, rounds: int, sizes: tuple[tuple[int, ...], ...] = SIZES
) -> Iterator[dict[str, object]]:
    """A forward without taps in its code, one with none asked for, one that reads."""
    for d_model, layers, heads, batch, length in sizes:
        spec = presets.budget_lm(
            vocab_size=VOCAB,
            d_model=d_model,
            d_ff=round(d_model * 2.6875),
            n_layers=layers,
            n_heads=heads,
            max_seq_len=length,
        )
        ours = build(spec, generator=torch.Generator().manual_seed(0)).eval()
        bare, cut = bare_decoder(spec)
        bare.load_state_dict(ours.state_dict())
        bare.eval()
        tokens = torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
        sides = {
            "without taps": plain(bare, tokens),
            "capture off": plain(ours, tokens),
            "attention and norms captured": captured(ours, tokens),
        }
        assert torch.equal(sides["without taps"](), sides["capture off"]())
        case = f"B{batch} T{length} d{d_model} {layers} layers {heads} heads"
        times = interleave(sides, rounds=rounds, inner=3, clock=time.thread_time)
        yield from rows(times, bench="lens", case=case, baseline="without taps")
        hooks = sum(len(part._forward_hooks) for part in ours.modules())
        yield said("lens", case, f"{hooks} hooks registered, {cut} taps cut out for comparison")


def plain(model: Model, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A forward."""

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens)["next"]

    return call


def captured(model: Model, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A forward that keeps every layer's attention, and the norm of every residual."""
    residual = [tap for _, tap in residual_rows(model.spec)]

    def call() -> torch.Tensor:
        taps = Taps(read=["*.attn.weights", *residual])
        with torch.no_grad():
            answers = model(tokens, taps=taps)
            norms = [taps.seen[name].norm(dim=-1) for name in residual]
        assert len(taps.seen) == len(norms) + model.spec.n_layers
        return answers["next"]

    return call


def trained(overrides: tuple[str, ...], folder: Path) -> tuple[TrainingRun, float]:
    """The recipe's run, and its CPU seconds."""
    run = TrainingRun(recipe("digits", ("engine=torch", *overrides)), folder)
    run.prepare()
    began = time.process_time()
    for _ in run.events():
        pass
    return run, time.process_time() - began


def fresh_rows(run: TrainingRun) -> tuple[Digits, np.ndarray]:
    """Examples that no split of the run's task holds."""
    held = {prompt for split in run.task.sizes() for prompt in prompts(run.task, split)}
    task = build_task(FRESH)
    assert isinstance(task, Digits)
    return task, np.array([i for i, p in enumerate(prompts(task, "train")) if p not in held])


def probes(run: TrainingRun, seconds: float) -> Iterator[dict[str, object]]:
    """What the run's probes cost of its time, and what they take on disk."""
    count = run.spec.train.steps // run.spec.train.evaluate_every
    folder = run.directory.folder / "probes"

    def once() -> None:
        seen = take_probes(run.engine, run.task, examples=run.spec.train.probes, step=1)
        run.directory.write("once.safetensors", seen.to_bytes())

    times = interleave({"probe": once}, rounds=20, inner=1, clock=time.process_time)["probe"]
    share = count * sorted(times)[len(times) // 2] / 1e3 / seconds
    size = sum(file.stat().st_size for file in folder.iterdir())
    kept = len(list(folder.iterdir()))
    text = f"{count} probes are {share:.2%} of {seconds:.0f} CPU s; {kept} files, {size:,} bytes"
    yield said("lens", "probes of the digits run", text)


def looked_at(run: TrainingRun, name: str) -> Iterator[dict[str, object]]:
    """Where the answering position looks, and by which way."""
    assert isinstance(run.engine, TorchEngine)
    model = run.engine.model.eval()
    task, some = fresh_rows(run)
    found = positional_attention(model, task, split="train", rows=some, operations=COPYING)
    for row in found.rows():
        way = "" if row["route"] is None else f"; by way of another {row['route_mass']:.3f}"
        best = f"{row['head']} {row['mass']:.3f} (chance {row['chance']:.2f})"
        text = f"{best}{way}; {row['accuracy']:.2%} of {row['examples']} right"
        yield said("lens", f"{name}: {row['operation']}", text)


def explained(run: TrainingRun) -> Iterator[dict[str, object]]:
    """Right answers with one place of one layer closed; then the roles of the heads."""
    assert isinstance(run.engine, TorchEngine)
    model = run.engine.model.eval()
    task, some = fresh_rows(run)
    some = some[:7_000]
    batch, asked = task.batch("train", some), np.array(task.groups("train", some)["operation"])
    right = run.engine.logits(batch)["answer"].argmax(-1) == batch.targets["answer"]
    text = " ".join(f"{name} {right[asked == name].mean():.0%}" for name in task.spec.operations)
    yield said("lens", "nothing closed", text)
    for layer in range(model.spec.n_layers):
        for site in SITES:
            found = cut_accuracy(model, task, layer=layer, site=site, split="train", rows=some)
            text = " ".join(f"{name} {share:.0%}" for name, share in found.items())
            yield said("lens", f"layer {layer} writes nothing at: {site}", text)
    few = some[:1_000]
    roles = head_roles(
        model, task.batch("train", few), groups=task.groups("train", few)["operation"]
    )
    for row in roles.rows():
        text = f"{row['role']}: {row['score']:.2f} (chance {row['chance']:.2f})"
        yield said("lens", f"role of {row['head']}", text)


def run(quick: bool = False) -> Iterator[dict[str, object]]:
    """Every row."""
    torch.set_num_threads(1)
    keep_freed_memory()  # else the clock shows the system filling pages, on one side or the other
    yield from capture(rounds=3 if quick else 60)
    for overrides in VARIANTS[: 1 if quick else None]:
        with tempfile.TemporaryDirectory() as place:
            few = ("train.steps=20", "train.evaluate_every=10") if quick else ()
            found, seconds = trained((*overrides, *few), Path(place) / "run")
            yield from looked_at(found, " ".join(("digits", *overrides)))
            if not overrides:
                yield from probes(found, seconds)
                yield from explained(found)
