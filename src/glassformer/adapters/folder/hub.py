"""`resolve`: a model's folder, by its path or by `org/name` in the local Hugging Face cache.

The cache is a folder that the caller names; nothing is read from the environment and nothing is
fetched. Only `download` fetches, with the user's consent, and never code or pickles.

    models--org--name/refs/main                   the commit that a name means
    models--org--name/snapshots/COMMIT/...        its files, links into ../../blobs
"""

import re
from pathlib import Path

from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.store.rundir import RunRef

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
COMMIT = re.compile(r"[0-9a-f]{40}")

#: What a model needs; weights as safetensors alone.
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "*.tiktoken")


def resolve(path: str | Path, *, cache: Path | None = None) -> Path:
    """Return `path` itself if it exists, else the snapshot of `org/name` or `org/name@rev`."""
    place = Path(path)
    if place.exists():
        return place
    ref = RunRef.parse(path)
    if not is_name(ref.path):
        raise InputError(
            f"there is no folder {path}", hint="give a folder, or org/name from the local cache"
        )
    if cache is None:
        raise InputError(f"there is no folder {path}", hint="no cache was named to look into")
    return find_snapshot(ref.path, cache=cache, revision=ref.step or "main")


def is_name(text: str) -> bool:
    """Return whether a text could be `org/name`."""
    return bool(NAME.fullmatch(text)) and ".." not in text and "--" not in text


def find_snapshot(name: str, *, cache: Path, revision: str = "main") -> Path:
    """Return the folder of one revision: a branch or tag that was fetched, or a commit."""
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise InputError(f"{revision[:80]!r} is no revision", hint="a branch, a tag or a commit")
    home = cache / f"models--{name.replace('/', '--')}"
    commit = revision
    reference = home / "refs" / revision
    if reference.is_file() and reference.stat().st_size <= 100:
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
        if not COMMIT.fullmatch(commit):
            raise FileError("a reference of the cache names no commit", where=str(reference))
    snapshot = home / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not snapshot.is_dir():
        raise InputError(
            f"{name} ({revision}) is not in the local cache",
            where=str(cache),
            hint="--download of glass generate, chat and serve fetches it, or `hf download` does",
        )
    return snapshot


def download(name: str, *, cache: Path, revision: str = "main") -> Path:
    """Download a model into the cache; the caller must have the user's consent."""
    if not is_name(name):
        raise InputError(f"{name[:80]!r} is no model's name", hint="org/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MachineError(
            "downloading needs huggingface_hub, which is not installed",
            hint="pip install transformers",
        ) from error
    try:
        place: str = snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=list(PATTERNS)
        )
    except Exception as error:  # the library has many: no network, no such model, not allowed
        reason = str(error).strip().splitlines()
        raise MachineError(
            f"could not download {name}: {(reason or [type(error).__name__])[0][:200]}",
            hint="check the name and the network",
        ) from error
    return Path(place)
