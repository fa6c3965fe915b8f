"""What a sweep shows: a table for the terminal, CSV, and pictures for the report and the page.

Pictures are trees of elements, which the report writes as SVG and the explorer's page builds as
nodes. Every number comes from `Ranking` or from a run's result.
"""

import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from glassformer.budget.question import Budget
from glassformer.lab.sweeps.executors import Result
from glassformer.lab.sweeps.plan import Cell as Planned
from glassformer.lab.sweeps.plan import Plan, run_name
from glassformer.lab.sweeps.ranking import Comparison, Ranked, Ranking
from glassformer.lens.show.chart import Grid, Line, Lines, scale_of
from glassformer.lens.show.chart_svg import chart_svg, line, series_colour, words
from glassformer.lens.show.element import Element, el, picture
from glassformer.lens.show.report_page import Cell, Section, Text, page, say, scrolled, table
from glassformer.lens.show.text import cut
from glassformer.spec.csv_text import csv_text
from glassformer.spec.options import options_of
from glassformer.spec.sweep import SweepSpec

#: Cells that the terminal lists, and that a picture shows.
LISTED, DRAWN, CURVES = 40, 60, 8
#: Columns of a picture, in pixels.
WIDE = 860


def score_text(value: float | None, metric: str) -> str:
    """Format a score: shares as percentages, losses to four decimals."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.2%}" if metric in ("accuracy", "exact_match") else f"{value:.4f}"


def margin_text(row: Ranked, metric: str) -> str:
    """Format half of a cell's interval."""
    if row.low is None or row.high is None:
        return ""
    return f"±{score_text((row.high - row.low) / 2, metric)}"


def gap_text(gap: Comparison | None, metric: str) -> str:
    """Format a difference; `*` marks one that is told apart from zero."""
    if gap is None:
        return ""
    sign = "+" if gap.difference >= 0 else "-"
    return f"{sign}{score_text(abs(gap.difference), metric)}{' *' if gap.is_clear else '  '}"


def _title(metric: str) -> str:
    return metric.replace("_", " ")


# --- the terminal ---------------------------------------------------------------------------------


def ranking_text(
    plan: Plan, ranking: Ranking, results: Mapping[str, Result], *, width: int = 120
) -> str:
    """Return the ranking in words and columns, no line longer than `width`."""
    parts = [*_table_lines(plan, ranking, width)]
    words = [ranking.group_text(group) for group in ranking.groups]
    if ranking.rows:
        parts += ["", "ties", *(f"  {line}" for line in words)]
        how = f"±: 95 % interval over {ranking.seeds} seeds"
        if ranking.seeds > 1 and len(ranking.rows) > 1:
            how += "; *: told apart, paired by seed, corrected for all pairs (Holm)"
        parts += ["", *textwrap.wrap(how, width)]
    if ranking.effects:
        parts += [
            "",
            f"main effects on {_title(ranking.metric)}, paired by seed",
            *_effects(ranking),
        ]
    for crossing in ranking.crossings[:3]:
        parts.append(f"the best was behind {crossing.ahead} until step {crossing.step:,}")
    for note in ranking.notes:
        parts += textwrap.wrap(f"note: {note}", width)
    if ranking.incomplete:
        parts += ["", "not ranked"]
        parts += [f"  {name}: {why}"[:width] for _, name, why in ranking.incomplete[:LISTED]]
        if len(ranking.incomplete) > LISTED:
            parts.append(f"  and {len(ranking.incomplete) - LISTED} more")
    return "\n".join(parts)


def ranking_columns(plan: Plan, ranking: Ranking) -> dict[str, list[str]]:
    """Return the ranking as columns of text by their heading, without those that are empty."""
    rows, metric = ranking.rows, ranking.metric
    made = {
        "rank": [str(row.rank) for row in rows],
        "cell": [row.name for row in rows],
        _title(metric): [score_text(row.mean, metric) for row in rows],
        "±": [margin_text(row, metric) for row in rows],
        "behind best": [gap_text(row.best, metric) for row in rows],
        "vs baseline": [gap_text(row.baseline, metric) for row in rows],
        "parameters": [f"{plan.cells[row.cell].parameters:,}" for row in rows],
    }
    return {head: column for head, column in made.items() if any(map(str.strip, column))}


