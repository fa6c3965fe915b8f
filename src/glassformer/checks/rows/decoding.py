"""Decoding: all steps, cached and uncached, batches, beams and sampling give the same tokens.

Beam search is compared with brute force, which scores every complete sequence of a tiny model and
shares no code with the search: every prefix is recomputed from its first token, nothing is pruned,
and the penalties are written out a second time. Tests, `verify` and the benchmark differ in the
number of random models.
"""

import itertools
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glasscheck.measure import (
    EXACT,
    TOLERANCE,
    Measure,
    NotOffered,
    nudged,
    relative_gap,
    scale_of,
)
from glasscheck.rows.invariants import tokens_of
from glasscheck.subject import Subject
from glassformer.adapters.executors import make_slots
from glassformer.byhand.model import Model as HandModel
from glassformer.checks.subject import with_source
from glassformer.generation.beam import Hypothesis, beam_search
from glassformer.generation.choosing import uniform
from glassformer.generation.native import stepper as native
from glassformer.generation.native.lowering import PAGE
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.speculative import SpeculativeStepper
from glassformer.generation.stepper import HandStepper, NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.derived_step import lacks
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.kernels import c_library
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Span, Stepper
from glassformer.models.weights import weights_of
from glassformer.spec.decoding import WIDEST_BEAM, BeamSpec, DecodeSpec, LengthPenalty
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    MLP,
    Attention,
    Block,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    Stack,
)

MOST = 50_000  # sequences


def every_hypothesis(stepper: Stepper, prompts: Prompts, *, spec: BeamSpec) -> list[Hypothesis]:
    """Return all sequences of one prompt that end with an `eos` or at the limit, best first.

    `width`, `n_best` and groups are ignored.
    """
    prompts.check(stepper)
    (prompt,) = prompts.tokens
    limit = prompts.room(stepper, spec.max_new_tokens)[0]
    live: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((), ())]
    complete = []
    for length in range(1, limit + 1):
        if len(live) * stepper.vocab_size > MOST:
            raise InputError(
                f"more than {MOST} sequences", hint="a smaller vocabulary or fewer new tokens"
            )
        sources = None if prompts.sources is None else prompts.sources * len(live)
        whole = Prompts(tuple((*prompt, *tokens) for tokens, _ in live), sources)
        logits_RV, _ = stepper.start(whole, room=1)
        logprobs_RV = logits_RV.double().log_softmax(-1).tolist()
        following = []
        for (tokens, values), row in zip(live, logprobs_RV, strict=True):
            for token, value in enumerate(row):
                if token in spec.forbidden:
                    continue
                longer = ((*tokens, token), (*values, value))
                if token in spec.eos:
                    if length >= spec.min_new_tokens:
                        complete.append(_scored(*longer, finish="eos", spec=spec))
                elif length == limit:
                    complete.append(_scored(*longer, finish="length", spec=spec))
                else:
                    following.append(longer)
        live = following
        if not live:
            break
    return sorted(complete, key=lambda h: -h.score)


def _scored(
    tokens: tuple[int, ...], values: tuple[float, ...], *, finish: str, spec: BeamSpec
) -> Hypothesis:
    total, length = sum(values), len(tokens)
    if spec.penalty == "gnmt":
        score = total * 6.0**spec.alpha / (5.0 + length) ** spec.alpha
    else:
        score = total * length ** (-spec.alpha)
    return Hypothesis(tokens, values, total, score, finish)


N_BEST = (1, 2, 3, 8, WIDEST_BEAM)


@dataclass(frozen=True, slots=True)
class Trial:
    """A model, a prompt, options of a search, and a width that prunes no hypothesis."""

    model: Model
    prompts: Prompts
    rules: dict[str, Any]
    full_width: int


