"""Other people's engines with our weights: the same model, so that only the engine differs.

Marian's architecture is our post-norm encoder-decoder with tables of positions as weights;
CTranslate2 takes the same tensors through its own description of a model, without a tokenizer.
"""

from pathlib import Path

import torch

from glassformer.checks.preset_subjects import perturb
from glassformer.models.model import Model, build
from glassformer.spec import presets
from glassformer.spec.model import ModelSpec

#: Ids that both sides know: padding, the beginning, the end.
PAD, BOS, EOS = 0, 1, 2
THETA = 1_000_000.0


def fresh(spec: ModelSpec, *, device: str, dtype: torch.dtype = torch.float32) -> Model:
    """Our model, ready to decode; weights are random everywhere, so that its tokens differ."""
    model = build(spec, device="meta").to_empty(device="cpu")
    perturb(model, dtype=torch.float32, seed=0)
    with torch.no_grad():  # large biases would choose one token for ever
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.mul_(0.1)
    return model.to(device=device, dtype=dtype).eval()


# --- decoder-only: Qwen2 ------------------------------------------------------------------------

QWEN_NAMES = (
    ("blocks.", "model.layers."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("embed.", "model.embed_tokens."),
    ("final_norm.", "model.norm."),
)


def renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """A parameter's name on the other side."""
    for ours, theirs in pairs:
        name = name.replace(ours, theirs)
    return name


@torch.no_grad()
def copied(model: Model, theirs: torch.nn.Module, pairs: tuple[tuple[str, str], ...]) -> None:
    """Every parameter of ours into theirs, and none of theirs left as it was."""
    foreign = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        other = renamed(name, pairs)
        if other in foreign:
            foreign.pop(other).copy_(parameter)
        else:
            theirs.get_buffer(other).copy_(parameter)
    for name in [key for key in foreign if "embed_positions" in key]:
        side = model.encoder if "encoder" in name else model.decoder  # type: ignore[attr-defined]
        foreign.pop(name).copy_(side.position.table)
    assert not foreign, f"not copied: {sorted(foreign)}"


def qwen_pair(
    shape: dict[str, int], *, length: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Model, torch.nn.Module]:
    """Our model and transformers' Qwen2 with the same weights; heads are 64 wide."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    spec = presets.qwen(d_head=64, max_seq_len=length, qk_norm=False, **shape)
    model = fresh(spec, device=device, dtype=dtype)
    config = Qwen2Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        intermediate_size=shape["d_ff"],
        num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    theirs = Qwen2ForCausalLM(config).eval().to(device=device, dtype=dtype)
    copied(model, theirs, QWEN_NAMES)
    return model, theirs


# --- encoder-decoder: Marian, CTranslate2 -------------------------------------------------------

MARIAN_NAMES = (
    ("encoder.", "model.encoder."),
    ("decoder.", "model.decoder."),
    ("blocks.", "layers."),
    (".attn_norm.", ".self_attn_layer_norm."),
    (".cross_norm.", ".encoder_attn_layer_norm."),
    (".ffn_norm.", ".final_layer_norm."),
    (".attn.", ".self_attn."),
    (".cross.", ".encoder_attn."),
    ("o_proj", "out_proj"),
    ("ffn.up_proj", "fc1"),
    ("ffn.down_proj", "fc2"),
    ("embed.", "embed_tokens."),
    ("heads.next.weight", "lm_head.weight"),
    ("heads.next.bias", "final_logits_bias"),
)


def marian_twin(model: Model, *, device: str) -> torch.nn.Module:
    """transformers' Marian with our weights."""
    from transformers import MarianConfig, MarianMTModel

    spec = model.spec
    assert spec.encoder is not None
    heads = spec.decoder.block().attention.n_heads
    d_ff = spec.decoder.block().ffn.d_ff
    config = MarianConfig(
        vocab_size=spec.vocab_size,
        decoder_vocab_size=spec.vocab_size,
        d_model=spec.d_model,
        encoder_layers=spec.encoder.n_layers,
        decoder_layers=spec.n_layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=d_ff,
        decoder_ffn_dim=d_ff,
        max_position_embeddings=spec.max_seq_len,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    theirs = MarianMTModel(config).eval().to(device)
    copied(model, theirs, MARIAN_NAMES)
    return theirs


def ctranslate_twin(model: Model, folder: Path, *, threads: int):
    """CTranslate2's translator with our weights, in float32; the folder is written."""
    import ctranslate2
    import numpy as np
    from ctranslate2.specs import transformer_spec

    weights = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    spec = model.spec
    assert spec.encoder is not None
    heads = spec.decoder.block().attention.n_heads
    made = transformer_spec.TransformerSpec.from_config(
        (spec.encoder.n_layers, spec.n_layers), heads, pre_norm=False
    )

    def linear(part, *names: str) -> None:
        part.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
        part.bias = np.concatenate([weights[f"{name}.bias"] for name in names])

    def norm(part, name: str) -> None:
        part.gamma, part.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def feed(part, at: str) -> None:
        linear(part.linear_0, f"{at}.ffn.up_proj")
        linear(part.linear_1, f"{at}.ffn.down_proj")
        norm(part.layer_norm, f"{at}.ffn_norm")

    def attend(part, at: str) -> None:
        linear(part.linear[0], *(f"{at}.attn.{leaf}_proj" for leaf in "qkv"))
        linear(part.linear[1], f"{at}.attn.o_proj")
        norm(part.layer_norm, f"{at}.attn_norm")

    made.encoder.embeddings[0].weight = weights["encoder.embed.weight"]
    made.decoder.embeddings.weight = weights["decoder.embed.weight"]
    for side, ours in ((made.encoder, model.encoder), (made.decoder, model.decoder)):  # type: ignore[attr-defined]
        side.scale_embeddings = True
        side.position_encodings.encodings = ours.position.table.float().cpu().numpy()
    for layer, part in enumerate(made.encoder.layer):
        attend(part.self_attention, f"encoder.blocks.{layer}")
        feed(part.ffn, f"encoder.blocks.{layer}")
    for layer, part in enumerate(made.decoder.layer):
        at = f"decoder.blocks.{layer}"
        attend(part.self_attention, at)
        linear(part.attention.linear[0], f"{at}.cross.q_proj")
        linear(part.attention.linear[1], f"{at}.cross.k_proj", f"{at}.cross.v_proj")
        linear(part.attention.linear[2], f"{at}.cross.o_proj")
        norm(part.attention.layer_norm, f"{at}.cross_norm")
        feed(part.ffn, at)
    linear(made.decoder.projection, "heads.next")
    names = [f"t{token}" for token in range(spec.vocab_size)]
    made.register_source_vocabulary(names)
    made.register_target_vocabulary(names)
    made.config.bos_token, made.config.eos_token = names[BOS], names[EOS]
    made.config.unk_token, made.config.decoder_start_token = names[PAD], names[BOS]
    made.config.add_source_bos = made.config.add_source_eos = False
    made.validate()
    made.optimize(quantization=None)
    folder.mkdir(parents=True)
    made.save(str(folder))
    return ctranslate2.Translator(
        str(folder), device="cpu", compute_type="float32", intra_threads=threads, inter_threads=1
    )
