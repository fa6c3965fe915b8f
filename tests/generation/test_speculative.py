"""Speculation: the tokens of every decoding are those without it, and it stops where it is slow."""

import math
from itertools import product

import pytest
import torch

import glassformer as gf
from glassformer.generation import speculative
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.speculative import (
    MOST,
    REST,
    TIMED,
    WINDOW,
    Ngrams,
    Pace,
    SpeculativeStepper,
)
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Speculation
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError

STEPPERS = [NativeStepper, TorchStepper, lambda model: TorchStepper(model, cache="growing")]


def still():
    """A clock that stands still: no pass takes longer than another, so guesses go on."""
    return 0.0


def small(preset="core", **changes):
    """A tiny model with random weights."""
    model = gf.build(gf.preset(preset, **changes), seed=0).eval()
    return getattr(model, "model", model)


def made(stepper, prompt, **options):
    (one,) = generate_batch(stepper, [prompt], spec=DecodeSpec(**options))
    return one


def test_ngrams_continue_as_before_and_into_themselves():
    assert Ngrams([1, 2, 3, 4, 1, 2]).guess(3) == [3, 4, 1]
    assert Ngrams([7, 8, 7, 8]).guess(5) == [7, 8, 7, 8, 7]
    assert Ngrams([1, 2, 9, 3, 2, 5, 1, 2]).guess(1) == [9]  # two tokens, not the latest one
    assert Ngrams([1, 2, 3]).guess(4) == Ngrams([]).guess(4) == []


@pytest.mark.parametrize("make", STEPPERS)
def test_several_tokens_are_read_as_one_by_one_and_forgotten(make):
    stepper = make(small())
    _, past = stepper.start(Prompts.of([[3, 1, 4]]), room=9)
    several_TV = stepper.extend([5, 6, 7, 8], past=past, every=True)
    past.rewind([length - 4 for length in past.lengths])
    single_TV = torch.cat(
        [stepper.step(torch.tensor([t]), past=past).clone() for t in (5, 6, 7, 8)]
    )
    torch.testing.assert_close(several_TV, single_TV, rtol=1e-5, atol=1e-5)


OPTIONS = [
    {},
    {"eos": (5,), "min_new_tokens": 9},
    {"forbidden": (4, 9), "forced": (2, 3)},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 3, "seed": 5},
    {"temperature": 1.5, "typical_p": 0.8, "eos": (7,)},
]


