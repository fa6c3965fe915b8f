"""Scores of attention maps: how much of a head's attention lies where a role says it should.

Each score is a share of attention, from 0 to 1, and each has a chance level. For roles that name a
place, that is the score of a head that looks everywhere it may alike. For the role that names a
group, it is the score after the groups' names were dealt out anew.

`head_roles`: what each head of a model does, as far as a few simple roles can tell.

Five roles, each with a score, its chance level, and how far between chance and 1 the score lies
(its lift). A head has the role of the largest lift, if that is at least the threshold; else it has
no clear role. A role says where a head looks, not what the answer depends on: ablation does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.measure.batch_attention import Maps, read_maps
from glassformer.lens.measure.head_names import HeadName, heads_of
from glassformer.lens.show import html
from glassformer.lens.show.displayable import Face, Row
from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model, model_of
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# B batch, T queries, S keys, G groups

NAN = float("nan")
#: Queries before this place are not asked: there, the previous token is the first one.
FROM = 2
#: How often the names of groups are dealt out anew for the chance level.
DEALS = 10


class Score(NamedTuple):
    """The mean over all rows that were asked, and what chance would give; NaN where none was."""

    score: float
    chance: float
    place: int | None = None

    @property
    def lift(self) -> float:
        """How far from chance (0) to everything (1); negative below chance."""
        return (self.score - self.chance) / (1 - self.chance) if self.chance < 1 else NAN


NOTHING = Score(NAN, NAN)


def mass(maps: Maps, head: HeadName, target_BTS: Tensor, asked_BT: Tensor) -> Score:
    """The mean attention on `target`, over the queries asked that may look at it at all."""
    target_BTS = target_BTS & maps.allow(head)
    asked_BT = asked_BT & target_BTS.any(-1)
    if not bool(asked_BT.any()):
        return NOTHING
    target = target_BTS[asked_BT].double()
    found = (maps.weights[head][asked_BT] * target).sum(-1).mean()
    chance = (maps.uniform(head)[asked_BT] * target).sum(-1).mean()
    return Score(float(found), float(chance))


def asked_queries(maps: Maps, head: HeadName, *, at: str) -> Tensor:
    """Real queries from the third place on; with `at="last"`, each row's last one only."""
    place_BT = maps.place_q(head.kind)
    if at == "last":
        return place_BT == place_BT.max(1, keepdim=True).values
    return place_BT >= FROM


def previous_token(maps: Maps, head: HeadName, *, at: str) -> Score:
    """Attention on the token before."""
    q_BT1, k_B1S = maps.place_q(head.kind)[:, :, None], maps.place_k(head.kind)[:, None]
    return mass(maps, head, k_B1S == q_BT1 - 1, asked_queries(maps, head, at=at))


def first_token(maps: Maps, head: HeadName, *, at: str) -> Score:
    """Attention on the first token of the sequence that is read."""
    k_B1S = maps.place_k(head.kind)[:, None]
    return mass(maps, head, _everywhere(maps, head, k_B1S == 0), asked_queries(maps, head, at=at))


def fixed_position(maps: Maps, head: HeadName, *, at: str) -> Score:
    """The fixed place, other than the first, that draws most attention beyond chance.

    Places are counted from the start, or (-1 the last) from the end where a head may look ahead;
    only those count that most rows have, and a query that stands there itself is not asked.
    """
    best = NOTHING
    place_BS = maps.place_k(head.kind)
    asked_BT = asked_queries(maps, head, at=at)
    for place in _candidates(maps, head):
        k_BS = place_BS == (
            place if place > 0 else place_BS.max(1, keepdim=True).values + 1 + place
        )
        k_BS = k_BS & (place_BS >= 1)
        elsewhere = asked_BT if head.kind == "cross" else asked_BT & ~k_BS
        found = mass(maps, head, _everywhere(maps, head, k_BS[:, None]), elsewhere)
        if found.score == found.score and not found.lift <= best.lift:
            best = found._replace(place=place)
    return best


