"""The transformer by hand: every name of its document, in NumPy, with gradients derived by hand.

    vocabulary.py       VOCABULARY, REVERSE_VOCABULARY, tokenize, detokenize
    data_generator.py   generate_example, generate_dataset, split_dataset
    data_utils.py       create_batch, create_batches
    layers.py           Linear, Embedding, PositionalEncoding, LayerNorm, ReLU, Softmax
    attention.py        scaled_dot_product_attention, attend_backward, MultiHeadAttention
    transformer.py      FeedForward, TransformerBlock, Transformer
    loss.py             CrossEntropyLoss
    optimizer.py        Adam, SGD
    train.py            train_one_epoch, evaluate
    gradient_check.py   numerical_gradient, relative_error, check_directions

The last two of its files are functions of the package, which take a `Transformer` as it is:
`gf.evaluate(model, "digits")` has accuracy and confusions by operation, `gf.inspect(model, tokens)`
the attention of every head. The layers are those of `glassformer.byhand.layers`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

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
    attend_backward,
    scaled_dot_product_attention,
)
from glassformer.byhand.optim import SGD, Adam, Optimizer
from glassformer.data.batch import Batch
from glassformer.data.tasks.digits import (
    VOCAB,
    Example,
    create_batch,
    detokenize,
    generate_example,
    tokenize,
)
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError

__all__ = [
    "REVERSE_VOCABULARY",
    "SGD",
    "VOCABULARY",
    "Adam",
    "CrossEntropyLoss",
    "Embedding",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "PositionalEncoding",
    "ReLU",
    "Softmax",
    "Transformer",
    "TransformerBlock",
    "attend_backward",
    "check_directions",
    "create_batch",
    "create_batches",
    "detokenize",
    "evaluate",
    "generate_dataset",
    "generate_example",
    "numerical_gradient",
    "relative_error",
    "scaled_dot_product_attention",
    "split_dataset",
    "tokenize",
    "train_one_epoch",
]

#: The twenty tokens and their ids, and back.
VOCABULARY = {name: i for i, name in enumerate(VOCAB.names)}
REVERSE_VOCABULARY = dict(enumerate(VOCAB.names))


def generate_dataset(count: int = 10_000, rng: np.random.Generator | None = None) -> list[Example]:
    """Return different examples in random order."""
    rng, found = np.random.default_rng() if rng is None else rng, dict[Example, None]()
    while len(found) < count:
        found[generate_example(rng)] = None
    return list(found)


def split_dataset(
    examples: Sequence[Example],
) -> tuple[list[Example], list[Example], list[Example]]:
    """Return train, validation and test examples: 80, 10 and 10 %."""
    first, second = len(examples) * 8 // 10, len(examples) * 9 // 10
    return list(examples[:first]), list(examples[first:second]), list(examples[second:])


def create_batches(
    examples: Sequence[Example], batch_size: int = 32, rng: np.random.Generator | None = None
) -> list[Batch]:
    """Return all examples in batches, each padded to its longest; with `rng`, shuffled first."""
    at_least("batch_size", batch_size)
    order = np.arange(len(examples)) if rng is None else rng.permutation(len(examples))
    return [
        create_batch([examples[i] for i in order[start : start + batch_size]])
        for start in range(0, len(examples), batch_size)
    ]


def train_one_epoch(
    model: Transformer,
    batches: Iterable[Batch],
    loss: CrossEntropyLoss,
    optimizer: Optimizer,
    *,
    log_every: int = 10,
) -> float:
    """Train on every batch once and return the mean loss of the examples.

    Prints the loss of every tenth batch (`log_every`; 0 prints nothing).
    """
    total, seen = 0.0, 0
    for number, batch in enumerate(batches, start=1):
        logits = model.forward(batch.tokens, batch.valid)
        value = loss.forward(logits, batch.targets["answer"])
        model.backward(loss.backward())
        optimizer.step()
        total, seen = total + value * len(batch.tokens), seen + len(batch.tokens)
        if log_every and number % log_every == 0:
            print(f"batch {number:4}  loss {value:.4f}")
    if not seen:
        raise InputError("an epoch without a batch", hint="create_batches(examples)")
    return total / seen


def evaluate(model: Transformer, batches: Iterable[Batch]) -> float:
    """Return the share of right answers; no gradient is computed."""
    right = seen = 0
    for batch in batches:
        valid = None if batch.valid.all() else batch.valid
        (logits,) = model.model.forward(batch.tokens, valid_BT=valid).values()
        right += int((logits.argmax(-1) == batch.targets["answer"]).sum())
        seen += len(batch.tokens)
    if not seen:
        raise InputError("nothing to evaluate on", hint="create_batches(examples)")
    return right / seen
