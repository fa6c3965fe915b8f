"""`head_roles`: what each head of a model does, as far as a few simple roles can tell.

Five roles, each with a score, its chance level, and how far between chance and 1 the score lies
(its lift). A head has the role of the largest lift, if that is at least the threshold; else it has
no clear role. A role says where a head looks, not what the answer depends on: ablation does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens import markup, scores
from glassformer.lens.face import Face, Row
from glassformer.lens.headname import HeadName, heads_of
from glassformer.lens.maps import Maps, read_maps
from glassformer.lens.scores import NOTHING, Score
from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model, model_of
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# B batch, T length, H heads, R roles

ROLES = ("previous token", "first token", "position", "induction", "operation")
NO_ROLE = "no clear role"
THRESHOLD = 0.5
#: Rows of random tokens, and how many tokens come twice in each, where the model has room.
ROWS, HALF = 16, 24
#: The shortest pattern whose repetition tells anything.
FEWEST = 3


@dataclass(frozen=True, eq=False, repr=False)
class HeadRoles(Face):
    """A score for every head and role; `role(head)` is the verdict."""

    heads: tuple[HeadName, ...]
    scores: tuple[tuple[Score, ...], ...]
    threshold: float
    source: str
    title: str = "head roles"

    @property
    def tensor(self) -> Tensor:
        """The scores (H, R), NaN where a role does not apply."""
        return torch.tensor([[each.score for each in line] for line in self.scores])

    @property
    def chance(self) -> Tensor:
        """The chance levels (H, R)."""
        return torch.tensor([[each.chance for each in line] for line in self.scores])

    @property
    def lift(self) -> Tensor:
        """(score - chance) / (1 - chance), (H, R)."""
        return torch.tensor([[each.lift for each in line] for line in self.scores])

    def role(self, head: str | HeadName) -> tuple[str, Score]:
        """The verdict on a head, and the score that it rests on: its largest lift."""
        name = HeadName.parse(head)
        if name not in self.heads:
            raise InputError(f"no head {name}", hint=f"known: {', '.join(map(str, self.heads))}")
        line = self.scores[self.heads.index(name)]
        known = [place for place, each in enumerate(line) if each.lift == each.lift]
        if not known:
            return NO_ROLE, NOTHING
        best = max(known, key=lambda place: line[place].lift)
        if line[best].lift < self.threshold:
            return NO_ROLE, line[best]
        place = line[best].place
        return ROLES[best] if place is None else f"{ROLES[best]} {place}", line[best]

    def rows(self) -> list[Row]:
        """A line a head: the verdict, the score it rests on, then every role's score."""
        found = []
        for head, line in zip(self.heads, self.scores, strict=True):
            role, best = self.role(head)
            row: Row = {"head": str(head), "role": role, "score": best.score}
            row |= {"chance": best.chance, "lift": best.lift}
            for name, each in zip(ROLES, line, strict=True):
                row |= {name: each.score, f"{name} chance": each.chance}
            found.append(row)
        return found

    def text(self) -> str:
        """A table: score and, in brackets, chance."""
        lines = [f"head roles: score (chance), {self.source}; threshold {self.threshold} of lift"]
        lines.append(f"  {'':12}" + "".join(f"{name:>17}" for name in ROLES))
        for head, line in zip(self.heads, self.scores, strict=True):
            cells = "".join(f"{_cell(each):>17}" for each in line)
            lines.append(f"  {head!s:12}{cells}   {self.role(head)[0]}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The same as a real table."""
        lines = (
            [str(head), *map(_cell, line), self.role(head)[0]]
            for head, line in zip(self.heads, self.scores, strict=True)
        )
        caption = f"head roles: score (chance), {self.source}; threshold {self.threshold} of lift"
        yield markup.table(["head", *ROLES, "role"], lines, caption=caption)

    def figure(self) -> "Figure":
        """Lift by head and role."""
        from glassformer.lens.figure import grid_figure

        return grid_figure(
            self.lift.numpy(),
            rows=list(map(str, self.heads)),
            columns=ROLES,
            title=f"{self.title}: a role is clear from {self.threshold} on",
            label="lift: 0 is chance, 1 is all attention",
        )


def _cell(score: Score) -> str:
    if score.score != score.score:
        return "-"
    at = "" if score.place is None else f"{score.place}: "
    return f"{at}{score.score:.2f} ({score.chance:.2f})"


def head_roles(
    model: Model | Holder,
    batch: "Batch | Inputs | np.ndarray | Tensor | None" = None,
    *,
    groups: Sequence[str] | None = None,
    at: Literal["every", "last"] = "every",
    tokens: Sequence[int] | None = None,
    seed: int = 0,
    threshold: float = THRESHOLD,
) -> HeadRoles:
    """Score every head on a batch of yours, and for induction on random tokens that come twice.

    Without a batch all roles but the last are scored on the random tokens. `groups` names each
    row's operation. `at="last"` asks only the last position, where an answer is read. `tokens` are
    the ids to draw from, all of them if not given.
    """
    model = model_of(model)
    if at not in ("every", "last"):
        raise InputError(f"at '{at}'", hint="every or last")
    if groups is not None and batch is None:
        raise InputError("groups without the batch whose rows they name")
    repeats, half = _repeated(model, tokens, seed=seed)
    twice = read_maps(model, repeats)
    maps = twice if batch is None else read_maps(model, batch)
    rows = len(maps.places["tokens"])
    if groups is not None and len(groups) != rows:
        raise InputError(f"{len(groups)} groups for {rows} rows", hint="one for each row")
    lines = tuple(
        tuple(_line(maps, twice, head, half=half, groups=groups, at=at, seed=seed))
        for head in heads_of(model.spec)
    )
    source = f"{rows} rows" if batch is not None else f"{rows} rows of {half} tokens twice"
    return HeadRoles(tuple(heads_of(model.spec)), lines, threshold, source)


def _line(
    maps: Maps,
    twice: Maps,
    head: HeadName,
    *,
    half: int,
    groups: Sequence[str] | None,
    at: str,
    seed: int,
) -> Iterator[Score]:
    """One head's scores in the order of `ROLES`; NaN for what a head across sequences cannot do."""
    across = head.kind == "cross"
    yield NOTHING if across else scores.previous_token(maps, head, at=at)
    yield scores.first_token(maps, head, at=at)
    yield scores.fixed_position(maps, head, at=at)
    yield NOTHING if across else scores.induction(twice, head, half=half)
    yield NOTHING if groups is None else scores.of_groups(maps, head, groups, at=at, seed=seed)


def _repeated(model: Model, tokens: Sequence[int] | None, *, seed: int) -> tuple[Inputs, int]:
    """Random rows in which every token is drawn once and the whole row comes twice."""
    spec = model.spec
    known = min(spec.vocab_size, spec.source_vocab) if spec.encoder else spec.vocab_size
    pool = torch.arange(known) if tokens is None else torch.tensor(sorted(set(tokens)))
    half = min(HALF, len(pool), spec.max_seq_len // 2)
    if half < FEWEST:
        raise InputError(
            f"{len(pool)} tokens in a context of {spec.max_seq_len} make no pattern to repeat",
            hint=f"at least {FEWEST} different tokens, and room for them twice",
        )
    draw = torch.Generator().manual_seed(seed)
    rows = [pool[torch.randperm(len(pool), generator=draw)[:half]] for _ in range(ROWS)]
    once = torch.stack(rows)
    both = torch.cat([once, once], dim=1)
    return Inputs(both, source_BS=both if spec.encoder else None), half
