"""Mistakes of the optimizer and its schedule, and those that some steps of training show.

Steps are undone: weights and the optimizer's state are put back after each examination.
"""

import math
import statistics
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glasscheck.measure import NotOffered
from glasscheck.patients import Patient, View
from glasscheck.setups import Symptom, cut, listed, mistake, passed, warning

# B batch, T length, V classes


def optimizer_coverage(p: Patient) -> Symptom:
    """Every parameter that trains is in the optimizer, once, with a rate above 0."""
    if not p.optimizers:
        raise NotOffered("no optimizer was given")
    groups = [g for o in p.optimizers for g in o.param_groups]
    held = Counter(id(q) for g in groups for q in g["params"])
    named = p.trainable()
    missing = [name for name, q in named.items() if id(q) not in held]
    own = {id(q) for q in p.model.parameters()}
    foreign = sum(count for key, count in held.items() if key not in own)
    fix = "optimizer = torch.optim.AdamW(model.parameters(), lr=lr)  # after the model is complete"
    if foreign:
        return mistake(
            f"{foreign} parameters of the optimizer are not the model's (it was changed after the "
            f"optimizer was made); {len(missing)} of {len(named)} of the model's are in none",
            fix,
        )
    if missing:
        size = sum(named[name].numel() for name in missing)
        share = size / max(1, sum(q.numel() for q in named.values()))
        return mistake(f"{listed(missing)} in no optimizer: {share:.1%} of what should train", fix)
    twice = [name for name, q in named.items() if held[id(q)] > 1]
    if twice:
        return mistake(f"{listed(twice)} in two groups: stepped twice", fix)
    still = [
        name
        for name, q in named.items()
        if any(any(q is x for x in g["params"]) and float(g["lr"]) == 0.0 for g in groups)
    ]
    if still and len(still) < len(named):
        return mistake(
            f"{listed(still)} in a group of learning rate 0", 'group["lr"] = lr  # or leave out'
        )
    return passed(f"all {len(named)} parameters, once each")


def decay_on_norms(p: Patient) -> Symptom:
    """No decay on gains and biases: it pulls a gain from 1 to 0, by lr * decay a step."""
    if not p.optimizers:
        raise NotOffered("no optimizer was given")
    gains = {
        id(q): f"{name}.{leaf}".strip(".")
        for name, part in p.model.named_modules()
        for leaf, q in part.named_parameters(recurse=False)
        if q.requires_grad
        and q.ndim <= 1
        and ("norm" in type(part).__name__.lower() or leaf == "bias")
    }
    decayed, worst = [], 0.0
    for group in (g for o in p.optimizers for g in o.param_groups):
        decay = float(group.get("weight_decay") or 0.0)
        found = [gains[id(q)] for q in group["params"] if id(q) in gains]
        if decay and found:
            decayed += found
            worst = max(worst, decay)
    if not decayed:
        return passed(f"none of {len(gains)} gains and biases decays")
    norms = [name for name in decayed if "norm" in name or "ln" in name] or decayed
    peak = max(p.base, default=0.0)
    lost = 1 - math.exp(-peak * worst * p.steps) if p.steps else None
    pull = f", which takes {lost:.1%} of a gain in {p.steps} steps" if lost is not None else ""
    return warning(
        f"{len(decayed)} gains and biases decay by {worst:g}{pull}, such as {norms[0]}",
        'groups = [{"params": [q for q in model.parameters() if q.ndim > 1]}, {"params": '
        '[q for q in model.parameters() if q.ndim <= 1], "weight_decay": 0.0}]',
    )


def warmup(p: Patient) -> Symptom:
    """The schedule reaches its peak early, stays above 0, and begins gently where that matters."""
    if not p.optimizers:
        raise NotOffered("no optimizer was given")
    steps = p.steps
    if steps is None:
        raise NotOffered("the number of steps was not given")
    rates = p.rates(min(steps, 20_000))
    peak = max(rates)
    wanted = max(p.base, default=0.0)
    share = (
        f"train.schedule.warmup={max(1, steps // 20)}"
        if p.ours
        else f"warmup={max(1, steps // 20)}"
    )
    if peak <= 0:
        return mistake(f"the learning rate is 0 in all of {steps} steps", share)
    top = next(i for i, rate in enumerate(rates) if rate > 0.95 * peak)
    if peak < 0.5 * wanted:
        return mistake(
            f"the rate reaches {peak:.1e} of {wanted:.1e} in {steps} steps: the schedule is longer "
            "than the training",
            f"{share}  # and the schedule's total steps: {steps}",
        )
    if top > 0.4 * steps and steps >= 10:
        return mistake(f"the warmup takes {top} of {steps} steps", share)
    still = sum(rate < 1e-3 * peak for rate in rates[top:])
    if still > 0.2 * steps and still > 2:
        return mistake(
            f"the rate is below a thousandth of its peak in {still} of {steps} steps",
            f"total_steps={steps}  # the schedule ends before the training does",
        )
    jumps = [i for i in range(max(top, 1), len(rates)) if rates[i] > 3 * rates[i - 1] > 0]
    if jumps:
        return mistake(
            f"at step {jumps[0]} the rate jumps from {rates[jumps[0] - 1]:.1e} to "
            f"{rates[jumps[0]]:.1e}",
            "scheduler.step() once for each optimizer.step()",
        )
    return passed(f"the peak of {peak:.1e} is reached after {top} of {steps} steps")


