"""Masks that know their axes, and the checks of what a part alone is given.

`padding_mask` is [batch, seq] and `causal_mask` is [seq, seq]; where batch = seq their shapes are
the same, and torch would combine one row of the first with one row of the second. Both are tensors
that remember which they are, so `causal_mask(T) & padding_mask(lengths)` is [batch, seq, seq], and
attention takes either as it is. What else is computed from them is a plain tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from glassformer.nn.mask import Mask, causal_allow, mask_from_allow
from glassformer.spec.attention_shapes import check_mask_shape
from glassformer.spec.errors import InputError

# B batch, T query length, S key length, D width


class MarkedMask(Tensor):
    """A bool tensor whose axes are known; combined with another mask by `&`, `|` or `*`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func in IN_PLACE:
            raise InputError(
                "a mask with known axes is not combined in place",
                hint="mask = mask & other",
            )
        if func in COMBINED and not kwargs:
            return _combined(COMBINED[func], *args)
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
        if func in COPIES and isinstance(made, Tensor) and made.dtype == torch.bool:
            return made.as_subclass(type(args[0]))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


class PaddingMask(MarkedMask):
    """(B, S) bool, True = real token."""


class CausalMask(MarkedMask):
    """(T, T) bool, True = may attend."""


#: Functions of two masks, by what computes them.
COMBINED: dict[Any, Callable[..., Tensor]] = {
    function: op
    for op, functions in {
        torch.logical_and: (
            *(Tensor.__and__, Tensor.__rand__, Tensor.__iand__, Tensor.__mul__, Tensor.__rmul__),
            *(Tensor.logical_and, Tensor.bitwise_and, Tensor.mul, Tensor.multiply),
            *(torch.logical_and, torch.bitwise_and, torch.mul, torch.multiply),
            *(Tensor.__imul__,),
        ),
        torch.logical_or: (
            *(Tensor.__or__, Tensor.__ror__, Tensor.__ior__),
            *(Tensor.logical_or, Tensor.bitwise_or, torch.logical_or, torch.bitwise_or),
        ),
    }.items()
    for function in functions
}
#: Functions that change a mask to a combination, whose axes would be others.
IN_PLACE = {
    *(Tensor.logical_and_, Tensor.logical_or_, Tensor.bitwise_and_, Tensor.bitwise_or_),
    *(Tensor.mul_, Tensor.multiply_),
}
#: Functions whose result is the same mask.
COPIES = {
    *(Tensor.to, Tensor.clone, Tensor.detach, Tensor.contiguous, Tensor.cpu, Tensor.cuda),
    *(Tensor.bool, torch.clone, torch.detach),
}


def padding(lengths: "Tensor | Sequence[int]", *, max_length: int | None = None) -> PaddingMask:
    """Return (B, S) bool from sequence lengths, True = real token."""
    if not isinstance(lengths, Tensor):
        try:
            lengths = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"lengths {lengths!r}", hint="whole numbers, such as [3, 1]"
            ) from error
    whole = not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool)
    if lengths.ndim != 1 or not len(lengths) or not whole:
        raise InputError(
            f"lengths of shape {tuple(lengths.shape)} and dtype {lengths.dtype}",
            hint="one whole number for each sequence, such as torch.tensor([3, 1])",
        )
    least, most = (int(end) for end in lengths.aminmax())
    width = most if max_length is None else max_length
    if least < 0 or most > width:
        raise InputError(
            f"lengths from {least} to {most}",
            hint=f"lengths run from 0 to max_length {width}" if most > width else "0 or more",
        )
    mask = torch.arange(width, device=lengths.device) < lengths[:, None]
    return mask.as_subclass(PaddingMask)


def causal(length: int) -> CausalMask:
    """Return (T, T) bool, True = may attend: the lower triangle with its diagonal."""
    return causal_allow(length, length).as_subclass(CausalMask)


def plain(mask: Any) -> Any:
    """Return a mask as a plain tensor; anything else as it is."""
    return mask.as_subclass(Tensor) if isinstance(mask, MarkedMask) else mask


def _combined(op: Callable[..., Tensor], a: Any, b: Any) -> Tensor:
    """Combine two masks by their axes, at least one of which knows its own."""
    marked, other = (a, b) if isinstance(a, MarkedMask) else (b, a)
    if isinstance(a, MarkedMask) and isinstance(b, MarkedMask) and isinstance(b, PaddingMask):
        marked, other = b, a
    mask, more = plain(marked), plain(other)
    if not isinstance(more, Tensor) or more.ndim == 0:
        return op(mask, torch.as_tensor(more, device=mask.device)).as_subclass(type(marked))
    if more.shape[-1] not in (1, mask.shape[-1]):
        raise _mismatch(mask, more)
    if type(other) is type(marked):
        if mask.shape != more.shape:
            raise _mismatch(mask, more)
        return op(mask, more).as_subclass(type(marked))
    if isinstance(marked, CausalMask):
        if more.ndim == 2 and more.shape[0] not in (1, len(mask)):
            raise InputError(
                f"a causal mask {tuple(mask.shape)} and a mask {tuple(more.shape)} differ in axes",
                hint="mask[:, None], if its axes are [batch, seq]",
            )
        return _broadcast(op, mask, more)
    if more.ndim > 2:
        return _broadcast(op, mask.reshape(len(mask), *(1,) * (more.ndim - 2), -1), more)
    if isinstance(other, CausalMask) or (more.ndim == 2 and len(more) not in (1, len(mask))):
        return op(mask[:, None], more)
    if more.ndim == 2 and len(more) == len(mask) == mask.shape[1] > 1:
        raise InputError(
            f"a mask of shape {tuple(more.shape)} is ambiguous: [seq, seq], or [batch, seq]?",
            where="combined with a padding mask of the same shape",
            hint="mask[None] for [seq, seq], mask[:, None] for [batch, seq]",
        )
    return op(mask, more).as_subclass(type(marked))


