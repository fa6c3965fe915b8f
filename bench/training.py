"""Training steps: ours beside plain PyTorch and transformers; the complete loop beside its step.

Llama shapes of 0.3 to 124 M parameters, and GPT-2's, the same batches, AdamW, bf16 on a GPU and
float32 on a CPU. Every side runs blocks of steps in turn; a row is the median time of one step.
FLOPs are 6 N + 12 L D T a token. The loop is a run as `glass train` makes it, with evaluations,
samples, probes and checkpoints.
"""

import argparse
import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.clock import Row, interleave, said
from glassformer.byhand.c_table import C
from glassformer.data.batch import Batch
from glassformer.gpu.training_graphs import Graphs
from glassformer.lab.recipes import plan_run
from glassformer.lab.runs.run import TrainingRun
from glassformer.models.model import build
from glassformer.nn.lora import apply_lora
from glassformer.spec import presets
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec, NextHead
from glassformer.spec.train import AdamW, LoRA, TrainSpec
from glassformer.training.fit import StepRecord, fit
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine


class Size(NamedTuple):
    """A Llama shape, or GPT-2's, with tied embeddings, and its batch."""

    vocab: int
    width: int
    ff: int
    layers: int
    heads: int
    batch: int
    length: int
    family: Literal["llama", "gpt2"] = "llama"

    def spec(self) -> ModelSpec:
        """The model as ours."""
        if self.family == "gpt2":
            made = presets.core(
                vocab_size=self.vocab,
                d_model=self.width,
                d_ff=self.ff,
                n_layers=self.layers,
                n_heads=self.heads,
                max_seq_len=self.length,
            )
            return replace(made, heads=(NextHead(tied=True),))
        return presets.modern_lm(
            vocab_size=self.vocab,
            d_model=self.width,
            d_ff=self.ff,
            n_layers=self.layers,
            n_heads=self.heads,
            n_kv_heads=self.heads,
            max_seq_len=self.length,
        )

    def flops(self) -> float:
        """Operations of a step."""
        tokens, parameters = self.batch * self.length, count_parameters(self.spec())
        return tokens * (6.0 * parameters + 12.0 * self.layers * self.width * self.length)


SIZES = {
    "0.3 M": Size(1_000, 64, 192, 3, 4, 16, 128),
    "3 M": Size(4_000, 192, 512, 6, 6, 32, 256),
    "10 M": Size(16_000, 256, 688, 8, 8, 32, 256),
    "124 M": Size(50_257, 768, 2_048, 12, 12, 32, 1_024),
    "GPT-2": Size(50_257, 768, 3_072, 12, 12, 32, 1_024, "gpt2"),
}
#: Sizes for a GPU alone.
LARGE = ("124 M", "GPT-2")
#: Steps of a block, and blocks; on a CPU a batch has this many rows, and a block one step.
STEPS, ROUNDS = {"0.3 M": 50, "3 M": 30, "10 M": 30, "124 M": 8, "GPT-2": 8}, 7
CPU_ROWS = 4


def options(parser: argparse.ArgumentParser) -> None:
    """What to run."""
    parser.add_argument(
        "--sizes", nargs="*", default=[*SIZES], choices=[*SIZES], help="which shapes"
    )
    parser.add_argument("--loops", nargs="*", default=["lm", "lm-10m"], help="recipes, whole loop")
    parser.add_argument(
        "--parity", nargs="*", default=["text", "reverse"], help="recipes, recorded against plain"
    )
    parser.add_argument("--sides", nargs="*", help="only these")
    parser.add_argument("--lora", action=argparse.BooleanOptionalAction, default=True, help="LoRA")


# --- plain PyTorch ------------------------------------------------------------------------------


