"""`generation_config.json`: where a model's texts end, and how its makers would sample.

The ids that end a sequence stand in `generation_config.json`, else in `config.json`, as one number
or as a list; a tokenizer's own end is the last resort of those who ask here.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.adapters.folder.files import read_sidecar
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError, InputError

NAME = "generation_config.json"
MOST_ENDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What the folder suggests; None where it says nothing. `do_sample` False means greedy."""

    eos: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def decode_spec(
        self, *, max_new_tokens: int = 100, forbidden: tuple[int, ...] = (), seed: int = 0
    ) -> DecodeSpec:
        """These values as a `DecodeSpec`; without any of them, greedy."""
        drawn = self.do_sample or (self.do_sample is None and self.temperature is not None)
        temperature = 1.0 if self.temperature is None else self.temperature
        return DecodeSpec(
            max_new_tokens=max_new_tokens,
            temperature=temperature if drawn else 0.0,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            eos=self.eos,
            forbidden=forbidden,
            seed=seed,
        )


def generation_defaults(folder: Path) -> GenerationDefaults:
    """Of a model's folder, checked; nothing is suggested where there is no such file."""
    found = read_sidecar(folder, NAME)
    where = str(folder / NAME)
    sampled = found.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise FileError(f"do_sample is {str(sampled)[:40]!r}, not true or false", where=where)
    top_k = found.get("top_k")
    if top_k is not None and type(top_k) is not int:
        raise FileError(f"top_k is {str(top_k)[:40]!r}, not a number", where=where)
    numbers = {
        name: _number(found.get(name), name=name, where=where)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
    }
    made = GenerationDefaults(
        eos=read_eos(folder), do_sample=sampled, top_k=top_k or None, **numbers
    )
    try:
        made.decode_spec()
    except InputError as error:
        raise FileError(error.what, where=where, hint=error.hint) from error
    return made


def read_eos(folder: Path) -> tuple[int, ...]:
    """The ids that end a sequence, by the first file that names any."""
    for name in (NAME, "config.json"):
        given = read_sidecar(folder, name).get("eos_token_id")
        if given is None or given == []:
            continue
        ids = given if isinstance(given, list) else [given]
        if len(ids) > MOST_ENDS or not all(type(i) is int and i >= 0 for i in ids):
            raise FileError(
                f"eos_token_id is {str(given)[:60]}, not a token id or a short list of them",
                where=str(folder / name),
            )
        return tuple(dict.fromkeys(ids))
    return ()


def _number(value: Any, *, name: str, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise FileError(f"{name} is {str(value)[:40]!r}, not a number", where=where)
    return float(value)
