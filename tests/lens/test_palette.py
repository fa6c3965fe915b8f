"""One palette: the page's variables are the module's colours, each seen on its ground."""

import re
from pathlib import Path

import pytest

from glassformer.lens.show import palette
from glassformer.lens.show.palette import COLOURS

STATIC = Path(palette.__file__).parents[2] / "web" / "static"
COLOUR = r"#[0-9a-f]{3,8}\b"


def contrast(one, other):
    """The ratio that WCAG defines, here from its own formula."""

    def luminance(colour):
        parts = [part / 255 for part in palette.rgb(colour)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_has_these_colours_and_no_others():
    css = (STATIC / "app.css").read_text("utf-8")
    found = re.findall(rf"--([a-z0-9-]+): light-dark\(({COLOUR}), ({COLOUR})\);", css)
    assert {name: (light, dark) for name, light, dark in found} == {
        name: (colour.light, colour.dark) for name, colour in COLOURS.items()
    }
    for path in [*STATIC.glob("*.css"), *STATIC.glob("js/*.js")]:
        rest = re.sub(r"light-dark\([^)]*\)", "", path.read_text("utf-8"))
        assert not re.findall(rf"(?<![\w&]){COLOUR}(?=[;,)\s\"'])", rest), path.name


def test_the_report_has_them_too():
    rule = palette.css_variables()
    assert all(f"--{n}:light-dark({c.light},{c.dark});" in rule for n, c in COLOURS.items())


@pytest.mark.parametrize("name", ["ink", "muted", "accent", "good", "warn", "bad", *(
    name for name in COLOURS if name.startswith("series-"))])  # fmt: skip
def test_text_in_a_colour_can_be_read_on_its_ground(name):
    panel = COLOURS["panel"]
    assert contrast(COLOURS[name].light, panel.light) >= 4.5
    assert contrast(COLOURS[name].dark, panel.dark) >= 4.5
    if either := COLOURS[name].either:
        assert min(contrast(either, panel.light), contrast(either, panel.dark)) >= 4


def test_a_ramp_ends_in_the_palette():
    heat, signed = palette.heat_colours(), palette.signed_colours()
    ends = {heat(0.0): "heat-low", heat(1.0): "heat-high", signed(0.0): "heat-minus"}
    for found, name in ends.items():
        wanted = palette.rgb(COLOURS[name].light)
        assert found[:3] == pytest.approx([part / 255 for part in wanted], abs=1e-9)
    assert signed(1.0) == heat(1.0)
