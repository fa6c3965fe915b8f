"""Names and shapes of the activations that can be read or replaced, the same in every engine.

Shapes are written in the project's letters: B batch, T query length, S key length, D d_model,
N query heads, K key-value heads, H d_head, F d_ff, V logits, E experts.
"""

from collections.abc import Iterator
from typing import assert_never

from glassformer.spec.checks import check_tree
from glassformer.spec.model import MLP, FeedForward, ModelSpec, MoE, SwiGLU

ATTENTION_TAPS = {
    "q": "BNTH",
    "k": "BKSH",
    "v": "BKSH",
    "scores": "BNTS",
    "weights": "BNTS",
    "heads": "BNTH",
    "out": "BTD",
}
FFN_TAPS = {"hidden": "BTF", "out": "BTD"}
#: The router's logits; the weight of each expert, 0 where it was not chosen; the weighted sum.
MOE_TAPS = {"router": "BTE", "routing": "BTE", "out": "BTD"}


def ffn_taps(ffn: FeedForward) -> dict[str, str]:
    """Return the taps of a feed-forward, in the order of the computation."""
    match ffn:
        case MLP() | SwiGLU():
            return FFN_TAPS
        case MoE(shared=None):
            return MOE_TAPS
        case MoE():
            return {"router": "BTE", "routing": "BTE", "shared": "BTD", "out": "BTD"}
        case _ as unreachable:
            assert_never(unreachable)


def tap_shapes(model: ModelSpec) -> dict[str, str]:
    """Return every tap of this model with its shape in letters, in the order of the computation."""
    check_tree(model)
    return dict(_taps(model))


def _taps(model: ModelSpec) -> Iterator[tuple[str, str]]:
    for prefix, stack in model.stacks().items():
        yield f"{prefix}embed", "BTD"
        for layer, block in enumerate(stack.blocks()):
            at = f"{prefix}blocks.{layer}"
            yield f"{at}.resid_pre", "BTD"
            for leaf, shape in ATTENTION_TAPS.items():
                yield f"{at}.attn.{leaf}", shape
            yield f"{at}.resid_mid", "BTD"
            if block.cross is not None:
                for leaf, shape in ATTENTION_TAPS.items():
                    yield f"{at}.cross.{leaf}", shape
                yield f"{at}.resid_cross", "BTD"
            for leaf, shape in ffn_taps(block.ffn).items():
                yield f"{at}.ffn.{leaf}", shape
            yield f"{at}.resid_post", "BTD"
        yield f"{prefix}final", "BTD"
    for head, name in zip(model.heads, model.head_names(), strict=True):
        yield f"logits.{name}", "BTV" if head.readout is None else "BV"
