"""`glass`: the verbs, in the order in which they are listed, and how an error ends.

Each verb is a module that holds its options; torch is imported only when one that needs it runs.
"""

import json
import signal
import sys
from typing import Annotated, NoReturn

import typer

from glassformer.cli.shell.process import waiting_briefly
from glassformer.cli.shell.terminal import (
    CUT_OFF,
    give_up_stdout,
    is_cut_off,
    open_streams,
    tell,
    trouble,
)
from glassformer.cli.verbs.convert import convert
from glassformer.cli.verbs.demo import demo
from glassformer.cli.verbs.design import design
from glassformer.cli.verbs.evaluate import evaluate
from glassformer.cli.verbs.explore import explore
from glassformer.cli.verbs.generate import generate
from glassformer.cli.verbs.inspect import inspect
from glassformer.cli.verbs.list import list_all
from glassformer.cli.verbs.lr_find import lr_find
from glassformer.cli.verbs.quantize import quantize
from glassformer.cli.verbs.report import report
from glassformer.cli.verbs.train import train
from glassformer.cli.verbs.verify import verify
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
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Design, train, look inside, generate, quantize, convert; and prove that nothing broke."""
    # `main` looks for --debug itself: an error may come before the options are read.


app.command()(demo)
app.command(name="list")(list_all)
app.command()(design)
app.command()(train)
app.command(name="lr-find")(lr_find)
app.command()(evaluate)
app.command()(generate)
app.command()(inspect)
app.command()(report)
app.command()(explore)
app.command()(verify)
app.command()(quantize)
app.command()(convert)


def main() -> None:
    """Run a verb; an error that people can mend is three lines and an exit code."""
    debug = "--debug" in sys.argv
    open_streams()
    waiting_briefly()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # at Python's own end nobody could tell that it failed
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except GlassError as error:
        if debug:
            raise
        _tell(error)
    except (OSError, SystemExit) as error:
        if is_cut_off(error):
            give_up_stdout()
            sys.exit(CUT_OFF)
        if debug or isinstance(error, SystemExit):
            raise
        give_up_stdout()
        _tell(trouble(error))


def _tell(error: GlassError) -> NoReturn:
    if "--json" in sys.argv:
        problem = {"what": error.what, "where": error.where, "hint": error.hint}
        tell(json.dumps({"error": problem}))
    else:
        tell(f"error: {error}")
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
