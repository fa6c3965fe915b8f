"""What must hold of decoding, as plain functions: the tests call them, and so do planted faults."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import torch

from glassformer.checks.rows.decoding import disagreements, random_trial
from glassformer.generation.beam import beam_search
from glassformer.generation.loop import NOTHING, decode
from glassformer.generation.native.stepper import NativeStepper, unavailable
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.kernels import c_library
from glassformer.kernels.threads import taking
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.nn.cache import from_int8, to_int8
from glassformer.spec import presets
from glassformer.spec.decoding import BeamSpec, DecodeSpec, KVCache
from glassformer.spec.model import (
    MLP,
    ALiBi,
    FactorizedEmbedding,
    LayerNorm,
    Learned,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
    Sinusoidal,
    SwiGLU,
)
from tests.generation.pages import attended, codes_and_scales
from tests.tiny import VOCAB, built, tiny

GROUPED = {"n_heads": 4, "n_kv_heads": 2}
KV_CACHES: tuple[KVCache, ...] = get_args(KVCache)

#: Every variant that a step treats in its own way.
SPECS: dict[str, ModelSpec] = {
    "none": tiny(position=NoPosition(), placement="post"),
    "learned": tiny(position=Learned(), final_norm=LayerNorm()),
    "sinusoidal": tiny(position=Sinusoidal(), embedding=ScaledEmbedding()),
    "rotary": tiny(
        position=Rotary(),
        attention=GROUPED | {"qk_norm": RMSNorm(), "bias": "none"},
        ffn=SwiGLU(d_ff=17),
        norm=RMSNorm(),
        heads=(NextHead(tied=True),),
    ),
    "window": tiny(
        position=Rotary(),
        attention=GROUPED | {"window": 3, "bias": "qkv", "qk_norm": LayerNorm()},
        ffn=SwiGLU(d_ff=17, bias=True),
    ),
    "factorized": tiny(
        embedding=FactorizedEmbedding(rank=5), heads=(NextHead(tied=True, bias=True),)
    ),
    "encoder": tiny(encoder=True, position=Sinusoidal(), placement="post"),
    "encoder-pre": tiny(
        encoder=True,
        position=Rotary(),
        attention=GROUPED | {"qk_norm": RMSNorm()},
        source_vocab_size=23,
    ),
    "alibi": tiny(position=ALiBi(), attention=GROUPED),
    "alibi-window": tiny(position=ALiBi(scaled=True), attention=GROUPED | {"window": 3}),
    "alibi-encoder": tiny(encoder=True, position=ALiBi(max_bias=4.0)),
    "moe": tiny(
        position=Rotary(),
        ffn=MoE(n_experts=5, experts_per_token=2, expert=SwiGLU(d_ff=7), shared=SwiGLU(d_ff=5)),
        norm=RMSNorm(),
    ),
    "moe-gated": tiny(
        ffn=MoE(
            n_experts=3,
            experts_per_token=1,
            expert=MLP(d_ff=7),
            normalize=False,
            shared=MLP(d_ff=5),
            shared_gate=True,
        ),
    ),
}
PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3))
SOURCES = ((2, 7), (1, 8, 2, 8, 1, 8), (2, 8, 4))
STEPPERS = {
    "fixed": TorchStepper,
    "growing": lambda model: TorchStepper(model, cache="growing"),
    "derived": RecordedStepper,
}


def prompts_for(model: Model, count: int = 3) -> Prompts:
    """Prompts of different lengths, with sources where the model has an encoder."""
    sources = None if model.spec.encoder is None else SOURCES[:count]
    return Prompts(PROMPTS[:count], sources)


def paired_logits(
    make, model: Model, prompts: Prompts, *, steps: int, kv_cache: KVCache = "float"
) -> Iterator[float]:
    """The largest difference from the uncached logits, at every step, through two reorders."""
    ours, naive = make(model), NaiveStepper(model, kv_cache=kv_cache)
    a_BV, past = ours.start(prompts, room=steps)
    b_BV, rows = naive.start(prompts, room=steps)
    orders = {1: [len(prompts) - 1, 0, 0, 0], 3: [1, 0]}
    for place in range(steps):
        assert a_BV.shape == b_BV.shape
        yield float((a_BV - b_BV).abs().max())
        tokens_B = b_BV.argmax(-1)
        assert torch.equal(a_BV.argmax(-1), tokens_B)
        if place in orders:
            order_B = torch.tensor(orders[place])
            past.reorder(order_B)
            rows.reorder(order_B)
            tokens_B = tokens_B[order_B]
        a_BV, b_BV = ours.step(tokens_B, past=past), naive.step(tokens_B, past=rows)


def cached_is_uncached(*, steppers=tuple(STEPPERS), specs=tuple(SPECS)) -> None:
    """float64 at 1e-12, float32 at 1e-5, every step, every variant, one row and several."""
    for name, stepper in itertools.product(specs, steppers):
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            model = built(SPECS[name])
            if dtype == torch.float32:
                with torch.no_grad():  # activations of unit scale, where 1e-5 is rounding
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            model = model.to(dtype)
            for count in (1, 3):
                prompts = prompts_for(model, count)
                worst = max(paired_logits(STEPPERS[stepper], model, prompts, steps=6))
                assert worst <= limit, f"{name}, {stepper}, {dtype}: off by {worst:.1e}"


def _with_block(made: ModelSpec, **fields) -> ModelSpec:
    layers = tuple(replace(run, block=replace(run.block, **fields)) for run in made.decoder.layers)
    return replace(made, decoder=replace(made.decoder, layers=layers))


#: More of what the native step has in C, each with something that no other has.
NATIVE_SPECS = SPECS | {
    "gemma": presets.gemma(
        vocab_size=VOCAB, d_model=12, n_heads=2, n_kv_heads=1, d_head=6, d_ff=17, window=3
    ),
    "neox": presets.neox(vocab_size=VOCAB, d_model=16, n_heads=2, d_ff=17, n_layers=2),
    "parallel-shared": tiny(
        position=Rotary(), placement="parallel_shared", ffn=MLP(d_ff=9, activation="relu2")
    ),
    "pre-ffn": tiny(position=Rotary(), placement="pre_ffn", attention={"bias": "out"}),
    "output": tiny(
        position=Rotary(),
        placement="output",
        attention=GROUPED | {"qk_norm": RMSNorm(), "qk_norm_over": "all"},
        heads=(NextHead(tied=True, scale=0.25),),
    ),
    "scaled": _with_block(
        tiny(
            position=Rotary(),
            attention=GROUPED | {"qk_norm": LayerNorm(), "qk_norm_last": True, "sinks": True},
            embedding=ScaledEmbedding(factor=3.0),
        ),
        residual_scale=0.3,
    ),
    "moe-post": tiny(
        ffn=MoE(
            n_experts=4, experts_per_token=3, expert=MLP(d_ff=7), router_bias=True, normalize=False
        ),
        placement="post",
    ),
    "moe-output": tiny(
        position=Learned(offset=2),
        ffn=MoE(n_experts=4, experts_per_token=2, expert=SwiGLU(d_ff=7), shared=MLP(d_ff=5)),
        norm=LayerNorm(bias=False),
        placement="output",
    ),
}


def _halved(model: Model) -> Model:
    """The model in float32, with activations of unit scale, where 1e-5 is rounding."""
    with torch.no_grad():
        for parameter in model.float().parameters():
            parameter.mul_(0.5)
    return model


def single(name: str) -> Model:
    """A small model for the native step."""
    return _halved(built(NATIVE_SPECS[name]))


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


def _long(name: str) -> Model:
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
        model = _long(name)
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
            stepper = NativeStepper(_long(name), kv_cache=kv_cache)
            rows = [[(5 * i + r) % VOCAB for i in range(n)] for r, n in enumerate((150, 97, 3))]
            _, past = stepper.start(Prompts.of([row[:1] for row in rows]), room=200)
            together = stepper.read_all([row[1:] for row in rows], past=past)
            alone = []
            for row in rows:
                _, past = stepper.start(Prompts.of([row[:1]]), room=200)
                alone += [stepper.step(torch.tensor([t]), past=past).clone() for t in row[1:]]
        assert torch.equal(together, torch.cat(alone)), f"{name}, {variant}, {kv_cache}"


def what_comes_later_is_not_read() -> None:
    """A row whose next tokens are no numbers: it is as if they were not there."""
    model = _long("learned")
    with torch.no_grad():
        model.embed.weight[VOCAB - 1] = torch.nan
    row = [(5 * i) % (VOCAB - 1) for i in range(90)]
    for variant in c_library.variants():
        with c_library.use_variant(variant):
            stepper = NativeStepper(model)
            _, past = stepper.start(Prompts.of([row[:1]]), room=99)
            logits = stepper.read_all([row[1:] + [VOCAB - 1] * 5], past=past)
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


# --- keys and values in 8 bits --------------------------------------------------------------------

#: Heads with numbers that fill no vector, in the first group and in another; a short last group.
HEAD_WIDTHS = (20, 37, 80)
TOKENS, HEADS_OF = 70, (6, 2)


def _sequence(H: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
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
            q, k, v = _sequence(H)
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
            q, k, v = _sequence(H, seed=1)
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
            q, k, v = _sequence(32, seed=2)
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
        model = _long(name)
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


def used_memory_is_masked() -> None:
    """What an earlier decoding left in the memory changes nothing."""

    def make(model: Model) -> RecordedStepper:
        decoder = RecordedStepper(model)
        generate_batch(decoder, prompts_for(model), spec=DecodeSpec(max_new_tokens=20))
        with torch.inference_mode():
            for kv_BXSH in decoder._kvs:
                kv_BXSH.fill_(7.0)  # what an earlier decoding left there
        return decoder

    for name in SPECS:
        model = built(SPECS[name])
        for count in (1, 3):
            prompts = prompts_for(model, count)
            worst = max(paired_logits(make, model, prompts, steps=6))
            assert worst <= 1e-12, f"{name}: off by {worst:.1e}"


def batch_is_singles() -> None:
    """Greedy and sampled, either padding, rows that end at different places."""
    for name, make in itertools.product(("learned", "window", "encoder"), ("fixed", "derived")):
        model = built(SPECS[name])
        prompts, stepper = prompts_for(model), STEPPERS[make](model)
        for spec in (
            DecodeSpec(max_new_tokens=11, eos=(0, 3)),
            DecodeSpec(max_new_tokens=40, temperature=1.5, eos=(0,), seed=5),
            DecodeSpec(max_new_tokens=9, temperature=0.9, top_p=0.8, repetition_penalty=1.7),
        ):
            together = generate_batch(stepper, prompts, spec=spec)
            for side in ("left", "right"):
                assert _tokens(
                    generate_batch(stepper, _padded(prompts, side), spec=spec)
                ) == _tokens(together)
            for row, whole in enumerate(together):
                sources = None if prompts.sources is None else (prompts.sources[row],)
                single = Prompts((prompts.tokens[row],), sources)
                (alone,) = generate_batch(NaiveStepper(model), single, spec=spec, rows=(row,))
                assert alone.tokens == whole.tokens
                assert alone.finish == whole.finish
                assert all(
                    abs(a - b) < 1e-10 for a, b in zip(alone.logprobs, whole.logprobs, strict=True)
                )


def _tokens(rows):
    return [row.tokens for row in rows]


def _padded(prompts: Prompts, side: str) -> Prompts:
    """The same prompts, through an array that was padded on one side with a real token's id."""

    def array(rows):
        longest = max(map(len, rows)) + 1
        ids, valid = [], []
        for row in rows:
            fill = [VOCAB - 1] * (longest - len(row))
            ids.append([*fill, *row] if side == "left" else [*row, *fill])
            real, empty = [True] * len(row), [False] * len(fill)
            valid.append([*empty, *real] if side == "left" else [*real, *empty])
        return ids, valid

    tokens, valid = array(prompts.tokens)
    if prompts.sources is None:
        return Prompts.of(tokens, valid=valid)
    sources, source_valid = array(prompts.sources)
    return Prompts.of(tokens, valid=valid, sources=sources, source_valid=source_valid)


