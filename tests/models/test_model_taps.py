"""Taps: read, replaced, followed backwards; nothing registered or computed when off. Dropout."""

import pytest
import torch
import torch.nn.functional as F

from glassformer.models.inputs import Inputs
from glassformer.nn.mask import build_mask
from glassformer.nn.taps import Taps, trace
from glassformer.spec.errors import InputError
from glassformer.spec.model import Dropout
from tests.tiny import D_MODEL, VOCAB, B, T, built, noise, tiny, token_ids


@pytest.fixture
def model():
    return built(tiny())


TOKENS = token_ids(B, T)


def test_reading_changes_no_answer(model):
    plain = model(TOKENS)["next"]
    with trace(model, read="*") as seen:
        traced = model(TOKENS)["next"]
    torch.testing.assert_close(traced, plain, rtol=0, atol=1e-12)
    with trace(model, read=["embed", "blocks.*.resid_post"]) as seen:
        traced = model(TOKENS)["next"]
    assert torch.equal(traced, plain)
    assert list(seen) == ["embed", "blocks.0.resid_post", "blocks.1.resid_post"]
    assert type(seen) is dict


def test_attention_maps_are_captured_per_head(model):
    with trace(model, read="blocks.*.attn.weights") as seen:
        model(TOKENS)
    assert {name: tuple(x.shape) for name, x in seen.items()} == {
        f"blocks.{layer}.attn.weights": (B, 3, T, T) for layer in range(2)
    }
    for weights in seen.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, 3, T).double())
        assert not weights.triu(1).any()


def test_residual_taps_obey_the_blocks_equations(model):
    with trace(model, read="*") as seen:
        model(TOKENS)
    at = "blocks.1."
    close = torch.testing.assert_close
    assert seen[f"{at}resid_pre"] is seen["blocks.0.resid_post"]
    close(seen[f"{at}resid_mid"], seen[f"{at}resid_pre"] + seen[f"{at}attn.out"])
    close(seen[f"{at}resid_post"], seen[f"{at}resid_mid"] + seen[f"{at}ffn.out"])
    close(seen[f"{at}attn.heads"], seen[f"{at}attn.weights"] @ seen[f"{at}attn.v"])


def test_traces_within_each_other_add_up(model):
    """Edits from the outside in; every block reads what all of them leave."""
    at, twice = "blocks.0.resid_post", {"blocks.0.resid_post": lambda x: 2 * x}
    with trace(model, read=at) as plain:
        model(TOKENS)
    with trace(model, read=at, edit={at: lambda x: x + 1}) as outer:
        with trace(model, edit=twice), trace(model, read="embed") as inner:
            explicit = Taps(read=at)
            model(TOKENS, taps=explicit)
        expected = 2 * (plain[at] + 1)
        torch.testing.assert_close(outer[at], expected)
        assert explicit.seen[at] is outer[at] and set(inner) == {"embed"}
        model(TOKENS)  # the inner blocks have ended
        torch.testing.assert_close(outer[at], plain[at] + 1)
        with trace(model, read=at, gradients=True) as followed:
            model(TOKENS)["next"].sum().backward()
        assert followed[at].grad is not None
    assert model.scoped_taps is None


def test_an_edit_replaces_what_the_model_goes_on_with(model):
    new = noise(B, T, D_MODEL, seed=3)
    with trace(model, read="*", edit={"blocks.0.resid_post": new}) as seen:
        edited = model(TOKENS)["next"]
    assert torch.equal(seen["blocks.0.resid_post"], new)
    assert torch.equal(seen["blocks.1.resid_pre"], new)
    want = model.blocks[1](new, mask=build_mask(T, T, causal=True))
    torch.testing.assert_close(edited, model.logits(want), rtol=0, atol=1e-11)
    with trace(model, edit={"logits.next": lambda x: x * 0}):
        assert not model(TOKENS)["next"].any()


def test_patching_with_what_was_read_gives_the_donors_answer(model):
    other = token_ids(B, T, seed=9)
    with trace(model, read="blocks.0.resid_post") as seen:
        donor = model(other)["next"]
    with trace(model, edit=seen):
        patched = model(TOKENS)["next"]
    assert torch.equal(patched, donor)


@pytest.mark.parametrize("name", ["blocks.1.attn.weights", "blocks.1.attn.scores"])
def test_uniform_attention_by_edit_is_the_mean_of_what_is_allowed(model, name):
    uniform = torch.ones(T, T).tril().double()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    edit = (lambda x: uniform.expand_as(x)) if name.endswith("weights") else torch.zeros_like
    with trace(model, read="*", edit={name: edit}) as seen:
        model(TOKENS)
    want = uniform @ seen["blocks.1.attn.v"]
    torch.testing.assert_close(seen["blocks.1.attn.heads"], want, rtol=0, atol=1e-12)


def test_the_gradient_of_a_tap_is_autograds(model):
    names = ["blocks.0.resid_post", "blocks.1.attn.weights", "blocks.1.ffn.hidden", "final"]
    taps = Taps(read=names, gradients=True)
    probe = noise(B, T, VOCAB, seed=2)
    (model(TOKENS, taps=taps)["next"] * probe).sum().backward()
    got = taps.gradients()
    assert list(got) == names
    again = Taps(read=names)
    loss = (model(TOKENS, taps=again)["next"] * probe).sum()
    want = torch.autograd.grad(loss, [again.seen[name] for name in names])
    for name, grad in zip(names, want, strict=True):
        assert torch.equal(got[name], grad)
    want_final = probe @ model.heads["next"].weight
    torch.testing.assert_close(got["final"], want_final, rtol=0, atol=1e-12)


