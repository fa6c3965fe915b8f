"""The program is the computation: weights are the manifest's, taps the taps, and executed by plain
torch operations it gives what the modules give, values and gradients.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import pytest
import torch
from bench.families import CASES, FIRST, module_of
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from glassformer.adapters.load import adapt
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, build
from glassformer.nn.taps import Taps
from glassformer.spec.lacking import ANY, Runs
from glassformer.spec.manifest import stored
from glassformer.spec.model import (
    MLP,
    Dropout,
    HeadTransform,
    MaskedHead,
    ModelSpec,
    MoE,
    Rotary,
    Stack,
    SwiGLU,
    VectorHead,
    YarnScaling,
    tap_shapes,
)
from glassformer.spec.presets import PRESETS, preset
from glassformer.spec.program import (
    KINDS,
    Add,
    Attend,
    Drop,
    Embed,
    Kind,
    Linear,
    Norm,
    Program,
    Rotate,
    block_runs,
    listing,
    missing,
    program,
)
from tests.spec.interpreter import Given, run
from tests.strategies import model_specs
from tests.tiny import tiny

#: The largest difference, relative to the largest number that is compared.
LIMIT = 1e-12


def assert_equal(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Compare by name; differences are relative to the largest number of all, 1 at least."""
    scale = max([1.0, *(float(one.detach().abs().max()) for one in want.values())])
    for name, one in want.items():
        assert got[name].shape == one.shape, f"{what} {name}"
        worst = float((got[name] - one).detach().abs().max())
        assert worst <= LIMIT * scale, f"{what} {name}: {worst:.1e} of {scale:.1e}"


def batches(spec: ModelSpec) -> Iterator[tuple[str, Given]]:
    """Yield tokens alone, padded left and in the middle, and packed where that is possible."""
    length = min(7, spec.max_seq_len)
    draw = torch.Generator().manual_seed(3)

    def ids(vocab: int, columns: int = length) -> Tensor:
        return torch.randint(vocab, (3, columns), generator=draw)

    tokens = ids(spec.vocab_size)
    source = None if spec.encoder is None else ids(spec.source_vocab, length - 1)
    types = ids(spec.token_types) if spec.token_types else None
    yield "plain", Given(tokens, types=types, source=source)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, :2] = False
    valid[2, 2:4] = False
    source_valid = None
    if source is not None:
        source_valid = torch.ones_like(source, dtype=torch.bool)
        source_valid[0, 3:] = False
    yield "padded", Given(tokens, valid, None, types, source, source_valid)
    if source is None:
        segments = torch.zeros_like(tokens)
        segments[0, 3:] = 1
        segments[2, 4:] = 5
        yield "packed", Given(tokens, valid, segments, types)


def taps_of(model: Model, batch: Given) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the outputs of the modules, and every tap."""
    inputs = Inputs(
        batch.tokens,
        valid_BT=batch.valid,
        segments_BT=batch.segments,
        source_BS=batch.source,
        source_valid_BS=batch.source_valid,
        types_BT=batch.types,
    )
    taps = Taps(read="*")
    return model(inputs, taps=taps), taps.seen


def gradients_of(outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a sum of outputs, weighted by noise, to every leaf."""
    total = torch.zeros((), dtype=torch.float64)
    for number, name in enumerate(sorted(outputs)):
        noise = torch.Generator().manual_seed(number)
        y = outputs[name]
        total = total + (torch.randn(y.shape, generator=noise, dtype=y.dtype) * y).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def drawn(model: Model) -> Model:
    """Draw every parameter anew, gains and biases too, so that no softmax is saturated."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.normal_(0.0, width**-0.5, generator=generator)
    return model


def check(spec: ModelSpec) -> None:
    """Hold a spec's program to its manifest, its taps and its modules."""
    made = program(spec)
    assert set(made.weights()) == set(stored(spec))
    assert list(made.taps()) == list(tap_shapes(spec))
    model = drawn(build(spec).double())
    leaves = {name: dict(model.named_parameters())[name] for name in made.weights()}
    for kind, batch in batches(spec):
        outputs, seen = taps_of(model, batch)
        found = run(made, leaves, batch, length=spec.max_seq_len, d_model=spec.d_model)
        ours = {head: found.values[name] for head, name in made.outputs.items()}
        assert_equal(kind, found.taps, seen)
        assert_equal(kind, ours, outputs)
        wanted = gradients_of(outputs, leaves)
        assert_equal(f"{kind} gradient", gradients_of(ours, leaves), wanted)


def short(spec: ModelSpec) -> ModelSpec:
    """Return a spec with few layers and a small vocabulary."""

    def cut(stack: Stack) -> Stack:
        layers = tuple(replace(run, count=min(run.count, 2)) for run in stack.layers)
        return replace(stack, layers=layers)

    encoder = None if spec.encoder is None else cut(spec.encoder)
    vocab = min(spec.vocab_size, 53)
    return replace(spec, vocab_size=vocab, decoder=cut(spec.decoder), encoder=encoder)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset(name: str) -> None:
    check(short(preset(name)))


