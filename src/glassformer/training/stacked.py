"""Many models of one shape trained as one: every operation computes all of them.

The parameters of all models are one array (M, P). A step gives each model its own batches, rate and
dropout; loss, gradient norm, clipping, the check for finite numbers and the update are each
model's own, so that a model trains as it would alone, and one that diverges disturbs no other.

`StackedEngine.members` are engines of one model each: they evaluate, save and load. On a GPU the
stacked step is compiled and recorded as one graph, as a single model's is.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap

from glassformer.data.batch import Batch, Ints
from glassformer.data.own_code import learning_rate
from glassformer.data.task import Task
from glassformer.models.inputs import Inputs, as_inputs
from glassformer.models.model import Model, build
from glassformer.models.weights import tensor_of
from glassformer.nn.norm import as_float
from glassformer.nn.position import make_tables
from glassformer.spec.errors import InputError
from glassformer.spec.lacking import ANY, Runs, lacks
from glassformer.spec.manifest import stored
from glassformer.spec.model import Dropout, ModelSpec
from glassformer.spec.own import OwnPosition
from glassformer.spec.program import Route, everything_but, missing, program
from glassformer.spec.train import SGD, AdamW, RunSpec, training_by
from glassformer.store.tensors import explain_difference
from glassformer.training.engine import (
    GPU_LOGITS,
    LOGITS,
    Array,
    Arrays,
    Judged,
    StepResult,
    judge_logits,
    loss_weights,
)
from glassformer.training.fit import StepRecord, step_seed
from glassformer.training.recorded import Graphs, precision
from glassformer.training.stacked_batches import Work, rows_of
from glassformer.training.stacked_step import (
    StackedModels,
    StackedSteps,
    dropout_rates,
    layout_of,
    mapped_model,
    moments_of,
)

# M models, B batch of one model, T length, D d_model, R rows that count, V logits, P parameters


#: A user's position is code for one model, and how many tokens an expert gets is data of each.
RUNS = everything_but(OwnPosition, Route)


#: What it takes of a run besides its model: no base to start from, and activations that are kept.
TRAINS: Runs = {
    RunSpec: {"engine": ("auto", "torch"), "train": ANY, "tuning": ANY},
    **training_by(SGD, AdamW),
}


def lacking(run: RunSpec) -> str:
    """Return what a stack lacks to train a run; empty if nothing."""
    for lack in (*missing(program(run.model), RUNS), *lacks(run, TRAINS)):
        return f"a stack has no {lack}"
    return ""


def stack_key(run: RunSpec) -> tuple[object, ...]:
    """Return what runs must have in common to train in one stack: all that decides shapes."""
    train = run.train
    return (
        shape_of(run.model),
        train.batch_size,
        train.accumulate,
        train.precision,
        train.compile,
        type(train.optimizer),
    )


def shape_of(spec: ModelSpec) -> ModelSpec:
    """Return the spec without its dropout rates."""
    encoder = None if spec.encoder is None else replace(spec.encoder, dropout=Dropout())
    return replace(spec, encoder=encoder, decoder=replace(spec.decoder, dropout=Dropout()))


class StackedEngine:
    """Models with their optimizers, side by side. `members` are in the order of the runs; those
    that have not left are `live`, and `slots` says whose each row of the arrays is. `sharing` is
    the number of stacks that train on the device at the same time. `graphs` record steps, on a GPU.
    """

    def __init__(
        self,
        runs: Sequence[RunSpec],
        *,
        device: str = "cpu",
        sharing: int = 1,
        graphs: Graphs | None = None,
    ) -> None:
        check_stack(runs)
        self.sharing, self.graphs = sharing, graphs
        self.runs, self.device = tuple(runs), torch.device(device)
        self.spec = shape_of(runs[0].model)
        self.dtype = torch.float64 if runs[0].train.precision == "float64" else torch.float32
        self.layout = layout_of(self.spec)
        self.rates = [dropout_rates(build(run.model, device="meta")) for run in runs]
        self.random = any(any(own.values()) for own in self.rates)
        self.batch_size, self.accumulate = runs[0].train.batch_size, runs[0].train.accumulate
        self.members = [Member(self, number) for number in range(len(runs))]
        #: Updates so far: whoever keeps results of the weights must forget them after each.
        self.version = 0
        self._judged: dict[bytes, dict[int, dict[str, Judged]]] = {}
        self._wanted: tuple[int, ...] = ()
        self._template: tuple[Model, tuple[int, int]] | None = None
        weights_MP = torch.zeros(len(runs), self.layout.size, dtype=self.dtype)
        for number, run in enumerate(runs):
            generator = torch.Generator().manual_seed(run.train.seed)
            model = build(run.model, generator=generator)
            self.layout.write(weights_MP[number], dict(model.named_parameters()))
        kinds = {kind for run in runs for kind in moments_of(run.train)}
        moments = {kind: torch.zeros_like(weights_MP) for kind in sorted(kinds)}
        self._install(list(range(len(runs))), weights_MP, moments, torch.zeros(len(runs)))

    def _install(
        self, slots: list[int], weights_MP: Tensor, moments: dict[str, Tensor], counts_M: Tensor
    ) -> None:
        """Make the stack of the members in `slots`; the arrays are theirs, in this order."""
        self.slots, self.live = slots, list(slots)
        self.weights_MP = weights_MP.to(self.device)
        self.moments = {kind: moment.to(self.device) for kind, moment in moments.items()}
        self.counts_M = counts_M.to(self.device, torch.float64)
        rates = [self.rates[member] for member in slots]
        largest = {site: max(own[site] for own in rates) for site in rates[0]}
        self.model = mapped_model(self.spec, largest, dtype=self.dtype, device=self.device)
        self.steps = StackedSteps(
            StackedModels(
                model=self.model,
                layout=self.layout,
                trains=[self.runs[member].train for member in slots],
                rates=rates,
                weights_MP=self.weights_MP,
                moments=self.moments,
                counts_M=self.counts_M,
            ),
            sharing=self.sharing,
            graphs=self.graphs,
        )

    @property
    def ahead(self) -> int:
        """Steps that may be submitted before the first one's result is read."""
        return self.steps.ahead

    def submit(self, work: Mapping[int, Work]) -> Callable[[], dict[int, StepResult]]:
        """Begin a step of some members; the others stay as they are.

        The returned function waits for the results, and must be called in the order of the steps.
        """
        self.version += 1
        self._judged.clear()
        return self.steps.submit_all(work, self.slots)

    def leave(self, members: Sequence[int]) -> None:
        """Take members out of the stack; the others go on. Their arrays are given up.

        A recorded stack keeps their slots, idle, until three quarters are: recording takes longer.
        """
        self.live = left = [member for member in self.live if member not in members]
        few = 4 * len(left) <= len(self.slots)
        if not left or not (few if self.steps.fixed else members):
            return
        kept = torch.tensor([self.slots.index(member) for member in left], device=self.device)
        self._install(
            left,
            self.weights_MP[kept],
            {kind: moment[kept] for kind, moment in self.moments.items()},
            self.counts_M[kept],
        )

    # --- evaluating -------------------------------------------------------------------------------

    def expect(self, members: Sequence[int]) -> None:
        """Announce which members are about to judge the same batches: they are judged as one."""
        self._wanted = tuple(members)

    def judge(self, member: int, batch: Batch) -> dict[str, Judged]:
        """Return the loss of every target and the likeliest class, by head, without dropout."""
        key = batch.tokens.tobytes() + batch.valid.tobytes()
        found = self._judged.get(key, {})
        if member not in found:
            together = self._wanted if member in self._wanted else (member,)
            found = self._judged[key] = self._judge_all(together, batch)
        return found[member]

    @torch.no_grad()
    def _judge_all(self, members: Sequence[int], batch: Batch) -> dict[int, dict[str, Judged]]:
        """Judge a batch by several members at once, in pieces that fit in memory."""
        heads = [head for head in batch.targets if head in self.spec.head_names()]
        if self.device.type == "cpu":
            return {m: judge_logits(self.logits(m, batch), batch) for m in members}
        found: dict[str, list[Array]] = {head: [] for head in heads}
        widest = max(map(self.spec.head_size, self.spec.head_names()))
        size = max(1, (1 << 27) // (len(self.slots) * batch.tokens.shape[1] * widest))
        state = self.layout.views(self.weights_MP)
        for start in range(0, len(batch.tokens), size):
            piece = rows_of(batch, start, start + size)
            inputs = as_inputs(piece, self.spec, device=self.device)
            with precision(self.runs[0].train, self.device):
                answers = vmap(
                    lambda own, given=inputs: functional_call(self.model, own, (given,))
                )(state)
            for head in heads:
                logits, target = as_float(answers[head]), piece.targets[head]
                known = np.where(loss_weights(piece, head) > 0, target, 0).astype(np.int64)
                known_M = torch.as_tensor(known, device=self.device).flatten().repeat(len(logits))
                rows = logits.flatten(0, -2)
                nll = F.cross_entropy(rows, known_M, reduction="none")
                both = torch.stack((nll.double(), rows.argmax(-1).double()))
                found[head].append(both.view(2, len(logits), *target.shape).cpu().numpy())
        joined = {head: np.concatenate(parts, axis=2) for head, parts in found.items()}
        return {
            m: {
                head: Judged(both[0, slot], both[1, slot].astype(np.int64))
                for head, both in joined.items()
            }
            for slot, m in enumerate(self.slots)
        }

    def _answers(self, inputs: Inputs, state: dict[str, Tensor]) -> dict[str, Tensor]:
        answers: dict[str, Tensor] = functional_call(self.model, state, (inputs,))
        return answers

    @torch.no_grad()
    def logits(self, member: int, batch: Batch) -> Arrays:
        """Return one member's logits by head."""
        with precision(self.runs[0].train, self.device):
            answers = self.alone(member)(as_inputs(batch, self.spec, device=self.device))
        return {head: as_float(logits).cpu().numpy() for head, logits in answers.items()}

    def alone(self, member: int) -> Model:
        """Return a model with a member's weights as they are now; it is lent, and the next call
        changes it.
        """
        if self._template is None:
            made = build(self.spec, device="meta").to(self.dtype).to_empty(device=self.device)
            make_tables(made, self.device)
            self._template = made.eval(), (-1, -1)
        model, has = self._template
        if has != (member, self.version):
            views = self.layout.views(self.weights_MP[self.slots.index(member)])
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(views[name])
            self._template = model, (member, self.version)
        return model

    # --- saving -----------------------------------------------------------------------------------

    def weights(self, member: int) -> Arrays:
        """Return copies of a member's parameters by manifest name."""
        return self._arrays(self.weights_MP, member)

    def _arrays(self, all_MP: Tensor, member: int) -> Arrays:
        own_P = all_MP[self.slots.index(member)].detach().to("cpu", copy=True)
        views = self.layout.views(own_P)
        return {name: views[name].numpy() for name in self.layout.shapes}

    def load_weights(self, member: int, arrays: Mapping[str, Array]) -> None:
        """Load a member's parameters by manifest name."""
        rules = stored(self.spec)
        problems = explain_difference(rules, {name: a.shape for name, a in arrays.items()})
        if problems:
            raise InputError(f"the weights do not fit the model: {problems}")
        self._load(self.weights_MP, member, arrays)

    def _load(self, all_MP: Tensor, member: int, arrays: Mapping[str, Array]) -> None:
        tensors = {name: tensor_of(array).to(self.device) for name, array in arrays.items()}
        with torch.no_grad():
            self.layout.write(all_MP[self.slots.index(member)], tensors)
        self.version += 1
        self._judged.clear()

    def state(self, member: int) -> Arrays:
        """Return a member's optimizer state, named as a single model's."""
        count = int(self.counts_M[self.slots.index(member)])
        arrays: Arrays = {"steps": np.array(count)}
        kinds = moments_of(self.runs[member].train)
        moments = {kind: self._arrays(self.moments[kind], member) for kind in kinds}
        adam = isinstance(self.runs[member].train.optimizer, AdamW)
        for name in self.layout.shapes if count else ():
            if adam:
                arrays[f"step.{name}"] = np.array(count, dtype=np.float32)
            for kind, values in moments.items():
                arrays[f"{kind}.{name}"] = values[name]
        return arrays

    def load_state(self, member: int, arrays: Mapping[str, Array]) -> None:
        """Load what `state` returned, of this engine or of a single model's."""
        self.counts_M[self.slots.index(member)] = float(arrays["steps"])
        for kind, moment in self.moments.items():
            names = [name for name in self.layout.shapes if f"{kind}.{name}" in arrays]
            self._load(moment, member, {name: arrays[f"{kind}.{name}"] for name in names})


def fit_stack(
    engine: StackedEngine,
    tasks: Sequence[Task],
    *,
    starts: Sequence[int],
    ended: Mapping[int, int] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[dict[int, StepRecord]]:
    """Train every member from its start to its last step, yielding their records step by step.

    The batches, the rate and the dropout of a member's step are those that `fit` gives it alone.
    The caller takes members out by `engine.leave`; the loop ends with the last one. A member's
    `seconds` are its share of the stack's.

    How an operation rounds depends on the shapes of all that it computes. So a stack that goes on
    after a kill computes what it did before: members that are behind catch up first, beside the
    others, which read the batches that they had at that step, and those that have `ended` stay
    until the step at which they left.
    """
    ended = {} if ended is None else ended
    orders = [
        task.order(batch_size=run.train.batch_size, seed=run.train.seed)
        for task, run in zip(tasks, engine.runs, strict=True)
    ]
    steps = list(starts)
    waiting: deque[tuple[dict[int, tuple[int, float]], Callable[[], dict[int, StepResult]]]]
    waiting = deque()
    began = time.perf_counter()
    while left := [
        m for m in engine.live if m not in ended and steps[m] < engine.runs[m].train.steps
    ]:
        now = min(steps[m] for m in left)
        engine.leave([m for m in engine.live if m in ended and ended[m] <= now])
        live = [m for m in left if steps[m] == now]
        told = {m: (now + 1, learning_rate(engine.runs[m].train, now)) for m in live}
        rows = {
            m: [orders[m].rows(now * engine.accumulate + i) for i in range(engine.accumulate)]
            for m in engine.live
        }
        work = _shared(engine, tasks, rows, told)
        if work is None:
            work = {
                m: Work(
                    [tasks[m].batch("train", one) for one in rows[m]],
                    told[m][1] if m in told else 0.0,
                    step_seed(engine.runs[m].train.seed, now),
                    live=m in told,
                )
                for m in engine.live
            }
        for member in live:
            steps[member] += 1
        waiting.append((told, engine.submit(work)))
        settle = stopping() or any(engine.runs[m].train.looks_after(steps[m]) for m in live)
        while len(waiting) > (0 if settle else engine.ahead):
            told, read = waiting.popleft()
            results = read()
            share = (time.perf_counter() - began) / len(told)
            yield {
                m: StepRecord(
                    number,
                    results[m].loss,
                    results[m].nll,
                    lr,
                    results[m].grad_norm,
                    results[m].tokens,
                    share,
                    results[m].applied,
                    results[m].balance,
                    results[m].balance_term,
                    settled=not waiting,
                )
                for m, (number, lr) in told.items()
            }
            settle = settle or stopping()
            began = time.perf_counter()


def _shared(
    engine: StackedEngine,
    tasks: Sequence[Task],
    rows: Mapping[int, Sequence[Ints]],
    told: Mapping[int, tuple[int, float]],
) -> dict[int, Work] | None:
    """Return a step's work cut from one batch for all members; None where it cannot be.

    They must read one task, in full batches, and draw nothing, whose shape their own batch decides.
    """
    size, task = engine.batch_size, tasks[next(iter(rows))]
    full = all(len(one) == size for own in rows.values() for one in own)
    if not full or engine.random or any(tasks[m] is not task for m in rows):
        return None
    turns = [task.batch("train", np.concatenate(turn)) for turn in zip(*rows.values(), strict=True)]
    return {
        member: Work(
            [rows_of(batch, place * size, (place + 1) * size) for batch in turns],
            told[member][1] if member in told else 0.0,
            0,
            live=member in told,
        )
        for place, member in enumerate(rows)
    }


class Member:
    """One model of a stack, as an engine of its own."""

    def __init__(self, stack: StackedEngine, number: int) -> None:
        self.stack, self.number = stack, number
        self.spec = stack.runs[number].model
        self.device = stack.device

    @property
    def ahead(self) -> int:
        """Steps that may be submitted before the first one's result is read."""
        return self.stack.ahead

    @property
    def logits_at_once(self) -> int:
        """Logits that may be asked for at once; the stack computes them in pieces."""
        return LOGITS if self.device.type == "cpu" else GPU_LOGITS

    @property
    def model(self) -> Model:
        """The model with its weights as they are now, lent until another member's is wanted."""
        return self.stack.alone(self.number)

    def submit(self, batches: Sequence[Batch], *, lr: float, seed: int) -> Callable[[], StepResult]:
        """Begin a step of this model alone, the others idle."""
        read = self.stack.submit({self.number: Work(batches, lr, seed)})
        return lambda: read()[self.number]

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> StepResult:
        return self.submit(batches, lr=lr, seed=seed)()

    def logits(self, batch: Batch) -> Arrays:
        return self.stack.logits(self.number, batch)

    def judge(self, batch: Batch) -> dict[str, Judged]:
        return self.stack.judge(self.number, batch)

    def weights(self) -> Arrays:
        return self.stack.weights(self.number)

    def load_weights(self, arrays: Mapping[str, Array]) -> None:
        self.stack.load_weights(self.number, arrays)

    def state(self) -> Arrays:
        return self.stack.state(self.number)

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        self.stack.load_state(self.number, arrays)


def check_stack(runs: Sequence[RunSpec]) -> None:
    """Refuse runs that cannot train as one, saying why."""
    if not runs:
        raise InputError("a stack without a run", hint="give at least one")
    for run in runs:
        if reason := lacking(run):
            raise InputError(f"the run cannot be stacked: {reason}", hint="train it alone")
    if len({stack_key(run) for run in runs}) > 1:
        raise InputError(
            "the runs differ in what decides shapes: the model apart from its dropout, the batch "
            "size, accumulate, the precision, compile or the kind of optimizer",
            hint="make a stack of each kind",
        )
