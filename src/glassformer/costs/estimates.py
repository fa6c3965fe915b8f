"""FLOPs and bytes of a model, computed from its spec.

FLOPs: a matrix product counts two for each multiplication, and attention counts all keys, as
PyTorch's own counter does. Elementwise work is left out. A backward pass is two forward passes. Of
a mixture of experts, only those that a token chooses count.

Bytes: weights, optimizer state, KV cache and activations, which are what autograd keeps between
forward and backward. The estimate follows the modules of `nn` operation by operation, in float32
and with fused attention: each tensor that a backward will read counts once. On a CPU that is what
our C kernels keep, which a step uses wherever their library is built; plain torch keeps more, but
for large heads, where it may keep less. On a GPU the fused kernel takes heads whose width is a
multiple of four, and a key for every query head, so padding and repeated keys are counted there. A
test compares the estimate with saved-tensor hooks (`bench.footprint`).
"""

from collections.abc import Iterator
from typing import assert_never

from glassformer.spec.checks import check_member, check_tree, spec
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.execution import (
    GPU_HEAD_BYTES,
    GROUP_ROWS,
    KERNEL_CHUNK,
    KERNEL_PIECE,
    KV_GROUP,
    PIECE,
)
from glassformer.spec.manifest import is_tied, stored
from glassformer.spec.model import (
    MLP,
    ALiBi,
    AnswerHead,
    Attention,
    Block,
    ClassHead,
    FactorizedEmbedding,
    LayerNorm,
    Learned,
    MaskedHead,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    Norm,
    PlainEmbedding,
    Position,
    RelativeBias,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
    Sinusoidal,
    Stack,
    StateHead,
    SwiGLU,
    VectorHead,
    rotary_of,
)
from glassformer.spec.own import OwnOptimizer, OwnPosition
from glassformer.spec.program import Attend, Linear, Remember, Route, program
from glassformer.spec.quantization import QuantSpec, coverage, targets
from glassformer.spec.schemes import SCHEMES, scheme_bytes
from glassformer.spec.train import SGD, AdamW, Muon, Optimizer


@spec
class Flops:
    """Forward FLOPs of one sequence: products with weights, and attention between positions."""

    products: int
    attention: int

    @property
    def forward(self) -> int:
        """Products and attention together."""
        return self.products + self.attention

    @property
    def training(self) -> int:
        """Forward and backward together."""
        return 3 * self.forward


def flops(model: ModelSpec, *, length: int, source_length: int | None = None) -> Flops:
    """Count the FLOPs of one sequence; `source_length` (encoder-decoder) defaults to `length`."""
    made = program(model)
    source = length if source_length is None else source_length
    rows = {"target": length, "source": source, "chosen": length, "sequence": 1}
    chosen = products = attention = 0
    keys = {op.memory: made.values[op.reads[0]].rows for op in made.ops if not op.writes}
    for op in made.ops:
        value = None if op.writes is None else made.values[op.writes]
        match op.kind:
            case Route():
                assert value is not None
                chosen, rows["chosen"] = op.kind.chosen, rows[value.rows]
            case Linear():
                assert value is not None
                # Of the experts that a token chooses, as many as there are stand for them.
                if value.rows != "chosen" or expert_of(op.part) < chosen:
                    width = made.values[op.reads[0]].width
                    products += 2 * rows[value.rows] * width * value.width
            case Attend():
                assert value is not None
                attention += 4 * rows[value.rows] * rows[keys[op.memory]] * value.width
            case _:
                pass
    return Flops(products=products, attention=attention)


def expert_of(part: str) -> int:
    """Return the number of the expert that a part of a program belongs to."""
    return int(part.rpartition(".experts.")[2])


def head_weights(model: ModelSpec, name: str) -> int:
    """Count the weights that a head's products read, whether tied or its own."""
    made = program(model)
    return sum(
        made.values[op.reads[0]].width * made.values[op.writes].width
        for op in made.ops
        if op.part in (f"heads.{name}", f"transforms.{name}")
        and isinstance(op.kind, Linear)
        and op.writes is not None
    )


FLOAT, LONG = 4, 8


