"""The native step: the plain step's logits, rows that come and go, pages that are given back."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from glassformer.adapters.executors import fastest_stepper
from glassformer.generation.beam import beam_search
from glassformer.generation.native import lowering
from glassformer.generation.native.stepper import NativeStepper, unavailable
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.kernels import c_library
from glassformer.kernels.threads import taking
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.nn.cache import from_int8, to_int8
from glassformer.quant.convert import quantize_model
from glassformer.spec import presets
from glassformer.spec import program as kinds
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import DivergedError, InputError
from glassformer.spec.lacking import ANY
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4, Int8
from tests.generation import checks
from tests.generation.checks import (
    KV_CACHES,
    NATIVE_SPECS,
    _halved,
    paired_logits,
    prompts_for,
    single,
)
from tests.generation.pages import attended, codes_and_scales
from tests.kernels.faults import STEP_FAULTS, damaged_library, new_memory_is_nan
from tests.tiny import VOCAB, built


def native_is_uncached(*, variants: Sequence[str] = (), specs: Sequence[str] = ()) -> None:
    """float32 at 1e-5, every step, every variant of the C code, one row and several."""
    assert [unavailable(single(name)) for name in NATIVE_SPECS] == [""] * len(NATIVE_SPECS)
    for variant in variants or c_library.variants():
        with c_library.use_variant(variant):
            for name in specs or NATIVE_SPECS:
                model = single(name)
                for count in (1, 3):
                    prompts = prompts_for(model, count)
                    worst = max(paired_logits(NativeStepper, model, prompts, steps=6))
                    assert worst <= 1e-5, f"{name}, {variant}: off by {worst:.1e}"


def long(name: str) -> Model:
    """A model with heads of 20: some vectors, and some numbers that fill none."""
    made = NATIVE_SPECS[name]
    for side in ("decoder", "encoder"):
        stack = getattr(made, side)
        if stack is not None:
            layers = tuple(
                replace(
                    run,
                    block=replace(
                        run.block,
                        attention=replace(run.block.attention, d_head=20),
                        cross=run.block.cross and replace(run.block.cross, d_head=20),
                    ),
                )
                for run in stack.layers
            )
            made = replace(made, **{side: replace(stack, layers=layers)})
    return _halved(built(replace(made, max_seq_len=403)))


def long_rows_are_uncached() -> None:
    """Rows over several tiles, in blocks, with windows and biases that begin within a page."""
    for name in ("window", "alibi", "encoder-pre", "gemma", "scaled"):
        model = long(name)
        lengths = (197, 61, 33)
        rows = [[(7 * i + r) % VOCAB for i in range(length)] for r, length in enumerate(lengths)]
        sources = None if model.spec.encoder is None else [[2] * 137, list(range(VOCAB)), [3] * 64]
        prompts = Prompts.of(rows, sources=sources)
        for variant in c_library.variants():
            with c_library.use_variant(variant):
                worst = max(paired_logits(NativeStepper, model, prompts, steps=8))
            assert worst <= 1e-5, f"{name}, {variant}: off by {worst:.1e}"


def long_rows_have_their_own_bits() -> None:
    """Logits after each token: in one block, token by token, and beside others, bit for bit."""
    for name, variant, kv_cache in itertools.product(
        ("window", "alibi", "gemma", "scaled", "learned"), c_library.variants(), KV_CACHES
    ):
        with c_library.use_variant(variant), taking(2):
            stepper = NativeStepper(long(name), kv_cache=kv_cache)
            rows = [[(5 * i + r) % VOCAB for i in range(n)] for r, n in enumerate((150, 97, 3))]
            _, past = stepper.start(Prompts.of([row[:1] for row in rows]), room=200)
            rest = [row[1:] for row in rows]
            together = stepper.read(rest, past=past, chosen=np.arange(sum(map(len, rest))))
            alone = []
            for row in rows:
                _, past = stepper.start(Prompts.of([row[:1]]), room=200)
                alone += [stepper.step(torch.tensor([t]), past=past).clone() for t in row[1:]]
        assert torch.equal(together, torch.cat(alone)), f"{name}, {variant}, {kv_cache}"


def what_comes_later_is_not_read() -> None:
    """A row whose next tokens are no numbers: it is as if they were not there."""
    model = long("learned")
    with torch.no_grad():
        model.embed.weight[VOCAB - 1] = torch.nan
    row = [(5 * i) % (VOCAB - 1) for i in range(90)]
    for variant in c_library.variants():
        with c_library.use_variant(variant):
            stepper = NativeStepper(model)
            _, past = stepper.start(Prompts.of([row[:1]]), room=99)
            logits = stepper.extend(row[1:] + [VOCAB - 1] * 5, past=past, every=True)
            assert logits[: len(row) - 1].isfinite().all(), variant
            assert logits[len(row) - 1 :].isnan().all(), variant


def first_of(prompts: Prompts) -> Prompts:
    """Return the first prompt alone."""
    return Prompts(prompts.tokens[:1], None if prompts.sources is None else prompts.sources[:1])


def native_runs_are_steps() -> None:
    """Many greedy steps in one call: the tokens, ends and log-probabilities of single steps."""
    for name in ("learned", "window", "encoder"):
        model = single(name)
        prompts = prompts_for(model)
        free = generate_batch(NaiveStepper(model), prompts, spec=DecodeSpec(max_new_tokens=9))
        for spec in (
            DecodeSpec(max_new_tokens=11, eos=(VOCAB - 1, free[0].tokens[4])),
            DecodeSpec(max_new_tokens=40, eos=(5,), min_new_tokens=4, forbidden=(1, 8)),
            DecodeSpec(max_new_tokens=9, forced=(4, 2)),
        ):
            stepper = NativeStepper(model)
            for _ in range(2):  # the second time it knows how long a step takes
                found = generate_batch(stepper, prompts, spec=spec)
            before = stepper.positions
            (first,) = generate_batch(stepper, first_of(prompts), spec=spec)
            read = stepper.positions - before
            assert read < len(prompts.tokens[0]) + len(first.tokens), "it went on after the end"
            expected = generate_batch(NaiveStepper(model), prompts, spec=spec)
            for one, other in zip(found, expected, strict=True):
                assert (one.tokens, one.finish) == (other.tokens, other.finish)
                assert all(
                    abs(a - b) < 1e-5 for a, b in zip(one.logprobs, other.logprobs, strict=True)
                )


def native_beams_are_plain() -> None:
    """Beams that share pages, part, and write."""
    for name, kv_cache in itertools.product(("rotary", "encoder"), KV_CACHES):
        model = single(name)
        stepper, prompts = NativeStepper(model, kv_cache=kv_cache), prompts_for(model)
        spec = BeamSpec(width=5, max_new_tokens=20, eos=(1,))
        found = beam_search(stepper, prompts, spec=spec)
        expected = beam_search(NaiveStepper(model, kv_cache=kv_cache), prompts, spec=spec)
        for one, other in zip(found, expected, strict=True):
            assert [h.tokens for h in one.hypotheses] == [h.tokens for h in other.hypotheses]
        assert stepper.pages.used == 0


#: Heads with numbers that fill no vector, in the first group and in another; a short last group.
HEAD_WIDTHS = (20, 37, 80)
TOKENS, HEADS_OF = 70, (6, 2)


def sequence(H: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values; some groups are zeros, some have halves and extremes."""
    (N, K), generator = HEADS_OF, torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(TOKENS, n, H, generator=generator) for n in (N, K, K))
    k[3, 0] = 0.0
    v[5] = 0.0
    k[7, 1, :5] = torch.tensor([127.0, 0.5, 1.5, -2.5, 126.5])
    v[9, 0, :4] = torch.tensor([3e-44, 1e-45, -3e-44, 0.0])
    v[9, 0, 4:] = 0.0
    k[11] *= 1e4
    return q, k, v


