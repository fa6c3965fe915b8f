"""Attention of a prompt: the native step's, and torch's fused kernel, one thread, processor time.

The native side reads a prompt with a model of one layer whose attention is nearly all of its work,
pages of keys and values included; torch's side is the kernel alone, on tensors that are ready.
"""

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.clock import Row, Sides, interleave, rows
from glassformer.generation.native.stepper import NativeStepper
from glassformer.kernels.threads import taking
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.spec import presets

LENGTHS = (512, 4_096, 20_000, 50_000)
#: Query heads, key-value heads, numbers of a head.
SHAPES = ((3, 1, 64), (4, 4, 16))


def run(*, quick: bool = False) -> Iterator[Row]:
    """Rows by shape and length; the ratio is ours over torch's."""
    for n_heads, n_kv_heads, d_head in SHAPES:
        spec = presets.qwen(
            vocab_size=64,
            d_model=16,
            d_ff=16,
            n_layers=1,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            max_seq_len=max(LENGTHS),
        )
        stepper = NativeStepper(build(spec, generator=torch.Generator().manual_seed(0)))
        for length in LENGTHS[: 1 if quick else None]:
            prompt = Prompts.of([[7 * i % 64 for i in range(length)]])
            made = torch.Generator().manual_seed(length)
            q, k, v = (torch.randn(1, n_heads, length, d_head, generator=made) for _ in range(3))
            sides: Sides = {
                "torch's kernel": partial(scaled_dot_product_attention, q, k, v, is_causal=True),
                "native step": partial(stepper.start, prompt, room=1),
            }
            rounds = 9 if length < 10_000 else 1
            with taking(1), torch.inference_mode():
                times = interleave(
                    sides, rounds=rounds, inner=1, warmup=rounds > 1, clock=time.process_time
                )
            case = f"{length:,} tokens, {n_heads} heads of {d_head}, {n_kv_heads} of keys"
            yield from rows(times, bench="attention", case=case, baseline="torch's kernel")
