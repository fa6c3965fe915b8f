"""Call modules of other libraries: by their argument names, step by step, for their logits."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from glassformer.checks.measure import NotOffered
from glassformer.spec.errors import InputError

# B batch, T length

Logits = Callable[[Tensor, Tensor | None], Tensor]


def through_state_dict(module: nn.Module) -> nn.Module:
    """Return a copy whose tensors were erased and reloaded from the state dict."""
    twin = copy.deepcopy(module)
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(saved)
    return twin


#: What different libraries call the token ids and the mask (True or 1 = real token).
TOKEN_ARGUMENTS = ("input_ids", "tokens", "x", "ids", "idx", "token_ids")
MASK_ARGUMENTS = ("attention_mask", "valid", "mask")


def call_by_signature(module: nn.Module) -> Logits:
    """Call `module(tokens, mask)` under the names that its forward uses."""
    arguments = list(inspect.signature(module.forward).parameters.values())
    names = [argument.name for argument in arguments]
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    token_name = next((n for n in TOKEN_ARGUMENTS if n in names), None)
    mask_name = next((n for n in MASK_ARGUMENTS if n in names), "mask" if takes_any else None)
    if token_name is None:
        raise InputError(
            f"cannot tell which argument of {type(module).__name__}.forward takes token ids",
            where=f"forward({', '.join(names)})",
            hint="pass logits=lambda tokens, valid: ..., or let the factory return a Subject",
        )

    def logits(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        call = {token_name: tokens_BT}
        if valid_BT is not None:
            if mask_name is None:
                raise NotOffered("its forward takes no mask")
            as_number = mask_name == "attention_mask"
            call[mask_name] = valid_BT.long() if as_number else valid_BT
        return tensor_of(module(**call))

    return logits


def step_by_signature(module: nn.Module) -> Logits | None:
    """Return a function that runs token by token through `past_key_values`, if there is one."""
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
    """Return the logits in what a forward returned."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping) and isinstance(result.get("logits"), Tensor):
        return cast(Tensor, result["logits"])
    if isinstance(result, (tuple, list)) and isinstance(result[0], Tensor):
        return result[0]
    raise InputError(
        f"the module returned a {type(result).__name__}",
        hint="pass logits=lambda tokens, valid: ... that returns a tensor",
    )


def vocabulary_of(module: nn.Module) -> int:
    """Return the number of rows of the module's first embedding."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            return part.num_embeddings
    raise InputError(
        f"{type(module).__name__} has no nn.Embedding, so its vocabulary is unknown",
        hint="pass vocab_size=",
    )