@pytest.mark.parametrize("make", STEPPERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_those_without_speculation(make, options):
    model = small(vocab_size=11)
    plain, guessing = make(model), SpeculativeStepper(make(model), clock=still)
    for prompt in ([3, 1, 4, 3, 1], [2] * 7):
        wanted = made(plain, prompt, max_new_tokens=30, **options)
        found = made(guessing, prompt, max_new_tokens=30, **options)
        assert (found.tokens, found.finish) == (wanted.tokens, wanted.finish)
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        facts = guessing.facts
        assert found.speculation is facts and facts.tokens == len(wanted.tokens) - 1
        assert facts.passes + facts.right == facts.tokens and facts.right <= facts.guessed


def test_a_repeating_text_takes_fewer_passes():
    guessing = SpeculativeStepper(NativeStepper(small(vocab_size=11)), clock=still)
    favoured = {"repetition_penalty": 0.01}  # what was there is likelier
    facts = made(guessing, [2] * 7, max_new_tokens=40, **favoured).speculation
    assert facts.tokens_per_pass > 1.5 and facts.acceptance > 0.5
    assert "tokens a pass" in str(facts)


def test_sampled_tokens_are_identical_for_every_seed():
    """Three tokens, 60 seeds: each of the sequences is the one sampled without speculation."""
    model = small(vocab_size=3)
    plain, guessing = NativeStepper(model), SpeculativeStepper(NativeStepper(model), clock=still)
    guessed = right = 0
    for seed in range(60):
        options = {"temperature": 1.0, "seed": seed, "max_new_tokens": 12}
        assert (
            made(guessing, [0, 1, 0], **options).tokens == made(plain, [0, 1, 0], **options).tokens
        )
        guessed, right = guessed + guessing.facts.guessed, right + guessing.facts.right
    assert 0 < right < guessed  # both right and wrong guesses have been met


def test_an_encoder_decoder_guesses_from_its_source():
    model = gf.build(gf.preset("seq2seq"), seed=0)
    options = {"source": [3, 4, 5, 3, 4, 5], "max_new_tokens": 12}
    plain, guessing = (gf.generate(model, [1], speculate=s, **options) for s in (False, True))
    assert plain.tokens == guessing.tokens and plain.speculation is None


def test_guessing_rests_where_it_takes_longer_and_tries_again():
    facts = Speculation()
    pace = Pace(facts)
    assert pace.wanted == 0
    for _ in range(TIMED):
        pace.plain(1, 1.0)
    for _ in range(WINDOW):  # one right of two: 2 tokens in 3 seconds
        assert pace.wanted > 0
        pace.guessed(2, 1, 3.0)
    assert pace.wanted == 0 and facts.rests == 1
    pace.plain(REST - 1, REST - 1.0)
    assert pace.wanted == 0
    pace.plain(1, 1.0)
    assert pace.wanted > 0
    for _ in range(3 * WINDOW):  # 2 tokens in less than 2 seconds
        pace.guessed(2, 1, 1.5)
    assert pace.wanted > 0 and facts.rests == 1


def test_a_slow_pass_falls_back_with_the_same_tokens():
    """On a clock that ticks with positions read, a pass of 5 costs 5: wrong guesses do not pay."""
    model = small(vocab_size=5)
    inner = NativeStepper(model)
    ticking = SpeculativeStepper(inner, clock=lambda: float(inner.positions))
    options = {"temperature": 1.0, "max_new_tokens": 60}
    found = made(ticking, [0, 1, 0], **options)
    assert found.tokens == made(NativeStepper(model), [0, 1, 0], **options).tokens
    assert found.speculation.rests >= 1 and "took longer" in str(found.speculation)


def test_several_rows_and_other_steppers_are_used_as_they_are():
    model = small()
    for inner, prompts in ((NativeStepper(model), [[3, 1], [4]]), (NaiveStepper(model), [[3, 1]])):
        guessing, spec = SpeculativeStepper(inner), DecodeSpec(max_new_tokens=6)
        wanted = [one.tokens for one in generate_batch(inner, prompts, spec=spec)]
        assert [one.tokens for one in generate_batch(guessing, prompts, spec=spec)] == wanted
        assert guessing.facts.why_not and str(guessing.facts).startswith("no speculation")
        assert math.isnan(guessing.facts.acceptance)


@pytest.mark.parametrize("other", [{"width": 4}, {"cached": False}])
def test_options_that_do_not_go_together_are_refused(other):
    call = gf.beam_search if "width" in other else gf.generate
    with pytest.raises(InputError, match="speculate"):
        call(small(), [3, 1, 4], speculate=True, **other)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_draft_model_changes_no_token(options):
    """Drafts by the model itself are right, those of another one mostly wrong; same tokens."""
    model, other = small(vocab_size=11), small(vocab_size=11, d_model=32, n_layers=1)
    for draft in (model, other):
        guessing = SpeculativeStepper(NativeStepper(model), draft=NativeStepper(draft), clock=still)
        for prompt in ([3, 1, 4, 3, 1], [2] * 7):
            wanted = made(NativeStepper(model), prompt, max_new_tokens=30, **options)
            found = made(guessing, prompt, max_new_tokens=30, **options)
            assert (found.tokens, found.finish) == (wanted.tokens, wanted.finish)
            facts = guessing.facts
            assert facts.guessed and facts.passes + facts.right == facts.tokens
            # Only the last pass's guesses can be left over when the text ends.
            if draft is model and not options:
                assert facts.guessed - facts.right <= MOST


def test_a_draft_of_another_vocabulary_is_refused():
    with pytest.raises(InputError, match="draft model of 7 tokens"):
        gf.generate(small(vocab_size=11), [1, 2], draft=small(vocab_size=7))


def test_all_texts_of_a_tiny_vocabulary_have_their_probability(monkeypatch):
    """Enumerated: speculating, 500 seeds give each of the 27 texts as often as the model says."""
    model = small(vocab_size=3)
    guessing = SpeculativeStepper(NativeStepper(model), draft=NativeStepper(model), clock=still)
    monkeypatch.setattr(speculative, "TIMED", 0)  # guesses from the first token on
    counts: dict[tuple[int, ...], int] = {}
    wrong = 0
    for seed in range(500):
        found = made(guessing, [0, 1, 0], temperature=1.0, seed=seed, max_new_tokens=3)
        counts[found.tokens] = counts.get(found.tokens, 0) + 1
        wrong += guessing.facts.guessed - guessing.facts.right
    assert wrong > 100
    plain, squares = TorchStepper(model), 0.0
    for text in product(range(3), repeat=3):
        logits_1V, past = plain.start(Prompts.of([[0, 1, 0]]), room=3)
        chance = 1.0
        for token in text:
            chance *= float(logits_1V.softmax(-1)[0, token])
            logits_1V = plain.step(torch.tensor([token]), past=past)
        squares += (counts.get(text, 0) - 500 * chance) ** 2 / (500 * chance)
    assert squares < 60  # chi-squared with 26 degrees of freedom: 1 in 6,000 is above
