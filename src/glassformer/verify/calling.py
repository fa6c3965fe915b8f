"""How modules of other libraries are asked: what they return, how they step, how they reload."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.spec.errors import InputError

# B batch, T length

Logits = Callable[[Tensor, Tensor | None], Tensor]


def through_state_dict(module: nn.Module) -> nn.Module:
    """A copy whose tensors were wiped and came back from the state dict: what it lacks is lost."""
    twin = copy.deepcopy(module)
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(saved)
    return twin


def step_by_signature(module: nn.Module) -> Logits | None:
    """Token by token through `past_key_values`, for modules that keep to that habit."""
    names = inspect.signature(module.forward).parameters
    if not {"input_ids", "attention_mask", "past_key_values", "use_cache"} <= set(names):
        return None

    def step(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if valid_BT is None else valid_BT
        past, columns = None, []
        for t in range(tokens_BT.shape[1]):
            result = module(
                input_ids=tokens_BT[:, t : t + 1],
                attention_mask=valid_BT[:, : t + 1].long(),
                past_key_values=past,
                use_cache=True,
            )
            past = result.past_key_values
            columns.append(result.logits)
        return torch.cat(columns, 1)

    return step


def tensor_of(result: Any) -> Tensor:
    """The logits in what a forward returned."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping) and "logits" in result:
        return result["logits"]
    if isinstance(result, (tuple, list)) and isinstance(result[0], Tensor):
        return result[0]
    raise InputError(
        f"the module returned a {type(result).__name__}",
        hint="pass logits=lambda tokens, valid: ... that returns a tensor",
    )


def vocabulary_of(module: nn.Module) -> int:
    """Rows of the module's first embedding."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            return part.num_embeddings
    raise InputError(
        f"{type(module).__name__} has no nn.Embedding, so its vocabulary is unknown",
        hint="pass vocab_size=",
    )
