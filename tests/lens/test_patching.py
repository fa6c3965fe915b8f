"""Patching: everything is clean, nothing is corrupt, each cell is a forward by hand."""

import pytest
import torch

import glassformer as gf
from glassformer.lens.inspection import inspect
from glassformer.lens.measure.patching import experiment, patch_activations, site_grid
from glassformer.nn.taps import trace
from glassformer.spec.errors import InputError
from tests.lens.models import EXACT, by_hand, inputs_of, model_of
from tests.planting import Subscript, catches
from tests.tiny import VOCAB, T, token_ids


def test_patching_everything_is_clean_and_nothing_corrupt():
    """All positions of any one layer give the clean metric; no site the corrupt one."""
    for name in ("decoder", "post-norm", "grouped", "answer"):
        model = model_of(name)
        clean, corrupt = inputs_of(name, seed=0), inputs_of(name, seed=5)
        for metric in ("logit_difference", "loss"):
            made = experiment(model, clean, corrupt, metric=metric, answers=(3, 8))
            grid = site_grid(model.spec, clean, sites="residual", kind="self")
            nothing, *layers = made.measure([[], *grid])
            head = model.spec.head_names()[0]
            with torch.no_grad():
                ends = [model(inputs)[head] for inputs in (clean, corrupt)]
            ends = [torch.log_softmax(end[0] if end.ndim == 2 else end[0, -1], -1) for end in ends]
            best, base = (float(-end[3] if metric == "loss" else end[3] - end[8]) for end in ends)
            assert abs(nothing - base) < EXACT and abs(made.clean_metric() - best) < EXACT
            assert all(abs(value - best) < EXACT for value in layers), (name, metric)


def test_patching_the_encoder_is_clean():
    """Two sources, one target: the encoder's residual, or all it says to the decoder, is enough."""
    model = model_of("encoder-decoder")
    clean = inputs_of("encoder-decoder")
    corrupt = type(clean)(clean.tokens_BT, source_BS=inputs_of("encoder-decoder", seed=7).source_BS)
    made = experiment(model, clean, corrupt, answers=(3, 8))
    for kind, sites in (("encoder", "residual"), ("cross", "heads"), ("cross", "attention")):
        grid = site_grid(model.spec, clean, sites=sites, kind=kind)
        groups = grid if kind == "encoder" else [[site for line in grid for site in line]]
        for value in made.measure(groups):
            assert abs(value - made.clean_metric()) < EXACT, (kind, sites)


@catches(
    "patched at the position before",
    "lens.measure.patching:_patches",
    Subscript("kept"),
    part="slice",
    to="{it} - 1",
)
def test_patches_are_forwards_by_hand():
    """Each cell against a forward whose one activation was replaced by hand."""
    for name in ("decoder", "post-norm", "grouped"):
        model = model_of(name)
        clean, corrupt = inputs_of(name, seed=0), inputs_of(name, seed=5)
        taps = ["*.resid_pre", "*.attn.out", "*.ffn.out", "*.attn.heads"]
        with trace(model, read=taps) as kept, torch.no_grad():
            model(clean)
        for sites, leaf in zip(("residual", "attention", "mlp", "heads"), taps, strict=True):
            made = patch_activations(model, clean, corrupt, sites=sites, answers=(3, 8))
            for layer in range(model.spec.n_layers):
                for place in range(made.tensor.shape[1]):
                    tap = f"blocks.{layer}" + leaf[1:]

                    def edit(x, tap=tap, place=place, kept=kept):
                        x = x.clone()
                        x[:, place] = kept[tap][:, place]
                        return x

                    with trace(model, edit={tap: edit}):
                        logp_V = by_hand(model, corrupt, "next")[-1]
                    value = float(logp_V[3] - logp_V[8])
                    share = (value - made.corrupt) / (made.clean - made.corrupt)
                    assert abs(float(made.tensor[layer, place]) - share) < 1e-9, (name, sites)
                    assert abs(float(made.values[layer, place]) - value) < 1e-9


