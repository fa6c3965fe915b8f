"""Whole models: every gradient and every tap against autograd and central differences."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from glassformer.byhand.gradient_check import check_directions, relative_error
from glassformer.byhand.model import Model
from glassformer.models.inputs import Inputs
from glassformer.nn.taps import Taps
from glassformer.spec.block import Placement
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import manifest
from glassformer.spec.model import (
    MLP,
    ALiBi,
    Attention,
    Block,
    FactorizedEmbedding,
    HeadTransform,
    LayerNorm,
    Layers,
    Learned,
    MaskedHead,
    ModelSpec,
    NoPosition,
    Position,
    RelativeBias,
    RMSNorm,
    Sinusoidal,
    Stack,
    VectorHead,
)
from glassformer.spec.presets import PRESETS as ALL_PRESETS
from tests.byhand.witness import (
    MODERN,
    OSS,
    PRESETS,
    T5,
    case_for,
    torch_gradients,
    torch_loss,
    torch_twin,
)
from tests.planting import Call, Compare, Name, Unary, catches
from tests.strategies import model_specs

PARITY = 1e-10  # worst seen 2.3e-11, where the gradient is 1e-5 of the largest
DIFFERENCES = 1e-6  # worst seen 2.5e-7
NOTHING = 1e-5  # of the model's largest gradient: below it one is compared absolutely, as zero

every_preset = pytest.mark.parametrize("spec", PRESETS.values(), ids=PRESETS.keys())


def test_no_preset_is_missing() -> None:
    assert set(PRESETS) == set(ALL_PRESETS)


def assert_same_gradients(spec: ModelSpec, *, segments: bool = False) -> None:
    twin, weights = torch_twin(spec)
    model, case = Model(spec, params=weights), case_for(spec, segments=segments)
    head_weights = {name: 0.3 + i for i, name in enumerate(spec.head_names())}
    want = torch_loss(twin, case, head_weights=head_weights)
    want.backward()
    found = model.loss_and_grads(
        case.inputs(model), targets=case.targets, label_smoothing=0.1, head_weights=head_weights
    )
    assert abs(found.total - float(want.detach())) <= 1e-11 * max(1.0, abs(found.total))
    wanted = torch_gradients(twin, spec)
    floor = NOTHING * max(np.abs(expected).max() for expected in wanted.values())
    for name, expected in wanted.items():
        error = relative_error(model.grads[name], expected, floor=floor)
        assert error <= PARITY, f"{name}: {error:.1e}"


@catches(
    "the second gradient of a value is lost",
    "byhand.interpreter:Plan.backward",
    Compare("is not", nth=2),
    to="False",
    case="core",
)
@catches(
    "a gradient that two values share is overwritten",
    "byhand.interpreter:_Backward._step",
    Unary("not"),
    to="True",
    case="gemma",
)
@catches(
    "mean over rows instead of over what counts",
    "byhand.loss:rows_that_count",
    Call("sum"),
    to="float(len(weights_M))",
    case="core",
)
@catches(
    "missing transpose",
    "byhand.linear:linear_products",
    Name("weight_OI"),
    to="{it}.T if len({it}) == len({it}.T) else {it}",
    case="core",
)
@every_preset
def test_every_gradient_of_a_preset_is_autograds(spec: ModelSpec) -> None:
    assert_same_gradients(spec)


@pytest.mark.parametrize("name", ["budget-lm", "qwen", "fsm-probe", "qwen-sliding", "alibi-lm"])
def test_packed_segments(name: str) -> None:
    assert_same_gradients(PRESETS[name], segments=True)


def test_linear_biases_in_an_encoder_and_decoder() -> None:
    """Both ways in the encoder, none in cross-attention, both sides padded."""
    assert_same_gradients(replace(PRESETS["seq2seq"], position=ALiBi(scaled=True)))


def test_learned_biases_by_distance() -> None:
    """T5's parts; a decoder alone, packed, with grouped heads and a window."""
    assert_same_gradients(T5)
    packed = replace(PRESETS["qwen-sliding"], position=RelativeBias(buckets=6, max_distance=4))
    assert_same_gradients(packed, segments=True)