def random_trial(seed: int) -> Trial:
    """Make a random trial: vocabulary 2 to 5, up to 6 tokens, peaked to flat distributions."""
    rng = random.Random(seed)
    vocab, longest = rng.randint(2, 5), rng.randint(1, 6)
    while _hypotheses(vocab, longest) > WIDEST_BEAM:
        longest -= 1
    crossed = rng.random() < 0.25
    model = _tiny_model(vocab, crossed, seed=seed, sharpness=rng.choice((0.1, 0.5, 1.0, 2.0)))
    prompts = Prompts(((0, 1),), ((1, 0, 1),) if crossed else None)
    likeliest = int(NaiveStepper(model).start(prompts, room=1)[0].argmax())
    rules: dict[str, Any] = {
        "penalty": rng.choice(("gnmt", "power")),
        "alpha": rng.uniform(-1.0, 1.0) * rng.choice((0.3, 1.0, 4.0)),
        "max_new_tokens": longest,
        "min_new_tokens": rng.choice((0, 0, rng.randint(0, longest))),
        # A likely end lets short and long hypotheses compete.
        "eos": (rng.choice((likeliest, rng.randrange(vocab))),),
    }
    if vocab > 3 and rng.random() < 0.3:
        rules["forbidden"] = (next(t for t in range(vocab) if t not in rules["eos"]),)
    return Trial(model, prompts, rules, _hypotheses(vocab, longest))


def _hypotheses(vocab: int, longest: int) -> int:
    """Return how many sequences end with the one `eos` of a vocabulary or at the limit."""
    return sum((vocab - 1) ** n for n in range(longest + 1))


def disagreements(
    models: int,
    *,
    first: int = 0,
    steppers: Sequence[Callable[[Model], Stepper]] = (TorchStepper,),
) -> Iterator[str]:
    """Return a line for each wrong n-best list of full width; empty if all are right.

    Each model is searched for its best hypothesis, its two best, and so on: the search stops at
    another step each time.
    """
    for seed in range(first, first + models):
        trial = random_trial(seed)
        every = every_hypothesis(
            NaiveStepper(trial.model), trial.prompts, spec=BeamSpec(**trial.rules)
        )
        for make in steppers:
            for n_best in sorted({min(n, trial.full_width) for n in N_BEST}):
                spec = BeamSpec(width=trial.full_width, n_best=n_best, **trial.rules)
                (found,) = beam_search(make(trial.model), trial.prompts, spec=spec)
                got, want = found.hypotheses, every[:n_best]
                same = [h.tokens for h in got] == [h.tokens for h in want] and all(
                    math.isclose(a.score, b.score, rel_tol=1e-9, abs_tol=1e-9)
                    and a.finish == b.finish
                    for a, b in zip(got, want, strict=True)
                )
                if not same:
                    yield f"model {seed}, {n_best} best of {len(every)}: {trial.rules}"


def _tiny_model(vocab: int, crossed: bool, *, seed: int, sharpness: float) -> Model:
    blind = Attention(n_heads=2, causal=False)
    block = Block(mixer=Attention(n_heads=2), ffn=MLP(d_ff=11), norm=LayerNorm())
    encoder = Stack(layers=(Layers(count=1, block=replace(block, mixer=blind)),))
    block = replace(block, cross=blind if crossed else None)
    model = build(
        ModelSpec(
            vocab_size=vocab,
            d_model=6,
            max_seq_len=9,
            position=Learned(),
            decoder=Stack(layers=(Layers(count=1, block=block),)),
            encoder=encoder if crossed else None,
            heads=(NextHead(tied=False, bias=True),),
        )
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 1.0, generator=generator)
        for parameter in model.heads.parameters():
            parameter.mul_(sharpness)
    return model


# B batch, T length, V vocab

