"""The page Model: its pictures are Python's own, a part's table is the manifest's."""

from pathlib import Path

import pytest

import glassformer as gf
from glassformer.lens.show.diagram import Diagram
from glassformer.lens.show.outline import outline
from glassformer.web.app.workspace import Workspace
from tests.web.conftest import Client, Opener


@pytest.fixture(scope="module")
def asked(talkers: Workspace, open_app: Opener) -> Client:
    """The app over one run of each kind."""
    return open_app(talkers.root)


def words_of(tree: list) -> list[str]:
    """Every text of a tree, in order."""
    found = []
    for each in tree[2:]:
        found += [each] if isinstance(each, str) else words_of(each)
    return found


def test_the_picture_is_pythons(asked: Client, talkers: Workspace) -> None:
    for name in ("digits", "reverse", "text"):
        found = asked.get(f"/api/runs/{name}/model")
        spec = gf.load(talkers.root / name).spec
        chosen = "encoder.blocks.0.attn" if name == "reverse" else "blocks.0.attn"
        own = Diagram(spec, layout="narrow", insides=False, chosen=chosen, title=name)
        assert found["picture"] == own.element().tree()
    two = asked.get("/api/runs/reverse/model?wide=1")
    assert two["two"] and two["picture"] != found["picture"]


def test_every_part_has_its_parameters(asked: Client, talkers: Workspace) -> None:
    spec = gf.load(talkers.root / "reverse").spec
    for column in outline(spec):
        for part in column.parts():
            found = asked.get(f"/api/runs/reverse/model?part={part.key}")
            words = words_of(["div", {}, *found["part"]])
            assert words[0] == part.title
            for parameter in part.parameters:
                assert parameter.name.removeprefix(f"{part.key}.") in words
            assert not part.parameters or f"{part.count:,}" in words


def test_another_layer_has_its_own_names(asked: Client) -> None:
    found = asked.get("/api/runs/reverse/model?part=decoder.blocks.0.cross&layer=1")
    words = words_of(["div", {}, *found["part"]])
    assert "decoder.blocks.1.cross" in words and "cross.L1H0" in words


def test_the_way_is_pythons(asked: Client, talkers: Workspace) -> None:
    found = asked.get("/api/runs/digits/model/way?text=SECOND+7+3+9&position=2&wide=1")
    own = gf.load(talkers.root / "digits").inspect("SECOND 7 3 9").token_path(2)
    assert found["way"][2] == own.element().tree()
    assert found["position"] == 2
    first = asked.get("/api/runs/digits/model/way")
    assert first["text"] and first["position"] == len(first["way"][1][2:]) - 1  # where it answers
    narrow = asked.get("/api/runs/reverse/model/way?row=3&split=val")
    assert narrow["way"][2][1]["viewBox"].split()[2] == "336"


def test_a_model_without_a_run_has_a_prompt(tmp_path: Path, open_app: Opener) -> None:
    gf.save(gf.build(gf.preset("digits")), tmp_path / "bare")
    client = open_app(tmp_path)
    assert client.get("/api/runs/bare/model")["run"] == "bare"


def test_what_is_not_there_is_refused(asked: Client) -> None:
    for path in (
        "digits/model?part=blocks.7.attn",
        "digits/model?colour=red",
        "digits/model/way?position=99",
        "digits/model?part=blocks.0.attn&layer=x",
    ):
        assert asked.ask(f"/api/runs/{path}").status == 400, path
    assert asked.ask("/api/runs/nobody/model").status == 404
