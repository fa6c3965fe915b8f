"""Rows for modules of other libraries: losses, gradients, and what is saved.

A loss is compared with the mean cross entropy over the labelled tokens, computed here; gradients
are compared tensor by tensor, and may differ by a multiple of their own rounding noise.
"""

import contextlib
import copy
import inspect
import io
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glasscheck.foreign import Foreign, has_replaced_forward, inner, training
from glasscheck.measure import (
    UNITS,
    Gaps,
    Measure,
    NotOffered,
    gap,
    nudged,
    short,
)
from glasscheck.rows.invariants import LENGTH, tokens_of, tolerance_of
from glasscheck.subject import Subject

# B batch, T length, V vocab

IGNORED = -100
#: Words in the names of results that a loss counts besides the next token's cross entropy.
ADDED = ("aux", "z_loss", "logits")


def _learner(subject: Subject) -> Foreign:
    foreign = subject.stranger()
    foreign.needs("labels")
    if not subject.per_position:
        raise NotOffered("it returns one result for a sequence")
    return foreign


def _labels(tokens_BT: Tensor) -> Tensor:
    """Return labels of which each row ignores another number."""
    labels = tokens_BT.clone()
    for row in range(len(labels)):
        labels[row, : 1 + 2 * row] = IGNORED
    return labels


def _loss(
    foreign: Foreign, tokens: Tensor, labels: Tensor, valid: Tensor | None = None, **extra: Any
) -> Tensor:
    result = foreign.call(tokens, valid, labels=labels, **extra)
    loss = result.get("loss") if isinstance(result, Mapping) else result[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise NotOffered("it returns no loss")
    return loss.reshape(())


def _by_hand(logits_BTV: Tensor, labels_BT: Tensor, *, shift: bool) -> Tensor:
    """Return the mean cross entropy over labelled tokens."""
    if shift:
        logits_BTV, labels_BT = logits_BTV[:, :-1], labels_BT[:, 1:]
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED
    )


def _shifts(foreign: Foreign) -> bool:
    """True if labels are the tokens themselves, to be predicted one position earlier."""
    return foreign.kind == "decoder"


def _in_range(subject: Subject, foreign: Foreign, tokens: Tensor) -> Tensor:
    """Return labels below the number of logits, which may be fewer than tokens."""
    with torch.no_grad():
        return tokens % foreign.logits(tokens[:1]).shape[-1]


@torch.no_grad()
def loss_by_hand(subject: Subject) -> Measure:
    """The loss is the mean cross entropy over labelled tokens, each predicted from those before."""
    foreign = _learner(subject)
    tokens = tokens_of(subject, 3, LENGTH, seed=141)
    labels = _labels(_in_range(subject, foreign, tokens))
    result = foreign.call(tokens, labels=labels)
    loss, logits = _loss(foreign, tokens, labels).cpu().float(), foreign.logits(tokens)
    bar, shift, gaps = tolerance_of(logits, subject), _shifts(foreign), Gaps()
    by_hand = _by_hand(logits, labels, shift=shift)
    gaps.compare(loss, by_hand)
    limit = ""
    if gaps.worst > bar:
        other = _by_hand(logits, labels, shift=not shift)
        if gap(loss, other) / float(other) <= bar:
            # One that reads both ways, or has inputs of its own, predicts each label where it is.
            limit = "labels are not shifted: give them shifted by one" if shift else ""
        added = (
            [name for name in result if any(word in name for word in ADDED) and name != "logits"]
            if isinstance(result, Mapping)
            else []
        )
        if added:
            limit = f"the loss adds {', '.join(added)}"
        limit = limit or _penalty(subject, foreign, float(loss - by_hand), bar)
    place = f"{float(loss):.6g}, by hand {float(by_hand):.6g}"
    measure = gaps.measure(bar, subject.size, limit=limit)
    note = place if gaps.worst > bar else ""
    return Measure(measure.worst, bar, subject.size, note, rounding=bar, limit=limit)


def _penalty(subject: Subject, foreign: Foreign, added: float, bar: float) -> str:
    """Return the limit of a loss that adds the same to every batch: a term of the weights alone."""
    for rows, length, seed in ((2, LENGTH, 138), (1, 5, 139), (4, 8, 140)):
        tokens = tokens_of(subject, rows, length, seed=seed)
        labels = _in_range(subject, foreign, tokens)
        labels[:, 0] = IGNORED
        by_hand = _by_hand(foreign.logits(tokens), labels, shift=_shifts(foreign))
        loss = float(_loss(foreign, tokens, labels))
        if not abs(loss - float(by_hand) - added) <= bar * abs(loss):
            return ""
    return f"the loss adds {added:.6g} to every batch, whatever its tokens: a term of the weights"


