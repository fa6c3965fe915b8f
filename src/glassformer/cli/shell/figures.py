"""Figures that verbs write: confusion tables, the learning-rate range test."""

from pathlib import Path

from glassformer.cli.shell import terminal
from glassformer.cli.shell.output import ending_of, write_file
from glassformer.lab.measure.evaluate import Evaluation, confusion_rows, csv_text, rows_csv
from glassformer.lab.plots import figures
from glassformer.lab.plots.figures import confusion_figure
from glassformer.lens.show.mpl import figure_bytes
from glassformer.training.lr_find import RateRange

CONFUSION_ENDINGS = LR_ENDINGS = ("png", "svg", "csv")


def save_confusion(evaluation: Evaluation, path: Path, *, title: str) -> None:
    """Write the tables of an evaluation as a figure, or every cell as CSV."""
    ending = ending_of(path, CONFUSION_ENDINGS)
    figure = confusion_figure(evaluation.confusion, title=title)  # refuses where there is none
    if ending == "csv":
        write_file(path, rows_csv(confusion_rows(evaluation.confusion)).encode())
    else:
        write_file(path, figure_bytes(figure, ending))


def lr_text(found: RateRange) -> str:
    """Draw the range test's curve for this terminal."""
    return figures.lr_text(found, width=terminal.columns(), unicode=terminal.is_unicode())


def save_lr(found: RateRange, path: Path, *, title: str) -> None:
    """Write the range test as a figure, or its points as CSV."""
    ending = ending_of(path, LR_ENDINGS)
    if ending == "csv":
        lines = [[rate, loss] for rate, loss in found.curve]
        write_file(path, csv_text(["lr", "loss"], lines).encode())
    else:
        write_file(path, figure_bytes(figures.lr_figure(found, title=title), ending))