def _candidates(maps: Maps, head: HeadName) -> Iterator[int]:
    lengths_B = maps.place_k(head.kind).max(1).values + 1
    usual = int(lengths_B.median())
    yield from range(1, usual)
    allow = maps.allow(head)[0]
    if len(set(lengths_B.tolist())) > 1 and bool(allow.triu(1).any()):
        yield from range(-1, -usual, -1)


def _everywhere(maps: Maps, head: HeadName, target: Tensor) -> Tensor:
    return target.expand_as(maps.allow(head))


def induction(maps: Maps, head: HeadName, *, half: int) -> Score:
    """On `half` tokens and the same again: attention on what followed the earlier copy."""
    q_BT1, k_B1S = maps.place_q(head.kind)[:, :, None], maps.place_k(head.kind)[:, None]
    return mass(maps, head, k_B1S == q_BT1 - half + 1, maps.place_q(head.kind) >= half)


def of_groups(maps: Maps, head: HeadName, groups: Sequence[str], *, at: str, seed: int) -> Score:
    """How much attention moves when the group changes: half the sum of |difference| between the
    mean maps of two groups, over all pairs of groups and all queries, among rows of one length.

    It is a share of attention like the other scores. The variance that groups explain would not
    be: it calls a head specific that hardly moves, so long as what little moves goes by group.
    """
    strata = list(_strata(maps, head, groups, at=at))
    if not strata:
        return NOTHING
    deal = torch.Generator().manual_seed(seed)

    def average(shuffled: bool) -> float:
        total = weight = 0.0
        for weights_BQS, labels in strata:
            dealt = labels[torch.randperm(len(labels), generator=deal)] if shuffled else labels
            total += len(labels) * _apart(weights_BQS, dealt)
            weight += len(labels)
        return total / weight

    chance = sum(average(shuffled=True) for _ in range(DEALS)) / DEALS
    return Score(average(shuffled=False), chance)


def _strata(
    maps: Maps, head: HeadName, groups: Sequence[str], *, at: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of equal lengths, their real places only, (B, Q, S), with the numbers of their groups;
    groups of a single row tell nothing of their spread and are left out.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    label_B = torch.tensor([names[name] for name in groups])
    q_BT, k_BS = maps.place_q(head.kind), maps.place_k(head.kind)
    asked_BT = asked_queries(maps, head, at=at)
    sizes = torch.stack([q_BT.max(1).values, k_BS.max(1).values], 1)
    for size in sizes.unique(dim=0):
        rows = (sizes == size).all(1)
        counts = torch.bincount(label_B[rows], minlength=len(names))
        rows &= counts[label_B] >= 2
        if len(label_B[rows].unique()) < 2:
            continue
        picked = [
            maps.weights[head][b][asked_BT[b]][:, k_BS[b] >= 0] for b in rows.nonzero().flatten()
        ]
        if picked[0].numel():
            yield torch.stack(picked), label_B[rows]


def _apart(weights_BQS: Tensor, label_B: Tensor) -> float:
    means = [weights_BQS[label_B == label].mean(0) for label in label_B.unique()]
    pairs = [
        float((one - other).abs().sum(-1).mean()) / 2
        for place, one in enumerate(means)
        for other in means[:place]
    ]
    return sum(pairs) / len(pairs)


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
        yield html.table(["head", *ROLES, "role"], lines, caption=caption)

    def figure(self) -> "Figure":
        """Lift by head and role."""
        from glassformer.lens.show.mpl import grid_figure

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
    yield NOTHING if across else previous_token(maps, head, at=at)
    yield first_token(maps, head, at=at)
    yield fixed_position(maps, head, at=at)
    yield NOTHING if across else induction(twice, head, half=half)
    yield NOTHING if groups is None else of_groups(maps, head, groups, at=at, seed=seed)


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
