"""What the heads of the baselines do, seed by seed: heads have no names that seeds share."""

from typing import Any

from bench.findings.cells import CELLS, TASKS
from bench.findings.results import entries
from bench.findings.tables import percent, table

Found = dict[str, Any]


def part(found: Found) -> str:
    """For each task: the strongest head of each seed, what ablating one costs, and the roles."""
    return "\n\n".join(made(found, task) for task in TASKS for made in (one_task, roles))


def one_task(found: Found, task: str) -> str:
    """A table of one task's baseline."""
    made = [entry["insides"] for entry in entries(found, task, CELLS[0]) if "insides" in entry]
    if not made:
        return f"Heads of {task}: not measured."
    rows = []
    for attention in dict.fromkeys(name.rpartition(".")[0] for name in made[0]["heads"]):
        looks, most, least = [], [], []
        for one in made:
            heads = [h for name, h in one["heads"].items() if name.rpartition(".")[0] == attention]
            looks.append(max((h["looks"] for h in heads if "looks" in h), default=None))
            most.append(max(h["lost"] for h in heads))
            least.append(min(h["lost"] for h in heads))
        rows.append([f"`{attention}`", shares(looks), shares(most), shares(least)])
    columns = [task, "on the due symbol", "lost without the head that matters most", "… least"]
    return table(columns, rows)


def roles(found: Found, task: str) -> str:
    """How many heads of each seed have which role."""
    made = [entry.get("insides", {}) for entry in entries(found, task, CELLS[0])]
    if not made or not all("roles" in one for one in made):
        return f"Roles of {task}: not measured."
    names = sorted({role for one in made for role in one["roles"].values()})
    rows = [
        [name, ", ".join(str(list(one["roles"].values()).count(name)) for one in made)]
        for name in names
    ]
    return table([f"{task}: role", "heads"], rows)


def shares(values: list[float | None]) -> str:
    """One share a seed, in the order of the seeds."""
    return ", ".join("" if value is None else percent(value, digits=0) for value in values).strip(
        ", "
    )