NEW = 6
#: The number of random models for brute force: always, and with `--deep`.
FEW, MANY = 30, 1_000
#: Orders of a batch's three rows before each step: as they are, and with one twice, as beams do.
ORDERS: tuple[tuple[int, ...], ...] = ((), (2, 0, 0, 1))
#: Lengths of prompts beyond a page of keys and values, beyond several, and just before the next.
LONG = (70, 33, 15)
#: The same of requests, which are read once more token by token.
SERVED = (PAGE + 3, 2, PAGE + 1)
#: Rows, and the longest prompt, whose positions give the median of two 8-bit caches' distance: the
#: pages of the native cache have 16 positions.
ROWS, LONGEST = 6, 14
#: The median share of 8 bits' own distance from float that native logits may be from torch's: so
#: many times what the last bit of every weight changes, and between these two. On SmolLM2 the two
#: are 0.49 and 0.26; scales one part in 128 too small are 1.06, codes rounded to zero 1.13.
SHARED_TIMES, SHARED_LEAST, SHARED_MOST = 4.0, 0.25, 0.9
#: The name of what the last bit of every weight changes, among the variants of the native step.
LAST_BIT = "last bit"
#: The share at any one position: 1.5 was seen.
SHARED_ANYWHERE = 12.0


def _case(subject: Subject, lengths: tuple[int, int, int] = (5, 2, 4)) -> tuple[Model, Prompts]:
    """Return a model of ours that decodes, and three prompts of these lengths, if they fit."""
    model = subject.ours()
    if "next" not in model.spec.head_names() or not subject.causal:
        raise NotOffered("it cannot continue a sequence")
    if next(model.parameters()).device.type != "cpu":
        raise NotOffered("decoding is examined on the CPU")
    room = max(5, model.spec.max_seq_len - NEW)
    tokens = tokens_of(subject, 3, min(max(lengths), room), seed=95).tolist()
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    source = with_source(model.spec, torch.tensor(tokens), None).source_BS
    sources = None if source is None else source.tolist()
    return model, Prompts.of(rows, sources=sources)


def _steppers(model: Model) -> dict[str, Stepper]:
    """Return every stepper for this model."""
    found: dict[str, Stepper] = {
        "cached": TorchStepper(model),
        "growing cache": TorchStepper(model, cache="growing"),
    }
    if not native.unavailable(model):
        found["native"] = NativeStepper(model)
    if not lacks(model.spec):
        found["derived"] = RecordedStepper(model)
    if next(model.parameters()).dtype in (torch.float32, torch.float64):
        hand = HandModel(model.spec, params=weights_of(model), dtype=weights_dtype(model))
        found["by hand"] = HandStepper(hand)
    return found


def _tokens(
    stepper: Stepper, prompts: Prompts, spec: DecodeSpec, *, rows: Sequence[int] | None = None
) -> list[list[int]]:
    made = generate_batch(stepper, prompts, spec=spec, rows=rows, logprobs=False)
    return [list(one.tokens) for one in made]


def _first(stepper: Stepper, prompts: Prompts, spec: BeamSpec) -> list[list[int]]:
    found = beam_search(stepper, prompts, spec=spec)
    return [list(beams.hypotheses[0].tokens) for beams in found]


def every_way_is_greedy(subject: Subject) -> Measure:
    """Every step, cached or not, temperature 0, top 1 and one beam give the same tokens."""
    model, prompts = _case(subject)
    greedy, plain = DecodeSpec(max_new_tokens=NEW), TorchStepper(model)
    expected = _tokens(NaiveStepper(model), prompts, greedy)
    found = {name: _tokens(one, prompts, greedy) for name, one in _steppers(model).items()}
    almost = DecodeSpec(max_new_tokens=NEW, temperature=1e-6)
    found["temperature 1e-6"] = _tokens(plain, prompts, almost)
    alone = DecodeSpec(max_new_tokens=NEW, temperature=1.0, top_k=1)
    found["top 1"] = _tokens(plain, prompts, alone)
    found["one beam"] = _first(plain, prompts, BeamSpec(width=1, max_new_tokens=NEW))
    wrong = [name for name, tokens in found.items() if tokens != expected]
    size = f"{subject.size}, {len(found)} ways"
    return Measure(float(len(wrong)), EXACT, size, ", ".join(wrong))


