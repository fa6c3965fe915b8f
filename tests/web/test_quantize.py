"""The page Quantize tells what the library measures, position by position."""

import json
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.lab.measure.precision import in_precisions, layer_errors
from glassformer.quant.contents import resident_bytes
from glassformer.spec.errors import InputError
from glassformer.spec.presets import budget_lm
from glassformer.spec.schemes import NAMES
from glassformer.web.app.query import Query, TooLarge, to_json
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import quantize as page

TEXT = "so it goes"


def told(lab: Workspace, **body: Any) -> dict[str, Any]:
    """What the page is sent."""
    query = Query(body={"run": "text", "text": TEXT, **body})
    found: dict[str, Any] = json.loads(to_json(page.quantize(query, lab)))
    return found


def test_divergence_is_that_of_the_distributions(talkers: Workspace) -> None:
    found = told(talkers)
    model = talkers.model("text")
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with torch.no_grad():
        p = model(ids)[0].double().log_softmax(-1)
        for scheme in NAMES:
            small = gf.quantize(model, scheme=scheme, indivisible="int8")
            name = next(one["name"] for one in found["precisions"] if one["scheme"] == scheme)
            q = small(ids)[0].double().log_softmax(-1)
            one = found["against"][name]
            there = (p.exp() * (p - q)).sum(-1)
            back = (q.exp() * (q - p)).sum(-1)
            assert one["there"] == pytest.approx(there.tolist(), abs=1e-9, rel=1e-6)
            assert one["back"] == pytest.approx(back.tolist(), abs=1e-9, rel=1e-6)
            assert one["same"] == (p.argmax(-1) == q.argmax(-1)).tolist()
            assert one["worst"][0] == int(there.argmax())
            assert one["layers"] == pytest.approx(
                dict(layer_errors(model.model, small.model, model.model.inputs(ids)))
            )
            for at, answers in enumerate(found["answers"]):
                for answer in answers:
                    assert answer["p"]["float32"] == pytest.approx(float(p[at, answer["id"]].exp()))
                    assert answer["p"][name] == pytest.approx(float(q[at, answer["id"]].exp()))
    assert found["positions"] == list(range(ids.shape[1]))
    assert all(one["back"] != one["there"] for one in found["against"].values())


def test_sizes_are_those_of_the_files(talkers: Workspace, tmp_path: Any) -> None:
    from glassformer.adapters.native import save_model

    model, sizes = (
        talkers.model("text"),
        {one["scheme"]: one for one in told(talkers)["precisions"]},
    )
    folder = talkers.checkpoint("text")
    assert sizes["float32"]["file_bytes"] == (folder / "model.safetensors").stat().st_size
    for name in NAMES:
        small = gf.quantize(model, scheme=name, indivisible="int8").model
        save_model(tmp_path / name, small)
        written = (tmp_path / name / "model.safetensors").stat().st_size
        assert sizes[name]["file_bytes"] == written
        assert sizes[name]["resident_bytes"] == resident_bytes(small)
    assert sizes["int4"]["file_bytes"] < sizes["int8"]["file_bytes"]


def test_an_answer_is_read_at_its_place(talkers: Workspace) -> None:
    found = told(talkers, run="digits", text="SECOND 7 3 9")
    assert found["head"] == "answer" and found["positions"] == [4]
    model = talkers.model("digits")
    assert found["answers"][0][0]["word"] == model.answer("SECOND 7 3 9")
    assert len(found["against"]["int8"]["there"]) == 1


def test_an_encoder_decoder_is_compared_on_its_own_answer(talkers: Workspace) -> None:
    found = told(talkers, run="reverse", text="3 1 2")
    assert found["source_words"][:3] == ["3", "1", "2"]
    assert len(found["positions"]) == len(found["words"])


def test_speed_is_measured_and_slower_is_said(talkers: Workspace) -> None:
    found = page.quantize_speed(Query(body={"run": "text"}), talkers)
    for one in found["speeds"].values():
        for kind in ("prefill", "decode"):
            assert one[kind]["slower"] is (one[kind]["ratio"] > 1.0)
            assert min(one[kind]["tokens_per_second"]) > 0
    assert found["rounds"] >= 3
    answers = page.quantize_speed(Query(body={"run": "digits"}), talkers)
    assert answers["speeds"]["int8"]["decode"] is None


def test_the_model_itself_stays_as_it_is(talkers: Workspace) -> None:
    model = talkers.model("text").model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    told(talkers)
    assert model is talkers.model("text").model
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_what_is_refused(talkers: Workspace, tmp_path: Any) -> None:
    with pytest.raises(InputError, match="there is no option"):
        told(talkers, bits=3)
    with pytest.raises(InputError, match="text is missing"):
        page.quantize(Query(body={"run": "text"}), talkers)
    with pytest.raises(InputError, match=r"not in the vocabulary|character"):
        told(talkers, text="\N{SNOWMAN}")
    with pytest.raises(TooLarge, match="512"):
        told(talkers, text="so it goes " * 60)
    small = gf.quantize(talkers.model("text"), bits=8)
    small.save_checkpoint(tmp_path / "small")
    with pytest.raises(InputError, match="quantized already"):
        told(Workspace(tmp_path), run="small")


def test_a_copy_is_named_for_what_its_layers_are() -> None:
    """32 divides neither width, one of them, both: never int8 under the name of int4."""
    names = {}
    for d_model, d_ff in ((20, 24), (32, 24), (32, 64)):
        spec = budget_lm(vocab_size=11, d_model=d_model, d_ff=d_ff, n_layers=1, n_heads=4)
        copies = in_precisions(gf.build(spec))
        names[d_model, d_ff] = [one.name for one in copies if one.scheme == "int4"]
        kinds = [kind for one in copies if one.name == "int4" for kind in one.schemes]
        assert all(kind.startswith(("int4", "int8")) for kind in kinds)
    assert names == {(20, 24): [], (32, 24): ["int4 and int8"], (32, 64): ["int4"]}
