"""bfloat16 without torch: widened and rounded as torch does."""

import numpy as np
import torch

from glassformer.models.weights import numpy_view
from glassformer.store.tensors import rounded, widened


def test_every_bfloat16_is_widened_and_comes_back():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = bits[bits.isfinite()]
    wide = widened(numpy_view(finite))
    assert np.array_equal(wide, finite.float().numpy())
    assert np.array_equal(rounded(wide).view("u2"), numpy_view(finite).view("u2"))


def test_rounding_is_torchs():
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(1)) * 3
    halves = (widened(numpy_view(x.bfloat16())).view("u4") + 0x8000).view("f4")  # half way
    for numbers in (x.numpy(), halves):
        want = numpy_view(torch.from_numpy(numbers).bfloat16())
        assert np.array_equal(rounded(numbers).view("u2"), want.view("u2"))
