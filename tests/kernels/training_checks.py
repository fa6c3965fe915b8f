"""What must hold of the kernels of a training step: torch in float64 is the reference.

Sizes are primes: no multiple of a vector, a block of rows, or a piece. Every check goes through
every variant that the machine has.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels import c_library, train_kernels
from glassformer.kernels.threads import taking
from glassformer.kernels.train_kernels import FusedAdamW
from glassformer.nn.position import rotate
from tests.tiny import noise

# B batch, T query length, S key length, N query heads, K key-value heads, H d_head

#: B, N, K, T, S, H: one block and several, heads of part of a vector, of one and of several.
SIZES = (
    (2, 3, 3, 5, 7, 11),
    (1, 6, 2, 19, 19, 16),
    (1, 2, 1, 131, 131, 33),
    (2, 2, 1, 67, 139, 8),
    (1, 1, 1, 2, 53, 67),
)
#: The worst seen was 2e-6, of attention over 131 keys.
NEAR = 1e-5


def single(*shape: int, seed: int = 0) -> Tensor:
    return noise(*shape, seed=seed, dtype=torch.float32)


def compare(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], given: Sequence[Tensor]
) -> None:
    """Outputs and the gradients of all inputs, by every variant."""
    wide = [x.double().requires_grad_() for x in given]
    wanted = reference(*wide)
    slope = single(*wanted.shape, seed=9)
    slopes = torch.autograd.grad(wanted, wide, slope.double())
    for name in c_library.variants():
        with c_library.use_variant(name):
            own = [x.detach().requires_grad_() for x in given]
            found = ours(*own)
            assert found.shape == wanted.shape
            pairs = [
                (found, wanted),
                *zip(torch.autograd.grad(found, own, slope), slopes, strict=True),
            ]
            for i, (one, other) in enumerate(pairs):
                gap = (one.detach().double() - other.detach()).abs().max()
                gap = gap / other.detach().abs().max().clamp(min=1.0)
                assert gap <= NEAR, (name, i, float(gap))


def _heads(B: int, N: int, T: int, H: int, *, seed: int) -> Tensor:
    """Heads as a projection leaves them: those of a token lie side by side."""
    return single(B, T, N, H, seed=seed).transpose(1, 2)


def attention_is_torchs() -> None:
    """Plain, causal and masked, with grouped heads, forward and backward."""
    for B, N, K, T, S, H in SIZES:
        given = [_heads(B, N, T, H, seed=1), _heads(B, K, S, H, seed=2), _heads(B, K, S, H, seed=3)]
        allow = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(4)) > 0.4
        allow[..., 1] = True
        masks = [(None, False), (allow, False), (allow[:1, 0], False), (allow[..., :1, :], False)]
        for mask, causal in masks + ([(None, True)] if T == S else []):
            ours = partial(train_kernels.attention, allow=mask, causal=causal, scale=0.3)
            torchs = partial(
                F.scaled_dot_product_attention,
                attn_mask=mask,
                is_causal=causal,
                scale=0.3,
                enable_gqa=N != K,
            )
            compare(ours, torchs, given)


def attention_reads_no_future() -> None:
    """Other keys and values after a position change no bit of what is before, nor its gradient."""
    for T, cut in ((37, 11), (131, 70)):
        q, k, v = (_heads(1, 2, T, 16, seed=seed) for seed in (1, 2, 3))
        slope = torch.zeros(1, 2, T, 16)
        slope[:, :, :cut] = single(1, 2, cut, 16, seed=4)
        found = []
        for name in c_library.variants():
            with c_library.use_variant(name):
                for change in (0.0, 5.0):
                    own = [x.clone().requires_grad_() for x in (q, k, v)]
                    with torch.no_grad():
                        for x in own:
                            x[:, :, cut:] += change
                    out = train_kernels.attention(*own, allow=None, causal=True, scale=0.25)
                    slopes = torch.autograd.grad(out, own, slope)
                    assert not any(s[:, :, cut:].any() for s in slopes[1:])
                    found.append([x[:, :, :cut] for x in (out, *slopes)])
                assert all(torch.equal(a, b) for a, b in zip(*found[-2:], strict=True))


def attention_layers_are_torchs() -> None:
    """Projections, rotation, a mask with rows that attend to nothing, attention and the last
    projection as one part: of a sequence and of another one, with and without biases.
    """
    B, T, S, D, N, K, H = 2, 5, 7, 13, 6, 3, 10
    sizes = ((N * H, D), (K * H, D), (K * H, D), (D, N * H))
    allow = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(4)) > 0.4
    allow[..., 1] = True
    empty = torch.zeros(B, 1, T, 1, dtype=torch.bool)
    empty[0, :, 3] = True
    angles = single(T, H // 2, seed=5)
    for crossed in (False, True):
        for biased in (False, True):
            given = [single(B, T, D), *([single(B, S, D, seed=8)] if crossed else [])]
            given += [0.2 * single(*size, seed=i) for i, size in enumerate(sizes, start=20)]
            given += [single(size[0], seed=i) for i, size in enumerate(sizes, start=30)] * biased
            kind = {
                "d_head": H,
                "allow": None if crossed else allow,
                "empty": None if crossed else empty,
                "causal": False,
                "scale": 0.3,
            }

            def parts(
                *x: Tensor, crossed: bool = crossed
            ) -> tuple[Tensor, Tensor | None, list[Any], list[Any]]:
                first = 2 if crossed else 1
                return (
                    x[0],
                    x[1] if crossed else None,
                    [*x[first : first + 4]],
                    [*x[first + 4 :]] or [None] * 4,
                )

            def ours(*x: Tensor, crossed: bool = crossed, kind: Any = kind) -> Tensor:
                turn = None if crossed else (angles.cos(), angles.sin())
                return train_kernels.attention_layer(*parts(*x), **kind, rotation=turn)

            def reference(*x: Tensor, crossed: bool = crossed, kind: Any = kind) -> Tensor:
                x_BTD, context, weights, biases = parts(*x)
                context = x_BTD if context is None else context
                q, k, v = (
                    F.linear(of, w, b).unflatten(-1, (-1, H)).transpose(1, 2)
                    for of, w, b in zip((x_BTD, context, context), weights, biases, strict=False)
                )
                if not crossed:
                    wide = angles.double()
                    q, k = rotate(q, wide.cos(), wide.sin()), rotate(k, wide.cos(), wide.sin())
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=kind["allow"], scale=0.3, enable_gqa=True
                )
                if kind["empty"] is not None:
                    out = out.masked_fill(kind["empty"], 0.0)
                return F.linear(out.transpose(1, 2).flatten(2), weights[3], biases[3])

            compare(ours, reference, given)


def products_are_torchs() -> None:
    """Some products of one input, with a bias and without; also of no rows, as an expert has."""
    none = train_kernels.products(single(0, 7), (single(11, 7), single(13, 7)), (None, None))
    assert [x.shape for x in none] == [(0, 11), (0, 13)]
    compare(
        lambda x, v, w, b: torch.cat(train_kernels.products(x, (v, w), (None, b)), -1),
        lambda x, v, w, b: torch.cat((F.linear(x, v), F.linear(x, w, b)), -1),
        [single(3, 5, 7), single(11, 7, seed=1), single(13, 7, seed=2), single(13, seed=3)],
    )


def sums_have_their_norm() -> None:
    """x + added and its norm, of which both are used, or one."""
    for used in ((0, 1), (0,), (1,)):

        def ours(x: Tensor, added: Tensor, gain: Tensor, used: Any = used) -> Tensor:
            both = train_kernels.sum_and_norm(x, added, gain, eps=0.1)
            return torch.stack([both[i] for i in used]) + 0 * gain

        def plain(x: Tensor, added: Tensor, gain: Tensor, used: Any = used) -> Tensor:
            both = x + added, F.rms_norm(x + added, x.shape[-1:], gain, 0.1)
            return torch.stack([both[i] for i in used]) + 0 * gain

        compare(ours, plain, [single(5, 37, 31), single(5, 37, 31, seed=1), single(31, seed=2)])


def embeddings_add_their_rows() -> None:
    """The gradient of a table, in which rows occur again, is added to what the parameter has."""
    tokens, slope = torch.tensor([[3, 0, 3], [5, 3, 1]]), single(2, 3, 7, seed=1)
    for before in (None, single(11, 7, seed=2)):
        wide = single(11, 7).double().requires_grad_()
        wanted = torch.autograd.grad(F.embedding(tokens, wide), wide, slope.double())[0]
        weight = torch.nn.Parameter(single(11, 7))
        weight.grad = None if before is None else before.clone()
        found = train_kernels.embedded(tokens, weight)
        found.backward(slope)
        assert torch.equal(found, weight[tokens])
        wanted = wanted if before is None else wanted + before
        assert weight.grad is not None and (weight.grad - wanted).abs().max() <= NEAR


def norms_are_torchs() -> None:
    """RMSNorm, of more rows than a piece has."""
    for width in (1, 7, 64, 131):
        compare(
            partial(train_kernels.rms_norm, eps=0.1),
            lambda x, gain: F.rms_norm(x, x.shape[-1:], gain, 0.1),
            [single(5, 37, width), single(width, seed=1)],
        )


def gates_are_torchs() -> None:
    """silu(gate) * up."""
    for shape in ((1, 1, 3), (3, 5, 37), (7, 64)):
        given = [4.0 * single(*shape), single(*shape, seed=1)]
        compare(train_kernels.gated, lambda gate, up: F.silu(gate) * up, given)


def rotations_are_the_plain_ones() -> None:
    """Tables for all rows and for each, as wide as a head and narrower."""
    for B, N, T, H, half in ((2, 3, 7, 22, 11), (1, 2, 5, 64, 16), (3, 1, 2, 5, 2)):
        for shape in ((T, half), (B, 1, T, half)):
            angles = single(*shape, seed=1)
            cos, sin = angles.cos(), angles.sin()
            compare(
                partial(train_kernels.turned, cos=cos, sin=sin),
                partial(rotate, cos=cos.double(), sin=sin.double()),
                [_heads(B, N, T, H, seed=2)],
            )


def losses_are_torchs() -> None:
    """Each row's losses, and their gradient over the logits."""
    for rows, classes in ((1, 2), (5, 37), (67, 131), (3, 1009)):
        logits, targets = 5.0 * single(rows, classes), torch.arange(rows) * 7 % classes
        weights = torch.rand(rows, generator=torch.Generator().manual_seed(1))
        weights[0] = 0.0
        for smoothing in (0.0, 0.1):
            wide = logits.double().requires_grad_()
            plain = F.cross_entropy(wide, targets, reduction="none") * weights
            loss = F.cross_entropy(wide, targets, reduction="none", label_smoothing=smoothing)
            (slope,) = torch.autograd.grad((loss * weights).sum(), wide)
            wanted = torch.stack((plain, loss * weights), 1)
            for name in c_library.variants():
                with c_library.use_variant(name):
                    held = torch.full((rows, classes + 3), 77.0)
                    held[:, :classes] = logits
                    sums = train_kernels.loss_rows(held[:, :classes], targets, weights, smoothing)
                    assert ((sums - wanted).abs() <= NEAR * (1 + wanted.abs())).all(), name
                    assert ((held[:, :classes] - slope).abs() <= NEAR).all(), name
                    assert (held[:, classes:] == 77.0).all()


