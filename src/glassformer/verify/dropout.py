"""Whether dropout acts where the spec says: seen at the taps before and after each place."""

from dataclasses import replace

import torch
from torch import Tensor

from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.taps import Taps
from glassformer.spec.model import Dropout
from glassformer.verify.invariants import LENGTH, tokens_of
from glassformer.verify.measure import EXACT, Measure
from glassformer.verify.subject import Subject, with_source

#: For each place: the tap that is still the same, and the one that first differs.
PLACES = {
    "embedding": (None, "embed"),
    "attention": ("attn.weights", "attn.heads"),
    "residual": ("attn.out", "resid_mid"),
    "ffn": ("ffn.hidden", "ffn.out"),
}


def dropout_places(subject: Subject) -> Measure:
    """Each rate acts where its name says and nowhere before, in training only."""
    model, mistakes = subject.ours(), 0
    inputs = with_source(model.spec, tokens_of(subject, 2, LENGTH, seed=81), None)
    for place, (same, differs) in PLACES.items():
        for prefix in model.spec.stacks():
            twin = _with_dropout(model, prefix, place)
            block = f"{prefix}blocks.0."
            after = f"{prefix}embed" if differs == "embed" else f"{block}{differs}"
            before = f"{block}{same}" if same else None
            names = [after, before] if before else [after]
            first, second = (_one_run(twin, inputs, names, seed=seed) for seed in (1, 2))
            mistakes += torch.equal(first[after], second[after])
            if before:
                mistakes += not torch.equal(first[before], second[before])
            twin.eval()
            first, second = (_one_run(twin, inputs, [], seed=seed) for seed in (1, 2))
            mistakes += any(not torch.equal(first[key], second[key]) for key in first)
    return Measure(float(mistakes), EXACT, subject.size)


def _with_dropout(model: Model, prefix: str, place: str) -> Model:
    """A copy in training mode whose only dropout is that one."""
    rates = {"decoder": Dropout(), "encoder": Dropout()}
    rates[prefix.removesuffix(".") or "decoder"] = Dropout(**{place: 0.5})
    spec = model.spec
    spec = replace(spec, decoder=replace(spec.decoder, dropout=rates["decoder"]))
    if spec.encoder is not None:
        spec = replace(spec, encoder=replace(spec.encoder, dropout=rates["encoder"]))
    twin = type(model)(spec).to(next(model.parameters()))
    twin.load_state_dict(model.state_dict())
    return twin.train()


@torch.no_grad()
def _one_run(model: Model, inputs: Inputs, names: list[str], *, seed: int) -> dict[str, Tensor]:
    taps = Taps(read=names)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        answers = model(inputs, taps=taps)
    return {**taps.seen, **answers}
