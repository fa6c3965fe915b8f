"""Position encodings: none, sinusoids, a learned table, rotations, biases by distance.

The numbers that are not learned (angles of rotary positions, slopes of ALiBi) are computed here in
plain Python, so that every engine uses the same ones. Formulas: RoFormer for the default angles,
Llama 3.1's release for llama3, and the YaRN paper (section 3) for yarn. Angles are single-precision
numbers, rounded where the programs that train such models round: a frequency that is right to more
digits would turn a released model's late positions by other angles than it has learned.
"""

import math
import struct
from typing import ClassVar, Literal, assert_never

from glassformer.spec.checks import at_least, positive, spec
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnPosition

SinusoidForm = Literal["interleaved", "halves", "fairseq"]


@spec
class NoPosition:
    """No position encoding: only the causal mask shows the order."""

    summary: ClassVar[str] = "no positions"


@spec
class Sinusoidal:
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos of the same; not learned.

    `form` halves has the sines in the first half and the cosines in the second (Marian, Pegasus);
    fairseq likewise, with base^(i/(d/2 - 1)) (M2M-100). Position 0 is row `offset` of the table.
    """

    summary: ClassVar[str] = "sinusoidal positions"

    base: float = 10_000.0
    form: SinusoidForm = "interleaved"
    offset: int = 0

    def __post_init__(self) -> None:
        positive("base", self.base)
        at_least("offset", self.offset, 0)

    def exponents(self, d_model: int) -> list[float]:
        """Return the power of `base` that divides the position, for each pair of columns."""
        pairs = range((d_model + 1) // 2)
        if self.form == "fairseq":
            return [i / (d_model // 2 - 1) for i in pairs]
        return [2 * i / d_model for i in pairs]


@spec
class Learned:
    """A learned row for each of max_seq_len positions.

    `offset` rows stand before that of position 0 and are never read: RoBERTa and BART have two.
    """

    summary: ClassVar[str] = "learned positions"

    offset: int = 0

    def __post_init__(self) -> None:
        at_least("offset", self.offset, 0)


@spec
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        positive("factor", self.factor)


@spec
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        at_least("original_max_seq_len", self.original_max_seq_len)
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}",
                hint="Llama 3.1 uses 1 and 4",
            )


@spec
class YarnScaling:
    """A ramp over dimensions between kept and divided frequencies, and a factor on cos and sin.

    `attention_factor` None means the paper's 0.1 ln(factor) + 1. The ramp begins and ends at whole
    dimensions, unless `truncate` is off (gpt-oss).
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        at_least("original_max_seq_len", self.original_max_seq_len)
        if not 0.0 < self.beta_slow < self.beta_fast:
            raise InputError(
                f"beta_slow {self.beta_slow} is not below beta_fast {self.beta_fast}",
                hint="the paper uses 1 and 32",
            )


