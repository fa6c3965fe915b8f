"""Decoding: ours with a cache and native, beside a loop without a cache and other people's engines.

The same weights on every side (`bench.peers`), greedy or beams, exactly so many new tokens.
`of_limit` is the share of the memory-bandwidth limit: the bytes that a step must read, weights and
cache, over the bandwidth that this machine showed in the same run.
"""

import argparse
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.clock import Row, Sides, bandwidth, growth, installed, interleave, rows, said
from bench.peers import EOS, fresh, qwen_pair
from bench.translation import crossed, crossed_on_gpu
from glassformer.checks.rows.decoding import disagreements
from glassformer.costs.estimates import cache_bytes
from glassformer.data.automata.library import brackets
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.generation.constraint import Constraint
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.quant.convert import quantize_model
from glassformer.spec import presets
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4, Int8, Scheme

#: 25 M parameters, and the shape of Qwen2.5-0.5B.
MEDIUM = {
    "n_layers": 6, "d_model": 512, "n_heads": 8, "n_kv_heads": 2, "d_ff": 1408,
    "vocab_size": 16_000,
}  # fmt: skip
HALF_BILLION = {
    "n_layers": 24, "d_model": 896, "n_heads": 14, "n_kv_heads": 2, "d_ff": 4864,
    "vocab_size": 151_936,
}  # fmt: skip
TINY = {
    "n_layers": 2, "d_model": 128, "n_heads": 2, "n_kv_heads": 1, "d_ff": 256, "vocab_size": 500,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much is measured; `quick` is for a look whether everything runs."""

    rounds: int = 5
    new: int = 100
    small: tuple[tuple[int, int], ...] = ((32, 1), (64, 2), (128, 2), (256, 4))
    crossed: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (32, 1), (1, 4), (8, 4))  # batch, beams
    #: Name, shape, new tokens, batches, rounds.
    qwens: tuple[tuple[str, dict[str, int], int, tuple[int, ...], int], ...] = (
        ("25 M", MEDIUM, 100, (1, 8, 32), 5),
        ("Qwen2.5-0.5B's shape", HALF_BILLION, 32, (1, 8), 3),
    )
    prompt: int = 128
    draws: int = 10_000
    searches: int = 1_000
    generations: int = 1_000
    asked: int = 1_000  # prompts of every preset


QUICK = Size(
    rounds=2,
    new=12,
    small=((32, 1),),
    crossed=((1, 1), (2, 2)),
    qwens=(("0.3 M", TINY, 12, (1, 2), 2),),
    prompt=16,
    draws=500,
    searches=20,
    generations=50,
    asked=12,
)


def options(parser: argparse.ArgumentParser) -> None:
    """A part alone."""
    parser.add_argument(
        "--only",
        choices=("native", "crossed"),
        help="native = plain, every preset; or encoder-decoders",
    )
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="of the encoder-decoders"
    )
    parser.add_argument(
        "--ours", action="store_true", help="on a GPU: without the others, who compile for minutes"
    )


def run(
    device: str = "cpu", quick: bool = False, asked: argparse.Namespace | None = None
) -> Iterator[Row]:
    """Every comparison in turn; on a GPU the one that a GPU is for."""
    size = QUICK if quick else Size()
    if asked is not None and asked.only == "native":
        yield from native_is_plain(size)
        return
    by_processor = asked is not None and asked.clock == "cpu"
    clock = time.process_time if by_processor else time.perf_counter
    if asked is not None and asked.only == "crossed" and device == "cpu":
        torch.set_num_threads(1)
        yield from crossed(size.crossed, new=size.new, rounds=size.rounds, clock=clock)
        return
    if device != "cpu":
        shape, batches = (TINY, (1, 4)) if quick else (HALF_BILLION, (1, 128))
        alone = asked is not None and asked.ours
        new = 24 if quick else 256
        yield from on_gpu(shape, batches, new=new, device=device, size=size, alone=alone)
        yield from crossed_on_gpu(device=device, quick=quick, alone=alone)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models are slower on two, and much slower on a busy machine
    for d_model, n_layers in size.small:
        yield from against_naive(d_model, n_layers, size=size)
    yield from crossed(size.crossed, new=size.new, rounds=size.rounds, clock=clock)
    yield from constrained(size)
    yield from flat(size)
    torch.set_num_threads(threads)
    for name, shape, new, batches, rounds in size.qwens:
        yield from against_transformers(
            name, shape, new=new, batches=batches, rounds=rounds, size=size
        )
    yield from native_is_plain(size)
    wrong = len(list(disagreements(size.searches, steppers=(TorchStepper, RecordedStepper))))
    yield said(
        "generate", "beam against brute force", f"{wrong} wrong lists of {size.searches} models"
    )


def greedy(stepper: Stepper, prompts: object, *, new: int) -> Callable[[], list]:
    """A call that decodes greedily, without log-probabilities, which the peers do not give."""
    spec = DecodeSpec(max_new_tokens=new)
    return lambda: generate_batch(stepper, prompts, spec=spec, logprobs=False)  # type: ignore[arg-type]


# --- a loop without a cache ---------------------------------------------------------------------


def against_naive(d_model: int, n_layers: int, *, size: Size) -> Iterator[Row]:
    """One prompt token, batch 1, one thread: ratio = time over the naive loop's."""
    spec = presets.core(d_model=d_model, n_layers=n_layers, d_ff=4 * d_model, max_seq_len=128)
    model = fresh(spec, device="cpu")
    sides: Sides = {
        "naive loop, no cache": greedy(NaiveStepper(model), [[1]], new=size.new),
        "glassformer, cached": greedy(TorchStepper(model), [[1]], new=size.new),
        "glassformer, native": greedy(NativeStepper(model), [[1]], new=size.new),
    }
    case = f"d{d_model} L{n_layers}, {size.new} tokens, batch 1"
    times = interleave(sides, rounds=size.rounds, inner=1, warmup=1)
    yield from rows(times, bench="generate", case=case, baseline="naive loop, no cache")


# --- decoder-only: transformers -----------------------------------------------------------------


def hugging_face(theirs: torch.nn.Module, given_BT: torch.Tensor, *, new: int, cache: str | None):
    """`transformers.generate` of exactly so many tokens; the result is waited for."""
    options = {} if cache is None else {"cache_implementation": cache}
    mask = torch.ones_like(given_BT)

    def call() -> torch.Tensor:
        made = theirs.generate(
            given_BT,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            **options,
        )
        return made.cpu()

    return call


def against_transformers(
    name: str,
    shape: dict[str, int],
    *,
    new: int,
    batches: tuple[int, ...],
    rounds: int,
    size: Size,
) -> Iterator[Row]:
    """Qwen2's architecture in float32."""
    if not installed("transformers"):
        yield said("generate", f"Qwen2 {name}", "transformers is not installed")
        return
    model, theirs = qwen_pair(shape, length=size.prompt + new, device="cpu")
    native = NativeStepper(model)
    for batch in batches:
        case = f"Qwen2 {name}, prompt {size.prompt}, {new} new, batch {batch}"
        generator = torch.Generator().manual_seed(1)
        tokens_BT = torch.randint(shape["vocab_size"], (batch, size.prompt), generator=generator)
        prompts = tokens_BT.tolist()
        sides: Sides = {
            "transformers": hugging_face(theirs, tokens_BT, new=new, cache=None),
            "transformers, static cache": hugging_face(theirs, tokens_BT, new=new, cache="static"),
            "glassformer, cached": greedy(TorchStepper(model), prompts, new=new),
            "glassformer, native": greedy(native, prompts, new=new),
        }
        yield said(
            "generate",
            case,
            agreement(sides["glassformer, native"](), sides["transformers"](), new),
        )
        limit_ms = limit(model, batch=batch, prompt=size.prompt, new=new, device="cpu")
        times = interleave(sides, rounds=rounds, inner=1, warmup=1)
        yield from with_limit(times, case, "transformers", limit_ms)


def agreement(ours: list, theirs: torch.Tensor, new: int) -> str:
    """How many of the new tokens are theirs."""
    made = torch.tensor([list(one.tokens) for one in ours])
    same = (made == theirs[:, -new:]).sum()
    return f"tokens equal to transformers': {int(same)} of {made.numel()}"


def with_limit(
    times: dict[str, list[float]], case: str, baseline: str, limit_ms: float
) -> Iterator[Row]:
    """Rows with the share of the limit."""
    for row in rows(times, bench="generate", case=case, baseline=baseline):
        yield row | {"of_limit": round(limit_ms / float(str(row["median_ms"])), 3)}


def limit(model: Model, *, batch: int, prompt: int, new: int, device: str) -> float:
    """Milliseconds of reading alone: each step all weights once, and the cache so far."""
    itemsize = next(model.parameters()).itemsize
    mean = prompt + new // 2
    cache = cache_bytes(model.spec, batch=batch, length=mean, itemsize=itemsize)
    return new * (weight_bytes(model) + cache) / bandwidth(device) * 1e3


def weight_bytes(model: Model) -> int:
    """What one step reads: every weight once; of an embedding that is not the head, nothing."""
    tied = model.output_embedding()
    own = {id(p) for p in tied.parameters()}
    head_is_tied = not any(p.ndim > 1 for p in model.heads.parameters())
    return sum(p.nbytes for p in model.parameters() if head_is_tied or id(p) not in own)


STATIC = "transformers, static cache"


def on_gpu(
    shape: dict[str, int],
    batches: tuple[int, ...],
    *,
    new: int,
    device: str,
    size: Size,
    alone: bool,
) -> Iterator[Row]:
    """bfloat16, the whole step as one graph, beside transformers with its static cache."""
    length, theirs = size.prompt + new, None
    if alone:
        spec = presets.qwen(d_head=64, max_seq_len=length, qk_norm=False, **shape)
        model = fresh(spec, device=device, dtype=torch.bfloat16)
    else:
        model, theirs = qwen_pair(shape, length=length, device=device, dtype=torch.bfloat16)
    ours = RecordedStepper(model)
    for batch in batches:
        case = f"bf16, prompt {size.prompt}, {new} new, batch {batch}"
        generator = torch.Generator().manual_seed(1)
        tokens_BT = torch.randint(shape["vocab_size"], (batch, size.prompt), generator=generator)
        given_BT, sides = tokens_BT.to(device), {}
        if theirs is not None:
            sides[STATIC] = hugging_face(theirs, given_BT, new=new, cache="static")
        sides["glassformer, recorded"] = greedy(ours, tokens_BT.tolist(), new=new)
        limit_ms = limit(model, batch=batch, prompt=size.prompt, new=new, device=device)
        times = interleave(sides, rounds=3, inner=1, warmup=2)
        for row in with_limit(times, case, next(iter(sides)), limit_ms):
            speed = batch * new / float(str(row["median_ms"])) * 1e3
            yield row | {"name": f"{row['name']}: {speed:,.0f} tokens/s"}
    if theirs is None:
        return
    # Random weights give near ties, which bfloat16 rounds either way: tokens are held in float32.
    model.float(), theirs.float()
    given_BT = tokens_BT[:1].to(device)
    made = (
        greedy(ours, tokens_BT[:1].tolist(), new=32)(),
        hugging_face(theirs, given_BT, new=32, cache=None)(),
    )
    yield said("generate", "float32, batch 1", agreement(*made, 32))  # type: ignore[arg-type]


# --- constraints, memory ------------------------------------------------------------------------


def constrained(size: Size) -> Iterator[Row]:
    """What a constraint costs: brackets, sampled, batch 32; ratio = time over unconstrained."""
    names = Vocab(("PAD", "BOS", "EOS", "(", ")"))
    model = fresh(presets.core(vocab_size=5, max_seq_len=256), device="cpu")
    stepper, prompts = NativeStepper(model), [[1]] * 32
    machine = brackets(4)
    bound = Constraint(machine, tokenizer=names)
    new = size.new
    spec = DecodeSpec(max_new_tokens=new + 1, min_new_tokens=new, temperature=1.0, eos=(EOS,))
    sides: Sides = {
        "unconstrained": lambda: generate_batch(stepper, prompts, spec=spec),
        "constrained": lambda: generate_batch(stepper, prompts, spec=spec, constraint=bound),
    }
    times = interleave(sides, rounds=2 * size.rounds, inner=1, warmup=1)
    case = f"brackets-4, sampled, batch 32, {new} tokens"
    yield from rows(times, bench="generate", case=case, baseline="unconstrained")
    short, legal = DecodeSpec(max_new_tokens=20, temperature=2.0, eos=(EOS,)), 0
    for first in range(0, size.draws, 500):
        made = generate_batch(
            stepper,
            [[1]] * 500,
            spec=short,
            constraint=bound,
            rows=range(first, first + 500),
            logprobs=False,
        )
        legal += sum(machine.accepts(names.names[t] for t in g.tokens[:-1]) for g in made)
    yield said("generate", "brackets-4, sampled, up to 20 tokens", f"{legal} of {size.draws} legal")


def flat(size: Size) -> Iterator[Row]:
    """Memory over many generations of one decoder: prompts of changing lengths and batches."""
    model = fresh(presets.core(), device="cpu")
    decoder, count = RecordedStepper(model), size.generations
    spec = DecodeSpec(max_new_tokens=8)

    def once(number: int) -> None:
        prompts = [[1] * (1 + (number + row) % 7) for row in range(1 + number % 3)]
        generate_batch(decoder, prompts, spec=spec)

    grown = growth(once, times=count, warmup=max(21, count // 10))
    expected = cache_bytes(model.spec, batch=3, length=7 + 8, itemsize=4)
    yield said("generate", f"{count} generations", grown)
    yield said(
        "generate",
        f"{count} generations",
        f"cache {decoder.memory_bytes:,} bytes, predicted {expected:,}",
    )


# --- the native step beside the plain one ---------------------------------------------------------

#: Sizes of presets, those that a preset has; inputs are multiples of 32 where they can be.
SMALL = {"vocab_size": 199, "d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 96}
SCHEMES: dict[str, Scheme | None] = {"float32": None, "INT8": Int8(), "INT4": Int4()}
#: A gap of two logits that is rounding, in standard deviations of all: of sums of float32, and of
#: an activation that is rounded to the other of two integers.
ROUNDING = {"float32": 1e-4, "INT8": 2e-2, "INT4": 2e-2}
TOGETHER = 50  # prompts in a batch


def native_is_plain(size: Size, names: Sequence[str] = ()) -> Iterator[Row]:
    """Random prompts of each preset that continues text: the plain step's tokens, or a tie."""
    for name in names or sorted(presets.PRESETS.keys() - {"digits"}):
        known = inspect.signature(presets.PRESETS[name]).parameters
        shape = {key: number for key, number in SMALL.items() if key in known}
        if "n_kv_heads" in known:
            shape["n_kv_heads"] = 2
        for kind, scheme in SCHEMES.items():
            model = fresh(presets.preset(name, **shape), device="cpu")
            if scheme is not None:
                model = quantize_model(model, QuantSpec(scheme=scheme, indivisible="int8"))
            same, gaps = compared(model, size.asked)
            wrong = sum(gap > ROUNDING[kind] for gap in gaps)
            worst = f", the widest gap {max(gaps):.1e} deviations" if gaps else ""
            told = (
                f"{same} of {size.asked} the same tokens, {len(gaps) - wrong} ties, {wrong} wrong"
            )
            yield said("generate", f"native = plain, {name}, {kind}", told + worst)


def compared(model: Model, count: int) -> tuple[int, list[float]]:
    """Return how many prompts give the same tokens, and for each other the gap where they part.

    The gap is between the plain step's logits of the two tokens, in deviations of its logits.
    """
    native, plain = NativeStepper(model), TorchStepper(model)
    draw, spec = random.Random(7), DecodeSpec(max_new_tokens=16)
    same, gaps = 0, []
    for first in range(0, count, TOGETHER):
        texts = [
            [draw.randrange(model.spec.vocab_size) for _ in range(draw.randint(1, 24))]
            for _ in range(min(TOGETHER, count - first))
        ]
        prompts = Prompts.of(texts, sources=texts[::-1] if model.spec.encoder else None)
        pairs = zip(
            generate_batch(native, prompts, spec=spec, logprobs=False),
            generate_batch(plain, prompts, spec=spec, logprobs=False),
            strict=True,
        )
        for row, (one, other) in enumerate(pairs):
            if one.tokens == other.tokens:
                same += 1
                continue
            both = enumerate(zip(one.tokens, other.tokens, strict=False))
            parts = next(i for i, (a, b) in both if a != b)
            read = [*texts[row], *other.tokens[:parts]]
            source = [prompts.sources[row]] if prompts.sources else None
            logits_V = plain.start(Prompts.of([read], sources=source), room=1)[0][0]
            gap = logits_V[other.tokens[parts]] - logits_V[one.tokens[parts]]
            gaps.append(float(gap.abs() / logits_V.std()))
    return same, gaps
