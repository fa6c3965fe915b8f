"""Beam search: many prompts at once, cached, with an early stop that never loses a winner.

At each step an item's candidates are all its live beams with all their next tokens. The best of
them fill the beams that no complete hypothesis occupies: those that end leave the search and keep
their beam, the others go on. An item is done when it has its n best and no live beam can beat the
last of them, by `BeamSpec.bound`, whatever the sign of the length penalty.

Candidates of one step have one length, so their log-probabilities rank them; scores compare
hypotheses of different lengths.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.generation.constraint import Bounded, Constraint
from glassformer.generation.loop import PATIENCE, check_something_left, check_tokens
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import BeamRun, BeamStep, Stepper
from glassformer.nn.norm import as_float
from glassformer.spec.decoding import BeamSpec
from glassformer.spec.errors import DivergedError

# I items (prompts), W beams, V vocab, C = W * V candidates, R rows of the batch


class Node(NamedTuple):
    """One kept token: the node before it (-1: the prompt), and the sum of log-probabilities.

    `position` counts new tokens from 1. `finish` says why a hypothesis is complete here, if it is.
    """

    parent: int
    token: int
    position: int
    logprob: float
    total: float
    group: int = 0
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete sequence of new tokens, the end among them; `node` is its leaf in the tree.

    `text` is empty unless the caller has a tokenizer and fills it in.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprob: float
    score: float
    finish: str
    node: int = -1
    text: str = ""


def path_to(nodes: list[Node], leaf: int) -> list[Node]:
    """Return the nodes from the first token to this one."""
    path = []
    while leaf >= 0:
        path.append(nodes[leaf])
        leaf = nodes[leaf].parent
    return path[::-1]


def best_candidates(
    ranked_IC: Tensor, totals_IC: Tensor, *, places: NDArray[np.int64]
) -> list[list[tuple[int, float]]]:
    """Return the places[i] best candidates of each item, as (number, total), best first.

    Of equal ones the first wins, as with `argmax`; `topk` alone does not promise which.
    """
    most = min(int(places.max()), ranked_IC.shape[1])
    if most == 0:
        return [[] for _ in places]
    sorted_IW = ranked_IC.topk(most).values
    last_I1 = torch.from_numpy(np.clip(places, 1, most) - 1)[:, None].to(ranked_IC.device)
    enough_IC = ranked_IC >= sorted_IW.gather(1, last_I1)
    found = enough_IC.logical_and_(ranked_IC > -math.inf).nonzero()
    items, numbers = found.cpu().numpy().T
    ranks = ranked_IC[found[:, 0], found[:, 1]].cpu().numpy()
    totals = totals_IC[found[:, 0], found[:, 1]].tolist()
    made: list[list[tuple[int, float]]] = [[] for _ in places]
    for at in np.lexsort((numbers, -ranks, items)).tolist():
        item = int(items[at])
        if len(made[item]) < places[item]:
            made[item].append((int(numbers[at]), totals[at]))
    return made


# I items (prompts), G groups, W beams of a group, V vocab, R rows of the batch


@dataclass(frozen=True, slots=True)
class Beams:
    """The hypotheses of one prompt, best first; with `record`, the tree of all kept nodes."""

    hypotheses: tuple[Hypothesis, ...]
    tree: tuple[Node, ...] = ()


@dataclass(slots=True)
class _Beam:
    """A live hypothesis: its row in the batch, its leaf, its sum, its constraint's state."""

    row: int
    node: int
    total: float
    state: int = 0


@dataclass(slots=True)
class _Item:
    """The search of one prompt: live beams and free beams by group, complete hypotheses."""

    limit: int
    bounded: Bounded | None
    live: list[list[_Beam]]
    places: list[int]
    nodes: list[Node] = field(default_factory=list)
    complete: list[Hypothesis] = field(default_factory=list)

    def last(self, spec: BeamSpec) -> float | None:
        """Return the lowest score among the n best, if there are so many."""
        if len(self.complete) < spec.kept:
            return None
        return sorted((h.score for h in self.complete), reverse=True)[spec.kept - 1]

    def settled(self, spec: BeamSpec, made: int) -> bool:
        """True if no live beam can come among the n best any more."""
        alive = [beam.total for group in self.live for beam in group]
        if not alive:
            return True
        last = self.last(spec)
        if last is None:
            return False
        shortest = max(made + 1, spec.min_new_tokens)
        return last >= spec.bound(max(alive), shortest=shortest, longest=self.limit)

    def ended(self, spec: BeamSpec, token: int, state: int, made: int) -> str | None:
        """Return why a hypothesis is complete with this token, or None."""
        if token in spec.eos:
            return "eos"
        if made >= self.limit:
            return "length"
        if self.bounded is not None and self.bounded.over(state, made):
            return "constraint"
        return None