def test_without_gradients_none_are_kept(model):
    taps = Taps(read="*")
    model(TOKENS, taps=taps)["next"].sum().backward()
    assert taps.gradients() == {}


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in model.modules() for kind in kinds)


def test_a_trace_is_scoped_and_registers_nothing(model):
    with trace(model, read="*", edit={"final": torch.zeros_like}) as seen:
        model(TOKENS)
        assert hooks(model) == 0
        with trace(model, read="embed") as inner:
            model(TOKENS)
        assert list(inner) == ["embed"]
        assert model.scoped_taps.seen is seen
    assert model.scoped_taps is None
    before = dict(seen)
    model(token_ids(B, T, seed=5))
    assert all(seen[name] is x for name, x in before.items())


def test_a_trace_ends_with_an_exception(model):
    with pytest.raises(RuntimeError, match="stop"), trace(model, read="*"):
        raise RuntimeError("stop")
    assert model.scoped_taps is None


def test_when_off_scores_are_never_computed(model, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("the explicit path ran")

    monkeypatch.setattr(torch, "softmax", refuse)
    model(TOKENS)
    model(TOKENS, taps=Taps(read=["*.attn.out", "*.attn.q", "*.resid_*"]))
    with pytest.raises(AssertionError, match="explicit"):
        model(TOKENS, taps=Taps(read="*.attn.weights"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"read": "blocks.0.atn.weights"}, "did you mean 'blocks.0.attn.weights'"),
        ({"read": ["embed", "blocks.2.resid_post"]}, "blocks.2.resid_post"),
        ({"edit": {"blocks.0.resid_pots": torch.zeros(1)}}, "did you mean 'blocks.0.resid_post'"),
        ({"edit": {"blocks.*.attn.out": torch.zeros_like}}, "no tap 'blocks.*.attn.out' to edit"),
    ],
)
def test_a_tap_that_is_not_there_is_named(model, options, words):
    with pytest.raises(InputError) as caught, trace(model, **options):
        pass
    assert words in str(caught.value)
    assert model.scoped_taps is None


def test_an_edit_of_the_wrong_shape_is_named(model):
    with (
        pytest.raises(InputError, match=r"'final' has shape \(2, 2\)(.|\n)*\(3, 7, 13\)"),
        trace(model, edit={"final": torch.zeros(2, 2)}),
    ):
        model(TOKENS)


# --- dropout ------------------------------------------------------------------------------------


@pytest.fixture
def drops(monkeypatch):
    """Rates of every dropout that really drops, by the kernel that does it."""
    seen = {"dropout": [], "attention": []}
    plain, fused = F.dropout, F.scaled_dot_product_attention

    def dropout(x, p=0.5, training=True, inplace=False):
        if p and training:
            seen["dropout"].append(p)
        return plain(x, p, training, inplace)

    def attention(*args, dropout_p=0.0, **options):
        if dropout_p:
            seen["attention"].append(dropout_p)
        return fused(*args, dropout_p=dropout_p, **options)

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return seen


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
def test_dropout_stands_where_the_spec_says_and_only_in_training(drops, encoder, explicit):
    places = Dropout(embedding=0.1, attention=0.2, residual=0.3, ffn=0.4)
    model = built(tiny(encoder=encoder, layers=2, dropout=places))
    inputs = Inputs(TOKENS, source_BS=TOKENS if encoder else None)
    taps = Taps(read="*.weights" if explicit else ())
    still = model(inputs, taps=taps)["next"]
    assert drops == {"dropout": [], "attention": []}
    assert torch.equal(model(inputs, taps=taps)["next"], still)

    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = model(inputs, taps=taps)["next"]
        counts = {p: drops["dropout"].count(p) for p in (0.1, 0.2, 0.3, 0.4)}
        total, fused = len(drops["dropout"]), drops["attention"]
        assert not torch.equal(model(inputs, taps=taps)["next"], first)
        torch.manual_seed(0)
        assert torch.equal(model(inputs, taps=taps)["next"], first)
    stacks, attentions = (2, 6) if encoder else (1, 2)
    sublayers = 2 * 2 + 2 * 3 if encoder else 2 * 2
    assert counts == {
        0.1: stacks,
        0.2: attentions if explicit else 0,
        0.3: sublayers,
        0.4: 2 * stacks,
    }
    assert total == sum(counts.values())
    assert set(fused) == (set() if explicit else {0.2})


@pytest.mark.parametrize("place", ["embedding", "attention", "residual", "ffn"])
def test_each_place_alone_changes_training(place, drops):
    model = built(tiny(layers=1, dropout=Dropout(**{place: 0.5}))).train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model(TOKENS)
    counts = (len(drops["dropout"]), len(drops["attention"]))
    assert (
        counts
        == {
            "embedding": (1, 0),
            "attention": (0, 1),
            "residual": (2, 0),
            "ffn": (1, 0),
        }[place]
    )


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(InputError, match=r"no tap matches 'blocks\.9\.resid_pre'"):
        built(tiny())(token_ids(2, 3), taps=Taps(read="blocks.9.resid_pre"))
