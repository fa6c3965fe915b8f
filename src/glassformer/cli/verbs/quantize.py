"""`glass quantize`: choose the folder, quantize, print the comparison as text or as JSON."""

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from glassformer.cli.shell import resolve
from glassformer.cli.shell.options import AnyModel, AsJson, Device, Runs
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import end, tell
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.options import option
from glassformer.spec.quantization import QuantSpec, quant_spec
from glassformer.spec.schemes import BY_BITS, SCHEMES, Method
from glassformer.spec.serialize import json_numbers

if TYPE_CHECKING:
    from glassformer.lab.quantize import Outcome, Wish
    from glassformer.training.fit import StepRecord

SCHEME_HELP = "; ".join(f"{scheme.name}: {scheme.summary}" for scheme in SCHEMES) + "."


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """What weights become: the arguments of `quant_spec`."""

    bits: float | None = option(
        None,
        help="8 (int8) or 4 (int4), instead of --scheme; between them, such as 4.5, a mean: the "
        "layers that lose most by 4 bits get 8.",
    )
    scheme: str | None = option(None, metavar="NAME", help=SCHEME_HELP)
    group: int | None = option(
        None, help="Inputs that share a scale: 32, 64 or 128; int8 also 0: all of a row."
    )
    head_bits: int | None = option(None, help="Bits of the head and of a tied table; 8 by default.")
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="By default int8 is symmetric, int4 not."),
    ] = None
    method: str | None = option(
        None,
        help="How scales are found: mse (the default of 8 bits), gptq (of 4, unless it would take "
        "over 10 minutes) or absmax.",
    )
    tied: str = option("share", help="What becomes of a tied table: share, untie or skip.")
    indivisible: str = option(
        "auto",
        help="A layer whose inputs a group does not divide: refuse, int8 or keep (float). By "
        "default such layers get 8 bits, and a --group that is given is refused.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """What is calibrated and measured on, and how: fields of `Wish`."""

    calibrate: str | None = option(
        None,
        metavar="FILE",
        help="Calibration text, similar to what the model will read; else the run's own examples, "
        "or Python's manuals.",
    )
    text: str | None = option(
        None,
        metavar="FILE",
        help="A text to measure on; else the run's own examples, or Python's manuals.",
    )
    smooth: Annotated[
        bool,
        typer.Option(
            "--smooth/--no-smooth",
            help="Move outliers of activations into weights first, by exact powers of two; "
            "--no-smooth looks at the weights alone, unless it calibrates.",
        ),
    ] = True
    qat_steps: int = option(
        0,
        flag="--qat",
        metavar="STEPS",
        help="Train this many steps with rounded weights before.",
    )
    auto: bool = option(False, help="Time each layer, and keep float where it is faster.")
    backend: str = option("auto", help="auto, c, aten (on a GPU), reference or float.")


def quantize(
    model: AnyModel,
    rounding: Rounding,
    texts: Texts,
    dequantize: bool = option(False, help="Write a quantized model's float weights."),
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--out", metavar="FOLDER", help="The folder to write; by default MODEL-SCHEME."
        ),
    ] = None,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Quantize the weights, and measure what it costs.

    Size, speed, perplexity and divergence before and after are printed. Examples:

      glass quantize text --bits 8

      glass quantize lm-modern --bits 4.5

      glass quantize lm-modern --bits 4 --calibrate novel.txt --out lm-small

      glass quantize lm-modern --scheme int4 --qat 200
    """
    path = resolve.find_model(model, runs=Path(runs))
    if dequantize:
        if out is None:
            raise InputError("--dequantize writes a folder", hint="name it with --out")
        if device != "cpu":
            raise InputError("--dequantize computes nothing", hint="leave out --device")
        from glassformer.lab.quantize import dequantize_folder

        folder = dequantize_folder(path, Path(out))
        print(json.dumps({"folder": str(folder)}) if as_json else f"written to {folder}")
        return
    chosen: dict[str, Any] = asdict(rounding) | {"method": _method(rounding, texts)}
    spec = quant_spec(**chosen)  # which checks each choice
    from glassformer.lab.quantize import Wish

    given: dict[str, Any] = asdict(texts)
    given |= {name: given[name] and Path(given[name]) for name in ("calibrate", "text")}
    wish = Wish(spec=spec, device=check_device(device), **given)
    place = _default_folder(model, spec, Path(runs)) if out is None else Path(out)
    _run(path, wish, out=place, as_json=as_json)


def _method(rounding: Rounding, texts: Texts) -> str | None:
    """Return how scales are found: the method given, or the one that other options imply."""
    method, bits, qat = rounding.method, rounding.bits, texts.qat_steps
    if method == "qat":
        raise InputError("--method qat trains", hint="--qat STEPS, such as --qat 200")
    if method is not None:
        one_of("--method", method, [name for name in get_args(Method) if name != "qat"])
    if qat < 0:
        raise InputError(f"--qat {qat} is negative", hint="a number of steps, such as 200")
    if qat and bits is not None and bits not in BY_BITS:
        raise InputError(f"--qat trains at one number of bits, not {bits:g}", hint="--bits 8 or 4")
    if qat and (method is not None or texts.calibrate is not None):
        raise InputError("--qat finds weights by training", hint="leave out --method, --calibrate")
    if texts.calibrate is not None and method == "absmax" and not texts.smooth:
        raise InputError(
            f"{method} with --no-smooth looks at no text",
            hint="leave out --calibrate or --no-smooth",
        )
    return "qat" if qat else method


def _run(path: str, wish: "Wish", *, out: Path, as_json: bool) -> None:
    """Quantize, and print the comparison."""
    from glassformer.lab.bar import PartsBar
    from glassformer.lab.next_steps import after_quantizing
    from glassformer.lab.quantize import quantize_folder

    with warnings.catch_warnings(record=True) as caught, PartsBar(out.name) as progress:
        warnings.simplefilter("always")
        outcome = quantize_folder(
            path, out, wish, watch=_tell_step, progress=progress.show, say=tell
        )
    for warning in caught:
        tell(f"warning: {warning.message}")
    if as_json:
        print(_as_json(outcome))
        return
    print(_as_text(outcome), flush=True)
    for said in outcome.warnings:
        tell(f"warning: {said}")
    end(
        outcome.folder,
        after_quantizing(outcome.folder, outcome.prompt, continues=outcome.continues),
    )


def _default_folder(text: str, spec: QuantSpec, runs: Path) -> Path:
    """Return the default folder, in the runs folder: `text-int4`, `text-int4.5`."""
    from glassformer.store.rundir import RunRef

    name = RunRef.parse(text).folder.name
    mean = spec.scheme.name if spec.mean_bits is None else f"int{spec.mean_bits:g}"
    return runs / f"{name}-{mean}"


def _tell_step(record: "StepRecord") -> None:
    if record.step % 20 == 0:
        tell(f"step={record.step} loss={record.loss:.4f}")


def _as_json(outcome: "Outcome") -> str:
    """Return one JSON object for scripts."""
    found = {
        "folder": str(outcome.folder),
        "quantized_layers": outcome.layers,
        "method": outcome.method,
        "schemes": outcome.schemes,
        "kept_float": list(outcome.kept),
        "wider": list(outcome.wider),
        "indivisible": list(outcome.indivisible),
        "narrowed": outcome.narrowed,
        "smoothed": [asdict(link) for link in outcome.smoothed],
        "outliers": [asdict(one) for one in outcome.outliers],
        "warnings": list(outcome.warnings),
        "timings": [
            asdict(timing) | {"scheme": timing.scheme.describe()} for timing in outcome.timings
        ],
        **outcome.comparison.to_dict(),
    }
    return json.dumps(json_numbers(found), allow_nan=False)


def _as_text(outcome: "Outcome") -> str:
    """Format the comparison for the terminal."""
    counted = [
        scheme if count == outcome.layers else f"{count} {scheme}"
        for scheme, count in outcome.schemes.items()
    ]
    schemes = ", ".join([*counted[:-2], " and ".join(counted[-2:])])
    lines = [
        f"{outcome.layers} layers, {schemes} by {outcome.method}, "
        f"run by {', '.join(outcome.comparison.backends)}",
        "",
        str(outcome.comparison),
    ]
    if outcome.outliers:
        shown = ", ".join(f"{o.layer} {o.channel} ({o.times:.0f}x)" for o in outcome.outliers[:4])
        lines.append(
            f"outlier channels       {len(outcome.outliers)}, size over the median channel's: "
            f"{shown}"
        )
    if outcome.smoothed:
        before, after = (
            sum(errors) / len(outcome.smoothed)
            for errors in zip(*((s.before, s.after) for s in outcome.smoothed), strict=True)
        )
        lines.append(
            f"smoothed               {len(outcome.smoothed)} inputs of layers, exactly; "
            f"error of their products {before:.2%} -> {after:.2%}"
        )
    if outcome.narrowed:
        lines.append(f"the table              {outcome.narrowed}")
    if outcome.indivisible:
        some = ", ".join(outcome.indivisible[:3])
        more = ", ..." if len(outcome.indivisible) > 3 else ""
        lines.append(
            f"8 bits                 {len(outcome.indivisible)} layers whose inputs the group "
            f"does not divide: {some}{more}"
        )
    if outcome.wider:
        lines.append(f"8 bits, where 4 cost most: {', '.join(outcome.wider)}")
    if outcome.kept:
        lines.append(f"kept in float, which is faster for them: {', '.join(outcome.kept)}")
    return "\n".join(lines)
