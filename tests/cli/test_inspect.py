"""`glass inspect` as a person and a script meet it: what is said is what the lens computes."""

import json

import pytest

from glassformer.adapters.load import load
from glassformer.cli.verbs import inspect
from glassformer.cli.verbs.inspect import Options
from tests.adapters import folders
from tests.lab.runs import trained
from tests.training.samples import digits, machine, reverse


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Hardly trained runs of each kind, of two layers."""
    place = tmp_path_factory.mktemp("runs")
    two = "model.decoder.layers.0.count=2"
    trained(digits(two), place / "digits")
    trained(digits(two, "train.seed=5"), place / "other")
    trained(digits(), place / "wide")
    trained(reverse(two), place / "reverse")
    trained(machine(), place / "machine")
    return place


@pytest.fixture
def shown(glass, runs):
    """`glass inspect` over these runs."""
    return lambda *words: glass("inspect", *words, "--runs", runs)


def test_the_terminal_says_what_the_lens_computes(shown, runs):
    code, out, err = shown("digits", "MAX 3 1", "--target", "3")
    assert code == 0 and err.startswith("\nnext:\n")
    seen = load(runs / "digits").eval().inspect("MAX 3 1", target="3")
    assert f"loss {seen.loss:.4f}" in out
    _, word, share = seen.next(None, 1)[0]
    assert f"{word} {share:7.2%}" in out
    best = seen.ranking().rows()[0]
    assert f"attention {best['head']} (of all heads, ablating it changes most" in out
    assert f"{best['effect']:+.4f}" in out
    for line in seen.lens.lines(seen.readout.position):
        assert line in out
    assert f"{float(seen.norms.residual[0, -1]):.2f}" in out


def test_the_head_asked_for_is_shown(shown):
    for words in (("--layer", 1, "--head", 0), ("--head", "L1H0")):
        assert "attention L1H0 (as requested)" in shown("digits", "MAX 3 1", *words)[1]
    assert "attention L0 mean (the mean" in shown("digits", "MAX 3 1", "--layer", 0)[1]
    assert "attention cross.L" in shown("reverse", "3 1 4", "--kind", "cross")[1]
    assert "source    3 1 4 EOS" in shown("reverse", "3 1 4")[1]
    assert "head 'next'" in shown("machine", "a b")[1]


def test_ablation_is_the_lens_own(shown, runs):
    code, out, _ = shown("digits", "MAX 3 1", "--target", "3", "--ablate", "L1H0", "--json")
    found = json.loads(out)
    before = load(runs / "digits").eval().inspect("MAX 3 1", target="3")
    ablation = before.ablate("L1H0")
    assert code == 0
    assert found["ablation"]["loss_change"] == pytest.approx(ablation.loss_change, abs=1e-7)
    assert found["ablation"]["kl"] == pytest.approx(ablation.kl.tolist(), abs=1e-7)
    assert found["loss"] == pytest.approx(ablation.after.loss, abs=1e-7)
    assert found["ablated"] == ["L1H0"]
    assert {row["head"] for row in found["ranking"]} == {"L0H0", "L0H1", "L1H1"}
    text = shown("digits", "MAX 3 1", "--target", "3", "--ablate", "L1H0")[1]
    assert f"without L1H0: loss {ablation.loss_change:+.4f}" in text


def test_json_holds_the_chosen_map_and_the_answers(shown, runs):
    found = json.loads(shown("digits", "MAX 3 1", "--head", "L0H1", "--top", 3, "--json")[1])
    seen = load(runs / "digits").eval().inspect("MAX 3 1")
    assert found["attention"]["head"] == "L0H1"
    assert found["attention"]["weights"] == seen.attention[0, 1].tensor.tolist()
    assert [one["word"] for one in found["next"]] == [w for _, w, _ in seen.next(None, 3)]
    assert found["position"] == len(seen.words) - 1
    assert found["loss"] is None


def test_another_model_is_compared(shown, runs, tmp_path):
    asked = ("digits", "MAX 3 1", "--target", "3", "--head", "L1H0", "--against", "other")
    here, there = (
        load(runs / run).eval().inspect("MAX 3 1", target="3") for run in ("digits", "other")
    )
    apart = here.attention[1, 0].tensor - there.attention[1, 0].tensor
    beside = here.compare(there)
    code, out, err = shown(*asked)
    assert code == 0 and err.startswith("\nnext:\n")
    assert f"loss there {there.loss:.4f}   KL(there || here) {beside.kl:.4f}" in out
    assert "L1H0 minus other's" in out
    for value in apart.flatten().tolist():
        assert f"{value:+.3f}" in out
    found = json.loads(shown(*asked, "--json")[1])["against"]
    assert found["difference"] == apart.tolist()
    assert (found["loss"], found["kl"]) == (there.loss, beside.kl)
    assert found["shares"] == list(beside.shares)
    assert json.loads(shown("digits", "MAX 3 1", "--json")[1])["against"] is None
    # without a head the one that matters most here; with --layer a mean
    best = here.ranking().heads[0]
    assert (
        f"{best} minus other's"
        in shown("digits", "MAX 3 1", "--target", "3", "--against", "other")[1]
    )
    mean = here.attention.mean(1).tensor - there.attention.mean(1).tensor
    words = ("digits", "MAX 3 1", "--layer", 1, "--against", "other", "--json")
    assert json.loads(shown(*words)[1])["against"]["difference"] == mean.tolist()
    # heads are silenced here, and not there
    code, out, _ = shown(*asked, "--ablate", "L0H0", "--json")
    silent = here.ablate("L0H0").after
    assert json.loads(out)["against"]["kl"] == pytest.approx(silent.compare(there).kl, abs=1e-7)
    for ending in ("png", "svg", "html", "json"):
        assert shown(*asked, "-o", tmp_path / f"apart.{ending}")[0] == 0
    assert "minus other" in (tmp_path / "apart.html").read_text()


def test_models_of_other_tokens_are_not_compared(shown):
    code, out, err = shown("digits", "MAX 3 1", "--against", "machine")
    assert (code, out) == (2, "")
    assert "'MAX' is not in" in err
    code, _, err = shown("digits", "MAX 3 1", "--against", "wide", "--head", "L1H0")
    assert code == 2
    assert "no head L1H0" in err and "hint: L0H0 to L0H1" in err


@pytest.mark.parametrize("ending", ["png", "svg", "html", "json"])
def test_files_of_every_kind(shown, tmp_path, ending):
    target = tmp_path / f"look.{ending}"
    code, out, err = shown("digits", "MAX 3 1", "--target", 3, "--ablate", "L0H0", "-o", target)
    assert code == 0 and "attention L1H0" in out, "what is saved is also printed"
    assert f"saved {target}" in err
    first = target.read_bytes()
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype", "json": b"{"}
    assert first.startswith(begins[ending])
    shown("digits", "MAX 3 1", "--target", 3, "--ablate", "L0H0", "-o", target)
    assert target.read_bytes() == first
    if ending == "json":
        assert len(json.loads(first)["attention"]["self"]) == 2
    if ending == "html":
        assert b"<script" not in first
        assert b"http://" not in first.replace(b"http://www.w3.org/2000/svg", b"")


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (("MAX 3 1", "--layer", 9), "no head L9H0", "L0H0 to L1H1"),
        (("MAX 3 1", "--head", "L0H9"), "no head L0H9", "L0H0 to L1H1"),
        (("MAX 3 1", "--ablate", "L7H0"), "no head L7H0", "L0H0 to L1H1"),
        (("MAX 3 1", "--ablate", "third"), "'third' is not the name of a head", "write L1H3"),
        (("MAX 3 1", "--layer", 0, "--head", "²"), "'²' is not the name of a head", "write L1H3"),
        (("MAX 3 1", "--head", 1), "of which layer", "--layer 0"),
        (("MAX 3 1", "--head", "L0H1", "--layer", 0), "names the layer", "--head 1"),
        (("MAX 3 1", "--kind", "cross"), "no attention of kind 'cross'", "self"),
        (("MAX 3 1", "--pos", 9), "no position 9", "0 to 3"),
        (("MAX 3 1", "--top", 0), "0 likeliest", "1 to"),
        (("MAX 3 1", "-o", "x.gif"), "does not end in", "-o x.png"),
        (("MAX 3 1", "-o", "no/such/place.png"), "cannot be written", "folder"),
        (("MAX 3 1", "--target", "3 1"), "2 tokens", "one token"),
        (("MEDIAN 3 1",), "'MEDIAN' is not in the vocabulary", "did you mean"),
        (("MAX " + "1 " * 99,), "101", "shorten"),
    ],
)
def test_bad_input_is_told_with_a_hint(shown, words, what, hint):
    code, out, err = shown("digits", *words)
    assert (code, out) == (2, "")
    assert what in err
    assert hint in err.partition("hint:")[2]
    assert len(err.strip().splitlines()) <= 3


def test_a_model_that_is_not_there_is_told(shown):
    code, _, err = shown("nothing", "MAX 3 1")
    assert code == 2
    assert "hint:" in err


def test_a_long_line_gives_the_strongest_cells_and_plain_signs_where_there_are_no_others(
    runs, monkeypatch
):
    adapter = load(runs / "digits").eval()
    seen = inspect.look(adapter, "SUM " + "1 2 3 4 " * 12, Options(target="3"))
    monkeypatch.setenv("COLUMNS", "60")
    text = inspect.result_text(seen)
    assert "does not fit 60 columns; its strongest:" in text
    short = inspect.look(adapter, "SUM 1 2", Options())
    monkeypatch.setattr(inspect.terminal, "is_unicode", lambda: False)
    assert inspect.result_text(short).isascii()


def test_every_head_may_be_silent(shown, tmp_path):
    every = [word for name in ("L0H0", "L0H1", "L1H0", "L1H1") for word in ("--ablate", name)]
    code, out, _ = shown("digits", "MAX 3 1", *every)
    assert code == 0
    assert "every head is ablated: there is none left to rank" in out
    code, out, _ = shown("digits", "MAX 3 1", *every, "--json")
    assert (code, json.loads(out)["ranking"]) == (0, [])
    assert shown("digits", "MAX 3 1", *every, "-o", tmp_path / "silent.html")[0] == 0


def test_a_hugging_face_folder(shown, tmp_path):
    place = folders.write_model(tmp_path / "model")
    code, out, _ = shown(place, "The cat жq", "--target", " sat", "--json")
    seen = load(place).inspect("The cat жq", target=" sat")
    assert code == 0
    assert json.loads(out)["loss"] == seen.loss
    assert json.loads(out)["words"] == list(seen.words)
    assert shown(place, "")[0] == 2
