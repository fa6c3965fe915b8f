"""`head_roles`: what each head of a model attends to, as far as a few simple roles describe it.

Five roles, each with a score (a share of attention, 0 to 1), its chance level, and the lift: how
far between chance and 1 the score is. Chance is the score of uniform attention for roles that name
a position, and the score after shuffling the labels for the role that names a group. A head has the
role of the largest lift, if that is at least the threshold; else it has no clear role. A role
describes what a head attends to, not what the prediction depends on: ablation does that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.capture import tapped_model
from glassformer.lens.heads import HeadName, heads_of
from glassformer.lens.measure.attention import BatchAttention, batch_attention
from glassformer.lens.show import html
from glassformer.lens.show.chart import Grid
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model
from glassformer.spec.errors import InputError

# B batch, T queries, S keys, G groups

NAN = float("nan")
#: Queries before this position are not scored: there, the previous token is the first one.
FROM = 2
#: How often the labels of groups are shuffled for the chance level.
SHUFFLES = 10


class Score(NamedTuple):
    """The mean over all scored queries, and the chance level; NaN where no query was scored."""

    score: float
    chance: float
    position: int | None = None

    @property
    def lift(self) -> float:
        """The distance from chance (0) to a score of 1 (1); negative below chance."""
        return (self.score - self.chance) / (1 - self.chance) if self.chance < 1 else NAN


NOT_SCORED = Score(NAN, NAN)


def mass(maps: BatchAttention, head: HeadName, target_BTS: Tensor, queries_BT: Tensor) -> Score:
    """Return the mean attention on `target`, over the queries that may attend to it at all."""
    target_BTS = target_BTS & maps.allow(head)
    queries_BT = queries_BT & target_BTS.any(-1)
    if not bool(queries_BT.any()):
        return NOT_SCORED
    target = target_BTS[queries_BT].double()
    score = (maps.weights[head][queries_BT] * target).sum(-1).mean()
    chance = (maps.uniform(head)[queries_BT] * target).sum(-1).mean()
    return Score(float(score), float(chance))


def scored_queries(maps: BatchAttention, head: HeadName, *, at: str) -> Tensor:
    """Return the real queries from the third on; with `at="last"`, each row's last only."""
    position_BT = maps.query_positions(head.kind)
    if at == "last":
        return position_BT == position_BT.max(1, keepdim=True).values
    return position_BT >= FROM


def previous_token(maps: BatchAttention, head: HeadName, *, at: str) -> Score:
    """Score attention on the token before."""
    q_BT1 = maps.query_positions(head.kind)[:, :, None]
    k_B1S = maps.key_positions(head.kind)[:, None]
    return mass(maps, head, k_B1S == q_BT1 - 1, scored_queries(maps, head, at=at))


def first_token(maps: BatchAttention, head: HeadName, *, at: str) -> Score:
    """Score attention on the first token of the sequence attended to."""
    k_B1S = maps.key_positions(head.kind)[:, None]
    return mass(maps, head, _everywhere(maps, head, k_B1S == 0), scored_queries(maps, head, at=at))


def fixed_position(maps: BatchAttention, head: HeadName, *, at: str) -> Score:
    """Score the fixed position, other than the first, with most attention beyond chance.

    Positions count from the start, or from the end (-1 is the last) where a head may attend to
    later tokens; only those that most rows have are tried, and a query at that position itself is
    not scored.
    """
    best = NOT_SCORED
    position_BS = maps.key_positions(head.kind)
    queries_BT = scored_queries(maps, head, at=at)
    for position in _candidates(maps, head):
        k_BS = position_BS == (
            position if position > 0 else position_BS.max(1, keepdim=True).values + 1 + position
        )
        k_BS = k_BS & (position_BS >= 1)
        elsewhere = queries_BT if head.kind == "cross" else queries_BT & ~k_BS
        score = mass(maps, head, _everywhere(maps, head, k_BS[:, None]), elsewhere)
        if score.score == score.score and not score.lift <= best.lift:
            best = score._replace(position=position)
    return best


def _candidates(maps: BatchAttention, head: HeadName) -> Iterator[int]:
    lengths_B = maps.key_positions(head.kind).max(1).values + 1
    usual = int(lengths_B.median())
    yield from range(1, usual)
    allow = maps.allow(head)[0]
    if len(set(lengths_B.tolist())) > 1 and bool(allow.triu(1).any()):
        yield from range(-1, -usual, -1)


def _everywhere(maps: BatchAttention, head: HeadName, target: Tensor) -> Tensor:
    return target.expand_as(maps.allow(head))


