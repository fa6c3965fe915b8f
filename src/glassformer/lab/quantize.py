"""Quantizing a model folder into another one, and the comparison of the two.

Calibration and measurement use a text, the run's own task, or sequences sampled from the model; the
examples that measure are never those that calibrated.

Quantization always saves memory, but not always time: each layer shape is timed, float and
quantized, and layers that would be slower on this machine may stay float.
"""

import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.adapters.folder.paths import folder_of
from glassformer.adapters.load import AnyModel, adapt, load
from glassformer.adapters.native import NativeAdapter, save_model
from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.data.tasks.text import read_corpus
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.lab.measure.precision import Comparison, compare, interleaved
from glassformer.lab.next_steps import example_prompt, model_prompt
from glassformer.lab.recipes import built_task
from glassformer.lab.runs.assemble import assemble
from glassformer.lab.runs.record import check_data, data_file, load_run_spec, recorded_hash
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts
from glassformer.nn.embedding import TokenEmbedding
from glassformer.quant.contents import is_model_quantized, quantization_report
from glassformer.quant.convert import (
    Progress,
    Select,
    dequantize_model,
    gptq_seconds,
    plan,
    prepare_model_for_quantization,
    quantize_model,
    quantized_layers,
    untie,
)
from glassformer.quant.layers import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from glassformer.quant.mixed import AIM, small_enough, stored_bytes
from glassformer.quant.schemes import quantize_tensor
from glassformer.quant.smooth import (
    SMOOTHING,
    Outlier,
    Smoothed,
    inputs_of_layers,
    outliers,
    quantize_on,
)
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.disk import check_new
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Method, Scheme
from glassformer.spec.serialize import to_json
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.tasks import Task as TaskSpec
from glassformer.spec.train import CosineSchedule, RunSpec
from glassformer.store.checkpoint import WEIGHTS
from glassformer.store.rundir import RunDirectory, RunRef
from glassformer.training.fit import StepRecord, fit
from glassformer.training.torch_engine import TorchEngine

# M rows, O outputs, I inputs

ROUNDS = 9
#: The length of a round, long enough that the clock's resolution does not matter.
ROUND_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one product of a layer's shape, float and quantized."""

    path: str
    shape: tuple[int, int]
    scheme: Scheme
    float_ms: float
    quantized_ms: float

    @property
    def wins(self) -> bool:
        """True if the quantized layer is faster."""
        return self.quantized_ms < self.float_ms


def time_layers(model: Model, spec: QuantSpec, *, backend: str = "auto") -> list[Timing]:
    """Time every layer that would be quantized, float and quantized, for one row of inputs.

    Layers of one shape and scheme are timed once.
    """
    known: dict[tuple[tuple[int, int], Scheme, bool], tuple[float, float]] = {}
    found = []
    for path, (module, scheme) in plan(model, spec).items():
        weight_OI = module.weight.detach()
        table = isinstance(module, TokenEmbedding)
        outputs, inputs = weight_OI.shape
        key = ((outputs, inputs), scheme, table)
        if key not in known:
            known[key] = _both_ways(weight_OI, scheme, table=table, backend=backend)
        found.append(Timing(path, key[0], scheme, *known[key]))
    return found


def keeping_float(timings: list[Timing]) -> Select:
    """Return a predicate that leaves out every layer that is slower when quantized."""
    losers = {timing.path for timing in timings if not timing.wins}
    return lambda path, module: path not in losers


