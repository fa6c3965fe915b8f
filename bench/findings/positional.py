"""`positional_attention`: on the digits task, does the answer come from the right position?

`FIRST 7 3 9 SEP` is answered at SEP, and the position of the right digit is known. Measured over
many examples: how much attention each head pays from the answering position to the right position,
and how much gets there through another position, which an earlier layer has filled. Attention is
not causation: `cut_accuracy` ablates all heads of one layer at one position and counts right
answers again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.data.batch import Ints
from glassformer.data.tasks.digits import Digits
from glassformer.lens.capture import eval_mode
from glassformer.lens.heads import HeadName, heads_of
from glassformer.lens.measure.attention import BatchAttention, batch_attention
from glassformer.lens.show import html
from glassformer.lens.show.chart import Grid
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.models.model import Holder, Model, model_of
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    pass

# B examples, T positions, N heads, H d_head, O operations

#: Operations whose answer is a digit of the input, and the three that name its position.
COPYING = ("FIRST", "SECOND", "LAST", "MAX", "MIN")
PLACED = ("FIRST", "SECOND", "LAST")
#: What counts as attending to the right position.
BAR = 0.9
Site = Literal["operation", "digits", "answer"]
SITES: tuple[Site, ...] = ("operation", "digits", "answer")


@dataclass(frozen=True, slots=True)
class Route:
    """Attention through another position: a later head attends to where an earlier one wrote."""

    later: HeadName
    earlier: HeadName
    mass: float

    def __str__(self) -> str:
        return f"{self.later} <- {self.earlier}"


@dataclass(frozen=True, eq=False, repr=False)
class PositionalAttention(Displayable):
    """Mass on the right position: `tensor` (operations, heads), means over the examples."""

    operations: tuple[str, ...]
    heads: tuple[HeadName, ...]
    mass: Tensor
    chance: tuple[float, ...]
    routes: tuple[Route | None, ...]
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]
    title: str = "attention from the answering position to the right one"

    @property
    def tensor(self) -> Tensor:
        """(operations, heads)."""
        return self.mass

    def best(self, operation: str) -> tuple[HeadName, float]:
        """The head that looks most at the right position, and its mass there."""
        place = self._place(operation)
        head = int(self.mass[place].argmax())
        return self.heads[head], float(self.mass[place, head])

    def route(self, operation: str) -> Route | None:
        """The best way over a position between; None in a model of one layer."""
        return self.routes[self._place(operation)]

    def _place(self, operation: str) -> int:
        if operation not in self.operations:
            known = ", ".join(self.operations)
            raise InputError(f"no operation '{operation}' here", hint=f"known: {known}")
        return self.operations.index(operation)

    def rows(self) -> list[Row]:
        """A line an operation: the best head, the best way round, right answers, every head."""
        found = []
        for place, operation in enumerate(self.operations):
            head, mass = self.best(operation)
            route = self.routes[place]
            row: Row = {
                "operation": operation,
                "examples": self.counts[place],
                "accuracy": self.accuracy[place],
                "chance": self.chance[place],
                "head": str(head),
                "mass": mass,
                "route": None if route is None else str(route),
                "route_mass": None if route is None else route.mass,
            }
            line = self.mass[place].tolist()
            found.append(row | {str(h): m for h, m in zip(self.heads, line, strict=True)})
        return found

    def text(self) -> str:
        """A line an operation."""
        lines = [
            f"{self.title} (bar {BAR})",
            f"  {'':8}{'right':>7}{'chance':>8}  {'best head':16}{'by way of another position'}",
        ]
        for row in self.rows():
            way = "" if row["route"] is None else f"{row['route']} {row['route_mass']:.3f}"
            best = f"{row['head']} {row['mass']:.3f}"
            lines.append(
                f"  {row['operation']:8}{row['accuracy']:7.1%}{row['chance']:8.3f}  {best:16}{way}"
            )
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The table with every head's mass."""
        rows = self.rows()
        yield html.table(list(rows[0]), (row.values() for row in rows), caption=self.title)

    def chart(self) -> Grid:
        """Mass by operation and head."""
        return Grid(
            title=self.title,
            values=self.mass.double().numpy(),
            rows=tuple(self.operations),
            columns=tuple(map(str, self.heads)),
            key="share of attention",
        )


def positional_attention(
    model: Model | Holder,
    task: Digits,
    *,
    split: str = "test",
    rows: Ints | None = None,
    operations: Sequence[str] = PLACED,
) -> PositionalAttention:
    """Over a split, or some rows of it: where the answering position looks, by operation."""
    model = _answering(model, task)
    for operation in operations:
        if operation not in COPYING:
            raise InputError(
                f"the answer of '{operation}' stands at no position",
                hint=f"operations that copy a digit: {', '.join(COPYING)}",
            )
    rows = np.arange(task.sizes()[split]) if rows is None else rows
    asked = np.array(task.groups(split, rows)["operation"])
    heads = [head for head in heads_of(model.spec) if head.kind == "self"]
    found = []
    for operation in operations:
        these = np.asarray(rows)[asked == operation]
        if not len(these):
            raise InputError(f"no example asks for {operation}", where=f"the split '{split}'")
        found.append(_measure(model, task, split, these, operation, heads))
    return PositionalAttention(
        operations=tuple(operations),
        heads=tuple(heads),
        mass=torch.tensor([each[0] for each in found]),
        chance=tuple(each[1] for each in found),
        routes=tuple(each[2] for each in found),
        accuracy=tuple(each[3] for each in found),
        counts=tuple(each[4] for each in found),
    )


