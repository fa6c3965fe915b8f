"""Parity with the NumPy engine: the same spec and weights, gradients derived by hand.

Everything is compared in float64: results and taps, each parameter's gradient against autograd's,
gradients against central differences, and the weights after some steps of each optimizer.
"""

import copy
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glasscheck.measure import Measure, NotOffered, seeded
from glasscheck.rows.invariants import tokens_of
from glasscheck.subject import Subject
from glassformer.byhand import optim
from glassformer.byhand.gradient_check import FLOOR as FLAT
from glassformer.byhand.gradient_check import slope_along
from glassformer.byhand.inputs import Inputs as HandInputs
from glassformer.byhand.model import Model as HandModel
from glassformer.checks.rows.own_models import shortened, size_with
from glassformer.checks.subject import with_source
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.models.weights import weights_of
from glassformer.nn.experts import BalanceLosses
from glassformer.nn.taps import Taps
from glassformer.spec.model import ModelSpec
from glassformer.training.losses import head_loss

#: Two derivations of one gradient in float64; the largest entry of the tensor is 1.
GRADIENT = 1e-10
#: The tolerance of central differences, which have their own error.
DIFFERENCES = 1e-6
#: Below this share of the model's largest gradient a tensor is compared absolutely.
FLOOR = 1e-5
STEPS = 5
#: By how much each tensor of a direction moves the loss: far above its rounding, and so little that
#: hardly a unit of a wide ReLU layer crosses its kink.
CHANGES = (3e-8, 1e-8)
#: Differences are taken at the weights, then at weights moved by this share of their size.
POINTS, NUDGE = 4, 1e-3


def _twins(subject: Subject, *, short: bool = False) -> tuple[Model, HandModel, Inputs]:
    """Return the model in float64, its NumPy twin with the same weights, and a padded batch.

    `short` takes some blocks of a large model: moving and stepping all of it takes gigabytes.
    """
    own = shortened(subject.ours()) if short else subject.ours()
    if any(p.dtype not in (torch.float32, torch.float64) for p in own.parameters()):
        raise NotOffered("the by-hand engine has no half precision")
    model = copy.deepcopy(own).double().cpu()
    hand = HandModel(model.spec, params=weights_of(model), dtype=np.float64)
    tokens = tokens_of(subject, 3, 7, seed=91)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, 5:] = False
    valid[1, :2] = False
    return model, hand, with_source(model.spec, tokens, valid)


def hand_inputs(hand: HandModel, inputs: Inputs) -> HandInputs:
    """Return the same batch as NumPy arrays."""

    def array(tensor: torch.Tensor | None) -> NDArray[Any] | None:
        return None if tensor is None else tensor.numpy()

    tokens = array(inputs.tokens_BT)
    assert tokens is not None
    return hand.inputs(
        tokens,
        valid_BT=array(inputs.valid_BT),
        source_tokens_BS=array(inputs.source_BS),
        source_valid_BS=array(inputs.source_valid_BS),
    )


def targets_for(spec: ModelSpec, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return random targets for every head."""
    targets = {}
    for i, head in enumerate(spec.head_names()):
        one = spec.head(head).readout is not None
        shape = inputs.tokens_BT.shape[:1] if one else inputs.tokens_BT.shape
        draw = seeded(92 + i)
        targets[head] = torch.randint(0, spec.head_size(head), shape, generator=draw)
    return targets


def torch_loss(
    model: Model, inputs: Inputs, targets: Mapping[str, torch.Tensor], taps: Taps | None = None
) -> torch.Tensor:
    """Mean cross-entropy of every head over real tokens, the spec's penalty, load balancing."""
    balance = BalanceLosses()
    hidden_BTD = model.hidden(inputs, taps=taps, balance=balance)
    total = model.penalty()
    if balance.losses:
        total = total + balance.weighted()[1]
    for head, target in targets.items():
        counted = inputs.valid_BT if target.ndim == 2 else None
        weights = torch.ones_like(target) if counted is None else counted
        weights = weights.to(hidden_BTD.dtype)
        sums = head_loss(model, hidden_BTD, head, target, weights, valid_BT=inputs.valid_BT)
        total = total + sums.smoothed / weights.sum()
    return total


def same_results(subject: Subject) -> Measure:
    """Logits and every tap of the by-hand engine are torch's."""
    model, hand, inputs = _twins(subject)
    taps = Taps(read="*")
    seen: dict[str, NDArray[Any]] = {}
    with torch.no_grad():
        model(inputs, taps=taps)
    checked = hand_inputs(hand, inputs)
    hand.record(checked, taps=seen)
    missing = set(taps.seen) - set(seen)
    worst = float("inf") if missing else 0.0
    for name in set(taps.seen) & set(seen):
        theirs = taps.seen[name].numpy()
        scale = max(1.0, float(np.abs(theirs).max()))
        worst = max(worst, float(np.abs(seen[name] - theirs).max()) / scale)
    note = f"missing: {', '.join(sorted(missing))}" if missing else ""
    return Measure(worst, GRADIENT, f"{subject.size}, {len(seen)} taps", note, "float64")


def same_gradients(subject: Subject) -> Measure:
    """Each parameter's gradient, derived by hand, is autograd's."""
    model, hand, inputs = _twins(subject)
    targets = targets_for(model.spec, inputs)
    torch_loss(model, inputs, targets).backward()
    arrays = {head: target.numpy() for head, target in targets.items()}
    hand.loss_and_grads(hand_inputs(hand, inputs), targets=arrays)
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(np.abs(grad).max()) for grad in grads.values())
    gaps = {}
    for name, theirs in grads.items():
        scale = max(float(np.abs(theirs).max()), FLOOR * largest)
        gaps[name] = float(np.abs(hand.grads[name] - theirs).max()) / scale
    name = max(gaps, key=lambda key: gaps[key])
    size = f"{subject.size}, {len(gaps)} tensors"
    return Measure(gaps[name], GRADIENT, size, f"worst: {name}", "float64")