def _table_lines(plan: Plan, ranking: Ranking, width: int) -> Iterator[str]:
    if not ranking.rows:
        yield "no cell has all its seeds yet"
        return
    columns = ranking_columns(plan, ranking)
    names = zip(ranking.rows, columns["cell"], strict=True)
    columns["cell"] = [f"{n} ~" if _missed(plan.cells[r.cell]) else n for r, n in names]
    cells = {head: ["" if head == "rank" else head, *c[:LISTED]] for head, c in columns.items()}
    widths = {head: max(map(len, column)) for head, column in cells.items()}
    spare = width - sum(widths[head] + 2 for head in cells if head != "cell")
    widths["cell"] = max(12, min(widths["cell"], spare))

    def line(number: int) -> str:
        named = {head: cut(c[number], widths[head], mark="…") for head, c in cells.items()}
        texts = (f"{t:{'<' if h == 'cell' else '>'}{widths[h]}}" for h, t in named.items())
        return "  ".join(texts).rstrip()

    yield line(0)
    group = 1
    for number, row in enumerate(ranking.rows[:LISTED], start=1):
        if row.group != group:
            yield "-" * min(width, sum(widths.values()) + 2 * len(widths) - 2)
            group = row.group
        yield line(number)
    if len(ranking.rows) > LISTED:
        yield f"and {len(ranking.rows) - LISTED} more: table.csv has all"
    for row in ranking.rows[:LISTED]:
        for missed in _missed(plan.cells[row.cell]):
            yield from textwrap.wrap(f"~ {row.name}: {missed}", width, subsequent_indent="  ")


def _missed(cell: Planned) -> list[str]:
    """Return what was requested of a cell's budget and could not be had exactly."""
    lines = [note.removeprefix("gave way: ") for note in cell.notes if note.startswith("gave way")]
    return [line for line in lines if ": requested " in line]


def _effects(ranking: Ranking) -> Iterator[str]:
    long = max(len(f"{e.factor}={e.value}") for e in ranking.effects)
    for effect in ranking.effects:
        sure = effect.low * effect.high > 0
        name = f"{effect.factor}={effect.value}"
        yield (
            f"  {name:<{long}}  {effect.effect:+.4f}  ({effect.low:+.4f} to {effect.high:+.4f})"
            f"{'' if sure else '  no effect seen'}"
        )


# --- as it is typed -------------------------------------------------------------------------------


def commands(sweep: SweepSpec, folder: str) -> dict[str, str]:
    """Return the sweep as a command and as Python."""
    vary = {factor.path: factor.values.typed() for factor in sweep.factors}
    design = {factor.path: factor.values.typed() for factor in sweep.designs}
    own = {o.name: getattr(sweep, o.name) for o in options_of(SweepSpec)}
    given = {o.name: own[o.name] for o in options_of(SweepSpec) if own[o.name] != o.default}
    words = ["glass sweep", sweep.what, *(f"{path}={v}" for path, v in vary.items()), *sweep.fixed]
    flags = {each.name: each for each in options_of(Budget)}
    for name, text in design.items():
        if flags[name].typed is bool:
            spelled = {"tied": {"true": "--tied", "false": "--untied"}}.get(name, {})
            values = [spelled.get(v, flags[name].flag) for v in text.split(",")]
            words.append(",".join(values))
        else:
            words += [flags[name].flag, text]
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    words = [word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words]
    parts = [repr(sweep.what)]
    parts += [f"vary={vary!r}"] if vary else []
    parts += [f"overrides={list(sweep.fixed)!r}"] if sweep.fixed else []
    parts += [f"design={design!r}"] if design else []
    parts += [f"{name}={value!r}" for name, value in given.items()]
    name = folder.rpartition("/")[2]
    python = (
        f"import glassformer as gf\n\ngf.sweep({', '.join([*parts, f'name={name!r}'])}).ranking"
    )
    return {"cli": " ".join([*words, "--name", name]), "python": python}


_PLAIN = re.compile(r"glass sweep|[\w@%+=:,./-]+")


# --- CSV ------------------------------------------------------------------------------------------


