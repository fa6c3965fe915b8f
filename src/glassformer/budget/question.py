"""A parameter budget: the options of `design`, and the model spec that a set of sizes stands for.

The fields of `Budget` are the only list of these options. The command line, the page, the docs'
table and `design(**options)` are made from it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.init import NormalInit
from glassformer.spec.manifest import turns_keys
from glassformer.spec.model import (
    ALiBi,
    Attention,
    Bias,
    Block,
    Embedding,
    FactorizedEmbedding,
    FeedForward,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    Norm,
    PlainEmbedding,
    Position,
    RMSNorm,
    Rotary,
    Sinusoidal,
    Stack,
    SwiGLU,
)
from glassformer.spec.options import check_options, option, options_of
from glassformer.spec.schemes import Int4
from glassformer.spec.units import parse_count, parse_share

#: The embedding ratio that is wished for if none is requested.
USUAL_RATIO = 0.35
#: A usual shape: d_model / n_layers between those of stories260K (64 wide, 5 deep) and GPT-2 (768
#: wide, 12 deep), and at least two layers.
USUAL_ASPECTS, USUAL_LAYERS = (12.0, 64.0), 2
#: With `heads="any"`, the range of head widths; a model narrower than this has one head.
HEAD_WIDTHS = (16, 128)
#: With `free_head_width`, how far d_head may be from d_model / n_heads, in columns.
HEAD_SLACK = 2
#: The most of what is counted in hundreds (heads, experts, a divisor), of tokens and
#: positions, and of layers.
MOST_HEADS, MOST_COUNTED, MOST_LAYERS = 65_536, 1_000_000_000, 10_000

POSITIONS: dict[str, Position] = {
    "learned": Learned(),
    "rotary": Rotary(),
    "sinusoidal": Sinusoidal(),
    "alibi": ALiBi(),
    "none": NoPosition(),
}
NORMS: dict[str, Norm] = {"layernorm": LayerNorm(), "rmsnorm": RMSNorm()}
#: The position and norm of each shape.
SHAPES = {"llama": ("rotary", "rmsnorm"), "classic": ("learned", "layernorm")}


def _count_or_any(name: str, text: Any) -> int | Literal["any"]:
    return "any" if text == "any" else parse_count(name, text)


def _share_or_free(name: str, text: Any) -> float | Literal["free"]:
    return "free" if text == "free" else parse_share(name, text)


def _share_or_word(name: str, text: Any) -> float | Literal["usual", "free"]:
    return "usual" if text == "usual" else _share_or_free(name, text)


@spec
class Wish:
    """A wished value of the embedding ratio or the GLU expansion.

    exact: as near as whole numbers allow, within half a step of the width or of d_ff.
    within: the most it may differ; points of the total for the ratio, relative for the expansion.
    """

    value: float
    exact: bool = False
    within: float | None = None

    @property
    def is_limited(self) -> bool:
        """True if this wish can make a budget infeasible."""
        return self.exact or self.within is not None


@spec
class Budget:
    """A number of parameters, a vocabulary, and everything else that may be requested.

    `ratio` and `expansion` are the two wishes that the options describe; None if free.
    """

    params: int = option(
        10_000_000,
        help="Total number of parameters, such as 10M.",
        label="Total parameters",
        parse=parse_count,
        at_least=1,
    )
    vocab: int = option(
        16_000,
        help="Size of the vocabulary.",
        label="Vocabulary",
        parse=parse_count,
        at_least=1,
        at_most=MOST_COUNTED,
    )
    tolerance: float = option(
        0.005,
        help="Allowed relative error of the total, such as 0.5%.",
        parse=parse_share,
        above=0.0,
        below=1.0,
        hint="0.5% is usual, and 0.99 is the most",
    )
    heads: int | Literal["any"] = option(
        8,
        help="Number of attention heads, or any: heads 16 to 128 wide.",
        label="Attention heads",
        parse=_count_or_any,
        at_least=1,
        at_most=MOST_HEADS,
    )
    tied: bool = option(
        True, help="Give the output head its own weights, not the embedding's.", flag="--untied"
    )
    length: int = option(
        512,
        help="Length of the longest sequence, in tokens.",
        label="Longest sequence",
        parse=parse_count,
        at_least=1,
        at_most=MOST_COUNTED,
    )
    shape: Literal["llama", "classic"] = option(
        "llama",
        help="llama: rotary positions, RMSNorm, widths that int4 takes; classic: learned "
        "positions, LayerNorm, any width.",
    )
    position: Literal["learned", "rotary", "sinusoidal", "alibi", "none"] | None = option(
        None, help="Kind of position information; that of the shape by default."
    )
    bias: Bias = option("none", help="Projections that have a bias.")
    norm: Literal["layernorm", "rmsnorm"] | None = option(
        None, help="Kind of norm; that of the shape by default."
    )
    embedding_ratio: float | Literal["usual", "free"] = option(
        "usual",
        help="Wished share of the parameters in the embedding (and an untied head); usual: "
        f"{USUAL_RATIO:.0%}, in shape llama as far as d_model / layers stays usual "
        f"({USUAL_ASPECTS[0]:g} to {USUAL_ASPECTS[1]:g}); free: no wish, a usual shape.",
        parse=_share_or_word,
        above=0.0,
        below=1.0,
        hint="use 0.01 to 0.99, written 0.35 or 35%; 'free' drops the wish",
    )
    exact_ratio: bool = option(
        False, help="Require the embedding ratio as nearly as whole widths allow."
    )
    ratio_within: float | None = option(
        None,
        help="Most that the embedding ratio may differ: 1% is one point.",
        parse=parse_share,
        above=0.0,
        hint="1% is tight; exact_ratio requires the nearest",
    )
    ratio_covers: Literal["both", "input"] = option(
        "both", help="What the ratio counts: embedding and untied head, or the embedding alone."
    )
    glu_expansion: float | Literal["free"] = option(
        2.66,
        help="Wished d_ff / d_model, or free.",
        label="GLU expansion",
        parse=_share_or_free,
        above=0.0,
        hint="2.66 and 4 are usual; 'free' drops the wish",
    )
    exact_expansion: bool = option(
        False, help="Require the expansion as nearly as a whole d_ff allows."
    )
    glu_within: float | None = option(
        None,
        help="Most that the expansion may differ, relative to itself.",
        label="GLU within",
        parse=parse_share,
        above=0.0,
        hint="1% is tight; exact_expansion requires the nearest",
    )
    multiple: int | None = option(
        None,
        help=f"Divisor of d_model and d_ff; in shape llama {Int4.multiple}, which int4 needs, if "
        "that is possible near the wishes, else 1.",
        parse=parse_count,
        at_least=1,
        at_most=MOST_HEADS,
    )
    ffn_multiple: int | None = option(
        None,
        help="Divisor of d_ff; as for d_model by default.",
        parse=parse_count,
        at_least=1,
        at_most=MOST_HEADS,
    )
    kv_heads: int | None = option(
        None,
        help="Number of heads for keys and values.",
        parse=parse_count,
        at_least=1,
        at_most=MOST_HEADS,
    )
    free_head_width: bool = option(False, help="Let heads x d_head differ from d_model.")
    experts: int | None = option(
        None,
        help="Number of experts of each feed-forward, all of them counted; dense by default.",
        parse=parse_count,
        at_least=2,
        at_most=MOST_HEADS,
    )
    experts_per_token: int | None = option(
        None,
        help="Number of experts that a token passes through; 2 by default.",
        parse=parse_count,
        at_least=1,
    )
    shared_expert: bool = option(
        False, help="Add an expert, as wide as the others, that every token passes through."
    )
    rank: int | Literal["any"] | None = option(
        None,
        help="Factorize the embedding with this rank; any: chosen to meet the ratio.",
        parse=_count_or_any,
        at_least=1,
        at_most=MOST_COUNTED,
    )
    min_layers: int = option(
        1, help="Fewest layers.", parse=parse_count, at_least=1, at_most=MOST_LAYERS
    )
    max_layers: int | None = option(
        None, help="Most layers.", parse=parse_count, at_least=1, at_most=MOST_LAYERS
    )
    min_aspect: float = option(
        0.0, help="Least d_model / layers.", parse=parse_share, at_least=0.0, hint="0 is no limit"
    )
    max_aspect: float | None = option(
        None, help="Largest d_model / layers.", parse=parse_share, above=0.0, hint="32 is usual"
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_wishes()
        self._check_heads()
        self._check_experts()
        if self.max_layers is not None and self.max_layers < self.min_layers:
            raise InputError(
                f"max_layers {self.max_layers} is below min_layers {self.min_layers}",
                hint=f"the nearest that works is {self.min_layers}",
            )
        if self.max_aspect is not None and self.max_aspect < self.min_aspect:
            raise InputError(
                f"max_aspect {self.max_aspect} is below min_aspect {self.min_aspect}",
                hint="32 is a usual d_model / n_layers",
            )

    def _check_wishes(self) -> None:
        for name, (exact, within) in WISHES.items():
            is_exact, limit = getattr(self, exact), getattr(self, within)
            if getattr(self, name) == "free" and (is_exact or limit is not None):
                raise InputError(
                    f"{name} is free, and yet limited", hint="give it a value, or drop the limit"
                )
            if is_exact and limit is not None:
                raise InputError(f"{name} is exact, and {within} too", hint="give one of them")
        if self.rank == "any" and self.ratio is None:
            raise InputError(
                "any rank and a free embedding ratio leave the rank open",
                hint="give the rank or the ratio a value",
            )

    def _check_heads(self) -> None:
        if self.heads == "any":
            if self.free_head_width:
                raise InputError(
                    "a free head width needs a number of heads",
                    hint="8 is usual, or leave the head width bound",
                )
        elif self.kv_heads is not None and self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            best = min(divisors, key=lambda n: (abs(n - (self.kv_heads or 1)), n))
            raise InputError(
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}",
                hint=f"the nearest that does is {best}",
            )

    def _check_experts(self) -> None:
        if self.experts is None and (self.experts_per_token is not None or self.shared_expert):
            name = "shared_expert" if self.shared_expert else "experts_per_token"
            raise InputError(f"{name} needs a number of experts", hint="experts 8 is usual")
        if self.experts is not None and self.chosen_experts > self.experts:
            raise InputError(
                f"experts_per_token {self.experts_per_token} is above experts {self.experts}",
                hint=f"the nearest that works is {self.experts}",
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Budget":
        """Build a budget from options by name; numbers may be text, such as `10M` or `0.5%`."""
        known = {each.name: each for each in options_of(cls)}
        values = {}
        for name, value in options.items():
            if name not in known:
                raise InputError(
                    f"a budget has no option '{name}'", hint=nearest(name, list(known))
                )
            parse = known[name].parse
            values[name] = value if parse is None or value is None else parse(name, value)
        return cls(**values)

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of parameters within tolerance, exactly."""
        slack = Fraction(repr(self.tolerance)) * self.params
        return math.ceil(self.params - slack), math.floor(self.params + slack)

    @property
    def ratio(self) -> Wish | None:
        """The wished embedding ratio; None if it is free."""
        if self.embedding_ratio == "free":
            return None
        value = USUAL_RATIO if self.embedding_ratio == "usual" else self.embedding_ratio
        return Wish(value=value, exact=self.exact_ratio, within=self.ratio_within)

    @property
    def expansion(self) -> Wish | None:
        """The wished GLU expansion; None if it is free."""
        if self.glu_expansion == "free":
            return None
        return Wish(value=self.glu_expansion, exact=self.exact_expansion, within=self.glu_within)

    @property
    def position_part(self) -> Position:
        """The position information: the one requested, or the shape's."""
        return POSITIONS[self.position or SHAPES[self.shape][0]]

    @property
    def norm_part(self) -> Norm:
        """The norm: the one requested, or the shape's."""
        return NORMS[self.norm or SHAPES[self.shape][1]]

    @property
    def model_step(self) -> int:
        """The divisor of d_model, resolved: 1 if none is requested."""
        return self.multiple or 1

    @property
    def ffn_step(self) -> int:
        """The divisor of d_ff, resolved."""
        return self.ffn_multiple or self.model_step

    @property
    def prefers_usual_shape(self) -> bool:
        """True if neither a ratio nor a limit of d_model / n_layers is requested."""
        is_limited = self.exact_ratio or self.ratio_within is not None
        is_wished = self.embedding_ratio not in ("usual", "free") or is_limited
        has_aspect = self.min_aspect > 0.0 or self.max_aspect is not None
        return self.shape == "llama" and not is_wished and not has_aspect

    def in_usual_shape(self) -> "Budget":
        """Return the same budget with a usual d_model / n_layers, and more than one layer."""
        least, most = USUAL_ASPECTS
        layers = max(self.min_layers, min(USUAL_LAYERS, self.max_layers or USUAL_LAYERS))
        return replace(self, min_aspect=least, max_aspect=most, min_layers=layers)

    @property
    def is_open(self) -> bool:
        """True if the multiple is left to the solver, which prefers one that int4 takes."""
        return self.shape == "llama" and self.multiple is None

    def in_multiples(self, multiple: int) -> "Budget":
        """Return the same budget with d_model and d_ff in multiples of this number as well."""
        return replace(
            self,
            multiple=math.lcm(multiple, self.model_step),
            ffn_multiple=math.lcm(multiple, self.ffn_step),
        )

    @property
    def chosen_experts(self) -> int:
        """The number of experts that a token passes through, resolved."""
        return 2 if self.experts_per_token is None else self.experts_per_token

    @property
    def head_step(self) -> int:
        """The divisor of d_head: positions that rotate keys rotate pairs of columns."""
        return 2 if turns_keys(self.position_part) else 1


