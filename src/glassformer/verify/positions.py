"""Our positions against closed forms: complex numbers for the rotary, the formula for sinusoids."""

import cmath
import math

import torch
from torch import Tensor

from glassformer.nn.position import SinusoidalPosition, rotate, rotations
from glassformer.spec import model as spec
from glassformer.verify.measure import TOLERANCE, Measure, draw, gap, parity

# B batch, T length, N heads, H d_head, D d_model


def turn_by_hand(x_BTH: Tensor, H: int) -> Tensor:
    """Pair (i, i + H/2) as a complex number, turned by t / 10000^(2i/H), a float32 frequency."""
    T, half = x_BTH.shape[1], H // 2
    exponents = torch.tensor([2 * i / H for i in range(half)], dtype=torch.float32).double()
    frequencies = (1.0 / (10_000.0**exponents).float()).tolist()
    turns = [[cmath.exp(1j * t * frequency) for frequency in frequencies] for t in range(T)]
    kind = torch.complex128 if x_BTH.dtype == torch.float64 else torch.complex64
    turned = torch.complex(x_BTH[..., :half], x_BTH[..., half:]) * torch.tensor(turns, dtype=kind)
    return torch.cat((turned.real, turned.imag), -1)


def rotary_closed_form(dtype: torch.dtype) -> Measure:
    """`rotate` against complex multiplication."""
    B, N, T, H = 2, 3, 23, 10
    cos, sin = rotations(spec.Rotary(), T, H, dtype=dtype)
    return parity(
        lambda x: rotate(x, cos, sin),
        lambda x: torch.stack([turn_by_hand(x[:, n], H) for n in range(N)], 1),
        inputs=[draw(B, N, T, H, dtype=dtype, seed=20)],
        size=f"B{B} N{N} T{T} H{H}",
    )


def rotary_is_relative(dtype: torch.dtype) -> Measure:
    """A score depends on the distance of two positions only: shifting both changes nothing."""
    T, H, shift = 17, 6, 5
    table = rotations(spec.Rotary(), T + shift, H, dtype=dtype)
    q, k = draw(1, 1, 1, H, dtype=dtype, seed=21), draw(1, 1, 1, H, dtype=dtype, seed=22)

    def score(i: int, j: int) -> Tensor:
        return (rotate(q, *table[:, i : i + 1]) * rotate(k, *table[:, j : j + 1])).sum()

    worst = max(gap(score(i, 3), score(i + shift, 3 + shift)) for i in range(T))
    return Measure(worst, TOLERANCE[dtype], f"T{T} H{H}")


def sinusoidal_closed_form(dtype: torch.dtype) -> Measure:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos, number by number; odd d too."""
    worst = 0.0
    for length, d_model in ((13, 10), (7, 5)):
        part = SinusoidalPosition(length, d_model, base=10_000.0).to(dtype)
        expected = torch.empty(length, d_model, dtype=dtype)
        for pos in range(length):
            for column in range(d_model):
                angle = pos / 10_000 ** ((column - column % 2) / d_model)
                expected[pos, column] = math.cos(angle) if column % 2 else math.sin(angle)
        shown = part(torch.zeros(2, length, d_model, dtype=dtype), slice(0, length))
        worst = max(worst, gap(shown, expected.expand(2, -1, -1)))
        if list(part.parameters()) or part.state_dict():
            worst = math.inf
    return Measure(worst, TOLERANCE[dtype], "T13 D10, T7 D5")
