"""Options of a spec: declared once, checked, described for the command line, the page, the docs."""

import math
from typing import Literal

import pytest

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.options import check_options, option, options_of
from glassformer.spec.units import parse_count


def count_or_any(name: str, text: str) -> int | str:
    return text if text == "any" else parse_count(name, text)


@spec
class Sample:
    """One option of every kind, and a field that is none."""

    count: int = option(5, help="A count.", at_least=2, flag="--how-many")
    few: int = option(1, help="At most eight.", at_least=0, at_most=8)
    limit: int | None = option(None, help="A limit.", at_least=1, hf="max_limit")
    share: float = option(1.0, help="A share.", above=0, at_most=1, off=1.0)
    rate: float = option(0.5, help="A rate.", at_least=0, below=1)
    size: float = option(1.0, help="A size.", above=0)
    slope: float = option(0.0, help="A slope.", at_least=-4, at_most=4, off=0)
    cost: float = option(0.0, help="A cost.", at_least=0, hint="0 is free")
    kind: Literal["red", "green"] = option("red", help="A colour.")
    heads: int | Literal["any"] = option(8, help="Heads.", at_least=1, parse=count_or_any)
    tied: bool = option(True, help="Weights of its own.", flag="--untied")
    stops: tuple[str, ...] = option((), help="Texts.", metavar="TEXT")
    ids: tuple[int, ...] = option((), help="Tokens of a text.", typed=str)
    unlisted: int = 7

    def __post_init__(self) -> None:
        check_options(self)


def one(name: str):
    return next(each for each in options_of(Sample) if each.name == name)


def test_options_are_the_declared_fields_in_their_order():
    names = [each.name for each in options_of(Sample)]
    assert names[:3] == ["count", "few", "limit"]
    assert "unlisted" not in names
    assert Sample().unlisted == 7
    assert Sample().limit is None


def test_types_and_names_are_resolved():
    assert (one("count").type, one("count").flag) == (int, "--how-many")
    assert (one("limit").type, one("limit").optional, one("limit").flag) == (int, True, "--limit")
    assert one("limit").hf == "max_limit"
    assert one("kind").choices == ("red", "green")
    assert (one("heads").type, one("heads").typed, one("heads").choices) == (int, str, ("any",))
    assert (one("stops").repeated, one("stops").typed) == (True, str)
    assert (one("ids").repeated, one("ids").typed) == (False, str)
    assert one("share").label == "Share"


@pytest.mark.parametrize(
    ("name", "value", "what", "hint"),
    [
        ("count", 1, "count 1 is below 2", "the nearest valid count is 2"),
        ("count", True, "count True is not a whole number", "use 2 or more"),
        ("count", 2.0, "count 2.0 is not a whole number", "use 2 or more"),
        ("count", None, "count None is no value", "the nearest valid count is 5"),
        ("few", 9, "few 9 is above 8", "the nearest valid few is 8"),
        ("few", -1, "few -1 is below 0", "the nearest valid few is 0"),
        ("limit", 0, "limit 0 is below 1", "the nearest valid limit is 1"),
        ("share", 0.0, "share 0.0 is outside (0, 1]", "1 turns it off"),
        ("share", 1.5, "share 1.5 is outside (0, 1]", "the nearest valid share is 1, which turns"),
        ("share", "1", "share '1' is not a number", "1 turns it off"),
        ("rate", 1.0, "rate 1.0 is outside [0, 1)", ""),
        ("rate", -0.1, "rate -0.1 is outside [0, 1)", "the nearest valid rate is 0"),
        ("size", 0.0, "size 0.0 is not a positive number", ""),
        ("size", math.inf, "size inf is not a positive number", ""),
        ("slope", 5.0, "slope 5.0 is outside [-4, 4]", "the nearest valid slope is 4"),
        ("slope", math.nan, "slope nan is outside [-4, 4]", "0 turns it off"),
        ("cost", -1.0, "cost -1.0 is not a finite number of 0 or more", "0 is free"),
        ("kind", "blue", "kind 'blue' is not one of green, red", "known: green, red"),
        ("heads", 0, "heads 0 is below 1", "the nearest valid heads is 1"),
    ],
)
def test_a_broken_limit_names_value_rule_and_nearest(name, value, what, hint):
    with pytest.raises(InputError) as caught:
        Sample(**{name: value})
    assert caught.value.what == what
    assert caught.value.hint.startswith(hint)


def test_limits_and_words_are_allowed():
    edges = Sample(count=2, few=8, limit=1, share=1, rate=0, slope=-4.0, heads="any", kind="green")
    assert edges.heads == "any"


def test_help_tells_limits_and_default():
    assert one("count").help_text == "A count. [default: 5; x >= 2]"
    assert one("share").help_text == "A share. [default: 1; 0 < x <= 1]"
    assert one("rate").limits == "0 <= x < 1"
    assert one("size").limits == "x > 0"
    assert one("limit").help_text == "A limit. [x >= 1]"
    assert one("kind").limits == "red or green"
    assert one("heads").limits == "x >= 1, or any"
    assert one("tied").help_text == "Weights of its own."


def test_the_page_gets_plain_data():
    assert one("share").to_dict() == {
        "name": "share",
        "flag": "--share",
        "label": "Share",
        "help": "A share.",
        "kind": "number",
        "repeated": False,
        "optional": False,
        "default": 1.0,
        "min": 0,
        "max": 1,
        "open": [True, False],
        "choices": [],
        "group": "",
    }
    kinds = {each.name: each.to_dict()["kind"] for each in options_of(Sample)}
    assert (kinds["limit"], kinds["kind"], kinds["tied"]) == ("integer", "choice", "flag")
    assert (kinds["heads"], kinds["stops"]) == ("text", "text")
