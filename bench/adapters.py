"""Every family beside transformers (`families.py`), and opening a folder: seconds, peak memory.

The folder has the shape of Qwen2.5-0.5B and random weights, made here. Every reading is a process
of its own that imports its library first; the peak is what the kernel saw beyond that. transformers
maps the file and reads nothing until it is used; here every number is read once, to refuse what is
not finite. So there are two times: until the model is there, and until all of it was touched.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import families
from bench.clock import said
from glassformer.adapters.config import Config
from glassformer.adapters.families.qwen import QWEN2
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.registry import QwenAdapter
from glassformer.models.model import build
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
ROUNDS = 5

READ = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
folder, library = sys.argv[1:]
def high():
    text = open("/proc/self/status").read()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024
if library == "glassformer":
    from glassformer.adapters.load import load
    def read(): return load(folder)
else:
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
    def read(): return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
before, cpu = high(), time.process_time()
model = read()
there = time.process_time() - cpu
for p in model.parameters():
    p.detach().aminmax()
touched = time.process_time() - cpu
print(json.dumps({"there": there, "touched": touched, "peak": high() - before}))
"""


def make_folder(place: Path) -> tuple[Path, int]:
    """A folder of that shape with random bfloat16 weights, and the bytes of its weights."""
    spec = QWEN2.spec_of(Config({"model_type": "qwen2"} | SHAPE))
    return _written(spec, place), 2 * count_parameters(spec)


def _written(spec: ModelSpec, place: Path) -> Path:
    model = build(spec, device="meta").to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 / math.sqrt(parameter.shape[-1])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    config = QWEN2.config_of(spec, dtype="bfloat16")
    return export_hf(QwenAdapter(model, config=config), place / "model").folder


def reading(folder: Path, library: str) -> dict[str, float]:
    """One load in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, str(folder), library],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--only", choices=("families", "gguf", "opening"), help="one of its parts")
    parser.add_argument("--type", default="", help="one model_type, of families and gguf")


def run(*, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Rows of parity, and of opening a folder."""
    if asked.only in (None, "families"):
        yield from families.run(asked.type)
    if asked.only in (None, "gguf"):
        yield from families.gguf_rows(asked.type)
    if asked.only in (None, "opening"):
        yield from opening()


def opening() -> Iterator[dict[str, object]]:
    """Rows of CPU seconds on one thread and of peak memory, libraries in turn."""
    with tempfile.TemporaryDirectory() as place:
        folder, size = make_folder(Path(place))
        found: dict[str, list[dict[str, float]]] = {"glassformer": [], "transformers": []}
        reading(folder, "glassformer")  # the file is in memory from here on
        for _ in range(ROUNDS):
            for library, readings in found.items():
                readings.append(reading(folder, library))
    for key, case in (("there", "model there"), ("touched", "all touched")):
        medians = {name: statistics.median(r[key] for r in rows) for name, rows in found.items()}
        for name, median in medians.items():
            yield said(
                "adapters",
                f"Qwen2.5-0.5B's shape, {case}, CPU",
                name,
                round(median * 1e3, 1),
                ratio=round(median / medians["transformers"], 3),
            )
    for name, rows in found.items():
        peak = max(row["peak"] for row in rows)
        yield said(
            "adapters",
            f"peak memory over {size:,} bytes of weights",
            f"{name}: {peak / size:.3f} x",
            ratio=round(peak / size, 3),
        )
