"""Numbers as they stand on the page."""

from collections.abc import Sequence

from bench.findings.results import Score


def shown(score: Score | None) -> str:
    """`97.1 % (96.8 to 97.4)`: the mean, and the lowest and highest seed."""
    if score is None:
        return "not measured"
    return f"{percent(score.mean)} ({score.low * 100:.1f} to {score.high * 100:.1f})"


def percent(share: float, *, digits: int = 1) -> str:
    """`97.1 %`."""
    return f"{share * 100:.{digits}f} %"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
