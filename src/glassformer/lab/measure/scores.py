"""Scores of complete answers that a model decodes on its own, as others define them.

An evaluation gives the model the right answer so far at every position; here it has only its own
tokens. Exact match; chrF and BLEU are sacrebleu's, as papers report them.

lm-evaluation-harness: its tasks request likelihoods and continuations, which are served from an
`Examinee`'s logits and by decoding. The harness is an extra and slow to import, so it is imported
when it is run. Its tasks come from a folder of YAML files or from its own list, whose data must
then be in the local cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.adapters.base import BaseAdapter
from glassformer.data.batch import Batch
from glassformer.data.task import Task, check_split
from glassformer.generation.beam import beam_search
from glassformer.generation.streaming import generate_batch
from glassformer.lab.measure.evaluate import in_order
from glassformer.lab.smallbench.question import examinee_of, log_probabilities
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.options import options_of


def corpus_scores(ours: Sequence[str], truths: Sequence[str]) -> dict[str, float]:
    """Return scores from 0 to 100: chrF by characters (F2 of 1- to 6-grams), BLEU by words."""
    if len(ours) != len(truths) or not ours:
        raise InputError(
            f"{len(ours)} texts beside {len(truths)} right ones", hint="one for each, at least one"
        )
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise MachineError(
            "chrF and BLEU need sacrebleu, which is not installed",
            hint="pip install sacrebleu",
        ) from error
    references = [list(truths)]
    return {
        "chrf": float(CHRF().corpus_score(list(ours), references).score),
        "bleu": float(BLEU().corpus_score(list(ours), references).score),
    }


#: Rows decoded at once; only speed depends on it.
CHUNK = 250

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The number of complete right answers of a split, the rows of the others, and what was
    generated for each row, the end included.
    """

    split: str
    examples: int
    right: int
    wrong: list[int] = field(default_factory=list)
    said: list[Ids] = field(default_factory=list)

    @property
    def exact_match(self) -> float:
        """The share of answers that is right from the first token to the end."""
        return self.right / self.examples


def decode_split(
    stepper: Stepper,
    task: Task,
    *,
    split: str = "test",
    examples: int | None = None,
    beams: int | None = None,
) -> Decoded:
    """Answer the first `examples` sources of a split, greedily or with the best of `beams`.

    For tasks with a source: the decoder starts from the first token alone.
    """
    sizes = task.sizes()
    check_split(split, sizes)
    count = sizes[split] if examples is None else min(examples, sizes[split])
    if count < 1:
        raise InputError(f"{count} examples of '{split}'", hint="ask for at least one")
    wrong: list[int] = []
    said: list[Ids] = []
    for first in range(0, count, CHUNK):
        rows = np.arange(first, min(first + CHUNK, count), dtype=np.int64)
        batch = task.batch(split, rows)
        if batch.source is None:
            raise InputError(
                f"the task '{task.name}' has no source to answer",
                hint="copy, reverse and sort have one",
            )
        found = answers(stepper, batch, eos=task.tokenizer.eos, beams=beams)
        said += found
        for row, ours, truth in zip(rows.tolist(), found, wanted(batch), strict=True):
            if ours != truth:
                wrong.append(row)
    return Decoded(split, count, count - len(wrong), wrong, said)


def decoded_scores(stepper: Stepper, task: Task, *, split: str) -> dict[str, Any]:
    """Decode a split greedily; return exact match, also by group, and for texts chrF and BLEU."""
    found = decode_split(stepper, task, split=split)
    rows = np.arange(found.examples, dtype=np.int64)
    wrong = set(found.wrong)
    by: dict[str, dict[str, float]] = {}
    for group, labels in task.groups(split, rows).items():
        marks: dict[str, list[bool]] = {}
        for row, label in enumerate(labels):
            marks.setdefault(label, []).append(row not in wrong)
        ordered = in_order(marks)
        by[group] = {label: sum(right) / len(right) for label, right in ordered}
    scores = text_scores(found, task) if task.answers_are_sentences else {}
    return {"examples": found.examples, "exact_match": found.exact_match, **scores, "by": by}


