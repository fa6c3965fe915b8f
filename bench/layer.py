"""One layer at B=16, T=64, d=128, h=4: ours, PyTorch's and x-transformers', eager and compiled.

Forward in eval mode with a causal mask, and a training step's forward + backward; then what capture
costs when it is off, and whether memory stays flat.
"""

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bench.clock import growth, interleave, rows, said
from glassformer.checks.preset_subjects import perturb
from glassformer.nn.block import TransformerBlock
from glassformer.nn.mask import Mask, build_mask
from glassformer.nn.taps import Taps, TapsAt
from glassformer.spec import model as spec

B, T, D, N, D_FF = 16, 64, 128, 4, 512
CASE = f"B{B} T{T} d{D} h{N} ff{D_FF}"


def ours() -> nn.Module:
    """Pre-norm, GELU, biases, like the reference."""
    block = spec.Block(
        mixer=spec.Attention(n_heads=N, bias="all"),
        ffn=spec.MLP(d_ff=D_FF),
        norm=spec.LayerNorm(),
    )
    return perturb(TransformerBlock(block, D, dropout=spec.Dropout()), dtype=torch.float32, seed=1)


def theirs() -> nn.Module:
    """The reference."""
    return nn.TransformerEncoderLayer(
        D, N, D_FF, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def x_transformers_layer() -> nn.Module | None:
    """The same layer of x-transformers, if it is installed."""
    if importlib.util.find_spec("x_transformers") is None:
        return None
    from x_transformers import Decoder

    return Decoder(dim=D, depth=1, heads=N, attn_dim_head=D // N, attn_flash=True)


def sides(device: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every contender as a function of x."""
    future = torch.full((T, T), float("-inf"), device=device).triu(1)
    mask = build_mask(T, T, causal=True)
    own, reference, other = ours().to(device), theirs().to(device), x_transformers_layer()
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "nn.TransformerEncoderLayer": lambda x: reference(x, src_mask=future),
        "glassformer": lambda x: own(x, mask=mask),
        "glassformer, compiled": torch.compile(lambda x: own(x, mask=Mask(causal=True))),
        "nn.TransformerEncoderLayer, compiled": torch.compile(
            lambda x: reference(x, src_mask=future)
        ),
    }
    if other is not None:
        other = other.to(device)
        found["x-transformers"] = other
    own.eval()
    reference.eval()
    return found


def run(device: str = "cpu", rounds: int = 60) -> Iterator[dict[str, object]]:
    """Forward, forward + backward, capture, memory."""
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(2)).to(device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    contenders = sides(device)

    def forward(side: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad():
                side(x)
            wait()

        return call

    def both(side: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def call() -> None:
            side(x).sum().backward()
            wait()

        return call

    baseline = "nn.TransformerEncoderLayer"
    for case, wrap in (("forward", forward), ("forward + backward", both)):
        calls = {name: wrap(side) for name, side in contenders.items()}
        times = interleave(calls, rounds=rounds, inner=3)
        yield from rows(times, bench="layer", case=f"{case}, {CASE}", baseline=baseline)
    yield from capture(x, rounds=rounds)
    yield memory(forward(contenders["glassformer"]))


def capture(x: Tensor, *, rounds: int) -> Iterator[dict[str, object]]:
    """The tap calls when off, alone, over a forward; and a forward that reads the weights."""
    own, mask = ours().to(x.device).eval(), build_mask(T, T, causal=True)
    taps = Taps(read="attn.weights")

    @torch.no_grad()
    def off() -> None:
        own(x, mask=mask)

    @torch.no_grad()
    def on() -> None:
        own(x, mask=mask, taps=TapsAt(taps, ""))

    times = interleave({"capture off": off, "weights captured": on}, rounds=rounds, inner=3)
    yield from rows(times, bench="layer", case=f"capture, {CASE}", baseline="capture off")
    assert taps.seen["attn.weights"].shape == (B, N, T, T)
    hooks = sum(len(part._forward_hooks) for part in own.modules())
    share = taps_off_share(sum(times["capture off"]) / len(times["capture off"]))
    yield said(
        "layer",
        f"taps when off, {CASE}",
        f"share of a forward ({hooks} hooks)",
        ratio=round(share, 5),
    )


def taps_off_share(forward_ms: float) -> float:
    """What the `is None` tests of one block cost, measured alone, as a share of its forward."""
    from glassformer.nn.taps import tap, under

    x = torch.zeros(1)

    def every_tap() -> None:
        for _ in range(3):
            under(None, "attn.")
        for _ in range(13):
            tap(None, "q", x)

    times = interleave({"taps": every_tap}, rounds=50, inner=200)["taps"]
    return sorted(times)[len(times) // 2] / forward_ms


def memory(call: Callable[[], None]) -> dict[str, object]:
    """Python memory and live tensors over 100 forwards: growth must be nothing."""
    return said("layer", "100 forwards", growth(lambda _: call(), times=100, warmup=1))
