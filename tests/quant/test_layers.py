"""What is claimed of quantization: each claim of schemes, methods, layers and models."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from glassformer.kernels import c_library
from glassformer.nn.lora import apply_lora, lora_parameters
from glassformer.quant.backends import routines
from glassformer.quant.backends.choose import BACKENDS, NAMES, lacking
from glassformer.quant.contents import (
    is_model_quantized,
    quantization_report,
    quantized_arrays,
    resident_bytes,
    restored_model,
)
from glassformer.quant.convert import (
    dequantize_model,
    plan,
    prepare_model_for_quantization,
    quantize_in_turn,
    quantize_model,
    quantized_layers,
    use_backend,
)
from glassformer.quant.layers import QuantizedEmbedding, QuantizedLinear, fake_quantize
from glassformer.quant.mixed import AIM, harms, small_enough, stored_bytes
from glassformer.quant.schemes import (
    QuantizedTensor,
    codec,
    dequantize,
    grid_of,
    making_up,
    quantize_tensor,
    quantize_with_inputs,
)
from glassformer.quant.smooth import quantize_on
from glassformer.spec import presets
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import SCHEMES as KINDS
from glassformer.spec.schemes import Float8, Int4, Int8, Scheme
from glassformer.spec.train import LoRA
from tests.kernels.checks import without_c
from tests.planting import Binary, Call, Name, Return, catches
from tests.quant.models import logits, matrix, model, noise, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore::glassformer.quant.backends.choose.SlowQuantization"  # a machine without a C compiler
)

CPU = torch.device("cpu")
SCHEMES = [
    Int8(group=0),
    Int8(group=0, symmetric=False),
    *(Int8(group=group) for group in (32, 128)),
    Int8(group=64, symmetric=False),
    *(Int4(group=group, symmetric=s) for group in (32, 64, 128) for s in (True, False)),
    *(Int4(group=group, symmetric=s, fine=False) for group in (32, 64) for s in (True, False)),
    Float8(),
]
BY_KIND = [QuantSpec(scheme=kind()) for kind in KINDS]


# --- schemes --------------------------------------------------------------------------------------


def e4m3() -> torch.Tensor:
    """Every finite e4m3 number that is not negative, by its bits: exponent bias 7, subnormals."""
    made = []
    for exponent in range(16):
        for mantissa in range(8):
            small = exponent == 0
            made.append((mantissa / 8 + (not small)) * 2.0 ** (max(exponent, 1) - 7))
    return torch.tensor(made[:-1], dtype=torch.float64)  # the last one is NaN


def by_definition(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The grid over each group's range, a group at a time, as a page of a book would write it."""
    if isinstance(scheme, Float8):
        return by_search(weight)
    if getattr(scheme, "fine", False):
        return by_definition_of_fine(weight, scheme)
    out = torch.empty_like(weight)
    width = scheme.group or weight.shape[1]
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], width):
            group = weight[row, start : start + width].double()
            if scheme.symmetric:
                low, high = (-127, 127) if isinstance(scheme, Int8) else (-8, 7)
                step = group.abs().max() / high
                zero = torch.zeros(())
            else:
                low, high = (-128, 127) if isinstance(scheme, Int8) else (0, 15)
                bottom, top = group.min().clamp(max=0), group.max().clamp(min=0)
                step = (top - bottom) / (high - low)
                zero = torch.round(low - bottom / step) if step > 0 else torch.zeros(())
            step = step.half() if scheme.group else step.float()
            step = step.double() if step > 0 else torch.ones((), dtype=torch.float64)
            level = (torch.round(group / step) + zero).clamp(low, high)
            out[row, start : start + width] = ((level - zero) * step).float()
    return out


def by_definition_of_fine(weight: torch.Tensor, scheme: Int4) -> torch.Tensor:
    """Scales are bytes times the row's power of two, rounded up; zeros are in sixteenths."""
    out = torch.empty_like(weight)
    for row, entries in enumerate(weight.double()):
        groups = entries.split(scheme.group)
        if scheme.symmetric:
            reach = [float(group.abs().max()) / 7 for group in groups]
        else:
            reach = [float(g.max().clamp(min=0) - g.min().clamp(max=0)) / 15 for g in groups]
        power = 2.0 ** math.ceil(math.log2((max(reach) or 1.0) / 255))
        made = []
        for group, step in zip(groups, reach, strict=True):
            step = max(1, math.ceil(step / power)) * power
            zero = 8.0
            if not scheme.symmetric:
                zero = round(-float(group.min().clamp(max=0)) / step * 16) / 16
            made.append(((group / step + zero).round().clamp(0, 15) - zero) * step)
        out[row] = torch.cat(made).float()
    return out