def in_blocks(spec: ModelSpec, attention: dict[str, object], **changes: object) -> ModelSpec:
    """Return a decoder whose blocks differ in these fields."""
    runs = tuple(
        replace(
            run,
            block=replace(
                run.block, attention=replace(run.block.attention, **attention), **changes
            ),
        )
        for run in spec.decoder.layers
    )
    return replace(spec, decoder=replace(spec.decoder, layers=runs))


#: A bias for queries and values only, and a residual factor.
NO_KEY = in_blocks(PRESETS["budget-lm"], {"bias": "no_key"}, residual_scale=0.3)


def test_biases_of_some_projections() -> None:
    assert_same_gradients(NO_KEY)


@pytest.mark.parametrize("placement", get_args(Placement))
def test_every_placement_of_the_norms(placement: Placement) -> None:
    """Also the second step's gradients: nothing of the first one is left."""
    spec = in_blocks(PRESETS["budget-lm"], {}, placement=placement)
    assert_same_gradients(spec)
    assert_gradients_stand_alone(spec)


@pytest.mark.parametrize(
    "spec", [*PRESETS.values(), T5, OSS], ids=[*PRESETS.keys(), "t5", "gpt-oss"]
)
def test_a_second_step_starts_from_nothing(spec: ModelSpec) -> None:
    assert_gradients_stand_alone(spec)


def assert_gradients_stand_alone(spec: ModelSpec) -> None:
    model, case = Model(spec, rng=np.random.default_rng(4)), case_for(spec)
    inputs = case.inputs(model)
    model.loss_and_grads(inputs, targets=case.targets)
    first = model.grad_vector.copy()
    model.grad_vector.fill(7.0)
    model.loss_and_grads(inputs, targets=case.targets)
    np.testing.assert_array_equal(model.grad_vector, first)


def test_a_head_without_targets_has_no_gradient() -> None:
    """The others' gradients are those of the sum of their losses alone."""
    spec = PRESETS["fsm-probe"]
    model, case = Model(spec, rng=np.random.default_rng(4)), case_for(spec)
    inputs, heads = case.inputs(model), list(case.targets)
    model.loss_and_grads(inputs, targets=case.targets)
    weights = {head: float(head == heads[-1]) for head in heads}
    model.loss_and_grads(inputs, targets=case.targets, head_weights=weights)
    want = model.grad_vector.copy()
    model.grad_vector.fill(7.0)
    model.loss_and_grads(inputs, targets={heads[-1]: case.targets[heads[-1]]})
    np.testing.assert_allclose(model.grad_vector, want, atol=1e-14)


@catches(
    "a value is overwritten that a cache refers to",
    "byhand.interpreter:_overwrite",
    Compare("not in"),
    to="True",
)
@pytest.mark.parametrize("spec", [MODERN, OSS], ids=["modernbert", "gpt-oss"])
def test_parts_of_newer_families(spec: ModelSpec) -> None:
    assert_same_gradients(spec)


#: BERT's parts: token types, a norm of the embedding, rows before position 0, norms after, a
#: transform before the logits, BERT's pooled vector.
ENCODER = ModelSpec(
    vocab_size=29,
    d_model=24,
    max_seq_len=16,
    token_types=3,
    position=Learned(offset=2),
    decoder=Stack(
        layers=(
            Layers(
                count=2,
                block=Block(
                    attention=Attention(n_heads=3, bias="all", causal=False),
                    ffn=MLP(d_ff=20),
                    norm=LayerNorm(),
                    placement="post",
                ),
            ),
        ),
        embed_norm=LayerNorm(),
    ),
    heads=(MaskedHead(transform=HeadTransform()), VectorHead(readout="first", pooler=True)),
)


