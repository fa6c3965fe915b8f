"""Heat maps as characters: a fixed scale, a cell for each weight, nonsense refused."""

import pytest
import torch

from glassformer.lens.show.text import ASCII_SHADES, heatmap_text, legend, shade
from glassformer.spec.errors import InputError


def test_every_weight_has_its_cell():
    weights = torch.tensor([[0.0, 0.25, 0.5], [0.75, 1.0, 0.199]])
    picture = heatmap_text(weights, rows=["a", "EOS"], columns=["7", "11", "EOS"])
    assert picture.split("\n") == ["      7 11 EOS", "  a     ░░ ▒▒▒", "EOS  ▓▓ ██"]
    plain = heatmap_text(weights, rows=["a", "b"], columns=["x", "y", "z"], shades=ASCII_SHADES)
    assert plain.split("\n")[2] == "b  ** ##"


def test_the_scale_is_fixed():
    assert [shade(value) for value in (0.0, 0.19, 0.2, 0.79, 0.8, 1.0, 1.004)] == list(
        " " * 2 + "░▓███"
    )
    assert legend() == "░ from 20 %  ▒ from 40 %  ▓ from 60 %  █ from 80 %"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.zeros(2, 3), "weights of shape"),
        (torch.tensor([[float("nan")]]), "not between 0 and 1"),
        (torch.tensor([[2.0]]), "not between 0 and 1"),
        (torch.tensor([[-1.0]]), "not between 0 and 1"),
    ],
)
def test_what_is_no_share_is_refused(weights, message):
    with pytest.raises(InputError, match=message):
        heatmap_text(weights, rows=["a"], columns=["b"])
