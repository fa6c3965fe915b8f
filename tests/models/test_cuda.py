"""On a GPU: the same answers as on the CPU, in every path. Skipped where there is none."""

import numpy as np
import pytest
import torch

from glassformer.checks.preset_subjects import NARROW, perturb
from glassformer.checks.subject import with_source
from glassformer.gpu.operations import gpu_operations
from glassformer.models.inputs import Inputs, packed_runs
from glassformer.models.model import build
from glassformer.nn.attention import attend
from glassformer.nn.cache import FixedCache
from glassformer.nn.mask import build_mask, mask_from_allow
from glassformer.nn.taps import Taps, TapsAt
from glassformer.spec.presets import PRESETS, preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def sample(name):
    spec = NARROW.get(name, preset(name))
    model = perturb(build(spec), dtype=torch.float32, seed=1).eval()
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, spec.vocab_size, (3, 11), generator=draw)
    valid = torch.ones(3, 11, dtype=torch.bool)
    valid[0, 7:] = False
    valid[1, :4] = False
    return model, with_source(spec, tokens, valid)


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_logits_are_the_cpus(name):
    model, inputs = sample(name)
    expected = model(inputs)
    for taps in (None, Taps(read="*.weights")):
        shown = model.cuda()(inputs, taps=taps)
        for head, logits in expected.items():
            at = inputs.valid_BT if logits.ndim == 3 else slice(None)
            scale = max(1.0, logits.abs().max().item())
            gap = (shown[head].cpu()[at] - logits[at]).abs().max().item() / scale
            assert gap < 1e-5, (name, head, gap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("explicit", [False, True])
def test_rows_that_may_attend_to_nothing_are_zero(dtype, explicit):
    allow = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="cuda")
    allow[0, :, 2] = False
    allow[1] = False
    q, k, v = (torch.randn(2, 4, 16, 32, device="cuda", dtype=dtype) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    taps = TapsAt(Taps(read="weights"), "") if explicit else None
    out = attend(q, k, v, mask=mask_from_allow(allow), taps=taps)
    out.float().sum().backward()
    for zero in (out[0, :, 2], out[1], q.grad[1], k.grad[1], v.grad[1]):
        assert zero.abs().max() == 0
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "digits"])
@torch.no_grad()
def test_cached_is_uncached_in_bfloat16(name):
    model, inputs = sample(name)
    model = model.cuda().to(torch.bfloat16)
    whole = torch.cat(list(model(inputs).values()), -1)
    cache, columns = FixedCache(11), []
    for t in range(11):
        part = slice(t, t + 1)
        piece = Inputs(
            inputs.tokens_BT[:, part],
            inputs.valid_BT[:, part],
            None,
            inputs.source_BS,
            inputs.source_valid_BS,
        )
        columns.append(torch.cat(list(model(piece, cache=cache).values()), -1))
    shown, expected = (x[inputs.valid_BT.cuda()].float() for x in (torch.cat(columns, 1), whole))
    assert shown.isfinite().all()
    assert (shown - expected).abs().max() / expected.abs().max() < 5e-2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (6, 2, 40), (14, 2, 64)])
@pytest.mark.parametrize("window", [None, 7])
def test_packed_attention_is_the_masked_one(causal, heads, groups, width, window):
    rng = np.random.default_rng(0)
    rows, length = 3, 101
    segments = np.sort(rng.integers(0, 6, (rows, length)), axis=1)
    valid = np.arange(length) < np.array([[101], [90], [64]])
    runs = packed_runs(segments, valid)
    given = [torch.from_numpy(a).cuda() for a in (valid, segments, runs)]
    mask = build_mask(
        length,
        length,
        causal=causal,
        window=window,
        valid_q_BT=given[0],
        valid_k_BS=given[0],
        segments_q_BT=given[1],
        segments_k_BS=given[1],
        runs_R=given[2],
        device=torch.device("cuda"),
    )
    table = gpu_operations()
    torch.manual_seed(0)
    shapes = ((rows, heads, length, width), *((rows, groups, length, width),) * 2)
    exact = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    felt = torch.randn(shapes[0], device="cuda")
    found = []
    for dtype, used in ((torch.float32, mask), (torch.bfloat16, mask)):
        parts = [x.to(dtype).requires_grad_() for x in exact]
        out = attend(*parts, mask=used, operations=table)
        (out.float() * felt).sum().backward()
        found.append([out, *(x.grad for x in parts)])
    for plain, packed in zip(*found, strict=True):
        scale = plain.abs().max().item()
        assert (plain - packed.float()).abs().max().item() / scale < 2e-2
    assert found[1][0].transpose(1, 2)[~given[0]].abs().max() == 0, "padding stays zero"
