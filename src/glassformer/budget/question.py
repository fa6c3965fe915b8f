"""A parameter budget as a question, and its answers as values.

"So many parameters, this vocabulary": what may be asked, which wishes are hard and which give way,
and the designs that answer. `solve` finds them; here is only what they are.
"""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Literal, get_args

from glassformer.spec.checks import at_least, one_of, spec
from glassformer.spec.errors import InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    Attention,
    Bias,
    Block,
    Embedding,
    FactorizedEmbedding,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    PlainEmbedding,
    Position,
    RMSNorm,
    Stack,
    SwiGLU,
)

#: With any number of heads, a head is this wide, or the model has one head and is narrower.
HEAD_WIDTHS = (16, 128)
#: How far a free head width may leave d_model / n_heads, in columns.
HEAD_SLACK = 2


@spec
class Exact:
    """As near as whole numbers allow: within half a step of the width, or of d_ff."""

    value: float


@spec
class Target:
    """As near as the total allows; never farther than `within`, where that is given."""

    value: float
    within: float | None = None


@spec
class Free:
    """Whatever comes out."""


Wish = Exact | Target | Free


@spec
class Budget:
    """The question. What `embedding_ratio` covers: the token table and, untied, the head too.

    `within` counts shares of the total for the ratio, and relative change for the expansion.
    `n_heads` None: any number, of heads 16 to 128 wide. `free_head_width`: n_heads * d_head need
    not be d_model. `rank` factorizes the embedding; "any" lets the ratio choose it. The multiples
    are those of d_model and d_ff; the aspect is d_model / n_layers.
    """

    vocab_size: int = 16_000
    total: int = 10_000_000
    tolerance: float = 0.005
    n_heads: int | None = 8
    tied: bool = True
    max_seq_len: int = 512
    position: Position = Learned()
    bias: Bias = "none"
    norm: LayerNorm | RMSNorm = LayerNorm()
    embedding_ratio: Exact | Target | Free = Target(value=0.35)
    glu_expansion: Exact | Target | Free = Target(value=2.66)
    ratio_covers: Literal["both", "input"] = "both"
    width_multiple: int = 1
    ffn_multiple: int = 1
    n_kv_heads: int | None = None
    free_head_width: bool = False
    rank: int | Literal["any"] | None = None
    min_layers: int = 1
    max_layers: int | None = None
    min_aspect: float = 0.0
    max_aspect: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "total", "max_seq_len", "width_multiple", "ffn_multiple"):
            at_least(name, getattr(self, name))
        at_least("min_layers", self.min_layers)
        for name in ("n_heads", "n_kv_heads", "max_layers"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name))
        if self.rank is not None and self.rank != "any":
            at_least("rank", self.rank)
        one_of("bias", self.bias, get_args(Bias))
        one_of("ratio_covers", self.ratio_covers, ("both", "input"))
        self._check_tolerance()
        self._check_wishes()
        self._check_pairs()

    def _check_tolerance(self) -> None:
        if not 0.0 < self.tolerance < 1.0:
            near = f"{1 / self.total:.1g}" if self.tolerance <= 0 else "0.99"
            raise InputError(
                f"tolerance {self.tolerance:g} is outside (0, 1)",
                hint=f"the nearest that makes sense is {near}; 0.5% is usual",
            )

    def _check_wishes(self) -> None:
        ratio, glu = self.embedding_ratio, self.glu_expansion
        if not isinstance(ratio, Free) and not 0.0 < ratio.value < 1.0:
            near = "0.01" if ratio.value <= 0 else "0.99"
            if 1.0 < ratio.value < 100.0:
                near = f"{ratio.value:g}%"
            raise InputError(
                f"embedding_ratio {ratio.value:g} is outside (0, 1)",
                hint=f"the nearest that works is {near}; 'free' drops the wish",
            )
        if not isinstance(glu, Free) and not 0.0 < glu.value < math.inf:
            raise InputError(
                f"glu_expansion {glu.value:g} is not above 0",
                hint="2.66 and 4 are usual; 'free' drops the wish",
            )
        for name, wish in (("ratio_within", ratio), ("glu_within", glu)):
            within = wish.within if isinstance(wish, Target) else None
            if within is not None and not 0.0 < within < math.inf:
                raise InputError(
                    f"{name} {within:g} is not above 0", hint="1% is tight; ask for an exact one"
                )
        if self.rank == "any" and isinstance(ratio, Free):
            raise InputError(
                "any rank and a free embedding ratio leave the rank open",
                hint="give the rank or the ratio a value",
            )

    def _check_pairs(self) -> None:
        heads, groups = self.n_heads, self.n_kv_heads
        if heads is not None and groups is not None and heads % groups:
            nearest = [n for n in range(1, heads + 1) if heads % n == 0]
            best = min(nearest, key=lambda n: (abs(n - groups), n))
            raise InputError(
                f"n_kv_heads {groups} does not divide n_heads {heads}",
                hint=f"the nearest that does is {best}",
            )
        if self.free_head_width and heads is None:
            raise InputError(
                "a free head width needs a number of heads", hint="8 is usual, or leave it bound"
            )
        if self.max_layers is not None and self.max_layers < self.min_layers:
            raise InputError(
                f"max_layers {self.max_layers} is below min_layers {self.min_layers}",
                hint=f"the nearest that works is {self.min_layers}",
            )
        if not 0.0 <= self.min_aspect < math.inf:
            raise InputError(f"min_aspect {self.min_aspect} is negative", hint="0 is no limit")
        if self.max_aspect is not None and not max(self.min_aspect, 1e-9) <= self.max_aspect:
            raise InputError(
                f"max_aspect {self.max_aspect} is below min_aspect {self.min_aspect}",
                hint="32 is a usual d_model / n_layers",
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most parameters that are within tolerance, exactly."""
        slack = Fraction(repr(self.tolerance)) * self.total
        return math.ceil(self.total - slack), math.floor(self.total + slack)


@spec
class Sizes:
    """The whole numbers that a budget leaves open; `rank` None: the embedding is plain."""

    d_model: int
    n_heads: int
    d_head: int
    d_ff: int
    n_layers: int
    rank: int | None = None


def build_block(budget: Budget, sizes: Sizes) -> Block:
    """A block of these sizes, otherwise as the budget says: pre-norm, SwiGLU."""
    whole = sizes.n_heads * sizes.d_head == sizes.d_model
    return Block(
        attention=Attention(
            n_heads=sizes.n_heads,
            n_kv_heads=budget.n_kv_heads,
            d_head=None if whole else sizes.d_head,
            bias=budget.bias,
        ),
        ffn=SwiGLU(d_ff=sizes.d_ff, bias=budget.bias in ("all", "no_key")),
        norm=budget.norm,
    )


def build_spec(budget: Budget, sizes: Sizes) -> ModelSpec:
    """The model of these sizes that the budget describes: source 001's, with its options."""
    embedding: Embedding = PlainEmbedding()
    if sizes.rank is not None:
        embedding = FactorizedEmbedding(rank=sizes.rank)
    return ModelSpec(
        vocab_size=budget.vocab_size,
        d_model=sizes.d_model,
        max_seq_len=budget.max_seq_len,
        embedding=embedding,
        position=budget.position,
        decoder=Stack(
            layers=(Layers(count=sizes.n_layers, block=build_block(budget, sizes)),),
            final_norm=budget.norm,
        ),
        heads=(NextHead(tied=budget.tied),),
        init=NormalInit(std=0.02),
    )


@spec
class Design:
    """One answer, counted by the manifest. `name` says what it is best at."""

    name: str
    sizes: Sizes
    spec: ModelSpec
    target: int
    params: int
    embedding_ratio: float
    input_ratio: float
    ratio_drift: float | None
    glu_drift: float | None

    @property
    def error(self) -> float:
        """Relative distance from the asked total."""
        return self.params / self.target - 1.0

    @property
    def miss(self) -> str:
        """The error for people: a percentage, or the count where that would be 0.00 %."""
        if abs(self.error) >= 5e-5:
            return f"{self.error:+.2%}"
        return f"{self.params - self.target:+,}" if self.params != self.target else "exactly"

    @property
    def glu_expansion(self) -> float:
        """d_ff / d_model."""
        return self.sizes.d_ff / self.sizes.d_model

    @property
    def aspect(self) -> float:
        """d_model / n_layers."""
        return self.sizes.d_model / self.sizes.n_layers

    def renamed(self, name: str) -> "Design":
        """The same design under another name."""
        return replace(self, name=name)

    def __str__(self) -> str:
        sizes = self.sizes
        rank = "" if sizes.rank is None else f", rank {sizes.rank}"
        return (
            f"{self.params:,} parameters ({self.miss}): d_model {sizes.d_model}, "
            f"d_ff {sizes.d_ff} ({self.glu_expansion:.2f}x), {sizes.n_layers} layers, "
            f"{sizes.n_heads} heads of {sizes.d_head}{rank}, embeddings {self.embedding_ratio:.2%}"
        )


@spec
class Answer:
    """The best design, others worth knowing, and a line for every wish that gave way.

    `not_proven`: a line for every design of which the search ended before it knew that none is
    better. A thorough search has no such lines.
    """

    budget: Budget
    best: Design
    alternatives: tuple[Design, ...]
    gave_way: tuple[str, ...]
    not_proven: tuple[str, ...] = ()

    @property
    def spec(self) -> ModelSpec:
        """The best design's model."""
        return self.best.spec

    def __repr__(self) -> str:
        lines = [str(self.best)]
        lines += [f"  gave way: {line}" for line in self.gave_way]
        lines += [f"  {design.name}: {design}" for design in self.alternatives]
        lines += [f"  not proven: {line}" for line in self.not_proven]
        return "\n".join(lines)


def format_dimensions(design: Design, budget: Budget) -> str:
    """The count beside the target, and the two shares that were wished for."""
    lines = [
        f"{design.params - design.target:+,} from the target of {design.target:,} "
        f"({design.error:+.2%}; {budget.tolerance * 100:g}% is allowed)"
    ]
    line = f"embedding ratio {design.embedding_ratio:.2%}"
    if not budget.tied and budget.ratio_covers == "both":
        line += f" with the head, {design.input_ratio:.2%} without"
    elif not budget.tied:
        line += " without the head"
    lines.append(f"{line}   GLU expansion {design.glu_expansion:.3f}")
    if budget.n_kv_heads is not None:
        lines.append(f"{budget.n_kv_heads} heads for keys and values")
    return "\n".join(lines)


def format_alternatives(answer: Answer) -> str:
    """One line each: what it is best at, and its numbers."""
    header = f"{'':<26}{'parameters':>12}{'off':>9}{'d_model':>9}{'d_ff':>7}{'layers':>8}"
    lines = [f"{header}{'ratio':>9}{'GLU':>7}"]
    for design in (answer.best, *answer.alternatives):
        sizes = design.sizes
        lines.append(
            f"{design.name:<26}{design.params:>12,}{design.miss:>9}{sizes.d_model:>9}"
            f"{sizes.d_ff:>7}{sizes.n_layers:>8}{design.embedding_ratio:>9.2%}"
            f"{design.glu_expansion:>7.2f}"
        )
    return "\n".join(lines)
