"""Angles against closed forms written for arrays, here, from the papers."""

import numpy as np
import pytest

from glassformer.spec.model import LinearScaling, Llama3Scaling, Rotary, YarnScaling
from glassformer.spec.position import rotary_frequencies

SINGLE = 1e-6  # frequencies are single-precision numbers, rounded at each step of the formula


def plain(base, d_head):
    return base ** (-np.arange(0, d_head, 2) / d_head)


def llama3(base, d_head, s):
    """Short wavelengths kept, long ones stretched, between them a straight line in 1/length."""
    f = plain(base, d_head)
    turns = s.original_max_seq_len * f / (2 * np.pi)
    kept = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return kept * f + (1 - kept) * f / s.factor


def yarn(base, d_head, s):
    """Pair i turns L / (2 pi base^(2i/d)) times; the ramp runs from beta_fast to beta_slow."""
    f = plain(base, d_head)

    def pair(turns):
        return d_head / 2 * np.log(s.original_max_seq_len / (2 * np.pi * turns)) / np.log(base)

    low = max(np.floor(pair(s.beta_fast)), 0)
    high = min(np.ceil(pair(s.beta_slow)), d_head - 1)
    stretched = np.clip((np.arange(d_head // 2) - low) / (high - low), 0.0, 1.0)
    return stretched * f / s.factor + (1 - stretched) * f


@pytest.mark.parametrize("base", [100.0, 10_000.0, 1_000_000.0])
@pytest.mark.parametrize("d_head", [2, 10, 64, 128])
def test_default_and_linear(base, d_head):
    frequencies, factor = rotary_frequencies(Rotary(base=base), d_head)
    np.testing.assert_allclose(frequencies, plain(base, d_head), rtol=SINGLE)
    assert factor == 1.0
    assert len(frequencies) == d_head // 2
    scaled = Rotary(base=base, scaling=LinearScaling(factor=4.0))
    frequencies, factor = rotary_frequencies(scaled, d_head)
    np.testing.assert_allclose(frequencies, plain(base, d_head) / 4, rtol=SINGLE)
    assert factor == 1.0


@pytest.mark.parametrize("d_head", [10, 64, 128])
@pytest.mark.parametrize("length", [64, 8192])
def test_llama3(d_head, length):
    scaling = Llama3Scaling(factor=8.0, original_max_seq_len=length)
    frequencies, factor = rotary_frequencies(Rotary(base=500_000.0, scaling=scaling), d_head)
    want = llama3(500_000.0, d_head, scaling)
    np.testing.assert_allclose(frequencies, want, rtol=SINGLE)
    assert factor == 1.0


def test_llama3_keeps_the_fast_divides_the_slow_and_bends_between():
    scaling = Llama3Scaling(factor=8.0, original_max_seq_len=8192)
    frequencies, _ = rotary_frequencies(Rotary(base=500_000.0, scaling=scaling), 128)
    ratio = plain(500_000.0, 128) / np.array(frequencies)
    assert ratio[0] == pytest.approx(1.0, rel=SINGLE)
    assert ratio[-1] == pytest.approx(8.0)
    assert np.any((ratio > 1.01) & (ratio < 7.99))
    assert np.all(np.diff(ratio) >= -8 * SINGLE)


@pytest.mark.parametrize("d_head", [10, 64, 128])
@pytest.mark.parametrize("length", [1024, 32_768])
def test_yarn(d_head, length):
    scaling = YarnScaling(factor=4.0, original_max_seq_len=length)
    frequencies, factor = rotary_frequencies(Rotary(base=10_000.0, scaling=scaling), d_head)
    np.testing.assert_allclose(frequencies, yarn(10_000.0, d_head, scaling), rtol=SINGLE)
    assert factor == pytest.approx(1 + 0.1 * np.log(4.0))


def test_yarns_factor_can_be_set_and_shrinking_needs_none():
    set_by_hand = YarnScaling(factor=4.0, original_max_seq_len=64, attention_factor=1.5)
    assert rotary_frequencies(Rotary(scaling=set_by_hand), 16)[1] == 1.5
    shrinking = YarnScaling(factor=0.5, original_max_seq_len=64)
    assert rotary_frequencies(Rotary(scaling=shrinking), 16)[1] == 1.0


def test_a_narrow_head_does_not_break_the_ramp():
    scaling = YarnScaling(factor=4.0, original_max_seq_len=8)
    frequencies, _ = rotary_frequencies(Rotary(scaling=scaling), 2)
    assert np.isfinite(frequencies).all()


@pytest.mark.parametrize("base", [10_000.0, 100_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("d_head", [8, 64, 128])
def test_frequencies_are_those_of_released_models(base, d_head):
    """What programs that train them compute in float32, to the last bit but for a power's own."""
    import torch

    exponents = torch.arange(0, d_head, 2, dtype=torch.int64).to(torch.float32) / d_head
    theirs = 1.0 / base**exponents
    ours = torch.tensor(rotary_frequencies(Rotary(base=base), d_head)[0], dtype=torch.float32)
    assert int((ours != theirs).sum()) <= 1
    assert torch.allclose(ours, theirs, rtol=1.2e-7, atol=0)


def test_a_base_beyond_single_precision_is_no_error():
    frequencies, _ = rotary_frequencies(Rotary(base=1e40), 8)
    assert np.isfinite(frequencies).all()
