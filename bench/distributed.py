"""Several processes beside one: the same losses, weights and moments, whatever the world size.

Every preset at a small size in float64, with batches of uneven lengths and a short last one of each
epoch: two ranks over gloo beside one process, as copies (DDP) and sharded (FSDP2), one and three
batches a step. Then runs that stop on two ranks, go on alone and end on two; and a run whose ranks
are killed under torchrun. `--plan` prints what eight H200 would do, on paper.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.clock import said
from glassformer.costs.timing import shared_step
from glassformer.data.build_task import build_task
from glassformer.spec import presets
from glassformer.spec.manifest import count_parameters, stored
from glassformer.spec.serialize import override, to_json
from glassformer.spec.tasks import DigitsTask, FsmTask, SequenceTask
from glassformer.spec.train import CosineSchedule, RunSpec, TrainSpec

STEPS, KILLS = 20, 10
#: What our compiled step reached on an H200 (`bench training`), and its NVLink one way, data sheet.
TFLOPS, GIGABYTES = 436.0, 450.0


def options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--plan", action="store_true", help="eight GPUs on paper, nothing is run")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"default {KILLS}")
    parser.add_argument("--only", choices=("equal", "crossing", "kills"), help="one part")
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="plan: of one GPU")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="plan: a second")


def small(name: str) -> RunSpec:
    """A preset at a size of seconds, on a task that has answers for its heads."""
    fsm = FsmTask(machine="random-3", max_length=9, examples=300, longer=2)
    made = build_task(fsm)
    known = {"max_seq_len": 24, "d_model": 16, "n_heads": 2, "d_ff": 24, "n_layers": 2}
    task: Any = fsm
    if name == "digits":
        task = DigitsTask(examples=300, max_length=5)
    elif name.startswith("seq2seq"):
        task = SequenceTask(vocab_size=11, min_length=2, max_length=7, examples=300, longer=1)
        known |= {"vocab_size": 11, "dropout": 0.0}
    else:
        known["vocab_size"] = made.tokenizer.vocab_size
    if name.startswith("fsm"):
        known |= {"num_classes": made.heads["class"], "num_states": made.heads["state"]}
    if name in ("modern-lm", "moe", "qwen", "qwen-sliding"):
        known["n_kv_heads"] = 1
    if name.startswith("qwen"):
        known["d_head"] = 8
    train = TrainSpec(
        steps=STEPS,
        batch_size=14,
        lr=1e-2,
        precision="float64",
        schedule=CosineSchedule(warmup=5),
        evaluate_every=7,
        evaluate_examples=33,
        checkpoint_every=5,
    )
    return RunSpec(model=presets.preset(name, **known), task=task, train=train)


# --- what two ranks compute -----------------------------------------------------------------------


def gaps(run: RunSpec, ranks: Any, *, sharded: bool) -> tuple[float, float]:
    """The worst difference of losses, and of weights and moments, from those of one process.

    Not of weights whose gradient is 0 by theory: it is all rounding, which Adam makes large.
    """
    import torch

    from glassformer.models.model import build
    from glassformer.training.distributed import DistributedEngine
    from glassformer.training.fit import fit
    from glassformer.training.torch_engine import TorchEngine

    def model() -> Any:
        return build(run.model, generator=torch.Generator().manual_seed(0)).double()

    task = build_task(run.task)
    alone = TorchEngine(model(), run.train)
    ours = DistributedEngine(model(), run.train, ranks, sharded=sharded)
    losses = [[record.objective for record in fit(e, task, run.train)] for e in (alone, ours)]
    idle = {name for name, p in stored(run.model).items() if p.zero_gradient}
    theirs, mine = ({**e.state(), **e.weights()} for e in (alone, ours))
    assert theirs.keys() == mine.keys()
    arrays = [np.abs(theirs[name] - mine[name]).max() for name in theirs if name not in idle]
    return float(np.abs(np.subtract(*losses)).max()), float(max(arrays))


def equal(names: list[str], rank: int, folder: Path) -> None:
    """One of two processes; rank 0 writes a line for each case."""
    import torch

    from glassformer.training.distributed import Ranks

    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    ranks = Ranks.join(rank=rank, size=2, local_rank=rank, local_size=2, meeting=meeting)
    for name in names:
        for accumulate in (1, 3):
            run = override(small(name), [f"train.accumulate={accumulate}"])
            for sharded in (False, True):
                loss, weight = gaps(run, ranks, sharded=sharded)
                kind = "FSDP2" if sharded else "DDP"
                if rank == 0:
                    print(json.dumps([name, accumulate, kind, loss, weight]), flush=True)
    ranks.leave()


def pairs(names: list[str]) -> Iterator[dict[str, object]]:
    """A row for each preset, number of batches and way of sharing."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.distributed", ",".join(names), folder]
        children = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True
            )
            for rank in range(2)
        ]
        assert children[0].stdout is not None
        for line in children[0].stdout:
            name, accumulate, kind, loss, weight = json.loads(line)
            case = f"{name}, {accumulate} batch{'es' if accumulate > 1 else ''} a step, {kind}"
            verdict = "ok" if max(loss, weight) <= 1e-12 else "DIFFERS"
            yield row(case, f"losses {loss:.1e}, weights {weight:.1e}: {verdict}")
        if any(child.wait() for child in children):
            raise RuntimeError("a rank failed")


