"""`glass chat`, and `glass generate --chat`: a conversation at the terminal, or over a pipe.

Answers go to stdout as they are generated, everything else to stderr. Ctrl-C ends an answer, not
the conversation. Without a terminal every line of stdin is a question, until stdin ends.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from glassformer.cli.shell.options import (
    AnyModel,
    AsJson,
    ChatOption,
    Device,
    Download,
    Runs,
    System,
    Threads,
    takes,
)
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.resolve import find_model
from glassformer.cli.shell.terminal import tell
from glassformer.spec.decoding import BeamSpec, ConstraintSpec, DecodeSpec, StepSpec
from glassformer.spec.errors import GlassError, InputError, nearest
from glassformer.spec.options import options_of
from glassformer.spec.units import visible

if TYPE_CHECKING:
    from glassformer.adapters.chat.template import Conversation


@takes(DecodeSpec, into="options")
def chat(
    model: AnyModel,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The first message.")
    ] = None,
    system: System = None,
    chat_option: ChatOption = None,
    download: Download = False,
    *,
    options: dict[str, Any],
    device: Device = "cpu",
    threads: Threads = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Hold a conversation with a model.

    Ctrl-C ends an answer, Ctrl-D the conversation, /help lists commands. Without a terminal every
    line of stdin is a question. Examples:

      glass chat Qwen/Qwen3-0.6B

      glass chat runs/helper "What is a tap?" --temperature 0.7
    """
    path = find_model(model, runs=Path(runs), download=download)
    talk(
        path,
        prompt,
        options,
        system=system,
        template_options=list(chat_option or ()),
        device=device,
        threads=threads,
        as_json=as_json,
    )


def talk(
    path: str,
    first: str | None,
    options: Mapping[str, Any],
    *,
    system: str | None,
    template_options: list[str],
    device: str,
    threads: int | None,
    as_json: bool,
) -> NoReturn:
    """Chat until the input ends, and end the command."""
    held = open_conversation(
        path,
        options,
        system=system,
        template_options=template_options,
        device=device,
        threads=threads,
    )
    raise typer.Exit(converse(held, first=first, as_json=as_json))


HELP = {
    "/reset": "forget the conversation",
    "/system": "TEXT: instructions for the model; without text there are none",
    "/save": "FILE: add the conversation to a JSONL file, as fine-tuning reads it",
    "/help": "this list; a question that begins with / is typed with //",
    "/quit": "leave (or Ctrl-D)",
}


def open_conversation(
    path: str,
    options: Mapping[str, Any],
    *,
    system: str | None = None,
    template_options: list[str],
    device: str = "cpu",
    threads: int | None = None,
) -> "Conversation":
    """Open a model for a chat: its folder's own sampling settings, then the options given.

    `options` are decoding options by name; a chat takes those of `DecodeSpec`. Torch keeps the
    number of threads that suits the model: a chat lasts as long as the command.
    """
    import torch

    from glassformer.adapters.load import load
    from glassformer.lab.runs.process import check_threads, threads_of_decoding

    _refuse_foreign(options)
    device = check_device(device)
    check_threads(threads)
    adapter = load(path).to(device)
    torch.set_num_threads(threads_of_decoding(adapter.spec, asked=threads, device=device))
    return adapter.chat(
        system=system, template_options=dict(map(template_option, template_options)), **options
    )


def _refuse_foreign(options: Mapping[str, Any]) -> None:
    """Refuse options that a chat has no use for: beams, constraints, other steps."""
    own = {each.name: each.flag for each in options_of(DecodeSpec)}
    others = (BeamSpec, ConstraintSpec, StepSpec)
    flags = {each.name: each.flag for cls in others for each in options_of(cls)}
    for name in options:
        if name not in own:
            raise InputError(
                f"{flags[name]} does not go with --chat",
                hint=f"a chat takes: {', '.join(own.values())}",
            )


def template_option(text: str) -> tuple[str, Any]:
    """Parse `enable_thinking=false`, a variable of the template; a value is JSON, else a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"{text[:60]!r} is no option", hint="enable_thinking=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


# --- the loop -----------------------------------------------------------------------------------


def converse(
    conversation: "Conversation", *, first: str | None = None, as_json: bool = False
) -> int:
    """Chat until the input ends, and return the exit code."""
    live = sys.stdin.isatty()
    if live:
        import readline  # noqa: F401  importing it gives `input` line editing and a history

        tell("a chat: /help lists the commands, Ctrl-C ends an answer, Ctrl-D the conversation")
    show = _show_json if as_json else _show_text
    waiting = [] if first is None else [first]
    while True:
        try:
            line = waiting.pop() if waiting else _read(live)
        except KeyboardInterrupt:  # at the prompt: the line is given up
            tell("\n(/quit or Ctrl-D leaves)")
            continue
        if line is None or line.strip() == "/quit":
            return 0
        if not line.strip():
            continue
        try:
            if line.startswith("/") and not line.startswith("//"):
                obey(conversation, line)
            else:
                show(conversation, line.removeprefix("/"))
        except KeyboardInterrupt:  # a second one: at once, also while the question is read
            if not live:
                raise
            tell("\n(stopped)")
        except GlassError as error:
            if not live:
                raise
            tell(f"error: {error.in_command()}")


def obey(conversation: "Conversation", line: str) -> None:
    """Run one of the chat's commands."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    match word:
        case "/reset":
            conversation.reset()
            tell("(forgotten)")
        case "/system":
            conversation.instruct(rest or None)
            tell("(from the next question on)" if rest else "(no instructions)")
        case "/save" if rest:
            conversation.save(Path(rest).expanduser())
            tell(f"(added to {rest})")
        case "/save":
            raise InputError("/save needs a file", hint="/save talk.jsonl")
        case "/help":
            tell("\n".join(f"  {name:<9}{what}" for name, what in HELP.items()))
        case _:
            raise InputError(f"'{word}' is no command", hint=nearest(word, HELP))


def _read(live: bool) -> str | None:
    """Read the next line; return None at the end of the input."""
    if live:
        try:
            return input("> ")
        except EOFError:
            tell("")
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _show_text(conversation: "Conversation", question: str) -> None:
    for piece in answering(conversation, question):
        print(visible(piece), end="", flush=True)
    print(flush=True)
    turn = conversation.last
    assert turn is not None
    if turn.dropped:
        tell(f"(the oldest {turn.dropped} messages no longer fit and are out of the model's sight)")
    if turn.finish == "length":
        tell("(cut off: the answer reached its longest)")
    elif turn.finish == "stopped":
        tell("(stopped)")


def _show_json(conversation: "Conversation", question: str) -> None:
    for _ in answering(conversation, question):
        pass
    turn = conversation.last
    assert turn is not None
    result = {"text": turn.text, "tokens": list(turn.tokens), "finish": turn.finish}
    print(json.dumps({**result, "dropped": turn.dropped}), flush=True)


def answering(conversation: "Conversation", question: str) -> Iterator[str]:
    """Yield the pieces of an answer, until it ends or a Ctrl-C stops it after the next token."""
    from glassformer.lab.runs.process import stopping

    with (
        stopping(only=signal.SIGINT) as stopped,
        contextlib.closing(conversation.ask(question)) as pieces,
    ):
        for piece in pieces:
            yield piece
            if stopped:
                return
