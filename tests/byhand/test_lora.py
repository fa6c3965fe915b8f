"""LoRA and frozen parameters by hand: torch's values and gradients, central differences, shapes."""

from dataclasses import replace

import numpy as np
import pytest

from glassformer.byhand.c_table import C
from glassformer.byhand.model import Model
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.pass_context import Array
from glassformer.models.weights import load_weights
from glassformer.nn.lora import apply_lora, lora_parameters
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import LoRA, lora_manifest, lora_targets
from tests.byhand.witness import MODERN, OSS, PRESETS, T5, case_for, torch_loss, torch_twin

MODELS = PRESETS | {"t5": T5, "modern-bert": MODERN, "gpt-oss": OSS}
EVERY = LoRA(rank=2, alpha=5.0, targets=("attention", "ffn"))


def few(spec: ModelSpec) -> LoRA:
    """A correction of queries and one projection of the feed-forward alone: little is wanted."""
    names = {name.rpartition(".")[2] for name in lora_targets(spec, EVERY)}
    return replace(EVERY, targets=("q_proj", "down_proj") if "down_proj" in names else ("q_proj",))


def factors_of(spec: ModelSpec, lora: LoRA) -> dict[str, Array]:
    """Both factors of every target, neither of them zero."""
    rng = np.random.default_rng(7)
    return {name: rng.normal(0, 0.3, p.shape) for name, p in lora_manifest(spec, lora).items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("choose", [lambda spec: EVERY, few], ids=["all", "few"])
def test_every_factors_gradient_is_torchs(name, choose):
    spec = MODELS[name]
    lora, (twin, weights), case = choose(spec), torch_twin(spec), case_for(spec)
    factors = factors_of(spec, lora)
    layers = apply_lora(twin, lora)
    load_weights(twin, factors, rules=lora_manifest(spec, lora))
    total = torch_loss(twin, case, label_smoothing=0.0)
    total.backward()
    model = Model(spec, params=weights | factors, lora=lora)
    found = model.loss_and_grads(case.inputs(model), targets=case.targets)
    assert found.total == pytest.approx(total.item(), rel=1e-12)
    assert set(model.grads) == set(factors) and len(factors) == 2 * len(layers)
    for key, parameter in lora_parameters(twin).items():
        theirs = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        scale = max(1e-3, float(np.abs(theirs).max()))
        assert np.abs(model.grads[key] - theirs).max() <= 1e-10 * scale, key


@pytest.mark.parametrize("name", ["qwen", "seq2seq-pre", "t5"])  # none has a kink
def test_every_factors_gradient_is_the_slope_of_the_loss(name):
    spec, case = MODELS[name], case_for(MODELS[name])
    model = Model(spec, params=torch_twin(spec)[1] | factors_of(spec, EVERY), lora=EVERY)

    def loss() -> float:
        return model.loss_and_grads(case.inputs(model), targets=case.targets).total

    loss()
    grads = {key: grad.copy() for key, grad in model.grads.items()}
    rng = np.random.default_rng(1)
    for key, grad in grads.items():
        held, way = model.params[key], rng.normal(size=grad.shape)
        start, slopes = held.copy(), []
        for size in (2e-4, 1e-4):
            either = []
            for sign in (size, -size):
                held[...] = start + sign * way
                either.append(loss())
            slopes.append((either[0] - either[1]) / (2 * size))
        held[...] = start
        slope = (4 * slopes[1] - slopes[0]) / 3  # without the error in size^2
        scale = max(1.0, float(np.linalg.norm(grad) * np.linalg.norm(way)))
        assert abs(slope - float((grad * way).sum())) <= 1e-10 * scale, key


@pytest.mark.parametrize("name", MODELS)
def test_what_trains_alone_has_the_gradients_that_it_has_in_company(name):
    """Frozen parameters change no number of the others, in either table."""
    spec, case = MODELS[name], case_for(MODELS[name])
    weights = torch_twin(spec)[1]
    names = sorted(stored(spec))
    for table, dtype in ((NUMPY, np.float64), (C, np.float32)):
        every = Model(spec, params=weights, dtype=dtype, table=table)
        every.loss_and_grads(case.inputs(every), targets=case.targets)
        scale = max(float(np.abs(grad).max()) for grad in every.grads.values())
        for part in (names[::2], names[1::3], names[:1], names[-1:]):
            some = Model(spec, params=weights, dtype=dtype, table=table, trained=part)
            some.loss_and_grads(case.inputs(some), targets=case.targets)
            assert set(some.grads) == set(part)
            for key in part:
                apart = float(np.abs(some.grads[key] - every.grads[key]).max())
                assert apart <= (1e-12 if table is NUMPY else 1e-5) * scale, (table.name, key)


@pytest.mark.parametrize("name", MODELS)
def test_in_c_factors_have_numpys_gradients(name):
    spec, case = MODELS[name], case_for(MODELS[name])
    weights, found = torch_twin(spec)[1] | factors_of(spec, EVERY), []
    for table, dtype in ((NUMPY, np.float64), (C, np.float32)):
        model = Model(spec, params=weights, dtype=dtype, table=table, lora=EVERY)
        total = model.loss_and_grads(case.inputs(model), targets=case.targets).total
        found.append((total, model.grad_vector.astype(np.float64)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    scale = float(np.abs(found[0][1]).max())
    assert float(np.abs(found[1][1] - found[0][1]).max()) <= 2e-5 * scale


@pytest.mark.parametrize("table", [NUMPY, C], ids=["numpy", "c"])
def test_a_dropped_input_of_a_correction_is_dropped_backward_too(table):
    lora, spec = replace(EVERY, dropout=0.4), MODELS["qwen"]
    case, dtype = case_for(spec), np.float64 if table is NUMPY else np.float32
    weights = torch_twin(spec)[1] | factors_of(spec, lora)
    model = Model(spec, params=weights, dtype=dtype, table=table, lora=lora)

    def loss() -> float:
        rng = np.random.default_rng(3)
        return model.loss_and_grads(case.inputs(model), targets=case.targets, rng=rng).total

    assert loss() == loss() != model.loss(case.inputs(model), targets=case.targets).total
    grad, vector = model.grad_vector.copy(), model.storage.vector[: model.storage.n_trained]
    size, start = 3e-3 / float(np.linalg.norm(grad)), vector.copy()
    vector[...] = start + size * grad
    above = loss()
    vector[...] = start - size * grad
    assert (above - loss()) / (2 * size) == pytest.approx(float(grad @ grad), rel=2e-2)


def test_a_fresh_correction_changes_nothing_and_has_the_shapes_of_its_manifest():
    """17, 11 and 13 wide: no two sizes are alike."""
    spec = replace(PRESETS["qwen"], d_model=13)
    lora, case = replace(EVERY, rank=3), case_for(spec)
    plain = Model(spec, rng=np.random.default_rng(2))
    model = Model(spec, params=plain.params, rng=np.random.default_rng(3), lora=lora)
    rules = lora_manifest(spec, lora)
    assert {key: grad.shape for key, grad in model.grads.items()} == {
        key: rule.shape for key, rule in rules.items()
    }
    assert model.storage.n_trained == sum(rule.size for rule in rules.values())
    ours, theirs = (m.loss(case.inputs(m), targets=case.targets).total for m in (model, plain))
    assert ours == theirs
    for key, rule in rules.items():
        assert model.params[key].any() == ("lora_A" in key), rule


def test_queries_keys_and_values_are_one_product_with_their_corrections():
    spec = PRESETS["qwen"]
    model = Model(spec, lora=EVERY)
    joined = [len(step.columns) for step in model.plan.body if step.columns]
    assert (
        joined == [3, 3, 2, 2] * spec.n_layers
    )  # frozen weights, then the factors that read the same
    drops = Model(spec, lora=replace(EVERY, dropout=0.1))._planned(training=True)
    assert [len(step.columns) for step in drops.body if step.columns] == [3, 2] * spec.n_layers
