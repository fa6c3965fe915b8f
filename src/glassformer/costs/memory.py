"""What autograd keeps between forward and backward, in bytes, from the spec alone.

It follows the parts of `nn` operation by operation, in float32 and with fused attention: each
tensor that some backward will read counts once. On a GPU the fused kernel wants heads of a multiple
of four numbers and a key for every query head, and is given them. A saved-tensor hook measures the
same (`lab.footprint`), and a test holds the two together.
"""

from collections.abc import Iterator

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    MLP,
    AnswerHead,
    Attention,
    Block,
    FactorizedEmbedding,
    LayerNorm,
    ModelSpec,
    NextHead,
    Norm,
    Rotary,
    Stack,
)

FLOAT, LONG = 4, 8
#: The fused attention of a GPU takes heads of a multiple of so many float32 numbers.
GPU_HEAD_MULTIPLE = 4
#: Logits of more entries than this are made in pieces, and made again for the backward.
PIECE = 1 << 25


@spec
class Activations:
    """Bytes that one batch keeps: in the embedding and the blocks, and in the heads' losses.

    `passing` is what the largest loss holds besides while its gradient is computed.
    """

    body: int
    heads: int
    passing: int

    @property
    def kept(self) -> int:
        """What a saved-tensor hook sees."""
        return self.body + self.heads


def activations(
    model: ModelSpec,
    *,
    batch: int,
    length: int,
    source_length: int | None = None,
    device: str = "cpu",
) -> Activations:
    """Of one training batch in which every place is a real token."""
    if any(stack.dropout.attention for stack in model.stacks().values()):
        raise InputError(
            "dropout on attention weights leaves the fused attention: what it keeps depends on "
            "the machine",
            hint="set dropout.attention=0",
        )
    source = length if source_length is None else source_length
    body = 0
    for prefix, stack in model.stacks().items():
        rows = batch * (source if prefix == "encoder." else length)
        memory = batch * source if prefix == "decoder." else 0
        body += sum(_embedding(model, stack, rows))
        for block in stack.blocks():
            body += sum(_block(model, block, stack, rows, memory, device))
            window = block.attention.window
            if window is not None and window < rows // batch:
                body += FLOAT * (rows // batch) ** 2  # the mask
        if stack.final_norm is not None:
            body += sum(_norm(stack.final_norm, rows, model.d_model))
        elif next(stack.blocks()).placement == "post":
            body -= FLOAT * rows * model.d_model  # what the last norm gives is kept by no product
        if prefix == "encoder.":
            body += FLOAT * rows * model.d_model  # the memory that every decoder layer reads
    heads, passing = 0, 0
    for name in model.head_names():
        counted = batch if isinstance(model.head(name), AnswerHead) else batch * length
        kept, width = sum(_head(model, name, counted)), model.head_size(name)
        heads += kept
        passing = max(passing, 2 * FLOAT * min(counted * width, PIECE))
    return Activations(body=body, heads=heads, passing=passing)


def _embedding(model: ModelSpec, stack: Stack, rows: int) -> Iterator[int]:
    yield LONG * rows  # the ids
    if isinstance(model.embedding, FactorizedEmbedding):
        yield FLOAT * rows * model.embedding.rank
    if isinstance(model.position, Rotary):
        heads = {block.attention.head_width(model.d_model) for block in stack.blocks()}
        yield FLOAT * model.max_seq_len * sum(heads)  # the table of angles
    if stack.dropout.embedding:
        yield FLOAT * rows * model.d_model
    if next(stack.blocks()).placement == "post":
        yield FLOAT * rows * model.d_model  # the first projections read it as it is


def _norm(norm: Norm, rows: int, width: int) -> Iterator[int]:
    """Its input; LayerNorm's two statistics, or RMSNorm's one and the normed input."""
    yield FLOAT * rows * width
    if isinstance(norm, LayerNorm):
        yield FLOAT * rows * 2
    else:
        yield FLOAT * rows * (1 + width)


def _block(
    model: ModelSpec, block: Block, stack: Stack, rows: int, memory: int, device: str
) -> Iterator[int]:
    d_model = model.d_model
    parts = 2 if block.cross is None else 3
    for _ in range(parts):
        yield from _norm(block.norm, rows, d_model)
        yield FLOAT * rows * d_model  # the normed input, which the products read
        if stack.dropout.residual:
            yield FLOAT * rows * d_model
    yield from _attention(model, block.attention, rows, rows, rotated=True, device=device)
    if block.cross is not None:
        yield from _attention(model, block.cross, rows, memory, rotated=False, device=device)
    wide = FLOAT * rows * block.ffn.d_ff
    if not isinstance(block.ffn, MLP):
        yield 4 * wide  # gate, silu(gate), up, and their product
    elif block.ffn.activation == "relu":
        yield wide if not stack.dropout.ffn else 2 * wide  # its own result tells its slope
    else:
        yield 2 * wide
    if stack.dropout.ffn:
        yield wide  # the mask


def _attention(
    model: ModelSpec,
    attention: Attention,
    queries: int,
    keys: int,
    *,
    rotated: bool,
    device: str,
) -> Iterator[int]:
    """Queries, keys, values, the result, and the logarithm of each row's sum."""
    d_head = attention.head_width(model.d_model)
    q, kv = queries * attention.n_heads, keys * attention.kv_heads
    padded, read = d_head, kv
    if device != "cpu":
        padded = -(-d_head // GPU_HEAD_MULTIPLE) * GPU_HEAD_MULTIPLE
        read = keys * attention.n_heads
    yield FLOAT * (padded * (2 * q + 2 * read) + q)
    turned = rotated and isinstance(model.position, Rotary)
    by_head = turned or isinstance(attention.qk_norm, LayerNorm)
    if padded != d_head or (by_head and device == "cpu"):
        yield FLOAT * d_head * q  # the result does not lie as it is read next: it is joined anew
    if attention.qk_norm is not None:
        yield from _norm(attention.qk_norm, q, d_head)
        yield from _norm(attention.qk_norm, kv, d_head)


def _head(model: ModelSpec, name: str, rows: int) -> Iterator[int]:
    """The rows that count, their logits' log-softmax, targets and weights."""
    head, width = model.head(name), model.head_size(name)
    yield FLOAT * rows * model.d_model
    yield rows  # which of them count, a byte each
    if rows * width > PIECE:
        return
    yield FLOAT * rows * width + LONG * rows + FLOAT * rows
    tied = isinstance(head, NextHead) and head.tied
    if tied and isinstance(model.embedding, FactorizedEmbedding):
        yield FLOAT * rows * model.embedding.rank
