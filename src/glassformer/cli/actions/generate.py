"""What `glass generate` does: a model and a prompt in, text out as it is made."""

import json
import signal
import sys
from dataclasses import dataclass
from typing import Any, cast

from glassformer.adapters.load import load, load_tokenizer
from glassformer.adapters.tokenizers.folder_tokenizer import end_ids, nameless_ids
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.progress import tell
from glassformer.data.automata.library import machine_named
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.beam import beam_search
from glassformer.generation.constraint import Constraint
from glassformer.generation.fast.stepper import Decoder
from glassformer.generation.loop import decode
from glassformer.generation.prompts import Prompts, text_prompt
from glassformer.generation.stepper import NaiveStepper, Stepper, TorchStepper
from glassformer.generation.text_stream import StopFilter, TextStream
from glassformer.kernels.threads import taking
from glassformer.lab.runs.threads import check_threads, threads_of_decoding
from glassformer.models.model import Model
from glassformer.spec.decoding import BeamSpec, DecodeSpec, LengthPenalty
from glassformer.spec.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command's options; texts become tokens when the tokenizer is known."""

    max_new: int = 100
    min_new: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    forbid: tuple[str, ...] = ()
    force: str = ""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    beams: int | None = None
    n_best: int | None = None
    penalty: str | None = None
    length_penalty: float | None = None
    groups: int | None = None
    diversity: float | None = None

    def spec(self, tokenizer: Tokenizer) -> DecodeSpec | BeamSpec:
        """The search or the draws that were asked for; options of the other are refused."""
        eos = end_ids(tokenizer)
        chosen = {token for text in self.forbid for token in tokenizer.encode(text)}
        forbidden = tuple(sorted({*chosen, *nameless_ids(tokenizer)}))
        draws = DecodeSpec(
            max_new_tokens=self.max_new,
            min_new_tokens=self.min_new,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            forbidden=forbidden,
            forced=tuple(tokenizer.encode(self.force)),
            eos=eos,
            stop=self.stop,
            seed=self.seed or 0,
        )
        if self.beams is None:
            self._refuse("n_best", "penalty", "length_penalty", "groups", "diversity", why="beams")
            self._mention_what_changes_nothing()
            return draws
        self._refuse(
            *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "force", "stop"),
            "seed",
            why="",
        )
        return BeamSpec(
            width=self.beams,
            n_best=self.n_best,
            groups=1 if self.groups is None else self.groups,
            diversity=self.diversity or 0.0,
            penalty=cast(LengthPenalty, self.penalty or "gnmt"),
            alpha=0.6 if self.length_penalty is None else self.length_penalty,
            max_new_tokens=self.max_new,
            min_new_tokens=self.min_new,
            forbidden=forbidden,
            eos=eos,
        )

    def _given(self, *names: str) -> list[str]:
        """Those that differ from their defaults, as they are typed."""
        plain = Options()
        differ = [name for name in names if getattr(self, name) != getattr(plain, name)]
        return [f"--{name.replace('_', '-')}" for name in differ]

    def _refuse(self, *names: str, why: str) -> None:
        given = self._given(*names)
        if given and why:
            raise InputError(f"{given[0]} belongs to a beam search", hint="add --beams 4")
        if given:
            raise InputError(
                f"{given[0]} does not go with --beams, which draws nothing and reads on to the end",
                hint="leave out one of the two",
            )

    def _mention_what_changes_nothing(self) -> None:
        given = self._given("top_k", "top_p", "min_p", "seed")
        if given and self.temperature == 0.0:
            tell(f"note: {', '.join(given)}: nothing is drawn at temperature 0; --temperature 1?")


def constraint_of(
    tokenizer: Tokenizer, *, pattern: str | None, machine: str | None
) -> Constraint | None:
    """A regular expression or one of the laboratory's machines, over this tokenizer's tokens."""
    if pattern is not None and machine is not None:
        raise InputError("--constrain and --machine are two constraints", hint="give one of them")
    if pattern is not None:
        return Constraint.of_regex(pattern, tokenizer=tokenizer)
    return None if machine is None else Constraint(machine_named(machine), tokenizer=tokenizer)


def stepper_of(model: Model, *, cached: bool, lean: bool, compiled: bool) -> Stepper:
    """How the model is asked: anew at each step, with a cache, or with the lean step."""
    if not cached and (lean or compiled):
        raise InputError("--no-cache is the plain loop", hint="leave out --lean and --compile")
    if not cached:
        return NaiveStepper(model)
    return Decoder(model, compile=compiled) if lean or compiled else TorchStepper(model)


def run(
    path: str,
    text: str,
    *,
    options: Options,
    pattern: str | None,
    machine: str | None,
    cached: bool,
    lean: bool,
    compiled: bool,
    device: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Generate, streaming; with beams, the n-best list. The exit code: 130 after Ctrl-C."""
    tokenizer = load_tokenizer(path)
    spec = options.spec(tokenizer)
    constraint = constraint_of(tokenizer, pattern=pattern, machine=machine)
    check_device(device)
    check_threads(threads)
    model = load(path).to(device)
    stepper = stepper_of(model, cached=cached, lean=lean, compiled=compiled)
    prompts = text_prompt(model.spec, tokenizer, sys.stdin.read() if text == "-" else text)
    count = threads_of_decoding(model.spec, asked=threads, device=device)
    try:
        with taking(count):
            if isinstance(spec, BeamSpec):
                _search(stepper, prompts, tokenizer, spec, constraint=constraint, as_json=as_json)
            else:
                _stream(stepper, prompts, tokenizer, spec, constraint=constraint, as_json=as_json)
    except KeyboardInterrupt:
        tell("\nstopped")
        return 128 + signal.SIGINT
    return 0


def _search(
    stepper: Stepper,
    prompts: Prompts,
    tokenizer: Tokenizer,
    spec: BeamSpec,
    *,
    constraint: Constraint | None,
    as_json: bool,
) -> None:
    (found,) = beam_search(stepper, prompts, spec=spec, constraint=constraint)
    rows: list[dict[str, Any]] = [
        {
            "text": tokenizer.decode([token for token in one.tokens if token not in spec.eos]),
            "tokens": list(one.tokens),
            "logprobs": list(one.logprobs),
            "score": one.score,
            "finish": one.finish,
        }
        for one in found.hypotheses
    ]
    if as_json:
        print(json.dumps({"hypotheses": rows}))
        return
    for row in rows:
        print(f"{row['score']:9.4f}  {row['text'] or '(nothing)'}")


def _stream(
    stepper: Stepper,
    prompts: Prompts,
    tokenizer: Tokenizer,
    spec: DecodeSpec,
    *,
    constraint: Constraint | None,
    as_json: bool,
) -> None:
    stream, visible = TextStream(tokenizer), StopFilter(spec.stop)
    tokens: list[int] = []
    logprobs: list[float] = []
    pieces: list[str] = []
    finish = "length"

    def show(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)

    for column in decode(stepper, prompts, spec=spec, constraint=constraint, tokenizer=tokenizer):
        token = int(column.tokens_B[0])
        tokens.append(token)
        logprobs.append(float(column.logprobs_B[0]))
        finish = column.finish[0] or finish
        if token not in spec.eos:
            show(visible.push(stream.push(token)))
    show(visible.push(stream.flush()) + visible.flush())
    result = {"text": "".join(pieces), "tokens": tokens, "logprobs": logprobs, "finish": finish}
    print(json.dumps(result) if as_json else "")
