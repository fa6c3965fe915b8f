"""Beam search: exact at full width, greedy at width 1, and what comes between."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.checks.rows.decoding import disagreements, every_hypothesis, random_trial
from glassformer.generation.beam import beam_search, beam_steps
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from tests.generation import checks, markov
from tests.generation.checks import SPECS, prompts_for
from tests.planting import Call, Compare, catches
from tests.tiny import VOCAB, built, tiny


def test_searches_of_extreme_probabilities_are_exact():
    markov.steep_searches_are_exact()


@catches(
    "EOS not counted",
    "generation.beam:_continue",
    Call("score"),
    arg=1,
    to="max(1, {it} - (finish == 'eos'))",
)
def test_the_n_best_list_of_full_width_is_exact() -> None:
    """The n-best list of a search of full width = the best of all sequences."""
    assert list(disagreements(60, steppers=(TorchStepper, RecordedStepper))) == []


def test_narrow_beams_are_plain() -> None:
    """Beams of any width = a search without cache, bound or batch, written down again."""
    trials = [random_trial(seed) for seed in range(30)]
    searches = [(trial.model, trial.prompts, trial.rules) for trial in trials]
    for seed, name in enumerate(SPECS):
        model = built(SPECS[name], seed=seed)
        rules = {"max_new_tokens": 6, "eos": (seed,), "alpha": 1.0}
        searches.append((model, prompts_for(model, 1), rules))
    for model, prompts, rules in searches:
        for width in (1, 2, 5):
            spec = BeamSpec(width=width, **rules)
            want = _plain_beams(model, prompts, spec)
            for stepper in (TorchStepper(model), RecordedStepper(model)):
                (found,) = beam_search(stepper, prompts, spec=spec)
                assert [h.tokens for h in found.hypotheses] == want, (width, rules)


def _plain_beams(model: Model, prompts: Prompts, spec: BeamSpec) -> list[tuple[int, ...]]:
    live, complete = [(0.0, ())], []
    for length in range(1, spec.max_new_tokens + 1):
        candidates = []
        for total, tokens in live:
            rows = Prompts(((*prompts.tokens[0], *tokens),), prompts.sources)
            logits_BV, _ = NaiveStepper(model).start(rows, room=1)
            for token, value in enumerate(logits_BV[0].log_softmax(-1).tolist()):
                early = token in spec.eos and length < spec.min_new_tokens
                if token not in spec.forbidden and not early:
                    candidates.append((total + value, (*tokens, token)))
        live = []
        for total, tokens in sorted(candidates, reverse=True)[: spec.width - len(complete)]:
            if tokens[-1] in spec.eos or length == spec.max_new_tokens:
                base = (5 + length) / 6 if spec.penalty == "gnmt" else length
                complete.append((total / base**spec.alpha, tokens))
            else:
                live.append((total, tokens))
    return [tokens for _, tokens in sorted(complete, reverse=True)]


def test_beam_one_is_greedy_is_temperature_zero() -> None:
    """A beam of one, greedy decoding and temperature 0 agree, whatever the length penalty."""
    for seed, (name, alpha) in enumerate(itertools.product(SPECS, (-1.0, 0.0, 8.0))):
        model = built(SPECS[name], seed=seed)
        prompts, stepper = prompts_for(model), RecordedStepper(model)
        rules = {"max_new_tokens": 9, "eos": (2, 7, 11), "min_new_tokens": 2}
        greedy = generate_batch(stepper, prompts, spec=DecodeSpec(**rules))
        beams = beam_search(stepper, prompts, spec=BeamSpec(width=1, alpha=alpha, **rules))
        cold = generate_batch(
            stepper, prompts, spec=DecodeSpec(temperature=1e-5, seed=seed, **rules)
        )
        for sequence, other, found in zip(greedy, cold, beams, strict=True):
            assert sequence.tokens == other.tokens == found.hypotheses[0].tokens
            assert math.isclose(sum(sequence.logprobs), found.hypotheses[0].logprob, abs_tol=1e-9)
            assert sequence.finish == found.hypotheses[0].finish


@given(
    alpha=st.floats(-3, 3),
    penalty=st.sampled_from(["gnmt", "power"]),
    logprob=st.floats(-50, 0),
    more=st.floats(0, 20),
    shortest=st.integers(1, 20),
    further=st.integers(0, 30),
    data=st.data(),
)
def test_no_completion_scores_above_the_bound(
    alpha, penalty, logprob, more, shortest, further, data
):
    spec = BeamSpec(alpha=alpha, penalty=penalty)
    length = data.draw(st.integers(shortest, shortest + further))
    bound = spec.bound(logprob, shortest=shortest, longest=shortest + further)
    assert spec.score(logprob - more, length) <= bound + 1e-12 * abs(bound)


def test_penalties_are_their_formulas() -> None:
    """Worked out by hand: GNMT's divides by ((5 + n) / 6)^alpha, the other by n^alpha."""
    gnmt, power = BeamSpec(alpha=0.5), BeamSpec(alpha=0.5, penalty="power")
    assert math.isclose(gnmt.score(-6.0, 19), -3.0)
    assert math.isclose(power.score(-6.0, 9), -2.0)
    assert BeamSpec(alpha=0.0).score(-6.0, 9) == -6.0
    assert math.isclose(BeamSpec(alpha=-1.0, penalty="power").score(-6.0, 3), -18.0)
    assert gnmt.score(-6.0, 20) > gnmt.score(-6.0, 10)  # long ones are favoured


