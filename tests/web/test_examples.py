"""What of an example a model is given; what a run, a model and a token are called on the page."""

import json
from pathlib import Path

import numpy as np
import pytest

import glassformer as gf
from glassformer.data.build_task import build_task
from glassformer.lab.quantize import Wish, quantize_folder
from glassformer.lab.recipes import recipe
from glassformer.lab.runs import table
from glassformer.models.prompts import text_prompt
from glassformer.spec.quantization import QuantSpec
from glassformer.web.app.query import Query, Unknown
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import generate, inspect
from glassformer.web.pages import runs as listing
from glassformer.web.pages.inspect import example_of, offered, opening, task_of
from tests.adapters import folders


@pytest.mark.parametrize("name", ["reverse", "parity", "fsm", "brackets"])
def test_an_opening_is_read_as_the_example_begins(name: str) -> None:
    spec = recipe(name, ["task.examples=80"])
    task = build_task(spec.task)
    for row in range(5):
        asked = example_of(task, "val", row)
        read = text_prompt(spec.model, task.tokenizer, opening(asked, task.tokenizer))
        batch = asked.batch
        if batch.source is not None:
            assert read.sources[0] == tuple(batch.source.tokens[0][batch.source.valid[0]].tolist())
            continue
        assert read.tokens[0] == tuple(batch.tokens[0][: len(read.tokens[0])].tolist())
        assert 1 < len(read.tokens[0]) < batch.valid[0].sum(), "something is left to say"
        first = np.flatnonzero(batch.weights[0] > 0)
        if len(first) and first[0]:
            assert len(read.tokens[0]) == first[0] + 1, "all that is given, nothing that is asked"


def test_a_question_is_its_own_opening_and_an_answer_is_not_in_it(talkers: Workspace) -> None:
    for run, shown in (("digits", "SEP"), ("reverse", "->")):
        task = task_of(run, talkers)
        for one in offered(task, "val"):
            question, _, answer = one["text"].partition(shown)
            assert answer.strip() and one["prompt"].removesuffix(" SEP") == question.strip()


def test_a_piece_of_a_sign_is_called_by_its_number(tmp_path: Path) -> None:
    lab = Workspace(folders.write_model(tmp_path / "runs" / "qwen"))
    body = {"run": "qwen", "prompt": "The cat", "mode": "sample", "max_new_tokens": 24, "seed": 1}
    lines = list(generate.generate(Query(body=body), lab))
    words = [one["word"] for line in lines[1:-1] for one in (line, *line["alternatives"])]
    assert any(word.startswith("<id ") for word in words)
    assert not any("\N{REPLACEMENT CHARACTER}" in word for word in words)


def test_a_quantized_model_has_as_many_parameters_as_its_twin(
    talkers: Workspace, tmp_path: Path
) -> None:
    model = gf.load(talkers.folder("digits"))
    wish = Wish(spec=QuantSpec())
    quantize_folder(f"{talkers.folder('digits')}@best", tmp_path / "small", wish)
    asked = Query(body={"run": "small", "text": "SECOND 7 3 9"})
    sent = inspect.inspect(asked, Workspace(tmp_path / "small"))
    small = gf.load(tmp_path / "small")
    assert sent["parameters"] == model.get_num_parameters() == small.get_num_parameters()


def test_what_tells_runs_apart_comes_first(talkers: Workspace) -> None:
    found = {run: table.settings(talkers.folder(run)) for run in ("digits", "reverse", "text")}
    keys = table.differing(found)["keys"]
    assert keys[:2] == ["task.kind", "task.operation"]
    assert keys.index("model.decoder.layers.0.count") < keys.index("train.steps")
    assert {key.partition(".")[0] for key in keys[-5:]} == {"model"}


def test_a_model_is_named_as_a_command_here_would(
    talkers: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.write_model(tmp_path / "models" / "qwen")
    monkeypatch.chdir(tmp_path)
    (line,) = listing.list_runs(Query(), Workspace(folder))["runs"]
    assert line["path"] == "models/qwen" and gf.load(line["path"]).tokenizer
    elsewhere = listing.list_runs(Query(), talkers)
    assert elsewhere["folder"] == "runs", "where the folder lies on the disk is left out"
    assert "/tmp" not in json.dumps(elsewhere)


def test_a_run_that_ended_early_is_not_waited_for(runs: Path, tmp_path: Path) -> None:
    young = tmp_path / "young"
    young.mkdir()
    (young / "run.json").write_bytes((runs / "quick" / "run.json").read_bytes())
    with pytest.raises(Unknown, match="has no checkpoint") as told:
        Workspace(tmp_path).checkpoint("young")
    assert "ended before" in told.value.hint