def rows_end_alone() -> None:
    """A row ends with its first eos, gives nothing afterwards, and leaves the batch."""
    model = built(SPECS["rotary"], seed=7)
    stepper = TorchStepper(model)
    free = generate_batch(stepper, PROMPTS, spec=DecodeSpec(max_new_tokens=12))
    eos = (free[0].tokens[2],)
    assert all(eos[0] not in other.tokens[:5] for other in free[1:]), "the first row ends first"
    sizes = []
    take = stepper.step

    def counted(tokens_B, *, past):
        sizes.append(len(tokens_B))
        return take(tokens_B, past=past)

    stepper.step = counted
    columns = list(decode(stepper, PROMPTS, spec=DecodeSpec(max_new_tokens=12, eos=eos)))
    for row, whole in enumerate(free):
        got = [int(column.tokens_B[row]) for column in columns]
        want = list(whole.tokens)
        if eos[0] in want:
            want = want[: want.index(eos[0]) + 1]
        assert got == want + [NOTHING] * (len(columns) - len(want))
        ends = [bool(column.finished_B[row]) for column in columns]
        assert ends == [place >= len(want) - 1 for place in range(len(columns))]
        assert columns[-1].finish[row] == ("eos" if want[-1] == eos[0] else "length")
    assert sizes == [sum(not f for f in column.finished_B) for column in columns[:-1]]
    assert sizes[-1] < len(PROMPTS)


