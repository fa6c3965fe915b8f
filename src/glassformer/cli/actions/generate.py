"""Run `glass generate`: print the continuation of a prompt as it is generated."""

import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

from glassformer.adapters.load import load, load_tokenizer
from glassformer.adapters.tokenizers.folder_tokenizer import end_ids, nameless_ids
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import tell
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.beam import beam_search
from glassformer.generation.generate import Request, make_stepper, read_request, with_texts
from glassformer.generation.prompts import Prompts, text_prompt
from glassformer.generation.stepper import Stepper
from glassformer.generation.streaming import Collected, stream
from glassformer.kernels.threads import taking
from glassformer.lab.runs.process import check_threads, threads_of_decoding
from glassformer.spec.decoding import BeamSpec, by_flag, without_effect


def read_options(options: Mapping[str, Any], tokenizer: Tokenizer) -> Request:
    """Check the options that were typed; mention those that change nothing."""
    request = read_request(
        options,
        tokenizer=tokenizer,
        eos=end_ids(tokenizer),
        forbidden=nameless_ids(tokenizer),
        spell=by_flag,
    )
    unused = ", ".join(map(by_flag, without_effect(options)))
    if unused:
        tell(f"note: {unused}: nothing is sampled at temperature 0; --temperature 1?")
    return request


def run(
    path: str,
    text: str,
    *,
    options: Mapping[str, Any],
    device: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Generate, streaming; with beams, print the n best. Return the exit code: 130 after Ctrl-C."""
    tokenizer = load_tokenizer(path)
    request = read_options(options, tokenizer)
    device = check_device(device)
    check_threads(threads)
    model = load(path).to(device)
    stepper = make_stepper(model, request.step)
    prompts = text_prompt(model.spec, tokenizer, sys.stdin.read() if text == "-" else text)
    count = threads_of_decoding(model.spec, asked=threads, device=device)
    show = _search if isinstance(request.decoding, BeamSpec) else _stream
    try:
        with taking(count):
            show(stepper, prompts, tokenizer, request, as_json=as_json)
    except KeyboardInterrupt:
        tell("\nstopped")
        return 128 + signal.SIGINT
    return 0


def _search(
    stepper: Stepper, prompts: Prompts, tokenizer: Tokenizer, request: Request, *, as_json: bool
) -> None:
    spec = request.decoding
    assert isinstance(spec, BeamSpec)
    (found,) = beam_search(stepper, prompts, spec=spec, constraint=request.constraint)
    best = with_texts(found.hypotheses, spec=spec, tokenizer=tokenizer)
    if as_json:
        fields = ("text", "tokens", "logprobs", "score", "finish")
        rows = [{name: getattr(one, name) for name in fields} for one in best]
        print(json.dumps({"hypotheses": rows}))
        return
    for one in best:
        print(f"{one.score:9.4f}  {one.text or '(nothing)'}")


def _stream(
    stepper: Stepper, prompts: Prompts, tokenizer: Tokenizer, request: Request, *, as_json: bool
) -> None:
    spec = request.decoding
    assert not isinstance(spec, BeamSpec)
    made = Collected()
    for (new,) in stream(
        stepper, prompts, spec=spec, constraint=request.constraint, tokenizer=tokenizer
    ):
        made.add(new)
        if not as_json:
            print(new.text, end="", flush=True)
    one = made.result(made.text)
    result = {"text": one.text, "tokens": one.tokens, "logprobs": one.logprobs}
    print(json.dumps(result | {"finish": one.finish}) if as_json else "")
    if not one.text and not as_json:
        tell("(nothing: the model predicted the end at once; --min-new 5 asks for more)")
