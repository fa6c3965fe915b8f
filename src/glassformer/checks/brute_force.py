"""Brute force against beam search: every complete sequence of a tiny model, scored.

It shares no code with the search: every prefix is recomputed from its first token, nothing is
pruned, and the penalties are written out a second time. `disagreements` compares both on random
tiny models with penalties of both signs; tests, `verify` and the benchmark differ in how many.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from glassformer.generation.beam import Hypothesis, beam_search
from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import NaiveStepper, Stepper, TorchStepper
from glassformer.models.build import build
from glassformer.models.model import Model
from glassformer.spec.decoding import BeamSpec
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


MOST_SEQUENCES = 5_000
N_BEST = (1, 2, 3, 8, MOST_SEQUENCES)


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
    while vocab**longest > MOST_SEQUENCES:
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
        # A likely end is what makes short and long hypotheses compete.
        "eos": (rng.choice((likeliest, rng.randrange(vocab))),),
    }
    if vocab > 3 and rng.random() < 0.3:
        rules["forbidden"] = (next(t for t in range(vocab) if t not in rules["eos"]),)
    width = sum((vocab - 1) ** n for n in range(longest + 1))
    return Trial(model, prompts, rules, width)


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
    block = Block(attention=Attention(n_heads=2), ffn=MLP(d_ff=11), norm=LayerNorm())
    encoder = Stack(layers=(Layers(count=1, block=replace(block, attention=blind)),))
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
