"""A set-up that can be called, read and trained for some steps, and is put back afterwards.

A loss function is a black box that calls a model. What it does is read from two sides: hooks record
the tokens, the mask and the logits of that call, and the gradient of the loss by the logits gives
the target and the weight of every position, since the cross-entropy's gradient is
weight * (softmax(logits) - one_hot(target)). So shifts, masks and means of any library are seen as
they are, not as its arguments are named.
"""

import contextlib
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasscheck.foreign import LENGTHS, MASK_ARGUMENTS, config_of, device_of, number
from glasscheck.measure import NotOffered
from glasscheck.setups import (
    IGNORED,
    TOKEN_KEYS,
    Setup,
    cut,
    first_batches,
    ids_in,
    is_ids,
    labels_in,
    logits_in,
    loss_in,
    mapped,
    mask_in,
)

# B batch, T length, V classes

#: Batches that go through the model, and examples of a split that are read as data.
BATCHES, EXAMPLES = 8, 2_000
#: Numbers in the logits of one call: more rows than that are left out.
LOGITS = 4_000_000
MASK_KEYS = ("decoder_attention_mask", *MASK_ARGUMENTS)
#: torch's own name for a mask with the other polarity: True = padding.
PAD_MASK_KEYS = ("src_key_padding_mask", "key_padding_mask", "padding_mask", "tgt_key_padding_mask")


@dataclass(kw_only=True, slots=True)
class View:
    """One head's targets in a batch, as the loss uses them.

    targets and weights are (B, T), or (B,) for one answer a sequence; a weight of 0 does not count,
    and the weights of a mean sum to 1. `recovered` is False where the loss has no logits to be read
    from, and targets are those of the batch.
    """

    head: str
    tokens: Tensor | None
    valid: Tensor | None
    targets: Tensor
    weights: Tensor
    logits: Tensor
    loss: float
    recovered: bool = True
    misfit: float = 0.0  # of the gradient, as a share, from that of a cross-entropy

    @property
    def per_position(self) -> bool:
        """True if there is a target at each position."""
        return self.targets.ndim == 2

    @property
    def counted(self) -> Tensor:
        """True where a target counts."""
        return self.weights > 1e-4 * self.weights.max().clamp(min=1e-30)

    def shift(self) -> tuple[int, float]:
        """Return the distance at which targets are the model's own input, and the share that are.

        1 is the next token.
        """
        if not self.per_position or self.tokens is None or self.tokens.shape != self.targets.shape:
            return 1, 0.0
        best = (1, 0.0)
        T, counted = self.tokens.shape[1], self.counted
        for k in (k for k in (1, 0, 2, -1, 3, -2) if abs(k) < T):
            here = slice(max(0, -k), T - max(0, k))
            there = slice(max(0, k), T - max(0, -k))
            real = counted[:, here]
            if int(real.sum()) < 8:
                continue
            same = (self.targets[:, here] == self.tokens[:, there])[real].float().mean()
            if float(same) > best[1] + 0.02:
                best = (k, float(same))
        return best


@dataclass(kw_only=True, slots=True)
class Call:
    """What one call of the model received and returned."""

    tokens: Tensor | None
    valid: Tensor | None
    logits: Tensor | None


