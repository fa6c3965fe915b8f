"""What a command says before it trains, when it has trained, and what one can do next.

Commands are ready to paste: names are as short as this folder allows, prompts come from the task.
The predicted time is `costs.timing`'s, from rates of this machine that are measured once and kept
with the runs' cache for a day.
"""

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glassformer.costs.timing import Rates, step_time
from glassformer.data.task import Task
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.lab.runs.run import TrainingRun
from glassformer.lab.runs.table import duration
from glassformer.lab.show import training_lines
from glassformer.lens.show.outline import model_lines
from glassformer.spec.disk import make_folder, replace_file, small_text
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.serialize import from_json, to_json
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.units import pasted
from glassformer.store.rundir import RunRef, cache_folder

#: Commands to paste, and what each does.
Commands = list[tuple[str, str]]
#: A run of fewer steps needs no prediction; rates older than this are measured again.
FEW_STEPS, RATES_SECONDS = 100, 86_400
#: Seconds of measuring, and tokens of a prompt made from an example.
MEASURED_SECONDS, PROMPT = 0.6, 8
#: A prompt for a model of any language that knows it, and the tokens tried for one that does not.
PHRASE, OWN_TOKENS = "Once upon a time", 1_000


def before_training(run: TrainingRun, *, threads: int) -> list[str]:
    """Return what will be trained: data, model, steps, and how long it may take."""
    sizes = run.task.sizes()
    data = ", ".join(f"{count:,} {split}" for split, count in sizes.items())
    lines = [f"task: {run.task.name}; examples: {data}"]
    lines += [*model_lines(run.spec.model)[:1], *training_lines(run.spec)]
    left = run.spec.train.steps - run.progress.step
    where = run.device
    if run.spec.engine == "numpy":
        where = "NumPy"
    elif run.device == "cpu":
        where = f"cpu, {threads} thread{'' if threads == 1 else 's'}"
        where += ", by the native engine" if run.spec.engine == "native" else ""
    if run.peers is not None:
        where += f" in each of {run.peers.ranks.size} processes"
        where += ", which share the model" if run.peers.sharded else ""
    seconds = predicted_seconds(run, steps=left)
    about = "" if seconds is None else f"time: {duration(seconds)} or more; "
    lines.append(f"{about}computed on {where}; written to {run.directory.folder}")
    return lines


def predicted_seconds(run: TrainingRun, *, steps: int) -> float | None:
    """Predict the time of the steps, without evaluations; None where rates say nothing.

    Small models take longer, up to twice: rates know the work, not all of a step's overhead. The
    first steps then tell.
    """
    spec = run.spec
    if steps < FEW_STEPS or spec.engine != "torch" or run.device != "cpu":
        return None
    if spec.train.precision != "float32":
        return None  # the rates are those of float32
    rates = _rates(run.device, cache_folder(run.directory.folder.parent))
    length, source = _lengths(run.task)
    one = step_time(
        spec.model,
        rates,
        batch=spec.train.batch_size,
        length=min(length, spec.model.max_seq_len),
        source_length=source,
    )
    return one.total * spec.train.accumulate * steps


def _lengths(task: Task) -> tuple[int, int | None]:
    """Return the mean length of an example, and of its source if it has one."""
    batch = task.batch("train", np.arange(min(16, task.sizes()["train"])))
    length = max(1, round(float(batch.valid.sum(axis=1).mean())))
    if batch.source is None:
        return length, None
    return length, max(1, round(float(batch.source.valid.sum(axis=1).mean())))


def _rates(device: str, cache: Path) -> Rates:
    """Return this machine's rates at this number of threads, measured at most once a day."""
    file = cache / f"rates-{device}-{torch.get_num_threads()}-{torch.__version__}.json"
    try:
        if time.time() - file.stat().st_mtime < RATES_SECONDS:
            return from_json(Rates, file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InputError):
        pass  # measured anew
    from glassformer.lab.measure.machine_rates import calibrate

    rates = calibrate(device=device, seconds=MEASURED_SECONDS)
    try:
        make_folder(cache, below=cache)
        replace_file(file, to_json(rates).encode())
    except (OSError, FileError):
        pass  # a folder that cannot be written to keeps no rates
    return rates


