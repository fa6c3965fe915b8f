"""The one comparison: outputs and every gradient of two ways to compute the same thing."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

#: What rounding may cost. Worst seen: float64 2e-14 forward and 1e-13 gradients, float32 7e-7.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
#: A reference gradient below this is zero by theory, and is compared absolutely.
NOTHING = 1e-9

Pairs = Mapping[str, tuple[Tensor | Sequence[Tensor], Tensor]]


def assert_matches(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    parameters: Pairs | None = None,
    tolerance: float | None = None,
) -> None:
    """Require equal outputs (absolutely) and equal gradients (relative to the largest entry).

    `inputs` go to both sides; the floating ones get gradients. `parameters` pairs ours with the
    reference's by name, and the reference gets our values first; several of ours may stand beside
    each other in one of theirs (a fused in_proj), joined along dimension 0.
    """
    parameters = dict(parameters or {})
    for mine, theirs in parameters.values():
        with torch.no_grad():
            theirs.copy_(_joined(mine))
    got, got_inputs = _run(ours, inputs)
    want, want_inputs = _run(reference, inputs)
    assert got.shape == want.shape, f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert got.dtype == want.dtype
    limit = TOLERANCE[want.dtype] if tolerance is None else tolerance
    _assert_close("output", got, want, limit, scale=1.0)

    probe = torch.randn(want.shape, generator=torch.Generator().manual_seed(97), dtype=want.dtype)
    mine_flat = [p for mine, _ in parameters.values() for p in _listed(mine)]
    theirs_flat = [theirs for _, theirs in parameters.values()]
    got_grads = iter(_gradients(got, probe, [*got_inputs, *mine_flat]))
    want_grads = iter(_gradients(want, probe, [*want_inputs, *theirs_flat]))
    for place in range(len(got_inputs)):
        _assert_gradient(f"input {place}", next(got_grads), next(want_grads), limit)
    for name, (mine, _) in parameters.items():
        joined = torch.cat([next(got_grads) for _ in _listed(mine)])
        _assert_gradient(name, joined, next(want_grads), limit)


def _run(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    own = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    return function(*own), [x for x in own if x.requires_grad]


def _gradients(out: Tensor, probe: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not leaves:
        return []
    return list(torch.autograd.grad(out, leaves, probe, allow_unused=True, materialize_grads=True))


def _assert_gradient(name: str, got: Tensor, want: Tensor, limit: float) -> None:
    largest = float(want.abs().max())
    _assert_close(
        f"gradient of {name}", got, want, limit, scale=largest if largest > NOTHING else 1.0
    )


def _assert_close(name: str, got: Tensor, want: Tensor, limit: float, *, scale: float) -> None:
    worst = float((got - want).detach().abs().max()) / scale
    assert worst <= limit, f"{name}: off by {worst:.2e}, at most {limit:.0e} allowed"


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _joined(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach() for t in _listed(tensors)])
