"""`glass generate`: its options; `actions.generate` and `actions.chat` do the work."""

from pathlib import Path
from typing import Annotated, Any

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
from glassformer.spec.decoding import BeamSpec, ConstraintSpec, DecodeSpec, StepSpec
from glassformer.spec.errors import InputError


@takes(DecodeSpec, BeamSpec, ConstraintSpec, StepSpec, into="options")
def generate(
    run: AnyModel,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation; PROMPT is its first message.")
    ] = False,
    system: System = None,
    chat_option: ChatOption = None,
    download: Download = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Write control characters to a terminal as they are."),
    ] = False,
    *,
    options: dict[str, Any],
    device: Device = "cpu",
    threads: Threads = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, answer it, or chat.

    Text streams as it is made; an encoder-decoder answers its prompt. Examples:

      glass generate reverse "3 1 4 15 9" --beams 4

      glass generate text "Return the" --temperature 0.8 --top-p 0.95

      glass generate parity "0 1" --temperature 1 --machine parity

      glass chat Qwen/Qwen3-0.6B
    """
    from glassformer.cli.shell import resolve

    path = resolve.find_model(run, runs=Path(runs), download=download)
    if chat:
        from glassformer.cli.actions import chat as chatting

        talk = chatting.open_conversation(
            path,
            options,
            system=system,
            template_options=list(chat_option or ()),
            device=device,
            threads=threads,
        )
        raise typer.Exit(chatting.chat(talk, first=prompt, as_json=as_json))
    if prompt is None or system is not None or chat_option:
        raise InputError(
            "a prompt is missing" if prompt is None else "--system and --chat-option are a chat's",
            hint="glass generate MODEL PROMPT, or glass chat MODEL",
        )
    from glassformer.cli.actions import generate as generating
    from glassformer.cli.shell.terminal import let_through

    if raw:
        let_through()
    code = generating.run(
        path, prompt, options=options, device=device, threads=threads, as_json=as_json
    )
    if code:
        raise typer.Exit(code)
