"""Cached = uncached: both caches, every position, padded on either side, in chunks, with beams."""

import pytest
import torch

from glassformer.models.inputs import Inputs
from glassformer.nn.cache import FixedCache, GrowingCache
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    ALiBi,
    AnswerHead,
    Clamp,
    Learned,
    NoPosition,
    RelativeBias,
    RMSNorm,
    Rotary,
    Sinusoidal,
    SwiGLU,
)
from tests.tiny import VOCAB, B, S, T, built, tiny, token_ids

SPECS = {
    "none": tiny(position=NoPosition()),
    "sinusoidal": tiny(position=Sinusoidal(), placement="post"),
    "learned": tiny(position=Learned()),
    "rotary": tiny(
        position=Rotary(), attention={"n_heads": 4, "n_kv_heads": 2, "qk_norm": RMSNorm()}
    ),
    "window": tiny(position=Rotary(), attention={"window": 3}),
    "alibi": tiny(position=ALiBi(), attention={"n_heads": 6, "n_kv_heads": 2}),
    "alibi, window": tiny(position=ALiBi(), attention={"window": 3}),
    "clamped, sinks": tiny(ffn=SwiGLU(d_ff=7, clamp=Clamp(limit=0.5)), attention={"sinks": True}),
    "no first norm": tiny(position=Rotary(), placement="pre_ffn"),
    "relative": tiny(position=RelativeBias(buckets=6, max_distance=5)),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
CACHES = pytest.mark.parametrize(
    "make", [GrowingCache, lambda: FixedCache(20)], ids=["grow", "fix"]
)
CHUNKS = [(0, 3), (3, 4), (4, 6), (6, 7)]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@every_spec
@CACHES
@torch.no_grad()
def test_chunk_by_chunk_is_at_once(spec, make):
    model, tokens, cache = built(spec), token_ids(B, T), make()
    steps = [model(tokens[:, a:b], cache=cache)["next"] for a, b in CHUNKS]
    close(torch.cat(steps, 1), model(tokens)["next"])
    assert cache.length == T
    assert cache.valid_BS is None


@every_spec
@CACHES
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_prompts_of_different_lengths_continue_as_if_alone(spec, make, side):
    model, cache = built(spec), make()
    prompts, more = [token_ids(n, seed=n) for n in (5, 2, 3)], token_ids(3, 4, seed=8)
    tokens, valid = torch.full((3, 6), VOCAB - 1), torch.zeros(3, 6, dtype=torch.bool)
    for b, prompt in enumerate(prompts):
        place = slice(0, len(prompt)) if side == "right" else slice(6 - len(prompt), 6)
        tokens[b, place], valid[b, place] = prompt, True
    out = [model(Inputs(tokens, valid), cache=cache)["next"]]
    out += [model(more[:, t : t + 1], cache=cache)["next"] for t in range(4)]
    got = torch.cat(out, 1)
    real = torch.cat((valid, torch.ones(3, 4, dtype=torch.bool)), 1)
    for b, prompt in enumerate(prompts):
        close(got[b][real[b]], model(torch.cat((prompt, more[b]))[None])["next"][0])
    assert torch.equal(cache.valid_BS, real)


@CACHES
@torch.no_grad()
def test_rows_may_end_while_others_go_on(make):
    model, tokens, cache = built(SPECS["rotary"]), token_ids(B, T), make()
    model(tokens, cache=cache)
    alive = torch.tensor([[True], [False], [True]])
    model(Inputs(token_ids(B, 1, seed=3), alive), cache=cache)
    got = model(token_ids(B, 1, seed=4), cache=cache)["next"][1, 0]
    row = torch.cat((tokens[1], token_ids(B, 1, seed=4)[1]))
    close(got, model(row[None])["next"][0, -1])


@every_spec
@CACHES
@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 0], [0, 0, 1, 1, 2]])
@torch.no_grad()
def test_reordered_beams_go_on_from_their_own_past(spec, make, rows):
    model, tokens, cache, rows = built(spec), token_ids(B, T), make(), torch.tensor(rows)
    model(tokens, cache=cache)
    cache.reorder(rows)
    more = token_ids(len(rows), 2, seed=6)
    got = torch.cat([model(more[:, t : t + 1], cache=cache)["next"] for t in range(2)], 1)
    close(got, model(torch.cat((tokens[rows], more), 1))["next"][:, T:])


@CACHES
@torch.no_grad()
def test_a_target_grows_while_its_source_stays(make):
    model, cache = built(tiny(encoder=True, position=Rotary())), make()
    tokens, source = token_ids(B, T), token_ids(B, S, seed=4)
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[1, 5:] = False

    def given(tokens):
        return Inputs(tokens, source_BS=source, source_valid_BS=valid)

    whole = model(given(tokens))["next"]
    got = [model(given(tokens[:, a:b]), cache=cache)["next"] for a, b in CHUNKS]
    close(torch.cat(got, 1), whole)

    by_hand, cache = [], make()
    memory = model.encode(given(tokens))
    for a, b in CHUNKS:
        by_hand.append(model.logits(model.decode(given(tokens[:, a:b]), memory, cache=cache)))
    close(torch.cat(by_hand, 1), whole)


def test_nothing_is_parked_on_the_model():
    model, tokens = built(SPECS["rotary"]), token_ids(B, T)
    before = set(vars(model)) | {name for name, _ in model.named_modules()}
    first = model(tokens, cache=GrowingCache())["next"]
    assert torch.equal(model(tokens, cache=GrowingCache())["next"], first)
    assert torch.equal(model(tokens)["next"], first)
    assert set(vars(model)) | {name for name, _ in model.named_modules()} == before


def test_a_growing_cache_lets_gradients_through():
    model, tokens, cache = built(SPECS["rotary"]), token_ids(B, T), GrowingCache()
    model(tokens[:, :4], cache=cache)
    model(tokens[:, 4:], cache=cache)["next"].square().sum().backward()
    cached = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(tokens)["next"][:, 4:].square().sum().backward()
    for name, p in model.named_parameters():
        scale = float(p.grad.abs().max())
        torch.testing.assert_close(cached[name], p.grad, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("readout", ["first", "mean"])
def test_an_answer_over_everything_cannot_be_continued(readout):
    model, cache = built(tiny(heads=(AnswerHead(readout=readout),))), GrowingCache()
    model(token_ids(B, T), cache=cache)
    with pytest.raises(InputError, match=f"read at '{readout}' cannot be continued"):
        model(token_ids(B, 1), cache=cache)
