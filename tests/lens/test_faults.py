"""The tests are tested: every planted fault turns its named check red."""

import pytest

from glassformer.spec.errors import InputError
from tests.lens import checks, patch_checks, test_roles
from tests.planting import Binary, Call, Choice, Fault, If, Return, Subscript, mutate, planted

CHECKS = {
    check.__name__: check
    for check in (
        checks.attention_is_softmax_of_scores,
        checks.every_row_is_the_model_cut_off,
        checks.losses_are_of_the_next_token,
        patch_checks.patches_are_forwards_by_hand,
        test_roles.induction_is_what_followed_the_earlier_copy,
        test_roles.groups_score_what_moves_between_them,
    )
}
FAULTS = (
    Fault("transposed map", mutate("lens.measure.attention:KindMaps._map", Return(), arg=0, to="{it}.T"), "attention_is_softmax_of_scores"),
    Fault("missing final norm", mutate("lens.measure.predictions:read_lens", Choice(), to="{body}"), "every_row_is_the_model_cut_off"),
    Fault("wrong KL direction", mutate("lens.measure.predictions:read_predictions", Call("divergence"), to="{func}({args[1]}, {args[0]})"), "every_row_is_the_model_cut_off"),
    Fault("the token itself is asked for", mutate("lens.measure.predictions:_next_tokens", Call("where"), arg=1, to="{value}[:-1]"), "losses_are_of_the_next_token"),
    Fault("patched at the position before", mutate("lens.measure.patching:_patches", Subscript("kept"), part="slice", to="{it} - 1"), "patches_are_forwards_by_hand"),
    Fault("the earlier copy itself", mutate("lens.measure.roles:induction", Binary("+"), to="{left}"), "induction_is_what_followed_the_earlier_copy"),
    Fault("chance without shuffling", mutate("lens.measure.roles:group_difference", If("shuffled"), to="False"), "groups_score_what_moves_between_them"),
)  # fmt: skip

#: A damaged look may also fail outright: an index out of range is noticed too.
RED = (
    AssertionError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    InputError,
    pytest.fail.Exception,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()
