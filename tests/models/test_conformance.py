"""For every spec: the module holds what the manifest says, and the taps that the names say."""

import pytest
import torch
from hypothesis import given, settings

from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.nn.taps import Taps
from glassformer.spec.manifest import count_parameters, manifest
from glassformer.spec.model import (
    FactorizedEmbedding,
    ModelSpec,
    NextHead,
    PlainEmbedding,
    tap_shapes,
)
from glassformer.spec.presets import PRESETS, preset
from tests.strategies import model_specs
from tests.tiny import VOCAB, built, noise, tiny, token_ids

B, T, S = 2, 5, 3


def inputs_for(spec: ModelSpec) -> Inputs:
    source = None if spec.encoder is None else token_ids(B, S, vocab=spec.source_vocab, seed=2)
    return Inputs(token_ids(B, T, vocab=spec.vocab_size), source_BS=source)


@given(model_specs())
def test_parameters_are_the_manifest_in_its_order(spec):
    model = build(spec, device="meta")
    owned = [(p.name, p.shape) for p in manifest(spec) if p.tied_to is None]
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == owned
    assert sum(p.numel() for p in model.parameters()) == count_parameters(spec)
    assert model.state_dict().keys() >= {name for name, _ in owned}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_conform(name):
    spec = preset(name)
    model = build(spec, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count_parameters(spec)


@given(model_specs())
def test_tables_are_no_state(spec):
    model = build(spec, device="meta")
    parameters = {id(p) for p in model.parameters()}
    state = model.state_dict(keep_vars=True)
    assert all(id(tensor) in parameters for tensor in state.values())


def sizes_at(name, spec):
    """What the letters mean at this tap."""
    _prefix, _, rest = name.partition("blocks.")
    encoding = name.startswith("encoder.")
    sizes = {"B": B, "T": S if encoding else T, "D": spec.d_model}
    sizes["S"] = sizes["T"]
    if rest:
        stack = spec.encoder if encoding else spec.decoder
        block = list(stack.blocks())[int(rest.split(".")[0])]
        crossing = ".cross." in name
        attention = block.cross if crossing else block.attention
        sizes |= {
            "N": attention.n_heads,
            "K": attention.kv_heads,
            "H": attention.head_width(spec.d_model),
            "F": block.ffn.d_ff,
        }
        if crossing:
            sizes["S"] = S
    if name.startswith("logits."):
        sizes["V"] = spec.head_size(name.removeprefix("logits."))
    return sizes


@given(model_specs())
@settings(max_examples=40)
def test_every_named_tap_is_seen_in_order_with_its_shape(spec):
    model, taps = build(spec), Taps(read="*")
    with torch.no_grad():
        model(inputs_for(spec), taps=taps)
    letters = tap_shapes(spec)
    assert list(taps.seen) == list(letters)
    for name, x in taps.seen.items():
        sizes = sizes_at(name, spec)
        assert tuple(x.shape) == tuple(sizes[letter] for letter in letters[name]), name


@given(model_specs())
@settings(max_examples=40)
def test_explicit_and_fused_agree_for_every_spec(spec):
    model = built(spec)
    with torch.no_grad():
        fused = model(inputs_for(spec))
        explicit = model(inputs_for(spec), taps=Taps(read="*"))
    assert fused.keys() == explicit.keys() == set(spec.head_names())
    for head, logits in fused.items():
        assert logits.isfinite().all()
        scale = max(1.0, float(logits.abs().max()))
        torch.testing.assert_close(explicit[head], logits, rtol=0, atol=1e-11 * scale)


# --- tying --------------------------------------------------------------------------------------


def gradient_reaches(model, inputs):
    loss = sum(logits.square().sum() for logits in model(inputs).values())
    loss.backward()


def test_a_tied_head_is_the_embedding():
    spec = tiny(heads=(NextHead(tied=True, bias=True),))
    model = built(spec)
    assert [n for n, _ in model.heads.named_parameters()] == ["next.bias"]
    assert model.output_embedding().weight.data_ptr() == model.embed.weight.data_ptr()
    tokens = token_ids(B, T)
    x = model.hidden(model.inputs(tokens))
    want = x @ model.embed.weight.T + model.heads["next"].bias
    torch.testing.assert_close(model(tokens)["next"], want, rtol=0, atol=1e-12)
    before = model(tokens)["next"]
    with torch.no_grad():
        model.embed.weight[VOCAB - 1] += 1.0  # a token that the input may not even hold
    assert not torch.equal(model(tokens)["next"][..., VOCAB - 1], before[..., VOCAB - 1])


def test_a_tied_factorized_head_shares_both_factors():
    model = built(tiny(embedding=FactorizedEmbedding(rank=5), heads=(NextHead(tied=True),)))
    assert not list(model.heads.parameters())
    hidden = noise(B, T, model.spec.d_model)
    dense = model.embed.u @ model.embed.v
    torch.testing.assert_close(model.logits(hidden), hidden @ dense.T, rtol=0, atol=1e-12)
    model.logits(hidden).sum().backward()
    assert model.embed.u.grad.abs().max() > 0
    assert model.embed.v.grad.abs().max() > 0


@pytest.mark.parametrize("embedding", [PlainEmbedding(), FactorizedEmbedding(rank=5, l1=0.5)])
def test_source_and_target_share_one_table(embedding):
    spec = tiny(
        encoder=True, share_embedding=True, embedding=embedding, heads=(NextHead(tied=True),)
    )
    model = built(spec)
    assert model.decoder.embed is model.encoder.embed
    assert model.output_embedding() is model.encoder.embed
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith("decoder.embed") for name in names)
    if isinstance(embedding, FactorizedEmbedding):
        once = 0.5 * model.encoder.embed.u.abs().sum()
        torch.testing.assert_close(model.penalty(), once, rtol=0, atol=1e-12)


