"""What a training step really holds: measured, to be compared with what `spec.activations` says."""

import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.training.torch_engine import TorchEngine


def saved_bytes(engine: TorchEngine, batch: Batch) -> int:
    """Bytes that autograd keeps between the forward and the backward of one step, which is taken.

    Every storage counts once, however many operations keep it; the parameters do not count.
    """
    own = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    kept: dict[int, Tensor] = {}  # keeps them alive, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.step([batch], lr=engine.train.lr, seed=0)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def optimizer_bytes(engine: TorchEngine) -> int:
    """Bytes of the optimizers' state."""
    return sum(
        value.untyped_storage().nbytes()
        for optimizer, _ in engine.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