def weights_dtype(model: Model) -> type:
    """Return the NumPy dtype of the model's precision."""
    wide = next(model.parameters()).dtype == torch.float64
    return np.float64 if wide else np.float32


def every_step_is_uncached(subject: Subject) -> Measure:
    """Logits of every way at every step, and the token they choose, are the uncached ones."""
    model, prompts = _case(subject)
    steppers = _steppers(model)
    size = f"{subject.size}, {NEW} steps"
    return _followed(subject, steppers, NaiveStepper(model), prompts, size)


def every_wide_step_is_uncached(subject: Subject) -> Measure:
    """The same with the model's weights in float64."""
    _case(subject)
    if subject.double is None:
        raise NotOffered("it cannot be had in float64")
    wide = subject.double()
    model, prompts = _case(wide)
    size = f"{subject.size}, {NEW} steps"
    return _followed(wide, _steppers(model), NaiveStepper(model), prompts, size, dtype="float64")


def _followed(
    subject: Subject,
    steppers: dict[str, Stepper],
    witness: Stepper,
    prompts: Prompts,
    size: str,
    dtype: str = "",
    order: tuple[int, ...] = (),
) -> Measure:
    """Return the worst gap of the steppers' logits to the witness's, along greedy tokens.

    Before every step the rows are reordered by `order`, if given: rows may repeat.
    """
    wanted_BV, past = witness.start(prompts, room=NEW)
    pasts = {}
    worst, where, logits = 0.0, "", {}
    for name, stepper in steppers.items():
        logits[name], pasts[name] = stepper.start(prompts, room=NEW)
    for step in range(NEW):
        chosen_B = wanted_BV.argmax(-1)
        for name, logits_BV in logits.items():
            apart = relative_gap(logits_BV, wanted_BV)
            theirs_B1 = logits_BV.argmax(-1, keepdim=True)
            behind_B = wanted_BV.amax(-1) - wanted_BV.gather(-1, theirs_B1)[:, 0]
            apart = max(apart, float(behind_B.max()) / (scale_of(wanted_BV) or 1.0))
            if not apart <= worst:
                worst, where = apart, f"worst: {name}, step {step + 1}"
        if step + 1 < NEW:
            if order:
                chosen_B = chosen_B[list(order)]
                for one in (past, *pasts.values()):
                    one.reorder(order)
            wanted_BV = witness.step(chosen_B, past=past)
            for name, stepper in steppers.items():
                logits[name] = stepper.step(chosen_B, past=pasts[name])
    return Measure(worst, subject.tolerance(wanted_BV.dtype), size, where, dtype)


def a_batch_decodes_as_its_rows(subject: Subject) -> Measure:
    """Prompts of three lengths, padded on either side, greedy and sampled: as each one alone."""
    model, prompts = _case(subject)
    wrong = []
    steppers: dict[str, Stepper] = {"cached": TorchStepper(model)}
    if not lacks(model.spec):
        steppers["derived"] = RecordedStepper(model)
    for name, stepper in steppers.items():
        for temperature in (0.0, 1.0):
            spec = DecodeSpec(max_new_tokens=NEW, temperature=temperature, seed=7)
            alone = []
            for row in range(len(prompts)):
                source = None if prompts.sources is None else (prompts.sources[row],)
                one = Prompts((prompts.tokens[row],), source)
                alone += _tokens(stepper, one, spec, rows=[row])
            for side in ("left", "right"):
                if _tokens(stepper, _padded(prompts, side), spec) != alone:
                    wrong.append(f"{name}, padded {side}, temperature {temperature:g}")
    return Measure(
        float(len(wrong)), EXACT, f"{subject.size}, {4 * len(steppers)} ways", "; ".join(wrong)
    )


