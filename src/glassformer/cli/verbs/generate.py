"""`glass generate`: print the continuation of a prompt as it is generated. `glass chat`: converse.

A chat's answers go to stdout as they are generated, everything else to stderr. Ctrl-C ends an
answer, not the conversation. Without a terminal every line of stdin is a question, until stdin
ends.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from glassformer.cli.shell.options import (
    LIBRARIES,
    AnyModel,
    AsJson,
    Backend,
    ChatOption,
    Device,
    Download,
    Runs,
    System,
    Threads,
    takes,
)
from glassformer.cli.shell.process import check_device, load_by, opening
from glassformer.cli.shell.resolve import find_model
from glassformer.cli.shell.terminal import let_through, tell
from glassformer.kernels.threads import taking
from glassformer.spec.checks import one_of
from glassformer.spec.decoding import (
    BeamSpec,
    ConstraintSpec,
    DecodeSpec,
    StepSpec,
    by_flag,
    chat_options,
    without_effect,
)
from glassformer.spec.errors import GlassError, InputError, nearest
from glassformer.spec.options import option, options_of
from glassformer.spec.units import visible

if TYPE_CHECKING:
    from glassformer.adapters.chat.template import Conversation
    from glassformer.data.tokenizers.vocab import Tokenizer
    from glassformer.generation.request import Request
    from glassformer.models.prompts import Prompts
    from glassformer.models.stepping import Stepper
    from glassformer.spec.model import ModelSpec


#: Digits of a token id.
LONGEST_ID = 12
#: Tokens of one short piece again and again that are a text that repeats itself.
REPEATED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """Where a model is found and what computes it, and what a chat is told."""

    system: System = None
    chat_option: ChatOption = None
    download: Download = False
    backend: Backend = "native"
    device: Device = "cpu"
    threads: Threads = None
    runs: Runs = "runs"

    def find(self, name: str) -> str:
        """Return the path of a model."""
        return find_model(name, runs=Path(self.runs), download=self.download)

    def check(self) -> str:
        """Refuse what this machine does not have; return the device."""
        from glassformer.kernels.threads import check_threads

        one_of("--backend", self.backend, LIBRARIES)
        check_threads(self.threads)
        return check_device(self.device)


@takes(DecodeSpec, BeamSpec, ConstraintSpec, StepSpec, into="options")
def generate(
    run: AnyModel,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin.")
    ] = None,
    chat: bool = option(False, help="Hold a conversation; PROMPT is its first message."),
    draft: str | None = option(
        None,
        metavar="MODEL",
        help="A smaller or quantized model of the same tokenizer that guesses tokens ahead.",
    ),
    ids: bool = option(False, help="PROMPT is token ids, such as '1 403 25'; so is the output."),
    raw: bool = option(False, help="Write control characters to a terminal as they are."),
    *,
    options: dict[str, Any],
    opening: Opening,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, answer it, or chat.

    Text streams as it is made; an encoder-decoder answers its prompt. Examples:

      glass generate reverse "3 1 4 15 9" --beams 4

      glass generate text "Return the" --temperature 0.8 --top-p 0.95

      glass generate parity "0 1" --temperature 1 --machine parity

      glass generate path/to/model "1 403 25" --ids

      glass chat Qwen/Qwen3-0.6B
    """
    path = opening.find(run)
    if chat:
        for flag, is_given in (("--draft", draft is not None), ("--raw", raw), ("--ids", ids)):
            if is_given:
                raise InputError(
                    f"{flag} does not go with --chat", hint="glass generate MODEL PROMPT"
                )
        talk(path, prompt, options, opening, as_json=as_json)
    if prompt is None or opening.system is not None or opening.chat_option:
        raise InputError(
            "a prompt is missing" if prompt is None else "--system and --chat-option are a chat's",
            hint="glass generate MODEL PROMPT, or glass chat MODEL",
        )
    if raw:
        let_through()
    if draft is not None:
        draft = opening.find(draft)
        options = {**options, "speculate": True}
    if code := _run(path, prompt, options, opening, draft=draft, ids=ids, as_json=as_json):
        raise typer.Exit(code)


def read_options(
    options: Mapping[str, Any], tokenizer: "Tokenizer | None", *, eos: tuple[int, ...] = ()
) -> "Request":
    """Check the options that were typed; mention those that change nothing.

    `eos` are the ends of a model without a tokenizer.
    """
    from glassformer.adapters.tokenizers.folder_tokenizer import end_ids, nameless_ids
    from glassformer.generation.request import read_request

    request = read_request(
        options,
        tokenizer=tokenizer,
        eos=eos if tokenizer is None else end_ids(tokenizer),
        forbidden=() if tokenizer is None else nameless_ids(tokenizer),
        spell=by_flag,
    )
    _mention_unused(options)
    return request


