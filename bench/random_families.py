"""Random configs of every family against transformers: equal, or refused by the field's name.

A case begins with a config of `bench.families`, and draws each field of its config class from
values that transformers accepts: sizes with odd numbers of heads, every switch, activations that no
spec has, rotary scalings, windows by layer, experts, caps and factors. Keys at their default are
left out of the file by chance, and rotary settings are sometimes written in the words of
transformers 4. The module that transformers reads from that folder is the reference. What is read
here must compute the same, come back byte for byte and be opened by transformers again; what is not
read must be refused with the name of a key or tensor. A config that transformers itself cannot
build or run is drawn again.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open

from bench.clock import said
from bench.families import CASES, FIRST, LENGTH, ROOM, Case, module_of, prove
from glassformer.spec.errors import GlassError

TOLERANCE = 1e-5  # of the largest logit, float32
ROUNDING = (
    5e-6  # the same in float64; one bit of a rotary frequency (float32) moved theirs by 1.6e-6
)
#: The first five are common.
WORDS = (
    *("gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu2"),
    *("tanh", "gelu_10", "mish", "swish", "linear", "relu6", "leaky_relu", "sigmoid", "laplace"),
    *("gelu_python", "gelu_accurate"),
)
ACTIVATIONS = (
    *("hidden_act", "hidden_activation", "activation_function", "activation"),
    "classifier_activation",
)
#: Fields that say nothing about the computation, or that another field draws.
LEFT = (
    *("use_cache", "is_decoder", "is_encoder_decoder", "add_cross_attention", "return_dict"),
    *("output_router_logits", "output_hidden_states", "output_attentions"),
)
D_MODEL = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
LAYERS: tuple[str, ...] = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
)
LAYERS = (*LAYERS, "encoder_layers", "decoder_layers")
WIDE: tuple[str, ...] = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "hidden_dim",
    "ffn_hidden_size",
    "d_ff",
)
WIDE = (*WIDE, "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size")
WIDE = (*WIDE, "shared_expert_intermediate_size")
SIDES = ("encoder_attention_heads", "decoder_attention_heads")
FULL, SLIDING = "full_attention", "sliding_attention"
#: Values of other fields that may differ from the default.
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        (1e-5, 1e-6, 1e-3, 0.02),
    ),
    "logit_scale": (0.25, 1.0, 3.0),
    "logits_scaling": (0.5, 2.0, 8.0),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier"), (0.3, 1.0, 2.5)
    ),
    "query_pre_attn_scalar": (1, 5, 8, 24),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None, 0.7, 3.0, 50.0)),
    "swiglu_limit": (0.5, 1.5, 7.0),
    "swiglu_alpha": (0.9, 1.702, 3.0),
    "sliding_window": (None, 1, 2, 3, 5, 8, 64),
    "window_size": (1, 2, 5, 8),
    "local_attention": (2, 4, 7, 8, 128),
    "max_window_layers": (0, 1, 2, 28),
    "no_rope_layer_interval": (1, 2, 3, 4),
    "clip_qkv": (None, 0.5, 8.0),
    "num_ln_in_parallel_attn": (None, 1, 2),
    "expansion_ratio": (1, 2, 3, 4),
    "type_vocab_size": (1, 2, 3),
    "router_jitter_noise": (0.0, 0.1),
    "pretraining_tp": (1, 2),
    "embedding_fraction": (1.0, 0.5),
    "relative_attention_num_buckets": (4, 8, 32),
    "relative_attention_max_distance": (9, 20, 128),
    "feed_forward_proj": (
        *("relu", "gelu", "gelu_new", "silu", "gated-gelu", "gated-silu", "gated-relu", "tanh"),
        "gated-gelu_new",
    ),
    "word_embed_proj_dim": (None, 8),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    **dict.fromkeys(
        (
            *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
            *("dropout", "activation_dropout", "hidden_dropout_prob", "residual_dropout"),
            *("embedding_dropout", "mlp_dropout", "dropout_rate", "attention_probs_dropout_prob"),
            *("resid_dropout", "embed_dropout", "emb_pdrop", "classifier_dropout"),
        ),
        (0.0, 0.1, 0.3),
    ),
    "initializer_range": (0.01, 0.02, 0.3),
}


def rope(chance: random.Random, width: int, *, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """Draw rotary settings for heads of this width; `kinds` are layers with their own."""
    if kinds:
        return {kind: rope(chance, width) for kind in kinds}
    kind = chance.choice(("default", "default", "linear", "dynamic", "yarn", "longrope", "llama3"))
    made: dict[str, Any] = {"rope_type": kind, "rope_theta": chance.choice((1e4, 5e5, 100.0, 1e6))}
    part = 1.0
    if chance.random() < 0.2:
        part = made["partial_rotary_factor"] = chance.choice((0.25, 0.4, 0.5, 0.75, 1.0))
    if kind != "default":
        made["factor"] = chance.choice((1.5, 2.0, 4.0, 8.0))
    if kind == "llama3":
        made |= {"low_freq_factor": 1.0, "high_freq_factor": chance.choice((2.0, 4.0))}
    if kind in ("llama3", "yarn", "longrope"):
        made["original_max_position_embeddings"] = chance.choice((8, 16, 32))
    if kind == "yarn":
        extra = {"beta_fast": (16, 32.0), "beta_slow": (1, 2.0), "attention_factor": (0.8, 1.3)}
        extra |= {"truncate": (False, True), "mscale": (0.7, 1.0), "mscale_all_dim": (0.7, 1.0)}
        made |= {key: chance.choice(each) for key, each in extra.items() if chance.random() < 0.3}
    if kind == "longrope":
        for name, least in (("short_factor", 1.0), ("long_factor", 2.0)):
            pairs = max(int(width * part) // 2, 1)
            made[name] = [round(least + 0.3 * i, 2) for i in range(pairs)]
        made["original_max_position_embeddings"] = chance.choice((24, 32))
        if chance.random() < 0.3:
            made["attention_factor"] = 1.2
    return made


def drawn(case: Case, seed: int) -> Case:
    """Return the case with random fields."""
    import transformers

    chance = random.Random(f"{case.model_type} {seed}")
    known = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(getattr(transformers, case.config))
    }
    made = case.sizes | case.fields
    rotary = "rope_parameters" in known
    heads = chance.choice((1, 2, 3, 4, 5, 6, 8))
    widths = (4, 6, 8, 10, 12) if rotary or "rotary_dim" in known else (2, 3, 4, 5, 6, 7, 8)
    width = chance.choice(widths)
    if "d_kv" in known:
        made["d_kv"] = width
    own = "head_dim" in known and (known["head_dim"] is not None or chance.random() < 0.5)
    if own:
        made["head_dim"] = width
    free = ("d_kv" in known or own) and chance.random() < 0.6
    whole = heads * (chance.choice((3, 5, 8)) if free else width)
    if "num_experts_per_tok" in known:  # their kernel takes rows of 16 bytes
        whole = -(-whole // 4) * 4 if own else heads * max(width // 4, 1) * 4
    if case.model_type in ("marian", "m2m_100"):
        whole *= 2
    for name in D_MODEL:
        if name in made:
            made[name] = whole
    for name in HEADS:
        if name in made:
            made[name] = heads
    for name in SIDES:
        if name in made:
            made[name] = chance.choice([n for n in range(1, 9) if whole % n == 0])
    for name in KV_HEADS:
        if name in known:
            made[name] = chance.choice([n for n in range(1, heads + 1) if heads % n == 0])
    for name in LAYERS:
        if name in made:
            made[name] = chance.randint(1, 5)
    layers = next((made[name] for name in LAYERS if name in made), 2)
    for name in WIDE:
        if name in known and (name in made or chance.random() < 0.5):
            made[name] = chance.choice(
                (16, 44) if "num_experts_per_tok" in known else (7, 16, 31, 44)
            )
    for name in ("num_local_experts", "num_experts"):
        if name in known:
            made[name] = chance.randint(1, 6)
            made["num_experts_per_tok"] = chance.randint(1, made[name])
    for name in ACTIVATIONS:
        if name in known and chance.random() < 0.3:
            made[name] = chance.choice(WORDS[:5] if chance.random() < 0.5 else WORDS)
    for name, default in known.items():
        if isinstance(default, bool) and name not in LEFT and chance.random() < 0.35:
            made[name] = not default
        elif name in VALUES and chance.random() < 0.4:
            made[name] = chance.choice(VALUES[name])
    if case.model_type in ("bert", "roberta", "xlm-roberta"):
        made.pop("tie_word_embeddings", None)  # untied heads are read, not written
    if case.model_type in ("roberta", "xlm-roberta") and chance.random() < 0.5:
        made["pad_token_id"] = chance.choice((0, 1, 2))
    if "rotary_dim" in known:
        made["rotary_dim"] = chance.choice(range(2, width + 1, 2))
    if "layer_types" in known:
        kinds = [chance.choice((FULL, SLIDING)) for _ in range(layers)]
        made["layer_types"] = kinds if chance.random() < 0.7 else None
    if "no_rope_layers" in known:
        marks = [chance.randint(0, 1) for _ in range(layers)]
        made["no_rope_layers"] = marks if chance.random() < 0.7 else None
    if "mlp_only_layers" in known:  # the last layer keeps its experts
        made["decoder_sparse_step"] = chance.choice([n for n in (1, 2, 3) if layers % n == 0])
        plain = chance.sample(range(layers - 1), chance.randint(0, layers - 1))
        made["mlp_only_layers"] = sorted(plain)
    if "attention_types" in known:
        made["attention_types"] = [[[chance.choice(("global", "local"))], 1] for _ in range(layers)]
    if "attn_config" in known and chance.random() < 0.7:
        inner = {"alibi_bias_max": (4, 8, 16), "clip_qkv": (None, 0.5), "qk_ln": (False, True)}
        inner |= {"softmax_scale": (None, 0.3), "alibi": (True, False), "attn_pdrop": (0.0, 0.1)}
        table = {key: chance.choice(each) for key, each in inner.items() if chance.random() < 0.3}
        made["attn_config"] = table
    if rotary and chance.random() < 0.75:
        by_layer = case.model_type in ("gemma3_text", "olmo3", "modernbert")
        first = (FULL, SLIDING) if by_layer else ()
        made["rope_parameters"] = rope(chance, width, kinds=first)
    if "original_max_position_embeddings" in known:
        made["original_max_position_embeddings"] = chance.choice((32, 64))
    made = {key: value for key, value in made.items() if key in known or key in case.sizes}
    return dataclasses.replace(case, variant=f"seed {seed}", fields=made, sizes=made)


def shortened(case: Case, seed: int) -> Callable[[Path], None]:
    """Return a function that leaves out keys at their default, and writes older words."""
    import transformers

    cls = getattr(transformers, case.config)
    usual = cls().to_dict()

    def change(folder: Path) -> None:
        chance = random.Random(f"shorter {case.model_type} {seed}")
        older = "rope_parameters" in usual and chance.random() < 0.3
        file = folder / "config.json"
        data = json.loads(file.read_text())
        for key in list(data):
            same = key in usual and data[key] == usual[key] and key not in ("model_type",)
            if same and chance.random() < 0.5:
                del data[key]
        table = data.get("rope_parameters")
        if older and table and not any(isinstance(each, dict) for each in table.values()):
            table = dict(data.pop("rope_parameters"))
            data["rope_theta"] = table.pop("rope_theta", 10_000.0)
            part = table.pop("partial_rotary_factor", None)
            if part is not None:
                data["partial_rotary_factor"] = part
            data["rope_scaling"] = None if table.get("rope_type") == "default" else table
        file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")

    return change


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case: equal, refused, rounding (equal in float64), theirs, or a fault."""

    kind: str
    words: str


