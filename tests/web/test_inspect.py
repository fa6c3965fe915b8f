"""What the page Inspect is sent: Python's own numbers, masked cells as such, refusals in words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.lens.measure.probes import read_probes
from glassformer.spec.errors import InputError
from glassformer.web.app import limits
from glassformer.web.app.query import Bytes, Query, TooLarge, Unknown
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import inspect

TEXT = "SECOND 7 3 9 SEP"


@pytest.fixture(scope="session")
def lab(runs: Path) -> Workspace:
    return Workspace(runs)


def asked(lab: Workspace, *, ablate: list[str] | None = None, **body: Any) -> dict[str, Any]:
    sent = inspect.inspect(Query(body={"run": "digits-0", **body}), lab)
    return sent if ablate is None else ablated(lab, sent["key"], ablate)


def ablated(lab: Workspace, key: str, heads: list[str]) -> dict[str, Any]:
    return inspect.ablate(Query(path={"key": key}, body={"ablate": heads}), lab)


def fetched(lab: Workspace, what: Any, key: str, **options: Any) -> Any:
    given = {name: str(value) for name, value in options.items()}
    return what(Query(path={"key": key}, options=given), lab)


def array(sent: Bytes) -> np.ndarray:
    return np.frombuffer(sent.data, sent.dtype).reshape(sent.shape)


def test_a_text_is_looked_at_as_python_does(lab, runs):
    sent = asked(lab, text=TEXT, target="3")
    own = gf.load(runs / "digits-0").inspect(TEXT, target="3")
    assert sent["words"] == list(own.words)
    assert sent["loss"] == own.loss
    assert sent["parameters"] == gf.load(runs / "digits-0").get_num_parameters()
    at = fetched(lab, inspect.position, sent["key"], position=2, top=5)
    assert [(row["id"], row["word"], row["p"]) for row in at["next"]] == own.next(2, 5)
    assert [row["kl"] for row in at["lens"]] == own.lens.kl[:, 2].tolist()
    assert [row["residual"] for row in at["norms"]] == own.norms.residual[:, 2].tolist()
    assert at["norms"][1]["added"] == float(own.norms.attention[0, 2])
    assert at["norms"][2]["added"] == float(own.norms.mlp[0, 2])
    weights = array(fetched(lab, inspect.attention, sent["key"], layer=1, head=3))
    assert np.array_equal(weights, own.attention[1, 3].tensor.numpy())
    mean = array(fetched(lab, inspect.attention, sent["key"], layer=1, head="mean"))
    assert np.array_equal(mean, own.attention.mean(1).tensor.numpy())
    ranking = fetched(lab, inspect.ranking, sent["key"])
    assert ranking == {"by": "loss", "rows": own.ranking().rows()}


def test_thumbnails_are_the_weights_in_bytes(lab, runs):
    sent = asked(lab, text=TEXT)
    small = array(fetched(lab, inspect.thumbnails, sent["key"]))
    own = gf.load(runs / "digits-0").inspect(TEXT).attention.tensor.numpy()
    assert small.shape == own.shape
    assert np.abs(small / 254 - own).max() <= 0.5 / 254 + 1e-7


def test_an_ablation_tells_before_and_after(lab, runs):
    sent = asked(lab, text=TEXT, target="3", ablate=["L1H3", "L0H0"])
    own = gf.load(runs / "digits-0").inspect(TEXT, target="3").ablate("L1H3", "L0H0")
    assert sent["ablated"] == ["L1H3", "L0H0"]
    assert (sent["loss_before"], sent["loss"]) == (own.before.loss, own.after.loss)
    at = fetched(lab, inspect.position, sent["key"], position=4)
    assert at["before"]["kl"] == pytest.approx(float(own.kl[4]), rel=1e-5)
    assert at["before"]["top"]["word"] == own.before.next(4, 1)[0][1]
    both = {row["id"]: share for row, share in zip(at["next"], at["before"]["p"], strict=True)}
    for i, _, share in own.before.next(4, 20):
        if i in both:
            assert both[i] == pytest.approx(share, rel=1e-5)


def test_an_ablation_costs_one_pass_and_gives_the_numbers_of_two(lab, runs, monkeypatch):
    sent = asked(lab, text=TEXT, target="3")
    model = lab.model("digits-0").model
    passes = []
    hidden = type(model).hidden

    def counted(self, *args, **kwargs):
        passes.append(self)
        return hidden(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "hidden", counted)
    first = ablated(lab, sent["key"], ["L1H3"])
    assert passes == [model]
    second = ablated(lab, first["key"], ["L1H3", "L0H0"])  # of an ablation: from the same baseline
    assert passes == [model, model]
    monkeypatch.undo()
    own = gf.load(runs / "digits-0").inspect(TEXT, target="3")
    for found, heads in ((first, ("L1H3",)), (second, ("L1H3", "L0H0"))):
        wanted = own.ablate(*heads)
        assert found["ablated"] == list(heads)
        assert (found["loss_before"], found["loss"]) == (wanted.before.loss, wanted.after.loss)
        np.testing.assert_array_equal(found["losses"], wanted.after.losses.numpy())
        weights = array(fetched(lab, inspect.attention, found["key"], layer=1, head=3))
        assert np.array_equal(weights, wanted.after.attention[1, 3].tensor.numpy())


def test_another_model_is_compared_on_the_same_tokens(lab, runs):
    ours, theirs = asked(lab, text=TEXT, target="3"), asked(lab, text=TEXT, target="3", step="4")
    options = {"layer": 1, "head": 0, "minus": theirs["key"]}
    sent = array(fetched(lab, inspect.attention, ours["key"], **options))
    a = gf.load(runs / "digits-0").inspect(TEXT, target="3")
    b = gf.load(f"{runs}/digits-0@4").inspect(TEXT, target="3")
    difference = a.attention[1, 0].tensor - b.attention[1, 0].tensor
    assert np.array_equal(sent, difference.numpy())
    at = fetched(lab, inspect.position, ours["key"], position=4, against=theirs["key"])
    assert at["against"]["loss"] == pytest.approx(b.loss)
    ours_V, theirs_V = (_answers(f"{runs}/digits-0@{step}", a.ids) for step in ("best", "4"))
    kl = float((theirs_V.exp() * (theirs_V - ours_V)).sum())
    assert at["against"]["kl"] == pytest.approx(kl, rel=1e-3)


@torch.no_grad()
def _answers(model: str, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities without the lens."""
    return gf.load(model)(torch.tensor([ids]))[0].double().log_softmax(-1)


