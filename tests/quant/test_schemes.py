"""Schemes as types: options, stored tensors, and folders that earlier versions wrote."""

import json
from pathlib import Path

import pytest
import torch

from glassformer.adapters.load import load_model
from glassformer.quant.arrays import quantized_arrays
from glassformer.quant.convert import use_backend
from glassformer.quant.schemes import quantize_tensor
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.quantization import (
    Quantization,
    QuantizedLayer,
    from_record,
    quant_spec,
    to_record,
)
from glassformer.spec.schemes import NAMES, SCHEMES, Int4, Int8, make_scheme, scheme_bytes
from glassformer.store.quantized import load_quantized, save_quantized
from glassformer.store.tensors import CODES
from tests.quant.checks import noise

BEFORE = Path(__file__).parent / "written_before"


@pytest.mark.parametrize("kind", SCHEMES, ids=NAMES)
def test_stored_tensors_are_those_the_spec_names(kind):
    scheme = kind().resolve(192)
    tensor = quantize_tensor(noise(7, 192), scheme)
    assert tensor.shape == (7, 192) and tensor.nbytes == scheme_bytes(scheme, (7, 192))
    from glassformer.models.state import array_of

    for leaf, part in scheme.parts(7, 192).items():
        stored = getattr(tensor, leaf)
        assert tuple(stored.shape) == part.shape, leaf
        assert CODES[array_of(stored).dtype] == part.dtype, leaf


@pytest.mark.parametrize("name", ["int8", "int8-asymmetric", "int4", "int4-symmetric"])
def test_folders_written_by_the_version_before_compute_the_same(name, tmp_path):
    folder = BEFORE / name
    expected = json.loads((folder / "expected.json").read_text())
    model = use_backend(load_model(folder), "reference")
    with torch.no_grad():
        found = model(torch.tensor(expected["tokens"]))["next"][0, -1]
    assert torch.equal(found, torch.tensor(expected["logits"]))
    # Written again, every byte is as it was: the version before reads what this one writes.
    spec, quantization, arrays = load_quantized(folder)
    save_quantized(tmp_path / "again", spec, quantization, arrays)
    for file in ("quantization.json", "spec.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes(), file
    assert quantized_arrays(model)[0] == quantization


def test_a_record_names_bits_where_it_did_and_kinds_elsewhere():
    for kind in SCHEMES:
        quantization = Quantization(
            layers=(QuantizedLayer(name="a", scheme=kind().resolve(64), method="mse"),)
        )
        record = json.loads(json.dumps(to_record(quantization)))
        assert ("bits" in record["layers"][0]["scheme"]) == (kind in (Int8, Int4))
        assert from_record(record) == quantization


@pytest.mark.parametrize(
    "scheme",
    [
        {"bits": 3},
        {"bits": []},
        {"bits": 8, "group": 32},
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
    assert make_scheme(Int8, group=32, symmetric=None) == Int8()
    for bad, why in (
        ({"scheme": "int5"}, "no quantization scheme 'int5'"),
        ({"scheme": "int8", "bits": 8}, "both given"),
        ({"scheme": "int8", "group": 32}, "int8 has no group"),
        ({"scheme": Int4(), "group": 32}, "has its options already"),
    ):
        with pytest.raises(InputError, match=why):
            quant_spec(**bad)


def test_a_group_that_is_not_given_is_chosen_by_the_inputs():
    assert Int4().resolve(128).group == 64 and Int4().resolve(96).group == 32
    assert Int4(group=128).why_not(96) == "group 128 does not divide the 96 inputs; group 32 does"
    assert not Int4().why_not(96) and Int4().why_not(48)
    with pytest.raises(InputError, match="needs its group"):
        Int4().parts(3, 64)