def trained_text(run: TrainingRun, result: Mapping[str, Any]) -> str:
    """Return the results of a training in a few rounded lines, and where they are."""
    progress = run.progress
    state = "stopped" if run.stopped else "trained"
    lines = [f"{state}    {progress.step:,} steps in {duration(result['seconds'])}"]
    if result["loss"] is not None:
        lines.append(f"loss       {result['loss']:.4g} on the last batch")
    if result["val_loss"] is not None:
        val, more = float(result["val_loss"]), ""
        if result["val_accuracy"] is not None:
            more = f", accuracy {float(result['val_accuracy']):.1%}"
        if "bits_per_byte" in result:
            more += f", {result['bits_per_byte']:.3f} bits per byte"
        lines.append(f"validation {val:.4g} nats{more}")
    if progress.best_step not in (None, progress.step):
        lines.append(f"best       step {progress.best_step:,}, which the run's name means")
    lines.append(f"saved      {run.directory.folder}")
    return "\n".join(lines)


def after_training(run: TrainingRun) -> Commands:
    """Return three commands for a run that has ended, or how to go on with one that has not."""
    name = short_name(run.directory.folder)
    if run.stopped:
        return [(resume_command(run.directory.folder), "go on")]
    prompt = shlex.quote(example_prompt(run.task))
    use = (f"glass generate {name} {prompt}", "let it answer")
    if isinstance(run.spec.task, FinetuneTask) and _can_chat(run):
        use = (f"glass chat {name}", "talk to it")
    if run.spec.model.head_names() == ("answer",):
        use = (f"glass explore {pasted(run.directory.folder)}", "look around in a browser")
    return [
        (f"glass evaluate {name}", "how well, by group, on held-out examples"),
        (f"glass inspect {name} {prompt}", "where it attends, which heads matter"),
        use,
    ]


def _can_chat(run: TrainingRun) -> bool:
    """True if the files that came with the base have a chat template."""
    return any(
        "chat_template" in name or b'"chat_template"' in data for name, data in run.files.items()
    )


def resume_command(folder: Path) -> str:
    """Return the command that goes on with a run: its name, its folder."""
    elsewhere = "" if str(folder.parent) == "runs" else f" --runs {pasted(folder.parent)}"
    return f"glass resume {pasted(Path(folder.name))}{elsewhere}"


def after_evaluation(path: str) -> Commands:
    """Return commands for a run, or a model made of one, that was measured."""
    folder = RunRef.parse(path).folder
    name, other = short_name(folder), _newest_beside(folder)
    beside = (f"glass explore {pasted(folder)}", "look around in a browser")
    if other is not None:
        beside = (f"glass compare {name} {short_name(other)}", "side by side with another run")
    verify = (f"glass verify {name}", "that cache, batch and padding change nothing")
    if not (folder / "run.json").is_file():  # a quantized or converted model has no curves
        return [beside, verify]
    return [
        (f"glass report {name}", "all of it on one page, with curves and heads"),
        beside,
        verify,
    ]


def _newest_beside(folder: Path) -> Path | None:
    """Return the run of the same task and folder that was written last; None if there is none."""
    task = _task_of(folder / "run.json")
    others = [
        (file.stat().st_mtime, file.parent)
        for file in folder.parent.glob("*/run.json")
        if file.parent.name != folder.name and _task_of(file) == task
    ]
    return max(others)[1] if others else None


def _task_of(file: Path) -> object:
    """Return the task that a run's record names."""
    try:
        return json.loads(small_text(file))["task"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, FileError):
        return None  # a run that another process is just writing, or deleting


