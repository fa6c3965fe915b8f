"""Run `glass quantize`: choose the folder, and print the comparison as text or as JSON."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path

from glassformer.cli.shell.output import end
from glassformer.cli.shell.terminal import tell
from glassformer.lab.next_steps import after_quantizing
from glassformer.lab.quantize import Outcome, Wish, dequantize_folder, quantize_folder
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.serialize import json_numbers
from glassformer.store.rundir import RunRef
from glassformer.training.fit import StepRecord


def run(path: str, wish: Wish, *, out: Path, as_json: bool) -> None:
    """Quantize, and print the comparison."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = quantize_folder(path, out, wish, watch=_tell_step)
    for warning in caught:
        tell(f"warning: {warning.message}")
    if as_json:
        print(outcome_json(outcome))
        return
    print(outcome_text(outcome, wish.spec), flush=True)
    end(outcome.folder, after_quantizing(outcome.folder, outcome.prompt))


def undo(path: str, *, out: Path, as_json: bool) -> None:
    """Write the float model of a quantized one."""
    folder = dequantize_folder(path, out)
    print(json.dumps({"folder": str(folder)}) if as_json else f"written to {folder}")


def default_folder(text: str, spec: QuantSpec, runs: Path) -> Path:
    """Return the default folder, in the runs folder: `text-int4`."""
    name = RunRef.parse(text).folder.name
    return runs / f"{name}-{spec.scheme.name}"


def _tell_step(record: StepRecord) -> None:
    if record.step % 20 == 0:
        tell(f"step={record.step} loss={record.loss:.4f}")


def outcome_json(outcome: Outcome) -> str:
    """Return one JSON object for scripts."""
    found = {
        "folder": str(outcome.folder),
        "quantized_layers": outcome.layers,
        "schemes": outcome.schemes,
        "kept_float": list(outcome.kept),
        "timings": [
            asdict(timing) | {"scheme": timing.scheme.describe()} for timing in outcome.timings
        ],
        **outcome.comparison.to_dict(),
    }
    return json.dumps(json_numbers(found), allow_nan=False)


def outcome_text(outcome: Outcome, spec: QuantSpec) -> str:
    """Format the comparison for the terminal."""
    schemes = " and ".join(
        scheme if count == outcome.layers else f"{count} {scheme}"
        for scheme, count in outcome.schemes.items()
    )
    lines = [
        f"{outcome.layers} layers, {schemes} by {spec.resolved_method}, "
        f"run by {', '.join(outcome.comparison.backends)}",
        "",
        str(outcome.comparison),
    ]
    if outcome.kept:
        lines.append(f"kept in float, which is faster for them: {', '.join(outcome.kept)}")
    return "\n".join(lines)