class Layer(nn.Module):
    """A block as one writes it by hand."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.width, 1e-6), nn.RMSNorm(size.width, 1e-6)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate_up = nn.Linear(size.width, 2 * size.ff, bias=False)
        self.down = nn.Linear(size.ff, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(D, -1)
        )
        q, k = (
            torch.cat((-u.chunk(2, -1)[1], u.chunk(2, -1)[0]), -1) * sin + u * cos for u in (q, k)
        )
        q, k = q.to(v.dtype), k.to(v.dtype)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(B, T, D))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Plain(nn.Module):
    """The model in fifty lines, loss included, as nanoGPT has it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, 1e-6)
        half = size.width // size.heads // 2
        turns = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(size.length), turns).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def theirs(size: Size) -> nn.Module:
    """transformers' model of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if size.family == "gpt2":
        sizes = {"n_embd": size.width, "n_inner": size.ff, "n_layer": size.layers}
        without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        about = {"vocab_size": size.vocab, "n_positions": size.length, "n_head": size.heads}
        return GPT2LMHeadModel(GPT2Config(**sizes, **without, **about, use_cache=False))
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.width,
        intermediate_size=size.ff,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


# --- one step -----------------------------------------------------------------------------------


def batches(size: Size) -> list[Batch]:
    """Four batches of random tokens."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(4):
        ids = rng.integers(0, size.vocab, (size.batch, size.length + 1))
        real = np.ones((size.batch, size.length), dtype=np.bool_)
        made.append(Batch(tokens=ids[:, :-1], valid=real, targets={"next": ids[:, 1:]}))
    return made


def our_steps(size: Size, device: str, *, compile: str, steps: int) -> Callable[[], object]:
    """A block of our engine's steps, as `fit` takes them."""
    train = TrainSpec(
        precision="bf16" if device == "cuda" else "float32",
        batch_size=size.batch,
        lr=1e-4,
        optimizer=AdamW(weight_decay=0.1),
        compile=compile,  # type: ignore[arg-type]
    )
    engine, given = TorchEngine.fresh(size.spec(), train, device=device), batches(size)

    def block() -> None:
        waiting: deque[Callable[[], object]] = deque()
        for i in range(steps):
            waiting.append(engine.submit([given[i % 4]], lr=1e-4, seed=i))
            if len(waiting) > engine.ahead:
                waiting.popleft()()
        for read in waiting:
            read()

    return block


def native_steps(size: Size, *, steps: int) -> Callable[[], object]:
    """The same by the native engine, which a CPU takes by default."""
    train = TrainSpec(batch_size=size.batch, lr=1e-4, optimizer=AdamW(weight_decay=0.1))
    engine, given = NumpyEngine.fresh(size.spec(), train, table=C), batches(size)

    def block() -> None:
        for i in range(steps):
            engine.step([given[i % 4]], lr=1e-4, seed=i)

    return block


def their_steps(
    model: nn.Module, size: Size, device: str, *, compiled: bool, steps: int
) -> Callable[[], object]:
    """A block of steps as a training script writes them: autocast, clipping, fused AdamW."""
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    given = [
        (
            torch.from_numpy(batch.tokens).to(device),
            torch.from_numpy(np.ascontiguousarray(batch.targets["next"])).to(device),
        )
        for batch in batches(size)
    ]

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        if isinstance(model, Plain):
            return model(tokens, targets)
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    objective = torch.compile(loss_of) if compiled else loss_of

    def block() -> None:
        for i in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = objective(*given[i % 4])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss.item()

    return block


def makers(size: Size, device: str, steps: int) -> dict[str, Callable[[], Callable[[], object]]]:
    """What builds each side; the model in fifty lines is a Llama."""
    sides = {
        "transformers, compiled": lambda: their_steps(
            theirs(size), size, device, compiled=True, steps=steps
        ),
        "transformers": lambda: their_steps(
            theirs(size), size, device, compiled=False, steps=steps
        ),
        "plain PyTorch, compiled": lambda: their_steps(
            Plain(size), size, device, compiled=True, steps=steps
        ),
        "plain PyTorch": lambda: their_steps(
            Plain(size), size, device, compiled=False, steps=steps
        ),
        **({} if device != "cpu" else {"ours, native": lambda: native_steps(size, steps=steps)}),
        "ours, off": lambda: our_steps(size, device, compile="off", steps=steps),
        "ours, auto": lambda: our_steps(size, device, compile="auto", steps=steps),
        "ours, on": lambda: our_steps(size, device, compile="on", steps=steps),
    }
    return {k: v for k, v in sides.items() if size.family == "llama" or "plain" not in k}