def steps_are_counted() -> None:
    """One new token a step, the encoder once; the naive way does both again and again."""
    model = built(SPECS["encoder"])
    calls = []
    encode = model.encode
    model.encode = lambda *a, **k: calls.append(1) or encode(*a, **k)
    prompts = prompts_for(model)
    longest = max(map(len, prompts.tokens))
    for make in (TorchStepper, RecordedStepper):
        calls.clear()
        stepper = make(model)
        read = []
        embed = model.decoder.embed.register_forward_hook(
            lambda _, given, __, read=read: read.append(given[0].shape[1])
        )
        generate_batch(stepper, prompts, spec=DecodeSpec(max_new_tokens=7))
        embed.remove()
        assert len(calls) == stepper.encoder_calls == 1
        assert stepper.positions == longest + 6
        assert read in ([longest] + [1] * 6, [longest])  # the derived step has no modules
    calls.clear()
    naive = NaiveStepper(model)
    generate_batch(naive, prompts, spec=DecodeSpec(max_new_tokens=7))
    assert len(calls) == naive.encoder_calls == 7
    assert naive.positions == sum(range(longest, longest + 7))


# --- beams --------------------------------------------------------------------------------------


def beams_are_exact(*, models: int = 60) -> None:
    """The n-best list of a search of full width = the best of all sequences."""
    assert list(disagreements(models, steppers=(TorchStepper, RecordedStepper))) == []


