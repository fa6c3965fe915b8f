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
