"""The native step beside the plain one: random prompts of every preset, in float32, INT8 and INT4.

Each prompt is continued greedily by both. Where tokens differ, the first difference is judged: it
is a tie if the two logits are nearer than rounding moves them. How far that is, is measured: the
plain step reads the same prompt again with what each product reads changed in the last bits,
several times, and the largest change of any logit, in any step up to there, is the scale of
rounding for this prompt. Rounded activations jump between levels, so the scale of INT8 and INT4 is
larger. A difference beyond twice the scale (either side is off by it once) is a defect. The logits
after some prompts are held to the same scale.

Then guesses read ahead, from the text and by a draft: the tokens of the step without them, greedy
and sampled; the gain is tokens for each pass over the weights. `--ledger FILE` writes every case.
"""

import argparse
import inspect
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.clock import Row, said
from glassformer.generation.native.stepper import IntegerWeights, NativeStepper
from glassformer.generation.speculative import SpeculativeStepper
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.kernels.threads import taking
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.nn.linear import Linear
from glassformer.quant.convert import quantize_model
from glassformer.spec import presets
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4, Int8

PROMPTS, NEW, TOGETHER, NOISES, LOGITS = 1_000, 12, 50, 16, 8
#: Changes of activations: a few roundings, as sums in another order make them.
EPS = 4 * torch.finfo(torch.float32).eps
SIZES = {"vocab_size": 97, "d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 96}
FORMS = {"float32": None, "INT8": Int8(), "INT4": Int4()}
#: Presets that continue no sequence.
SILENT = {"digits"}


@dataclass(frozen=True)
class Difference:
    """A prompt whose continuations part: at which token, how near the two were, and the scale."""

    preset: str
    form: str
    prompt: list[int]
    step: int
    tokens: tuple[int, int]
    gap: float
    scale: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.gap <= 2 * self.scale


def options(parser: argparse.ArgumentParser) -> None:
    """Add where to write every case."""
    parser.add_argument("--ledger", type=Path, help="a JSON line for each case, and each tie")


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Rows by preset and form, then those of guesses."""
    count = TOGETHER if quick else PROMPTS
    ledger: list[dict[str, object]] = []
    with taking(1):
        for name in sorted(presets.PRESETS.keys() - SILENT):
            for form in FORMS:
                same, found = _compared(name, form, count)
                ties = [one for one in found if one.is_tie]
                off = _off(name, form)
                case = {"preset": name, "form": form, "prompts": count, "same": same, "logits": off}
                ledger += [case, *(asdict(one) | {"tie": one.is_tie} for one in found)]
                what = f"{same} of {count} the same, {len(ties)} ties, {len(found) - len(ties)} "
                what += f"defects; logits off by {off:.2f} of rounding's scale"
                yield said("native", f"{name}, {form}", what)
        yield from _guessed(count, ledger)
    if asked.ledger is not None:
        asked.ledger.write_text("".join(json.dumps(line) + "\n" for line in ledger))


def _model(name: str, form: str) -> Model:
    known = inspect.signature(presets.PRESETS[name]).parameters
    sizes = {size: number for size, number in SIZES.items() if size in known}
    if "n_kv_heads" in known:
        sizes["n_kv_heads"] = 2
    model = build(presets.preset(name, **sizes), generator=torch.Generator().manual_seed(3))
    scheme = FORMS[form]
    if scheme is None:
        return model
    return quantize_model(model, QuantSpec(scheme=scheme, indivisible="int8"))


def _random_prompts(model: Model, count: int, seed: str) -> list[Prompts]:
    made, vocab = random.Random(seed), model.spec.vocab_size
    longest = min(40, model.spec.max_seq_len - NEW)

    def rows() -> list[list[int]]:
        lengths = [made.randint(1, longest) for _ in range(TOGETHER)]
        return [[made.randrange(vocab) for _ in range(length)] for length in lengths]

    return [
        Prompts.of(rows(), sources=None if model.spec.encoder is None else rows())
        for _ in range(count // TOGETHER)
    ]


def _compared(name: str, form: str, count: int) -> tuple[int, list[Difference]]:
    """Return how many continuations are the same, and what is known of the others."""
    model = _model(name, form)
    native, plain, same, found = NativeStepper(model), TorchStepper(model), 0, []
    for prompts in _random_prompts(model, count, name):
        spec = DecodeSpec(max_new_tokens=NEW)
        sides = [generate_batch(stepper, prompts, spec=spec) for stepper in (native, plain)]
        for row, (ours, theirs) in enumerate(zip(*sides, strict=True)):
            if ours.tokens == theirs.tokens:
                same += 1
                continue
            sources = None if prompts.sources is None else (prompts.sources[row],)
            one = Prompts((prompts.tokens[row],), sources)
            found.append(_judged(model, name, form, one, ours.tokens, theirs.tokens))
    return same, found


def _off(name: str, form: str) -> float:
    """Return the largest difference of logits after a prompt, of the scale of rounding there."""
    model = _model(name, form)
    native, worst = NativeStepper(model), 0.0
    (prompts, *_) = _random_prompts(model, TOGETHER, f"{name} logits")
    for row in range(LOGITS):
        sources = None if prompts.sources is None else (prompts.sources[row],)
        one = Prompts((prompts.tokens[row],), sources)
        plain_TV, scale = _scaled(model, one, ())
        difference = float((native.start(one, room=1)[0] - plain_TV).abs().max())
        worst = max(worst, difference / scale if difference else 0.0)
    return worst


def _scaled(model: Model, prompt: Prompts, tokens: Sequence[int]) -> tuple[Tensor, float]:
    """Return the plain step's logits, and the largest change that rounding makes in them."""
    logits_TV, scale = _plain_logits(model, prompt, tokens, noise=None), 0.0
    for seed in range(NOISES):
        noise = torch.Generator().manual_seed(seed)
        changed_TV = _plain_logits(model, prompt, tokens, noise=noise)
        scale = max(scale, float((changed_TV - logits_TV).abs().max()))
    return logits_TV, scale


def _judged(
    model: Model, name: str, form: str, prompt: Prompts, ours: Sequence[int], theirs: Sequence[int]
) -> Difference:
    step = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    logits_TV, scale = _scaled(model, prompt, ours[:step])
    a, b = ours[step], theirs[step]
    gap = abs(float(logits_TV[-1, a] - logits_TV[-1, b]))
    tokens = list(prompt.tokens[0])
    return Difference(name, form, tokens, step, (a, b), gap, scale)


def _plain_logits(
    model: Model, prompt: Prompts, tokens: Sequence[int], *, noise: torch.Generator | None
) -> Tensor:
    """Logits of each step; with noise, what every product reads is off by some roundings."""

    def shaken(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x  # the ids that a quantized table reads
        return x * (1 + EPS * (2 * torch.rand(x.shape, generator=noise) - 1))

    hooks = [
        part.register_forward_pre_hook(lambda _, given: (shaken(given[0]), *given[1:]))
        for part in model.modules()
        if noise is not None and isinstance(part, (Linear, IntegerWeights))
    ]
    try:
        stepper = TorchStepper(model)
        logits_BV, past = stepper.start(prompt, room=NEW)
        made = [logits_BV[0].clone()]
        for token in tokens:
            made.append(stepper.step(torch.tensor([token]), past=past)[0].clone())
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(made)


def _guessed(count: int, ledger: list[dict[str, object]]) -> Iterator[Row]:
    model, twin = _model("qwen", "float32"), _model("qwen", "INT8")
    stepper = NativeStepper(model)
    made = random.Random("guesses")
    for temperature in (0.0, 0.7):
        for how in ("from the text", "by its INT8 twin"):
            draft = None if how == "from the text" else NativeStepper(twin)
            same = tokens = passes = guessed = right = 0
            for number in range(count):
                piece = [made.randrange(97) for _ in range(made.randint(2, 6))]
                prompt = Prompts.of([piece * made.randint(1, 4)])
                spec = DecodeSpec(max_new_tokens=24, temperature=temperature, seed=number)
                guessing = SpeculativeStepper(stepper, draft=draft, clock=lambda: 0.0)
                (want,) = generate_batch(stepper, prompt, spec=spec)
                (found,) = generate_batch(guessing, prompt, spec=spec)
                same += found.tokens == want.tokens
                tokens += len(found.tokens)
                passes += guessing.facts.passes
                guessed += guessing.facts.guessed
                right += guessing.facts.right
            case = f"guesses {how}, temperature {temperature:g}"
            ledger.append({"case": case, "prompts": count, "same": same})
            what = f"{same} of {count} the same; {right} of {guessed} guesses right, "
            yield said("native", case, what + f"{tokens / passes:.2f} tokens a pass")