def narrow_beams_are_plain() -> None:
    """Beams of any width = a search without cache, bound or batch, written down again."""
    trials = [random_trial(seed) for seed in range(30)]
    searches = [(trial.model, trial.prompts, trial.rules) for trial in trials]
    for seed, name in enumerate(SPECS):
        model = built(SPECS[name], seed=seed)
        rules = {"max_new_tokens": 6, "eos": (seed,), "alpha": 1.0}
        searches.append((model, prompts_for(model, 1), rules))
    for model, prompts, rules in searches:
        for width in (1, 2, 5):
            spec = BeamSpec(width=width, **rules)
            want = _plain_beams(model, prompts, spec)
            for stepper in (TorchStepper(model), RecordedStepper(model)):
                (found,) = beam_search(stepper, prompts, spec=spec)
                assert [h.tokens for h in found.hypotheses] == want, (width, rules)


def _plain_beams(model: Model, prompts: Prompts, spec: BeamSpec) -> list[tuple[int, ...]]:
    live, complete = [(0.0, ())], []
    for length in range(1, spec.max_new_tokens + 1):
        candidates = []
        for total, tokens in live:
            rows = Prompts(((*prompts.tokens[0], *tokens),), prompts.sources)
            logits_BV, _ = NaiveStepper(model).start(rows, room=1)
            for token, value in enumerate(logits_BV[0].log_softmax(-1).tolist()):
                early = token in spec.eos and length < spec.min_new_tokens
                if token not in spec.forbidden and not early:
                    candidates.append((total + value, (*tokens, token)))
        live = []
        for total, tokens in sorted(candidates, reverse=True)[: spec.width - len(complete)]:
            if tokens[-1] in spec.eos or length == spec.max_new_tokens:
                base = (5 + length) / 6 if spec.penalty == "gnmt" else length
                complete.append((total / base**spec.alpha, tokens))
            else:
                live.append((total, tokens))
    return [tokens for _, tokens in sorted(complete, reverse=True)]


def beam_one_is_greedy() -> None:
    """A beam of one, greedy decoding and temperature 0 agree, whatever the length penalty."""
    for seed, (name, alpha) in enumerate(itertools.product(SPECS, (-1.0, 0.0, 8.0))):
        model = built(SPECS[name], seed=seed)
        prompts, stepper = prompts_for(model), RecordedStepper(model)
        rules = {"max_new_tokens": 9, "eos": (2, 7, 11), "min_new_tokens": 2}
        greedy = generate_batch(stepper, prompts, spec=DecodeSpec(**rules))
        beams = beam_search(stepper, prompts, spec=BeamSpec(width=1, alpha=alpha, **rules))
        cold = generate_batch(
            stepper, prompts, spec=DecodeSpec(temperature=1e-5, seed=seed, **rules)
        )
        for sequence, other, found in zip(greedy, cold, beams, strict=True):
            assert sequence.tokens == other.tokens == found.hypotheses[0].tokens
            assert math.isclose(sum(sequence.logprobs), found.hypotheses[0].logprob, abs_tol=1e-9)
            assert sequence.finish == found.hypotheses[0].finish
