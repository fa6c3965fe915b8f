"""Rows for modules of other libraries: losses, gradients, and what is saved.

A loss is compared with the mean cross entropy over the labelled tokens, computed here; gradients
are compared tensor by tensor, and may differ by a multiple of their own rounding noise.
"""

import contextlib
import inspect
import io
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glasscheck.foreign import Foreign, copied, has_replaced_forward, inner, loss_of, training
from glasscheck.measure import (
    UNITS,
    Gaps,
    Measure,
    NotOffered,
    gap,
    nudged,
    short,
)
from glasscheck.rows.invariants import LENGTH, long_of, tokens_of, tolerance_of
from glasscheck.subject import Subject

# B batch, T length, V vocab

IGNORED = -100
#: What a label may be for its position to be left out.
IGNORABLE = (-100, -1)
#: Words in the names of results that a loss counts besides the next token's cross entropy.
ADDED = ("aux", "z_loss", "logits")


@dataclass(frozen=True, slots=True)
class Loss:
    """What a loss does with its labels, as one call of it shows.

    `shift`: labels are the tokens themselves, each to be predicted one position earlier; `ignored`
    is the label that leaves a position out, None where there is none; `total`: a sum over labels,
    not their mean.
    """

    foreign: Foreign
    shift: bool
    ignored: int | None = IGNORED
    total: bool = False

    def of(
        self, tokens: Tensor, labels: Tensor, valid: Tensor | None = None, **extra: Any
    ) -> Tensor:
        """Return the loss of a call."""
        result = self.call(tokens, labels, valid, **extra)
        loss = loss_of(result)
        if loss is None:
            raise NotOffered("it returns no loss")
        return loss

    def call(
        self, tokens: Tensor, labels: Tensor, valid: Tensor | None = None, **extra: Any
    ) -> Any:
        """Return the result of a call with labels."""
        name = self.foreign.label_name
        if name is None:
            raise NotOffered("its forward takes no labels")
        if self.ignored is not None:
            labels = torch.where(labels == IGNORED, self.ignored, labels)
        given = labels.t() if self.foreign.time_first else labels
        return self.foreign.call(tokens, valid, **{name: given}, **extra)

    def by_hand(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the cross entropy of labelled tokens: their mean, or their sum."""
        if self.shift:
            logits_BTV, labels_BT = logits_BTV[:, :-1], labels_BT[:, 1:]
        return F.cross_entropy(
            wide(logits_BTV).flatten(0, 1),
            labels_BT.flatten(),
            ignore_index=IGNORED,
            reduction="sum" if self.total else "mean",
        )

    def count(self, labels: Tensor) -> int:
        """Return the number of labelled tokens that count."""
        return int(((labels[:, 1:] if self.shift else labels) != IGNORED).sum())

    def weight(self, labels: Tensor, among: int) -> float:
        """Return the share of a part's loss in that of everything."""
        return 1.0 if self.total else self.count(labels) / among


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 if they are: never in less."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _learner(subject: Subject) -> Loss:
    """Return how the loss reads its labels: as its library does, or as one call shows."""
    foreign = subject.stranger()
    if foreign.label_name is None:
        raise NotOffered("its forward takes no labels")
    if not subject.per_position:
        raise NotOffered("it returns one result for a sequence")
    usual = Loss(foreign, shift=foreign.kind == "decoder" and foreign.label_name == "labels")
    tokens = tokens_of(subject, 2, LENGTH, seed=140)
    labels = _in_range(subject, foreign, tokens)
    with torch.no_grad():
        logits, bar = foreign.logits(tokens), subject.tolerance(torch.float32)
        found = wide(usual.of(tokens, labels).cpu())
        for one in (usual, replace(usual, total=True), replace(usual, shift=not usual.shift)):
            wanted = one.by_hand(logits, labels)
            if float((found - wanted).abs()) <= max(bar, 1e-5) * float(wanted.abs()):
                if one.shift != usual.shift and foreign.label_name == "labels":
                    return _that_ignores(usual, tokens, labels, bar)  # a row says so
                return _that_ignores(one, tokens, labels, bar)
    return _that_ignores(usual, tokens, labels, bar)


def _that_ignores(loss: Loss, tokens: Tensor, labels: Tensor, bar: float) -> Loss:
    """Return the loss with the label that it leaves out, if it leaves any out."""
    holes = labels.clone()
    holes[:, 3:6] = IGNORED
    if loss.foreign.label_name == "labels":
        with contextlib.suppress(IndexError):  # -100 is no label of it
            loss.of(tokens, holes)
            return loss
    wanted = loss.by_hand(loss.foreign.logits(tokens), holes)
    others = loss.by_hand(loss.foreign.logits(tokens), labels)
    for ignored in (*IGNORABLE, loss.foreign.pad):
        one = replace(loss, ignored=ignored)
        with contextlib.suppress(Exception):  # a stranger's model may raise anything
            found = one.of(tokens, holes).cpu()
            # a wrong count of what is left out is a row's to find: any label is closer than none
            if torch.isfinite(found) and float((found - wanted).abs()) <= max(
                bar * float(wanted.abs()), 0.5 * float((others - wanted).abs()), 0.3 * float(wanted)
            ):
                return one
    return replace(loss, ignored=None)


def _labels(tokens_BT: Tensor, kind: Loss) -> Tensor:
    """Return labels of which each row ignores another number, if any can be ignored."""
    labels = tokens_BT.clone()
    if kind.ignored is None:
        return labels
    for row in range(len(labels)):
        labels[row, : 1 + 2 * row] = IGNORED
    return labels


def _in_range(subject: Subject, foreign: Foreign, tokens: Tensor) -> Tensor:
    """Return labels below the number of logits, which may be fewer than tokens."""
    with torch.no_grad():
        return tokens % foreign.logits(tokens[:1]).shape[-1]


@torch.no_grad()
def loss_by_hand(subject: Subject) -> Measure:
    """The loss is the mean cross entropy over labelled tokens, each predicted from those before."""
    return _loss_by_hand(subject, LENGTH)


@torch.no_grad()
def long_loss_by_hand(subject: Subject) -> Measure:
    """The loss of a long row is its cross entropy too, however it is cut into pieces."""
    return _loss_by_hand(subject, long_of(subject))


def _loss_by_hand(subject: Subject, length: int) -> Measure:
    kind = _learner(subject)
    foreign, tokens = kind.foreign, tokens_of(subject, 3, length, seed=141)
    labels = _labels(_in_range(subject, foreign, tokens), kind)
    result = kind.call(tokens, labels)
    loss, logits = wide(kind.of(tokens, labels).cpu()), foreign.logits(tokens)
    bar, gaps = tolerance_of(logits, subject), Gaps()
    by_hand = kind.by_hand(logits, labels)
    gaps.compare(loss, by_hand.to(loss))
    limit = ""
    if gaps.worst > bar:
        other = replace(kind, shift=not kind.shift).by_hand(logits, labels)
        if gap(loss, other.to(loss)) / float(other) <= bar:
            # One that reads both ways, or has inputs of its own, predicts each label where it is.
            limit = "labels are not shifted: give them shifted by one" if kind.shift else ""
        added = (
            [name for name in result if any(word in name for word in ADDED) and name != "logits"]
            if isinstance(result, Mapping)
            else []
        )
        if added:
            limit = f"the loss adds {', '.join(added)}"
        limit = limit or _penalty(subject, kind, float(loss - by_hand), bar)
    place = f"{float(loss):.6g}, by hand {float(by_hand):.6g}"
    measure = gaps.measure(bar, f"{subject.size}, T{length}", limit=limit)
    note = place if gaps.worst > bar else ""
    return Measure(measure.worst, bar, measure.size, note, rounding=bar, limit=limit)


def _penalty(subject: Subject, kind: Loss, added: float, bar: float) -> str:
    """Return the limit of a loss that adds the same to every batch: a term of the weights alone."""
    for rows, length, seed in ((2, LENGTH, 138), (1, 5, 139), (4, 8, 140)):
        tokens = tokens_of(subject, rows, length, seed=seed)
        labels = _in_range(subject, kind.foreign, tokens)
        if kind.ignored is not None:
            labels[:, 0] = IGNORED
        by_hand = kind.by_hand(kind.foreign.logits(tokens), labels)
        loss = float(kind.of(tokens, labels))
        if not abs(loss - float(by_hand) - added) <= bar * abs(loss):
            return ""
    return f"the loss adds {added:.6g} to every batch, whatever its tokens: a term of the weights"


@torch.no_grad()
def padding_in_the_loss(subject: Subject) -> Measure:
    """A padded batch has the loss of its rows alone, weighted by their labelled tokens."""
    kind = _learner(subject)
    foreign = kind.foreign
    if foreign.mask_name is None or kind.ignored is None:
        lacking = "takes no mask" if foreign.mask_name is None else "leaves no label out"
        raise NotOffered(f"its forward {lacking}")
    tokens = tokens_of(subject, 3, LENGTH, seed=142)
    T = tokens.shape[1]
    lengths = [T, max(2, T - 3), max(2, T - 6)]
    valid = torch.arange(T)[None] < torch.tensor(lengths)[:, None]
    labels = torch.where(valid, _in_range(subject, foreign, tokens), IGNORED)
    labels[:, 0] = IGNORED  # which only a model with positions of its own could predict
    padded = torch.where(valid, tokens, foreign.pad)
    together = wide(kind.of(padded, labels, valid).cpu())
    total, among = 0.0, kind.count(labels)
    for row, length in enumerate(lengths):
        one, its = tokens[row : row + 1, :length], labels[row : row + 1, :length]
        total += kind.weight(its, among) * float(kind.of(one, its))
    gaps = Gaps()
    wanted = torch.tensor(total).to(together)
    gaps.compare(together, wanted)
    bar = tolerance_of(foreign.logits(tokens[:1]), subject)
    note = f"{float(together):.6g}, alone {float(wanted):.6g}" if gaps.worst > bar else ""
    limit = _unshifted(subject) if gaps.worst > bar else ""
    return Measure(gaps.worst, bar, subject.size, note, rounding=bar, limit=limit)


def _unshifted(subject: Subject) -> str:
    """Return the limit of a loss that is no plain mean, which a row of its own reports."""
    found = loss_by_hand(subject)
    return found.limit if not found.holds else ""


# --- gradients ----------------------------------------------------------------------------------


def _gradients(foreign: Foreign, losses: Callable[[], Iterator[Tensor]]) -> dict[str, Tensor]:
    """Return the summed gradients of the losses, in training mode without dropout."""
    parameters = {n: p for n, p in foreign.module.named_parameters() if p.requires_grad}
    if not parameters:
        raise NotOffered("every parameter is frozen")
    for p in parameters.values():
        p.grad = None
    try:
        with training(foreign.module):
            for loss in losses():
                loss.backward()
        return {n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None}
    finally:
        for p in parameters.values():
            p.grad = None


def _compare_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Return the worst relative gap; a tensor of tiny gradients counts at a thousandth of all."""
    if set(ours) != set(theirs):
        return float("inf"), f"gradients of {sorted(set(ours) ^ set(theirs))[:3]} on one side only"
    floor = 1e-3 * max((float(g.abs().max()) for g in theirs.values() if g.numel()), default=0.0)
    worst, place = 0.0, ""
    for name, gradient in theirs.items():
        if gradient.numel():
            scale = max(float(gradient.abs().max()), floor) or 1.0
            apart = gap(ours[name], gradient) / scale
            if not apart <= worst:
                worst, place = apart, name
    return worst, place


def _gradient_bar(foreign: Foreign, ask: Callable[[], dict[str, Tensor]]) -> float:
    """Return the tolerance of gradients: a multiple of what the last bit of each weight changes."""
    plain, changes = ask(), []
    parameters = list(foreign.module.parameters())
    for seed in (1, 2, 3):
        with nudged(parameters, seed=seed):
            changes.append(_compare_gradients(ask(), plain)[0])
    dtype = parameters[0].dtype
    return UNITS[dtype] * max(statistics.median(changes), torch.finfo(dtype).eps)


def accumulated(subject: Subject) -> Measure:
    """Gradients added over parts, weighted by labelled tokens, are those of one batch."""
    kind = _learner(subject)
    foreign, tokens = kind.foreign, tokens_of(subject, 3, LENGTH, seed=143)
    labels = _labels(_in_range(subject, foreign, tokens), kind)
    among = kind.count(labels)
    rows = [(tokens[row : row + 1], labels[row : row + 1]) for row in range(3)]

    def whole() -> dict[str, Tensor]:
        return _gradients(foreign, lambda: iter([kind.of(tokens, labels)]))

    def parts() -> Iterator[Tensor]:
        for one, its in rows:
            yield kind.of(one, its) * kind.weight(its, among)

    bar = _gradient_bar(foreign, whole)
    worst, place = _compare_gradients(_gradients(foreign, parts), whole())
    limit = _unshifted(subject) if worst > bar else ""
    if worst <= bar and (foreign.any_argument or foreign.offers("num_items_in_batch")):

        def counted() -> Iterator[Tensor]:
            for one, its in rows:
                yield kind.of(one, its, num_items_in_batch=torch.tensor(among))

        try:
            worst, place = _compare_gradients(_gradients(foreign, counted), whole())
        except Exception as error:  # a stranger's model may raise anything
            place = f"num_items_in_batch is refused: {short(error)}"
        else:
            limit = "num_items_in_batch is ignored: weigh the parts yourself" if worst > bar else ""
    note = f"worst at {place}" if worst > bar else ""
    return Measure(worst, bar, subject.size, note, rounding=bar, limit=limit)


def checkpointed(subject: Subject) -> Measure:
    """Gradient checkpointing changes no gradient."""
    foreign = subject.stranger()
    module: Any = inner(foreign.module)
    if not callable(getattr(module, "gradient_checkpointing_enable", None)):
        raise NotOffered("it has no gradient checkpointing")
    if getattr(module, "supports_gradient_checkpointing", True) is False:
        raise NotOffered("it does not support gradient checkpointing")
    tokens = tokens_of(subject, 2, LENGTH, seed=144)
    with torch.no_grad():
        shape = foreign.logits(tokens).shape
    push = torch.randn(shape, generator=torch.Generator().manual_seed(145))

    def ask() -> dict[str, Tensor]:
        def losses() -> Iterator[Tensor]:
            logits = foreign.logits(
                tokens, None, **({"use_cache": False} if foreign.cache_name else {})
            )
            kept = logits.abs() < 1e30
            yield (wide(torch.where(kept, logits, 0.0)) * push).sum()

        return _gradients(foreign, losses)

    bar, plain = _gradient_bar(foreign, ask), ask()
    module.gradient_checkpointing_enable()
    try:
        worst, place = _compare_gradients(ask(), plain)
    finally:
        module.gradient_checkpointing_disable()
    note = f"worst at {place}" if worst > bar else ""
    return Measure(worst, bar, subject.size, note, rounding=bar)


@torch.no_grad()
def packed(subject: Subject) -> Measure:
    """Two sequences in one row, positions counted anew, have the logits they have alone."""
    foreign = subject.stranger()
    foreign.needs("position_ids")
    if foreign.kind != "decoder" or not subject.per_position:
        raise NotOffered("it does not continue text")
    tokens = tokens_of(subject, 1, LENGTH, seed=146)
    T = tokens.shape[1]
    half = T // 2
    segments = (torch.arange(T) >= half).long()
    positions = torch.cat((torch.arange(half), torch.arange(T - half)))[None]
    positions = positions + foreign.first_position
    alone = torch.cat(
        [
            foreign.logits(part, position_ids=foreign.positions(torch.ones_like(part)))
            for part in (tokens[:, :half], tokens[:, half:])
        ],
        1,
    )
    bar = tolerance_of(alone, subject)
    by_positions, by_mask = Gaps(), Gaps()
    uncached: dict[str, Any] = {"use_cache": False} if foreign.cache_name is not None else {}
    with by_positions.attempt("position_ids"):
        given = foreign.logits(tokens, None, position_ids=positions, **uncached)
        by_positions.compare(given, alone)
    if by_positions.compared and by_positions.worst <= bar:
        return by_positions.measure(bar, subject.size)
    allow = (segments[:, None] == segments[None]) & torch.ones(T, T, dtype=torch.bool).tril()
    bias = torch.where(allow, 0.0, torch.finfo(alone.dtype).min).to(alone.dtype)
    for mask in (allow, bias):
        with by_mask.attempt("a mask of (B, 1, T, T)"):
            extra = {"attention_mask": mask[None, None], "position_ids": positions, **uncached}
            found = Gaps()
            found.compare(foreign.logits(tokens, None, **extra), alone)
            if found.worst <= bar:
                limit = "position_ids alone do not keep them apart; a mask of (B, 1, T, T) does"
                return (
                    by_positions.measure(bar, subject.size, limit=limit)
                    if (by_positions.compared)
                    else found.measure(bar, subject.size)
                )
    return by_positions.measure(
        bar, subject.size, limit="packed sequences are not kept apart: give each a row of its own"
    )


# --- files and ties -----------------------------------------------------------------------------


@torch.no_grad()
def saved_folder(subject: Subject) -> Measure:
    """`save_pretrained` and `from_pretrained` give the same bits in a new object."""
    foreign = subject.stranger()
    module: Any = foreign.module
    if not callable(getattr(type(module), "save_pretrained", None)):
        if callable(getattr(inner(module), "save_pretrained", None)):
            raise NotOffered("it is part of another module, which saves it in its own way")
        raise NotOffered("it has no save_pretrained")
    if has_replaced_forward(module):
        raise NotOffered("its forward was exchanged on this object, and no folder holds that")
    tokens, gaps = tokens_of(subject, 2, LENGTH, seed=147), Gaps()
    plain = foreign.logits(tokens)
    with TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):  # progress bars
        folder = Path(place) / "saved"
        module.save_pretrained(folder)
        again = _read_back(module, folder)
        saved = dict(module.named_parameters())
        for name, loaded in again.named_parameters():
            if name in saved:  # some read everything as float32
                loaded.data = loaded.data.to(saved[name].dtype)
        gaps.compare(foreign.twin(again.to(foreign.device)).logits(tokens), plain)
    untied = _ties(module) - _ties(again)
    if untied:
        return Measure(float("inf"), 0.0, subject.size, f"tied no more: {sorted(untied)[0]}")
    return gaps.measure(tolerance_of(plain, subject), subject.size, exact=True)


def _read_back(module: Any, folder: Path) -> Any:
    """Return what `from_pretrained` reads: from a folder, or for adapters into a bare model."""
    read = type(module).from_pretrained
    needed = [
        p
        for p in inspect.signature(read).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if len(needed) <= 1:
        return read(folder)
    twin = copied(module)
    bare = next(
        (
            getattr(twin, name)
            for name in ("unload", "get_base_model")
            if callable(getattr(twin, name, None))
        ),
        None,
    )
    if len(needed) > 2 or bare is None:
        raise NotOffered(f"its from_pretrained wants {', '.join(p.name for p in needed)}")
    return read(bare(), folder)


def _ties(module: Any) -> set[tuple[str, ...]]:
    """Return the names of parameters that share one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(sorted(group)) for group in names.values() if len(group) > 1}