@spec
class LongRopeScaling:
    """Each frequency divided by a factor of its own (LongRoPE, Phi-3), and a factor on cos and sin.

    There are two sets: `short` for sequences up to `original_max_seq_len`, and `long` for longer
    ones. Which one is used must not change while a text grows, since cached keys were rotated by
    it: `extended` chooses the long one for every length.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_seq_len: int
    attention_factor: float = 1.0
    extended: bool = False

    def __post_init__(self) -> None:
        at_least("original_max_seq_len", self.original_max_seq_len)
        positive("attention_factor", self.attention_factor)
        for factor in (*self.short, *self.long):
            positive("factor", factor)
        if len(self.short) != len(self.long):
            raise InputError(
                f"{len(self.short)} short factors and {len(self.long)} long ones",
                hint="one of each for every rotated pair",
            )


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@spec
class Rotary:
    """Queries and keys rotated by an angle that grows with position, in half-split pairs.

    With a `share` below 1, only that first part of each head is rotated (GPT-NeoX, Phi, StableLM).
    """

    summary: ClassVar[str] = "rotary positions"

    base: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise InputError(f"share {self.share} is outside (0, 1]", hint="1 rotates whole heads")
        if not 1.0 < self.base < float("inf"):
            raise InputError(
                f"base {self.base} is not above 1, so every pair would rotate by the same angle",
                hint="10000 is the usual base",
            )

    def width(self, d_head: int) -> int:
        """The number of rotated entries of a head."""
        return int(d_head * self.share + 1e-9)


@spec
class ALiBi:
    """Attention with linear biases: score(i, j) -= slope * |i - j|, one slope for each head.

    Press, Smith and Lewis, 2022. Nothing is added to the embedding, nothing is learned. Head n of N
    (a power of two) has the slope 2^(-max_bias * n / N), n from 1; see `alibi_slopes` for other N.
    `scaled` divides the bias by sqrt(d_head) along with the scores, as Falcon does; Bloom and MPT
    do not. Cross-attention has no bias: the two sequences share no positions.
    """

    summary: ClassVar[str] = "linear biases for positions (ALiBi)"
    #: What is added to a score.
    term: ClassVar[str] = "- slope · distance"

    max_bias: float = 8.0
    scaled: bool = False

    def __post_init__(self) -> None:
        positive("max_bias", self.max_bias)


@spec
class RelativeBias:
    """A learned bias of scores for each head and bucket of distances, shared by all layers (T5).

    Raffel and others, 2020. Each stack has a table of its own. Of the `buckets` a causal attention
    has half for the distances 0, 1, 2, ..., and half for ranges that grow with the distance's
    logarithm; from `max_distance` on, all distances share the last. Attention to both sides has
    half of the buckets for either side. Cross-attention has no bias.
    """

    summary: ClassVar[str] = "learned biases by distance (T5)"
    #: What is added to a score.
    term: ClassVar[str] = "+ bias by distance"

    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        at_least("buckets", self.buckets, 4)
        if self.buckets % 2:
            raise InputError(
                f"buckets {self.buckets} is odd: each side has half of them",
                hint=f"the nearest valid number is {self.buckets + 1}",
            )
        at_least("max_distance", self.max_distance, self.buckets // 2 + 1)


Position = NoPosition | Sinusoidal | Learned | Rotary | ALiBi | RelativeBias | OwnPosition


def relative_buckets(bias: RelativeBias, *, causal: bool) -> list[int]:
    """Return the bucket of each key - query from -max_distance to max_distance.

    What is farther apart has the bucket of either end. Logarithms are rounded as T5's code does,
    in single precision: a range begins where a quotient of two of them is a whole number.
    """
    count = bias.buckets if causal else bias.buckets // 2
    exact = count // 2
    whole = single(math.log(bias.max_distance / exact))

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        share = single(single(math.log(single(distance / exact))) / whole)
        return min(exact + int(single(share * (count - exact))), count - 1)

    one_side = [bucket(distance) for distance in range(bias.max_distance + 1)]
    after = [0 if causal else count + number for number in one_side[1:]]
    return [*reversed(one_side), *after]


def alibi_slopes(alibi: ALiBi, n_heads: int, d_head: int) -> list[float]:
    """Return the slope of each head, positive.

    A number of heads that is not a power of two takes the slopes of the next lower power P, then
    the first, third, fifth, ... slopes of 2 P: the rule of the paper's code, Bloom and MPT.
    """
    power = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-alibi.max_bias * n / power) for n in range(1, power + 1)]
    between = range(1, 2 * (n_heads - power), 2)
    slopes += [2.0 ** (-alibi.max_bias * n / (2 * power)) for n in between]
    return [slope / math.sqrt(d_head) for slope in slopes] if alibi.scaled else slopes


def rotary_frequencies(rotary: Rotary, d_head: int) -> tuple[list[float], float]:
    """Return the angle per position of each rotated pair, and the factor on cos and sin."""
    d_head = rotary.width(d_head)
    powers = [rotary.base ** single(2 * i / d_head) for i in range(d_head // 2)]
    plain = [single(1.0 / single(power)) for power in powers]
    match rotary.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return [single(f / factor) for f in plain], 1.0
        case Llama3Scaling() as scaling:
            return [single(_llama3(f, scaling)) for f in plain], 1.0
        case YarnScaling() as scaling:
            scaled, factor = _yarn(plain, scaling, rotary.base, d_head)
            return [single(f) for f in scaled], factor
        case LongRopeScaling() as scaling:
            factors = scaling.long if scaling.extended else scaling.short
            if len(factors) != len(plain):
                raise InputError(
                    f"{len(factors)} factors of rotary positions for {len(plain)} pairs",
                    hint="one for each pair of a head",
                )
            pairs = zip(factors, powers, strict=True)
            made = [single(1.0 / single(single(f) * single(p))) for f, p in pairs]
            return made, scaling.attention_factor
        case _ as unreachable:
            assert_never(unreachable)


def single(number: float) -> float:
    """Round to the nearest single-precision number; a number too large for one is returned."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return number


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    wavelength = 2 * math.pi / frequency
    turns = scaling.original_max_seq_len / wavelength
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    width = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (turns - scaling.low_freq_factor) / width
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(
    plain: list[float], scaling: YarnScaling, base: float, d_head: int
) -> tuple[list[float], float]:
    def pair_that_turns(times: float) -> float:
        """Return the index of the pair that makes this many turns over the original context."""
        context = scaling.original_max_seq_len / (times * 2 * math.pi)
        return d_head * math.log(context) / (2 * math.log(base))

    first, last = (pair_that_turns(times) for times in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, d_head - 1)
    width = max(high - low, 0.001)  # both ends may be equal on narrow heads
    scaled = []
    for i, frequency in enumerate(plain):
        divided_share = min(max((i - low) / width, 0.0), 1.0)
        scaled.append(frequency * (1 - divided_share) + frequency / scaling.factor * divided_share)
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return scaled, attention_factor