def _count(labels: Tensor, *, shift: bool) -> int:
    return int(((labels[:, 1:] if shift else labels) != IGNORED).sum())


@torch.no_grad()
def padding_in_the_loss(subject: Subject) -> Measure:
    """A padded batch has the loss of its rows alone, weighted by their labelled tokens."""
    foreign = _learner(subject)
    if foreign.mask_name is None:
        raise NotOffered("its forward takes no mask")
    tokens = tokens_of(subject, 3, LENGTH, seed=142)
    T, shift = tokens.shape[1], _shifts(foreign)
    lengths = [T, max(2, T - 3), max(2, T - 6)]
    valid = torch.arange(T)[None] < torch.tensor(lengths)[:, None]
    labels = torch.where(valid, _in_range(subject, foreign, tokens), IGNORED)
    labels[:, 0] = IGNORED  # which only a model with positions of its own could predict
    padded = torch.where(valid, tokens, foreign.pad)
    together = _loss(foreign, padded, labels, valid).cpu().float()
    total, weight = 0.0, 0
    for row, length in enumerate(lengths):
        one, its = tokens[row : row + 1, :length], labels[row : row + 1, :length]
        count = _count(its, shift=shift)
        total += count * float(_loss(foreign, one, its))
        weight += count
    gaps = Gaps()
    wanted = torch.tensor(total / weight)
    gaps.compare(together, wanted)
    bar = tolerance_of(foreign.logits(tokens[:1]), subject)
    note = f"{float(together):.6g}, alone {float(wanted):.6g}" if gaps.worst > bar else ""
    limit = _unshifted(subject, foreign) if gaps.worst > bar else ""
    return Measure(gaps.worst, bar, subject.size, note, rounding=bar, limit=limit)


def _unshifted(subject: Subject, foreign: Foreign) -> str:
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
    foreign = _learner(subject)
    tokens = tokens_of(subject, 3, LENGTH, seed=143)
    labels = _labels(_in_range(subject, foreign, tokens))
    shift = _shifts(foreign)
    counts = [_count(labels[row : row + 1], shift=shift) for row in range(3)]

    def whole() -> dict[str, Tensor]:
        return _gradients(foreign, lambda: iter([_loss(foreign, tokens, labels)]))

    def parts() -> Iterator[Tensor]:
        for row, count in enumerate(counts):
            loss = _loss(foreign, tokens[row : row + 1], labels[row : row + 1])
            yield loss * count / sum(counts)

    bar = _gradient_bar(foreign, whole)
    worst, place = _compare_gradients(_gradients(foreign, parts), whole())
    limit = _unshifted(subject, foreign) if worst > bar else ""
    if worst <= bar and (foreign.any_argument or foreign.offers("num_items_in_batch")):

        def counted() -> Iterator[Tensor]:
            for row in range(3):
                yield _loss(
                    foreign,
                    tokens[row : row + 1],
                    labels[row : row + 1],
                    num_items_in_batch=torch.tensor(sum(counts)),
                )

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
            yield (torch.where(kept, logits, 0.0).float() * push).sum()

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
    twin = copy.deepcopy(module)
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
    twin = copy.deepcopy(module)
    lost = _ties(module) - _ties(twin)
    return Measure(float(len(lost)), 0.0, subject.size, f"lost in a copy: {sorted(lost)[:1]}")


@torch.no_grad()
def adapters_merged(subject: Subject) -> Measure:
    """Adapters merged into the weights compute what they compute beside them; unmerged too."""
    foreign = subject.stranger()
    module: Any = foreign.module
    if not callable(getattr(module, "merge_adapter", None)):
        raise NotOffered("it has no adapters to merge")
    tokens, gaps = tokens_of(subject, 3, LENGTH, seed=148), Gaps()
    plain = foreign.logits(tokens)
    twin = foreign.twin(copy.deepcopy(module))
    merged: Any = twin.module
    merged.merge_adapter()
    gaps.compare(twin.logits(tokens), plain, "merged")
    merged.unmerge_adapter()
    gaps.compare(twin.logits(tokens), plain, "merged and unmerged")
    return gaps.measure(tolerance_of(plain, subject), subject.size)