def _broadcast(op: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    try:
        return op(a, b)
    except RuntimeError as error:
        raise _mismatch(a, b) from error


def _mismatch(a: Tensor, b: Tensor) -> InputError:
    return InputError(
        f"masks of shapes {tuple(a.shape)} and {tuple(b.shape)} do not combine",
        hint="[batch, seq] and [seq, seq] of the same sequence length",
    )


# --- what a part alone is given -------------------------------------------------------------------


def attention_mask(mask: Tensor | None, *, batch: int, heads: int, queries: int, keys: int) -> Mask:
    """Return any mask that attention alone takes, checked; None is no mask."""
    if mask is None:
        return Mask()
    allow = _bool_tensor("a mask", mask, "bool, True = may attend")
    if isinstance(mask, PaddingMask):
        if allow.shape != (batch, keys):
            raise InputError(
                f"a padding mask of shape {tuple(allow.shape)}",
                where=f"attention of a batch of {batch} and {keys} keys",
                hint=f"lengths of {batch} sequences, max_length={keys}",
            )
        return mask_from_allow(allow[:, None])
    shape = check_mask_shape(
        allow.shape,
        batch=batch,
        heads=heads,
        queries=queries,
        keys=keys,
        ordered=isinstance(mask, CausalMask),
    )
    if shape[:2] == (1, 1):
        return mask_from_allow(allow.reshape(shape[2:]).expand(queries, keys))
    return mask_from_allow(allow.reshape(shape).expand(batch, shape[1], queries, keys))


def token_mask(
    valid: Tensor | None, *, batch: int, length: int, name: str = "valid"
) -> Tensor | None:
    """Return a mask of tokens (B, S), checked: True = real token."""
    if valid is None:
        return None
    if isinstance(valid, CausalMask):
        raise InputError(
            f"{name} is a causal mask", hint="[batch, seq], True = real token; order is built in"
        )
    mask = _bool_tensor(name, valid, "bool, True = real token")
    if mask.shape != (batch, length):
        raise InputError(
            f"{name} has shape {tuple(mask.shape)}",
            hint=f"[batch, seq] is ({batch}, {length}) here, True = real token",
        )
    return mask


def mask_of(name: str, valid: Tensor | None, tokens: Any) -> Tensor | None:
    """Return the mask of these token ids (B, S), checked."""
    if valid is None or not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return plain(valid)  # type: ignore[no-any-return]
    return token_mask(valid, batch=tokens.shape[0], length=tokens.shape[1], name=name)


def _bool_tensor(name: str, mask: Any, hint: str) -> Tensor:
    if not isinstance(mask, Tensor):
        raise InputError(f"{name} of type {type(mask).__name__}", hint=f"a tensor: {hint}")
    if mask.dtype != torch.bool:
        raise InputError(f"{name} of dtype {mask.dtype}", hint=hint)
    made: Tensor = plain(mask)
    return made


def vectors(name: str, x: Any, width: int | None, *, like: Tensor | None = None) -> None:
    """Require [batch, seq, width] of floating-point numbers; `like` has the same batch."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}", hint="a tensor [batch, seq, d_model]")
    if x.ndim != 3 or (width is not None and x.shape[-1] != width):
        wide = "d_model" if width is None else width
        raise InputError(
            f"{name} has shape {tuple(x.shape)}", hint=f"[batch, seq, {wide}] fits this part"
        )
    if not x.is_floating_point():
        raise InputError(f"{name} has dtype {x.dtype}", hint="floating-point numbers")
    if like is not None and len(like) != len(x):
        raise InputError(f"{name} has a batch of {len(x)}, x one of {len(like)}")


def wide(name: str, x: Any, width: int) -> Tensor:
    """Return vectors (..., width) of floating-point numbers, checked."""
    if not isinstance(x, Tensor) or not x.ndim or x.shape[-1] != width or not x.is_floating_point():
        kind = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name} is {kind}", hint=f"floating-point numbers (..., {width})")
    return x


def token_ids(tokens: Any, vocab_size: int, *, name: str = "token") -> None:
    """Require whole numbers below vocab_size, [batch, seq] or any other shape."""
    whole = isinstance(tokens, Tensor) and tokens.dtype in (torch.int64, torch.int32)
    if not whole:
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"{name} ids of {kind}", hint="a tensor of torch.long, [batch, seq]")
    if not tokens.numel():
        return
    low, high = (int(end) for end in tokens.aminmax())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"{name} id {low if low < 0 else high} is outside the vocabulary of {vocab_size}",
            hint=f"ids run from 0 to {vocab_size - 1}",
        )