def induction(maps: BatchAttention, head: HeadName, *, half: int) -> Score:
    """On `half` tokens repeated once, score attention on the token after the earlier copy."""
    q_BT1 = maps.query_positions(head.kind)[:, :, None]
    k_B1S = maps.key_positions(head.kind)[:, None]
    return mass(maps, head, k_B1S == q_BT1 - half + 1, maps.query_positions(head.kind) >= half)


def group_difference(
    maps: BatchAttention, head: HeadName, groups: Sequence[str], *, at: str, seed: int
) -> Score:
    """Score how much attention moves when the group changes: half the sum of |difference| between
    the mean maps of two groups, averaged over pairs and queries, among rows of one length.

    It is a share of attention like the other scores. Explained variance would not be: it would call
    a head group-specific that hardly moves, as long as the little that moves depends on the group.
    """
    strata = list(_strata(maps, head, groups, at=at))
    if not strata:
        return NOT_SCORED
    shuffle = torch.Generator().manual_seed(seed)

    def average(shuffled: bool) -> float:
        total = weight = 0.0
        for weights_BQS, labels in strata:
            used = labels[torch.randperm(len(labels), generator=shuffle)] if shuffled else labels
            total += len(labels) * _mean_difference(weights_BQS, used)
            weight += len(labels)
        return total / weight

    chance = sum(average(shuffled=True) for _ in range(SHUFFLES)) / SHUFFLES
    return Score(average(shuffled=False), chance)


