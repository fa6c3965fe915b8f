"""Predictions of one output head over one sequence, their targets, and the logit lens.

Targets are given by the caller, come from a batch, or are each token's successor. Of a predicted
distribution the likeliest ids are kept, its entropy, the target's loss and its divergence from the
final one; never all of it for all positions, which would not fit for a large vocabulary.

The logit lens is what the model would predict if it stopped after each sublayer. Each row of the
residual stream goes through the final norm, if the model has one, then through the output head. In
a pre-norm model that is the usual logit lens. In a post-norm model every sublayer ends in its own
norm and there is mostly no final one, so the residual is projected as it is, which is what a model
cut off there would predict; only the row `embed` has passed no norm.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glassformer.data.batch import Batch
from glassformer.lens.capture import Capture, eval_mode, residual_rows
from glassformer.lens.show import html
from glassformer.lens.show.chart import READABLE, Grid, series
from glassformer.lens.show.chart_svg import chart_svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import Names, shown
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Model
from glassformer.nn.heads import read_out
from glassformer.nn.norm import as_float
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import ModelSpec, VectorHead

# R rows of hidden states, T positions, D d_model, V vocabulary of the head, K likeliest ids kept

#: The number of likeliest ids kept at each position.
KEPT = 32
#: Log-probabilities computed at once: numbers, not bytes.
PIECE = 1 << 23
#: No target at this position.
NONE = -1


@dataclass(frozen=True, eq=False)
class Readout:
    """One output head of a model over one sequence.

    `position` is the readout position: the last real token, or where an answer head reads.
    `targets_T` holds -1 where there is no target.
    """

    model: Model
    head: str
    inputs: Inputs
    position: int
    targets_T: Tensor
    names: Names

    def rows_of(self, hidden_TD: Tensor) -> Tensor:
        """Return the vectors that the head reads, one per position.

        An answer head reads once, at `position`; at the others, what it would predict there.
        """
        readout = self.model.spec.head(self.head).readout
        if readout is None:
            return hidden_TD
        rows_TD = hidden_TD.clone()
        read_1D = read_out(hidden_TD[None], self.inputs.valid_BT, readout=readout)
        rows_TD[self.position] = read_1D[0]
        return rows_TD

    def log_probabilities(self, rows_TD: Tensor) -> Tensor:
        """Return (T, V) log-probabilities of vectors that the head reads."""
        return torch.log_softmax(as_float(self.model.project(rows_TD, self.head)), dim=-1)

    def pieces(self, length: int) -> Iterator[slice]:
        """Yield slices of positions that are projected together."""
        step = max(1, PIECE // self.model.spec.head_size(self.head))
        for start in range(0, length, step):
            yield slice(start, min(start + step, length))

    def real(self) -> Tensor:
        """Return True where a token is real (T,): nothing is measured on padding."""
        if self.inputs.valid_BT is not None:
            return self.inputs.valid_BT[0]
        return torch.ones_like(self.inputs.tokens_BT[0], dtype=torch.bool)

    def word(self, i: int) -> str:
        """Return the word of a predicted id."""
        return class_name(self.model.spec, self.head, i, self.names)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Summaries of R rows of distributions: all on the CPU, first dimensions (R, T).

    Entropy and divergence are NaN on padding, losses wherever there is no target.
    """

    ids: Tensor  # (R, T, K)
    probabilities: Tensor  # (R, T, K)
    entropy: Tensor
    losses: Tensor
    kl: Tensor  # KL(last row || row), nats


