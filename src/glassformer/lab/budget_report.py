"""A design and the report on it: where it can go, an unusual shape, its costs, a run of it.

Whether a design exports and cuts to int4 is not decided here: the predicates are those of the
adapters and of quantization. Torch is not needed for that.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from glassformer.adapters.counterpart import counterpart, misfits
from glassformer.adapters.families.llama import LLAMA
from glassformer.adapters.gguf.architectures import ARCHITECTURES
from glassformer.adapters.gguf.config import architecture_of
from glassformer.budget.answer import Answer, Design, Portability
from glassformer.budget.design import EVALUATIONS, LANDSCAPE_EVALUATIONS, ask, best_design, solve
from glassformer.budget.infeasible import Undecided, command_of
from glassformer.budget.question import HEAD_WIDTHS, Budget, Sizes, build_spec
from glassformer.budget.search import Effort, SearchStopped, Stop
from glassformer.costs.estimates import cache_bytes, flops, training_memory, weight_bytes
from glassformer.costs.parameter_table import format_allocation
from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import coverage
from glassformer.spec.schemes import Int4
from glassformer.spec.tasks import TextTask
from glassformer.spec.train import RunSpec
from glassformer.spec.units import format_bytes, format_flops, format_seconds

#: The number of parameters from which on a text run gets the learning rate of the 10 M recipe.
LARGE = 3_000_000
#: A shape is unusual if d_model / n_layers is below the first or above the second. Losses differ by
#: a few per cent from 33 (48 layers of 1,600) to 715 (6 of 4,288) in Kaplan et al., "Scaling laws
#: for neural language models" (arXiv:2001.08361), figure 5; small models that are deep on purpose
#: have 19 (MobileLLM-125M, 30 of 576, arXiv:2402.14905).
LEAST_ASPECT, MOST_ASPECT = 8, 1024
#: A width of heads is unusual outside these, or if it is odd: it then has no pairs to rotate.
#: stories260K has 8; FlashAttention's kernels end at 256.
LEAST_HEAD, MOST_HEAD = 8, 256
#: Tolerances that are tried where whole multiples of int4 are out of reach.
TOLERANCES = (0.01, 0.02, 0.05)


def design(
    params: int | float | str,
    vocab: int | float | str,
    *,
    thorough: bool = False,
    **options: Any,
) -> Answer:
    """Solve a parameter budget: `design("10M", 16_000).spec` is a model of that size.

    `options` are the fields of `Budget`. Numbers may be text (`"10M"`, `"0.5%"`); the ratio and the
    expansion may be `"free"`. A search ends after a while and says what it has not proven;
    `thorough` removes the limit.
    """
    effort = Effort() if thorough else Effort(EVALUATIONS)
    budget = ask({"params": params, "vocab": vocab, **options}, effort)
    return judged(solve(budget, thorough=thorough))


# --- can it leave -------------------------------------------------------------------------------


def judged(answer: Answer, *, stop: Stop | None = None) -> Answer:
    """Return the answer with the portability of each design, and for the best what would help."""
    best = replace(answer.best, portability=portability(answer.best.spec))
    if best.portability is not None and best.portability.reasons():
        change = _change(answer.budget, Effort(EVALUATIONS, stop=stop))
        best = replace(best, portability=replace(best.portability, change=change))
    others = (replace(each, portability=portability(each.spec)) for each in answer.alternatives)
    return replace(answer, best=best, alternatives=tuple(others))


def portability(model: ModelSpec) -> Portability:
    """Ask the export to Hugging Face, the export to GGUF and int4 whether they take a model."""
    exports_as = gguf = why = ""
    try:
        exports_as = counterpart(model).title
        entry, _ = architecture_of(model)
        gguf = ARCHITECTURES[entry].name(entry)
    except InputError:
        why = "" if exports_as else "; ".join(misfits(model, LLAMA))
    cut = coverage(model, Int4())
    return Portability(
        exports_as=exports_as,
        gguf=gguf,
        why_not_exported=why,
        why_not_int4=cut.why() if cut.unfit else "",
    )


def _change(budget: Budget, effort: Effort) -> dict[str, Any]:
    """Return the fewest options with which a design exports and cuts to int4; {} if none do.

    Every change was tried: the design that it gives was judged.
    """
    for change in _changes(budget):
        try:
            limited = Effort(LANDSCAPE_EVALUATIONS, parent=effort)
            found = best_design(replace(budget, **change), effort=limited)
        except (InputError, Undecided):  # options that exclude one another, or no result in time
            continue
        except SearchStopped:  # the answer itself is there
            return {}
        if found is not None and not portability(found.spec).reasons():
            return change
    return {}


def _changes(budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield changes to try, the smallest first: parts as Llama has them, then wider tolerances."""
    parts: dict[str, dict[str, Any]] = {
        name: {name: value}
        for name, value in (
            ("shape", "llama"),
            ("position", None),
            ("norm", None),
            ("bias", "none"),
            ("rank", None),
            ("free_head_width", False),
            ("multiple", None if budget.multiple is None else Int4.multiple),
            ("ffn_multiple", None),
        )
        if getattr(budget, name) != value
    }
    if budget.experts is not None:
        dense = {"experts": None, "experts_per_token": None, "shared_expert": False}
        parts["experts"] = {k: v for k, v in dense.items() if getattr(budget, k) != v}
    more: list[dict[str, Any]] = [{}]
    if budget.multiple is None:
        more += [{"tolerance": wider} for wider in TOLERANCES if wider > budget.tolerance]
        more += [{"multiple": Int4.multiple}]
    for number in range(len(parts) + 1):
        for chosen in itertools.combinations(parts.values(), number):
            change = {name: value for part in chosen for name, value in part.items()}
            if _exports(budget, change):
                yield from (change | extra for extra in more)


