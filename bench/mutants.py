"""Which random changes of the package no test notices: a sample of mutants, and the survivors.

A mutant is one function with one change: another operator, the other side of a boundary, another
constant, a condition turned, a statement dropped. The tests that touch its module run against a
copy of the package with the change in it, until one fails. A survivor is a missing test, a change
that means the same, or code that can go.

    python -m bench mutants --sample 60 --package nn

Outcomes are kept in `build/mutants`, a line of JSON each: the same call goes on where it stopped.
Survivors that were looked into and stay have their reason in `EXPLAINED`.
"""

import argparse
import ast
import compileall
import copy
import functools
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from bench.clock import said

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "glassformer"
#: Code that no test of this machine runs, and files without computation.
LEFT_OUT = ("gpu/", "kernels/triton", "kernels/cuda", "__main__.py", "__init__.py")
#: Their tests need a browser, a network of processes or many minutes.
SLOW = (
    "tests/browser/",
    "tests/learning/",
    "tests/lab/test_kills.py",
    "tests/contracts/test_site.py",
)

#: Survivors that no test could notice: file, function, and why.
EXPLAINED = {
    ("data/corpus/prepare.py", "_groups"): "how many documents are encoded at once: the same bytes",
    ("quant/backends/routines.py", "AtenInt4._table"): "a product that only a GPU has",
    ("quant/backends/routines.py", "AtenInt4._multiply"): "a product that only a GPU has",
}

Kind = Literal["operator", "boundary", "constant", "condition", "statement"]
Outcome = Literal["caught", "survives", "timed out", "untested", "fails without it"]

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
BOUNDARIES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}


@dataclass(frozen=True)
class Mutant:
    """One change: `old` at a place of a file becomes `new`."""

    file: str  # below src/glassformer
    line: int
    column: int
    kind: Kind
    function: str
    old: str
    new: str
    start: int  # the characters of the file that are replaced
    end: int

    @property
    def key(self) -> str:
        """A name that other lines of the file do not change."""
        said = f"{self.file} {self.function} {self.kind} {self.old} {self.new}"
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @property
    def place(self) -> str:
        """`file:line` below the repository."""
        return f"src/glassformer/{self.file}:{self.line}"


# --- what can be changed --------------------------------------------------------------------------