def read_predictions(readout: Readout, rows: Sequence[Tensor]) -> Predictions:
    """Project each of the (T, D) to distributions, and compare them with the last one."""
    targets_T = readout.targets_T.to(rows[-1].device)
    targeted_T, real_T = targets_T != NONE, readout.real()
    pieces = []
    for at in readout.pieces(len(rows[-1])):
        final_TV = readout.log_probabilities(rows[-1][at])
        by_row = []
        for number, hidden_TD in enumerate(rows):
            last = number == len(rows) - 1
            logp_TV = final_TV if last else readout.log_probabilities(hidden_TD[at])
            best = logp_TV.topk(min(KEPT, logp_TV.shape[-1]))
            target_T1 = targets_T[at].clamp(min=0)[:, None]
            entropy_T = 0.0 - (logp_TV.exp() * logp_TV).sum(-1)  # not -0.0, as the loss
            loss_T = 0.0 - logp_TV.gather(1, target_T1)[:, 0]  # not -0.0
            by_row.append(
                (
                    best.indices,
                    best.values.exp(),
                    entropy_T.masked_fill(~real_T[at], torch.nan),
                    loss_T.masked_fill(~targeted_T[at], torch.nan),
                    divergence(final_TV, logp_TV).masked_fill(~real_T[at], torch.nan),
                )
            )
        pieces.append([torch.stack(kind).cpu() for kind in zip(*by_row, strict=True)])
    return Predictions(*(torch.cat(kind, dim=1) for kind in zip(*pieces, strict=True)))


def top_predictions(
    readout: Readout, predictions: Predictions, row: int, position: int, k: int
) -> list[tuple[int, str, float]]:
    """Return the k likeliest ids of one row at one position: id, word, probability.

    All of them where there are fewer than k.
    """
    kept = predictions.ids.shape[-1]
    if k < 1 or (k > kept and kept < readout.model.spec.head_size(readout.head)):
        raise InputError(f"the {k} likeliest predictions requested", hint=f"1 to {kept} are kept")
    ids = predictions.ids[row, position, :k].tolist()
    shares = predictions.probabilities[row, position, :k].tolist()
    return [(i, readout.word(i), share) for i, share in zip(ids, shares, strict=True)]


def divergence(logp_TV: Tensor, logq_TV: Tensor) -> Tensor:
    """Return KL(p || q) in nats, (T,); rounding below zero is cut off."""
    return (logp_TV.exp() * (logp_TV - logq_TV)).sum(-1).clamp(min=0.0)


def mean_of(losses_T: Tensor) -> float | None:
    """Return the mean over the positions with a target; None without any."""
    targeted = losses_T[~losses_T.isnan()]
    return float(targeted.mean()) if len(targeted) else None


# --- which head, and where it reads ---------------------------------------------------------------


def final_norm(model: Model) -> nn.Module | None:
    """Return the norm between the last block and the heads, if there is one."""
    norm = model.decoder.final_norm if isinstance(model, EncoderDecoder) else model.final_norm
    assert norm is None or isinstance(norm, nn.Module)
    return norm


#: Heads that answer for a text, in the order of choice.
CHOICE = ("next", "answer", "masked")


def class_name(spec: ModelSpec, head: str, i: int, names: Callable[[int], str]) -> str:
    """Return the name of a head's class: a token's text, or the head and the number."""
    return names(i) if spec.predicts_tokens(head) else f"{head} {i}"


def chosen_head(model: Model, head: str | None) -> str:
    """Return the requested output head; else `next`, else `answer`, else the first there is."""
    names = model.spec.head_names()
    if head is None:
        head = next((name for name in CHOICE if name in names), names[0])
    if isinstance(model.spec.head(head), VectorHead):
        raise InputError(
            "a vector is no prediction: there are no probabilities to look at",
            hint="glass embed gives vectors, gf.trace(model) activations; a folder with its "
            "masked-token head can be inspected",
        )
    return head


def readout_position(model: Model, head: str, inputs: Inputs) -> int:
    """Return the last real position; the first for a head that reads there."""
    T = inputs.tokens_BT.shape[1]
    real = torch.arange(T) if inputs.valid_BT is None else inputs.valid_BT[0].nonzero().flatten()
    if not len(real):
        raise InputError("a sequence of padding alone", hint="give at least one real token")
    return int(real[0 if model.spec.head(head).readout == "first" else -1])


# --- targets --------------------------------------------------------------------------------------


