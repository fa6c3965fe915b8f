"""Encoder-decoders: ours beside transformers' Marian and CTranslate2, greedy and with beams.

On a CPU d 128, 2 + 2 layers, vocabulary 128, source 20, one thread; on a GPU the shape of 2017's
base model, bfloat16, vocabulary 32,000, source 32. The same weights everywhere. Nobody may end
early: the end is forbidden on every side.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from bench.clock import Row, Sides, installed, interleave, rows, said
from bench.peers import BOS, EOS, ctranslate_twin, fresh, marian_twin
from glassformer.generation.beam import beam_search
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.spec import presets
from glassformer.spec.decoding import BeamSpec, DecodeSpec


def crossed(
    cases: tuple[tuple[int, int], ...],
    *,
    new: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
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
        built = f"its wheel {version('ctranslate2')}; CT2_VERBOSE=1 prints the instructions chosen"
        yield said("generate", "CTranslate2", built)
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
            "native": NativeStepper(model),
        }
        for name, stepper in ours.items():
            sides[f"glassformer, {name}"] = ours_crossed(stepper, prompts, width, new)
        first = {name: first_tokens(call()) for name, call in sides.items()}
        same = [name for name, tokens in first.items() if tokens == first["glassformer, native"]]
        yield said("generate", case, f"the same tokens: {', '.join(same)}")
        times = interleave(sides, rounds=rounds, inner=1, warmup=1, clock=clock)
        yield from rows(times, bench="generate", case=case, baseline="transformers (Marian)")


#: The base model of 2017, and a model that is small enough to see whether everything runs.
BASE = {"vocab_size": 32_000, "d_model": 512, "n_heads": 8, "n_layers": 6, "max_seq_len": 256}
SMALL = {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}


def crossed_on_gpu(*, device: str, quick: bool, alone: bool, rounds: int = 3) -> Iterator[Row]:
    """Greedy and four beams, batch 1 and 64; tokens count once for each source."""
    shape, new = (SMALL, 16) if quick else (BASE, 128)
    model = fresh(presets.seq2seq(**shape), device=device, dtype=torch.bfloat16)
    stepper = RecordedStepper(model)
    theirs = None if alone else marian_twin(model, device=device).to(torch.bfloat16)
    for batch, width in ((1, 1), (64, 1), (1, 4), (64, 4)):
        kind = "greedy" if width == 1 else f"beam {width}"
        depth = f"d{shape['d_model']} {shape['n_layers']}+{shape['n_layers']}"
        case = f"bf16, encoder-decoder {depth}, {new} new, {kind}, batch {batch}"
        generator = torch.Generator().manual_seed(1)
        source_BS = torch.randint(3, shape["vocab_size"], (batch, 32), generator=generator)
        prompts = Prompts.of([[BOS]] * batch, sources=source_BS.tolist())
        sides: Sides = {}
        if theirs is not None:
            given = marian(theirs, source_BS.to(device), width, new)
            sides["transformers (Marian)"] = lambda given=given: given().cpu()
        sides["glassformer, recorded"] = ours_crossed(stepper, prompts, width, new)
        times = interleave(sides, rounds=rounds, inner=1, warmup=2)
        for row in rows(times, bench="generate", case=case, baseline=next(iter(sides))):
            speed = batch * new / float(str(row["median_ms"])) * 1e3
            yield row | {"name": f"{row['name']}: {speed:,.0f} tokens/s"}


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
