"""The models of the museum, built with whatever release is first on the path, and verified.

`python -m bench.museum_models JSON` builds each model of a list and prints its certificate: the
process is told which models to build, never what to look for.
"""

import importlib
import json
import math
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.tiny_models import EXTRA, shrink, unit_scale

# B batch, T length, S key length, N heads, H head width, D width

#: Seconds of processor time after which a model is given up.
LIMIT = 90


def of_transformers(class_name: str, **settings: Any) -> nn.Module:
    """Build a tiny model of a class of transformers, with these settings in its config."""
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, class_name)
    config = kind.config_class()
    if hasattr(config, "is_decoder"):
        settings = {"is_decoder": True, **settings}
    shrink(config, {**EXTRA.get(config.model_type, {}), **settings})
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model: nn.Module = kind(config)
    unit_scale(model, seed=0)
    return model


def of_x_transformers(*, num_memory_tokens: int = 0, **settings: Any) -> nn.Module:
    """Build a small decoder of x-transformers."""
    x = importlib.import_module("x_transformers")
    torch.manual_seed(0)
    layers = x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
    extra = {"num_memory_tokens": num_memory_tokens} if num_memory_tokens else {}
    model: nn.Module = x.TransformerWrapper(
        num_tokens=97, max_seq_len=64, attn_layers=layers, **extra
    )
    return model


def of_hourglass() -> nn.Module:
    """Build a small hourglass transformer."""
    h = importlib.import_module("hourglass_transformer_pytorch")
    torch.manual_seed(0)
    model: nn.Module = h.HourglassTransformerLM(
        num_tokens=97, dim=32, max_seq_len=8, heads=4, dim_head=8, shorten_factor=2, depth=(1, 1, 1)
    )
    return model


def with_adapter(**settings: Any) -> nn.Module:
    """Build a GPT-2 with adapters of peft on its square projections, their weights random."""
    peft = importlib.import_module("peft")
    base = of_transformers("GPT2LMHeadModel")
    config = peft.LoraConfig(r=4, target_modules=r".*attn\.c_proj", fan_in_fan_out=True, **settings)
    model: nn.Module = peft.get_peft_model(base, config)
    unit_scale(model, seed=1)
    return model


class RotaryLM(nn.Module):
    """One layer of attention whose positions a library rotates, with a cache."""

    def __init__(self, rotary: nn.Module, *, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.embed = nn.Embedding(97, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 97)

    def forward(
        self, input_ids: Tensor, past_key_values: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the logits, and the keys and values so far."""
        B, T = input_ids.shape
        x_BTD = self.embed(input_ids)
        parts = self.qkv(x_BTD).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q_BNTH, k_BNTH, v_BNTH = parts
        before = 0 if past_key_values is None else past_key_values[0].shape[2]
        rotate: Any = self.rotary
        q_BNTH = rotate.rotate_queries_or_keys(q_BNTH, offset=before)
        k_BNTH = rotate.rotate_queries_or_keys(k_BNTH, offset=before)
        if past_key_values is not None:
            k_BNTH = torch.cat((past_key_values[0], k_BNTH), 2)
            v_BNTH = torch.cat((past_key_values[1], v_BNTH), 2)
        S = k_BNTH.shape[2]
        allow_TS = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        read_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, attn_mask=allow_TS)
        mixed_BTD = self.out(read_BNTH.transpose(1, 2).reshape(B, T, -1))
        return self.head(x_BTD + mixed_BTD), (k_BNTH, v_BNTH)


def with_rotary(**settings: Any) -> nn.Module:
    """Build a layer of attention on rotary-embedding-torch."""
    rotary = importlib.import_module("rotary_embedding_torch")
    torch.manual_seed(0)
    return RotaryLM(rotary.RotaryEmbedding(dim=8, **settings))


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "transformers": of_transformers,
    "x-transformers": of_x_transformers,
    "hourglass": of_hourglass,
    "adapter": with_adapter,
    "rotary": with_rotary,
}


def verified(builder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Build a model, verify it, return its rows, or why there are none."""
    from glassformer.checks.report import verify

    try:
        report = verify(BUILDERS[builder](**settings))
    except Exception as error:  # of a release that does not know this model
        return {"error": f"{type(error).__name__}: {str(error)[:160]}"}
    return {
        "rows": {
            f.name: {
                "verdict": f.verdict,
                "worst": f.worst if math.isfinite(f.worst) else None,
                "note": f.note,
            }
            for f in report.findings
        }
    }


def stop(*_: object) -> None:
    """End a model that takes too long."""
    raise TimeoutError(f"more than {LIMIT} s of processor time")


def main(models: str) -> None:
    """Verify each model of a JSON list; print a line for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, stop)
    for builder, settings in json.loads(models):
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        print(json.dumps(verified(builder, settings)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