#: Steps of the range test, of the trial at the planned rate, and of one batch alone.
RANGE_STEPS, TRIAL_STEPS, ALONE_STEPS = 48, 24, 80


class Trial(NamedTuple):
    """A short training at the planned peak rate, after a few steps of warmup."""

    losses: list[float]  # of the training's batches
    before: float  # of one batch in evaluation mode
    after: float
    val_before: float | None
    val_after: float | None
    moved: bool  # any weight
    rate: float


def peak_rate(p: Patient) -> float:
    """Return the highest planned learning rate."""
    return max(p.rates(min(p.steps or 200, 20_000)))


def trial(p: Patient) -> Trial:
    """Train some steps as planned, on fresh batches; made once for two checks."""
    found = p.memory.get("trial")
    if isinstance(found, Trial):
        return found
    if not p.optimizers:
        raise NotOffered("no optimizer was given")
    batches = [p.smaller(b) for b in p.need_batches(2)]
    rate, probe = peak_rate(p), batches[-1]
    losses: list[float] = []
    with p.fresh():
        first = [q.detach().clone() for q in p.model.parameters()]
        before, val_before = _evaluated(p, probe), _evaluated(p, *p.val_batches[:1])
        torch.manual_seed(0)
        for i in range(TRIAL_STEPS):
            loss = p.train_step([batches[i % (len(batches) - 1)]], rate=rate * min(1, (i + 1) / 6))
            losses.append(loss)
            if not math.isfinite(loss):
                break
        after, val_after = _evaluated(p, probe), _evaluated(p, *p.val_batches[:1])
        moved = any(not torch.equal(a, b) for a, b in zip(first, p.model.parameters(), strict=True))
    assert before is not None and after is not None
    made = Trial(losses, before, after, val_before, val_after, moved, rate)
    p.memory["trial"] = made  # for two examinations
    return made


@torch.no_grad()
def _evaluated(p: Patient, *batches: Any) -> float | None:
    p.model.eval()
    return float(p.loss(p.smaller(batches[0]))) if batches else None


def learning_rate(p: Patient) -> Symptom:
    """The planned rate is inside the range in which a range test's loss falls.

    The loss of each batch is divided by its own at the start, so that easy and hard ones compare.
    """
    if not p.optimizers:
        raise NotOffered("no optimizer was given")
    rate = peak_rate(p)
    if rate <= 0:
        raise NotOffered("the rate is 0: see warmup")
    batches = [p.smaller(b) for b in p.need_batches(2)]
    low, high = min(1e-6, rate / 10), max(3.0, rate * 2)
    curve: list[tuple[float, float]] = []
    smooth = 0.0
    with p.fresh():
        start = [_evaluated(p, b) or 1.0 for b in batches]
        for i in range(RANGE_STEPS):
            now = low * (high / low) ** (i / (RANGE_STEPS - 1))
            at = i % len(batches)
            loss = p.train_step([batches[at]], rate=now) / start[at]
            if not math.isfinite(loss):
                curve.append((now, math.inf))
                break
            smooth = 0.7 * smooth + 0.3 * loss
            curve.append((now, smooth / (1 - 0.7 ** (i + 1))))
            if len(curve) > 8 and curve[-1][1] > 3 * min(r for _, r in curve):
                break
    best_rate, best = min(curve, key=lambda point: point[1])
    level = statistics.median(r for _, r in curve[:6])
    fell = [now for now, r in curve if r < level - 0.1 * (level - best)]
    broken = [now for now, r in curve if now > best_rate and r > level + 0.05]
    ceiling = broken[0] if broken else math.inf
    suggestion = best_rate / 10
    fix = f"train.lr={suggestion:.0e}" if p.ours else f"lr={suggestion:.0e}"
    least = min(fell, default=best_rate)
    said = f"rate {rate:.1e}; the loss falls from {least:.0e} to {best_rate:.0e}"
    if math.isfinite(ceiling):
        said += f" and rises above its start at {ceiling:.0e}"
    if rate >= ceiling:
        return mistake(said, fix)
    done = trial(p)
    worse = done.after > done.before * 1.05 or not math.isfinite(done.losses[-1])
    if worse and rate > suggestion:
        return mistake(
            f"{said}; after {len(done.losses)} steps at this rate the loss is {done.after:.3g}, "
            f"before {done.before:.3g}",
            fix,
        )
    travel = _travel(p)
    if rate < best_rate / 300 and travel is not None and travel < 0.02:
        return mistake(
            f"{said}; over all of the training a weight moves by at most {travel:.1%} of its size",
            fix,
        )
    if rate < least / 100:
        return mistake(said, fix)
    return passed(said)