# --- LoRA ---------------------------------------------------------------------------------------

#: Qwen2.5-0.5B's shape, rows of packed examples, and the correction.
QWEN = {
    "vocab_size": 151_936, "d_model": 896, "n_heads": 14, "n_kv_heads": 2, "d_head": 64,
    "d_ff": 4_864, "n_layers": 24, "max_seq_len": 2_048, "qk_norm": False,
}  # fmt: skip
LORA_ROWS, LORA_RANK, LORA_EXAMPLES = 8, 16, 6
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def packed_rows(shape: dict[str, Any]) -> Batch:
    """Rows of some examples each, of random lengths, which do not see each other."""
    rng, length = np.random.default_rng(1), shape["max_seq_len"]
    ids = rng.integers(0, shape["vocab_size"], (LORA_ROWS, length + 1))
    cuts = np.sort(rng.integers(1, length, (LORA_ROWS, LORA_EXAMPLES - 1)), axis=1)
    segments = (np.arange(length)[None, :, None] >= cuts[:, None]).sum(2)
    real = np.ones((LORA_ROWS, length), dtype=np.bool_)
    return Batch(tokens=ids[:, :-1], valid=real, targets={"next": ids[:, 1:]}, segments=segments)


def our_lora(shape: dict[str, Any], device: str, *, steps: int) -> Callable[[], object]:
    """Steps of our engine on packed rows."""
    train = TrainSpec(
        precision="bf16" if device == "cuda" else "float32",
        batch_size=LORA_ROWS,
        lr=1e-4,
        optimizer=AdamW(weight_decay=0.0),
        compile="on",
    )
    lora = LoRA(rank=LORA_RANK, alpha=2.0 * LORA_RANK, targets=LORA_TARGETS)
    model = build(presets.qwen(**shape), device=device)
    apply_lora(model, lora)
    engine, batch = TorchEngine(model, train, lora=lora), packed_rows(shape)

    def block() -> None:
        waiting: deque[Callable[[], object]] = deque()
        for i in range(steps):
            waiting.append(engine.submit([batch], lr=1e-4, seed=i))
            if len(waiting) > engine.ahead:
                waiting.popleft()()
        for read in waiting:
            read()

    return block


