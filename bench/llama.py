"""Decoding compared with builds of llama.cpp: float32, 8 and 4 bits of the same weights.

`--library FILE` names a build, and may be given several times: a libllama.so, or the wheel's
`xllamacpp.abi3.so`, which is among them where `xllamacpp` is installed. A wheel is built for all
machines, with AVX2 at most; so one that was built for this machine must be among them:

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python

(its library is llama_cpp/lib/libllama.so). Rows say which instructions each was built for. The
files that they read are our own exports: f32, q8_0 and q4_0. Each is asked in a process of its own
by plain `llama_decode` calls, with flash attention on, and chooses greedily as we do; the sides
are interleaved. Batch 1 and 8 from a short prompt, and reading a prompt of 512. `--clock cpu
--threads 1` takes CPU time, for a machine that others use. `--keep` writes the rows to
docs/figures-llama.json, with the machine, the commit and the date, and the table of docs/kernels.md
from all that are kept.
"""

import argparse
import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.clock import Row, said
from bench.generate import MEDIUM, TINY, weight_bytes
from bench.serve import make_model
from glassformer.adapters.any_model import export
from glassformer.adapters.load import load
from glassformer.generation.native.arrays import NativePast
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.streaming import generate_batch
from glassformer.kernels.large_pages import LargePages
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts
from glassformer.quant.convert import quantize_model
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4, Int8

#: Ours and the type of llama.cpp's file that it is compared with. Our exports round the tied table
#: as all else, so the heads of ours have as many bits here, which is not their default for INT4.
PAIRS: tuple[tuple[str, QuantSpec | None, str], ...] = (
    ("float32", None, "f32"),
    ("INT8", QuantSpec(scheme=Int8(), head=Int8()), "q8_0"),
    ("INT4", QuantSpec(scheme=Int4(), head=Int4()), "q4_0"),
)
SHORT = 8  # tokens before those that are decoded
LIMIT, OURS = "reading alone", "glassformer"
PEER = Path(__file__).parent / "llama_peer.py"
ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "docs" / "figures-llama.json", ROOT / "docs" / "kernels.md"
TABLE = re.compile(r"(?<=<!-- made: llama -->\n).*?(?=<!-- end: llama -->)", re.S)
#: Named by a library's system information where it was built for this machine's vectors.
WIDE = "AVX512"


def options(parser: argparse.ArgumentParser) -> None:
    """The sizes."""
    parser.add_argument("--library", type=Path, action="append", default=[], help="a build")
    parser.add_argument("--gguf", type=Path, action="append", default=[], help="a model more")
    parser.add_argument("--alone", action="store_true", help="only the models named by --gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--only", action="append", choices=("float32", "INT8", "INT4"))
    parser.add_argument("--keep", action="store_true", help="in docs/figures-llama.json")
    parser.add_argument("--case", action="append", choices=("decode", "prefill", "batch 8"))


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Each model in turn: one of 25 M parameters, and the files that were named."""
    rows = list(measured(quick=quick, asked=asked)) if asked.keep else ()
    yield from rows or measured(quick=quick, asked=asked)
    if rows:
        keep(rows)


def measured(*, quick: bool, asked: argparse.Namespace) -> Iterator[Row]:
    """The rows of every model."""
    libraries = [*wheel(), *asked.library]
    if not libraries:
        yield said("llama", "all", "no build of llama.cpp: --library FILE names one")
        return
    if quick:
        asked.rounds, asked.new, asked.prompt = 1, 4, 32
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory(prefix="glass-llama-") as place:
        if not asked.alone:
            made = make_model(Path(place), TINY if quick else MEDIUM)
            yield from compared(f"Qwen2 {'0.3' if quick else '25'} M", load(made), libraries, asked)
        for file in asked.gguf:
            yield from compared(file.stem, load(file), libraries, asked)


def wheel() -> list[Path]:
    """The library in the wheel of xllamacpp, where that is installed."""
    found = importlib.util.find_spec("xllamacpp")
    places = found.submodule_search_locations if found is not None else None
    files = [file for place in places or () for file in Path(place).glob("xllamacpp*.so")]
    return files[:1]


def compared(
    name: str, adapter: Any, libraries: list[Path], asked: argparse.Namespace
) -> Iterator[Row]:
    """Every pair and case of one model."""
    model: Model = adapter.model
    for ours, spec, kind in PAIRS:
        if asked.only and ours not in asked.only:
            continue
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="glass-llama-"))
            file = Path(folder) / "m.gguf"
            export(adapter, file, to="gguf", dtype=kind)
            theirs: dict[str, Llama] = {}
            for path in libraries:
                llama = Llama(path, file, asked)
                stack.callback(llama.close)
                label = f"llama.cpp, {widest(llama.built)}"
                label += f" ({len(theirs) + 1})" if label in theirs else ""
                theirs[label] = llama
                yield said("llama", f"{name}, {kind}", f"{label}: {path} has {llama.built}")
            if has_wide() and not any(WIDE in llama.built for llama in theirs.values()):
                yield said(
                    "llama", f"{name}, {kind}", "NO BUILD HERE IS FOR THIS MACHINE'S AVX-512"
                )
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
                sides: dict[str, Callable[[], float]] = {
                    label: partial(llama, prompts, new) for label, llama in theirs.items()
                }
                sides[OURS] = partial(stepper, prompts, new)
                threads = f"{asked.threads} thread{'s' * (asked.threads > 1)}"
                title = f"{name}, {ours}, {threads}, {case}, {batch} x "
                title += f"({prompt} + {new}){', CPU time' * (asked.clock == 'cpu')}"
                is_limited = case == "decode" and spec is None and asked.clock == "wall"
                if is_limited:
                    sides[LIMIT] = Reading(new * weight_bytes(model))
                times = taken(sides, asked.rounds)
                yield from shown(times, title)
                if spec is None:
                    equal = all(llama.tokens == stepper.tokens for llama in theirs.values())
                    yield said("llama", title, "the same tokens" if equal else "OTHER TOKENS")


def widest(built: str) -> str:
    """Return the widest vectors among the instructions that a library was built with."""
    return next((each for each in (WIDE, "AVX2", "AVX") if each in built.split()), "no AVX")


def has_wide() -> bool:
    """Does this processor have AVX-512?"""
    facts = Path("/proc/cpuinfo")
    return facts.is_file() and "avx512f" in facts.read_text(encoding="utf-8")


def taken(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds that each side says it took, interleaved: every side in every round."""
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(0.05)  # the threads of the side before fall asleep
            times[name].append(sides[name]())
    return times


