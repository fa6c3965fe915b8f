"""The GPU kernels of a decoding step against plain torch in float64; skipped without a GPU."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from glassformer.spec.position import ALiBi, alibi_slopes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# I inputs, O outputs, B rows, N query heads, K key-value heads, H d_head, S places


def draw(*shape, seed=0, dtype=torch.float32):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to("cuda", dtype)


@pytest.mark.parametrize("n_in", [17, 96, 1024, 1409])
@pytest.mark.parametrize("norm", ["", "rms", "layer"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_a_product_of_one_row(n_in, norm, gated, extra):
    from glassformer.gpu import triton_decode

    n_out = 37
    x, weight = draw(1, n_in), draw(2 * n_out if gated else n_out, n_in, seed=1)
    bias = draw(len(weight), seed=2) if extra else None
    gain, shift = draw(n_in, seed=3), draw(n_in, seed=4)
    residual = draw(1, n_out, seed=5) if extra else None
    wide = x.double()
    if norm == "rms":
        wide = wide / (wide.square().mean() + 1e-6).sqrt() * gain
    if norm == "layer":
        wide = F.layer_norm(wide, (n_in,), gain.double(), shift.double(), 1e-6)
    want = wide @ weight.double().t() + (0 if bias is None else bias)
    if gated:
        want = F.silu(want[:, ::2]) * want[:, 1::2]
    want = want if residual is None else want + residual
    shown = triton_decode.product(
        x,
        weight,
        bias,
        norm=norm,
        gain_I=gain if norm else None,
        shift_I=shift if norm == "layer" else None,
        eps=1e-6,
        activation="gate" if gated else "",
        residual_1O=residual,
    )
    assert (shown - want).abs().max() <= 2e-6 * want.abs().max()


def test_a_gate_of_many_rows():
    from glassformer.gpu import triton_decode

    wide = draw(5, 2 * 1031)
    want = F.silu(wide[:, ::2].double()) * wide[:, 1::2]
    assert (triton_decode.gate(wide) - want).abs().max() < 1e-5


class Heads(NamedTuple):
    """Queries, keys and numbers of a head, in one dtype."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    dtype: torch.dtype


