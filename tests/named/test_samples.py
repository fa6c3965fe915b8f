"""Every code sample and quick start of the five documents, as written but for the import.

A sample is a string here, copied from its document; what it leaves open (`batch`, `seq_len`) is
given to it. Where a document has calls and no code, its calls are made.
"""

import dataclasses
import inspect
import math
import re
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import BoolTensor, LongTensor, nn

import glassformer as gf
from glassformer.adapters import registry
from glassformer.checks.rows.attention import attention_pairs
from glassformer.named import budget_lm, by_hand, core, fsm_probe, seq2seq


def ran(sample: str, **given: object) -> dict:
    """Run a sample and return what it leaves."""
    space = dict(given)
    exec(compile(textwrap.dedent(sample), "<sample>", "exec"), space)
    return space


def parameters(function) -> dict:
    """Return the names of a function's arguments, with their defaults."""
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


# --- 000: the probe of finite-state machines ------------------------------------------------------

FORWARD = """
def forward(self, tokens_bxt: LongTensor, attn_mask_bxt: BoolTensor,
            return_attn: bool = False) -> dict:
    # returns {"next_logits", "class_logits", "state_logits?", "attn?"}
    ...
"""
BLOCK = """
x = x + Attn(LN1(x))
x = x + MLP(LN2(x))
"""


def probe(**changes) -> fsm_probe.SingleLayerTransformer:
    fields = {"vocab_size": 11, "num_classes": 3, "num_states": 5, "d_model": 12, "n_heads": 3}
    config = fsm_probe.ModelConfig(**{**fields, "d_mlp": 17, "max_seq_len": 13, **changes})
    return fsm_probe.SingleLayerTransformer(config)


