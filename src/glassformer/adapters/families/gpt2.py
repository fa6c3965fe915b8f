"""GPT-2: LayerNorm, GELU, learned positions, fused q, k, v, matrices stored as (in, out)."""

from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config
from glassformer.adapters.table import Columns, Family, Row, Table, dense
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    MLP,
    Activation,
    Attention,
    Block,
    Dropout,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    Stack,
)

LAYER, BLOCK = "transformer.h.{}.", "blocks.{}."
FUSED = tuple(f"{BLOCK}attn.{letter}_proj." for letter in "qkv")
TABLE = Table(
    rows=(
        Row("transformer.wte.weight", "embed.weight"),
        Row("transformer.wpe.weight", "position.weight"),
        Row(f"{LAYER}attn.c_attn.weight", tuple(f"{name}weight" for name in FUSED), Columns()),
        Row(f"{LAYER}attn.c_attn.bias", tuple(f"{name}bias" for name in FUSED)),
        *(
            Row(f"{LAYER}{theirs}.{leaf}", f"{BLOCK}{ours}.{leaf}", layout)
            for theirs, ours in (
                ("attn.c_proj", "attn.o_proj"),
                ("mlp.c_fc", "ffn.up_proj"),
                ("mlp.c_proj", "ffn.down_proj"),
            )
            for leaf, layout in (("weight", Columns()),)
        ),
        *(
            Row(f"{LAYER}{theirs}", f"{BLOCK}{ours}")
            for theirs, ours in (
                ("attn.c_proj.bias", "attn.o_proj.bias"),
                ("mlp.c_fc.bias", "ffn.up_proj.bias"),
                ("mlp.c_proj.bias", "ffn.down_proj.bias"),
                ("ln_1.weight", "attn_norm.weight"),
                ("ln_1.bias", "attn_norm.bias"),
                ("ln_2.weight", "ffn_norm.weight"),
                ("ln_2.bias", "ffn_norm.bias"),
            )
        ),
        Row("transformer.ln_f.weight", "final_norm.weight"),
        Row("transformer.ln_f.bias", "final_norm.bias"),
        Row("lm_head.weight", "heads.next.weight"),
    ),
    ignored=(f"{LAYER}attn.bias", f"{LAYER}attn.masked_bias"),
    prefix="transformer.",
)
ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu_fast": "gelu_tanh",
}


def read_gpt2(config: Config) -> ModelSpec:
    """Read a GPT-2 config; sizes have GPT-2's own names or the later common ones."""
    width = config.whole("n_embd", "hidden_size")
    norm = LayerNorm(eps=config.number("layer_norm_epsilon", default=1e-5))
    inner = config.any("n_inner", default=None)
    word = config.one_of(
        "activation_function", {name: name for name in ACTIVATIONS}, default="gelu_new"
    )
    block = Block(
        attention=Attention(n_heads=config.whole("n_head", "num_attention_heads"), bias="all"),
        ffn=MLP(
            d_ff=4 * width if inner is None else config.whole("n_inner"),
            activation=ACTIVATIONS[word],
        ),
        norm=norm,
    )
    residual = config.number("resid_pdrop", default=0.1)
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=width,
        max_seq_len=config.whole("n_positions", "max_position_embeddings", most=MOST_POSITIONS),
        position=Learned(),
        decoder=Stack(
            layers=(
                Layers(
                    count=config.whole("n_layer", "num_hidden_layers", most=MOST_LAYERS),
                    block=block,
                ),
            ),
            final_norm=norm,
            dropout=Dropout(
                embedding=config.number("embd_pdrop", default=0.1),
                attention=config.number("attn_pdrop", default=0.1),
                residual=residual,
            ),
        ),
        heads=(NextHead(tied=config.flag("tie_word_embeddings", default=True)),),
        init=NormalInit(std=config.number("initializer_range", default=0.02)),
    )


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of GPT-2 for a spec."""
    block, head = next(spec.decoder.blocks()), spec.heads[0]
    words = {meaning: word for word, meaning in reversed(ACTIVATIONS.items())}
    ffn = dense(block.ffn)
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": block.attention.n_heads,
        "n_inner": ffn.d_ff,
        "n_positions": spec.max_seq_len,
        "activation_function": words[ffn.activation] if isinstance(ffn, MLP) else "gelu_new",
        "layer_norm_epsilon": block.norm.eps,
        "embd_pdrop": spec.decoder.dropout.embedding,
        "attn_pdrop": spec.decoder.dropout.attention,
        "resid_pdrop": spec.decoder.dropout.residual,
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": isinstance(head, NextHead) and head.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    TABLE,
    read_gpt2,
    write_gpt2,
    harmless=(
        "n_ctx",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "reorder_and_upcast_attn",
    ),
    idle={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
)
