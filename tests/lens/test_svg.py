"""Pictures hold what they were given, follow the theme, and never obey a word."""

import base64
import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from glassformer.lens.show import chart_svg as picture
from glassformer.lens.show import html
from glassformer.lens.show.chart import Bars, Grid, Mark, series
from glassformer.lens.show.chart_svg import chart_svg
from glassformer.lens.show.text import shown

HOSTILE = (
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "\"'><svg onload=alert(1)>",
    "]]>&lt;b&gt;",
    "\x00\x1b[31m\u202etxt",
    "</title></text></td>",
    "javascript:alert(1)",
    "{{7*7}}${7*7}`x`",
)


class Seen(HTMLParser):
    """Tags and attributes as a browser would find them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)


def inert(text):
    """No script, no handler, nothing fetched."""
    seen = Seen(text)
    assert not {"script", "iframe", "object", "link", "b", "embed"} & set(seen.tags)
    for tag, name, value in seen.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href"):
            assert value.startswith("data:image/png;base64,"), (tag, value)
    assert "\x00" not in text and "\x1b" not in text and "\u202e" not in text
    return seen


def opened(png):
    """RGBA of a PNG, by another library."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def test_a_png_holds_the_values():
    values = np.linspace(-1.0, 1.0, 7 * 11).reshape(7, 11)
    pixels = opened(picture.heatmap_png(values))
    assert pixels.shape == (7, 11, 4)
    assert np.abs(pixels[..., 3] / 255 - np.sqrt(np.abs(values))).max() <= 0.5 / 126 + 0.5 / 255
    assert (pixels[values > 0.05][:, :3] == picture.ACCENT).all()
    assert (pixels[values < -0.05][:, :3] == picture.OPPOSITE).all()


def test_masked_and_missing_cells_are_hatched():
    values = np.full((5, 5), 0.9)
    values[0, 1] = np.nan
    allowed = np.tril(np.ones((5, 5), np.bool_))
    allowed[0, 1] = True
    pixels = opened(picture.heatmap_png(values, allowed=allowed, scale=8))
    assert pixels.shape == (40, 40, 4)
    for t in range(5):
        for s in range(5):
            cell = pixels[8 * t : 8 * t + 8, 8 * s : 8 * s + 8]
            if s > t:
                assert set(map(tuple, cell.reshape(-1, 4)[:, 3:])) == {(0,), (120,)}
            else:
                assert len(set(map(tuple, cell.reshape(-1, 4)))) == 1


def test_a_cell_lies_in_its_row_and_column():
    values = np.zeros((3, 7))
    values[2, 5] = 1.0
    grid = Grid(title="one cell", values=values, rows=tuple("abc"), columns=tuple("1234567"))
    svg = chart_svg(grid, width=384).svg()
    uri = re.search(r'href="data:image/png;base64,([^"]+)"', svg)[1]
    pixels = opened(base64.b64decode(uri))
    scale = pixels.shape[0] // 3
    assert pixels.shape == (3 * scale, 7 * scale, 4)
    lit = np.argwhere(pixels[..., 3] > 0) // scale
    assert set(map(tuple, lit)) == {(2, 5)}
    words = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    assert words == ["one cell", *"abc", *"1234567"]


def test_pooling_keeps_the_peaks():
    values = np.zeros((130, 67))
    values[129, 66] = values[3, 5] = 0.5
    small = picture.pooled(values, most=16)
    assert small.shape == (15, 14) and small.max() == 0.5 and (small > 0).sum() == 2
    assert picture.pooled(values, most=200).shape == values.shape


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_are_text(word):
    named = {"rows": (word, "b"), "columns": ("c", word)}
    grid = Grid(title=word, values=np.ones((2, 2)), **named)
    cells = replace(grid, cells=((word, word), (word, word)))
    bars = Bars(title=word, names=(word,), values=(0.5,))
    below = series({word: [1.0, 2.0]}, title=word, words=[word, word])
    (line,) = below.lines
    marked = replace(line, marks=(Mark(1.0, 1.5, word),))
    beside = replace(below, lines=(marked,), legend=False, x_title=word)
    heat = chart_svg(grid).svg()
    for svg in (heat, *(chart_svg(each).svg() for each in (cells, bars, below, beside))):
        ElementTree.fromstring(svg)  # well formed, whatever the word
        inert(svg)
    lined = (word, [(word, 0.5)])
    inside = "".join(
        (
            html.table([word, "x"], [[word, 0.5]], caption=word),
            html.shaded_table(["", word], [lined], caption=word),
            html.folded(word, html.heading(word)),
            html.captioned(heat, word),
        )
    )
    seen = inert(html.page(word, inside))
    page = {"html", "head", "meta", "title", "style", "body", "main", "p", "strong"}
    table = {"table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary"}
    drawn = {"figure", "figcaption", "svg", "image", "rect", "text"}
    assert set(seen.tags) <= page | table | drawn


def test_words_are_seen_whole():
    assert shown(" the") == "\u2423the" and shown("a b ") == "a b\u2423" and shown("") == "''"
    assert shown("\n\x1b[0m") == "\\n\\u001b[0m"
    assert shown("x" * 50, most=12) == "x" * 11 + "…"


def test_what_does_not_fit_is_counted():
    parts = ["<p>a</p>", "<p>" + "b" * 500 + "</p>", "<p>c</p>"]
    whole = html.capped(parts, most=1000)
    assert "left out" not in whole and "<p>c</p>" in whole
    cut = html.capped(parts, most=100)
    assert "2 more parts were left out" in cut and len(cut.encode()) < 400
    assert "bbb" not in cut and "<p>c</p>" not in cut


def test_long_tables_say_how_much_is_missing():
    text = html.table(["n"], ([n] for n in range(1_000)), caption="numbers", most=10)
    assert text.count("<tr>") == 11 and "990 left out" in text
    wide = ["", *map(str, range(100))]
    shaded = html.shaded_table(wide, [("row", [("x", 0.1)] * 100)], caption="c", most=40)
    assert shaded.count("<td") == 40 and "the last 40 of 100 positions" in shaded


def test_lines_survive_what_is_not_finite():
    svg = chart_svg(series({"a": [1.0, float("nan"), 3.0], "b": []}, title="l")).svg()
    assert "nan" not in svg
    assert "nan" in chart_svg(Bars(title="l", names=("a",), values=(float("nan"),))).svg()
    ElementTree.fromstring(svg)