def test_000_forward_signature():
    theirs = ran(FORWARD, LongTensor=LongTensor, BoolTensor=BoolTensor)["forward"]
    ours = fsm_probe.SingleLayerTransformer.forward
    assert list(parameters(ours)) == list(parameters(theirs))
    assert parameters(ours)["return_attn"] is False
    tokens_bxt, attn_mask_bxt = torch.randint(0, 11, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    found = probe().forward(tokens_bxt, attn_mask_bxt, return_attn=True)
    assert set(found) == {"next_logits", "class_logits", "state_logits", "attn"}
    assert found["attn"].shape == (2, 3, 7, 7)
    assert set(probe(num_states=0)(tokens_bxt, attn_mask_bxt)) == {"next_logits", "class_logits"}


def test_000_model_config_fields():
    fields = {field.name for field in dataclasses.fields(fsm_probe.ModelConfig)}
    assert fields == {
        *("vocab_size", "num_classes", "num_states", "d_model", "n_heads", "d_mlp", "dropout"),
        *("max_seq_len", "tie_weights", "factorized_embedding", "factor_rank", "l1_u"),
        "positional_type",
    }


def test_000_pre_norm_block():
    block, x = fsm_probe.TransformerBlock(12, 3, 17), torch.randn(2, 7, 12)
    attend = fsm_probe.CausalSelfAttention(12, 3)
    attend.load_state_dict(block.attn.state_dict())
    given = {"LN1": block.attn_norm, "LN2": block.ffn_norm, "Attn": attend, "MLP": block.ffn}
    torch.testing.assert_close(ran(BLOCK, x=x, **given)["x"], block(x))


def test_000_parts_alone():
    embedding = fsm_probe.TokenEmbedding(11, 12)
    tokens = torch.randint(0, 11, (2, 7))
    assert torch.equal(embedding(tokens), F.embedding(tokens, embedding.weight))
    factors = fsm_probe.FactorizedEmbedding(11, 12, 5, l1_u=0.5)
    torch.testing.assert_close(factors(tokens), (factors.u @ factors.v)[tokens])
    torch.testing.assert_close(factors.penalty(), 0.5 * factors.u.abs().sum())
    bound = math.sqrt(6 / (11 + 12))
    assert bound / 2 < embedding.weight.abs().max() <= bound
    x_btd = embedding(tokens)
    added = fsm_probe.add_positional(x_btd)
    torch.testing.assert_close(fsm_probe.PositionalEncoding(12)(x_btd), added)
    with pytest.raises(gf.GlassError, match="length 7 exceeds max_seq_len 5"):
        fsm_probe.PositionalEncoding(12, 5)(x_btd)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    out, weights = fsm_probe.CausalSelfAttention(12, 3)(x_btd, mask, return_attn=True)
    assert out.shape == (2, 7, 12) and weights.shape == (2, 3, 7, 7)
    assert not weights[1, :, 4:].any() and not weights[1, :, :, 4:].any()
    assert fsm_probe.MLP(12, 17)(x_btd).shape == (2, 7, 12)
    assert fsm_probe.ClassHead(12, 3)(x_btd).shape == (2, 7, 3)
    assert fsm_probe.StateHead(12, 5)(x_btd).shape == (2, 7, 5)
    head = fsm_probe.NextTokenHead(12, 11, tied=embedding)
    assert head.weight is embedding.weight
    assert fsm_probe.NextTokenHead(12, 11)(x_btd).shape == (2, 7, 11)
    with pytest.raises(gf.GlassError, match="tied to a table"):
        fsm_probe.NextTokenHead(12, 9, tied=embedding)


# --- 001: the budget language model ---------------------------------------------------------------

CONFIG = """
@dataclass
class ModelConfig:
    vocab_size: int = 16_000
    total_params: int = 10_000_000
    embedding_ratio: float = 0.35      # 25%, 35%, or 45%
    glu_expansion: float = 2.66        # 2.0, 2.66, 3.0, or 4.0
    n_heads: int = 8
    tied_lm_head: bool = True
    # ... other hyperparameters
"""
CREATE = """
from glassformer.named.budget_lm import LanguageModel, ModelConfig

# Default 10M model
config = ModelConfig()
model = LanguageModel(config)

# Custom configuration
config = ModelConfig(
    total_params=5_000_000,
    vocab_size=8_000,
    embedding_ratio=0.25,
    glu_expansion=4.0,
    tied_lm_head=False,
)
model = LanguageModel(config)
"""
PASS = """
import torch

# Inference
input_ids = torch.randint(0, config.vocab_size, (batch, seq_len))
logits, _ = model(input_ids)

# Training
labels = torch.randint(0, config.vocab_size, (batch, seq_len))
logits, loss = model(input_ids, labels=labels)
loss.backward()
"""
PRINT = """
from glassformer.named.budget_lm import print_param_table

print_param_table(model)
"""
#: The lines of the example output without their numbers, which the document's own do not add up to.
TABLE = """
Parameter Allocation Table
Component Parameters Percentage
Token Embedding
Position Embedding
LM Head (output)
(tied=True)
Transformer Backbone:
Attention (per layer)
FFN/SwiGLU (per layer)
LayerNorm (per layer)
Num layers
Final LayerNorm
TOTAL
Model Configuration:
d_model:
d_ff:
n_layers:
n_heads: 8
vocab_size: 16000
embedding_ratio: 35.00%
glu_expansion: 2.66x
tied_lm_head: True
Target params: 10,000,000
Actual params:
Difference:
"""
DEFINED = """
ModelConfig SwiGLU MultiHeadAttention TransformerBlock LanguageModel compute_model_dims
count_parameters print_param_table
"""


def test_001_model_config():
    theirs = ran("from dataclasses import dataclass\n" + CONFIG)["ModelConfig"]
    ours = {f.name: f.default for f in dataclasses.fields(budget_lm.ModelConfig)}
    for field in dataclasses.fields(theirs):
        assert ours[field.name] == field.default
    assert dataclasses.is_dataclass(budget_lm.ModelConfig)


def test_001_create_a_model_and_a_forward_pass():
    made = ran(CREATE)
    config, model = made["config"], made["model"]
    assert abs(budget_lm.count_parameters(model) / 5_000_000 - 1) <= 0.005
    left = ran(PASS, config=config, model=model, batch=2, seq_len=7)
    assert left["logits"].shape == (2, 7, 8_000)
    assert left["_"] is None and left["loss"].item() == pytest.approx(math.log(8_000), rel=0.1)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_001_print_parameter_table(capsys):
    ran(PRINT, model=budget_lm.LanguageModel(budget_lm.ModelConfig()))
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == shown[2] == shown[-1] == "=" * 80
    for line in TABLE.strip().splitlines():
        at = next((i for i, text in enumerate(shown) if text.startswith(line)), None)
        assert at is not None, line
        shown = shown[at + 1 :]


def test_001_every_name_is_defined():
    for name in DEFINED.split():
        assert callable(getattr(budget_lm, name))


def test_001_parameters_per_layer():
    d_model, d_ff = 24, 40
    assert budget_lm.count_parameters(budget_lm.MultiHeadAttention(d_model, 4)) == 4 * d_model**2
    assert budget_lm.count_parameters(budget_lm.SwiGLU(d_model, d_ff)) == 3 * d_model * d_ff
    block = budget_lm.TransformerBlock(d_model, 4, d_ff)
    norms = 4 * d_model
    assert budget_lm.count_parameters(block) == 4 * d_model**2 + 3 * d_model * d_ff + norms


# --- 002: the model core --------------------------------------------------------------------------


def transformer() -> core.Transformer:
    return core.Transformer(19, 16, 2, 32, 2, max_seq_len=32)


def test_002_forward_produces_logits():
    token_ids = torch.randint(0, 19, (3, 7))
    logits = transformer().forward(token_ids)
    assert logits.shape == (3, 7, 19)
    F.cross_entropy(logits.flatten(0, 1), token_ids.flatten()).backward()


def test_002_quantized_model():
    model, token_ids = transformer().eval(), torch.randint(0, 19, (3, 7))
    full = model(token_ids)
    assert core.is_model_quantized(model) is False
    core.prepare_model_for_quantization(model)
    model(token_ids)  # observers see batches
    core.quantize_model(model)
    assert core.is_model_quantized(model) is True
    found = core.quantization_report(model)
    assert (found.bits, found.mode) == (8, "ptq")
    assert {"heads.next", "blocks.0.attn.q_proj", "blocks.1.ffn.down_proj"} <= set(found.layers)
    assert model(token_ids).shape == full.shape
    core.dequantize_model(model)
    assert core.is_model_quantized(model) is False
    assert (model(token_ids) - full).abs().max() < 0.1


def test_002_quantization_aware_training():
    model = transformer()
    core.prepare_model_for_quantization(model, mode="qat")
    model(torch.randint(0, 19, (3, 7))).square().mean().backward()
    core.quantize_model(model)
    assert core.quantization_report(model).mode == "qat"


def test_002_base_adapter_interface(tmp_path):
    adapter = core.CustomTransformerAdapter(transformer())
    assert isinstance(adapter, core.BaseAdapter)
    assert list(parameters(adapter.forward))[:2] == ["input_ids", "attention_mask"]
    assert parameters(adapter.forward)["attention_mask"] is None
    input_ids = torch.randint(0, 19, (3, 7))
    logits = adapter.forward(input_ids, attention_mask=torch.ones(3, 7, dtype=torch.long))
    assert logits.shape == (3, 7, 19)
    assert isinstance(adapter.get_config(), dict)
    assert adapter.get_architecture_type() == "custom-transformer"
    assert adapter.get_num_parameters() == sum(p.numel() for p in adapter.parameters())
    assert adapter.get_tokenizer() is None
    assert adapter.save_checkpoint(tmp_path / "saved") is None
    again = core.CustomTransformerAdapter(transformer())
    assert again.load_checkpoint(tmp_path / "saved") is None
    torch.testing.assert_close(again(input_ids), adapter(input_ids))
    torch.optim.AdamW(adapter.trainable_parameters())


def test_002_loading_by_architecture(tmp_path):
    transformer().save_checkpoint(tmp_path / "custom")
    qwen = gf.preset("qwen", vocab_size=19, d_model=16, n_heads=2, d_head=8, d_ff=32, n_layers=2)
    gf.export(gf.build(qwen), tmp_path / "qwen")
    for name, kind in (("custom", "custom-transformer"), ("qwen", "qwen")):
        adapter = core.load(tmp_path / name, core.TrainingConfig(architecture_type=kind))
        assert adapter.get_architecture_type() == kind
        assert type(adapter) is core.adapter_named(kind)
    assert isinstance(adapter, core.QwenAdapter)
    assert adapter(torch.randint(0, 19, (3, 7))).shape == (3, 7, 19)
    assert len(adapter.generate([1, 2], max_new_tokens=3, temperature=0.8)) == 3


def test_002_adapter_registration_and_validation(monkeypatch):
    monkeypatch.setattr(registry, "ADAPTERS", dict(registry.ADAPTERS))

    class MyAdapter(core.CustomTransformerAdapter):
        architecture_type = "mine"

    assert core.register(MyAdapter) is MyAdapter
    assert core.adapter_named("mine") is MyAdapter
    report = core.validate_adapter(MyAdapter(transformer()))
    assert report.passed and not report.failed


# --- 003: by hand ---------------------------------------------------------------------------------

FIRST_DAY = """
from glassformer.named.by_hand import *

# Task 1.1: Vocabulary & Tokenization
assert len(VOCABULARY) == 20
assert detokenize(tokenize("SECOND 7 3 9 SEP")) == "SECOND 7 3 9 SEP"

# Task 1.2: Data Generation (100 examples)
examples = [generate_example() for _ in range(100)]

# Task 2.2: Embedding Layer, Task 2.3: Positional Encoding
batch = create_batch(examples)
x = PositionalEncoding(32).forward(Embedding(20, 32).forward(batch.tokens))

# Task 4.3: Transformer
model = Transformer(20, 32, 4, 64, 1)

# Task 5.1: Loss Function, Task 5.3: Basic Training Loop
value = train_one_epoch(model, create_batches(examples, 10), CrossEntropyLoss(), Adam(model))
print(value)
"""


def test_003_quick_start_prints_a_loss(capsys):
    left = ran(FIRST_DAY)
    assert left["x"].shape == (*left["batch"].tokens.shape, 32)
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"batch   10  loss \d\.\d{4}", printed[0])
    assert float(printed[1]) == left["value"]


