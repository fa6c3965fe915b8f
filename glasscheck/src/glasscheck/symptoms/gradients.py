"""Mistakes that one call and one backward show: modes, dtypes, parameters, norms, accumulation."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glasscheck.measure import NotOffered
from glasscheck.patients import Patient
from glasscheck.setups import Symptom, ids_in, listed, mistake, passed

# B batch, T length, V classes


def dropout_in_eval(p: Patient) -> Symptom:
    """The same call in evaluation mode gives the same bits."""
    batch = p.smaller(p.need_batches()[0])
    if p.setup.evaluate is not None:
        p.model.train()
        twice = []
        with torch.no_grad():
            for seed in (1, 2):
                torch.manual_seed(seed)
                twice.append(float(p.setup.evaluate(p.model, batch)))
        if twice[0] != twice[1]:
            return mistake(
                f"evaluate() on the same batch returns {twice[0]:.6g}, then {twice[1]:.6g}",
                "model.eval()  # first line of the evaluation, model.train() after it",
            )
    p.model.eval()
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        logits = p.logits(batch).logits
        assert logits is not None
        found.append(logits.float())
    if not bool(found[0].isfinite().all()):
        raise NotOffered("the logits are not finite")
    apart = float((found[0] - found[1]).abs().max()) / (float(found[0].std()) or 1.0)
    left = [n for n, part in p.model.named_modules() if part.training]
    if apart:
        where = f"; still in training mode: {left[0]}" if left else ""
        return mistake(
            f"two calls in eval mode differ by {apart:.2g} of the logits' spread{where}",
            "F.dropout(x, p, training=self.training)  # or nn.Dropout, which eval() switches off",
        )
    return passed("two calls in eval mode give the same bits")


def dtype_range(p: Patient) -> Symptom:
    """Activations, loss and gradients are finite and far from the dtype's limits."""
    batch = p.smaller(p.need_batches()[0])
    ids = ids_in(batch)
    if ids is not None and not p.ours and ids.dtype in (torch.int8, torch.uint8, torch.int16):
        top = torch.iinfo(ids.dtype).max
        if p.classes > top + 1:
            return mistake(
                f"token ids are {str(ids.dtype)[6:]}, up to {top}, and the model has {p.classes}: "
                "larger ids wrap around",
                "input_ids.to(torch.int64)  # when they are made",
            )
    largest, bad = _activations(p, batch)
    if bad:
        return mistake(
            bad, "autocast(torch.bfloat16), float32 for norms, softmax and loss; no -1e9"
        )
    where, share = max(largest, key=lambda kv: kv[1], default=("", 0.0))
    if share > 0.1:
        return mistake(
            f"{where} reaches {share:.0%} of the largest number of its dtype", "bfloat16 or float32"
        )
    halves = {n: q for n, q in p.trainable().items() if q.dtype in (torch.float16, torch.bfloat16)}
    gradients = _half_gradients(p, batch)
    if gradients is not None:
        return gradients
    if halves and p.optimizers:
        peak = max(p.rates(min(p.steps or 1, 2_000)))
        lost = _unmoved(p, batch, peak, halves)
        if lost > 0.3:
            kind = str(next(iter(halves.values())).dtype)[6:]
            return mistake(
                f"at a rate of {peak:.1e}, {lost:.0%} of the {kind} weights stay where they are: "
                "the step is below their rounding",
                "float32 weights with torch.autocast(..., torch.bfloat16)",
            )
    return passed(f"finite; the largest activation is {share:.1g} of its dtype's range")


def _activations(p: Patient, batch: Any) -> tuple[list[tuple[str, float]], str]:
    """Return each module's largest output as a share of its dtype's range; the first bad one."""
    largest: list[tuple[str, float]] = []
    bad: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            for t in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(t, Tensor) and t.is_floating_point() and t.numel():
                    if t.dtype in (torch.float16,):
                        top = float(t.detach().abs().max()) / torch.finfo(t.dtype).max
                        largest.append((name or "the model", top))
                    if bool(t.detach().isnan().any()) or bool((t.detach() == math.inf).any()):
                        bad.append(f"{name or 'the model'} returns numbers that are not finite")

        return hook

    handles = [part.register_forward_hook(note(name)) for name, part in p.model.named_modules()]
    p.model.train()
    try:
        loss = p.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not bad and not bool(loss.detach().isfinite()):
        bad.append(f"the loss is {float(loss.detach())} in {str(loss.dtype)[6:]}")
    return largest, bad[0] if bad else ""


def _half_gradients(p: Patient, batch: Any) -> Symptom | None:
    """Find gradients in float16 that are not finite, or are below its smallest number."""
    gradients = _gradients(p, [batch])
    broken = [n for n, g in gradients.items() if g is not None and not bool(g.isfinite().all())]
    if broken:
        return mistake(
            f"the gradient of {listed(broken)} not finite",
            "torch.amp.GradScaler(), or bfloat16; F.cross_entropy on logits.float()",
        )
    tables = {id(m.weight) for m in p.model.modules() if isinstance(m, nn.Embedding)}
    half = p.setup.autocast == torch.float16
    named, zeros, total = dict(p.model.named_parameters()), 0, 0
    for name, g in gradients.items():
        if g is None or id(named[name]) in tables or g.ndim < 2:
            continue
        if g.dtype == torch.float16 or half:
            zeros, total = zeros + int((g == 0).sum()), total + g.numel()
    if total and zeros > 0.3 * total:
        return mistake(
            f"{zeros / total:.0%} of the gradients in float16 are 0: below its smallest number",
            "scaler = torch.amp.GradScaler(); scaler.scale(loss).backward()",
        )
    return None


