"""`python -m bench styles`: mistakes in models with other calling habits, and who sees them.

The models of `bench/styles/models.py` are healthy; each record of `mistakes.txt` changes one line
of one of them so that an equality which the model promises no longer holds. `gf.verify` is asked
without a word about how the model is called; `--healthy` asks only the models as they stand and
their healthy variants (`variants.txt`).
"""

import argparse
import importlib.util
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
#: What a caller must say, since nothing in the module does: this one reads both ways.
CAUSAL = {"torchbert": False}
SOURCE = HERE / "models.py"
RECORD = re.compile(r"^(?P<model>[a-z]+): (?P<name>.+)\n- (?P<old>.+)\n\+ (?P<new>.+)$", re.M)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake: the model, what goes wrong, the text that stands there, the text put instead."""

    model: str
    name: str
    old: str
    new: str


def records(file: str) -> tuple[Mistake, ...]:
    """Read the records of a file: mistakes, or changes that break nothing."""
    text = (HERE / file).read_text(encoding="utf-8")
    return tuple(Mistake(**found.groupdict()) for found in RECORD.finditer(text))


def sections(source: str) -> dict[str, int]:
    """Return where the source of each model begins: the first class that its factory needs."""
    begins, names = {}, {}
    for found in re.finditer(r"^class (\w+)", source, re.M):
        names[found.group(1)] = found.start()
    for found in re.finditer(r"^def (\w+)\(\) -> nn.Module:\n(?P<body>(?: .*\n)+)", source, re.M):
        used = re.findall(r"[A-Z]\w+(?=\()", found.group("body"))
        begins[found.group(1)] = names[used[0]]
    return begins


def planted(mistake: Mistake | None) -> str:
    """Return the source of the models with a mistake: where the model's own class has the line.

    Parts above the class are its own too; so the last such line before the class's end is taken.
    """
    source = SOURCE.read_text(encoding="utf-8")
    if mistake is None:
        return source
    begin = sections(source)[mistake.model]
    end = source.find("\nclass ", begin + 1)
    end = source.index("\n# --- factories") if end < 0 else end
    at = source.rfind(mistake.old, 0, end)
    if at < 0:
        raise LookupError(f"{mistake.model}: no line {mistake.old!r}")
    return source[:at] + mistake.new + source[at + len(mistake.old) :]


def imported(file: Path) -> ModuleType:
    """Import a file as a module of its own."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def certified(mistake: Mistake | None, model: str) -> tuple[list[str], int, int]:
    """Return the checks that fail, how many ran, and how many there are."""
    from glasscheck.errors import InputError
    from glasscheck.report import verify_reference

    with TemporaryDirectory() as place:
        file = Path(place) / "styled.py"
        file.write_text(planted(mistake), encoding="utf-8")
        try:
            report = verify_reference(f"{file}:{model}", causal=CAUSAL.get(model))
        except InputError as refused:
            return [f"refused: {str(refused).splitlines()[0]}"], 0, 0
    failed = [f.name for f in report.findings if f.failed]
    ran = report.ran
    return failed, ran, len(report.findings)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="", help="part of a model's or a mistake's name")
    parser.add_argument("--healthy", action="store_true", help="only the models as they stand")


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, for each mistake, then the sums."""
    import torch

    torch.set_num_threads(1)
    empty = {"bench": "styles", "median_ms": None, "ratio": None, "of_limit": None}

    def asked_for(file: str) -> tuple[Mistake, ...]:
        found = [m for m in records(file) if asked.only in f"{m.model}: {m.name}"]
        return tuple(found[::12] if quick else found)

    chosen = asked_for("mistakes.txt")
    models = dict.fromkeys(m.model for m in chosen)
    healthy = [(f"{model}, as it stands", None, model) for model in models]
    healthy += [(f"{m.model}: {m.name}", m, m.model) for m in asked_for("variants.txt")]
    counts, alarms, clean = [], 0, dict[str, set[str]]()
    for case, variant, model in healthy:
        failed, ran, known = certified(variant, model)
        counts.append(ran)
        if variant is None:
            clean[model] = set(failed)
        alarms += bool(failed)
        said = f"{ran} of {known} ran; {', '.join(failed) or 'green'}"
        yield {**empty, "case": case, "name": said}
    said = f"{alarms} alarms; checks that ran: median {statistics.median(counts)}"
    yield {**empty, "case": f"{len(healthy)} healthy models", "name": said}
    if asked.healthy:
        return
    seen = 0
    for mistake in chosen:
        failed, _, _ = certified(mistake, mistake.model)
        refused = any(name.startswith("refused: ") for name in failed)
        # What the model fails without the mistake, or is not asked at all, does not show it.
        failed = [] if refused else [name for name in failed if name not in clean[mistake.model]]
        seen += bool(failed)
        case = f"{mistake.model}: {mistake.name}"
        yield {**empty, "case": case, "name": "; ".join(failed) or "MISSED"}
    said = f"seen: {seen} ({seen / max(1, len(chosen)):.1%})"
    yield {**empty, "case": f"{len(chosen)} mistakes", "name": said}
