"""Where the recipes' own models fail, and what the numbers say about why."""

import statistics
from typing import Any

from bench.findings.cells import CELLS, cell_named
from bench.findings.results import Score, entries, score, split_score, verdict
from bench.findings.tables import percent, shown, table

Found = dict[str, Any]
LEARNED = 10  # places of an answer that training ever shows
ENOUGH = 0.95  # an operation counts as learned above this share
BASE = CELLS[0]


def part(found: Found) -> str:
    """Digits by operation, reverse by length and by place."""
    return "\n\n".join([operations(found), lengths(found), places(found)])


def by_label(found: Found, task: str, split: str, group: str) -> dict[str, Score | None]:
    """The baseline's score for each label of a group."""
    made = [entry["splits"][split] for entry in entries(found, task, BASE)]
    if not made:
        return {}
    labels = made[0]["by"].get(group, {})
    each = made[0]["examples"] // max(1, len(labels))
    return {label: score([one["by"][group][label] for one in made], each) for label in labels}


def operations(found: Found) -> str:
    """Each operation on examples that were trained on and on others."""
    seen = by_label(found, "digits", "train", "operation")
    held = by_label(found, "digits", "test", "operation")
    if not held:
        return "Digits by operation: not measured."
    rows = [[label, shown(seen.get(label)), shown(held[label])] for label in sorted(held)]
    lines = [table(["operation", "trained on", "held out"], rows), ""]
    for label in sorted(held):
        ours, theirs = held[label], seen.get(label)
        if ours is None or theirs is None or ours.mean > ENOUGH:
            continue
        if verdict(theirs, ours) == "better":
            why = "what was trained on is answered better: in part it is remembered, not worked out"
        else:
            why = "no difference seen to examples that were trained on"
        each = [
            e["splits"]["test"]["by"]["operation"][label] for e in entries(found, "digits", BASE)
        ]
        learned = sum(share > ENOUGH for share in each)
        lines.append(
            f"- **{label}** fails, {percent(ours.mean)}: above {percent(ENOUGH, digits=0)} "
            f"with {learned} of {len(each)} seeds; {why}."
        )
    return "\n".join(lines)


def lengths(found: Found) -> str:
    """Reverse by length: those of the training, and longer ones."""
    rows = [
        [label, "longer" if split == "longer" else "as trained", shown(one)]
        for split in ("test", "longer")
        for label, one in sorted(
            by_label(found, "reverse", split, "length").items(), key=lambda item: int(item[0])
        )
    ]
    if not rows:
        return "Reverse by length: not measured."
    return table(["symbols", "", "reverse"], rows)


def mean_of(made: list[list[float]], places: slice) -> str:
    """The mean over these places, with the lowest and the highest seed."""
    means = [statistics.fmean(one[places]) for one in made]
    low, high = min(means) * 100, max(means) * 100
    return f"{percent(statistics.fmean(means), digits=0)} right ({low:.0f} to {high:.0f})"


def places(found: Found) -> str:
    """Where in the answer to a longer source the wrong tokens stand."""
    made = [entry["places"] for entry in entries(found, "reverse", BASE) if "places" in entry]
    if not made:
        return "Reverse by place: not measured."
    mean = [statistics.fmean(column) for column in zip(*made, strict=True)]
    rows = [[percent(share, digits=0) for share in mean]]
    text = table([str(place) for place in range(1, len(mean) + 1)], rows)
    longest = len(mean) - 1  # the last place is the end's
    # Place p of an answer of n symbols is source place n + 1 - p.
    late = longest - LEARNED
    lines = [
        "Right tokens at each place of an answer to a longer source (mean of the seeds, each place "
        "given the right ones before it):",
        "",
        text,
        "",
        f"Places 1 to {late} may have to read source places that no training source fills: "
        f"{mean_of(made, slice(late))}. Places {late + 1} to {LEARNED} read places that training "
        f"fills, and are filled in training themselves, so that the length alone is new: "
        f"{mean_of(made, slice(late, LEARNED))}. Later places are new in the answer: "
        f"{mean_of(made, slice(LEARNED, None))}.",
    ]
    ours = split_score(found, "reverse", BASE, "longer")
    better = []
    for name in ("none", "learned", "rotary"):
        other = split_score(found, "reverse", cell_named("positions", name), "longer")
        if ours is not None and verdict(other, ours) == "better":
            better.append(name)
    lines.append(
        f"Of the other positions, better on longer sources: {', '.join(better) or 'none of them'}."
    )
    return "\n".join(lines)
