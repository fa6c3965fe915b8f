"""`Product` by every routine against F.linear, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F

from glassformer.kernels.matmul import CLASSES, ROUTINES, Product, joined, why_not_c
from glassformer.spec.errors import InputError
from tests.tiny import noise


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("rows", [1, 3, 11, 17])
@pytest.mark.parametrize("biased", [False, True])
def test_products(routine, rows, biased):
    dtype, limit = (torch.float32, 2e-6) if routine == "c" else (torch.float64, 1e-13)
    weight, x, residual = noise(5, 7), noise(rows, 7, seed=1), noise(rows, 5, seed=2)
    weight, x, residual = weight.to(dtype), x.to(dtype), residual.to(dtype)
    bias = noise(5, seed=3, dtype=dtype) if biased else None
    product = Product(weight, bias, routines=(routine,) * 3)
    want = F.linear(x, weight, bias)
    torch.testing.assert_close(product(x), want, rtol=0, atol=limit)
    torch.testing.assert_close(
        product.onto(residual.clone(), x), residual + want, rtol=0, atol=limit
    )


def test_each_class_of_rows_has_its_routine():
    product = Product(torch.zeros(2, 3), None, routines=("c", "columns", "transposed"))
    names = [product.by_rows[min(rows, CLASSES[-1] + 1)].__name__ for rows in range(20)]
    assert names == ["_linear", "_c", *["_columns"] * 4, *["_transposed"] * 11, *["_linear"] * 3]


def test_other_layouts_of_the_operands():
    weight, x = noise(5, 14, dtype=torch.float32)[:, ::2], noise(7, 3, dtype=torch.float32).t()
    residual = noise(5, 3, seed=2, dtype=torch.float32).t()
    product = Product(weight, None, routines=("c",) * 3)
    torch.testing.assert_close(product(x), F.linear(x, weight))
    want = residual + F.linear(x, weight)
    torch.testing.assert_close(product.onto(residual, x), want)


def test_joined_products_and_unknown_routines():
    weight, bias = joined([(noise(2, 3), None), (noise(4, 3), noise(4))])
    assert weight.shape == (6, 3)
    assert torch.equal(bias, torch.cat((torch.zeros(2, dtype=torch.float64), noise(4))))
    assert joined([(noise(2, 3), None)])[1] is None
    with pytest.raises(InputError, match="no routine 'fast'"):
        Product(weight, bias, routines=("linear", "fast", "linear"))


def test_what_c_cannot_do_is_said():
    assert "float64" in why_not_c(noise(2, 3))
    assert "meta" in why_not_c(torch.zeros(2, 3, device="meta"))
    with pytest.raises(InputError, match="float64"):
        Product(noise(2, 3), None, routines=("c",) * 3)
    product = Product(torch.ones(2, 3), None, routines=("c",) * 3)
    x = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(InputError, match="no gradients"):
        product(x)
    with torch.no_grad():
        assert product(x).tolist() == [[3.0, 3.0]]