def pages_hold_the_defined_codes() -> None:
    """Codes and scales of 8-bit pages: the bits of `nn.cache.to_int8`, of every variant."""
    for H, variant in itertools.product(HEAD_WIDTHS, c_library.variants()):
        with c_library.use_variant(variant):
            q, k, v = sequence(H)
            k[13, 0, H - 1], v[15, 1, 0] = torch.nan, -torch.inf
            _, pages = attended(q, k, v, kv_cache="int8")
        for (codes, scale), x in zip(
            codes_and_scales(pages, TOKENS, HEADS_OF[1], H), (k, v), strict=True
        ):
            want_codes, want_scale = to_int8(x)
            assert torch.equal(codes, want_codes), f"{H}, {variant}"
            assert torch.equal(scale.isnan(), want_scale.isnan()), f"{H}, {variant}"
            assert torch.equal(scale.nan_to_num(), want_scale.nan_to_num()), f"{H}, {variant}"


def rounded_attention_is_of_the_rounded_numbers() -> None:
    """Attention over 8-bit pages: the bits of float32 pages that hold the rounded numbers."""
    ways = ({}, {"window": 19}, {"cap": 5.0})
    for H, variant, at_once in itertools.product(HEAD_WIDTHS, c_library.variants(), (1, 64)):
        with c_library.use_variant(variant):
            q, k, v = sequence(H, seed=1)
            near = [from_int8(*to_int8(x), torch.float32) for x in (k, v)]
            for way in ways:
                found, _ = attended(q, k, v, kv_cache="int8", at_once=at_once, **way)
                want, _ = attended(q, *near, kv_cache="float", at_once=at_once, **way)
                assert found.isfinite().all()
                assert torch.equal(found, want), f"{H}, {variant}, {at_once} at once, {way}"


