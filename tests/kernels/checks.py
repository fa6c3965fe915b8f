"""What must hold of the C kernels, as functions, so that planted faults can be held against them.

Sizes are primes and their neighbours: no multiple of a vector, a tile, or a panel. Every check goes
through every variant that the machine has.
"""

import ctypes
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from glassformer.kernels import c_library
from glassformer.kernels.grids import Levels, searched_grids
from glassformer.kernels.int_matmul import Int4Weight, Int8Weight, reference_int4, reference_int8
from glassformer.kernels.threads import product_threads
from glassformer.quant.schemes import (
    QuantizedTensor,
    codec,
    dequantize,
    least_squares_grid,
    quantize_tensor,
    quantize_with_inputs,
)
from glassformer.spec.schemes import Int4, Int8, Scheme
from tests.kernels.array_checks import ARRAY_CHECKS
from tests.tiny import noise

# B rows, I inputs, O outputs, G groups

SHAPES = ((1, 1), (3, 7), (5, 8), (17, 31), (37, 129), (131, 53), (29, 2111))
ROWS = (1, 2, 3, 5, 7, 11, 16)
GROUPED = ((3, 8, 8), (17, 96, 32), (37, 264, 24), (35, 608, 32), (5, 1280, 128), (33, 512, 512))


def single(*shape: int, seed: int = 0) -> torch.Tensor:
    """Unit normal numbers in float32."""
    return noise(*shape, seed=seed, dtype=torch.float32)


class _Floating(ctypes.Structure):
    """`struct floating` of native.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
        ("form", ctypes.c_int32),
    )


class FloatProduct:
    """x W^T + b, and residual + x W^T + b, by the C routine that the native step calls."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = None if bias_O is None else bias_O.float()
        self.form = _Floating(
            weight_OI.data_ptr(),
            None if self.bias_O is None else self.bias_O.data_ptr(),
            *weight_OI.shape,
            weight_OI.dtype == torch.bfloat16,
        )

    def __call__(self, x_BI: torch.Tensor) -> torch.Tensor:
        return self._into(x_BI.new_empty(len(x_BI), len(self.weight_OI)), x_BI, onto=False)

    def onto(self, residual_BO: torch.Tensor, x_BI: torch.Tensor) -> torch.Tensor:
        return self._into(residual_BO, x_BI, onto=True)

    def _into(self, y_BO: torch.Tensor, x_BI: torch.Tensor, *, onto: bool) -> torch.Tensor:
        address, threads = ctypes.addressof(self.form), product_threads()
        c_library.library().glass_floating(
            address, x_BI.data_ptr(), y_BO.data_ptr(), len(x_BI), onto, threads
        )
        return y_BO


