"""What the model should have said at each position: given, from a batch, or the text's own next.

How hidden states become distributions: one head, its place, its targets; in pieces if large.

Of a distribution the likeliest answers are kept, its entropy, the target's loss and its divergence
from the final one; never all of it for all positions, which a large vocabulary would not allow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from glassformer.data.batch import Batch
from glassformer.lens.show.token_text import Names
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Model
from glassformer.nn.heads import read_out
from glassformer.spec.errors import InputError

# T positions


def read_targets(
    model: Model,
    head: str,
    given: "Batch | object",
    inputs: Inputs,
    place: int,
    targets: "int | Sequence[int | None] | np.ndarray | Tensor | None",
) -> Tensor:
    """(T,) of ids, -1 where nothing is asked for. One number is the answer at `place`."""
    T = inputs.tokens_BT.shape[1]
    if targets is None and isinstance(given, Batch) and head in given.targets:
        return _checked(model, head, _of_batch(given, head, place, T))
    if targets is None:
        return _next_tokens(inputs) if head == "next" else no_targets(inputs)
    if isinstance(targets, Tensor | np.ndarray | np.generic):
        targets = targets.tolist()
    listed = targets if isinstance(targets, Sequence) else [targets]
    values = [NONE if value is None else value for value in listed]
    if not all(type(value) is int and abs(value) < 1 << 62 for value in values):
        raise InputError("targets hold more than whole numbers", hint="ids, or None for no target")
    alone = listed is not targets or model.spec.head(head).readout is not None
    if alone and len(values) == 1:
        return _checked(model, head, _at(place, values[0], T))
    if len(values) != T:
        raise InputError(f"{len(values)} targets for {T} tokens", hint="one for each token")
    return _checked(model, head, torch.tensor(values))


def no_targets(inputs: Inputs) -> Tensor:
    """Nothing asked for, anywhere."""
    return torch.full((inputs.tokens_BT.shape[1],), NONE)


def _at(place: int, target: int, length: int) -> Tensor:
    found_T = torch.full((length,), NONE)
    found_T[place] = target
    return found_T


def _of_batch(batch: Batch, head: str, place: int, length: int) -> Tensor:
    target = batch.targets[head]
    if target.ndim == 1:
        return _at(place, int(target[0]), length)
    counted = batch.valid[0] if batch.weights is None else batch.weights[0] > 0
    return torch.as_tensor(np.where(counted, target[0], NONE))


def _next_tokens(inputs: Inputs) -> Tensor:
    """Each token's successor, where it is real and of the same segment."""
    tokens_T = inputs.tokens_BT[0].cpu()
    found_T = torch.full_like(tokens_T, NONE)
    follows_T = torch.ones(len(tokens_T) - 1, dtype=torch.bool)
    if inputs.valid_BT is not None:
        valid_T = inputs.valid_BT[0].cpu()
        follows_T &= valid_T[1:] & valid_T[:-1]
    if inputs.segments_BT is not None:
        segments_T = inputs.segments_BT[0].cpu()
        follows_T &= segments_T[1:] == segments_T[:-1]
    found_T[:-1] = torch.where(follows_T, tokens_T[1:], NONE)
    return found_T


def _checked(model: Model, head: str, targets_T: Tensor) -> Tensor:
    size = model.spec.head_size(head)
    bad = (targets_T < NONE) | (targets_T >= size)
    if bool(bad.any()):
        place = int(bad.nonzero()[0])
        raise InputError(
            f"target {int(targets_T[place])} of head '{head}'",
            where=f"position {place}",
            hint=f"ids run from 0 to {size - 1}; -1 or None means no target",
        )
    return targets_T.long()


# T positions, R rows of hidden states, D d_model, V answers of the head, K likeliest ones

#: How many of the likeliest answers are kept at each place.
KEPT = 32
#: Log-probabilities made at once: numbers, not bytes.
PIECE = 1 << 23
#: No target here.
NONE = -1


