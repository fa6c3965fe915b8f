"""Quantized layers and models beside float32: one thread by its CPU time, two by the wall clock.

The baseline is eager float32 (`F.linear`, and a model that decodes through it with a cache); our
fastest float32 stands beside it, so that nobody takes a better loop for a gain of quantization.
`ratio` = time over the baseline's. Sides take turns. Weights are drawn, not trained: only time and
memory are measured here.

`--model PATH` measures quality instead, on real weights: our schemes as they run, activations of 8
bits included, beside llama.cpp's formats (weights rounded by its own C where `xllamacpp` is there,
else by the `gguf` package; activations as they are; "weighted": by the calibration's inputs, as its
importance matrix does). Each has its bytes, the change of perplexity with its paired error, the
divergence, how often the likeliest token is the same, and greedy decoding from `--prompts` prompts.
`--windows 4 --length 1022 --text FILE` measures on 4 windows of 1,022 tokens of the end of a text.
`--model RUN --calibrations 4` measures a run of ours on its own examples, with GPTQ four times.
`--model PATH --kv-cache` measures keys and values in 8 bits beside float32: bytes of a position,
what they cost in perplexity, divergence and greedy texts, and the time of a step behind long
contexts (of zeros: only time is measured there), both in turn, weights as they are and in INT4.

A file that comes quantized has its weights on a grid, which a grid like it finds again: that shows
the grid, not the scheme. `--shuffle` exchanges channels first (the same function: their order means
nothing), which leaves groups of 32 without a grid.
"""

import argparse
import copy
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
import torch.nn.functional as F

from bench.clock import said
from bench.quant_peers import (
    ggml_packed,
    ggml_quantizer,
    installed,
    k_m_format,
    peers_of,
    torch_calls,
)
from glassformer.adapters.executors import fastest_stepper
from glassformer.adapters.load import load
from glassformer.adapters.native import NativeAdapter
from glassformer.data.batch import Batch
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.kernels.threads import taking
from glassformer.lab.measure.precision import agree, cache_cost
from glassformer.lab.quantize import (
    LENGTH,
    Material,
    of_manuals,
    of_task,
    of_text,
    run_of,
    tokens_of,
)
from glassformer.lab.runs.assemble import assemble
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.ffn import SwiGLU
from glassformer.nn.lora import apply_lora
from glassformer.quant.contents import (
    is_model_quantized,
    quantization_report,
    quantized_arrays,
    resident_bytes,
)
from glassformer.quant.convert import quantize_model, use_backend
from glassformer.quant.layers import QuantizedLinear
from glassformer.quant.mixed import bits_within
from glassformer.quant.schemes import QuantizedTensor, quantize_tensor
from glassformer.quant.smooth import SMOOTHING, Sample, inputs_of_layers, quantize_on
from glassformer.spec import presets
from glassformer.spec.decoding import DecodeSpec, KVCache
from glassformer.spec.errors import GlassError, InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import QuantSpec, quant_spec
from glassformer.spec.schemes import Float8, Int4, Int8
from glassformer.spec.train import LoRA, TrainSpec
from glassformer.training.torch_engine import TorchEngine

if TYPE_CHECKING:
    import gguf

LAYERS = ((512, 512), (896, 896), (4864, 896), (896, 4864))
ROWS = (1, 8, 64)
SCHEMES = {
    "int8 per channel": Int8(group=0),
    "int8 g32": Int8(group=32),
    "int4 g32": Int4(),
    "int4 g64, 16-bit scales": Int4(group=64, fine=False),
    "int4 g32 symmetric": Int4(group=32, symmetric=True),
}
INT8 = ("int8 per channel", "int8 g32")
SPECS = {
    "int8": QuantSpec(),
    "int4": QuantSpec(scheme=Int4(), method="absmax"),
    "int4 g64, 16-bit scales": QuantSpec(scheme=Int4(group=64, fine=False), method="absmax"),
}
PAST, PREFILL = 128, 64
#: Tokens of a prompt, and tokens that are decoded after it.
PROMPT, NEW = 16, 64
#: Training examples of a batch, and where batches begin: 256 examples in all.
ROWS_CALIBRATING, CALIBRATING = 16, range(0, 256, 16)
EAGER, FASTEST = "float32, eager", "float32, our fastest"

