"""Elements of a picture: a tree that is written as SVG, or sent to the explorer's page.

The page builds its nodes from the same tree.
"""

from dataclasses import dataclass, field
from typing import Any

from glassformer.lens.show.html import escape_line


@dataclass(frozen=True)
class Element:
    """A node of the picture: a tag, its attributes, and nodes or text inside."""

    tag: str
    props: dict[str, str] = field(default_factory=dict)
    inside: tuple["Element | str", ...] = ()

    def svg(self) -> str:
        """Return it as SVG text; words are escaped."""
        props = "".join(f' {name}="{escape_line(value)}"' for name, value in self.props.items())
        if not self.inside:
            return f"<{self.tag}{props}/>"
        inner = "".join(
            escape_line(each) if isinstance(each, str) else each.svg() for each in self.inside
        )
        return f"<{self.tag}{props}>{inner}</{self.tag}>"

    def tree(self) -> list[Any]:
        """Return it as nested lists for JSON: [tag, attributes, inside ...]."""
        inside = (each if isinstance(each, str) else each.tree() for each in self.inside)
        return [self.tag, self.props, *inside]


def el(tag: str, *inside: "Element | str", **props: object) -> Element:
    """Return an element; `stroke_width` is the attribute stroke-width, numbers are rounded."""
    named = {
        key.rstrip("_").replace("_", "-"): f"{v:.1f}".removesuffix(".0")
        if isinstance(v, float)
        else str(v)
        for key, v in props.items()
    }
    return Element(tag, named, inside)


def picture(width: float, height: float, label: str, *inside: Element, **props: object) -> Element:
    """Return a picture of this size in pixels, which is read aloud as `label`.

    Text is `currentColor`, so that a picture follows the page around it, light or dark.
    """
    sizes = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    box = {"viewBox": f"0 0 {width:.0f} {height:.0f}"}
    head = {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria_label": label}
    rest = {"font_size": 11, "fill": "currentColor"} | props
    return el("svg", el("title", label), *inside, **head, **sizes, **box, **rest)


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> Element:
    """Return words at a baseline."""
    props = {"x": f"{x:g}", "y": f"{y:g}"} | ({"class": kind} if kind else {})
    return Element("text", props | ({} if anchor == "start" else {"text-anchor": anchor}), (words,))


def rect(
    x: float, y: float, width: float, height: float, kind: str, *, round_: float = 7
) -> Element:
    """Return a rectangle with round corners."""
    sizes = {"x": x, "y": y, "width": width, "height": height, "rx": round_}
    return Element("rect", {name: f"{value:g}" for name, value in sizes.items()} | {"class": kind})


def path(d: str, kind: str = "wire") -> Element:
    """Return a line or an outline."""
    return Element("path", {"d": d, "class": kind})


def down_tip(x: float, y: float, kind: str = "") -> Element:
    """Return the tip of an arrow that points down to (x, y)."""
    return path(f"M{x - 4:g} {y - 6:g}h8l-4 6z", f"tip {kind}".strip())


def short(words: str, width: float, *, size: float = 11.5) -> str:
    """Cut words that would not fit; a letter is a little more than half as wide as it is high."""
    most = int(width / (0.55 * size))
    return words if len(words) <= most else words[: most - 1].rstrip(" ,;") + "…"
