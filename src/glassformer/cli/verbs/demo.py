"""`glass demo`: train from scratch, verify, decode, inspect; each step is also a verb."""

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from glassformer.cli.shell.options import AsJson, Device, Runs
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import is_unicode, tell
from glassformer.kernels.threads import one_blas_thread, taking
from glassformer.spec.manifest import count_parameters
from glassformer.spec.options import option
from glassformer.spec.serialize import json_numbers
from glassformer.spec.units import pasted

if TYPE_CHECKING:
    from glassformer.checks.report import Report
    from glassformer.data.task import Task
    from glassformer.lab.measure.scores import Decoded
    from glassformer.lab.runs.run import TrainingRun
    from glassformer.lens.show.attention_map import AttentionMap
    from glassformer.models.model import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The run of the demonstration."""

    name: str | None = option(None, help="Name of the run; by default demo, demo-2, ...")
    steps: int | None = option(None, help="Number of training steps (default: the recipe's).")
    seed: int | None = option(None, help="Draws the first weights and the order of the data.")
    overwrite: bool = option(False, help="Delete the run of this name and start again.")
    device: Device = "cpu"
    runs: Runs = "runs"


def demo(options: Options, as_json: AsJson = False) -> None:
    """Train a model, verify it, decode with it, look inside.

    Half a minute on one core, nothing to prepare.
    """
    one_blas_thread()
    if code := _demo(options, as_json=as_json):
        raise typer.Exit(code)


TASK, SPLIT = "reverse", "test"
HELD_OUT = 500  # examples decoded
WIDTH = 4  # beams
SHOWN = 7  # symbols of the example that is inspected


def _demo(options: Options, *, as_json: bool) -> int:
    """Run all steps, and return the exit code: 1 if the certificate fails, 130 after Ctrl-C."""
    from glassformer.lab.recipes import plan_run
    from glassformer.lab.runs.process import threads_of_run
    from glassformer.lab.runs.run import TrainingRun
    from glassformer.store.rundir import run_folder

    short, runs = {"steps": options.steps, "seed": options.seed}, Path(options.runs)
    changes = [f"train.{key}={value}" for key, value in short.items() if value is not None]
    if options.name is None:
        folder = free_folder(runs, "demo", overwrite=options.overwrite)
    else:
        folder = run_folder(runs, options.name)
    run = TrainingRun(plan_run(TASK, changes), folder, device=check_device(options.device))
    began = time.perf_counter()
    say = (lambda _: None) if as_json else _say  # a script gets one object at the end
    try:
        with taking(threads_of_run(run.spec, run.task)):
            code, result = _train(run, overwrite=options.overwrite)
            if not code:
                say(
                    f"trained   {result['steps']:,} steps in {result['seconds']:.0f} s, "
                    f"validation loss {result['val_loss']:.4f}: {folder}"
                )
                code = _after_training(run, result, say)
    except KeyboardInterrupt:
        tell(f"\nstopped; what was trained is in {folder}")
        return 128 + signal.SIGINT
    result["total_seconds"] = round(time.perf_counter() - began, 1)
    if as_json:
        print(json.dumps(json_numbers(result), allow_nan=False))
    elif not run.stopped:
        say(f"\nin all    {result['total_seconds']:.0f} s. Next:")
        commands = next_commands(folder)
        width = max(len(command) for command, _ in commands)
        for command, what in commands:
            say(f"  {command:<{width}}   {what}")
    return code


def free_folder(runs: Path, name: str, *, overwrite: bool) -> Path:
    """Return the first of demo, demo-2, demo-3 … that does not exist; with `overwrite`, demo."""
    from glassformer.store.rundir import run_folder

    number, folder = 1, run_folder(runs, name)
    while folder.exists() and not overwrite:
        number += 1
        folder = run_folder(runs, f"{name}-{number}")
    return folder


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """Return commands to try on the run, ready to paste, and what each one shows."""
    place = pasted(folder)
    return [
        (f"glass explore {place}", "look around in it, in a browser"),
        (
            f'glass inspect {place} "3 1 4 15 9" --kind cross --layer 1',
            "what it attends to, and why",
        ),
        (f'glass generate {place} "3 1 4 15 9" --beams 4', "its four most probable outputs"),
        (f"glass evaluate {place} --split longer", "rows longer than it ever saw"),
        (f"glass verify {place}", "the certificate, row by row"),
    ]


def _say(text: str) -> None:
    print(text, flush=True)


def _train(run: "TrainingRun", *, overwrite: bool) -> tuple[int, dict[str, Any]]:
    """Train from fresh weights to the end, or to the first Ctrl-C, and save the state."""
    from glassformer.lab import api
    from glassformer.lab.runs.process import stopping

    folder, sizes = run.directory.folder, run.task.sizes()
    tell(
        f"1/4 train   {TASK}: {sizes['train']:,} rows of symbols to turn around; encoder-decoder, "
        f"{count_parameters(run.spec.model):,} parameters, {run.spec.train.steps:,} steps"
    )
    began = time.perf_counter()
    with run.directory.locked(), stopping(run.request_stop) as caught:
        run.prepare(overwrite=overwrite)
        api.follow(run)
    result = api.result_of(run) | {"seconds": round(time.perf_counter() - began, 1)}
    if not run.stopped:
        return 0, result
    elsewhere = "" if str(folder.parent) == "runs" else f" --runs {pasted(folder.parent)}"
    tell(f"stopped at step {run.progress.step}, state saved; go on with")
    tell(f"  glass train {TASK} --name {folder.name}{elsewhere} --resume")
    return 128 + (caught[0] if caught else signal.SIGINT), result


def _after_training(run: "TrainingRun", result: dict[str, Any], say: Any) -> int:
    """Verify, decode held-out rows, inspect one example, and add all of it to the result."""
    from glassformer.adapters.load import load_model
    from glassformer.checks.report import Report
    from glassformer.web.report.document import report_html

    model = load_model(run.directory.folder).to(run.device)
    report = _verify(model, run.directory.folder.name)
    result["verify"] = {
        "passed": report.passed,
        "failed": report.failed,
        "warnings": report.warnings,
    }
    absent = sum(finding.verdict == "not offered" for finding in report.findings)
    warned = f"{report.warnings} warned, " if report.warnings else ""
    say(
        f"verified  {report.passed} checks passed, {report.failed} failed, {warned}"
        f"{absent} do not apply to this model"
    )
    if report.failed:
        say(Report(tuple(f for f in report.findings if f.failed)).text())
    found = _decode(model, run.task)
    result["examples"] = found["greedy"].examples
    result["exact_match"] = {way: one.exact_match for way, one in found.items()}
    shares = ", ".join(f"{way} {one.exact_match:.1%}" for way, one in found.items())
    say(f"decoded   {result['examples']} held-out sequences, completely right: {shares}")
    tell("4/4 look    what the decoder attends to")
    example = _example(model, run.task)
    result["attention"] = example.to_dict()
    say(example.text())
    page = report_html(str(run.directory.folder), certificate=report)
    run.directory.write("report.html", page)
    result["report"] = str(run.directory.folder / "report.html")
    say(f"\nreport    {result['report']}: all of this and more, for any browser")
    say(f"          (glass report {pasted(run.directory.folder)} makes it again)")
    return 1 if report.failed else 0


def _verify(model: "Model", name: str) -> "Report":
    from glassformer.checks.catalogue import SUBJECT_CHECKS, verify_subject
    from glassformer.checks.report import Report
    from glassformer.checks.subject import subject_of
    from glassformer.lab.bar import Bar

    subject = subject_of(model, name=name)
    checks = sum(not check.deep and check.concerns(subject) for check in SUBJECT_CHECKS)
    tell(f"2/4 verify  {checks} checks: two ways of computing the same thing, compared")
    findings = []
    with Bar("verify", total=checks) as bar:
        for finding in verify_subject(subject):
            findings.append(finding)
            bar.show(len(findings), finding.name)
    return Report(tuple(findings))


def _decode(model: "Model", task: "Task") -> "dict[str, Decoded]":
    from glassformer.generation.stepper import TorchStepper
    from glassformer.lab.measure.scores import decode_split

    tell(f"3/4 decode  {HELD_OUT} rows that were never trained on, greedily and with {WIDTH} beams")
    stepper, found = TorchStepper(model), {}
    for way, beams in (("greedy", None), (f"beam {WIDTH}", WIDTH)):
        found[way] = decode_split(stepper, task, split=SPLIT, examples=HELD_OUT, beams=beams)
    return found


@dataclass(frozen=True, slots=True)
class Example:
    """One held-out row, the model's output, and the last layer's attention to the source."""

    map: "AttentionMap"
    right: bool
    layer: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with weights rounded to four digits."""
        return {
            "source": list(self.map.columns_words),
            "answer": list(self.map.rows_words),
            "right": self.right,
            "layer": self.layer,
            "weights": [[round(w, 4) for w in row] for row in self.map.tensor.tolist()],
        }

    def text(self) -> str:
        """Return the example and its heat map; reversing shows as a diagonal from the top right."""
        from glassformer.lens.show.text import ASCII_SHADES, SHADES, legend

        shades = SHADES if is_unicode(SHADES) else ASCII_SHADES
        lines = [
            f"\ninput     {_words(self.map.columns_words)}",
            f"output    {_words(self.map.rows_words)}  ({'right' if self.right else 'wrong'})",
            f"\ncross-attention, layer L{self.layer}, mean of its heads: what each output token",
            f"attends to in the source ({legend(shades)})\n",
        ]
        return "\n".join(
            [*lines, *(f"  {row}" for row in self.map.drawn(shades=shades).split("\n"))]
        )