Side = Callable[[], object]
#: Steps of one call behind a long context.
STEPS = 2
KV_CACHES: tuple[KVCache, ...] = get_args(KVCache)


def options(parser: argparse.ArgumentParser) -> None:
    """`--model PATH`, and what to measure it on."""
    parser.add_argument("--model", help="a folder or GGUF file: measure quality on its weights")
    parser.add_argument("--text", help="a text to measure on; else Python's manuals")
    parser.add_argument("--windows", type=int, default=32, help="windows to measure on")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a window")
    parser.add_argument("--all", action="store_true", help="what is not a default of ours too")
    parser.add_argument("--shuffle", action="store_true", help="exchange channels before")
    parser.add_argument("--threads", type=int, default=2, help="with --model: on a busy machine, 1")
    parser.add_argument("--prompts", type=int, default=100, help="to decode 64 tokens from")
    parser.add_argument(
        "--calibrations",
        type=int,
        default=0,
        metavar="COUNT",
        help="with a run of ours: GPTQ on so many samples of its training examples instead",
    )
    parser.add_argument(
        "--tune", type=int, default=0, metavar="STEPS", help="LoRA over int4 beside float32 instead"
    )
    parser.add_argument("--kv-cache", action="store_true", help="keys and values in 8 bits instead")
    parser.add_argument(
        "--contexts", default="500,2000,4000,8000", help="with --kv-cache: positions to step behind"
    )
    parser.add_argument(
        "--only",
        default="",
        help="the row of this name, or rows with it, or several with commas between; without a "
        "model: layers, fbgemm, 10 M or 0.5 B",
    )


def run(
    device: str = "cpu", rounds: int = 7, asked: argparse.Namespace | None = None
) -> Iterator[dict[str, object]]:
    """Layers by shape, then whole models; or the quality of one model."""
    if asked is not None and asked.model is not None:
        measure = tuning if asked.tune else calibrations if asked.calibrations else quality
        measure = caches if asked.kv_cache else measure
        with taking(asked.threads):
            yield from measure(asked, device=device)
        return
    for title, found in installed().items():
        yield _row("peers", f"{title}: {'installed' if found else 'not installed'}")
    parts = {
        "layers": layers,
        "fbgemm": beside_fbgemm,
        "10 M": small_model,
        "0.5 B": large_model,
    }
    only = "" if asked is None else asked.only
    for count in (1, 2) if device == "cpu" else (torch.get_num_threads(),):
        with taking(count):
            for name, part in parts.items():
                if only in name:
                    yield from part(device=device, rounds=rounds)


@torch.no_grad()
def quality(asked: argparse.Namespace, *, device: str = "cpu") -> Iterator[dict[str, object]]:
    """Bytes and loss of one model in every scheme, and in llama.cpp's formats.

    On a GPU the reference computes, which has the bits of our C routines.
    """
    adapter = load(asked.model, device=device)
    full = adapter.model.float().eval()
    found = _found(asked, adapter)
    batches = _measured(asked, found)
    case = f"{Path(asked.model).name}, {tokens_of(batches):,} positions of {found.origin}"
    if asked.shuffle:
        shuffle(full)
        case += ", shuffled"
    prompts = _prompts(asked, full, found)
    answers = _greedy(full, prompts)
    known = Remembered(full)
    makers = dict(_makers(full, found.calibrating, every=asked.all))
    wanted = re.split(",(?! )", asked.only)  # names have a space after their commas
    for name in makers:
        if not any(name == one or (one in name and one not in makers) for one in wanted):
            continue
        make = makers[name]
        begin = time.process_time()
        small, size = make()
        made = time.process_time() - begin
        if device != "cpu" and is_model_quantized(small):
            use_backend(small, "reference")
        agreement = agree(known, small, batches)
        share = size / sum(4 * p.numel() for p in full.parameters())
        error = "" if agreement.change_error is None else f" ± {agreement.change_error:.2%}"
        said = (
            f"{name}: {share:.4f} of float32's bytes, perplexity {agreement.perplexity[1]:.4f} "
            f"({agreement.change:+.2%}{error}), KL {agreement.full_to_small.mean:.5f}, "
            f"same token {agreement.top1:.2%}"
        )
        if prompts:
            said += f", {_alike(answers, _greedy(small, prompts))}"
        yield _row(case, f"{said}, made in {made:.0f} CPU s")


