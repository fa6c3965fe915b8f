"""Processes: freed memory, which devices exist, and several processes for one run.

Those are started by torchrun, or by `--nproc`, which calls its agent. A process that torchrun
started finds its rank in the environment, which is read here and nowhere else. One rank reports to
people; all of them end with the same exit code.
"""

import contextlib
import ctypes
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import typer

from glassformer.cli.shell.terminal import tell
from glassformer.spec.errors import GlassError, InputError, MachineError

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.training.distributed import Ranks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST, KEPT = 32 << 20, 1 << 30  # glibc takes no larger threshold for maps
#: Starts after one that ended because a process was killed.
RESTARTS = 3
#: Seconds that processes have to save and end when a stop is requested.
GRACE = 300


def keep_freed_memory() -> bool:
    """Keep arrays of up to 32 MB for the next step instead of giving them back to the system.

    By default glibc maps each large array anew, and the system fills every page with zeros: a fifth
    of the time of a small language model's step. Where the C library has no such setting nothing
    is done; results are the same bits.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, KEPT))


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Import libraries and open a model without the garbage collector, which would find nothing.

    Everything made in this block lives as long as the command, and torch alone is half a million
    objects: going over them again and again took an eighth of the time to a first token. What is
    there at the end is left out of later collections too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def load_by(path: str, backend: str, *, device: str, large_pages: bool = True) -> "BaseAdapter":
    """Open a model, computed by our parts or by transformers, which is said once."""
    from glassformer.adapters.load import Backend, load

    model = load(path, device=device, backend=cast(Backend, backend), large_pages=large_pages)
    if backend == "transformers":
        tell(
            "note: transformers computes this model, without a cache of ours: "
            "each token reads the text once more"
        )
    return model


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let the kernel end the process on Ctrl-C, while there is nothing to save yet.

    Python's exception can come within an import's own callbacks, which swallow it: the run would
    begin as if nobody had asked.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:  # not the main thread, which alone receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def check_device(device: str) -> str:
    """Return the device to compute on, `auto` resolved; refuse one that this machine lacks."""
    number = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device)
    if number is None and device not in ("cpu", "mps", "auto"):
        raise InputError(f"unknown device '{device[:60]}'", hint="auto, cpu, cuda, cuda:1 or mps")
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if number is None:
        if not torch.backends.mps.is_available():
            raise MachineError("no Apple GPU on this machine", hint="--device cpu")
        return device
    if not torch.cuda.is_available():
        raise MachineError("no CUDA device on this machine", hint="--device cpu")
    if int(number[1] or 0) >= torch.cuda.device_count():
        raise MachineError(
            f"no device {device} on this machine", hint=f"it has {torch.cuda.device_count()}"
        )
    return device


def is_a_rank() -> bool:
    """Return True in a process that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def was_restarted() -> bool:
    """Return True where torchrun starts this process again: the run must go on, not begin."""
    return is_a_rank() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def join(device: str) -> "Ranks":
    """Join the other processes that torchrun started; each takes the GPU of its number."""
    from glassformer.training.distributed import Ranks

    local = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    if device.startswith("cuda"):
        import torch

        count = torch.cuda.device_count()
        if device != "cuda" or local >= count:
            raise MachineError(
                f"rank {rank} has no GPU of its own: process {local} of a machine with {count}",
                hint=f"--device cuda, and {count} processes a machine",
            )
        torch.cuda.set_device(local)
    return Ranks.join(
        rank=rank,
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=local,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=device,
    )


@contextlib.contextmanager
def reporting(ranks: "Ranks") -> Iterator[None]:
    """Let one rank alone report an error: the others end without a word."""
    try:
        yield
    except Exception as error:
        if not ranks.is_first_to_fail():
            raise typer.Exit(error.exit_code if isinstance(error, GlassError) else 1) from error
        if ranks.rank and isinstance(error, GlassError):
            tell(f"on rank {ranks.rank}:")
        raise


def launch(nproc: int) -> int:
    """Start this command in `nproc` processes, and again with --resume if one was killed.

    torchrun's agent starts and watches them. It would also restart after a bad input, in vain.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if nproc < 1:
        raise InputError(f"--nproc {nproc} is below 1", hint="the number of processes")
    if is_a_rank():
        raise InputError("--nproc inside torchrun", hint="torchrun has started the processes")
    logging.disable(logging.CRITICAL)  # the agent's; here is nothing else that logs
    # Without the first, processes that are started again meet in the store of those that ended.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer that ended is reported once
    arguments = _without_nproc(sys.argv[1:])
    for left in reversed(range(RESTARTS + 1)):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="glass",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "glassformer", *arguments)
        except SignalException as signalled:
            return 128 + signalled.sigval
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            # Of the others the agent ends some itself, and some have only lost contact.
            killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
            reported = [code for code in codes.values() if code > 0]
            if reported and not killed:
                return min(reported, key=lambda code: code == MachineError.exit_code)
            killed = killed or [*codes]
            names = ", ".join(f"rank {rank} by signal {-codes[rank]}" for rank in killed)
            if not left:
                tell(f"killed: {names}; go on with --resume")
                return 128 - codes[killed[0]]
            tell(f"killed: {names}; starting again from the last checkpoint")
            arguments = [word for word in arguments if word not in ("--overwrite", "--resume")]
            arguments.append("--resume")
        else:
            return 0
    raise AssertionError("the last start returns")


def _without_nproc(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip or word == "--nproc":
            skip = not skip
        elif not word.startswith("--nproc="):
            kept.append(word)
    return kept
