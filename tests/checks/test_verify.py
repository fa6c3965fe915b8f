"""The certificate: green on ourselves, honest about strangers, able to tell rounding from a bug."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import glassformer as gf
from glasscheck.measure import Measure
from glasscheck.rows import invariants
from glassformer.checks.catalogue import (
    GROUPS,
    PartCheck,
    SubjectCheck,
    run_part_check,
    run_subject_check,
    verify_parts,
)
from glassformer.checks.preset_subjects import sample_subject
from glassformer.checks.report import Report, verify
from glassformer.checks.rows import numpy_parity, own_models
from glassformer.checks.rows.numpy_parity import _equal_shares, gradients_by_differences
from glassformer.checks.subject import (
    Subject,
    subject_of,
    subject_of_factory,
    subject_of_module,
)
from glassformer.spec.errors import CheckFailed, InputError
from glassformer.spec.presets import PRESETS, seq2seq
from tests.checks import foreign


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_and_torchs_generator_is_left_alone(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    report = verify(sample_subject(name))
    assert report.failed == 0, str(report)
    assert report.passed >= 13
    assert torch.equal(torch.get_rng_state(), before)


def test_our_parts_pass_in_both_precisions():
    findings = list(verify_parts())
    assert not [f for f in findings if f.failed]
    for f in findings:
        if f.tolerance not in (0.0, 1.0):
            assert f.tolerance == {"float32": 1e-5, "float64": 1e-12}[f.dtype]


def test_groups_are_closed():
    with pytest.raises(InputError, match="no group of checks 'cach'"):
        list(verify_parts(only="cach"))
    assert {f.group for f in verify(sample_subject("core"), only="cache").findings} == {"cache"}
    assert "attention" in GROUPS


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("factory", [foreign.llama, foreign.x_transformer])
def test_models_of_other_libraries_pass(factory):
    report = gf.verify(factory())
    assert report.failed == 0, str(report)
    assert report.passed >= (30 if factory is foreign.llama else 11)


@pytest.mark.filterwarnings("ignore")
def test_a_convention_is_told_from_a_bug():
    """With a mask alone GPT-2 counts padding as positions; given positions it does not."""
    report = gf.verify(foreign.gpt2())
    assert report.failed == 0, str(report)
    limits = {f.name: f.note for f in report.findings if f.verdict == "limit"}
    assert (
        limits["more padding on the left changes nothing"] == "it holds when position_ids are given"
    )
    assert report.warnings == len(limits) > 0
    assert f", {report.warnings} warning" in str(report)


def test_a_leaky_model_is_found_out():
    findings = {f.name: f for f in gf.verify(foreign.leaky()).findings}
    failed = {name for name, f in findings.items() if f.failed}
    assert "the future changes no bit of the past" in failed
    assert "what PAD holds changes no bit" in failed
    assert findings["the future changes no bit of the past"].note.startswith("tokens from ")
    assert all(findings[name].verdict == "bug" for name in failed)
    idle = findings["every parameter gets a gradient"]
    assert (idle.verdict, "idle" in idle.note) == ("limit", True)


def test_experts_that_no_token_chooses_need_no_gradient():
    model = gf.build(gf.preset("moe"), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("ffn.gate.weight"):
                parameter.zero_()  # all alike: every token goes to the first ones
    findings = {f.name: f for f in gf.verify(model, only="gradients").findings}
    found = findings["every parameter gets a gradient"]
    assert found.verdict == "passed" and "that no token chose" in found.note
    routed = [name for name, _ in model.named_parameters() if ".experts." in name]
    unchosen = invariants._unchosen(subject_of(model, name="moe"), routed)
    assert unchosen and not any(".experts.0." in name for name in unchosen)


class Shaky(nn.Module):
    """Right, but for rounding of a size that only a longer sum shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        big = 3e3 * tokens.shape[1]  # adding and taking off a large number loses digits
        return self.embed(tokens) + big - big


def test_rounding_is_called_rounding_and_fails_nothing():
    torch.manual_seed(0)
    report = gf.verify(Shaky(), causal=True, only="padding")
    assert report.failed == 0
    assert {f.verdict for f in report.findings if f.warned} == {"rounding"}
    report.raise_if_failed()


def test_a_part_check_tells_rounding_from_bug():
    def rounds(dtype):
        return Measure(
            1e-3 if dtype == torch.float32 else 1e-13, 1e-5 if dtype == torch.float32 else 1e-12
        )

    def wrong(dtype):
        return Measure(1e-3, 1e-5)

    assert [f.verdict for f in run_part_check(PartCheck("r", "g", rounds))] == [
        "rounding",
        "passed",
    ]
    assert [f.verdict for f in run_part_check(PartCheck("w", "g", wrong))] == ["bug", "bug"]


def test_nan_never_passes():
    def nan(dtype):
        return Measure(math.nan, 1e-5)

    assert all(f.failed for f in run_part_check(PartCheck("n", "g", nan)))


def test_a_check_that_could_not_run_is_no_bug():
    def logits(tokens, valid):
        raise RuntimeError("out of order")

    subject = Subject(name="broken", logits=logits, vocab_size=7, max_length=16)
    check = SubjectCheck("c", "g", lambda s: Measure(0.0, 0.0) if s.logits(None, None) else None)
    finding = run_subject_check(check, subject)
    assert finding.verdict == "error"
    assert finding.note == "the model raised RuntimeError: out of order"
    assert "could not run\n  the model raised RuntimeError: out of order: c" in str(
        Report((finding,))
    )


