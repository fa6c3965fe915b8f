"""The error function: its accuracy, and where its coefficients come from."""

import math

import mpmath
import numpy as np
import pytest

from glassformer.byhand.activation import DOUBLE, SINGLE, erf

LINE = np.concatenate([np.linspace(-7, 7, 20_011), np.linspace(-1e-3, 1e-3, 1_009)])


def exactly(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(value) for value in x])


def test_double_precision() -> None:
    assert np.abs(erf(LINE) - exactly(LINE)).max() <= 1e-15  # worst seen 5e-16


def test_single_precision() -> None:
    x = LINE.astype(np.float32)
    assert erf(x).dtype == np.float32
    assert np.abs(erf(x) - exactly(x)).max() <= 6e-7  # worst seen 3.7e-7


def test_it_is_odd_and_ends_at_one() -> None:
    np.testing.assert_array_equal(erf(-LINE), -erf(LINE))
    np.testing.assert_array_equal(erf(np.array([30.0, -30.0, 1e10, np.inf])), [1, -1, 1, 1])
    assert np.isnan(erf(np.array([np.nan]))).all()
    np.testing.assert_allclose(erf(np.array([1, 2])), [math.erf(1), math.erf(2)], atol=1e-15)


@pytest.mark.parametrize(("coefficients", "error"), [(SINGLE, 1e-8), (DOUBLE, 1e-17)])
def test_coefficients_do_what_they_say(coefficients: tuple[float, ...], error: float) -> None:
    """Evaluated in 40 digits, so that only the fit is judged."""
    with mpmath.workdps(40):
        for z in np.linspace(0, 6, 301):
            z = mpmath.mpf(float(z))
            s = (2 - z) / (2 + z)
            found = mpmath.exp(-z * z) * mpmath.polyval(list(coefficients)[::-1], s)
            # float64 keeps 2e-17 of a coefficient near 0.4; the fit itself leaves 9e-19
            assert abs(found - mpmath.erfc(z)) <= error + 4e-17


def test_coefficients_can_be_found_again() -> None:
    """Weighted least squares from erfc alone gives the float32 ones to the fit's own error."""
    with mpmath.workdps(30):
        points = [mpmath.cos(mpmath.pi * (i + 0.5) / 60) for i in range(60)]
        s = [(1 + p) * mpmath.mpf(2) / 3 - mpmath.mpf(1) / 3 for p in points]  # z from 0 to 4
        z = [2 * (1 - x) / (1 + x) for x in s]
        left = mpmath.matrix(
            [[mpmath.exp(-a * a) * b**j for j in range(7)] for a, b in zip(z, s, strict=True)]
        )
        found, _ = mpmath.qr_solve(left, mpmath.matrix([mpmath.erfc(a) for a in z]))
        for place in z:
            x = (2 - place) / (2 + place)
            again = mpmath.polyval(list(found)[::-1], x)
            ours = mpmath.polyval(list(SINGLE)[::-1], x)
            assert abs(again - ours) * mpmath.exp(-place * place) <= 5e-8