def after_quantizing(folder: Path, prompt: str, *, continues: bool = True) -> Commands:
    """Return commands for a model that was quantized; not every one can continue a text."""
    name = short_name(folder)
    use = (f"glass generate {name} {shlex.quote(prompt)}", "let it answer")
    if not continues:
        use = (f"glass inspect {name} {shlex.quote(prompt)}", "what it predicts, and why")
    return [
        (f"glass verify {name}", "that it computes what its weights say"),
        use,
        (f"glass explore {pasted(folder)}", "where it differs, in a browser"),
    ]


def after_converting(folder: Path, to: str, prompt: str, *, continues: bool = True) -> Commands:
    """Return commands for a model that was written in another format."""
    place, prompt = pasted(folder), shlex.quote(prompt)
    answer = (f"glass generate {place} {prompt}", "let it answer")
    if not continues:
        answer = (f"glass inspect {place} {prompt}", "what it predicts, and why")
    if to == "gguf":
        return [
            (f"glass verify {place}", "that nothing broke on the way"),
            answer,
            (f"llama-cli -m {place} -p {prompt}", "the same in llama.cpp"),
        ]
    if to == "native":
        return [(f"glass verify {place}", "that nothing broke on the way"), answer]
    commands = [
        (f"glass verify {place} --deep", "that it computes what transformers computes"),
        answer,
    ]
    if place == str(folder):  # nothing to quote within the quotes
        opened = f"t.AutoModelForCausalLM.from_pretrained('{folder}')"
        script = f'python -c "import transformers as t; print({opened})"'
        commands.append((script, "open it with transformers"))
    return commands


def after_inspecting(model: str, text: str) -> Commands:
    """Return commands for a text that was inspected."""
    name, text = pasted(model), shlex.quote(text)
    return [
        (f"glass inspect {name} {text} -o inspect.html", "all of it, as a page"),
        (f"glass explore {name}", "the same with a mouse"),
    ]


def after_report(name: str) -> Commands:
    """Return commands for a run that was reported."""
    return [(f"glass explore {pasted(name)}", "the same, alive in a browser")]


def short_name(folder: Path) -> str:
    """Return a run as it is typed here: its name if it is in ./runs, else its path."""
    name = folder.name
    plain = folder.parent == Path("runs") and not Path(name).exists()
    return pasted(name if plain and not name.startswith("-") else folder)


def example_prompt(task: Task) -> str:
    """Return a prompt in the task's own words: a source, a question, or the start of a text."""
    split = "val" if task.sizes().get("val") else "train"
    batch = task.batch(split, np.array([0]))
    tokenizer = task.tokenizer
    side = batch if batch.source is None else batch.source
    ids = [int(i) for i, real in zip(side.tokens[0], side.valid[0], strict=True) if real]
    special = {tokenizer.bos, tokenizer.eos}
    ids = [i for i in ids if i not in special]
    if batch.source is None and "next" in batch.targets:
        ids = ids[:PROMPT]  # so that something is left to predict
    return " ".join(tokenizer.decode(ids).split())


def model_prompt(tokenizer: Tokenizer | None) -> str:
    """Return a prompt for a model whose task is not known: a phrase, else tokens of its own."""
    if tokenizer is None or _reads(tokenizer, PHRASE):
        return PHRASE
    special = {tokenizer.pad, tokenizer.bos, tokenizer.eos, getattr(tokenizer, "sep", None)}
    ids: list[int] = []
    for i in range(min(tokenizer.vocab_size, OWN_TOKENS)):
        if i not in special and _reads(tokenizer, tokenizer.decode([*ids, i])):
            ids.append(i)
        if len(ids) == 3:
            break
    return tokenizer.decode(ids) if ids else PHRASE


def _reads(tokenizer: Tokenizer, text: str) -> bool:
    """Return True if a text survives the tokenizer, but for capitals and marks around it."""
    try:
        seen = tokenizer.decode(tokenizer.encode(text))
    except InputError:
        return False
    return bool(text.strip()) and text.casefold() in seen.casefold()
