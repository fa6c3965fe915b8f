"""`glass show`, `glass list`, `glass completion`: settings, names, a shell that completes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from glassformer.cli.shell.options import AsJson, Overrides, Runs, out_file
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.options import option


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A task or preset of `glass list`, a run, a config file, or a model on disk.",
        ),
    ],
    overrides: Overrides = None,
    diagram: bool = option(False, help="Draw the model: -o FILE.svg, else its parts as text."),
    narrow: bool = option(False, help="Draw the stack alone, for a narrow column."),
    program: bool = option(False, help="List what the model computes, operation by operation."),
    executors: bool = option(False, help="List what computes the model, and what cannot."),
    every_block: bool = option(False, help="Draw or list equal blocks one by one."),
    out: Annotated[
        str | None,
        out_file("Write a .toml, .json or .svg."),
    ] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Show a model and its settings, without training it.

    The settings are TOML; of a task or a run, `glass train` reads them. Examples:

      glass show reverse

      glass show digits train.lr=3e-4 -o digits.toml

      glass show runs/digits

      glass show qwen --diagram -o qwen.svg

      glass show qwen --program
    """
    from glassformer.cli.shell import resolve
    from glassformer.cli.shell.terminal import target_of, tell, write_file
    from glassformer.lab.show import show as shown

    others = {"--diagram": diagram, "--narrow": narrow, "-o": out is not None}
    if executors:
        refuse_with("--executors", {"--program": program, **others, "--every-block": every_block})
    if program:
        refuse_with("--program", others)
    drawn = not program and (
        diagram or narrow or every_block or (out or "").lower().endswith(".svg")
    )
    target = target_of(out, ("svg",) if drawn else ("toml", "json"))
    if what.count("/") == 1 and not what.endswith((".toml", ".json")):  # perhaps org/name
        what = resolve.find_model(what, runs=Path(runs))
    found = shown(what, overrides=list(overrides or ()), runs=runs)
    if executors:
        from glassformer.checks.executors import lacking

        lacks = lacking(found.model)
        if as_json:
            typer.echo(json.dumps({"name": found.name, "executors": lacks}))
        else:
            width = max(map(len, lacks))
            lines = [f"{name:<{width}}  {why or 'runs'}" for name, why in lacks.items()]
            typer.echo("\n".join(lines))
        return
    if program:
        typer.echo(
            found.operations_json() if as_json else found.operations(every_block=every_block)
        )
        return
    if drawn:
        from glassformer.lens.show.diagram import diagram as draw

        layout: Literal["wide", "narrow"] = "narrow" if narrow else "wide"
        picture = draw(found.model, layout=layout, every_block=every_block, title=found.name)
        if target is not None:
            write_file(target, (picture.svg() + "\n").encode())
        elif not as_json:
            typer.echo(str(picture))
    elif target is not None:
        as_file = found.to_json() if target.suffix.lower() == ".json" else found.text()
        write_file(target, (as_file + "\n").encode())
        if found.run is not None:
            tell(f"train it: glass train {target}")
    if as_json:
        typer.echo(found.to_json())
    elif target is None and not drawn:
        typer.echo(found.text())


def refuse_with(option: str, others: Mapping[str, bool]) -> None:
    """Refuse options that are given together with one that leaves them nothing to do."""
    for name, given in others.items():
        if given:
            raise InputError(f"{option} and {name} are two ways to show a model", hint="use one")


def list_all(runs: Runs = "runs", as_json: AsJson = False) -> None:
    """List tasks, presets, suites and your runs.

    Examples:

      glass list

      glass list --json
    """
    from glassformer.cli.shell import terminal
    from glassformer.lab.show import catalogue

    found = catalogue(runs)
    typer.echo(json.dumps(found.to_dict()) if as_json else found.text(width=terminal.columns()))


SHELLS = ("bash", "zsh", "fish")


def completion(
    shell: Annotated[
        str,
        typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=lambda: SHELLS),
    ],
) -> None:
    """Print the script that completes `glass` in your shell.

    Examples:

      eval "$(glass completion bash)"

      glass completion zsh > ~/.zfunc/_glass

      glass completion fish > ~/.config/fish/completions/glass.fish
    """
    if shell not in SHELLS:
        raise InputError(f"no completion for '{shell}'", hint=nearest(shell, SHELLS))
    # typer's own, which it does not list among its exports
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="glass", complete_var="_GLASS_COMPLETE", shell=shell)
    typer.echo(script)
