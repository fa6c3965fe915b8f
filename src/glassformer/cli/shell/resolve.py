"""Resolve a MODEL or RUN of the command line: a folder, a run, or `org/name` of the local cache.

The environment is read here, once, for the folder where Hugging Face's tools keep downloads.
"""

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from glassformer.adapters.folder import hub
from glassformer.cli.shell.terminal import tell
from glassformer.spec.errors import InputError
from glassformer.store.rundir import RunRef

#: Names that are listed, and characters of a name that are shown.
LISTED, LONGEST = 12, 200


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return Hugging Face's cache: HF_HUB_CACHE, else in HF_HOME, else in the user's cache."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "huggingface" / "hub"


def find_model(
    text: str,
    *,
    runs: Path,
    download: bool = False,
    cache: Path | None = None,
    also: Iterable[str] = (),
) -> str:
    """Resolve a path, a run's name, or the snapshot of `org/name`, downloaded first if requested.

    An unknown name is refused, with a list of known ones; `also` are names of other things that
    may have been meant.
    """
    ref = RunRef.parse(text)
    name, revision = ref.path, ref.step
    found = _here(text, runs)
    if found is not None:
        return found
    if not hub.is_name(name):
        raise _unknown(name, runs, also)
    cache = hub_cache() if cache is None else cache
    try:
        return str(hub.find_snapshot(name, cache=cache, revision=revision or "main"))
    except InputError as error:
        if not download:
            raise InputError(
                f"{error.what}, nor is there a folder of that name, here or in {runs}",
                where=error.where,
                hint=_close(name, _neighbours(name, runs)) or error.hint,
            ) from error
    if not agreed(f"download {name} from huggingface.co into {cache}?"):
        raise InputError("nothing was downloaded")
    return str(hub.download(name, cache=cache, revision=revision or "main"))


def find_run(text: str, runs: Path) -> str:
    """Resolve a folder, or a name under the runs folder; runs are in no cache."""
    found = _here(text, runs)
    if found is None:
        raise _unknown(RunRef.parse(text).path, runs)
    return found


def find_data(text: str) -> str:
    """Return the path of a file of examples; refuse one that is not there, with the nearest."""
    path = Path(text)
    if path.exists():
        return text
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = _close(path.name, beside) or "JSON lines with messages, prompt and completion, or text"
    raise InputError(f"there is no file {text[:LONGEST]}", hint=hint)


def _here(text: str, runs: Path) -> str | None:
    """Return the existing path of a name: itself, else in the runs folder, else None."""
    name = RunRef.parse(text).path
    if not name:
        raise InputError("the name of the model is empty", hint="glass list shows the runs")
    if os.path.exists(name):  # False for a name that is too long or not readable
        return text
    return str(runs / text) if os.path.exists(runs / name) else None


def _unknown(name: str, runs: Path, also: Iterable[str] = ()) -> InputError:
    kind = "file" if name.lower().endswith(".gguf") else "folder"
    known = list(dict.fromkeys([*_neighbours(name, runs), *also]))
    shown = name if len(name) <= LONGEST else f"{name[:LONGEST]}..."
    listed = ", ".join(known[:LISTED]) + (" ..., all by glass list" if len(known) > LISTED else "")
    return InputError(
        f"there is no {kind} {shown}",
        where=f"looked for it here and in {runs}",
        hint=_close(name, known)
        or (f"there are: {listed}" if known else f"{runs} has no runs; glass train makes them"),
    )


def _neighbours(name: str, runs: Path) -> list[str]:
    """Return names that may have been meant: the runs, and the files next to the given path."""
    beside = Path(name).parent
    places = {} if beside == Path() or beside == runs else {beside: f"{beside}/"}
    places[runs] = f"{beside}/" if beside == runs else ""
    found = []
    for place, prefix in places.items():
        try:
            entries = sorted(place.iterdir())
        except OSError:
            continue
        found += [f"{prefix}{entry.name}" for entry in entries if _is_model(entry)]
    return found


def _is_model(place: Path) -> bool:
    marks = ("run.json", "config.json", "MANIFEST.json")
    return place.suffix == ".gguf" or any(os.path.isfile(place / mark) for mark in marks)


def _close(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'reverse'?`, or nothing."""
    close = difflib.get_close_matches(name[:LONGEST], list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""


def agreed(question: str, *, instead: str = "fetch the model before: hf download") -> bool:
    """Return True if a user at the terminal confirms; without a terminal, refuse to go on."""
    if not sys.stdin.isatty():
        raise InputError(
            "this asks first, and there is no terminal to ask at",
            hint=f"run it in a terminal, or {instead}",
        )
    tell(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
