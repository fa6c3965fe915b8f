"""TensorBoard opens what a run writes, and the files name no host."""

import socket

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import TrainingRun


def test_tensorboard_reads_the_run(tmp_path):
    spec = recipe(
        "copy",
        [
            "task.examples=300",
            "train.steps=20",
            "train.batch_size=8",
            "train.evaluate_every=10",
        ],
    )
    run = TrainingRun(spec, tmp_path / "run")
    run.prepare()
    list(run.events())
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert socket.gethostname() not in file.name
    seen = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append(event.step)
    assert seen["loss"] == seen["lr"] == seen["grad_norm"] == [10, 20]
    assert seen["val_loss"] == seen["val_accuracy"] == [10, 20]
