"""Bits per byte: how short a model could write a text of Python's manuals.

The text is the beginning of what the language-model recipes hold out. Every token costs -log2 of
its probability; a first token that nothing stands before costs log2 of the vocabulary. So uniform
logits cost exactly tokens * log2(vocabulary) / bytes.
"""

import bz2
import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glassformer.data.tasks.text import held_out_text
from glassformer.lab.smallbench.examinee import Examinee, NotOffered, Place, log_probabilities
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import TextTask

#: A longer context is not used, so that models of different lengths are asked the same.
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Code:
    """What a text costs: bits by window, bytes by window (its tokens' share of the text), tokens in
    all, and bits per byte of this model and of uniform logits.
    """

    bits: NDArray[np.float64]
    bytes: NDArray[np.float64]
    tokens: int
    bits_per_byte: float
    uniform: float


def manuals(size: int) -> str:
    """The first `size` bytes or so of the default corpus's held-out part, in whole lines."""
    text = _held_out()
    end = text.find(b"\n", size)
    return text.decode() if end < 0 else text[: end + 1].decode()


@functools.cache
def _held_out() -> bytes:
    return held_out_text(TextTask()).encode()


def encode_length(examinee: Examinee, text: str) -> Code:
    """Read a text in windows; a token is told by what stands before it in the window."""
    if not text.strip():
        raise InputError("an empty text has no bits per byte")
    if examinee.max_length < 2:
        raise NotOffered("it reads one token at a time")
    ids = examinee.ids(text)
    if len(ids) < 2:
        raise NotOffered("the text is a single token")
    width = min(WINDOW, examinee.max_length)
    rows, places = [], []
    for start in range(0, len(ids) - 1, width):
        row = ids[start : start + width]
        following = ids[start + 1 : start + width + 1]
        asked: list[Place] = list(enumerate(following))
        rows.append(row[: len(asked)])
        places.append(asked)
    found = log_probabilities(examinee, rows, places)
    bits = np.array([-logp.sum() / math.log(2) for logp, _ in found])
    tokens = np.array([len(asked) for asked in places])
    if examinee.begin is None:  # nothing stood before the first token
        bits[0] += math.log2(examinee.vocab_size)
        tokens[0] += 1
    size, count = len(text.encode()), int(tokens.sum())
    return Code(
        bits,
        tokens / count * size,
        count,
        bits_per_byte=float(bits.sum() / size),
        uniform=count * math.log2(examinee.vocab_size) / size,
    )


def yardstick(text: str) -> float:
    """Bits per byte of bz2 on this text alone, which it has learned nothing about before."""
    content = text.encode()
    return 8 * len(bz2.compress(content, 9)) / len(content)
