"""Commands as typer has them, but for two things: how help is laid out, and how texts are read.

In help, values have people's words, text is as wide as the terminal, and an example is one line.
"""

import inspect
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from glassformer.cli.shell.options import FORMER
from glassformer.cli.shell.terminal import WIDEST

#: Settings of every command.
SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": WIDEST,
    # Python's name of the option is taken, too
    "token_normalize_func": lambda word: "max-new" if word == "max-new-tokens" else word,
}

#: The kinds of numbers that are read here, in words.
NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


class _Conversion:
    """Read texts, numbers and what was not typed; leave everything else to typer.

    typer converts every value by pydantic, whose import takes a third of the time of `glass list`,
    and whose messages are written for programmers.
    """

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        """Return the value of a parameter, as typer's own conversion does."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        kind = param.type_descriptor.annotation
        if kind is str and isinstance(value, str) and not several:
            return value
        if kind == list[str] and not isinstance(value, str):
            return list(value)
        limits = param.type_descriptor.parameter_info
        if kind in NUMBERS and not several and limits.min is None and limits.max is None:
            try:
                return kind(value)
            except ValueError:
                raise BadParameter(f"'{value}' is not {NUMBERS[kind]}", ctx, param) from None
        param._runtime_param = None  # typer makes its own
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _read_quickly(params: list[Any]) -> list[Any]:
    """Give parameters the conversion above; a release of typer without pydantic ignores it."""
    for param in params:
        if getattr(param, "_runtime_param", None) is None:
            param._runtime_param = _Conversion()
    return params


class _Laid:
    """How help is laid out, for a command and for a group of them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` too, which read texts without pydantic."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # a command of typer
        return _read_quickly(params)

    def format_help_text(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the text and the examples."""
        write_text(self.help or "", formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List arguments, then options."""
        write_parameters(self.get_params(ctx), ctx, formatter)


class Verb(_Laid, TyperCommand):
    """A command whose help is laid out by this module."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return `TASK [SETTING=VALUE ...] [OPTIONS]`."""
        pieces = []
        for param in self.params:
            if param.param_type_name == "argument" and not getattr(param, "hidden", False):
                name = value_name(param) + (" ..." if param.nargs == -1 else "")
                pieces.append(name if param.required else f"[{name}]")
        return [*pieces, "[OPTIONS]"]


class VerbGroup(_Laid, TyperGroup):
    """A command with commands of its own, such as `glass runs`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return `[OPTIONS] [COMMAND ...]`."""
        return ["[OPTIONS]", "[COMMAND ...]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the options, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def write_text(help_text: str, formatter: Any) -> None:
    """Wrap the text to the terminal's width; the examples stay as they are written."""
    text, _, examples = inspect.cleandoc(help_text).partition("Examples:\n")
    with formatter.indentation():
        for paragraph in filter(str.strip, text.split("\n\n")):
            formatter.write_paragraph()
            formatter.write_text(" ".join(paragraph.split()))
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    if lines:
        formatter.write_paragraph()
        formatter.write("Examples:\n" + "".join(f"  {line}\n" for line in lines))


def write_parameters(params: Any, ctx: Any, formatter: Any) -> None:
    """List arguments, then options; each with its value's name and its default."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in params:
        if getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            sections["Arguments"].append((value_name(param), _help_of(param, ctx)))
        else:
            sections["Options"].append((_spelled(param), _help_of(param, ctx)))
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def value_name(param: Any) -> str:
    """Return what stands for a parameter's value: its own metavar, N for a number, else a name."""
    if param.metavar:
        return str(param.metavar)
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if kind in (int, float):
        return "N" if kind is int else "NUMBER"
    return str(param.name).replace("_", "-").upper()


def _spelled(param: Any) -> str:
    names = ", ".join(sorted((name for name in param.opts if name not in FORMER), key=len))
    if param.secondary_opts:
        return f"{names} / {', '.join(param.secondary_opts)}"
    return names if getattr(param, "is_flag", False) else f"{names} {value_name(param)}"


def _help_of(param: Any, ctx: Any) -> str:
    text = param.help or ""
    default = param.get_default(ctx) if getattr(param, "show_default", False) else None
    if default is None or isinstance(default, bool) or default in ((), []):
        return text
    return f"{text} [default: {default}]"
