"""Kernels in CUDA C++: compiled by NVIDIA's run-time compiler, kept in Triton's cache, launched.

Few kernels need what Triton does not offer: clusters of blocks that read each other's memory, and
warps that go their own ways. Their sources lie beside this file and are compiled for one shape at
a time. A kernel may start while the one before it still runs (programmatic dependent launch).
"""

import ctypes
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from glassformer.spec.errors import MachineError

DTYPES = (torch.float16, torch.bfloat16)
HINT = "update NVIDIA's driver, or remove cuda-bindings: without it Triton's kernels run"


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Return True for a Hopper GPU with NVIDIA's bindings for Python, which torch depends on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return _bindings() is not None


@functools.cache
def _bindings() -> Any:
    """Return NVIDIA's driver and run-time compiler, or None without them or their libraries."""
    try:
        from cuda.bindings import driver, nvrtc

        checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError, MachineError):  # the bindings find no library
        return None
    return driver, nvrtc


def checked(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver or the compiler returns, if it succeeded."""
    status, *values = answer
    if status.value:
        raise MachineError(f"a kernel for this GPU cannot run: {status.name}", hint=HINT)
    return values[0] if len(values) == 1 else values


def program(name: str, defined: Mapping[str, object], *functions: str) -> str:
    """Return the source of a kernel: definitions, what all kernels share, functions, its file."""
    lines = [f"#define {key} {value}" for key, value in defined.items()]
    shared, own = (
        Path(__file__).with_name(file).read_text(encoding="utf-8")
        for file in ("hopper.cuh", f"{name}.cu")
    )
    return "\n".join((*lines, shared, *functions, own))


def multiply(outputs: int, dtype: torch.dtype) -> str:
    """Return the instruction that multiplies 64 rows with some outputs, 16 inputs at a time."""
    sums, kind = outputs // 2, "f16" if dtype is torch.float16 else "bf16"
    numbers = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{sums}], u64 x, u64 weight) {{
    asm volatile("{{ .reg .pred add; setp.eq.u32 add, 0, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{outputs}k16.f32.{kind}.{kind} "
                 "{{{numbers}}}, %{sums}, %{sums + 1}, add, 1, 1, 0, 0; }}"
                 : {operands} : "l"(x), "l"(weight));
}}
"""


def compiled(text: str) -> bytes:
    """Return a program's machine code for Hopper, from Triton's cache or made now."""
    from triton.runtime.cache import get_cache_manager

    _, nvrtc = _bindings()
    version = checked(nvrtc.nvrtcVersion())
    cache = get_cache_manager(hashlib.sha256(f"{version} {text}".encode()).hexdigest())
    if (kept := cache.get_file("kernel.cubin")) is not None:
        return Path(kept).read_bytes()
    made = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    if nvrtc.nvrtcCompileProgram(made, len(options), options)[0].value:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(made))
        nvrtc.nvrtcGetProgramLog(made, log)
        why = log.decode(errors="replace").strip(" \0\n").partition("\n")[0]
        raise MachineError(f"a kernel for this GPU was not compiled: {why}", hint=HINT)
    code: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(made))
    checked(nvrtc.nvrtcGetCUBIN(made, code))
    checked(nvrtc.nvrtcDestroyProgram(made))
    cache.put(code, "kernel.cubin")
    return code


class Kernel:
    """A compiled kernel on one device, and the shared memory that a block of it has."""

    def __init__(self, text: str, name: str, *, shared: int, device: torch.device) -> None:
        driver, _ = _bindings()
        code = compiled(text)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context that modules belong to
            self.module = checked(driver.cuModuleLoadData(code))
        self.function = checked(driver.cuModuleGetFunction(self.module, name.encode()))
        self.shared = shared
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self.function, dynamic, shared))

    def __call__(
        self, blocks: tuple[int, int], threads: int, *, cluster: int, arguments: tuple[int, ...]
    ) -> None:
        """Launch it on torch's stream; `arguments` are the addresses of what it is given."""
        driver, _ = _bindings()
        how = self._launch(blocks, threads, cluster)
        how.hStream = torch.cuda.current_stream().cuda_stream
        listed = (ctypes.c_void_p * len(arguments))(*arguments)
        checked(driver.cuLaunchKernelEx(how, self.function, ctypes.addressof(listed), 0))

    def clusters_at_once(self, threads: int, *, cluster: int) -> int:
        """Return how many clusters of blocks the device has room for."""
        driver, _ = _bindings()
        how = self._launch((cluster, 1), threads, cluster)
        return int(checked(driver.cuOccupancyMaxActiveClusters(self.function, how)))

    def _launch(self, blocks: tuple[int, int], threads: int, cluster: int) -> Any:
        """Return how so many blocks are launched: in clusters, and early."""
        driver, _ = _bindings()
        name = driver.CUlaunchAttributeID
        together, early = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        together.id = name.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        together.value.clusterDim.x = cluster
        together.value.clusterDim.y = together.value.clusterDim.z = 1
        early.id = name.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        how = driver.CUlaunchConfig()
        how.gridDimX, how.gridDimY, how.gridDimZ = *blocks, 1
        how.blockDimX, how.blockDimY, how.blockDimZ = threads, 1, 1
        how.sharedMemBytes = self.shared
        how.attrs, how.numAttrs = [together, early], 2
        return how


class TensorMap:
    """How copies of 64 columns and some rows of a matrix go, swizzled; zeros outside of it."""

    COLUMNS = 64

    def __init__(self, matrix_RI: torch.Tensor, rows: int) -> None:
        driver, _ = _bindings()
        (R, n_in), kind = matrix_RI.shape, driver.CUtensorMapDataType
        half = matrix_RI.dtype is torch.float16
        self.memory = ctypes.create_string_buffer(128 + 64)
        # The driver's function itself, since the bindings' own maps are not always aligned to 64.
        self.address = -(-ctypes.addressof(self.memory) // 64) * 64
        long, short = ctypes.c_uint64, ctypes.c_uint32
        status = _driver_library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            int(
                kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                if half
                else kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            ),
            short(2),
            ctypes.c_void_p(matrix_RI.data_ptr()),
            (long * 2)(n_in, R),
            (long * 1)(2 * n_in),
            (short * 2)(self.COLUMNS, rows),
            (short * 2)(1, 1),
            int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
            int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
        checked((driver.CUresult(status), None))


@functools.cache
def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