def test_the_answers_are_the_two_likeliest():
    model, clean, corrupt = model_of("grouped"), token_ids(T), token_ids(T, seed=5)
    right, wrong = (inspect(model, ids).next(None, 1)[0][0] for ids in (clean, corrupt))
    assert right != wrong
    made = gf.patch_activations(model, clean, corrupt)
    assert torch.equal(
        made.tensor, gf.patch_activations(model, clean, corrupt, answers=(right, wrong)).tensor
    )
    assert made.clean > 0 > made.corrupt


def test_one_token_at_one_position_is_all_that_differs():
    model, clean = model_of("grouped"), token_ids(T)
    corrupt = clean.clone()
    corrupt[2] = (corrupt[2] + 1) % VOCAB
    made = gf.patch_activations(model, clean, corrupt, position=4, metric="loss")
    likeliest = inspect(model, clean).next(4, 1)[0][0]
    asked = inspect(model, clean, targets=[None] * 4 + [likeliest] + [None] * 2)
    assert made.clean == pytest.approx(asked.loss, abs=1e-12)
    # What the two share before, and what comes after the position that is read, changes nothing.
    assert made.tensor[0].tolist() == pytest.approx([0, 0, 1, 0, 0, 0, 0], abs=1e-9)
    assert made.tensor[:, 5:].abs().max() < 1e-12


def test_looks_bring_their_words():
    model = model_of("decoder")
    clean, corrupt = inputs_of("decoder"), inputs_of("decoder", seed=5)
    looks = [inspect(model, inputs, names=lambda i: f"w{i}") for inputs in (clean, corrupt)]
    made = gf.patch_activations(model, *looks, answers=(3, 8))
    assert torch.equal(
        made.tensor, gf.patch_activations(model, clean, corrupt, answers=(3, 8)).tensor
    )
    first = [inputs.tokens_BT[0, 0].item() for inputs in (clean, corrupt)]
    assert made.columns_words[0] == f"w{first[0]}/w{first[1]}"
    heads = gf.patch_activations(model, *looks, sites="heads", answers=(3, 8))
    assert heads.columns_words == ("H0", "H1", "H2") and heads.tensor.shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"corrupt": token_ids(T - 1)}, "7 tokens and a corrupt one of 6"),
        ({"corrupt": token_ids(T), "answers": (3, 8)}, "nothing to restore"),
        ({"answers": (3, 3)}, "no difference"),
        ({"answers": (3, 99)}, "ids run from"),
        ({"answers": (3,)}, "answers"),
        ({"answers": ("a", "b")}, "answers"),
        ({"position": 9}, "no position"),
        ({"metric": "kl"}, "metric"),
        ({"sites": "everything", "answers": (3, 8)}, "sites"),
        ({"kind": "cross", "answers": (3, 8)}, "no attention of kind"),
        ({"head": "class"}, "no head"),
    ],
)
def test_what_is_refused(arguments, message):
    corrupt = arguments.pop("corrupt", token_ids(T, seed=5))
    with pytest.raises(InputError, match=message):
        gf.patch_activations(model_of("decoder"), token_ids(T), corrupt, **arguments)


def test_cross_attention_has_no_residual_of_its_own():
    name = "encoder-decoder"
    with pytest.raises(InputError, match="no 'residual' of cross"):
        gf.patch_activations(
            model_of(name), inputs_of(name), inputs_of(name, seed=5), kind="cross", answers=(3, 8)
        )


def test_a_look_that_cannot_be_patched_is_refused():
    model, clean, corrupt = model_of("decoder"), token_ids(T), token_ids(T, seed=5)
    silenced = inspect(model, corrupt, ablate=["L0H1"])
    with pytest.raises(InputError, match="without L0H1"):  # its runs would not be silent
        gf.patch_activations(model, clean, silenced, answers=(3, 8))
    wide = gf.build(gf.preset("qwen"), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="outside the vocabulary"):
        gf.patch_activations(model, inspect(wide, [700] * T), corrupt, answers=(3, 8))
