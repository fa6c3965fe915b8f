"""The record that a run writes about itself: metrics, specs, hashes, TensorBoard events.

The hash of the data is checked before any of it is shown: a run may come from a stranger, and its
config.json may name any file that its reader can read, such as a key; only someone who has read a
file can record its hash. The fingerprint lists what a run's bits depend on besides its spec.
TensorBoard events are written if that package is installed, to a file that names no host.
"""

import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.data.task import Task
from glassformer.lab.show import toml_text
from glassformer.spec import tasks
from glassformer.spec.disk import create, small_text
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.own import OwnTask
from glassformer.spec.serialize import from_json, json_numbers, to_dict
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory
from glassformer.training.fit import StepRecord

#: The data's record, in a folder that was made from a run.
DATA = "data.json"


def recorded_hash(folder: Path, spec: tasks.Task) -> str | None:
    """Return the hash in the run's record; None for a task that reads no file.

    A record without one is refused, before anything is opened.
    """
    if isinstance(spec, OwnTask):  # it runs only with consent, but its options may name a file
        file = spec.source
    elif isinstance(spec, tasks.TextTask | tasks.FinetuneTask) and spec.path:
        file = spec.path
    elif isinstance(spec, tasks.TextTask) and spec.mixture:
        file = ", ".join(spec.mixture)
    else:
        return None
    directory, data = RunDirectory(folder), None
    if (folder / DATA).is_file():
        data = directory.read_json(DATA)
    elif (folder / "run.json").is_file():
        data = directory.read_json("run.json").get("data")
    found = data.get("sha256") if isinstance(data, dict) else None
    if not isinstance(found, str):
        raise FileError(
            "the run names a file as its data, and records no hash of it: it is not opened",
            where=f"{folder}: {file[:200]}",
            hint="a run that was trained here has that hash in its run.json",
        )
    return found


def check_data(task: Task, recorded: str | None) -> None:
    """Refuse data with another hash than the recorded one: changed, or never the run's."""
    if recorded is not None and task.facts()["sha256"] != recorded:
        raise InputError(
            "the data is not what the run was trained on: it has changed since, or was never its",
            hint="bring the data back; a run from elsewhere needs its file from there as well",
        )


def data_file(recorded: str | None) -> dict[str, bytes]:
    """Return the data's record as a file for a folder that is made from a run."""
    return {} if recorded is None else {DATA: (json.dumps({"sha256": recorded}) + "\n").encode()}


#: Steps between two points of a curve; evaluations are all written.
EVERY = 10


