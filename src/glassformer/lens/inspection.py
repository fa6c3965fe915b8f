"""`inspect(model, inputs)`: one forward pass with everything kept, as one value.

    seen = inspect(model, ids, names=vocabulary)
    seen.attention[1, 3], seen.lens.top(4), seen.norms, seen.next(), seen.ablate("L1H3").loss_change

An inspection belongs to the model as it was: what needs another pass (`ablate`, `ranking`) is
refused when the weights have been written to since.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.lens.capture import (
    OneSequence,
    ablations,
    capture,
    edits_by_tap,
    eval_mode,
    one_row,
    tapped_model,
    weight_versions,
)
from glassformer.lens.heads import HeadName, Kind, checked_heads, kinds_of
from glassformer.lens.measure.ablation import Ranking, loss_change, rank_heads
from glassformer.lens.measure.attention import Attentions, read_attention
from glassformer.lens.measure.contributions import (
    ExpertChoices,
    Norms,
    TokenPath,
    read_experts,
    read_norms,
    read_token_path,
)
from glassformer.lens.measure.predictions import (
    NONE,
    LogitLens,
    Predictions,
    Readout,
    chosen_head,
    divergence,
    mean_of,
    no_targets,
    read_lens,
    read_predictions,
    read_targets,
    readout_position,
    top_predictions,
)
from glassformer.lens.show import html
from glassformer.lens.show.chart import Bars, Lines, Panels, series
from glassformer.lens.show.chart_svg import chart_svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import Names, checked_words, naming, shown
from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import json_numbers

# T positions, D d_model, V vocabulary of the output head

#: Maps in one row of a figure, and the most of them that are drawn: the first and the last.
ACROSS, LAYERS = 6, 12
#: Lines of a long sequence that the text shows: the last ones.
LINES = 24


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Displayable):
    """One sequence in one model: attention, logit lens, norms, predictions, losses."""

    readout: Readout
    words: tuple[str, ...]
    source_words: tuple[str, ...] | None
    attention: Attentions
    lens: LogitLens
    norms: Norms
    others: Mapping[str, tuple[Readout, Predictions]]  # of the other output heads
    hidden_TD: Tensor
    experts: ExpertChoices | None = None  # of a model with mixtures of experts
    ablated: tuple[HeadName, ...] = ()
    title: str = "inspection"
    versions: tuple[int, ...] = field(default=(), repr=False)

    # --- what was inspected -----------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model."""
        return self.readout.model

    @property
    def inputs(self) -> Inputs:
        """The sequence as the model read it."""
        return self.readout.inputs

    @property
    def head(self) -> str:
        """The output head whose predictions these are."""
        return self.readout.head

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids."""
        return tuple(self.inputs.tokens_BT[0].tolist())

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of attention: `("self",)`, or `("encoder", "self", "cross")`."""
        return kinds_of(self.model.spec)

    # --- what it predicts -------------------------------------------------------------------------

    def next(
        self, position: int | None = None, k: int = 5, *, head: str | None = None
    ) -> list[tuple[int, str, float]]:
        """Return the k likeliest predictions at a position: id, word, probability.

        `head` names another output head.
        """
        if head is None or head == self.head:
            return self.lens.choices(position, k)
        self.model.spec.head(head)
        readout, predictions = self.others[head]
        return top_predictions(readout, predictions, 0, self.lens.position(position), k)

    @property
    def answer(self) -> tuple[int, str, float] | None:
        """The likeliest answer of a model with an answer head, at its readout position; or None."""
        return self.next(None, 1)[0] if self.head == "answer" else None

    @property
    def losses(self) -> Tensor:
        """-log p(target) at each position (T,); NaN where there is no target."""
        return self.lens.losses[-1]

    @property
    def loss(self) -> float | None:
        """The mean loss; None without a target."""
        return mean_of(self.losses)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predicted distribution at each position, in nats (T,)."""
        return self.lens.entropy[-1]

    def target(self, position: int | None = None) -> tuple[int, str] | None:
        """Return the id and word that should have been predicted; None without a target."""
        target = int(self.readout.targets_T[self.lens.position(position)])
        return None if target == NONE else (target, self.readout.word(target))

    def token_path(self, position: int | None = None) -> TokenPath:
        """Return the residual stream at one position, after every sublayer: one more pass.

        Heads that are ablated in this inspection are ablated there too.
        """
        self.check_unchanged()
        t = self.lens.position(position)
        return read_token_path(
            self.readout,
            t,
            edits=edits_by_tap(ablations(self.model.spec, self.ablated)),
            word=self.words[t],
            lens=self.lens,
            norms=self.norms,
        )

    # --- what would change it ---------------------------------------------------------------------

    def ablate(self, *heads: str | HeadName) -> "Ablation":
        """Repeat the pass with these heads ablated as well, and compare it with this one."""
        named = checked_heads(self.model.spec, heads)
        if not named:
            raise InputError("no head to ablate", hint='name one, as in ablate("L1H3")')
        self.check_unchanged()
        every = tuple(dict.fromkeys((*self.ablated, *named)))
        after = _inspected(self.readout, self.words, self.source_words, every)
        kl_T = _divergence_by_position(self.readout, self.hidden_TD, after.hidden_TD)
        return Ablation(self, after, named, loss_change(self.loss, after.loss), kl_T)

    def ranking(self) -> Ranking:
        """Rank every head by what ablating it does."""
        self.check_unchanged()
        return rank_heads(self.readout, self.hidden_TD, loss=self.loss, ablated=self.ablated)

    def compare(self, other: "Inspection", position: int | None = None, k: int = 5) -> "Comparison":
        """Compare what another model predicts for the same tokens: its probabilities of our k
        likeliest, its loss, the KL divergence.

        The maps of the two are compared by `seen.attention[1, 3] - other.attention[1, 3]`.
        """
        return compare(self, other, position, [i for i, *_ in self.next(position, k)])

    def check_unchanged(self) -> None:
        """Refuse to compare with a model whose weights are no longer the inspected ones."""
        if weight_versions(self.model) != self.versions:
            raise InputError(
                "the model's weights have changed since this inspection", hint="inspect it again"
            )

    # --- how it is displayed ----------------------------------------------------------------------

    @property
    def tensor(self) -> Tensor:
        """The hidden states (T, D) that the output heads read."""
        return self.hidden_TD

    def rows(self) -> list[Row]:
        """One row per position: its word, the likeliest prediction, target, loss and entropy."""
        losses, entropy = self.losses.tolist(), self.entropy.tolist()
        rows = []
        for t, word in enumerate(self.words):
            i, likeliest, probability = self.next(t, 1)[0]
            target = self.target(t)
            rows.append(
                {
                    "position": t,
                    "id": self.ids[t],
                    "word": word,
                    "top": likeliest,
                    "top_id": i,
                    "probability": probability,
                    "target": None if target is None else target[1],
                    "loss": losses[t],
                    "entropy": entropy[t],
                }
                | {head: self.next(t, 1, head=head)[0][1] for head in self.others}
            )
        return rows

    def summary(self) -> str:
        """One line: tokens, layers, heads, loss."""
        layers, heads = self.attention.shape
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        without = f", {' '.join(map(str, self.ablated))} ablated" if self.ablated else ""
        size = f"{len(self.words)} tokens, {layers} layer{'s' * (layers != 1)} x {heads} heads"
        return f"{size}, output head '{self.head}'{loss}{without}"

    def text(self) -> str:
        """One line per position, the last ones of a long sequence."""
        lines = [self.summary()]
        if self.source_words is not None:
            lines.append(f"  source: {' '.join(map(shown, self.source_words))}")
        for row in self.rows()[-LINES:]:
            loss = "" if row["target"] is None else f"  loss {row['loss']:.3f}"
            word, top = shown(row["word"], most=16), shown(row["top"], most=16)
            lines.append(
                f"  {row['position']:4} {word:>16} -> {top:16} {row['probability']:.3f}{loss}"
            )
        if self.experts is not None:
            lines.append(self.experts.text())
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Predictions, lens, attention, norms, experts."""
        yield html.heading(self.summary())
        if self.source_words is not None:
            words = " ".join(map(shown, self.source_words))
            yield f"<p>source: {html.escape_line(words)}</p>"
        best = self.next(None, 8)
        label = f"likeliest predictions at position {self.readout.position}"
        yield html.captioned(
            chart_svg(
                Bars(
                    title=label,
                    names=tuple(word for _, word, _ in best),
                    values=tuple(share for *_, share in best),
                )
            ).svg(),
            label,
        )
        yield self.table(heading="by position")
        yield from self.lens.parts()
        yield from self.attention.parts()
        yield from self.norms.parts()
        if self.experts is not None:
            yield from self.experts.parts()

    def record(self) -> dict[str, Any]:
        """All values for JSON, the cells of the attention maps among them."""
        maps = {
            kind: [layer.tolist() for layer in self.attention.of(kind).weights]
            for kind in self.kinds
        }
        record: dict[str, Any] = json_numbers(
            {
                "title": self.summary(),
                "words": self.words,
                "source_words": self.source_words,
                "head": self.head,
                "ablated": [str(head) for head in self.ablated],
                "loss": self.loss,
                "rows": self.rows(),
                "lens": self.lens.rows(),
                "norms": self.norms.rows(),
                "attention": maps,
            }
            | ({} if self.experts is None else {"experts": self.experts.rows()}),
            not_finite="null",
        )
        return record

    def chart(self) -> Panels:
        """Each layer's mean attention, of many layers the first and the last; the logit lens."""
        kinds = [self.attention.of(kind) for kind in self.kinds]
        means = [maps.mean(layer).chart() for maps in kinds for layer in range(maps.shape[0])]
        half = LAYERS // 2
        kept = means if len(means) <= LAYERS else [*means[:half], *means[-half:]]
        left_out = len(means) - len(kept)
        more = f"; the first and last {half} of {len(means)} layers" if left_out else ""
        title = f"attention, mean of each layer's heads{more}"
        maps = Panels(charts=tuple(kept), columns=min(ACROSS, len(kept)), title=title)
        return Panels(charts=(maps, self.lens.chart()), title=self.summary())