@pytest.mark.parametrize(
    "spec",
    [
        ENCODER,
        replace(ENCODER, heads=(VectorHead(),), embedding=FactorizedEmbedding(rank=7)),
        replace(
            ENCODER,
            token_types=0,
            position=NoPosition(),
            heads=(
                MaskedHead(
                    tied=False,
                    bias=False,
                    transform=HeadTransform(activation="relu", norm=RMSNorm(), bias=False),
                ),
            ),
        ),
    ],
    ids=["bert", "mean", "plain"],
)
def test_an_encoder_s_parts(spec: ModelSpec) -> None:
    assert_same_gradients(spec)
    twin, weights = torch_twin(spec)
    model, case = Model(spec, params=weights), case_for(spec)
    theirs = Taps(read="*", gradients=True)
    torch_loss(twin, case, taps=theirs).backward()
    taps: dict[str, np.ndarray] = {}
    model.loss_and_grads(case.inputs(model), targets=case.targets, label_smoothing=0.1, taps=taps)
    assert set(taps) == set(theirs.seen)


@pytest.mark.parametrize(
    "position",
    [Sinusoidal(form="halves"), Sinusoidal(form="fairseq", offset=2), Learned(offset=2)],
    ids=["halves", "fairseq", "learned"],
)
def test_a_translator_s_parts(position: Position) -> None:
    """Marian's, M2M-100's and BART's positions, a norm of both embeddings, SiLU."""
    plain = PRESETS["seq2seq"]
    assert plain.encoder is not None

    def changed(stack: Stack) -> Stack:
        runs = tuple(
            replace(run, block=replace(run.block, ffn=MLP(d_ff=17, activation="silu")))
            for run in stack.layers
        )
        return replace(stack, layers=runs, embed_norm=LayerNorm())

    spec = replace(
        plain, position=position, encoder=changed(plain.encoder), decoder=changed(plain.decoder)
    )
    assert_same_gradients(spec)


def test_token_types_reach_both_engines() -> None:
    twin, weights = torch_twin(ENCODER)
    model, rng = Model(ENCODER, params=weights), np.random.default_rng(0)
    tokens, types = rng.integers(0, 29, (2, 7)), rng.integers(0, 3, (2, 7))
    ours = model.forward(tokens, types_BT=types)
    inputs = Inputs(torch.from_numpy(tokens), types_BT=torch.from_numpy(types))
    theirs = twin(inputs)
    for head, logits in ours.items():
        assert relative_error(logits, theirs[head].detach().numpy(), floor=1e-3) <= PARITY
    plain = model.forward(tokens)["masked"]
    assert np.abs(plain - ours["masked"]).max() > 1e-3
    with pytest.raises(InputError, match="token types"):
        model.forward(tokens, types_BT=types + 1)
    with pytest.raises(InputError, match="outside the vocabulary of 3"):
        twin(Inputs(torch.from_numpy(tokens), types_BT=torch.from_numpy(types + 1)))


@settings(max_examples=60)
@given(spec=model_specs())
def test_any_spec_has_autograds_gradients(spec: ModelSpec) -> None:
    assert_same_gradients(spec)


@every_preset
def test_every_tap_and_its_gradient(spec: ModelSpec) -> None:
    twin, weights = torch_twin(spec)
    model, case = Model(spec, params=weights), case_for(spec)
    theirs = Taps(read="*", gradients=True)
    torch_loss(twin, case, taps=theirs).backward()
    taps: dict[str, np.ndarray] = {}
    grads: dict[str, np.ndarray] = {}
    model.loss_and_grads(
        case.inputs(model), targets=case.targets, label_smoothing=0.1, taps=taps, tap_grads=grads
    )
    assert set(taps) == set(theirs.seen)
    assert set(grads) == set(theirs.gradients())
    for name, tensor in theirs.seen.items():
        assert relative_error(taps[name], tensor.detach().numpy(), floor=1e-3) <= PARITY, name
        assert tensor.grad is not None
        assert relative_error(grads[name], tensor.grad.numpy(), floor=1e-5) <= PARITY, name