@torch.no_grad()
def _both_ways(
    weight_OI: Tensor, scheme: Scheme, *, table: bool, backend: str
) -> tuple[float, float]:
    x_MI = torch.randn(1, weight_OI.shape[1], device=weight_OI.device, dtype=weight_OI.dtype)
    tensor = quantize_tensor(weight_OI, scheme)
    if table:
        layer: QuantizedWeight = QuantizedEmbedding(tensor, backend=backend)
    else:
        layer = QuantizedLinear(tensor, None, backend=backend)
    sides = (lambda: F.linear(x_MI, weight_OI), lambda: layer.times(x_MI, None))
    counts = [_calls_a_round(side) for side in sides]
    rounds = [functools.partial(_repeat, side, n) for side, n in zip(sides, counts, strict=True)]
    float_ms, quantized_ms = (
        statistics.median(taken) / n * 1e3
        for taken, n in zip(interleaved(rounds, rounds=ROUNDS), counts, strict=True)
    )
    return float_ms, quantized_ms


def _calls_a_round(side: Callable[[], Tensor]) -> int:
    _repeat(side, 1)
    (once,) = interleaved([functools.partial(_repeat, side, 1)], rounds=1)
    return max(1, min(200, int(ROUND_SECONDS / max(1e-7, once[0]))))


def _repeat(side: Callable[[], Tensor], calls: int) -> None:
    for _ in range(calls):
        out = side()
    float(out[0, 0])  # waits for a GPU to finish


# --- a folder into another one -------------------------------------------------------------------

LENGTH, ROWS = 128, 16
#: What an error about a text that was given suggests.
TEXT = "a plain text in UTF-8, of some thousand words"
#: Batches that calibrate at most, and that measure at most.
CALIBRATING, MEASURING = 16, 32
#: Tokens times parameters that one reading of the material may cost; but never fewer tokens.
AFFORDED, LEAST = 10**12, 4096
#: Logits that are held at once: a large vocabulary gets fewer rows.
LOGITS = 1 << 25
#: A loss above this is warned of; so are fewer tokens than these to calibrate GPTQ on, to measure.
WARNED, FEW_CALIBRATING, FEW_MEASURING = 0.01, 4096, 1000
#: GPTQ that would take longer is left to those who ask for it by name.
LONGEST_GPTQ = 600.0
#: Share of a text that is kept for measuring.
HELD_OUT = 0.2


@dataclass(frozen=True, slots=True)
class Material:
    """Batches to calibrate on, others to measure on, and the origin of the latter."""

    calibrating: tuple[Batch, ...]
    measuring: tuple[Batch, ...]
    origin: str


def of_task(task: Task) -> Material:
    """Return material of a task: training examples calibrate, held-out ones measure."""
    sizes = task.sizes()
    split = next(name for name in ("val", "test", "train") if sizes.get(name))
    return Material(
        tuple(_batches(task, "train", CALIBRATING)),
        tuple(_batches(task, split, MEASURING)),
        f"the task's own examples ({split})",
    )


def _batches(task: Task, split: str, most: int) -> list[Batch]:
    """Return batches spread over the split, with examples at even distances."""
    count = task.sizes()[split]
    rows = np.unique(np.linspace(0, count - 1, min(count, most * ROWS)).astype(np.int64))
    return [task.batch(split, rows[i : i + ROWS]) for i in range(0, len(rows), ROWS)]


def of_text(path: Path, tokenizer: Tokenizer, model: Model, *, length: int = LENGTH) -> Material:
    """Return material of a text, in windows: its beginning calibrates, its end measures."""
    _check_continues(model)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"the text cannot be read: {why}", where=str(path), hint=TEXT) from error
    except UnicodeDecodeError as error:
        what = f"the text is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        raise InputError(what, where=str(path), hint=TEXT) from error
    origin = f"the end of {path.name}"
    return _of_words(text, tokenizer, model, length, where=str(path), origin=origin)


def of_manuals(tokenizer: Tokenizer, model: Model, *, length: int = LENGTH) -> Material:
    """Return material of Python's own manuals, in English: what every machine has."""
    _check_continues(model)
    enough = 8 * (CALIBRATING + MEASURING) * ROWS * LENGTH  # characters
    pieces, characters = [], 0
    for document in read_corpus("", seed=0):
        pieces.append(document.content.decode())
        characters += len(pieces[-1])
        if characters > enough:
            break
    text = "\n\n".join(pieces)
    origin = "Python's manuals (English; --text FILE measures on yours)"
    return _of_words(text, tokenizer, model, length, where="Python's manuals", origin=origin)


