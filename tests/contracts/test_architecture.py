"""docs/architecture.md names what exists: every package at its rank, every module, every name."""

import importlib
import re

import pytest

from tests.contracts.test_docs import ROOT
from tests.contracts.test_house import HOUSE, RANKS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWN = {
    name: int(rank)
    for rank, names in re.findall(r"^ +(\d)  │([\w │]+)│$", PAGE, re.M)
    for name in re.findall(r"\w+", names)
}
TABLE = {name: int(rank) for rank, name in re.findall(r"^\| (\d) \| `(\w+)` \|", PAGE, re.M)}
PACKAGES = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
NAMES = sorted(set(re.findall(rf"`((?:{'|'.join(RANKS)})\.[\w.]+)`", PAGE)))


def test_the_house_is_drawn_as_it_stands():
    assert DRAWN == TABLE
    assert DRAWN.keys() == PACKAGES
    assert {name: RANKS[name] for name in PACKAGES} == DRAWN


def found(name: str) -> bool:
    """Whether this is a module, or something in one."""
    parts = ["glassformer", *name.split(".")]
    for cut in range(len(parts), 1, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            if not hasattr(thing, attribute):
                return False
            thing = getattr(thing, attribute)
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_exists(name):
    assert found(name)


def test_a_name_that_is_nowhere_is_noticed():
    assert not found("nn.attention.attend_to")
    assert not found("nn.atention")
    assert found("nn.attention.attend")


@pytest.mark.parametrize("way", ["batch", "token", "checkpoint"])
def test_each_way_passes_modules_step_by_step(way):
    part = PAGE.split(f"## The way of a {way}")[1].split("\n## ")[0]
    steps = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", part, re.M)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= 8
    for _, modules in steps:
        assert re.fullmatch(r"`[\w.]+`(, `[\w.]+`)*", modules), modules


def test_the_ways_are_long_enough_to_be_read():
    assert len(NAMES) > 50