def gradients_by_differences(subject: Subject) -> Measure:
    """The by-hand gradient along random directions, against central differences of the loss."""
    model, hand, inputs = _twins(subject, short=True)
    targets = {h: t.numpy() for h, t in targets_for(model.spec, inputs).items()}
    checked = hand_inputs(hand, inputs)

    def loss() -> float:
        return hand.loss(checked, targets=targets).total

    kinds: dict[str, list[str]] = {}
    for name in hand.params:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    # A step may cross the kink of a ReLU, where no difference is a slope: a shorter one decides. A
    # trained model may have a unit right at its kink: then weights close by are used, where
    # a wrong gradient is as wrong.
    errors, rng = dict.fromkeys(kinds, math.inf), np.random.default_rng(93)
    for moved in range(POINTS):
        left = [kind for kind, error in errors.items() if error > DIFFERENCES]
        if not left:
            break
        if moved:
            for param in hand.params.values():
                param += NUDGE * np.abs(param).mean() * rng.standard_normal(param.shape)
        hand.loss_and_grads(checked, targets=targets)
        grads = {name: hand.grads[name].copy() for kind in left for name in kinds[kind]}
        for kind in left:
            toward, slope = _equal_shares({name: grads[name] for name in kinds[kind]}, rng)
            for epsilon in CHANGES:
                if errors[kind] > DIFFERENCES:
                    found = slope_along(loss, hand.params, toward, epsilon=epsilon)
                    errors[kind] = min(errors[kind], abs(found - slope))
    worst = max(errors, key=lambda kind: errors[kind])
    size = f"{size_with(subject, model)}, {len(hand.params)} tensors"
    return Measure(errors[worst], DIFFERENCES, size, f"worst: {worst}", "float64")


def _equal_shares(
    grads: Mapping[str, NDArray[Any]], rng: np.random.Generator
) -> tuple[dict[str, NDArray[Any]], float]:
    """Return a random direction through some tensors and its slope, to which each adds 1.

    So an error in one tensor shows in full, however small its gradient is.
    """
    toward, total = {}, 0.0
    for name, grad in grads.items():
        way = rng.standard_normal(grad.shape)
        slope = float(np.vdot(grad, way))
        scale = math.copysign(max(abs(slope), FLAT), slope)
        toward[name] = np.divide(way, scale, out=way)
        total += slope / scale
    return toward, total


def same_training(subject: Subject) -> Measure:
    """Weights after some AdamW steps beside torch's, from the same weights and batch."""
    model, hand, inputs = _twins(subject, short=True)
    targets = targets_for(model.spec, inputs)
    arrays = {head: target.numpy() for head, target in targets.items()}
    checked = hand_inputs(hand, inputs)
    # A large eps keeps the zero-by-theory gradients, which are rounding, from being blown up.
    theirs = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    ours = optim.Adam(hand, lr=1e-3, eps=1e-4)
    worst = 0.0
    for _ in range(STEPS):
        theirs.zero_grad()
        loss = torch_loss(model, inputs, targets)
        loss.backward()
        theirs.step()
        mine = hand.loss_and_grads(checked, targets=arrays).total
        ours.step()
        worst = max(worst, abs(mine - loss.item()))
    for name, parameter in model.named_parameters():
        worst = max(worst, float(np.abs(hand.params[name] - parameter.detach().numpy()).max()))
    return Measure(worst, GRADIENT, f"{size_with(subject, model)}, {STEPS} steps", "", "float64")