def read_targets(
    model: Model,
    head: str,
    given: object,
    inputs: Inputs,
    position: int,
    targets: int | Sequence[int | None] | NDArray[Any] | Tensor | None,
) -> Tensor:
    """Return target ids (T,), -1 where there is none.

    `given` is what the caller passed as input: a Batch has targets of its own. A single number is
    the target at the readout `position`.
    """
    T = inputs.tokens_BT.shape[1]
    if targets is None and isinstance(given, Batch) and head in given.targets:
        return _checked(model, head, _of_batch(given, head, position, T))
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
        return _checked(model, head, _target_at(position, values[0], T))
    if len(values) != T:
        raise InputError(f"{len(values)} targets for {T} tokens", hint="one for each token")
    return _checked(model, head, torch.tensor(values))


def no_targets(inputs: Inputs) -> Tensor:
    """Return (T,) without any target."""
    return torch.full((inputs.tokens_BT.shape[1],), NONE)


def _target_at(position: int, target: int, length: int) -> Tensor:
    targets_T = torch.full((length,), NONE)
    targets_T[position] = target
    return targets_T


def _of_batch(batch: Batch, head: str, position: int, length: int) -> Tensor:
    target = batch.targets[head]
    if target.ndim == 1:
        return _target_at(position, int(target[0]), length)
    counted = batch.valid[0] if batch.weights is None else batch.weights[0] > 0
    return torch.as_tensor(np.where(counted, target[0], NONE))


def _next_tokens(inputs: Inputs) -> Tensor:
    """Return each token's successor, where it is real and of the same segment."""
    tokens_T = inputs.tokens_BT[0].cpu()
    targets_T = torch.full_like(tokens_T, NONE)
    follows_T = torch.ones(len(tokens_T) - 1, dtype=torch.bool)
    if inputs.valid_BT is not None:
        valid_T = inputs.valid_BT[0].cpu()
        follows_T &= valid_T[1:] & valid_T[:-1]
    if inputs.segments_BT is not None:
        segments_T = inputs.segments_BT[0].cpu()
        follows_T &= segments_T[1:] == segments_T[:-1]
    targets_T[:-1] = torch.where(follows_T, tokens_T[1:], NONE)
    return targets_T


def _checked(model: Model, head: str, targets_T: Tensor) -> Tensor:
    size = model.spec.head_size(head)
    bad_T = (targets_T < NONE) | (targets_T >= size)
    if bool(bad_T.any()):
        position = int(bad_T.nonzero()[0])
        raise InputError(
            f"target {int(targets_T[position])} of head '{head}'",
            where=f"position {position}",
            hint=f"ids run from 0 to {size - 1}; -1 or None means no target",
        )
    return targets_T.long()