def outcome(case: Case, seed: int) -> Outcome:
    """Compare one random config."""
    with TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (why := _theirs(case, seed)) is not None:
            return Outcome("theirs", why)
        change = shortened(case, seed)
        try:
            proof = prove(case, Path(place), change=change)
        except GlassError as error:
            fault = not names_a_key(case, str(error), Path(place) / "theirs")
            return Outcome("fault" if fault else "refused", str(error).split("\n")[0])
        except Exception as error:  # whatever it is, it is no refusal in words
            return Outcome("fault", f"{type(error).__name__}: {str(error)[:300]}")
        exact = {"tokens": proof.tokens, "bytes": proof.bytes, "opened": proof.complete}
        wrong = [word for word, right in exact.items() if not right]
        words = f"{proof.worst:.1e}" + "".join(f"; {word} differ" for word in wrong)
        if proof.worst <= TOLERANCE and not wrong:
            return Outcome("equal", words)
        with TemporaryDirectory() as other:
            torch.set_default_dtype(torch.float64)
            try:
                exactly = prove(case, Path(other), change=change)
            finally:
                torch.set_default_dtype(torch.float32)
        if exactly.worst <= ROUNDING and exactly.tokens and proof.bytes and proof.complete:
            return Outcome("rounding", f"{words}; {exactly.worst:.1e} in float64")
        return Outcome("fault", f"{words}; {exactly.worst:.1e} in float64; {proof}")