class Remembered:
    """A model that reads each batch once: its logits are kept, as float32."""

    def __init__(self, model: Model) -> None:
        self.model, self.spec = model, model.spec
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        if id(batch) not in self.kept:
            self.kept[id(batch)] = self.model(batch)
        return self.kept[id(batch)]


@torch.no_grad()
def calibrations(asked: argparse.Namespace, *, device: str = "cpu") -> Iterator[dict[str, object]]:
    """A run of ours in int8 and int4, and by GPTQ on several samples of its training examples."""
    run = run_of(asked.model)
    if run is None:
        raise InputError("not a run of ours, which has a task", where=asked.model)
    adapter, task = load(asked.model, device=device), assemble(run).task
    full, material = adapter.model.float().eval(), of_task(task)
    known = Remembered(full)
    case = f"{Path(asked.model).name}, {sum(p.numel() for p in full.parameters()):,} parameters"

    def row(name: str, spec: QuantSpec, batches: Sequence[Batch]) -> tuple[dict, float]:
        small, _ = quantize_on(copy.deepcopy(full), batches, spec)
        found = agree(known, small, material.measuring)
        error = "" if found.change_error is None else f" ± {found.change_error:.3%}"
        said = f"{name}: perplexity {found.change:+.3%}{error}, KL {found.full_to_small.mean:.6f}"
        return _row(case, f"{said}, same token {found.top1:.2%}"), found.change

    for name, scheme in (("int8", Int8()), ("int4", Int4())):
        yield row(name, QuantSpec(scheme=scheme), material.calibrating)[0]
    count, changes = task.sizes()["train"], []
    for seed in range(asked.calibrations):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()
        picked = [order[i : i + ROWS_CALIBRATING] for i in CALIBRATING if i < count]
        batches = [task.batch("train", rows) for rows in picked]
        name = f"int4, GPTQ on sample {seed} of {tokens_of(batches):,} tokens"
        made, change = row(name, QuantSpec(scheme=Int4(), method="gptq"), batches)
        changes.append(change)
        yield made
    yield _row(case, f"int4, GPTQ, mean of {len(changes)}: {statistics.mean(changes):+.3%}")