def tied(subject: Subject) -> Measure:
    """The head shares the embedding where the config says so; no weight is a copy of another."""
    foreign = subject.stranger()
    module: Any = inner(foreign.module)
    table, head = (
        getattr(module, name, None) for name in ("get_input_embeddings", "get_output_embeddings")
    )
    wanted = getattr(getattr(module, "config", None), "tie_word_embeddings", None)
    if wanted and callable(table) and callable(head) and head() is not None:
        if head().weight.shape != table().weight.shape:
            raise NotOffered("head and embedding have other shapes")
        shared = head().weight is table().weight
        decoder = getattr(module, "get_decoder", None)
        if not shared and foreign.kind == "encoder-decoder" and callable(decoder):
            shared = head().weight is decoder().get_input_embeddings().weight
        note = "" if shared else "config.tie_word_embeddings, yet the head has a weight of its own"
        return Measure(0.0 if shared else 1.0, 0.0, subject.size, note)
    if not _ties(module):
        raise NotOffered("nothing is tied")
    lost = _ties(module) - _ties(copied(module))
    return Measure(float(len(lost)), 0.0, subject.size, f"lost in a copy: {sorted(lost)[:1]}")


@torch.no_grad()
def ties_reloaded(subject: Subject) -> Measure:
    """A weight under two names is one tensor after reloading too, and moves what both compute."""
    foreign = subject.stranger()
    module = inner(foreign.module)
    ties = _ties(module)
    if not ties:
        raise NotOffered("nothing is tied")
    again = foreign.reloaded()
    lost = ties - _ties(inner(again.module))
    if lost:
        return Measure(float(len(lost)), 0.0, subject.size, f"tied no more: {sorted(lost)[0]}")
    tokens, gaps = tokens_of(subject, 2, LENGTH, seed=149), Gaps()
    for twin in (again, foreign.twin(copied(foreign.module))):
        held = dict(inner(twin.module).named_parameters(remove_duplicate=False))
        for group in ties:
            held[group[0]].mul_(1.25)
        gaps.compare(twin.logits(tokens), foreign.twin(_scaled(foreign, ties)).logits(tokens))
    return gaps.measure(tolerance_of(foreign.logits(tokens[:1]), subject), subject.size)


def _scaled(foreign: Foreign, ties: set[tuple[str, ...]]) -> Any:
    """Return a copy in which each tied weight was written through every one of its names."""
    twin = copied(foreign.module)
    state = inner(twin).state_dict()
    for group in ties:
        wanted = state[group[0]] * 1.25 if group[0] in state else None
        for name in group:
            if wanted is not None and name in state:
                state[name].copy_(wanted)
    return twin


@torch.no_grad()
def adapters_merged(subject: Subject) -> Measure:
    """Adapters merged into the weights compute what they compute beside them; unmerged too."""
    foreign = subject.stranger()
    module: Any = foreign.module
    if not callable(getattr(module, "merge_adapter", None)):
        raise NotOffered("it has no adapters to merge")
    tokens, gaps = tokens_of(subject, 3, LENGTH, seed=148), Gaps()
    plain = foreign.logits(tokens)
    twin = foreign.twin(copied(module))
    merged: Any = twin.module
    merged.merge_adapter()
    gaps.compare(twin.logits(tokens), plain, "merged")
    merged.unmerge_adapter()
    gaps.compare(twin.logits(tokens), plain, "merged and unmerged")
    return gaps.measure(tolerance_of(plain, subject), subject.size)
