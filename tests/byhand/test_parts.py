"""Every pair: its shape, its numbers against torch, its gradient against central differences."""

import numpy as np
import pytest
import torch

from glassformer.byhand.gradient_check import numerical_gradient, relative_error
from tests.byhand.parts import PARTS, Part
from tests.planting import Name, Subscript, Unary, catches

TOLERANCE = 1e-12  # worst seen 4e-15 in outputs, 1.2e-13 in gradients (one zero by theory)
DIFFERENCES = 1e-6  # worst seen 2.1e-7, entry by entry

every_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())


def probe(part: Part) -> np.ndarray:
    return np.random.default_rng(97).standard_normal(part.shape)


@every_part
def test_shape(part: Part) -> None:
    out, grads = part.run(part.arrays(), probe(part))
    assert out.shape == part.shape
    assert {name: g.shape for name, g in grads.items()} == {
        name: a.shape for name, a in part.arrays().items()
    }


@catches(
    "rotation turned the same way twice",
    "byhand.embedding:rotate_backward",
    Unary("-"),
    to="{operand}",
    case="rotary",
)
@catches(
    "dropped 1/sqrt(d) backward",
    "byhand.attention:attend_backward",
    Name("scale"),
    to="1.0",
    case="attend",
)
@catches(
    "softmax without the Jacobian's second term",
    "byhand.attention:softmax_backward",
    Name("dot"),
    to="0.0",
    case="softmax",
)
@catches(
    "norm without the mean term",
    "byhand.norm:layer_norm_backward",
    Subscript("mean"),
    to="0.0",
    case="layer_norm",
)
@every_part
def test_numbers_and_gradients_are_torchs(part: Part) -> None:
    out, grads = part.run(part.arrays(), probe(part))
    tensors = {name: torch.tensor(a, requires_grad=True) for name, a in part.arrays().items()}
    want = part.reference(tensors)
    want.backward(torch.tensor(probe(part)))
    assert np.abs(out - want.detach().numpy()).max() <= TOLERANCE
    for name, tensor in tensors.items():
        expected = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
        assert relative_error(grads[name], expected, floor=1e-2) <= TOLERANCE, name


@every_part
def test_gradient_is_the_slope_of_the_forward(part: Part) -> None:
    arrays, dout = part.arrays(), probe(part)
    grads = {name: np.array(g) for name, g in part.run(arrays, dout)[1].items()}
    for name, array in arrays.items():
        some = array.reshape(-1)[:: max(1, array.size // 23)]  # a view, a few dozen entries

        def loss() -> float:
            return float(np.vdot(part.run(arrays, None)[0], dout))

        found = numerical_gradient(loss, some)
        analytic = grads[name].reshape(-1)[:: max(1, array.size // 23)]
        assert relative_error(analytic, found, floor=0.05) <= DIFFERENCES, name


@every_part
def test_backward_leaves_its_arguments_alone(part: Part) -> None:
    """A gradient that arrives may be read by others: nothing may be written into it."""
    arrays, dout = part.arrays(), probe(part)
    kept = {name: a.copy() for name, a in arrays.items()}
    part.run(arrays, dout)
    np.testing.assert_array_equal(dout, probe(part))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, kept[name])
