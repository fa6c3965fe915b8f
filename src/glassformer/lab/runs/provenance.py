"""Is the file that a run names the one that it was trained on? Asked before any of it is shown.

A run may come from a stranger, and its config.json may name whatever its reader can read: a key, a
diary. A run records the hash of its data; who has never seen a file cannot record that file's.
"""

import json
from pathlib import Path

from glassformer.data.task import Task
from glassformer.spec import tasks
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.own import OwnTask
from glassformer.store.rundir import RunDirectory

#: In a folder that was made from a run: what its run.json says of the data.
DATA = "data.json"


def recorded_hash(folder: Path, spec: tasks.Task) -> str | None:
    """The hash that the run's record holds; None for a task that reads no file.

    A record without one is refused, before anything is opened.
    """
    if isinstance(spec, OwnTask):  # it runs only with consent, but its options may name a file
        file = spec.source
    elif isinstance(spec, tasks.TextTask | tasks.FinetuneTask) and spec.path:
        file = spec.path
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
    """Refuse data that is not what was recorded: it has changed, or was never the run's."""
    if recorded is not None and task.facts()["sha256"] != recorded:
        raise InputError(
            "the data is not what the run was trained on: it has changed since, or was never its",
            hint="bring the data back; a run from elsewhere needs its file from there as well",
        )


def data_file(recorded: str | None) -> dict[str, bytes]:
    """The record for a folder that is made from a run, as a file of it."""
    return {} if recorded is None else {DATA: (json.dumps({"sha256": recorded}) + "\n").encode()}