def changes_of(node: ast.AST) -> Iterator[tuple[Kind, ast.AST]]:
    """Yield what may stand in a node's place."""
    match node:
        case ast.BinOp(left=left, op=op) if type(op) in SWAPS:
            texts = (ast.JoinedStr, ast.List, ast.Tuple)
            if not any(isinstance(side, texts) or _is_text(side) for side in (left, node.right)):
                yield "operator", _with(node, op=SWAPS[type(op)]())
        case ast.BoolOp(op=op):
            yield "operator", _with(node, op=SWAPS[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in BOUNDARIES:
            yield "boundary", _with(node, ops=[BOUNDARIES[type(op)]()])
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield "operator", _with(node, ops=[SWAPS[type(op)]()])
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "operator", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(value * 1.5 if value else 1.0)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
                yield "condition", ast.UnaryOp(ast.Not(), test)
        case ast.AugAssign() | ast.Break() | ast.Continue():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield "statement", ast.Pass()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _computes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below that compute something: no annotation, no message, no assertion."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr) or not isinstance(
                child, ast.AST
            ):
                continue
            if isinstance(child, ast.Call) and _names_a_type(child):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of zip: an assertion
            yield child
            yield from _computes(child)


def _names_a_type(call: ast.Call) -> bool:
    """Errors, warnings and casts: what they say is not computed with."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in ("cast", "warn", "assert_never") or name.endswith(("Error", "Warning"))


def mutants_of(file: Path) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    # columns count bytes
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for function, name in _functions(ast.parse(text), ""):
        for node in _computes(function):
            for kind, new in changes_of(node):
                old = node
                if kind == "condition":
                    old = node.test  # type: ignore[attr-defined]
                begin = at(old.lineno, old.col_offset)  # type: ignore[attr-defined]
                end = at(old.end_lineno, old.end_col_offset)  # type: ignore[attr-defined]
                said = ast.unparse(new)
                found.append(
                    Mutant(
                        file=file.relative_to(SOURCE).as_posix(),
                        line=old.lineno,  # type: ignore[attr-defined]
                        column=old.col_offset,  # type: ignore[attr-defined]
                        kind=kind,
                        function=name,
                        old=text[begin:end],
                        new=said if kind == "statement" else f"({said})",
                        start=begin,
                        end=end,
                    )
                )
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the functions and methods of a module; what is nested belongs to its outer one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name != "__repr__":
                yield child, prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def population(package: str) -> list[Path]:
    """Return the files of the package (`nn`, `lab/runs`, or everything)."""
    files = sorted((SOURCE / package).rglob("*.py"))
    if not files and (SOURCE / f"{package}.py").exists():
        files = [SOURCE / f"{package}.py"]
    if not files:
        raise SystemExit(f"there is no package {package} in {SOURCE}")
    return [
        file
        for file in files
        if not any(part in file.relative_to(SOURCE).as_posix() for part in LEFT_OUT)
    ]


def sample(package: str, count: int, seed: int) -> list[Mutant]:
    """Return mutants drawn at random, the same for the same seed and tree: each place alike."""
    every = [mutant for file in population(package) for mutant in mutants_of(file)]
    random.Random(seed).shuffle(every)
    chosen, seen = [], set()
    for mutant in every:
        if mutant.key not in seen:
            seen.add(mutant.key)
            chosen.append(mutant)
    return chosen[:count]


# --- which tests touch a module -------------------------------------------------------------------


@functools.cache
def _imports(file: Path) -> frozenset[str]:
    """Return the modules of ours that a file (or its conftest) imports, or plants a fault in."""
    text = _text(file)
    beside = file.with_name("conftest.py")
    found = set(re.findall(r'"([a-z_.]+):[\w.]+"', text))
    for node in ast.walk(ast.parse(text + (_text(beside) if beside.exists() else ""))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name.removeprefix("glassformer.") for name in found)


def tests_of(file: str, function: str, most: int) -> list[str]:
    """Return the test files that touch a module, the nearest first.

    Nearest is the file that is named for it; then who imports it, and names the function; then who
    imports the modules that import it.
    """
    module = file.removesuffix(".py").replace("/", ".")
    users = {
        other.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
        for other in SOURCE.rglob("*.py")
        if module in _imports(other)
    }
    package, leaf = file.split("/")[0], Path(file).stem.lstrip("_")
    scores = Counter[str]()
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        name = test.relative_to(ROOT).as_posix()
        if name.startswith(SLOW) or "cuda" in name or "gpu" in name:
            continue
        imported = _imports(test)
        score = 0
        if test.stem == f"test_{leaf}":
            score += 8 if f"/{package}/" in name else 2
        if file.startswith("checks/rows/") and test.stem == "test_verify":
            score += 8  # which runs every row
        if module in imported:
            score += 6
            score += 2 * (
                re.search(rf"\b{re.escape(function.split('.')[0])}\b", _text(test)) is not None
            )
        score += min(4, len(users & imported))
        score += 3 * (f"tests/{package}/" in name and score > 0)
        if score:
            scores[name] = score
    ranked = sorted(scores, key=lambda name: (-scores[name], (ROOT / name).stat().st_size))
    return ranked[:most]


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


# --- one mutant at a time -------------------------------------------------------------------------


class Bench:
    """A copy of the package, into which one change at a time is written."""

    def __init__(self, place: Path, *, files: int, seconds: float) -> None:
        self.source, self.files, self.seconds = place / "src", files, seconds
        shutil.copytree(ROOT / "src", self.source)
        compileall.compile_dir(self.source, quiet=2, workers=1)

    def judge(self, mutant: Mutant, tests: list[str]) -> tuple[Outcome, str]:
        """Run the nearest tests with the change, then the others; say which one failed."""
        if not tests:
            return "untested", ""
        near, far = tests[: self.files], tests[self.files :]
        file = self.source / "glassformer" / mutant.file
        whole = file.read_text(encoding="utf-8")
        changed = whole[: mutant.start] + mutant.new + whole[mutant.end :]
        compile(changed, mutant.file, "exec")
        self._write(file, changed)
        try:
            outcome, failed = self._run(near)
            if outcome == "survives" and far:
                outcome, failed = self._run(far)
        finally:
            self._write(file, whole)
        # A test that fails in any case has noticed nothing.
        if outcome == "caught" and failed and self._run([failed])[0] != "survives":
            return "fails without it", failed
        return outcome, failed

    def _write(self, file: Path, text: str) -> None:
        for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            old.unlink()
        file.write_text(text, encoding="utf-8")

    def _run(self, tests: list[str]) -> tuple[Outcome, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=no", "-rfE"]
        command += ["-p", "no:cacheprovider", "-p", "no:randomly", *tests]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.source}{os.pathsep}{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=self.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "timed out", ""
        if done.returncode in (0, 5):
            return "survives", ""
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
        return "caught", failed[1] if failed else ""


# --- the command ----------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    """Add what is sampled, and how long each may take."""
    parser.add_argument("--sample", type=int, default=20, metavar="N", help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", default="", help="nn, lab/runs, ...; everything if not given")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for one mutant")
    parser.add_argument(
        "--files", type=int, default=4, help="the nearest test files; twice as many for a survivor"
    )
    parser.add_argument("--ledger", type=Path, default=Path("build/mutants"))


def run(*, asked: argparse.Namespace, quick: bool = False) -> Iterator[dict[str, object]]:
    """Yield a row for each survivor, and one with the counts."""
    count = 2 if quick else asked.sample
    scope = asked.package.replace("/", "-") or "everything"
    ledger = asked.ledger / f"{scope}-{asked.seed}.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    known = {found["key"]: found for found in map(json.loads, lines)}
    counts = Counter[str]()
    with TemporaryDirectory() as place:
        bench = None
        for mutant in sample(asked.package, count, asked.seed):
            found = known.get(mutant.key)
            if found is None:
                if bench is None:
                    bench = Bench(Path(place), files=asked.files, seconds=asked.seconds)
                begin = time.perf_counter()
                tests = tests_of(mutant.file, mutant.function, 3 * asked.files)
                outcome, failed = bench.judge(mutant, tests)
                found = {
                    "key": mutant.key,
                    **asdict(mutant),
                    "outcome": outcome,
                    "failed": failed,
                    "tests": tests,
                    "seconds": round(time.perf_counter() - begin, 1),
                }
                with ledger.open("a") as out:
                    out.write(json.dumps(found) + "\n")
                print(
                    f"{outcome}: {mutant.place} {mutant.old!r} -> {mutant.new!r}", file=sys.stderr
                )
            counts[found["outcome"]] += 1
            why = EXPLAINED.get((mutant.file, mutant.function))
            if found["outcome"] == "survives" and why:
                counts.subtract([found["outcome"]])
                counts["explained"] += 1
                yield _row(mutant.place, f"explained: {mutant.old} -> {mutant.new}: {why}")
            elif found["outcome"] != "caught":
                yield _row(mutant.place, f"{found['outcome']}: {mutant.old} -> {mutant.new}")
    told = ", ".join(f"{number} {what}" for what, number in counts.most_common() if number)
    judged = counts["caught"] + counts["survives"]
    ratio = counts["caught"] / judged if judged else None
    yield {**_row(f"{sum(counts.values())} mutants of {scope}", told), "ratio": ratio}


_row = partial(said, "mutants")
