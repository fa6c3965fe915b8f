"""`Examinee`: the interface of a model to SmallBench, which is a tokenizer and logits.

Our models are converted here; a model of another library needs two functions of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.data.batch import Batch, pad
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.model import Holder, Model, model_of
from glassformer.spec.errors import GlassError, InputError

# B batch, T length, V vocabulary

Ids = tuple[int, ...]
Logits = Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[np.floating]]

#: The most numbers that one call for logits may return, so that a large vocabulary fits memory.
ROOM = 1 << 26


class NotOffered(Exception):
    """A question that the model cannot be given; the text gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examinee:
    """A model with its tokenizer.

    logits(tokens_BT, valid_BT) returns (B, T, V), the next token's at each position; rows are
    padded on the right and valid is True for real tokens, so a causal model may ignore it. `encode`
    adds nothing of its own; `begin` is the token before every text, if there is one.
    `decode` shows whether a text survived: one that was lost or changed is not offered.
    """

    name: str
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    logits: Logits
    vocab_size: int
    max_length: int
    begin: int | None = None

    def ids(self, text: str) -> Ids:
        """Return the ids of a text as the model reads it, after `begin`."""
        try:
            inner = [int(token) for token in self.encode(text)]
            again = self.decode(inner)
        except (GlassError, ValueError, KeyError) as error:
            what = str(error).partition("\n")[0]
            raise NotOffered(f"its tokenizer cannot read {text[:40]!r}: {what}") from error
        if again.strip() != text.strip():
            raise NotOffered(f"its tokenizer makes {again[:40]!r} of {text[:40]!r}")
        ids = (*(() if self.begin is None else (self.begin,)), *inner)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InputError(
                f"the tokenizer gives id {wrong}, the model has {self.vocab_size}",
                where=self.name,
                hint="give the tokenizer that the model was trained with",
            )
        return ids


def examinee_of(model: Model | Holder, tokenizer: Tokenizer, *, name: str) -> Examinee:
    """Return one of our models as an examinee; it needs a next-token head and no encoder."""
    model = model_of(model)
    if "next" not in model.spec.head_names() or model.spec.encoder is not None:
        raise InputError(
            f"{name} does not continue a text, so SmallBench has no questions for it",
            hint="glass evaluate RUN measures a model on its own task",
        )
    if any(not block.attention.causal for block in model.spec.decoder.blocks()):
        raise InputError(f"{name} looks ahead, so it would see the answers", hint="a causal model")

    @torch.no_grad()
    def logits(tokens_BT: NDArray[np.int64], valid_BT: NDArray[np.bool_]) -> NDArray[np.floating]:
        answer_BTV: torch.Tensor = model(Batch(tokens=tokens_BT, valid=valid_BT))["next"]
        return answer_BTV.float().cpu().numpy()

    model.eval()
    return Examinee(
        name=name,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        logits=logits,
        vocab_size=model.spec.vocab_size,
        max_length=model.spec.max_seq_len,
        begin=tokenizer.bos,
    )


Place = tuple[int, int]  # of a row: a position, and the token that follows it


def log_probabilities(
    examinee: Examinee, rows: Sequence[Ids], places: Sequence[Sequence[Place]]
) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Return the log-probability of the given next token at each position of each row, and whether
    it is the likeliest. Rows of similar lengths share a batch; nothing else depends on that.
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    found: dict[int, tuple[NDArray[np.float64], NDArray[np.bool_]]] = {}
    while order:
        longest = len(rows[order[-1]])
        chosen = order[-max(1, min(256, ROOM // (longest * examinee.vocab_size))) :]
        del order[-len(chosen) :]
        tokens_BT, valid_BT = pad([rows[row] for row in chosen])
        logits_BTV = np.asarray(examinee.logits(tokens_BT.astype(np.int64), valid_BT))
        expected = (*tokens_BT.shape, examinee.vocab_size)
        if logits_BTV.shape != expected:
            raise InputError(
                f"the logits have shape {logits_BTV.shape}, not {expected}",
                where=examinee.name,
                hint="(batch, length, vocabulary)",
            )
        for place, row in enumerate(chosen):
            read, following = np.array(places[row], dtype=np.int64).reshape(-1, 2).T
            found[row] = _looked_up(logits_BTV[place, read], following, name=examinee.name)
    return [found[row] for row in range(len(rows))]


def _looked_up(
    logits_PV: NDArray[np.floating], following_P: NDArray[np.int64], *, name: str
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    wide_PV = logits_PV.astype(np.float64)
    if not np.isfinite(wide_PV.max(-1)).all() or np.isnan(wide_PV).any():
        raise InputError("the model's logits are not finite", where=name)
    wide_PV = wide_PV - wide_PV.max(-1, keepdims=True)
    own_P = np.take_along_axis(wide_PV, following_P[:, None], -1)[:, 0]
    return own_P - np.log(np.exp(wide_PV).sum(-1)), wide_PV.argmax(-1) == following_P
