"""Steppers: cached = uncached at every step, a batch = its rows alone, work is counted."""

import itertools

import numpy as np
import pytest
import torch

from glassformer.byhand.model import Model as HandModel
from glassformer.generation.stepper import HandStepper, NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.models.weights import weights_of
from glassformer.spec import presets
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from tests.generation import checks
from tests.generation.checks import SPECS, STEPPERS, paired_logits, prompts_for
from tests.tiny import VOCAB, built


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("spec", SPECS)
def test_cached_is_uncached_at_every_step(spec, stepper):
    """float64 at 1e-12, float32 at 1e-5, one row and several."""
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = built(SPECS[spec])
        if dtype == torch.float32:
            with torch.no_grad():  # activations of unit scale, where 1e-5 is rounding
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        model = model.to(dtype)
        for count in (1, 3):
            prompts = prompts_for(model, count)
            worst = max(paired_logits(STEPPERS[stepper], model, prompts, steps=6))
            assert worst <= limit, f"{dtype}: off by {worst:.1e}"


def test_what_is_left_in_memory_is_masked() -> None:
    """What an earlier decoding left in the memory changes nothing."""

    def make(model: Model) -> RecordedStepper:
        decoder = RecordedStepper(model)
        generate_batch(decoder, prompts_for(model), spec=DecodeSpec(max_new_tokens=20))
        with torch.inference_mode():
            for kv_BXSH in decoder._kvs:
                kv_BXSH.fill_(7.0)  # what an earlier decoding left there
        return decoder

    for name in SPECS:
        model = built(SPECS[name])
        for count in (1, 3):
            prompts = prompts_for(model, count)
            worst = max(paired_logits(make, model, prompts, steps=6))
            assert worst <= 1e-12, f"{name}: off by {worst:.1e}"


def test_a_batch_is_its_rows_alone_padded_on_either_side() -> None:
    """Greedy and sampled, either padding, rows that end at different places."""
    for name, make in itertools.product(("learned", "window", "encoder"), ("fixed", "derived")):
        model = built(SPECS[name])
        prompts, stepper = prompts_for(model), STEPPERS[make](model)
        for spec in (
            DecodeSpec(max_new_tokens=11, eos=(0, 3)),
            DecodeSpec(max_new_tokens=40, temperature=1.5, eos=(0,), seed=5),
            DecodeSpec(max_new_tokens=9, temperature=0.9, top_p=0.8, repetition_penalty=1.7),
        ):
            together = generate_batch(stepper, prompts, spec=spec)
            for side in ("left", "right"):
                assert _tokens(
                    generate_batch(stepper, _padded(prompts, side), spec=spec)
                ) == _tokens(together)
            for row, whole in enumerate(together):
                sources = None if prompts.sources is None else (prompts.sources[row],)
                single = Prompts((prompts.tokens[row],), sources)
                (alone,) = generate_batch(NaiveStepper(model), single, spec=spec, rows=(row,))
                assert alone.tokens == whole.tokens
                assert alone.finish == whole.finish
                assert all(
                    abs(a - b) < 1e-10 for a, b in zip(alone.logprobs, whole.logprobs, strict=True)
                )


def _tokens(rows):
    return [row.tokens for row in rows]


def _padded(prompts: Prompts, side: str) -> Prompts:
    """The same prompts, through an array that was padded on one side with a real token's id."""

    def array(rows):
        longest = max(map(len, rows)) + 1
        ids, valid = [], []
        for row in rows:
            fill = [VOCAB - 1] * (longest - len(row))
            ids.append([*fill, *row] if side == "left" else [*row, *fill])
            real, empty = [True] * len(row), [False] * len(fill)
            valid.append([*empty, *real] if side == "left" else [*real, *empty])
        return ids, valid

    tokens, valid = array(prompts.tokens)
    if prompts.sources is None:
        return Prompts.of(tokens, valid=valid)
    sources, source_valid = array(prompts.sources)
    return Prompts.of(tokens, valid=valid, sources=sources, source_valid=source_valid)


