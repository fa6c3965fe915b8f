"""Source 001's model side: exact parameter counts, causality, (logits, loss)."""

import pytest
import torch

from glassformer.lab.recipes import recipe
from glassformer.named.budget_lm import (
    IGNORED,
    LanguageModel,
    MultiHeadAttention,
    SwiGLU,
    TransformerBlock,
    run_experiment,
    shift_for_lm,
)
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.presets import budget_lm


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


def test_initial_weights_have_std_002():
    model = LanguageModel(budget_lm(vocab_size=211, d_model=64, d_ff=170, n_layers=2))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert abs(parameter.std().item() - 0.02) < 2e-3, name


def test_an_experiment_is_a_run(tmp_path):
    spec = recipe("copy", ["task.examples=300", "train.steps=3", "train.batch_size=8"])
    result = run_experiment(spec, tmp_path / "runs" / "first")
    assert result["steps"] == 3
    assert (tmp_path / "runs" / "first" / "checkpoints" / "last").is_file()