def _padded(prompts: Prompts, side: str) -> Prompts:
    """Return the same prompts as an array with a mask."""
    longest = max(map(len, prompts.tokens))
    tokens_BT = np.zeros((len(prompts), longest), dtype=np.int64)
    valid_BT = np.zeros((len(prompts), longest), dtype=np.bool_)
    for row, ids in enumerate(prompts.tokens):
        place = slice(longest - len(ids), None) if side == "left" else slice(0, len(ids))
        tokens_BT[row, place], valid_BT[row, place] = ids, True
    return Prompts.of(tokens_BT, valid=valid_BT, sources=prompts.sources)


def all_kept_is_plain_sampling(subject: Subject) -> Measure:
    """Top-k of everything, top-p 1 and min-p 0 sample the tokens of the plain distribution."""
    model, prompts = _case(subject)
    size, seed, stepper = model.spec.vocab_size, 11, TorchStepper(model)
    expected = _drawn(stepper, prompts, seed=seed)
    wrong = []
    for top_k in (None, size, size + 5):
        spec = DecodeSpec(
            max_new_tokens=NEW, temperature=1.0, top_k=top_k, top_p=1.0, min_p=0.0, seed=seed
        )
        if _tokens(stepper, prompts, spec) != expected:
            wrong.append(f"top_k {top_k}")
    return Measure(float(len(wrong)), EXACT, f"{subject.size}, k {size}", ", ".join(wrong))


def _drawn(stepper: Stepper, prompts: Prompts, *, seed: int) -> list[list[int]]:
    """Sample by definition: the first token whose cumulative probability exceeds a number."""
    logits_BV, past = stepper.start(prompts, room=NEW)
    made: list[list[int]] = [[] for _ in range(len(prompts))]
    for step in range(NEW):
        chance_BV = np.exp(logits_BV.double().log_softmax(-1).numpy())
        chosen = []
        for row, chance_V in enumerate(chance_BV):
            below = np.cumsum(chance_V) <= uniform(seed, row, step) * chance_V.sum()
            chosen.append(int(below.sum()))
            made[row].append(chosen[-1])
        if step + 1 < NEW:
            logits_BV = stepper.step(torch.tensor(chosen), past=past)
    return made


def beams_are_brute_force(subject: Subject) -> Measure:
    """The widest search over a few allowed tokens finds all sequences in their order."""
    model, prompts = _case(subject)
    one = Prompts(prompts.tokens[:1], None if prompts.sources is None else prompts.sources[:1])
    vocab = model.spec.vocab_size
    # Brute force reads every prefix of two tokens and an end: as long as the limit allows.
    longest = max((n for n in range(2, 6) if 2 ** (n - 1) * vocab <= MOST), default=0)
    if not longest or vocab < 3:
        raise NotOffered("its vocabulary is too large or too small for brute force")
    allowed = sorted({int(token) for token in _likeliest(model, one, 3)})
    wrong, scores = 0, 0.0
    penalties: tuple[tuple[LengthPenalty, float], ...] = (("gnmt", 0.6), ("power", -0.7))
    for penalty, alpha in penalties:
        rules = BeamSpec(
            width=2 ** (longest + 1) - 1,  # every sequence with and without an end
            penalty=penalty,
            alpha=alpha,
            max_new_tokens=longest,
            forbidden=tuple(token for token in range(vocab) if token not in allowed),
            eos=(allowed[0],),
        )
        every = every_hypothesis(NaiveStepper(model), one, spec=rules)
        (found,) = beam_search(TorchStepper(model), one, spec=rules)
        same = [h.tokens for h in found.hypotheses] == [h.tokens for h in every]
        wrong += not same
        if same:
            pairs = zip(found.hypotheses, every, strict=True)
            scores = max(scores, max(_apart(a.score, b.score) for a, b in pairs))
    dtype = next(model.parameters()).dtype
    worst = float(wrong) if wrong else scores
    size = f"{subject.size}, {2 ** (longest + 1) - 1} sequences, 2 penalties"
    return Measure(worst, subject.tolerance(dtype), size)


