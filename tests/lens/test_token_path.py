"""One token's way: the vectors are the taps', the norms theirs, the predictions the lens'."""

import pytest
import torch

from glassformer.lens.capture import residual_rows
from glassformer.lens.inspection import inspect
from glassformer.nn.taps import trace
from glassformer.spec.errors import InputError
from tests.lens.models import inputs_of, model_of


@pytest.mark.parametrize("name", ["decoder", "post-norm", "encoder-decoder", "several heads"])
def test_it_is_the_residual_stream_at_one_position(name):
    model, inputs = model_of(name), inputs_of(name)
    seen = inspect(model, inputs)
    path = seen.token_path(3)
    named = residual_rows(model.spec)
    with torch.no_grad(), trace(model, read=[tap for _, tap in named]) as taps:
        model(inputs)
    assert path.row_names == tuple(name for name, _ in named)
    for row, (_, tap) in enumerate(named):
        assert torch.equal(path.values_RD[row], taps[tap][0, 3].float())
    torch.testing.assert_close(
        path.values_RD.norm(dim=1), torch.tensor(path.norms), rtol=1e-5, atol=1e-6
    )
    assert path.predicted[-1] == seen.lens.top(3, 1)[0]
    assert path.predicted[0] == seen.lens.top(3, 1, row="embed")[0]


def test_pre_norm_rows_are_sums_of_what_was_added():
    model, inputs = model_of("decoder"), inputs_of("decoder")
    path = inspect(model, inputs).token_path(-1)
    steps = path.values_RD.diff(dim=0).norm(dim=1)
    torch.testing.assert_close(steps, torch.tensor(path.added[1:]), rtol=1e-4, atol=1e-5)
    assert path.added[0] != path.added[0]  # the embedding adds to nothing


def test_ablated_heads_are_ablated_on_the_way():
    model, inputs = model_of("decoder"), inputs_of("decoder")
    seen = inspect(model, inputs)
    after = seen.ablate("L0H0").after.token_path(2)
    before = seen.token_path(2)
    assert torch.equal(before.values_RD[0], after.values_RD[0])
    assert not torch.equal(before.values_RD[1], after.values_RD[1])
    assert after.norms[-1] == pytest.approx(float(after.values_RD[-1].norm()), rel=1e-5)


def test_no_such_position_is_refused():
    with pytest.raises(InputError, match="no position"):
        inspect(model_of("decoder"), inputs_of("decoder")).token_path(99)