def _unmoved(p: Patient, batch: Any, rate: float, halves: dict[str, nn.Parameter]) -> float:
    """Return the share of half-precision weights with a gradient that a step leaves unchanged."""
    still = total = 0
    with p.fresh():
        before = {n: q.detach().clone() for n, q in halves.items()}
        p.train_step([batch], rate=rate)
        for n, q in halves.items():
            if q.grad is not None:
                has = q.grad != 0
                still += int(((q.detach() == before[n]) & has).sum())
                total += int(has.sum())
    return still / total if total else 0.0


def _gradients(p: Patient, batches: Sequence[Any]) -> dict[str, Tensor | None]:
    """Return the gradients of some batches' losses, in training mode."""
    p.model.train()
    for q in p.model.parameters():
        q.grad = None
    torch.manual_seed(0)
    for batch in batches:
        loss = p.loss(batch)
        if not loss.requires_grad:
            raise NoGradient
        loss.backward()
    found = {n: q.grad for n, q in p.model.named_parameters()}
    for q in p.model.parameters():
        q.grad = None
    return found


class NoGradient(Exception):
    """The loss does not depend on any parameter that trains."""


def frozen_or_unused(p: Patient) -> Symptom:
    """Every parameter has a gradient, or is frozen as a whole kind.

    Where a factor begins at 0 (LoRA, gates) others have no gradient in the first step; so a step is
    made before a parameter counts as unused.
    """
    named = dict(p.model.named_parameters())
    trainable = p.trainable()
    if not trainable:
        return mistake("no parameter requires a gradient", "p.requires_grad_(True)")
    held = {id(q) for o in p.optimizers for g in o.param_groups for q in g["params"]}
    meant = p.setup.frozen
    still = [n for n, q in named.items() if not q.requires_grad and not n.startswith(meant or "\0")]
    frozen = [n for n in still if id(named[n]) in held and not _adapted(named)]
    odd = frozen or _irregular(still, list(trainable))
    if odd:
        where = "in the optimizer" if frozen else "its like in other layers trains"
        return mistake(
            f"{listed(odd)} frozen; {where}",
            f"model.get_parameter({odd[0]!r}).requires_grad_(True)  # or Setup(frozen=...)",
        )
    batches = [p.smaller(b) for b in p.need_batches()[:4]]
    try:
        unused = _without_gradient(p, batches)
        if unused:
            with p.fresh():
                quick = torch.optim.AdamW(trainable.values(), lr=1e-3, weight_decay=0.0)
                _gradients_into(p, batches)
                quick.step()
                unused = [n for n in unused if n in _without_gradient(p, batches)]
    except NoGradient:
        return mistake(
            "the loss does not depend on any parameter: a detach, .item() or no_grad is on the way",
            "loss = F.cross_entropy(model(x), y)  # outside torch.no_grad(), without .detach()",
        )
    if unused:
        share = sum(named[n].numel() for n in unused) / sum(q.numel() for q in trainable.values())
        return mistake(
            f"{listed(unused)} without a gradient ({share:.1%} of what should train): not used in "
            "the forward, or behind a detach",
            "call it in forward(), or delete it",
        )
    left = f"; {len(still)} frozen, all of a kind" if still else ""
    return passed(f"all {len(trainable)} parameters have a gradient{left}")


def _gradients_into(p: Patient, batches: Sequence[Any]) -> None:
    """Leave the gradients of some batches in the parameters."""
    found = _gradients(p, batches)
    for n, q in p.model.named_parameters():
        q.grad = found[n]


def _without_gradient(p: Patient, batches: Sequence[Any]) -> list[str]:
    found = _gradients(p, batches)
    return [n for n in p.trainable() if (g := found[n]) is None or not bool(g.any())]


def _adapted(named: dict[str, Any]) -> bool:
    return any(re.search(r"lora|adapter|prompt|ia3", name.lower()) for name in named)


def _irregular(frozen: Sequence[str], trainable: Sequence[str]) -> list[str]:
    """Return frozen parameters whose like in other layers trains; the first layers may be."""

    def kind(name: str) -> tuple[str, int]:
        found = re.search(r"\.(\d+)\.", f".{name}.")
        return re.sub(r"\.\d+\.", ".#.", f".{name}.", count=1), int(found[1]) if found else -1

    living: dict[str, list[int]] = {}
    for name in trainable:
        key, layer = kind(name)
        living.setdefault(key, []).append(layer)
    deepest = max((kind(n)[1] for n in [*frozen, *trainable]), default=-1)
    whole = {
        layer for layer in range(deepest + 1) if not any(kind(n)[1] == layer for n in trainable)
    }
    first = 0
    while first in whole:
        first += 1
    return [
        n for n in frozen if (k := kind(n))[1] >= 0 and k[0] in living and not k[1] < first
    ] or [n for n in frozen if kind(n)[1] < 0 and _alone(n, frozen, trainable)]


