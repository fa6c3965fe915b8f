"""TensorBoard events, written where that package is installed, in a file that names no host."""

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

#: Steps between two points of a curve; evaluations are all written.
EVERY = 10


class Board:
    """Scalars by tag and step, for those who watch a run in TensorBoard; nothing without it."""

    def __init__(self, folder: Path) -> None:
        self.writer: Any = None
        if importlib.util.find_spec("tensorboard") is None:
            return
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard's own writer puts the host's name into the file's; readers ignore it.
        number = len(list(folder.glob("events.out.tfevents.*")))
        self.writer = RecordWriter((folder / f"events.out.tfevents.{number:06d}").open("wb"))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Points of some curves at this step."""
        if self.writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self.writer.write(event.SerializeToString())

    def __enter__(self) -> "Board":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.writer is not None:
            self.writer.flush()
            self.writer.close()