def what_is_no_number_stays_none() -> None:
    """A key or value that is not finite: NaN for whoever attends to it, and for nobody before."""
    for bad, variant in itertools.product((torch.nan, torch.inf), c_library.variants()):
        with c_library.use_variant(variant):
            q, k, v = sequence(32, seed=2)
            k[40, 0, 3] = v[40, 1, 3] = bad
            found, _ = attended(q, k, v, kv_cache="int8")
        assert found[:40].isfinite().all(), variant
        assert found[40:, 0].isnan().all() and found[40:, -32 + 3].isnan().all(), variant


def rounded_is_uncached() -> None:
    """Native steps with 8-bit keys and values: a forward that rounds all of them anew.

    A key computed in another order may get the next code: the bar is a share of what 8 bits change.
    """
    for name, variant in itertools.product(
        ("rotary", "gemma", "encoder-pre"), c_library.variants()
    ):
        model = long(name)
        sources = None if model.spec.encoder is None else [[2] * 37, [3, 1, 4]]
        rows = [[(7 * i + r) % VOCAB for i in range(97 - 40 * r)] for r in (0, 1)]
        prompts = Prompts.of(rows, sources=sources)
        two = [NaiveStepper(model, kv_cache=kv_cache) for kv_cache in KV_CACHES]
        plain_BV, rounded_BV = (stepper.start(prompts, room=1)[0] for stepper in two)
        moved = float((plain_BV - rounded_BV).abs().max())
        make = functools.partial(NativeStepper, kv_cache="int8")
        with c_library.use_variant(variant):
            worst = max(paired_logits(make, model, prompts, steps=8, kv_cache="int8"))
        assert worst <= 0.3 * moved, f"{name}, {variant}: off by {worst:.1e} of {moved:.1e}"


class OneByOne(NativeStepper):
    """The native step without runs: `beam_search` chooses at every step."""

    run_beams = Stepper.run_beams


def native_beam_runs_are_steps() -> None:
    """Many beam steps in one call: the trees of single steps, whatever ends a run."""
    for name in ("learned", "encoder"):
        model = single(name)
        stepper, prompts = NativeStepper(model), prompts_for(model)
        for spec in (
            BeamSpec(width=4, max_new_tokens=40, n_best=1, eos=(VOCAB - 1, 5), alpha=1.0),
            BeamSpec(width=5, max_new_tokens=30, eos=(5,), min_new_tokens=9, forbidden=(1, 8)),
            BeamSpec(width=3, max_new_tokens=30, n_best=2, eos=(5, 7), alpha=-2.0),
            BeamSpec(width=5, max_new_tokens=40, n_best=1, eos=tuple(range(3, 9)), alpha=1.0),
            BeamSpec(width=6, max_new_tokens=40, n_best=1, eos=(5, 6, 7), alpha=0.3),
        ):
            expected = beam_search(OneByOne(model), prompts, spec=spec, record=True)
            for _ in range(2):  # the second time it knows how long a step takes
                before = stepper.positions
                found = beam_search(stepper, prompts, spec=spec, record=True)
                for one, other in zip(found, expected, strict=True):
                    assert [h.tokens for h in one.hypotheses] == [
                        h.tokens for h in other.hypotheses
                    ]
                    assert len(one.tree) == len(other.tree)
                    for a, b in zip(one.tree, other.tree, strict=True):
                        assert a[:3] == b[:3] and a.finish == b.finish
                        assert abs(a.total - b.total) < 1e-5 and abs(a.logprob - b.logprob) < 1e-5
                assert stepper.positions - before < 100
            assert stepper.pages.used == 0


def threads_change_no_step() -> None:
    """Three threads that take up parts of a step: the bits of one."""
    model = build(presets.core(), generator=torch.Generator().manual_seed(5))
    prompts = [[(7 * i + r) % 1000 for i in range(11)] for r in range(17)]
    found = []
    for threads in (1, 3):
        with taking(threads):
            found.append(NativeStepper(model).start(Prompts.of(prompts), room=3)[0])
    assert torch.equal(*found)


