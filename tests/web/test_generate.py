"""The page Generate streams what `decode` and `beam_search` make, and stops when nobody listens."""

import json
import math
import threading
from typing import Any

import pytest
import torch

from glassformer.generation.beam import beam_search
from glassformer.generation.streaming import generate_batch
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.spec.options import options_of
from glassformer.web.app import limits
from glassformer.web.app.query import Busy, Query, TooLarge, Unknown, to_json
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import generate as page
from glassformer.web.pages.generate import BEAM_TOKENS


def said(lab: Workspace, **body: Any) -> list[dict[str, Any]]:
    """All lines, as the page reads them."""
    lines = page.generate(Query(body={"run": "text", "prompt": "so it", **body}), lab)
    return [json.loads(to_json(line)) for line in lines]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "sample", "seed": 5, "temperature": 0.8, "top_k": 9, "top_p": 0.9},
        {"mode": "sample", "seed": 6, "temperature": 2.0},
        {"mode": "sample", "seed": 7, "temperature": 2.0, "typical_p": 0.5, "min_p": 0.01},
        {"cached": False},
    ],
    ids=str,
)
def test_tokens_are_those_of_decode(talkers: Workspace, settings: dict[str, Any]) -> None:
    start, *lines, end = said(talkers, max_new_tokens=9, **settings)
    model = talkers.model("text")
    own = {name: value for name, value in settings.items() if name not in ("mode", "cached")}
    spec = DecodeSpec(max_new_tokens=9, eos=model.end_ids(), **own)
    (made,) = generate_batch(
        model.stepper(), model.prompt("so it"), spec=spec, tokenizer=model.tokenizer
    )
    assert [line["id"] for line in lines] == list(made.tokens)
    assert end["text"] == made.text and end["finish"] == made.finish
    assert [line["logprob"] for line in lines] == pytest.approx(list(made.logprobs), abs=2e-6)
    assert "".join(line["text"] for line in lines) == made.text
    assert start["cached"] is (settings.get("cached") is not False)
    assert end["seconds"] > 0 and end["tokens_per_second"] > 0


def test_the_page_gets_every_number_and_choice_of_the_specs(talkers: Workspace) -> None:
    told = page.options(Query(), talkers)
    names = {mode: [one["name"] for one in controls] for mode, controls in told.items()}
    assert set(names["greedy"]) < set(names["sample"])
    sampling = {each.name for each in options_of(DecodeSpec) if each.group == "sampling"}
    assert set(names["sample"]) - set(names["greedy"]) == sampling
    assert {"width", "alpha", "penalty", "groups"} < set(names["beam"])
    (most,) = (one for one in told["beam"] if one["name"] == "max_new_tokens")
    assert (most["min"], most["max"], most["default"]) == (1, BEAM_TOKENS, 64)
    assert json.loads(to_json(told)) == told
    for mode, controls in told.items():
        defaults = {one["name"]: one["default"] for one in controls if one["default"] is not None}
        assert page.read_ask(
            Query(body={"run": "text", "prompt": "x", "mode": mode, **defaults})
        ).options == defaults | {"max_new_tokens": 64}


def test_alternatives_are_the_models_own_distribution(talkers: Workspace) -> None:
    _, *lines, _ = said(talkers, max_new_tokens=4, mode="sample", temperature=5.0, seed=1)
    model = talkers.model("text")
    ids = list(model.prompt("so it").tokens[0])
    for line in lines:
        with torch.no_grad():
            chance = model(torch.tensor([ids]))[0, -1].double().softmax(-1)
        best = chance.topk(page.ALTERNATIVES)
        assert [one["id"] for one in line["alternatives"]] == best.indices.tolist()
        told = [one["probability"] for one in line["alternatives"]]
        assert told == pytest.approx(best.values.tolist(), abs=1e-6)
        assert line["probability"] == pytest.approx(float(chance[line["id"]]), abs=1e-6)
        ids.append(line["id"])


def test_a_branch_keeps_what_came_before_it(talkers: Workspace) -> None:
    _, *lines, _ = said(talkers, max_new_tokens=8, mode="sample", seed=3, temperature=1.0)
    other = next(one for one in lines[3]["alternatives"] if one["id"] != lines[3]["id"])
    forced = [line["id"] for line in lines[:3]] + [other["id"]]
    given = ",".join(map(str, forced))
    _, *branch, _ = said(
        talkers, max_new_tokens=8, mode="sample", seed=3, temperature=1.0, forced=given
    )
    assert [line["id"] for line in branch[:4]] == forced
    assert [line["forced"] for line in branch] == [True] * 4 + [False] * 4
    assert branch[3]["alternatives"] == lines[3]["alternatives"]


