"""`design`: a parameter budget in numbers as people write them, and its answer."""

from decimal import Decimal
from typing import Literal

from glassformer.spec.base import one_of
from glassformer.spec.budget import Answer, Budget, Exact, Free, Target, Wish
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    Bias,
    LayerNorm,
    Learned,
    NoPosition,
    Norm,
    Position,
    RMSNorm,
    Rotary,
    Sinusoidal,
)
from glassformer.spec.neighbours import counts_around, least_tolerance
from glassformer.spec.patience import Effort
from glassformer.spec.quantity import parse_count, parse_share
from glassformer.spec.solve import LOOKS, solve

POSITIONS: dict[str, Position] = {
    "learned": Learned(),
    "rotary": Rotary(),
    "sinusoidal": Sinusoidal(),
    "none": NoPosition(),
}
NORMS: dict[str, Norm] = {"layernorm": LayerNorm(), "rmsnorm": RMSNorm()}


def _wish(
    name: str, value: float | str, *, exact: bool, within: float | str | None, within_name: str
) -> Wish:
    if value == "free":
        if exact or within is not None:
            raise InputError(
                f"{name} is free, and yet limited", hint="give it a value, or drop the limit"
            )
        return Free()
    number = parse_share(name, value)
    if exact:
        if within is not None:
            raise InputError(f"{name} is exact, and {within_name} too", hint="give one of them")
        return Exact(value=number)
    return Target(value=number, within=None if within is None else parse_share(within_name, within))


def design(
    params: int | float | str,
    vocab: int | float | str,
    *,
    tolerance: float | str = 0.005,
    heads: int | Literal["any"] = 8,
    tied: bool = True,
    length: int = 512,
    position: str = "learned",
    bias: Bias = "none",
    norm: str = "layernorm",
    embedding_ratio: float | str = 0.35,
    exact_ratio: bool = False,
    ratio_within: float | str | None = None,
    ratio_covers: Literal["both", "input"] = "both",
    glu_expansion: float | str = 2.66,
    exact_expansion: bool = False,
    glu_within: float | str | None = None,
    multiple: int = 1,
    ffn_multiple: int | None = None,
    kv_heads: int | None = None,
    free_head_width: bool = False,
    rank: int | Literal["any"] | None = None,
    min_layers: int = 1,
    max_layers: int | None = None,
    min_aspect: float = 0.0,
    max_aspect: float | None = None,
    thorough: bool = False,
) -> Answer:
    """Solve a parameter budget: `design("10M", 16_000).spec` is a model of that size.

    Numbers may be texts (`"10M"`, `"0.5%"`); the ratio and the expansion may be `"free"`.
    A search ends after a while and says what it has not proven; a `thorough` one goes on.
    """
    one_of("position", position, POSITIONS)
    one_of("norm", norm, NORMS)
    budget = Budget(
        vocab_size=parse_count("vocab", vocab),
        total=parse_count("params", params),
        tolerance=_tolerance(tolerance),
        n_heads=None if heads == "any" else heads,
        tied=tied,
        max_seq_len=length,
        position=POSITIONS[position],
        bias=bias,
        norm=NORMS[norm],
        embedding_ratio=_wish(
            "embedding_ratio",
            embedding_ratio,
            exact=exact_ratio,
            within=ratio_within,
            within_name="ratio_within",
        ),
        glu_expansion=_wish(
            "glu_expansion",
            glu_expansion,
            exact=exact_expansion,
            within=glu_within,
            within_name="glu_within",
        ),
        ratio_covers=ratio_covers,
        width_multiple=multiple,
        ffn_multiple=multiple if ffn_multiple is None else ffn_multiple,
        n_kv_heads=kv_heads,
        free_head_width=free_head_width,
        rank=rank,
        min_layers=min_layers,
        max_layers=max_layers,
        min_aspect=min_aspect,
        max_aspect=max_aspect,
    )
    if parse_share("tolerance", tolerance) == 0.0:
        effort = Effort() if thorough else Effort(LOOKS)
        counts = counts_around(budget, budget.total, budget.total, effort)
        near = least_tolerance(budget, counts)
        raise InputError(
            "a tolerance of 0 asks for one number, which whole sizes rarely meet",
            hint=("the nearest that works here is " if counts.is_proven else "one that works is ")
            + ("0.5%" if near is None else f"{(Decimal(repr(near)) * 100).normalize():f}%"),
        )
    return solve(budget, thorough=thorough)


def _tolerance(tolerance: float | str) -> float:
    """As asked; 0 is let through to the door, which knows the nearest that works."""
    return parse_share("tolerance", tolerance) or 0.005