def table_csv(plan: Plan, ranking: Ranking, results: Mapping[str, Result]) -> str:
    """Return a line for each cell, ranked ones first: settings, scores, comparisons, seeds."""
    factors = plan.factors()
    seeds = [f"seed {seed}" for seed in range(plan.sweep.seeds)]
    heading = (
        *("rank", "group", "cell", *factors, "parameters", ranking.metric, "low", "high"),
        *("behind best", "p best", "vs baseline", "p baseline", *seeds, "status", "notes"),
    )
    lines: list[list[object]] = []
    for row in ranking.rows:
        cell = plan.cells[row.cell]
        gaps: list[object] = []
        for gap in (row.best, row.baseline):
            gaps += ["", ""] if gap is None else [gap.difference, gap.p]
        lines.append(
            [
                *(row.rank, row.group, cell.name, *(cell.settings.get(f, "") for f in factors)),
                *(cell.parameters, row.mean, row.low, row.high, *gaps, *row.seeds),
                *("finished", "; ".join(cell.notes)),
            ]
        )
    for index, name, why in ranking.incomplete:
        cell = plan.cells[index]
        found = [results.get(run_name(index, seed)) for seed in range(plan.sweep.seeds)]
        values = [None if one is None else one.at(None, ranking.metric) for one in found]
        lines.append(
            [
                *("", "", name, *(cell.settings.get(factor, "") for factor in factors)),
                *(cell.parameters, "", "", "", "", "", "", "", *values, why, "; ".join(cell.notes)),
            ]
        )
    return csv_text(heading, lines)


# --- pictures -------------------------------------------------------------------------------------


class _Axis:
    """Numbers onto pixels."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        known = np.array([value for value in values if math.isfinite(value)])
        self.scale, self.start, self.end = scale_of(known, pad=0.04), start, end

    def at(self, value: float) -> float:
        """Return the pixel of a number."""
        return self.start + self.scale.at(value) * (self.end - self.start)


def intervals_picture(ranking: Ranking) -> Element:
    """Draw each cell's mean with its interval, and every seed as a dot; the best on top."""
    rows = ranking.rows[:DRAWN]
    left = min(WIDE * 0.42, 16 + 6.9 * max(len(row.name) for row in rows))
    ends = [v for row in rows for v in (row.low, row.high) if v is not None]
    axis = _Axis([*ends, *(v for row in rows for v in row.seeds)], left + 8, WIDE - 12)
    height = 20 * len(rows) + 34
    parts: list[Element] = []
    for tick in axis.scale.ticks(5):
        x = axis.at(tick)
        parts.append(line(x, 4, x, height - 28, stroke_opacity="0.15"))
        parts.append(words(x, height - 12, f"{tick:.4g}", anchor="middle", opacity="0.75"))
    for index, row in enumerate(rows):
        y = 20 * index + 16
        colour = series_colour(row.group - 1)
        if index and rows[index - 1].group != row.group:
            parts.append(line(4, y - 10, WIDE - 4, y - 10, stroke_opacity="0.35"))
        most = int(left / 6.9)
        name = row.name if len(row.name) <= most else f"{row.name[: most - 1]}…"
        parts.append(words(left, y + 4, name, anchor="end"))
        if row.low is not None and row.high is not None:
            parts.append(
                line(axis.at(row.low), y, axis.at(row.high), y, stroke=colour, stroke_width=2)
            )
        parts += [
            # below the interval, which would cover them
            el("circle", cx=f"{axis.at(v):.1f}", cy=y + 6, r="2.4", fill=colour, fill_opacity="0.8")
            for v in row.seeds
        ]
        x = axis.at(row.mean)
        tip = el("title", f"{row.name}: {score_text(row.mean, ranking.metric)}")
        parts.append(
            el(
                "rect",
                tip,
                x=f"{x - 2:.1f}",
                y=y - 6,
                width=4,
                height=12,
                fill=colour,
                stroke="currentColor",
            )
        )
    label = f"{_title(ranking.metric)} of each cell: mean, 95 % interval, every seed a dot"
    return picture(WIDE, height, label, *parts)


def heat_chart(plan: Plan, ranking: Ranking) -> Grid | None:
    """Return the mean score over the two factors with the largest effects; None without two."""
    span: dict[str, float] = {}
    for effect in ranking.effects:
        size = abs(effect.effect)
        span[effect.factor] = max(span.get(effect.factor, 0.0), size)
    chosen = sorted(span, key=lambda factor: -span[factor])[:2]
    if len(chosen) < 2:
        return None
    order = plan.factors()
    down, across = sorted(chosen, key=order.index)
    found: dict[tuple[str, str], list[float]] = {}
    for row in ranking.rows:
        settings = plan.cells[row.cell].settings
        found.setdefault((settings[down], settings[across]), []).append(row.mean)
    means = {key: math.fsum(values) / len(values) for key, values in found.items()}
    rows = list(dict.fromkeys(key[0] for key in _in_order(plan, means, down, across)))
    columns = list(dict.fromkeys(key[1] for key in _in_order(plan, means, down, across)))
    sign = -1.0 if ranking.smaller_is_better else 1.0
    values = np.array([[sign * means.get((r, c), math.nan) for c in columns] for r in rows])
    return Grid(
        title=f"Mean {_title(ranking.metric)} over {down} and {across}; the darker the better",
        values=values,
        rows=tuple(f"{down.rpartition('.')[2]}={value}" for value in rows),
        columns=tuple(f"{across.rpartition('.')[2]}={value}" for value in columns),
        low=float(np.nanmin(values)),
        high=float(np.nanmax(values)),
        cells=tuple(
            tuple(score_text(means.get((r, c)), ranking.metric) for c in columns) for r in rows
        ),
    )