def int8(outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights from -128 to 127, and scales."""
    generator = torch.Generator().manual_seed(seed)
    qweight = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    return qweight, torch.rand(outputs, generator=generator) + 0.1


def int4(outputs: int, inputs: int, group: int, seed: int = 0):
    """Weights from 0 to 15, scales, and zero points that are no whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    qweight = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scale, zero = torch.rand(2, outputs, inputs // group, generator=generator)
    return qweight, scale + 0.1, 15 * zero


def floats_are_torchs() -> None:
    """x W^T + b and residual + x W^T + b, within rounding of float64."""
    for outputs, inputs in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            weight, bias = single(outputs, inputs).to(dtype), single(outputs, seed=1).to(dtype)
            for given in (None, bias):
                product = FloatProduct(weight, given)
                for rows in ROWS:
                    x, residual = single(rows, inputs, seed=2), single(rows, outputs, seed=3)
                    want = F.linear(
                        x.double(), weight.double(), None if given is None else given.double()
                    )
                    limit = 1e-6 * (inputs**0.5 + 1 + want.abs() + residual.abs())
                    for name in c_library.variants():
                        with c_library.use_variant(name):
                            assert ((product(x) - want).abs() <= limit).all(), (
                                name,
                                outputs,
                                inputs,
                            )
                            got = product.onto(residual.clone(), x) - residual.double()
                            assert ((got - want).abs() <= 2 * limit).all(), (name, outputs, inputs)


def int8_is_the_reference() -> None:
    """Bit for bit, in every variant: with a bias and without, a scale per channel or per group."""
    cases = [(outputs, inputs, int8(outputs, inputs)) for outputs, inputs in SHAPES]
    for outputs, inputs, group in GROUPED:
        _, scales, _ = int4(outputs, inputs, group)
        cases += [(outputs, inputs, (int8(outputs, inputs)[0], s)) for s in (scales, scales.half())]
    for outputs, inputs, (qweight, scale) in cases:
        bias = single(outputs, seed=1)
        for refined in (False, True):
            weight = Int8Weight(qweight, scale, refined=refined)
            for rows in (*ROWS, 41, 53):
                x = single(rows, inputs, seed=2) * torch.logspace(-9, 9, rows)[:, None]
                for given in (None, bias):
                    want = reference_int8(x, qweight, scale, given, refined=refined)
                    for name in c_library.variants():
                        with c_library.use_variant(name):
                            got = weight.product(x, given)
                            assert torch.equal(got, want), (name, outputs, inputs, refined)


def refined_products_are_finer() -> None:
    """What is rounded twice is a hundred times nearer, and beside an outlier too."""
    qweight, scale = int8(37, 256)
    x = single(5, 256, seed=4)
    x[:, 7] *= 100.0
    exact = x.double() @ (qweight * scale[:, None]).double().t()
    plain, fine = (
        (Int8Weight(qweight, scale, refined=refined).product(x) - exact).norm()
        for refined in (False, True)
    )
    assert fine < 0.01 * plain, (fine, plain)


def int4_is_the_reference() -> None:
    """Bit for bit: halves, floats, bytes, zero points or 8, groups that end within a vector."""
    for outputs, inputs, group in GROUPED:
        qweight, scale, zero = int4(outputs, inputs, group)
        bias = single(outputs, seed=1)
        for scales in (scale, scale.half()):
            for zeros in (None, zero, zero.half(), (17 * zero).to(torch.uint8)):  # to 254
                weight = Int4Weight(qweight, scales, zeros, group=group)
                for rows in (1, 3, 13, 41, 53):
                    x = single(rows, inputs, seed=2)
                    want = reference_int4(x, qweight, scales, zeros, bias)
                    for name in c_library.variants():
                        with c_library.use_variant(name):
                            assert torch.equal(weight.product(x, bias), want), (name, inputs, group)


def int4_of_bytes_is_the_reference() -> None:
    """Scales of a byte, zeros in sixteenths, an outer factor of each output: bit for bit."""
    for outputs, inputs, group in GROUPED:
        qweight, scale, zero = int4(outputs, inputs, group)
        bytes_OG = (1 + 254 * scale / scale.max()).to(torch.uint8)
        sixteenths = (16 * zero).to(torch.uint8)
        outer = torch.exp2(torch.arange(outputs) % 7 - 9.0)
        for zeros in (None, sixteenths):
            for refined in (False, True):
                weight = Int4Weight(
                    qweight, bytes_OG, zeros, group=group, outer_O=outer, refined=refined
                )
                again = pickle.loads(pickle.dumps(weight))
                x = single(13, inputs, seed=2)
                want = reference_int4(x, qweight, bytes_OG, zeros, None, outer, refined=refined)
                for name in c_library.variants():
                    with c_library.use_variant(name):
                        assert torch.equal(weight.product(x), want), (name, inputs, group)
                assert torch.equal(again.product(x), want)
                rows = weight.rows(torch.arange(outputs))
                z = torch.full(scale.shape, 8.0) if zeros is None else zeros / 16
                dense = (qweight.unflatten(1, (-1, group)) - z[..., None]) * bytes_OG[..., None]
                assert torch.equal(rows, dense.flatten(1) * outer[:, None])
                exact = x.double() @ rows.double().T
                assert ((weight.product(x) - exact).norm() < 0.02 * exact.norm()).all()


def nothing_saturates() -> None:
    """Everything at its largest, of either sign: exact."""
    inputs, x = 1280, torch.full((2, 1280), 3.0)
    x[1] = -3.0
    for level in (-128, 127):
        qweight = torch.full((19, inputs), level, dtype=torch.int8)
        for name in c_library.variants():
            with c_library.use_variant(name):
                got = Int8Weight(qweight, torch.ones(19)).product(x)
                want = reference_int8(x, qweight, torch.ones(19))
                assert torch.equal(got, want) and bool((got[0] == 3.0 * inputs * level).all()), name
        for group in (32, 128, 256, 512):
            wide = torch.full((19, 1536), level, dtype=torch.int8)
            scale, rows = torch.ones(19, 1536 // group).half(), torch.full((13, 1536), -3.0)
            want = reference_int8(rows, wide, scale)
            for name in c_library.variants():
                with c_library.use_variant(name):
                    assert torch.equal(Int8Weight(wide, scale).product(rows), want), (name, group)
    for level in (0, 15):
        qweight = torch.full((19, inputs), level, dtype=torch.uint8)
        for group in (32, 128, 1280):
            scale = torch.ones(19, inputs // group)
            for name in c_library.variants():
                with c_library.use_variant(name):
                    got = Int4Weight(qweight, scale, group=group).product(x)
                    assert torch.equal(got, reference_int4(x, qweight, scale)), (name, group)


def rows_are_their_own() -> None:
    """A row alone and beside one a million times larger: the same bits, integers and floats."""
    qweight8, scale8 = int8(37, 129)
    qweight4, scale4, zero4 = int4(37, 256, 32)
    grouped8 = Int8Weight(int8(37, 256)[0], scale4.half())
    kinds = (
        (Int8Weight(qweight8, scale8).product, 129, 41),
        (grouped8.product, 256, 41),
        (Int4Weight(qweight4, scale4, zero4, group=32).product, 256, 41),
        (FloatProduct(single(37, 129), single(37, seed=1)), 129, 16),
        (FloatProduct(single(37, 2111), None), 2111, 16),
    )
    for name in c_library.variants():
        with c_library.use_variant(name):
            for product, inputs, most in kinds:
                x = single(most, inputs, seed=2)
                x[most // 2] *= 1e6
                for rows in (2, 5, most):
                    together = product(x[:rows])
                    alone = torch.cat([product(row[None]) for row in x[:rows]])
                    assert torch.equal(together, alone), (name, inputs, rows)


def threads_change_nothing() -> None:
    """One thread, two and three: the same bits, and every output is written."""
    before = torch.get_num_threads()
    qweight8, scale8 = int8(2003, 129)
    qweight4, scale4, zero4 = int4(2003, 128, 64)
    kinds = (
        (Int8Weight(qweight8, scale8).product, 129),
        (Int4Weight(qweight4, scale4, zero4, group=64).product, 128),
        (FloatProduct(single(2003, 129), None), 129),
    )
    try:
        for product, inputs in kinds:
            x = single(3, inputs, seed=1)
            answers = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                answers.append(product(x))
            assert torch.equal(answers[0], answers[1]), inputs
            assert torch.equal(answers[0], answers[2]), inputs
    finally:
        torch.set_num_threads(before)


def grids_are_the_reference() -> None:
    """The search for grids has torch's bits: every scheme, groups of any length, odd weights."""
    odd = single(19, 96) * single(19, 1, seed=1).abs()
    odd[2], odd[3, :32], odd[4], odd[5, 7] = 0, 0, odd[4].abs(), 40
    odd[6] *= 1e-4  # scales that float16 holds as subnormal numbers
    wide = single(17, 256, seed=2)
    cases = [(odd, group) for group in (0, 32)] + [(wide, group) for group in (0, 64, 128)]
    for weight_OI, group in cases:
        inputs_I = single(weight_OI.shape[1], seed=3).abs()
        schemes: list[Scheme] = [Int8(group=group, symmetric=one) for one in (True, False)]
        if group:
            schemes += [
                Int4(group=group, symmetric=one, fine=fine)
                for one in (True, False)
                for fine in (True, False)
            ]
        for scheme in schemes:
            rules = codec(scheme)
            unit_O1 = rules.unit(weight_OI)
            with without_c():
                expected = least_squares_grid(weight_OI, rules, unit_O1, inputs_I)
            for variant in c_library.variants():
                with c_library.use_variant(variant):
                    found = least_squares_grid(weight_OI, rules, unit_O1, inputs_I)
                for one, other in zip(found, expected, strict=True):
                    assert torch.equal(one, other), (scheme, variant)
    levels = Levels(-127, 127, 0, symmetric=True, half=True)
    huge = searched_grids(1e9 * wide, torch.ones(256), None, groups=8, shares=(1.0,), levels=levels)
    assert huge is None, "scales that float16 does not hold are told"


def columns_make_up_for_errors() -> None:
    """GPTQ's passes leave torch's error of the products, up to the order of sums."""
    for outputs, inputs, scheme in (
        (37, 96, Int4(group=32)),
        (16, 256, Int4(group=64, fine=False)),
        (19, 128, Int4(group=128, symmetric=True)),
        (21, 67, Int8(group=0)),
    ):
        weight_OI = single(outputs, inputs)
        x_MI = single(4 * inputs, inputs, seed=1) @ single(inputs, inputs, seed=2)
        given = x_MI.T @ x_MI
        with without_c():
            expected = quantize_with_inputs(weight_OI, scheme, moment_II=given)
        due = _off(weight_OI, expected, x_MI)
        assert due < 0.75 * _off(weight_OI, quantize_tensor(weight_OI, scheme), x_MI)
        for variant in c_library.variants():
            with c_library.use_variant(variant):
                found = quantize_with_inputs(weight_OI, scheme, moment_II=given)
            assert abs(_off(weight_OI, found, x_MI) - due) < 0.01 * due, (scheme, variant)
            same = (found.levels() == expected.levels()).float().mean()
            assert same > 0.98, (scheme, variant, float(same))


def _off(weight_OI: torch.Tensor, tensor: QuantizedTensor, x_MI: torch.Tensor) -> float:
    return float((x_MI @ (dequantize(tensor) - weight_OI).T).norm())


@contextmanager
def without_c() -> Iterator[None]:
    """Compute as on a machine without the compiled library."""
    before = c_library._loaded
    c_library._loaded = lambda: (None, "not for now")  # type: ignore[assignment]
    try:
        yield
    finally:
        c_library._loaded = before


def activations_are_rounded_as_said() -> None:
    """Halves go to even; zeros stay; what is not finite gives NaN, in its own row only."""
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.5], [0.0] * 5, [1.0, torch.nan, 1.0, 1.0, 1.0]])
    x = torch.cat((x, torch.tensor([[torch.inf] + [1.0] * 4, [3e-44, 1e-45, 0.0, 0.0, -3e-44]])))
    weight = Int8Weight(torch.eye(5, dtype=torch.int8), torch.ones(5))
    for name in c_library.variants():
        with c_library.use_variant(name):
            got = weight.product(x)
            assert got[0].tolist() == [127.0, 0.0, 2.0, -2.0, 126.0], name
            assert got[1].tolist() == [0.0] * 5, name
            assert bool(got[2:4].isnan().all()), name
            assert torch.equal(got[4], reference_int8(x[4:], *weight.unpack())[0]), name


def products_stand_for_quotients() -> None:
    """Numbers within a bit of halfway between two codes are rounded by their quotients."""
    halves = torch.arange(-63, 64) + 0.5
    for rows, groups in ((1, 4), (13, 4), (13, 1)):
        size = single(rows, seed=5).abs()[:, None] + 0.1
        x = torch.cat((127 * size, halves * size), 1)
        place = torch.arange(128) % 3  # a little more, as it is, a little less
        away = torch.where(place == 0, torch.inf, -torch.inf)
        x = torch.where(place == 1, x, torch.nextafter(x, away))
        x = x.view(rows, 32, 4).transpose(1, 2).reshape(rows, 128).contiguous()
        x[:, ::32] = 127 * size  # the largest of its group
        qweight = torch.eye(128, dtype=torch.int8)
        scale = torch.ones(128, groups).half() if groups > 1 else torch.ones(128)
        want = reference_int8(x, qweight, scale)
        for name in c_library.variants():
            with c_library.use_variant(name):
                assert torch.equal(Int8Weight(qweight, scale).product(x), want), (name, rows)


def packed_numbers_are_the_librarys() -> None:
    """GGUF's packed types, any bytes at all: the library's bits; what is not finite is noticed."""
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"):
        number = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[number]
        generator = np.random.default_rng(12)
        data = generator.integers(0, 256, (1031, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(data, number)
        fine = np.isfinite(expected).all(1)
        assert 0 < fine.sum() < len(fine)
        for variant in c_library.variants():
            for rows, strange in ((data, 1), (data[fine], 0)):
                found = np.full((len(rows), block), np.nan, dtype=np.float32)
                with c_library.use_variant(variant):
                    told = c_library.library().glass_unpack(
                        number, rows.ctypes.data, found.ctypes.data, len(rows), 2
                    )
                assert told == strange, (name, variant)
                wanted = expected if strange else expected[fine]
                assert np.array_equal(found, wanted, equal_nan=True), (name, variant)
    assert c_library.library().glass_unpack(0, None, None, 0, 1) == -1


CHECKS = {
    check.__name__: check
    for check in (
        floats_are_torchs,
        int8_is_the_reference,
        refined_products_are_finer,
        int4_is_the_reference,
        int4_of_bytes_is_the_reference,
        nothing_saturates,
        rows_are_their_own,
        threads_change_nothing,
        activations_are_rounded_as_said,
        products_stand_for_quotients,
        packed_numbers_are_the_librarys,
        grids_are_the_reference,
        columns_make_up_for_errors,
    )
} | ARRAY_CHECKS
