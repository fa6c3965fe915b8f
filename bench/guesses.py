"""Guesses read ahead on text: a trained model continues code and conversations, with and without.

The prompts are this project's own: windows of its source, and questions about its pages. Guesses
come from the text so far, or from the model's own INT4 twin. Then the same text at the size of
0.5 B parameters: a model that is wide enough, whose additional weights are zeros, so that it says
what the file's model says and takes the time of its size; the file's model in INT4 guesses for it.
`ratio` is the time of all prompts over that without guesses, in turns prompt by prompt.
"""

import argparse
import copy
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import glassformer
from bench.clock import Row, said
from glassformer.adapters.load import load
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.speculative import SpeculativeStepper
from glassformer.generation.streaming import generate_batch
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.quant.convert import quantize_model
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.model import ModelSpec, SwiGLU
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4

SOURCE = Path(glassformer.__file__).parent
PAGES = Path(__file__).parents[1] / "docs"
LONGEST = 96  # tokens of a prompt
QUESTIONS = (
    "Repeat this and explain it: {}",
    "Rewrite this in simple words: {}",
    "What does this say? {}",
)


def options(parser: argparse.ArgumentParser) -> None:
    """The model, and how much of it."""
    parser.add_argument("--gguf", type=Path, required=True, help="a trained decoder")
    parser.add_argument("--prompts", type=int, default=1_000, help="half code, half conversations")
    parser.add_argument("--wide-prompts", type=int, default=60, help="of those, at 0.5 B")
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """The file's model, then one of four times its size."""
    if quick:
        asked.prompts, asked.wide_prompts, asked.new = 4, 2, 8
    torch.set_num_threads(asked.threads)
    adapter = load(asked.gguf)
    model: Model = adapter.model
    assert adapter.tokenizer is not None, "a GGUF file has one"
    texts = {
        "code": code(adapter.tokenizer, asked.prompts // 2),
        "conversations": conversations(adapter.tokenizer, asked.prompts // 2),
    }
    spec = QuantSpec(scheme=Int4(), head=Int4(), indivisible="int8")
    twin = NativeStepper(quantize_model(copy.deepcopy(model), spec))
    drafts = {"guesses from the text": None, "guesses by its INT4 twin": twin}
    for name, prompts in texts.items():
        case = f"{asked.gguf.stem}, {name}, {len(prompts)} x {asked.new}"
        yield from compared(case, NativeStepper(model), drafts, prompts, asked.new)
    wide = widened(model)
    drafts = {"guesses from the text": None, "guesses by the INT4 model": twin}
    size = sum(p.numel() for p in wide.parameters()) / 1e6
    stepper = NativeStepper(wide)
    for name, prompts in texts.items():
        some = prompts[: asked.wide_prompts // 2]
        case = f"{size:.0f} M that say the same, {name}, {len(some)} x {asked.new}"
        yield from compared(case, stepper, drafts, some, asked.new)


def code(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Beginnings of windows of the package's source, from the start of a line."""
    draw, files, made = random.Random("code"), sorted(SOURCE.rglob("*.py")), []
    while len(made) < count:
        lines = draw.choice(files).read_text(encoding="utf-8").splitlines(keepends=True)
        first = draw.randrange(len(lines))
        if ids := tokenizer.encode("".join(lines[first : first + 20]))[:LONGEST]:
            made.append(ids)
    return made


def conversations(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Questions about paragraphs of the documentation, and the beginning of an answer."""
    pages = sorted(PAGES.glob("*.md"))
    parts = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    prose = [part for part in parts if part[:1].isalpha() and len(part) > 80]
    draw, made = random.Random("conversations"), []
    for number in range(count):
        asked = QUESTIONS[number % len(QUESTIONS)].format(draw.choice(prose)[:280])
        made.append(tokenizer.encode(f"User: {asked}\n\nAssistant:"))
    return made


@dataclass(slots=True)
class Side:
    """What one way of decoding took, and what it guessed."""

    seconds: float = 0.0
    same: int = 0
    tokens: int = 0
    passes: int = 0
    guessed: int = 0
    right: int = 0


def compared(
    case: str,
    stepper: NativeStepper,
    drafts: dict[str, NativeStepper | None],
    prompts: list[list[int]],
    new: int,
) -> Iterator[Row]:
    """Decode each prompt in every way, in turns; greedy, so that the tokens are to be the same."""
    steppers: dict[str, Stepper] = {"without guesses": stepper}
    steppers |= {name: SpeculativeStepper(stepper, draft=draft) for name, draft in drafts.items()}
    sides = {name: Side() for name in steppers}
    spec, names = DecodeSpec(max_new_tokens=new), list(steppers)
    for number, ids in enumerate(prompts):
        found = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            (one,) = generate_batch(steppers[name], Prompts.of([ids]), spec=spec, logprobs=False)
            sides[name].seconds += time.perf_counter() - begin
            found[name] = one
        for name, one in found.items():
            side, facts = sides[name], one.speculation
            side.same += one.tokens == found["without guesses"].tokens
            if facts is not None:
                side.tokens, side.passes = side.tokens + facts.tokens, side.passes + facts.passes
                side.guessed, side.right = side.guessed + facts.guessed, side.right + facts.right
    whole = sides["without guesses"].seconds
    for name, side in sides.items():
        row = said("guesses", case, name)
        row |= {"median_ms": round(side.seconds / len(prompts) * 1e3, 3)}
        yield row | {"ratio": round(side.seconds / whole, 3)}
        if name != "without guesses":
            share = side.right / max(1, side.guessed)
            what = f"{side.same} of {len(prompts)} the same, {side.right} of {side.guessed} guesses"
            what += f" right ({share:.0%}), {side.tokens / max(1, side.passes):.2f} tokens a pass"
            yield said("guesses", case, what)


def widened(model: Model) -> Model:
    """Return a decoder of twice the width that computes the same: what is new is zeros.

    A mean of squares over twice as many numbers is half as large, so gains are divided by sqrt 2.
    """
    made = build(twice(model.spec), generator=torch.Generator().manual_seed(1))
    narrow = model.state_dict()
    with torch.no_grad():
        for name, wide in made.state_dict().items():
            given = narrow[name]
            wide.zero_()
            corner = tuple(slice(0, size) for size in given.shape)
            wide[corner] = given / 2**0.5 if given.ndim == 1 else given
    return made.eval()


def twice(spec: ModelSpec) -> ModelSpec:
    """Return the same architecture with twice the width, heads and feed-forward."""
    layers = []
    for run_ in spec.decoder.layers:
        block = run_.block
        assert isinstance(block.ffn, SwiGLU), "Llama's feed-forward"
        attention = replace(
            block.attention,
            n_heads=2 * block.attention.n_heads,
            n_kv_heads=2 * block.attention.kv_heads,
        )
        ffn = replace(block.ffn, d_ff=2 * block.ffn.d_ff)
        layers.append(replace(run_, block=replace(block, mixer=attention, ffn=ffn)))
    decoder = replace(spec.decoder, layers=tuple(layers))
    return replace(spec, d_model=2 * spec.d_model, decoder=decoder)