def names_a_key(case: Case, message: str, folder: Path) -> bool:
    """Return whether a refusal names a key of the config, or a tensor."""
    import transformers

    usual = getattr(transformers, case.config)().to_dict()
    data = usual | json.loads((folder / "config.json").read_text())

    def keys(table: Mapping[str, Any]) -> Iterator[str]:
        for key, value in table.items():
            yield key
            if isinstance(value, dict):
                yield from keys(value)

    words = set(re.findall(r"[A-Za-z_][A-Za-z0-9_.]*", message))
    words |= {part for word in words for part in word.split(".")}  # attn_config.alibi
    with safe_open(folder / "model.safetensors", "pt") as file:
        return bool(words & ((set(keys(data)) | set(file.keys())) - {"model_type", "type"}))


@torch.no_grad()
def _theirs(case: Case, seed: int) -> str | None:
    """Return why transformers cannot build or run a config, or None."""
    try:
        module = module_of(case)
        ids = torch.zeros(1, LENGTH + ROOM, dtype=torch.long)
        extra = {"decoder_input_ids": ids} if case.auto == "AutoModelForSeq2SeqLM" else {}
        made = module(ids, **extra)
        result = made.last_hidden_state if case.auto == "AutoModel" else made.logits
        if not bool(result.isfinite().all()):
            return "results that are not finite"
        if float(result.std()) < 1e-3:
            return "results that hardly differ"
    except Exception as error:  # of their code: whatever it is, this config is none of theirs
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--each", type=int, default=10, help="cases of every family")
    parser.add_argument("--seed", type=int, default=1, help="the first seed of every family")
    parser.add_argument("--only", default="", help="one model_type")
    parser.add_argument("--verbose", action="store_true", help="print every case, not faults alone")