#: The options of each wish: `exact`, `within`.
WISHES = {
    "embedding_ratio": ("exact_ratio", "ratio_within"),
    "glu_expansion": ("exact_expansion", "glu_within"),
}


@spec
class Sizes:
    """The whole numbers that the search chooses; `rank` is None for a plain embedding."""

    d_model: int
    n_heads: int
    d_head: int
    d_ff: int
    n_layers: int
    rank: int | None = None


def build_block(budget: Budget, sizes: Sizes) -> Block:
    """Build a pre-norm block of these sizes with SwiGLU, or with experts that are SwiGLU.

    `d_ff` is the width of each expert.
    """
    dense = SwiGLU(d_ff=sizes.d_ff, bias=budget.bias in ("all", "no_key"))
    ffn: FeedForward = dense
    if budget.experts is not None:
        ffn = MoE(
            n_experts=budget.experts,
            experts_per_token=budget.chosen_experts,
            expert=dense,
            normalize=budget.chosen_experts > 1,
            shared=dense if budget.shared_expert else None,
        )
    fills_width = sizes.n_heads * sizes.d_head == sizes.d_model
    return Block(
        mixer=Attention(
            n_heads=sizes.n_heads,
            n_kv_heads=budget.kv_heads,
            d_head=None if fills_width else sizes.d_head,
            bias=budget.bias,
        ),
        ffn=ffn,
        norm=budget.norm_part,
    )


def build_spec(budget: Budget, sizes: Sizes) -> ModelSpec:
    """Build the decoder of these sizes, otherwise as the budget says."""
    embedding: Embedding = PlainEmbedding()
    if sizes.rank is not None:
        embedding = FactorizedEmbedding(rank=sizes.rank)
    return ModelSpec(
        vocab_size=budget.vocab,
        d_model=sizes.d_model,
        max_seq_len=budget.length,
        embedding=embedding,
        position=budget.position_part,
        decoder=Stack(
            layers=(Layers(count=sizes.n_layers, block=build_block(budget, sizes)),),
            final_norm=budget.norm_part,
        ),
        heads=(NextHead(tied=budget.tied),),
        init=NormalInit(std=0.02),
    )
