"""The rates of this machine, from which `spec.timing` predicts the time of a training step.

A few operations of a training step are timed forward and backward, at sizes at which machines
differ: in and out of the caches, narrow and wide. A GPU works while the host prepares what comes
next, so the two are timed apart: the GPU's work replayed as a graph, the host's calls unawaited.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.costs.timing import USUAL_HEAD, Curve, Rates
from glassformer.training.torch_engine import light

ROWS = 1024
WIDTHS = (32, 64, 128, 256, 512)
LENGTHS = (32, 128, 512)
HEADS = (4, 8, 16, 32, 64)
USUAL_LENGTH = 128
ELEMENTS = (1 << 14, 1 << 17, 1 << 20, 1 << 22)
LOGITS = (1 << 18, 1 << 21, 1 << 23)
CHAIN = 50
REPLAYS = 10

Clock = Callable[[], float]


def calibrate(
    *, device: str = "cpu", seconds: float = 2.0, clock: Clock = time.perf_counter
) -> Rates:
    """Measure for about `seconds`; each of the sizes runs three times at least.

    On one thread `time.process_time` as the clock leaves out what other programs take.
    """
    place = torch.device(device)
    sizes = (*WIDTHS, *LENGTHS, *HEADS, *ELEMENTS, *LOGITS)
    share = seconds / 2 / (len(sizes) + 2)  # making the tensors and warming up take the other half

    def timed(run: Callable[[], Tensor]) -> float:
        if place.type == "cuda":
            return _seconds_on_gpu(run, share)
        return _seconds(run, share, clock)

    def curve(
        sizes: tuple[int, ...], work: Callable[[int], tuple[float, Callable[[], Tensor]]]
    ) -> Curve:
        points = []
        for size in sizes:
            amount, run = work(size)
            points.append((size, amount / timed(run)))
        return tuple(points)

    chain = _seconds(_tiny(place), share, clock) / CHAIN
    return Rates(
        device=device,
        threads=torch.get_num_threads(),
        products=curve(WIDTHS, lambda d: (6.0 * ROWS * d * d, _product(d, place))),
        attention=curve(LENGTHS, lambda t: _attention(t, USUAL_HEAD, place)),
        heads=curve(HEADS, lambda h: _attention(USUAL_LENGTH, h, place)),
        passes=curve(ELEMENTS, lambda n: (float(n), _pass(n, place))),
        logits=curve(LOGITS, lambda n: (float(n), _loss(n, place))),
        updates=_UPDATED / timed(_update(place)),
        dispatch=chain,
    )


def _seconds(run: Callable[[], Tensor], seconds: float, clock: Clock) -> float:
    """Return the lower quartile of a few calls: one that was interrupted does not count.

    Reading a number waits for the device that computes it.
    """
    run().item()
    times: list[float] = []
    end = clock() + seconds
    while len(times) < 3 or clock() < end:
        began = clock()
        run().item()
        times.append(clock() - began)
    return sorted(times)[len(times) // 4]


def _seconds_on_gpu(run: Callable[[], Tensor], seconds: float) -> float:
    """Return the time of the device alone: the work is recorded once, replayed without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(REPLAYS):
            graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / REPLAYS)
    return sorted(times)[len(times) // 4]


def _leaf(*shape: int, device: torch.device) -> Tensor:
    return torch.ones(shape, device=device).requires_grad_()


def _backward(result: Tensor, gradient: Tensor, *leaves: Tensor) -> Tensor:
    for leaf in leaves:
        leaf.grad = None
    result.backward(gradient)
    assert leaves[0].grad is not None
    return leaves[0].grad.view(-1)[0]


def _product(width: int, device: torch.device) -> Callable[[], Tensor]:
    x, w = _leaf(ROWS, width, device=device), _leaf(width, width, device=device)
    gradient = torch.ones(ROWS, width, device=device)
    return lambda: _backward(F.linear(x, w), gradient, x, w)


def _attention(
    length: int, d_head: int, device: torch.device
) -> tuple[float, Callable[[], Tensor]]:
    batch, heads = max(1, ROWS // length), 4
    q, k, v = (_leaf(batch, length, heads, d_head, device=device) for _ in range(3))
    gradient = torch.ones(batch, heads, length, d_head, device=device)

    def run() -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            heads_first[0], heads_first[1], heads_first[2], is_causal=True
        )
        return _backward(out, gradient, q, k, v)

    return 12.0 * batch * heads * length * length * d_head, run


def _pass(elements: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = _leaf(elements, device=device), _leaf(elements, device=device)
    gradient = torch.ones(elements, device=device)
    return lambda: _backward(a * b, gradient, a, b)


def _loss(entries: int, device: torch.device) -> Callable[[], Tensor]:
    x = _leaf(ROWS // 4, 4 * entries // ROWS, device=device)
    targets = torch.zeros(ROWS // 4, dtype=torch.long, device=device)
    one = torch.ones((), device=device)
    return lambda: _backward(F.cross_entropy(x, targets), one, x)


_UPDATED = 20 * 256 * 256


def _update(device: torch.device) -> Callable[[], Tensor]:
    weights = [_leaf(256, 256, device=device) for _ in range(20)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    kind = light(torch.optim.AdamW)
    optimizer = kind(weights, lr=1e-9, fused=True, capturable=device.type == "cuda")

    def run() -> Tensor:
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(weights, 1.0, norm)
        optimizer.step()
        return norm

    return run


def _tiny(device: torch.device) -> Callable[[], Tensor]:
    x, one = _leaf(8, device=device), torch.ones(8, device=device)

    def run() -> Tensor:
        y = x
        for _ in range(CHAIN):
            y = y * one
        return _backward(y, one, x)

    return run
