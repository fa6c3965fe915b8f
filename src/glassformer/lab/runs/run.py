"""`TrainingRun`, the one consumer of `fit`: evaluates, saves, watches, can be killed any time.

`events()` yields what happens: steps, evaluations, checkpoints, alerts. The caller draws or prints
them; `request_stop` ends the run after the current step, with its state saved.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.load import load
from glassformer.lab.measure.evaluate import Evaluation, evaluate
from glassformer.lab.runs.artifacts import (
    Sample,
    forget_probes,
    keep_probes,
    keep_samples,
    sample_stepper,
    take_probes,
    write_samples,
)
from glassformer.lab.runs.assemble import (
    Parts,
    Peers,
    assemble,
    read_checkpoint,
    write_checkpoint,
)
from glassformer.lab.runs.curves import Curves, read_curves
from glassformer.lab.runs.planned import PlannedRun
from glassformer.lab.runs.record import (
    EVERY,
    Board,
    balance,
    code_hash,
    data_hash,
    fingerprint,
    is_of_spec,
    losses,
    metrics_line,
    read_state,
    spec_hash,
    to_toml,
)
from glassformer.lens.measure.probes import Probes
from glassformer.spec.errors import DivergedError, FileError, InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.serialize import json_numbers, to_dict, to_json
from glassformer.spec.train import RunSpec
from glassformer.spec.units import visible
from glassformer.store.checkpoint import Contents
from glassformer.store.rundir import FOLDERS, LOGS, RunDirectory, cache_folder
from glassformer.store.tensors import Deferred, TensorPieces, read_tensors
from glassformer.training.distributed import DistributedEngine
from glassformer.training.engine import Array
from glassformer.training.engine_choice import settled
from glassformer.training.fit import StepRecord, fit


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation during training; a language model also writes samples."""

    step: int
    evaluation: Evaluation
    best: bool
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Alert:
    """A warning about the training."""

    step: int
    kind: str
    message: str


Event = StepRecord | Evaluated | Saved | Alert


#: A loss this many standard deviations above its recent mean is a spike.
SPIKE = 6.0
WINDOW = 128
#: This many steps in a row that could not be applied end the run.
PATIENCE_FOR_NAN = 3
#: Lines of metrics.jsonl wait in memory no longer than this.
FLUSH_SECONDS = 0.5


@dataclass(slots=True)
class Progress:
    """The state that a run keeps between steps; saved with every checkpoint."""

    step: int = 0
    best_step: int | None = None
    best_loss: float = math.inf
    stale: int = 0
    unapplied: int = 0
    recent: tuple[float, ...] = ()
    loss: float | None = None
    val: dict[str, Any] | None = None
    metrics_bytes: int = 0
    metrics_sha256: str = ""
    alerts_bytes: int = 0

    @classmethod
    def read(cls, saved: Mapping[str, Any], *, where: str) -> Self:
        """Read what a checkpoint has; a field that an older one lacks keeps its default."""
        made = cls()
        for field, value in saved.items():
            if field not in cls.__dataclass_fields__:
                raise FileError(f"state.json is damaged: '{visible(field)[:40]}'", where=where)
            try:
                setattr(made, field, _READ[field](value))
            except (TypeError, ValueError, OverflowError) as error:
                what = f"state.json is damaged: progress.{field} is {visible(repr(value))[:40]}"
                raise FileError(what, where=where) from error
        return made


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("not a count")
    return value


def _number(value: Any) -> float:
    """Return a number; infinity and NaN are saved as text."""
    if type(value) not in (int, float) and value not in ("inf", "-inf", "nan"):
        raise ValueError("not a number")
    return float(value)


def _recent(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) > WINDOW:
        raise ValueError("not the last losses")
    return tuple(_number(loss) for loss in value)


def _val(value: Any) -> dict[str, Any] | None:
    """Return the last evaluation, as far as it is printed: the rest goes to other programs."""
    if value is None:
        return None
    oracle = value.get("oracle", {}) if isinstance(value, dict) else None
    if not isinstance(oracle, dict):
        raise TypeError("not an evaluation")
    for number in (value.get("loss"), value.get("accuracy"), oracle.get("bits_per_byte")):
        if number is not None:
            _number(number)
    return dict(value)


