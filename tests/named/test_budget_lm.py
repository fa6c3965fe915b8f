"""Source 001's model side: exact parameter counts, causality, (logits, loss)."""

import re

import pytest
import torch

from glassformer.lab.recipes import recipe
from glassformer.named import budget_lm as budget_lm_module
from glassformer.named.budget_lm import (
    IGNORED,
    LanguageModel,
    ModelConfig,
    MultiHeadAttention,
    RelaxedTarget,
    SwiGLU,
    TransformerBlock,
    compute_model_dims,
    print_param_table,
    run_experiment,
    shift_for_lm,
)
from glassformer.named.budget_lm import count_parameters as count_trainable
from glassformer.spec.errors import CheckFailed, InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.presets import budget_lm, modern_lm


def x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def count(module):
    return sum(p.numel() for p in module.parameters())


def tiny(**changes):
    sizes = {"vocab_size": 23, "d_model": 15, "d_ff": 19, "n_layers": 2, "n_heads": 3}
    return budget_lm(**{**sizes, "max_seq_len": 13, **changes})


def test_swiglu_has_three_matrices_and_no_bias():
    assert count(SwiGLU(15, 19)) == 3 * 15 * 19
    assert SwiGLU(15, 19)(x(2, 7, 15)).shape == (2, 7, 15)


def test_attention_has_four_matrices_and_no_bias():
    part = MultiHeadAttention(15, 3)
    assert count(part) == 4 * 15 * 15
    assert part(x(2, 7, 15)).shape == (2, 7, 15)


def test_attention_is_causal_and_takes_another_mask():
    part, before = MultiHeadAttention(15, 3), x(2, 7, 15)
    after = before.clone()
    after[:, 4:] += 1
    assert torch.equal(part(before)[:, :4], part(after)[:, :4])
    everything = torch.ones(7, 7, dtype=torch.bool)
    assert not torch.equal(part(before, everything)[:, :4], part(after, everything)[:, :4])


def test_the_two_dropouts_are_separate():
    before = x(2, 7, 15)
    for rates in ({"attention_dropout": 0.5}, {"output_dropout": 0.5}):
        part = MultiHeadAttention(15, 3, **rates).train()
        torch.manual_seed(1)
        first = part(before)
        assert not torch.equal(first, part(before))
        zeros = (first == 0).any()
        assert bool(zeros) == ("output_dropout" in rates)
        assert torch.equal(part.eval()(before), part(before))


def test_block_with_and_without_mask():
    block = TransformerBlock(15, 3, 19)
    triangle = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(block(x(2, 7, 15)), block(x(2, 7, 15), triangle))


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_counts_what_the_manifest_counts(tied):
    model = LanguageModel(tiny(tied=tied))
    assert count(model) == count_parameters(tiny(tied=tied))
    assert count(LanguageModel(tiny(tied=False))) - count(LanguageModel(tiny())) == 23 * 15


def test_logits_and_loss():
    model = LanguageModel(tiny())
    ids = torch.randint(0, 23, (3, 11), generator=torch.Generator().manual_seed(2))
    logits, nothing = model(ids)
    assert logits.shape == (3, 11, 23)
    assert nothing is None
    inputs, labels = shift_for_lm(ids)
    logits, loss = model(inputs, labels=labels)
    expected = -torch.log_softmax(logits, -1).gather(-1, labels[..., None]).mean()
    torch.testing.assert_close(loss, expected)
    masked = labels.clone()
    masked[:, 5:] = IGNORED
    assert not torch.equal(model(inputs, labels=masked)[1], loss)
    with pytest.raises(InputError, match="labels have shape"):
        model(ids, labels=labels)