def _strata(
    maps: BatchAttention, head: HeadName, groups: Sequence[str], *, at: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of equal lengths, real positions only (B, Q, S), with the numbers of their groups;
    groups of a single row are left out.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    label_B = torch.tensor([names[name] for name in groups])
    q_BT, k_BS = maps.query_positions(head.kind), maps.key_positions(head.kind)
    queries_BT = scored_queries(maps, head, at=at)
    sizes = torch.stack([q_BT.max(1).values, k_BS.max(1).values], 1)
    for size in torch.unique(sizes, dim=0):
        rows = (sizes == size).all(1)
        counts = torch.bincount(label_B[rows], minlength=len(names))
        rows &= counts[label_B] >= 2
        if len(torch.unique(label_B[rows])) < 2:
            continue
        picked = [
            maps.weights[head][b][queries_BT[b]][:, k_BS[b] >= 0] for b in rows.nonzero().flatten()
        ]
        if picked[0].numel():
            yield torch.stack(picked), label_B[rows]


def _mean_difference(weights_BQS: Tensor, label_B: Tensor) -> float:
    means = [weights_BQS[label_B == label].mean(0) for label in torch.unique(label_B)]
    pairs = [
        float((one - other).abs().sum(-1).mean()) / 2
        for number, one in enumerate(means)
        for other in means[:number]
    ]
    return sum(pairs) / len(pairs)


# B batch, T length, H heads, R roles

ROLES = ("previous token", "first token", "position", "induction", "operation")
NO_ROLE = "no clear role"
THRESHOLD = 0.5
#: Rows of random tokens, and how many tokens are repeated in each, if the context is long enough.
ROWS, HALF = 16, 24
#: The shortest pattern whose repetition is scored.
FEWEST = 3


@dataclass(frozen=True, eq=False, repr=False)
class HeadRoles(Displayable):
    """A score for every head and role; `role(head)` is its role."""

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
        """Return the role of a head, and the score with the largest lift that decides it."""
        name = HeadName.parse(head)
        if name not in self.heads:
            raise InputError(f"no head {name}", hint=f"known: {', '.join(map(str, self.heads))}")
        line = self.scores[self.heads.index(name)]
        known = [number for number, each in enumerate(line) if each.lift == each.lift]
        if not known:
            return NO_ROLE, NOT_SCORED
        best = max(known, key=lambda number: line[number].lift)
        if line[best].lift < self.threshold:
            return NO_ROLE, line[best]
        position = line[best].position
        return ROLES[best] if position is None else f"{ROLES[best]} {position}", line[best]

    def rows(self) -> list[Row]:
        """One row per head: its role, the score that decides it, then every role's score."""
        rows = []
        for head, line in zip(self.heads, self.scores, strict=True):
            role, best = self.role(head)
            row: Row = {"head": str(head), "role": role, "score": best.score}
            row |= {"chance": best.chance, "lift": best.lift}
            for name, each in zip(ROLES, line, strict=True):
                row |= {name: each.score, f"{name} chance": each.chance}
            rows.append(row)
        return rows

    def text(self) -> str:
        """A table: score and, in parentheses, chance."""
        lines = [f"head roles: score (chance), {self.source}; threshold {self.threshold} of lift"]
        lines.append(f"  {'':12}" + "".join(f"{name:>17}" for name in ROLES))
        for head, line in zip(self.heads, self.scores, strict=True):
            cells = "".join(f"{_cell(each):>17}" for each in line)
            lines.append(f"  {head!s:12}{cells}   {self.role(head)[0]}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The same as an HTML table."""
        lines = (
            [str(head), *map(_cell, line), self.role(head)[0]]
            for head, line in zip(self.heads, self.scores, strict=True)
        )
        caption = f"head roles: score (chance), {self.source}; threshold {self.threshold} of lift"
        yield html.table(["head", *ROLES, "role"], lines, caption=caption)

    def chart(self) -> Grid:
        """Lift by head and role."""
        values = self.lift.double().numpy()
        largest = max(1.0, float(np.nanmax(np.abs(values))))
        return Grid(
            title=f"{self.title}: a role counts from {self.threshold} on",
            values=values,
            rows=tuple(map(str, self.heads)),
            columns=tuple(ROLES),
            low=-largest,
            high=largest,
            signed=True,
            key="lift: 0 is chance, 1 is all attention",
        )


def _cell(score: Score) -> str:
    if score.score != score.score:
        return "-"
    at = "" if score.position is None else f"{score.position}: "
    return f"{at}{score.score:.2f} ({score.chance:.2f})"


def head_roles(
    model: Model | Holder,
    batch: Batch | Inputs | NDArray[Any] | Tensor | None = None,
    *,
    groups: Sequence[str] | None = None,
    at: Literal["every", "last"] = "every",
    tokens: Sequence[int] | None = None,
    seed: int = 0,
    threshold: float = THRESHOLD,
) -> HeadRoles:
    """Score every head on a batch, and for induction on random tokens that are repeated once.

    Without a batch all roles but the last are scored on the random tokens. `groups` names each
    row's operation. `at="last"` scores only the last position, where an answer head reads. `tokens`
    are the ids to sample from, all of them if not given.
    """
    model = tapped_model(model)
    if at not in ("every", "last"):
        raise InputError(f"at '{at}'", hint="every or last")
    if groups is not None and batch is None:
        raise InputError("groups without a batch", hint="give the batch whose rows they name")
    repeats, half = _repeated(model, tokens, seed=seed)
    twice = batch_attention(model, repeats)
    maps = twice if batch is None else batch_attention(model, batch)
    rows = len(maps.positions["tokens"])
    if groups is not None and len(groups) != rows:
        raise InputError(f"{len(groups)} groups for {rows} rows", hint="one for each row")
    lines = tuple(
        tuple(_line(maps, twice, head, half=half, groups=groups, at=at, seed=seed))
        for head in heads_of(model.spec)
    )
    source = f"{rows} rows" if batch is not None else f"{rows} rows of {half} tokens twice"
    return HeadRoles(tuple(heads_of(model.spec)), lines, threshold, source)


def _line(
    maps: BatchAttention,
    twice: BatchAttention,
    head: HeadName,
    *,
    half: int,
    groups: Sequence[str] | None,
    at: str,
    seed: int,
) -> Iterator[Score]:
    """Yield one head's scores in the order of `ROLES`; not scored where a role does not apply."""
    across = head.kind == "cross"
    yield NOT_SCORED if across else previous_token(maps, head, at=at)
    yield first_token(maps, head, at=at)
    yield fixed_position(maps, head, at=at)
    yield NOT_SCORED if across else induction(twice, head, half=half)
    yield NOT_SCORED if groups is None else group_difference(maps, head, groups, at=at, seed=seed)


def _repeated(model: Model, tokens: Sequence[int] | None, *, seed: int) -> tuple[Inputs, int]:
    """Return random rows of different tokens, each repeated once, and the length of one copy."""
    spec = model.spec
    known = min(spec.vocab_size, spec.source_vocab) if spec.encoder else spec.vocab_size
    pool = torch.arange(known) if tokens is None else torch.tensor(sorted(set(tokens)))
    half = min(HALF, len(pool), spec.max_seq_len // 2)
    if half < FEWEST:
        raise InputError(
            f"{len(pool)} tokens in a context of {spec.max_seq_len} make no pattern to repeat",
            hint=f"at least {FEWEST} different tokens, and room for them twice",
        )
    sample = torch.Generator().manual_seed(seed)
    rows = [pool[torch.randperm(len(pool), generator=sample)[:half]] for _ in range(ROWS)]
    once = torch.stack(rows)
    both = torch.cat([once, once], dim=1)
    return Inputs(both, source_BS=both if spec.encoder else None), half
