"""Models of other libraries, as `glass verify tests.checks.foreign:NAME` takes them."""

import torch
from torch import nn


def llama() -> nn.Module:
    """A tiny random Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def adapted() -> nn.Module:
    """The Llama with LoRA of peft."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    return get_peft_model(llama(), config)


def gpt2() -> nn.Module:
    """A tiny random GPT-2 of transformers, whose positions count padding on the left."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """A tiny random BERT of transformers."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return BertForMaskedLM(config)


def t5() -> nn.Module:
    """A tiny random T5 of transformers."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def x_transformer() -> nn.Module:
    """A tiny decoder of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    return TransformerWrapper(
        num_tokens=97, max_seq_len=64, attn_layers=layers, use_abs_pos_emb=False
    )


class Leaky(nn.Module):
    """Three mistakes: it looks ahead, reads PAD, and keeps a parameter it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.out = nn.Linear(16, 31)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        return self.out(x + x.mean(1, keepdim=True))


def leaky() -> nn.Module:
    """The model with mistakes."""
    torch.manual_seed(0)
    return Leaky()
