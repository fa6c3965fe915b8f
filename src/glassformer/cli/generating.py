"""What `glass generate` does: a model and a prompt in, text out as it is made."""

import json
import sys
from typing import Any

from glassformer.adapters.load import load, load_tokenizer
from glassformer.data.vocab import Tokenizer
from glassformer.generate.beam import beam_search
from glassformer.generate.constraint import Constraint
from glassformer.generate.decode import decode
from glassformer.generate.prompts import Prompts
from glassformer.generate.stepper import NaiveStepper, Stepper, TorchStepper
from glassformer.generate.text import TextStream
from glassformer.models.model import Model
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError


def prompt_of(model: Model, tokenizer: Tokenizer, text: str) -> Prompts:
    """The prompt as the model was trained to see it: BOS before it, or as the source of a BOS."""
    if "next" not in model.spec.head_names():
        raise InputError(
            "this model has no next-token head, so it cannot continue a text",
            hint="glass evaluate measures what it answers",
        )
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("an empty prompt", hint="give some text, or - to read stdin")
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    if model.spec.encoder is None:
        return Prompts.of([begin + ids])
    end = [] if tokenizer.eos is None else [tokenizer.eos]
    return Prompts.of([begin], sources=[ids + end])


def run(
    path: str,
    text: str,
    *,
    spec: DecodeSpec,
    beams: BeamSpec | None,
    constrain: str | None,
    cached: bool,
    as_json: bool,
) -> None:
    """Generate, streaming; with beams, the n-best list."""
    model, tokenizer = load(path), load_tokenizer(path)
    stepper: Stepper = TorchStepper(model) if cached else NaiveStepper(model)
    prompts = prompt_of(model, tokenizer, sys.stdin.read() if text == "-" else text)
    constraint = None if constrain is None else Constraint.of_regex(constrain, tokenizer=tokenizer)
    if beams is not None:
        found = beam_search(stepper, prompts, spec=beams, constraint=constraint)[0]
        rows = [
            {
                "text": tokenizer.decode([token for token in one.tokens if token not in beams.eos]),
                "tokens": list(one.tokens),
                "logprobs": list(one.logprobs),
                "score": one.score,
                "finish": one.finish,
            }
            for one in found.hypotheses
        ]
        show_beams(rows, as_json=as_json)
        return
    stream, tokens, logprobs, finish = TextStream(tokenizer), [], [], "length"
    pieces = []
    for column in decode(stepper, prompts, spec=spec, constraint=constraint, tokenizer=tokenizer):
        token = int(column.tokens_B[0])
        tokens.append(token)
        logprobs.append(float(column.logprobs_B[0]))
        finish = column.finish[0] or finish
        if token not in spec.eos:
            pieces.append(stream.push(token))
            if not as_json:
                print(pieces[-1], end="", flush=True)
    pieces.append(stream.flush())
    result = {"text": "".join(pieces), "tokens": tokens, "logprobs": logprobs, "finish": finish}
    print(json.dumps(result) if as_json else pieces[-1])


def show_beams(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """The n-best list."""
    if as_json:
        print(json.dumps({"hypotheses": rows}))
        return
    for row in rows:
        print(f"{row['score']:9.4f}  {row['text']}")


def eos_of(path: str) -> tuple[int, ...]:
    """The ids at which a text of this model ends."""
    eos = load_tokenizer(path).eos
    return () if eos is None else (eos,)
