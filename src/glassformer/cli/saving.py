"""Files that a verb writes where `-o` says: the ending decides the form, errors are told."""

from collections.abc import Sequence
from pathlib import Path

from glassformer.cli.narrator import tell
from glassformer.spec.errors import InputError


def ending_of(path: Path, allowed: Sequence[str]) -> str:
    """`png` of x.png, if it is one of those."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in allowed:
        known = f"{', '.join(f'.{name}' for name in allowed[:-1])} or .{allowed[-1]}"
        raise InputError(
            f"-o {path} ends in none of {known}", hint=f"-o {path.with_suffix('')}.{allowed[0]}"
        )
    return ending


def write_file(path: Path, content: bytes) -> None:
    """Write it and say so; a place that cannot be written to is an error with its reason."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            hint="the folder must be there, and be yours to write to",
        ) from error
    tell(f"saved {path}")