@pytest.mark.parametrize("name", ["learned", "encoder-pre", "window"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_batch_of_searches_is_each_alone(name, groups):
    model = built(checks.SPECS[name])
    prompts = checks.prompts_for(model)
    spec = BeamSpec(
        width=4, groups=groups, diversity=groups - 1.0, max_new_tokens=7, eos=(1, 4), n_best=2
    )
    for stepper in (TorchStepper(model), RecordedStepper(model)):
        together = beam_search(stepper, prompts, spec=spec)
        for row, found in enumerate(together):
            sources = None if prompts.sources is None else (prompts.sources[row],)
            single = Prompts((prompts.tokens[row],), sources)
            (alone,) = beam_search(NaiveStepper(model), single, spec=spec)
            assert [h.tokens for h in alone.hypotheses] == [h.tokens for h in found.hypotheses]
            for a, b in zip(alone.hypotheses, found.hypotheses, strict=True):
                assert math.isclose(a.score, b.score, abs_tol=1e-9)


def test_groups_differ() -> None:
    """A group avoids what earlier ones chose; without diversity all groups are the same."""
    model = built(checks.SPECS["learned"])
    rules = {"width": 4, "max_new_tokens": 5}
    alike = beam_search(TorchStepper(model), [[1]], spec=BeamSpec(groups=4, **rules))[0].hypotheses
    assert len({h.tokens for h in alike}) == 1
    spec = BeamSpec(groups=4, diversity=1e6, **rules)
    apart = beam_search(TorchStepper(model), [[1]], spec=spec)[0].hypotheses
    for place in range(5):
        assert len({h.tokens[place] for h in apart}) == 4
    one = beam_search(TorchStepper(model), [[1]], spec=BeamSpec(width=1, max_new_tokens=5))[0]
    assert one.hypotheses[0].tokens in {h.tokens for h in apart}


def test_the_tree_is_recorded():
    model = built(checks.SPECS["learned"])
    spec = BeamSpec(width=3, max_new_tokens=6, eos=(2, 5))
    (found,) = beam_search(TorchStepper(model), [[1, 2]], spec=spec, record=True)
    (plain,) = beam_search(TorchStepper(model), [[1, 2]], spec=spec)
    assert plain.tree == ()
    assert plain.hypotheses == found.hypotheses
    for hypothesis in found.hypotheses:
        path, at = [], hypothesis.node
        while at >= 0:
            path.append(found.tree[at])
            at = found.tree[at].parent
        assert tuple(node.token for node in path[::-1]) == hypothesis.tokens
        assert [node.position for node in path[::-1]] == list(range(1, len(path) + 1))
        assert path[0].finish == hypothesis.finish
        assert math.isclose(sum(node.logprob for node in path), hypothesis.logprob, abs_tol=1e-9)
        assert math.isclose(sum(hypothesis.logprobs), hypothesis.logprob, abs_tol=1e-9)
    by_place = [sum(n.position == p for n in found.tree) for p in range(1, 7)]
    assert max(by_place) <= 3


@catches("never stops early", "generation.beam:_Item.settled", Compare(">="), to="False and {it}")
def test_searches_end_early() -> None:
    """A search with n_best below the width stops when nothing live can win, not when all end."""
    rules = {"width": 4, "alpha": -1.0, "max_new_tokens": 25, "eos": (0, 1, 2)}
    read = {1: 0, 4: 0}
    for seed in range(10):
        model = built(checks.SPECS["learned"], seed=seed)
        for n_best in read:
            stepper = TorchStepper(model)
            beam_search(stepper, [[1]], spec=BeamSpec(n_best=n_best, **rules))
            read[n_best] += stepper.positions
    assert read[1] < 0.7 * read[4]


def test_widths_beyond_the_vocabulary_and_few_sequences():
    model = built(checks.SPECS["learned"])
    (found,) = beam_search(
        TorchStepper(model), [[1]], spec=BeamSpec(width=50, max_new_tokens=1, eos=(0,))
    )
    assert len(found.hypotheses) == VOCAB
    assert [h.score for h in found.hypotheses] == sorted(
        (h.score for h in found.hypotheses), reverse=True
    )


def test_too_many_sequences_are_refused():
    model = built(checks.SPECS["learned"])
    with pytest.raises(InputError, match="more than 50000"):
        every_hypothesis(NaiveStepper(model), Prompts(((1,),)), spec=BeamSpec(max_new_tokens=9))


def test_the_search_in_steps_ends_where_the_search_does():
    model = built(tiny())
    spec = BeamSpec(width=3, max_new_tokens=5, eos=(2,))
    (whole,) = beam_search(TorchStepper(model), [[3, 5]], spec=spec, record=True)
    steps = list(beam_steps(TorchStepper(model), [[3, 5]], spec=spec))
    assert steps[-1] == [whole]
    grown = [len(step[0].tree) for step in steps]
    assert grown == sorted(set(grown)) and len(grown) > 1
    for (step,) in steps:
        assert step.tree == whole.tree[: len(step.tree)]
    with pytest.raises(InputError, match="outside the vocabulary"):
        beam_steps(TorchStepper(model), [[999]], spec=spec)
