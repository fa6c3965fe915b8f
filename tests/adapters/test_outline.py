"""An adapter of what no spec describes: by the recipe of the page, and its limits."""

import re
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.adapters import registry
from glassformer.adapters.base import BaseAdapter, Outline
from glassformer.named.core import TrainingConfig, load, register, validate_adapter

PAGE = Path(__file__).parents[2] / "docs/adding-an-architecture.md"


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """What the page's last block defines, and a model of it of another size."""
    others = {name: one for name, one in registry.ADAPTERS.items() if name != "gru"}
    monkeypatch.setattr(registry, "ADAPTERS", others)
    monkeypatch.chdir(tmp_path)
    *_, block = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    space = {"__name__": "recipe"}
    exec(compile(block[: block.index("adapter = ")], "<recipe>", "exec"), space)
    torch.manual_seed(0)
    return space["GRUAdapter"]


def test_it_is_validated_generates_and_comes_back(recipe, tmp_path):
    model = recipe(37, 11)
    report = validate_adapter(model)
    assert report.passed > 10 and not report.failed and not report.warnings, str(report)
    assert repr(model).startswith("<GRUAdapter: ") and "vocabulary 37" in repr(model)
    made = gf.generate(model, [[3, 1, 4], [5]], max_new_tokens=6)
    assert [list(one.tokens) for one in made] == model.generate([[3, 1, 4], [5]], max_new_tokens=6)
    folder = gf.save(model, tmp_path / "kept")
    again = load(tmp_path / "kept", TrainingConfig(architecture_type="gru"))
    tokens = torch.randint(0, 37, (2, 5))
    assert torch.equal(again(tokens), model(tokens)) and not again.training
    assert again.origin == tmp_path / "kept" and folder
    with pytest.raises(gf.GlassError, match="takes no dropout"):
        load(tmp_path / "kept", TrainingConfig(architecture_type="gru", dropout=0.1))
    with pytest.raises(gf.GlassError, match="no such folder"):
        load(tmp_path / "nothing", TrainingConfig(architecture_type="gru"))


def test_a_mistake_in_it_is_found(recipe):
    class ReadsPadding(recipe):
        def forward(self, input_ids, attention_mask=None, *, valid=None, head=None):
            return super().forward(input_ids)

    class ComesBackAnew(recipe):
        @classmethod
        def open_folder(cls, folder):
            return cls(37, 11)

    for kind, row in (
        (ReadsPadding, "what PAD holds changes no bit"),
        (ComesBackAnew, "saved and loaded, same bits"),
    ):
        found = {f.name for f in validate_adapter(kind(37, 11)).findings if f.failed}
        assert row in found


def test_what_needs_a_spec_raises_an_error(recipe, tmp_path):
    model = recipe(37, 11)
    for call in (
        lambda: gf.trace(model, read="*").__enter__(),
        lambda: gf.inspect(model, [1, 2]),
        lambda: gf.export(model, tmp_path / "out"),
        lambda: model.hidden_states(gf.Inputs(torch.tensor([[1]]))),
        lambda: model.spec.decoder,
        lambda: model.generate([1] * 128),
        lambda: model.generate([37]),
    ):
        with pytest.raises(gf.GlassError):
            call()


def test_what_is_no_adapter_yet_says_what_is_missing(recipe):
    with pytest.raises(gf.GlassError, match=r"hint: Outline\("):
        type(
            "Of",
            (recipe,),
            {"__init__": lambda self: BaseAdapter.__init__(self, torch.nn.Linear(2, 2), spec=None)},
        )()
    with pytest.raises(gf.GlassError, match="has no architecture_type"):
        register(type("Nameless", (BaseAdapter,), {}))
    with pytest.raises(gf.GlassError, match="has no `open_folder`"):
        BaseAdapter.open_folder(Path("x"))
    with pytest.raises(gf.GlassError, match="vocab_size 0"):
        Outline(vocab_size=0, max_seq_len=3)