def _mention_unused(options: Mapping[str, Any]) -> None:
    unused = ", ".join(map(by_flag, without_effect(options)))
    if unused:
        tell(f"note: {unused}: nothing is sampled at temperature 0; --temperature 1?")


def _run(
    path: str,
    text: str,
    options: Mapping[str, Any],
    how: Opening,
    *,
    draft: str | None,
    ids: bool,
    as_json: bool,
) -> int:
    """Generate, streaming; with beams, print the n best. Return the exit code: 130 after Ctrl-C."""
    with opening():
        from glassformer.adapters.folder.paths import load_tokenizer
        from glassformer.kernels import large_pages
        from glassformer.kernels.threads import threads_of_decoding
        from glassformer.models.prompts import Prompts, text_prompt

        given = sys.stdin.read() if text == "-" else text
        row = read_ids(given) if ids else []
        tokenizer, eos = _tokenizer(path) if ids else (load_tokenizer(path), ())
        request = read_options(options, tokenizer, eos=eos)
        device = how.check()
        is_long = request.decoding.max_new_tokens >= large_pages.WORTH
        spec, stepper = _open(
            path, request, draft=draft, backend=how.backend, device=device, large_pages=is_long
        )
    if ids and spec.encoder is not None:
        raise InputError("--ids is for a decoder: the text of an encoder is its source")
    if ids:
        prompts = Prompts.of([row])
    else:
        assert tokenizer is not None
        prompts = text_prompt(spec, tokenizer, given)
    count = threads_of_decoding(spec, asked=how.threads, device=device)
    show = _search if isinstance(request.decoding, BeamSpec) else _stream
    try:
        with taking(count):
            show(stepper, prompts, tokenizer, request, ids=ids, as_json=as_json)
        if request.step.prompt_cache is not None:
            length, where = len(prompts.tokens[0]), request.step.prompt_cache
            tell(f"{stepper.reused} of the prompt's {length} tokens were kept in {visible(where)}")
    except KeyboardInterrupt:
        tell("\nstopped")
        return 128 + signal.SIGINT
    return 0


def read_ids(text: str) -> list[int]:
    """Return the token ids of a text: numbers with spaces or commas, or a JSON list of them."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit()) or len(word) > LONGEST_ID:
            raise InputError(f"--ids: {word[:40]!r} is no token id", hint="such as '1 403 25'")
    if not words:
        raise InputError("--ids: no token id", hint="such as '1 403 25'")
    return [int(word) for word in words]


def _tokenizer(path: str) -> "tuple[Tokenizer | None, tuple[int, ...]]":
    """Return a model's tokenizer, if it has one, and the ids that its folder ends texts with."""
    from glassformer.adapters.folder.files import read_eos
    from glassformer.adapters.folder.origin import find_tokenizer, origin_of
    from glassformer.adapters.folder.paths import folder_of

    folder = folder_of(path)
    own = origin_of(folder)
    return find_tokenizer(folder), () if own is None or not own.is_dir() else read_eos(own)


def _open(
    path: str,
    request: "Request",
    *,
    draft: str | None,
    backend: str,
    device: str,
    large_pages: bool,
) -> "tuple[ModelSpec, Stepper]":
    """Open a model and what decodes with it: without torch where the same comes out of it."""
    if draft is None and backend == "native" and device == "cpu" and request.is_for_arrays:
        from glassformer.adapters.array_model import open_stepper

        found = open_stepper(path, unpacks=large_pages, kv_cache=request.step.kv_cache)
        if found is not None:
            return found
    from glassformer.adapters.generate import make_stepper
    from glassformer.adapters.load import load

    model = load_by(path, backend, device=device, large_pages=large_pages)
    guessing = None if draft is None else load(draft, large_pages=large_pages).to(device)
    return model.spec, make_stepper(model, request.step, draft=guessing)


def _search(
    stepper: "Stepper",
    prompts: "Prompts",
    tokenizer: "Tokenizer | None",
    request: "Request",
    *,
    ids: bool,
    as_json: bool,
) -> None:
    from glassformer.adapters.generate import with_texts
    from glassformer.generation.beam import beam_search

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
        shown = " ".join(map(str, one.tokens)) if ids else one.text
        print(f"{one.score:9.4f}  {shown or '(nothing)'}")


