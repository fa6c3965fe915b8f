"""Schemes as types: options, stored tensors, and folders that earlier versions wrote."""

import copy
import json
import re
from pathlib import Path

import pytest
import safetensors
import torch

import glassformer
from glassformer.adapters.load import load_model
from glassformer.quant.contents import quantization_report, quantized_arrays
from glassformer.quant.convert import quantize_model, use_backend
from glassformer.quant.schemes import dequantize, quantize_tensor
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import (
    Quantization,
    QuantizedLayer,
    QuantSpec,
    from_record,
    quant_spec,
    to_record,
)
from glassformer.spec.schemes import NAMES, SCHEMES, Float8, Int4, Int8, make_scheme, scheme_bytes
from glassformer.spec.serialize import from_json
from glassformer.store.checkpoint import load_quantized, save_quantized
from glassformer.store.tensors import CODES
from tests.quant.models import logits, model, noise

BEFORE = Path(__file__).parent / "written_before"


@pytest.mark.parametrize("kind", SCHEMES, ids=NAMES)
def test_stored_tensors_are_those_the_spec_names(kind):
    scheme = kind().resolve(192)
    tensor = quantize_tensor(noise(7, 192), scheme)
    assert tensor.shape == (7, 192) and tensor.nbytes == scheme_bytes(scheme, (7, 192))
    from glassformer.models.weights import array_of

    for leaf, part in scheme.parts(7, 192).items():
        stored = getattr(tensor, leaf)
        assert tuple(stored.shape) == part.shape, leaf
        assert CODES[array_of(stored).dtype] == part.dtype, leaf


def test_eight_bit_floats_of_prime_sizes_and_scaled_weights():
    weight = noise(7, 37)
    weight[2] = 0.0
    tensor = quantize_tensor(weight, Float8())
    assert tensor.shape == (7, 37) and tensor.qweight.dtype == torch.float8_e4m3fn
    assert tensor.nbytes == 7 * 37 + 7 * 4
    assert not dequantize(tensor)[2].any()
    # A power of two in the weights is a power of two in the scales, and in nothing else.
    twice = quantize_tensor(4.0 * weight, Float8())
    assert torch.equal(dequantize(twice), 4.0 * dequantize(tensor))
    # Relative precision is the same for small weights: an integer grid loses them.
    uneven = torch.cat((torch.ones(3, 1), 1e-3 * noise(3, 37).abs().clamp(min=0.1)), 1)
    errors = [
        float(((dequantize(quantize_tensor(uneven, s)) / uneven) - 1).abs().max())
        for s in (Float8(), Int8())
    ]
    assert errors[0] < 0.07 < 0.9 < errors[1]


