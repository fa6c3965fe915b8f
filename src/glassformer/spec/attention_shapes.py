"""The shapes that attention alone takes, of queries, keys, values and masks, in torch and NumPy.

A mask of two axes is [seq, seq], the same for each sequence. One of [batch, seq], which says what
is padding, has the same shape where batch = seq, so that a mask that does not say which it is
raises an error there: read as the other one, it would be a wrong answer.
"""

from collections.abc import Sequence

from glassformer.spec.errors import InputError

# B batch, T query length, S key length, N heads


def check_mask_shape(
    shape: Sequence[int], *, batch: int, heads: int, queries: int, keys: int, ordered: bool = False
) -> tuple[int, ...]:
    """Return the shape with four axes, (B, N, T, S), where 1 stands for all; refuse other shapes.

    `ordered`: a mask of two axes is known to be [seq, seq].
    """
    shape = tuple(shape)
    where = f"attention of a batch of {batch}, {queries} queries, {keys} keys"
    where += f", {heads} heads" if heads > 1 else ""
    if len(shape) == 2 and shape[0] == batch == queries > 1 and not ordered:
        raise InputError(
            f"a mask of shape {shape} is ambiguous: [seq, seq], or padding as [batch, seq]?",
            where=where,
            hint="mask[None] for [seq, seq], mask[:, None] for [batch, seq]",
        )
    full = {
        2: (1, 1, *shape),
        3: (shape[0], 1, *shape[1:]),
        4: shape,
    }.get(len(shape), ())
    sizes = (batch, heads, queries, keys)
    if full and all(n in (1, size) for n, size in zip(full, sizes, strict=True)):
        return full
    if shape == (batch, keys):
        hint = "one of [batch, seq] says what is padding: give mask[:, None]"
    else:
        hint = (
            f"[seq, seq] is ({queries}, {keys}), [batch, seq, seq] is ({batch}, {queries}, {keys})"
            f", [batch, h, seq, seq] is ({batch}, {heads}, {queries}, {keys}); 1 stands for all"
        )
    raise InputError(f"a mask of shape {shape} does not fit", where=where, hint=hint)


def check_heads(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Require the shapes of q, k, v to belong together: (batch, seq, d_k), or with heads."""
    fault = ""
    if len(q) not in (3, 4) or not len(q) == len(k) == len(v):
        fault = "three or four axes"
    elif not q[0] == k[0] == v[0]:
        fault = "the same batch"
    elif len(q) == 4 and (k[1] != v[1] or k[1] < 1 or q[1] % k[1]):
        fault = "the same heads, or fewer for k and v that divide those of q"
    elif q[-1] != k[-1]:
        fault = "the same d_k for q and k, which are multiplied"
    elif k[-2] != v[-2]:
        fault = "the same length for k and v"
    elif not q[-1] or not k[-2]:
        fault = "d_k and the length of k of 1 or more"
    if fault:
        raise InputError(
            f"q, k, v have shapes {q}, {k}, {v}",
            hint=f"[batch, seq, d_k], or [batch, heads, seq, d_k], for all three: {fault}",
        )