def beam_search(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    *,
    spec: BeamSpec = BeamSpec(),  # noqa: B008  frozen
    constraint: Constraint | None = None,
    record: bool = False,
) -> list[Beams]:
    """Return the n best complete hypotheses of each prompt; `record` keeps the tree."""
    prompts, items = _begin(stepper, prompts, spec, constraint)
    for _ in _search(stepper, prompts, items, spec):
        pass
    return [_found(item, spec, record) for item in items]


def beam_steps(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    *,
    spec: BeamSpec = BeamSpec(),  # noqa: B008  frozen
    constraint: Constraint | None = None,
) -> Iterator[list[Beams]]:
    """Yield the state of the same search after each step: what is complete, and the tree."""
    prompts, items = _begin(stepper, prompts, spec, constraint)
    steps = _search(stepper, prompts, items, spec)
    return ([_found(item, spec, True) for item in items] for _ in steps)


def _begin(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    spec: BeamSpec,
    constraint: Constraint | None,
) -> tuple[Prompts, list[_Item]]:
    """Check everything before any work, and return the prompts with a search for each."""
    prompts = prompts if isinstance(prompts, Prompts) else Prompts.of(prompts)
    prompts.check(stepper)
    check_tokens(stepper.vocab_size, forbidden=spec.forbidden, eos=spec.eos)
    early_end = set(spec.eos) if spec.min_new_tokens > 1 else set()
    check_something_left(stepper.vocab_size, {*spec.forbidden, *early_end})
    items = []
    for row, limit in enumerate(prompts.room(stepper, spec.max_new_tokens)):
        bounded = None
        if constraint is not None:
            bounded = constraint.within(
                shortest=spec.min_new_tokens,
                longest=limit,
                vocab_size=stepper.vocab_size,
                eos=spec.eos,
                forbidden=spec.forbidden,
            )
        state = 0 if bounded is None else bounded.start
        live = [[_Beam(row, -1, 0.0, state)] for _ in range(spec.groups)]
        items.append(_Item(limit, bounded, live, [spec.width // spec.groups] * spec.groups))
    return prompts, items


def _search(
    stepper: Stepper, prompts: Prompts, items: list[_Item], spec: BeamSpec
) -> Iterator[int]:
    """Run the search, yielding the number of each step, from 1."""
    logits_RV, past = stepper.start(prompts, room=max(item.limit for item in items))
    going, made = items, 0
    while made < spec.max_new_tokens:
        made += 1
        logprobs_RV = _logprobs(logits_RV, spec, made)
        rows, tokens = _grow(going, logprobs_RV, spec, made)
        yield made
        going = [item for item in going if not item.settled(spec, made)]
        if not going:
            return
        # Beams of items that are done leave the batch; the others get their rows in order.
        beams = [beam for item in going for group in item.live for beam in group]
        order = [rows[beam.row] for beam in beams]
        chosen = torch.tensor([tokens[beam.row] for beam in beams])
        for place, beam in enumerate(beams):
            beam.row = place
        if order != list(range(len(logits_RV))):
            past.reorder(order)
        logits_RV, ahead = stepper.run_beams(chosen, past=past, run=_run(going, spec, made))
        if ahead:
            for made in _follow(going, ahead, made):  # noqa: B020  the steps go on from there
                yield made


def _run(items: list[_Item], spec: BeamSpec, made: int) -> BeamRun:
    """Return how far the stepper may search by itself: none where more than sums decides."""
    count = min(item.limit for item in items) - made - 1
    closed = spec.forbidden
    if made + 1 < spec.min_new_tokens:
        closed, count = (*closed, *spec.eos), min(count, spec.min_new_tokens - 1 - made)
    free = all(item.bounded is None and item.places[0] == len(item.live[0]) for item in items)
    if spec.groups > 1 or not free:
        count = 0
    lengths = [max(made + step + 2, spec.min_new_tokens) for step in range(count)]
    beams = [item.live[0] for item in items]
    return BeamRun(
        count=count,
        seconds=PATIENCE,
        first=np.cumsum([0, *map(len, beams)]).tolist(),
        sums=[beam.total for live in beams for beam in live],
        closed=closed,
        ends=spec.eos,
        last=[math.nan if (last := item.last(spec)) is None else last for item in items],
        shortest=[spec.length_penalty(length) for length in lengths],
        longest=[spec.length_penalty(item.limit) for item in items],
    )


def _follow(items: list[_Item], steps: Sequence[BeamStep], made: int) -> Iterator[int]:
    """Add steps that the stepper chose, one by one: every item continues all its beams."""
    first = np.cumsum([0, *(len(item.live[0]) for item in items)]).tolist()
    leaves = [(beam.node, beam.total) for item in items for beam in item.live[0]]
    for step, (parents, tokens, totals) in enumerate(steps, made + 1):
        before = [leaves[parent] for parent in parents]
        leaves = []
        for item, begin, end in zip(items, first, first[1:], strict=False):
            number = len(item.nodes)
            for row in range(begin, end):
                node, sum_before = before[row]
                total = totals[row]
                item.nodes.append(Node(node, tokens[row], step, total - sum_before, total))
                leaves.append((number, total))
                number += 1
        yield step
    for item, begin, end in zip(items, first, first[1:], strict=False):
        item.live[0] = [_Beam(row, *leaves[row]) for row in range(begin, end)]


def _logprobs(logits_RV: Tensor, spec: BeamSpec, made: int) -> Tensor:
    """Return the model's log-probabilities, -inf for tokens that are not allowed."""
    wide_RV = as_float(logits_RV)
    logprobs_RV = wide_RV.log_softmax(-1)
    if bool(logprobs_RV.isnan().any()):
        raise DivergedError(
            "the model's logits are not numbers", hint="its weights hold NaN or infinity"
        )
    closed = (*spec.forbidden, *(spec.eos if made < spec.min_new_tokens else ()))
    if closed:
        logprobs_RV[:, list(closed)] = -math.inf
    return logprobs_RV


def _grow(
    items: list[_Item], logprobs_RV: Tensor, spec: BeamSpec, made: int
) -> tuple[list[int], list[int]]:
    """Choose the next beams of every group.

    Return, for each new beam in the order of its `row`, the row that it continues and its token.
    """
    rows: list[int] = []
    tokens: list[int] = []
    vocab = logprobs_RV.shape[1]
    taken_IV = np.zeros((len(items), vocab))
    for group in range(spec.groups):
        before = [item.live[group] for item in items]
        totals_IWV = ranked_IWV = _totals(items, before, logprobs_RV, made)
        if group and spec.diversity:
            paid_IV = torch.from_numpy(spec.diversity * taken_IV).to(totals_IWV.device)
            ranked_IWV = totals_IWV - paid_IV[:, None]
        places = np.array([item.places[group] for item in items])
        best = best_candidates(ranked_IWV.flatten(1), totals_IWV.flatten(1), places=places)
        for i, (item, candidates) in enumerate(zip(items, best, strict=True)):
            item.live[group] = []
            for number, total in candidates:
                parent, token = before[i][number // vocab], number % vocab
                taken_IV[i, token] += 1
                beam = _continue(item, parent, (token, total), (group, made), spec=spec)
                if beam is not None:
                    beam.row = len(rows)
                    rows.append(parent.row)
                    tokens.append(token)
                    item.live[group].append(beam)
    return rows, tokens


def _totals(
    items: list[_Item], before: list[list[_Beam]], logprobs_RV: Tensor, made: int
) -> Tensor:
    """Return totals (I, W, V) of live beams with each next token; -inf where there is no beam."""
    widest = max(1, max(map(len, before)))
    rows = np.zeros((len(items), widest), dtype=np.int64)
    sums = np.full((len(items), widest), -math.inf)
    for i, beams in enumerate(before):
        rows[i, : len(beams)] = [beam.row for beam in beams]
        sums[i, : len(beams)] = [beam.total for beam in beams]
    device = logprobs_RV.device
    totals_IWV = logprobs_RV.double()[torch.from_numpy(rows).to(device)]
    totals_IWV += torch.from_numpy(sums)[..., None].to(device)
    for i, (item, beams) in enumerate(zip(items, before, strict=True)):
        if item.bounded is not None:
            for w, beam in enumerate(beams):
                allow_V = torch.from_numpy(item.bounded.allow(beam.state, made - 1))
                totals_IWV[i, w].masked_fill_(~allow_V.to(device), -math.inf)
    return totals_IWV


def _continue(
    item: _Item, parent: _Beam, chosen: tuple[int, float], at: tuple[int, int], *, spec: BeamSpec
) -> _Beam | None:
    """Add a chosen token to the tree; return the new live beam, or None at the last token."""
    (token, total), (group, made) = chosen, at
    state = parent.state if item.bounded is None else item.bounded.advance(parent.state, token)
    finish = item.ended(spec, token, state, made)
    node = Node(parent.node, token, made, total - parent.total, total, group, finish)
    item.nodes.append(node)
    if finish is None:
        return _Beam(-1, len(item.nodes) - 1, total, state)
    item.places[group] -= 1
    path = path_to(item.nodes, len(item.nodes) - 1)
    item.complete.append(
        Hypothesis(
            tokens=tuple(n.token for n in path),
            logprobs=tuple(n.logprob for n in path),
            logprob=total,
            score=spec.score(total, made),
            finish=finish,
            node=len(item.nodes) - 1,
        )
    )
    return None


def _found(item: _Item, spec: BeamSpec, record: bool) -> Beams:
    best = sorted(item.complete, key=lambda h: -h.score)[: spec.kept]
    return Beams(tuple(best), tuple(item.nodes) if record else ())
