"""Planted faults of reading and of writing GGUF, and the case that must show each."""

from tests.checks.faults import Fault

SETTINGS = "adapters.gguf.config:read_settings"
READING = [
    Fault(
        "rows not reordered",
        "adapters.gguf.config:table_of",
        "one.turned and",
        "False and",
        "llama",
    ),
    Fault(
        "Qwen reordered too",
        "adapters.gguf.config:table_of",
        "one.turned and",
        "",
        "qwen2 tied",
    ),
    Fault(
        "k not reordered",
        "adapters.gguf.config:table_of",
        "part in TURNED",
        'part == "attn_q"',
        "llama",
    ),
    Fault(
        "reordered the other way",
        "adapters.table:Interleaved.split",
        "(self.turned or self.d_head) // 2, 2",
        "2, (self.turned or self.d_head) // 2",
        "llama",
    ),
    Fault("tied forgotten", SETTINGS, '"output.weight" not in tensors', "False", "smollm2"),
    Fault(
        "theta dropped",
        SETTINGS,
        "found.number(THETA)",
        "found.number(THETA) * 0 + 1e4",
        "qwen2 tied",
    ),
    Fault(
        "eps of another family",
        SETTINGS,
        "found.number(made.eps[1])",
        "found.number(made.eps[1]) * 0 + 1e-6",
        "llama",
    ),
    Fault("bias dropped", SETTINGS, "tensor in tensors for", "False for", "llama3 biases"),
    Fault(
        "head's width dropped",
        "adapters.gguf.config:_head_width",
        "return width",
        "return usual",
        "qwen3 wide heads",
    ),
    Fault("factors dropped", SETTINGS, "if factors is not None:", "if False:", "llama3 biases"),
    Fault(
        "yarn's context dropped",
        "adapters.gguf.config:_scaling",
        '"original_max_position_embeddings"] = original',
        '"original_max_position_embeddings"] = context',
        "qwen3 yarn",
    ),
    Fault(
        "linear scaling dropped",
        "adapters.gguf.config:_scaling",
        'kind == "none"',
        'kind != "yarn"',
        "linear rope",
    ),
    Fault(
        "dimensions not turned around",
        "adapters.gguf.header:_Cursor.stored",
        "reversed(",
        "list(",
        "llama",
    ),
]

WRITING = [
    Fault(
        "written as it is",
        "adapters.table:Interleaved.join",
        "tensor[self._order(len(tensor), 2, (self.turned or self.d_head) // 2)]",
        "tensor",
        "llama",
    ),
    Fault(
        "theta not written",
        "adapters.gguf.config:write_settings",
        "10_000.0 if turned is None else float(turned.base)",
        "10_000.0",
        "qwen2 tied",
    ),
    Fault(
        "eps not as it was",
        "adapters.gguf.config:write_settings",
        "float(config[one.eps[0]])",
        "2 * float(config[one.eps[0]])",
        "llama",
    ),
]