# --- the logit lens: rows are embed, each sublayer, final ---------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens(Displayable):
    """`top` and `kl` by row and position; the row `final` is the model's own distribution."""

    row_names: tuple[str, ...]
    words: tuple[str, ...]
    predictions: Predictions
    readout: Readout
    title: str = "logit lens"

    @property
    def tensor(self) -> Tensor:
        """The divergences (R, T)."""
        return self.kl

    @property
    def kl(self) -> Tensor:
        """KL(final || row) in nats, (R, T)."""
        return self.predictions.kl

    @property
    def entropy(self) -> Tensor:
        """Entropy of each row's distribution, in nats, (R, T)."""
        return self.predictions.entropy

    @property
    def losses(self) -> Tensor:
        """-log p(target) by row, (R, T); NaN where there is no target."""
        return self.predictions.losses

    def top(
        self, position: int | None = None, k: int = 5, *, row: str = "final"
    ) -> list[tuple[str, float]]:
        """Return the k likeliest words of a row at a position, with their probabilities."""
        return [(word, share) for _, word, share in self.choices(position, k, row=row)]

    def choices(
        self, position: int | None = None, k: int = 5, *, row: str = "final"
    ) -> list[tuple[int, str, float]]:
        """Return the k likeliest of a row at a position: id, word, probability."""
        return top_predictions(
            self.readout, self.predictions, self._row(row), self.position(position), k
        )

    def at(self, position: int | None = None, k: int = 5) -> dict[str, list[tuple[str, float]]]:
        """Return `top` of every row, by its name."""
        return {name: self.top(position, k, row=name) for name in self.row_names}

    def position(self, position: int | None) -> int:
        """Check a position; negative ones count from the end, None is the readout position."""
        if position is None:
            return self.readout.position
        T = len(self.words)
        if not -T <= position < T:
            raise InputError(f"no position {position} among {T}", hint=f"0 to {T - 1}")
        return position % T

    def _firsts(self) -> Iterator[tuple[str, list[int], list[float]]]:
        """Yield each row's name, likeliest ids and their probabilities."""
        ids, shares = self.predictions.ids[..., 0], self.predictions.probabilities[..., 0]
        yield from zip(self.row_names, ids.tolist(), shares.tolist(), strict=True)

    def _row(self, name: str) -> int:
        if name not in self.row_names:
            raise InputError(f"no row '{name}'", hint=nearest(name, self.row_names))
        return self.row_names.index(name)

    def rows(self) -> list[Row]:
        """One row per depth and position: the likeliest word, and its KL to the final one."""
        ids, shares = self.predictions.ids[..., 0].tolist(), self.predictions.probabilities[..., 0]
        kl, entropy, losses = self.kl.tolist(), self.entropy.tolist(), self.losses.tolist()
        return [
            {
                "row": name,
                "position": t,
                "word": word,
                "top": self.readout.word(ids[r][t]),
                "top_id": ids[r][t],
                "probability": float(shares[r, t]),
                "kl": kl[r][t],
                "entropy": entropy[r][t],
                "loss": losses[r][t],
            }
            for r, name in enumerate(self.row_names)
            for t, word in enumerate(self.words)
        ]

    def text(self) -> str:
        """Each row's three likeliest words at the readout position, and its KL."""
        t = self.position(None)
        head = f"logit lens at position {t} ({shown(self.words[t])})"
        return "\n".join([head, *self.lines(t)])

    def lines(self, position: int) -> Iterator[str]:
        """Yield for each row its KL to the final one and its three likeliest words."""
        for r, name in enumerate(self.row_names):
            best = self.top(position, 3, row=name)
            words = "  ".join(f"{shown(word, most=16)} {share:.3f}" for word, share in best)
            yield f"  {name:9} KL {float(self.kl[r, position]):8.4f}  {words}"

    def parts(self) -> Iterator[str]:
        """Words by row and position, shaded by probability; then the divergence by depth."""
        t = self.position(None)
        yield html.heading("logit lens: the likeliest word after each sublayer")
        yield html.shaded_table(
            ["", *self.words],
            [
                (name, list(zip(map(self.readout.word, ids), shares, strict=True)))
                for name, ids, shares in reversed(list(self._firsts()))
            ],
            caption="read from the bottom up; shade: probability",
        )
        label = f"KL(final || row) in nats at position {t}"
        drawn = series({label: self.kl[:, t].tolist()}, words=self.row_names)
        yield chart_svg(drawn, label=label, width=520).svg()

    def chart(self) -> Grid:
        """Divergence by row and position, the likeliest words written in; the first row below."""
        values = self.kl.double().numpy()
        words = tuple(
            tuple(shown(self.readout.word(i), most=8) for i in ids) for _, ids, _ in self._firsts()
        )
        return Grid(
            title="logit lens: the likeliest next token after each sublayer",
            values=values,
            rows=self.row_names,
            columns=self.words,
            high=max(1e-6, float(np.nanmax(values))),
            cells=words if len(self.words) <= READABLE else (),
            key="KL(final || row), nats",
            x_title="token at each position",
            y_title="after",
            from_bottom=True,
        )


def read_lens(readout: Readout, captured: Capture, *, words: tuple[str, ...]) -> LogitLens:
    """Project the captured residual stream, row by row."""
    named = residual_rows(readout.model.spec)
    norm = final_norm(readout.model)
    with eval_mode(readout.model):
        rows = [captured.taps[tap] for _, tap in named]
        rows = [*(row if norm is None else norm(row) for row in rows), captured.hidden_TD]
        predictions = read_predictions(readout, [readout.rows_of(row) for row in rows])
    names = (*(name for name, _ in named), "final")
    return LogitLens(names, words, predictions, readout)
