"""Tensor files: what the library reads, and what a hostile one gets."""

import contextlib
import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.models.weights import numpy_view
from glassformer.spec.errors import FileError, InputError
from glassformer.store.tensors import (
    BFLOAT16,
    DTYPES,
    read_header,
    read_tensors,
    rounded,
    tensor_bytes,
    widened,
)


def some(dtype, *shape):
    count = int(np.prod(shape))
    if dtype == BFLOAT16:
        return np.arange(count, dtype="<u2").view(BFLOAT16).reshape(shape)
    return (np.arange(count) % 2).astype(dtype).reshape(shape)


EVERY = {f"t.{code}": some(dtype, 3, 5) for code, dtype in DTYPES.items()}


def write(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    return path


def raw(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    arrays = EVERY | {"scalar": np.float32(3).reshape(()), "none": np.zeros((0, 5), "<f4")}
    again = read_tensors(write(tmp_path, tensor_bytes(arrays)))
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        assert again[name].shape == array.shape
        assert again[name].tobytes() == array.tobytes()


def test_the_library_reads_what_we_write():
    plain = {name: array for name, array in EVERY.items() if array.dtype.names is None}
    theirs = safetensors.numpy.load(tensor_bytes(plain))
    assert theirs.keys() == plain.keys()
    assert all(np.array_equal(theirs[name], plain[name]) for name in plain)
    for code in ("BF16", "F8_E4M3"):
        ((name, entry),) = safetensors.deserialize(tensor_bytes({"b": EVERY[f"t.{code}"]}))
        assert (name, entry["dtype"], entry["shape"]) == ("b", code, [3, 5])


def test_we_read_what_the_library_writes(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5)}
    again = read_tensors(write(tmp_path, safetensors.numpy.save(arrays)))
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)


def test_equal_weights_give_equal_bytes_in_any_order_and_layout():
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    one = tensor_bytes({"a": array, "b": array.T.copy()})
    other = tensor_bytes({"b": array.T, "a": np.asfortranarray(array)})
    assert one == other
    assert (struct.unpack("<Q", one[:8])[0]) % 8 == 0


def test_a_dtype_that_no_file_holds_is_named():
    with pytest.raises(InputError, match="tensor 'z' has dtype complex64"):
        tensor_bytes({"z": np.zeros(2, dtype=np.complex64)})


def test_the_header_is_read_alone(tmp_path):
    header = read_header(write(tmp_path, tensor_bytes(EVERY)))
    assert header == {f"t.{code}": (code, (3, 5)) for code in DTYPES}