def text_scores(found: Decoded, task: Task) -> dict[str, float]:
    """Return chrF and BLEU of the decoded answers against the right ones, both as texts."""
    ends = {task.tokenizer.eos, task.tokenizer.pad}

    def text(ids: Ids) -> str:
        return task.tokenizer.decode([token for token in ids if token not in ends])

    truths: list[Ids] = []
    for first in range(0, found.examples, CHUNK):
        rows = np.arange(first, min(first + CHUNK, found.examples), dtype=np.int64)
        truths += wanted(task.batch(found.split, rows))
    return corpus_scores([text(ids) for ids in found.said], [text(ids) for ids in truths])


def answers(stepper: Stepper, batch: Batch, *, eos: int | None, beams: int | None) -> list[Ids]:
    """Return what the model generates for each source of a batch, the end included."""
    assert batch.source is not None
    prompts = Prompts.of(
        batch.tokens[:, :1], sources=batch.source.tokens, source_valid=batch.source.valid
    )
    # One token more than any truth has: an answer that goes on is wrong whatever follows.
    longest = batch.tokens.shape[1] + 1
    ends = () if eos is None else (eos,)
    if beams is None:
        greedy = DecodeSpec(max_new_tokens=longest, eos=ends)
        return [one.tokens for one in generate_batch(stepper, prompts, spec=greedy, logprobs=False)]
    spec = BeamSpec(width=beams, n_best=1, max_new_tokens=longest, eos=ends)
    return [one.hypotheses[0].tokens for one in beam_search(stepper, prompts, spec=spec)]


def wanted(batch: Batch) -> Iterator[Ids]:
    """Return the right answer of each row, without padding."""
    for target, valid in zip(batch.targets["next"], batch.valid, strict=True):
        yield tuple(target[valid].tolist())


# --- lm-evaluation-harness ------------------------------------------------------------------------


Pair = tuple[Sequence[int], Sequence[int]]

LONGEST_ANSWER = 256  # tokens of a continuation, where a task does not say


class Answerer:
    """The requests of the harness, served by a model in ids and texts."""

    def __init__(self, adapter: BaseAdapter, *, batch_size: int = 16) -> None:
        self.adapter = adapter
        self.examinee = examinee_of(adapter, adapter.tokenizer, name=str(adapter.origin))
        self.tokenizer = adapter.tokenizer
        self.batch_size = batch_size
        self.longest = adapter.spec.max_seq_len

    def begin(self) -> int:
        """Return the token that precedes a text with nothing before it."""
        for token in (self.tokenizer.bos, self.tokenizer.eos):
            if token is not None:
                return token
        raise InputError(
            "this task scores texts without a context, and the tokenizer has no token to begin one",
            hint="choose tasks whose questions have a context",
        )

    def encode(self, text: str, *, begun: bool) -> list[int]:
        """Return ids; `begun` prepends the token that the model's texts begin with."""
        ids, bos = self.tokenizer.encode(text), self.tokenizer.bos
        return ids if not begun or bos is None or ids[:1] == [bos] else [bos, *ids]

    def likelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability after its context, and whether it is greedy.

        A context that is too long loses its beginning.
        """
        rows, places = [], []
        for context, rest in pairs:
            if len(rest) > self.longest:
                raise InputError(f"{len(rest)} tokens to score in a context of {self.longest}")
            row = (*context, *rest)[:-1][-self.longest :]
            rows.append(row)
            places.append(list(enumerate(rest, start=len(row) - len(rest))))
        found = log_probabilities(self.examinee, rows, places)
        return [(float(values.sum()), bool(greedy.all())) for values, greedy in found]

    def rolling(self, text: str) -> float:
        """Return the log-probability of a text of any length: in windows, each token once."""
        ids = self.encode(text, begun=False)
        if not ids:
            return 0.0
        pairs, before = [], [self.begin()]
        for first in range(0, len(ids), self.longest):
            window = ids[first : first + self.longest]
            # A window reads what its first token follows, and as much before as there is room for.
            room = self.longest + 1 - len(window)
            pairs.append((before[-room:], window))
            before = before + window
        return math.fsum(value for value, _ in self.likelihoods(pairs))

    def continuations(self, texts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        """Return what the model generates after each text, up to a stop string."""
        spec = self._decoding(settings)
        room = self.longest - spec.max_new_tokens
        if room < 1:
            raise InputError(
                f"{spec.max_new_tokens} new tokens leave no context of {self.longest}",
                hint="max_gen_toks in the task's generation_kwargs",
            )
        made, stepper = [], self.adapter.stepper()
        for first in range(0, len(texts), self.batch_size):
            some = texts[first : first + self.batch_size]
            rows = [self.encode(text, begun=True)[-room:] or [self.begin()] for text in some]
            found = generate_batch(
                stepper, rows, spec=spec, tokenizer=self.tokenizer, logprobs=False
            )
            made += [each.text for each in found]
        return made

    def _decoding(self, settings: Mapping[str, Any]) -> DecodeSpec:
        """Return a task's generation_kwargs as a `DecodeSpec`; refuse unknown ones."""
        names = {each.hf: each.name for each in options_of(DecodeSpec) if each.hf is not None}
        left = dict(settings)
        until = left.pop("until", [])
        longest = left.pop("max_gen_toks", LONGEST_ANSWER)
        sampled = left.pop("do_sample", bool(left.get("temperature")))
        temperature = float(left.pop("temperature", None) or 1.0) if sampled else 0.0
        options = {names[name]: left.pop(name) for name in list(left) if name in names}
        if left:
            raise InputError(
                f"generation_kwargs not known here: {', '.join(sorted(map(str, left)))}",
                hint=", ".join(("until", "max_gen_toks", "do_sample", *names)),
            )
        return DecodeSpec(
            **{**options, "temperature": temperature},
            max_new_tokens=longest,
            stop=tuple([until] if isinstance(until, str) else filter(None, until)),
            eos=self.adapter.end_ids(),
            forbidden=self.adapter.nameless_ids(),
        )