def _exports(budget: Budget, change: dict[str, Any]) -> bool:
    """Return whether a small model of the changed budget exports: size plays no part in that."""
    try:
        changed = replace(budget, **change)
        heads = changed.kv_heads or 1
        rank = None if changed.rank is None else 1
        sizes = Sizes(d_model=2 * heads, n_heads=heads, d_head=2, d_ff=2, n_layers=1, rank=rank)
        return bool(portability(build_spec(changed, sizes)).exports_as)
    except InputError:
        return False


def _portability_text(found: Portability) -> str:
    lines = [found.verdict(), *(f"  {line}" for line in found.reasons())]
    if found.change:
        lines.append(f"  yes to both: {command_of(found.change)}")
    return "\n".join(lines)


# --- unusual shapes -----------------------------------------------------------------------------


@spec
class UnusualShape:
    """A shape that nobody builds, and options that ask for a more usual one."""

    what: str
    options: dict[str, Any]
    then: str

    def text(self) -> str:
        """Return the warning with the command-line option that avoids it."""
        return f"{self.what}; {command_of(self.options)} asks for {self.then}"


def unusual_shapes(design: Design) -> tuple[UnusualShape, ...]:
    """Return a warning for very many layers, or very few, and for heads of a strange width."""
    sizes, found = design.sizes, []
    layers = "one layer" if sizes.n_layers == 1 else f"{sizes.n_layers} layers"
    what = f"an unusual shape: {layers} of width {sizes.d_model}"
    for is_odd, option, side, limit in (
        (sizes.d_model < LEAST_ASPECT * sizes.n_layers, "min_aspect", "least", LEAST_ASPECT),
        (sizes.d_model > MOST_ASPECT * sizes.n_layers, "max_aspect", "most", MOST_ASPECT),
    ):
        if is_odd:
            then = f"d_model of at {side} {limit} x the layers"
            found.append(UnusualShape(what=what, options={option: limit}, then=then))
    what, (least, most) = f"an unusual width of heads: {sizes.d_head}", HEAD_WIDTHS
    if not LEAST_HEAD <= sizes.d_head <= MOST_HEAD:
        then = f"heads {least} to {most} wide"
        found.append(UnusualShape(what=what, options={"heads": "any"}, then=then))
    elif sizes.d_head % 2:
        options = {"multiple": 2 * sizes.n_heads}
        found.append(UnusualShape(what=what, options=options, then="an even one"))
    return tuple(found)


# --- costs --------------------------------------------------------------------------------------


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


def design_costs(model: ModelSpec, *, batch: int) -> tuple[Cost, ...]:
    """Return FLOPs, bytes of the weights, training memory and cache of a model."""
    length = model.max_seq_len
    work, forms = flops(model, length=length), weight_bytes(model)
    memory = training_memory(model, batch=batch, length=length, device="cpu")
    cache = cache_bytes(model, batch=1, length=1, itemsize=4)
    at_batch = f"batch {batch} x {length:,} in float32"
    state = memory.weights + memory.optimizer
    rows: list[tuple[str, float, Literal["flops", "bytes"], str]] = [
        ("forward, per token", work.forward / length, "flops", f"at length {length:,}"),
        ("training, per token", work.training / length, "flops", "forward and backward"),
        *((f"weights in {form}", count, "bytes", "") for form, count in forms.items()),
        ("weights and AdamW", state, "bytes", "float32, without a batch"),
        ("training, at most", memory.peak, "bytes", at_batch),
        ("KV cache, per token", cache, "bytes", "float32; half of it in bf16"),
        ("KV cache, full context", cache * length, "bytes", f"{length:,} tokens, float32"),
    ]
    return tuple(
        Cost(name=name, value=value, unit=unit, note=note) for name, value, unit, note in rows
    )


def design_text(answer: Answer, *, batch: int, device: str = "cpu") -> str:
    """Return the answer as text: table, wishes, alternatives, what is not proven, costs."""
    parts = [str(answer.best), format_allocation(answer.spec), answer.best.text(answer.budget)]
    if answer.best.portability is not None:
        parts.append(_portability_text(answer.best.portability))
    if answer.gave_way:
        parts.append("gave way\n" + "\n".join(f"  {line}" for line in answer.gave_way))
    parts += [warning.text() for warning in unusual_shapes(answer.best)]
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
    plural = "" if rates.threads == 1 else "s"
    threads = f", {rates.threads} thread{plural}" if device == "cpu" else ""
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