def _apart(score: float, wanted: float) -> float:
    """Return the gap: absolute below 1, else relative, as large sums round with their size."""
    return abs(score - wanted) / max(1.0, abs(wanted))


def _likeliest(model: Model, prompts: Prompts, count: int) -> Tensor:
    logits_BV, _ = NaiveStepper(model).start(prompts, room=1)
    return logits_BV[0].topk(count).indices


def searches_are_exact(dtype: torch.dtype) -> Measure:
    """The n-best lists of tiny random models, penalties of both signs, against brute force."""
    return _exact(FEW)


def many_searches_are_exact(dtype: torch.dtype) -> Measure:
    """The same for many more of them."""
    return _exact(MANY)


def _exact(models: int) -> Measure:
    wrong = list(disagreements(models, steppers=(TorchStepper, RecordedStepper)))
    note = wrong[0] if wrong else ""
    return Measure(float(len(wrong)), EXACT, f"{models:,} random models, vocabulary ≤ 5", note)


def native_steps_are_plain(subject: Subject) -> Measure:
    """The native step gives the logits and tokens of the plain cached step, with every variant.

    Rows of different lengths, a few tokens and several pages, then the same batch reordered with a
    row twice, as beams do.
    """
    model, short = _case(subject)
    if reason := native.unavailable(model):
        raise NotOffered(reason)
    found, size = [], f"{subject.size}, {NEW} steps"
    _, long = _case(subject, LONG)
    for name in c_library.variants():
        sides: dict[str, Stepper] = {name: NativeStepper(model)}
        with c_library.use_variant(name):
            for prompts, order in itertools.product((short, long), ORDERS):
                plain = TorchStepper(model)
                found.append(_followed(subject, sides, plain, prompts, size, order=order))
    return _worst(found)


def rounded_steps_are_uncached(subject: Subject) -> Measure:
    """Steps with keys and values in 8 bits: the logits of a forward that rounds all of them anew.

    Both caches, rows of different lengths and reordered, in float64: there the two sides round the
    same numbers, and no code falls on the other side of a half.
    """
    _case(subject)
    if subject.double is None:
        raise NotOffered("it cannot be had in float64")
    wide = subject.double()
    model, prompts = _case(wide)
    steppers: dict[str, Stepper] = {
        "fixed": TorchStepper(model, kv_cache="int8"),
        "growing": TorchStepper(model, cache="growing", kv_cache="int8"),
    }
    found = [
        _followed(
            wide,
            steppers,
            NaiveStepper(model, kv_cache="int8"),
            prompts,
            f"{subject.size}, {NEW} steps",
            dtype="float64",
            order=order,
        )
        for order in ORDERS
    ]
    return _worst(found)


def native_rounded_steps_are_torchs(subject: Subject) -> Measure:
    """The native step with keys and values in 8 bits is nearer to torch's than rounding is far.

    A key that is computed in another order may get the next code, so the two cannot have one
    float32's precision. At each of many positions their distance is taken as a share of that of 8
    bits from float. `worst` is the median, as the largest swings with the prompt; what it may be is
    measured: a multiple of what the last bit of every weight changes, and less than 8 bits' own.
    With every variant, rows reordered as well.
    """
    model, prompts = _case(subject)
    if reason := native.unavailable(model, kv_cache="int8"):
        raise NotOffered(reason)
    longest = max(1, min(LONGEST, subject.max_length - NEW))
    tokens = tokens_of(subject, ROWS, longest, seed=95).tolist()
    rows = [row[: max(1, longest - i)] for i, row in enumerate(tokens)]
    sources = prompts.sources and (prompts.sources * ROWS)[:ROWS]
    return _rounding_shared(model, Prompts(tuple(map(tuple, rows)), sources))