@pytest.mark.parametrize("family", sorted(FIRST))
def test_every_family(family: str) -> None:
    """The first config of a family of transformers, as our spec has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, which compiles parts of one by a script
        module = module_of(CASES[FIRST[family]])
    check(adapt(module).spec)


@given(spec=model_specs())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_specs(spec: ModelSpec) -> None:
    check(eased(spec))


def eased(value: Any) -> Any:
    """Return a spec whose norms have larger eps: two almost equal numbers, normalised by a small
    one again and again, would magnify rounding beyond what is compared here.
    """
    if isinstance(value, tuple):
        return tuple(eased(one) for one in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {one.name: eased(getattr(value, one.name)) for one in fields(value)}
    if "eps" in changed:
        changed["eps"] *= 1e4
    return replace(value, **changed)


def test_heads_that_no_preset_has() -> None:
    """Vectors with and without a pooler, and masked tokens behind a transform."""
    for head in (
        VectorHead(),
        VectorHead(readout="first", pooler=True),
        MaskedHead(transform=HeadTransform(activation="gelu_tanh")),
        MaskedHead(tied=False),
    ):
        check(tiny(attention={"causal": False}, heads=(head,), token_types=2))


def test_mixtures() -> None:
    """Experts chosen with and without a bias, normalized or not, with the shared expert's gate."""
    expert = SwiGLU(d_ff=7)
    for ffn in (
        MoE(n_experts=5, experts_per_token=2, expert=expert, router_bias=True),
        MoE(n_experts=3, experts_per_token=1, expert=MLP(d_ff=5), normalize=False, shared=expert),
        MoE(n_experts=4, experts_per_token=3, expert=expert, shared=MLP(d_ff=11), shared_gate=True),
    ):
        check(tiny(ffn=ffn))


# --- what is written ------------------------------------------------------------------------------


def test_every_value_is_written_once_and_before_it_is_read() -> None:
    for name in PRESETS:
        made = program(preset(name), training=True)
        written = {"tokens", "source", "types"}
        for op in made.ops:
            assert set(op.reads) <= written
            assert op.writes not in written
            written |= {op.writes} if op.writes else set()
        assert written - {"tokens", "source", "types"} == set(made.values)


def test_kinds_have_few_fields() -> None:
    """A kind with more fields than these would be two kinds."""
    assert get_args(Kind) == KINDS
    assert {kind.__name__: len(fields(kind)) for kind in KINDS if len(fields(kind)) > 7} == {}


def test_dropout_is_written_for_training_alone() -> None:
    spec = tiny(dropout=Dropout(embedding=0.1, attention=0.2, residual=0.3, ffn=0.4))
    plain, training = program(spec), program(spec, training=True)
    assert not any(isinstance(op.kind, Drop) for op in plain.ops)
    rates = [op.kind.rate for op in training.ops if isinstance(op.kind, Drop)]
    assert rates == [0.1, *[0.3, 0.4, 0.3] * spec.n_layers]
    assert {op.kind.drop for op in training.ops if isinstance(op.kind, Attend)} == {0.2}
    assert training.taps() == plain.taps()
    assert training.weights() == plain.weights()


# --- what an executor lacks -----------------------------------------------------------------------

SOME: Runs = {
    Embed: {},
    Norm: {"form": {"rms"}, "eps": ANY},
    Linear: {},
    Attend: {"before": {None}},
    Add: {},
    Rotate: {"base": ANY, "scaling": ANY},
}


def lacks(spec: ModelSpec) -> set[str]:
    return {lack.rpartition(" (")[0] for lack in missing(program(spec), SOME)}


def test_what_is_missing_is_derived() -> None:
    assert lacks(preset("qwen")) == {"Remember", "Gate"}
    assert "Norm form=layer" in lacks(preset("digits"))
    assert "Attend before=4" in lacks(preset("qwen-sliding"))
    assert "Embed scale=9.79796" in lacks(preset("gemma"))
    # A spec inside a field is declared like a kind.
    scaling = YarnScaling(factor=2.0, original_max_seq_len=8)
    scaled = replace(preset("qwen"), position=Rotary(scaling=scaling))
    assert "YarnScaling" in lacks(scaled)


def test_what_is_missing_names_its_first_place() -> None:
    assert missing(program(preset("qwen")), SOME)[0] == "Remember (blocks.0.attn)"


# --- the list as text -----------------------------------------------------------------------------


def lines(made: Program, *, every_block: bool = False) -> list[str]:
    return listing(made, every_block=every_block).splitlines()


def test_equal_blocks_are_listed_once() -> None:
    made = program(preset("qwen"))
    short_one, long_one = lines(made), lines(made, every_block=True)
    assert "    blocks.1 to 2: as blocks.0" in short_one
    assert len([line for line in long_one if "Attend" in line]) == 3
    assert len([line for line in short_one if "Attend" in line]) == 1


def test_blocks_that_differ_are_all_listed() -> None:
    spec = preset("qwen")
    first = spec.decoder.layers[0]
    other = replace(first, count=1, block=replace(first.block, placement="post"))
    mixed = replace(spec, decoder=replace(spec.decoder, layers=(first, other, first)))
    text = listing(program(mixed))
    assert "blocks.1 to 2: as blocks.0" in text
    assert "blocks.5 to 6: as blocks.4" in text
    assert len([line for line in text.splitlines() if " Attend " in line]) == 3


def test_blocks_of_other_widths_differ() -> None:
    spec = preset("qwen")
    first = spec.decoder.layers[0]
    wide = replace(first.block, ffn=SwiGLU(d_ff=2 * first.block.ffn.d_ff))
    runs = (first, replace(first, count=2, block=wide))
    mixed = replace(spec, decoder=replace(spec.decoder, layers=runs))
    assert block_runs(program(mixed)) == [
        ("blocks.0", "blocks.1", "blocks.2"),
        ("blocks.3", "blocks.4"),
    ]


def test_experts_are_listed_once() -> None:
    text = listing(program(preset("moe")))
    assert "ffn.experts.1 and on: as ffn.experts.0" in text
    assert "experts.1.up_proj" not in text