def test_labels_are_aligned_not_shifted_inside():
    """A memorised sequence: the label at t is the token at t + 1, and the loss falls to nothing."""
    torch.manual_seed(0)
    model = LanguageModel(tiny()).train()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    inputs, labels = shift_for_lm(ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        _, loss = model(inputs, labels=labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert torch.equal(model(inputs)[0].argmax(-1), labels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 2000, "embedding_ratio": 0.25}, "embedding_ratio 0.25 .* 0.1625"),
        ({"vocab_size": 2000, "embedding_ratio": 0.35}, "embedding_ratio 0.35 .* 0.1625"),
        ({"vocab_size": 257, "total_params": 3_000_000}, "embedding_ratio 0.35 "),
        ({"vocab_size": 97, "total_params": 1_000_000, "embedding_ratio": 0.99}, "ratio 0.99 "),
        ({"vocab_size": 2000, "total_params": 500_000, "max_seq_length": 64}, "glu_expansion 2.66"),
    ],
)
def test_a_target_that_is_out_of_reach_warns_and_the_drift_is_a_value(fields, message):
    config = ModelConfig(**fields)
    with pytest.warns(RelaxedTarget, match=message) as caught:
        dims = compute_model_dims(config)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(RelaxedTarget, match=message):
        spec = config.spec()
    d_model, d_ff, n_layers = dims
    assert (d_model, n_layers) == (spec.d_model, spec.n_layers)
    total = count_parameters(spec)
    assert dims.drift.total_params == pytest.approx(total / config.total_params - 1)
    ratio = config.vocab_size * d_model / total
    assert dims.drift.embedding_ratio == pytest.approx(ratio - config.embedding_ratio)
    expansion = d_ff / d_model / config.glu_expansion - 1
    assert dims.drift.glu_expansion == pytest.approx(expansion)


@pytest.mark.parametrize("ratio", [0.25, 0.35, 0.45])
@pytest.mark.parametrize("expansion", [2.0, 2.66, 3.0, 4.0])
def test_the_documents_own_targets_are_near(ratio, expansion):
    dims = compute_model_dims(ModelConfig(embedding_ratio=ratio, glu_expansion=expansion))
    assert abs(dims.drift.embedding_ratio) <= 0.01 and abs(dims.drift.glu_expansion) <= 0.1


@pytest.mark.parametrize("value", ["no", 0, None])
def test_tied_is_true_or_false(value):
    with pytest.raises(InputError, match="tied_lm_head="):
        ModelConfig(tied_lm_head=value)


def test_labels_are_ids_of_any_whole_dtype():
    model, ids = LanguageModel(tiny()), torch.randint(0, 23, (3, 11))
    labels = ids.clone()
    labels[0, :3] = IGNORED
    expected = model(ids, labels=labels)[1]
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(model(ids, labels=labels.to(dtype))[1], expected)
    for bad in (torch.full_like(ids, 23), torch.full_like(ids, -1)):
        with pytest.raises(InputError, match=r"label id .* is outside the vocabulary of 23"):
            model(ids, labels=bad)
    with pytest.raises(InputError, match=r"labels of dtype torch\.float32"):
        model(ids, labels=labels.float())


def test_initial_weights_have_std_002():
    model = LanguageModel(budget_lm(vocab_size=211, d_model=64, d_ff=170, n_layers=2))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert abs(parameter.std().item() - 0.02) < 2e-3, name


