"""Tests are tested: one line of damage in the engine, and a named check turns red.

Each fault names the check that must catch it; the check passes without the fault.
"""

from collections.abc import Callable

import pytest
import torch

from glassformer.byhand.optim import Adam
from tests.byhand import (
    test_cached_forward,
    test_model_parity,
    test_parts,
    test_training,
)
from tests.byhand.parts import PARTS
from tests.byhand.witness import MODERN, PRESETS
from tests.planting import (
    Binary,
    Call,
    Compare,
    Fault,
    Keyword,
    Name,
    Subscript,
    Unary,
    mutate,
    planted,
)


def steps_like(ours: type[Adam], theirs: type[torch.optim.Optimizer]) -> None:
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    loss_error, weight_error = test_training.trajectories(
        PRESETS["budget-lm"], ours, theirs, settings, 5
    )
    assert loss_error <= 1e-10
    assert weight_error <= 1e-9


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"part {name}": lambda part=part: test_parts.test_numbers_and_gradients_are_torchs(part)
        for name, part in PARTS.items()
    },
    "model core": lambda: test_model_parity.assert_same_gradients(PRESETS["core"]),
    "model gemma": lambda: test_model_parity.assert_same_gradients(PRESETS["gemma"]),
    "model without a first norm": lambda: test_model_parity.assert_same_gradients(MODERN),
    "accumulation": lambda: test_model_parity.test_accumulation_is_the_sum("core"),
    "adam": lambda: steps_like(Adam, torch.optim.Adam),
    "cached": lambda: test_cached_forward.test_cached_is_uncached(PRESETS["qwen"], "left"),
}

FAULTS = [
    Fault(
        "missing transpose",
        mutate(
            "byhand.linear:linear_products",
            Name("weight_OI"),
            to="{it}.T if len({it}) == len({it}.T) else {it}",
        ),
        "model core",
    ),
    Fault(
        "norm without the mean term",
        mutate("byhand.norm:layer_norm_backward", Subscript("mean"), to="0.0"),
        "part layer_norm",
    ),
    Fault(
        "softmax without the Jacobian's second term",
        mutate("byhand.attention:softmax_backward", Name("dot"), to="0.0"),
        "part softmax",
    ),
    Fault(
        "dropped 1/sqrt(d) backward",
        mutate("byhand.attention:attend_backward", Name("scale"), to="1.0"),
        "part attend",
    ),
    Fault(
        "rotation turned the same way twice",
        mutate("byhand.embedding:rotate_backward", Unary("-"), to="{operand}"),
        "part rotary",
    ),
    Fault(
        "mean over rows instead of over what counts",
        mutate("byhand.loss:rows_that_count", Call("sum"), to="float(len(weights_M))"),
        "model core",
    ),
    Fault(
        "no bias correction", mutate("byhand.updates:adam_update", Binary("/"), to="{left}"), "adam"
    ),
    Fault(
        "a gradient that two values share is overwritten",
        mutate("byhand.interpreter:_Backward._step", Unary("not"), to="True"),
        "model gemma",
    ),
    Fault(
        "the second gradient of a value is lost",
        mutate("byhand.interpreter:Plan.backward", Compare("is not", nth=2), to="False"),
        "model core",
    ),
    Fault(
        "a value is overwritten that a cache refers to",
        mutate("byhand.interpreter:_overwrite", Compare("not in"), to="True"),
        "model without a first norm",
    ),
    Fault(
        "gradients of the last batch left standing",
        mutate("byhand.operations:_zeroed", Unary("not"), to="False"),
        "accumulation",
    ),
    Fault(
        "cache off by one",
        mutate("byhand.cached_forward:_advance", Keyword("past"), to="max({it} - 1, 0)"),
        "cached",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a damaged engine may divide by zero
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    check = CHECKS[fault.caught_by]
    check()
    with planted(fault), pytest.raises((AssertionError, ValueError, IndexError)):
        check()
    check()
