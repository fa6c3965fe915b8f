"""Models of another house, each two functions: uniform, all-knowing, and slaves of one habit."""

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

from glassformer.checks.preset_subjects import perturb
from glassformer.data.tokenizers.vocab import Bytes, Tokenizer
from glassformer.lab.smallbench.question import Exam, Examinee, Group, examinee_of
from glassformer.models.model import build
from glassformer.spec import presets
from glassformer.spec.model import ModelSpec

SURE = 30.0


def random_model(seed: int, tokenizer: Tokenizer | None = None, *, loud: bool = False) -> Examinee:
    """An untrained language model: positions, norms and ties differ with the seed.

    A fresh one prefers the same answer to nearly every question; a loud one has weights of unit
    scale, so that what it says depends on everything it reads.
    """
    tokenizer = Bytes() if tokenizer is None else tokenizer
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 24, "d_ff": 48, "n_layers": 2}
    kinds: list[Callable[[], ModelSpec]] = [
        lambda: presets.budget_lm(**sizes, n_heads=4, max_seq_len=128),
        lambda: presets.modern_lm(**sizes, n_heads=4, n_kv_heads=2, max_seq_len=128),
        lambda: presets.budget_lm(**sizes, n_heads=2, max_seq_len=160, tied=False),
        lambda: presets.core(**sizes, n_heads=3, max_seq_len=192),
        lambda: presets.modern_lm(
            **sizes,
            n_heads=2,
            n_kv_heads=1,
            max_seq_len=256,
            tied=False,
        ),
    ]
    spec = kinds[seed % len(kinds)]()
    model = build(spec, generator=torch.Generator().manual_seed(seed))
    if loud:
        perturb(model, dtype=torch.float32, seed=seed)
    return examinee_of(model, tokenizer, name=f"random {seed}")


def uniform(tokenizer: Tokenizer, *, begin: int | None = None, max_length: int = 128) -> Examinee:
    """Everything is equally likely."""

    def logits(tokens_BT: np.ndarray, valid_BT: np.ndarray) -> np.ndarray:
        return np.zeros((*tokens_BT.shape, tokenizer.vocab_size), dtype=np.float32)

    return Examinee(
        name="uniform",
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        logits=logits,
        vocab_size=tokenizer.vocab_size,
        max_length=max_length,
        begin=begin,
    )


def all_knowing(exam: Exam, groups: Sequence[Group]) -> Examinee:
    """Reads bytes; wherever a question's context is complete, it says what the solver says."""
    said = {
        one.context.encode(): exam.solve(one.context, one.choices).encode()
        for group in groups
        for one in group.questions
    }

    def following(text: bytes) -> int:
        for size in range(len(text), 0, -1):
            answer = said.get(text[:size], b"")
            rest = text[size:]
            if len(rest) < len(answer) and answer.startswith(rest):
                return answer[len(rest)]
        return 0

    def logits(tokens_BT: np.ndarray, valid_BT: np.ndarray) -> np.ndarray:
        found = np.zeros((*tokens_BT.shape, 256), dtype=np.float32)
        for row, tokens in enumerate(tokens_BT):
            for place in np.flatnonzero(valid_BT[row]):
                found[row, place, following(bytes(tokens[: place + 1].tolist()))] = SURE
        return found

    blind = uniform(Bytes())
    return Examinee(
        name="oracle",
        encode=blind.encode,
        decode=blind.decode,
        logits=logits,
        vocab_size=256,
        max_length=128,
    )


class Words:
    """A tokenizer of words, each with the space before it; ids are given as words are met."""

    vocab_size = 2_000

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        words = re.findall(r" ?[^\s\w]| ?\w+|\s", text)
        return [self.known.setdefault(word.strip() or word, len(self.known)) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Not its own inverse: a habit has no use for spaces."""
        raise AssertionError("asked for text")


#: What a word's score is, of the places where it stood before (most recent last).
HABITS: dict[str, Callable[[int, np.ndarray, int], float]] = {
    "always the same": lambda word, places, now: np.sin(997.0 * word),
    "the most recent": lambda word, places, now: places.max(initial=-1),
    "the oldest": lambda word, places, now: -places.min(initial=10_000),
    "the most frequent": lambda word, places, now: len(places),
    "the rarest": lambda word, places, now: -len(places),
    "by distance": lambda word, places, now: np.cos(1.7 * (now - places)).sum(),
}


def habit(name: str) -> Examinee:
    """A model that knows nothing but where a word stood before."""
    words, rule = Words(), HABITS[name]

    def logits(tokens_BT: np.ndarray, valid_BT: np.ndarray) -> np.ndarray:
        found = np.zeros((*tokens_BT.shape, words.vocab_size))
        for row, tokens in enumerate(tokens_BT):
            for place in np.flatnonzero(valid_BT[row])[-2:]:  # no answer has more than two words
                seen = tokens[: place + 1]
                for word in range(len(words.known)):
                    found[row, place, word] = rule(word, np.flatnonzero(seen == word), place)
        return found

    texts: dict[tuple[int, ...], str] = {}

    def encode(text: str) -> list[int]:
        ids = words.encode(text)
        texts[tuple(ids)] = text
        return ids

    return Examinee(
        name=name,
        encode=encode,
        decode=lambda ids: texts[tuple(ids)],
        logits=logits,
        vocab_size=words.vocab_size,
        max_length=128,
    )