def test_003_shapes_of_the_checklist():
    (B, L, D, V), tokens = (3, 5, 8, 20), np.zeros((3, 5), int)
    x = by_hand.Embedding(V, D).forward(tokens)
    assert x.shape == (B, L, D)
    assert by_hand.PositionalEncoding(D).forward(x).shape == (B, L, D)
    assert by_hand.MultiHeadAttention(D, 2).forward(x).shape == (B, L, D)
    assert by_hand.FeedForward(D, 16).forward(x).shape == (B, L, D)
    assert by_hand.TransformerBlock(D, 2, 16).forward(x).shape == (B, L, D)
    assert by_hand.Transformer(V, D, 2, 16, 1).forward(tokens).shape == (B, V)
    assert by_hand.Linear(5, 3).forward(np.zeros((2, 5))).shape == (2, 3)


def test_003_every_layer_goes_forward_and_backward():
    x = np.random.default_rng(0).standard_normal((3, 5, 8))
    layers = (
        *(by_hand.Linear(8, 8), by_hand.LayerNorm(8), by_hand.ReLU(), by_hand.Softmax()),
        *(by_hand.FeedForward(8, 16), by_hand.TransformerBlock(8, 2, 16)),
    )
    for layer in layers:
        assert layer.backward(np.ones_like(layer.forward(x))).shape == x.shape
    _, weights, _ = by_hand.scaled_dot_product_attention(x, x, x)
    np.testing.assert_allclose(weights.sum(-1), 1)
    norm = by_hand.LayerNorm(8)
    np.testing.assert_allclose(norm.forward(x).mean(-1), 0, atol=1e-12)
    assert norm.gamma.shape == norm.beta.shape == (8,)


