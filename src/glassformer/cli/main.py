"""`glass`: one function for each verb. Torch is imported only by verbs that need it."""

import json
import sys
from typing import Annotated

import typer

from glassformer.spec.errors import GlassError

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
            help="A checkpoint folder, a preset, or package.module:factory. Without it: our own "
            "parts and every preset.",
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(help="One group of checks.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also what takes longer: compiled paths, full widths.")
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
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, RUN@last, RUN@120.")],
    split: Annotated[
        str | None, typer.Option(help="test, val, train, or the task's own; test without it.")
    ] = None,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Measure a run on held-out examples: by group, and against the truth where it is known."""
    from pathlib import Path

    from glassformer.cli import training

    result = training.evaluate_run(run, runs=Path(runs), split=split, device=device)
    typer.echo(training.evaluation_json(result) if as_json else training.evaluation_text(result))


@app.command(name="list")
def list_all(runs: Runs = "runs", as_json: AsJson = False) -> None:
    """Tasks, presets and runs."""
    from pathlib import Path

    from glassformer.cli import training

    found = training.listing(Path(runs))
    typer.echo(json.dumps(found) if as_json else training.listing_text(found))


@app.command(name="lr-find")
def lr_find(
    what: Annotated[str, typer.Argument(metavar="TASK|CONFIG", help="See `glass list`.")],
    overrides: Overrides = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Find a learning rate: a number, a range in which the loss falls, a command to paste."""
    from glassformer.cli import training

    found = training.lr_find(what, list(overrides or []), device=device)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(
        f"lr {found['lr']:.1e}  (falls steadily from {found['low']:.1e} to {found['high']:.1e})"
    )
    typer.echo(str(found["command"]))


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="MODEL", help="A run, RUN@120, a checkpoint.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads stdin.")],
    max_new: Annotated[int, typer.Option(help="New tokens at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest.")] = None,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages.")] = 1.0,
    beams: Annotated[int | None, typer.Option(help="Beam search of this width.")] = None,
    length_penalty: Annotated[float, typer.Option(help="Alpha of the beams' penalty.")] = 0.6,
    constrain: Annotated[str | None, typer.Option(help="A regex the output must match.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Recompute everything.")] = False,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or translate it with an encoder-decoder; text streams as it is made.

    Examples:

      glass generate reverse "a b c d" --beams 4

      glass generate text "Return the" --temperature 0.8 --top-p 0.95
    """
    from pathlib import Path

    from glassformer.cli import generating, training
    from glassformer.spec.decoding import BeamSpec, DecodeSpec

    path = training.find_run(run, Path(runs))
    eos = generating.eos_of(path)
    spec = DecodeSpec(
        max_new_tokens=max_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        eos=eos,
        seed=seed,
    )
    search = None
    if beams is not None:
        search = BeamSpec(width=beams, alpha=length_penalty, max_new_tokens=max_new, eos=eos)
    generating.run(
        path,
        prompt,
        spec=spec,
        beams=search,
        constrain=constrain,
        cached=not no_cache,
        as_json=as_json,
    )


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