@every_preset
def test_gradients_are_slopes(spec: ModelSpec) -> None:
    model, case = Model(spec, rng=np.random.default_rng(4)), case_for(spec)
    inputs = case.inputs(model)
    model.loss_and_grads(inputs, targets=case.targets, label_smoothing=0.1)
    checks = check_directions(
        lambda: model.loss(inputs, targets=case.targets, label_smoothing=0.1).total,
        model.params,
        model.grads,
        rng=np.random.default_rng(6),
        directions=1,
    )
    worst = max(checks, key=lambda check: check.error)
    assert worst.error <= DIFFERENCES, worst


def test_gradients_are_slopes_with_dropout() -> None:
    """The same generator state draws the same masks, so the dropped loss is a function too."""
    spec = PRESETS["seq2seq"]
    model, case = Model(spec, rng=np.random.default_rng(4)), case_for(spec)
    inputs = case.inputs(model)

    def loss() -> float:
        rng = np.random.default_rng(11)
        return model.loss_and_grads(inputs, targets=case.targets, rng=rng).total

    dropped = loss()
    assert abs(dropped - model.loss(inputs, targets=case.targets).total) > 1e-3
    grads = {name: grad.copy() for name, grad in model.grads.items()}
    checks = check_directions(loss, model.params, grads, rng=np.random.default_rng(6), directions=1)
    worst = max(checks, key=lambda check: check.error)
    assert worst.error <= DIFFERENCES, worst


def test_known_zero_gradients_are_the_manifests() -> None:
    spec = PRESETS["core"]
    model, case = Model(spec, rng=np.random.default_rng(4)), case_for(spec)
    model.loss_and_grads(case.inputs(model), targets=case.targets)
    for parameter in manifest(spec):
        size = np.abs(model.grads[parameter.name]).max()
        assert (size < 1e-14) == bool(parameter.zero_gradient), parameter.name


@catches(
    "gradients of the last batch left standing",
    "byhand.operations:_zeroed",
    Unary("not"),
    to="False",
    case="core",
)
@pytest.mark.parametrize("name", ["fsm-factorized", "core"])
def test_accumulation_is_the_sum(name: str) -> None:
    spec = PRESETS[name]
    model = Model(spec, rng=np.random.default_rng(4))
    cases = [case_for(spec, seed=seed) for seed in (0, 1)]
    apart = []
    for case in cases:
        model.loss_and_grads(case.inputs(model), targets=case.targets, scale=0.5)
        apart.append(model.grad_vector.copy())
    for case, accumulate in zip(cases, (False, True), strict=True):
        model.loss_and_grads(
            case.inputs(model), targets=case.targets, scale=0.5, accumulate=accumulate
        )
    np.testing.assert_allclose(model.grad_vector, apart[0] + apart[1], atol=1e-15)


def test_weights_travel_both_ways_bit_for_bit() -> None:
    spec = PRESETS["qwen"]
    twin, weights = torch_twin(spec)
    model = Model(spec, params=weights)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            np.testing.assert_array_equal(model.params[name], parameter.numpy())
    single = Model(spec, rng=np.random.default_rng(0), dtype=np.float32)
    again = Model(spec, params=single.params, dtype=np.float32)
    assert again.storage.vector.tobytes() == single.storage.vector.tobytes()


def test_float32_is_float64_rounded() -> None:
    for name in ("digits", "qwen", "seq2seq-pre"):
        spec = PRESETS[name]
        wide = Model(spec, rng=np.random.default_rng(2))
        narrow = Model(spec, params=wide.params, dtype=np.float32)
        case = case_for(spec)
        for model in (wide, narrow):
            model.loss_and_grads(case.inputs(model), targets=case.targets)
        error = relative_error(narrow.grad_vector, wide.grad_vector)
        assert narrow.grad_vector.dtype == np.float32
        assert error <= 1e-5, error  # worst seen 9e-7