# --- runs -----------------------------------------------------------------------------------------


def command(run: Path, *, name: str, ranks: int, more: tuple[str, ...] = ()) -> list[str]:
    """`glass train` of a config, alone or under torchrun."""
    train = ["-m", "glassformer", "train", str(run), "--name", name, "--threads", "1", "--resume"]
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        start += [
            "--max-restarts",
            "20",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
    return [*start, *train, *more]


def environment() -> dict[str, str]:
    """The variables of a process: restarted ones must not meet in the store of those that died."""
    return {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def losses_of(folder: Path) -> list[float]:
    """The loss of every step in metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for text in lines if "loss" in (line := json.loads(text))]


def weights_file(folder: Path) -> bytes:
    """The last checkpoint's weights."""
    last = (folder / "checkpoints" / "last").read_text().strip()
    return (folder / "checkpoints" / last / "model.safetensors").read_bytes()


def crossing() -> Iterator[dict[str, object]]:
    """Stop on two ranks, go on alone, end on two; copies and sharded."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        spec = override(small("core"), ["train.checkpoint_every=1"])
        (folder / "run.json").write_text(to_json(spec))

        def go(name: str, ranks: int, steps: int, *more: str) -> None:
            given = command(folder / "run.json", name=name, ranks=ranks, more=more)
            subprocess.run(
                [*given, "--steps", str(steps)], cwd=folder, env=environment(), check=True,
                capture_output=True,
            )  # fmt: skip

        # the schedule depends on the last step: a run of fewer steps would have other rates
        spec = override(spec, ['train.schedule={"kind": "ConstantSchedule"}'])
        (folder / "run.json").write_text(to_json(spec))
        go("alone", 1, STEPS)
        for kind, more in (("DDP", ()), ("FSDP2", ("--fsdp",))):
            for steps, ranks in ((7, 2), (13, 1), (STEPS, 2)):
                go(kind, ranks, steps, *(more if ranks > 1 else ()))
            both = [losses_of(folder / "runs" / name) for name in ("alone", kind)]
            worst = float(np.abs(np.subtract(*both)).max())
            name = f"losses {worst:.1e}: {'ok' if worst <= 1e-12 else 'DIFFERS'}"
            yield row(f"2 ranks, then 1, then 2, {kind}, float64", name)


def kills(count: int) -> Iterator[dict[str, object]]:
    """A rank killed `count` times under torchrun, with dropout: the bits of an undisturbed run."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        more = [
            "train.precision=float32", "model.decoder.dropout=0.1", "train.checkpoint_every=5",
            "train.steps=600", "train.evaluate_every=150",
        ]  # fmt: skip
        (folder / "run.json").write_text(to_json(override(small("core"), more)))
        start = command(folder / "run.json", name="whole", ranks=2)
        subprocess.run(start, cwd=folder, env=environment(), check=True, capture_output=True)
        began, done, chance = time.perf_counter(), 0, random.Random(0)
        start = command(folder / "run.json", name="killed", ranks=2)
        log = (folder / "log").open("w")
        agent = subprocess.Popen(start, cwd=folder, env=environment(), stdout=log, stderr=log)
        run, victims = folder / "runs" / "killed", []
        while agent.poll() is None:
            time.sleep(0.05)
            workers = children_of(agent.pid)
            steps = len(losses_of(run)) if (run / "metrics.jsonl").exists() else 0
            # once the run goes on again, at a random moment
            if done < count and len(workers) == 2 and steps > 600 * done // (count + 2):
                time.sleep(chance.uniform(0.0, 0.5))
                victim = chance.randrange(2)
                victims.append(victim)
                os.kill(workers[victim], signal.SIGKILL)
                done += 1
                while agent.poll() is None and set(children_of(agent.pid)) & set(workers):
                    time.sleep(0.05)
        same = [losses_of(folder / "runs" / name) for name in ("whole", "killed")]
        ended = agent.returncode == 0
        bits = ended and same[0] == same[1]
        bits = bits and weights_file(folder / "runs" / "whole") == weights_file(run)
        name = f"{'ended' if ended else 'FAILED'}, {'same bits' if bits else 'OTHER BITS'}"
        seconds = (time.perf_counter() - began) * 1e3
        yield {**row(f"{done} kills, of rank 0 {victims.count(0)}", name), "median_ms": seconds}


def children_of(pid: int) -> list[int]:
    """The processes of the ranks, in their order."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                text = (folder / "environ").read_bytes().split(b"\0")
                ranks = [int(word[5:]) for word in text if word.startswith(b"RANK=")]
                found.update(dict.fromkeys(ranks, int(folder.name)))
        except (OSError, ValueError, IndexError):
            continue  # it has ended
    return [found[rank] for rank in sorted(found)]


# --- on paper -------------------------------------------------------------------------------------


def plan(tflops: float, gigabytes: float) -> Iterator[dict[str, object]]:
    """Eight GPUs in one machine: bytes of a step, efficiency and memory, from `costs`."""
    models = {
        "GPT-2's parts": presets.core(
            vocab_size=50_257, d_model=768, n_heads=12, d_ff=3072, n_layers=12, max_seq_len=1024
        ),
        "Llama's parts": presets.modern_lm(
            vocab_size=32_000, d_model=2048, n_heads=16, n_kv_heads=16, d_ff=5632, n_layers=24,
            max_seq_len=2048,
        ),
        "Llama 7B's": presets.modern_lm(
            vocab_size=32_000, d_model=4096, n_heads=32, n_kv_heads=32, d_ff=11_008, n_layers=32,
            max_seq_len=2048,
        ),
    }  # fmt: skip
    for name, model in models.items():
        length, size = model.max_seq_len, count_parameters(model)
        rows = 32 * 1024 // length
        for sharded in (False, True):
            found = shared_step(
                model, ranks=8, batch=rows, length=length, sharded=sharded,
                flops_a_second=tflops * 1e12, bytes_a_second=gigabytes * 1e9,
            )  # fmt: skip
            case = f"{name}, {size / 1e6:,.0f} M, {rows} x {length} on each of 8"
            text = (
                f"{'FSDP2' if sharded else 'DDP'}: {found.sent / 1e9:.2f} GB sent in "
                f"{found.wire_seconds * 1e3:.1f} ms, {found.efficiency:.1%} efficient, "
                f"{found.memory / 2**30:.1f} GiB without activations"
            )
            yield {**row(case, text), "median_ms": found.compute_seconds * 1e3}


row = partial(said, "distributed")


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """All of it; `--quick` takes two presets and two kills."""
    if asked.plan:
        yield from plan(asked.tflops, asked.gigabytes)
        return
    if asked.only in (None, "equal"):
        yield from pairs(["digits", "moe"] if quick else [*presets.PRESETS])
    if asked.only in (None, "crossing"):
        yield from crossing()
    if asked.only in (None, "kills"):
        yield from kills(2 if quick else asked.kills)


if __name__ == "__main__":
    equal(sys.argv[1].split(","), int(sys.argv[3]), Path(sys.argv[2]))