def _alone(name: str, frozen: Sequence[str], trainable: Sequence[str]) -> bool:
    """True if a frozen parameter outside the layers is one half of a module that trains."""
    owner = name.rpartition(".")[0]
    halves = [n for n in trainable if n.rpartition(".")[0] == owner and owner]
    return bool(halves) and "position" not in name


def gradient_norms(p: Patient) -> Symptom:
    """Gradients of like layers are alike, and the norm of all of them is neither 0 nor huge."""
    batches = [p.smaller(b) for b in p.need_batches()[:2]]
    try:
        found = _gradients(p, batches)
    except NoGradient as error:
        raise NotOffered("the loss has no gradient") from error
    endless = [n for n, g in found.items() if g is not None and not bool(g.isfinite().all())]
    if endless:
        return mistake(
            f"the gradient of {listed(endless)} not finite",
            "a norm before each part, initial weights of std 0.02, a mean loss",
        )
    norms = {
        n: float(g.float().norm()) / len(batches)
        for n, g in found.items()
        if g is not None and bool(g.any())
    }
    if not norms:
        raise NotOffered("every gradient is 0")
    matrices = {n for n, g in found.items() if g is not None and g.ndim > 1}
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    layers: dict[str, dict[int, float]] = {}
    for name, norm in norms.items():
        where = re.match(r"(.*?)\.(\d+)\.", f"{name}.")
        if where and name in matrices and not _adapted({name: 0}):
            own = layers.setdefault(where[1], {})
            own[int(where[2])] = math.hypot(own.get(int(where[2]), 0.0), norm)
    for place, own in layers.items():
        if len(own) < 2:
            continue
        high, low = max(own, key=lambda i: own[i]), min(own, key=lambda i: own[i])
        ratio = own[high] / own[low]
        # Residual blocks of one width differ by a few times; each factor of 10 is a layer lost.
        if ratio > 50:
            return mistake(
                f"the gradient of {place}.{high} is {own[high]:.2g}, of {place}.{low} "
                f"{own[low]:.2g}: {ratio:.0f} times as large",
                "residual connections, a norm before each part, equal initial scales",
            )
    # With a mean loss of a few nats, logits of spread 1 give a norm near 1.
    if total > 300 or total < 1e-5:
        return mistake(
            f"the norm of the gradient is {total:.2g}",
            "a mean loss, initial weights of std 0.02, clip_grad_norm_(parameters, 1.0)",
        )
    parts = [own for own in layers.values() if len(own) > 1]
    apart = max((max(own.values()) / min(own.values()) for own in parts), default=1.0)
    return passed(f"norm {total:.2g}; layers differ by a factor of {apart:.1f}")


def accumulation(p: Patient) -> Symptom:
    """Every token of a step of several batches has the same weight, and they sum to 1."""
    count = p.accumulate
    if count < 2 and p.setup.step_loss is None:
        raise NotOffered("one batch a step")
    batches = [p.smaller(b) for b in p.need_batches(2)[: max(2, min(count, 4))]]
    if p.ours:
        p.model.eval()
        with torch.no_grad():
            together = float(p.loss_of_step(batches))
            sizes = [float(sum(v.counted.sum() for v in p.read(b)[:1])) for b in batches]
            means = [float(p.loss(b)) for b in batches]
        apart = abs(together - sum(s * m for s, m in zip(sizes, means, strict=True)) / sum(sizes))
        return passed(f"tokens weigh the same in {len(batches)} batches (gap {apart:.0e})")
    p.model.eval()
    with p.recorded() as calls:
        loss = p.loss_of_step(batches)
    weights: list[float] = []
    total = 0.0
    for call in calls:
        view = p.view(call, loss, batches[0]) if call.logits is not None else None
        if view is None or not view.recovered:
            continue
        number = int(view.counted.sum())
        weights.append(float(view.weights.sum()) / max(1, number))
        total += float(view.weights.sum())
    if len(weights) < 2:
        raise NotOffered("the weights of the targets cannot be read from the loss")
    apart = max(weights) / max(min(weights), 1e-30)
    # Rows are often of similar lengths; a twentieth is what no one would notice in a mean.
    if apart > 1.05:
        return mistake(
            f"a target of one batch weighs {apart:.2f} times as much as one of another: a mean of "
            "means",
            "loss = summed / tokens_of_all_batches  # F.cross_entropy(..., reduction='sum')",
        )
    if not 0.5 < total < 1.5:
        return mistake(
            f"the weights of a step's targets sum to {total:.3g}, not 1: the rate is off by that",
            f"(loss / {len(batches)}).backward()",
        )
    return passed(f"targets of {len(weights)} batches weigh the same, within {apart - 1:.1%}")
