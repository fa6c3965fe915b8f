"""The transformer by hand: layers with forward and backward, loss, optimizers, an epoch.

The layers are `byhand`'s; an epoch and an evaluation use the common training loop and evaluation,
on the NumPy engine.
"""

from dataclasses import replace
from itertools import islice

from glassformer.byhand.gradient_check import check_directions, numerical_gradient, relative_error
from glassformer.byhand.layers import (
    CrossEntropyLoss,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    PositionalEncoding,
    ReLU,
    Softmax,
    Transformer,
    TransformerBlock,
    scaled_dot_product_attention,
)
from glassformer.byhand.model import Model
from glassformer.byhand.optim import SGD, Adam
from glassformer.data.task import Task
from glassformer.data.tasks.digits import create_batch, detokenize, generate_example, tokenize
from glassformer.lab.measure import evaluate as measure
from glassformer.spec.train import TrainSpec
from glassformer.training.fit import fit
from glassformer.training.numpy_engine import NumpyEngine

__all__ = [
    "Adam",
    "CrossEntropyLoss",
    "Embedding",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "PositionalEncoding",
    "ReLU",
    "SGD",
    "Softmax",
    "Trainer",
    "Transformer",
    "TransformerBlock",
    "check_directions",
    "create_batch",
    "detokenize",
    "evaluate",
    "generate_example",
    "numerical_gradient",
    "relative_error",
    "scaled_dot_product_attention",
    "tokenize",
    "train_one_epoch",
]


class Trainer:
    """A NumPy model, its task and optimizer, and the number of epochs so far."""

    def __init__(self, model: Model, task: Task, train: TrainSpec) -> None:
        self.engine = NumpyEngine(model, train)
        self.task = task
        self.train = train
        self.epochs = 0


def train_one_epoch(trainer: Trainer) -> float:
    """Train on every example once; return the mean loss of the steps."""
    batches = -(-trainer.task.sizes()["train"] // trainer.train.batch_size)
    first = trainer.epochs * batches
    # The schedule is the whole training's: an epoch must not end it, nor start it anew.
    steps = max(trainer.train.steps, first + batches)
    train = replace(trainer.train, steps=steps, accumulate=1)
    records = fit(trainer.engine, trainer.task, train, start=first)
    losses = [record.loss for record in islice(records, batches)]
    trainer.epochs += 1
    return sum(losses) / len(losses)


def evaluate(trainer: Trainer, *, split: str = "val") -> float:
    """Return the accuracy on held-out examples."""
    return measure.evaluate(trainer.engine, trainer.task, split=split).accuracy