def _in_order(
    plan: Plan, means: Mapping[tuple[str, str], float], down: str, across: str
) -> list[tuple[str, str]]:
    """Return the pairs of values in the order in which the sweep lists them."""
    seen = [(cell.settings[down], cell.settings[across]) for cell in plan.cells]
    return [key for key in dict.fromkeys(seen) if key in means]


def parallel_picture(plan: Plan, ranking: Ranking) -> Element | None:
    """Draw each cell as a line through its settings to its score; the best group in colour."""
    factors = plan.factors()
    rows = ranking.rows[: DRAWN * 4]
    if not factors or len(rows) < 3:
        return None
    height, top, bottom = 280.0, 34.0, 250.0
    place = {f: 70 + i * (WIDE - 150) / len(factors) for i, f in enumerate((*factors, ""))}
    scores = _Axis([row.mean for row in rows], bottom, top)
    if ranking.smaller_is_better:
        scores.start, scores.end = top, bottom
    levels: dict[str, dict[str, float]] = {}
    for factor in factors:
        values = list(dict.fromkeys(cell.settings.get(factor, "") for cell in plan.cells))
        values.sort(key=_as_number)
        gap = (bottom - top) / max(1, len(values) - 1)
        levels[factor] = {v: bottom - gap * i for i, v in enumerate(values)}
    parts: list[Element] = []
    for row in reversed(rows):
        settings = plan.cells[row.cell].settings
        points = [(place[f], levels[f][settings.get(f, "")]) for f in factors]
        points.append((place[""], scores.at(row.mean)))
        first = row.group == 1
        colour = series_colour(0) if first else "currentColor"
        parts.append(
            el(
                "polyline",
                el("title", f"{row.name}: {score_text(row.mean, ranking.metric)}"),
                points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
                fill="none",
                stroke=colour,
                stroke_opacity="0.9" if first else "0.22",
                stroke_width=2 if row.rank == 1 else 1.2,
            )
        )
    middle = (top + bottom) / 2
    for factor in factors:
        x = place[factor]
        parts.append(line(x, top - 6, x, bottom + 6, stroke_opacity="0.5"))
        parts.append(words(x, 18, factor.rpartition(".")[2], anchor="middle", font_weight=600))
        every = max(1, math.ceil(len(levels[factor]) / 12))
        for value, y in list(levels[factor].items())[::every]:
            if factor == factors[0]:
                parts.append(words(x - 6, y + 4, value[:14], anchor="end", opacity="0.8"))
            else:  # beside the lines that arrive and leave
                beside = y - 5 if y < middle else y + 13
                parts.append(words(x + 5, beside, value[:14], opacity="0.8"))
    x = place[""]
    parts.append(line(x, top - 6, x, bottom + 6, stroke_opacity="0.5"))
    parts.append(words(x, 18, _title(ranking.metric), anchor="middle", font_weight=600))
    parts += [
        words(x + 6, scores.at(tick) + 4, f"{tick:.4g}", opacity="0.8")
        for tick in scores.scale.ticks(5)
    ]
    label = "Every cell as a line through its settings to its score; the first group in colour"
    return picture(WIDE, height, label, *parts)