def _sha256(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a hash")
    return value


#: How each field of `Progress` is read.
_READ: Mapping[str, Callable[[Any], Any]] = {
    "step": _count,
    "best_step": lambda value: None if value is None else _count(value),
    "best_loss": _number,
    "stale": _count,
    "unapplied": _count,
    "recent": _recent,
    "loss": lambda value: None if value is None else _number(value),
    "val": _val,
    "metrics_bytes": _count,
    "metrics_sha256": _sha256,
    "alerts_bytes": _count,
}


class TrainingRun:
    """One run in one directory."""

    def __init__(
        self,
        run: RunSpec | PlannedRun,
        folder: Path,
        *,
        device: str = "cpu",
        parts: Parts | None = None,
        peers: Peers | None = None,
    ) -> None:
        processes = 1 if peers is None else peers.ranks.size
        wanted = run.spec if isinstance(run, PlannedRun) else run
        if parts is not None and wanted.engine == "auto":  # a stack is torch's
            wanted = replace(wanted, engine="torch")
        self.spec = settled(wanted, device=device, processes=processes)
        self.peers = peers
        self.directory = RunDirectory(folder, writes=peers is None or peers.ranks.writes)
        self.device = device
        self.progress = Progress()
        self.stop_requested = False
        self.stopped = False
        self.stopping = False  # what all processes have agreed on
        self.saving: Future[Saved] | None = None
        stacked = parts is not None  # the stack writes samples and probes of all its runs at once
        if parts is None:
            parts = assemble(run, device=device, cache=cache_folder(folder.parent), peers=peers)
        self.task, self.engine, self.files = parts.task, parts.engine, parts.files
        self.notes = parts.notes
        self.facts = dict(self.task.facts())
        stepper = None if stacked else sample_stepper(self.engine, self.task)
        self.samples: Callable[[], tuple[Sample, ...]]
        self.samples = lambda: write_samples(stepper, self.task)
        self.probes: Callable[[], Probes] = self._probes
        self.seconds = 0.0  # of all steps, also those before a resume
        self.flushed, self.has_ended = 0.0, False
        if peers is not None:
            facts = {
                "a package": code_hash(),
                "a spec": spec_hash(self.spec),
                "data": data_hash(self.facts),
            }
            peers.ranks.check_equal({key: bytes.fromhex(text) for key, text in facts.items()})
        self.written_metrics = hashlib.sha256()  # of metrics.jsonl so far

    # --- results ------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The folder of the run; `gf.load`, `gf.evaluate` and every command take it."""
        return self.directory.folder

    @property
    def loss(self) -> float | None:
        """The loss of the last batch, in nats a token."""
        return self.progress.loss

    @property
    def metrics(self) -> dict[str, Any]:
        """The last evaluation on the validation split: loss, accuracy, exact_match, by, oracle."""
        return dict(self.progress.val or {})

    @property
    def val_loss(self) -> float | None:
        """The loss on the validation split, at the last evaluation."""
        return self.metrics.get("loss")

    @property
    def val_accuracy(self) -> float | None:
        """The accuracy on the validation split, at the last evaluation."""
        return self.metrics.get("accuracy")

    @property
    def history(self) -> Curves:
        """Every measurement so far: `history.rows()`, `history.frame()`, `history["val.loss"]`."""
        return read_curves(self.path)

    @property
    def model(self) -> BaseAdapter:
        """The trained model, from the best checkpoint, as `gf.load` returns it."""
        return load(str(self.path), device=self.device)

    def summary(self) -> list[str]:
        """Return the results in a few lines: how far, how well, where."""
        progress, steps = self.progress, self.spec.train.steps
        lines = [f"run {self.path.name}: {progress.step:,} of {steps:,} steps"]
        if progress.loss is not None:
            lines.append(f"loss {progress.loss:.4g} nats on the last batch")
        if self.val_loss is not None:
            accuracy = (
                f", accuracy {self.val_accuracy:.1%}" if self.val_accuracy is not None else ""
            )
            lines.append(f"validation {float(self.val_loss):.4g} nats{accuracy}")
        if progress.best_step is not None:
            lines.append(f"best checkpoint: step {progress.best_step:,}")
        lines.append(f"saved in {self.path}")
        return lines

    def __repr__(self) -> str:
        following = f'next: run.model, gf.evaluate(run), gf.report("{self.path}")'
        return "\n  ".join([*self.summary(), following])

    # --- starting -----------------------------------------------------------------------------

    def prepare(self, *, overwrite: bool = False) -> None:
        """Make a new run directory; refuse one that holds a run, unless it may be overwritten."""
        if not self.directory.writes:
            return
        if not overwrite:
            self.directory.check_new()
        elif self.directory.has_run():
            self.directory.remove(*FOLDERS, *LOGS[1:], "run.json")
        self._write_config()
        self._record("running")

    def _write_config(self) -> None:
        self.directory.write("config.json", to_json(self.spec))
        toml = to_toml(self.spec)
        if toml is not None:
            self.directory.write("config.toml", toml)

    def resume(self) -> list[str]:
        """Resume from the newest intact checkpoint; return what was wrong with newer ones."""
        step, notes = self._newest_whole()
        if step is None:
            notes.append("no whole checkpoint: starting at step 0")
            self.directory.cut(self.directory.metrics, 0)
            self.directory.cut(self.directory.alerts, 0)
            forget_probes(self.directory, after=0)
            self._write_config()  # a kill may have come before it was complete
            return notes
        folder = self.directory.step_folder(step)
        weights = read_checkpoint(folder, self.spec)
        state = read_state(folder)
        if not is_of_spec(folder, state["spec"], self.spec):
            raise InputError("the checkpoint is of another run's spec", where=str(folder))
        if state["data"] != data_hash(self.facts):
            raise InputError(
                "the data changed since the checkpoint was written",
                where=str(folder),
                hint="start a new run, or bring the data back",
            )
        saved = Progress.read(state["progress"], where=str(folder))
        here, before = self._fingerprint(), state["fingerprint"]
        if before != here:
            changed = [key for key in {**here, **before} if before.get(key) != here.get(key)]
            if "device" in changed:  # another one computes a step in its own way anyhow
                changed = [key for key in changed if key not in ("compile", "kernels")]
            names = ", ".join(visible(key)[:40] for key in changed[:20])
            notes.append(f"not bit-exact: {names} changed since the checkpoint")
        self.engine.load_weights(weights)
        self.engine.load_state(read_tensors(folder / "state.safetensors"))
        self.progress = saved
        if self.progress.loss is None and len(self.spec.model.head_names()) == 1:
            self.progress.loss = next(reversed(saved.recent), None)  # saved before it had one
        # A kill may have come between a checkpoint and its pointers.
        self.directory.point("last", step)
        if self.progress.best_step in self.directory.steps():
            self.directory.point("best", self.progress.best_step)
        self.directory.prune(keep=self.spec.train.keep)
        self.directory.cut(self.directory.metrics, self.progress.metrics_bytes)
        self.directory.cut(self.directory.alerts, self.progress.alerts_bytes)
        self.written_metrics = _hash_of(self.directory.metrics)
        if self.progress.metrics_sha256 not in ("", self.written_metrics.hexdigest()):
            notes.append(
                "metrics.jsonl is not what the run wrote: lines before this step were changed or "
                "lost; the weights are what they were"
            )
        with contextlib.suppress(FileError):  # the clock of a damaged log starts again
            self.seconds = read_curves(self.directory.folder).spent.seconds
        forget_probes(self.directory, after=self.progress.step)
        self._write_config()  # it may go on for longer than it was meant to
        notes.append(f"resuming at step {self.progress.step}")
        return notes

    def _newest_whole(self) -> tuple[int | None, list[str]]:
        """Return the checkpoint to resume from, which rank 0 decides, and what is wrong."""
        if self.peers is None:
            return self.directory.newest_whole()
        found: tuple[int | None, list[str]] = (None, [])
        if self.directory.writes:
            found = self.directory.newest_whole()
        step = self.peers.ranks.gather(-1 if found[0] is None else found[0])[0]
        return (None if step < 0 else step), found[1]

    def agreed(self, flag: bool) -> bool:
        """Return rank 0's opinion; a process alone has its own."""
        return flag if self.peers is None else bool(self.peers.ranks.gather(flag)[0])

    def _fingerprint(self) -> dict[str, Any]:
        return fingerprint(self.spec, self.device, ranks=str(self.peers or ""))

    # --- running ------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Train to the end, or until a stop is requested."""
        with self.training():
            if not self.has_ended:
                steps = fit(
                    self.engine,
                    self.task,
                    self.spec.train,
                    start=self.progress.step,
                    stopping=self._stop_agreed,
                )
                for record in steps:
                    yield from self.after(record)
                    if self.has_ended:
                        break
                yield from self.written()

    @contextlib.contextmanager
    def training(self, writer: Executor | None = None) -> Iterator[None]:
        """Keep the run's files open for `after`, and its record true; `writer` is lent."""
        self.has_ended = self._gave_up()
        with self.directory.writing(), contextlib.ExitStack() as files:
            self._record("running")
            if not self.has_ended:
                self.writer = writer or files.enter_context(ThreadPoolExecutor(1))
                self.log = files.enter_context(self.directory.append(self.directory.metrics))
                self.board = files.enter_context(Board(self.directory))
            yield
            files.close()
            unfinished = self.progress.step < self.spec.train.steps and not self._gave_up()
            self.stopped = self._stop_agreed() and unfinished
            self._record("stopped" if self.stopped else "finished")

    def after(self, record: StepRecord) -> Iterator[Event]:
        """Log and watch a step; evaluate and save where the run does; `has_ended` at its end."""
        train, log = self.spec.train, self.log
        if self.peers is not None:
            self.stopping = self.peers.ranks.any(self.stop_requested)
        yield from self.written(wait=False)
        self.progress.step = record.step
        self.seconds += record.seconds
        self._log(metrics_line(record))
        self._check_folder()
        if time.monotonic() - self.flushed > FLUSH_SECONDS:  # others watch the file grow
            log.flush()
            self.flushed = time.monotonic()
        if record.step % EVERY == 0:
            rest = {"lr": record.lr, "grad_norm": record.grad_norm}
            self.board.add(record.step, {**losses(record), **balance(record), **rest})
        yield record
        yield from self._watch(record)
        if not record.settled:
            return
        last = record.step == train.steps or self._stop_agreed()
        save = last or record.step % train.checkpoint_every == 0
        if record.step % train.evaluate_every == 0 or record.step == train.steps:
            evaluated = self._evaluate()
            line = {"step": record.step, "val": self.progress.val}
            self._log(json.dumps(line, allow_nan=False) + "\n")
            found = evaluated.evaluation
            self.board.add(record.step, {"val_loss": found.loss, "val_accuracy": found.accuracy})
            yield evaluated
            last |= self._gave_up()
            save |= last or evaluated.best
        if save:
            self.directory.sync(log)  # a checkpoint says how long it is
            yield from self._save()
        self.has_ended = last

    def request_stop(self) -> None:
        """Let the run end after the current step, with its state saved."""
        self.stop_requested = True

    def _stop_agreed(self) -> bool:
        """Return True if the run is to stop: the same answer in all processes of a step."""
        return self.stop_requested if self.peers is None else self.stopping

    def _log(self, line: str) -> None:
        self.log.write(line)
        self.written_metrics.update(line.encode())

    def _check_folder(self) -> None:
        """Raise if the log was deleted or replaced: what follows would be written to nowhere."""
        try:
            links = os.fstat(self.log.fileno()).st_nlink
        except io.UnsupportedOperation:  # no file
            return
        if links == 0:
            raise self.directory.deleted()

    def _gave_up(self) -> bool:
        """Return True after too many evaluations without a better one, also if resumed."""
        patience = self.spec.train.patience
        return bool(patience) and self.progress.stale >= patience

    def _evaluate(self) -> Evaluated:
        evaluation = evaluate(
            self.engine,
            self.task,
            split="val",
            examples=self.spec.train.evaluate_examples,
            errors=0,
        )
        self.progress.val = dict(json_numbers(evaluation.to_dict()))
        best = evaluation.loss < self.progress.best_loss
        if best:
            self.progress.best_loss = evaluation.loss
            self.progress.best_step = self.progress.step
        self.progress.stale = 0 if best else self.progress.stale + 1
        samples: tuple[Sample, ...] = ()
        engine = self.engine
        if math.isfinite(evaluation.loss):
            if isinstance(engine, DistributedEngine) and engine.sharded:
                samples = engine.run(self._look_closer)  # its parameters are on all ranks
            elif self.directory.writes:
                samples = self._look_closer()
        return Evaluated(self.progress.step, evaluation, best, samples)

    def _look_closer(self) -> tuple[Sample, ...]:
        """Write samples and probes; return the samples."""
        samples = self.samples()
        if self.spec.train.probes:
            seen = self.probes()
            every, answers = self.spec.train.evaluate_every, self.spec.model.head_size(seen.head)
            keep_probes(self.directory, seen, every=every, vocab_size=answers)
        keep_samples(self.directory, self.progress.step, samples)
        return samples

    def _probes(self) -> Probes:
        examples, step = self.spec.train.probes, self.progress.step
        return take_probes(self.engine, self.task, examples=examples, step=step)

    def _watch(self, record: StepRecord) -> Iterator[Alert]:
        """Report spikes; count steps that could not be applied, of which too many end the run."""
        progress, recent = self.progress, self.progress.recent
        if not record.applied:
            progress.unapplied += 1
            what = f"loss {record.loss}, gradient norm {record.grad_norm}: step not applied"
            yield self._alert(record.step, "not finite", what)
            if progress.unapplied >= PATIENCE_FOR_NAN:
                self._record("diverged")
                good = self.directory.pointed("last")
                where = f"the last good checkpoint is step {good}" if good else "none was saved"
                raise DivergedError(
                    f"{progress.unapplied} steps in a row were not finite",
                    where=f"step {record.step}; {where}",
                    hint="lower train.lr, lengthen the warmup, or clip harder; "
                    "{glass doctor|gf.doctor} with the same arguments looks for mistakes",
                )
            return
        progress.unapplied = 0
        if len(recent) == WINDOW:
            mean = math.fsum(recent) / WINDOW
            if record.objective > mean:
                spread = math.sqrt(math.fsum((loss - mean) ** 2 for loss in recent) / WINDOW)
                if record.objective > mean + SPIKE * spread and spread > 0:
                    what = f"{[*losses(record)][-1]} {record.objective:.4g}, recent mean {mean:.4g}"
                    yield self._alert(record.step, "spike", what)
        progress.recent = (*recent[-WINDOW + 1 :], record.objective)
        progress.loss = record.first_loss

    def _alert(self, step: int, kind: str, message: str) -> Alert:
        with self.directory.append(self.directory.alerts) as log:
            log.write(json.dumps({"step": step, "kind": kind, "message": message}) + "\n")
            self.directory.sync(log)
        return Alert(step, kind, message)

    def _save(self) -> Iterator[Saved]:
        """Save the state of this step. A GPU goes on training while a thread writes the files.

        Of a sharded model all ranks read every tensor, one after the other, and rank 0 writes it.
        """
        yield from self.written()
        if isinstance(self.engine, DistributedEngine) and self.engine.sharded:
            moments, weights = self.engine.saved_state(), self.engine.saved_weights()
            if self.directory.writes:
                yield self._snapshot(TensorPieces(moments), weights)()
                return
            for tensors in (moments, weights):
                for name in sorted(tensors):
                    tensors[name].read()
            return
        if not self.directory.writes:
            return
        write = self._snapshot(TensorPieces(self.engine.state()), self.engine.weights())
        if self.device == "cpu":
            yield write()
        else:
            self.saving = self.writer.submit(write)

    def written(self, *, wait: bool = True) -> Iterator[Saved]:
        """Yield the checkpoint that was being written, once it is; raise what went wrong."""
        if self.saving is not None and (wait or self.saving.done()):
            saving, self.saving = self.saving, None
            yield saving.result()

    def _snapshot(
        self, moments: TensorPieces, weights: Mapping[str, Array | Deferred]
    ) -> Callable[[], Saved]:
        """Copy everything else that a checkpoint holds; return what writes it.

        It writes a complete checkpoint, then moves the pointers, then prunes.
        """
        progress, directory = self.progress, self.directory
        progress.metrics_bytes = _size(directory.metrics)
        progress.metrics_sha256 = self.written_metrics.hexdigest()
        progress.alerts_bytes = _size(directory.alerts)
        step, best = progress.step, progress.best_step == progress.step
        folder = directory.step_folder(step)
        state = {
            "progress": asdict(progress),
            "spec": spec_hash(self.spec),
            "data": data_hash(self.facts),
            "fingerprint": self._fingerprint(),
        }
        text = (json.dumps(json_numbers(state), indent=2) + "\n").encode()

        def write() -> Saved:
            files: dict[str, Contents] = {
                "state.json": text,
                "state.safetensors": moments,
                "run.json": to_json(self.spec).encode(),
                **self.files,
            }
            # one that was left by this run before it was resumed, and is damaged
            directory.remove(f"checkpoints/{folder.name}")
            write_checkpoint(folder, self.spec, weights, files=files)
            directory.point("last", step)
            if best:
                directory.point("best", step)
            directory.prune(keep=self.spec.train.keep)
            return Saved(step, folder)

        return write

    def _record(self, status: str) -> None:
        tuning = self.spec.tuning
        self.directory.write_json(
            "run.json",
            {
                "status": status,
                **({} if tuning is None else {"tuning": to_dict(tuning)}),
                "step": self.progress.step,
                "steps": self.spec.train.steps,
                "task": self.task.name,
                "engine": self.spec.engine,
                "parameters": count_parameters(self.spec.model),
                "seed": self.spec.train.seed,
                "lr": self.spec.train.lr,
                "best_step": self.progress.best_step,
                "fingerprint": self._fingerprint(),
                "data": self.facts,
                "val": self.progress.val,
                "clock": {"at": round(time.time()), "seconds": round(self.seconds, 2)},
            },
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hash_of(path: Path) -> "hashlib._Hash":
    """Return the hash of a file's content, to go on with; of nothing where there is no file."""
    if not path.exists():
        return hashlib.sha256()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")