def _rounding_shared(model: Model, prompts: Prompts) -> Measure:
    """Return the median share of 8 bits' own distance that native logits are from torch's."""
    shares: dict[str, list[Tensor]] = {}
    for order in ORDERS:
        order = (*order, *range(len(order) - 1, len(prompts))) if order else ()
        chosen: list[Tensor] = []
        wanted_PV = _along(TorchStepper(model, kv_cache="int8"), prompts, order, chosen)
        own_P = _distance(_along(TorchStepper(model), prompts, order, chosen), wanted_PV)
        # A position at which 8 bits happen to change little is no measure of the others.
        least = TOLERANCE[wanted_PV.dtype] * float(wanted_PV.square().mean().sqrt())
        own_P = own_P.clamp(min=max(least, 0.5 * float(own_P.median())))
        found = {}
        for name in c_library.variants():
            with c_library.use_variant(name):
                native = NativeStepper(model, kv_cache="int8")
                found[name] = _along(native, prompts, order, chosen)
        with nudged(list(model.parameters()), seed=1):
            again = TorchStepper(model, kv_cache="int8")
            found[LAST_BIT] = _along(again, prompts, order, chosen)
        for name, logits_PV in found.items():
            shares.setdefault(name, []).append(_distance(logits_PV, wanted_PV) / own_P)
    joined = {name: torch.cat(parts) for name, parts in shares.items()}
    moved = float(joined.pop(LAST_BIT).median())
    bar = min(SHARED_MOST, max(SHARED_LEAST, SHARED_TIMES * moved))
    worst, note = 0.0, ""
    for name, share_P in joined.items():
        median, most = float(share_P.median()), float(share_P.max())
        gross = math.isnan(most) or most > SHARED_ANYWHERE
        share = most if gross else median
        if not share <= worst or not note:
            worst = share
            note = f"{name}: {median:.2f} of 8 bits' own distance in the median, {most:.2f} at most"
    size = f"d{model.spec.d_model} L{model.spec.n_layers}, {len(share_P)} positions"
    return Measure(worst, bar, size, note, evident=True)


def _along(
    stepper: Stepper, prompts: Prompts, order: tuple[int, ...], chosen: list[Tensor]
) -> Tensor:
    """Return the logits of every row at every step, (positions, V), of tokens that are chosen.

    An empty list is filled: with the tokens that this stepper finds likeliest.
    """
    given, found = bool(chosen), []
    logits_BV, past = stepper.start(prompts, room=NEW)
    for step in range(NEW):
        found.append(logits_BV.clone())
        if step + 1 == NEW:
            break
        if order:
            past.reorder(order)
        if not given:
            tokens_B = logits_BV.argmax(-1)
            chosen.append(tokens_B[torch.tensor(order)] if order else tokens_B)
        logits_BV = stepper.step(chosen[step], past=past)
    return torch.cat(found)


def _distance(a_PV: Tensor, b_PV: Tensor) -> Tensor:
    return (a_PV - b_PV).double().square().mean(-1).sqrt()


def _worst(found: Sequence[Measure]) -> Measure:
    return max(found, key=lambda one: math.inf if math.isnan(one.worst) else one.worst)


def company_changes_nothing(subject: Subject) -> Measure:
    """Logits of the server's step: the same bits alone, in company, and with a prompt in pieces."""
    model, prompts = _case(subject, SERVED)
    if model.spec.encoder is not None:
        raise NotOffered("an encoder-decoder is served one sequence at a time")
    rows = prompts.tokens
    longest = max(map(len, rows))
    slots = make_slots(
        model, lambda: TorchStepper(model), model.spec, slots=len(rows) + 1, context=longest + 1
    )
    if not slots.cuts_prompts:
        raise NotOffered("it is served one sequence at a time")
    together_RV = slots.read([Span(slot, 0, row) for slot, row in enumerate(rows)])
    spare, differ = len(rows), 0
    for slot, row in enumerate(rows):
        alone_1V = slots.read([Span(spare, 0, row)])
        for place, token in enumerate(row):
            beside = [Span(slot, 0, row[:1])] if place % 2 else []
            cut_RV = slots.read([*beside, Span(spare, place, (token,))])
        same = torch.equal(alone_1V[0], together_RV[slot]) and torch.equal(alone_1V[0], cut_RV[-1])
        differ += not same
    return Measure(float(differ), EXACT, f"{subject.size}, {len(rows)} sequences")


