"""A training step (forward, backward, Adam) of the by-hand engine against PyTorch, same model.

float32, PyTorch eager with its default Adam, two threads, the same weights and batches. The two
take turns of a few steps; the first steps of a turn are not timed, because the other library's
worker threads still spin then. `of_limit` is the time of the step's matrix products alone, in
NumPy's BLAS, over the time of the step.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from bench.clock import said
from glassformer.byhand.model import Model
from glassformer.byhand.optim import Adam
from glassformer.data.batch import Batch
from glassformer.models.model import build
from glassformer.spec import model as spec
from glassformer.spec.presets import digits
from glassformer.spec.serialize import override

VOCAB = 20
ROUNDS, SETTLE, TIMED = 15, 3, 6
Step = Callable[[], object]


def one_layer() -> spec.ModelSpec:
    """One post-norm block as in source 003, causal, with a next-token head."""
    block = spec.Block(
        mixer=spec.Attention(n_heads=4, bias="all"),
        ffn=spec.MLP(d_ff=512, activation="relu"),
        norm=spec.LayerNorm(),
        placement="post",
    )
    return spec.ModelSpec(
        vocab_size=VOCAB,
        d_model=128,
        max_seq_len=64,
        position=spec.Sinusoidal(),
        decoder=spec.Stack(layers=(spec.Layers(count=1, block=block),)),
        heads=(spec.NextHead(tied=False, bias=True),),
    )


def steps(model_spec: spec.ModelSpec, *, batch: int, length: int) -> tuple[Step, Step]:
    """Our step and PyTorch's; answers come from padded rows of different lengths."""
    rng = np.random.default_rng(0)
    twin = build(model_spec, generator=torch.Generator().manual_seed(0)).train()
    weights = {name: p.detach().numpy() for name, p in twin.named_parameters()}
    model = Model(model_spec, params=weights, dtype=np.float32)
    ours, theirs = Adam(model), torch.optim.Adam(twin.parameters())
    (head,) = model_spec.head_names()
    tokens, valid = rng.integers(0, VOCAB, (batch, length)), np.ones((batch, length), np.bool_)
    targets = rng.integers(0, VOCAB, (batch, length))
    if head == "answer":
        valid = np.arange(length) < rng.integers(3, length + 1, batch)[:, None]
        targets = targets[:, 0]
    wanted, whole = torch.tensor(targets).flatten(), Batch(tokens=tokens, valid=valid)

    def our_step() -> None:
        model.loss_and_grads(model.inputs(tokens, valid_BT=valid), targets={head: targets})
        ours.step()

    def their_step() -> None:
        theirs.zero_grad()
        F.cross_entropy(twin(whole)[head].reshape(-1, VOCAB), wanted).backward()
        theirs.step()

    return our_step, their_step


def products(model_spec: spec.ModelSpec, *, batch: int, length: int) -> Step:
    """Nothing but the step's matrix products with weights and those of attention."""
    rng = np.random.default_rng(0)
    rows, d_model = batch * length, model_spec.d_model
    (run,) = model_spec.decoder.layers
    heads, d_ff = run.block.attention.n_heads, run.block.ffn.d_ff

    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    linears = []
    for d_in, d_out in (
        (d_model, 3 * d_model),
        (d_model, d_model),
        (d_model, d_ff),
        (d_ff, d_model),
    ):
        x, weight, dout = noise(rows, d_in), noise(d_out, d_in), noise(rows, d_out)
        linears.append((x, weight, dout, np.empty_like(dout), np.empty_like(x), noise(d_out, d_in)))
    q, k = (noise(batch, heads, length, d_model // heads) for _ in range(2))
    scores, out = noise(batch, heads, length, length), np.empty_like(q)

    def step() -> None:
        for _ in range(run.count):
            for x, weight, dout, y, dx, dweight in linears:
                np.matmul(x, weight.T, out=y)
                np.matmul(dout, weight, out=dx)
                np.matmul(dout.T, x, out=dweight)
            for _ in range(2):
                np.matmul(q, k.swapaxes(-1, -2), out=scores)
                np.matmul(scores, k, out=out)
                np.matmul(scores.swapaxes(-1, -2), k, out=out)

    return step


def timed(step: Step) -> list[float]:
    """Milliseconds of each timed step of one turn."""
    found = []
    for turn in range(SETTLE + TIMED):
        start = time.perf_counter()
        step()
        if turn >= SETTLE:
            found.append((time.perf_counter() - start) * 1e3)
    return found


def compare(
    case: str, model_spec: spec.ModelSpec, *, batch: int, length: int
) -> Iterator[dict[str, object]]:
    """Rows of one case: ours with its ratio, PyTorch's, and the products alone."""
    sides = dict(
        zip(("byhand", "torch eager"), steps(model_spec, batch=batch, length=length), strict=True)
    )
    sides["products alone"] = products(model_spec, batch=batch, length=length)
    times: dict[str, list[float]] = {name: [] for name in sides}
    shares = []
    for _ in range(ROUNDS):
        turn = {name: timed(step) for name, step in sides.items()}
        shares.append(statistics.median(turn["byhand"]) / statistics.median(turn["torch eager"]))
        for name, values in turn.items():
            times[name] += values
    limit = statistics.median(times["products alone"])
    for name, values in times.items():
        median, ours = statistics.median(values), name == "byhand"
        yield said(
            "byhand",
            case,
            name,
            round(median, 4),
            ratio=round(statistics.median(shares), 3) if ours else None,
            of_limit=None if name == "products alone" else round(limit / median, 3),
        )


def run() -> Iterator[dict[str, object]]:
    """Both sizes of the issue with ReLU, then the same with GELU, which the by-hand erf serves."""
    torch.set_num_threads(2)
    gelu = ("decoder.layers.block.ffn.activation=gelu",)
    for activation, change in (("ReLU", ()), ("GELU", gelu)):
        small, layer = override(digits(), change), override(one_layer(), change)
        yield from compare(
            f"digits, {activation}: V20 d64 h4 L2 ff256 B128 T8", small, batch=128, length=8
        )
        yield from compare(
            f"one layer, {activation}: B16 T64 d128 h4 ff512", layer, batch=16, length=64
        )
