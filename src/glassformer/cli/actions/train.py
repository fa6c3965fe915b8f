"""Run `glass train`: start or resume a run, handle signals, print progress."""

import json
import signal
import time
from pathlib import Path
from typing import Any

from glassformer.cli.shell.output import end
from glassformer.cli.shell.process import check_device, keep_freed_memory
from glassformer.cli.shell.ranks import is_a_rank, join, reporting, was_restarted
from glassformer.cli.shell.resolve import find_model
from glassformer.cli.shell.terminal import tell
from glassformer.kernels.threads import taking
from glassformer.lab import api
from glassformer.lab.finetune.recipe import NAME as FINETUNE
from glassformer.lab.next_steps import after_training, before_training, trained_text
from glassformer.lab.runs.assemble import Peers
from glassformer.lab.runs.process import stopping
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import json_numbers


def found_base(overrides: list[str], runs: Path) -> list[str]:
    """Resolve `base=NAME` as MODEL is resolved in every other command."""
    made = []
    for text in overrides:
        key, _, value = text.partition("=")
        made.append(f"base={find_model(value, runs=runs)}" if key == "base" and value else text)
    return made


def train(
    what: str,
    overrides: list[str],
    *,
    name: str | None,
    runs: Path,
    device: str,
    threads: int | None,
    fsdp: bool = False,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Train, handle signals, print the result, and return the exit code."""
    device = check_device(device)
    keep_freed_memory()
    if resume and overwrite:
        raise InputError(
            "--resume goes on with the run, --overwrite starts it anew",
            hint="leave out one of the two",
        )
    overrides = found_base(overrides, runs) if what == FINETUNE else overrides
    options = {"name": name, "runs": runs, "device": device, "threads": threads}
    if not is_a_rank():
        if fsdp:
            raise InputError("--fsdp shards over several processes", hint="--nproc N, or torchrun")
        return _train(what, overrides, resume, overwrite, as_json, options)
    if was_restarted():
        resume, overwrite = True, False
    ranks = join(device)
    with reporting(ranks):
        peers = Peers(ranks, sharded=fsdp)
        code = _train(what, overrides, resume, overwrite, as_json, options | {"peers": peers})
        ranks.leave()
    return code


def _train(
    what: str,
    overrides: list[str],
    resume: bool,
    overwrite: bool,
    as_json: bool,
    options: dict[str, Any],
) -> int:
    run, count = api.open_run(what, overrides, resume=resume, **options)
    reports = run.directory.writes  # one of several processes
    for note in run.notes if reports else ():
        tell(note)
    began, code = time.perf_counter(), 0
    with run.directory.locked(), stopping(run.request_stop) as caught, taking(count):
        notes = api.begin(run, resume=resume, overwrite=overwrite)
        if reports:
            for line in [*notes, *before_training(run, threads=count)]:
                tell(line)
        began = time.perf_counter()
        api.follow(run, progress=reports)
    if run.stopped:
        code = 128 + (caught[0] if caught else signal.SIGINT)
    if not reports:
        return code
    if run.stopped:
        tell(f"stopped at step {run.progress.step}, state saved; go on with --resume")
    result = api.result_of(run)
    result["seconds"] = round(time.perf_counter() - began, 2)
    if as_json:
        print(json.dumps(json_numbers(result), allow_nan=False))
    else:
        print(trained_text(run, result), flush=True)
        end("", after_training(run))
    return code
