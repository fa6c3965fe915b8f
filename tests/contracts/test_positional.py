"""Positional attention on the digits task: right places, masses and routes, cuts; and learned."""

import numpy as np
import pytest
import torch
from bench.findings.positional import (
    BAR,
    COPYING,
    SITES,
    cut_accuracy,
    positional_attention,
    right_places,
)

from glassformer.data.build_task import build_task
from glassformer.data.tasks.digits import answer_of
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import TrainingRun
from glassformer.models.model import build
from glassformer.nn.taps import Taps
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import DigitsTask, SequenceTask

TASK = build_task(DigitsTask(examples=400, max_length=4))


def model_of(*, layers=2, seed=3):
    """Weights large enough that its heads look somewhere, and its answers depend on all parts."""
    spec = presets.digits(d_model=16, n_heads=2, n_layers=layers, d_ff=24)
    model = build(spec, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.mul_(3.0)
    return model.eval()


def test_the_right_place_holds_the_answer():
    """By the task's own answers: the marked places hold it; FIRST, SECOND and LAST mark one."""
    rows = np.arange(TASK.sizes()["train"])
    batch, lengths = TASK.batch("train", rows), TASK.lengths("train")[rows]
    asked = np.array(TASK.groups("train", rows)["operation"])
    for operation in COPYING:
        these = asked == operation
        right = right_places(operation, batch.tokens[these], lengths[these])
        for tokens, length, marks in zip(batch.tokens[these], lengths[these], right, strict=True):
            digits = [int(digit) for digit in tokens[1 : length - 1]]
            answer = answer_of(operation, digits)
            marked = np.flatnonzero(marks)
            assert len(marked) >= 1 and (tokens[marked] == answer).all()
            assert (marked >= 1).all() and (marked < length - 1).all()
            if operation in ("MAX", "MIN"):
                assert len(marked) == digits.count(answer)
            else:
                want = {"FIRST": 1, "SECOND": 2, "LAST": length - 2}[operation]
                assert marked.tolist() == [want]


def test_masses_and_routes_are_the_slow_ones():
    """One example at a time, unpadded, from the taps."""
    model = model_of()
    found = positional_attention(model, TASK, split="val", operations=("LAST", "MAX"))
    rows = np.arange(TASK.sizes()["val"])
    asked = TASK.groups("val", rows)["operation"]
    for place, operation in enumerate(found.operations):
        direct, routed = [], []
        for row in (r for r in rows if asked[r] == operation):
            batch, length = TASK.batch("val", np.array([row])), int(TASK.lengths("val")[row])
            tokens = batch.tokens[:, :length]
            taps = Taps(read="*.attn.weights")
            with torch.no_grad():
                model(tokens, taps=taps)
            right = np.flatnonzero(right_places(operation, tokens, np.array([length]))[0])
            maps = [taps.seen[f"blocks.{i}.attn.weights"][0].double().numpy() for i in range(2)]
            direct.append([maps[h.layer][h.head, -1, right].sum() for h in found.heads])
            between = [p for p in range(length - 1) if p not in right]
            routed.append(
                [
                    [
                        sum(maps[1][a, -1, p] * maps[0][b, p, right].sum() for p in between)
                        for b in range(2)
                    ]
                    for a in range(2)
                ]
            )
        assert found.counts[place] == len(direct)
        assert np.allclose(found.tensor[place].numpy(), np.mean(direct, axis=0), atol=1e-6)
        route = found.routes[place]
        assert route is not None
        table = np.mean(routed, axis=0)
        assert route.mass == pytest.approx(table.max(), abs=1e-6)
        assert (route.later.layer, route.earlier.layer) == (1, 0)
        assert table[route.later.head, route.earlier.head] == pytest.approx(table.max())
        head, mass = found.best(operation)
        assert mass == pytest.approx(np.mean(direct, axis=0).max(), abs=1e-6)
        assert str(head) in repr(found)


def test_cuts_close_one_place_of_one_layer():
    """Against a forward with a hand-made edit of the same tap."""
    model = model_of()
    rows = np.arange(TASK.sizes()["test"])
    batch, lengths = TASK.batch("test", rows), TASK.lengths("test")[rows]
    asked = np.array(TASK.groups("test", rows)["operation"])
    changed = 0
    with torch.no_grad():
        plain = model(batch)["answer"].argmax(-1).numpy()
        for layer in range(2):
            for site in SITES:

                def closed(x, site=site):
                    x = x.clone()
                    for b, length in enumerate(lengths):
                        at = {"operation": [0], "answer": [length - 1]}
                        x[b, :, at.get(site, range(1, length - 1))] = 0.0
                    return x

                taps = Taps(edit={f"blocks.{layer}.attn.heads": closed})
                answers = model(batch, taps=taps)["answer"].argmax(-1).numpy()
                right = answers == batch.targets["answer"]
                want = {op: right[asked == op].mean() for op in TASK.spec.operations}
                assert cut_accuracy(model, TASK, layer=layer, site=site) == pytest.approx(want)
                changed += int((answers != plain).sum())
    assert changed > 50, "cuts that change nothing would pass without being made"


def test_one_layer_has_no_way_round():
    found = positional_attention(model_of(layers=1), TASK)
    assert found.routes == (None, None, None)
    assert found.rows()[0]["route"] is None
    assert found.tensor.shape == (3, 2)


def test_the_value_shows_itself(tmp_path):
    found = positional_attention(model_of(), TASK, operations=COPYING)
    assert len(found.rows()) == len(COPYING)
    assert "<script" not in found.html()
    for ending in ("png", "csv", "json", "html"):
        assert found.save(tmp_path / f"positions.{ending}").stat().st_size > 100


def test_what_has_no_right_position_is_refused():
    model, reverse = model_of(), build_task(SequenceTask(examples=100))
    for call in (
        lambda: positional_attention(model, reverse),
        lambda: positional_attention(model, TASK, operations=("SUM",)),
        lambda: positional_attention(model, TASK, rows=np.array([0])),
        lambda: positional_attention(model, TASK).best("MAX"),
        lambda: cut_accuracy(model, TASK, layer=7, site="answer"),
        lambda: cut_accuracy(model, TASK, layer=0, site="elsewhere"),
        lambda: positional_attention(build(presets.budget_lm(vocab_size=20)), TASK),
    ):
        with pytest.raises(InputError):
            call()


def test_a_causal_model_learns_to_look_at_the_right_position(tmp_path):
    """Where no token can read what comes after it, each operation's digit is looked at directly."""
    spec = recipe(
        "digits",
        [
            'task.operations=["FIRST","SECOND","LAST"]',
            "task.examples=3000",
            "model.decoder.layers.block.attention.causal=true",
            "train.batch_size=64",
            "train.steps=500",
            "train.seed=1",
            "engine=torch",
            "train.evaluate_every=500",
            "train.checkpoint_every=500",
        ],
    )
    run = TrainingRun(spec, tmp_path / "run")
    run.prepare()
    for _ in run.events():
        pass
    found = positional_attention(run.engine.model, run.task)
    for operation in ("FIRST", "SECOND", "LAST"):
        assert found.best(operation)[1] >= BAR, repr(found)
    assert min(found.accuracy) > 0.95