def _travel(p: Patient) -> float | None:
    """Return the farthest a weight can go, as a part of a weight's size: Adam moves it by the rate.

    The sum of all rates bounds the way of a weight under Adam; None for others.
    """
    adams = [o for o in p.optimizers if "adam" in type(o).__name__.lower()]
    if not adams or p.steps is None:
        return None
    sizes = [float(q.detach().float().std()) for q in p.trainable().values() if q.ndim > 1]
    count = min(p.steps, 20_000)
    way = sum(p.rates(count)) * p.steps / count
    return way / statistics.median(sizes) if sizes and statistics.median(sizes) > 0 else None


def one_batch(p: Patient) -> Symptom:
    """One small batch can be learned by heart: below the entropy of its own targets.

    A model that does not use its input cannot be better than the frequencies of the targets at
    each position.
    """
    batch, floor, torn = _small_batch(p)
    trainable = list(p.trainable().values())
    if not trainable:
        raise NotOffered("no parameter trains")
    every = sum(q.numel() for q in p.model.parameters())
    # All of a model learns a few rows by heart; a few factors, or a head, need only use the input.
    by_heart = torn + 0.8 * (floor - torn)
    bound = by_heart if 2 * sum(q.numel() for q in trainable) > every else floor
    best, used = math.inf, 0
    for rate in (3e-3, 1e-3, 2e-2):
        with p.fresh():
            adam = torch.optim.Adam(trainable, lr=rate, betas=(0.9, 0.95))
            torch.manual_seed(0)
            for i in range(ALONE_STEPS):
                p.check_time()
                p.model.train()
                adam.zero_grad()
                loss = p.loss(batch)
                if not loss.requires_grad:
                    raise NotOffered("the loss has no gradient")
                if not bool(loss.detach().isfinite()):
                    break
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trainable, 1.0)
                adam.step()
                used += 1
                if i % 10 == 9:
                    now = _plain(p, batch)
                    best = min(best, now if math.isfinite(now) else math.inf)
                    if best < bound:
                        return passed(
                            f"loss {best:.3g} after {used} steps on one batch; without its input "
                            f"{floor:.3g} at best"
                        )
    return mistake(
        f"after {used} steps on one batch the loss is {best:.3g}; the frequencies of its "
        f"targets alone give {floor:.3g}",
        "does the input reach the output, the gradient the input? less dropout, more width",
    )


def _small_batch(p: Patient) -> tuple[Any, float, float]:
    """Return a few rows whose targets differ, and the entropy of those targets in nats.

    First without the input, then after equal tokens.
    """
    for rows in (8, 16):
        for batch in p.need_batches():
            small = cut(batch, rows)
            views = p.read(p.smaller(small))
            if not views:
                raise NotOffered("the targets cannot be read from the loss")
            targets, counted = views[0].targets, views[0].counted
            floor = _entropy(targets[counted])
            if targets.ndim == 2 and len(targets) >= 8:
                shares = [counted[:, t].sum() / counted.sum() for t in range(targets.shape[1])]
                each = [_entropy(targets[:, t][counted[:, t]]) for t in range(targets.shape[1])]
                floor = float(sum(s * h for s, h in zip(shares, each, strict=True)))
            torn = _torn(views[0])
            if floor > 0.3 and torn < 0.5 * floor:
                return small, floor, torn
    raise NotOffered("the targets of a batch are all the same, or differ after the same tokens")


def _torn(view: View) -> float:
    """Return the entropy of targets after equal tokens: what nobody can learn of these rows."""
    if not view.per_position or view.tokens is None or view.tokens.shape != view.targets.shape:
        return 0.0
    after: dict[tuple[int, ...], list[int]] = {}
    for row, targets, counted in zip(view.tokens, view.targets, view.counted, strict=True):
        for t in counted.nonzero()[:, 0].tolist():
            after.setdefault(tuple(row[: t + 1].tolist()), []).append(int(targets[t]))
    total = max(1, sum(map(len, after.values())))
    return sum(len(found) / total * _entropy(torch.tensor(found)) for found in after.values())


def _entropy(targets: Tensor) -> float:
    """Return the entropy of the frequencies of some targets, in nats."""
    counts = targets.unique(return_counts=True)[1].double()
    shares = counts / counts.sum().clamp(min=1)
    return float(-(shares * shares.log()).sum())


