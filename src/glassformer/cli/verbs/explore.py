"""`glass explore`: the page over your runs, on this machine only; torch is imported later."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import Device, Runs
from glassformer.spec.errors import InputError


def explore(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUNS",
            help="A folder of runs, one run, or a model; by default --runs.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 7337,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let --host be reachable by others.")
    ] = False,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the link and open no browser.")
    ] = False,
    device: Device = "cpu",
    runs: Runs = "runs",
) -> None:
    """Inspect, compare, design, generate and quantize in a browser.

    The page is local and fetches nothing; Ctrl-C ends it. Examples:

      glass explore

      glass explore runs/digits --port 0

      glass explore path/to/Qwen3-0.6B --no-open
    """
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} is no port", hint="0 to 65535; 0 takes a free one")
    place = _place(what, Path(runs))
    from glassformer.cli.actions import explore as exploring

    exploring.serve(
        place,
        port=port,
        host=host,
        allow_remote=allow_remote,
        open_browser=not no_open,
        device=device,
    )


def _checked(place: Path) -> Path:
    """Require a folder, which may still be empty, or a model in one file."""
    from glassformer.web.app.workspace import kind_of

    if kind_of(place) is None and not place.is_dir():
        raise InputError(f"{place} is neither a folder nor a .gguf file")
    if kind_of(place) is None and (place / "config.json").is_file():
        raise InputError(
            f"{place} has a config.json, but neither a run.json nor .safetensors",
            hint="weights in any other form are not opened",
        )
    return place


def _place(what: str | None, runs: Path) -> Path:
    """Return the folder to show. The runs folder may be empty or missing: Design needs none."""
    if what is None:
        return runs
    if Path(what).exists():
        return _checked(Path(what))
    from glassformer.store.rundir import RunRef

    if RunRef.parse(what).step:
        raise InputError(f"{what} names a checkpoint", hint="the page lets you choose the step")
    from glassformer.cli.shell.resolve import find_model

    return Path(find_model(what, runs=runs))
