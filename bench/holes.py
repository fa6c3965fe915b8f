"""`python -m bench holes`: fresh mistakes in models of small projects, and healthy odd ones.

Each mistake of `bench/holes_models.py` is switched on by itself, and `glasscheck.verify` is asked
without a word, but for an encoder's `causal=False`. A row for each mistake and each healthy model,
then the rates.
"""

import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import glasscheck as gc
from bench.holes_models import HEALTHY, MODELS, Masked

#: What a caller must say, since nothing in the module does: it reads both ways.
SAID: dict[Any, dict[str, Any]] = {Masked: {"causal": False}}


def verified(make: Any, told: dict[str, Any]) -> Any:
    """Return the certificate of a model."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gc.verify(make().eval(), **told)


def run(*, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row for each mistake and each healthy model, then the totals."""
    red = total = alarms = 0
    ran: list[int] = []
    healthy = {kind.__name__: (kind, SAID.get(kind, {})) for kind in MODELS} | HEALTHY
    for name, (make, told) in list(healthy.items())[:: 6 if quick else 1]:
        report = verified(make, told)
        failed = [f"{f.name} ({f.note[:90]})" for f in report.findings if f.failed]
        alarms += bool(failed)
        ran.append(report.ran)
        yield _row(f"healthy: {name}", f"{report.ran} ran; alarms: {'; '.join(failed) or 'none'}")
    for kind, mistakes in list(MODELS.items())[:: 6 if quick else 1]:
        for mistake in mistakes:
            report = verified(lambda kind=kind, mistake=mistake: kind(mistake), SAID.get(kind, {}))
            failed = [f.name for f in report.findings if f.failed]
            red, total = red + bool(failed), total + 1
            yield _row(f"{kind.__name__}: {mistake}", "; ".join(failed) or "NOT SEEN")
    yield _row("mistakes seen", f"{red} of {total}")
    few = f"fewest {min(ran)}, median {statistics.median(ran):.0f}"
    yield _row("healthy models with an alarm", f"{alarms} of {len(ran)}; checks that ran: {few}")


def _row(case: str, name: str) -> dict[str, Any]:
    return {
        "bench": "holes",
        "case": case,
        "name": name,
        "median_ms": None,
        "ratio": None,
        "of_limit": None,
    }
