"""What `glass lr-find` does: the range test of a learning rate on a model of its own."""

from typing import Any

from glassformer.cli.actions.train import planned_run
from glassformer.cli.shell.process import check_device
from glassformer.kernels.threads import taking
from glassformer.lab.runs.assemble import assemble
from glassformer.lab.runs.threads import threads_of_run
from glassformer.training.lr_find import RateRange, find_rate


def find(what: str, overrides: list[str], *, device: str, threads: int | None) -> RateRange:
    """The loss at rising rates, and the range in which it falls."""
    check_device(device)
    plan = planned_run(what, overrides)
    spec = plan.spec
    parts = assemble(plan, device=device)
    with taking(threads_of_run(spec, parts.task, asked=threads, device=device)):
        return find_rate(parts.engine, parts.task, spec.train)


def lr_json(found: RateRange, what: str, overrides: list[str]) -> dict[str, Any]:
    """The rate, its range, the command to paste, and the curve."""
    rate = float(f"{found.suggestion:.1e}")
    return {
        "lr": rate,
        "low": found.low,
        "high": found.high,
        "command": f"glass train {what} {' '.join([*overrides, f'train.lr={rate}'])}",
        "curve": [list(point) for point in found.curve],
    }
