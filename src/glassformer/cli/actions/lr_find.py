"""Run `glass lr-find`: the range test of a learning rate, on a fresh model."""

from typing import Any

from glassformer.cli.shell.process import check_device
from glassformer.lab import api
from glassformer.training.lr_find import RateRange


def find(what: str, overrides: list[str], *, device: str, threads: int | None) -> RateRange:
    """Measure the loss at rising rates, and the range in which it falls."""
    device = check_device(device)
    return api.lr_find(what, overrides=overrides, device=device, threads=threads)


def lr_json(found: RateRange, what: str, overrides: list[str]) -> dict[str, Any]:
    """Return the rate, its range, the command to paste, and the curve."""
    rate = float(f"{found.suggestion:.1e}")
    return {
        "lr": rate,
        "low": found.low,
        "high": found.high,
        "command": f"glass train {what} {' '.join([*overrides, f'train.lr={rate}'])}",
        "curve": [list(point) for point in found.curve],
    }