def test_eight_bit_floats_keep_their_type_through_a_model(tmp_path):
    small = quantize_model(model(), QuantSpec(scheme=Float8()))
    assert quantization_report(small).backends == ("reference",)
    expected = logits(small)
    for made in (copy.deepcopy(small), copy.deepcopy(small).double().float()):
        assert made.get_submodule("embed").qweight.dtype == torch.float8_e4m3fn
        assert torch.equal(logits(made), expected)
    quantization, arrays = quantized_arrays(small)
    save_quantized(tmp_path / "fp8", small.spec, quantization, arrays)
    opened = load_model(tmp_path / "fp8")
    assert torch.equal(logits(opened), expected)
    with safetensors.safe_open(tmp_path / "fp8" / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("embed.qweight").dtype == torch.float8_e4m3fn
    arrays["embed.qweight"] = arrays["embed.qweight"].copy()
    arrays["embed.qweight"].view("u1")[0, 0] = 0x7F
    with pytest.raises(InputError, match=r"embed\.qweight holds NaN"):
        save_quantized(tmp_path / "nan", small.spec, quantization, arrays)


def test_a_scheme_is_spelled_in_at_most_four_files():
    """docs/adding-a-scheme.md names them; everybody else asks the scheme."""
    source = Path(glassformer.__file__).parent
    names = re.compile(r"Float8|float8_e4m3|\bfp8\b|F8_E4M3|FLOAT8", re.IGNORECASE)
    files = sorted(
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.suffix in (".py", ".js", ".css", ".html", ".c", ".h")
        and "adapters" not in path.parts  # which read other people's files, of any number type
        and names.search(path.read_text(encoding="utf-8"))
    )
    assert files == ["quant/schemes.py", "spec/schemes.py", "store/tensors.py"]


@pytest.mark.parametrize("name", ["int8", "int8-asymmetric", "int4", "int4-symmetric"])
def test_folders_written_by_the_version_before_compute_the_same(name, tmp_path):
    folder = BEFORE / name
    expected = json.loads((folder / "expected.json").read_text())
    model = use_backend(load_model(folder), "float")
    with torch.no_grad():
        found = model(torch.tensor(expected["tokens"]))["next"][0, -1]
    # They were computed on another machine, whose products may have summed in another order.
    assert torch.allclose(found, torch.tensor(expected["logits"]), rtol=1e-5, atol=1e-6)
    # Written again, every byte is as it was, but for the fields that specs have since then.
    spec, quantization, arrays = load_quantized(folder)
    save_quantized(tmp_path / "again", spec, quantization, arrays)
    for file in ("quantization.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes(), file
    assert from_json(ModelSpec, (tmp_path / "again" / "spec.json").read_text()) == spec
    assert quantized_arrays(model)[0] == quantization


def test_a_record_names_bits_where_it_did_and_kinds_elsewhere():
    for kind in SCHEMES:
        quantization = Quantization(
            layers=(QuantizedLayer(name="a", scheme=kind().resolve(64), method="mse"),)
        )
        record = json.loads(json.dumps(to_record(quantization)))
        assert ("bits" in record["layers"][0]["scheme"]) == (kind is Int8)
        assert from_record(record) == quantization
    older = Quantization(layers=(QuantizedLayer(name="a", scheme=Int4(group=64, fine=False)),))
    record = json.loads(json.dumps(to_record(older)))
    assert record["layers"][0]["scheme"] == {"bits": 4, "group": 64, "symmetric": False}
    assert from_record(record) == older


@pytest.mark.parametrize(
    "scheme",
    [
        {"bits": 3},
        {"bits": []},
        {"bits": 8, "group": 48},
        {"bits": 4, "group": 48},
        {"kind": "Int2"},
        {"kind": "Int8", "bits": 8},
        "int8",
        None,
        {"bits": 4, "group": 32, "symmetric": 1},
    ],
)
def test_a_damaged_record_is_refused(scheme):
    with pytest.raises(InputError):
        from_record({"layers": [{"name": "a", "scheme": scheme}]})


def test_a_record_that_is_no_record_is_refused(tmp_path):
    for record in ([], "x", None, {"layers": 3}, {"layers": [3]}, {}):
        with pytest.raises(InputError):
            from_record(record)
    broken = tmp_path / "broken"
    spec, quantization, arrays = load_quantized(BEFORE / "int8")
    save_quantized(broken, spec, quantization, arrays)
    (broken / "quantization.json").write_text("{")
    with pytest.raises(FileError):
        load_quantized(broken)


def test_options_make_the_scheme():
    assert quant_spec().scheme == Int8()
    assert quant_spec(bits=4).scheme == quant_spec(scheme="int4").scheme == Int4()
    assert quant_spec(bits=4).head_scheme == Int8()
    assert quant_spec(bits=4, head_bits=4, group=32).head_scheme == Int4(group=32)
    assert quant_spec(bits=4, symmetric=False).head_scheme == Int8(symmetric=False)
    assert quant_spec(scheme=Int4(group=128)).scheme == Int4(group=128)
    assert quant_spec(group=0).scheme == Int8(group=0)
    assert make_scheme(Float8, group=32, symmetric=None) == Float8()
    for bad, why in (
        ({"scheme": "int5"}, "no quantization scheme 'int5'"),
        ({"scheme": "int8", "bits": 8}, "both given"),
        ({"scheme": "fp8", "group": 32}, "fp8 has no group"),
        ({"scheme": Int4(), "group": 32}, "has its options already"),
    ):
        with pytest.raises(InputError, match=why):
            quant_spec(**bad)


def test_a_group_that_is_not_given_is_chosen_by_the_inputs():
    assert Int4().resolve(128).group == 32 and Int4().resolve(96).group == 32
    assert Int4(group=128).lacks(96) == "group 128 does not divide the 96 inputs; group 32 does"
    assert not Int4().lacks(96) and Int4().lacks(48)
    assert Int8().resolve(96).group == 32 and Int8().resolve(48).group == 0
    assert Int8(symmetric=False).resolve(96).group == 0 and not Int8().lacks(48)
    assert Int8(group=64).lacks(96) == "group 64 does not divide the 96 inputs; group 32 does"
    with pytest.raises(InputError, match="needs its group"):
        Int8().parts(3, 64)
    with pytest.raises(InputError, match="needs its group"):
        Int4().parts(3, 64)


def test_a_folder_that_names_an_earlier_method_still_says_so():
    record = to_record(Quantization(layers=(QuantizedLayer(name="lm_head", scheme=Int4()),)))
    record["layers"][0]["method"] = "hqq"
    (layer,) = from_record(record).layers
    assert layer.method == "hqq"
    with pytest.raises(InputError, match="hqq"):
        QuantSpec(method="hqq")
