"""Preparing corpora: memory, speed beside the tokenizers library, kills, and how training starts.

The corpus is Python's manuals, repeated in ever new orders as lines of JSON. Memory is the peak of
resident bytes of `glass prepare`, one process without children, as the system counted it. Speed is
a ratio in one run: the library's `encode_batch` on texts in memory, which neither reads, writes nor
keeps anything, and our preparing of a file of the same texts with the same tokenizer, in turns. A
kill comes at a random moment; every file of the folder must be as if it had not come.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.clock import Row, said
from glassformer.data.corpus.prepare import preparing
from glassformer.data.corpus.shards import read_index, read_tokenizer_file
from glassformer.data.tasks.text import read_corpus
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.spec.tasks import PrepareSpec
from glassformer.spec.units import format_bytes, parse_count

KILLS, ROUNDS = 20, 5
SLICE = 8_000_000
VOCABULARY = 16_000


def options(parser: argparse.ArgumentParser) -> None:
    """How large the corpus is."""
    parser.add_argument("--size", default="2G", help="bytes of text; 2G by default")


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Memory and time of the whole, the speed ratio, the start of a training, kills."""
    size = 6_000_000 if quick else parse_count("--size", asked.size)
    with TemporaryDirectory() as name:
        place = Path(name)
        write_corpus(place / "corpus.jsonl", size)
        seconds, peak = prepared_alone(place / "corpus.jsonl", place / "prepared")
        index = read_index(place / "prepared")
        text = sum(index.text_bytes(split) for split in ("train", "val"))
        tokens = sum(index.tokens(split) for split in ("train", "val"))
        case = f"{format_bytes(text)} of text, {os.cpu_count()} cores"
        yield said("corpus", case, f"peak RSS {peak / 1e6:.0f} MB (one process, no children)")
        rate = format_bytes(text / seconds)
        yield said("corpus", case, f"{tokens:,} tokens in {seconds:.0f} s, {rate}/s, learning too")
        yield from starts(place / "prepared", case)
        yield speed(place, min(size, SLICE), rounds=2 if quick else ROUNDS)
        yield killed(place, 2 if quick else KILLS)


def write_corpus(file: Path, size: int, *, seed: int = 0) -> None:
    """Write the manuals as lines of JSON, in new orders until it is enough."""
    texts = [document.text() for document in read_corpus("", seed=0)]
    chance, written = random.Random(seed), 0
    with file.open("w", encoding="utf-8") as out:
        while written < size:
            chance.shuffle(texts)
            for text in texts:
                out.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= size:
                    break


def prepared_alone(source: Path, folder: Path) -> tuple[float, int]:
    """Run `glass prepare` in a process of its own; seconds, and its peak of resident bytes."""
    command = [sys.executable, "-m", "glassformer", "prepare", str(source), "-o", str(folder)]
    began = time.perf_counter()
    child = subprocess.Popen([*command, "--vocab-size", str(VOCABULARY)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)  # its own peak, not an earlier child's
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"preparing ended with {child.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


START = """
import sys, time
import glassformer as gf
from glassformer.data.build_task import build_task
from glassformer.spec.tasks import TextTask
import glassformer.lab.api
began = time.perf_counter()
task = build_task(TextTask(path=sys.argv[1]))
task.batch("train", task.order(batch_size=16, seed=0).rows(0))
first = time.perf_counter() - began
began = time.perf_counter()
run, count = glassformer.lab.api.open_run("lm", [f"task.path={sys.argv[1]}"], name=None,
    runs=glassformer.lab.api.Path(sys.argv[2]), device="cpu", threads=None, resume=False)
with run.directory.locked():
    glassformer.lab.api.begin(run, resume=False, overwrite=False)
    next(run.events())
print(first, time.perf_counter() - began)
"""


def starts(folder: Path, case: str) -> Iterator[Row]:
    """Time the first batch, and the first step of `glass train lm`, from the call on."""
    times = []
    for _ in range(3):
        with TemporaryDirectory() as runs:
            command = [sys.executable, "-c", START, str(folder), runs]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        times.append([float(word) for word in done.stdout.split()])
    batch, step = (statistics.median(column) for column in zip(*times, strict=True))
    yield {**said("corpus", case, "from the call to the first batch"), "median_ms": batch * 1e3}
    yield {**said("corpus", case, "from the call to the first step's end"), "median_ms": step * 1e3}


def speed(place: Path, size: int, *, rounds: int) -> Row:
    """Preparing beside `encode_batch` alone, in turns: `ratio` is our time over theirs."""
    write_corpus(place / "slice.jsonl", size, seed=1)
    lines = (place / "slice.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    tokenizer = read_tokenizer_file(place / "prepared", read_index(place / "prepared"))
    assert isinstance(tokenizer, BytePairs)
    spec = PrepareSpec(tokenizer="given")
    engine = tokenizer._engine
    shares, times = [], []
    for turn in range(rounds + 1):
        began = time.perf_counter()
        engine.encode_batch(texts, add_special_tokens=False)
        theirs = time.perf_counter() - began
        began = time.perf_counter()
        folder = place / f"slice-{turn}"
        for _ in preparing([place / "slice.jsonl"], folder, spec, tokenizer=tokenizer):
            pass
        ours = time.perf_counter() - began
        if turn:  # the first warms both
            shares.append(ours / theirs)
            times.append(ours * 1e3)
    ratio = statistics.median(shares)
    case = f"{format_bytes(size)}, the tokenizer given"
    middle = round(statistics.median(times), 1)
    inverse = round(1 / ratio, 3)
    return said(
        "corpus", case, "prepare / encode_batch", middle, ratio=round(ratio, 3), of_limit=inverse
    )


CHILD = """
import sys
from pathlib import Path
from glassformer.data.corpus.prepare import preparing
from glassformer.spec.tasks import PrepareSpec
spec = PrepareSpec(vocab_size=1000, shard_size=100_000)
for _ in preparing([sys.argv[1]], Path(sys.argv[2]), spec):
    pass
"""


def killed(place: Path, kills: int) -> Row:
    """SIGKILL at a random moment, then the same again to its end: the same files?"""
    source, chance = place / "small.jsonl", random.Random(0)
    write_corpus(source, 1_300_000, seed=2)
    command = [sys.executable, "-c", CHILD, str(source)]
    began = time.perf_counter()
    subprocess.run([*command, str(place / "undisturbed")], check=True)
    whole = time.perf_counter() - began
    expected = files(place / "undisturbed")
    equal = tried = shards = 0
    folder = place / "killed"
    while tried < kills:
        child = subprocess.Popen([*command, str(folder)])
        try:
            child.wait(chance.uniform(0.2, 1.0) * whole)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            tried += 1
            shards += len(list(folder.glob("train-*.bin")))
            subprocess.run([*command, str(folder)], check=True)
            equal += files(folder) == expected
        shutil.rmtree(folder, ignore_errors=True)
    parts = len([name for name in expected if name.startswith("train-") and name.endswith("bin")])
    case = f"SIGKILL, after {shards / tried:.1f} of {parts} shards on average"
    return said("corpus", case, f"{equal} of {tried} equal, every file")


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
