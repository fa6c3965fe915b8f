"""What patching must hold, as functions that planted faults can turn red."""

import torch

from glassformer.lens.measure.patching import experiment, patch_activations, site_grid
from glassformer.nn.taps import trace
from tests.lens.checks import EXACT, by_hand
from tests.lens.models import inputs_of, model_of


def patching_everything_is_clean_and_nothing_corrupt():
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


def patching_the_encoder_is_clean():
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


def patches_are_forwards_by_hand():
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
