"""What the heads of a baseline do: where each looks, and what is lost without it.

For an encoder-decoder, the share of a head's cross-attention that lies on the symbol to be said
next; for every head, the answers that are lost when its result is replaced by zeros, and its role.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.lens.measure.roles import head_roles
from glassformer.nn.taps import trace
from glassformer.spec.model import tap_shapes
from glassformer.training.torch_engine import TorchEngine

#: Examples of the test split that are looked at.
EXAMPLES = 500


def insides(engine: TorchEngine, task: Task) -> dict[str, Any]:
    """By head: `looks` at the symbol that is due, `lost` without it; `kept` with all of them."""
    count = min(EXAMPLES, task.sizes()["test"])
    batch = task.batch("test", np.arange(count, dtype=np.int64))
    whole = exact(engine, batch)
    found: dict[str, Any] = {"exact": whole, "heads": {}}
    shapes = tap_shapes(engine.spec)
    numbers = {name: n_heads(engine, name) for name in shapes if name.endswith(".heads")}
    for name, many in numbers.items():
        for head in range(many):
            with trace(engine.model, edit={name: ablated(head)}):
                lost = whole - exact(engine, batch)
            found["heads"][f"{name.removesuffix('.heads')}.{head}"] = {"lost": round(lost, 4)}
    if batch.source is not None:
        for name, share in on_the_due_symbol(engine, batch).items():
            found["heads"][name]["looks"] = round(share, 4)
    found["roles"] = roles(engine, task, batch)
    return found


def roles(engine: TorchEngine, task: Task, batch: Batch) -> dict[str, str]:
    """The role of every head, where it has a clear one: see `glassformer.lens.measure.roles`."""
    rows = np.arange(len(batch.tokens), dtype=np.int64)
    answers = batch.source is None  # one answer, read at the last place
    seen = head_roles(
        engine.model,
        batch,
        groups=task.groups("test", rows)["operation"] if answers else None,
        at="last" if answers else "every",
    )
    return {str(head): seen.role(head)[0] for head in seen.heads}


def n_heads(engine: TorchEngine, tap: str) -> int:
    """Heads of the attention that a tap belongs to."""
    prefix, _, rest = tap.partition("blocks.")
    layer, kind, _ = rest.split(".")
    block = list(engine.spec.stacks()[prefix].blocks())[int(layer)]
    attention = block.cross if kind == "cross" else block.attention
    assert attention is not None
    return attention.n_heads


def ablated(head: int) -> Callable[[Tensor], Tensor]:
    """An edit that replaces one head's result by zeros."""

    def edit(heads_BNTH: Tensor) -> Tensor:
        keep = torch.ones(heads_BNTH.shape[1], 1, 1)
        keep[head] = 0.0
        return heads_BNTH * keep

    return edit


def exact(engine: TorchEngine, batch: Batch) -> float:
    """Share of answers that are right throughout."""
    head = engine.spec.head_names()[0]
    right = engine.logits(batch)[head].argmax(-1) == batch.targets[head]
    if right.ndim == 2:
        right = (right | ~batch.valid).all(axis=1)
    return float(right.mean())


def on_the_due_symbol(engine: TorchEngine, batch: Batch) -> dict[str, float]:
    """Mean cross-attention on the source's place of the symbol that is due; reversed, so from
    the end. The step that says EOS has none, and is left out.
    """
    with trace(engine.model, read="decoder.blocks.*.cross.weights") as seen, torch.no_grad():
        engine.model(batch)
    symbols_B = batch.valid.sum(axis=1) - 1
    shares = {}
    for name, weights_BNTS in seen.items():
        due = [
            weights_BNTS[row, :, torch.arange(int(n)), torch.arange(int(n)).flip(0)]
            for row, n in enumerate(symbols_B)
        ]
        mean_N = torch.cat(due, dim=1).mean(dim=1)
        for head, share in enumerate(mean_N.tolist()):
            shares[f"{name.removesuffix('.weights')}.{head}"] = share
    return shares