def test_untied_tables_are_apart():
    model = built(tiny(encoder=True, source_vocab_size=5))
    assert model.encoder.embed.weight.shape[0] == 5
    assert model.decoder.embed.weight.shape[0] == VOCAB
    gradient_reaches(model, Inputs(token_ids(B, T), source_BS=token_ids(B, S, vocab=5)))
    assert model.heads["next"].weight.data_ptr() != model.decoder.embed.weight.data_ptr()


def test_the_penalty_is_each_tables_l1():
    model = built(tiny(encoder=True, embedding=FactorizedEmbedding(rank=3, l1=0.25)))
    tables = (model.encoder.embed.u, model.decoder.embed.u)
    want = 0.25 * sum(u.abs().sum() for u in tables)
    torch.testing.assert_close(model.penalty(), want, rtol=0, atol=1e-12)
    assert built(tiny()).penalty().item() == 0.0


# --- gradients ----------------------------------------------------------------------------------


@given(model_specs())
@settings(max_examples=25)
def test_what_theory_calls_zero_is_zero_and_everything_is_finite(spec):
    model = built(spec).train(False)
    loss = sum((x * noise(*x.shape, seed=4)).sum() for x in model(inputs_for(spec)).values())
    loss.backward()
    own = dict(model.named_parameters())
    for parameter in manifest(spec):
        if parameter.tied_to is None:
            grad = own[parameter.name].grad
            assert grad is not None, parameter.name
            assert grad.isfinite().all(), parameter.name
            if parameter.zero_gradient:
                whole = own[parameter.name.replace(".bias", ".weight")].grad
                assert grad.abs().max() <= 1e-10 * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_every_other_gradient_is_alive(encoder, placement):
    spec = tiny(encoder=encoder, placement=placement, layers=3)
    model = built(spec)
    for (x,) in [model(inputs_for(spec)).values()]:
        (x * noise(*x.shape, seed=4)).sum().backward()
    own = dict(model.named_parameters())
    dead = {name for name, p in own.items() if p.grad.abs().max() < 1e-9}
    assert dead == {p.name for p in manifest(spec) if p.zero_gradient}
