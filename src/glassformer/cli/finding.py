"""Which model a word on the command line means: a folder, a run, or `org/name` of the local cache.

Here the environment is read, once, for where Hugging Face's tools keep what they fetched.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from glassformer.adapters import hub
from glassformer.cli.narrator import tell
from glassformer.spec.errors import InputError


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Hugging Face's cache: HF_HUB_CACHE, else under HF_HOME, else under the user's cache."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "huggingface" / "hub"


def find_model(text: str, *, runs: Path, download: bool = False, cache: Path | None = None) -> str:
    """A path as given, a run's name, or the snapshot of `org/name`, fetched first if asked."""
    name, _, revision = text.partition("@")
    if Path(name).exists():
        return text
    if (runs / name).exists() or not hub.is_name(name):
        return str(runs / text)
    cache = hub_cache() if cache is None else cache
    try:
        return str(hub.find_snapshot(name, cache=cache, revision=revision or "main"))
    except InputError:
        if not download:
            raise
    if not agreed(f"download {name} from huggingface.co into {cache}?"):
        raise InputError("nothing was downloaded")
    return str(hub.download(name, cache=cache, revision=revision or "main"))


def agreed(question: str) -> bool:
    """Whether a person at the terminal says yes; where there is none, nobody does."""
    if not sys.stdin.isatty():
        raise InputError(
            "--download asks first, and there is no terminal to ask at",
            hint="run it in a terminal, or fetch the model before: hf download",
        )
    tell(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