def _as_number(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def curves_chart(ranking: Ranking, curves: Mapping[int, Mapping[int, float]]) -> Lines | None:
    """Return the mean score at every evaluation, of the best cells and of the last one."""
    rows = [row for row in ranking.rows if len(curves.get(row.cell, {})) > 1]
    chosen = rows[: CURVES - 1] + (rows[-1:] if len(rows) >= CURVES else [])
    if not chosen:
        return None
    lines: list[Line] = []
    values: list[float] = []
    for row in chosen:
        steps, scores = zip(*sorted(curves[row.cell].items()), strict=True)
        x, y = np.array(steps, np.float64), np.array(scores, np.float64)
        lines.append(Line(label=f"{row.rank}  {row.name}", x=x, y=y))
        values += scores
    if ranking.smaller_is_better:
        # early evaluations of a loss are far above the rest, which is where cells differ
        top = sorted(values)[int(0.9 * (len(values) - 1))]
        lines = [replace(line, y=np.where(line.y <= top, line.y, np.nan)) for line in lines]
    return Lines(
        title=f"Mean {_title(ranking.metric)} over seeds at every evaluation, by step",
        lines=tuple(lines),
        legend=True,
    )


def pictures(
    plan: Plan, ranking: Ranking, curves: Mapping[int, Mapping[int, float]]
) -> Iterator[tuple[str, str, Element]]:
    """Yield key, heading and picture: two factors, all settings, the curves."""
    if not ranking.rows:
        return
    if (heat := heat_chart(plan, ranking)) is not None:
        yield "factors", "Two factors", chart_svg(heat, width=WIDE)
    if (settings := parallel_picture(plan, ranking)) is not None:
        yield "settings", "Settings", settings
    if (lines := curves_chart(ranking, curves)) is not None:
        yield "curves", "Curves", chart_svg(lines, width=WIDE, height=280)


# --- the report -----------------------------------------------------------------------------------


def html(
    plan: Plan,
    ranking: Ranking,
    results: Mapping[str, Result],
    curves: Mapping[int, Mapping[int, float]],
    *,
    title: str,
) -> str:
    """Return one file without a script that fetches nothing: ranking, pictures, every cell."""
    sweep = plan.sweep
    ended = [one for one in results.values() if one.status in ("finished", "diverged", "failed")]
    bad = sum(one.status in ("diverged", "failed") for one in ended)
    seconds = math.fsum(one.seconds for one in results.values())
    lead = say(
        f"{sweep.what}: {len(plan.cells)} cells, {sweep.seeds} seeds each, {len(ended)} runs ended"
        f"{f', {bad} of them failed or diverged' if bad else ''}; {seconds:,.0f} seconds of "
        f"training. Ranked by {_title(ranking.metric)}."
    )
    sections = []
    if ranking.rows:
        body = "".join(say(ranking.group_text(group)) for group in ranking.groups[:12])
        body += "".join(say(note, kind="note") for note in ranking.notes)
        body += scrolled(intervals_picture(ranking).svg(), label="ranking")
        body += _ranking_table(plan, ranking)
        sections.append(Section("ranking", "Ranking", body))
    for key, heading, drawn in pictures(plan, ranking, curves):
        body = say(f"{drawn.props['aria-label']}.", kind="note")
        body += scrolled(drawn.svg(), label=heading)
        if key == "curves":
            body += "".join(
                say(f"The best was behind {one.ahead} until step {one.step:,}.")
                for one in ranking.crossings[:5]
            )
        sections.append(Section(key, heading, body))
    if ranking.effects:
        rows = [
            [f"{e.factor}={e.value}", f"{e.effect:+.4f}", f"{e.low:+.4f}", f"{e.high:+.4f}"]
            for e in ranking.effects
        ]
        head = ["value", "effect", "low", "high"]
        note = say("The mean of all cells with this value minus the mean of all, paired by seed.")
        body = note + table(head, rows, caption="main effects with 95 % intervals")
        sections.append(Section("effects", "Main effects", body))
    if ranking.incomplete:
        lines: list[list[Cell]] = [[name, Text(why)] for _, name, why in ranking.incomplete]
        body = table(["cell", "why"], lines, caption="cells that are not ranked")
        sections.append(Section("rest", "Not ranked", body))
    noted: list[list[Cell]] = [
        [cell.name, Text("; ".join(cell.notes))] for cell in plan.cells if cell.notes
    ]
    if noted:
        body = table(["cell", "design"], noted, caption="how each budget was met, what gave way")
        sections.append(Section("designs", "Designs", body))
    foot = say("Made by glass sweep. No script, nothing fetched.")
    return page(title, lead, sections, foot)


def _ranking_table(plan: Plan, ranking: Ranking) -> str:
    columns = ranking_columns(plan, ranking)
    columns = {"cell": columns.pop("cell"), **columns}
    against = f"; the baseline is {ranking.baseline}" if ranking.baseline else ""
    caption = f"±: 95 % interval; * told apart, corrected for all comparisons{against}"
    return table([*columns], zip(*columns.values(), strict=True), caption=caption)
