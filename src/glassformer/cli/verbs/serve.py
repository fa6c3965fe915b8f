"""`glass serve`: models behind OpenAI's interface, until Ctrl-C; torch is imported later."""

import os
import sys
from collections.abc import Mapping, Sequence
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

#: Tokens of a slot where the model could hold more and none are requested.
LONGEST_CONTEXT = 4_096


@takes(serving_options(), into="options")
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Runs, Hugging Face folders, .gguf files, org/name; NAME=MODEL gives a name.",
            autocompletion=complete_runs,
        ),
    ],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="GLASS_API_KEY",
            metavar="KEY",
            help="Requests must carry it; needed where others can reach --host. GLASS_API_KEY "
            "keeps it out of the list of processes.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further name of this server, as behind a proxy."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The name of the only model; by default its file's.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Prompt and answer; by default the model's, to 4096."),
    ] = None,
    slots: Annotated[int, typer.Option(help="Sequences that are computed at once.")] = 8,
    queue: Annotated[int, typer.Option(help="Sequences that may wait; then 429.")] = 256,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="New tokens of one answer at most.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one answer.")] = 600.0,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="On a GPU: answers that do not depend on other requests, one sequence at a time.",
        ),
    ] = False,
    *,
    options: dict[str, Any],
    backend: Backend = "native",
    device: Device = "cpu",
    threads: Threads = None,
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
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} is no port", hint="0 to 65535; 0 takes a free one")
    if name is not None and len(models) != 1:
        raise InputError("--name is for one model", hint="NAME=MODEL names each of several")
    for flag, value in (("--slots", slots), ("--queue", queue), ("--max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise InputError(f"{flag} {value}", hint="at least 1")
    if not timeout > 0:
        raise InputError(f"--timeout {timeout:g}", hint="seconds, above 0")
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
    _serve(
        places,
        port=port,
        host=host,
        api_key=api_key,
        allow_hosts=tuple(allow_host or ()),
        context=context,
        slots=slots,
        queue=queue,
        max_tokens=max_tokens,
        timeout=timeout,
        invariant=invariant or None,
        step=StepSpec(**options),
        backend=backend,
        device=device,
        threads=threads,
    )


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


def _serve(
    places: Mapping[str, str],
    *,
    port: int,
    host: str,
    api_key: str | None,
    allow_hosts: Sequence[str],
    context: int | None,
    slots: int,
    queue: int,
    max_tokens: int | None,
    timeout: float,
    invariant: bool | None,
    step: StepSpec,
    backend: str,
    device: str,
    threads: int | None,
) -> None:
    """Open the socket, load the models, and serve until a signal."""
    from glassformer.cli.shell.process import check_device, load_by
    from glassformer.kernels.threads import check_threads, threads_of_decoding
    from glassformer.serve.http import is_loopback, listen, reachable_host

    _check_key(api_key)
    if not is_loopback(host) and api_key is None:
        raise InputError(
            f"{host} can be reached from other machines",
            hint="ssh -L is safer; if you mean it, add --api-key",
        )
    device = check_device(device)
    check_threads(threads)
    listening = listen(host, port)
    from glassformer.serve.app import Limits, create_app, serve_forever  # imports torch
    from glassformer.serve.engine import Engine, Served

    models = []
    for name, path in places.items():
        adapter = load_by(path, backend, device=device)
        longest = context or min(adapter.spec.max_seq_len, LONGEST_CONTEXT)
        models.append(
            Served(
                name,
                adapter,
                slots=slots,
                context=longest,
                invariant=invariant,
                kv_cache=step.kv_cache,
            )
        )
        tell(models[-1].described())
    asked = [threads_of_decoding(one.spec, asked=threads, device=device) for one in models]
    engine = Engine(models, threads=max(asked))
    limits = Limits(output_tokens=max_tokens, seconds=timeout, queue=queue)
    app = create_app(engine, api_key=api_key, host=host, allow_hosts=allow_hosts, limits=limits)

    def ready() -> None:
        tell("Ctrl-C finishes what is running and ends")
        print(f"http://{reachable_host(host)}:{listening.getsockname()[1]}/v1", flush=True)

    try:
        serve_forever(app, listening, ready)
    except KeyboardInterrupt:  # uvicorn has closed up and passes the signal on
        tell("")
    sys.stdout.flush()
    os._exit(0)  # the engine's thread may be in a step; nothing is written here
