"""Figures that verbs write beside their text: confusion, range test, curves."""

from pathlib import Path

from glassformer.cli import terminal
from glassformer.cli.saving import ending_of, write_file
from glassformer.lab import lr_figure
from glassformer.lab.confusion import confusion_rows, csv_text, rows_csv
from glassformer.lab.confusion_figure import confusion_figure
from glassformer.lab.evaluate import Evaluation
from glassformer.lens.figure_file import figure_bytes
from glassformer.train.lr_find import RateRange

CONFUSION_ENDINGS = LR_ENDINGS = ("png", "svg", "csv")


def target_of(output: str | None, endings: tuple[str, ...]) -> Path | None:
    """Where `-o` leads, asked before the work is done; None without it."""
    if output is None:
        return None
    path = Path(output)
    ending_of(path, endings)
    return path


def save_confusion(evaluation: Evaluation, path: Path, *, title: str) -> None:
    """The tables of an evaluation as a figure, or every cell as CSV."""
    ending = ending_of(path, CONFUSION_ENDINGS)
    figure = confusion_figure(evaluation.confusion, title=title)  # refuses where there is none
    if ending == "csv":
        write_file(path, rows_csv(confusion_rows(evaluation.confusion)).encode())
    else:
        write_file(path, figure_bytes(figure, ending))


def lr_text(found: RateRange) -> str:
    """The range test's curve for this terminal."""
    return lr_figure.lr_text(found, width=terminal.columns(), unicode=terminal.is_unicode())


def save_lr(found: RateRange, path: Path, *, title: str) -> None:
    """The range test as a figure, or its points as CSV."""
    ending = ending_of(path, LR_ENDINGS)
    if ending == "csv":
        lines = [[rate, loss] for rate, loss in found.curve]
        write_file(path, csv_text(["lr", "loss"], lines).encode())
    else:
        write_file(path, figure_bytes(lr_figure.lr_figure(found, title=title), ending))
