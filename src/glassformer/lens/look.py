"""`look(model, inputs)`: one forward pass with everything kept, as one value.

    seen = look(model, ids, names=vocabulary)
    seen.attention[1, 3], seen.lens.top(4), seen.norms, seen.next(), seen.ablate("L1H3").loss_change

A look is of the model as it was: what needs another pass (`ablate`, `ranking`) refuses when the
weights have been written to since.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.compare import Beside, beside
from glassformer.lens.measure.ablation import Ablation, Ranking, compared, rank_heads
from glassformer.lens.measure.attention import Attentions, read_attention
from glassformer.lens.measure.capture import at_rest, capture, one_row, weight_versions
from glassformer.lens.measure.head_names import HeadName, Kind, checked_heads, kinds_of
from glassformer.lens.measure.logit_lens import LogitLens, read_lens
from glassformer.lens.measure.norms import Norms, read_norms
from glassformer.lens.measure.predictions import (
    NONE,
    Measured,
    Reading,
    chosen_head,
    likeliest,
    mean_of,
    measure,
    no_targets,
    read_targets,
    reading_place,
)
from glassformer.lens.show import sheet
from glassformer.lens.show.displayable import Face, Row
from glassformer.lens.show.token_text import Names, checked_words, naming
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# T positions, D d_model


@dataclass(frozen=True, eq=False, repr=False)
class Look(Face):
    """What one sequence did in one model: attention, lens, norms, answers, losses."""

    reading: Reading
    words: tuple[str, ...]
    source_words: tuple[str, ...] | None
    attention: Attentions
    lens: LogitLens
    norms: Norms
    others: Mapping[str, tuple[Reading, Measured]]
    hidden_TD: Tensor
    ablated: tuple[HeadName, ...] = ()
    title: str = "look"
    versions: tuple[int, ...] = field(default=(), repr=False)

    # --- what was looked at -----------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model that was looked into."""
        return self.reading.model

    @property
    def inputs(self) -> Inputs:
        """The sequence as the model read it."""
        return self.reading.inputs

    @property
    def head(self) -> str:
        """The output head whose distributions these are."""
        return self.reading.head

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids."""
        return tuple(self.inputs.tokens_BT[0].tolist())

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """`("self",)`, or `("encoder", "self", "cross")`."""
        return kinds_of(self.model.spec)

    # --- what it says -----------------------------------------------------------------------------

    def next(
        self, position: int | None = None, k: int = 5, *, head: str | None = None
    ) -> list[tuple[int, str, float]]:
        """The k likeliest answers at a position: id, word, probability; also of another head."""
        if head is None or head == self.head:
            return self.lens.choices(position, k)
        self.model.spec.head(head)
        reading, measured = self.others[head]
        return likeliest(reading, measured, 0, self.lens.position(position), k)

    @property
    def answer(self) -> tuple[int, str, float] | None:
        """The likeliest answer of a model with an answer head, where it is read; else None."""
        return self.next(None, 1)[0] if self.head == "answer" else None

    @property
    def losses(self) -> Tensor:
        """-log p(target) at each position (T,); NaN where nothing was asked for."""
        return self.lens.losses[-1]

    @property
    def loss(self) -> float | None:
        """Their mean; None without a target."""
        return mean_of(self.losses)

    @property
    def entropy(self) -> Tensor:
        """Of the answers' distribution at each position, in nats (T,)."""
        return self.lens.entropy[-1]

    def target(self, position: int | None = None) -> tuple[int, str] | None:
        """What should have been said at a position: id and word; None where nobody says."""
        target = int(self.reading.targets_T[self.lens.position(position)])
        return None if target == NONE else (target, self.reading.word(target))

    # --- what would change it ---------------------------------------------------------------------

    def ablate(self, *heads: str | HeadName) -> Ablation:
        """The same pass with these heads silent as well, beside this one."""
        named = checked_heads(self.model.spec, heads)
        if not named:
            raise InputError("no head to silence", hint='name one, as in ablate("L1H3")')
        self.check_unchanged()
        silent = tuple(dict.fromkeys((*self.ablated, *named)))
        after = look_again(self.reading, self.words, self.source_words, silent)
        return compared(self, after, named)

    def beside(self, other: "Look", position: int | None = None, k: int = 5) -> Beside:
        """What another model says to the same tokens: its shares of our k likeliest, its loss, KL.

        The maps of the two are compared by `seen.attention[1, 3] - other.attention[1, 3]`.
        """
        return beside(self, other, position, [i for i, *_ in self.next(position, k)])

    def ranking(self) -> Ranking:
        """Every head by what silencing it does."""
        self.check_unchanged()
        return rank_heads(self)

    def check_unchanged(self) -> None:
        """Refuse to compare with a model that is no longer the one looked into."""
        if weight_versions(self.model) != self.versions:
            raise InputError(
                "the model's weights have changed since this look", hint="look at it again"
            )

    # --- how it shows itself ----------------------------------------------------------------------

    @property
    def tensor(self) -> Tensor:
        """The hidden states (T, D) that the heads read."""
        return self.hidden_TD

    def rows(self) -> list[Row]:
        """A line a position: its word, the likeliest answer, target, loss and entropy."""
        losses, entropy = self.losses.tolist(), self.entropy.tolist()
        found = []
        for t, word in enumerate(self.words):
            i, likeliest, share = self.next(t, 1)[0]
            target = self.target(t)
            answer = {"top": likeliest, "top_id": i, "probability": share}
            asked = {"target": None if target is None else target[1], "loss": losses[t]}
            found.append(
                {"position": t, "id": self.ids[t], "word": word}
                | answer
                | asked
                | {"entropy": entropy[t]}
                | {head: self.next(t, 1, head=head)[0][1] for head in self.others}
            )
        return found

    def summary(self) -> str:
        """One line: tokens, layers, heads, loss."""
        layers, heads = self.attention.shape
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        silent = f", without {' '.join(map(str, self.ablated))}" if self.ablated else ""
        size = f"{len(self.words)} tokens, {layers} layers x {heads} heads"
        return f"look at {size}, head '{self.head}'{loss}{silent}"

    def text(self) -> str:
        """A line a position, the last ones of a long sequence."""
        return sheet.text(self)

    def parts(self) -> Iterator[str]:
        """Answers, lens, attention, norms."""
        return sheet.parts(self)

    def record(self) -> dict[str, Any]:
        """All sub-values for JSON, the attention maps' cells among them."""
        return sheet.record(self)

    def figure(self) -> "Figure":
        """Attention and lens on one sheet."""
        return sheet.figure(self)


