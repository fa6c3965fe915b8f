"""Plant one mistake in one function, at a node of its syntax tree.

A fault says which node and what becomes of it:

    Fault(
        "top-k one too many",
        mutate("generation.samplers:keep_top_k", Call("topk"), arg=0, to="{it} + 1"),
        caught_by="top-k of everything = plain sampling",
    )

The node is the first that a selector finds in the function, in the order of its text. Lines may be
moved, renamed and formatted around it; a fault is out of date only when no such node is left.

Faults of the certificate are a table, `tests/checks/faults.py`. Any other stands above the test
that notices it, which runs a second time with the fault in the package and must fail:

    @catches("a torn line is read", "lab.runs.curves:read_curves", Binary("+"), to="len(data)")
    def test_a_torn_last_line_waits_for_the_next_reading(tmp_path): ...
"""

import ast
import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OPERATORS: dict[str, type[ast.AST]] = {
    "+": ast.Add,
    "-": ast.Sub,
    "*": ast.Mult,
    "/": ast.Div,
    "//": ast.FloorDiv,
    "%": ast.Mod,
    "**": ast.Pow,
    "@": ast.MatMult,
    "&": ast.BitAnd,
    "|": ast.BitOr,
    "^": ast.BitXor,
    "<<": ast.LShift,
    ">>": ast.RShift,
    "<": ast.Lt,
    "<=": ast.LtE,
    ">": ast.Gt,
    ">=": ast.GtE,
    "==": ast.Eq,
    "!=": ast.NotEq,
    "is": ast.Is,
    "is not": ast.IsNot,
    "in": ast.In,
    "not in": ast.NotIn,
    "and": ast.And,
    "or": ast.Or,
    "~": ast.Invert,
    "not": ast.Not,
}
UNARY = {"-": ast.USub, "~": ast.Invert, "not": ast.Not}


@dataclass(frozen=True)
class Selector:
    """Expressions of a function: `found` yields what a node of the tree contributes.

    `of` keeps those that mention a name; `nth` takes a later one than the first.
    """

    says: str
    found: Callable[[ast.AST], list[ast.expr]]
    of: str = ""
    nth: int = 0

    def __repr__(self) -> str:
        return self.says + (f" of {self.of}" if self.of else "") + f" number {self.nth}"

    def select(self, function: ast.AST) -> ast.expr | None:
        """Return the node, or None if it is gone."""
        every = [expression for node in in_order(function) for expression in self.found(node)]
        if self.of:
            every = [one for one in every if mentions(one, self.of)]
        return every[self.nth] if len(every) > self.nth else None


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below in the order of the text, outer ones first."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from in_order(child)


def leaf(node: ast.AST) -> str:
    """Return `z` of `z`, `x.z`, `x.z[0]`; else nothing."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Starred(value=value):
            return leaf(value)
    return ""


def mentions(node: ast.AST, name: str) -> bool:
    """Return True if a name, an attribute, a keyword or a text of this spelling is in a node."""
    for one in ast.walk(node):
        match one:
            case ast.Name(id=said) | ast.Attribute(attr=said) | ast.keyword(arg=said):
                pass
            case ast.Constant(value=str(said)):
                pass
            case _:
                continue
        if said == name:
            return True
    return False


def Call(name: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802 (named as the nodes are)
    """Select a call by the last part of what it calls: `topk` of `logits.topk(k)`."""

    def found(node: ast.AST) -> list[ast.expr]:
        return [node] if isinstance(node, ast.Call) and leaf(node.func) == name else []

    return Selector(f"a call of {name}", found, of, nth)


def Keyword(name: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select the value of a keyword argument, whoever is called."""

    def found(node: ast.AST) -> list[ast.expr]:
        return [node.value] if isinstance(node, ast.keyword) and node.arg == name else []

    return Selector(f"the keyword {name}", found, of, nth)