def test_fewer_bits_are_a_copy_and_the_model_stays(lab, runs):
    sent = asked(lab, text=TEXT, target="3", precision="int8")
    own = gf.quantize(gf.load(runs / "digits-0"), bits=8).inspect(TEXT, target="3")
    assert sent["loss"] == pytest.approx(own.loss, rel=1e-6)
    assert len(fetched(lab, inspect.ranking, sent["key"])["rows"]) == 8
    assert asked(lab, text=TEXT, target="3")["loss"] == (
        gf.load(runs / "digits-0").inspect(TEXT, target="3").loss
    )


def test_examples_are_offered_watched_ones_first(lab):
    told = inspect.about(Query(path={"id": "digits-0"}), lab)
    watched = told["watched"]
    assert watched
    assert [each["row"] for each in told["examples"]][: len(watched)] == watched
    assert told["split"] == "val"
    assert told["checkpoints"] == [4, 8, 12]
    other = inspect.about(Query(path={"id": "digits-0"}, options={"split": "test"}), lab)
    assert other["split"] == "test"
    assert other["watched"] == []


def test_an_example_is_its_text(lab):
    row = inspect.about(Query(path={"id": "digits-0"}), lab)["examples"][3]["row"]
    example = asked(lab, split="val", row=row)
    again = asked(lab, text=example["text"], target=example["target"])
    assert example["loss"] == pytest.approx(again["loss"], rel=1e-6)
    assert example["words"] == again["words"]


def test_a_step_without_a_checkpoint_is_shown_from_its_snapshot(lab, runs, tmp_path):
    import shutil

    shutil.copytree(runs / "digits-0", tmp_path / "thin")
    shutil.rmtree(tmp_path / "thin/checkpoints/step-000004")
    thin = Workspace(tmp_path)
    probes = read_probes(tmp_path / "thin/probes/step-000004.safetensors")
    row = probes.examples[1]
    sent = asked(thin, run="thin", step="4", split="val", row=row)
    assert sent["snapshot"] is True
    assert sent["words"] == list(probes.words[1])
    weights = array(fetched(thin, inspect.attention, sent["key"], layer=1, head=2))
    assert np.array_equal(weights, probes.map(1, "L1H2").tensor.numpy())
    at = fetched(thin, inspect.position, sent["key"], position=1)
    assert [row["word"] for row in at["next"]] == [word for word, _ in probes.top(1, 1)]
    with pytest.raises(InputError, match="only a snapshot is kept, of the validation examples"):
        asked(thin, run="thin", step="4", text=TEXT)
    with pytest.raises(InputError, match="no model to quantize"):
        asked(thin, run="thin", step="4", split="val", row=row, precision="int8")
    with pytest.raises(InputError, match="no head of it can be ablated"):
        ablated(thin, sent["key"], ["L0H0"])
    with pytest.raises(InputError, match="holds no model"):
        fetched(thin, inspect.ranking, sent["key"])
    with pytest.raises(Unknown, match="neither a checkpoint nor a snapshot"):
        asked(thin, run="thin", step="5", split="val", row=row)