def _stream(
    stepper: "Stepper",
    prompts: "Prompts",
    tokenizer: "Tokenizer | None",
    request: "Request",
    *,
    ids: bool,
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
            shown = f"{new.token} " if ids else new.text
            print(shown, end="", flush=True)
    one = made.result(made.text)
    result = {"text": one.text, "tokens": one.tokens, "logprobs": one.logprobs}
    facts = stepper.facts
    counts = {} if facts is None else {"speculation": asdict(facts)}
    print(json.dumps(result | {"finish": one.finish} | counts) if as_json else "")
    if facts is not None and not as_json:
        tell(str(facts))
    if ids:
        return
    if not one.text and not as_json:
        tell("(nothing: the model predicted the end at once; --min-new 5 asks for more)")
    elif not one.text.strip() and not as_json:
        tell(f"(only white space, {len(one.tokens)} tokens; --temperature 0.8 would sample others)")
    elif not as_json and spec.temperature == 0 and repeats(one.tokens):
        tell("(it repeats itself, as greedy decoding of a young model does; --temperature 0.8?)")


def repeats(tokens: Sequence[int]) -> bool:
    """True where the second half of some tokens, or more, is one short piece again and again."""
    half = len(tokens) // 2
    return half >= REPEATED and any(
        all(tokens[i] == tokens[i - period] for i in range(len(tokens) - half, len(tokens)))
        for period in range(1, REPEATED // 2 + 1)
    )


# --- glass chat -----------------------------------------------------------------------------------


@takes(chat_options(), into="options")
def chat(
    model: AnyModel,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The first message.")
    ] = None,
    *,
    options: dict[str, Any],
    opening: Opening,
    as_json: AsJson = False,
) -> None:
    """Hold a conversation with a model.

    Ctrl-C ends an answer, Ctrl-D the conversation, /help lists commands. Without a terminal every
    line of stdin is a question. Answers are sampled as the model's generation_config.json says,
    greedily without one, unless options say otherwise. Examples:

      glass chat Qwen/Qwen3-0.6B

      glass chat runs/helper "What is a tap?" --temperature 0.7
    """
    talk(opening.find(model), prompt, options, opening, as_json=as_json)


def talk(
    path: str, first: str | None, options: Mapping[str, Any], how: Opening, *, as_json: bool
) -> NoReturn:
    """Chat until the input ends, and end the command."""
    held = open_conversation(path, options, how)
    _mention_unused({**options, "temperature": held.spec.temperature})
    raise typer.Exit(converse(held, first=first, as_json=as_json))


HELP = {
    "/reset": "forget the conversation",
    "/system": "TEXT: instructions for the model; without text there are none",
    "/save": "FILE: add the conversation to a JSONL file, as fine-tuning reads it",
    "/help": "this list; a question that begins with / is typed with //",
    "/quit": "leave (or Ctrl-D)",
}


def open_conversation(path: str, options: Mapping[str, Any], how: Opening) -> "Conversation":
    """Open a model for a chat: its folder's own sampling settings, then the options given.

    `options` are decoding options by name; a chat takes `chat_options`. The number of threads that
    suits the model is kept: a chat lasts as long as the command.
    """
    _refuse_foreign(options)
    steps = {each.name for each in options_of(StepSpec)}
    step = StepSpec(**{name: value for name, value in options.items() if name in steps})
    switches = dict(map(template_option, how.chat_option or ()))
    with opening():
        from glassformer.adapters.folder.paths import folder_of, load_tokenizer
        from glassformer.kernels.threads import take, threads_of_decoding

        device = how.check()
        if how.backend == "native" and device == "cpu" and step == StepSpec(kv_cache=step.kv_cache):
            from glassformer.adapters.array_model import open_stepper
            from glassformer.adapters.chat.begin import begin_chat

            found = open_stepper(path, kv_cache=step.kv_cache, in_turns=True)
            if found is not None:
                spec, stepper = found
                take(threads_of_decoding(spec, asked=how.threads, device=device))
                return begin_chat(
                    folder_of(path),
                    load_tokenizer(path),
                    lambda _: stepper,
                    vocab_size=spec.vocab_size,
                    system=how.system,
                    template_options=switches,
                    options=options,
                )
        adapter = load_by(path, how.backend, device=device)
    take(threads_of_decoding(adapter.spec, asked=how.threads, device=device))
    return adapter.chat(system=how.system, template_options=switches, **options)


def _refuse_foreign(options: Mapping[str, Any]) -> None:
    """Refuse options that a chat has no use for: beams, constraints, other steps."""
    own = {each.name: each.flag for each in chat_options()}
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
        raise InputError(
            f"--chat-option {text[:60]!r} is not NAME=VALUE",
            hint="--chat-option enable_thinking=false",
        )
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
        tell("(cut off: --max-new or the end of the context was reached)")
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