def speculation_changes_nothing(subject: Subject) -> Measure:
    """Tokens chosen with guesses read ahead, right and wrong ones: those without, sampled or not.

    Guesses come from the text and, for a decoder, from a draft: the model itself, always right when
    greedy. Held to equality where a row's numbers do not depend on the rows read with it.
    """
    model, prompts = _case(subject)
    if reason := native.unavailable(model):
        raise NotOffered(reason)
    stepper, wrong, guessed, right = NativeStepper(model), [], 0, 0
    drafts: dict[str, Stepper | None] = {"from the text": None}
    if model.spec.encoder is None:
        drafts["by a draft"] = NativeStepper(model)
    sources = None if prompts.sources is None else prompts.sources[:1]
    repeated = Prompts((prompts.tokens[0][:2] * 2,), sources)
    for name, draft in drafts.items():
        guessing = SpeculativeStepper(stepper, draft=draft, clock=lambda: 0.0)
        for temperature in (0.0, 1.0):
            spec = DecodeSpec(max_new_tokens=3 * NEW, temperature=temperature, seed=3)
            (want,) = generate_batch(stepper, repeated, spec=spec)
            (found,) = generate_batch(guessing, repeated, spec=spec)
            guessed, right = guessed + guessing.facts.guessed, right + guessing.facts.right
            if found.tokens != want.tokens:
                wrong.append(f"{name}, temperature {temperature:g}")
    size = f"{subject.size}, {right} of {guessed} guesses right"
    return Measure(float(len(wrong)), EXACT, size, "; ".join(wrong))


def kept_prompts_change_nothing(subject: Subject) -> Measure:
    """Logits after a prompt whose beginning was kept on disk, and those of it read anew: all bits.

    One prompt is kept; then itself is read, and one that begins alike and differs within a page.
    """
    model, prompts = _case(subject)
    if reason := native.unavailable(model):
        raise NotOffered(reason)
    if model.spec.encoder is not None:
        raise NotOffered("prompts are kept for decoders")
    row = tuple(itertools.islice(itertools.cycle(prompts.tokens[0]), 3 * PAGE + 3))
    row = row[: model.spec.max_seq_len]
    middle = len(row) // 2 + 1
    other = (*row[:middle], (row[middle] + 1) % model.spec.vocab_size, *row[middle + 1 :])
    if len(row) < PAGE + 2:
        raise NotOffered(f"its {model.spec.max_seq_len} positions are fewer than a page and more")
    plain, differ, reused = NativeStepper(model), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for each in (row, row, other):
            keeping = NativeStepper(model, prompt_cache=Path(folder))
            want, _ = plain.start(Prompts((each,)), room=1)
            found, _ = keeping.start(Prompts((each,)), room=1)
            differ += not torch.equal(found, want)
            reused += keeping.reused
    missing = int(reused == 0)
    size = f"{subject.size}, {reused} tokens not read again"
    return Measure(float(differ + missing), EXACT, size)


def one_token_a_step(subject: Subject) -> Measure:
    """After the prompt each cached step reads one position; the encoder runs once."""
    model, prompts = _case(subject)
    extra = 0
    for name, stepper in _steppers(model).items():
        if name == "by hand":
            continue
        generate_batch(stepper, prompts, spec=DecodeSpec(max_new_tokens=NEW))
        # The last token is chosen and never read.
        columns = max(len(row) for row in prompts.tokens) + NEW - 1
        extra += abs(stepper.positions - columns)
        extra += abs(stepper.encoder_calls - (model.spec.encoder is not None))
    return Measure(float(extra), EXACT, subject.size)
