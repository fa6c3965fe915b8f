"""The page Design's answers are the solver's own; what it cannot answer it says, and soon."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glassformer.budget.design import EXPANSIONS, RATIOS, drift, landscape
from glassformer.budget.question import Budget
from glassformer.cli.main import app
from glassformer.costs.estimates import cache_bytes, flops, training_memory, weight_bytes
from glassformer.lab.budget_report import design as solve
from glassformer.lab.budget_report import run_of_design
from glassformer.lab.runs.record import to_toml
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import manifest
from glassformer.web.app.query import Query, to_json
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import design as page

LAB = Workspace(Path("nowhere"))


def asked(**settings: Any) -> dict[str, Any]:
    """The page's answer."""
    options = {name: str(value) for name, value in settings.items()}
    return page.design(Query(options=options), LAB)


CASES: list[dict[str, Any]] = [
    {},
    {"params": "350k", "vocab": 2000, "length": 128, "heads": 4},
    {"tied": False, "embedding_ratio": "45%"},
    {"embedding_ratio": "free", "glu_expansion": 4, "multiple": 64},
    {"heads": "any", "params": 1_000_000, "vocab": 256},
    {"exact_expansion": True, "position": "rotary", "norm": "rmsnorm"},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_answer_is_the_solvers(settings: dict[str, Any]) -> None:
    told = asked(
        **{k: str(v).lower() if v is False or v is True else v for k, v in settings.items()}
    )
    given = {**page.DEFAULTS, **settings}
    answer = solve(given.pop("params"), given.pop("vocab"), **given)
    best, model = answer.best, answer.spec
    assert told["design"]["params"] == best.params
    assert told["verdict"][0].startswith(f"{best.params:,} parameters ({best.miss})")
    assert told["design"]["d_model"] == best.sizes.d_model
    assert told["gave_way"] == list(answer.gave_way)
    assert [each["params"] for each in told["alternatives"]] == [
        each.params for each in (best, *answer.alternatives)
    ]
    lines = {line["name"]: line for line in told["lines"]}
    counted = sum(p.size for p in manifest(model) if p.tied_to is None)
    whole = [line["parameters"] for line in told["lines"][:-1] if not line["indented"]]
    assert sum(whole) == lines["total"]["parameters"] == counted
    parts = [line["parameters"] for line in told["lines"] if line["indented"]]
    assert sum(parts) == lines["layers"]["parameters"]
    costs = {row["name"]: row["value"] for row in told["costs"]}
    length = model.max_seq_len
    memory = training_memory(model, batch=page.BATCH, length=length)
    assert costs["forward, per token"] == flops(model, length=length).forward / length
    assert costs["training, at most"] == memory.peak
    assert costs["weights and AdamW"] == memory.weights + memory.optimizer
    assert costs["KV cache, per token"] == cache_bytes(model, batch=1, length=1, itemsize=4)
    for form, count in weight_bytes(model).items():
        assert costs[f"weights in {form}"] == count
    json.loads(to_json(told))


def test_the_command_gives_the_same_answer() -> None:
    told = asked(params="2M", vocab=1000, tied="false", glu_expansion=3, min_layers=2, heads=4)
    words = told["cli"].split()
    assert words[:2] == ["glass", "design"]
    said = CliRunner().invoke(app, [*words[1:], "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["params"] == told["design"]["params"]
    found: dict[str, Any] = {}
    exec(told["python"].replace("print(answer)", ""), found)
    assert found["answer"].best.params == told["design"]["params"]


def test_a_budget_without_a_design_says_why_and_what_would_do() -> None:
    told = asked(params=10_000)
    why = told["infeasible"]
    assert "16,000 tokens" in why["why"] and "verdict" not in told
    assert why["changes"]
    for change in why["changes"]:
        again = asked(**{"params": 10_000, **change["settings"]})
        assert "verdict" in again, change
    exact = asked(params="1M", vocab=256, exact_ratio="true", embedding_ratio=0.9, tolerance=0.001)
    assert {"ratio_within", "embedding_ratio"} <= {
        name for change in exact["infeasible"]["changes"] for name in change["settings"]
    }
    for change in exact["infeasible"]["changes"]:
        settings = {"params": "1M", "vocab": 256, "exact_ratio": True, "embedding_ratio": 0.9}
        settings |= {"tolerance": 0.001, **change["settings"]}
        plain = {k: str(v).lower() if isinstance(v, bool) else v for k, v in settings.items()}
        assert "verdict" in asked(**plain), change


def test_unusual_shapes_are_warned_of_and_the_button_mends_them() -> None:
    told = asked(shape="classic", tied="false")
    (warning,) = told["warnings"]
    assert warning["what"] == "an unusual shape: 42 layers of width 112"
    mended = asked(shape="classic", tied="false", heads="any", **warning["settings"])
    assert not mended["warnings"]
    (odd,) = asked(shape="classic")["warnings"]
    assert odd["what"] == "an unusual width of heads: 27"
    assert not asked(shape="classic", **odd["settings"])["warnings"]
    wide = asked(params="1G", vocab=50_000, embedding_ratio=0.35)
    assert "one layer of width" in wide["warnings"][0]["what"]
    assert "width of heads" in wide["warnings"][1]["what"]
    narrower = {k: v for warning in wide["warnings"] for k, v in warning["settings"].items()}
    assert not asked(params="1G", vocab=50_000, **narrower)["warnings"]


def test_what_an_alternative_is_asked_for_by_gives_it() -> None:
    for each in asked()["alternatives"]:
        if each["settings"]:
            settings = {k: str(v).lower() for k, v in each["settings"].items()}
            assert asked(**settings)["design"]["params"] == each["params"], each["name"]


def test_the_controls_are_the_options_of_a_budget() -> None:
    told = page.design_controls(Query(), LAB)
    json.loads(to_json(told))
    listed = {each["name"]: each for each in told["options"]}
    assert list(listed) == [field.name for field in dataclasses.fields(Budget)]
    assert listed["position"]["kind"] == "choice" and "rotary" in listed["position"]["choices"]
    assert listed["tied"]["kind"] == "flag" and listed["tied"]["default"] is True
    assert {name for name, each in listed.items() if each["shown"]} == set(page.DEFAULTS)
    assert told["wishes"]["embedding_ratio"] == ["exact_ratio", "ratio_within"]


def test_the_landscape_is_the_figures() -> None:
    lines = list(page.design_landscape(Query(body={"params": "350k", "vocab": "2000"}), LAB))
    assert lines[0]["ratios"] == list(RATIOS) and lines[0]["expansions"] == list(EXPANSIONS)
    given = {**page.DEFAULTS, "params": "350k", "vocab": 2000}
    cells = landscape(solve(given.pop("params"), given.pop("vocab"), **given).budget)
    assert len(lines) == 1 + len(RATIOS) * len(EXPANSIONS)
    for line in lines[1:]:
        found = cells[line["row"]][line["column"]]
        assert found is not None
        assert line["cell"]["n_layers"] == found.sizes.n_layers
        assert line["cell"]["params"] == found.params
        assert line["cell"]["drift"] == drift(found)
    empty = list(page.design_landscape(Query(body={"params": "10k"}), LAB))
    assert all(line["cell"] is None for line in empty[1:])


def test_the_config_is_what_the_command_saves() -> None:
    told = page.design_config(Query(options={"params": "350k", "vocab": "2000"}), LAB)
    read = tomllib.loads(told["toml"])
    assert read["model"]["vocab_size"] == 2000
    given = {**page.DEFAULTS, "params": "350k", "vocab": 2000}
    answer = solve(given.pop("params"), given.pop("vocab"), **given)
    assert told["toml"] == to_toml(run_of_design(answer, batch=page.BATCH))
    with pytest.raises(InputError, match="256 byte pairs"):
        page.design_config(Query(options={"vocab": "100"}), LAB)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"params": "two"}, "not a number"),
        ({"params": "1e400"}, "too large"),
        ({"params": "-5"}, "outside 1"),
        ({"params": "9G"}, "outside 1"),
        ({"params": "nan"}, "finite"),
        ({"vocab": "0"}, "outside 1"),
        ({"heads": "1000000"}, "outside 1"),
        ({"heads": "free"}, "not a number"),
        ({"embedding_ratio": "7"}, "outside"),
        ({"embedding_ratio": "inf"}, "finite"),
        ({"glu_expansion": "-1"}, "not a positive number"),
        ({"tied": "maybe"}, "neither true nor false"),
        ({"tolerance": "0"}, "tolerance of 0"),
        ({"position": "<script>"}, "not one of"),
        ({"length": "1.5"}, "whole number"),
        ({"colour": "red"}, "there is no option"),
        ({"params": "1" * 50}, "characters"),
        ({"min_layers": "5", "max_layers": "2"}, "below min_layers"),
        ({"kv_heads": "3"}, "does not divide"),
    ],
)
def test_bad_values_are_told_in_words(settings: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        asked(**settings)


def test_a_search_is_given_up_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PATIENCE", 0.0)
    monkeypatch.setattr(page, "CELL_PATIENCE", 0.0)
    monkeypatch.setattr(page, "LANDSCAPE_PATIENCE", 0.0)
    long = {"params": "1G", "vocab": "256", "embedding_ratio": "0.001", "heads": "1"}
    with pytest.raises(InputError, match="nothing was found in") as caught:
        asked(**long)
    assert "glass design --params 1000000000" in caught.value.hint
    simple = {"params": "1G", "vocab": "50000", "heads": "1", "glu_expansion": "free"}
    monkeypatch.setattr(page, "PATIENCE", 30.0)
    lines = list(page.design_landscape(Query(body=simple), LAB))
    assert any(line.get("late") for line in lines[1:])


def test_what_is_not_proven_is_shown_and_what_is_undecided_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked()["not_proven"] == []
    monkeypatch.setitem(page.MOST, "params", 10**10)
    open_ended = {"params": 9_000_000_007, "vocab": 3, "tolerance": 1e-10, "heads": 7}
    open_ended |= {"length": 11_131, "norm": "rmsnorm", "bias": "all", "shape": "classic"}
    open_ended |= {"glu_expansion": 2.7, "glu_within": 1e-4, "rank": "any"}
    with pytest.raises(InputError, match="did not rule one out") as caught:
        asked(**open_ended)
    assert caught.value.hint.startswith(
        "the command can search on: glass design --params 900000000"
    )
    assert caught.value.hint.endswith(" --thorough")
