"""`glass`: the verbs by group, how help is laid out, and how an error ends.

Each verb is a module that holds its options and is imported when that verb is called; torch is
imported only by verbs that need it, when they run. An error that users can fix is three lines and
an exit code; an error of ours is three lines and a file with the traceback.
"""

import difflib
import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.main import get_command

from glassformer.cli.shell.help import SETTINGS, Verb, VerbGroup, write_parameters
from glassformer.cli.shell.options import gathered, with_own_code
from glassformer.cli.shell.terminal import (
    CUT_OFF,
    give_up_stdout,
    is_cut_off,
    open_streams,
    tell,
    trouble,
)
from glassformer.kernels.threads import sleep_soon_while_waiting, widest_blas
from glassformer.spec.errors import FileError, GlassError, InputError, MachineError, nearest

#: The verbs by group: the function of that name in the module of that name, `_` for `-`.
GROUPS: dict[str, tuple[str, ...]] = {
    "Begin": ("demo", "list", "show"),
    "Train": ("prepare", "design", "doctor", "lr-find", "train", "resume", "finetune", "sweep"),
    "Measure": ("evaluate", "runs", "compare", "report"),
    "Use": ("generate", "chat", "embed", "serve", "explore"),
    "Look inside": ("inspect", "extract"),
    "Check and move": ("verify", "diff", "quantize", "convert"),
    "Shell": ("completion",),
}
#: Verbs that are read with another one, in its module.
WITH = {
    "list": "show",
    "completion": "show",
    "finetune": "train",
    "resume": "train",
    "lr-find": "train",
    "compare": "runs",
    "chat": "generate",
}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)
#: Verbs that open no run and no model.
WITHOUT_MODELS = ("demo", "list", "design", "runs", "compare", "completion")
#: The exit code of an error of ours: a bug, not a bad input.
OUR_FAULT = 70
#: The base of all errors that the option parser raises, which typer exports one leaf of.
USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[2]


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
    module = importlib.import_module(f"glassformer.cli.verbs.{WITH.get(name, word)}")
    found = getattr(module, "list_all" if word == "list" else word)
    if isinstance(found, typer.Typer):  # a verb with verbs of its own
        return get_command(found)
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    verb = gathered(found)
    verb = verb if name in WITHOUT_MODELS else with_own_code(verb)
    one.command(name=name, cls=Verb, context_settings=SETTINGS)(verb)
    return get_command(one)


