"""What a run writes about itself: lines, hashes, the fingerprint of what its bits depend on."""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.spec.errors import FileError, InputError
from glassformer.spec.serialize import from_json, json_numbers, to_dict
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory
from glassformer.training.fit import StepRecord


def losses(record: StepRecord) -> dict[str, float]:
    """`loss`; with several heads it is the first one's, as in an evaluation, and `objective` is
    what was differentiated: all of them, weighed, the penalty, and the load-balancing term of a
    model with experts.
    """
    several = len(record.nll) > 1 or record.balance is not None
    return {"loss": record.first_loss, **({"objective": record.objective} if several else {})}


def balance(record: StepRecord) -> dict[str, float]:
    """`balance`, the load-balancing loss of a model with experts."""
    return {} if record.balance is None else {"balance": record.balance}


def metrics_line(record: StepRecord) -> dict[str, Any]:
    """A step as a line of metrics.jsonl; `seconds` is the only clock in it."""
    return dict(
        json_numbers(
            {
                "step": record.step,
                **losses(record),
                **balance(record),
                "nll": dict(record.nll),
                "lr": record.lr,
                "grad_norm": record.grad_norm,
                "tokens": record.tokens,
                "seconds": round(record.seconds, 6),
            }
        )
    )


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    try:
        return dict(json.loads((folder / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise FileError(f"state.json cannot be read: {error}", where=str(folder)) from error


def spec_hash(spec: RunSpec) -> str:
    """What must be equal for a run to go on: all but how long it goes on and what it shows."""
    same = to_dict(replace(spec, train=replace(spec.train, steps=1)))
    del same["train"]["probes"]
    return hashlib.sha256((json.dumps(same, indent=2) + "\n").encode()).hexdigest()


def data_hash(facts: Mapping[str, Any]) -> str:
    """A hash of what a task says of its data."""
    text = json.dumps(json_numbers(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(spec: RunSpec, device: str) -> dict[str, Any]:
    """What bits depend on besides the spec."""
    import torch  # here: the explorer reads runs before torch is there

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "numpy": np.__version__,
        "torch": torch.__version__ if spec.engine == "torch" else None,
        "threads": torch.get_num_threads() if spec.engine == "torch" else None,
        "device": device,
    }


def to_toml(spec: RunSpec) -> str | None:
    """config.toml, what is None left out; nothing where no TOML writer is installed."""
    if importlib.util.find_spec("tomli_w") is None:
        return None  # config.json says the same, and `glass train` reads it too
    import tomli_w

    return tomli_w.dumps(_without_none(to_dict(spec)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def load_run_spec(directory: RunDirectory) -> RunSpec:
    """The spec that a run directory holds."""
    path = directory.folder / "config.json"
    if not path.is_file():
        raise InputError("no config.json here, so this is not a run", where=str(directory.folder))
    try:
        return from_json(RunSpec, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"config.json cannot be read: {error}", where=str(path)) from error
    except InputError as error:
        if not (directory.folder / "run.json").exists():
            raise InputError(
                "this config.json is no run's, so this is not a run",
                where=str(directory.folder),
                hint="glass evaluate MODEL --suite smallbench takes any model",
            ) from error
        raise FileError(f"config.json is no run's: {error.what}", where=str(path)) from error