def by_search(weight: torch.Tensor) -> torch.Tensor:
    """Each row over a 448th of its largest entry, at the nearest of all e4m3 numbers."""
    numbers, out = e4m3(), torch.empty_like(weight)
    for row, entries in enumerate(weight):
        step = entries.abs().max() / 448
        step = step if step > 0 else torch.ones(())
        far = (entries.abs().double() / step.double())[:, None] - numbers
        # Of two that are equally near, the one with the even mantissa: the even index.
        rank = far.abs() * 2 + (torch.arange(len(numbers)) % 2) * 1e-9
        out[row] = entries.sign() * (numbers[rank.argmin(1)] * step).float()
    return out


def steps_of(tensor: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring levels at each weight, (O, I)."""
    scale = grid_of(tensor)[0]
    each = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    if not isinstance(tensor.scheme, Float8):
        return each
    exponent = (weight.abs() / each).clamp(2.0**-6, 448.0).log2().floor()
    return each * 2.0 ** (exponent - 3)


@catches(
    "scale by column",
    "quant.schemes:IntegerCodec.grid",
    Call("amax"),
    to="{func}(0, keepdim=True).amax(-1).expand(len(weight_OI), -1)",
)
def test_schemes_are_their_definition() -> None:
    for scheme in SCHEMES:
        weight = matrix()
        found = dequantize(quantize_tensor(weight, scheme))
        expected = by_definition(weight, scheme)
        room = steps_of(quantize_tensor(weight, scheme), weight)
        # In float32 a tie may fall the other way: then it is one whole step, and rare.
        off = (found - expected).abs() > 1e-4 * room
        assert off.float().mean() < 1e-3, (scheme, int(off.sum()))
        assert ((found - expected).abs() <= 1.01 * room).all(), scheme


def test_errors_are_half_a_step() -> None:
    for scheme in SCHEMES:
        weight = matrix()
        tensor = quantize_tensor(weight, scheme)
        room = steps_of(tensor, weight)
        # A rounded zero level moves both ends of an asymmetric grid by up to half a step more.
        share = 0.502 if getattr(scheme, "symmetric", True) else 1.01
        error = (dequantize(tensor) - weight).abs()
        assert (error <= share * room).all(), scheme
        step = grid_of(tensor)[0]
        assert (error <= 1.01 * codec(scheme).error_bound(weight, step)).all(), scheme


def test_levels_stay_in_range() -> None:
    """GPTQ moves weights after their grid is chosen: what leaves the range goes to its end."""
    for scheme in SCHEMES:
        rules, weight = codec(scheme), matrix()
        scale, zero = rules.grid(weight, unit_O1=rules.unit(weight))
        ends = rules.values(rules.nearest_levels(100.0 * weight, scale, zero), scale, zero)
        assert torch.isfinite(ends).all(), scheme
        most = weight.abs().amax(1, keepdim=True)
        assert (ends.abs() <= 1.2 * most).all(), scheme


@catches(
    "nibbles exchanged when packed",
    "quant.schemes:Int4Codec.pack",
    Return(),
    to="levels[:, 1::2] | {left} << 4",
)
def test_nibbles_keep_their_order() -> None:
    levels = torch.arange(16, dtype=torch.uint8).repeat(2, 2)
    rules = codec(Int4(group=32))
    packed = rules.pack(levels)
    assert packed[0, 0] == 0 | 1 << 4  # the even column low, the odd one high
    assert torch.equal(rules.unpack(packed), levels)


@catches(
    "clip missing",
    "quant.schemes:IntegerCodec.nearest",
    Return(),
    to="torch.round(weight / scale) + zero",
)
def test_least_squares_are_less() -> None:
    for scheme in SCHEMES:
        weight = matrix()
        plain = (dequantize(quantize_tensor(weight, scheme)) - weight).square().sum()
        least = dequantize(quantize_tensor(weight, scheme, method="mse")) - weight
        assert least.square().sum() <= plain, scheme
        if isinstance(scheme, Int4):
            assert least.square().sum() < 0.97 * plain


@catches("no correction within a block", "quant.schemes:_corrected", Call("outer"), drop=True)
def test_gptq_keeps_products() -> None:
    """By the compiled passes over columns, and by torch's."""
    _gptq_keeps_products()
    with without_c():
        _gptq_keeps_products()


def _gptq_keeps_products() -> None:
    mixed = noise(400, 128, seed=1) @ noise(128, 128, seed=2)
    weight = noise(24, 128, seed=3)
    for scheme in (Int4(group=32), Int4(group=64, symmetric=True), Int8(), Float8()):
        exact = mixed @ weight.T
        errors = [
            float((mixed @ dequantize(tensor).T - exact).norm() / exact.norm())
            for tensor in (
                quantize_tensor(weight, scheme),
                quantize_tensor(weight, scheme, method="mse"),
                quantize_with_inputs(weight, scheme, moment_II=mixed.T @ mixed),
            )
        ]
        assert errors[2] < (0.62 * errors[0] if isinstance(scheme, Int4) else 0.8 * errors[1])


def test_errors_are_made_up_for() -> None:
    due = noise(400, 64, seed=1) @ noise(64, 64, seed=2)
    got = due + 0.3 * noise(400, 64, seed=4) @ noise(64, 64, seed=5) + 0.2 * due.roll(1, 1)
    weight = noise(24, 64, seed=3)
    moved = making_up(weight, moment_II=got.T @ got, cross_II=due.T @ got)
    best = torch.linalg.lstsq(got, due @ weight.T).solution.T
    errors = [float((got @ w.T - due @ weight.T).norm()) for w in (weight, moved, best)]
    assert errors[1] < 0.7 * errors[0] and errors[1] < 1.1 * errors[2], errors


def test_turns_keep_answers() -> None:
    spec = QuantSpec(scheme=Int4(), method="gptq")
    full = model("core")
    ids = tokens(full, 16, 16)
    at_once = prepare_model_for_quantization(copy.deepcopy(full), spec)
    with torch.no_grad():
        at_once(ids)
        small = [
            quantize_model(at_once, backend="float"),
            quantize_in_turn(copy.deepcopy(full), ids.chunk(2), spec, backend="float"),
        ]
        exact = full(ids)["next"]
        errors = [float((one(ids)["next"] - exact).norm() / exact.norm()) for one in small]
    assert errors[1] < 0.7 * errors[0], errors
    one, other = (quantization_report(each).layers for each in small)
    assert one == other


def test_harm_is_what_rounding_does() -> None:
    full = model()
    ids = tokens(full, 16, 40)
    spec = QuantSpec(scheme=Int4())
    schemes = {path: scheme for path, (_, scheme) in plan(full, spec).items() if path != "embed"}
    found = harms(full, [ids], schemes)
    shares = []
    with torch.no_grad():
        p = full(ids)["next"].double().log_softmax(-1)
        for path, scheme in schemes.items():
            alone = copy.deepcopy(full)
            weight = alone.get_submodule(path).weight
            weight.copy_(dequantize(quantize_tensor(weight, scheme)))
            q = alone(ids)["next"].double().log_softmax(-1)
            shares.append(found[path].nats / float((p.exp() * (p - q)).sum(-1).mean()))
            assert found[path].weights == weight.numel()
    # 32 samples of a square: a quarter of it either way, and seldom more than three times that
    assert min(shares) > 0.3 and max(shares) < 2.5, shares
    assert 0.75 < sum(shares) / len(shares) < 1.3, shares


# --- layers and backends --------------------------------------------------------------------------


def test_tables_that_dominate_are_narrow() -> None:
    """A table that is most of a model gets 4 bits, so that all of it comes to the aim."""
    spec = presets.preset("qwen", vocab_size=8_000, d_model=64, d_ff=160, n_layers=2)
    wish, full = QuantSpec(scheme=Int4()), model(spec)
    chosen = small_enough(spec, wish)
    assert chosen.head == Int4() and chosen.mean_bits is not None and chosen.mean_bits > 5
    small, _ = quantize_on(copy.deepcopy(full), [tokens(full, 4, 16)], wish)
    bits = {path: layer.bits for path, layer in quantization_report(small).layers.items()}
    assert bits["embed"] == 4 and set(bits.values()) == {4, 8}
    floats = 4 * sum(p.numel() for p in full.parameters())
    size = sum(array.nbytes for array in quantized_arrays(small)[1].values())
    assert 0.95 * AIM * floats < size <= AIM * floats, size / floats
    for other in (QuantSpec(), wish, QuantSpec(scheme=Int4(), head=Int4())):
        made = quantize_model(copy.deepcopy(full), other)
        size = sum(array.nbytes for array in quantized_arrays(made)[1].values())
        assert stored_bytes(spec, other) == size, other
    given = QuantSpec(scheme=Int4(), head=Int8())
    for model_spec, asked in ((spec, given), (presets.preset("qwen"), wish), (spec, QuantSpec())):
        assert small_enough(model_spec, asked) == asked


def test_backends_are_within_their_bound() -> None:
    weight = matrix(48)
    x = noise(20, 256, seed=9)
    x[1] *= 20.0
    x[2] = x[2].sign()  # all at their ends
    x[3] = 0.0
    asked = 0
    for scheme in SCHEMES:
        tensor = quantize_tensor(weight, scheme)
        exact = x.double() @ dequantize(tensor).double().T
        for name, backend in BACKENDS.items():
            if lacking(name, scheme, tensor.shape, CPU):
                continue
            bias = noise(48, seed=4)
            layer = QuantizedLinear(tensor, bias, backend=name)
            room = backend.bound(x, dequantize(tensor)) + 1e-5 * exact.abs().max()
            assert ((layer(x) - bias - exact).abs() <= room).all(), (name, scheme)
            asked += 1
        layer = QuantizedLinear(tensor, None, backend="float")
        assert (layer(x) - exact).abs().max() < 1e-4 * exact.abs().max()
    assert asked or not c_library.available()  # without C, the reference runs


def test_the_reference_has_the_bits_of_c() -> None:
    weight, x = matrix(48), noise(20, 256, seed=9)
    x[1] *= 20.0
    x[2], x[3] = x[2].sign(), 0.0
    for scheme in SCHEMES:
        tensor, bias = quantize_tensor(weight, scheme), noise(48, seed=4)
        if lacking("c", scheme, tensor.shape, CPU):
            continue
        for head in (False, True):
            one, other = (
                QuantizedLinear(tensor, bias, backend=name, head=head)
                for name in ("c", "reference")
            )
            assert torch.equal(one(x), other(x)), (scheme, head)
            assert torch.equal(one(x[:, None]).bfloat16(), other(x[:, None]).bfloat16())
            # Activations of 8 bits are not activations as they are.
            assert not torch.equal(one(x), QuantizedLinear(tensor, bias, backend="float")(x))
    for preset in ("qwen", "core"):
        for spec in BY_KIND:
            small = quantize_model(model(preset), spec)
            expected = logits(use_backend(small, "reference"))
            assert torch.equal(logits(use_backend(small, "auto")), expected), (preset, spec)


def test_rows_are_alone() -> None:
    weight, x = matrix(48), noise(40, 256, seed=8)
    x[1:] *= 20.0
    for scheme in SCHEMES:
        tensor = quantize_tensor(weight, scheme)
        if not lacking("c", scheme, tensor.shape, CPU):
            layer = QuantizedLinear(tensor, None, backend="c")
            for rows in (2, 16, 17, 40):
                assert torch.equal(layer(x[:1]), layer(x[:rows])[:1]), (scheme, rows)


def test_forms_come_back() -> None:
    for scheme in SCHEMES:
        tensor = quantize_tensor(matrix(48), scheme)
        for name in BACKENDS:
            if lacking(name, scheme, tensor.shape, CPU):
                continue
            layer = QuantizedLinear(tensor, noise(48), backend=name)
            layer(noise(2, 256))
            assert layer.form is not None and layer.qweight is None  # in place of the stored form
            if name == "c":  # 48 outputs fill their tiles; a row's power of two is a float here
                powers = 0 if tensor.exponent is None else 3 * 48
                assert layer.nbytes == tensor.nbytes + powers, scheme
            state = layer.state_dict()
            assert torch.equal(state["qweight"], tensor.qweight)
            assert torch.equal(state["scale"], tensor.scale)
            assert (tensor.zero is None) or torch.equal(state["zero"], tensor.zero)
            assert (tensor.exponent is None) or torch.equal(state["exponent"], tensor.exponent)
            twin = copy.deepcopy(layer)
            assert torch.equal(twin(noise(2, 256)), layer(noise(2, 256)))


def test_lookups_are_rows() -> None:
    for scheme in SCHEMES:
        tensor = quantize_tensor(matrix(48), scheme)
        for name in NAMES:
            if name in BACKENDS and lacking(name, scheme, tensor.shape, CPU, lookup=True):
                continue
            table = QuantizedEmbedding(tensor, multiplier=3.0, backend=name)
            ids = torch.tensor([[0, 5], [47, 5]])
            expected = F.embedding(ids, dequantize(tensor)) * 3.0
            assert torch.allclose(table(ids), expected, rtol=1e-6), (name, scheme)


# --- models ---------------------------------------------------------------------------------------


def test_converted_is_rounded() -> None:
    for kind in KINDS:
        for preset in ("qwen", "core"):
            rounded = prepare_model_for_quantization(
                model(preset), QuantSpec(scheme=kind()), mode="qat"
            )
            before = logits(rounded)
            assert not torch.equal(before, logits(model(preset)))
            assert torch.equal(logits(quantize_model(rounded, backend="float")), before)


@catches(
    "STE gradient missing",
    "quant.layers:StraightThrough.backward",
    Name("gradient"),
    to="torch.zeros_like({it})",
)
def test_gradients_go_straight_through() -> None:
    for kind in KINDS:
        weight = noise(8, 64).requires_grad_()
        push = noise(8, 64, seed=6)
        (fake_quantize(weight, kind()) * push).sum().backward()
        assert weight.grad is not None and torch.equal(weight.grad, push)


def test_pieces_add_up() -> None:
    tensor = quantize_tensor(matrix(37, 256), Int4())
    y = noise(5, 37, seed=4)
    expected = y @ dequantize(tensor)
    before = routines.PIECE
    try:
        routines.PIECE = 10 * 256
        found = routines.transposed_product(y, tensor)
    finally:
        routines.PIECE = before
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_corrections_learn_over_rounded_weights() -> None:
    small = quantize_model(model(), QuantSpec(scheme=Int4()))
    plain = dequantize_model(copy.deepcopy(small))
    found = []
    for each in (small, plain):
        apply_lora(each, LoRA(rank=3), generator=torch.Generator().manual_seed(0))
        factors = lora_parameters(each)
        with torch.no_grad():
            for i, factor in enumerate(factors.values()):
                factor.add_(0.05 * noise(*factor.shape, seed=i))
        answers = each.train()(tokens(each))["next"]
        answers.square().mean().backward()
        found.append([answers.detach(), *(factor.grad for factor in factors.values())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    held = [p for p in small.parameters() if p.requires_grad]
    assert len(held) == len(lora_parameters(small))


def test_dequantized_is_what_was_used() -> None:
    for spec in (*BY_KIND, QuantSpec(scheme=Int4(), tied="untie")):
        for preset in ("qwen", "core"):
            small = quantize_model(model(preset), spec, backend="float")
            used = {path: layer.weights() for path, layer in quantized_layers(small)}
            expected = logits(small)
            back = dequantize_model(small)
            assert not is_model_quantized(back)
            assert torch.equal(logits(back), expected)
            for path, weights in used.items():
                assert torch.equal(back.get_submodule(path).weight, weights)
            assert not [n for n, _ in back.named_buffers() if "scale" in n or "zero" in n]


@catches("tied table forgotten", "spec.quantization:targets", Binary("or"), to="True")
def test_tied_tables_are_shared() -> None:
    full = model("qwen")  # tied
    small = quantize_model(copy.deepcopy(full), QuantSpec())
    assert "embed" in quantization_report(small).layers
    logits(small)
    assert resident_bytes(small) < 0.28 * resident_bytes(full)
    untied = quantize_model(copy.deepcopy(full), QuantSpec(tied="untie"))
    assert set(quantization_report(untied).layers) - set(quantization_report(small).layers) == {
        "heads.next"
    }
    assert not untied.spec.heads[0].tied
    skipped = quantize_model(copy.deepcopy(full), QuantSpec(tied="skip"))
    assert not {"embed", "heads.next"} & set(quantization_report(skipped).layers)
    assert skipped.embed.weight.equal(full.embed.weight)
    for one in (small, untied, skipped):
        found, expected = logits(one), logits(full)
        assert (found - expected).norm() < 0.1 * expected.norm()
        assert resident_bytes(one) < resident_bytes(full)


def test_arrays_come_back() -> None:
    untied = [QuantSpec(scheme=Int8(symmetric=each), tied="untie") for each in (True, False)]
    for spec in (*BY_KIND, *untied):
        small = quantize_model(model(), spec)
        quantization, arrays = quantized_arrays(small)
        again = restored_model(small.spec, quantization, arrays)
        assert torch.equal(logits(again), logits(small))
