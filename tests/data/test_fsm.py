"""The FSM laboratory: what a row says, what the oracle says, and what may be held out."""

import math

import numpy as np
import pytest

from glassformer.data.tasks.fsm import BOS, EOS, FIRST, PAD, Fsm
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import FsmTask

TABLE = ("parity", "mod-3", "brackets-4", "random-5", "partial-5")


def fsm(machine, **fields):
    return Fsm(FsmTask(machine=machine, **{"examples": 4_000, **fields}))


def whole(task, split):
    rows = np.arange(task.sizes()[split])
    return task.batch(split, rows), task.oracle(split, rows)


@pytest.mark.parametrize("machine", [*TABLE, "regex:(ab|cd)*e?(a|b)*"])
def test_rows_say_what_the_machine_does(machine):
    task = fsm(machine, min_length=2)
    names = task.tokenizer.names
    for split, longest in (("train", 16), ("val", 16), ("test", 16), ("longer", 24)):
        batch, _ = whole(task, split)
        for row in range(0, len(batch.tokens), 7):
            valid = batch.valid[row]
            begin, *read = batch.tokens[row][valid].tolist()
            following = batch.targets["next"][row][valid].tolist()
            assert begin == BOS
            assert following[:-1] == read  # what comes next is what is read one place later
            symbols = [names[token] for token in read]
            states = task.machine.run(symbols)
            assert batch.targets["state"][row][valid].tolist() == states
            classes = [task.machine.classes[state] for state in states]
            assert batch.targets["class"][row][valid].tolist() == classes
            assert 2 <= len(read) <= longest
            if len(read) < longest:
                assert following[-1] == EOS
            if following[-1] == EOS:
                assert task.machine.accepts(symbols)
            elif following[-1] != EOS:
                task.machine.run([*symbols, names[following[-1]]])  # can go on so


def test_padding_has_no_weight_and_no_truth():
    task = fsm("parity")
    for split in task.sizes():
        batch, truth = whole(task, split)
        pad = ~batch.valid
        assert pad.any()
        assert (batch.weights[pad] == 0).all()
        assert (batch.tokens[pad] == PAD).all()
        assert (truth.entropy[pad] == 0).all()
        assert (truth.probabilities[pad] == 0).all()
        assert not truth.legal[pad].any()


@pytest.mark.parametrize("machine", TABLE)
def test_oracle_is_the_walk(machine):
    task = fsm(machine, min_length=2)
    batch, truth = whole(task, "test")
    for row in range(0, len(batch.tokens), 11):
        state = task.machine.start
        for place in np.flatnonzero(batch.valid[row]):
            if place:
                symbol = batch.tokens[row, place] - FIRST
                state = task.machine.transitions[state][symbol]
            *symbols, end = task.walk.after(int(place))[state]
            given = truth.probabilities[row, place]
            assert given[[PAD, BOS]].tolist() == [0, 0]
            assert given[EOS] == end
            assert given[FIRST:].tolist() == symbols
            assert math.isclose(given.sum(), 1.0, rel_tol=1e-12)
            assert (given[EOS] == 0) or place >= 2
            nats = -sum(p * math.log(p) for p in given if p > 0)
            assert math.isclose(truth.entropy[row, place], nats, rel_tol=1e-12, abs_tol=1e-15)
            legal = {task.tokenizer.names[i] for i in np.flatnonzero(truth.legal[row, place])}
            if place >= 2:
                ends = {"EOS"} if task.machine.ends[state] else set()
                assert legal == set(task.machine.legal(state)) | ends


@pytest.mark.parametrize("machine", TABLE)
def test_a_perfect_model_has_no_excess_and_only_legal_mass(machine):
    task = fsm(machine)
    for split in task.sizes():
        batch, truth = whole(task, split)
        with np.errstate(divide="ignore"):
            perfect = np.log(truth.probabilities)
        assert np.abs(truth.excess(perfect)).max() < 1e-12
        np.testing.assert_allclose(truth.legal_mass(perfect), batch.valid, atol=1e-12)
        uniform = np.full(perfect.shape, -math.log(perfect.shape[-1]))
        assert (truth.excess(uniform)[batch.valid] > 0.1).all()


@pytest.mark.parametrize("machine", TABLE)
def test_no_string_is_in_two_splits(machine):
    task = fsm(machine)
    own = {}
    for split in task.sizes():
        batch, _ = whole(task, split)
        own[split] = {tuple(t[v].tolist()) for t, v in zip(batch.tokens, batch.valid, strict=True)}
    assert sum(map(len, own.values())) == len(set().union(*own.values()))
    assert min(map(len, own.values())) > 50


def sampled_gap(task, split, *, weighted=True):
    """Cross-entropy of the walk itself on the targets less its entropy, and its standard error."""
    batch, truth = whole(task, split)
    weights = batch.weights if weighted else batch.valid
    picked = np.take_along_axis(truth.probabilities, batch.targets["next"][..., None], 2)[..., 0]
    assert (picked[batch.valid] > 0).all()
    off = (-np.log(np.where(batch.valid, picked, 1.0)) - truth.entropy) * weights
    per_string = off.sum(axis=1)
    error = math.sqrt((per_string**2).sum()) / weights.sum()
    return off.sum() / weights.sum(), error


