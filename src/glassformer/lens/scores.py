"""Scores of attention maps: how much of a head's attention lies where a role says it should.

Each score is a share of attention, from 0 to 1, and each has a chance level. For roles that name a
place, that is the score of a head that looks everywhere it may alike. For the role that names a
group, it is the score after the groups' names were dealt out anew.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glassformer.lens.headname import HeadName
from glassformer.lens.maps import Maps

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
