"""Every complete sequence of a tiny model, scored: the oracle of beam search.

It shares no code with the search: every prefix is read anew from its first token, nothing is cut,
and the penalties are written out a second time.
"""

from glassformer.generate.prompts import Prompts
from glassformer.generate.ranking import Hypothesis
from glassformer.generate.stepper import Stepper
from glassformer.spec.decoding import BeamSpec
from glassformer.spec.errors import InputError

MOST = 50_000  # sequences


def every_hypothesis(stepper: Stepper, prompts: Prompts, *, spec: BeamSpec) -> list[Hypothesis]:
    """All sequences that end with an `eos`, or at the limit without one, best first.

    For one prompt. `width`, `n_best` and groups mean nothing here.
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
