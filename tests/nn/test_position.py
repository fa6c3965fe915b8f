"""Sinusoids and rotations against closed forms in NumPy; tables that keep their precision."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from glassformer.nn.operations import rotate
from glassformer.nn.position import (
    ALiBiPosition,
    LearnedPosition,
    RotaryPosition,
    SinusoidalPosition,
    sinusoids,
)
from glassformer.spec.model import (
    ALiBi,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Sinusoidal,
    YarnScaling,
)
from glassformer.spec.position import alibi_slopes, rotary_frequencies
from tests.compare import assert_matches
from tests.tiny import filled, noise

LENGTH, WIDTH, D_HEAD = 11, 7, 10
PLACES = slice(0, 5)
ROTARIES = {
    "default": Rotary(),
    "linear": Rotary(base=500.0, scaling=LinearScaling(factor=4.0)),
    "llama3": Rotary(scaling=Llama3Scaling(factor=8.0, original_max_seq_len=64)),
    "yarn": Rotary(scaling=YarnScaling(factor=4.0, original_max_seq_len=1024)),
}
rotary_kinds = pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)


# --- sinusoidal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 7, 12])
def test_sinusoids_are_the_papers_at_even_and_odd_width(width):
    want = np.empty((LENGTH, width))
    for position in range(LENGTH):
        for column in range(width):
            angle = position / 10_000 ** (2 * (column // 2) / width)
            want[position, column] = np.cos(angle) if column % 2 else np.sin(angle)
    table = sinusoids(LENGTH, width)
    assert table.shape == (LENGTH, width)
    np.testing.assert_allclose(table.numpy(), want, rtol=0, atol=1e-14)


def test_a_shift_is_a_rotation_of_each_pair():
    """PE(p + k) is the same linear map of PE(p) for every p."""
    table = sinusoids(40, 8).view(40, 4, 2)
    pairs = torch.complex(table[..., 1], table[..., 0])  # cos + i sin
    turn = pairs[3:] / pairs[:-3]
    torch.testing.assert_close(turn, turn[:1].expand_as(turn), rtol=0, atol=1e-12)


def test_sinusoids_are_added_at_the_asked_places_to_every_row():
    part = SinusoidalPosition(LENGTH, WIDTH, kind=Sinusoidal(base=100.0)).double()
    x, table = noise(3, 5, WIDTH), sinusoids(LENGTH, WIDTH, kind=Sinusoidal(base=100.0))
    assert_matches(lambda x: part(x, slice(2, 7)), lambda x: x + table[2:7], [x])
    places = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [4, 5, 6, 7, 8]])
    assert_matches(lambda x: part(x, places), lambda x: x + table[places], [x])


def test_learned_rows_are_added_and_get_their_gradient():
    part = filled(LearnedPosition(LENGTH, WIDTH))
    places = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [4, 5, 6, 7, 8]])
    table = noise(LENGTH, WIDTH).requires_grad_()
    assert_matches(
        lambda x: part(x, places),
        lambda x: x + torch.nn.functional.one_hot(places, LENGTH).double() @ table,
        [noise(3, 5, WIDTH)],
        parameters={"weight": (part.weight, table)},
    )


# --- rotary -------------------------------------------------------------------------------------


def turned(x, rotary, places):
    """The reference: halves as real and imaginary, times factor * e^(i * place * frequency)."""
    frequencies, factor = rotary_frequencies(rotary, x.shape[-1])
    z = torch.complex(*x.chunk(2, dim=-1))
    angle = torch.from_numpy(np.outer(places, frequencies))
    z = z * torch.polar(torch.full_like(angle, factor), angle)
    return torch.cat((z.real, z.imag), dim=-1)


@rotary_kinds
def test_rotation_is_a_complex_product(rotary):
    part = RotaryPosition(rotary, LENGTH, D_HEAD).double()
    x = noise(2, 3, 5, D_HEAD)
    assert part.at(PLACES)[0].shape == (5, D_HEAD // 2)
    assert_matches(
        lambda x: rotate(x, *part.at(slice(4, 9))),
        lambda x: turned(x, rotary, range(4, 9)),
        [x],
    )


def test_rows_of_a_batch_may_stand_elsewhere():
    part = RotaryPosition(Rotary(), LENGTH, D_HEAD).double()
    x, places = noise(2, 3, 5, D_HEAD), torch.tensor([[0, 0, 1, 2, 3], [5, 6, 7, 8, 9]])
    cos, sin = part.at(places)
    assert cos.shape == (2, 1, 5, D_HEAD // 2)
    got = rotate(x, cos, sin)
    for row in range(2):
        want = turned(x[row : row + 1], Rotary(), places[row].numpy())
        torch.testing.assert_close(got[row : row + 1], want, rtol=0, atol=1e-13)


@rotary_kinds
def test_scores_depend_on_distance_alone_and_position_0_turns_nothing(rotary):
    part = RotaryPosition(rotary, 40, D_HEAD).double()
    factor = rotary_frequencies(rotary, D_HEAD)[1]
    q, k = noise(1, 1, 1, D_HEAD, seed=1), noise(1, 1, 1, D_HEAD, seed=2)

    def score(i, j):
        at = [part.at(slice(place, place + 1)) for place in (i, j)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum()

    for distance in (0, 1, 7):
        scores = torch.stack([score(p + distance, p) for p in (0, 3, 19)])
        torch.testing.assert_close(scores, scores[:1].expand(3), rtol=0, atol=1e-12)
    torch.testing.assert_close(score(0, 0), factor**2 * (q * k).sum(), rtol=0, atol=1e-12)
    turned_q = rotate(q, *part.at(slice(17, 18)))
    torch.testing.assert_close(turned_q.norm(), factor * q.norm(), rtol=0, atol=1e-12)


def test_gradient():
    cos, sin = RotaryPosition(Rotary(), LENGTH, 6).double().at(slice(0, 3))
    assert gradcheck(lambda x: rotate(x, cos, sin), [noise(2, 1, 3, 6).requires_grad_()])


# --- linear biases ------------------------------------------------------------------------------


def bloom_slopes(n_heads):
    """The slopes as transformers' build_alibi_tensor for Bloom and Falcon computes them."""
    power = 2 ** math.floor(math.log2(n_heads))
    base = 2 ** (-(2 ** -(math.log2(power) - 3)))
    slopes = [base**n for n in range(1, power + 1)]
    if power != n_heads:
        extra = 2 ** (-(2 ** -(math.log2(2 * power) - 3)))
        slopes += [extra**n for n in range(1, 1 + 2 * min(power, n_heads - power), 2)]
    return slopes


