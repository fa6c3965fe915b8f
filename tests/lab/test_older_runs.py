"""What an older tree wrote still loads: a run, models in every form of ours, a certificate.

No version is released yet. The run was committed with 3c9edcb; the models, their predictions and
the certificate were written by that commit's code, checked out for it. What quantized models
predict from inputs of 8 bits is from a later tree, which has them in every backend. Bits are the
same on the machine that wrote them; on another processor the last digits may differ.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.adapters.load import load
from glassformer.cli.verbs.train import Beginning, Machine, run_training
from glassformer.quant.contents import quantization_report
from glassformer.quant.convert import use_backend

WRITTEN = Path(__file__).parents[1] / "fixtures" / "older-run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy to work on."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "digits"))


def lines(run: Path) -> list[dict]:
    """The losses of every step as the run recorded them."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    kept = [json.loads(line) for line in text.splitlines()]
    return [
        {key: line[key] for key in ("step", "loss", "grad_norm") if key in line} for line in kept
    ]


def test_it_loads_and_answers(run):
    model = load(run)
    assert model.spec.d_model == 8
    assert model.generate("SECOND 7 3 9", max_new_tokens=1) is not None


def test_it_evaluates_to_what_was_recorded(run):
    recorded = json.loads((run / "run.json").read_text(encoding="utf-8"))["val"]
    found = gf.evaluate(run, split="val")
    assert found.loss == pytest.approx(recorded["loss"], rel=1e-5)
    assert found.accuracy == recorded["accuracy"]


def test_it_resumes_to_the_same_losses(run):
    before = lines(run)
    shutil.rmtree(run / "checkpoints" / "step-000008")
    beginning = Beginning(name="digits", resume=True)
    machine = Machine(runs=str(run.parent), threads=1, as_json=True)
    code = run_training("digits", [], beginning, machine)
    assert code == 0
    for now, then in zip(lines(run), before, strict=True):
        assert now == pytest.approx(then, rel=1e-5)


# --- models and a certificate ---------------------------------------------------------------------

KEPT = WRITTEN.parent / "older-models"


@pytest.mark.filterwarnings("ignore::glassformer.quant.backends.choose.SlowQuantization")
@pytest.mark.parametrize("name", ["native", "lm-native", "int8", "int4"])
def test_models_of_an_older_tree_load_and_predict_what_they_did(name):
    recorded = json.loads((KEPT / "predictions.json").read_text())[name]
    model = load(KEPT / name)
    tokens = torch.arange(1, 8)[None]

    def predicted(backend: str | None = None) -> list[float]:
        if backend is not None:
            use_backend(model.model, backend)
        with torch.inference_mode():
            return model.forward(tokens).flatten().tolist()

    if name.endswith("native"):
        assert predicted() == pytest.approx(recorded, abs=1e-5)
        return
    found = predicted()  # with activations of 8 bits
    backends = quantization_report(model.model).backends
    if backends in (("c",), ("reference",)):
        assert found == predicted("reference") == predicted("auto")
        of_eight_bits = json.loads((KEPT / "predictions.json").read_text())[f"{name}, 8-bit inputs"]
        assert found == pytest.approx(of_eight_bits, abs=1e-5)
    assert found == pytest.approx(recorded, abs=0.01 * max(map(abs, recorded)))
    assert predicted("float") == pytest.approx(recorded, abs=1e-5)


def test_a_certificate_of_an_older_tree_can_be_compared_with():
    older = json.loads((KEPT / "certificate.json").read_text())
    report = gf.verify(load(WRITTEN), only="names")
    assert isinstance(report.compare(older), list)
    assert older["failed"] == 0 and older["passed"] >= 20
