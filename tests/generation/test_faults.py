"""The tests are tested: every planted fault turns its named check red."""

import inspect

import pytest

from glassformer.spec.errors import InputError
from tests.generation import (
    checks,
    definitions,
    test_beam,
    test_constraint,
    test_loop,
    test_samplers,
    test_stepper,
    test_text_stream,
)
from tests.planting import Binary, Call, Compare, Constant, Fault, Name, mutate, planted

CHECKS = {
    check.__name__: check
    for check in (
        checks.rows_end_alone,
        checks.beams_are_exact,
        definitions.top_k_is_its_definition,
        definitions.top_p_is_its_definition,
        definitions.draws_are_independent,
        definitions.the_chain_is_in_order,
        test_beam.searches_end_early,
        test_text_stream.text_streams_whole,
    )
}
FAULTS = (
    Fault("finished rows sampled on", mutate("generation.loop:_columns", Compare("is"), to="True"), "rows_end_alone"),
    Fault("top-p drops the first token", mutate("generation.samplers:keep_top_p", Constant(0.0), to="1.0"), "top_p_is_its_definition"),
    Fault("top-k one too many", mutate("generation.samplers:keep_top_k", Call("_largest"), arg=1, to="{it} + 1"), "top_k_is_its_definition"),
    Fault("the same draw at every step", mutate("generation.samplers:draw", Name("step"), to="0"), "draws_are_independent"),
    Fault("top-p before temperature", mutate("generation.samplers:_kept", Name("x_BV"), to="keep_top_p({it}, spec.top_p)"), "the_chain_is_in_order"),
    Fault("EOS not counted", mutate("generation.beam:_continue", Call("score"), arg=1, to="max(1, {it} - (finish == 'eos'))"), "beams_are_exact"),
    Fault("never stops early", mutate("generation.beam:_Item.settled", Compare(">="), to="False and {it}"), "searches_end_early"),
    Fault("half a character shown", mutate("generation.text_stream:TextStream.push", Binary("-"), to="{left}"), "text_streams_whole"),
)  # fmt: skip

#: A damaged step may also fail outright: an index out of range is noticed too.
RED = (AssertionError, IndexError, RuntimeError, InputError, pytest.fail.Exception)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()


def test_every_check_is_a_test_of_its_own():
    """The tests that call the checks show that they are green without a fault."""
    tests = [
        inspect.getsource(function)
        for module in (
            test_beam,
            test_constraint,
            test_loop,
            test_samplers,
            test_stepper,
            test_text_stream,
        )
        for name, function in vars(module).items()
        if name.startswith("test_")
    ]
    for name in CHECKS:
        assert any(f"{name}(" in source for source in tests), name