def peft_lora(
    shape: dict[str, Any], device: str, *, packed: bool, steps: int
) -> Callable[[], object]:
    """transformers and peft, compiled: the base in bf16; positions that begin again are how it is
    told of packed examples. Without, a row is one example: less work, and no mask.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        intermediate_size=shape["d_ff"],
        num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        max_position_embeddings=shape["max_seq_len"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    base = Qwen2ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    wanted = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=[*LORA_TARGETS])
    model = get_peft_model(base, wanted).to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    batch = packed_rows(shape)
    assert batch.segments is not None
    tokens = torch.from_numpy(batch.tokens).to(device)
    targets = torch.from_numpy(np.ascontiguousarray(batch.targets["next"])).to(device)
    begins = np.diff(batch.segments, axis=1, prepend=-1) > 0
    places = np.arange(batch.tokens.shape[1])
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    positions = torch.from_numpy(places - starts).to(device)

    def loss_of(tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        more = {"position_ids": positions} if packed else {}
        logits = model(input_ids=tokens, **more).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    objective = torch.compile(loss_of)

    def block() -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = objective(tokens, targets, positions)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        loss.item()

    return block


def lora_rows(device: str, *, quick: bool) -> Iterator[Row]:
    """LoRA on Qwen2.5-0.5B's shape; on a CPU on a fraction of it."""
    shape = QWEN | ({} if device == "cuda" else {"n_layers": 2, "vocab_size": 2_000})
    shape |= {} if device == "cuda" else {"d_ff": 512, "max_seq_len": 256}
    steps = 5 if device == "cuda" else 1
    built: dict[str, Callable[[], object]] = {}
    peaks: dict[str, float] = {}
    sides = {
        "transformers + peft, compiled": lambda: peft_lora(
            shape, device, packed=False, steps=steps
        ),
        "the same, examples kept apart": lambda: peft_lora(shape, device, packed=True, steps=steps),
        "ours": lambda: our_lora(shape, device, steps=steps),
    }
    if quick:
        del sides["the same, examples kept apart"]
    for name, make in sides.items():
        if device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        built[name] = make()
        built[name]()
        took = time.perf_counter() - began
        yield said("training", f"LoRA, {name}", f"built and compiled in {took:.0f} s")
        if device == "cuda":
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    times = interleave(built, rounds=3 if quick else ROUNDS, inner=1, warmup=1)
    first = next(iter(built))
    for name, blocks in times.items():
        each = statistics.median(blocks) / steps
        shares = [a / b for a, b in zip(blocks, times[first], strict=True)]
        tokens = LORA_ROWS * shape["max_seq_len"] / each * 1e3
        memory = f", {peaks[name]:.1f} GiB" if name in peaks else ""
        yield said(
            "training",
            f"LoRA, {LORA_ROWS} x {shape['max_seq_len']}, {tokens:,.0f} tokens/s{memory}",
            name,
            round(each, 3),
            ratio=round(statistics.median(shares), 3),
        )
    del built
    gc.collect()


def peak_product(device: str, *, seconds: float = 0.0) -> float:
    """TFLOP/s of a large matrix product, in the format that training uses: ten of them, or as many
    as these seconds take, after which a GPU is as slow as its power allows.
    """
    n, dtype = (8_192, torch.bfloat16) if device == "cuda" else (1_024, torch.float32)
    a = torch.randn(n, n, device=device, dtype=dtype)
    (a @ a).sum().item()
    began, products = time.perf_counter(), 0
    while not products or time.perf_counter() - began < seconds:
        for _ in range(10):
            b = a @ a
        b.sum().item()
        products += 10
    return products * 2 * n**3 / (time.perf_counter() - began) / 1e12