def test_no_label_at_all_is_a_loss_of_nothing():
    model = LanguageModel(tiny())
    ids = torch.tensor([[3, 1, 4]])
    _, loss = model(ids, labels=torch.full_like(ids, IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_scaling_of_residual_projections_is_named_in_the_spec():
    """Four layers write eight times into the residual stream: 0.02 / sqrt(8) there, 0.02 else."""
    sizes = {"vocab_size": 211, "d_model": 64, "d_ff": 170, "n_layers": 4, "n_heads": 4}
    for spec, scaled in (
        (budget_lm(**sizes), False),
        (budget_lm(**sizes, scale_residual=True), True),
        (modern_lm(**sizes, n_kv_heads=2), True),
    ):
        assert spec.init.scale_residual is scaled
        for name, parameter in LanguageModel(spec).named_parameters():
            if parameter.ndim == 2:
                small = scaled and name.endswith(("o_proj.weight", "down_proj.weight"))
                expected = 0.02 / 8**0.5 if small else 0.02
                assert parameter.std().item() == pytest.approx(expected, rel=0.12), name


def test_the_modern_alternative_has_the_same_face():
    """Rotary positions, RMSNorm, grouped keys and values: other parts behind (logits, loss)."""
    sizes = {"vocab_size": 23, "d_model": 24, "d_ff": 19, "n_layers": 2, "max_seq_len": 13}
    spec = modern_lm(**sizes, n_heads=6, n_kv_heads=2)
    model = LanguageModel(spec)
    names = [name for name, _ in model.named_parameters()]
    assert not any("bias" in name or "position" in name for name in names)
    assert count(model) == count_parameters(spec)
    per_layer = 2 * 24 * 24 + 2 * 24 * 8 + 3 * 24 * 19 + 2 * 24
    assert count(model) == 23 * 24 + 2 * per_layer + 24
    ids = torch.randint(0, 23, (3, 11), generator=torch.Generator().manual_seed(2))
    inputs, labels = shift_for_lm(ids)
    logits, loss = model(inputs, labels=labels)
    assert logits.shape == (3, 10, 23)
    loss.backward()
    changed = inputs.clone()
    changed[:, 6:] = 0
    assert torch.equal(model(changed)[0][:, :6], model(inputs)[0][:, :6])


def test_the_module_exports_the_sources_names():
    named = {"SwiGLU", "MultiHeadAttention", "TransformerBlock", "LanguageModel"}
    assert named <= set(budget_lm_module.__all__)
    assert all(hasattr(budget_lm_module, name) for name in budget_lm_module.__all__)


def test_an_experiment_is_a_run(tmp_path):
    spec = recipe("copy", ["task.examples=300", "train.steps=3", "train.batch_size=8"])
    result = run_experiment(spec, tmp_path / "runs" / "first")
    assert result["steps"] == 3
    assert (tmp_path / "runs" / "first" / "checkpoints" / "last").is_file()


# --- the budget ---------------------------------------------------------------------------------


def test_the_default_configuration_is_the_sources():
    config = ModelConfig()
    assert (config.vocab_size, config.total_params, config.n_heads) == (16_000, 10_000_000, 8)
    assert (config.embedding_ratio, config.glu_expansion, config.tied_lm_head) == (0.35, 2.66, True)
    d_model, d_ff, n_layers = compute_model_dims(config)
    assert d_model % config.n_heads == 0
    assert abs(d_ff / d_model / 2.66 - 1) < 0.06
    assert abs(count_parameters(config.spec()) - 10_000_000) <= 50_000
    assert n_layers == config.spec().n_layers


@pytest.mark.parametrize("tied", [True, False])
def test_a_small_budget_is_kept_by_the_built_model(tied):
    config = ModelConfig(
        total_params=200_000, vocab_size=900, n_heads=4, max_seq_length=32, tied_lm_head=tied
    )
    model = LanguageModel(config)
    assert abs(count_trainable(model) - 200_000) <= 1_000
    logits, _ = model(torch.zeros(2, 8, dtype=torch.long))
    assert logits.shape == (2, 8, 900)
    deep, shallow = compute_model_dims(config), compute_model_dims(ModelConfig())
    assert deep != shallow


def test_the_table_adds_up_and_tells_the_target(capsys):
    config = ModelConfig(
        total_params=200_000, vocab_size=900, n_heads=4, max_seq_length=32, tied_lm_head=False
    )
    model = LanguageModel(config)
    print_param_table(model)
    shown = capsys.readouterr().out
    found = {
        name.strip(): int(count.replace(",", ""))
        for name, count in re.findall(r"^([^\d\n]+?) +([\d,]+)(?: +[\d.]+%)?$", shown, re.M)
    }
    layer = sum(found[f"{part} (per layer)"] for part in ("Attention", "FFN/SwiGLU", "LayerNorm"))
    assert layer * found["Num layers"] == found["Transformer Backbone:"]
    parts = ("Token Embedding", "Position Embedding", "LM Head (output)", "Final LayerNorm")
    total = sum(found[part] for part in parts) + found["Transformer Backbone:"]
    assert total == found["TOTAL"] == count_trainable(model)
    shares = [float(share) for share in re.findall(r"([\d.]+)%$", shown.split("TOTAL")[0], re.M)]
    assert sum(shares) == pytest.approx(100, abs=0.03)
    for words in ("d_model:", "tied_lm_head: False", "Target params: 200,000", "Difference: "):
        assert words in shown


def test_a_spec_without_a_budget_has_a_table_too(capsys):
    print_param_table(LanguageModel(tiny()))
    assert "Target" not in capsys.readouterr().out


def test_a_budget_that_nothing_meets_is_refused():
    with pytest.raises(CheckFailed, match="infeasible: 16,000 tokens"):
        LanguageModel(ModelConfig(total_params=100_000))
    with pytest.raises(InputError, match="outside"):
        ModelConfig(embedding_ratio=1.5)