def test_one_token_a_step_and_one_run_of_the_encoder() -> None:
    """One new token a step, the encoder once; the naive way does both again and again."""
    model = built(SPECS["encoder"])
    calls = []
    encode = model.encode
    model.encode = lambda *a, **k: calls.append(1) or encode(*a, **k)
    prompts = prompts_for(model)
    longest = max(map(len, prompts.tokens))
    for make in (TorchStepper, RecordedStepper):
        calls.clear()
        stepper = make(model)
        read = []
        embed = model.decoder.embed.register_forward_hook(
            lambda _, given, __, read=read: read.append(given[0].shape[1])
        )
        generate_batch(stepper, prompts, spec=DecodeSpec(max_new_tokens=7))
        embed.remove()
        assert len(calls) == stepper.encoder_calls == 1
        assert stepper.positions == longest + 6
        assert read in ([longest] + [1] * 6, [longest])  # the derived step has no modules
    calls.clear()
    naive = NaiveStepper(model)
    generate_batch(naive, prompts, spec=DecodeSpec(max_new_tokens=7))
    assert len(calls) == naive.encoder_calls == 7
    assert naive.positions == sum(range(longest, longest + 7))


@pytest.mark.parametrize("name", checks.SPECS)
def test_the_by_hand_engine_is_one_more_stepper(name):
    model = built(checks.SPECS[name])
    hand = HandStepper(HandModel(model.spec, params=weights_of(model)))
    prompts = checks.prompts_for(model)
    worst = max(checks.paired_logits(lambda _: hand, model, prompts, steps=6))
    assert worst <= 1e-11
    spec = DecodeSpec(max_new_tokens=8, temperature=0.9, seed=4, eos=(1,))
    ours, theirs = (generate_batch(s, prompts, spec=spec) for s in (hand, NaiveStepper(model)))
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]


def test_the_by_hand_engine_says_that_it_counts_padding():
    model = built(checks.SPECS["learned"])
    hand = HandStepper(HandModel(model.spec, params=weights_of(model)))
    with pytest.raises(InputError, match="counts padding"):
        generate_batch(hand, [[1] * 20, [2]], spec=DecodeSpec(max_new_tokens=20))


@pytest.mark.parametrize("make", [TorchStepper, NaiveStepper, RecordedStepper])
def test_models_that_cannot_decode_are_refused(make):
    with pytest.raises(InputError, match="no next-token head"):
        make(build(presets.digits()))
    with pytest.raises(InputError, match="training mode"):
        make(built(checks.SPECS["learned"]).train())


def test_rows_fill_the_context_each_for_itself():
    model = built(checks.SPECS["learned"])  # max_seq_len 29
    for stepper in (TorchStepper(model), RecordedStepper(model)):
        got = generate_batch(
            stepper, [[1] * 28, [2] * 3, [3] * 20], spec=DecodeSpec(max_new_tokens=99)
        )
        assert [len(g.tokens) for g in got] == [1, 26, 9]
        (alone,) = generate_batch(
            NaiveStepper(model), [[2] * 3], spec=DecodeSpec(max_new_tokens=99)
        )
        assert alone.tokens == got[1].tokens


def test_prompts_come_from_batches_and_arrays():
    tokens, valid = np.array([[0, 5, 6], [7, 8, 9]]), np.array([[0, 1, 1], [1, 1, 1]], bool)
    assert Prompts.of(tokens, valid=valid).tokens == ((5, 6), (7, 8, 9))
    assert Prompts.of(torch.from_numpy(tokens)).tokens == ((0, 5, 6), (7, 8, 9))
    with pytest.raises(InputError, match="mask of shape"):
        Prompts.of(tokens, valid=valid[:1])
    with pytest.raises(InputError, match="cannot be read"):
        Prompts.of([[0.5]])
