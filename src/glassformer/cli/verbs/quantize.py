"""`glass quantize`: its options; `actions.quantize` does the work, and imports torch."""

from pathlib import Path
from typing import Annotated, cast

import typer

from glassformer.cli.shell import resolve
from glassformer.cli.shell.options import AnyModel, AsJson, Device, Runs
from glassformer.spec.errors import InputError
from glassformer.spec.schemes import SCHEMES, Method

SCHEME_HELP = "; ".join(f"{scheme.name}: {scheme.summary}" for scheme in SCHEMES) + "."


def quantize(
    model: AnyModel,
    bits: Annotated[
        int | None, typer.Option(help="8 (int8) or 4 (int4), instead of --scheme.")
    ] = None,
    scheme: Annotated[str | None, typer.Option(metavar="NAME", help=SCHEME_HELP)] = None,
    group: Annotated[
        int | None,
        typer.Option(help="int4: inputs that share a scale: 32, 64 (the default) or 128."),
    ] = None,
    head_bits: Annotated[
        int | None, typer.Option(help="Bits of the head and of a tied table; 8 by default.")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="By default int8 is symmetric, int4 not."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="absmax, mse or gptq: how scales are found.")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(metavar="FILE", help="A text to calibrate on, by GPTQ.")
    ] = None,
    qat: Annotated[
        int,
        typer.Option(metavar="STEPS", help="Train this many steps with rounded weights before."),
    ] = 0,
    auto: Annotated[
        bool, typer.Option("--auto", help="Time each layer, and keep float where it is faster.")
    ] = False,
    tied: Annotated[
        str, typer.Option(help="What becomes of a tied table: share, untie or skip.")
    ] = "share",
    indivisible: Annotated[
        str, typer.Option(help="A layer that --group does not divide: refuse, int8 or keep.")
    ] = "refuse",
    backend: Annotated[str, typer.Option(help="auto, c, fbgemm, aten or reference.")] = "auto",
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize", help="Write a quantized model's float weights."),
    ] = False,
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

      glass quantize text --bits 4 --calibrate novel.txt --out text-small

      glass quantize text --scheme int4 --qat 200
    """
    path = resolve.find_model(model, runs=Path(runs))
    if dequantize:
        from glassformer.cli.actions import quantize as quantizing

        if out is None:
            raise InputError("--dequantize writes a folder", hint="name it with --out")
        if device != "cpu":
            raise InputError("--dequantize computes nothing", hint="leave out --device")
        quantizing.undo(path, out=Path(out), as_json=as_json)
        return
    from glassformer.spec.quantization import Indivisible, Tied, quant_spec

    # QuantSpec checks each choice
    spec = quant_spec(
        scheme=scheme,
        bits=bits,
        group=group,
        symmetric=symmetric,
        method=cast(Method | None, _way(method, calibrate=calibrate, qat=qat)),
        head_bits=head_bits,
        tied=cast(Tied, tied),
        indivisible=cast(Indivisible, indivisible),
    )
    from glassformer.cli.actions import quantize as quantizing
    from glassformer.cli.shell.process import check_device
    from glassformer.lab.quantize import Wish

    wish = Wish(
        spec=spec,
        calibrate=None if calibrate is None else Path(calibrate),
        qat_steps=qat,
        auto=auto,
        backend=backend,
        device=check_device(device),
    )
    place = quantizing.default_folder(model, spec, Path(runs)) if out is None else Path(out)
    quantizing.run(path, wish, out=place, as_json=as_json)


def _way(method: str | None, *, calibrate: str | None, qat: int) -> str | None:
    """Return how scales are found: the method given, or the one that other options imply."""
    if qat < 0:
        raise InputError(f"--qat {qat} is negative", hint="a number of steps, such as 200")
    if qat and (method is not None or calibrate is not None):
        raise InputError("--qat finds weights by training", hint="leave out --method, --calibrate")
    if calibrate is not None and method not in (None, "gptq"):
        raise InputError(f"{method} needs no text", hint="leave out --calibrate, or --method gptq")
    return "qat" if qat else "gptq" if calibrate is not None else method