@pytest.mark.parametrize("machine", ["parity", "mod-3", "random-5", "partial-5"])
def test_counted_targets_are_draws_from_the_oracle(machine):
    gaps = {"train": [], "val": [], "test": [], "longer": []}
    for seed in range(6):  # which rare strings are held out is chance too
        task = fsm(machine, seed=seed)
        for split, found in gaps.items():
            found.append(sampled_gap(task, split))
    for split, found in gaps.items():
        gap = np.mean([gap for gap, _ in found])
        error = math.sqrt(sum(error**2 for _, error in found)) / len(found)
        # The hash's choice adds at most as much again as the draws (see `fsm`: strings that
        # are expected at most once).
        assert abs(gap) < 5 * error, (split, gap, error)
        assert error < 0.02


def test_uncounted_positions_are_why_there_are_weights():
    task = fsm("parity", examples=20_000)
    for split in ("val", "test", "longer"):
        gap, error = sampled_gap(task, split, weighted=False)
        assert abs(gap) > 5 * error  # held-out strings alone would blame a perfect model


@pytest.mark.parametrize("machine", ["parity", "brackets-4", "random-5"])
def test_train_follows_the_walk(machine):
    """After each frequent prefix, each next token as often as the oracle says."""
    task = fsm(machine, examples=20_000)
    batch, truth = whole(task, "train")
    assert (batch.weights == batch.valid).all()
    checked = 0
    for length in range(4):
        there = batch.valid[:, length]
        prefixes, number = np.unique(batch.tokens[there, : length + 1], axis=0, return_inverse=True)
        for prefix in range(len(prefixes)):
            rows = np.flatnonzero(there)[number == prefix]
            if len(rows) < 300:
                continue
            for token, p in enumerate(truth.probabilities[rows[0], length]):
                seen = (batch.targets["next"][rows, length] == token).sum()
                # twice the variance of draws: the hash's choice counts as much
                spread = math.sqrt(2 * len(rows) * p * (1 - p))
                assert abs(seen - len(rows) * p) <= 5 * spread + 1e-9, (prefixes[prefix], token)
                checked += 1
    assert checked > 20
    # Rare strings are the long ones: too many or too few of them would show in the mean length.
    lengths = task.lengths("train")
    error = lengths.std() / math.sqrt(len(lengths))
    assert abs(lengths.mean() - task.walk.totals(cut=16)[1]) < 4 * error


def test_longer_counts_only_what_is_longer():
    task = fsm("random-4", max_length=9, longer=5)
    batch, _ = whole(task, "longer")
    assert (task.lengths("longer") > 10).all()
    assert batch.tokens.shape[1] == 15
    np.testing.assert_array_equal(batch.weights[:, :10], 0)
    np.testing.assert_array_equal(batch.weights[:, 10:], batch.valid[:, 10:])


def test_facts_hold_the_exact_entropy():
    task = fsm("brackets-3")
    facts = task.facts()
    nats, events = task.walk.totals(cut=16)
    assert facts["entropy_per_token"] == round(nats / events, 9)
    assert facts["states"] == 4
    batch, truth = whole(task, "train")
    assert abs(truth.entropy.sum() / batch.valid.sum() - nats / events) < 0.02


def test_weights_are_by_state_or_all_alike():
    uniform = fsm("random-5", order="uniform")
    assert len(np.unique(uniform.walk.after(9)[:, 0].round(12))) == 1
    weighted = fsm("random-5", order="weighted")
    assert len(np.unique(weighted.walk.after(9)[:, 0].round(12))) > 1
    assert fsm("random-5", machine_seed=1).machine != weighted.machine


def test_a_language_without_longer_strings_has_no_such_split():
    task = fsm("regex:[a-e][a-e][a-e][a-e][a-e]", examples=1_000, max_length=8)
    assert set(task.sizes()) == {"train", "val", "test"}
    assert (task.lengths("train") == 6).all()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"machine": "parrity"}, "did you mean parity?"),
        ({"machine": "brakets-3"}, "did you mean brackets-D?"),
        ({"machine": "qqq"}, "known: parity, mod-K"),
        ({"machine": "mod-1"}, "mod-K 1 is below 2"),
        ({"machine": "brackets-0"}, "brackets-D 0 is below 1"),
        ({"machine": "random-0"}, "states 0 is below 1"),
        ({"machine": "random-99999"}, "too large"),
        ({"machine": "random-3", "symbols": 27}, "26 is the most"),
        ({"machine": "regex:(a"}, "a ( that is not closed"),
        ({"machine": "regex:ab", "min_length": 3}, "no string of 3 symbols or more"),
        ({"machine": "parity", "max_length": 4}, "too common to be held out"),
        ({"machine": "parity", "max_length": 4}, "raise max_length"),
    ],
)
def test_bad_input_is_named(spec, words):
    with pytest.raises(InputError) as caught:
        Fsm(FsmTask(**spec))
    assert words in str(caught.value)
