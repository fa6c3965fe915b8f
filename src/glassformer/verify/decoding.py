"""Decoding: every way of choosing the likeliest tokens chooses the same, and does no more work."""

import numpy as np
import torch

from glassformer.byhand.model import Model as HandModel
from glassformer.generate.beam import beam_search
from glassformer.generate.decode import generate
from glassformer.generate.decoder import Decoder
from glassformer.generate.prompts import Prompts
from glassformer.generate.stepper import HandStepper, NaiveStepper, Stepper, TorchStepper
from glassformer.models.model import Model
from glassformer.models.state import weights_of
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.verify.invariants import tokens_of
from glassformer.verify.measure import EXACT, Measure
from glassformer.verify.subject import NotOffered, Subject, with_source

NEW = 6


def _case(subject: Subject) -> tuple[Model, Prompts]:
    """One of our models that can continue, and prompts of different lengths for it."""
    model = subject.model
    if model is None:
        raise NotOffered("not one of our models")
    if "next" not in model.spec.head_names() or not subject.causal:
        raise NotOffered("it cannot continue a sequence")
    if next(model.parameters()).device.type != "cpu":
        raise NotOffered("decoding is examined on the CPU")
    tokens = tokens_of(subject, 3, 5, seed=95).tolist()
    rows = [tokens[0], tokens[1][:2], tokens[2][:4]]
    source = with_source(model.spec, torch.tensor(tokens), None).source_BS
    sources = None if source is None else source.tolist()
    return model, Prompts.of(rows, sources=sources)


def _tokens(stepper: Stepper, prompts: Prompts, spec: DecodeSpec) -> list[list[int]]:
    return [list(one.tokens) for one in generate(stepper, prompts, spec=spec)]


def every_way_is_greedy(subject: Subject) -> Measure:
    """Cached, uncached, lean, by hand, temperature 0 and one beam give the same tokens."""
    model, prompts = _case(subject)
    greedy = DecodeSpec(max_new_tokens=NEW)
    expected = _tokens(NaiveStepper(model), prompts, greedy)
    found = {
        "cached": _tokens(TorchStepper(model), prompts, greedy),
        "growing cache": _tokens(TorchStepper(model, cache="growing"), prompts, greedy),
        "lean": _tokens(Decoder(model), prompts, greedy),
        "temperature 1e-6": _tokens(
            TorchStepper(model), prompts, DecodeSpec(max_new_tokens=NEW, temperature=1e-6)
        ),
        "top 1": _tokens(
            TorchStepper(model), prompts, DecodeSpec(max_new_tokens=NEW, temperature=1.0, top_k=1)
        ),
        "one beam": [
            list(beams.hypotheses[0].tokens)
            for beams in beam_search(
                TorchStepper(model), prompts, spec=BeamSpec(width=1, max_new_tokens=NEW)
            )
        ],
    }
    if next(model.parameters()).dtype in (torch.float32, torch.float64):
        hand = HandModel(model.spec, params=weights_of(model), dtype=weights_dtype(model))
        found["by hand"] = _tokens(HandStepper(hand), prompts, greedy)
    wrong = [name for name, tokens in found.items() if tokens != expected]
    size = f"{subject.size}, {len(found)} ways"
    return Measure(float(len(wrong)), EXACT, size, ", ".join(wrong))


def weights_dtype(model: Model) -> type:
    """NumPy's name for the model's precision."""
    wide = next(model.parameters()).dtype == torch.float64
    return np.float64 if wide else np.float32


def one_token_a_step(subject: Subject) -> Measure:
    """After the prompt each cached step reads one column; the encoder runs once."""
    model, prompts = _case(subject)
    stepper = TorchStepper(model)
    generate(stepper, prompts, spec=DecodeSpec(max_new_tokens=NEW))
    # The last token is chosen and never read.
    columns = max(len(row) for row in prompts.tokens) + NEW - 1
    extra = stepper.positions - columns
    runs = stepper.encoder_calls - (model.spec.encoder is not None)
    return Measure(float(abs(extra) + abs(runs)), EXACT, subject.size)
