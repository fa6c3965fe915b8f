"""docs/requirements.md tells the truth: every test exists, every name can be imported."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "requirements.md").read_text()
TESTS = sorted(set(re.findall(r"\| (\S+\.py)::(\w+) \|", PAGE)))
NAMES = re.findall(r"^\| 00\d \| (\w+) \| ([\w.]+) \|$", PAGE, re.M)


@pytest.mark.parametrize(("file", "test"), TESTS)
def test_the_test_exists(file, test):
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("name", "module"), NAMES)
def test_the_name_is_where_it_is_said_to_be(name, module):
    assert callable(getattr(importlib.import_module(module), name))


def test_the_page_is_read():
    assert len(TESTS) > 60
    assert len(NAMES) > 15


def test_every_row_names_one_test():
    rows = re.findall(r"^\| ((?:S\d|C|X)-[^|]*) \|.*\|$", PAGE, re.M)
    with_test = re.findall(r"^\| ((?:S\d|C|X)-[^|]*) \|.*\.py::\w+ \|$", PAGE, re.M)
    assert rows == with_test


def test_there_are_as_many_planted_faults_as_the_figures_say():
    told = re.search(
        r"planted faults caught.*more than (\d+)", (ROOT / "docs/figures.md").read_text()
    )
    tests = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    planted = sum(len(re.findall(r"^\s+Fault\(|^@catches\(", text, re.M)) for text in tests)
    assert told is not None and int(told[1]) < planted
