"""A build without taps: our own modules with every tap cut out of their source, for comparison.

`tap(taps, name, x)` becomes `x`, `under(...)` becomes None, and what is asked of `taps` becomes
False. Nothing else changes, so that the difference in time is what taps cost when nobody looks.
"""

import ast
import importlib
import inspect
import sys
import types

from glassformer.models.model import Model
from glassformer.spec.model import ModelSpec

#: In the order of their imports.
MODULES = (
    "glassformer.nn.ffn",
    "glassformer.nn.attention",
    "glassformer.nn.block",
    "glassformer.models.stack",
    "glassformer.models.model",
)


class _Cut(ast.NodeTransformer):
    """Counts what it cuts, so that a renamed function is noticed."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "tap":
            self.count += 1
            return node.args[2]
        if isinstance(node.func, ast.Name) and node.func.id == "under":
            self.count += 1
            return ast.Constant(None)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        if ast.unparse(node.test).startswith("taps is not None"):
            self.count += 1
            return node.orelse
        return node


def bare_decoder(spec: ModelSpec) -> tuple[Model, int]:
    """A decoder of that spec without taps, and how many places were cut."""
    cut, originals = _Cut(), {name: importlib.import_module(name) for name in MODULES}
    try:
        for name in MODULES:
            tree = ast.fix_missing_locations(
                cut.visit(ast.parse(inspect.getsource(originals[name])))
            )
            made = types.ModuleType(name)
            sys.modules[name] = made  # later ones import the bare one
            exec(compile(tree, f"<{name} without taps>", "exec"), made.__dict__)
        return sys.modules[MODULES[-1]].DecoderLM(spec), cut.count
    finally:
        sys.modules.update(originals)