def updates_are_torchs() -> None:
    """Norm, clipping and AdamW of several steps; a parameter without a gradient stays."""
    for name in c_library.variants():
        with c_library.use_variant(name):
            sizes = (3, 1, 20_011, 129)
            own = [torch.nn.Parameter(single(n, seed=n)) for n in sizes]
            wide = [torch.nn.Parameter(p.detach().double()) for p in own]
            made = [
                torch.optim.AdamW(
                    [
                        {"params": some[:2], "weight_decay": 0.3},
                        {"params": some[2:], "weight_decay": 0.0},
                    ],
                    lr=0.01, betas=(0.8, 0.9), eps=1e-3,
                )
                for some in (own, wide)
            ]  # fmt: skip
            assert FusedAdamW.takes(made[0]) and not FusedAdamW.takes(made[1])
            update = FusedAdamW(made[0])
            for step in range(4):
                for i, (one, other) in enumerate(zip(own, wide, strict=True)):
                    one.grad = None if i == 1 and step < 2 else single(*one.shape, seed=step)
                    other.grad = None if one.grad is None else one.grad.double()
                norm, lr = update.norm(), 0.01 * (step + 1)
                wanted = float(torch.nn.utils.clip_grad_norm_(wide, 1.0))
                assert abs(norm - wanted) <= NEAR * wanted
                for group in made[1].param_groups:
                    group["lr"] = lr
                update.step(lr=lr, scale=min(1.0, 1.0 / (norm + 1e-6)))
                made[1].step()
            for one, other in zip(own, wide, strict=True):
                assert (one - other).abs().max() <= NEAR
                for key, value in made[1].state[other].items():
                    assert (made[0].state[one][key] - value).abs().max() <= NEAR, key


