"""A matplotlib figure as the bytes of a file: the same bytes for the same drawing."""

import io
from typing import TYPE_CHECKING

from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "svg")


def figure_bytes(figure: "Figure", kind: str) -> bytes:
    """PNG or SVG without date, version or random ids; text of an SVG stays text."""
    if kind not in KINDS:
        raise InputError(f"a figure cannot be written as .{kind}", hint=f"one of {KINDS}")
    import matplotlib

    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    made = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "glassformer", "svg.fonttype": "none"}):
        figure.savefig(made, format=kind, dpi=110, metadata=metadata)
    return made.getvalue()
