"""`validate_adapter`: check that an adapter, ours or a user's, keeps the contract of `BaseAdapter`.

First the methods themselves, then every check of a model, through the adapter's own `forward`,
`save_checkpoint` and `load_checkpoint`.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from glasscheck.measure import EXACT, Measure, NotOffered, gap
from glasscheck.rows.invariants import tokens_of
from glasscheck.subject import Subject
from glassformer.adapters.base import BaseAdapter, Outline
from glassformer.adapters.load import load
from glassformer.checks.catalogue import SUBJECT_CHECKS, SubjectCheck, run_subject_check
from glassformer.checks.report import Report
from glassformer.checks.subject import subject_of_adapter
from glassformer.generation.streaming import generate_batch
from glassformer.kernels.threads import verifying
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts
from glassformer.quant.contents import quantized_numbers
from glassformer.spec.decoding import DecodeSpec

# B batch, T length, V vocab

#: The methods of the contract, and the arguments that each takes.
METHODS = {
    "forward": ("input_ids", "attention_mask"),
    "get_config": (),
    "save_checkpoint": ("path",),
    "load_checkpoint": ("path",),
    "get_architecture_type": (),
    "get_num_parameters": (),
    "get_tokenizer": (),
}
#: The groups of checks that are run on the model behind the adapter.
GROUPS = ("causality", "padding", "determinism", "cache", "gradients", "reference")


def validate_adapter(adapter: BaseAdapter, *, name: str = "") -> Report:
    """Return the findings on one adapter: its methods, then the model through them."""
    adapter.eval()
    subject = _through(adapter, name=name)
    asked = (check for check in SUBJECT_CHECKS if check.group in GROUPS and not check.deep)
    with verifying(subject.parameter_count()):
        findings = [run_subject_check(check, subject) for check in (*_own_checks(adapter), *asked)]
    return Report(tuple(findings))


def _through(adapter: BaseAdapter, *, name: str) -> Subject:
    """Return a subject that calls the adapter's own forward, with the logits of one head."""
    plain = subject_of_adapter(adapter, name=name)
    spec = adapter.spec
    if spec.encoder is not None:
        return plain
    heads = spec.head_names()
    head = "next" if "next" in heads else heads[0]
    begin = sum(spec.head_size(name) for name in heads[: heads.index(head)])
    columns = slice(begin, begin + spec.head_size(head))
    silent = tuple(f"heads.{name}." for name in heads if name != head)
    step = plain.step

    def stepped(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        assert step is not None
        return step(tokens_BT, valid_BT)[..., columns]

    return replace(
        plain,
        logits=lambda tokens, valid: _ask(adapter, tokens, valid),
        step=None if step is None else stepped,
        double=None,  # a float64 copy would not be this adapter
        parameters={
            name: p for name, p in adapter.named_parameters() if not name.startswith(silent)
        },
    )


def _ask(adapter: BaseAdapter, tokens_BT: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    if adapter.spec.encoder is not None:
        raise NotOffered("its forward needs a source beside the tokens")
    logits: Tensor = adapter(tokens_BT, None if valid_BT is None else valid_BT.long())
    return logits


def _own_checks(adapter: BaseAdapter) -> Iterator[SubjectCheck]:
    def check(name: str, run: Callable[[BaseAdapter, Subject], Measure]) -> SubjectCheck:
        def bound(subject: Subject) -> Measure:
            return run(adapter, subject)

        bound.__doc__ = run.__doc__
        return SubjectCheck(name, "adapter", bound)

    yield check("every method is there, with its arguments", has_methods)
    yield check("config is plain data, type is a name", describes_itself)
    yield check("parameters are counted once", counts)
    yield check("logits are (batch, length, vocabulary)", right_shape)
    yield check("saved and loaded, same bits", round_trip)
    yield check("it learns: one step changes every parameter", one_step)
    yield check("it generates, the same twice", generates)


def has_methods(adapter: BaseAdapter, subject: Subject) -> Measure:
    """Every method of the contract exists and takes its arguments."""
    wrong = []
    for name, arguments in METHODS.items():
        method = getattr(adapter, name, None)
        if not callable(method):
            wrong.append(f"{name} is missing")
        elif tuple(inspect.signature(method).parameters)[: len(arguments)] != arguments:
            wrong.append(f"{name} does not take {', '.join(arguments)}")
    return Measure(float(len(wrong)), EXACT, subject.size, "; ".join(wrong))


def describes_itself(adapter: BaseAdapter, subject: Subject) -> Measure:
    """get_config is JSON data, and get_architecture_type a name."""
    config, kind = adapter.get_config(), adapter.get_architecture_type()
    wrong = []
    if not isinstance(config, dict) or not config:
        wrong.append("get_config gives no table")
    else:
        json.dumps(config, default=str)
    if not isinstance(kind, str) or not kind:
        wrong.append("get_architecture_type gives no name")
    return Measure(float(len(wrong)), EXACT, subject.size, "; ".join(wrong))


def counts(adapter: BaseAdapter, subject: Subject) -> Measure:
    """get_num_parameters counts each storage once, and the optimizer gets each once."""
    unique = {p.data_ptr(): p.numel() for p in adapter.parameters()}
    wrong = abs(adapter.get_num_parameters() - sum(unique.values()) - quantized_numbers(adapter))
    given = [id(p) for p in adapter.trainable_parameters()]
    wrong += len(given) - len(set(given))
    wrong += sum(not p.requires_grad for p in adapter.trainable_parameters())
    return Measure(float(wrong), EXACT, subject.size)


@torch.no_grad()
def right_shape(adapter: BaseAdapter, subject: Subject) -> Measure:
    """Finite logits of the right shape, with a mask and without."""
    tokens = tokens_of(subject, 2, 5, seed=73)
    size = adapter.spec.head_size(adapter.spec.head_names()[0])
    wanted = (2, 5, size) if subject.per_position else (2, size)
    wrong = 0
    for valid in (None, torch.ones_like(tokens, dtype=torch.bool)):
        logits = _ask(adapter, tokens, valid)
        wrong += not isinstance(logits, Tensor) or tuple(logits.shape) != wanted
        wrong += not bool(torch.isfinite(logits).all())
    return Measure(float(wrong), EXACT, subject.size)


@dataclass
class _Weights:
    """A copy of all weights, restored at the end of a block."""

    adapter: BaseAdapter

    def __enter__(self) -> None:
        self.kept = [p.detach().clone() for p in self.adapter.parameters()]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self.adapter.parameters(), self.kept, strict=True):
                parameter.copy_(kept)
                parameter.grad = None


def round_trip(adapter: BaseAdapter, subject: Subject) -> Measure:
    """Saved, wiped, loaded into the same adapter, and opened as a new one: the same bits."""
    tokens = tokens_of(subject, 2, 7, seed=74)
    origin = adapter.origin
    with TemporaryDirectory() as place, torch.no_grad(), _Weights(adapter):
        before, folder = _ask(adapter, tokens), Path(place) / "saved"
        adapter.save_checkpoint(folder)
        for parameter in adapter.parameters():
            parameter.zero_()
        try:
            adapter.load_checkpoint(folder)
            worst = gap(adapter(tokens), before)
        finally:
            adapter.origin = origin
        if isinstance(adapter.model, Model):
            worst = max(worst, gap(load(folder)(tokens), before))
        elif isinstance(adapter.spec, Outline):
            worst = max(worst, gap(adapter.open_folder(folder).eval()(tokens), before))
    return Measure(worst, EXACT, subject.size)


def one_step(adapter: BaseAdapter, subject: Subject) -> Measure:
    """A step of plain gradient descent lowers the loss and moves every trainable parameter."""
    parameters = adapter.trainable_parameters()
    if not parameters:
        raise NotOffered("everything is frozen")
    if not subject.per_position:
        raise NotOffered("one answer a sequence")
    tokens = tokens_of(subject, 4, 12, seed=75)
    with _Weights(adapter):
        first = _loss(adapter, tokens)
        first.backward()
        idle = [
            name
            for name, p in (subject.parameters or {}).items()
            if p.requires_grad
            and (p.grad is None or not float(p.grad.abs().max()) > 0)
            and name not in (subject.zero_by_theory or {})
        ]
        size = math.sqrt(
            sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
        )
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-1e-2 / max(size, 1e-12))
        after = _loss(adapter, tokens)
        fell = float(after.detach()) < float(first.detach())
    note = (
        f"no gradient: {', '.join(idle[:4])}" if idle else "" if fell else "the loss did not fall"
    )
    return Measure(float(len(idle) + (not fell)), EXACT, subject.size, note)


def _loss(adapter: BaseAdapter, tokens_BT: Tensor) -> Tensor:
    logits_BTV = _ask(adapter, tokens_BT)[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def generates(adapter: BaseAdapter, subject: Subject) -> Measure:
    """Greedy and seeded sampling repeat exactly; each greedy token is the argmax of a forward."""
    if "next" not in adapter.spec.head_names() or adapter.spec.encoder is not None:
        raise NotOffered("it continues no text")
    prompts = Prompts.of(tokens_of(subject, 1, 5, seed=76).tolist())
    wrong = 0
    for temperature in (0.0, 1.0):
        spec = DecodeSpec(max_new_tokens=6, temperature=temperature, seed=3)
        first, again = (
            generate_batch(adapter.stepper(), prompts, spec=spec)[0].tokens for _ in "ab"
        )
        wrong += first != again
        if temperature == 0.0:
            row = [*prompts.tokens[0], *first]
            with torch.no_grad():
                best = adapter(torch.tensor([row]))[0, len(prompts.tokens[0]) - 1 : -1].argmax(-1)
            wrong += best.tolist() != list(first)
    return Measure(float(wrong), EXACT, subject.size)