def test_what_is_not_offered_is_never_passed():
    embed = nn.Embedding(7, 7)
    subject = Subject(
        name="bare", logits=lambda tokens, valid: embed(tokens), vocab_size=7, max_length=16
    )
    by_name = {f.name: f for f in verify(subject).findings}
    assert by_name["cached = uncached, token by token"].verdict == "not offered"
    assert by_name["every parameter gets a gradient"].verdict == "not offered"
    assert by_name["the future changes no bit of the past"].verdict == "passed"


def test_a_function_can_say_how_to_ask():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(
                torch.randn(11, 5, generator=torch.Generator().manual_seed(1))
            )

        def forward(self, words):
            return {"scores": self.table[words]}

    odd = Odd()
    with pytest.raises(InputError, match="pass vocab_size="):
        gf.verify(odd)
    assert gf.verify(odd, vocab_size=11).failed == 0
    report = gf.verify(odd, vocab_size=11, logits=lambda tokens, valid: odd(tokens)["scores"])
    assert report.failed == 0


def test_subjects_from_anything():
    model = gf.build(gf.preset("core"))
    assert subject_of(model).model is subject_of(model.model).model is model.model
    assert subject_of(subject_of(model, name="a"), name="b").name == "b"
    with pytest.raises(InputError, match="cannot verify a int"):
        subject_of(3)
    with pytest.raises(InputError, match="no module named 'nowhere'"):
        subject_of_factory("nowhere:model")
    with pytest.raises(InputError, match="has no 'nothing'"):
        subject_of_factory("tests.checks.foreign:nothing")
    assert subject_of_factory("tests.checks.foreign:leaky").vocab_size == 31
    assert subject_of_factory("tests/checks/foreign.py:leaky").vocab_size == 31
    with pytest.raises(InputError, match="there is no file nowhere"):
        subject_of_factory("nowhere.py:model")


def test_masks_that_a_module_does_not_take_are_not_offered():
    module = nn.Sequential()
    module.embed = nn.Embedding(7, 7)
    module.forward = lambda tokens: module.embed(tokens)
    by_name = {f.name: f for f in verify(subject_of_module(module)).findings}
    assert by_name["what PAD holds changes no bit"].verdict == "not offered"
    assert by_name["what PAD holds changes no bit"].note == "its forward takes no mask"


def test_the_report_counts_and_writes_itself():
    report = verify(sample_subject("core"), only="cache")
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passed"] == report.passed == 2
    assert set(data["checks"][0]) >= {"name", "group", "dtype", "worst", "tolerance", "verdict"}
    report.raise_if_failed()
    assert "2 passed, 0 failed" in str(report)
    assert repr(report) == str(report)  # what a notebook shows
    bad = gf.verify(foreign.leaky(), only="causality")
    with pytest.raises(CheckFailed, match="the future changes no bit"):
        bad.raise_if_failed()
    assert isinstance(bad, Report)
    assert "bug  the future changes no bit of the past" in str(bad)


def test_what_was_not_offered_is_listed_by_reason_on_lines_that_fit():
    report = gf.verify(foreign.leaky())
    listed = str(report).partition("\nnot offered\n")[2].partition("\n\n")[0]
    assert max(map(len, listed.splitlines())) <= 100
    read = dict(line.strip().split(": ", 1) for line in listed.replace("\n    ", " ").splitlines())
    silent = [f for f in report.findings if f.verdict == "not offered"]
    assert len(silent) > 5
    assert {name for names in read.values() for name in names.split("; ")} == {
        f.name for f in silent
    }
    assert all(f.name in read[f.note].split("; ") for f in silent)


def test_the_callers_threads_are_given_back():
    threads, seen = torch.get_num_threads(), []

    def bigram(tokens, valid):
        seen.append(torch.get_num_threads())
        return torch.eye(11)[tokens]

    subject = gf.Subject(name="bigram", logits=bigram, vocab_size=11, max_length=32)
    try:
        torch.set_num_threads(2)
        gf.verify(subject)
        assert set(seen) == {2}  # nobody knows how large it is
        seen.clear()
        gf.verify(replace(subject, parameters={}), only="causality")
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_small_gradients_error_shows_beside_large_ones_of_its_kind():
    rng = np.random.default_rng(0)
    grads = {"large": rng.standard_normal((5, 7)), "small": 1e-3 * rng.standard_normal((5, 7))}
    toward, slope = _equal_shares(grads, rng)
    assert slope == pytest.approx(2.0)
    wrong = {**grads, "small": 1.01 * grads["small"]}
    along = sum(float(np.vdot(wrong[name], way)) for name, way in toward.items())
    assert along - slope == pytest.approx(0.01)


def test_wide_layers_of_kinked_units_are_no_bug():
    spec = seq2seq(d_model=64, d_ff=8192, n_layers=1, vocab_size=50)
    model = gf.build(spec, generator=torch.Generator().manual_seed(0))
    assert gradients_by_differences(subject_of(model)).holds


def test_a_large_model_is_cut_where_depth_shows_nothing(monkeypatch):
    subject = sample_subject("modern-lm")
    model = subject.ours()
    assert own_models.shortened(model) is model
    monkeypatch.setattr(own_models, "LARGE", 0)
    short = own_models.shortened(model)
    assert (short.spec.n_layers, model.spec.n_layers) == (own_models.KEPT, 3)
    whole = model.state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in short.state_dict().items())
    measure = numpy_parity.same_training(subject)
    assert measure.holds
    assert "2 blocks of it" in measure.size


def test_a_deep_stack_has_edits_in_its_first_and_last_blocks(monkeypatch):
    monkeypatch.setattr(own_models, "EDITED_BLOCKS", 2)
    subject = sample_subject("modern-lm")
    edited = own_models._edited_taps(subject.ours().spec)
    assert {name.split(".")[1] for name in edited if name.startswith("blocks.")} == {"0", "2"}
    assert own_models.taps_are_named(subject).holds