@torch.no_grad()
def _plain(p: Patient, batch: Any) -> float:
    """Return the mean loss of the first head's targets in evaluation mode."""
    with torch.enable_grad():
        view = p.read(p.smaller(batch))[0]
    counted = view.counted
    logp = view.logits[counted].log_softmax(-1)
    own = -logp.gather(-1, view.targets[counted][:, None])[:, 0]
    weights = view.weights[counted]
    return float((own * weights).sum() / weights.sum())


def learning_curve(p: Patient) -> Symptom:
    """Losses are possible: not below 0 or the data's entropy, not constant, not rising."""
    if len(p.setup.curve):
        found = _read_curve([float(x) for x in p.setup.curve], p)
        if found is not None:
            return found
        if not p.optimizers or len(p.batches) < 2:
            return passed(f"{len(p.setup.curve)} losses of an earlier training are possible")
    done = trial(p)
    losses = done.losses
    found = _read_curve(losses, p)
    if found is not None:
        return found
    if not done.moved:
        return mistake(
            f"after {len(losses)} steps at {done.rate:.1e} no weight has changed",
            "loss.backward(); optimizer.step()  # with this model's parameters",
        )
    if done.after == done.before:
        return mistake(
            f"the weights move, and the loss stays {done.after:.6g}: it does not depend on them",
            "loss = F.cross_entropy(model(batch), targets)  # of this batch, of this model",
        )
    if _climbs(p, done):
        return mistake(
            f"the smallest step raises the loss: the optimizer climbs (in {len(losses)} steps from "
            f"{done.before:.4g} to {done.after:.4g})",
            "maximize=False, and the loss without a minus",
        )
    if done.val_after is not None and done.val_before is not None:
        gain, val_gain = done.before - done.after, done.val_before - done.val_after
        if done.val_after < 0.5 * done.after and done.val_before < 0.5 * done.before:
            return mistake(
                f"the validation loss is {done.val_before:.3g} before training and "
                f"{done.val_after:.3g} after, that of training {done.before:.3g} and "
                f"{done.after:.3g}: they do not measure the same",
                "the same loss and the same masks on both splits",
            )
        if gain > 0.2 * done.before and val_gain == 0:
            return mistake("the validation loss does not move", "evaluate the model that trains")
    return passed(
        f"loss {done.before:.4g} to {done.after:.4g} in {len(losses)} steps at {done.rate:.1e}"
    )


def _climbs(p: Patient, done: Trial) -> bool:
    """True if a step of a ten-thousandth of the rate raises the loss it was made for.

    To first order a step of any descent lowers it; noise of dropout is switched off.
    """
    if done.after <= done.before:
        return False
    batch = p.smaller(p.batches[0])
    for share in (1e-1, 1e-2):
        with p.fresh():
            before = _evaluated(p, batch)
            p.train_step([batch], rate=done.rate * share)
            after = _evaluated(p, batch)
        assert before is not None and after is not None
        if after <= before:
            return False
    return True


def _read_curve(losses: list[float], p: Patient) -> Symptom | None:
    wrong = [i for i, x in enumerate(losses) if not math.isfinite(x)]
    if wrong:
        return mistake(
            f"the loss is {losses[wrong[0]]} at step {wrong[0] + 1}", "glass lr-find; a lower rate"
        )
    lowest = min(losses)
    if lowest < 0:
        return mistake(
            f"the loss is {lowest:.3g}: a cross-entropy is never below 0",
            "F.cross_entropy(logits, targets)  # its sign; logits, not probabilities, for nll_loss",
        )
    if len(losses) >= 8 and max(losses) == lowest:
        return mistake(
            f"the loss is {lowest:.6g} in each of {len(losses)} steps, though the batches differ",
            "next(batches) inside the loop; the loss of this batch",
        )
    if p.floor is not None:
        tail = statistics.mean(losses[-max(1, len(losses) // 10) :])
        # The mean of a few batches scatters around the entropy of all of them.
        noise = statistics.pstdev(losses[-10:]) if len(losses) >= 10 else 0.0
        if tail < 0.9 * p.floor - 2 * noise - 0.02:
            return mistake(
                f"the loss is {tail:.3g}, below the data's entropy of {p.floor:.3g} nats: no model "
                "can predict it so well",
                "look for the answer in the input, and for training examples in this split",
            )
    if len(losses) >= 20:
        drops = [losses[i - 1] - losses[i] for i in range(2, len(losses))]
        fall, usual = max(drops), statistics.median(abs(d) for d in drops)
        settled = [x for x in losses[-5:] if x < 1e-4]
        if len(settled) == 5 and len(losses) < 200 and fall > 100 * max(usual, 1e-9):
            return mistake(
                f"the loss falls to {losses[-1]:.1g} within {len(losses)} steps of fresh batches",
                "look for the answer in the input",
            )
    return None