# --- 004: the encoder-decoder ---------------------------------------------------------------------


def x(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_004_attention_is_pytorchs_in_both_shapes():
    q, k, v = x(2, 5, 8), x(2, 7, 8, seed=2), x(2, 7, 6, seed=3)
    out, weights = seq2seq.scaled_dot_product_attention(q, k, v)
    assert out.shape == (2, 5, 6) and weights.shape == (2, 5, 7)
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))
    mask = seq2seq.causal_mask(5)
    found, _ = seq2seq.scaled_dot_product_attention(q, q, q, mask)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    padding = seq2seq.padding_mask(torch.tensor([7, 3]))[:, None].expand(2, 5, 7)
    _, weights = seq2seq.scaled_dot_product_attention(q, k, v, padding)
    assert not weights[1, :, 3:].any()
    with pytest.raises(gf.GlassError, match="q, k, v have shapes"):
        seq2seq.scaled_dot_product_attention(q, k[:, None], v)


def test_004_heads():
    part, theirs = seq2seq.MultiHeadAttention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    for pair in attention_pairs("attn", part, theirs):
        pair.copy()
    query, memory = x(2, 5, 12), x(2, 7, 12, seed=2)
    torch.testing.assert_close(part(query), theirs(query, query, query)[0], atol=1e-5, rtol=0)
    expected = theirs(query, memory, memory)[0]
    torch.testing.assert_close(part(query, memory), expected, atol=1e-5, rtol=0)
    assert seq2seq.split_heads(query, 3).shape == (2, 3, 5, 4)
    assert torch.equal(seq2seq.concat_heads(seq2seq.split_heads(query, 3)), query)
    with pytest.raises(gf.GlassError, match="d_model 12 is not divisible by heads 5"):
        seq2seq.MultiHeadAttention(12, 5)