def threads_change_no_training_bit() -> None:
    """Everything at once on one, two and three threads."""
    found = []
    for threads in (1, 2, 3):
        with taking(threads):
            q, k, v = (_heads(5, 4, 67, 16, seed=s).requires_grad_() for s in (1, 2, 3))
            x, gain = single(1031, 37, seed=4).requires_grad_(), single(37, seed=5).requires_grad_()
            cos, sin = single(67, 8, seed=6), single(67, 8, seed=7)
            out = train_kernels.attention(
                train_kernels.turned(q, cos, sin), k, v, allow=None, causal=True, scale=0.25
            )
            y = train_kernels.rms_norm(x, gain, eps=1e-5)
            y = train_kernels.gated(y, x)
            slopes = torch.autograd.grad(out.square().sum() + y.square().sum(), (q, k, v, x, gain))
            logits = single(331, 1009, seed=8)
            sums = train_kernels.loss_rows(logits, torch.arange(331), torch.ones(331), 0.0)
            weight = torch.nn.Parameter(single(200_003, seed=9))
            weight.grad = single(200_003, seed=10)
            update = FusedAdamW(torch.optim.AdamW([weight], lr=0.1))
            norm = torch.tensor(update.norm())
            update.step(lr=0.1, scale=0.5)
            found.append([out, y, *slopes, logits, sums, norm, weight])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


TRAINING_CHECKS = {
    check.__name__: check
    for check in (
        attention_is_torchs,
        attention_reads_no_future,
        attention_layers_are_torchs,
        products_are_torchs,
        sums_have_their_norm,
        embeddings_add_their_rows,
        norms_are_torchs,
        gates_are_torchs,
        rotations_are_the_plain_ones,
        losses_are_torchs,
        updates_are_torchs,
        threads_change_no_training_bit,
    )
}