CHECKS = {
    check.__name__: check
    for check in (
        native_is_uncached,
        long_rows_are_uncached,
        long_rows_have_their_own_bits,
        what_comes_later_is_not_read,
        native_runs_are_steps,
        native_beams_are_plain,
        pages_hold_the_defined_codes,
        rounded_attention_is_of_the_rounded_numbers,
        what_is_no_number_stays_none,
        rounded_is_uncached,
        native_beam_runs_are_steps,
        threads_change_no_step,
    )
}


@pytest.mark.parametrize("name", CHECKS)
def test_native(name):
    with new_memory_is_nan():
        CHECKS[name]()


@pytest.mark.parametrize("fault", STEP_FAULTS, ids=lambda fault: fault.name)
def test_every_fault_of_an_operation_is_caught(fault, tmp_path, monkeypatch):
    if fault.needs not in c_library.variants():
        pytest.skip("this machine cannot run the damaged line")
    damaged = c_library.open_library(damaged_library(fault, tmp_path))
    monkeypatch.setattr(c_library, "_loaded", lambda: (damaged, ""))
    one = partial(native_is_uncached, variants=("portable",), specs=(fault.caught_by,))
    # Numbers that were never written are NaN here, and beam search says so by name.
    with new_memory_is_nan(), pytest.raises((AssertionError, DivergedError)):
        CHECKS.get(fault.caught_by, one)()


SMALL_SEQ2SEQ = presets.seq2seq(d_model=64, n_heads=4, n_layers=2, vocab_size=97)


@pytest.mark.parametrize("scheme", [Int8(), Int4(), Int4(symmetric=False)], ids=str)
def test_quantized_weights_give_the_plain_logits(scheme):
    for spec in (presets.qwen(d_model=64, d_ff=96, n_layers=2), SMALL_SEQ2SEQ):
        model = build(spec, generator=torch.Generator().manual_seed(1))
        model = quantize_model(model, QuantSpec(scheme=scheme))
        sources = None if spec.encoder is None else [[1, 2, 3], [4, 5]]
        prompts = Prompts.of([[3, 1, 4], [1, 5, 9, 2, 6]], sources=sources)
        ours, plain = NativeStepper(model), TorchStepper(model)
        found_BV, past = ours.start(prompts, room=4)
        expected_BV, other = plain.start(prompts, room=4)
        for _ in range(3):
            # A rounding of an activation may fall either way: a small step of a small weight.
            assert float((found_BV - expected_BV).abs().max()) <= 1e-2 * float(expected_BV.std())
            tokens_B = expected_BV.argmax(-1)
            found_BV = ours.step(tokens_B, past=past)
            expected_BV = plain.step(tokens_B, past=other)


def test_bfloat16_weights_are_read_as_they_are():
    """Activations are float32 in the native step: it is closer to the exact logits than torch."""
    exact = build(presets.qwen(), generator=torch.Generator().manual_seed(1)).bfloat16().float()
    half = build(presets.qwen(), generator=torch.Generator().manual_seed(1)).bfloat16()
    prompts = Prompts.of([[3, 1, 4], [1, 5, 9, 2, 6]])
    want_BV, _ = NaiveStepper(exact).start(prompts, room=1)
    found_BV, _ = NativeStepper(half).start(prompts, room=1)
    assert torch.allclose(found_BV, want_BV, atol=1e-5)


def test_beams_share_pages_and_give_them_back():
    for name in ("rotary", "encoder"):
        model = checks.single(name)
        stepper, prompts = NativeStepper(model), checks.prompts_for(model)
        _, past = stepper.start(prompts, room=1)
        used = stepper.pages.used
        past.reorder(torch.tensor([0, 0, 0, 1, 2]))
        assert stepper.pages.used == used, "beams of one row share its pages"
        stepper.step(torch.tensor([3, 4, 5, 6, 7]), past=past)
        assert used < stepper.pages.used <= 5 * used
        del past
        assert stepper.pages.used == 0