def mpt_slopes(n_heads, max_bias):
    """The slopes as transformers' build_mpt_alibi_tensor computes them."""
    power = 2 ** math.ceil(math.log2(n_heads))
    slopes = [1 / 2 ** (n * max_bias / power) for n in range(1, power + 1)]
    return slopes if power == n_heads else [*slopes[1::2], *slopes[::2]][:n_heads]


@pytest.mark.parametrize("n_heads", [*range(1, 18), 25, 71, 112])
def test_slopes_are_those_of_bloom_and_mpt(n_heads):
    got = alibi_slopes(ALiBi(), n_heads, 64)
    assert len(got) == n_heads
    np.testing.assert_allclose(got, bloom_slopes(n_heads), rtol=1e-13)
    np.testing.assert_allclose(got, mpt_slopes(n_heads, 8), rtol=1e-13)
    np.testing.assert_allclose(
        alibi_slopes(ALiBi(max_bias=5.0), n_heads, 64), mpt_slopes(n_heads, 5), rtol=1e-13
    )
    scaled = alibi_slopes(ALiBi(scaled=True), n_heads, 64)
    np.testing.assert_allclose(np.array(scaled) * 8, got, rtol=1e-15)


def test_biases_of_rows_that_stand_elsewhere():
    """Shape, numbers pair by pair, and the last positions as queries."""
    part = ALiBiPosition(ALiBi(), 3, 5).double()
    places = torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 0, 1]])
    bias = part.bias(places, 2)
    assert bias.shape == (2, 3, 2, 5)
    for b, n, t, s in np.ndindex(2, 3, 2, 5):
        want = -alibi_slopes(ALiBi(), 3, 5)[n] * abs(int(places[b, 3 + t] - places[b, s]))
        assert bias[b, n, t, s].item() == pytest.approx(want, rel=1e-15)
    assert torch.equal(part.bias(torch.arange(5), 5)[0, :, -2:], part.bias(torch.arange(5), 2)[0])
    assert not part.bias(places, 2).requires_grad


# --- precision of the tables --------------------------------------------------------------------


def make(kind):
    if kind == "alibi":
        return ALiBiPosition(ALiBi(max_bias=3.0), 7, 4)
    if kind == "rotary":
        return RotaryPosition(Rotary(), 9_001, 4)
    return SinusoidalPosition(9_001, 4, kind=Sinusoidal())


@pytest.mark.parametrize("kind", ["rotary", "sinusoidal", "alibi"])
@pytest.mark.parametrize(
    "cast",
    [
        lambda part: part.to(torch.bfloat16),
        lambda part: part.half(),
        lambda part: part.bfloat16().half().float(),
        lambda part: part.double().bfloat16(),
        lambda part: part.to_empty(device="cpu"),
    ],
    ids=["bfloat16", "half", "there and back", "from double", "emptied"],
)
def test_tables_stay_float32_bit_for_bit(kind, cast):
    want = make(kind).table.clone()
    got = cast(make(kind)).table
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["rotary", "sinusoidal"])
def test_tables_follow_to_float64_with_all_digits(kind):
    part = make(kind).double()
    assert part.table.dtype == torch.float64
    frequencies = 10_000.0 ** -np.array([0, 0.5])
    if kind == "rotary":  # single-precision numbers, turned with all digits
        frequencies = frequencies.astype(np.float32).astype(np.float64)
    place = np.arange(9_001)[:, None] * frequencies
    cos, sin = np.cos(place), np.sin(place)
    if kind == "rotary":
        got_cos, got_sin = part.table.numpy()
    else:
        got_cos, got_sin = part.table[:, 1::2].numpy(), part.table[:, 0::2].numpy()
    np.testing.assert_allclose(got_cos, cos, rtol=0, atol=1e-11)
    np.testing.assert_allclose(got_sin, sin, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["rotary", "sinusoidal", "alibi"])
def test_tables_are_buffers_outside_the_checkpoint(kind):
    part = make(kind)
    assert not list(part.parameters())
    assert not part.state_dict()
    assert [name for name, _ in part.named_buffers()] == ["table"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_half_model_adds_or_turns_keeps_its_dtype(dtype):
    x = noise(1, 2, 3, 4).to(dtype)
    assert rotate(x, *make("rotary").to(dtype).at(slice(0, 3))).dtype == dtype
    assert make("sinusoidal").to(dtype)(x[0], slice(0, 3)).dtype == dtype
