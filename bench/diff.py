"""`gf.diff` on planted faults: does it name the first module that differs, and the cause?

Six architectures, ours and transformers', random weights of unit scale. Each fault changes one
module, or the code between modules, of a copy; `diff` is given the model and the copy, and nothing
else. A module is right if it is the damaged one, or for code between modules the smallest module
that contains it. Faults that change nothing are not counted (an epsilon below rounding).
"""

import argparse
import copy
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.clock import Row, said
from glassformer.checks.diff import Difference, diff
from glassformer.checks.preset_subjects import perturb
from glassformer.models.model import build
from glassformer.nn.operations import TORCH, use
from glassformer.spec import presets

COUNT = 200


@dataclass(frozen=True)
class Parts:
    """The names of an architecture's modules, by what they do; `{}` is the layer."""

    attention: str
    q: str
    o: str
    norm: str
    up: str
    down: str
    ffn: str
    block: str


OURS = Parts(
    "blocks.{}.attn", "blocks.{}.attn.q_proj", "blocks.{}.attn.o_proj", "blocks.{}.ffn_norm",
    "blocks.{}.ffn.up_proj", "blocks.{}.ffn.down_proj", "blocks.{}.ffn", "blocks.{}",
)  # fmt: skip
LLAMA = Parts(
    "model.layers.{}.self_attn", "model.layers.{}.self_attn.q_proj",
    "model.layers.{}.self_attn.o_proj", "model.layers.{}.post_attention_layernorm",
    "model.layers.{}.mlp.up_proj", "model.layers.{}.mlp.down_proj", "model.layers.{}.mlp",
    "model.layers.{}",
)  # fmt: skip
NEOX = Parts(
    "gpt_neox.layers.{}.attention", "gpt_neox.layers.{}.attention.query_key_value",
    "gpt_neox.layers.{}.attention.dense", "gpt_neox.layers.{}.post_attention_layernorm",
    "gpt_neox.layers.{}.mlp.dense_h_to_4h", "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    "gpt_neox.layers.{}.mlp", "gpt_neox.layers.{}",
)  # fmt: skip


def models() -> dict[str, tuple[nn.Module, Parts]]:
    """Six architectures, three layers each."""
    from transformers import (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 101}
    sizes |= {"max_position_embeddings": 64}
    grouped = {"num_key_value_heads": 2, "intermediate_size": 80, "head_dim": 8}
    made: dict[str, tuple[nn.Module, Parts]] = {
        "ours, Llama shape": (build(presets.modern_lm(vocab_size=101, d_model=48, d_ff=80,
            n_layers=3, n_heads=6, n_kv_heads=2, max_seq_len=64)), OURS),
        "ours, learned positions": (build(presets.budget_lm(vocab_size=101, d_model=48, d_ff=80,
            n_layers=3, n_heads=6, max_seq_len=64)), OURS),
        "ours, Qwen3": (build(presets.qwen(vocab_size=101, d_model=48, d_ff=80, n_layers=3,
            n_heads=6, n_kv_heads=2, d_head=8, max_seq_len=64)), OURS),
        "Llama": (LlamaForCausalLM(LlamaConfig(**sizes, **grouped)), LLAMA),
        "Qwen3": (Qwen3ForCausalLM(Qwen3Config(**sizes, **grouped)), LLAMA),
        "GPT-NeoX": (GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=80,
            use_parallel_residual=False)), NEOX),
    }  # fmt: skip
    return {
        name: (perturb(model, dtype=torch.float32, seed=1).eval(), parts)
        for name, (model, parts) in made.items()
    }


# --- faults: (model, parts, layer) -> (the module that differs, a word of the cause) ------------

Found = tuple[str, str] | None
Plant = Callable[[nn.Module, Parts, int, random.Random], Found]


def _weight(model: nn.Module, name: str) -> Tensor:
    return model.get_submodule(name).weight.data