def run_harness(
    adapter: BaseAdapter,
    tasks: Sequence[str],
    *,
    tasks_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> dict[str, Any]:
    """Return metrics by task; `tasks_dir` holds YAML tasks and replaces the harness's own list."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MachineError(
            "the suite lm-eval needs lm-evaluation-harness, which is not installed",
            hint="pip install lm-eval",
        ) from error
    if not tasks:
        raise InputError(
            "no tasks", hint="{--tasks arc_easy,my_task|tasks=['arc_easy', 'my_task']}"
        )
    if tasks_dir is not None and not tasks_dir.is_dir():
        raise InputError(f"there is no folder {tasks_dir}", hint="a folder of YAML tasks")
    own = None if tasks_dir is None else str(tasks_dir)
    manager = TaskManager(include_path=own, include_defaults=tasks_dir is None)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        known = ", ".join(manager.all_tasks[:12])
        raise InputError(f"no task '{unknown[0]}'", hint=f"known: {known}")
    found = simple_evaluate(
        model=_language_model(Answerer(adapter, batch_size=batch_size)),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None, "one process only"
    return {
        "suite": "lm-eval",
        "tasks": {name: _metrics(values) for name, values in found["results"].items()},
        "examples": {name: n["effective"] for name, n in found["n-samples"].items()},
    }


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return `acc,none` as `acc`, without names and without what was not computed."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in key
    }


def _language_model(answerer: Answerer) -> Any:
    """Return the harness's own interface over an `Answerer`."""
    from lm_eval.api.model import TemplateLM

    class GlassLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
        @property
        def eot_token_id(self) -> int:
            return answerer.begin()

        @property
        def max_length(self) -> int:
            return answerer.longest

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
        ) -> list[int]:
            return answerer.encode(string, begun=add_special_tokens is not False)

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            return answerer.likelihoods([(context, rest) for _, context, rest in requests])

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[float]:
            return [answerer.rolling(request.args[0]) for request in requests]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            groups: dict[str, list[int]] = {}
            for place, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(place)
            made: dict[int, str] = {}
            for places in groups.values():
                texts = [requests[place].args[0] for place in places]
                answers = answerer.continuations(texts, requests[places[0]].args[1])
                made.update(zip(places, answers, strict=True))
            return [made[place] for place in range(len(requests))]

    return GlassLM()
