"""Every claim holds; and every planted fault turns its named check red."""

import pytest

from glassformer.kernels import int_matmul
from glassformer.spec.errors import InputError
from tests.planting import Binary, Call, Fault, Name, Return, mutate, planted
from tests.quant import checks

CHECKS = {
    check.__name__: check
    for check in (
        checks.schemes_are_their_definition,
        checks.errors_are_half_a_step,
        checks.levels_stay_in_range,
        checks.nibbles_keep_their_order,
        checks.least_squares_are_less,
        checks.gptq_keeps_products,
        checks.errors_are_made_up_for,
        checks.turns_keep_answers,
        checks.harm_is_what_rounding_does,
        checks.tables_that_dominate_are_narrow,
        checks.backends_are_within_their_bound,
        checks.the_reference_has_the_bits_of_c,
        checks.rows_are_alone,
        checks.forms_come_back,
        checks.lookups_are_rows,
        checks.converted_is_rounded,
        checks.gradients_go_straight_through,
        checks.pieces_add_up,
        checks.corrections_learn_over_rounded_weights,
        checks.dequantized_is_what_was_used,
        checks.tied_tables_are_shared,
        checks.arrays_come_back,
    )
}
FAULTS = (
    Fault("scale by column", mutate("quant.schemes:IntegerCodec.grid", Call("amax"), to="{func}(0, keepdim=True).amax(-1).expand(len(weight_OI), -1)"), "schemes_are_their_definition"),
    Fault("clip missing", mutate("quant.schemes:IntegerCodec.nearest", Return(), to="torch.round(weight / scale) + zero"), "least_squares_are_less"),
    Fault("nibbles exchanged when packed", mutate("quant.schemes:Int4Codec.pack", Return(), to="levels[:, 1::2] | {left} << 4"), "nibbles_keep_their_order"),
    Fault("no correction within a block", mutate("quant.schemes:_corrected", Call("outer"), drop=True), "gptq_keeps_products"),
    Fault("STE gradient missing", mutate("quant.layers:StraightThrough.backward", Name("gradient"), to="torch.zeros_like({it})"), "gradients_go_straight_through"),
    Fault("tied table forgotten", mutate("spec.quantization:targets", Binary("or"), to="True"), "tied_tables_are_shared"),
)  # fmt: skip

RED = (AssertionError, IndexError, KeyError, RuntimeError, AttributeError, InputError, ValueError)

pytestmark = pytest.mark.filterwarnings(
    "ignore::glassformer.quant.backends.choose.SlowQuantization"  # a machine without a C compiler
)


@pytest.fixture(scope="module")
def sound():
    """Checks that were seen green; backends are probed then, not with a fault in them."""
    return set()


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_the_claim_holds(check):
    check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault, sound):
    if ":Native" in fault.where:
        assert int_matmul.available(), int_matmul.unavailable()
    if fault.caught_by not in sound:
        CHECKS[fault.caught_by]()
        sound.add(fault.caught_by)
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()
