"""`glass`: one function for each verb. Torch is imported only by verbs that need it."""

import json
import os
import sys
from typing import Annotated, Any

import typer

from glassformer.cli.design import design
from glassformer.cli.explore import explore
from glassformer.cli.inspect import inspect
from glassformer.cli.quantize import quantize
from glassformer.cli.report import report
from glassformer.spec.errors import GlassError, InputError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A laboratory for transformers in which every claim is checked.",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"glassformer {version('glassformer')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Design, train, look inside, generate, quantize, convert; and prove that nothing broke."""
    context.obj = {"debug": debug}


@app.command()
def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A run, a checkpoint, a Hugging Face folder, a preset, or "
            "package.module:factory. Without it: our own parts and every preset.",
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(help="One group of checks.")] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also what takes longer: compiled, brute force, full widths."),
    ] = False,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="A foreign model that may look ahead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """The equality certificate: two ways of computing the same thing, compared.

    Exit 1 if any check fails. Examples:

      glass verify

      glass verify qwen --only cache

      glass verify my_package.models:tiny_model --json
    """
    if "numpy" not in sys.modules:
        # Its products here are small; on a busy machine a second thread makes them much slower.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from glassformer.cli.certificate import certificate, show

    report = certificate(model, only=only, deep=deep, causal=not bidirectional)
    show(report, as_json=as_json)
    if report.failed:
        raise typer.Exit(1)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="train.lr=1e-3, task.max_length=8, ..."),
]
Runs = Annotated[str, typer.Option(help="The folder that holds the runs.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Output = Annotated[str | None, typer.Option("-o", "--output", help="A file to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else there.")]


@app.command()
def train(
    what: Annotated[str, typer.Argument(metavar="TASK|CONFIG", help="See `glass list`.")],
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; the task's without it.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Short for train.steps=N.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for train.seed=N.")] = None,
    engine: Annotated[str | None, typer.Option(help="torch or numpy.")] = None,
    device: Device = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start it anew.")] = False,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Train a model on a task; the run can be killed at any moment and resumed exactly.

    Examples:

      glass train reverse

      glass train digits --engine numpy --name by-hand train.steps=500

      glass train runs/reverse/config.toml --name again
    """
    from pathlib import Path

    from glassformer.cli import training

    given = list(overrides or [])
    shorts = {"train.steps": steps, "train.seed": seed, "engine": engine}
    given += [f"{key}={value}" for key, value in shorts.items() if value is not None]
    code = training.train(
        what,
        given,
        name=name,
        runs=Path(runs),
        device=device,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)


@app.command()
def evaluate(
    run: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A run, RUN@last, RUN@120; with a suite any model."),
    ],
    split: Annotated[
        str | None, typer.Option(help="test, val, train, or the task's own; test without it.")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="smallbench or lm-eval.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Of the suite: names with commas.")] = None,
    tasks_dir: Annotated[str | None, typer.Option(help="A folder of lm-eval's YAML tasks.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Of lm-eval: examples of each task at most.")
    ] = None,
    items: Annotated[int | None, typer.Option(help="Of smallbench: questions of each.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of smallbench: draws the questions.")] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="What was taken for what, as .png, .svg or .csv."),
    ] = None,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Measure a run on held-out examples: by group, and against the truth where it is known.

    Examples:

      glass evaluate reverse

      glass evaluate digits -o confusion.png

      glass evaluate lm --suite smallbench

      glass evaluate Qwen/Qwen3-0.6B --suite lm-eval --tasks-dir my_tasks --tasks my_task
    """
    from pathlib import Path

    from glassformer.cli import training

    if suite is not None:
        from glassformer.cli import finding, suites

        training.check_device(device)
        if split is not None or output is not None:
            raise InputError("--split and -o are of a run's own task", hint="leave out --suite")
        asked = suites.Asked(
            tasks=tuple(filter(None, (tasks or "").split(","))),
            tasks_dir=None if tasks_dir is None else Path(tasks_dir),
            limit=limit,
            items=items,
            seed=seed,
            device=device,
        )
        outcome = suites.run_suite(suite, finding.find_model(run, runs=Path(runs)), asked)
        typer.echo(json.dumps(outcome.data) if as_json else outcome.text)
        return
    if not (tasks is tasks_dir is limit is items is seed is None):
        raise InputError(
            "--tasks, --tasks-dir, --limit, --items and --seed are a suite's",
            hint="--suite smallbench, or --suite lm-eval",
        )
    from glassformer.cli import figures, terminal

    target = figures.target_of(output, figures.CONFUSION_ENDINGS)
    result = training.evaluate_run(run, runs=Path(runs), split=split, device=device)
    if as_json:
        typer.echo(training.evaluation_json(result))
    else:
        typer.echo(training.evaluation_text(result, width=terminal.columns()))
    if target is not None:
        figures.save_confusion(result, target, title=f"{run}, {result.split}")


@app.command(name="list")
def list_all(runs: Runs = "runs", as_json: AsJson = False) -> None:
    """Tasks, presets, suites and runs."""
    from pathlib import Path

    from glassformer.cli import training

    found = training.listing(Path(runs))
    typer.echo(json.dumps(found) if as_json else training.listing_text(found))


@app.command(name="lr-find")
def lr_find(
    what: Annotated[str, typer.Argument(metavar="TASK|CONFIG", help="See `glass list`.")],
    overrides: Overrides = None,
    output: Output = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Find a learning rate: a curve, a range in which the loss falls, a command to paste.

    -o writes the curve as .png, .svg or .csv.
    """
    from glassformer.cli import figures, training

    target = figures.target_of(output, figures.LR_ENDINGS)
    tested = training.lr_find(what, list(overrides or []), device=device)
    found = training.lr_json(tested, what, list(overrides or []))
    if target is not None:
        figures.save_lr(tested, target, title=what)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(figures.lr_text(tested))
    typer.echo(
        f"lr {found['lr']:.1e}  (falls steadily from {found['low']:.1e} to {found['high']:.1e})"
    )
    typer.echo(str(found["command"]))


