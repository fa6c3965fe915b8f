"""Subjects of our own models: what gf.build and gf.load return, adapters, models by hand.

Modules of other libraries become subjects in `glasscheck`, which knows no library.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import glasscheck.subject
from glasscheck.foreign import foreign_of
from glasscheck.measure import seeded
from glasscheck.subject import Logits, Subject, subject_of_module
from glassformer.adapters.base import BaseAdapter, Outline
from glassformer.adapters.load import adapt
from glassformer.byhand.layers import Transformer as HandTransformer
from glassformer.byhand.model import Model as HandModel
from glassformer.checks.errors import as_ours
from glassformer.data.own_code import neighbours
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, model_of
from glassformer.models.weights import load_weights, weights_of
from glassformer.nn.cache import FixedCache
from glassformer.nn.taps import Taps
from glassformer.quant.contents import is_model_quantized
from glassformer.quant.convert import dequantize_model
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec
from glassformer.spec.program import Attend, program
from glassformer.store.checkpoint import load_checkpoint, save_checkpoint

# B batch, T length, S source length, V logits


# --- our own models -----------------------------------------------------------------------------


def subject_of_model(model: Model, *, name: str) -> Subject:
    """Make a subject of our model; an encoder-decoder is checked with a fixed source."""
    if is_model_quantized(model):
        twin = dequantize_model(copy.deepcopy(model))
        return replace(subject_of_model(twin, name=name), quantized=model)
    spec = model.spec

    def inputs(tokens_BT: Tensor, valid_BT: Tensor | None) -> Inputs:
        return with_source(spec, tokens_BT, valid_BT)

    def logits(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        return torch.cat(list(model(inputs(tokens_BT, valid_BT)).values()), -1)

    def step(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        cache, columns = FixedCache(tokens_BT.shape[1]), []
        for t in range(tokens_BT.shape[1]):
            column = slice(t, t + 1)
            valid = None if valid_BT is None else valid_BT[:, column]
            answers = model(inputs(tokens_BT[:, column], valid), cache=cache)
            columns.append(torch.cat(list(answers.values()), -1))
        return torch.cat(columns, 1)

    def reload() -> Subject:
        with TemporaryDirectory() as place:
            folder = Path(place) / "checkpoint"
            save_checkpoint(folder, spec, weights_of(model))
            spec_again, arrays = load_checkpoint(folder)
        again = type(model)(spec_again).to(next(model.parameters())).eval()
        load_weights(again, arrays)
        return subject_of_model(again, name=name)

    causal = all(block.mixer.causal for block in spec.decoder.blocks())
    per_position = all(head.readout is None for head in spec.heads)
    zero = {p.name: p.zero_gradient for p in manifest(spec) if p.zero_gradient}
    return Subject(
        name=name,
        logits=logits,
        vocab_size=spec.vocab_size,
        max_length=spec.max_seq_len,
        causal=causal,
        per_position=per_position,
        size=size_of(spec),
        parameters=dict(model.named_parameters()),
        zero_by_theory=zero,
        train=model.train,
        step=step if causal and per_position else None,
        reload=reload,
        double=lambda: subject_of_model(copy.deepcopy(model).double(), name=name),
        weights=lambda tokens, valid: _weights(model, inputs(tokens, valid)),
        model=model,
        windows=tuple(
            op.kind.before + 1
            for op in program(spec).ops
            if isinstance(op.kind, Attend) and op.kind.before is not None
        ),
        routed=frozenset(each.name for each in manifest(spec) if each.expert is not None),
    )


def with_source(spec: ModelSpec, tokens_BT: Tensor, valid_BT: Tensor | None) -> Inputs:
    """Return inputs of our model; with an encoder, every row gets the same random source."""
    if spec.encoder is None:
        return Inputs(tokens_BT, valid_BT)
    length = min(7, spec.max_seq_len)
    source_1S = torch.randint(0, spec.source_vocab, (1, length), generator=seeded(51))
    valid_1S = torch.ones(1, length, dtype=torch.bool)
    valid_1S[0, length // 2 + 1 :] = False
    rows = len(tokens_BT)
    return Inputs(tokens_BT, valid_BT, None, source_1S.repeat(rows, 1), valid_1S.repeat(rows, 1))


def _weights(model: Model, inputs: Inputs) -> dict[str, Tensor]:
    taps = Taps(read="*.weights")
    model(inputs, taps=taps)
    return taps.seen


def size_of(spec: ModelSpec) -> str:
    """Return `d64 L2 h4 V99`, with both depths for an encoder-decoder."""
    heads = spec.decoder.heads_in_words().replace(" and ", "+")
    encoder = "" if spec.encoder is None else f"{spec.encoder.n_layers}+"
    return f"d{spec.d_model} L{encoder}{spec.n_layers} h{heads} V{spec.vocab_size}"


# --- adapters -----------------------------------------------------------------------------------


def subject_of_adapter(adapter: BaseAdapter, *, name: str = "") -> Subject:
    """Make a subject of the model in an adapter; the module it was made of is its reference."""
    name = name or adapter.get_architecture_type()
    if isinstance(adapter.model, Model):
        subject = subject_of_model(adapter.model.eval(), name=name)
    else:
        adapter.eval()
        subject = subject_of_module(
            # A module that no spec describes is called as its adapter calls it.
            adapter if isinstance(adapter.spec, Outline) else adapter.model,
            name=name,
            vocab_size=adapter.spec.vocab_size,
            max_length=adapter.spec.max_seq_len,
        )
    return _compared(subject, adapter.reference)


def _compared(subject: Subject, reference: nn.Module | None) -> Subject:
    """Add a reference to a subject, in float64 too."""
    if reference is None:
        return subject
    again = subject.double

    def double() -> Subject:
        assert again is not None
        return _compared(again(), copy.deepcopy(reference).double())

    return replace(
        subject,
        reference=foreign_of(reference.eval()).logits,
        double=None if again is None else double,
    )


def subject_of_hand(hand: HandModel, *, name: str) -> Subject:
    """Make a subject of a by-hand model: the same weights in torch, and by hand as the reference.

    The rows that compare every tap and every gradient with autograd's use these weights too.
    """
    model = model_of(adapt(hand)).float()  # as the certificate's other subjects

    def logits(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        inputs = with_source(model.spec, tokens_BT, valid_BT)

        def array(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.numpy()

        answers = hand.forward(
            inputs.tokens_BT.numpy(),
            valid_BT=array(inputs.valid_BT),
            source_tokens_BS=array(inputs.source_BS),
            source_valid_BS=array(inputs.source_valid_BS),
        )
        return torch.cat([torch.from_numpy(answer) for answer in answers.values()], -1)

    return replace(subject_of_model(model, name=name), reference=logits)


# --- anything -----------------------------------------------------------------------------------


def subject_of(
    thing: object,
    *,
    name: str = "",
    logits: Logits | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    causal: bool | None = None,
    fresh: Callable[[], nn.Module] | None = None,
) -> Subject:
    """Make a subject of a Subject, of what gf.build and gf.load return, or of any module."""
    match thing:
        case Model():
            return subject_of_model(thing.eval(), name=name or type(thing).__name__)
        case BaseAdapter():
            return subject_of_adapter(thing, name=name)
        case HandModel():
            return subject_of_hand(thing, name=name or "by hand")
        case HandTransformer():
            return subject_of_hand(thing.model, name=name or "by hand")
        case Subject() | nn.Module():
            with as_ours():
                return glasscheck.subject.subject_of(
                    thing,
                    name=name,
                    logits=logits,
                    vocab_size=vocab_size,
                    max_length=max_length,
                    causal=causal,
                    fresh=fresh,
                )
    raise InputError(
        f"cannot verify a {type(thing).__name__}",
        hint="give a model, an nn.Module, or a Subject",
    )


def named(reference: str) -> Any:
    """Return what `package.module:name` or `file.py:name` names; the current folder counts too."""
    place = reference.rpartition(":")[0]
    in_file = place.endswith(".py")
    with as_ours(), neighbours(Path(place).resolve().parent) if in_file else nullcontext():
        return glasscheck.subject.named(reference)


def called(reference: str) -> tuple[Any, Callable[[], Any] | None]:
    """Return what `package.module:factory` makes, and the factory; `file.py:factory` likewise."""
    with as_ours():
        return glasscheck.subject.made_by(named(reference), reference)


def subject_of_factory(reference: str, *, causal: bool | None = None) -> Subject:
    """Make a subject of what `package.module:factory` returns."""
    made, fresh = called(reference)
    return subject_of(made, name=reference, causal=causal, fresh=fresh)
