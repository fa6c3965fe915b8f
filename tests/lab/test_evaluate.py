"""Evaluation against a slow one that looks at one example and one position at a time."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.lab.measure import evaluate as module
from glassformer.lab.measure.evaluate import evaluate, token_namer
from glassformer.spec.errors import InputError
from glassformer.training.engine import AtOnce, log_softmax
from glassformer.training.fit import fit
from tests.planting import Binary, catches
from tests.training.samples import ENGINES, RUNS, digits, engine_of, machine, reverse


def copy(*changes: str):
    """Strings so short that some are wholly right; the model has more answers than the task."""
    short = ("task.operation=copy", "task.vocab_size=6", "task.min_length=1", "task.max_length=3")
    return reverse(*short, "task.examples=30", *changes, "train.steps=45")


CASES = {**RUNS, "copy": copy}


def half_trained(name: str, kind: str = "torch", *changes: str):
    """Right about some answers and wrong about others."""
    run = CASES[name]("train.precision=float64", "train.steps=25", "train.lr=0.02", *changes)
    engine, task = engine_of(run, kind), build_task(run.task)
    for _ in fit(engine, task, run.train):
        pass
    return engine, task


def one_at_a_time(engine, task, split: str, count: int):
    """Loss, accuracy, exact match, groups and oracle, example by example, without padding."""
    nll, right, seen = defaultdict(float), defaultdict(float), defaultdict(float)
    groups = defaultdict(lambda: defaultdict(list))
    exact, truth = {}, defaultdict(float)
    places, confused, mistakes = defaultdict(list), Counter(), {}
    first = next(head for head in engine.spec.head_names() if head in task.heads)
    for row in range(count):
        batch = task.batch(split, np.array([row]))
        logits = engine.logits(batch)
        oracle = task.oracle(split, np.array([row]))
        whole, asked, place_in_answer = True, False, 0
        for head, target in batch.targets.items():
            for place in np.ndindex(target.shape):
                same_shape = batch.weights is not None and batch.weights.shape == target.shape
                weight = float(batch.weights[place]) if same_shape else 1.0
                if weight == 0.0 or (target.ndim == 2 and not batch.valid[place]):
                    continue
                row_logits = logits[head][place]
                probabilities = np.exp(row_logits - row_logits.max())
                probabilities /= probabilities.sum()
                answer = int(target[place])
                nll[head] -= weight * math.log(probabilities[answer])
                hit = int(row_logits.argmax()) == answer
                right[head] += weight * hit
                seen[head] += weight
                if head == first and not hit:
                    confused[answer, int(row_logits.argmax())] += target.ndim - 1
                    mistakes.setdefault(row, (answer, int(row_logits.argmax())))
                if head == first and target.ndim == 2:
                    places[place_in_answer].append(hit)
                    place_in_answer += 1
                if head == first:
                    whole, asked = whole and hit, True
                    if oracle is not None:
                        q = oracle.probabilities[place]
                        ours = -sum(
                            a * math.log(b) for a, b in zip(q, probabilities, strict=False) if a > 0
                        )
                        entropy = -sum(a * math.log(a) for a in q if a > 0)
                        truth["excess"] += weight * (ours - entropy)
                        truth["entropy"] += weight * entropy
                        legal = np.flatnonzero(oracle.legal[place])
                        truth["legal"] += weight * probabilities[legal].sum()
        if not asked:  # nothing of this string counts, so it is neither right nor wrong
            continue
        exact[row] = whole
        for group, labels in task.groups(split, np.array([row])).items():
            groups[group][labels[0]].append(whole)
    return {
        "heads": {
            head: {"loss": nll[head] / seen[head], "accuracy": right[head] / seen[head]}
            for head in seen
        },
        "exact_match": sum(exact.values()) / len(exact),
        "by": {g: {k: sum(v) / len(v) for k, v in t.items()} for g, t in groups.items()},
        "counts": {g: {k: len(v) for k, v in t.items()} for g, t in groups.items()},
        "oracle": {key: value / seen[first] for key, value in truth.items()},
        "places": [(sum(hits) / len(hits), len(hits)) for hits in places.values()],
        "confused": {pair: number for pair, number in confused.items() if number},
        "mistakes": mistakes,
        "errors": [row for row, whole in exact.items() if not whole],
    }


def nothing_is_right_or_wrong(found, engine, task, split) -> None:
    """No exact match; the rows with the prediction that is farthest off, and the worst first."""
    assert found.exact_match is None and not found.by and "exact_match" not in found.to_dict()
    off, impossible = {}, 0
    for row in range(found.examples):
        batch, oracle = (ask(split, np.array([row])) for ask in (task.batch, task.oracle))
        logits_TV = engine.logits(batch)["next"][0]
        logp_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=-1, keepdims=True))
        counted = batch.valid[0] if batch.weights is None else batch.weights[0] > 0
        for at in np.flatnonzero(counted):
            if oracle is None:
                score = -logp_TV[at, batch.targets["next"][0, at]]
            else:
                q = oracle.probabilities[0, at]
                likely = q > 0
                score = (q[likely] * (np.log(q[likely]) - logp_TV[at, : len(q)][likely])).sum()
            off[row] = max(off.get(row, -1.0), float(score))
        if oracle is not None:
            best_T = logits_TV.argmax(axis=-1)
            impossible += any(not oracle.legal[0, at, best_T[at]] for at in np.flatnonzero(counted))
    assert (found.kind, found.wrong) == (
        ("text", None) if task.is_running_text else ("process", impossible)
    )
    told = [off[error["row"]] for error in found.errors]
    assert told[0] == pytest.approx(max(off.values()))
    assert told == pytest.approx(sorted(told, reverse=True))
    inputs = {error["input"] for error in found.errors}
    assert len(inputs) == len(found.errors) > 1
    for row, score in off.items():
        kept = len(found.errors) == 20 and score <= told[-1] * (1 + 1e-9)
        assert kept or any(score == pytest.approx(one) for one in told), row
    for error in found.errors:
        if found.kind == "process":
            assert error["excess"] == pytest.approx(off[error["row"]], rel=1e-6)
            assert sum(error["truth"].values()) == pytest.approx(1.0, abs=0.01)
        else:
            told = -math.log(error["right_probability"])
            assert told == pytest.approx(off[error["row"]], rel=1e-6)


def tokens_are_counted(found, want, named) -> None:
    """Single positions as they are; a range is the mean of its positions; the commonest pairs."""
    listed = found.get("positions", [])
    single = [(one["accuracy"], one["count"]) for one in listed if one["position"].isdigit()]
    assert single == want["places"][: len(single)]
    for one in listed[len(single) :]:
        low, high = map(int, one["position"].split(" to "))
        inside = want["places"][low - 1 : high]
        assert one["count"] == sum(number for _, number in inside)
        right = sum(share * number for share, number in inside)
        assert one["accuracy"] == pytest.approx(right / one["count"])
    assert sum(one["count"] for one in listed) == sum(number for _, number in want["places"])
    counts = [one["count"] for one in found.get("confused", [])]
    assert counts == sorted(want["confused"].values(), reverse=True)[: module.CONFUSED]
    pairs = {(named(a), named(b)): number for (a, b), number in want["confused"].items()}
    for one in found.get("confused", []):
        assert pairs[one["target"], one["predicted"]] == one["count"]


@catches(
    "PAD counted in accuracy",
    "lab.measure.evaluate:_Tally.add",
    Binary("*", nth=1),
    to="{left}",
    case="machine",
)
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_the_slow_one(name: str, kind: str) -> None:
    engine, task = half_trained(name, kind)
    for split in ("train", "val"):
        count = min(21, task.sizes()[split])
        found = evaluate(engine, task, split=split, examples=count)
        want = one_at_a_time(engine, task, split, count)
        first = engine.spec.head_names()[0]
        assert found.examples == count
        if name == "copy" and split == "train":
            assert 0 < found.exact_match < 1
        assert found.heads.keys() == want["heads"].keys()
        for head, values in want["heads"].items():
            assert found.heads[head] == pytest.approx(values, rel=1e-10)
        assert found.loss == found.heads[first]["loss"]
        assert found.accuracy == found.heads[first]["accuracy"]
        assert found.oracle == pytest.approx(want["oracle"], rel=1e-9)
        if found.kind != "answers":
            nothing_is_right_or_wrong(found, engine, task, split)
            continue
        assert found.exact_match == pytest.approx(want["exact_match"])
        assert found.by == want["by"]
        assert found.counts == want["counts"]
        assert [error["row"] for error in found.errors] == want["errors"][:20]
        for error in found.errors:
            assert error["example"] == task.describe(split, error["row"])
            answer, said = map(token_namer(task, first), want["mistakes"][error["row"]])
            pairs = list(zip(error["target"], error["predicted"], strict=True))
            assert next(pair for pair in pairs if pair[0] != pair[1]) == (answer, said)
            assert 0 < error["right_probability"] < 1 <= error["wrong"] <= error["of"]
        assert found.wrong == len(want["errors"])
        tokens_are_counted(found.tokens, want, token_namer(task, first))


def test_chunks_change_nothing(monkeypatch) -> None:
    engine, task = half_trained("machine")
    whole = evaluate(engine, task, split="train")
    monkeypatch.setattr(module, "CHUNK", 7)
    parts = evaluate(engine, task, split="train")
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.oracle == pytest.approx(whole.oracle, rel=1e-12)
    assert (parts.exact_match, parts.by, parts.counts) == (
        whole.exact_match,
        whole.by,
        whole.counts,
    )
    assert [e["row"] for e in parts.errors] == [e["row"] for e in whole.errors]


def test_the_truth_is_never_beaten():
    """Excess is a divergence: not negative, and 0 for an engine that answers with the oracle."""
    run = machine()
    task = build_task(run.task)
    engine = engine_of(run)
    untrained = evaluate(engine, task, split="val")
    assert untrained.oracle["excess"] > 0
    assert 0 < untrained.oracle["legal"] < 1

    class Knowing(AtOnce):
        spec = run.model

        def logits(self, batch):
            truth = task.oracle("val", np.arange(len(batch.tokens)))
            made = engine.logits(batch)
            with np.errstate(divide="ignore"):
                return made | {"next": np.maximum(np.log(truth.probabilities), -1e3)}

    knowing = evaluate(Knowing(), task, split="val")
    assert knowing.oracle["excess"] == pytest.approx(0.0, abs=1e-12)
    assert knowing.oracle["legal"] == pytest.approx(1.0)
    shown = " ".join(knowing.text().split())
    assert "cost 0.0000 nats a token above the entropy of the machine itself" in shown
    assert "exact match" not in shown
    assert "by length" not in shown
    assert len(repr(untrained)) < 400


@pytest.mark.parametrize("kind", ENGINES)
def test_evaluating_changes_nothing(kind):
    run = digits("model.decoder.dropout=0.3")
    engine, task = engine_of(run, kind), build_task(run.task)
    records = fit(engine, task, run.train)
    next(records)
    weights, state, rng = engine.weights(), engine.state(), torch.get_rng_state()
    assert evaluate(engine, task).to_dict() == evaluate(engine, task).to_dict()
    assert torch.equal(rng, torch.get_rng_state())
    assert all(np.array_equal(weights[n], a) for n, a in engine.weights().items())
    assert all(np.array_equal(state[n], a) for n, a in engine.state().items())
    undisturbed = engine_of(run, kind)
    other = fit(undisturbed, task, run.train)
    next(other)
    assert next(records).loss == next(other).loss


def test_log_softmax_is_exact_and_safe():
    x = np.array([[1e5, 0.0], [-1e30, -1e30]], np.float32)
    assert log_softmax(x)[0, 0] == 0.0
    assert log_softmax(x)[1] == pytest.approx([-math.log(2)] * 2)
    assert log_softmax(x).dtype == np.float64


def test_examples_of_which_nothing_counts_are_refused():
    """Common strings are in no held-out split, so an early position has no weight there."""
    engine, task = half_trained("machine")

    class Silent:
        def __getattr__(self, name):
            return getattr(task, name)

        def batch(self, split, rows):
            batch = task.batch(split, rows)
            return replace(batch, weights=np.zeros_like(batch.weights))

    with pytest.raises(InputError, match="nothing counts in the first 5 examples of 'val'"):
        evaluate(engine, Silent(), split="val", examples=5)


def test_a_split_that_is_not_there_is_refused():
    engine, task = half_trained("digits")
    with pytest.raises(InputError, match="no split 'tset'") as caught:
        evaluate(engine, task, split="tset")
    assert "test" in caught.value.hint
