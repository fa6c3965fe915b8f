"""Encoder-decoders: ours beside transformers' Marian and CTranslate2, greedy and with beams.

d 128, 2 + 2 layers, vocabulary 128, source 20, one thread, the same weights everywhere. Nobody may
end early: the end is forbidden on every side.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.clock import Row, Sides, installed, interleave, rows, said
from bench.peers import BOS, EOS, ctranslate_twin, fresh, marian_twin
from glassformer.generation.beam import beam_search
from glassformer.generation.fast.native import NativeStepper
from glassformer.generation.fast.stepper import FastStepper
from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import Stepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.spec import presets
from glassformer.spec.decoding import BeamSpec, DecodeSpec


def crossed(cases: tuple[tuple[int, int], ...], *, new: int, rounds: int) -> Iterator[Row]:
    """For each batch and number of beams: every engine in turn."""
    spec = presets.seq2seq(vocab_size=128, d_model=128, n_heads=4, n_layers=2, max_seq_len=128)
    model = fresh(spec, device="cpu")
    if not installed("transformers"):
        yield said("generate", "encoder-decoder d128 2+2", "transformers is not installed")
        return
    theirs, translator = marian_twin(model, device="cpu"), None
    if installed("ctranslate2"):
        with tempfile.TemporaryDirectory() as place:
            translator = ctranslate_twin(model, Path(place) / "model", threads=1)
    else:
        yield said("generate", "encoder-decoder d128 2+2", "CTranslate2 is not installed")
    for batch, width in cases:
        kind = "greedy" if width == 1 else f"beam {width}"
        case = f"encoder-decoder d128 2+2, {new} new, {kind}, batch {batch}"
        generator = torch.Generator().manual_seed(1)
        source_BS = torch.randint(3, 128, (batch, 20), generator=generator)
        prompts = Prompts.of([[BOS]] * batch, sources=source_BS.tolist())
        sides: Sides = {"transformers (Marian)": marian(theirs, source_BS, width, new)}
        if translator is not None:
            sides["CTranslate2"] = translated(translator, source_BS, width, new)
        ours = {
            "cached": TorchStepper(model),
            "lean": FastStepper(model),
            "native": NativeStepper(model),
        }
        for name, stepper in ours.items():
            sides[f"glassformer, {name}"] = ours_crossed(stepper, prompts, width, new)
        first = {name: first_tokens(call()) for name, call in sides.items()}
        same = [name for name, tokens in first.items() if tokens == first["glassformer, lean"]]
        yield said("generate", case, f"the same tokens: {', '.join(same)}")
        times = interleave(sides, rounds=rounds, inner=1, warmup=1)
        yield from rows(times, bench="generate", case=case, baseline="transformers (Marian)")


def ours_crossed(stepper: Stepper, prompts: Prompts, width: int, new: int) -> Callable[[], object]:
    """Greedy or beams, no end."""
    if width == 1:
        spec = DecodeSpec(max_new_tokens=new, forbidden=(EOS,))
        return lambda: generate_batch(stepper, prompts, spec=spec, logprobs=False)
    beams = BeamSpec(width=width, n_best=1, alpha=0.0, max_new_tokens=new, forbidden=(EOS,))
    return lambda: beam_search(stepper, prompts, spec=beams)


def marian(
    theirs: torch.nn.Module, source_BS: torch.Tensor, width: int, new: int
) -> Callable[[], torch.Tensor]:
    """transformers' encoder-decoder."""
    mask_BS = torch.ones_like(source_BS)
    beams = {} if width == 1 else {"num_beams": width, "length_penalty": 0.0}
    return lambda: theirs.generate(
        source_BS,
        attention_mask=mask_BS,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        **beams,
    )


def translated(translator, source_BS: torch.Tensor, width: int, new: int) -> Callable[[], list]:
    """CTranslate2's."""
    words = [[f"t{token}" for token in row] for row in source_BS.tolist()]
    return lambda: translator.translate_batch(
        words,
        beam_size=width,
        max_decoding_length=new,
        min_decoding_length=new,
        length_penalty=0.0,
        max_input_length=0,
    )


def first_tokens(made: object) -> list[int]:
    """The best answer to the first source, whoever gave it."""
    if isinstance(made, torch.Tensor):
        return made[0, 1:].tolist()
    one = made[0]  # type: ignore[index]
    if hasattr(one, "tokens"):
        return list(one.tokens)
    best = one.hypotheses[0]
    return list(best.tokens) if hasattr(best, "tokens") else [int(name[1:]) for name in best]