class _Group(VerbGroup):
    """The group of all verbs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # typer only reads its commands, though it declares that it may add to them
        self.commands = cast(MutableMapping[str, Any], _Commands())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of `GROUPS`."""
        return list(VERBS)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return `COMMAND ...`."""
        return ["COMMAND ..."]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the verbs by group, then the options, then where to read on."""
        width = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            rows = [(f"{v:<{width}}", self.commands[v].get_short_help_str(200)) for v in verbs]
            with formatter.section(title):
                formatter.write_dl(rows)
        write_parameters(self.get_params(ctx), ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text("glass help COMMAND explains one, with examples.")


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
    help="Train, inspect, test and serve small transformers.",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"glassformer {version('glassformer')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Design, train, look inside, generate, quantize, convert; and prove that nothing broke."""
    # `main` looks for --debug itself: an error may come before the options are read.


# --- running --------------------------------------------------------------------------------------


def main() -> None:
    """Run a verb, and end with an exit code."""
    debug = "--debug" in sys.argv
    open_streams()
    sleep_soon_while_waiting()
    widest_blas()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # __main__ has left it so
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if "_GLASS_COMPLETE" in os.environ:
                from typer._completion_classes import completion_init

                completion_init()
            code = app(_arguments(sys.argv[1:]), prog_name="glass", standalone_mode=False)
        finally:
            sys.stdout.flush()  # a failure while Python shuts down could not be reported
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except GlassError as error:
        if debug:
            raise
        _tell(error)
    except USAGE_ERROR as error:
        if debug:
            raise
        _tell(explained(error))
    except MemoryError as error:
        if debug:
            raise
        _tell(out_of_memory(error))
    except (OSError, SystemExit) as error:
        if is_cut_off(error):
            give_up_stdout()
            sys.exit(CUT_OFF)
        if debug or isinstance(error, SystemExit):
            raise
        give_up_stdout()
        _tell(trouble(error))
    except Exception as error:
        if debug:
            raise
        _tell(out_of_memory(error) if is_out_of_memory(error) else incident(error))
    except BaseException as error:
        if debug or type(error).__module__ != "pyo3_runtime":
            raise
        _tell(FileError(f"a library gave up on a file: {str(error)[:200]}"))  # a panic of Rust's
    sys.exit(code if isinstance(code, int) else 0)


def _arguments(given: list[str]) -> list[str]:
    """Read `glass help train` as `glass train --help`, and nothing at all as `--help`."""
    if given[:1] == ["help"]:
        return [*given[1:], "--help"]
    return given or ["--help"]


def explained(error: Any) -> InputError:
    """Turn an error of the option parser into one of ours: what is wrong, and what to type."""
    context, what = error.ctx, str(error.format_message())
    path = context.command_path if context is not None else "glass"
    hint = f"{path} --help"
    if (option := getattr(error, "option_name", None)) and "No such option" in what:
        what, verb = f"{path} has no option {option}", path.rpartition(" ")[2]
        known = [name for param in context.command.params for name in param.opts]
        hint = _argument_hint(context.command, path, option) or (
            _option_hint(option, verb, known) or hint
        )
    elif what.startswith("No such command"):
        name = what.split("'")[1] if "'" in what else ""
        what, hint = f"there is no command '{name}'", nearest(name, VERBS)
    elif what.startswith("Missing "):
        word = what.removeprefix("Missing ").rstrip(".")
        what = f"{path} needs {word.removeprefix('argument ').replace(chr(39), '')}"
    elif what.startswith("Got unexpected extra argument"):
        what = what[0].lower() + what[1:]
    else:
        what = what.replace("Invalid value for ", "").replace("Invalid value: ", "").rstrip(".")
    return InputError(what, hint=hint)


def _argument_hint(command: Any, path: str, option: str) -> str:
    """Return where a word belongs that was typed as an option and is an argument (`--prompt`)."""
    words = [param for param in command.params if param.param_type_name == "argument"]
    for param in words:
        if option.lstrip("-").partition("=")[0].replace("-", "_") == param.name:
            shown = " ".join(each.metavar or each.name.upper() for each in words)
            return f"no dashes: {path} {shown}"
    return ""


def _option_hint(option: str, verb: str, known: list[str]) -> str:
    """Return the setting that an unknown option means (`--lr`: `train.lr=...`), or a near one."""
    word = option.lstrip("-").partition("=")[0].replace("-", "_")
    close = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
    if verb in ("train", "lr-find", "finetune", "show"):
        from glassformer.spec.train import setting_for

        setting = setting_for(word)
        if setting is not None and not close:
            value = _typed_value(option)
            return f"settings have no dashes: {setting}={value or '...'}"
    if not close:  # the same words, more or fewer: --max-new-words for --max-new
        typed = {*word.split("_")}
        shared = {name: len(typed & {*name.strip("-").split("-")}) for name in known}
        most = max(shared.values(), default=0)
        close = [name for name, count in shared.items() if count == most > 0][:1]
    return f"did you mean '{close[0]}'?" if close else ""


def _typed_value(option: str) -> str:
    """Return what was typed behind the option, if it looks like its value."""
    for index, word in enumerate(sys.argv):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and index + 1 < len(sys.argv):
            following = sys.argv[index + 1]
            return "" if following.startswith("-") or "=" in following else following
    return ""


def is_out_of_memory(error: Exception) -> bool:
    """Return True for torch's own kinds of a MemoryError."""
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError)
        and any(words in text for words in ("not enough memory", "can't allocate memory"))
    )


def out_of_memory(error: Exception) -> MachineError:
    """Return three lines for what the machine could not allocate."""
    first = str(error).partition("\n")[0][:200]
    return MachineError(f"out of memory: {first}".rstrip(": "), hint="a smaller batch or model")


class _OurFault(GlassError):
    exit_code = OUR_FAULT


def incident(error: Exception) -> GlassError:
    """Write the traceback of an error of ours to a file, and return three lines about it."""
    text = "".join(traceback.format_exception(error))
    command = " ".join(sys.argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    what = f"a mistake inside glassformer: {type(error).__name__}: {str(error)[:200]}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"glass-{stamp}-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(f"{command}\npython {sys.version}\n\n{text}")
    except OSError:
        return _OurFault(what, hint="this is our fault, not yours; --debug shows where it happened")
    return _OurFault(
        what, where=file.name, hint="this is our fault, not yours; please report it with that file"
    )


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