def run(
    asked: argparse.Namespace | None = None, quick: bool = False
) -> Iterator[dict[str, object]]:
    """A row for each family, and for each fault."""
    each, first = (1, 1) if quick or asked is None else (asked.each, asked.seed)
    only = "" if asked is None else asked.only
    total: Counter[str] = Counter()
    for model_type in sorted(FIRST):
        if only not in ("", model_type):
            continue
        found: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        bases = [case for case in CASES.values() if case.model_type == model_type]
        seed = first
        while sum(found.values()) - found["theirs"] < each and found["theirs"] < 20 * each:
            case = drawn(bases[seed % len(bases)], seed)
            with contextlib.redirect_stderr(io.StringIO()):
                got = outcome(case, seed)
            found[got.kind] += 1
            if got.kind == "refused":
                refused[got.words[:90]] += 1
            if got.kind == "fault" or (asked is not None and asked.verbose):
                fields = json.dumps(case.fields, sort_keys=True)
                yield _row(f"{model_type} {seed}", f"{got.kind}: {got.words} {fields}")
            seed += 1
        total += found
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()))
        yield _row(model_type, counts)
        if asked is not None and asked.verbose:
            for why, n in refused.most_common():
                yield _row("", f"{n} x {why}")
    yield _row("all", ", ".join(f"{n} {kind}" for kind, n in sorted(total.items())))


_row = partial(said, "random_families")