@dataclass(kw_only=True, slots=True)
class Rows:
    """Examples as data: tokens without padding, and the answer, one a sequence, if there is one."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    answers: list[int | None] = field(default_factory=list)
    counted: list[int | None] = field(default_factory=list)  # targets of each that count
    labels: Counter[int] = field(default_factory=Counter)  # at every position, of all examples
    longest: int = 0  # tokens of an input; `tokens` has the last target too

    def __len__(self) -> int:
        return len(self.tokens)


class Patient:
    """A set-up that can be called, trained for some steps and read; foreign ones.

    All calls are inside `untouched`: what happens to the model is undone afterwards.
    """

    ours = False
    deadline = math.inf  # by time.perf_counter()
    knows_truth = False  # the true distribution of every target, also where an example ends

    def __init__(self, setup: Setup) -> None:
        self.setup, self.model = setup, setup.model
        self.optimizers = [] if setup.optimizer is None else [setup.optimizer]
        self.tokenizer, self.accumulate = setup.tokenizer, max(1, setup.accumulate)
        self.steps, self.floor = setup.steps, setup.entropy
        self.batches = first_batches(setup.batches, BATCHES)
        self.val_batches = first_batches(setup.val_batches, BATCHES)
        self._views: list[View] | None = None
        self.memory: dict[str, object] = {}  # what several examinations share
        groups = [g for o in self.optimizers for g in o.param_groups]
        self.base = [float(g["lr"]) for g in groups]

    # --- what there is ---

    @property
    def device(self) -> torch.device:
        """The device on which the model is."""
        return device_of(self.model)

    @property
    def classes(self) -> int:
        """The model's vocabulary, or the rows of its largest embedding."""
        rows = [p.num_embeddings for p in self.model.modules() if isinstance(p, nn.Embedding)]
        return number(config_of(self.model), "vocab_size") or max(rows, default=2)

    @property
    def context(self) -> int | None:
        """The longest input that the model says it takes."""
        return number(config_of(self.model), *LENGTHS) or number(self.model, *LENGTHS)

    def special(self, name: str) -> int | None:
        """Return the id of `pad`, `eos` or `bos`: the tokenizer's, else the config's."""
        config = config_of(self.model)
        for owner, key in (
            (self.tokenizer, f"{name}_token_id"),
            (self.tokenizer, name),
            (config, f"{name}_token_id"),
        ):
            found = getattr(owner, key, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return None

    def need_batches(self, count: int = 1) -> list[Any]:
        """Return the batches; refuse a check where there are too few."""
        if len(self.batches) < count:
            raise NotOffered("no batches were given" if not self.batches else "one batch was given")
        return self.batches

    def rate(self, step: int) -> float | None:
        """Return the learning rate of a step (from 0), or None where nobody says."""
        return self.rates(step + 1)[-1] if self.optimizers else None

    def rates(self, count: int) -> list[float]:
        """Return the planned learning rates of the first steps."""
        schedule, optimizer = self.setup.schedule, self.setup.optimizer
        if schedule is None:
            return [max(self.base, default=0.0)] * count
        if not hasattr(schedule, "state_dict"):
            return [float(schedule(step)) for step in range(count)]
        assert optimizer is not None, "a torch scheduler has its optimizer"
        kept = dict(vars(schedule))
        lists = {key: list(value) for key, value in kept.items() if isinstance(value, list)}
        groups = [dict(g) for g in optimizer.param_groups]
        found = []
        try:
            for _ in range(count):
                found.append(max(float(g["lr"]) for g in optimizer.param_groups))
                schedule.step()
        finally:
            vars(schedule).clear()
            vars(schedule).update(kept)
            vars(schedule).update(lists)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
        return found

    # --- calling ---

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, as the training differentiates it."""
        with self._precision():
            given = self.setup.loss
            found = (
                loss_in(self._called(batch))
                if given is None
                else given(self.model, self._moved(batch))
            )
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise NotOffered("no loss: give loss(model, batch)")
        return found.reshape(())

    def loss_of_step(self, batches: Sequence[Any]) -> Tensor:
        """Return the loss of a step of several batches."""
        if self.setup.step_loss is not None:
            with self._precision():
                moved = [self._moved(batch) for batch in batches]
                return self.setup.step_loss(self.model, moved).reshape(())
        return torch.stack([self.loss(batch) for batch in batches]).mean()

    def _called(self, batch: Any) -> Any:
        batch = self._moved(batch)
        takes = inspect.signature(self.model.forward).parameters
        if isinstance(batch, Mapping):
            any_key = any(p.kind is p.VAR_KEYWORD for p in takes.values())
            return self.model(**{k: v for k, v in batch.items() if any_key or k in takes})
        if isinstance(batch, (tuple, list)):
            return self.model(*batch[: len(takes)])
        return self.model(batch)

    def _moved(self, batch: Any) -> Any:
        return mapped(batch, lambda x: x.to(self.device) if isinstance(x, Tensor) else x)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self.setup.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.setup.autocast)

    @contextlib.contextmanager
    def recorded(self, change: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Call]]:
        """Record every call of the model; `change` replaces the tokens that it receives."""
        calls: list[Call] = []

        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            assert change is not None
            tokens = self._received(args, kwargs)
            if tokens is None:
                return args, kwargs
            new = change(tokens)
            swapped = {key: new if x is tokens else x for key, x in kwargs.items()}
            return tuple(new if x is tokens else x for x in args), swapped

        def after(_: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
            calls.append(_call_of(self._received(args, kwargs), args, kwargs, result))

        handles = [self.model.register_forward_hook(after, with_kwargs=True)]
        if change is not None:
            handles.append(self.model.register_forward_pre_hook(before, with_kwargs=True))
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()

    def _received(self, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the ids of which the model predicts; an encoder-decoder may make them itself."""
        try:
            given = inspect.signature(self.model.forward).bind_partial(*args, **kwargs).arguments
        except TypeError:
            given = dict(kwargs)
        given = {**given, **given.get("kwargs", {})}
        names: Sequence[str] = TOKEN_KEYS
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            names = TOKEN_KEYS[:1]
        found = next((given[key] for key in names if is_ids(given.get(key))), None)
        if found is None and names is TOKEN_KEYS:
            found = next((x for x in (*args, *kwargs.values()) if is_ids(x)), None)
        return cast("Tensor | None", found)

    def logits(self, batch: Any, change: Callable[[Tensor], Tensor] | None = None) -> Call:
        """Return the call of the model in evaluation mode, its tokens changed if requested."""
        self.model.eval()
        with torch.no_grad(), self.recorded(change) as calls:
            try:
                self.loss(batch)
            except Exception as error:  # its loss may need what is not given here
                if not calls and not isinstance(error, NotOffered):
                    raise
            if not calls:
                self._called(batch)
        found = next((call for call in calls if call.logits is not None), None)
        if found is None:
            raise NotOffered("the model's logits cannot be read from its result")
        return found

    # --- reading ---

    def smaller(self, batch: Any) -> Any:
        """Return the batch with as many rows as its logits allow."""
        tokens = ids_in(batch)
        if tokens is None:
            return batch
        rows = max(1, LOGITS // max(1, tokens.shape[-1] * self.classes))
        return batch if len(tokens) <= rows else cut(batch, rows)

    def views(self) -> list[View]:
        """Return what the loss uses of the first batches, by head; read once."""
        if self._views is None:
            self.need_batches()
            self._views = []
            for batch in self.batches[:3]:
                self._views += self.read(self.smaller(batch))
        return self._views

    def read(self, batch: Any) -> list[View]:
        """Return what the loss uses of one batch, by head."""
        self.model.eval()
        with torch.enable_grad(), self.recorded() as calls:
            loss = self.loss(batch)
        return [
            view
            for call in calls
            if call.logits is not None
            if (view := self.view(call, loss, batch)) is not None
        ][:1]

    def view(self, call: Call, loss: Tensor, batch: Any) -> View | None:
        """Return the targets and weights of one call in a loss, read from its gradient."""
        logits = cast(Tensor, call.logits)
        tokens, valid = call.tokens, call.valid
        if tokens is not None:
            valid = self.real(tokens, valid)
        gradient = None
        if logits.requires_grad and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True, retain_graph=True)
        flat = logits.detach().float()
        if gradient is None or not bool(gradient.abs().sum() > 0):
            return self._labelled(call, flat, float(loss.detach()), batch)
        gradient = gradient.float()
        if flat.ndim == 2 and tokens is not None and len(flat) == tokens.numel() != len(tokens):
            flat = flat.reshape(*tokens.shape, -1)
            gradient = gradient.reshape_as(flat)
        p = flat.softmax(-1)
        targets = gradient.argmin(-1)
        at = targets[..., None]
        own = gradient.gather(-1, at)[..., 0]
        weights = (-own / (1 - p.gather(-1, at)[..., 0]).clamp(min=1e-3)).clamp(min=0)
        wanted = weights[..., None] * (p - torch.zeros_like(p).scatter(-1, at, 1.0))
        misfit = float((gradient - wanted).norm() / gradient.norm().clamp(min=1e-30))
        return View(
            head="", tokens=tokens, valid=valid, targets=targets.cpu(), weights=weights.cpu(),
            logits=flat.cpu(), loss=float(loss.detach()), misfit=misfit,
        )  # fmt: skip

    def _labelled(self, call: Call, logits: Tensor, loss: float, batch: Any) -> View | None:
        labels = labels_in(batch)
        if labels is None or labels.shape != logits.shape[:-1]:
            return None
        weights = (labels != IGNORED).float()
        return View(
            head="", tokens=call.tokens, valid=call.valid, targets=labels.clamp(min=0).cpu(),
            weights=(weights / weights.sum().clamp(min=1)).cpu(), logits=logits.cpu(), loss=loss,
            recovered=False,
        )  # fmt: skip

    def real(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return True at real tokens: what the padding token says, else what the mask says.

        Padding is a run of that token at an end of a row. Where it also ends a text, the first
        one after the text is real.
        """
        pad = self.special("pad")
        if pad is None or not bool((tokens == pad).any()):
            return mask
        is_pad = tokens == pad
        behind = is_pad.flip(1).long().cumprod(1).flip(1).bool()
        if pad == self.special("eos"):
            first = behind & ~F.pad(behind, (1, 0))[:, :-1]
            behind = behind & ~first
        ahead = is_pad.long().cumprod(1).bool()
        ahead &= pad != self.special("bos")
        return ~(behind | ahead)

    def rows(self, split: str) -> Rows:
        """Return the examples of a split as data."""
        found = Rows()
        given = self.setup.batches if split == "train" else self.setup.val_batches
        kept = self.batches if split == "train" else self.val_batches
        source = kept if given is None or iter(given) is given else given
        for batch in source:
            tokens = ids_in(batch, encoder=True)
            if tokens is None:
                break
            labels, mask = labels_in(batch), mask_in(batch)
            real = self.real(tokens, mask)
            for i in range(len(tokens)):
                row = tokens[i] if real is None else tokens[i][real[i]]
                found.longest = max(found.longest, len(row))
                last = _last_target(tokens[i], labels[i]) if labels is not None else None
                found.tokens.append((*row.tolist(), *([] if last is None else [last])))
                one = labels is not None and labels.ndim == 1 and len(labels) == len(tokens)
                found.answers.append(int(cast(Tensor, labels)[i]) if one else None)
                count = None
                if labels is not None and labels.ndim == 2:
                    known = labels[i][labels[i] != IGNORED]
                    count = len(known)
                    found.labels.update(known.tolist())
                found.counted.append(count)
            if len(found) >= EXAMPLES:
                break
        return found

    # --- training ---

    def out_of_time(self) -> str:
        """Return the reason for what was not examined."""
        return "the time limit was reached: --time SECONDS, or seconds= in Python"

    def check_time(self) -> None:
        """End an examination that trains when the time is over."""
        if time.perf_counter() > self.deadline:
            raise NotOffered(self.out_of_time())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require a gradient."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def train_step(self, batches: Sequence[Any], *, rate: float | None = None) -> float:
        """Make one step of the set-up's optimizer; return the loss before it."""
        self.check_time()
        self.model.train()
        for p in self.model.parameters():
            p.grad = None
        loss = self.loss(batches[0]) if len(batches) == 1 else self.loss_of_step(batches)
        loss.backward()
        if self.setup.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)
        top, i = max(self.base, default=1.0) or 1.0, 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if rate is not None:
                    group["lr"] = rate * self.base[i] / top
                i += 1
            optimizer.step()
        return float(loss.detach())

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Train inside; weights, gradients and the optimizers' states are as before afterwards."""
        values = [
            (t, t.detach().clone()) for t in (*self.model.parameters(), *self.model.buffers())
        ]
        states = []
        for o in self.optimizers:
            held = {
                p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()}
                for p, s in o.state.items()
            }
            states.append((o, held, [{**g, "params": list(g["params"])} for g in o.param_groups]))
            o.state.clear()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            for o, held, groups in states:
                o.state.clear()
                o.state.update(held)
                for group, before in zip(o.param_groups, groups, strict=True):
                    group.update(before)
            for p in self.model.parameters():
                p.grad = None


