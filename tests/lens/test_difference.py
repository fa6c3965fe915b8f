"""Two models beside each other: the signed map, its faces, and the numbers of the answers."""

import json

import pytest
import torch

from glassformer.lens.inspection import comparable, inspect
from glassformer.spec.errors import InputError
from tests.lens.models import SPECS, inputs_of, model_of
from tests.tiny import built, tiny

# T positions, V answers


def both(name):
    """The same tokens in two models of one spec."""
    other = built(tiny(**SPECS[name]), seed=4)
    return inspect(model_of(name), inputs_of(name)), inspect(other, inputs_of(name))


@pytest.mark.parametrize("name", ["decoder", "window", "encoder-decoder"])
def test_a_difference_is_the_maps_and_hatched_where_either_is(name):
    here, there = both(name)
    for kind in here.kinds:
        ours, theirs = here.attention.of(kind)[1, 0], there.attention.of(kind)[1, 0]
        apart = ours - theirs
        assert torch.equal(apart.allowed, ours.allowed & theirs.allowed)
        exact = (ours.tensor - theirs.tensor)[apart.allowed]
        assert torch.equal(apart.tensor[apart.allowed], exact)
        assert torch.equal((theirs - ours).tensor[apart.allowed], -exact)
        t, s, value = apart.peaks(1)[0]
        assert abs(value) == exact.abs().max()
        assert value == apart.tensor[t, s]
        assert len(apart.rows()) == int(apart.allowed.sum())
        assert f"{value:+.3f}" in apart.text()


def test_its_faces(tmp_path):
    here, there = both("window")
    apart = here.attention[1, 0] - there.attention.mean(1)
    assert apart.title == "L1H0 minus L1 mean"
    for ending in ("png", "svg", "html", "json", "csv"):
        apart.save(tmp_path / f"apart.{ending}")
    saved = json.loads((tmp_path / "apart.json").read_text())
    assert saved["rows"] == apart.rows()
    axes = apart.figure().axes[0]
    drawn = axes.images[0]
    assert drawn.get_clim() == (-1.0, 1.0)
    assert drawn.get_array().mask.tolist() == (~apart.allowed).tolist()


def test_of_a_large_map_the_cells_that_differ_most_are_told():
    tokens = (torch.arange(20) % 5)[None]
    one, other = (
        inspect(model, tokens) for model in (model_of("bare"), built(tiny(max_seq_len=20), seed=4))
    )
    text = (one.attention[0, 0] - other.attention[0, 0]).text()
    assert "20 x 20, the cells that differ most:" in text
    assert len(text.splitlines()) == 13


@pytest.mark.parametrize("name", ["decoder", "answer", "several heads"])
@torch.no_grad()
def test_a_comparison_is_the_other_distribution(name):
    here, there = both(name)
    for position in (0, None):
        found = here.compare(there, position, 3)
        at = here.lens.position(position)
        logp, logq = (
            torch.log_softmax(
                seen.model.project(seen.readout.rows_of(seen.hidden_TD)[at], seen.head).double(), 0
            )
            for seen in (there, here)
        )
        ids = [i for i, *_ in here.next(position, 3)]
        assert found.shares == pytest.approx(logp[ids].exp().tolist(), abs=1e-6)
        assert found.kl == pytest.approx(float((logp.exp() * (logp - logq)).sum()), abs=1e-6)
        assert found.top == there.next(position, 1)[0]
        assert found.mean_loss == there.loss
        assert found.loss == pytest.approx(float(there.losses[at]), nan_ok=True)
    assert here.compare(here, None).kl == 0.0


def test_what_is_not_of_the_same_tokens_is_refused():
    here, _ = both("decoder")
    model = model_of("decoder")
    longer = inspect(model, inputs_of("decoder").tokens_BT[:, :-1])
    other = inspect(model, inputs_of("decoder", seed=5))
    for there in (longer, other):
        assert not comparable(here, there)
        with pytest.raises(InputError, match="do not read the same tokens"):
            here.compare(there)
    with pytest.raises(InputError, match="maps are of different tokens"):
        here.attention[0, 0] - longer.attention[0, 0]
