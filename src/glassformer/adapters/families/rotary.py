"""Rotary positions and windows, as configs of transformers say them.

Configs of transformers 4.x have `rope_theta` and `rope_scaling`, those of 5.x `rope_parameters`
alone. Both are read, and must agree if both are present; both are written. A table of
`rope_parameters` may be one for full and one for sliding attention.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, Config
from glassformer.adapters.keys import Facts, Own
from glassformer.spec.errors import FileError
from glassformer.spec.model import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    NoPosition,
    Rotary,
    YarnScaling,
    rotary_of,
)
from glassformer.spec.position import Scaling

THETA = 10_000.0  # the default of transformers
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rotary(
    config: Config, *, max_seq_len: int, theta: float = THETA, share: float | None = None
) -> Rotary:
    """Read the rotary base and scaling of a config.

    `theta` is the base where none is given, `share` the part of a head that is rotated; families
    that always rotate whole heads have None, and refuse a config with another part.
    """
    new = _table(config, "rope_parameters")
    old = _table(config, "rope_scaling")
    outer = config.number("rope_theta", default=None) if config.data.get("rope_theta") else None
    found = Config(old or new, where=config.where)
    inner = found.number("rope_theta", default=outer or theta)
    for other in (outer, new.get("rope_theta")):
        if other is not None and other != inner:
            raise FileError(
                f"config.json has two values of rope_theta: {other} and {inner}", where=config.where
            )
    kind = found.any("rope_type", "type", default="default")
    if old and new and {**_named(new), "rope_theta": inner} != {**_named(old), "rope_theta": inner}:
        raise FileError(
            "rope_scaling and rope_parameters contradict each other", where=config.where
        )
    part = 1.0
    if share is not None:
        outside = config.number("partial_rotary_factor", "rotary_pct", default=share)
        part = found.number("partial_rotary_factor", default=outside)
    if kind == "longrope" and not found.has("original_max_position_embeddings"):
        found.data["original_max_position_embeddings"] = config.any(
            "original_max_position_embeddings", default=max_seq_len
        )
    return Rotary(base=inner, scaling=_scaling(found, kind, max_seq_len), share=part)


def read_rotaries(
    config: Config, *, max_seq_len: int, thetas: tuple[float, float]
) -> tuple[Rotary, Rotary]:
    """Read the rotations of full and of sliding attention, in either generation's words.

    `thetas` are the bases of both where none is given.
    """
    table = config.any("rope_parameters", default={})
    if isinstance(table, dict) and isinstance(table.get(FULL), dict):
        if set(table) - {FULL, SLIDING}:
            raise config.bad("rope_parameters", table, f"a table of {FULL} and {SLIDING}")
        made = []
        for kind, theta in ((FULL, thetas[0]), (SLIDING, thetas[1])):
            own = Config({"rope_parameters": table.get(kind, {})}, where=config.where)
            made.append(read_rotary(own, max_seq_len=max_seq_len, theta=theta))
        return made[0], made[1]
    whole = read_rotary(config, max_seq_len=max_seq_len, theta=thetas[0])
    local = config.number("rope_local_base_freq", default=thetas[1])
    return whole, Rotary(base=local)


def write_rotaries(spec: ModelSpec) -> dict[str, Any]:
    """Return the table of both rotations, as transformers 5 has it."""
    usual = spec.position if isinstance(spec.position, Rotary) else Rotary()
    found = {FULL: usual, SLIDING: usual}
    for block in spec.decoder.blocks():
        rotary = rotary_of(block.attention, spec.position)
        kind = FULL if block.attention.window is None else SLIDING
        found[kind] = Rotary() if rotary is None else rotary
    own = {kind: write_rotary(rotary)["rope_parameters"] for kind, rotary in found.items()}
    return {"rope_parameters": own}


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


def _scaling(found: Config, kind: Any, max_seq_len: int) -> Scaling | None:
    scaling: Scaling | None
    match kind:
        case "default":
            scaling = None
        case "dynamic":  # acts beyond the context alone
            found.number("factor")
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
            factor = found.number("factor", default=max_seq_len / original)
            scaling = YarnScaling(
                factor=factor,
                original_max_seq_len=original,
                beta_fast=found.number("beta_fast", default=32.0),
                beta_slow=found.number("beta_slow", default=1.0),
                attention_factor=_yarn_attention(found, factor),
                truncate=found.flag("truncate", default=True),
            )
        case "longrope" | "su":
            scaling = _longrope(found, max_seq_len)
        case _:
            raise found.bad("rope_type", kind, f"one of {', '.join(SCALINGS)}")
    found.finish()
    return scaling


def _yarn_attention(found: Config, factor: float) -> float | None:
    """Return the factor of YaRN's scores: given, or by two further keys; None for the usual one."""
    names = ("attention_factor", "mscale", "mscale_all_dim")
    given, own, every = (
        found.number(name) if found.any(name, default=None) is not None else None for name in names
    )
    if given is not None or not own or not every:
        return given
    rise = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (own * rise + 1.0) / (every * rise + 1.0)