def _of_words(
    text: str, tokenizer: Tokenizer, model: Model, length: int, *, where: str, origin: str
) -> Material:
    ids = np.array(tokenizer.encode(text), dtype=np.int64)
    if len(ids) and ids.max() >= model.spec.vocab_size:
        raise InputError("the tokenizer has more tokens than the model", where=where)
    cut = int(len(ids) * (1 - HELD_OUT))
    parts = [_windows(part, model, length, bos=tokenizer.bos) for part in (ids[:cut], ids[cut:])]
    if not all(parts):
        raise InputError(
            f"a text of {len(ids)} tokens is too short to calibrate and to measure on",
            where=where,
            hint="some thousand words serve best",
        )
    tokens = max(LEAST, AFFORDED // max(1, sum(p.numel() for p in model.parameters())))
    most = max(1, tokens // int(parts[0][0].tokens.size))
    rows = _rows(model, length)
    return Material(
        tuple(_spread(parts[0], min(most, CALIBRATING * ROWS // rows))),
        tuple(_spread(parts[1], min(most, MEASURING * ROWS // rows))),
        origin,
    )


def _rows(model: Model, length: int) -> int:
    """Return the number of rows of a batch whose logits may be held at once."""
    return max(1, min(ROWS, LOGITS // (length * model.spec.vocab_size)))


def _spread(batches: list[Batch], most: int) -> list[Batch]:
    """Return at most `most` batches, at even distances."""
    places = np.unique(np.linspace(0, len(batches) - 1, min(len(batches), most)).astype(np.int64))
    return [batches[place] for place in places]


def of_model(model: Model) -> Material:
    """Return sequences sampled from the model itself: its own distribution, not the truth."""
    _check_continues(model)
    length = min(LENGTH, model.spec.max_seq_len - 1)
    spec = DecodeSpec(max_new_tokens=length, temperature=1.0, seed=0)
    vocab = model.spec.vocab_size
    first = np.random.default_rng(0).integers(0, vocab, 2 * ROWS).tolist()
    made = generate_batch(TorchStepper(model), Prompts.of([[t] for t in first]), spec=spec)
    rows = [[begin, *one.tokens] for begin, one in zip(first, made, strict=True)]
    both = [_batch(np.array(rows[i : i + ROWS])) for i in (0, ROWS)]
    return Material((both[0],), (both[1],), "sequences drawn from the model itself")


def _check_continues(model: Model) -> None:
    if model.spec.encoder is not None or "next" not in model.spec.head_names():
        raise InputError(
            "only a decoder with a next-token head can be measured on text",
            hint="a run is measured on its task's examples, without {--text or --calibrate|a text}",
        )


def _windows(
    ids: "np.ndarray", model: Model, length: int, *, bos: int | None = None
) -> list[Batch]:
    """Return a text in windows, each after the token that the model's texts begin with."""
    many = _rows(model, length)
    length = min(length, model.spec.max_seq_len, max(2, len(ids) - 1))
    starts = range(0, len(ids) - length, length)
    if bos is None:
        rows = [ids[start : start + length + 1] for start in starts]
    else:
        rows = [np.array([bos, *ids[start : start + length]]) for start in starts]
    return [_batch(np.stack(rows[i : i + many])) for i in range(0, len(rows), many)]


def _batch(window_BT: "np.ndarray") -> Batch:
    """Return every token but the last, with the token after each as its target."""
    tokens = window_BT[:, :-1]
    return Batch(
        tokens=tokens,
        valid=np.ones(tokens.shape, dtype=np.bool_),
        targets={"next": window_BT[:, 1:]},
    )


def joined(one: Material, other: Material) -> Material:
    """Return material that calibrates on the one and measures on the other."""
    return Material(one.calibrating, other.measuring, other.origin)


def tokens_of(batches: Sequence[Batch]) -> int:
    """Return the number of real tokens."""
    return sum(int(batch.valid.sum()) for batch in batches)


#: Training with rounded weights goes on gently: a share of the rate that the run began with.
QAT_RATE = 0.1

Watch = Callable[[StepRecord], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """The options of `glass quantize`."""

    spec: QuantSpec
    calibrate: Path | None = None
    text: Path | None = None
    smooth: bool = True
    qat_steps: int = 0
    auto: bool = False
    backend: str = "auto"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The folder that was written, the comparison, and the timings that `auto` went by.

    `method` found the scales; `schemes` counts the layers of each scheme; `wider` are those that a
    mean number of bits left 8, `indivisible` those whose inputs the group does not divide;
    `narrowed` says why a table has 4 bits; `prompt` is a text to try the model with, which it can
    continue if `continues`.
    """

    folder: Path
    comparison: Comparison
    layers: int
    method: Method
    schemes: dict[str, int]
    kept: tuple[str, ...]
    prompt: str
    continues: bool
    wider: tuple[str, ...] = ()
    indivisible: tuple[str, ...] = ()
    narrowed: str = ""
    timings: list[Timing] = field(default_factory=list)
    smoothed: list[Smoothed] = field(default_factory=list)
    outliers: list[Outlier] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


def quantize_folder(
    path: str,
    out: Path,
    wish: Wish,
    *,
    watch: Watch | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Open, calibrate or train if requested, quantize, write, open again, compare.

    `say` is told how long GPTQ will take before it begins, or that it is left out for that.
    """
    check_new(out, hint="choose another {--out|out}, or remove it first")
    adapter = load(path, device=wish.device)
    if not isinstance(adapter, NativeAdapter):
        raise InputError("only a model of our own parts can be quantized", where=path)
    if is_model_quantized(adapter.model):
        raise InputError(
            "the model is quantized already", where=path, hint="{--dequantize|dequantize} undoes it"
        )
    run = run_of(path)
    before, note = _complete_bytes(path, run, adapter.model)
    full = adapter.model.float()
    recorded = None if run is None else recorded_hash(_folder(path), run.task)
    task = None if run is None else assemble(run).task
    if task is not None:
        check_data(task, recorded)
    material = _material(wish, adapter, task)
    asked = wish.spec.method is not None
    wish = replace(wish, spec=_chosen(wish, tokens_of(material.calibrating)))
    if wish.spec.resolved_method == "gptq":
        seconds = gptq_seconds(full, material.calibrating, wish.spec)
        wish = replace(wish, spec=_affordable(wish.spec, seconds, asked=asked, say=say))
    small, timings, select = copy.deepcopy(full), [], None
    if wish.spec.tied == "untie":
        untie(small)
    alike = copy.deepcopy(small) if wish.spec.tied == "untie" else full
    if wish.auto:
        timings = time_layers(small, wish.spec, backend=wish.backend)
        if not any(timing.wins for timing in timings):
            raise InputError(
                "float is faster for every layer of this model, on this machine",
                where=path,
                hint="leave out {--auto|auto=True} to save memory all the same",
            )
        select = keeping_float(timings)
    samples = inputs_of_layers(alike, material.calibrating[:SMOOTHING])
    large = outliers(samples)
    smoothed: list[Smoothed] = []
    if wish.qat_steps:
        small = _trained_rounded(small, wish, run, task, select, watch)
    elif not _looks_at_inputs(wish):
        small = quantize_model(small, wish.spec, select=select, backend=wish.backend)
    else:
        small, smoothed = quantize_on(
            small,
            material.calibrating,
            wish.spec,
            select=select,
            backend=wish.backend,
            smoothing=wish.smooth,
            samples=samples,
            progress=progress,
        )
    files = dict(adapter.files())
    if run is not None:
        files |= {"config.json": to_json(_whole(run, small.spec)).encode(), **data_file(recorded)}
    save_model(out, small, files=files)
    opened = load(out, device=wish.device).model
    assert isinstance(opened, Model), "save_model has written one of ours"
    disk = (before, _bytes(out))
    comparison = compare(
        full,
        opened,
        material.measuring,
        material=material.origin,
        untied=None if alike is full else alike,
        progress=progress,
    )
    kept = tuple(timing.path for timing in timings if not timing.wins)
    report = quantization_report(opened)
    return Outcome(
        folder=out,
        comparison=replace(comparison, disk=disk, note=note),
        layers=len(report.layers),
        method=wish.spec.resolved_method,
        schemes=report.schemes(),
        kept=kept,
        wider=_wider(wish.spec, opened),
        indivisible=_indivisible(wish.spec, opened),
        narrowed=_narrowed(wish, full.spec),
        prompt=model_prompt(adapter.get_tokenizer()) if task is None else example_prompt(task),
        continues="next" in small.spec.head_names(),
        timings=timings,
        smoothed=smoothed,
        outliers=large,
        warnings=tuple(_warnings(wish, comparison, tokens_of(material.calibrating))),
    )


def _chosen(wish: Wish, tokens: int) -> QuantSpec:
    """Return the spec, with the method for text where none is given: text is looked at anyway.

    Fewer than 8 bits take it where there are enough tokens: they fit what they have seen.
    """
    spec = wish.spec
    if spec.method is not None or wish.qat_steps or not (wish.smooth or wish.calibrate):
        return spec
    few = spec.scheme.bits < 8 and tokens < FEW_CALIBRATING and wish.calibrate is None
    return spec if few else replace(spec, method=spec.scheme.calibrated_method)


def _affordable(
    spec: QuantSpec, seconds: float, *, asked: bool, say: Callable[[str], None] | None
) -> QuantSpec:
    """Return the spec, by `mse` where GPTQ would take too long and is not asked for by name."""
    tell = say or (lambda _: None)
    if seconds <= LONGEST_GPTQ or asked:
        tell(f"GPTQ: about {_duration(seconds)}; --method mse is done much sooner")
        return spec
    tell(
        f"GPTQ would take about {_duration(seconds)}, more than {_duration(LONGEST_GPTQ)}: "
        "grids are searched instead; --method gptq does it all the same"
    )
    return replace(spec, method="mse")


def _duration(seconds: float) -> str:
    """Return `40 s`, `5 min` or `3.2 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _narrowed(wish: Wish, model: ModelSpec) -> str:
    """Return why a table has 4 bits that would have had 8; empty where it has not."""
    chosen = small_enough(model, wish.spec)
    if chosen.head == wish.spec.head or wish.qat_steps or not _looks_at_inputs(wish):
        return ""
    share = stored_bytes(model, wish.spec) / (4 * count_parameters(model))
    more = (
        "" if chosen.mean_bits is None else f"; other layers have {chosen.mean_bits:g} on average"
    )
    return (
        f"4 bits, as most weights are in it: with 8 and others of 4 the model would have "
        f"{share:.3f} of float32's bytes, and {AIM:g} is aimed at{more}"
    )


def _looks_at_inputs(wish: Wish) -> bool:
    """Return True unless weights alone are looked at."""
    given = wish.calibrate is not None
    return bool(wish.smooth or given or wish.spec.resolved_method == "gptq" or wish.spec.mean_bits)


def _wider(spec: QuantSpec, model: Model) -> tuple[str, ...]:
    """Return the layers that a mean number of bits left 8, heads and tables aside."""
    if small_enough(model.spec, spec).mean_bits is None:
        return ()
    forced = _indivisible(spec, model)
    return tuple(
        path
        for path, layer in quantized_layers(model)
        if not layer.head and layer.scheme.bits > spec.scheme.bits and path not in forced
    )


def _indivisible(spec: QuantSpec, model: Model) -> tuple[str, ...]:
    """Return the quantized layers whose inputs the group does not divide, tables aside."""
    return tuple(
        path
        for path, layer in quantized_layers(model)
        if not layer.head and spec.scheme.resolve(layer.shape[1]).lacks(layer.shape[1])
    )


def _warnings(wish: Wish, found: Comparison, calibrated: int) -> Iterator[str]:
    """Yield what the user should know before trusting the result, and what would help."""
    agreement, spec = found.agreement, wish.spec
    gptq = spec.resolved_method == "gptq"
    if gptq and spec.scheme.bits < 8 and calibrated < FEW_CALIBRATING:
        yield (
            f"GPTQ has seen {calibrated:,} tokens, and fits what it sees: give it "
            f"{FEW_CALIBRATING:,} or more (--calibrate FILE)"
        )
    if agreement.positions < FEW_MEASURING:
        yield f"measured on {agreement.positions:,} positions only: another text may differ much"
    if agreement.change - (agreement.change_error or 0.0) <= WARNED:
        return
    helps = []
    if not wish.smooth and not wish.qat_steps:
        helps.append("smoothing (leave out --no-smooth)")
    if spec.scheme.bits < 8:
        if not gptq and not wish.qat_steps:
            helps.append("GPTQ on a text like yours (--calibrate FILE)")
        if getattr(spec.scheme, "group", 32) not in (None, 32):
            helps.append("groups of 32 (--group 32)")
        if spec.mean_bits is None:
            helps.append("8 bits for the layers that lose most (--bits 4.5)")
        helps.append("8 bits (--bits 8)")
    elif getattr(spec.scheme, "group", None) == 0:
        helps.append("groups of 32 (leave out --group 0)")
    elif not gptq:
        helps.append("GPTQ on a text like yours (--calibrate FILE)")
    more = f"; what helps: {', '.join(helps)}" if helps else ""
    yield f"the perplexity rises by {agreement.change:.1%}{more}"


def compare_precision(
    full: str | Path | AnyModel,
    small: str | Path | AnyModel,
    *,
    task: "Task | TaskSpec | str | None" = None,
    text: str | Path | None = None,
) -> Comparison:
    """Measure what rounding costs a model: bytes, speed, perplexity, divergence, worst layers.

    Models in memory, or the folders of both. They are compared on a task's held-out examples, on
    the end of a text, on a run's own task, or else on sequences sampled from the full model. Times
    are of this machine, now.
    """
    if task is not None and text is not None:
        raise InputError("both a task and a text to measure on", hint="give one of the two")
    before, after = _native(full), _native(small)
    run = run_of(str(full)) if isinstance(full, str | Path) else None
    if task is not None:
        material = of_task(built_task(task))
    elif text is not None:
        material = of_text(Path(text), before.tokenizer, before.model)
    elif run is not None:
        material = of_task(assemble(run).task)
    else:
        material = of_model(before.model)
    found = compare(before.model, after.model, material.measuring, material=material.origin)
    if not isinstance(full, str | Path) or not isinstance(small, str | Path):
        return found
    there, note = _complete_bytes(str(full), run, before.model)
    return replace(found, disk=(there, _bytes(folder_of(small))), note=note)


def _native(model: str | Path | AnyModel) -> NativeAdapter:
    adapter = load(model) if isinstance(model, str | Path) else adapt(model)
    if not isinstance(adapter, NativeAdapter):
        raise InputError(
            f"{type(adapter.model).__name__} is another library's module",
            hint='load it with backend="native"',
        )
    adapter.eval()
    return adapter


def dequantize_folder(path: str, out: Path) -> Path:
    """Write the float32 model with exactly the weights of a quantized folder."""
    check_new(out, hint="choose another {--out|out}, or remove it first")
    adapter = load(path)
    dequantize_model(cast(Model, adapter.model))  # refuses what has no quantized layer of ours
    assert isinstance(adapter, NativeAdapter)
    files = dict(adapter.files())
    run = run_of(path)
    if run is not None:
        files["config.json"] = to_json(_whole(run, adapter.model.spec)).encode()
        files |= data_file(recorded_hash(_folder(path), run.task))
    save_model(out, adapter.model, files=files)
    return out


def _whole(run: RunSpec, model: ModelSpec) -> RunSpec:
    """Return the run of a folder with every weight: no LoRA, a base only if data needs one."""
    needed = run.tuning if isinstance(run.task, FinetuneTask) else None
    tuning = None if needed is None else replace(needed, lora=None)
    return replace(run, model=model, tuning=tuning)


def _folder(path: str) -> Path:
    """Return `runs/digits` of `runs/digits@120`."""
    return RunRef.parse(path).folder


def run_of(path: str) -> RunSpec | None:
    """Return the spec of a run, or of a folder made from one; None for other models."""
    directory = RunDirectory(_folder(str(path)))
    ours = directory.steps() or (directory.folder / "MANIFEST.json").is_file()
    if not ours or not (directory.folder / "config.json").is_file():
        return None
    return load_run_spec(directory)


def _material(wish: Wish, adapter: NativeAdapter, task: Task | None) -> Material:
    """Return what to calibrate and to measure on: given texts, the task, manuals, own samples."""
    tokenizer = adapter.get_tokenizer()
    texts = [wish.calibrate, wish.text]
    if tokenizer is None and any(texts):
        raise InputError("a model without a tokenizer cannot read a text")
    calibrating, measuring = (
        None if path is None else of_text(path, cast(Tokenizer, tokenizer), adapter.model)
        for path in texts
    )
    if measuring is None:
        measuring = of_task(task) if task is not None else calibrating
    if measuring is None:
        measuring = _without_text(adapter, tokenizer)
    return measuring if calibrating is None else joined(calibrating, measuring)


def _without_text(adapter: NativeAdapter, tokenizer: Tokenizer | None) -> Material:
    """Return manuals that the model can read, or else sequences sampled from it."""
    if tokenizer is not None:
        try:
            return of_manuals(tokenizer, adapter.model)
        except InputError:  # characters, or ids, that it does not have
            pass
    return of_model(adapter.model)


def _trained_rounded(
    model: Model,
    wish: Wish,
    run: RunSpec | None,
    task: Task | None,
    select: Select | None,
    watch: Watch | None,
) -> Model:
    """Train with rounded weights for a while, then quantize."""
    if run is None or task is None:
        raise InputError(
            "training with rounded weights needs a run, which knows its task",
            hint="give a run, or calibrate on a text instead",
        )
    prepare_model_for_quantization(model, wish.spec, mode="qat", select=select)
    # by the one loop, at a rate that falls to 0
    train = replace(
        run.train,
        steps=wish.qat_steps,
        lr=run.train.lr * QAT_RATE,
        schedule=CosineSchedule(),
        compile="off",
    )
    for record in fit(TorchEngine(model, train), task, train):
        if watch is not None:
            watch(record)
    return quantize_model(model, backend=wish.backend)


def _complete_bytes(path: str, run: RunSpec | None, model: Model) -> tuple[int, str]:
    """Return the bytes of a complete model of this folder, and a note where its file has fewer."""
    own = _bytes(folder_of(path))
    if run is None or run.tuning is None or run.tuning.lora is None:
        return own, ""
    complete = sum(p.numel() * p.element_size() for p in model.parameters())
    note = f"before: the base with LoRA merged; the run's own file is LoRA alone, {own:,}"
    return complete, note


def _bytes(folder: Path) -> int:
    """Return the bytes of the weights of a model folder."""
    if folder.is_file():
        return folder.stat().st_size
    own = folder / WEIGHTS
    files = [own] if own.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files)
