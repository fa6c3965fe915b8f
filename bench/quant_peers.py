"""The same matrix in other libraries' quantized layers, where they are installed.

Each gives calls `x -> x W^T` by name; what a library cannot do on this machine is left out.
llama.cpp runs whole files only (`glass convert MODEL FILE --to gguf`), so no layer of it is timed
here; its rounding of weights is called (`ggml_packed`).
"""

import contextlib
import ctypes
import importlib.util
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import gguf

# O outputs, I inputs, M rows

Call = Callable[[Tensor], object]
NAMES = {"torchao": "torchao", "onnxruntime": "ONNX Runtime", "llama_cpp": "llama.cpp"}


def installed() -> dict[str, bool]:
    """By title."""
    return {title: importlib.util.find_spec(name) is not None for name, title in NAMES.items()}


def peers_of(weight_OI: Tensor) -> Iterator[tuple[str, Call]]:
    """Every call that works, with its name; on a CPU."""
    yield from torch_calls(weight_OI)
    have = installed()
    if have["torchao"]:
        yield from torchao_calls(weight_OI)
    if have["ONNX Runtime"] and importlib.util.find_spec("onnx") is not None:
        yield from onnx_calls(weight_OI)


def torch_calls(weight_OI: Tensor) -> Iterator[tuple[str, Call]]:
    """Torch's own dynamic layer, FBGEMM: a scale for each channel, one for the batch's inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and still what many people run
        layer = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
        layer.weight = nn.Parameter(weight_OI.clone(), requires_grad=False)
        kinds = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), kinds)
    yield "int8 per channel, torch.ao dynamic (FBGEMM)", model


def torchao_calls(weight_OI: Tensor) -> Iterator[tuple[str, Call]]:
    """Its 8-bit settings; the 4-bit ones want packages for other machines."""
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from torchao.quantization import (
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )

        settings = {
            "int8, torchao, weights only": Int8WeightOnlyConfig(),
            "int8, torchao, dynamic": Int8DynamicActivationInt8WeightConfig(),
        }
        for name, setting in settings.items():
            layer = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
            layer.weight = nn.Parameter(weight_OI.clone(), requires_grad=False)
            model = nn.Sequential(layer)
            quantize_(model, setting)
            yield name, model


def onnx_calls(weight_OI: Tensor) -> Iterator[tuple[str, Call]]:
    """Dynamic 8 bits, and 4 bits in groups of 32 with 8-bit activations."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3

    def call(path: Path) -> Call:
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        return lambda x_MI: session.run(None, {"x": x_MI.numpy()})

    plain = onnx_product(weight_OI.numpy())
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, made = Path(folder) / "plain.onnx", Path(folder) / "int8.onnx"
        onnx.save(plain, str(given))
        quantize_dynamic(given, made, weight_type=QuantType.QInt8)
        yield "int8, ONNX Runtime, dynamic", call(made)
        if importlib.util.find_spec("onnx_ir") is None:  # which its 4-bit packer needs
            return
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        packer = MatMulNBitsQuantizer(plain, block_size=32, is_symmetric=True, accuracy_level=4)
        packer.process()
        packed = Path(folder) / "int4.onnx"
        onnx.save(packer.model.model, str(packed))
        yield "int4 g32 symmetric, ONNX Runtime", call(packed)


def onnx_product(weight_OI: np.ndarray) -> object:
    """A graph of one product."""
    from onnx import TensorProto, helper, numpy_helper

    outputs, inputs = weight_OI.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])],
        [numpy_helper.from_array(np.ascontiguousarray(weight_OI.T), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# --- llama.cpp's rounding of weights --------------------------------------------------------------

#: What it takes where a row is not a multiple of 256, which its k-quants need.
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def ggml_quantizer() -> ctypes.CDLL | None:
    """llama.cpp's own C library, in the wheel of xllamacpp; None where that is not installed."""
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.submodule_search_locations is None:
        return None
    files = list(Path(next(iter(found.submodule_search_locations))).glob("xllamacpp*.so"))
    library = ctypes.CDLL(str(files[0])) if files else None
    if library is None or not hasattr(library, "ggml_quantize_chunk"):
        return None
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (
        ctypes.c_int,
        *(ctypes.c_void_p,) * 2,
        *(ctypes.c_int64,) * 3,
        ctypes.c_void_p,
    )
    return library


def ggml_packed(
    weight_OI: Tensor, kind: "gguf.GGMLQuantizationType", weighed_I: Tensor | None = None
) -> np.ndarray:
    """Return a matrix in one of llama.cpp's formats, by its own code where that is installed.

    `weighed_I`: what an error of each input counts; its own code alone knows that.
    """
    import gguf

    library = ggml_quantizer()
    weight = np.ascontiguousarray(weight_OI.float().numpy())
    if library is None:
        return gguf.quants.quantize(weight, kind)
    outputs, inputs = weight.shape
    per, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.zeros((outputs, inputs // per * size), np.uint8)
    counts = None if weighed_I is None else np.ascontiguousarray(weighed_I.float().numpy())
    library.ggml_quantize_chunk(
        int(kind),
        weight.ctypes.data,
        packed.ctypes.data,
        0,
        outputs,
        inputs,
        None if counts is None else counts.ctypes.data,
    )
    return packed


def k_m_format(path: str, inputs: int, layers: int) -> str:
    """Return the format that llama.cpp's q4_K_M gives to a matrix: more bits for some layers."""
    kind = "Q4_K"
    if path.startswith("embed"):
        kind = "Q6_K"
    elif path.endswith(("v_proj.weight", "down_proj.weight")):
        layer, eighth = int(path.split(".")[1]), layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        kind = "Q6_K" if more else "Q4_K"
    return FALLBACK[kind] if inputs % 256 else kind