def _longrope(found: Config, max_seq_len: int) -> LongRopeScaling:
    """Read LongRoPE's factors: the short ones are used, up to the context that they are for."""
    original = _original(found, max_seq_len)
    factor = found.number("factor", default=max_seq_len / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    lists = [found.any(key) for key in ("short_factor", "long_factor")]
    for each in lists:
        if not isinstance(each, list) or not all(isinstance(f, int | float) for f in each):
            raise found.bad("short_factor", each, "a list of numbers")
    short, long = (tuple(float(f) for f in each) for each in lists)
    return LongRopeScaling(
        short=short,
        long=long,
        original_max_seq_len=original,
        attention_factor=found.number("attention_factor", default=usual),
    )


def _original(found: Config, max_seq_len: int) -> int:
    return found.whole("original_max_position_embeddings", default=max_seq_len)


#: A scaling's name in a config, and its fields' where they are not ours.
WORDS: dict[type[Scaling], str] = {
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    LongRopeScaling: "longrope",
}
FIELDS = {
    "original_max_seq_len": "original_max_position_embeddings",
    "short": "short_factor",
    "long": "long_factor",
}


def write_rotary(rotary: Rotary) -> dict[str, Any]:
    """Return the config keys of both generations of files."""
    scaled = None if rotary.scaling is None else _write_scaling(rotary.scaling)
    part = {} if rotary.share == 1.0 else {"partial_rotary_factor": rotary.share}
    new = {"rope_type": "default", **(scaled or {}), "rope_theta": rotary.base, **part}
    return {
        "rope_theta": rotary.base,
        "rope_scaling": None if scaled is None else scaled | part,
        "rope_parameters": new,
        **part,
    }


def _write_scaling(scaling: Scaling) -> dict[str, Any]:
    found = {each.name: getattr(scaling, each.name) for each in fields(scaling)}
    found.pop("extended", None)  # no config says it: the short factors are read
    for name, usual in (("attention_factor", None), ("truncate", True)):
        if name in found and found[name] == usual:
            del found[name]
    listed = {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}
    return {
        "rope_type": WORDS[type(scaling)],
        **{FIELDS.get(name, name): value for name, value in listed.items()},
    }


# --- entries of a family's table ------------------------------------------------------------------


def rope(*, theta: float = THETA, share: float | None = None, base: str = "") -> Own:
    """Return the entry of one rotation; `base` is an older key of `rope_theta`."""

    def read(config: Config, facts: Facts) -> None:
        if base and not config.has("rope_theta") and config.data.get(base):
            config.data["rope_theta"] = config.number(base)
        most = facts["max_seq_len"]
        _take(config, facts, read_rotary(config, max_seq_len=most, theta=theta, share=share))

    def write(spec: ModelSpec) -> dict[str, Any]:
        return write_rotary(spec.position if isinstance(spec.position, Rotary) else Rotary())

    return Own(read, write)


def ropes(*thetas: float, keys: tuple[str, ...] = ()) -> Own:
    """Return the entry of two rotations, that of sliding layers if it differs their own.

    `thetas` are the bases where none is given; `keys` may say them.
    """

    def read(config: Config, facts: Facts) -> None:
        first, near = thetas
        if keys:
            first = config.number(keys[0], default=first)
            given = config.any(keys[1], default=near)
            near = first if given is None else config.number(keys[1], default=near)
        whole, local = read_rotaries(config, max_seq_len=facts["max_seq_len"], thetas=(first, near))
        _take(config, facts, whole)
        own = None if local == whole else local
        facts["each.attn.position"] = [
            own if width else None for width in facts["each.attn.window"]
        ]

    return Own(read, write_rotaries)


def _take(config: Config, facts: Facts, rotary: Rotary) -> None:
    """Make a rotation the position, if heads have pairs for it."""
    width = facts.get("attn.d_head") or facts["d_model"] // facts["attn.n_heads"]
    if int(width * rotary.share) % 2 or int(width * rotary.share) == 0:
        if rotary.share == 1.0:
            raise config.bad("head_dim", width, "an even number: rotary positions turn pairs")
        what = f"a part of 'head_dim' {width} that is pairs of numbers"
        raise config.bad("partial_rotary_factor", rotary.share, what)
    if isinstance(rotary.scaling, LongRopeScaling):
        facts["max_seq_len"] = min(facts["max_seq_len"], rotary.scaling.original_max_seq_len)
    facts["position"] = rotary


def read_kinds(config: Config, *, absent: Sequence[str]) -> list[str]:
    """Return `layer_types`: for each layer full or sliding attention."""
    kinds = config.any("layer_types", default=list(absent))
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    known = (FULL, SLIDING)
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise config.bad("layer_types", kinds, f"{layers} of {FULL} and {SLIDING}")
    return kinds


def kinds_of(spec: ModelSpec) -> list[str]:
    """Return `layer_types` of a spec."""
    return [SLIDING if block.attention.window else FULL for block in spec.decoder.blocks()]


def window_of(spec: ModelSpec) -> int | None:
    """Return the window of the first layer that has one."""
    windows = [block.attention.window for block in spec.decoder.blocks()]
    return next((window for window in windows if window is not None), None)


def slide(facts: Facts, kinds: Sequence[str], window: int | None) -> None:
    """Give the sliding layers their window."""
    facts["each.attn.window"] = [window if kind == SLIDING else None for kind in kinds]


def windows(every: int, *pattern: str, absent: int = 4096, bare: bool = False) -> Own:
    """Return the entry of `sliding_window` and `layer_types`.

    Without the latter all layers slide but every `every`-th (0: none), a number that a key of
    `pattern` may change. `absent` is the window that is written where no layer has one. `bare`:
    layers without a window have no positions.
    """

    def read(config: Config, facts: Facts) -> None:
        step = config.whole(*pattern, default=every) if pattern else every
        usual = [
            SLIDING if not step or (layer + 1) % step else FULL for layer in range(facts["layers"])
        ]
        kinds = read_kinds(config, absent=usual)
        slide(facts, kinds, config.whole("sliding_window"))
        if bare:
            facts["each.attn.position"] = [NoPosition() if k == FULL else None for k in kinds]

    return Own(
        read,
        lambda spec: {"sliding_window": window_of(spec) or absent, "layer_types": kinds_of(spec)},
    )
