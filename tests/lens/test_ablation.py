"""Silencing heads equals a forward without their columns; the ranking equals every ablation."""

import copy

import pytest
import torch.nn.functional as F

from glassformer.lens.heads import HeadName, heads_of
from glassformer.lens.inspection import inspect
from glassformer.spec.errors import InputError
from tests.lens.models import EXACT, by_hand, inputs_of, model_of
from tests.tiny import T


def test_ranking_in_pieces(monkeypatch):
    seen = inspect(model_of("grouped"), inputs_of("grouped"))
    whole = seen.ranking()
    monkeypatch.setattr("glassformer.lens.measure.ablation.CHUNK", 20)
    pieces = seen.ranking()
    assert pieces.heads == whole.heads
    assert pieces.loss_changes == pytest.approx(whole.loss_changes, abs=EXACT)


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


def without_columns(model, heads):
    """A copy whose o_proj has no columns for these heads."""
    cut = copy.deepcopy(model)
    for head in heads:
        stack = cut if model.spec.encoder is None else cut.decoder
        stack = cut.encoder if head.kind == "encoder" else stack
        block = stack.blocks[head.layer]
        part = block.cross if head.kind == "cross" else block.attn
        width = part.d_head
        part.o_proj.weight.data[:, head.head * width : (head.head + 1) * width] = 0.0
    return cut


def test_ablation_is_a_head_without_columns():
    """Every head of every kind, one by one, against a forward by hand; and two at once."""
    for name in ("decoder", "post-norm", "grouped", "encoder-decoder", "post encoder-decoder"):
        model, inputs = model_of(name), inputs_of(name)
        seen = inspect(model, inputs)
        before_TV = by_hand(model, inputs, "next")
        tokens = inputs.tokens_BT[0]
        groups = [[head] for head in heads_of(model.spec)]
        groups.append([groups[0][0], groups[-1][0]])
        for heads in groups:
            made = seen.ablate(*map(str, heads))
            after_TV = by_hand(without_columns(model, heads), inputs, "next")
            kl = F.kl_div(after_TV, before_TV, log_target=True, reduction="none").sum(-1)
            assert (made.kl - kl).abs().max() < EXACT, (name, heads)
            wanted = [
                float(before_TV[t, tokens[t + 1]] - after_TV[t, tokens[t + 1]])
                for t in range(T - 1)
            ]
            assert abs(made.loss_change - sum(wanted) / len(wanted)) < EXACT, (name, heads)
            assert made.after.ablated == tuple(heads)


def test_ranking_is_every_ablation():
    """The batched pass gives what one ablation after another gives, in order of size."""
    for name in ("decoder", "grouped", "encoder-decoder"):
        seen = inspect(model_of(name), inputs_of(name)).ablate("L1H2").after
        ranking = seen.ranking()
        assert set(ranking.heads) == set(heads_of(seen.model.spec)) - set(seen.ablated)
        for head, change, kl in zip(ranking.heads, ranking.loss_changes, ranking.kls, strict=True):
            alone = seen.ablate(head)
            assert abs(alone.loss_change - change) < EXACT, (name, str(head))
            assert abs(float(alone.kl[T - 1]) - kl) < EXACT, (name, str(head))
        sizes = [abs(effect) for effect in ranking.effects]
        assert sizes == sorted(sizes, reverse=True)
        unasked = inspect(model_of(name), inputs_of(name), targets=[None] * T).ranking()
        assert unasked.loss_changes == (None,) * len(unasked.heads)
        assert list(unasked.effects) == sorted(unasked.kls, reverse=True)
