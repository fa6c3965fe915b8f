"""The classes of source 003 by their names: shapes, gradients by central differences, learning."""

from typing import Any

import numpy as np
import pytest

from glassformer.byhand.gradient_check import numerical_gradient, relative_error
from glassformer.byhand.layers import (
    CrossEntropyLoss,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    PositionalEncoding,
    ReLU,
    Softmax,
    Transformer,
    TransformerBlock,
    attend_backward,
    scaled_dot_product_attention,
)
from glassformer.byhand.optim import SGD, Adam
from glassformer.spec.errors import InputError
from glassformer.spec.presets import digits

B, T, D, F, V = 3, 5, 12, 17, 19


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


X = np.random.default_rng(1).standard_normal((B, T, D))
LAYERS: dict[str, Any] = {
    "Linear": lambda: Linear(D, D, rng=rng(), he=True),
    "LayerNorm": lambda: LayerNorm(D),
    "ReLU": ReLU,
    "Softmax": Softmax,
    "PositionalEncoding": lambda: PositionalEncoding(D, max_seq_len=23),
    "MultiHeadAttention": lambda: MultiHeadAttention(D, 3, rng=rng()),
    "FeedForward": lambda: FeedForward(D, F, rng=rng()),
    "TransformerBlock": lambda: TransformerBlock(D, 3, F, rng=rng()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_shape_and_gradient(name: str) -> None:
    layer, x = LAYERS[name](), X.copy()
    dout = np.random.default_rng(2).standard_normal((B, T, D))
    assert layer.forward(x).shape == (B, T, D)
    dx = layer.backward(dout.copy())
    dx = dx[0] if isinstance(dx, tuple) else dx
    arrays = {"x": (x, dx)} | {
        name: (param, layer.grads[name].copy()) for name, param in layer.params.items()
    }
    for array_name, (array, analytic) in arrays.items():
        some, found = array.reshape(-1)[::13], analytic.reshape(-1)[::13]
        numeric = numerical_gradient(lambda: float(np.vdot(layer.forward(x), dout)), some)
        assert relative_error(found, numeric, floor=0.05) <= 1e-6, array_name


@pytest.mark.parametrize("name", LAYERS)
def test_backward_needs_a_forward(name: str) -> None:
    if name in ("ReLU", "Softmax", "PositionalEncoding"):
        return  # their gradient has no parameters to wait for
    with pytest.raises(InputError, match="backward without a forward"):
        LAYERS[name]().backward(X)


def test_embedding_shape_and_repeated_tokens() -> None:
    layer = Embedding(V, D, rng=rng())
    tokens = np.array([[1, 1, 4], [1, 0, 4]])
    assert layer.forward(tokens).shape == (2, 3, D)
    layer.backward(np.ones((2, 3, D)))
    np.testing.assert_array_equal(layer.grads["weight"][:5, 0], [1, 3, 0, 0, 2])


def test_attention_function() -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((B, 3, T, 4)) for i in range(3))
    out, weights, cache = scaled_dot_product_attention(q, k, v)
    assert out.shape == (B, 3, T, 4)
    np.testing.assert_allclose(weights.sum(-1), 1)
    np.testing.assert_allclose(out, weights @ v)
    grads = attend_backward(np.ones_like(out), cache)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_attention_without_heads_is_attention_with_one() -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((B, T, 4)) for i in range(3))
    mask = np.tril(np.ones((T, T), bool))
    out, weights, _ = scaled_dot_product_attention(q, k, v, mask=mask)
    headed = scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask=mask)
    assert out.shape == (B, T, 4) and weights.shape == (B, T, T)
    assert not weights[:, ~mask].any()
    np.testing.assert_array_equal(out, headed[0][:, 0])
    np.testing.assert_array_equal(weights, headed[1][:, 0])
    batched = scaled_dot_product_attention(q, k, v, mask=np.broadcast_to(mask, (B, T, T)))
    np.testing.assert_array_equal(out, batched[0])
    with pytest.raises(InputError, match=r"q, k, v have shapes \(5, 4\)"):
        scaled_dot_product_attention(q[0], k[0], v[0])


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_of_attention_alone(heads: tuple[int, ...], masked: bool) -> None:
    """With values of another width, and another length, than the queries."""
    shapes = ((B, *heads, T, 4), (B, *heads, T + 2, 4), (B, *heads, T + 2, 7))
    q, k, v = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes))
    mask = None
    if masked:
        mask = np.random.default_rng(5).random((B, T, T + 2)) < 0.5
        mask[0, 0] = False  # a query that may attend to nothing
    out, weights, cache = scaled_dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(out, weights @ v, atol=1e-12)
    dout = np.random.default_rng(4).standard_normal(out.shape)
    grads = attend_backward(dout, cache)
    again = attend_backward(dout, cache)
    for array, analytic, same in zip((q, k, v), grads, again, strict=True):
        assert analytic.shape == array.shape
        np.testing.assert_array_equal(analytic, same)
        numeric = numerical_gradient(
            lambda: float(np.vdot(scaled_dot_product_attention(q, k, v, mask=mask)[0], dout)),
            array.reshape(-1)[::7],
        )
        assert relative_error(analytic.reshape(-1)[::7], numeric, floor=0.05) <= 1e-6
    with pytest.raises(InputError, match="the gradient has shape"):
        attend_backward(dout[..., :-1], cache)


