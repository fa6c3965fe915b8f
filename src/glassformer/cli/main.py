"""`glass`: the verbs, in the order in which they are listed, and how an error ends.

Each verb is a module that holds its options and is imported when that verb is called; torch is
imported only by verbs that need it, when they run.
"""

import functools
import importlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from glassformer.cli.shell.options import with_own_code
from glassformer.cli.shell.terminal import (
    CUT_OFF,
    give_up_stdout,
    is_cut_off,
    open_streams,
    tell,
    trouble,
)
from glassformer.kernels.threads import sleep_soon_while_waiting
from glassformer.spec.errors import GlassError

#: The verbs: the function of that name in `glassformer.cli.verbs`, `_` for `-`.
VERBS = (
    "demo",
    "list",
    "show",
    "design",
    "train",
    "lr-find",
    "evaluate",
    "extract",
    "generate",
    "inspect",
    "report",
    "explore",
    "verify",
    "quantize",
    "convert",
)
#: Verbs that open no run and no model.
WITHOUT_MODELS = ("demo", "list", "design")


class _Commands(Mapping[str, Any]):
    """The commands by name, each built when it is first requested."""

    def __getitem__(self, name: str) -> Any:
        if name not in VERBS:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


@functools.cache
def _command(name: str) -> Any:
    word = name.replace("-", "_")
    module = importlib.import_module(f"glassformer.cli.verbs.{word}")
    verb = getattr(module, "list_all" if word == "list" else word)
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    one.command(name=name)(verb if name in WITHOUT_MODELS else with_own_code(verb))
    return get_command(one)


class _Group(TyperGroup):
    """The group of all verbs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # typer only reads its commands, though it declares that it may add to them
        self.commands = cast(MutableMapping[str, Any], _Commands())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of `VERBS`."""
        return list(VERBS)


app = typer.Typer(
    cls=_Group,
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


def main() -> None:
    """Run a verb; an error that users can fix is three lines and an exit code."""
    debug = "--debug" in sys.argv
    open_streams()
    sleep_soon_while_waiting()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # a failure while Python shuts down could not be reported
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


def _tell(raised: GlassError) -> NoReturn:
    error = raised.in_command()
    if "--json" in sys.argv:
        problem = {"what": error.what, "where": error.where, "hint": error.hint}
        tell(json.dumps({"error": problem}))
    else:
        tell(f"error: {error}")
    sys.exit(raised.exit_code)


if __name__ == "__main__":
    main()
