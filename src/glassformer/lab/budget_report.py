"""The report on a design: its costs, an unusual shape, the full text, and a run of it."""

from dataclasses import replace
from typing import Literal

from glassformer.budget.answer import Answer, Design
from glassformer.costs.estimates import cache_bytes, flops, training_memory, weight_bytes
from glassformer.costs.parameter_table import format_allocation
from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.tasks import TextTask
from glassformer.spec.train import RunSpec
from glassformer.spec.units import format_bytes, format_flops, format_seconds

#: From this number of parameters on, a text run gets the learning rate of the 10 M recipe.
LARGE = 3_000_000
#: A shape is unusual if d_model / n_layers is below the first or above the second.
LEAST_ASPECT, MOST_ASPECT = 4, 1024


@spec
class UnusualShape:
    """A shape that nobody builds, and the option with a value that asks for a more usual one."""

    what: str
    option: Literal["min_aspect", "max_aspect"]
    value: int

    def text(self) -> str:
        """Return the warning with the command-line option that avoids it."""
        side = "least" if self.option == "min_aspect" else "most"
        flag = f"--{self.option.replace('_', '-')}"
        limit = f"d_model of at {side} {self.value} x the layers"
        return f"{self.what}; {flag} {self.value} asks for {limit}"


def unusual_shape(design: Design) -> UnusualShape | None:
    """Return a warning if a design meets every constraint with very many layers, or very few."""
    sizes = design.sizes
    layers = "one layer" if sizes.n_layers == 1 else f"{sizes.n_layers} layers"
    what = f"an unusual shape: {layers} of width {sizes.d_model}"
    if sizes.d_model < LEAST_ASPECT * sizes.n_layers:
        return UnusualShape(what=what, option="min_aspect", value=LEAST_ASPECT)
    if sizes.d_model > MOST_ASPECT * sizes.n_layers:
        return UnusualShape(what=what, option="max_aspect", value=MOST_ASPECT)
    return None


@spec
class Cost:
    """One cost of a model: a number of FLOPs or bytes, and when it applies."""

    name: str
    value: float
    unit: Literal["flops", "bytes"]
    note: str = ""

    @property
    def text(self) -> str:
        """The value with its unit, such as `38.2 MB`."""
        return format_flops(self.value) if self.unit == "flops" else format_bytes(self.value)


def design_costs(model: ModelSpec, *, batch: int, device: str = "cpu") -> tuple[Cost, ...]:
    """Return FLOPs, bytes of the weights, training memory and cache of a model."""
    length = model.max_seq_len
    work, forms = flops(model, length=length), weight_bytes(model)
    memory = training_memory(model, batch=batch, length=length, device=device)
    cache = cache_bytes(model, batch=1, length=1, itemsize=4)
    at_batch = f"batch {batch} x {length:,} in float32"
    same = "32 divides neither width: the same as int8" if _is_int8(forms) else ""
    return (
        Cost(
            name="forward, per token",
            value=work.forward / length,
            unit="flops",
            note=f"at length {length:,}",
        ),
        Cost(
            name="training, per token",
            value=work.training / length,
            unit="flops",
            note="forward and backward",
        ),
        *(
            Cost(
                name=f"weights in {form}",
                value=count,
                unit="bytes",
                note=same if form == "int4" else "",
            )
            for form, count in forms.items()
        ),
        Cost(
            name="weights and AdamW",
            value=memory.weights + memory.optimizer,
            unit="bytes",
            note="float32, without a batch",
        ),
        Cost(name="training, at most", value=memory.peak, unit="bytes", note=at_batch),
        Cost(
            name="KV cache, per token",
            value=cache,
            unit="bytes",
            note="float32; half of it in bf16",
        ),
        Cost(
            name="KV cache, full context",
            value=cache * length,
            unit="bytes",
            note=f"{length:,} tokens, float32",
        ),
    )


def _is_int8(forms: dict[str, int]) -> bool:
    """Return True if 32 divides no width, so that int4 stays int8."""
    return forms["int4"] == forms["int8"]


def design_text(answer: Answer, *, batch: int, device: str = "cpu") -> str:
    """Return the answer as text: table, wishes, alternatives, what is not proven, costs."""
    parts = [str(answer.best), format_allocation(answer.spec), answer.best.text(answer.budget)]
    if answer.gave_way:
        parts.append("gave way\n" + "\n".join(f"  {line}" for line in answer.gave_way))
    unusual = unusual_shape(answer.best)
    if unusual is not None:
        parts.append(unusual.text())
    if answer.alternatives:
        parts.append(f"other designs within the tolerance\n{answer.table()}")
    if answer.not_proven:
        lines = "\n".join(f"  {line}" for line in answer.not_proven)
        parts.append(f"not proven, which --thorough would be\n{lines}")
    parts.append(_costs_text(answer.spec, batch=batch, device=device))
    return "\n\n".join(parts)


def _costs_text(model: ModelSpec, *, batch: int, device: str) -> str:
    length = model.max_seq_len
    work, forms = flops(model, length=length), weight_bytes(model)
    memory = training_memory(model, batch=batch, length=length, device=device)
    cache = cache_bytes(model, batch=1, length=1, itemsize=4)
    weights = "   ".join(f"{form} {format_bytes(count)}" for form, count in forms.items())
    if _is_int8(forms):
        weights += "   (32 divides neither width, so int4 stays int8)"
    return "\n".join(
        [
            f"FLOPs per token    forward {format_flops(work.forward / length)}   training "
            f"{format_flops(work.training / length)}   (length {length})",
            f"weights            {weights}",
            f"training memory    {format_bytes(memory.peak)} at batch {batch} x {length} in "
            "float32",
            f"                   weights {format_bytes(memory.weights)}, AdamW "
            f"{format_bytes(memory.optimizer)}, activations {format_bytes(memory.activations)}, "
            f"the gradient of the loss {format_bytes(memory.passing)}",
            f"KV cache per token {format_bytes(cache)} in float32, {format_bytes(cache / 2)} in "
            "bf16",
        ]
    )


def step_time_text(model: ModelSpec, *, batch: int, device: str) -> str:
    """Return the predicted time of a training step, after two seconds of measuring the machine."""
    from glassformer.costs.timing import step_time
    from glassformer.lab.measure.machine_rates import calibrate

    length = model.max_seq_len
    rates = calibrate(device=device)
    seconds = step_time(model, rates, batch=batch, length=length).total
    threads = f", {rates.threads} threads" if device == "cpu" else ""
    return (
        f"training step      about {format_seconds(seconds)} at batch {batch} x {length} on this "
        f"machine ({device}{threads}): {batch * length / seconds:,.0f} tokens a second"
    )


def run_of_design(answer: Answer, *, batch: int) -> RunSpec:
    """Return a run of the best design on text, with byte pairs of the budget's vocabulary."""
    budget = answer.budget
    if budget.vocab < 256:
        raise InputError(
            f"a text run has 256 byte pairs or more, and the vocabulary is {budget.vocab}",
            hint="the nearest that can be saved is --vocab 256",
        )
    # Here: this imports numpy and torch, which a design does not need.
    from glassformer.lab.recipes import LARGE_LM_TRAINING, LM_TRAINING

    task = TextTask(tokenizer="bpe", vocab_size=budget.vocab, length=budget.length)
    train = LM_TRAINING
    if answer.best.params > LARGE:
        train = replace(train, lr=LARGE_LM_TRAINING.lr)
    return RunSpec(model=answer.spec, task=task, train=replace(train, batch_size=batch))
