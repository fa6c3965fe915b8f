"""Rotary positions between configs and specs, with the keys of 4.x and of 5.x files.

4.x has `rope_theta` and `rope_scaling` (with `type` or `rope_type`); 5.x has `rope_parameters`
alone, theta within. Both are read, and must agree if both are there; both are written.
"""

from typing import Any, assert_never

from glassformer.adapters.config import Config
from glassformer.spec.errors import FileError
from glassformer.spec.model import LinearScaling, Llama3Scaling, Rotary, YarnScaling

THETA = 10_000.0  # the default of transformers
SCALINGS = ("default", "linear", "llama3", "yarn")


def read_rotary(config: Config, *, max_seq_len: int) -> Rotary:
    """Read the rotary base and scaling of a config."""
    new = _table(config, "rope_parameters")
    old = _table(config, "rope_scaling")
    theta = config.number("rope_theta", default=None) if config.data.get("rope_theta") else None
    found = Config(old or new, where=config.where)
    inner = found.number("rope_theta", default=theta or THETA)
    for other in (theta, new.get("rope_theta")):
        if other is not None and other != inner:
            raise FileError(
                f"config.json has two values of rope_theta: {other} and {inner}", where=config.where
            )
    kind = found.any("rope_type", "type", default="default")
    if old and new and {**_named(new), "rope_theta": inner} != {**_named(old), "rope_theta": inner}:
        raise FileError(
            "rope_scaling and rope_parameters contradict each other", where=config.where
        )
    return Rotary(base=inner, scaling=_scaling(found, kind, max_seq_len))


def _table(config: Config, key: str) -> dict[str, Any]:
    value = config.any(key, default={})
    if not isinstance(value, dict):
        raise config.bad(key, value, "a table")
    if any(isinstance(item, dict) for item in value.values()):
        raise FileError(
            f"config.json: '{key}' differs between layers, which is not handled here",
            where=config.where,
        )
    return value


def _named(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with its type under one name."""
    rest = {key: value for key, value in table.items() if key not in ("type", "rope_type")}
    return {"rope_type": table.get("rope_type", table.get("type", "default")), **rest}


def _scaling(
    found: Config, kind: Any, max_seq_len: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(factor=found.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=found.number("factor"),
                low_freq_factor=found.number("low_freq_factor"),
                high_freq_factor=found.number("high_freq_factor"),
                original_max_seq_len=_original(found, max_seq_len),
            )
        case "yarn":
            original = _original(found, max_seq_len)
            share = found.any("attention_factor", default=None)
            scaling = YarnScaling(
                factor=found.number("factor", default=max_seq_len / original),
                original_max_seq_len=original,
                beta_fast=found.number("beta_fast", default=32.0),
                beta_slow=found.number("beta_slow", default=1.0),
                attention_factor=None if share is None else found.number("attention_factor"),
            )
        case _:
            raise FileError(
                f"config.json scales rotary positions by {str(kind)[:40]!r}",
                where=found.where,
                hint=f"known here: {', '.join(SCALINGS)}",
            )
    found.finish(idle={"truncate": True})
    return scaling


def _original(found: Config, max_seq_len: int) -> int:
    return found.whole("original_max_position_embeddings", default=max_seq_len)


def write_rotary(rotary: Rotary) -> dict[str, Any]:
    """Return the config keys of both generations of files."""
    scaled = _write_scaling(rotary)
    return {
        "rope_theta": rotary.base,
        "rope_scaling": scaled,
        "rope_parameters": {"rope_type": "default", **(scaled or {}), "rope_theta": rotary.base},
    }


def _write_scaling(rotary: Rotary) -> dict[str, Any] | None:
    match rotary.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        case YarnScaling() as scaling:
            share = scaling.attention_factor
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                **({} if share is None else {"attention_factor": share}),
            }
        case _ as unreachable:
            assert_never(unreachable)
