"""The page that spells one block out is what the interpreter computes: values, every gradient."""

import numpy as np

from glassformer.byhand.gradient_check import relative_error
from glassformer.byhand.model import Model
from glassformer.byhand.walkthrough import EPS, block_backward, block_forward
from glassformer.spec import model as spec

HEADS, AT = 3, "blocks.1"
SPEC = spec.ModelSpec(
    vocab_size=31,
    d_model=12,
    max_seq_len=13,
    position=spec.Learned(),
    decoder=spec.Stack(
        layers=(
            spec.Layers(
                count=3,
                block=spec.Block(
                    attention=spec.Attention(n_heads=HEADS, bias="all"),
                    ffn=spec.MLP(d_ff=17, activation="relu"),
                    norm=spec.LayerNorm(eps=EPS),
                    placement="pre",
                ),
            ),
        ),
        final_norm=spec.LayerNorm(),
    ),
    heads=(spec.NextHead(tied=True),),
)


def test_the_walkthrough_is_the_interpreters_block() -> None:
    rng = np.random.default_rng(3)
    model = Model(SPEC, rng=rng)
    for param in model.params.values():
        param[...] = 0.5 * rng.standard_normal(param.shape)
    tokens, targets = rng.integers(0, 31, (2, 3, 7))
    taps: dict[str, np.ndarray] = {}
    grads: dict[str, np.ndarray] = {}
    model.loss_and_grads(
        model.inputs(tokens), targets={"next": targets}, taps=taps, tap_grads=grads
    )
    p = {n.removeprefix(f"{AT}."): x for n, x in model.params.items() if n.startswith(f"{AT}.")}
    out, cache = block_forward(taps[f"{AT}.resid_pre"], p, heads=HEADS)
    dx, found = block_backward(grads[f"{AT}.resid_post"], cache, p, heads=HEADS)
    assert relative_error(out, taps[f"{AT}.resid_post"]) <= 1e-14
    assert relative_error(dx, grads[f"{AT}.resid_pre"]) <= 1e-13
    assert set(found) == set(p)
    for name, grad in found.items():
        error = relative_error(grad, model.grads[f"{AT}.{name}"], floor=1e-3)
        assert error <= 1e-13, f"{name}: {error:.1e}"
