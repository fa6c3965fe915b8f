"""The angles of rotary positions, with the scalings that long-context models use.

Pure numbers, so that every engine turns by the same angles. Formulas: RoFormer for the default,
Llama 3.1's release for llama3, and the YaRN paper (section 3) for yarn.
"""

import math

from glassformer.spec.model import LinearScaling, Llama3Scaling, Rotary, YarnScaling


def rotary_frequencies(rotary: Rotary, d_head: int) -> tuple[list[float], float]:
    """Angle per position of each of d_head / 2 pairs, and the factor on cos and sin."""
    plain = [rotary.base ** (-(2 * i) / d_head) for i in range(d_head // 2)]
    match rotary.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return [f / factor for f in plain], 1.0
        case Llama3Scaling() as scaling:
            return [_llama3(f, scaling) for f in plain], 1.0
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, rotary.base, d_head)


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
        """Index of the pair that makes so many full turns over the original context."""
        context = scaling.original_max_seq_len / (times * 2 * math.pi)
        return d_head * math.log(context) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), d_head - 1)
    width = max(high - low, 0.001)  # the two ends may meet on narrow heads
    scaled = []
    for i, frequency in enumerate(plain):
        divided_share = min(max((i - low) / width, 0.0), 1.0)
        scaled.append(frequency * (1 - divided_share) + frequency / scaling.factor * divided_share)
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return scaled, attention_factor