def look(
    model: Model,
    inputs: "Batch | Inputs | Tensor | np.ndarray | Sequence[int]",
    *,
    words: Sequence[str] | None = None,
    source_words: Sequence[str] | None = None,
    names: "Names | Sequence[str] | None" = None,
    targets: "int | Sequence[int | None] | np.ndarray | Tensor | None" = None,
    ablate: Sequence[str | HeadName] = (),
    head: str | None = None,
) -> Look:
    """Run one sequence and keep what happened.

    `names` gives the word of any id (a function, or the vocabulary as a list), `words` and
    `source_words` those of the tokens. `targets`: ids, None or -1 where there is none; without
    them those of a Batch, or each token's successor. `head`: the output head to read.
    """
    row = one_row(model, inputs)
    head = chosen_head(model, head)
    place = reading_place(model, head, row)
    targets_T = read_targets(model, head, inputs, row, place, targets)
    word_of = naming(names)
    reading = Reading(model, head, row, place, targets_T, word_of)
    said = checked_words(words, row.tokens_BT[0].tolist(), word_of)
    source = None
    if row.source_BS is not None:
        shared = word_of if model.spec.share_embedding else str
        source = checked_words(source_words, row.source_BS[0].tolist(), shared, what="source words")
    return look_again(reading, said, source, checked_heads(model.spec, ablate))


def look_again(
    reading: Reading,
    words: tuple[str, ...],
    source_words: tuple[str, ...] | None,
    ablate: tuple[HeadName, ...],
) -> Look:
    """The pass itself, for a sequence that has been checked."""
    model = reading.model
    seen = capture(model, reading.inputs, ablate=ablate)
    unasked = no_targets(reading.inputs)
    others = {
        head: replace(reading, head=head, targets_T=unasked)
        for head in model.spec.head_names()
        if head != reading.head
    }
    with at_rest(model):
        said = {
            head: (other, measure(other, [other.rows_of(seen.hidden_TD)]))
            for head, other in others.items()
        }
    return Look(
        reading=reading,
        words=words,
        source_words=source_words,
        attention=read_attention(model.spec, seen, words=words, source_words=source_words or ()),
        lens=read_lens(reading, seen, words=words),
        norms=read_norms(model.spec, seen, words=words),
        others=said,
        hidden_TD=seen.hidden_TD,
        ablated=ablate,
        versions=weight_versions(model),
    )