def test_rows_come_and_go():
    """Three requests, each joining the batch while the others are under way, then leaving it."""
    for name in ("window", "encoder"):
        model = checks.single(name)
        stepper, prompts = NativeStepper(model), checks.prompts_for(model)
        spec = DecodeSpec(max_new_tokens=9)
        expected = [one.tokens for one in generate_batch(NaiveStepper(model), prompts, spec=spec)]
        made: dict[int, list[int]] = {}
        batch, going = None, []
        for turn in range(12):
            if turn % 2 == 0 and turn // 2 < len(prompts):
                row = turn // 2
                source = None if prompts.sources is None else (prompts.sources[row],)
                one = Prompts((prompts.tokens[row],), source)
                logits_BV, past = stepper.start(one, room=9)
                made[row] = [int(logits_BV.argmax())]
                if batch is None:
                    batch = past
                else:
                    batch.join(past)
                going.append(row)
            logits_BV = stepper.step(torch.tensor([made[row][-1] for row in going]), past=batch)
            for row, token in zip(going, logits_BV.argmax(-1).tolist(), strict=True):
                made[row].append(token)
            stay = [line for line, row in enumerate(going) if len(made[row]) < 9]
            batch.reorder(torch.tensor(stay, dtype=torch.long))
            going = [going[line] for line in stay]
            if not going:
                break
        assert [tuple(made[row]) for row in range(len(prompts))] == expected
        assert stepper.pages.used == 0


def test_several_tokens_at_once_and_taken_back():
    """What speculation needs: logits after each of several new tokens, and a row cut short."""
    model = checks.single("rotary")
    stepper, plain = NativeStepper(model), NaiveStepper(model)
    _, past = stepper.start(Prompts.of([[3, 1, 4], [1]]), room=9)
    logits = stepper.read([[5, 9, 2], [7]], past=past, chosen=np.arange(4))
    for place, row in enumerate(([3, 1, 4, 5], [3, 1, 4, 5, 9], [3, 1, 4, 5, 9, 2], [1, 7])):
        want_BV, _ = plain.start(Prompts.of([row]), room=1)
        assert float((logits[place] - want_BV[0]).abs().max()) <= 1e-5
    assert past.rewind([4, 1]) == [4, 1]
    logits = stepper.read([[8], [6, 2]], past=past)
    for place, row in enumerate(([3, 1, 4, 5, 8], [1, 6, 2])):
        want_BV, _ = plain.start(Prompts.of([row]), room=1)
        assert float((logits[place] - want_BV[0]).abs().max()) <= 1e-5


def test_new_weights_are_noticed():
    model = checks.single("rotary")
    stepper = NativeStepper(model)
    before, _ = stepper.start(Prompts.of([[1, 2]]), room=1)
    with torch.no_grad():
        model.blocks[0].attn_norm.weight.mul_(2.0)
    after, _ = stepper.start(Prompts.of([[1, 2]]), room=1)
    want, _ = NaiveStepper(model).start(Prompts.of([[1, 2]]), room=1)
    assert not torch.allclose(before, after)
    assert torch.allclose(after, want, atol=1e-5)


def test_weights_that_are_no_numbers_are_reported():
    model = checks.single("learned")
    with torch.no_grad():
        model.blocks[1].ffn.down_proj.weight[2, 3] = torch.nan
    with pytest.raises(DivergedError):
        generate_batch(NativeStepper(model), [[1, 2]], spec=DecodeSpec(max_new_tokens=5))


def test_what_it_does_not_know_is_left_to_others(monkeypatch):
    with monkeypatch.context() as unknown:
        unknown.delitem(lowering.RUNS, kinds.Route)
        assert "has no Route" in unavailable(checks.single("moe"))
        unknown.setitem(lowering.RUNS, kinds.Rotate, {"base": ANY, "scaling": ANY})
        assert "has no Rotate share=0.5" in unavailable(checks.single("neox"))
    assert "float64" in unavailable(built(checks.SPECS["rotary"]))
    hooked = checks.single("rotary")
    hooked.blocks[0].ffn.register_forward_hook(lambda *_: None)
    assert "hook" in unavailable(hooked)
    assert isinstance(fastest_stepper(hooked), TorchStepper)
    with pytest.raises(InputError, match="no native step"):
        NativeStepper(hooked)

    class Odd(torch.nn.Dropout):
        pass

    changed = checks.single("rotary")
    changed.blocks[0].dropout = Odd()
    assert "Odd" in unavailable(changed)


def test_a_field_that_it_does_not_know_is_not_passed_over(monkeypatch):
    """Behave as if `softcap` had been added to attention after the native step was written."""
    capped, plain = checks.single("gemma"), checks.single("learned")
    assert not unavailable(capped) and not unavailable(plain)
    older = {"before": ANY, "after": {0, None}}
    monkeypatch.setitem(lowering.RUNS, kinds.Attend, older)
    assert "Attend softcap=" in unavailable(capped)
    assert not unavailable(plain), "it has the default"
    monkeypatch.delitem(lowering.RUNS, kinds.AddRows)
    assert "AddRows" in unavailable(plain)
