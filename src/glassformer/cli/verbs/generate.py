"""`glass generate`: its options. `generating` does the work, of a chat `chatting`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from glassformer.cli.shell.options import AnyModel, AsJson, Device, Runs, Threads
from glassformer.spec.errors import InputError

#: What a chat takes as it is; the other options that were typed change how it decodes.
NOT_OF_DECODING = {
    *("run", "prompt", "chat", "system", "chat_option"),
    *("download", "device", "threads", "runs", "as_json"),
}


def generate(
    context: typer.Context,
    run: AnyModel,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation; PROMPT is its first message.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="Chat: instructions for the model.")] = None,
    chat_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Chat: for the template, enable_thinking=false."),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch org/name if it is not here; asks first.")
    ] = False,
    max_new: Annotated[int, typer.Option(help="New tokens at most.")] = 100,
    min_new: Annotated[int, typer.Option(help="New tokens at least, the end counted.")] = 0,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; 1 draws as the model says.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest tokens that hold this much probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes tokens that came before less likely.")
    ] = 1.0,
    forbid: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="No token of this text is made; repeatable."),
    ] = None,
    force: Annotated[str, typer.Option(help="The output begins with this text.")] = "",
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws; 0 by default.")] = None,
    beams: Annotated[int | None, typer.Option(help="Beam search of this width.")] = None,
    n_best: Annotated[
        int | None, typer.Option(help="Beams: how many to show; by default all.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Beams: alpha of the penalty on length; 0.6 by default.")
    ] = None,
    penalty: Annotated[
        str | None, typer.Option(help="Beams: its formula, gnmt (the default) or power.")
    ] = None,
    groups: Annotated[int | None, typer.Option(help="Beams: groups that are kept apart.")] = None,
    diversity: Annotated[
        float | None, typer.Option(help="Beams: how strongly groups avoid each other's tokens.")
    ] = None,
    constrain: Annotated[
        str | None, typer.Option(metavar="REGEX", help="The output must match it.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="A machine that must accept the output: parity, brackets-4, ..."),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Recompute everything at each token.")
    ] = False,
    lean: Annotated[
        bool, typer.Option("--lean", help="The fast step, worth it for long texts.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="The fast step through torch.compile.")
    ] = False,
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

      glass generate Qwen/Qwen3-0.6B --chat
    """
    from glassformer.cli.actions import generate as generating
    from glassformer.cli.shell import resolve

    path = resolve.find_model(run, runs=Path(runs), download=download)
    if chat:
        from glassformer.cli.actions import chat as chatting

        talk = chatting.open_conversation(
            path,
            _given(context),
            system=system,
            options=list(chat_option or ()),
            device=device,
            threads=threads,
        )
        raise typer.Exit(chatting.chat(talk, first=prompt, as_json=as_json))
    if prompt is None or system is not None or chat_option:
        raise InputError(
            "a prompt is missing" if prompt is None else "--system and --chat-option are a chat's",
            hint="glass generate MODEL PROMPT, or glass generate MODEL --chat",
        )
    options = generating.Options(
        max_new=max_new,
        min_new=min_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        forbid=tuple(forbid or ()),
        force=force,
        stop=tuple(stop or ()),
        seed=seed,
        beams=beams,
        n_best=n_best,
        penalty=penalty,
        length_penalty=length_penalty,
        groups=groups,
        diversity=diversity,
    )
    code = generating.run(
        path,
        prompt,
        options=options,
        pattern=constrain,
        machine=machine,
        cached=not no_cache,
        lean=lean,
        compiled=compiled,
        device=device,
        threads=threads,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)


def _given(context: typer.Context) -> dict[str, Any]:
    """The options of decoding that were typed, as against those that have their defaults."""
    source = context.get_parameter_source
    typed = (name for name in context.params if str(source(name)).endswith("COMMANDLINE"))
    return {name: context.params[name] for name in typed if name not in NOT_OF_DECODING}
