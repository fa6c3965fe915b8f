"""What `glass design` does: a budget in, a table, its costs and what gave way out."""

import json
import sys
from pathlib import Path
from typing import Any

from glassformer.budget.infeasible import InfeasibleBudget, Undecided, show
from glassformer.budget.question import (
    Answer,
    Budget,
    Exact,
    format_alternatives,
    format_dimensions,
)
from glassformer.costs.flops import flops
from glassformer.costs.memory import cache_bytes, training_memory, weight_bytes
from glassformer.costs.parameter_table import format_allocation
from glassformer.lab.budget_report import design_numbers, odd_shapes, run_of_design
from glassformer.spec.errors import InputError
from glassformer.spec.units import format_bytes, format_flops, format_seconds


def design_json(answer: Answer) -> str:
    """The answer for scripts."""
    found = design_numbers(answer.best)
    found["gave_way"] = list(answer.gave_way)
    found["not_proven"] = list(answer.not_proven)
    found["alternatives"] = [
        {"name": design.name, **design_numbers(design)} for design in answer.alternatives
    ]
    return json.dumps(found)


def infeasible_json(error: InfeasibleBudget) -> str:
    """The certificate for scripts."""
    found = error.certificate
    told = {"why": found.why, "nearest": found.nearest, "unproven": list(found.unproven)}
    return json.dumps({"infeasible": told})


def undecided_json(error: Undecided) -> str:
    """For scripts: neither a design nor a certificate, and what is known."""
    told = {"why": error.what, "counts": list(error.counts), "tolerance": error.tolerance}
    return json.dumps({"undecided": told})


def infeasible_text(error: InfeasibleBudget) -> str:
    """The certificate for people."""
    found = error.certificate
    lines = [f"infeasible: {found.why}"]
    works = {name: value for name, value in found.nearest.items() if value is not None}
    if works:
        lines.append("any one of these changes alone makes it feasible:")
        for name, value in works.items():
            nearer = "  (a nearer one is not ruled out)" if name in found.unproven else ""
            lines.append(f"  {_option(name, value, found.budget)}{nearer}")
    helpless = [name for name in found.nearest if name not in works]
    known = [_switch(name) for name in helpless if name not in found.unproven]
    if known:
        lines.append(f"no change of one of these alone does: {' '.join(known)}")
    unknown = [_switch(name) for name in helpless if name in found.unproven]
    if unknown:
        lines.append(f"not known of these, --thorough would tell: {' '.join(unknown)}")
    return "\n".join(lines)


def _switch(name: str) -> str:
    return "--untied" if name == "tied" else f"--{name.replace('_', '-')}"


def _option(name: str, value: Any, budget: Budget) -> str:
    """The change as words of the command line."""
    if name == "tied":
        return "without --untied" if value else "--untied"
    words = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return words
    text = f"{words} {show(value).replace(',', '')}"
    if name == "ratio_within" and isinstance(budget.embedding_ratio, Exact):
        return f"{text} instead of --exact-ratio"
    if name == "glu_within" and isinstance(budget.glu_expansion, Exact):
        return f"{text} instead of --exact-expansion"
    return text


def design_text(answer: Answer, *, batch: int, device: str = "cpu") -> str:
    """The answer for people, but for the step's time, which takes a moment to calibrate."""
    parts = [str(answer.best), format_allocation(answer.spec)]
    parts.append(format_dimensions(answer.best, answer.budget))
    if answer.gave_way:
        parts.append("gave way\n" + "\n".join(f"  {line}" for line in answer.gave_way))
    parts += [
        f"{odd.what}; --{odd.option.replace('_', '-')} {odd.value} asks for d_model of at "
        f"{'least' if odd.option == 'min_aspect' else 'most'} {odd.value} x the layers"
        for odd in odd_shapes(answer.best)
    ]
    if answer.alternatives:
        parts.append("other designs within the tolerance\n" + format_alternatives(answer))
    if answer.not_proven:
        lines = "\n".join(f"  {line}" for line in answer.not_proven)
        parts.append(f"not proven, which --thorough would be\n{lines}")
    parts.append(costs_text(answer, batch=batch, device=device))
    return "\n\n".join(parts)


def costs_text(answer: Answer, *, batch: int, device: str) -> str:
    """FLOPs, memory and cache."""
    model, length = answer.spec, answer.spec.max_seq_len
    work = flops(model, length=length)
    kept = training_memory(model, batch=batch, length=length, device=device)
    forms = weight_bytes(model)
    cache = cache_bytes(model, batch=1, length=1, itemsize=4)
    weights = "   ".join(f"{form} {format_bytes(count)}" for form, count in forms.items())
    if forms["int4"] == forms["int8"]:
        weights += "   (32 divides neither width, so int4 stays int8)"
    return "\n".join(
        [
            f"FLOPs per token    forward {format_flops(work.forward / length)}   training "
            f"{format_flops(work.training / length)}   (length {length})",
            f"weights            {weights}",
            f"training memory    {format_bytes(kept.peak)} at batch {batch} x {length} in float32",
            f"                   weights {format_bytes(kept.weights)}, AdamW "
            f"{format_bytes(kept.optimizer)}, activations {format_bytes(kept.activations)}, the "
            f"gradient of the loss {format_bytes(kept.passing)}",
            f"KV cache per token {format_bytes(cache)} in float32, {format_bytes(cache / 2)} in "
            "bf16",
        ]
    )


def time_text(answer: Answer, *, batch: int, device: str) -> str:
    """The predicted time of a training step, after two seconds of measuring this machine."""
    from glassformer.cli.shell.process import check_device
    from glassformer.costs.timing import step_time
    from glassformer.lab.measure.machine_rates import calibrate

    check_device(device)
    length = answer.spec.max_seq_len
    rates = calibrate(device=device)
    seconds = step_time(answer.spec, rates, batch=batch, length=length).total
    threads = f", {rates.threads} threads" if device == "cpu" else ""
    return (
        f"training step      about {format_seconds(seconds)} at batch {batch} x {length} on this "
        f"machine ({device}{threads}): {batch * length / seconds:,.0f} tokens a second"
    )


def save(answer: Answer, path: Path, *, batch: int) -> None:
    """Write a config that `glass train` takes."""
    if path.suffix != ".toml":
        raise InputError(
            f"--save {path} is not a .toml", hint=f"--save {path.with_suffix('.toml')}"
        )
    from glassformer.lab.runs.record import to_toml

    text = to_toml(run_of_design(answer, batch=batch))
    if text is None:
        raise InputError("writing TOML needs the library tomli_w", hint="pip install tomli-w")
    _write(path, text.encode())
    print(f"saved {path}: glass train {path}", file=sys.stderr)


def draw(answer: Answer, path: Path) -> None:
    """The allocation, and the landscape of ratio and expansion around it."""
    if path.suffix != ".png":
        raise InputError(f"--png {path} is not a .png", hint=f"--png {path.with_suffix('.png')}")
    from glassformer.lab.plots.figures import design_figure

    _write(path, design_figure(answer))
    print(f"saved {path}", file=sys.stderr)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from error
