"""Faults are planted at nodes of a syntax tree: each selector, each way to change a node."""

import ast
import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import pytest

from tests.planting import (
    Assign,
    Binary,
    Call,
    Choice,
    Compare,
    Constant,
    Fault,
    For,
    If,
    Keyword,
    Mutation,
    Name,
    Return,
    Selector,
    Subscript,
    Unary,
    catches,
    changed_code,
    damaged,
    function_named,
    mutate,
    planted,
)

HERE = "tests.test_planting:"

SOURCE = '''
def f(x, y, flag=True):
    """A text with 1 in it."""
    total = max(x, 1) + min(x, y, key=abs)
    rows = [-row for row in y.rows if row > 0]
    total -= len(rows)
    for place, _ in enumerate(rows):
        rows[place] = rows[0] * 2
    if flag and not x:
        return total if total <= 3 else other(max(y.rows[1:], 2))
    return total
'''


def text_after(node: Selector, **change: object) -> str:
    tree = ast.parse(SOURCE)
    damaged(tree.body[0], mutate("module:f", node, **change))
    return ast.unparse(tree)


@pytest.mark.parametrize(
    ("node", "change", "line"),
    [
        (Call("max"), {"to": "{args[1]}"}, "total = 1 + min(x, y, key=abs)"),
        (Call("max"), {"arg": 1, "to": "{it} + 1"}, "total = max(x, 1 + 1) + min(x, y, key=abs)"),
        (Call("max", nth=1), {"to": "0"}, "return total if total <= 3 else other(0)"),
        (Call("max", of="rows"), {"to": "0"}, "return total if total <= 3 else other(0)"),
        (Call("min"), {"arg": "key", "to": "None"}, "total = max(x, 1) + min(x, y, key=None)"),
        (Call("min"), {"part": "func", "to": "max"}, "total = max(x, 1) + max(x, y, key=abs)"),
        (Keyword("key"), {"to": "len"}, "total = max(x, 1) + min(x, y, key=len)"),
        (Compare("<="), {"op": "<"}, "return total if total < 3 else other(max(y.rows[1:], 2))"),
        (Compare(">"), {"to": "{left}"}, "rows = [-row for row in y.rows if row]"),
        (Binary("+"), {"op": "-"}, "total = max(x, 1) - min(x, y, key=abs)"),
        (Binary("and"), {"op": "or"}, "if flag or not x:"),
        (Binary("*"), {"part": "right", "to": "3"}, "rows[place] = rows[0] * 3"),
        (Unary("-"), {"to": "{operand}"}, "rows = [row for row in y.rows if row > 0]"),
        (Unary("not"), {"to": "{operand}"}, "if flag and x:"),
        (Constant(2), {"to": "{it} * 8"}, "rows[place] = rows[0] * (2 * 8)"),
        (Name("flag"), {"to": "False"}, "if False and (not x):"),
        (Name("rows"), {"to": "x"}, "rows = [-row for row in x if row > 0]"),
        (Subscript("rows"), {"part": "slice", "to": "1"}, "rows[place] = rows[1] * 2"),
        (Assign("rows"), {"to": "[]"}, "rows = []"),
        (Assign("rows", nth=1), {"to": "9"}, "rows[place] = 9"),
        (Assign("total", nth=1), {"to": "0"}, "total -= 0"),
        (Return(), {"to": "x"}, "return x"),
        (Return(nth=1), {"to": "-{it}"}, "return -total"),
        (If("flag"), {"to": "True"}, "if True:"),
        (If("row"), {"to": "True"}, "rows = [-row for row in y.rows if True]"),
        (Choice(), {"to": "{body}"}, "return total"),
        (For("place"), {"to": "()"}, "for place, _ in ():"),
        (For("row"), {"to": "{it}[:1]"}, "rows = [-row for row in y.rows[:1] if row > 0]"),
        (Assign("total", nth=1), {"drop": True}, "pass"),
        (Call("max", nth=1), {"statement": "raise KeyError"}, "raise KeyError"),
    ],
    ids=str,
)
def test_a_node_is_changed_and_nothing_else(
    node: Selector, change: dict[str, object], line: str
) -> None:
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    after = text_after(node, **change).splitlines()
    (changed,) = (new for old, new in zip(before, after, strict=True) if old != new)
    assert changed.strip() == line


