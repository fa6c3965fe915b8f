"""Optimizer updates: the gradient's norm, and the update of a piece of the parameters."""

import math

import numpy as np

from glassformer.byhand.pass_context import Array
from glassformer.byhand.table import AdamRule

# P entries of one piece


def sgd_update(
    param_P: Array,
    grad_P: Array,
    m_P: Array,
    *,
    lr: float,
    momentum: float,
    decay: float,
    work_P: Array,
) -> None:
    """p -= lr g; with momentum, p -= lr m, m = momentum m + g. Weight decay is added to g."""
    np.multiply(param_P, decay, out=work_P)
    work_P += grad_P
    if momentum:
        m_P *= momentum
        m_P += work_P
        work_P[...] = m_P
    work_P *= lr
    param_P -= work_P


def adam_update(
    param_P: Array,
    grad_P: Array,
    m_P: Array,
    v_P: Array,
    rule: AdamRule,
    scratch: tuple[Array, Array],
) -> None:
    """p -= lr m / (sqrt(v) + eps): running means of g and g^2, corrected for their start at 0."""
    work, more = scratch
    if rule.decay and rule.decoupled:
        param_P *= 1.0 - rule.lr * rule.decay
    elif rule.decay:
        grad_P = np.add(np.multiply(param_P, rule.decay, out=more), grad_P, out=more)
    np.subtract(grad_P, m_P, out=work)
    work *= 1.0 - rule.beta1
    m_P += work
    np.multiply(grad_P, grad_P, out=work)
    work *= 1.0 - rule.beta2
    v_P *= rule.beta2
    v_P += work
    # m_hat / (sqrt(v_hat) + eps) with m_hat = m / (1 - beta1^t), v_hat = v / root^2,
    # root^2 = 1 - beta2^t, is m / (sqrt(v) + eps root) * root / (1 - beta1^t)
    root = math.sqrt(1.0 - rule.beta2**rule.steps)
    np.sqrt(v_P, out=work)
    work += rule.eps * root
    np.divide(m_P, work, out=work)
    work *= rule.lr * root / (1.0 - rule.beta1**rule.steps)
    param_P -= work


#: p(s) = a s + b s^3 + c s^5, whose slope at 0 is as steep as it can be: five times, it takes
#: singular values from 0.01 on to between 0.7 and 1.2.
QUINTIC, TIMES, LEAST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7


def orthogonalized(x_IO: Array) -> Array:
    """Return about U V^T of x = U S V^T: its singular values become nearly 1, without finding them.

    An odd polynomial of a matrix is the same of its singular values: (x x^T) x = U S^3 V^T.
    """
    a, b, c = QUINTIC
    x = x_IO.T if x_IO.shape[0] > x_IO.shape[1] else x_IO
    x = x / max(float(np.linalg.norm(x)), LEAST_NORM)  # no singular value is above 1
    for _ in range(TIMES):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if x_IO.shape[0] > x_IO.shape[1] else x


def muon_update(
    param_IO: Array,
    grad_IO: Array,
    m_IO: Array,
    *,
    lr: float,
    momentum: float,
    decay: float,
) -> None:
    """p -= lr sqrt(max(1, I / O)) orthogonalized(g + momentum (m - g)), m a running mean of g.

    Decay shrinks the parameter itself before.
    """
    m_IO += (1.0 - momentum) * (grad_IO - m_IO)
    step_IO = orthogonalized(grad_IO + momentum * (m_IO - grad_IO))
    param_IO *= 1.0 - lr * decay
    param_IO -= (lr * math.sqrt(max(1.0, param_IO.shape[0] / param_IO.shape[1]))) * step_IO


def global_norm(grads: Array) -> float:
    """Return the norm of the gradient as one vector."""
    return float(np.sqrt(np.dot(grads, grads)))


def clip_global_norm(grads: Array, *, max_norm: float) -> float:
    """Shrink the gradient vector in place to max_norm if it is longer; return its norm before."""
    norm = global_norm(grads)
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0:
        grads *= factor
    return norm