#: By the Triton kernel; the others by the one in CUDA, on a GPU that has what it needs.
NARROW = Heads(6, 2, 24, torch.float32)
WIDE = (
    Heads(14, 2, 64, torch.bfloat16),
    Heads(8, 8, 64, torch.float16),
    Heads(16, 2, 128, torch.float16),
    Heads(6, 2, 128, torch.bfloat16),
)
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def table(places, width, dtype, seed=4):
    """Return cos and sin of each position as a rotation has them: both halves, one sign turned."""
    angle = draw(places, width // 2, seed=seed)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), 1).to(dtype), torch.cat((-sin, sin), 1).to(dtype)


def check_one_query(heads, batch, end, window, *, extra, biased):
    """Compare attention and the written cache with plain torch in float64.

    `extra` adds padding on the left, rotation and a norm; `biased` adds ALiBi's slopes.
    """
    from glassformer.gpu import triton_decode

    (N, K, H, dtype), S = heads, 320
    qkv, kv = draw(batch, N + 2 * K, H, dtype=dtype), draw(batch, 2 * K, S, H, seed=1, dtype=dtype)
    given = kv.double().clone()
    start = torch.arange(batch, device="cuda") % 3 if extra and end > 3 else None
    mask = rotation = gains = None
    places = torch.full((batch,), end - 1, device="cuda")
    turned = qkv.double().clone()
    if extra:
        gains = (draw(H, seed=2, dtype=dtype), draw(H, seed=3, dtype=dtype))
        for some, gain in zip((slice(0, N), slice(N, N + K)), gains, strict=True):
            x = turned[:, some]
            turned[:, some] = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
        rotation = table(S, H, dtype)
        if start is not None:
            places = places - start
            mask = torch.zeros(batch, S, device="cuda", dtype=dtype)
            mask.masked_fill_(torch.arange(S, device="cuda") < start[:, None], -torch.inf)
        x = turned[:, : N + K]
        both = [table[places].double()[:, None] for table in rotation]
        turned[:, : N + K] = x * both[0] + x.roll(H // 2, -1) * both[1]
    given[:, :, end - 1] = turned[:, N:]
    column = torch.arange(S, device="cuda")
    seen = (column < end) & (column >= (0 if window is None else end - window))
    score = torch.einsum(
        "bkgh,bksh->bkgs", turned[:, :N].view(batch, K, N // K, H), given[:, :K]
    ) / (H**0.5)
    slopes = torch.tensor(alibi_slopes(ALiBi(), N, H), device="cuda") if biased else None
    if slopes is not None:
        score = score - slopes.double().view(K, -1, 1) * (end - 1 - column)
    score = score.masked_fill(~seen, -torch.inf)
    score = score if mask is None else score + mask[:, None, None].double()
    want = torch.einsum("bkgs,bksh->bkgh", score.softmax(-1), given[:, K:]).reshape(batch, N * H)
    shown = triton_decode.attend(
        qkv,
        kv,
        torch.tensor([end], device="cuda"),
        n_heads=N,
        places_B=places,
        rotation=rotation,
        gains=gains,
        eps=1e-6,
        window=window,
        mask_BS=mask,
        slopes_N=slopes,
    )
    assert (shown - want).abs().max() < NEAR[dtype]
    assert (kv - given).abs().max() < NEAR[dtype]
    before = torch.arange(S, device="cuda") != end - 1
    assert torch.equal(kv[:, :, before].double(), given[:, :, before]), "one position is written"


@pytest.mark.parametrize("batch", [1, 3, 70])
@pytest.mark.parametrize("end", [1, 64, 65, 301])
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_one_query_looks_back(batch, end, window, extra, biased):
    check_one_query(NARROW, batch, end, window, extra=extra, biased=biased)


@pytest.mark.parametrize("heads", WIDE, ids=str)
@pytest.mark.parametrize("end", [1, 2, 16, 17, 64, 65, 301])
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_one_query_of_many_rows_looks_back(heads, end, window, extra, biased):
    """Rows enough for a block of the GPU each, some of them with two key-value heads."""
    from glassformer.gpu import cuda_attend, cuda_launch

    together = 2 if end in (17, 301) else 1
    batch = -(-together * cuda_attend.LEAST_BLOCKS // heads.n_kv_heads) + 3
    if cuda_launch.runs_on(torch.device("cuda", 0)):
        assert cuda_attend.takes(
            draw(batch, heads.n_heads + 2 * heads.n_kv_heads, heads.d_head, dtype=heads.dtype),
            draw(1, 2 * heads.n_kv_heads, 1, heads.d_head, dtype=heads.dtype),
            n_heads=heads.n_heads, rotation=None, gains=None, mask_BS=None, slopes_N=None,
        )  # fmt: skip
    check_one_query(heads, batch, end, window, extra=extra, biased=biased)


@pytest.mark.parametrize("heads", [NARROW, *WIDE], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_rows_have_their_own_slot_and_end(heads, window):
    """A batch over some slots is each row alone over its slot."""
    from glassformer.gpu import triton_decode

    (N, K, H, dtype), S = heads, 320
    batch = 3 if heads is NARROW else 70
    slots = torch.arange(batch, device="cuda").roll(1) * 2
    ends = torch.arange(batch, device="cuda") * 149 % 301 + 1
    qkv, kv = draw(batch, N + 2 * K, H, dtype=dtype), draw(2 * batch, 2 * K, S, H, seed=1)
    kv, rotation = kv.to(dtype), table(S, H, dtype)

    def attend(rows, memory, ends, **where):
        return triton_decode.attend(
            rows, memory, ends, n_heads=N, places_B=ends - 1, rotation=rotation, gains=None,
            eps=0.0, window=window, mask_BS=None, **where,
        )  # fmt: skip

    want, given = [], kv.clone()
    for row, (slot, end) in enumerate(zip(slots.tolist(), ends, strict=True)):
        own = given[slot : slot + 1].clone()
        want.append(attend(qkv[row : row + 1], own, end[None]))
        given[slot] = own[0]
    shown = attend(qkv, kv, ends, slots_B=slots)
    assert (shown - torch.cat(want)).abs().max() < NEAR[dtype]
    assert (kv - given).abs().max() < NEAR[dtype]


@pytest.mark.parametrize("heads", [NARROW, *WIDE], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_find_their_past_in_other_rows(heads, padded):
    """The past of beams is read by an index: the same as if it had been copied together."""
    from glassformer.gpu import triton_decode

    (N, K, H, dtype), S, end = heads, 64, 45
    batch, prompts = (6, 2) if heads is NARROW else (72, 5)
    qkv = draw(batch, N + 2 * K, H, dtype=dtype)
    kv = draw(batch, 2 * K, S, H, seed=1, dtype=dtype)
    lines = torch.randint(batch, (batch, S), generator=torch.Generator().manual_seed(2))
    lines = lines.to("cuda", torch.int32)
    lines[:, end - 1] = torch.arange(batch, device="cuda")
    sources = torch.arange(batch, device="cuda") % prompts
    mask = torch.zeros(prompts, S, device="cuda", dtype=dtype) if padded else None
    if mask is not None:
        mask[1:, :3] = -torch.inf
    ends, places = torch.tensor([end], device="cuda"), torch.full((batch,), end - 1, device="cuda")
    copied = kv[lines.long(), :, torch.arange(S, device="cuda")].permute(0, 2, 1, 3).contiguous()
    given = {"n_heads": N, "places_B": places, "rotation": table(S, H, dtype), "gains": None}
    given |= {"eps": 0.0, "window": None}
    want = triton_decode.attend(
        qkv, copied, ends, mask_BS=None if mask is None else mask[sources], **given
    )
    shown = triton_decode.attend(
        qkv, kv, ends, mask_BS=mask, sources_B=sources, lines_BS=lines, **given
    )
    assert torch.equal(shown, want)
    assert torch.equal(kv[:, :, end - 1], copied[:, :, end - 1])


@pytest.mark.parametrize("extra", [False, True])
def test_prompts_are_turned_and_stored(extra):
    """All positions of two prompts: normalised and rotated with `extra`, else as they are."""
    from glassformer.gpu import triton_decode

    B, T, N, K, H, S = 2, 7, 6, 2, 24, 13
    qkv, kv = draw(B * T, N + 2 * K, H), draw(B, 2 * K, S, H, seed=1)
    want, given = qkv.double(), kv.clone()
    gains = rotation = None
    if extra:
        gains, angle = (draw(H, seed=2), draw(H, seed=3)), draw(S, H // 2, seed=4)
        for heads, gain in zip((slice(0, N), slice(N, N + K)), gains, strict=True):
            x = want[:, heads]
            want[:, heads] = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
        cos, sin = angle.cos(), angle.sin()
        rotation = (torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))
        both = [table[:T].double().repeat(B, 1)[:, None] for table in rotation]
        x = want[:, : N + K]
        want[:, : N + K] = x * both[0] + x.roll(H // 2, -1) * both[1]
    shown = triton_decode.turn(
        qkv, kv, length=T, n_heads=N, rotation=rotation, gains=gains, eps=1e-6
    )
    assert (shown - want[:, : N + K]).abs().max() < 1e-5
    kept = want[:, N:].view(B, T, 2 * K, H).transpose(1, 2)
    assert (kv[:, :, :T] - kept).abs().max() < 1e-5
    assert torch.equal(kv[:, :, T:], given[:, :, T:])


@pytest.mark.parametrize("rows", [64, 100, 200])
@pytest.mark.parametrize("shape", [(64, 48), (200, 104), (896, 1152), (4864, 896)])
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(name, torch.bfloat16) for name in ("", "gate", "relu", "gelu")] + [("gate", torch.float16)],
)
def test_products_of_some_rows(rows, shape, activation, dtype):
    """Bias and residual are added, and rows prepared for a norm that the next product applies."""
    from glassformer.gpu import cuda_launch, cuda_rows

    if not cuda_launch.runs_on(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVIDIA's bindings for Python")
    n_in, n_out = shape
    wide = 2 * n_out if activation == "gate" else n_out
    x, residual = draw(rows, n_in, dtype=dtype), draw(rows, n_out, seed=5, dtype=dtype)
    weight = (draw(wide, n_in, seed=1) / n_in**0.5).to(dtype)
    bias, gain = draw(wide, seed=2, dtype=dtype), draw(n_out, seed=3, dtype=dtype)

    def activated(y):
        if activation == "gate":
            return F.silu(y[:, ::2]) * y[:, 1::2]
        return {"": lambda y: y, "relu": F.relu, "gelu": F.gelu}[activation](y)

    def close(shown, want):
        return float((shown.double() - want).norm() / want.norm()) < (
            4e-3 if dtype == torch.bfloat16 else 6e-4
        )

    want = activated(x.double() @ weight.double().t() + bias.double()) + residual.double()
    shown = cuda_rows.product_of_rows(
        x, weight, bias, activation=activation, residual_BO=residual, gain_O=gain
    )
    assert close(shown.rows_BI, want) and close(shown.gained_BI, want * gain.double())
    squares = shown.rows_BI.double().square().sum(1)
    assert ((shown.squares_PB.double().sum(0) - squares).abs() <= 1e-5 * squares).all()
    again = cuda_rows.product_of_rows(x, weight, bias, activation=activation, residual_BO=residual)
    assert torch.equal(again, shown.rows_BI), "sums have one order"
    if n_out > 100:
        rows_BI = shown.rows_BI.double()
        normed = rows_BI * (rows_BI.square().mean(1, keepdim=True) + 1e-6).rsqrt() * gain.double()
        reader = (draw(72, n_out, seed=6) / n_out**0.5).to(dtype)
        read = cuda_rows.product_of_rows(shown, reader, None, eps=1e-6)
        assert close(read, normed @ reader.double().t())


def chosen(parts_of, rows):
    """Return tokens and log-probabilities by kernels that look for the likeliest in parts."""
    from glassformer.gpu import triton_choose

    tokens = torch.full((rows,), -7, device="cuda")
    made, values = torch.zeros(3, rows, dtype=torch.long, device="cuda"), draw(3, rows)
    counters = torch.tensor([9, 1, 4, 0, 0], device="cuda")
    triton_choose.keep_likeliest(*parts_of(), counters, tokens, made, values)
    assert torch.equal(made[1], torch.where(made[1] < 0, made[1], tokens))
    return made[1], values[1]


@pytest.mark.parametrize("rows", [1, 5, 128])
@pytest.mark.parametrize("vocab", [31, 1500, 40_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_of_logits(rows, vocab, dtype):
    """The first of equal ones, closed ones never; NaN, infinity and nothing open are no choice."""
    from glassformer.gpu import triton_choose

    logits = draw(rows, vocab, dtype=dtype)
    logits[:, vocab // 2] = logits[:, vocab // 3] = logits.amax(1) + 1
    flags = torch.zeros(vocab + 1, dtype=torch.uint8, device="cuda")
    for closed in ((), (vocab // 3,), (vocab // 3, vocab // 2, 0)):
        flags[list(closed)] = triton_choose.CLOSED
        flags[-1] = bool(closed)
        tokens, values = chosen(lambda: triton_choose._found(logits, flags, 1), rows)
        shut = (flags[:-1] & triton_choose.CLOSED).bool()
        want = logits.double().masked_fill(shut, -torch.inf).argmax(1)
        assert torch.equal(tokens, want)
        right = logits.double().log_softmax(1).gather(1, want[:, None])[:, 0]
        assert (values - right).abs().max() < 1e-5
    logits[0, 7] = torch.nan
    logits[-1, -1] = torch.inf
    logits[rows // 2] = -torch.inf
    tokens, values = chosen(lambda: triton_choose._found(logits, flags, 1), rows)
    bad = sorted({0, rows - 1, rows // 2})
    assert (tokens < 0).nonzero()[:, 0].tolist() == bad and values.isnan().sum() == len(bad)


@pytest.mark.parametrize("rows", [33, 64, 100, 128])
@pytest.mark.parametrize("shape", [(896, 20_006), (200, 8_192), (1_408, 8_700)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extra", [False, True])
def test_the_likeliest_tokens_of_a_head(rows, shape, dtype, extra):
    """As by logits in float64 that are rounded; `extra` adds a bias, and the norm of the rows."""
    from glassformer.gpu import cuda_head, cuda_launch, triton_choose
    from glassformer.gpu.products import Gained

    if not cuda_launch.runs_on(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVIDIA's bindings for Python")
    n_in, vocab = shape
    weight = (draw(vocab, n_in, seed=1) / n_in**0.5).to(dtype)
    weight[vocab - 1] = weight[vocab // 2] = weight[vocab // 3]  # ties
    assert cuda_head.reads(weight)
    x, bias = draw(rows, n_in, dtype=dtype), draw(vocab, seed=2, dtype=dtype) if extra else None
    x[: rows // 2] = 3 * weight[vocab // 2] * n_in**0.5
    exact = x.double() @ weight.double().t()
    given = x
    if extra:
        bias[vocab - 1] = bias[vocab // 2] = bias[vocab // 3]
        squares = x.double().square()
        halves = torch.stack([half.sum(1) for half in squares.split(n_in // 2 + 1, 1)])
        given = Gained(x, x, halves.float())
        exact = exact / (squares.mean(1, keepdim=True) + 1e-6).sqrt() + bias.double()
    flags = torch.zeros(vocab + 1, dtype=torch.uint8, device="cuda")
    near = 2 * NEAR[dtype]
    for closed in ((), (vocab // 3, int(exact[-1].argmax()))):
        flags[list(closed)] = triton_choose.CLOSED
        flags[-1] = bool(closed)
        tokens, values = chosen(lambda: cuda_head.find(given, weight, bias, flags, eps=1e-6), rows)
        still = exact.masked_fill((flags[:-1] & triton_choose.CLOSED).bool(), -torch.inf)
        shown = still.gather(1, tokens[:, None])[:, 0]
        assert (still.amax(1) - shown).max() <= near
        first = vocab // 2 if closed else vocab // 3
        assert (tokens[: rows // 2] == first).all(), "of equal ones the first"
        right = exact.log_softmax(1).gather(1, tokens[:, None])[:, 0]
        assert ((values - right).abs() <= near * (1 + right.abs())).all()
    x[1, 3] = torch.nan
    tokens, _ = chosen(lambda: cuda_head.find(given, weight, bias, flags, eps=1e-6), rows)
    assert (tokens < 0).nonzero()[:, 0].tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "width"), [(8, 8, 32), (12, 4, 18), (3, 1, 64)])
def test_heads_of_one_product_are_cut_apart_and_rotated(n_heads, n_kv_heads, width, by_row, dtype):
    """Forward and backward against the plain rotation in float64, from other layouts too."""
    from glassformer.gpu.triton_step import turned_heads
    from glassformer.nn.operations import rotate

    B, T, heads = 3, 37, n_heads + 2 * n_kv_heads
    joined = draw(B, T, heads * width, dtype=dtype).requires_grad_()
    angles = draw(*((B, 1) if by_row else ()), T, width // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    shown = turned_heads(joined, cos, sin, n_heads, n_kv_heads)
    wide = joined.detach().double().requires_grad_()
    by_head = wide.view(B, T, heads, width).transpose(1, 2)
    q, k, v = by_head.split((n_heads, n_kv_heads, n_kv_heads), 1)
    wanted = rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double()), v
    grads = [draw(*x.shape, seed=2 + i, dtype=dtype) for i, x in enumerate(wanted)]
    grads[1] = grads[1].transpose(1, 2).contiguous().transpose(1, 2)
    (back,) = torch.autograd.grad(shown, joined, grads)
    (right,) = torch.autograd.grad(wanted, wide, [x.double() for x in grads])
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip((*shown, back), (*wanted, right), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= limit * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 688, 1021])
def test_the_gated_unit_of_one_product(width, dtype):
    """Gate and up as slices of one product, as they come, and as arrays of their own."""
    from glassformer.gpu.triton_step import gated

    wide = draw(5, 7, 2 * width, dtype=dtype)
    for gate, up in (wide.split(width, -1), (x.contiguous() for x in wide.split(width, -1))):
        given = [x.detach().requires_grad_() for x in (gate, up)]
        exact = [x.detach().double().requires_grad_() for x in given]
        shown, wanted = gated(*given), F.silu(exact[0]) * exact[1]
        grad = draw(5, 7, width, seed=1, dtype=dtype)
        back = torch.autograd.grad(shown, given, grad)
        right = torch.autograd.grad(wanted, exact, grad.double())
        limit = 1e-6 if dtype == torch.float32 else 1e-2
        for ours, theirs in zip((shown, *back), (wanted, *right), strict=True):
            assert (ours - theirs).norm() <= limit * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(3, 7, 5), (13, 1024), (2, 301, 1031)])
def test_gelu_of_a_sum_with_a_bias(shape, biased, dtype):
    """Values and gradients against torch in float64."""
    from glassformer.gpu.triton_step import biased_gelu

    wide = (3 * draw(*shape, dtype=dtype)).requires_grad_()
    bias = draw(shape[-1], seed=1).requires_grad_() if biased else None
    grad = draw(*shape, seed=2, dtype=dtype)
    given = [wide, bias] if biased else [wide]
    exact = [one.detach().double().requires_grad_() for one in given]
    shown = biased_gelu(wide, bias)
    wanted = F.gelu(sum(exact))
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    if dtype == torch.float32:
        assert (shown - wanted).abs().max() <= 2e-6
    ours = torch.autograd.grad(shown, given, grad)
    theirs = torch.autograd.grad(wanted, exact, grad.double())
    for one, other in zip((shown, *ours), (wanted, *theirs), strict=True):
        assert one.shape == other.shape and (one - other).norm() <= limit * other.norm()
