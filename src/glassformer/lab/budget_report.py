"""What becomes of a design: its numbers for scripts and pages, what is odd in it, a run of it."""

from dataclasses import replace
from typing import Any

from glassformer.budget.question import Answer, Design
from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import TextTask
from glassformer.spec.train import RunSpec

#: From here on a text run has the learning rate of the 10 M recipe.
LARGE = 3_000_000
#: Width over depth below which a design is called odd, and above which it is.
ODD_ASPECT, WIDE_ASPECT = 4, 1024


@spec
class Odd:
    """What is unusual, and the limit that asks for something more usual, by its option's name."""

    what: str
    option: str
    value: int


def odd_shapes(design: Design) -> tuple[Odd, ...]:
    """Layers without end, or hardly any: designs that keep every wish, and that nobody builds."""
    sizes = design.sizes
    if sizes.d_model < ODD_ASPECT * sizes.n_layers:
        what = f"an odd shape: {sizes.n_layers} layers of width {sizes.d_model}"
        return (Odd(what=what, option="min_aspect", value=ODD_ASPECT),)
    if sizes.d_model > WIDE_ASPECT * sizes.n_layers:
        layers = "one layer" if sizes.n_layers == 1 else f"{sizes.n_layers} layers"
        what = f"an odd shape: {layers} of width {sizes.d_model}"
        return (Odd(what=what, option="max_aspect", value=WIDE_ASPECT),)
    return ()


def design_numbers(design: Design) -> dict[str, Any]:
    """A design as plain data."""
    sizes = design.sizes
    tied = design.spec.heads[0].tied  # type: ignore[union-attr]  # a design has a next head
    return {
        "target": design.target,
        "params": design.params,
        "error": design.error,
        "d_model": sizes.d_model,
        "d_head": sizes.d_head,
        "d_ff": sizes.d_ff,
        "n_layers": sizes.n_layers,
        "n_heads": sizes.n_heads,
        "embedding_ratio": design.embedding_ratio,
        "glu_expansion": design.glu_expansion,
        "tied": tied,
    }


def run_of_design(answer: Answer, *, batch: int) -> RunSpec:
    """A whole run of the design: text, in byte pairs of the asked vocabulary."""
    budget = answer.budget
    if budget.vocab_size < 256:
        raise InputError(
            f"a text run has 256 byte pairs or more, and the vocabulary is {budget.vocab_size}",
            hint="the nearest that can be saved is --vocab 256",
        )
    from glassformer.lab.recipes import RECIPES  # numpy and torch, which a design does not need

    task = TextTask(tokenizer="bpe", vocab_size=budget.vocab_size, length=budget.max_seq_len)
    train = RECIPES["lm"][2]
    if answer.best.params > LARGE:
        train = replace(train, lr=RECIPES["lm-10m"][2].lr)
    return RunSpec(model=answer.spec, task=task, train=replace(train, batch_size=batch))
