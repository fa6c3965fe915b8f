"""`glass report`: the one-file report of a run, or curves of runs, printed or written to a file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell import terminal
from glassformer.cli.shell.options import AsJson, Device, Runs, complete_runs, out_file
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.resolve import find_run
from glassformer.cli.shell.terminal import end, target_of, tell, write_file
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.options import option
from glassformer.spec.serialize import json_numbers

if TYPE_CHECKING:
    from glassformer.lab.runs.curves import Curves
    from glassformer.lens.show.chart import Lines

CURVE_ENDINGS = ("png", "svg", "pdf", "csv")
ENDINGS = ("html", *CURVE_ENDINGS)
#: Lines of a plot in the terminal; alerts that are listed below it.
HEIGHT, LISTED = 12, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Whether curves are drawn and how, and how the report is made."""

    curves: bool = option(False, help="Curves in the terminal instead of a report.")
    series: tuple[str, ...] = option(
        (), metavar="NAME", help="Curves: lr, val.by.operation.MAX, ..."
    )
    axis: str | None = option(
        None, flag="--x", metavar="AXIS", help="Curves: step (the default), tokens or time."
    )
    span: float | None = option(
        None, flag="--smooth", help="Curves: points that the mean covers; 1 is no mean."
    )
    log: Annotated[
        bool | None,
        typer.Option("--log/--linear", help="Curves: the scale; by default what suits them."),
    ] = None
    verify: bool = option(True, flag="--no-verify", help="Report: leave out the certificate.")
    device: Device = "cpu"

    @property
    def of_curves(self) -> bool:
        """True if an option was given that only curves take."""
        given = (self.axis, self.span, self.log)
        return bool(self.series) or any(each is not None for each in given)