def weight_bytes(model: ModelSpec) -> dict[str, int]:
    """Count the bytes of a checkpoint in float32, bf16 and each quantization scheme.

    Scales are included; tensors that are not quantized count as float32. A matrix that a scheme
    does not fit is counted as int8, which the name then says; a scheme that fits none is left out.
    """
    own = stored(model)
    numbers = sum(p.size for p in own.values())
    found = {"float32": 4 * numbers, "bf16": 2 * numbers}
    for kind in SCHEMES:
        form = coverage(model, kind()).name
        if not form:
            continue
        quantized = QuantSpec(scheme=kind(), indivisible="int8")
        chosen = {p.name: quantized.scheme_of(p) for p in targets(model)}
        found[form] = sum(
            FLOAT * p.size
            if (scheme := chosen.get(name)) is None
            else scheme_bytes(scheme, p.shape)
            for name, p in own.items()
        )
    return found


def optimizer_bytes(model: ModelSpec, optimizer: Optimizer) -> int:
    """Count the bytes of the optimizer's state: moments, and AdamW's step count per tensor."""
    check_member("optimizer", optimizer, Optimizer)
    own = list(stored(model).values())
    match optimizer:
        case SGD(momentum=momentum):
            return FLOAT * sum(p.size for p in own) if momentum else 0
        case AdamW():
            return FLOAT * sum(2 * p.size + 1 for p in own)
        case Muon():
            return FLOAT * sum(
                p.size if p.kind == "matrix" and p.layer is not None else 2 * p.size + 1
                for p in own
            )
        case OwnOptimizer():
            raise InputError(f"how much {optimizer.source} keeps is not known")
        case _ as unreachable:
            assert_never(unreachable)