class Board:
    """Scalars by tag and step, for TensorBoard; does nothing if it is not installed."""

    def __init__(self, directory: RunDirectory) -> None:
        self.writer: Any = None
        if not directory.writes or importlib.util.find_spec("tensorboard") is None:
            return
        from tensorboard.summary.writer.record_writer import RecordWriter

        # TensorBoard's own writer puts the host's name into the file's; readers ignore it.
        number, folder = 0, directory.folder / "tensorboard"
        while os.path.lexists(path := folder / f"events.out.tfevents.{number:06d}"):
            number += 1
        self.writer = RecordWriter(create(directory.changing(path)))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write points of some curves at this step."""
        if self.writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self.writer.write(event.SerializeToString())

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *raised: object) -> None:
        if self.writer is not None:
            self.writer.flush()
            self.writer.close()


def losses(record: StepRecord) -> dict[str, float]:
    """Return `loss`; with several heads it is the first one's, as in an evaluation, and `objective`
    is what was differentiated: their weighted sum, the penalty, and the load-balancing term of a
    model with experts.
    """
    several = len(record.nll) > 1 or record.balance is not None
    return {"loss": record.first_loss, **({"objective": record.objective} if several else {})}


def balance(record: StepRecord) -> dict[str, float]:
    """Return `balance`, the load-balancing loss of a model with experts."""
    return {} if record.balance is None else {"balance": record.balance}


def metrics_line(record: StepRecord) -> str:
    """Return a step as a line of metrics.jsonl; `seconds` is the only clock in it."""
    line = {
        "step": record.step,
        **losses(record),
        **balance(record),
        "nll": dict(record.nll),
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "tokens": record.tokens,
        "seconds": round(record.seconds, 6),
    }
    try:
        return json.dumps(line, allow_nan=False) + "\n"
    except ValueError:  # a number that is not finite is written as a string
        return json.dumps(json_numbers(line), allow_nan=False) + "\n"


def read_state(folder: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint."""
    try:
        state = json.loads(small_text(folder / "state.json"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"state.json cannot be read: {error}", where=str(folder)) from error
    kinds = {"progress": dict, "spec": str, "data": str, "fingerprint": dict}
    for key, kind in kinds.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            raise FileError(f"state.json is damaged: it has no {key}", where=str(folder))
    return dict(state)


def spec_hash(spec: RunSpec) -> str:
    """Hash what must be equal for a run to resume: all but its length and what it shows."""
    same = to_dict(replace(spec, train=replace(spec.train, steps=1)))
    del same["train"]["probes"]
    same["train"]["compile"] = spec.train.compile == "on"  # a choice of speed, once a boolean
    if isinstance(spec.task, tasks.TextTask):
        plain = to_dict(tasks.TextTask())
        for field in ("mixture", "packing", "text_field"):  # a text had none of these at first
            if same["task"][field] == plain[field]:
                del same["task"][field]
    return hashlib.sha256((json.dumps(same, indent=2) + "\n").encode()).hexdigest()


def is_of_spec(folder: Path, recorded: str, spec: RunSpec) -> bool:
    """Return True if a checkpoint is of this spec: by its hash, or by the spec that it holds.

    A later version may give specs new fields, which change the hash: the spec that the checkpoint
    holds is read as this version reads it, with the new fields at their defaults.
    """
    if recorded == spec_hash(spec):
        return True
    path = folder / "run.json"
    if not path.is_file():
        return False
    try:
        return spec_hash(from_json(RunSpec, small_text(path))) == spec_hash(spec)
    except InputError:
        return False


def data_hash(facts: Mapping[str, Any]) -> str:
    """Return a hash of a task's facts about its data."""
    text = json.dumps(json_numbers(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def code_hash() -> str:
    """Return a hash of the package's own source."""
    total = hashlib.sha256()
    root = Path(__file__).parents[2]
    for file in sorted(root.rglob("*.py")):
        total.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return total.hexdigest()


def fingerprint(spec: RunSpec, device: str, *, ranks: str = "") -> dict[str, Any]:
    """Return what a run's bits depend on besides the spec; `ranks`: how several share a step."""
    import torch  # here: the explorer reads runs before torch is imported

    from glassformer.byhand.operations import ROUNDING
    from glassformer.gpu.operations import table_name
    from glassformer.kernels.threads import blas_kernels
    from glassformer.kernels.training import identity

    by_kernels = spec.engine == "native" and spec.train.precision == "float32"
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "numpy": np.__version__,
        "torch": torch.__version__ if spec.engine == "torch" else None,
        "threads": torch.get_num_threads() if spec.engine != "numpy" else None,
        "device": device,
        **({"engine": spec.engine} if spec.engine == "native" else {}),
        **({"kernels": identity()} if by_kernels else {}),
        **({} if spec.engine == "torch" else {"operations": ROUNDING, "products": blas_kernels()}),
        # On a GPU the recorded and the compiled step round differently from the plain one.
        **({} if device == "cpu" else {"compile": spec.train.compile, "kernels": table_name()}),
        **({"ranks": ranks} if ranks else {}),
    }


def to_toml(spec: RunSpec) -> str | None:
    """Return config.toml without values of None; None if no TOML writer is installed."""
    if importlib.util.find_spec("tomli_w") is None:
        return None  # config.json has the same content, and `glass train` reads it too
    return toml_text(to_dict(spec))


def load_run_spec(directory: RunDirectory) -> RunSpec:
    """Read the spec of a run directory."""
    path = directory.folder / "config.json"
    if not path.is_file():
        raise InputError("no config.json here, so this is not a run", where=str(directory.folder))
    try:
        return from_json(RunSpec, small_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"config.json cannot be read: {error}", where=str(path)) from error
    except InputError as error:
        if not (directory.folder / "run.json").exists():
            raise InputError(
                "this config.json is no run's, so this is not a run",
                where=str(directory.folder),
                hint="glass evaluate MODEL --suite smallbench takes any model",
            ) from error
        raise FileError(f"config.json is no run's: {error.what}", where=str(path)) from error