def step_rows(name: str, device: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Every side of one size, in turn; on a GPU also its peak of memory.

    A side's first block, which compiles, and its second one are printed as soon as they are done.
    """
    size, steps = SIZES[name], STEPS[name]
    if device == "cpu":
        size, steps = size._replace(batch=min(size.batch, CPU_ROWS)), 1
    built, peaks = {}, {}
    for side, make in makers(size, device, steps).items():
        if asked.sides and side not in asked.sides:
            continue
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        built[side] = make()
        built[side]()
        first = time.perf_counter()
        if device == "cuda":
            peaks[side] = (torch.cuda.max_memory_allocated() - before) / 2**30
        built[side]()
        then = (time.perf_counter() - first) / steps * 1e3
        about = f"{side}: begun in {first - began:.1f} s, then {then:.4g} ms a step"
        yield said("training", f"{name}, {size.batch} x {size.length}", about)
    times = interleave(built, rounds=ROUNDS, inner=1, warmup=0)
    limit, baseline = peak_product(device), next(iter(built))
    for side, blocks in times.items():
        each = statistics.median(blocks) / steps
        rate = size.flops() / each / 1e9
        shares = [a / b for a, b in zip(blocks, times[baseline], strict=True)]
        tokens = size.batch * size.length / each * 1e3
        memory = f", {peaks[side]:.1f} GiB" if side in peaks else ""
        yield said(
            "training",
            f"{name}, {size.batch} x {size.length}, {tokens:,.0f} tokens/s, "
            f"{rate:.3g} TFLOP/s{memory}",
            side,
            round(each, 4),
            ratio=round(statistics.median(shares), 3),
            of_limit=rate / limit,
        )
    del built
    gc.collect()


def loop_rows(recipe: str, device: str, steps: int | None) -> Iterator[Row]:
    """A run as users make it, of its recipe's length unless `steps` says another: time to the
    first step, and time a step with everything around, beside the same steps without it.
    """
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        given = [f"train.steps={steps}"] if steps else []
        planned = plan_run(recipe, given, cache=Path(folder) / "cache")
        steps = planned.spec.train.steps
        run = TrainingRun(planned, Path(folder) / "run", device=device)
        run.prepare()
        moments = []
        for event in run.events():
            if isinstance(event, StepRecord):
                moments.append(time.perf_counter())
        end = time.perf_counter()
        steps = len(moments)  # a run may stop early
        settle = min(50, steps // 4)
        each = (end - moments[settle]) / (steps - settle - 1) * 1e3
        alone = replace(planned.spec.train, evaluate_every=steps, checkpoint_every=steps)
        alone = replace(alone, steps=steps)
        bare_moments = [time.perf_counter() for _ in fit(run.engine, run.task, alone)]
    bare = (bare_moments[-1] - bare_moments[settle]) / (steps - settle - 1) * 1e3
    yield said("training", f"{recipe}: first step", f"{moments[0] - began:.1f} s")
    yield said(
        "training",
        f"{recipe}, {steps} steps with everything, step alone {bare:.2f} ms",
        "a step of the loop",
        round(each, 3),
        ratio=round(bare / each, 3),
    )


def parity_rows(recipe: str, steps: int) -> Iterator[Row]:
    """The losses of the recorded step beside the plain one, float32, no dropout: the worst gap.

    Training may be chaotic: the plain engine's own gap between float32 and float64 is the scale.
    """
    given = [f"train.steps={steps}", "train.precision=float32", "model.decoder.dropout=0"]
    with TemporaryDirectory() as folder:
        planned = plan_run(recipe, given, cache=Path(folder))
        losses = {}
        for name, compile, precision in (
            ("plain", "off", "float32"),
            ("compiled and recorded", "on", "float32"),
            ("plain, float64", "off", "float64"),
        ):
            train = replace(planned.spec.train, compile=compile, precision=precision)
            engine = TorchEngine.fresh(planned.spec.model, train, device="cuda", graphs=Graphs)
            losses[name] = [record.loss for record in fit(engine, planned.task, train)]
    plain = losses.pop("plain")
    for name, those in losses.items():
        gaps = [abs(one - other) / abs(other) for one, other in zip(those, plain, strict=True)]
        at = {step: f"{max(gaps[:step]):.1e}" for step in (10, 50, steps)}
        worst = ", ".join(f"{gap} in {step} steps" for step, gap in at.items())
        yield said("training", f"{recipe}: losses, {name}, beside plain float32", worst)


def run(*, device: str = "cpu", quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Rows of every size and loop; the ratio is to the first side, of the loop to its bare step."""
    yield said("training", "a large matrix product", f"{peak_product(device):.3g} TFLOP/s")
    if device == "cuda":
        lasting = f"{peak_product(device, seconds=3):.3g} TFLOP/s"
        yield said("training", "the same for three seconds", lasting)
    sizes = asked.sizes if not quick else asked.sizes[:1]
    for name in sizes:
        if device == "cuda" or name not in LARGE:
            yield from step_rows(name, device, asked)
    if asked.lora:
        yield from lora_rows(device, quick=quick)
    for recipe in asked.parity if device == "cuda" else ():
        yield from parity_rows(recipe, 200)
    for recipe in asked.loops if not quick else asked.loops[:1]:
        yield from loop_rows(recipe, device, 40 if quick or device == "cpu" else None)
