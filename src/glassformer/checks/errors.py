"""Errors of glasscheck as ours: of the same texts, so that whoever catches ours catches them."""

import contextlib
from collections.abc import Iterator

from glasscheck import errors as theirs
from glassformer.spec import errors


@contextlib.contextmanager
def as_ours() -> Iterator[None]:
    """Raise an error of glasscheck as our class of the same name."""
    try:
        yield
    except theirs.GlassError as error:
        texts = {"where": error.where, "hint": error.hint}
        match error:
            case theirs.CheckFailed():
                raise errors.CheckFailed(error.what, **texts) from error
            case theirs.InputError():
                raise errors.InputError(error.what, **texts) from error
            case theirs.FileError():
                raise errors.FileError(error.what, **texts) from error
        raise errors.GlassError(error.what, **texts) from error
