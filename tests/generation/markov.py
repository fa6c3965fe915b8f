"""A language small enough to write down: next-token logits by place and last token.

One more `Stepper`, without a network: its probabilities can be as extreme as a search needs, which
those of random models never are.
"""

import random
from dataclasses import dataclass

import torch

from glassformer.checks.rows.decoding import every_hypothesis
from glassformer.generation.beam import beam_search
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import BeamSpec

# B batch, V vocab


@dataclass
class Chain:
    """Where each row stands."""

    place: int

    def reorder(self, rows_B):
        """Rows know nothing but their place, which is the same for all."""


class MarkovStepper:
    """logits[length - 1][last token]; nothing is learned and nothing is cached."""

    source_vocab = None
    run_beams = Stepper.run_beams

    def __init__(self, logits_SVV: torch.Tensor) -> None:
        self.logits_SVV = logits_SVV
        self.vocab_size = logits_SVV.shape[-1]
        self.max_seq_len = len(logits_SVV) + 1
        self.encoder_calls = self.positions = 0

    def start(self, prompts, *, room):
        """Prompts of one length."""
        (length,) = set(map(len, prompts.tokens))
        last_B = torch.tensor([row[-1] for row in prompts.tokens])
        return self.logits_SVV[length - 1, last_B], Chain(length)

    def step(self, tokens_B, *, past):
        """One place further."""
        past.place += 1
        return self.logits_SVV[past.place - 1, tokens_B]


def steep_searches_are_exact(*, chains: int = 500) -> None:
    """Ends that are likely at some places, certain ways on: long and short ones win in turn."""
    for seed in range(chains):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        vocab, longest = rng.randint(2, 3), rng.randint(2, 5)
        scale = torch.rand(longest, vocab, 1, generator=generator) * 12
        logits_SVV = torch.randn(longest, vocab, vocab, generator=generator).double() * scale
        stepper, prompts = MarkovStepper(logits_SVV), Prompts(((0,),))
        rules = {
            "penalty": rng.choice(("gnmt", "power")),
            "alpha": rng.uniform(-4.0, 4.0),
            "max_new_tokens": longest,
            "eos": (0,),
        }
        every = every_hypothesis(stepper, prompts, spec=BeamSpec(**rules))
        for n_best in range(1, min(6, len(every)) + 1):
            spec = BeamSpec(width=len(every), n_best=n_best, **rules)
            (found,) = beam_search(stepper, prompts, spec=spec)
            got, want = ([h.score for h in hs] for hs in (found.hypotheses, every[:n_best]))
            worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
            assert worst < 1e-9, (seed, n_best, rules)
