"""`Graphs`: computations of a training step as CUDA graphs, one for each kind of arrays.

The host copies one block of bytes to the device for a step and reads one row of numbers back, a few
steps later. The first computation of a kind is not recorded (it warms up), the second is.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Kind = tuple[tuple[str, tuple[int, ...], str], ...]
Compute = Callable[[Mapping[str, Tensor]], Tensor]

#: Bytes between the starts of two arrays in a block.
ALIGNED = 64
#: Blocks of pinned memory for each kind: more than the steps that are on their way.
BUFFERS = 6


def graphs_for(device: str | torch.device) -> "type[Graphs] | None":
    """Return what records training steps on this device; None where nothing is recorded."""
    return Graphs if torch.device(device).type == "cuda" else None


class Block:
    """One block of device memory with a view for each array, filled by a single copy.

    The copy begins in pinned memory; there are several such buffers, so that the next step's
    arrays are written while the last ones' are on their way.
    """

    def __init__(self, kind: Kind, device: torch.device, *, buffers: int) -> None:
        offsets, size = [], 0
        for _, shape, dtype in kind:
            offsets.append(size)
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNED) * ALIGNED
        pinned = device.type == "cuda"
        self.device_bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.views: dict[str, Tensor] = {}
        self.buffers: list[tuple[Tensor, dict[str, Array]]] = []
        for (name, shape, dtype), offset in zip(kind, offsets, strict=True):
            self.views[name] = _view(self.device_bytes, offset, shape, dtype)
        for _ in range(buffers):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            views = {
                name: _view(host, offset, shape, dtype).numpy()
                for (name, shape, dtype), offset in zip(kind, offsets, strict=True)
            }
            self.buffers.append((host, views))
        self.sent: list[torch.cuda.Event | None] = [None] * buffers
        self.turn = 0

    def send(self, arrays: Mapping[str, Array]) -> None:
        """Copy a step's arrays to the device, without waiting for it."""
        sent = self.sent[self.turn]
        if sent is not None:
            sent.synchronize()
        host, views = self.buffers[self.turn]
        for name, array in arrays.items():
            np.copyto(views[name], array)
        self.device_bytes.copy_(host, non_blocking=True)
        if host.is_pinned():
            self.sent[self.turn] = torch.cuda.current_stream().record_event()
        self.turn = (self.turn + 1) % len(self.buffers)


def _view(block: Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return block[offset : offset + size].view(kind).view(shape)


class Graphs:
    """Computations of one engine, by its weights."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters, self.device = parameters, parameters[0].device
        self.forget()

    def forget(self) -> None:
        """Drop every record: the weights or the optimizer's tensors were replaced."""
        self.blocks: dict[Kind, Block] = {}
        self.graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self.results: dict[Kind, Tensor] = {}
        self.pool: Any = None

    def run(self, arrays: Mapping[str, Array], compute: Compute) -> Tensor:
        """Compute on arrays: by their record, by recording it the second time, or plainly."""
        kind = tuple((name, array.shape, array.dtype.str) for name, array in arrays.items())
        first = kind not in self.blocks
        if first:
            self.blocks[kind] = Block(kind, self.device, buffers=BUFFERS)
        block = self.blocks[kind]
        block.send(arrays)
        if kind not in self.graphs:
            if first:
                return self._plainly(compute, block.views)
            self._record(kind, compute)
        self.graphs[kind].replay()
        # Autograd does not see what a record writes; whoever keeps results by version must.
        torch.autograd.graph.increment_version(self.parameters)
        return self.results[kind]

    def _plainly(self, compute: Compute, views: Mapping[str, Tensor]) -> Tensor:
        """Compute without a record, on a stream of its own as CUDA graphs require of the first."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            result = compute(views)
        here.wait_stream(aside)
        return result

    def _record(self, kind: Kind, compute: Compute) -> None:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.results[kind] = compute(self.blocks[kind].views)
        self.graphs[kind] = graph

    @contextlib.contextmanager
    def dropout_from(self, seed: int) -> Iterator[None]:
        """Seed dropout for this step; torch's own generator is restored afterwards."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        generator = torch.cuda.default_generators[index]
        before = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(seed)
        yield
        generator.manual_seed(before[0])
        generator.set_offset(before[1])

    def fetched(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Start the copy of numbers to the host; return a function that waits for it."""
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        done = torch.cuda.current_stream().record_event()

        def read() -> Tensor:
            done.synchronize()
            return host

        return read
