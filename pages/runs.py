"""The runs behind the figures: small trainings and measurements, each made once a process.

One thread and fixed seeds: on one machine the numbers, and so the pictures, come out the same.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from tests.checks.faults import FAULTS
from tests.planting import planted

from glasscheck.measure import EXACT, TOLERANCE
from glassformer.checks.catalogue import (
    PART_CHECKS,
    Finding,
    run_part_check,
    verify_parts,
    verify_subject,
)
from glassformer.checks.preset_subjects import sample_subjects
from glassformer.data.build_task import build_task
from glassformer.data.task import Task
from glassformer.generation.beam import beam_search
from glassformer.generation.native.stepper import NativeStepper
from glassformer.lab.recipes import recipe
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.nn.taps import trace
from glassformer.spec.decoding import BeamSpec
from glassformer.spec.presets import seq2seq
from glassformer.training.fit import StepRecord, fit
from glassformer.training.torch_engine import TorchEngine


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of two threads depend on who comes first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Trained:
    """A model after its run, the task, and a record for each step."""

    model: Model
    task: Task
    records: tuple[StepRecord, ...]


@cache
def reverse(*overrides: str) -> Trained:
    """The `reverse` recipe with these changes, trained here."""
    spec = recipe("reverse", overrides)
    task = build_task(spec.task)
    engine = TorchEngine.fresh(spec.model, spec.train)
    records = tuple(fit(engine, task, spec.train))
    return Trained(engine.model.eval(), task, records)


def saturation(width: int, *, scaled: bool, keys: int = 32, rows: int = 400) -> tuple[float, float]:
    """Unit normal q and k of this width: mean of the largest weight, and size of a row's Jacobian.

    The size is the sum of p (1 - p) over the row: what a gradient is multiplied by on its way back.
    """
    rng = np.random.default_rng(width)
    q, k = rng.standard_normal((rows, 1, width)), rng.standard_normal((rows, width, keys))
    scores = (q @ k)[:, 0] / (math.sqrt(width) if scaled else 1.0)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return float(p.max(-1).mean()), float((p * (1 - p)).sum(-1).mean())


def gradients_at_init(*, pre_norm: bool, layers: int = 12) -> list[float]:
    """Length of the gradient of each decoder layer's last matrix, before any training."""
    spec = seq2seq(
        vocab_size=50,
        d_model=64,
        n_heads=4,
        d_ff=256,
        n_layers=layers,
        max_seq_len=64,
        dropout=0.0,
        pre_norm=pre_norm,
    )
    model = build(spec, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    source_BS, tokens_BT, next_BT = (torch.randint(3, 50, (16, 20), generator=draw) for _ in "stn")
    logits = model(Inputs(tokens_BT, None, source_BS=source_BS))["next"]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_BT.flatten()).backward()
    blocks = model.decoder.blocks
    return [float(block.ffn.down_proj.weight.grad.norm()) for block in blocks]


def searched(run: Trained, *, width: int, alpha: float, rows: int = 100) -> tuple[float, float]:
    """Sources longer than any that was trained on: share of empty answers, mean length."""
    batch = run.task.batch("longer", np.arange(rows))
    spec = BeamSpec(
        width=width, n_best=1, penalty="power", alpha=alpha, max_new_tokens=24, eos=(2,)
    )
    assert batch.source is not None
    prompts = Prompts.of([[1]] * rows, sources=batch.source.tokens, source_valid=batch.source.valid)
    found = beam_search(NativeStepper(run.model), prompts, spec=spec)
    lengths = [len(beams.hypotheses[0].tokens) - 1 for beams in found]
    return float(np.mean([length == 0 for length in lengths])), float(np.mean(lengths))


@cache
def certificate() -> tuple[Finding, ...]:
    """Every row of `glass verify`."""
    findings = list(verify_parts())
    for subject in sample_subjects():
        findings += verify_subject(subject)
    return tuple(findings)


@cache
def damaged() -> tuple[Finding, ...]:
    """What the part checks say of the planted faults that they are meant to catch."""
    checks = {check.name: check for check in PART_CHECKS}
    found: list[Finding] = []
    for fault in FAULTS:
        if fault.caught_by in checks:
            with planted(fault):
                found += [f for f in run_part_check(checks[fault.caught_by]) if f.failed]
    return tuple(found)


def gaps(findings: tuple[Finding, ...], dtype: str) -> list[float]:
    """Differences of checks that are held to the usual bar of their precision, or to every bit.

    Other bars are other questions: the spread of random weights, slopes, rounded weights.
    """
    usual = (EXACT, TOLERANCE[getattr(torch, dtype)])
    ours = [f for f in findings if f.dtype == dtype and f.tolerance in usual]
    return [f.worst for f in ours if f.verdict != "not offered" and f.worst < math.inf]


def weights_of(model: Model, name: str, ask: Callable[[Model], object]) -> NDArray[np.float32]:
    """The attention weights of one tap while the model is asked."""
    with torch.no_grad(), trace(model, read=name) as seen:
        ask(model)
    return seen[name].numpy()
