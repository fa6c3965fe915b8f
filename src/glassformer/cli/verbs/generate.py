"""`glass generate`: print the continuation of a prompt as it is generated."""

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from glassformer.cli.shell.terminal import let_through, tell
from glassformer.kernels.threads import taking
from glassformer.spec.decoding import (
    BeamSpec,
    ConstraintSpec,
    DecodeSpec,
    StepSpec,
    by_flag,
    without_effect,
)
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from glassformer.data.tokenizers.vocab import Tokenizer
    from glassformer.generation.generate import Request
    from glassformer.generation.prompts import Prompts
    from glassformer.generation.stepper import Stepper


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
    path = find_model(run, runs=Path(runs), download=download)
    if chat:
        from glassformer.cli.verbs.chat import talk

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
    if prompt is None or system is not None or chat_option:
        raise InputError(
            "a prompt is missing" if prompt is None else "--system and --chat-option are a chat's",
            hint="glass generate MODEL PROMPT, or glass chat MODEL",
        )
    if raw:
        let_through()
    code = _run(path, prompt, options=options, device=device, threads=threads, as_json=as_json)
    if code:
        raise typer.Exit(code)


def read_options(options: Mapping[str, Any], tokenizer: "Tokenizer") -> "Request":
    """Check the options that were typed; mention those that change nothing."""
    from glassformer.adapters.tokenizers.folder_tokenizer import end_ids, nameless_ids
    from glassformer.generation.generate import read_request

    request = read_request(
        options,
        tokenizer=tokenizer,
        eos=end_ids(tokenizer),
        forbidden=nameless_ids(tokenizer),
        spell=by_flag,
    )
    unused = ", ".join(map(by_flag, without_effect(options)))
    if unused:
        tell(f"note: {unused}: nothing is sampled at temperature 0; --temperature 1?")
    return request


def _run(
    path: str,
    text: str,
    *,
    options: Mapping[str, Any],
    device: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Generate, streaming; with beams, print the n best. Return the exit code: 130 after Ctrl-C."""
    from glassformer.adapters.load import load, load_tokenizer
    from glassformer.generation.generate import make_stepper
    from glassformer.generation.prompts import text_prompt
    from glassformer.lab.runs.process import check_threads, threads_of_decoding

    tokenizer = load_tokenizer(path)
    request = read_options(options, tokenizer)
    device = check_device(device)
    check_threads(threads)
    model = load(path).to(device)
    stepper = make_stepper(model, request.step)
    prompts = text_prompt(model.spec, tokenizer, sys.stdin.read() if text == "-" else text)
    count = threads_of_decoding(model.spec, asked=threads, device=device)
    show = _search if isinstance(request.decoding, BeamSpec) else _stream
    try:
        with taking(count):
            show(stepper, prompts, tokenizer, request, as_json=as_json)
    except KeyboardInterrupt:
        tell("\nstopped")
        return 128 + signal.SIGINT
    return 0


def _search(
    stepper: "Stepper",
    prompts: "Prompts",
    tokenizer: "Tokenizer",
    request: "Request",
    *,
    as_json: bool,
) -> None:
    from glassformer.generation.beam import beam_search
    from glassformer.generation.generate import with_texts

    spec = request.decoding
    assert isinstance(spec, BeamSpec)
    (found,) = beam_search(stepper, prompts, spec=spec, constraint=request.constraint)
    best = with_texts(found.hypotheses, spec=spec, tokenizer=tokenizer)
    if as_json:
        fields = ("text", "tokens", "logprobs", "score", "finish")
        rows = [{name: getattr(one, name) for name in fields} for one in best]
        print(json.dumps({"hypotheses": rows}))
        return
    for one in best:
        print(f"{one.score:9.4f}  {one.text or '(nothing)'}")


def _stream(
    stepper: "Stepper",
    prompts: "Prompts",
    tokenizer: "Tokenizer",
    request: "Request",
    *,
    as_json: bool,
) -> None:
    from glassformer.generation.streaming import Collected, stream

    spec = request.decoding
    assert not isinstance(spec, BeamSpec)
    made = Collected()
    for (new,) in stream(
        stepper, prompts, spec=spec, constraint=request.constraint, tokenizer=tokenizer
    ):
        made.add(new)
        if not as_json:
            print(new.text, end="", flush=True)
    one = made.result(made.text)
    result = {"text": one.text, "tokens": one.tokens, "logprobs": one.logprobs}
    print(json.dumps(result | {"finish": one.finish}) if as_json else "")
    if not one.text and not as_json:
        tell("(nothing: the model predicted the end at once; --min-new 5 asks for more)")