def test_the_tree_is_that_of_beam_search(talkers: Workspace) -> None:
    start, *grown, end = said(talkers, mode="beam", width=3, max_new_tokens=6, alpha=0.2)
    model = talkers.model("text")
    spec = BeamSpec(width=3, alpha=0.2, max_new_tokens=6, eos=model.end_ids())
    (found,) = beam_search(model.stepper(), model.prompt("so it"), spec=spec, record=True)
    nodes = [node for line in grown for node in line["nodes"]]
    assert len(grown) > 1 and len(nodes) == len(found.tree)
    for node, own in zip(nodes, found.tree, strict=True):
        assert (node["parent"], node["id"], node["position"]) == (
            own.parent,
            own.token,
            own.position,
        )
        assert node["probability"] == pytest.approx(math.exp(own.logprob), abs=1e-6)
    assert [one["score"] for one in end["hypotheses"]] == [h.score for h in found.hypotheses]
    assert [one["node"] for one in end["hypotheses"]] == [h.node for h in found.hypotheses]
    assert start["mode"] == "beam"


def test_a_model_that_answers_says_what_it_offers(talkers: Workspace) -> None:
    (line,) = said(talkers, run="digits", prompt="SECOND 7 3 9")
    model = talkers.model("digits")
    assert line["kind"] == "answer" and "one answer" in line["what"]
    assert line["answers"][0]["word"] == model.answer("SECOND 7 3 9")
    assert line["answers"] == sorted(line["answers"], key=lambda one: -one["probability"])
    with pytest.raises(InputError, match="one answer"):
        said(talkers, run="digits", prompt="SECOND 7 3 9", mode="beam")


def test_an_encoder_reads_the_prompt(talkers: Workspace) -> None:
    start, *lines, end = said(talkers, run="reverse", prompt="3 1 2")
    model = talkers.model("reverse")
    assert [word["word"] for word in start["source"]] == ["3", "1", "2", "EOS"]
    assert "encoder" in start["what"] and end["text"] == model.generate("3 1 2", max_new_tokens=64)
    assert lines


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": limits.NEW_TOKENS + 1}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"mode": "beam", "width": limits.BEAMS + 1}, "width"),
        ({"mode": "beam", "max_new_tokens": BEAM_TOKENS + 1}, "max_new_tokens"),
        ({"mode": "beam", "seed": 3}, "seed has no effect in mode beam"),
        ({"temperature": 1.0}, "temperature has no effect in mode greedy"),
        ({"mode": "sample", "temperature": -1}, "temperature"),
        ({"mode": "sample", "top_p": 0}, "top_p"),
        ({"mode": "sample", "top_k": 0}, "top_k"),
        ({"mode": "sample", "seed": -1}, "seed"),
        ({"mode": "sideways"}, "unknown"),
        ({"forced": "1,x"}, "forced"),
        ({"forced": "999999"}, "outside the vocabulary"),
        ({"forced": ",".join(["1"] * 9), "max_new_tokens": 4}, "9 forced tokens"),
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": 7}, "must be a text"),
        ({"prompt": "\ud800"}, "half a character"),
        ({"prompt": "<img src=x onerror=alert(1)>"}, r"not in the vocabulary|no token|character"),
        ({"prompt": "so it goes" * 10}, "leaves no room"),
        ({"colour": "red"}, "there is no option"),
        ({"step": "../../etc"}, "not a step"),
    ],
)
def test_bad_values_are_told_in_words(talkers: Workspace, body: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        said(talkers, **body)


def test_what_is_too_long_or_not_there(talkers: Workspace) -> None:
    with pytest.raises(TooLarge, match="characters"):
        said(talkers, prompt="a" * (limits.PROMPT_CHARACTERS + 1))
    with pytest.raises(Unknown, match="no run called"):
        said(talkers, run="nobody")
    with pytest.raises(Unknown):
        said(talkers, run="../text")


def test_who_stops_listening_stops_the_work(
    talkers: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the iterator ends the decoding, and the next question finds the place free."""
    monkeypatch.setattr(limits, "PATIENCE_SECONDS", 0.05)
    for mode in ({}, {"mode": "beam", "width": 3}):
        body = {"run": "text", "prompt": "so it", "max_new_tokens": 19, **mode}
        lines = page.generate(Query(body=body), talkers)
        assert next(lines)["kind"] == "start" and next(lines)["kind"] in ("token", "tree")
        held: list[BaseException | None] = []

        def ask(held: list[BaseException | None] = held) -> None:
            try:
                said(talkers, max_new_tokens=1)
                held.append(None)
            except Busy as error:
                held.append(error)

        busy = threading.Thread(target=ask)
        busy.start()
        busy.join()
        assert isinstance(held[0], Busy)
        lines.close()  # type: ignore[attr-defined]  # a generator
        assert said(talkers, max_new_tokens=2)[-1]["kind"] == "end"
