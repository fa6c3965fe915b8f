"""`glass serve`: models behind OpenAI's interface, until Ctrl-C; torch is imported later."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from glassformer.cli.shell.options import (
    Backend,
    Device,
    Download,
    Runs,
    Threads,
    complete_runs,
    takes,
)
from glassformer.cli.shell.terminal import tell
from glassformer.spec.decoding import StepSpec, serving_options
from glassformer.spec.errors import InputError
from glassformer.spec.options import check_options, option

#: Tokens of a slot where the model could hold more and none are requested.
LONGEST_CONTEXT = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where the server listens, and what it takes on."""

    port: int = option(8000, at_least=0, at_most=65535, help="0 takes a free one.")
    host: str = option("127.0.0.1", help="The address to listen at.")
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="GLASS_API_KEY",
            metavar="KEY",
            help="Requests must carry it; needed where others can reach --host. GLASS_API_KEY "
            "keeps it out of the list of processes.",
        ),
    ] = None
    allow_host: tuple[str, ...] = option(
        (), metavar="NAME", help="A further name of this server, as behind a proxy."
    )
    context: int | None = option(
        None, metavar="TOKENS", help="Prompt and answer; by default the model's, to 4096."
    )
    slots: int = option(8, at_least=1, help="Sequences that are computed at once.")
    queue: int = option(256, at_least=1, help="Sequences that may wait; then 429.")
    max_tokens: int | None = option(
        None, at_least=1, metavar="TOKENS", help="New tokens of one answer at most."
    )
    timeout: float = option(
        600.0, above=0, metavar="SECONDS", help="Abort an answer after this many seconds."
    )
    invariant: bool = option(
        False,
        help="On a GPU: answers that do not depend on other requests, one sequence at a time.",
    )
    backend: Backend = "native"
    device: Device = "cpu"
    threads: Threads = None

    def __post_init__(self) -> None:
        check_options(self, has_flags=True)


@takes(serving_options(), into="step")
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Runs, Hugging Face folders, .gguf files, org/name; NAME=MODEL gives a name.",
            autocompletion=complete_runs,
        ),
    ],
    server: Server,
    name: str | None = option(None, help="The name of the only model; by default its file's."),
    *,
    step: dict[str, Any],
    download: Download = False,
    runs: Runs = "runs",
) -> None:
    """Serve models to applications: OpenAI's interface, on this machine.

    On a CPU an answer does not depend on what else is being served; on a GPU its last bits may,
    unless --invariant is given. Applications talk to the address that it prints; curl
    ADDRESS/v1/models lists the models. Ctrl-C finishes what is running, SIGTERM what ends within
    8 seconds; a second signal ends at once. Examples:

      glass serve Qwen/Qwen3-0.6B

      glass serve small=runs/helper large=path/to/model.gguf --slots 16
    """
    if name is not None and len(models) != 1:
        raise InputError("--name is for one model", hint="NAME=MODEL names each of several")
    from glassformer.cli.shell.resolve import find_model

    places = {}
    for given in models:
        own, equals, rest = given.partition("=")
        named = bool(equals) and "/" not in own
        path = find_model(rest if named else given, runs=Path(runs), download=download)
        chosen = own if named else name or Path(path).name.removesuffix(".gguf")
        if chosen in places:
            raise InputError(f"two models are named {chosen!r}", hint="NAME=MODEL gives others")
        places[chosen] = path
    serve_models(places, server, step=StepSpec(**step))


#: Characters of an API key at least.
SHORTEST_KEY = 8


def _check_key(key: str | None) -> None:
    """Refuse a key that is easily guessed, or that no header can carry; never show it."""
    if key is None:
        return
    if len(key) < SHORTEST_KEY:
        raise InputError(
            f"an API key of fewer than {SHORTEST_KEY} characters", hint="openssl rand -hex 16"
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise InputError(
            "an API key with a character that a header cannot carry: no blanks, ASCII only",
            hint="openssl rand -hex 16",
        )


def serve_models(places: Mapping[str, str], server: Server, *, step: StepSpec) -> None:
    """Open the socket, load the models, and serve until a signal."""
    from glassformer.cli.shell.process import check_device, load_by
    from glassformer.kernels.threads import check_threads, threads_of_decoding
    from glassformer.serve.http import is_loopback, listen, reachable_host

    _check_key(server.api_key)
    if not is_loopback(server.host) and server.api_key is None:
        raise InputError(
            f"{server.host} can be reached from other machines",
            hint="ssh -L is safer; if you mean it, add --api-key",
        )
    device = check_device(server.device)
    check_threads(server.threads)
    listening = listen(server.host, server.port)
    from glassformer.serve.app import Limits, create_app, serve_forever  # imports torch
    from glassformer.serve.engine import Engine, Served

    models = []
    for name, path in places.items():
        adapter = load_by(path, server.backend, device=device)
        models.append(
            Served(
                name,
                adapter,
                slots=server.slots,
                context=server.context or min(adapter.spec.max_seq_len, LONGEST_CONTEXT),
                invariant=server.invariant or None,
                kv_cache=step.kv_cache,
            )
        )
        tell(models[-1].described())
    threads = [threads_of_decoding(m.spec, asked=server.threads, device=device) for m in models]
    app = create_app(
        Engine(models, threads=max(threads)),
        api_key=server.api_key,
        host=server.host,
        allow_hosts=server.allow_host,
        limits=Limits(output_tokens=server.max_tokens, seconds=server.timeout, queue=server.queue),
    )

    def ready() -> None:
        tell("Ctrl-C finishes what is running and ends")
        print(f"http://{reachable_host(server.host)}:{listening.getsockname()[1]}/v1", flush=True)

    try:
        serve_forever(app, listening, ready)
    except KeyboardInterrupt:  # uvicorn has closed up and passes the signal on
        tell("")
    sys.stdout.flush()
    os._exit(0)  # the engine's thread may be in a step; nothing is written here
