"""The table in C beside NumPy's in float64: values, every gradient, dropout, what falls back."""

from dataclasses import replace

import numpy as np
import pytest

from glassformer.byhand.c_table import C
from glassformer.byhand.model import Model
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.pass_context import Array
from glassformer.kernels import training as c
from glassformer.kernels.threads import taking
from glassformer.spec.block import Dropout
from glassformer.spec.model import ModelSpec
from glassformer.spec.program import Gate, Op, program
from tests.byhand.witness import MODERN, OSS, PRESETS, T5, case_for, torch_twin

MODELS = PRESETS | {"t5": T5, "modern-bert": MODERN, "gpt-oss": OSS}
#: How many times NumPy's own rounding in float32 an entry may be away, and what is allowed anyhow;
#: relative to the largest of its array, or of a ten thousandth of the model's largest gradient.
UNITS, LEAST, FLOOR = 16.0, 1e-5, 1e-4


def steps_of(model: Model, spec: ModelSpec, *, segments: bool) -> tuple[float, dict[str, Array]]:
    """The loss and gradients of a batch after another one, whose memory is used again."""
    model.loss_and_grads(case_for(spec, seed=5).inputs(model), targets=case_for(spec).targets)
    case = case_for(spec, segments=segments)
    found = model.loss_and_grads(case.inputs(model), targets=case.targets, label_smoothing=0.1)
    return found.total, {name: grad.copy() for name, grad in model.grads.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("segments", [False, True])
def test_every_gradient_is_numpys(name: str, segments: bool) -> None:
    spec = MODELS[name]
    if segments and spec.encoder is not None:
        return
    weights = torch_twin(spec)[1]
    wide, narrow, ours = (
        steps_of(Model(spec, params=weights, dtype=dtype, table=table), spec, segments=segments)
        for dtype, table in ((np.float64, NUMPY), (np.float32, NUMPY), (np.float32, C))
    )
    assert abs(ours[0] - wide[0]) <= max(LEAST, UNITS * abs(narrow[0] - wide[0])) * abs(wide[0])
    largest = max(float(np.abs(grad).max()) for grad in wide[1].values())
    for key, exact in wide[1].items():
        scale = max(float(np.abs(exact).max()), FLOOR * largest)
        apart = float(np.abs(ours[1][key] - exact).max()) / scale
        rounding = float(np.abs(narrow[1][key] - exact).max()) / scale
        assert apart <= max(LEAST, UNITS * rounding), (key, apart, rounding)


@pytest.mark.parametrize(
    "shape", [(3, 5, 7), (301, 257, 131), (131, 67, 613), (1, 9, 1), (0, 3, 5)]
)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_in_chunks_is_the_product(
    shape: tuple[int, int, int], turned: tuple[bool, bool]
) -> None:
    """Of matrices as they are, transposed, and columns of wider ones; written, or added."""
    rng, (M, K, N) = np.random.default_rng(2), shape
    wide_a = rng.normal(size=(K, M + 4) if turned[0] else (M, K + 4)).astype(np.float32)
    wide_b = rng.normal(size=(N, K + 2) if turned[1] else (K, N + 2)).astype(np.float32)
    a = wide_a[:, 3 : 3 + M].T if turned[0] else wide_a[:, 3 : 3 + K]
    b = wide_b[:, 1 : 1 + K].T if turned[1] else wide_b[:, 1 : 1 + N]
    exact = a.astype(np.float64) @ b.astype(np.float64)
    found = []
    for threads in (1, 2):
        room = np.full((M, N + 6), 7.0, np.float32)
        with taking(threads):
            c.product(a, b, out=room[:, 2 : 2 + N])
            once = room.copy()
            c.product(a, b, out=room[:, 2 : 2 + N], add=True)
        found.append(room.tobytes())
        for got, times in ((once, 1), (room, 2)):
            np.testing.assert_allclose(got[:, 2 : 2 + N], times * exact, rtol=1e-4, atol=1e-3)
            assert (got[:, :2] == 7).all() and (got[:, 2 + N :] == 7).all()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["budget-lm", "seq2seq", "qwen", "t5"])
def test_threads_change_no_bit_of_a_step(name: str) -> None:
    spec, found = MODELS[name], []
    weights = torch_twin(spec)[1]
    for threads in (1, 2):
        with taking(threads):
            model = Model(spec, params=weights, dtype=np.float32, table=C)
            found.append(steps_of(model, spec, segments=False))
    assert found[0][0] == found[1][0]
    assert all(np.array_equal(grad, found[1][1][key]) for key, grad in found[0][1].items())


@pytest.mark.parametrize("name", ["budget-lm", "digits", "seq2seq-pre", "gemma"])
def test_what_was_dropped_is_dropped_backward_too(name: str) -> None:
    """The slope along a direction, by two losses on either side with the same dropout."""
    spec = MODELS[name]
    drop = Dropout(embedding=0.2, attention=0.3, residual=0.2, ffn=0.3)
    stacks = {"decoder": replace(spec.decoder, dropout=drop)}
    if spec.encoder is not None:
        stacks["encoder"] = replace(spec.encoder, dropout=drop)
    spec = replace(spec, **stacks)
    case, weights = case_for(spec), torch_twin(spec)[1]
    model = Model(spec, params=weights, dtype=np.float32, table=C)

    def loss() -> float:
        rng = np.random.default_rng(3)
        return model.loss_and_grads(case.inputs(model), targets=case.targets, rng=rng).total

    plain = model.loss(case.inputs(model), targets=case.targets).total
    first = loss()
    assert first == loss() != plain
    grad, vector = model.grad_vector.copy(), model.storage.vector
    size = 3e-3 / float(np.linalg.norm(grad))
    start = vector.copy()
    vector[...] = start + size * grad
    above = loss()
    vector[...] = start - size * grad
    slope = (above - loss()) / (2 * size)
    assert slope == pytest.approx(float(grad @ grad), rel=2e-2)


def served(made: ModelSpec) -> set[str]:
    """The kinds of a program that NumPy's table serves in C's."""
    numpys = set(map(id, NUMPY.operations))
    ops: tuple[Op, ...] = program(made, training=True).ops
    return {type(op.kind).__name__ for op in ops if id(C.serving(op)) in numpys}


def test_what_is_not_in_c_falls_back_by_what_is_declared() -> None:
    assert served(PRESETS["budget-lm"]) == {"AddRows", "Remember"}
    assert served(PRESETS["qwen"]) == {"Remember"}
    assert served(PRESETS["moe"]) == {"Remember", "Route", "Gather", "Scatter", "Gate"}
    # A clamped gate is NumPy's, a plain one is C's.
    gates = [op for op in program(OSS).ops if isinstance(op.kind, Gate)]
    assert C.serving(gates[0]) in NUMPY.operations
    assert not C.lacking(program(T5, training=True))


def test_taps_and_cached_steps_are_numpys_too() -> None:
    spec = PRESETS["qwen"]
    weights, case = torch_twin(spec)[1], case_for(spec)
    taps: list[dict[str, Array]] = [{}, {}]
    for found, table in zip(taps, (NUMPY, C), strict=True):
        model = Model(spec, params=weights, dtype=np.float32, table=table)
        model.forward(case.tokens, valid_BT=case.valid, taps=found)
    assert taps[0].keys() == taps[1].keys()
    for key, want in taps[0].items():
        finite = np.isfinite(want)
        gap = np.abs(np.where(finite, taps[1][key] - np.where(finite, want, 0), 0)).max()
        assert gap <= 2e-5 * max(1.0, float(np.abs(want[finite]).max())), key