@dataclass(frozen=True, eq=False)
class Reading:
    """One head of a model over one sequence.

    `place` is the position that matters most: the last real token, or where an answer is read.
    `targets_T` holds -1 where nothing is asked for.
    """

    model: Model
    head: str
    inputs: Inputs
    place: int
    targets_T: Tensor
    names: Names

    def rows_of(self, hidden_TD: Tensor) -> Tensor:
        """The vectors that the head reads, one a position.

        An answer head reads once, at `place`; elsewhere: what it would say if it read there.
        """
        kind = self.model.spec.head(self.head)
        if kind.readout is None:
            return hidden_TD
        rows_TD = hidden_TD.clone()
        rows_TD[self.place] = read_out(hidden_TD[None], self.inputs.valid_BT, readout=kind.readout)[
            0
        ]
        return rows_TD

    def log_probabilities(self, rows_TD: Tensor) -> Tensor:
        """(T, V) of some vectors."""
        logits_TV = self.model.project(rows_TD, self.head)
        wide = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        return torch.log_softmax(wide, dim=-1)

    def pieces(self, length: int) -> Iterator[slice]:
        """Positions that are projected together."""
        step = max(1, PIECE // self.model.spec.head_size(self.head))
        for start in range(0, length, step):
            yield slice(start, min(start + step, length))

    def real(self) -> Tensor:
        """True where a token is real: elsewhere nothing is measured."""
        if self.inputs.valid_BT is not None:
            return self.inputs.valid_BT[0]
        return torch.ones_like(self.inputs.tokens_BT[0], dtype=torch.bool)

    def word(self, i: int) -> str:
        """The word of an answer."""
        return self.names(i) if self.head in ("next", "answer") else f"{self.head} {i}"


@dataclass(frozen=True, eq=False)
class Measured:
    """What is kept of R rows of distributions: all on the CPU, first dimensions (R, T).

    Entropy and divergence are NaN on padding, losses wherever there is no target.
    """

    ids: Tensor  # (R, T, K)
    probabilities: Tensor  # (R, T, K)
    entropy: Tensor
    losses: Tensor
    kl: Tensor  # KL(last row || row), nats


def measure(reading: Reading, rows: Sequence[Tensor]) -> Measured:
    """Each of the (T, D) as distributions, against the last of them."""
    targets_T = reading.targets_T.to(rows[-1].device)
    asked_T, real_T = targets_T != NONE, reading.real()
    pieces = []
    for at in reading.pieces(len(rows[-1])):
        final_TV = reading.log_probabilities(rows[-1][at])
        measured = []
        for number, hidden_TD in enumerate(rows):
            last = number == len(rows) - 1
            logp_TV = final_TV if last else reading.log_probabilities(hidden_TD[at])
            best = logp_TV.topk(min(KEPT, logp_TV.shape[-1]))
            chosen_T1 = targets_T[at].clamp(min=0)[:, None]
            loss_T = 0.0 - logp_TV.gather(1, chosen_T1)[:, 0]  # not -0.0
            measured.append(
                (
                    best.indices,
                    best.values.exp(),
                    entropy_of(logp_TV).masked_fill(~real_T[at], torch.nan),
                    loss_T.masked_fill(~asked_T[at], torch.nan),
                    divergence(final_TV, logp_TV).masked_fill(~real_T[at], torch.nan),
                )
            )
        pieces.append([torch.stack(kind).cpu() for kind in zip(*measured, strict=True)])
    return Measured(*(torch.cat(kind, dim=1) for kind in zip(*pieces, strict=True)))


def likeliest(
    reading: Reading, measured: Measured, row: int, position: int, k: int
) -> list[tuple[int, str, float]]:
    """The k likeliest answers of one row at one position: id, word, probability.

    All of them where there are fewer than k.
    """
    kept = measured.ids.shape[-1]
    if k < 1 or (k > kept and kept < reading.model.spec.head_size(reading.head)):
        raise InputError(f"the {k} likeliest were asked for", hint=f"1 to {kept} are kept")
    ids = measured.ids[row, position, :k].tolist()
    shares = measured.probabilities[row, position, :k].tolist()
    return [(i, reading.word(i), share) for i, share in zip(ids, shares, strict=True)]


def entropy_of(logp_TV: Tensor) -> Tensor:
    """-sum p log p in nats, (T,)."""
    return 0.0 - (logp_TV.exp() * logp_TV).sum(-1)


def divergence(logp_TV: Tensor, logq_TV: Tensor) -> Tensor:
    """KL(p || q) in nats, (T,); rounding below zero is cut off."""
    return (logp_TV.exp() * (logp_TV - logq_TV)).sum(-1).clamp(min=0.0)


def mean_of(losses_T: Tensor) -> float | None:
    """Over the positions that were asked; None where none was."""
    asked = losses_T[~losses_T.isnan()]
    return float(asked.mean()) if len(asked) else None


def final_norm(model: Model) -> nn.Module | None:
    """The norm between the last block and the heads, if there is one."""
    return model.decoder.final_norm if isinstance(model, EncoderDecoder) else model.final_norm


def chosen_head(model: Model, head: str | None) -> str:
    """The head asked for; else the next token, else the answer, else the first there is."""
    names = model.spec.head_names()
    if head is None:
        return next((name for name in ("next", "answer") if name in names), names[0])
    model.spec.head(head)
    return head


def reading_place(model: Model, head: str, inputs: Inputs) -> int:
    """The last real position; the first for a head that answers there."""
    T = inputs.tokens_BT.shape[1]
    real = torch.arange(T) if inputs.valid_BT is None else inputs.valid_BT[0].nonzero().flatten()
    if not len(real):
        raise InputError("a sequence of padding alone", hint="give at least one real token")
    kind = model.spec.head(head)
    first = kind.readout == "first"
    return int(real[0 if first else -1])