def test_a_fault_is_out_of_date_only_when_its_node_is_gone() -> None:
    for node, part in ((Call("sum"), None), (Call("max", nth=2), None), (Call("max"), 2)):
        with pytest.raises(LookupError, match="is gone from module:f"):
            text_after(node, arg=part, to="0")
    moved = SOURCE.replace("max(x, 1)", "max(\n        renamed ** 2,\n        1,\n    )")
    tree = ast.parse(moved)
    damaged(tree.body[0], mutate("module:f", Call("max"), arg=1, to="2"))
    assert "max(renamed ** 2, 2)" in ast.unparse(tree)


def test_a_change_that_changes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="changes nothing"):
        text_after(Constant(2), to="2")
    for many in ({}, {"to": "1", "drop": True}, {"op": "+", "statement": "pass"}):
        with pytest.raises(ValueError, match="say one of"):
            mutate("module:f", Return(), **many)
    with pytest.raises(ValueError, match="no operator"):
        mutate("module:f", Return(), op="<>")


# --- what is planted reaches everybody ----------------------------------------------------------


def plain(x: int) -> int:
    return x + 1


by_another_name = plain


@functools.cache
def remembered(x: int) -> int:
    return x + 1


@contextlib.contextmanager
def managed() -> Iterator[int]:
    yield 1 + 1


def maker(scale: int) -> Callable[[int], int]:
    def scaled(x: int) -> int:
        return scale * x

    return scaled


class Base:
    def value(self) -> int:
        return 1


class Thing(Base):
    def value(self) -> int:
        """Return the value below, and one."""
        return super().value() + 1

    @staticmethod
    def still(x: int) -> int:
        return x + 1

    @classmethod
    def made(cls, x: int) -> int:
        return x + 1

    @property
    def size(self) -> int:
        return self.value() + 1

    @functools.cached_property
    def late(self) -> float:
        return math.floor(1.5) + 1


def entered() -> int:
    with managed() as value:
        return value


@pytest.mark.parametrize(
    ("where", "node", "change", "result"),
    [
        ("plain", Binary("+"), {"op": "-"}, lambda: by_another_name(2)),
        ("plain", Constant(1), {"to": "math.floor(9.5)"}, lambda: by_another_name(2)),
        ("remembered", Binary("+"), {"op": "-"}, lambda: remembered.__wrapped__(2)),
        ("managed", Binary("+"), {"op": "-"}, entered),
        ("maker", Binary("*"), {"op": "+"}, lambda: maker(3)(4)),
        ("Thing.value", Binary("+"), {"op": "-"}, lambda: Thing().value()),
        ("Thing.value", Return(), {"to": "7"}, lambda: Thing().value()),
        ("Thing.still", Binary("+"), {"op": "-"}, lambda: Thing.still(2)),
        ("Thing.made", Binary("+"), {"op": "-"}, lambda: Thing.made(2)),
        ("Thing.size", Binary("+"), {"op": "-"}, lambda: Thing().size),
        ("Thing.late", Binary("+"), {"op": "-"}, lambda: Thing().late),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_reaches_whoever_holds_the_function_and_is_taken_out(
    where: str, node: Selector, change: dict[str, str], result: Callable[[], object]
) -> None:
    healthy = result()
    with planted(Fault("a fault", mutate(HERE + where, node, **change), "a check")):
        assert result() != healthy
    assert result() == healthy


def test_a_fault_is_taken_out_after_an_error() -> None:
    fault = Fault("an error", mutate(HERE + "plain", Return(), statement="raise KeyError"), "")
    with pytest.raises(KeyError), planted(fault):
        by_another_name(1)
    assert by_another_name(1) == 2


@catches("a difference", HERE + "plain", Binary("+"), op="-")
@catches("an error", HERE + "plain", Return(), statement="raise KeyError", case="2")
@pytest.mark.parametrize("number", [1, 2])
def test_a_test_runs_again_with_each_fault_that_it_names(number: int) -> None:
    assert by_another_name(number) == number + 1


def test_line_numbers_stay() -> None:
    function = function_named(HERE + "plain")
    change = Mutation(HERE + "plain", Constant(1), to="1 / 0")
    code = changed_code(function, change)
    lines = {line for *_, line in code.co_lines()}
    assert lines == {line for *_, line in function.__code__.co_lines()}
