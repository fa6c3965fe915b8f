"""What a quantization is calibrated and measured on: a text, a run's own task, or the model's own
words. What measures is never what calibrated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.data.vocab import Tokenizer
from glassformer.generate.decode import generate
from glassformer.generate.prompts import Prompts
from glassformer.generate.stepper import TorchStepper
from glassformer.models.model import Model
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError

LENGTH, ROWS = 128, 16
#: Batches that calibrate at most, and that measure at most.
CALIBRATING, MEASURING = 16, 32
#: Share of a text that is kept for measuring.
HELD_OUT = 0.2


@dataclass(frozen=True, slots=True)
class Material:
    """Batches to calibrate on, others to measure on, and where the latter come from."""

    calibrating: tuple[Batch, ...]
    measuring: tuple[Batch, ...]
    origin: str


def of_task(task: Task) -> Material:
    """Training examples calibrate, held-out ones measure."""
    sizes = task.sizes()
    split = next(name for name in ("val", "test", "train") if sizes.get(name))
    return Material(
        tuple(_batches(task, "train", CALIBRATING)),
        tuple(_batches(task, split, MEASURING)),
        f"the task's own examples ({split})",
    )


def _batches(task: Task, split: str, most: int) -> list[Batch]:
    """Batches spread over the split, examples taken at even distances."""
    count = task.sizes()[split]
    rows = np.unique(np.linspace(0, count - 1, min(count, most * ROWS)).astype(np.int64))
    return [task.batch(split, rows[i : i + ROWS]) for i in range(0, len(rows), ROWS)]


def of_text(path: Path, tokenizer: Tokenizer, model: Model) -> Material:
    """The beginning of a text calibrates, its end measures."""
    _check_continues(model)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the text cannot be read: {error}", where=str(path)) from error
    ids = np.array(tokenizer.encode(text), dtype=np.int64)
    if len(ids) and ids.max() >= model.spec.vocab_size:
        raise InputError("the tokenizer has more tokens than the model", where=str(path))
    cut = int(len(ids) * (1 - HELD_OUT))
    parts = [_windows(part, model) for part in (ids[:cut], ids[cut:])]
    if not all(parts):
        raise InputError(
            f"a text of {len(ids)} tokens is too short to calibrate and to measure on",
            where=str(path),
            hint="some thousand words serve best",
        )
    return Material(
        tuple(_spread(parts[0], CALIBRATING)),
        tuple(_spread(parts[1], MEASURING)),
        f"the end of {path.name}",
    )


def _spread(batches: list[Batch], most: int) -> list[Batch]:
    """At most so many, at even distances."""
    places = np.unique(np.linspace(0, len(batches) - 1, min(len(batches), most)).astype(np.int64))
    return [batches[place] for place in places]


def of_model(model: Model, *, seed: int = 0) -> Material:
    """Sequences that the model itself draws: no truth, but its own distribution."""
    _check_continues(model)
    length = min(LENGTH, model.spec.max_seq_len - 1)
    spec = DecodeSpec(max_new_tokens=length, temperature=1.0, seed=seed)
    vocab = model.spec.vocab_size
    first = np.random.default_rng(seed).integers(0, vocab, 2 * ROWS).tolist()
    made = generate(TorchStepper(model), Prompts.of([[t] for t in first]), spec=spec)
    rows = [[begin, *one.tokens] for begin, one in zip(first, made, strict=True)]
    both = [_batch(np.array(rows[i : i + ROWS])) for i in (0, ROWS)]
    return Material((both[0],), (both[1],), "sequences drawn from the model itself")


def _check_continues(model: Model) -> None:
    if model.spec.encoder is not None or "next" not in model.spec.head_names():
        raise InputError(
            "only a decoder with a next-token head can be measured on text",
            hint="quantize a run: its task has examples",
        )


def _windows(ids: "np.ndarray", model: Model) -> list[Batch]:
    length = min(LENGTH, model.spec.max_seq_len, max(2, len(ids) - 1))
    starts = range(0, len(ids) - length, length)
    rows = [ids[start : start + length + 1] for start in starts]
    return [_batch(np.stack(rows[i : i + ROWS])) for i in range(0, len(rows), ROWS)]


def _batch(window_BT: "np.ndarray") -> Batch:
    """Every token but the last, and the token after each."""
    tokens = window_BT[:, :-1]
    return Batch(
        tokens=tokens,
        valid=np.ones(tokens.shape, dtype=np.bool_),
        targets={"next": window_BT[:, 1:]},
    )


def joined(one: Material, other: Material) -> Material:
    """Calibrate on the one, measure on the other."""
    return Material(one.calibrating, other.measuring, other.origin)


def tokens_of(batches: Sequence[Batch]) -> int:
    """Real tokens in them."""
    return sum(int(batch.valid.sum()) for batch in batches)