@app.command()
def demo(
    name: Annotated[
        str | None, typer.Option(help="Name of the run; without it demo, demo-2, ...")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Fewer than the recipe's, for a hurry.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the first weights and the order.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the run anew.")] = False,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """One minute, nothing to prepare: train a model, verify it, decode with it, look inside."""
    from pathlib import Path

    from glassformer.cli import demo as demonstration

    code = demonstration.demo(
        runs=Path(runs), name=name, steps=steps, seed=seed, overwrite=overwrite, as_json=as_json
    )
    if code:
        raise typer.Exit(code)


@app.command()
def generate(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A run, RUN@120, a checkpoint, a Hugging Face folder, org/name."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - reads stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk; PROMPT is the first word.")] = False,
    system: Annotated[str | None, typer.Option(help="Of a chat: its instructions.")] = None,
    chat_option: Annotated[
        list[str] | None, typer.Option(help="Of its template: enable_thinking=false.")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch org/name if it is not here; asks first.")
    ] = False,
    max_new: Annotated[int, typer.Option(help="New tokens at most.")] = 100,
    min_new: Annotated[int, typer.Option(help="New tokens at least, the end among them.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest.")] = None,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages.")] = 1.0,
    forbid: Annotated[
        list[str] | None, typer.Option(help="Tokens of this text never come; repeatable.")
    ] = None,
    force: Annotated[str, typer.Option(help="The output begins with this text.")] = "",
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; 0 without it.")] = None,
    beams: Annotated[int | None, typer.Option(help="Beam search of this width.")] = None,
    n_best: Annotated[int | None, typer.Option(help="Hypotheses to show; all without it.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Alpha of the beams' penalty; 0.6 without it.")
    ] = None,
    penalty: Annotated[str | None, typer.Option(help="gnmt or power: the formula.")] = None,
    groups: Annotated[int | None, typer.Option(help="Groups of beams to keep apart.")] = None,
    diversity: Annotated[float | None, typer.Option(help="What keeps groups apart.")] = None,
    constrain: Annotated[str | None, typer.Option(help="A regex the output must match.")] = None,
    machine: Annotated[
        str | None, typer.Option(help="A machine that must accept it: parity, brackets-4, ...")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Recompute everything.")] = False,
    lean: Annotated[bool, typer.Option("--lean", help="The fast step, for long texts.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="The fast step, compiled.")] = False,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or answer it with an encoder-decoder; text streams as it is made.

    Examples:

      glass generate reverse "3 1 4 15 9" --beams 4

      glass generate text "Return the" --temperature 0.8 --top-p 0.95

      glass generate parity "0 1" --temperature 1 --machine parity

      glass generate Qwen/Qwen3-0.6B --chat
    """
    from pathlib import Path

    from glassformer.cli import finding, generating

    path = finding.find_model(run, runs=Path(runs), download=download)
    if chat:
        from glassformer.cli import chatting

        own = ("run", "prompt", "chat", "system", "chat_option", "download", "device", "runs")
        given = _given(context, leave=(*own, "as_json"))
        talk = chatting.open_conversation(
            path, given, system=system, options=list(chat_option or ()), device=device
        )
        raise typer.Exit(chatting.chat(talk, first=prompt, as_json=as_json))
    if prompt is None or system is not None or chat_option:
        raise InputError(
            "a prompt is missing" if prompt is None else "--system and --chat-option are a chat's",
            hint="glass generate MODEL PROMPT, or glass generate MODEL --chat",
        )
    options = generating.Options(
        max_new=max_new,
        min_new=min_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        forbid=tuple(forbid or ()),
        force=force,
        stop=tuple(stop or ()),
        seed=seed,
        beams=beams,
        n_best=n_best,
        penalty=penalty,
        length_penalty=length_penalty,
        groups=groups,
        diversity=diversity,
    )
    code = generating.run(
        path,
        prompt,
        options=options,
        pattern=constrain,
        machine=machine,
        cached=not no_cache,
        lean=lean,
        compiled=compiled,
        device=device,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)


def _given(context: typer.Context, *, leave: tuple[str, ...]) -> dict[str, Any]:
    """The options that were typed, by name, as against those that have their defaults."""
    source = context.get_parameter_source
    typed = (name for name in context.params if str(source(name)).endswith("COMMANDLINE"))
    return {name: context.params[name] for name in typed if name not in leave}


@app.command()
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A run, a checkpoint, a Hugging Face folder, a GGUF file."
        ),
    ],
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="A folder, or a .gguf file, that does not exist.")
    ],
    to: Annotated[str, typer.Option(help="hf, native or gguf.")],
    dtype: Annotated[
        str | None, typer.Option(help="For gguf: f32 (as it is unless said), f16 or q8_0.")
    ] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Write a model in another format; an import goes back byte for byte.

    Examples:

      glass convert path/to/Qwen3-0.6B mine --to native

      glass convert runs/text exported --to hf

      glass convert runs/text text.gguf --to gguf --dtype q8_0
    """
    from pathlib import Path

    from glassformer.cli import converting

    converting.convert(model, Path(folder), to=to, dtype=dtype, runs=Path(runs), as_json=as_json)


app.command()(design)
app.command()(explore)
app.command()(inspect)
app.command()(quantize)
app.command()(report)


def main() -> None:
    """Run a verb; an error that people can mend is three lines and an exit code."""
    debug = "--debug" in sys.argv
    try:
        app()
    except GlassError as error:
        if debug:
            raise
        if "--json" in sys.argv:
            problem = {"what": error.what, "where": error.where, "hint": error.hint}
            print(json.dumps({"error": problem}), file=sys.stderr)
        else:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