# --- comparisons ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Ablation(Displayable):
    """Two inspections of one sequence: `before`, and `after` these heads were ablated."""

    before: Inspection
    after: Inspection
    heads: tuple[HeadName, ...]
    loss_change: float | None  # after - before; None without a target
    kl: Tensor  # (T,): KL(before || after) in nats; NaN on padding

    @property
    def title(self) -> str:
        """The ablated heads."""
        return f"without {' '.join(map(str, self.heads))}"

    @property
    def tensor(self) -> Tensor:
        """The divergence by position."""
        return self.kl

    def rows(self) -> list[Row]:
        """One row per position: the likeliest prediction before and after, loss, divergence."""
        pairs = zip(self.before.rows(), self.after.rows(), self.kl.tolist(), strict=True)
        return [
            {
                "position": old["position"],
                "word": old["word"],
                "before": old["top"],
                "after": new["top"],
                "loss_before": old["loss"],
                "loss_after": new["loss"],
                "kl": kl,
            }
            for old, new, kl in pairs
        ]

    def summary(self) -> str:
        """One line."""
        change = self.loss_change
        loss = "" if change is None else f"loss {change:+.4f}, "
        at = self.before.readout.position
        return f"{self.title}: {loss}KL {float(self.kl[at]):.4f} at position {at}"

    def text(self) -> str:
        """The summary, and one line per position whose likeliest prediction changed."""
        changed = [row for row in self.rows() if row["before"] != row["after"]]
        count = f"{len(changed)} of {len(self.kl)} likeliest predictions changed"
        lines = [self.summary(), f"  {count}"]
        for row in changed[:24]:
            words = f"{shown(row['before'], most=16)} -> {shown(row['after'], most=16)}"
            lines.append(f"  {row['position']:4} {shown(row['word'], most=16):>16}  {words}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The divergence by position, and the table."""
        yield html.heading(self.summary())
        yield chart_svg(self.chart(), label="KL(before || after) in nats, by position").svg()
        yield self.table(heading="by position")

    def chart(self) -> Lines:
        """The divergence by position."""
        values = {"KL(before || after), nats": self.kl.tolist()}
        return series(values, words=self.before.words, title=self.summary())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another model's predictions at one position.

    `shares` are its probabilities of the ids given, `loss` is at that position (NaN without a
    target), `mean_loss` over all positions, `top` its likeliest prediction, `kl` is
    KL(other || ours) in nats.
    """

    shares: tuple[float, ...]
    loss: float
    mean_loss: float | None
    top: tuple[int, str, float]
    kl: float


def comparable(ours: Inspection, other: Inspection) -> bool:
    """Return True if both read the same tokens and predict over equally many."""
    a, b = ours.readout, other.readout
    return a.inputs.tokens_BT.tolist() == b.inputs.tokens_BT.tolist() and (
        a.model.spec.head_size(a.head) == b.model.spec.head_size(b.head)
    )


def compare(
    ours: Inspection, other: Inspection, position: int | None, ids: Sequence[int]
) -> Comparison:
    """Compare `other` with `ours` at a position; `ids` are the predictions to give shares of."""
    if not comparable(ours, other):
        raise InputError(
            "the two models do not read the same tokens, or do not predict over equally many",
            hint="compare models with one vocabulary; give a target where they write their own",
        )
    at = ours.lens.position(position)
    ours_1V, other_1V = _distribution(ours, at), _distribution(other, at)
    return Comparison(
        shares=tuple(other_1V[0, list(ids)].exp().tolist()),
        loss=float(other.lens.losses[-1, at]),
        mean_loss=other.loss,
        top=other.lens.choices(at, 1)[0],
        kl=float(divergence(other_1V, ours_1V)[0]),
    )


def _distribution(inspection: Inspection, at: int) -> Tensor:
    """Return the log-probabilities (1, V) at a position."""
    readout = inspection.readout
    with eval_mode(readout.model):
        rows_TD = readout.rows_of(inspection.hidden_TD)
        return readout.log_probabilities(rows_TD[at : at + 1]).cpu()


def _divergence_by_position(readout: Readout, before_TD: Tensor, after_TD: Tensor) -> Tensor:
    """Return KL(before || after) at each position (T,), NaN on padding."""
    with eval_mode(readout.model):
        before_TD, after_TD = readout.rows_of(before_TD), readout.rows_of(after_TD)
        pieces = [
            divergence(
                readout.log_probabilities(before_TD[at]), readout.log_probabilities(after_TD[at])
            )
            for at in readout.pieces(len(before_TD))
        ]
    return torch.cat(pieces).masked_fill(~readout.real(), torch.nan).cpu()


# --- the pass -------------------------------------------------------------------------------------


def inspect(
    model: Model | Holder,
    inputs: OneSequence,
    *,
    words: Sequence[str] | None = None,
    source_words: Sequence[str] | None = None,
    names: Names | Sequence[str] | None = None,
    targets: int | Sequence[int | None] | NDArray[Any] | Tensor | None = None,
    ablate: Sequence[str | HeadName] = (),
    head: str | None = None,
) -> Inspection:
    """Run one sequence and keep what happened.

    `names` gives the word of any id (a function, or the vocabulary as a list), `words` and
    `source_words` those of the tokens. `targets`: ids, None or -1 where there is none; without
    them those of a Batch, or each token's successor. `head`: the output head to read.
    """
    model = tapped_model(model)
    row = one_row(model, inputs)
    head = chosen_head(model, head)
    position = readout_position(model, head, row)
    targets_T = read_targets(model, head, inputs, row, position, targets)
    word_of = naming(names)
    readout = Readout(model, head, row, position, targets_T, word_of)
    token_words = checked_words(words, row.tokens_BT[0].tolist(), word_of)
    source = None
    if row.source_BS is not None:
        shared = word_of if model.spec.share_embedding else str
        source = checked_words(source_words, row.source_BS[0].tolist(), shared, what="source words")
    return _inspected(readout, token_words, source, checked_heads(model.spec, ablate))


def _inspected(
    readout: Readout,
    words: tuple[str, ...],
    source_words: tuple[str, ...] | None,
    ablate: tuple[HeadName, ...],
) -> Inspection:
    """Run a sequence that has been checked."""
    model = readout.model
    kept = capture(model, readout.inputs, ablate=ablate)
    untargeted = no_targets(readout.inputs)
    others = {
        head: replace(readout, head=head, targets_T=untargeted)
        for head in model.spec.head_names()
        if head != readout.head
    }
    with eval_mode(model):
        predicted = {
            head: (other, read_predictions(other, [other.rows_of(kept.hidden_TD)]))
            for head, other in others.items()
        }
    return Inspection(
        readout=readout,
        words=words,
        source_words=source_words,
        attention=read_attention(model.spec, kept, words=words, source_words=source_words or ()),
        lens=read_lens(readout, kept, words=words),
        norms=read_norms(model.spec, kept, words=words),
        others=predicted,
        hidden_TD=kept.hidden_TD,
        experts=read_experts(model.spec, kept, words=words),
        ablated=ablate,
        versions=weight_versions(model),
    )
