"""Integer weights: nothing is lost in the layout, sizes are as said, bad input is refused."""

import copy

import pytest
import torch

from glassformer.kernels import int_matmul
from glassformer.kernels.int_matmul import Int4Weight, Int8Weight
from glassformer.spec.errors import InputError
from tests.kernels.checks import int4, int8, single


@pytest.mark.parametrize("shape", [(1, 1), (37, 129), (16, 8), (33, 64)])
def test_int8_unpacks_to_what_was_given(shape):
    qweight, scale = int8(*shape)
    weight = Int8Weight(qweight, scale)
    assert all(map(torch.equal, weight.unpack(), (qweight, scale)))
    index = torch.tensor([0, shape[0] - 1, 0])
    assert torch.equal(weight.rows(index), (qweight * scale[:, None])[index])


def test_int8_in_groups_unpacks_to_what_was_given():
    qweight, (_, scale, _) = int8(37, 96)[0], int4(37, 96, 32)
    weight = Int8Weight(qweight, scale.half())
    assert all(map(torch.equal, weight.unpack(), (qweight, scale.half())))
    want = qweight * scale.half().float().repeat_interleave(32, 1)
    assert torch.equal(weight.rows(torch.tensor([36, 0])), want[[36, 0]])
    assert weight.nbytes == 48 * 96 + 2 * 48 * 3  # rows up to a multiple of 16


@pytest.mark.parametrize("zeros", [None, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(1, 8, 8), (37, 96, 32), (16, 256, 128)])
def test_int4_unpacks_to_what_was_given(shape, zeros):
    qweight, scale, zero = int4(*shape)
    scale, zero = scale.half(), None if zeros is None else zero.to(zeros)
    weight = Int4Weight(qweight, scale, zero, group=shape[2])
    packed = Int4Weight(qweight[:, ::2] | qweight[:, 1::2] << 4, scale, zero, group=shape[2])
    assert torch.equal(weight.packed, packed.packed)
    levels, scales, found = weight.unpack()
    assert torch.equal(levels, qweight)
    assert torch.equal(scales, scale)
    assert (found is None) == (zero is None)
    assert found is None or (found.dtype == zeros and torch.equal(found, zero))
    base = 8.0 if zero is None else zero.float().repeat_interleave(shape[2], 1)
    want = (qweight - base) * scale.float().repeat_interleave(shape[2], 1)
    assert torch.equal(weight.rows(torch.arange(shape[0])), want)


def test_sizes():
    qweight, scale = int8(512, 256)
    assert Int8Weight(qweight, scale).nbytes == 512 * 256 + 4 * 512
    levels, scales, zeros = int4(512, 256, 32)
    plain = Int4Weight(levels, scales.half(), group=32)
    assert plain.nbytes == 512 * 256 // 2 + 2 * 512 * 8
    for kind, size in ((torch.float16, 8192), (torch.uint8, 4096)):
        with_zeros = Int4Weight(levels, scales.half(), zeros.to(kind), group=32)
        assert with_zeros.nbytes == plain.nbytes + size


def test_copies_have_addresses_of_their_own():
    qweight, scale = int8(37, 129)
    levels, scales, zeros = int4(37, 96, 32)
    for weight in (Int8Weight(qweight, scale), Int4Weight(levels, scales, zeros, group=32)):
        x = single(3, weight.shape[1])
        twin, want = copy.deepcopy(weight), weight.product(x)
        weight.packed.zero_()
        assert torch.equal(twin.product(x), want)


def test_no_rows_and_rows_that_are_not_contiguous():
    weight = Int8Weight(*int8(5, 7))
    assert weight.product(torch.zeros(0, 7)).shape == (0, 5)
    x = single(7, 3).t()
    assert torch.equal(weight.product(x), weight.product(x.contiguous()))


def test_bad_input_is_refused():
    qweight, scale = int8(5, 7)
    levels, scales, zeros = int4(5, 64, 32)
    weight = Int8Weight(qweight, scale)
    for call, said in (
        (lambda: Int8Weight(qweight.float(), scale), "float32"),
        (lambda: Int8Weight(qweight, scale[:-1]), "scale"),
        (lambda: Int8Weight(torch.zeros(2, 0, dtype=torch.int8), scale[:2]), "0 inputs"),
        (lambda: Int8Weight(int8(5, 60)[0], scales), "2 groups of 60"),
        (lambda: Int4Weight(levels, scales, group=12), "groups of 12"),
        (lambda: Int4Weight(levels[:, :-1], scales, group=32), "63 bytes a row"),
        (lambda: Int4Weight(levels, scales, zeros[:, :1], group=32), "zero"),
        (lambda: Int4Weight(levels, scales, zeros.to(torch.int8), group=32), "zero"),
        (lambda: Int4Weight(levels, scales.to(torch.uint8), group=32), "scale"),
        (lambda: Int4Weight(levels + 9, scales, group=32), "4-bit value"),
        (lambda: weight.product(torch.zeros(7)), r"x is \(7,\)"),
        (lambda: weight.product(torch.zeros(2, 8)), r"\(2, 8\)"),
        (lambda: weight.product(torch.zeros(2, 7).double()), "float64"),
        (lambda: weight.product(torch.zeros(2, 7), torch.zeros(4)), "bias"),
        (lambda: weight.product(torch.zeros(2, 7, requires_grad=True)), "gradient"),
    ):
        with pytest.raises(InputError, match=said):
            call()


def test_the_api_speaks_of_the_library():
    assert int_matmul.available()
    assert int_matmul.unavailable() == ""
    assert int_matmul.variant() in ("portable", "avx2", "avx512-vnni")
