"""How a model sees the order of its tokens."""

from glassformer.spec.base import at_least, positive, spec
from glassformer.spec.errors import InputError


@spec
class NoPosition:
    """Order is seen through the causal mask alone."""


@spec
class Sinusoidal:
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos of the same; not learned."""

    base: float = 10_000.0

    def __post_init__(self) -> None:
        positive("base", self.base)


@spec
class Learned:
    """A learned row for each of max_seq_len positions."""


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

    `attention_factor` None means the paper's 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        at_least("original_max_seq_len", self.original_max_seq_len)
        if not 0.0 < self.beta_slow < self.beta_fast:
            raise InputError(
                f"beta_slow {self.beta_slow} is not below beta_fast {self.beta_fast}",
                hint="the paper uses 1 and 32",
            )


@spec
class Rotary:
    """Queries and keys turned by an angle that grows with position, in half-split pairs."""

    base: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        if not 1.0 < self.base < float("inf"):
            raise InputError(
                f"base {self.base} is not above 1, so every pair would turn alike",
                hint="10000 is the usual base",
            )


Position = NoPosition | Sinusoidal | Learned | Rotary