def Compare(op: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select a comparison by its (first) operator."""

    def found(node: ast.AST) -> list[ast.expr]:
        fits = isinstance(node, ast.Compare) and type(node.ops[0]) is OPERATORS[op]
        return [node] if fits else []

    return Selector(f"a comparison {op}", found, of, nth)


def Binary(op: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select an operation of two operands, `and` and `or` included."""

    def found(node: ast.AST) -> list[ast.expr]:
        match node:
            case ast.BinOp(op=what) | ast.BoolOp(op=what) if type(what) is OPERATORS[op]:
                return [node]
        return []

    return Selector(f"an operation {op}", found, of, nth)


def Unary(op: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select an operation of one operand: `-`, `~`, `not`."""

    def found(node: ast.AST) -> list[ast.expr]:
        fits = isinstance(node, ast.UnaryOp) and type(node.op) is UNARY[op]
        return [node] if fits else []

    return Selector(f"an operation {op} of one operand", found, of, nth)


def Constant(value: object, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select a number or a text that stands in the code; `1`, `1.0` and `True` differ."""

    def found(node: ast.AST) -> list[ast.expr]:
        fits = isinstance(node, ast.Constant) and repr(node.value) == repr(value)
        return [node] if fits else []

    return Selector(f"the constant {value!r}", found, of, nth)


def Name(name: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select a use of a name or of an attribute: `T` of `T` and of `x.T`."""

    def found(node: ast.AST) -> list[ast.expr]:
        fits = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        return [node] if fits and leaf(node) == name else []

    return Selector(f"the name {name}", found, of, nth)


def Subscript(name: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select a read element or slice by the name of what it is read from."""

    def found(node: ast.AST) -> list[ast.expr]:
        fits = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        return [node] if fits and leaf(node.value) == name else []

    return Selector(f"a part of {name}", found, of, nth)


def Assign(name: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select what is assigned to a name, an attribute or elements of one of this name."""

    def named(target: ast.AST) -> bool:
        if isinstance(target, ast.Tuple | ast.List):
            return any(named(one) for one in target.elts)
        return leaf(target) == name

    def found(node: ast.AST) -> list[ast.expr]:
        match node:
            case ast.Assign(targets=targets, value=value) if any(map(named, targets)):
                return [value]
            case ast.AugAssign(target=target, value=value) if named(target):
                return [value]
            case ast.AnnAssign(target=target, value=ast.expr() as value) if named(target):
                return [value]
            case ast.NamedExpr(target=target, value=value) if named(target):
                return [value]
        return []

    return Selector(f"an assignment to {name}", found, of, nth)


def Return(*, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select what is returned."""

    def found(node: ast.AST) -> list[ast.expr]:
        return [node.value] if isinstance(node, ast.Return) and node.value is not None else []

    return Selector("a return", found, of, nth)


def If(of: str = "", *, nth: int = 0) -> Selector:  # noqa: N802
    """Select the condition of an `if`, of a `while`, of `a if b else c`, of a comprehension."""

    def found(node: ast.AST) -> list[ast.expr]:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                return [test]
            case ast.comprehension(ifs=tests):
                return list(tests)
            case ast.match_case(guard=ast.expr() as test):
                return [test]
        return []

    return Selector("a condition", found, of, nth)


def Choice(*, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select `a if b else c`."""

    def found(node: ast.AST) -> list[ast.expr]:
        return [node] if isinstance(node, ast.IfExp) else []

    return Selector("a conditional expression", found, of, nth)


def For(name: str, *, of: str = "", nth: int = 0) -> Selector:  # noqa: N802
    """Select what a loop or a comprehension goes through, by the name of its variable."""

    def found(node: ast.AST) -> list[ast.expr]:
        if isinstance(node, ast.For | ast.comprehension) and mentions(node.target, name):
            return [node.iter]
        return []

    return Selector(f"a loop over {name}", found, of, nth)


@dataclass(frozen=True)
class Mutation:
    """What becomes of one node of the function `where` (module:qualified name)."""

    where: str
    node: Selector
    part: str | int | None = None
    to: str | None = None
    op: str | None = None
    statement: str | None = None


def mutate(
    where: str,
    node: Selector,
    *,
    arg: int | str | None = None,
    part: str | None = None,
    to: str | None = None,
    op: str | None = None,
    statement: str | None = None,
    drop: bool = False,
) -> Mutation:
    """Replace a node, or an argument (`arg=0`, `arg="dim"`) or a field (`part="left"`) of it.

    `to` is the code that stands there instead, with `{it}` for what stood there and `{left}`,
    `{args[0]}`, ... for its fields. `op` changes the operator alone. `statement` replaces the
    entire statement that the node is in, and `drop` removes it.
    """
    statement = "pass" if drop else statement
    if [to, op, statement].count(None) != 2:
        raise ValueError("say one of to, op, statement and drop")
    if op is not None and op not in OPERATORS:
        raise ValueError(f"{op!r} is no operator: {' '.join(OPERATORS)}")
    return Mutation(where, node, arg if arg is not None else part, to, op, statement)


@dataclass(frozen=True)
class Fault:
    """A mistake, what it changes, and the check that must notice it."""

    name: str
    change: Mutation
    caught_by: str = ""  # the row that notices it, if no test stands below
    preset: str = ""  # the preset whose model is examined, for checks of models

    @property
    def where(self) -> str:
        """The function that is damaged, as `module:qualified name` of the package."""
        return self.change.where


def catches(
    name: str, where: str, node: Selector, *, case: str = "", **change: Any
) -> pytest.MarkDecorator:
    """Run a test again with a fault, when it must fail; `change` is that of `mutate`.

    `case` is in the id of the parameter set to run; the first one is taken if there is none.
    """
    return pytest.mark.catches(Fault(name, mutate(where, node, **change)), case=case)


class _Replace(ast.NodeTransformer):
    """Put one node in another's place."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _part_of(node: ast.expr, part: str | int) -> ast.expr | None:
    """Return an argument of a call, by number or keyword, or a field of another node."""
    if isinstance(part, int):
        elements = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        return elements[part] if part < len(elements) else None
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == part:
                return keyword.value
    found = getattr(node, part, None)
    return found if isinstance(found, ast.expr) else None


def _spelled(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Constant) else f"({text})"


def _fields(node: ast.expr) -> dict[str, Any]:
    """Return what `to` may quote: the node's text and that of its fields."""
    found: dict[str, Any] = {"it": _spelled(node)}
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            found[name] = _spelled(value)
        elif isinstance(value, list):
            found[name] = [_spelled(one) for one in value if isinstance(one, ast.AST)]
    return found


def _statement_of(function: ast.AST, node: ast.expr) -> ast.stmt:
    """Return the innermost statement that a node is in."""
    around = [
        one for one in in_order(function) if isinstance(one, ast.stmt) and node in ast.walk(one)
    ]
    return around[-1]


def damaged(function: ast.AST, change: Mutation, name: str = "") -> None:
    """Change the tree of a function."""
    node = change.node.select(function)
    if node is not None and change.part is not None:
        node = _part_of(node, change.part)
    if node is None:
        part = "" if change.part is None else f", {change.part!r} of it"
        raise LookupError(
            f"{name or change.where}: {change.node!r}{part} is gone from {change.where}\n"
            f"{ast.unparse(function)}"
        )
    old: ast.AST = node
    new: ast.AST
    if change.statement is not None:
        old = _statement_of(function, node)
        (new,) = ast.parse(change.statement).body
    elif change.op is not None:
        operator = UNARY if isinstance(node, ast.UnaryOp) else OPERATORS
        if isinstance(node, ast.Compare):
            node.ops[0] = operator[change.op]()  # type: ignore[call-overload]
        else:
            node.op = operator[change.op]()  # type: ignore[attr-defined]
        return
    else:
        assert change.to is not None
        new = ast.parse(f"({change.to.format(**_fields(node))})", mode="eval").body
        if ast.dump(new) == ast.dump(node):
            raise ValueError(f"{name or change.where}: this changes nothing: {ast.unparse(new)}")
    for one in ast.walk(new):
        ast.copy_location(one, old)
    _Replace(old, new).visit(function)


def planted_in(module: str) -> types.ModuleType:
    """Return the module of a fault: ours, one of the benchmarks and tests, or of a library."""
    outside = module.startswith(("bench.", "tests.", "transformers.", "peft."))
    return importlib.import_module(module if outside else f"glassformer.{module}")


def function_named(where: str) -> types.FunctionType:
    """Return the plain function of `module:qualified name`, below every decorator."""
    module, _, path = where.partition(":")
    found: Any = planted_in(module)
    for name in path.split("."):
        found = vars(found)[name]
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, functools.cached_property):
        found = found.func
    found = inspect.unwrap(found)
    assert isinstance(found, types.FunctionType), where
    return found


def _definition(tree: ast.Module, line: int, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the definition that begins at a line, its decorators included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == line:
                return node
    raise LookupError(f"line {line} defines no {name}")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def changed_code(function: types.FunctionType, change: Mutation, name: str = "") -> types.CodeType:
    """Return a function's code with the change in it."""
    code = function.__code__
    tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
    definition = _definition(tree, code.co_firstlineno, function.__name__)
    damaged(definition, change, name)
    # A name of the scope around stays one, even if the change took its last use.
    kept = [ast.Name(free, ast.Load()) for free in code.co_freevars if free != "__class__"]
    if "__class__" in code.co_freevars:
        kept.append(ast.Name("__class__", ast.Load()))
    if kept:
        uses = ast.If(ast.Constant(False), [ast.Expr(one) for one in kept], [])
        documented = ast.get_docstring(definition) is not None
        definition.body.insert(int(documented), uses)
    ast.fix_missing_locations(tree)
    for twin in _codes(compile(tree, f"<fault: {name}>", "exec", dont_inherit=True)):
        if (twin.co_qualname, twin.co_firstlineno) == (code.co_qualname, code.co_firstlineno):
            assert twin.co_freevars == code.co_freevars, (name, twin.co_freevars)
            return twin
    raise LookupError(f"{change.where} is not in its file")


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Run with this fault in the package; restored afterwards.

    The function's code is exchanged, which reaches everyone who imported it by name, and closures
    that are made of it from now on.
    """
    function = function_named(fault.where)
    before = function.__code__
    function.__code__ = changed_code(function, fault.change, fault.name)
    try:
        yield
    finally:
        function.__code__ = before