def test_004_feed_forward_embedding_and_positions():
    feed = seq2seq.FeedForward(12, dropout=0.0)
    w1, b1 = feed.up_proj.weight, feed.up_proj.bias
    w2, b2 = feed.down_proj.weight, feed.down_proj.bias
    assert w1.shape == (48, 12)
    torch.testing.assert_close(feed(x(2, 5, 12)), torch.relu(x(2, 5, 12) @ w1.T + b1) @ w2.T + b2)
    combined = seq2seq.TransformerEmbedding(9, 12, dropout=0.5)
    tokens = torch.randint(0, 9, (2, 5))
    assert not torch.equal(combined(tokens), combined(tokens))
    combined.eval()
    scaled = combined.tokens.weight[tokens] * math.sqrt(12)
    place = torch.arange(5)[:, None] / 10_000 ** (torch.arange(0, 12, 2) / 12)
    torch.testing.assert_close((combined(tokens) - scaled)[0, :, 0::2], place.sin())
    torch.testing.assert_close((combined(tokens) - scaled)[0, :, 1::2], place.cos())
    assert [name for name, _ in combined.named_parameters()] == ["tokens.weight"]
    plain = seq2seq.TokenEmbedding(9, 12, scale=False)
    assert torch.equal(plain(tokens), plain.weight[tokens])


@pytest.mark.parametrize("pre_norm", [False, True])
def test_004_stacks(pre_norm):
    sizes = {"d_model": 12, "heads": 3, "d_ff": 17, "dropout": 0.0, "pre_norm": pre_norm}
    encoder, decoder = seq2seq.Encoder(2, **sizes), seq2seq.Decoder(2, **sizes)
    valid = seq2seq.padding_mask(torch.tensor([5, 3]))
    memory = encoder(x(2, 5, 12), valid)
    out = decoder(x(2, 7, 12, seed=2), memory, valid)
    assert out.shape == (2, 7, 12)
    assert len(seq2seq.Encoder(d_model=12, heads=3).layers) == 6
    out.square().sum().backward()
    for stack in (encoder, decoder):
        for name, size in seq2seq.gradient_flow(stack).items():
            # By theory: keys' biases; of a stack that ends in a norm over x^2, nothing else.
            assert size > 1e-7 or name.endswith("k_proj.bias"), name
    memory = memory.detach()
    noise = memory.clone()
    noise[1, 3:] += 1  # padding of the source is not read
    again = decoder(x(2, 7, 12, seed=2), noise, valid)
    torch.testing.assert_close(again, decoder(x(2, 7, 12, seed=2), memory, valid))


def test_004_loss_and_schedule():
    logits, targets = x(2, 5, 9), torch.randint(0, 9, (2, 5))
    valid = seq2seq.padding_mask(torch.tensor([5, 2]))
    expected = F.cross_entropy(logits[valid], targets[valid], label_smoothing=0.1)
    found = seq2seq.masked_cross_entropy(logits, targets, valid, label_smoothing=0.1)
    torch.testing.assert_close(found, expected)
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(seq2seq.masked_cross_entropy(logits, targets), whole)
    rates = [seq2seq.WarmupSchedule(warmup=4).share(step, 100) for step in range(16)]
    assert rates[3] == max(rates) == 1.0 and rates[15] == 0.5


def test_004_inference():
    torch.manual_seed(0)
    model = seq2seq.Transformer(9, 9, d_model=16, N=1, heads=2, max_seq_len=16)
    source = torch.randint(3, 9, (3, 5))
    asked = {"bos": 1, "eos": 2, "max_length": 6}
    greedy = seq2seq.greedy_decode(model, source, **asked)
    assert greedy == seq2seq.greedy_decode(model, source, **asked, cached=False)
    assert greedy == seq2seq.sample_decode(model, source, **asked, temperature=0.0)
    assert greedy == seq2seq.greedy_decode(model, source.tolist(), **asked)
    padded = torch.cat((source, torch.zeros(3, 2, dtype=torch.long)), 1)
    valid = seq2seq.padding_mask(torch.tensor([5, 5, 5]), max_length=7)
    assert greedy == seq2seq.greedy_decode(model, padded, **asked, source_valid=valid)
    beams = seq2seq.beam_search(model, source, **asked, top_k=2)
    assert [len(found) for found in beams] == [2, 2, 2]
    assert all(found[0].score >= found[1].score for found in beams)
    (one, *_), *_ = seq2seq.beam_search(model, source, **asked, beam_width=1)
    assert one.tokens == greedy[0]
    for hypothesis in seq2seq.beam_search(model, source, **asked, length_penalty=2.0)[0]:
        penalty = ((5 + len(hypothesis.tokens)) / 6) ** 2.0
        assert hypothesis.score == pytest.approx(hypothesis.logprob / penalty)
    assert model.training