def shown(times: dict[str, list[float]], title: str) -> Iterator[Row]:
    """A row for each side; its ratio is the median over rounds of our time over its time."""
    least = times.pop(LIMIT, [])
    for name, values in times.items():
        shares = [ours / theirs for ours, theirs in zip(times[OURS], values, strict=True)]
        pairs = zip(least, values, strict=True) if least else ()
        yield said(
            "llama",
            title,
            f"{name} ({min(values):.1f} to {max(values):.1f} ms)",
            round(median(values), 3),
            ratio=round(median(shares), 3),
            of_limit=round(median(read / all_ for read, all_ in pairs), 3) if least else None,
        )


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
        self.now = time.process_time if asked.clock == "cpu" else time.perf_counter
        self.started = 0.0
        self.tokens: list[list[int]] = []

    def start(self, prompts: Prompts, *, room: int) -> tuple[torch.Tensor, NativePast]:
        found = super().start(prompts, room=room)
        self.started = self.now()
        return found

    def __call__(self, prompts: list[list[int]], new: int) -> float:
        """Milliseconds of choosing so many tokens; where it is one, of reading the prompt."""
        begin = self.now()
        spec = DecodeSpec(max_new_tokens=new)
        made = generate_batch(self, prompts, spec=spec, logprobs=False)
        end = self.now()
        self.tokens = [list(each.tokens) for each in made]
        return 1e3 * (self.started - begin if new == 1 else end - self.started)


class Llama:
    """A build of llama.cpp with a file open, in a process of its own."""

    def __init__(self, library: Path, file: Path, asked: argparse.Namespace) -> None:
        command = [sys.executable, PEER, library.resolve(), file, asked.threads]
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.clock = asked.clock
        self.tokens: list[list[int]] = []
        self.built = " ".join(self._line()["built"])

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp's process ended; what it printed is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def __call__(self, prompts: list[list[int]], new: int) -> float:
        """Milliseconds of choosing so many tokens; where it is one, of reading the prompt."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self.process.stdin.flush()
        answer = self._line()
        self.tokens = answer["tokens"]
        return 1e3 * float(answer[self.clock][0 if new == 1 else 1])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


# --- what is kept ---------------------------------------------------------------------------------


def keep(rows: list[Row]) -> None:
    """Write rows beside those that are kept already, in place of the same ones, and the table."""
    kept: dict[str, dict[str, Any]] = {}
    if KEPT.is_file():
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    facts = {
        "machine": f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    for row in rows:
        if row["median_ms"] is not None:
            label, _, spread = str(row["name"]).partition(" (")
            found = {
                "ms": row["median_ms"],
                "range": spread.rstrip(")"),
                "ours_over_it": row["ratio"],
            }
            kept[f"{row['case']}, {label}"] = found | facts
    text = json.dumps(kept, indent=1, sort_keys=True)
    KEPT.write_text(text + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(kept), page), encoding="utf-8")


def processor() -> str:
    """The processor's name and its widest vectors."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"model name\s*: (.*)", facts)
    return f"{name.group(1) if name else 'a processor'}{' with AVX-512' * has_wide()}"


def table(kept: dict[str, dict[str, Any]]) -> str:
    """A line for each model, precision and case: both builds, our time over theirs, the range."""
    lines = [
        "| model, precision, threads | case | built here (AVX-512) | the wheel (AVX2) | ours, ms |",
        "|---|---|---|---|---|",
    ]
    order = [ours for ours, _, _ in PAIRS]
    cases = {key.rpartition(f", {OURS}")[0] for key in kept if key.endswith(f", {OURS}")}
    for case in sorted(cases, key=lambda case: (order.index(case.split(", ")[1]), case)):
        model, precision, threads, what, *rest = case.split(", ")
        cells = [kept.get(f"{case}, llama.cpp, {built}") for built in (WIDE, "AVX2")]
        said = [
            f"{cell['ours_over_it']:.2f} ({cell['ms']:.0f} ms)" if cell else "" for cell in cells
        ]
        ours = kept[f"{case}, {OURS}"]
        clock = " of CPU time" if rest[-1] == "CPU time" else ""
        size = rest[0]
        lines.append(
            f"| {model}, {precision}, {threads} | {what}, {size} | {said[0]} | {said[1]} "
            f"| {ours['ms']:.0f}{clock} ({ours['range'].removesuffix(' ms')}) |"
        )
    facts = {f"{row['machine']}, commit {row['commit']}, {row['date']}" for row in kept.values()}
    return "\n".join((*lines, "", f"Measured on: {'; '.join(sorted(facts))}.")) + "\n"
