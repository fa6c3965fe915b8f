"""Run `glass diff`: open both sides, compare them, print where they part."""

import dataclasses
import json
from pathlib import Path

from torch import nn

from glassformer.adapters.load import build, load
from glassformer.checks.diff import Difference, diff
from glassformer.checks.subject import called
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.resolve import find_model
from glassformer.spec.presets import PRESETS, preset
from glassformer.spec.serialize import json_numbers


def compared(first: str, second: str | None, *, backward: bool, device: str = "cpu") -> Difference:
    """Compare two models, or a model with transformers' implementation of the same folder."""
    device = check_device(device)
    one = opened(first, device)
    if second is not None:
        return diff(one, opened(second, device), names=(first, second), backward=backward)
    place = find_model(first, runs=Path("runs"))
    other = load(place, backend="transformers", device=device)
    return diff(one, other, names=("ours", "transformers"), backward=backward)


def opened(model: str, device: str) -> object:
    """Return the model of a preset, a factory, or a name on disk."""
    if model in PRESETS:
        return build(preset(model), seed=0).to(device)
    if ":" in model:
        made = called(model)[0]
        return made.to(device) if isinstance(made, nn.Module) else made
    return load(find_model(model, runs=Path("runs"), also=PRESETS), device=device)


def show(found: Difference, *, as_json: bool) -> None:
    """Print JSON for scripts, else the difference in words."""
    if as_json:
        data = {**dataclasses.asdict(found), "module": "" if found.same else found.module}
        print(json.dumps(json_numbers(data), allow_nan=False))
    else:
        print(found)