def _last_target(tokens_T: Tensor, labels_T: Tensor) -> int | None:
    """Return the token that ends a text, where it is a target and no longer an input."""
    if labels_T.shape != tokens_T.shape or len(tokens_T) < 2:
        return None
    known = labels_T != IGNORED
    if not bool(known.any()) or not torch.equal(
        tokens_T[1:][known[:-1]], labels_T[:-1][known[:-1]]
    ):
        return None
    return int(labels_T[known][-1])


def _call_of(tokens: Tensor | None, args: Any, kwargs: Mapping[str, Any], result: Any) -> Call:
    valid = None
    if tokens is not None:
        same = {
            key: value
            for key, value in kwargs.items()
            if isinstance(value, Tensor) and value.shape == tokens.shape
        }
        valid = next((same[k].bool() for k in MASK_KEYS if k in same), None)
        if valid is None:
            valid = next((~same[k].bool() for k in PAD_MASK_KEYS if k in same), None)
        if valid is None:
            masks = [a for a in args if isinstance(a, Tensor) and a.dtype == torch.bool]
            valid = next((a for a in masks if a.shape == tokens.shape), None)
    return Call(
        tokens=None if tokens is None else tokens.detach().cpu().long(),
        valid=None if valid is None else valid.detach().cpu(),
        logits=logits_in(result),
    )
