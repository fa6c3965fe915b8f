"""What can be checked of the CUDA kernels without a GPU: tiles, arguments, the compiler."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glassformer.gpu import cuda_attend, cuda_head, cuda_launch, cuda_rows
from glassformer.spec.errors import MachineError

MEMORY = 232_448  # bytes of shared memory that a block of a Hopper GPU may have
STATIC = 2_048  # more than any of the kernels declares besides
WIDTHS = (64, 200, 512, 896, 1_024, 1_536, 2_048, 4_096, 4_864, 14_336)


@pytest.mark.parametrize("rows", [64, 65, 100, 128, 200, 256])
def test_tiles_fit_into_the_memory_of_a_block(rows):
    for n_in in WIDTHS:
        for n_wide in (16, 48, 512, 896, 1_152, 9_728, 16_384):
            tile = cuda_rows.tile_of(rows, n_in, n_wide)
            assert tile.bytes + STATIC <= MEMORY
            assert tile.rows in (64, 128) and tile.outputs % 16 == 0 and tile.outputs <= 256
            assert tile.splits in (1, 2, 4, 8) and tile.stages >= 1
            chunks = -(-n_in // cuda_rows.CHUNK)
            assert tile.splits <= chunks, "every block has inputs"


def test_no_two_blocks_of_a_large_product_share_a_multiprocessor():
    """And the product after the attention fits beside them; see RING."""
    gate, down = cuda_rows.tile_of(128, 896, 9_728), cuda_rows.tile_of(128, 4_864, 896)
    out = cuda_rows.tile_of(128, 896, 896)
    for large in (gate, down):
        assert 2 * large.bytes > 233_472 > large.bytes + out.bytes + 2 * STATIC


C_TYPES = {"float": ctypes.c_float, "int": ctypes.c_int, "i64": ctypes.c_longlong}


@pytest.mark.parametrize(
    ("name", "module"), [("rows", cuda_rows), ("attend", cuda_attend), ("head", cuda_head)]
)
def test_arguments_are_declared_alike_in_both_languages(name, module):
    """Names, order and kinds of the fields of `Operands`."""
    text = Path(module.__file__).with_name(f"{name}.cu").read_text(encoding="utf-8")
    body = re.search(r"struct Operands \{(.*?)\n\};", text, re.DOTALL)[1]
    declared = []
    for line in re.sub(r"//[^\n]*", "", body).split(";"):
        if not line.strip():
            continue
        kind, names = re.fullmatch(
            r"\s*((?:const\s+)?(?:unsigned char|long long|\w+))\s+(.+)", line
        ).groups()
        for one in names.split(","):
            pointer = one.strip().startswith("*")
            kept = ctypes.c_void_p if pointer else C_TYPES[kind]
            declared.append((one.strip().lstrip("*"), kept))
    assert declared == list(module.Operands._fields_)


def test_a_failure_says_what_to_do():
    status = SimpleNamespace(value=209, name="CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(MachineError, match="NO_BINARY_FOR_GPU") as found:
        cuda_launch.checked((status,))
    assert "cuda-bindings" in str(found.value) and found.value.exit_code == 5
    status.value = 0
    assert cuda_launch.checked((status, 7)) == 7


def sources():
    """Return a program of each kernel as it is compiled for a 0.5 B model of 128 rows."""
    dtype = torch.bfloat16
    made = {}
    given = {
        "gate": ((896, 9_728), "GATE", (1, 0, 0, 0)),
        "down": ((4_864, 896), "NOTHING", (0, 1, 1, 1)),
    }
    for name, (shape, activation, operands) in given.items():
        tile = cuda_rows.tile_of(128, *shape)
        defined = dict(zip(("NORMED", "BIASED", "ONTO", "GAINED"), operands, strict=True))
        defined |= {key.upper(): number for key, number in tile._asdict().items()}
        defined |= {"HALF": 0, "ACTIVATION": activation}
        multiply = cuda_launch.multiply(tile.outputs, dtype)
        made[name] = cuda_launch.program("rows", defined, multiply)
    defined = {"HEAD": 64, "GROUP": 7, "TOGETHER": 2, "DEPTH": 3, "HALF": 1}
    made["attend"] = cuda_launch.program("attend", defined | {"NORMED": 1, "TURNED": 1})
    defined = {"BLOCKS": 2, "CHUNKS": 14, "STAGES": 7, "OUTPUTS": 128, "GROUPS": 2}
    defined |= {"HALF": 0, "NORMED": 1, "BIASED": 1}
    made["head"] = cuda_launch.program("head", defined, cuda_launch.multiply(128, dtype))
    return made


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs NVIDIA's compiler")
@pytest.mark.parametrize("name", ["gate", "down", "attend", "head"])
def test_the_kernels_compile_and_keep_their_numbers_in_registers(name, tmp_path):
    (tmp_path / "kernel.cu").write_text(sources()[name], encoding="utf-8")
    done = subprocess.run(
        [
            "nvcc", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17",
            "-diag-suppress=177,550", "-Werror=all-warnings", "-Xptxas=-v",
            "-o", "kernel.cubin", "kernel.cu",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
