"""Decoding beside llama.cpp (`xllamacpp`): float32, 8 and 4 bits of the same weights.

The files that llama.cpp reads are our own exports: f32, q8_0 and q4_0. Batch 1 and 8 from a short
prompt, and reading a prompt of 512. By the wall clock llama.cpp's time is the one that it reports
itself, without requests and text. On a machine that others use, `--clock cpu --threads 1` compares
the work: the processor time of this process during each call, with reading the short prompt.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.clock import Row, installed, rows, said
from bench.generate import MEDIUM, TINY, weight_bytes
from bench.serve import make_model
from glassformer.adapters.any_model import export
from glassformer.adapters.load import load
from glassformer.generation.fast.native import NativePast
from glassformer.generation.fast.native_stepper import NativeStepper
from glassformer.generation.prompts import Prompts
from glassformer.generation.streaming import generate_batch
from glassformer.kernels.large_pages import LargePages
from glassformer.models.model import Model
from glassformer.quant.convert import quantize_model
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4, Int8

#: Ours and the type of llama.cpp's file that it stands beside. Our exports round the tied table as
#: all else, so the heads of ours have as many bits here, which is not their default for INT4.
PAIRS: tuple[tuple[str, QuantSpec | None, str], ...] = (
    ("float32", None, "f32"),
    ("INT8", QuantSpec(scheme=Int8(), head=Int8()), "q8_0"),
    ("INT4", QuantSpec(scheme=Int4(), head=Int4()), "q4_0"),
)
SHORT = 8  # tokens before those that are decoded
LIMIT = "reading alone"


def options(parser: argparse.ArgumentParser) -> None:
    """The sizes."""
    parser.add_argument("--gguf", type=Path, action="append", default=[], help="a model more")
    parser.add_argument("--alone", action="store_true", help="only the models named by --gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--only", action="append", choices=("float32", "INT8", "INT4"))
    parser.add_argument("--case", action="append", choices=("decode", "prefill", "batch 8"))


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Each model in turn: one of 25 M parameters, and the files that were named."""
    if not installed("xllamacpp"):
        yield said("llama", "all", "xllamacpp is not installed")
        return
    if quick:
        asked.rounds, asked.new, asked.prompt = 1, 4, 32
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory(prefix="glass-llama-") as place:
        if not asked.alone:
            made = make_model(Path(place), TINY if quick else MEDIUM)
            yield from beside(f"Qwen2 {'0.3' if quick else '25'} M", load(made), asked)
        for file in asked.gguf:
            yield from beside(file.stem, load(file), asked)


def beside(name: str, adapter: Any, asked: argparse.Namespace) -> Iterator[Row]:
    """Every pair and case of one model."""
    model: Model = adapter.model
    for ours, spec, kind in PAIRS:
        if asked.only and ours not in asked.only:
            continue
        with tempfile.TemporaryDirectory(prefix="glass-llama-") as place:
            export(adapter, Path(place) / "m.gguf", to="gguf", dtype=kind)
            theirs = Llama(Path(place) / "m.gguf", asked)
            quantized = model if spec is None else quantize_model(copy.deepcopy(model), spec)
            stepper = Clocked(quantized, asked)
            for case, batch, prompt, new in (
                ("decode", 1, SHORT, asked.new),
                ("prefill", 1, asked.prompt, 1),
                ("batch 8", 8, SHORT, asked.new),
            ):
                if asked.case and case not in asked.case:
                    continue
                generator = torch.Generator().manual_seed(1)
                high = model.spec.vocab_size
                prompts = torch.randint(3, high, (batch, prompt), generator=generator).tolist()
                sides = {
                    f"llama.cpp, {kind}": partial(theirs, prompts, new),
                    f"glassformer, {ours}": partial(stepper, prompts, new),
                }
                title = f"{name}, {asked.threads} threads, {case}, {batch} x ({prompt} + {new})"
                if asked.clock == "cpu":
                    title += ", CPU time"
                is_limited = case == "decode" and spec is None and asked.clock == "wall"
                if is_limited:
                    sides[LIMIT] = Reading(new * weight_bytes(model))
                times = taken(sides, asked.rounds)
                least = times.pop(LIMIT, [])
                for row in rows(times, bench="llama", case=title, baseline=f"llama.cpp, {kind}"):
                    if is_limited:
                        pairs = zip(least, times[str(row["name"])], strict=True)
                        row["of_limit"] = round(median(read / all_ for read, all_ in pairs), 3)
                    yield row


def taken(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds that each side says it took, side by side in every round."""
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in (*sides,)[:: 1 if turn % 2 else -1]:
            times[name].append(sides[name]())
    return times


class Reading:
    """Milliseconds that reading so many bytes takes, in every round anew: others use the memory."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.halves = torch.from_numpy(LargePages().empty((2, 1 << 25))).fill_(1.0)

    def __call__(self) -> float:
        """The median of five products of two large vectors, scaled."""
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            float(torch.dot(*self.halves))
            seconds.append(time.perf_counter() - begin)
        return 1e3 * median(seconds) * self.count / self.halves.nbytes


class Clocked(NativeStepper):
    """The native step that knows when it had read the prompts."""

    def __init__(self, model: Model, asked: argparse.Namespace) -> None:
        super().__init__(model)
        self.processor = asked.clock == "cpu"
        self.started = 0.0

    def start(self, prompts: Prompts, *, room: int) -> tuple[torch.Tensor, NativePast]:
        found = super().start(prompts, room=room)
        self.started = time.perf_counter()
        return found

    def __call__(self, prompts: list[list[int]], new: int) -> float:
        """Milliseconds of decoding so many tokens; of one, of reading the prompt."""
        begin, worked = time.perf_counter(), time.process_time()
        generate_batch(self, prompts, spec=DecodeSpec(max_new_tokens=new), logprobs=False)
        if self.processor:
            return 1e3 * (time.process_time() - worked)
        return 1e3 * (self.started - begin if new == 1 else time.perf_counter() - self.started)


class Llama:
    """A file opened by llama.cpp, in this process."""

    def __init__(self, file: Path, asked: argparse.Namespace) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_parallel, params.n_ctx = 8, 8 * 1024
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
        params.warmup, params.verbosity, params.port = True, 0, 0
        self.server = xllamacpp.Server(params)
        self.processor = asked.clock == "cpu"

    def __call__(self, prompts: list[list[int]], new: int) -> float:
        """Milliseconds of decoding so many tokens; of one, of reading the prompt."""
        begin = time.process_time()
        with ThreadPoolExecutor(len(prompts)) as pool:
            made = list(pool.map(lambda prompt: self.one(prompt, new), prompts))
        if self.processor:
            return 1e3 * (time.process_time() - begin)
        return max(
            answer["timings"]["prompt_ms" if new == 1 else "predicted_ms"] for answer in made
        )

    def one(self, prompt: list[int], new: int) -> Any:
        """One answer, of exactly so many tokens."""
        asked = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        return self.server.handle_completions({**asked, "cache_prompt": False})
