"""llama.cpp as a process: a library and a file, then a line of JSON for each call.

`python bench/llama_peer.py LIBRARY FILE THREADS` loads libllama (or the wheel's extension module,
which exports the same functions) and asks it by plain `llama_decode` calls: flash attention on, all
else as llama.cpp has it, greedy. Only the standard library and NumPy are imported. The first line
says which instructions the library was built for.
"""

import ctypes
import json
import sys
import time
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_void_p

import numpy as np

CONTEXT, SEQUENCES = 8 * 1024, 8
#: Where `llama_context_params` has what is set here, in bytes, and its default, which is compared.
FIELDS = {
    "n_ctx": (0, 512),
    "n_batch": (4, 2048),
    "n_ubatch": (8, 512),
    "n_seq_max": (12, 1),
    "n_threads": (28, 4),
    "n_threads_batch": (32, 4),
    "flash_attn_type": (52, -1),
}
ENABLED = 1


class Params(Structure):
    """A struct of parameters of any version: only its first bytes are read here."""

    _fields_ = (("bytes", ctypes.c_ubyte * 1024),)


class Batch(Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class Llama:
    """A file opened by a build of llama.cpp."""

    def __init__(self, library: str, file: str, threads: int) -> None:
        self.lib = lib = ctypes.CDLL(library)
        self.silence = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
        lib.llama_log_set(self.silence, None)
        for name, result, *arguments in (
            ("llama_print_system_info", c_char_p),
            ("llama_model_default_params", Params),
            ("llama_context_default_params", Params),
            ("llama_model_load_from_file", c_void_p, c_char_p, Params),
            ("llama_init_from_model", c_void_p, c_void_p, Params),
            ("llama_model_get_vocab", c_void_p, c_void_p),
            ("llama_vocab_n_tokens", c_int32, c_void_p),
            ("llama_get_memory", c_void_p, c_void_p),
            ("llama_memory_clear", None, c_void_p, c_bool),
            ("llama_batch_init", Batch, c_int32, c_int32, c_int32),
            ("llama_decode", c_int32, c_void_p, Batch),
            ("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        lib.llama_backend_init()
        params = lib.llama_context_default_params()
        at = {name: c_int32.from_buffer(params, place) for name, (place, _) in FIELDS.items()}
        other = {name for name, (_, value) in FIELDS.items() if at[name].value != value}
        if other:
            sys.exit(f"{library}: another version, in which these are elsewhere: {sorted(other)}")
        at["n_ctx"].value, at["n_seq_max"].value = CONTEXT, SEQUENCES
        at["n_threads"].value = at["n_threads_batch"].value = threads
        at["flash_attn_type"].value = ENABLED
        self.model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
        self.context = self.model and lib.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit(f"{library} does not open {file}")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(2048, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, logits or not) at once; the likeliest where asked."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        get, shape = self.lib.llama_get_logits_ith, (self.vocab,)
        return [
            int(np.ctypeslib.as_array(get(self.context, i), shape).argmax())
            for i, row in enumerate(rows)
            if row[3]
        ]

    def __call__(self, prompts: list[list[int]], new: int) -> dict[str, object]:
        """Read the prompts, then choose so many tokens for each: seconds of both, and tokens."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        clocks = [(time.perf_counter(), time.process_time())]
        rows = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        chosen = [self.decode(rows)]
        clocks.append((time.perf_counter(), time.process_time()))
        while len(chosen) < new:
            place = len(prompts[0]) + len(chosen) - 1
            chosen.append(self.decode([(t, place, s, True) for s, t in enumerate(chosen[-1])]))
        clocks.append((time.perf_counter(), time.process_time()))
        (a, x), (b, y), (c, z) = clocks
        tokens = [list(each) for each in zip(*chosen, strict=True)]
        return {"wall": (b - a, c - b), "cpu": (y - x, z - y), "tokens": tokens}


def main() -> None:
    """Answer a line for a line."""
    library, file, threads = sys.argv[1:]
    llama = Llama(library, file, int(threads))
    info = llama.lib.llama_print_system_info().decode()
    named = [word.split(" = ") for word in info.replace("CPU :", "").split("|") if " = " in word]
    print(json.dumps({"built": [k.strip() for k, v in named if v.strip() == "1"]}), flush=True)
    for line in sys.stdin:
        print(json.dumps(llama(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