HOSTILE = {
    "no bytes": b"",
    "seven bytes": b"1234567",
    "no header": struct.pack("<Q", 0),
    "header cut off": struct.pack("<Q", 100) + b"{}",
    "huge header length": struct.pack("<Q", 2**63) + b"{}" * 50,
    "header over the limit": struct.pack("<Q", 10_000_001) + b" " * 64,
    "not JSON": raw(b"{'a': 1}"),
    "not UTF-8": raw(b'{"\xff\xfe": 1}'),
    "deep JSON": raw(b"[" * 100_000),
    "a list": raw([1, 2]),
    "a number": raw(7),
    "entry is a number": raw({"a": 7}),
    "entry is null": raw({"a": None}),
    "no dtype": raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "unknown dtype": raw({"a": entry(dtype="F7")}, bytes(8)),
    "dtype is a list": raw({"a": entry(dtype=["F32"])}, bytes(8)),
    "a name twice": raw(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a key twice": raw(
        b'{"a":{"dtype":"F32","dtype":"F64","shape":[2],"data_offsets":[0,8]}}', bytes(8)
    ),
    "path in a name": raw({"../x": entry()}, bytes(8)),
    "dots in a name": raw({"a..b": entry()}, bytes(8)),
    "slash in a name": raw({"/etc/passwd": entry()}, bytes(8)),
    "nul in a name": raw({"a\0b": entry()}, bytes(8)),
    "empty name": raw({"": entry()}, bytes(8)),
    "long name": raw({"a" * 257: entry()}, bytes(8)),
    "shape of 2^40": raw({"a": entry(shape=[2**40])}, bytes(8)),
    "shape that overflows": raw({"a": entry(shape=[2**40, 2**40])}, bytes(8)),
    "shape beyond numbers": raw({"a": entry(shape=[float("inf")])}, bytes(8)),
    "shape of 1e999": raw(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', bytes(8)),
    "shape of 5,000 digits": raw(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5_000 + b'],"data_offsets":[0,8]}}', bytes(8)
    ),
    "a million dimensions": raw({"a": entry(shape=[1] * 1_000_000)}, bytes(8)),
    "fractional shape": raw({"a": entry(shape=[2.5])}, bytes(8)),
    "negative shape": raw({"a": entry(shape=[-2])}, bytes(8)),
    "shape is text": raw({"a": entry() | {"shape": "2"}}, bytes(8)),
    "offsets beyond the end": raw({"a": entry(shape=[4], offsets=(0, 16))}, bytes(8)),
    "offsets overlap": raw({"a": entry(), "b": entry()}, bytes(8)),
    "offsets backwards": raw({"a": entry(offsets=(8, 0))}, bytes(8)),
    "a hole": raw({"a": entry(offsets=(8, 16))}, bytes(16)),
    "bytes left over": raw({"a": entry()}, bytes(9)),
    "NaN": tensor_bytes({"a": np.array([1.0, np.nan], "<f4")}),
    "infinity": tensor_bytes({"a": np.array([np.inf], "<f8")}),
    "half NaN": tensor_bytes({"a": np.array([np.nan], "<f2")}),
    "bfloat16 NaN": tensor_bytes({"a": np.array([0x7FC0], "<u2").view(BFLOAT16)}),
    "bfloat16 infinity": tensor_bytes({"a": np.array([0xFF80], "<u2").view(BFLOAT16)}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_a_file_error(tmp_path, case):
    with pytest.raises(FileError) as caught:
        read_tensors(write(tmp_path, HOSTILE[case]))
    assert caught.value.where == "x.safetensors"
    assert caught.value.exit_code == 3
    assert len(str(caught.value)) < 1_000


def test_more_tensors_than_anyone_has_are_refused(tmp_path):
    header = {f"t{i}": entry(shape=[0], offsets=(0, 0)) for i in range(100_001)}
    with pytest.raises(FileError, match="100001 tensors in one file"):
        read_header(write(tmp_path, raw(header)))


def test_cut_off_at_every_64th_is_noticed(tmp_path):
    data = tensor_bytes(EVERY)
    for part in range(64):
        with pytest.raises(FileError):
            read_tensors(write(tmp_path, data[: len(data) * part // 64]))


@given(place=st.integers(0, 2**16), bit=st.integers(0, 7))
def test_no_flipped_bit_brings_anything_but_a_file_error(tmp_path_factory, place, bit):
    data = bytearray(tensor_bytes({"a": np.arange(6, dtype="<f4"), "b": np.ones(3, "<f8")}))
    data[place % len(data)] ^= 1 << bit
    with contextlib.suppress(FileError):
        read_tensors(write(tmp_path_factory.mktemp("flip"), bytes(data)))


@given(st.binary(max_size=200))
def test_no_bytes_bring_anything_but_a_file_error(tmp_path_factory, data):
    path = write(tmp_path_factory.mktemp("any"), struct.pack("<Q", len(data)) + data)
    with pytest.raises(FileError):
        read_tensors(path)


def test_numbers_that_are_not_finite_have_one_rule_and_are_read_back():
    from glassformer.spec.serialize import json_numbers

    found = json_numbers({"a": (1.0, float("nan")), "b": [float("-inf"), "x", 3]})
    assert found == {"a": [1.0, "nan"], "b": ["-inf", "x", 3]}
    assert float(found["b"][0]) == float("-inf")
    assert json_numbers([float("inf"), 2.0], not_finite="null") == [None, 2.0]


# --- bfloat16 without torch -----------------------------------------------------------------------


def test_every_bfloat16_is_widened_and_comes_back():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = bits[bits.isfinite()]
    wide = widened(numpy_view(finite))
    assert np.array_equal(wide, finite.float().numpy())
    assert np.array_equal(rounded(wide).view("u2"), numpy_view(finite).view("u2"))


def test_rounding_is_torchs():
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(1)) * 3
    halves = (widened(numpy_view(x.bfloat16())).view("u4") + 0x8000).view("f4")  # half way
    for numbers in (x.numpy(), halves):
        want = numpy_view(torch.from_numpy(numbers).bfloat16())
        assert np.array_equal(rounded(numbers).view("u2"), want.view("u2"))