def transposed(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """A square weight, transposed."""
    name = parts.o.format(layer)
    weight = _weight(model, name)
    weight.copy_(weight.T.clone())
    return name, "transposed"


def bias_missing(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """A bias that one side lacks, or has alone."""
    name = draw.choice((parts.q, parts.up, parts.down)).format(layer)
    part = model.get_submodule(name)
    if part.bias is None:
        part.bias = nn.Parameter(torch.randn(part.weight.shape[0]) * 0.5)
    else:
        part.bias = None
    return name, "bias"


def epsilon(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Another epsilon."""
    name = parts.norm.format(layer)
    part: Any = model.get_submodule(name)
    for attribute in ("eps", "variance_epsilon"):
        if hasattr(part, attribute):
            setattr(part, attribute, 0.05)
    return name, "epsilon"


def scaled(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """A factor too many."""
    name = draw.choice((parts.q, parts.o, parts.down)).format(layer)
    _weight(model, name).mul_(draw.choice((0.5, 48**0.5, 8**-0.5)))
    return name, "scale" if model.get_submodule(name).bias is None else "weight"


def reordered(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """The rows of heads in another order."""
    name = parts.q.format(layer)
    weight = _weight(model, name)
    weight.copy_(weight.unflatten(0, (-1, 8)).flip(0).flatten(0, 1).clone())
    return name, "order"


def other_rows(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Some rows that were not loaded."""
    name = draw.choice((parts.up, parts.down)).format(layer)
    _weight(model, name)[3:7] = torch.randn_like(_weight(model, name)[3:7])
    return name, "weights"


def one_more(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """1 + weight instead of the weight."""
    name = parts.norm.format(layer)
    _weight(model, name).add_(1.0)
    return name, "norm"


def rounded(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """One product in half precision."""
    name = draw.choice((parts.up, parts.down)).format(layer)
    part = model.get_submodule(name)
    plain = part.forward
    part.forward = lambda x: plain(x).bfloat16().float()  # type: ignore[method-assign]
    return name, "dtype"


def _with_attention(model: nn.Module, name: str, change: Callable[..., Tensor]) -> None:
    """Run one layer's attention with another kernel."""
    part = model.get_submodule(name)
    plain, kernel = part.forward, F.scaled_dot_product_attention

    def forward(*args: Any, **kwargs: Any) -> Any:
        def changed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return change(kernel, q, k, v, **options)

        with mock.patch.object(F, "scaled_dot_product_attention", changed):
            return plain(*args, **kwargs)

    part.forward = forward  # type: ignore[method-assign]


def attention_scale(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Scores without their scale, or with another."""
    factor = draw.choice((1.0, 48**-0.5, 1 / 8))
    _with_attention(
        model, parts.attention.format(layer),
        lambda kernel, q, k, v, **o: kernel(q, k, v, **{**o, "scale": factor}),
    )  # fmt: skip
    return parts.attention.format(layer), "scale"


def attention_mask(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """No mask, one position ahead, inverted."""
    which = draw.choice(("none", "ahead", "inverted"))

    def change(kernel: Any, q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Tensor:
        T = q.shape[2]
        order = torch.arange(T)[:, None] - torch.arange(T)
        allow = {"none": order < T, "ahead": order >= -1, "inverted": order <= 0}[which]
        return kernel(q, k, v, **{**o, "attn_mask": allow, "is_causal": False})

    _with_attention(model, parts.attention.format(layer), change)
    return parts.attention.format(layer), "mask"


def grouping(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Key heads repeated in turn."""

    def change(kernel: Any, q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Tensor:
        if k.shape[1] == q.shape[1]:
            k, v = k[:, ::3].repeat(1, 3, 1, 1), v[:, ::3].repeat(1, 3, 1, 1)
        else:
            k, v = k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)
        return kernel(q, k, v, **{**o, "enable_gqa": False})

    if parts is NEOX or "position" in dict(model.named_children()):
        return None
    _with_attention(model, parts.attention.format(layer), change)
    return parts.attention.format(layer), "head"


def rotation(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Neighbours turned instead of halves, or backwards."""
    which = draw.choice(("neighbours", "backwards"))

    def halves(x: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
        if which == "backwards":
            sign = -sign
            one, two = x.chunk(2, -1)
            return torch.cat((one * cos - sign * two * sin, two * cos + sign * one * sin), -1)
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)

    name = parts.attention.format(layer)
    part = model.get_submodule(name)
    if parts is OURS:
        if not model.rotary:
            return None
        use(part, replace(TORCH, rotate=halves))
    elif parts is LLAMA:
        import sys

        plain, module = part.forward, sys.modules[type(part).__module__]

        def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Any:
            cos, sin = (t[:, None, :, : t.shape[-1] // 2] for t in (cos, sin))
            return halves(q, cos, sin), halves(k, cos, sin)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(module, "apply_rotary_pos_emb", both):
                return plain(*args, **kwargs)

        part.forward = forward  # type: ignore[method-assign]
    else:
        return None
    return name, "rotation"


def activation(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Another activation."""
    act = draw.choice((F.relu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid))
    part: Any = model.get_submodule(parts.ffn.format(layer))
    if parts is OURS:
        use(
            part,
            replace(TORCH, activate=lambda x, _: act(x), gate=lambda gate, up, _: act(gate) * up),
        )
    else:
        name = "act_fn" if hasattr(part, "act_fn") else "act"
        changed = nn.Module()
        changed.forward = act  # type: ignore[method-assign]
        setattr(part, name, changed)
    return parts.ffn.format(layer), "activation"


def residual(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """The attention's output added twice, or the stream left out."""
    share = draw.choice((2.0, -1.0))
    part = model.get_submodule(parts.attention.format(layer))
    plain = part.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if isinstance(result, tuple):
            return (share * result[0], *result[1:])
        return share * result

    part.forward = types.MethodType(forward, part)  # type: ignore[method-assign]
    return parts.attention.format(layer) + "|" + parts.block.format(layer), "residual"


def forgotten(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """A layer that is not computed."""
    block = parts.block.format(layer)
    model.get_submodule(block).forward = lambda x, *a, **k: x  # type: ignore[method-assign]
    return f"{block}.", f"the second side does not compute {block}."


def neighbour(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """A layer with the weights of the layer before, or of the layer after."""
    other = layer - 1 if layer else 1
    if 0 < layer < 2 and draw.random() < 0.5:
        other = layer + 1
    block, source = (model.get_submodule(parts.block.format(i)) for i in (layer, other))
    block.load_state_dict(source.state_dict())
    return f"{parts.block.format(layer)}.", f"holds what {parts.block.format(other)}."


def exchanged(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Keys and values exchanged; where all are of one size also queries and keys."""
    if parts is NEOX:
        return None
    attention = model.get_submodule(parts.attention.format(layer))
    q, k, v = (attention.get_submodule(f"{x}_proj") for x in "qkv")
    pairs = [(k, v)] if q.weight.shape != k.weight.shape else [(k, v), (q, k)]
    one, other = draw.choice(pairs)
    _swap(one, other)
    return parts.attention.format(layer), "exchanged|input"


def window(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """A window in one layer."""
    width = draw.randrange(2, 9)

    def change(kernel: Any, q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Tensor:
        order = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        allow = (order >= 0) & (order < width)
        return kernel(q, k, v, **{**o, "attn_mask": allow, "is_causal": False})

    _with_attention(model, parts.attention.format(layer), change)
    return parts.attention.format(layer), f"window of {width}"


def scores_factor(model: nn.Module, parts: Parts, layer: int, draw: random.Random) -> Found:
    """Scores times a factor that is no width's root."""
    factor = draw.choice((1.5, 0.9, 1.1))
    _with_attention(
        model, parts.attention.format(layer),
        lambda kernel, q, k, v, **o: kernel(factor * q, k, v, **o),
    )  # fmt: skip
    return parts.attention.format(layer), f"{factor:g} times"


PLANTS: tuple[Plant, ...] = (
    transposed, bias_missing, epsilon, scaled, reordered, other_rows, one_more, rounded,
    attention_scale, attention_mask, grouping, rotation, activation, residual, forgotten,
    neighbour, exchanged, window, scores_factor,
)  # fmt: skip


def is_right(expected: str, found: Difference) -> bool:
    """True if the module is the expected one, or inside of a part that ends in a dot."""
    places = expected.split("|")
    return not found.same and any(
        found.module == one or (one.endswith(".") and found.module.startswith(one))
        for one in places
    )


def is_named(expected: str, found: Difference) -> bool:
    """True if a cause has the expected words, one of several."""
    return any(word in text for text in found.causes for word in expected.split("|"))


# --- released models: ours beside transformers', into which mistakes are planted -----------------


def _layers(model: nn.Module) -> nn.ModuleList:
    return next(m for n, m in model.named_modules() if n.rpartition(".")[2] in ("layers", "layer")
                and isinstance(m, nn.ModuleList))  # fmt: skip


def _ending(part: nn.Module, *endings: str) -> Any:
    return next(m for e in endings for n, m in part.named_modules() if n.endswith(e))


ATTENTION = ("self_attn", "attention.self")
Q, K, V, OUT = (f"{x}_proj" for x in "qkvo")
BERT = {Q: "self.query", K: "self.key", V: "self.value", OUT: "attention.output.dense",
        "up_proj": "intermediate.dense"}  # fmt: skip


def _wrapped(part: nn.Module, change: Callable[[Any], Any]) -> None:
    part.register_forward_hook(
        lambda m, a, r: (change(r[0]), *r[1:]) if isinstance(r, tuple) else change(r)
    )


def real_faults(model: nn.Module) -> Iterator[tuple[str, int, str, Callable[[nn.Module], None]]]:
    """Yield (what, layer, the part of ours that differs, plant): early, in the middle and late."""
    n = len(_layers(model))
    bert = "query" in str([name for name, _ in model.named_modules()])
    early, middle, late = 1, n // 2, n - 1

    def part(layer: int, name: str) -> Callable[[nn.Module], Any]:
        ending = (BERT.get(name, name), name) if bert else (name,)
        if name == "down_proj" and bert:
            return lambda m: _layers(m)[layer].output.dense
        return lambda m: _ending(_layers(m)[layer], *ending)

    def weights(layer: int, name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def plant(m: nn.Module) -> None:
            w = part(layer, name)(m).weight.data
            w.copy_(change(w.clone()))

        return plant

    def attribute(where: Callable[[nn.Module], Any], value: Callable[[Any], Any], *names: str):  # type: ignore[no-untyped-def]
        def plant(m: nn.Module) -> None:
            owner = where(m)
            name = next(x for x in names if hasattr(owner, x))
            setattr(owner, name, value(getattr(owner, name)))

        return plant

    def attention(layer: int) -> Callable[[nn.Module], Any]:
        return lambda m: _ending(_layers(m)[layer], *ATTENTION)

    def hooked(
        where: Callable[[nn.Module], Any], change: Callable[[Any], Any]
    ) -> Callable[..., None]:
        return lambda m: _wrapped(where(m), change)

    for layer in (early, middle, late):
        yield "scores times 1.5", layer, "attn", attribute(
            attention(layer), lambda x: 1.5 * x, "scaling")  # fmt: skip
        yield "head order of queries", layer, "attn.q_proj", weights(
            layer, Q, lambda w: w.roll(32, 0))  # fmt: skip
        yield "half precision", layer, "ffn.down_proj", hooked(
            part(layer, "down_proj"), lambda x: x.bfloat16().to(x))  # fmt: skip
        yield "another activation", layer, "ffn", _activation(layer)
        yield "attention output doubled", layer, "attn.o_proj", hooked(
            part(layer, OUT), lambda x: 2 * x)  # fmt: skip
        yield "mask off by one", layer, "attn", _mask(attention(layer))
    yield "keys times 1.001", middle, "attn.k_proj", weights(middle, K, lambda w: 1.001 * w)
    yield "values of the next row", late, "attn.v_proj", weights(late, V, lambda w: w.roll(1, 0))
    yield "weights of the layer before", middle, "ffn.up_proj", lambda m: part(middle, "up_proj")(
        m).weight.data.copy_(part(middle - 1, "up_proj")(m).weight)  # fmt: skip
    swapped = (Q, K) if bert else (K, V)
    yield " and ".join(swapped) + " swapped", middle, "attn", lambda m: _swap(
        *(part(middle, name)(m) for name in swapped))  # fmt: skip
    yield "a residual left out", middle, "", _no_residual(middle, bert=bert)
    yield "table times 1.01", -1, "embed", lambda m: _times(m.get_input_embeddings(), 1.01)  # type: ignore[operator]
    for layer in (early, middle):
        yield "epsilon 1e-2", layer, "attn_norm", _epsilon(layer)
    if bert:
        yield "bias left out", middle, "attn.q_proj", lambda m: setattr(
            part(middle, Q)(m), "bias", None)  # fmt: skip
        return
    yield "rotary base", 0, "attn", _rotary_base
    yield "last norm times 1.01", -1, "final_norm", lambda m: _times(m.model.norm, 1.01)
    yield "a head of its own", -1, "logits", _untied
    if "gemma" in type(model).__name__.lower():
        yield "logits capped", -1, "logits", lambda m: setattr(
            m.config, "final_logit_softcapping", 30.0)  # fmt: skip


def _times(part: Any, factor: float) -> None:
    part.weight.data.mul_(factor)


def _swap(one: Any, other: Any) -> None:
    one.weight, other.weight = other.weight, one.weight
    one.bias, other.bias = other.bias, one.bias


def _untied(m: Any) -> None:
    m.lm_head.weight = nn.Parameter(1.01 * m.lm_head.weight.data)


def _rotary_base(m: nn.Module) -> None:
    """Raise the base, such that the slowest frequency is a tenth slower or more."""
    for name, buffer in m.named_buffers():
        if name.endswith("inv_freq"):
            buffer.pow_(1.1)


def _mask(where: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    """One position ahead is seen; of an encoder, the last one is hidden."""

    def moved(part: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        T = kwargs["hidden_states"].shape[1] if "hidden_states" in kwargs else args[0].shape[1]
        order = torch.arange(T)[:, None] - torch.arange(T)
        causal = getattr(part, "is_causal", False)
        allow = order >= -1 if causal else (torch.arange(T) < T - 1).expand(T, T)
        mask = torch.zeros(1, 1, T, T).masked_fill(~allow, torch.finfo(torch.float32).min)
        if len(args) > 1:
            return (args[0], mask, *args[2:]), kwargs
        return args, {**kwargs, "attention_mask": mask}

    return lambda m: where(m).register_forward_pre_hook(moved, with_kwargs=True)


def _no_residual(layer: int, *, bert: bool) -> Callable[[nn.Module], None]:
    def plant(m: nn.Module) -> None:
        block: Any = _layers(m)[layer]
        if bert:  # dense(first) + second, then the norm
            block.output.register_forward_pre_hook(lambda _, a: (a[0], torch.zeros_like(a[1])))
        else:
            block.register_forward_hook(
                lambda _, a, r: (r[0] - a[0], *r[1:]) if isinstance(r, tuple) else r - a[0]
            )

    return plant


def _activation(layer: int) -> Callable[[nn.Module], None]:
    def plant(m: nn.Module) -> None:
        owner = _layers(m)[layer]
        for part in owner.modules():
            for name in ("act_fn", "intermediate_act_fn"):
                if hasattr(part, name):
                    changed = nn.Module()
                    changed.forward = F.relu  # type: ignore[method-assign]
                    setattr(part, name, changed)

    return plant


def _epsilon(layer: int) -> Callable[[nn.Module], None]:
    def plant(m: nn.Module) -> None:
        block = _layers(m)[layer]
        norm: Any = next(x for n, x in block.named_modules() if n.lower().endswith("layernorm"))
        name = next(x for x in ("variance_epsilon", "eps") if hasattr(norm, x))
        setattr(norm, name, 1e-2)

    return plant


def real(folder: str) -> Iterator[Row]:
    """Ours beside transformers': no difference as they are, each mistake placed where it is."""
    from glassformer.adapters.load import load
    from glassformer.adapters.wrapped import open_with_transformers, opener_of

    path = Path(folder)
    ours, theirs = load(path), open_with_transformers(path, opener=opener_of(path))
    healthy = diff(ours, theirs)
    yield said("diff", path.name, f"healthy: {str(healthy).splitlines()[0]}")
    right = count = 0
    for what, layer, place, plant in real_faults(theirs):
        twin = copy.deepcopy(theirs)
        with torch.no_grad():
            plant(twin)
        found, count = diff(ours, twin, backward=False), count + 1
        wanted = ".".join(
            [*([f"blocks.{layer}"] if layer >= 0 else []), *([place] if place else [])]
        )
        told = found.module if not found.same else "no difference"
        good = told == wanted or (bool(place) and told.startswith(f"{wanted}."))
        right += good
        if not good:
            yield said("diff", f"{path.name}, {what}, {wanted}", f"{told}, {found.times:.3g} times")
    yield said("diff", f"{path.name}, {count} mistakes", f"{right} of {count} in the right place")


def options(parser: argparse.ArgumentParser) -> None:
    """Add folders of released models."""
    parser.add_argument(
        "--real", nargs="*", default=[], metavar="FOLDER", help="plant into released models"
    )


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """A line for each miss, then the counts."""
    if asked.real:
        for folder in asked.real:
            yield from real(folder)
        return
    draw, made = random.Random(0), models()
    count, place, cause, planted = (40 if quick else COUNT), 0, 0, 0
    names = list(made)
    turn = 0
    while planted < count:
        name, plant = names[turn % len(names)], PLANTS[(turn // len(names)) % len(PLANTS)]
        turn += 1
        model, parts = made[name]
        twin = copy.deepcopy(model)
        layer = draw.randrange(3)
        with torch.no_grad():
            expected = plant(twin, parts, layer, draw)
        if expected is None:
            continue
        planted += 1
        found = diff(model, twin)
        right = is_right(expected[0], found)
        named = is_named(expected[1], found)
        place, cause = place + right, cause + named
        if not right or not named:
            told = "no difference" if found.same else f"{found.module}: {'; '.join(found.causes)}"
            yield said("diff", f"{name}, {plant.__name__}, layer {layer}", told)
    yield said(
        "diff", f"{planted} faults", f"module {place / planted:.1%}, cause {cause / planted:.1%}"
    )
