"""`glass chat`: its options; `actions.chat` does the work."""

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
from glassformer.spec.decoding import DecodeSpec


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
    from glassformer.cli.shell.resolve import find_model

    path = find_model(model, runs=Path(runs), download=download)
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