#: What a part must not accept: each would be another answer, without a word.
MISUSE: dict[str, Any] = {
    "heads of attention": lambda: MultiHeadAttention(10, 3),
    "heads of a block": lambda: TransformerBlock(10, 3, 7),
    "no heads": lambda: MultiHeadAttention(10, 0),
    "grouped heads": lambda: MultiHeadAttention(12, 4, n_kv_heads=3),
    "an id beyond": lambda: Embedding(13, 4).forward(np.array([[13]])),
    "an id below": lambda: Embedding(13, 4).forward(np.array([[3, -1]])),
    "a list of ids": lambda: Embedding(13, 4).forward([[13]]),  # type: ignore[arg-type]
    "ids of floats": lambda: Embedding(13, 4).forward(np.array([[1.0]])),
    "width of a linear": lambda: Linear(4, 3).forward(X),
    "width of a norm": lambda: LayerNorm(1).forward(X),
    "a norm of one": lambda: LayerNorm(D).forward(X[..., :1]),
    "width of attention": lambda: MultiHeadAttention(8, 2).forward(X),
    "width of a feed-forward": lambda: FeedForward(8, 2).forward(X),
    "width of a block": lambda: TransformerBlock(8, 2, 3).forward(X),
    "width of positions": lambda: PositionalEncoding(8).forward(X[..., :1]),
    "two axes": lambda: MultiHeadAttention(D, 2).forward(X[0]),
    "a context of another batch": lambda: MultiHeadAttention(D, 2).forward(X, context_BSD=X[:1]),
    "no numbers": lambda: Linear(4, 3).forward(np.array(["a"])),
    "no size": lambda: Linear(0, 3),
    "a gradient of another shape": lambda: forwarded(Linear(D, 3)).backward(X[..., :1]),
    "a gradient for one row": lambda: forwarded(LayerNorm(D)).backward(X[:1]),
    "a gradient of a block": lambda: forwarded(TransformerBlock(D, 3, F)).backward(X[:, :1]),
    "d_k": lambda: scaled_dot_product_attention(X, X[..., :3], X),
    "length of v": lambda: scaled_dot_product_attention(X, X, X[:, :3]),
    "batch of k": lambda: scaled_dot_product_attention(X, X[:1], X[:1]),
    "heads of k": lambda: scaled_dot_product_attention(
        np.ones((B, 3, T, 4)), np.ones((B, 2, T, 4)), np.ones((B, 2, T, 4))
    ),
    "a gradient of a model": lambda: answered().backward(np.ones((2, V - 1))),
    "a gradient for one sequence": lambda: answered().backward(np.ones((1, V))),
    "targets of floats": lambda: CrossEntropyLoss().forward(np.ones((2, 4)), np.array([1.0, 2.0])),
    "nothing to train": lambda: Adam(ReLU(), lr=0.1),
    "a mask of numbers": lambda: MultiHeadAttention(D, 3).forward(X, mask=np.zeros((T, T))),
}


def forwarded(layer: Any) -> Any:
    layer.forward(X)
    return layer


def answered() -> Transformer:
    model = Transformer(V, D, 3, F, 1)
    model.forward(np.zeros((2, 4), int))
    return model


@pytest.mark.parametrize("name", MISUSE)
def test_a_part_raises_what_the_model_would(name: str) -> None:
    with pytest.raises(InputError):
        MISUSE[name]()


def test_an_id_that_is_refused_leaves_no_gradient() -> None:
    layer = Embedding(V, D, rng=rng())
    with pytest.raises(InputError, match=r"token id 19 is outside the vocabulary of 19"):
        layer.forward(np.array([[1, V]]))
    with pytest.raises(InputError, match="call forward first"):
        layer.backward(np.ones((1, 2, D)))
    assert not layer.grads["weight"].any()


