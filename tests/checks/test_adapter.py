"""The validation kit: green on every adapter of ours, red on the mistakes that people make."""

from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.adapters.load import adapt, load
from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.checks.adapter import validate_adapter
from glassformer.checks.preset_subjects import perturb
from glassformer.spec import presets
from tests.adapters.checkpoints import folder_of, live

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SPEC = presets.qwen(vocab_size=61, d_model=32, n_heads=4, d_head=8, d_ff=48, n_layers=2)


def small() -> gf.ModelSpec:
    return perturb(gf.build(SPEC), dtype=torch.float32, seed=4).eval()


@pytest.mark.parametrize("case", ["qwen2 window", "qwen3 yarn", "llama3 biases", "gpt2"])
def test_adapters_of_live_modules_pass(case):
    report = validate_adapter(adapt(live(case)))
    assert report.failed == 0, str(report)
    names = {f.name for f in report.findings if f.verdict == "passed"}
    assert "logits = the reference's" in names
    assert "saved and loaded, same bits" in names
    assert len(names) >= 20


def test_a_folder_and_our_own_model_pass(tmp_path):
    assert validate_adapter(load(folder_of("mistral", tmp_path))).failed == 0
    assert validate_adapter(CustomTransformerAdapter(small())).failed == 0


def test_several_heads_and_answers_and_sources_are_asked_what_they_offer():
    for name in ("fsm-probe", "digits"):
        report = validate_adapter(CustomTransformerAdapter(gf.build(gf.preset(name))))
        assert report.failed == 0, str(report)
    both = presets.seq2seq(vocab_size=31, d_model=16, n_heads=2, n_layers=1)
    report = validate_adapter(CustomTransformerAdapter(gf.build(both)))
    assert report.failed == 0, str(report)
    assert any("needs a source" in f.note for f in report.findings)


def test_a_wrapped_module_passes():
    report = validate_adapter(adapt(live("llama"), backend="transformers"))
    assert report.failed == 0, str(report)


class Leaks(CustomTransformerAdapter):
    """Looks one token ahead."""

    architecture_type = "leaks"

    def forward(self, input_ids, attention_mask=None):
        return super().forward(torch.roll(input_ids, -1, 1), attention_mask)


class Forgets(CustomTransformerAdapter):
    """Loads all but one tensor."""

    architecture_type = "forgets"

    def load_checkpoint(self, path: str | Path) -> None:
        super().load_checkpoint(path)
        with torch.no_grad():
            self.model.final_norm.weight.fill_(1.0)


class IgnoresMask(CustomTransformerAdapter):
    """Takes a mask, and does nothing with it."""

    architecture_type = "ignores-mask"

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids)


class Squeezes(CustomTransformerAdapter):
    """Gives the last position alone."""

    architecture_type = "squeezes"

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask)[:, -1]


class Detaches(CustomTransformerAdapter):
    """Cuts the graph."""

    architecture_type = "detaches"

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask).detach()


class Renames(CustomTransformerAdapter):
    """Another name for an argument."""

    architecture_type = "renames"

    def forward(self, ids, attention_mask=None):
        return super().forward(ids, attention_mask)


class CountsTwice(CustomTransformerAdapter):
    """Counts the tied table twice."""

    architecture_type = "counts-twice"

    def get_num_parameters(self) -> int:
        return super().get_num_parameters() + self.model.embed.weight.numel()


class Drifts(CustomTransformerAdapter):
    """Decodes with other weights than it computes with."""

    architecture_type = "drifts"

    def stepper(self):
        other = gf.build(self.spec, generator=torch.Generator().manual_seed(9))
        return CustomTransformerAdapter(other).stepper()


MISTAKES = {
    Leaks: "the future changes no bit of the past",
    Forgets: "saved and loaded, same bits",
    IgnoresMask: "what PAD holds changes no bit",
    Squeezes: "logits are (batch, length, vocabulary)",
    Detaches: "every parameter gets a gradient",
    Renames: "every method is there, with its arguments",
    CountsTwice: "parameters are counted once",
    Drifts: "it generates, the same twice",
}


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_is_found(kind):
    failed = {f.name for f in validate_adapter(kind(small())).findings if f.failed}
    assert MISTAKES[kind] in failed


def test_the_adapter_is_left_as_it_was():
    adapter = CustomTransformerAdapter(small())
    before = [p.detach().clone() for p in adapter.parameters()]
    validate_adapter(adapter)
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.parameters(), strict=True))
    assert all(p.grad is None for p in adapter.parameters())
    assert adapter.origin is None