REFUSED = {
    "no such run": ({"run": "nowhere", "text": TEXT}, "no run called"),
    "no such step": ({"step": "999", "text": TEXT}, "neither a checkpoint nor a snapshot"),
    "no text": ({}, "text is missing"),
    "an unknown word": ({"text": "MEDIAN 7"}, "not in the vocabulary"),
    "a target of two": ({"text": TEXT, "target": "3 4"}, "target of 2 tokens"),
    "no such head": ({"text": TEXT, "ablate": ["L9H0"]}, "no head L9H0"),
    "no head at all": ({"text": TEXT, "ablate": ["<b>"]}, "is not the name of a head"),
    "a row too far": ({"split": "val", "row": 10**9}, "no example"),
    "no such split": ({"split": "secret", "row": 0}, "no examples called"),
    "other bits": ({"text": TEXT, "precision": "int2"}, "precision 'int2' is unknown"),
    "an unknown option": ({"text": TEXT, "temperature": 1}, "there is no option"),
    "too long": ({"text": "7 " * limits.PROMPT_CHARACTERS}, "characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_questions_are_answered_in_words(lab, name):
    body, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        asked(lab, **body)


@pytest.mark.parametrize(
    "options",
    [
        {"layer": 7, "head": 0},
        {"layer": 0, "head": 99},
        {"layer": 0, "head": "first"},
        {"layer": 0, "head": 0, "kind": "cross"},
        {"layer": 0, "head": 0, "minus": "0" * 16},
    ],
)
def test_no_such_map(lab, options):
    key = asked(lab, text=TEXT)["key"]
    with pytest.raises(InputError):
        fetched(lab, inspect.attention, key, **options)


def test_masked_cells_are_nan_and_never_a_zero(causal):
    key = asked(causal, run="text", text="abcab")["key"]
    weights = array(fetched(causal, inspect.attention, key, layer=0, head=0))
    assert np.isnan(weights).tolist() == np.triu(np.ones((5, 5), bool), 1).tolist()
    assert np.nansum(weights, axis=1) == pytest.approx(np.ones(5), abs=1e-6)
    small = array(fetched(causal, inspect.thumbnails, key))
    assert (small[0, 0] == 255).tolist() == np.isnan(weights).tolist()
    long = asked(causal, run="text", text="ab" * 32)["key"]
    pooled = array(fetched(causal, inspect.thumbnails, long))[0, 0]
    full = np.nan_to_num(array(fetched(causal, inspect.attention, long, layer=0, head=0)))
    assert pooled.shape == (32, 32)
    patches = full.reshape(32, 2, 32, 2).max(axis=(1, 3))
    seen = pooled != 255
    assert seen.tolist() == np.tril(np.ones((32, 32), bool)).tolist()
    assert np.abs(pooled[seen] / 254 - patches[seen]).max() <= 0.5 / 254 + 1e-7


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A tiny language model over three letters."""
    from glassformer.lab.api import train

    folder = tmp_path_factory.mktemp("causal")
    (folder / "letters.txt").write_text("abcabacbabcbacab" * 40, encoding="utf-8")
    told = ("task.tokenizer=characters", "task.length=64", "train.batch_size=2", "train.steps=2")
    path = f"task.path={folder / 'letters.txt'}"
    train("text", name="text", runs=folder / "runs", overrides=(path, *told))
    return Workspace(folder / "runs")


def test_maps_of_different_tokens_have_no_difference(lab):
    long, short = asked(lab, text=TEXT)["key"], asked(lab, text="MAX 7 3 SEP")["key"]
    with pytest.raises(InputError, match="different tokens"):
        fetched(lab, inspect.attention, long, layer=0, head=0, minus=short)
    at = fetched(lab, inspect.position, long, position=1, against=short)
    assert at["against"]["kl"] is None


def test_old_looks_are_let_go_by_their_size(runs, monkeypatch):
    lab = Workspace(runs)
    monkeypatch.setattr(limits, "RESULT_BYTES", 2_000)  # two layers x four heads x 25 cells is 800
    keys = [asked(lab, text=TEXT)["key"] for _ in range(4)]
    for key in keys[:2]:
        with pytest.raises(Unknown, match="no longer kept"):
            lab.results.get(key)
    assert lab.results.get(keys[-1]).inspection.words
    assert lab.results.get(keys[-2]).inspection.words


def test_a_key_of_another_page_is_refused(lab):
    key = lab.results.put({"something": "else"})
    with pytest.raises(Unknown, match="another page"):
        fetched(lab, inspect.thumbnails, key)


def test_too_many_tokens_are_refused_before_the_pass(lab, monkeypatch):
    monkeypatch.setattr(limits, "PROMPT_TOKENS", 3)
    with pytest.raises(TooLarge, match="at most 3 are inspected"):
        asked(lab, text=TEXT)