def report(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="A run, or RUN@120; several give their curves.",
            autocompletion=complete_runs,
        ),
    ],
    asked: Options,
    out: Annotated[
        str | None,
        out_file("Write the report to this .html, or curves as .png, .svg, .pdf or .csv."),
    ] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about a run, or curves of several.

    The report needs no script and no network. It is in the run's folder as report.html unless
    -o says otherwise. Examples:

      glass report digits

      glass report digits --curves

      glass report first second -o curves.png --x tokens
    """
    for name in run:
        find_run(name, Path(runs))  # before torch is imported
    target, place = target_of(out, ENDINGS), Path(runs)
    ending = "" if target is None else target.suffix.lower().removeprefix(".")
    drawn = asked.curves or ending in CURVE_ENDINGS or (not ending and len(run) > 1)
    if ending == "html" and (drawn or len(run) > 1):
        raise InputError(
            "a report is of one run, and holds its curves",
            hint="-o curves.png for several, or one run with -o report.html",
        )
    if drawn:
        if not asked.verify or asked.device != "cpu":
            raise InputError("--no-verify and --device are of a report", hint="leave them out")
        _draw_curves(run, asked, target=target, runs=place, as_json=as_json)
        return
    if asked.of_curves:
        raise InputError(
            "--series, --x, --smooth, --log and --linear are of curves", hint="add --curves"
        )
    _write_report(run[0], asked, target=target, runs=place, as_json=as_json)


def _write_report(
    name: str,
    asked: Options,
    *,
    target: Path | None,
    runs: Path,
    as_json: bool,
) -> None:
    """Make the report, write it atomically, and print its path."""
    from glassformer.checks.report import Report
    from glassformer.lab.next_steps import after_report
    from glassformer.store.rundir import RunRef
    from glassformer.web.report.document import report_html

    path = find_run(name, runs)
    directory = RunRef.parse(path).directory
    certificate = None if asked.verify else Report(())
    text = report_html(
        path,
        certificate=certificate,
        device=check_device(asked.device),
        progress=lambda title: tell(f"  {title}"),
    )
    if target is None:
        directory.write("report.html", text)
        target = directory.folder / "report.html"
    else:
        write_file(target, text.encode())
    size = len(text.encode())
    if as_json:
        typer.echo(json.dumps({"report": str(target), "bytes": size}))
    else:
        typer.echo(f"{target}  {size:,} bytes, opens in any browser, offline")
        end("", after_report(name))


# --- curves ---------------------------------------------------------------------------------------


def _draw_curves(
    names: Sequence[str],
    asked: Options,
    *,
    target: Path | None,
    runs: Path,
    as_json: bool,
) -> None:
    """Read the curves, then print them or write them to the requested file."""
    from glassformer.lab.measure.evaluate import rows_csv
    from glassformer.lab.plots.curves import curve_chart
    from glassformer.lab.runs.curves import AXES
    from glassformer.lens.show.chart_figure import figure_bytes

    axis = asked.axis or "step"
    if axis not in AXES:
        raise InputError(f"no axis '{axis}'", hint=nearest(axis, AXES))
    curves = [_read(name, runs) for name in names]
    if target is None and not as_json:
        typer.echo(_curves_text(curves, asked, axis))
        return
    if target is not None and target.suffix.lower() == ".csv":
        write_file(target, rows_csv(_rows(curves, asked.series)).encode())
    elif target is not None:
        drawn = curve_chart(curves, names=asked.series, axis=axis, span=asked.span, log=asked.log)
        write_file(target, figure_bytes(drawn, target.suffix.lower().removeprefix(".")))
    if as_json:
        typer.echo(json.dumps(json_numbers(_record(curves, asked.series)), allow_nan=False))


def _read(name: str, runs: Path) -> "Curves":
    from glassformer.lab.runs.curves import read_curves
    from glassformer.store.rundir import RunRef

    ref = RunRef.parse(name)
    if ref.step:
        raise InputError(
            f"{name} is a checkpoint, and curves are of a whole run", hint=f"write {ref.path}"
        )
    return read_curves(Path(find_run(ref.path, runs)))


def _curves_text(curves: "Sequence[Curves]", asked: Options, axis: str) -> str:
    """Draw every panel for this terminal, then explain how to read it."""
    from glassformer.lab.plots.curves import alerts_text, panels, smoothing_text

    made = panels(curves, names=asked.series, axis=axis, span=asked.span, log=asked.log)
    parts = [_panel_text(chart) for chart in made]
    notes = [smoothing_text(made, asked.span)]
    if alerts := alerts_text(curves):
        notes.append(f"alerts (!): {alerts}")
    parts.append("\n".join(filter(None, [*notes, *_alerts(curves)])))
    return terminal.printable("\n\n".join(filter(None, parts)))


def _panel_text(chart: "Lines") -> str:
    from glassformer.lens.show.chart_text import chart_text

    picture = chart_text(
        chart,
        width=terminal.columns(),
        height=HEIGHT,
        unicode=terminal.is_unicode(),
        paint=terminal.paint,
    )
    scale = ", logarithmic" if chart.log_y else ""
    return f"{chart.title} over {chart.x_title}{scale}\n{picture}"


def _alerts(curves: "Sequence[Curves]") -> Iterator[str]:
    every = [(one.run, alert) for one in curves for alert in one.alerts]
    for name, alert in every[:LISTED]:
        yield f"  {name} step {alert.step}: {alert.kind}: {alert.message}"
    if len(every) > LISTED:
        yield f"  and {len(every) - LISTED} more in alerts.jsonl"


def _rows(curves: "Sequence[Curves]", names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the wide tables of all runs, one after another, with the union of their columns."""
    for name in names:
        if not any(name in one.series for one in curves):
            curves[0][name]  # raises, and lists the known series
    rows = [row for one in curves for row in one.rows()]
    fixed = ("run", "step", "tokens", "seconds")
    every = dict.fromkeys(name for row in rows for name in row if name not in fixed)
    chosen = (*fixed, *(names or every))
    return [{name: row.get(name) for name in chosen} for row in rows]


def _record(curves: "Sequence[Curves]", names: Sequence[str]) -> dict[str, Any]:
    made = []
    for one in curves:
        kept = {name: one[name] for name in names} if names else one.series
        series = {
            name: {"step": line.step.tolist(), "value": line.value.tolist()}
            for name, line in kept.items()
        }
        alerts = [{"step": a.step, "kind": a.kind, "message": a.message} for a in one.alerts]
        made.append({"run": one.run, "series": series, "alerts": alerts})
    return {"runs": made}
