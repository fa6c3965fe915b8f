"""Tables of options in the docs, written from the specs that declare them.

A page marks a table with a comment; `python -m pages options` writes the table under it, and a test
compares every table with its spec:

    <!-- options: glassformer/spec/decoding.py DecodeSpec -->

With a prefix, the table lists settings that are given as `train.lr=1e-3`, not options of a command:

    <!-- options: glassformer/spec/train.py TrainSpec train. -->

`<!-- help: train -->` marks the help of a command, at 80 columns.
"""

import importlib
import re
from pathlib import Path

from glassformer.spec.options import Option, options_of
from pages.quotes import PAGES

MARK = re.compile(
    r"^(?P<mark><!-- options: (?P<file>\S+)\.py (?P<name>\w+)(?: (?P<prefix>\w+\.))? -->)\n"
    r"(?:\n(?:\|.*\n)+)?",
    re.M,
)


HELP = re.compile(
    r"^(?P<mark><!-- help: (?P<verb>[a-z -]*?) ?-->)\n(?:\n```text\n(?:.*\n)*?```\n)?", re.M
)


def help_of(verb: str) -> str:
    """What `glass VERB --help` prints at 80 columns, as a block."""
    from typer.testing import CliRunner

    from glassformer.cli.main import app

    shown = CliRunner().invoke(
        app, [*verb.split(), "--help"], env={"COLUMNS": "80"}, prog_name="glass"
    )
    return f"```text\n{shown.stdout.strip()}\n```\n"


def table_of(file: str, name: str, prefix: str | None = None) -> str:
    """The options of a spec as a Markdown table; with a prefix, its settings."""
    cls = getattr(importlib.import_module(file.replace("/", ".")), name)
    rows = ["| field | command | default | allowed | |", "|---|---|---|---|---|"]
    if prefix is not None:
        rows = ["| setting | default | allowed | |", "|---|---|---|---|"]
    return "\n".join([*rows, *(_row(each, prefix) for each in options_of(cls))]) + "\n"


def _row(option: Option, prefix: str | None) -> str:
    repeated = ", repeatable" if option.repeated else ""
    allowed = option.limits.replace("|", "\\|")
    command = () if prefix is not None else (f"`{option.flag}`{repeated}",)
    cells = (
        f"`{prefix or ''}{option.name}`",
        *command,
        f"{option.default_text}",
        f"`{allowed}`" if allowed else "",
        option.help,
    )
    return f"| {' | '.join(cells)} |"


def refreshed(page: str) -> str:
    """The page with every table as its spec is now."""
    page = HELP.sub(lambda m: f"{m['mark']}\n\n{help_of(m['verb'])}", page)
    return MARK.sub(lambda m: f"{m['mark']}\n\n{table_of(m['file'], m['name'], m['prefix'])}", page)


def refresh(folder: Path = PAGES) -> list[Path]:
    """Rewrite the pages whose tables have changed, and return their paths."""
    changed = []
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
