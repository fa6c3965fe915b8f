"""Silencing heads equals a forward without their columns; the ranking equals every ablation."""

import pytest

from glassformer.lens.heads import HeadName, heads_of
from glassformer.lens.inspection import inspect
from glassformer.spec.errors import InputError
from tests.lens import checks
from tests.lens.models import inputs_of, model_of


def test_ablation_is_a_head_without_columns():
    checks.ablation_is_a_head_without_columns()


def test_ranking_is_every_ablation():
    checks.ranking_is_every_ablation()


def test_ranking_in_pieces(monkeypatch):
    seen = inspect(model_of("grouped"), inputs_of("grouped"))
    whole = seen.ranking()
    monkeypatch.setattr("glassformer.lens.measure.ablation.CHUNK", 20)
    pieces = seen.ranking()
    assert pieces.heads == whole.heads
    assert pieces.loss_changes == pytest.approx(whole.loss_changes, abs=checks.EXACT)


def test_a_look_may_begin_without_heads():
    model, inputs = model_of("decoder"), inputs_of("decoder")
    at_once = inspect(model, inputs, ablate=["L0H1", "L1H0", "L0H1"])
    one_by_one = inspect(model, inputs).ablate("L0H1").after.ablate("L1H0")
    assert at_once.ablated == one_by_one.after.ablated
    assert at_once.loss == one_by_one.after.loss
    assert one_by_one.loss_change == at_once.loss - inspect(model, inputs, ablate=["L0H1"]).loss


def test_ablation_of_an_answer():
    seen = inspect(model_of("answer"), inputs_of("answer"))
    made = seen.ablate("L1H1")
    assert made.loss_change is None and float(made.kl[-1]) > 0
    assert seen.ranking().effects[0] == max(seen.ranking().kls)


@pytest.mark.parametrize("name", ["L1H3", "encoder.L0H2", "cross.L11H0"])
def test_names_go_there_and_back(name):
    assert str(HeadName.parse(name)) == name
    assert HeadName.parse(HeadName.parse(name)) == HeadName.parse(f" {name.lower()} ")


@pytest.mark.parametrize("name", ["", "L1", "1.3", "L1H3H4", "decoder.L0H0", "L-1H0", "L1H3 x"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(InputError):
        HeadName.parse(name)


def test_taps_of_heads_are_taps_of_the_model():
    from glassformer.spec.model import tap_shapes

    for name in ("decoder", "encoder-decoder"):
        spec = model_of(name).spec
        known = tap_shapes(spec)
        assert all(known[head.tap(spec)] == "BNTH" for head in heads_of(spec))
    assert len(heads_of(model_of("encoder-decoder").spec)) == 3 * 2 * 3
