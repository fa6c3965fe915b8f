"""The progress of a training: a bar where somebody watches, greppable lines on stderr elsewhere."""

import time
from types import TracebackType
from typing import Self

from glassformer.generation.text_stream import visible
from glassformer.lab.bar import Bar, clock
from glassformer.lab.runs.artifacts import Sample
from glassformer.lab.runs.run import Alert, Evaluated, Event, Saved
from glassformer.training.fit import StepRecord

#: Seconds between lines where there is no bar.
QUIET_SECONDS = 10.0
#: The step after which the first line tells how long it will take.
EARLY = 10


class Narrator:
    """The progress of a training: one live line on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, *, steps: int, start: int) -> None:
        self.steps, self.start = steps, start
        self.bar = Bar(title, total=steps, done=start)
        self.began = self.told = time.perf_counter()
        self.tokens = 0
        self.loss = self.val = float("nan")
        self.rate = 0.0
        self.samples: tuple[Sample, ...] = ()

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.__exit__(kind, error, trace)
        for sample in self.samples:
            self.bar.tell(f"--- {sample.opening.strip()!r} goes on:\n{visible(sample.text)}")

    def see(self, event: Event) -> None:
        """Record an event, and print it when it is time."""
        match event:
            case StepRecord():
                self.tokens += event.tokens
                self.loss, self.rate = event.first_loss, event.lr
                self._tell(event.step, now=False)
            case Evaluated():
                self.val = event.evaluation.loss
                self.samples = event.samples
                self._tell(event.step, now=True)
            case Alert():
                self.bar.tell(f"alert at step {event.step}: {event.kind}: {event.message}")
            case Saved():
                pass

    def _tell(self, step: int, *, now: bool) -> None:
        moment = time.perf_counter()
        passed = max(1e-9, moment - self.began)
        left = passed / max(1, step - self.start) * (self.steps - step)
        speed = self.tokens / passed
        if self.bar.live:
            val = "" if self.val != self.val else f"  val {self.val:.4f}"
            facts = f"{step:,}/{self.steps:,}  loss {self.loss:.4f}{val}  {speed:,.0f} tokens/s"
            self.bar.show(step, f"{facts}  {clock(left)} left")
        elif now or step == self.start + EARLY or moment - self.told >= QUIET_SECONDS:
            self.told = moment
            val = "" if self.val != self.val else f"val={self.val:.4f} "
            self.bar.tell(
                f"step={step}/{self.steps} loss={self.loss:.4f} {val}"
                f"lr={self.rate:.2e} tokens/s={speed:,.0f} left={left:.0f}s"
            )