def tuning(asked: argparse.Namespace, *, device: str = "cpu") -> Iterator[dict[str, object]]:
    """LoRA of rank 8 over float32 and over int4, on the same batches: loss, bytes and time.

    What a forward keeps for its backward is counted once per storage, the weights aside.
    """
    adapter = load(asked.model, device=device)
    full, tokenizer = adapter.model.float().eval(), adapter.get_tokenizer()
    length = asked.length
    if asked.text is None:
        found = of_manuals(tokenizer, full, length=length)
    else:
        found = of_text(Path(asked.text), tokenizer, full, length=length)
    held, steps = found.measuring[: asked.windows], asked.tune
    train = TrainSpec(steps=steps, batch_size=1, lr=2e-4, compile="off")
    case = f"{Path(asked.model).name}, LoRA 8, {steps} steps of {found.calibrating[0].tokens.size}"
    small = quantize_on(
        copy.deepcopy(full), found.calibrating[:SMOOTHING], QuantSpec(scheme=Int4())
    )
    for name, model in (("float32", full), ("int4", small[0])):
        before = sum(p.nbytes for p in [*model.parameters(), *model.buffers()])
        lora = LoRA()
        apply_lora(model, lora, generator=torch.Generator().manual_seed(0))
        engine = TorchEngine(model, train, lora=lora)
        first = _loss(model, held)
        own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
        kept: dict[int, int] = {}

        def keep(part: torch.Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> object:
            storage = part.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return part

        begin = time.process_time()
        for step in range(steps):
            batch = found.calibrating[step % len(found.calibrating)]
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
                engine.step([batch], lr=train.lr, seed=step)
        spent = (time.process_time() - begin) / max(1, steps)
        last = _loss(model, held)
        yield _row(
            case,
            f"{name}: weights {before / 2**20:.0f} MiB, kept for the backward "
            f"{sum(kept.values()) / 2**20:.0f} MiB, held-out loss {first:.4f} -> {last:.4f}",
            spent * 1e3,
        )


@torch.no_grad()
def _loss(model: Model, batches: Sequence[Batch]) -> float:
    """The mean negative log likelihood of the next token."""
    found = []
    for batch in batches:
        logits = model(batch)["next"].flatten(0, 1)
        found.append(F.cross_entropy(logits, torch.from_numpy(batch.targets["next"]).flatten()))
    return float(torch.stack(found).mean())


Made = Callable[[], tuple[Model, int]]


def _makers(
    full: Model, calibrating: Sequence[Batch], *, every: bool
) -> Iterator[tuple[str, Made]]:
    """Each scheme by name, and how the model is made in it, with its bytes.

    The defaults are what `glass quantize` does, and with `--method mse`; with `every`, also other
    grids, and quantization that leaves out smoothing or calibration.
    """
    own = ggml_quantizer() is not None
    specs = {
        "int8": QuantSpec(method="gptq"),
        "int4": QuantSpec(scheme=Int4(), method="gptq"),
        "int4.5": quant_spec(bits=4.5, method="gptq"),
    }
    if own:
        spec = QuantSpec(scheme=Int4())
        bits = bits_within(full.spec, spec, gguf_bytes(full, "Q4_K_M"))
        if 4 < bits < 8:
            specs["int4 and int8, the bytes of q4_k_m"] = quant_spec(bits=bits, method="gptq")
    sooner = {f"{name} by mse": replace(spec, method="mse") for name, spec in specs.items()}
    others = {
        "int4 by absmax": QuantSpec(scheme=Int4(), method="absmax"),
        "int8 by absmax": QuantSpec(method="absmax"),
        "fp8": QuantSpec(scheme=Float8()),
        "int4 g32, 16-bit scales": QuantSpec(scheme=Int4(group=32, fine=False)),
        "int8 per channel": QuantSpec(scheme=Int8(group=0)),
        "int4 g64, 16-bit scales": QuantSpec(scheme=Int4(group=64, fine=False)),
        "int4, head of 4 bits": QuantSpec(scheme=Int4(), head=Int4()),
    }
    for name, spec in {**specs, **sooner, **(others if every else {})}.items():
        yield name, lambda s=spec: _sized(quantize_on(copy.deepcopy(full), calibrating, s)[0])
        if every and spec.mean_bits is None:
            yield (
                f"{name}, not smoothed",
                lambda s=spec: _sized(
                    quantize_on(copy.deepcopy(full), calibrating, s, smoothing=False)[0]
                ),
            )
        if spec.mean_bits is None and spec.resolved_method != "gptq":
            yield (
                f"{name}, of weights alone",
                lambda s=spec: _sized(quantize_model(copy.deepcopy(full), s)),
            )
    for name in ("Q8_0", "Q5_0", "Q4_1", "Q4_0", *(("Q4_K_M",) if own else ())):
        yield f"llama.cpp's {name.lower()}", lambda n=name: in_gguf_format(full, n)
    if own:
        yield (
            "llama.cpp's q4_k_m, weighted",
            lambda: in_gguf_format(full, "Q4_K_M", inputs_of_layers(full, calibrating)),
        )


def _sized(model: Model) -> tuple[Model, int]:
    return model, sum(array.nbytes for array in quantized_arrays(model)[1].values())


def _found(asked: argparse.Namespace, adapter: NativeAdapter) -> Material:
    """What a model is measured on: a text, or manuals."""
    if asked.text is None:
        return of_manuals(adapter.tokenizer, adapter.model, length=asked.length)
    return of_text(Path(asked.text), adapter.tokenizer, adapter.model, length=asked.length)


def _measured(asked: argparse.Namespace, found: Material) -> list[Batch]:
    """The first batches of so many windows."""
    batches, count = [], 0
    for batch in found.measuring:
        if count < asked.windows:
            batches.append(batch)
            count += len(batch.tokens)
    return batches


def _prompts(asked: argparse.Namespace, model: Model, found: Material) -> list[list[int]]:
    """Prompts at even distances in the text that is measured on."""
    begin = min(PROMPT, model.spec.max_seq_len // 2)
    rows = torch.cat([torch.from_numpy(b.tokens).unfold(1, begin, begin) for b in found.measuring])
    rows = rows.flatten(0, 1)
    return rows[:: max(1, len(rows) // max(1, asked.prompts))][: asked.prompts].tolist()


def _alike(answers: list[list[int]], others: list[list[int]]) -> str:
    pairs = list(zip(answers, others, strict=True))
    alike = sum(one == other for one, other in pairs)
    first = statistics.mean(_shared(one, other) for one, other in pairs)
    return (
        f"greedy {alike} of {len(pairs)} texts of {len(answers[0])} tokens alike, "
        f"the first {first:.1f} on average"
    )


@torch.no_grad()
def caches(asked: argparse.Namespace, *, device: str = "cpu") -> Iterator[dict[str, object]]:
    """Keys and values in 8 bits beside float32: what they cost, and the time of a step."""
    adapter = load(asked.model)
    model, run = adapter.model.eval(), run_of(asked.model)
    found = _found(asked, adapter) if run is None else of_task(assemble(run).task)
    name = Path(asked.model).name
    if asked.windows:
        cost = cache_cost(model, _measured(asked, found))
        yield _row(f"{name}, {found.origin}", f"8-bit cache: {cost}")
    if prompts := _prompts(asked, model, found) if asked.prompts else []:
        forms = [_greedy(model, prompts, kv_cache=form) for form in KV_CACHES]
        yield _row(name, f"8-bit cache: {_alike(*forms)}")
    sides = {"weights as they are": model}
    if not is_model_quantized(model):
        sides["int4 weights"] = quantize_model(
            copy.deepcopy(model).float(), replace(SPECS["int4"], indivisible="int8")
        )
    for label, one in sides.items():
        for context in map(int, asked.contexts.split(",")):
            if context + STEPS > one.spec.max_seq_len:
                continue
            steps = {form: _behind(one, context, form) for form in KV_CACHES}
            times = _timed(steps, device="cpu", rounds=9)
            case = f"{name}, {label}, {_clock('cpu')[1]}"
            for form, values in times.items():
                pairs = zip(values, times["float"], strict=True)
                ratio = statistics.median(ours / theirs for ours, theirs in pairs)
                yield _row(
                    case, f"{form} cache of {context:,}", statistics.median(values) / STEPS, ratio
                )


def _behind(model: Model, context: int, kv_cache: KVCache) -> Side:
    """A call that reads some tokens, one by one, behind a context, and takes them back."""
    stepper = NativeStepper(model, kv_cache=kv_cache)
    past = stepper.empty(1, room=context + STEPS)
    stepper.pages.numbers[:] = 0  # memory that was never written would be one page of zeros
    past.own.reserve(context + STEPS)
    past.own.length[:] = context
    token = torch.tensor([0])

    def call() -> None:
        for _ in range(STEPS):
            stepper.step(token, past=past)
        past.rewind([context])

    return call


def _greedy(
    model: Model, prompts: list[list[int]], *, kv_cache: KVCache = "float"
) -> list[list[int]]:
    """The tokens that follow each prompt, each the likeliest."""
    room = model.spec.max_seq_len - max((len(prompt) for prompt in prompts), default=0)
    found, spec = [], DecodeSpec(max_new_tokens=min(NEW, room))
    stepper = fastest_stepper(model, kv_cache=kv_cache)
    for i in range(0, len(prompts), 10):
        some = Prompts.of(prompts[i : i + 10])
        found += [list(one.tokens) for one in generate_batch(stepper, some, spec=spec)]
    return found


def _shared(one: list[int], other: list[int]) -> int:
    """The tokens at the beginning that are the same."""
    pairs = zip(one, other, strict=False)  # one may have ended earlier
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def shuffle(model: Model) -> None:
    """Exchange channels of the residual stream, of feed-forwards and of values: the same function.

    For models of norms that see all channels alike, gated feed-forwards and one attention.
    """
    generator = torch.Generator().manual_seed(0)

    def order(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator).to(next(model.parameters()).device)

    stream = order(model.spec.d_model)
    for name, p in model.named_parameters():
        of_stream = p.ndim == 1 and "norm" in name and len(p) == len(stream)
        if of_stream or name.endswith(("o_proj.weight", "down_proj.weight")):
            p.copy_(p[stream])
        elif p.ndim == 2:
            p.copy_(p[:, stream])
    for part in model.modules():
        if isinstance(part, SwiGLU):
            inner = order(part.up_proj.d_out)
            for layer in (part.up_proj, part.gate_proj):
                layer.weight.copy_(layer.weight[inner])
            part.down_proj.weight.copy_(part.down_proj.weight[:, inner])
        if isinstance(part, MultiHeadAttention):
            width, heads = part.d_head, part.o_proj.d_in // part.d_head
            kv_heads = part.v_proj.d_out // width
            orders = [order(width) for _ in range(kv_heads)]
            rows = torch.cat([k * width + one for k, one in enumerate(orders)])
            shared = [orders[n * kv_heads // heads] + n * width for n in range(heads)]
            part.v_proj.weight.copy_(part.v_proj.weight[rows])
            part.o_proj.weight.copy_(part.o_proj.weight[:, torch.cat(shared)])


def in_gguf_format(
    full: Model, name: str, samples: Mapping[str, Sample] | None = None
) -> tuple[Model, int]:
    """Every matrix in one of llama.cpp's formats (a table has 8 bits at least), and the bytes.

    With samples, errors count by the size of the inputs.
    """
    import gguf

    model = copy.deepcopy(full)
    for path, p in model.named_parameters():
        kind = gguf_kind(full, path, p, name)
        if kind is None:
            continue
        sample = None if samples is None else samples.get(path.removesuffix(".weight"))
        weighed = None if sample is None else sample.rms_I.square().cpu()
        packed = ggml_packed(p.detach().cpu(), kind, weighed)
        p.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
    return model, gguf_bytes(full, name)


def gguf_kind(
    full: Model, path: str, p: torch.Tensor, name: str
) -> "gguf.GGMLQuantizationType | None":
    """What llama.cpp makes of a tensor in the format of this name; None: it stays float32."""
    import gguf

    if p.ndim != 2 or p.shape[1] % 32:
        return None
    if name == "Q4_K_M":
        return gguf.GGMLQuantizationType[k_m_format(path, p.shape[1], full.spec.n_layers)]
    return gguf.GGMLQuantizationType["Q8_0" if path.startswith("embed") else name]


def gguf_bytes(full: Model, name: str) -> int:
    """The bytes of all tensors in the format of this name."""
    import gguf

    size = 0
    for path, p in full.named_parameters():
        kind = gguf_kind(full, path, p, name)
        per, each = (1, 4) if kind is None else gguf.GGML_QUANT_SIZES[kind]
        size += p.numel() // per * each
    return size


def _row(case: str, name: str, ms: float | None = None, ratio: float | None = None) -> dict:
    return said(
        "quant",
        case,
        name,
        None if ms is None else round(ms, 4),
        ratio=None if ratio is None else round(ratio, 3),
    )


def _clock(device: str) -> tuple[Callable[[], float], str]:
    if device != "cpu":

        def now() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return now, "cuda"
    if torch.get_num_threads() == 1:
        return time.process_time, "1 thread, CPU time"
    return time.perf_counter, "2 threads, wall time"


def _timed(sides: dict[str, Side], *, device: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a call, every side in turn; enough calls to fill 20 ms."""
    now, _ = _clock(device)
    calls = {}
    for name, side in sides.items():
        side()
        begin = now()
        side()
        calls[name] = max(1, min(200, int(0.02 / max(1e-6, now() - begin))))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            begin = now()
            for _ in range(calls[name]):
                side()
            times[name].append((now() - begin) / calls[name] * 1e3)
    return times


def _rows(
    case: str, times: dict[str, list[float]], device: str, *, base: str = EAGER
) -> Iterator[dict[str, object]]:
    for name, values in times.items():
        shares = [ours / theirs for ours, theirs in zip(values, times[base], strict=True)]
        label = f"{case}, {_clock(device)[1]}"
        yield _row(label, name, statistics.median(values), statistics.median(shares))


@torch.inference_mode()
def layers(
    *,
    device: str = "cpu",
    rounds: int = 7,
    shapes: tuple[tuple[int, int], ...] = LAYERS,
    batches: tuple[int, ...] = ROWS,
) -> Iterator[dict[str, object]]:
    """One product of each shape, by every backend that serves."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in shapes:
        weight = (torch.randn(outputs, inputs, generator=generator) * 0.02).to(device)
        made = {name: quantize_tensor(weight, scheme) for name, scheme in SCHEMES.items()}
        peers = dict(peers_of(weight)) if device == "cpu" else {}
        for rows in batches:
            x = torch.randn(rows, inputs, generator=generator).to(device)
            sides: dict[str, Side] = {EAGER: lambda x=x, w=weight: F.linear(x, w)}
            for name, tensor in made.items():
                for backend in ("c", "aten"):
                    layer = _layer(tensor, backend)
                    if layer is not None:
                        sides[f"{name}, {backend}"] = lambda x=x, q=layer: q(x)
            sides |= {name: lambda x=x, call=call: call(x) for name, call in peers.items()}
            times = _timed(sides, device=device, rounds=rounds)
            yield from _rows(f"layer {outputs}x{inputs}, {rows} rows", times, device)


@torch.inference_mode()
def beside_fbgemm(*, device: str = "cpu", rounds: int = 7) -> Iterator[dict[str, object]]:
    """Our INT8 products over torch's FBGEMM, interleaved with nothing else between them."""
    if device != "cpu":
        return
    built = f"torch {torch.__version__}, which chooses {torch.backends.cpu.get_cpu_capability()}"
    yield _row("FBGEMM", f"{built} at run time")
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in LAYERS[1:]:
        weight = torch.randn(outputs, inputs, generator=generator) * 0.02
        [(base, theirs)] = torch_calls(weight)
        tensors = {name: quantize_tensor(weight, SCHEMES[name]) for name in INT8}
        ours = {name: QuantizedLinear(t, None, backend="c") for name, t in tensors.items()}
        for rows in (1, 64):
            x = torch.randn(rows, inputs, generator=generator)
            sides: dict[str, Side] = {base: lambda x=x, call=theirs: call(x)}
            sides |= {name: lambda x=x, layer=layer: layer(x) for name, layer in ours.items()}
            times = _timed(sides, device=device, rounds=3 * rounds)
            case = f"layer {outputs}x{inputs}, {rows} rows, over FBGEMM"
            yield from _rows(case, times, device, base=base)


def _layer(tensor: QuantizedTensor, backend: str) -> QuantizedLinear | None:
    try:
        return QuantizedLinear(tensor, None, backend=backend)
    except GlassError:
        return None


def small_model(*, device: str, rounds: int) -> Iterator[dict[str, object]]:
    """About 10 M parameters, untied as its measurements elsewhere are; decoding, batch 1."""
    spec = presets.qwen(
        vocab_size=4096, d_model=320, n_heads=5, n_kv_heads=5, d_head=64, d_ff=864, n_layers=6,
        max_seq_len=256, qk_norm=False,
    )  # fmt: skip
    models = _models(spec, device)
    yield from _bytes("10 M", models)
    sides = _decoders(models)
    yield from _rows("10 M, decode", _timed(sides, device=device, rounds=rounds), device)
    sides = _prefills(models)
    yield from _rows("10 M, prefill 64", _timed(sides, device=device, rounds=rounds), device)


def large_model(*, device: str, rounds: int) -> Iterator[dict[str, object]]:
    """Qwen2.5-0.5B's shape, all of it."""
    spec = presets.qwen(
        vocab_size=151_936, d_model=896, n_heads=14, n_kv_heads=2, d_head=64, d_ff=4864,
        n_layers=24, max_seq_len=256, qk_norm=False,
    )  # fmt: skip
    models = _models(spec, device)
    yield from _bytes("Qwen2.5-0.5B shape", models)
    for name, make in (("decode", _decoders), ("prefill 64", _prefills)):
        times = _timed(make(models), device=device, rounds=rounds)
        yield from _rows(f"Qwen2.5-0.5B shape, {name}", times, device)


def _models(spec: ModelSpec, device: str) -> dict[str, Model]:
    full = build(spec, generator=torch.Generator().manual_seed(0), device=device)
    found: dict[str, Model] = {EAGER: full}
    for name, wish in SPECS.items():
        found[name] = quantize_model(copy.deepcopy(full), wish)
    return found


def _bytes(case: str, models: dict[str, Model]) -> Iterator[dict[str, object]]:
    linears = sum(
        p.numel() * 4 for p in models[EAGER].parameters() if p.ndim == 2
    )  # the shared table is the head
    for name, model in models.items():
        report = quantization_report(model)
        if report:
            with torch.inference_mode():
                model(torch.zeros(1, 2, dtype=torch.long))
            report = quantization_report(model)
            share = sum(layer.nbytes for layer in report.layers.values()) / linears
            whole = resident_bytes(model) / resident_bytes(models[EAGER])
            kinds = ", ".join(report.backends)
            yield _row(case, f"{name}: linears {share:.3f} x, resident {whole:.3f} x ({kinds})")


def _decoders(models: dict[str, Model]) -> dict[str, Side]:
    """One step each, at a past of 128 that does not grow: the same place is written again."""
    sides: dict[str, Side] = {EAGER: _step(TorchStepper(models[EAGER]))}
    for name, model in models.items():
        sides[FASTEST if name == EAGER else name] = _step(NativeStepper(model))
    return sides


def _step(stepper: TorchStepper | NativeStepper) -> Side:
    prompt = torch.randint(1000, (PAST,), generator=torch.Generator().manual_seed(1)).tolist()
    _, past = stepper.start(Prompts.of([prompt]), room=2)
    token = torch.zeros(1, dtype=torch.long)

    def step() -> object:
        past.rewind([PAST])
        return stepper.step(token, past=past)

    return step


def _prefills(models: dict[str, Model]) -> dict[str, Side]:
    tokens = torch.randint(1000, (1, PREFILL), generator=torch.Generator().manual_seed(2))
    return {name: _prefill(model, tokens) for name, model in models.items()}


def _prefill(model: Model, tokens: torch.Tensor) -> Side:
    @torch.inference_mode()
    def call() -> object:
        hidden = model.hidden(model.inputs(Inputs(tokens)))
        return model.project(hidden[:, -1], "next")

    return call