SQUARE = X[:, :B]  # batch = length, where padding has the shape of an order
MASKED: dict[str, Any] = {
    "function": lambda mask: scaled_dot_product_attention(SQUARE, SQUARE, SQUARE, mask=mask)[0],
    "MultiHeadAttention": lambda mask: MultiHeadAttention(D, 3, rng=rng()).forward(
        SQUARE, mask=mask
    ),
    "TransformerBlock": lambda mask: TransformerBlock(D, 3, F, rng=rng()).forward(
        SQUARE, mask=mask
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_padding_is_not_read_as_an_order(name: str) -> None:
    call, valid = MASKED[name], np.arange(B) < np.array([3, 2, 1])[:, None]
    with pytest.raises(InputError, match=r"ambiguous(.|\n)*mask\[:, None\]"):
        call(valid)
    expected = call(np.broadcast_to(valid[:, None], (B, B, B)))
    np.testing.assert_array_equal(call(valid[:, None]), expected)
    np.testing.assert_array_equal(call(valid[:, None, None]), expected)
    for bad in (valid[:2, None], valid[0], valid[:, None, None, None]):
        with pytest.raises(InputError, match="does not fit"):
            call(bad)


@pytest.mark.parametrize("name", [name for name in LAYERS if LAYERS[name]().params])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_an_optimizer_takes_any_layer_before_its_first_backward(name: str, kind: Any) -> None:
    layer = LAYERS[name]()
    optimizer, start = kind(layer, lr=0.01), {n: p.copy() for n, p in layer.params.items()}
    arrays = {n: id(grad) for n, grad in layer.grads.items()}
    for _ in range(3):
        before = {n: p.copy() for n, p in layer.params.items()}
        layer.backward(layer.forward(X) - 1.0)
        grads = {n: grad.copy() for n, grad in layer.grads.items()}
        optimizer.step()
        if kind is SGD:
            for n, param in layer.params.items():
                np.testing.assert_allclose(param, before[n] - 0.01 * grads[n])
    assert arrays == {n: id(grad) for n, grad in layer.grads.items()}
    assert all((start[n] != param).any() for n, param in layer.params.items())


def test_mask_of_multi_head_attention() -> None:
    layer = MultiHeadAttention(D, 3, rng=rng())
    layer.forward(X, mask=np.tril(np.ones((T, T), bool)))
    assert layer.weights_BNTS is not None
    assert not layer.weights_BNTS[..., ~np.tril(np.ones((T, T), bool))].any()
    layer.forward(X, mask=np.ones((B, T, T), bool))
    np.testing.assert_allclose(layer.weights_BNTS.sum(-1), 1)


def test_cross_entropy_class() -> None:
    loss, logits = CrossEntropyLoss(label_smoothing=0.1), X.copy()
    targets = np.arange(B * T).reshape(B, T) % D
    loss.forward(logits, targets)
    analytic = loss.backward()
    assert analytic.shape == logits.shape
    numeric = numerical_gradient(lambda: loss.forward(logits, targets), logits)
    assert relative_error(analytic, numeric) <= 1e-6
    assert CrossEntropyLoss().forward(np.array([[-1e4, 1e4]]), np.array([0])) == 2e4
    with pytest.raises(InputError, match="backward without a forward"):
        CrossEntropyLoss().backward()


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_layer_learns(kind: Any) -> None:
    layer, target = Linear(D, V, rng=rng()), np.random.default_rng(3).standard_normal((B, T, V))
    optimizer = kind(layer.slots(), lr=0.05)
    losses = []
    for _ in range(200):
        error = layer.forward(X) - target
        losses.append(float((error**2).mean()))
        layer.backward(error / B)
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


def test_transformer_end_to_end() -> None:
    model = Transformer.of(digits(d_model=D, n_heads=3, d_ff=F), rng=rng())
    tokens = np.random.default_rng(0).integers(0, 20, (7, 5))
    answers, loss = tokens[:, 0], CrossEntropyLoss()
    optimizer = Adam(model.model, lr=3e-3)
    losses = []
    for _ in range(40):
        logits = model.forward(tokens)
        assert logits.shape == (7, 20)
        losses.append(loss.forward(logits, answers))
        model.backward(loss.backward())
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]
    assert all(np.isfinite(grad).all() for grad in model.grads.values())


def test_sizes_make_a_transformer_and_an_optimizer_takes_it() -> None:
    model = Transformer(V, D, 3, F, 2, max_seq_len=9, rng=rng())
    same = Transformer.of(model.spec, rng=rng())
    assert all(np.array_equal(array, same.params[name]) for name, array in model.params.items())
    tokens, valid = np.zeros((2, 4), int), np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    assert model.forward(tokens, valid).shape == (2, V)
    optimizer = Adam(model)
    assert sum(slot.param.size for slot in optimizer.slots) == model.model.storage.vector.size
    with pytest.raises(InputError, match="length 5 exceeds max_seq_len 4"):
        PositionalEncoding(D, max_seq_len=4).forward(X)


def test_without_rng_first_values_are_new_each_time() -> None:
    makers = (
        lambda: Linear(D, V),
        lambda: Embedding(V, D),
        lambda: MultiHeadAttention(D, 3),
        lambda: FeedForward(D, F),
        lambda: TransformerBlock(D, 3, F),
        lambda: Transformer(V, D, 3, F, 1),
    )
    for make in makers:
        one, other = make(), make()
        assert any(not np.array_equal(one.params[n], other.params[n]) for n in one.params)
    layer = 4 * (D * D + D) + 2 * D * F + F + D + 4 * D
    assert repr(one).startswith(f"<Transformer: {2 * V * D + V + layer:,} parameters, 1 layers")
    norm = LayerNorm(D)
    assert repr(norm) == "<LayerNorm: weight (12,), bias (12,)>"
    assert norm.gamma is norm.params["weight"] and norm.beta is norm.params["bias"]