def _example(model: "Model", task: "Task") -> Example:
    """Decode, greedily, the held-out row whose length is nearest to SHOWN, to fit a screen."""
    import numpy as np
    import torch

    from glassformer.data.tokenizers.vocab import Vocab
    from glassformer.generation.stepper import TorchStepper
    from glassformer.lab.measure.scores import answers, wanted
    from glassformer.lens.inspection import inspect
    from glassformer.models.inputs import Inputs

    names = task.tokenizer
    assert isinstance(names, Vocab)
    lengths = task.lengths(SPLIT) - 1  # symbols; the end is a token too
    row = int(np.argmin(np.abs(lengths - SHOWN)))
    batch = task.batch(SPLIT, np.array([row]))
    assert batch.source is not None
    (answer,) = answers(TorchStepper(model), batch, eos=names.eos, beams=None)
    tokens_1T = torch.tensor([[int(batch.tokens[0, 0]), *answer[:-1]]])
    source_1S = torch.from_numpy(batch.source.tokens).long()
    layer = model.spec.n_layers - 1
    seen = inspect(model, Inputs(tokens_1T, source_BS=source_1S))
    words = [tuple(names.names[i] for i in ids) for ids in (answer, source_1S[0].tolist())]
    drawn = seen.attention.of("cross").mean(layer)
    drawn = replace(drawn, rows_words=words[0], columns_words=words[1])
    return Example(drawn, right=answer == next(wanted(batch)), layer=layer)


def _words(names: Sequence[str]) -> str:
    return " ".join(name for name in names if name != "EOS")
