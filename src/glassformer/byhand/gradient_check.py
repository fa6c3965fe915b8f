"""Numerical gradients, to check a hand-derived backward against.

Central differences of a loss in float64: every entry of small arrays, random directions of models.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from glassformer.byhand.pass_context import Array
from glassformer.spec.errors import InputError

#: Below this size a derivative drowns in the rounding of the two losses: eps * loss / epsilon is
#: about 1e-11, so relative errors of 1e-6 need derivatives above 1e-5.
FLOOR = 1e-4


class DirectionCheck(NamedTuple):
    """One parameter along one random direction; `error` is relative to at least FLOOR."""

    name: str
    analytic: float
    numeric: float
    error: float


def relative_error(found: Array | float, expected: Array | float, *, floor: float = 0.0) -> float:
    """Return the largest difference over the largest magnitude (or `floor`); 0 if both are 0."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape:
        raise InputError(f"shapes {a.shape} and {b.shape} cannot be compared")
    if a.size == 0:
        return 0.0
    scale = max(float(np.abs(a).max()), float(np.abs(b).max()), floor)
    worst = float(np.abs(a - b).max())
    return worst / scale if scale else worst


def numerical_gradient(loss: Callable[[], float], x: Array, *, epsilon: float = 1e-6) -> Array:
    """Return d loss / d x by central differences, entry by entry; x is changed and restored."""
    if x.dtype != np.float64:
        raise InputError(f"central differences in {x.dtype} say nothing", hint="use float64")
    gradient = np.empty_like(x)
    for place in np.ndindex(x.shape):
        kept = x[place]
        x[place] = kept + epsilon
        above = loss()
        x[place] = kept - epsilon
        below = loss()
        x[place] = kept
        gradient[place] = (above - below) / (2 * epsilon)
    return gradient


def check_directions(
    loss: Callable[[], float],
    params: Mapping[str, Array],
    grads: Mapping[str, Array],
    *,
    rng: np.random.Generator,
    epsilon: float = 3e-5,
    directions: int = 2,
) -> list[DirectionCheck]:
    """Compare the slope of the loss along random directions of each parameter with its gradient."""
    found = []
    for name, param in params.items():
        if param.dtype != np.float64:
            raise InputError(f"'{name}' is {param.dtype}", hint="check a float64 model")
        gradient = grads[name].copy()
        for _ in range(directions):
            toward = rng.standard_normal(param.shape)
            numeric = slope_along(loss, {name: param}, {name: toward}, epsilon=epsilon)
            analytic = float(np.vdot(gradient, toward))
            error = relative_error(analytic, numeric, floor=FLOOR)
            found.append(DirectionCheck(name, analytic, numeric, error))
    return found


def slope_along(
    loss: Callable[[], float],
    params: Mapping[str, Array],
    toward: Mapping[str, Array],
    *,
    epsilon: float,
) -> float:
    """Return the slope of the loss where these parameters move together; they are restored."""
    kept, slope = {name: params[name].copy() for name in toward}, 0.0
    # f' = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h: the error is of order h^4, which sharply
    # bent places need (a norm over small numbers)
    for steps, factor in ((1, 8.0), (-1, -8.0), (2, -1.0), (-2, 1.0)):
        for name, way in toward.items():
            params[name][...] = kept[name] + steps * epsilon * way
        slope += factor * loss() / (12.0 * epsilon)
    for name, before in kept.items():
        params[name][...] = before
    return slope