@spec
class TrainingMemory:
    """Bytes of a training step in float32.

    `activations` is what one batch keeps for the backward pass; `passing` is what the loss needs in
    addition while its gradient is computed.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    passing: int

    @property
    def resident(self) -> int:
        """Weights, optimizer state and activations: what is allocated when the backward begins."""
        return self.weights + self.optimizer + self.activations

    @property
    def peak(self) -> int:
        """The maximum: as the backward begins, or once every gradient is allocated."""
        begin = self.resident + self.passing
        return max(begin, self.weights + self.optimizer + self.gradients)


def training_memory(
    model: ModelSpec,
    *,
    batch: int,
    length: int,
    optimizer: Optimizer | None = None,
    device: str = "cpu",
) -> TrainingMemory:
    """Estimate a training step on a batch without padding; the optimizer defaults to AdamW."""
    kept = activations(model, batch=batch, length=length, device=device)
    weights = FLOAT * sum(p.size for p in stored(model).values())
    return TrainingMemory(
        weights=weights,
        optimizer=optimizer_bytes(model, AdamW() if optimizer is None else optimizer),
        gradients=weights,
        activations=kept.kept,
        passing=kept.passing,
    )


def cache_bytes(
    spec: ModelSpec, *, batch: int, length: int, itemsize: int, kv_cache: KVCache = "float"
) -> int:
    """Count the bytes of the keys and values of `length` positions in every decoder layer.

    `itemsize` is of a number where they are kept as computed; "int8" has a byte for each, and a
    float32 for each group.
    """
    made, total = program(spec), 0
    for op in made.ops:
        if not isinstance(op.kind, Remember) or op.part.startswith("encoder."):
            continue
        if op.part.endswith(".cross"):  # of a source, once
            continue
        for name in op.reads:
            width = made.values[name].width // op.kind.heads
            match kv_cache:
                case "float":
                    one = width * itemsize
                case "int8":
                    one = width + 4 * -(-width // KV_GROUP)
                case _ as unreachable:
                    assert_never(unreachable)
            total += op.kind.heads * one
    return total * batch * length


# --- activations ----------------------------------------------------------------------------------


@spec
class Activations:
    """Bytes that one batch keeps in the body (embedding and blocks) and in the heads' losses.

    `passing` is what the largest loss needs in addition while its gradient is computed.
    """

    body: int
    heads: int
    passing: int

    @property
    def kept(self) -> int:
        """The bytes that a saved-tensor hook measures."""
        return self.body + self.heads


def activations(
    model: ModelSpec,
    *,
    batch: int,
    length: int,
    source_length: int | None = None,
    device: str = "cpu",
) -> Activations:
    """Estimate the activations of one training batch without padding."""
    if any(stack.dropout.attention for stack in model.stacks().values()):
        raise InputError(
            "dropout on attention weights leaves the fused attention: what it keeps depends on "
            "the machine",
            hint="set dropout.attention=0",
        )
    check_tree(model)
    source = length if source_length is None else source_length
    body = 0
    for prefix, stack in model.stacks().items():
        rows = batch * (source if prefix == "encoder." else length)
        memory = batch * source if prefix == "decoder." else 0
        body += sum(_embedding(model, stack, rows, device))
        body += sum(_masks(model, stack, rows // batch, device))
        for block in stack.blocks():
            body += sum(_block(model, block, stack, rows, memory, device, batch))
        if stack.final_norm is not None:
            body += sum(_norm(stack.final_norm, rows, model.d_model, device))
        if list(stack.blocks())[-1].placement == "post":
            # No product keeps the last norm's output, and what keeps it has been counted.
            body -= FLOAT * rows * model.d_model
        if prefix == "encoder.":
            body += FLOAT * rows * model.d_model  # the memory that every decoder layer reads
    heads, passing = 0, 0
    for head, name in zip(model.heads, model.head_names(), strict=True):
        counted = batch * head.rows(length)
        heads += sum(_head(model, name, counted, device))
        passing = max(passing, _passing(model, name, counted, device))
    return Activations(body=body, heads=heads, passing=passing)


def _masks(model: ModelSpec, stack: Stack, length: int, device: str) -> Iterator[int]:
    """Masks that fused attention keeps: biases by distance once; a window's in each layer, added to
    the scores, or once for all layers by our kernel, a byte for each score.
    """
    attentions = [block.attention for block in stack.blocks()]
    fused = [a for a in attentions if not _is_explicit(a, model.position, device)]
    match model.position:
        case (
            ALiBi() | RelativeBias()
        ):  # one bias for each head, shared by all layers whose attention is alike
            kinds = {(a.causal, a.window, a.n_heads, a.head_width(model.d_model)) for a in fused}
            yield FLOAT * length**2 * sum(n_heads for _, _, n_heads, _ in kinds)
            if isinstance(model.position, RelativeBias):  # the bucket of each distance
                yield LONG * length**2 * len({(a.causal, a.window) for a in attentions})
        case NoPosition() | Sinusoidal() | Learned() | Rotary() | OwnPosition():
            windows = [
                (a.causal, a.window) for a in fused if a.window is not None and a.window < length
            ]
            if _by_kernels(device):
                yield length**2 * len(set(windows))
            else:
                yield FLOAT * length**2 * len(windows)
        case _ as unreachable:
            assert_never(unreachable)


def _by_kernels(device: str) -> bool:
    """True if a step in float32 computes its norms, gates, rotations, attention and losses by our C
    kernels (`kernels.train_kernels`): on a CPU, where their library is assumed to be built.
    """
    return device == "cpu"


def _is_explicit(attention: Attention, position: Position, device: str) -> bool:
    """True if all weights are computed one by one: no fused kernel caps scores or has a sink, and
    on a CPU none has the gradient of a bias.
    """
    learned = device == "cpu" and isinstance(position, RelativeBias)
    return attention.softcap is not None or attention.sinks or learned


def _embedding(model: ModelSpec, stack: Stack, rows: int, device: str) -> Iterator[int]:
    yield LONG * rows  # the ids
    match model.embedding:
        case FactorizedEmbedding(rank=rank):
            yield FLOAT * rows * rank
        case PlainEmbedding() | ScaledEmbedding():
            pass
        case _ as unreachable:
            assert_never(unreachable)
    if stack.embed_norm is not None:
        yield from _norm(stack.embed_norm, rows, model.d_model, device)
    tables = {
        (rotary, block.attention.head_width(model.d_model))
        for block in stack.blocks()
        if (rotary := rotary_of(block.attention, model.position)) is not None
    }
    yield FLOAT * model.max_seq_len * sum(r.width(width) for r, width in tables)  # of angles
    if stack.dropout.embedding:
        yield FLOAT * rows * model.d_model
    if next(stack.blocks()).placement == "post":
        yield FLOAT * rows * model.d_model  # input of the first projections, without a norm between


def _norm(norm: Norm, rows: int, width: int, device: str) -> Iterator[int]:
    """The input; then LayerNorm's two statistics, or RMSNorm's one. The normalised input of an
    RMSNorm is kept too, unless it is computed by a kernel.
    """
    yield FLOAT * rows * width
    match norm:
        case LayerNorm():
            yield FLOAT * rows * 2
        case RMSNorm():
            yield FLOAT * rows * (1 if _by_kernels(device) else 1 + width)
            if norm.offset:
                yield FLOAT * width  # 1 + weight
        case _ as unreachable:
            assert_never(unreachable)


def _block(
    model: ModelSpec,
    block: Block,
    stack: Stack,
    rows: int,
    memory: int,
    device: str,
    batch: int,
) -> Iterator[int]:
    d_model = model.d_model
    parts = 2 if block.cross is None else 3
    if stack.dropout.residual:
        yield FLOAT * parts * rows * d_model
    norms = 1 if block.placement in ("parallel_shared", "pre_ffn") else parts
    for _ in range(norms):
        yield from _norm(block.norm, rows, d_model, device)
        yield FLOAT * rows * d_model  # the normalised input, which the products read
    match block.placement:
        case "pre" | "post" | "output" | "parallel_shared":
            pass
        case "pre_ffn":
            yield FLOAT * rows * d_model  # attention's input, without a norm before it
        case "parallel":
            yield -FLOAT * rows * d_model  # both norms keep the same input
        case "sandwich":
            for _ in range(parts):
                yield from _norm(block.norm, rows, d_model, device)
        case _ as unknown:
            assert_never(unknown)
    own, cross = block.attention, block.cross
    yield from _attention(model, own, rows, rows, batch=batch, self_attention=True, device=device)
    if cross is not None:
        yield from _attention(
            model, cross, rows, memory, batch=batch, self_attention=False, device=device
        )
    match block.ffn:
        case MLP() | SwiGLU():
            yield from _ffn(block.ffn, stack, rows, device)
        case MoE():
            yield from _moe(model, block.ffn, stack, rows, device)
        case _ as unreachable:
            assert_never(unreachable)


def _ffn(ffn: MLP | SwiGLU, stack: Stack, rows: int, device: str) -> Iterator[int]:
    """The activations between the input of a feed-forward and its output."""
    wide = FLOAT * rows * ffn.d_ff
    match ffn:
        case SwiGLU(clamp=None, activation="silu") if _by_kernels(device):
            yield 3 * wide  # gate, up, and the product
        case SwiGLU(clamp=None):
            yield 4 * wide  # gate, silu(gate), up, and their product
        case SwiGLU():
            # gate and up, the gate after its limit, the sigmoid, the opened gate, u + 1, and the
            # product
            yield 7 * wide
        case MLP(activation="relu"):
            yield wide if not stack.dropout.ffn else 2 * wide  # the slope follows from the output
        case MLP():
            yield 2 * wide
        case _ as unreachable:
            assert_never(unreachable)
    if stack.dropout.ffn:
        yield wide  # the mask


def _moe(model: ModelSpec, ffn: MoE, stack: Stack, rows: int, device: str) -> Iterator[int]:
    """Router, experts over groups of tokens, shared expert. How far groups are filled up depends on
    the tokens: half of the most is taken.
    """
    chosen = rows * ffn.experts_per_token
    grouped = chosen + ffn.n_experts * (GROUP_ROWS - 1) // 2
    yield FLOAT * rows * (ffn.n_experts + 1)  # probabilities; which tokens are real
    yield (FLOAT + 2 * LONG) * chosen  # their weights, indices and rows in the groups
    if ffn.normalize:
        yield FLOAT * (chosen + rows)  # the probabilities that were chosen, and their sum
    yield LONG * grouped + FLOAT * grouped * model.d_model  # the experts' input
    yield from _ffn(ffn.expert, stack, grouped, device)
    yield FLOAT * chosen * model.d_model  # their outputs, to be weighted
    if ffn.shared is not None:
        yield from _ffn(ffn.shared, stack, rows, device)
    if ffn.shared_gate:
        yield FLOAT * rows * (1 + model.d_model)  # the gate, and what it multiplies


def _attention(
    model: ModelSpec,
    attention: Attention,
    queries: int,
    keys: int,
    *,
    batch: int,
    self_attention: bool,
    device: str,
) -> Iterator[int]:
    """Queries, keys, values, the output, and the log-sum-exp of each row, which our kernel keeps as
    the maximum and the sum; it takes no bias.

    Without a fused kernel: keys and values for every query head, and all weights, with the capped
    scores before them.
    """
    d_head = attention.head_width(model.d_model)
    q, kv = queries * attention.n_heads, keys * attention.kv_heads
    padded, read = d_head, kv
    if device != "cpu":
        multiple = GPU_HEAD_BYTES // FLOAT
        padded = -(-d_head // multiple) * multiple
        read = keys * attention.n_heads
    position = model.position if self_attention else NoPosition()
    biased = isinstance(position, ALiBi | RelativeBias)
    by_head = attention.qk_norm is not None and attention.qk_norm_over == "head"
    if _is_explicit(attention, position, device):
        yield FLOAT * d_head * (2 * q + 2 * keys * attention.n_heads)
        scores = q * keys // batch
        yield FLOAT * scores + (FLOAT * q if attention.sinks else 0)
        if attention.softcap is not None:
            yield FLOAT * scores
            if biased:
                yield scores // batch  # which of them are masked, a byte each
            elif attention.causal:
                yield scores // (attention.n_heads * batch)
    elif _by_kernels(device) and not biased:
        yield FLOAT * (d_head * (2 * q + 2 * kv) + 2 * q)
    else:
        yield FLOAT * (padded * (2 * q + 2 * read) + q)
        if padded != d_head or (by_head and device == "cpu"):
            yield FLOAT * d_head * q  # the output is copied to the layout that is read next
    if attention.qk_norm is not None:
        norm = attention.qk_norm
        if attention.qk_norm_over == "all":
            yield from _norm(norm, queries, attention.n_heads * d_head, device)
            yield from _norm(norm, keys, attention.kv_heads * d_head, device)
        else:
            yield from _norm(norm, q, d_head, device)
            yield from _norm(norm, kv, d_head, device)


def _head(model: ModelSpec, name: str, rows: int, device: str) -> Iterator[int]:
    """The hidden rows with a target, their log-softmax, targets and weights.

    In chunks, the logits are not kept: only the gradients of the rows and of the head's parameters
    or, where a chunk is computed again, rows, targets and weights.
    """
    head, width = model.head(name), model.head_size(name)
    yield FLOAT * rows * model.d_model
    yield rows  # the mask of rows with a target, a byte each
    if rows * width > PIECE or _loss_by_kernel(model, name, rows, device):
        if _is_one_product(model, name):
            yield FLOAT * width * (model.d_model + head.bias)
        else:
            yield (LONG + FLOAT) * rows
        return
    if isinstance(head, NextHead) and head.softcap is not None:
        yield FLOAT * rows * width  # the capped logits
    yield FLOAT * rows * width + LONG * rows + FLOAT * rows
    if is_tied(head) and isinstance(model.embedding, FactorizedEmbedding):
        yield FLOAT * rows * model.embedding.rank


def _passing(model: ModelSpec, name: str, rows: int, device: str) -> int:
    """A chunk of logits and its gradient, which our kernel writes over them."""
    logits = rows * model.head_size(name)
    if _loss_by_kernel(model, name, rows, device):  # with a bias, the sum is another chunk
        return FLOAT * min(logits, KERNEL_CHUNK) * (1 + model.head(name).bias)
    return 2 * FLOAT * min(logits, PIECE)


def _loss_by_kernel(model: ModelSpec, name: str, rows: int, device: str) -> bool:
    """True if our kernel writes the gradient over the logits, chunk by chunk."""
    large = rows * model.head_size(name) >= KERNEL_PIECE
    return large and _by_kernels(device) and _is_one_product(model, name)


def _is_one_product(model: ModelSpec, name: str) -> bool:
    """True if nothing but a product with a matrix, and a bias, turns hidden rows into logits."""
    head = model.head(name)
    match head:
        case NextHead():
            plain = head.scale == 1.0 and head.softcap is None
        case MaskedHead():
            plain = head.transform is None
        case VectorHead():
            plain = False
        case ClassHead() | StateHead() | AnswerHead():
            plain = True
        case _ as unreachable:
            assert_never(unreachable)
    return plain and not (is_tied(head) and isinstance(model.embedding, FactorizedEmbedding))