def right_places(operation: str, tokens_BT: Ints, lengths_B: Ints) -> NDArray[np.bool_]:
    """(B, T): where the right digit stands; every place that holds it, for MAX and MIN."""
    place_1T, last_B1 = np.arange(tokens_BT.shape[1])[None], np.asarray(lengths_B)[:, None] - 1
    digit_BT = (place_1T >= 1) & (place_1T < last_B1)
    match operation:
        case "FIRST":
            return digit_BT & (place_1T == 1)
        case "SECOND":
            return digit_BT & (place_1T == 2)
        case "LAST":
            return digit_BT & (place_1T == last_B1 - 1)
        case "MAX":
            best_B = np.where(digit_BT, tokens_BT, -1).max(1)
        case _:
            best_B = np.where(digit_BT, tokens_BT, 10).min(1)
    return digit_BT & (tokens_BT == best_B[:, None])


def _measure(
    model: Model, task: Digits, split: str, rows: Ints, operation: str, heads: list[HeadName]
) -> tuple[list[float], float, Route | None, float, int]:
    batch = task.batch(split, rows)
    lengths_B = task.lengths(split)[rows]
    right_BT = torch.from_numpy(right_places(operation, batch.tokens, lengths_B))
    maps = batch_attention(model, batch)
    at_B = torch.arange(len(rows)), torch.from_numpy(lengths_B) - 1

    def mass(weights_BTS: Tensor) -> float:
        return float((weights_BTS[at_B] * right_BT).sum(-1).mean())

    by_head = [mass(maps.weights[head]) for head in heads]
    chance = mass(maps.uniform(heads[0]))
    with eval_mode(model):
        answers = model(batch)["answer"].argmax(-1).cpu().numpy()
    share = float((answers == batch.targets["answer"]).mean())
    return by_head, chance, _best_route(maps, heads, right_BT, at_B), share, len(rows)


def _best_route(
    maps: BatchAttention, heads: list[HeadName], right_BT: Tensor, at_B: tuple[Tensor, Tensor]
) -> Route | None:
    """The pair of heads with most mass on answer -> elsewhere -> right; staying put is no way."""
    best = None
    for earlier in heads:
        lands_BT = (maps.weights[earlier] * right_BT[:, None]).sum(-1).masked_fill(right_BT, 0.0)
        lands_BT[at_B] = 0.0
        for later in heads:
            if later.layer > earlier.layer:
                mass = float((maps.weights[later][at_B] * lands_BT).sum(-1).mean())
                if best is None or mass > best.mass:
                    best = Route(later, earlier, mass)
    return best


def cut_accuracy(
    model: Model | Holder,
    task: Digits,
    *,
    layer: int,
    site: Site,
    split: str = "test",
    rows: Ints | None = None,
) -> dict[str, float]:
    """Right answers by operation when no head of a layer writes at a site: the operation's token,
    the digits, or the answering position. All of the layer's heads give 0 there.
    """
    model = _answering(model, task)
    if site not in SITES:
        raise InputError(f"no site '{site}'", hint=f"one of {', '.join(SITES)}")
    name = HeadName("self", layer, 0).check(model.spec).tap(model.spec)
    rows = np.arange(task.sizes()[split]) if rows is None else np.asarray(rows)
    batch, lengths_B1 = task.batch(split, rows), task.lengths(split)[rows][:, None]
    place_1T = np.arange(batch.tokens.shape[1])[None]
    chosen = {
        "operation": place_1T == 0,
        "digits": (place_1T >= 1) & (place_1T < lengths_B1 - 1),
        "answer": place_1T == lengths_B1 - 1,
    }[site]
    closed_B1T1 = torch.from_numpy(np.broadcast_to(chosen, batch.tokens.shape).copy())[
        :, None, :, None
    ]
    edit: dict[str, Edit] = {name: lambda x: x.masked_fill(closed_B1T1.to(x.device), 0.0)}
    with eval_mode(model):
        answers = model(batch, taps=Taps(edit=edit))["answer"].argmax(-1).cpu().numpy()
    right = answers == batch.targets["answer"]
    asked = np.array(task.groups(split, rows)["operation"])
    return {
        op: float(right[asked == op].mean()) for op in task.spec.operations if (asked == op).any()
    }


def _answering(model: Model | Holder, task: Digits) -> Model:
    if not isinstance(task, Digits):
        raise InputError("only the digits task says which position is right")
    found = model_of(model)
    if found.spec.encoder is not None or "answer" not in found.spec.head_names():
        raise InputError("the model does not answer the digits task", hint="glass train digits")
    return found
