"""`Model`: any `ModelSpec` in NumPy. A body and heads, a loss, and the gradient of every parameter.

The model holds the arrays; its program says what is computed, and the interpreter runs it.
Results of `forward` and `hidden` belong to the caller. What `record` and `loss_and_grads` return
is in the model's workspace and valid until the next call of either.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from glassformer.byhand.inputs import Inputs, Side, check_inputs
from glassformer.byhand.interpreter import Plan, plan
from glassformer.byhand.loss import Losses, balance_slopes, head_losses, penalty, total_loss
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.pass_context import Array, PassContext, Workspace
from glassformer.byhand.storage import Storage
from glassformer.byhand.table import Rows, Run, Table
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import check_fits, manifest
from glassformer.spec.own import OwnPosition
from glassformer.spec.program import program
from glassformer.spec.state import Memories
from glassformer.spec.train import LoRA, lora_manifest

# B batch, T target length, S source length, D d_model, V logits


class Tape(NamedTuple):
    """A recorded pass, for `backward`."""

    run: Run
    plan: Plan


class Model:
    """embed -> blocks -> final norm -> heads, with an encoder before it if the spec has one.

    `params` and `grads` are dicts by manifest name; tied parameters appear under their owner.
    `table` has the operations that compute. Only what `trained` names has gradients, by default
    everything, and with `lora` its factors, which `params` may leave to be initialised.
    """

    def __init__(
        self,
        model: spec.ModelSpec,
        *,
        params: Mapping[str, Array] | None = None,
        rng: np.random.Generator | None = None,
        dtype: "np.dtype[Any] | type[Any]" = np.float64,
        table: Table = NUMPY,
        lora: LoRA | None = None,
        trained: Collection[str] | None = None,
    ) -> None:
        self.spec, self.lora = model, lora
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise InputError(
                f"the by-hand engine computes in float32 or float64, not {self.dtype}",
                hint="half precision and quantized layers are torch-only",
            )
        if isinstance(model.position, OwnPosition):
            raise InputError(
                f"{model.position.source} is a torch module: positions of your own have no NumPy "
                "twin",
                hint="engine=torch",
            )
        check_fits(model, bytes_each=2 * self.dtype.itemsize)  # with its gradients
        factors = {} if lora is None else lora_manifest(model, lora)
        if lora is not None and trained is None:
            trained = factors
        # A before B: those of one input are neighbours, and one product
        ordered = sorted(factors.values(), key=lambda one: ".lora_B." in one.name)
        self.storage = Storage([*manifest(model), *ordered], self.dtype, trained=trained)
        fresh: set[str] = set(self.storage.owners if params is None else factors)
        if params is not None:
            fresh -= set(params)
            self.storage.load(params, [name for name in self.storage.owners if name not in fresh])
        rng = np.random.default_rng() if rng is None else rng
        self.storage.draw(rng, [name for name in self.storage.owners if name in fresh])
        self.params = self.storage.views
        self.grad_vector, self.grads = self.storage.twin()
        self.table = table
        self.plan = self._planned(training=False)
        self._training: Plan | None = None
        self.workspace, self.arena = Workspace(self.dtype), Workspace(self.dtype)
        self._before: Array | None = None
        self._recorded: Tape | None = None
        #: Bytes of the arrays that the last recorded pass kept for its backward.
        self.cached_bytes = 0

    def _planned(self, *, training: bool) -> Plan:
        return plan(
            program(self.spec, training=training, lora=self.lora),
            table=self.table,
            storage=self.storage,
            grads=(self.grad_vector, self.grads),
            max_seq_len=self.spec.max_seq_len,
        )

    def new_run(
        self,
        sides: dict[str, Rows],
        context: PassContext,
        *,
        made: Plan | None = None,
        state: Memories | None = None,
    ) -> Run:
        """Return a pass over these rows."""
        made = self.plan if made is None else made
        return Run(
            context,
            sides,
            values=len(made.numbers),
            steps=len(made.steps),
            arena=self.arena,
            state=state,
        )

    # --- forward ------------------------------------------------------------------------------

    def inputs(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        source_tokens_BS: Array | None = None,
        source_valid_BS: Array | None = None,
        types_BT: Array | None = None,
    ) -> Inputs:
        """Return checked arrays."""
        return check_inputs(
            tokens_BT,
            model=self.spec,
            valid_BT=valid_BT,
            segments_BT=segments_BT,
            source_tokens_BS=source_tokens_BS,
            source_valid_BS=source_valid_BS,
            types_BT=types_BT,
        )

    def forward(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        source_tokens_BS: Array | None = None,
        source_valid_BS: Array | None = None,
        types_BT: Array | None = None,
        taps: dict[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Return logits by head; `taps` is filled by tap name."""
        inputs = self.inputs(
            tokens_BT,
            valid_BT=valid_BT,
            segments_BT=segments_BT,
            source_tokens_BS=source_tokens_BS,
            source_valid_BS=source_valid_BS,
            types_BT=types_BT,
        )
        return self._run(inputs, PassContext(Workspace(self.dtype), taps=taps), self.plan)[0]

    def hidden(self, inputs: Inputs) -> Array:
        """Return the hidden states (B, T, D) after the final norm."""
        run = self._body(inputs, PassContext(Workspace(self.dtype)), self.plan)
        return self._hidden(run, self.plan)

    def logits(
        self, hidden_BTD: Array, *, head: str = "next", valid_BT: Array | None = None
    ) -> Array:
        """Return one head's logits, (..., V) as the hidden states, or (B, V) for an answer."""
        one = self.spec.head(head).readout is not None
        lead, width = hidden_BTD.shape[:-1], hidden_BTD.shape[-1]
        run = self._rows_run(lead if len(lead) == 2 else (*lead, 1), valid_BT)
        run.values[self.plan.numbers[self.plan.program.hidden]] = hidden_BTD.reshape(-1, width)
        self.plan.forward(run, self.plan.heads[head])
        logits_MV: Array = run.values[self.plan.output(head)]
        return logits_MV if one else logits_MV.reshape(*lead, -1)

    def final_norm(self, x_BTD: Array, *, prefix: str = "") -> Array:
        """Return residual rows after a stack's final norm; as they are without one."""
        for step in self.plan.body:
            if step.op.part == f"{prefix}final_norm":
                run = self._rows_run(x_BTD.shape[:2], None)
                run.values[step.reads[0]] = np.array(x_BTD).reshape(-1, x_BTD.shape[-1])
                self.plan.forward(run, [step])
                normed_MD: Array = run.values[step.writes[0]]
                return normed_MD.reshape(x_BTD.shape)
        return x_BTD

    def _rows_run(self, shape: Iterable[int], valid_BT: Array | None) -> Run:
        """Return a pass over rows of hidden states, whatever their tokens were."""
        side = Side(np.zeros(tuple(shape), np.int64), valid_BT)
        return self.new_run(
            {"target": (rows := Rows(side)), "source": rows}, PassContext(Workspace(self.dtype))
        )

    def record(
        self,
        inputs: Inputs,
        *,
        rng: np.random.Generator | None = None,
        taps: dict[str, Array] | None = None,
    ) -> tuple[dict[str, Array], Tape]:
        """Return logits by head, and the tape for `backward`; with `rng`, dropout is on."""
        self.workspace.reset()
        made = self.plan
        if rng is not None:
            if self._training is None:
                self._training = self._planned(training=True)
            made = self._training
        logits, run = self._run(inputs, PassContext(self.workspace, taps=taps, rng=rng), made)
        self.cached_bytes = self.workspace.taken_bytes
        self._recorded = tape = Tape(run, made)
        return logits, tape

    def _run(
        self, inputs: Inputs, context: PassContext, made: Plan
    ) -> tuple[dict[str, Array], Run]:
        run, logits = self._body(inputs, context, made), {}
        for head, steps in made.heads.items():
            made.forward(run, steps)
            logits[head] = self._logits(run, head, made)
        return logits, run

    def _body(self, inputs: Inputs, context: PassContext, made: Plan) -> Run:
        sides = {"target": Rows(inputs.target)}
        if inputs.source is not None:
            sides["source"] = Rows(inputs.source)
        run = self.new_run(sides, context, made=made)
        made.forward(run, made.body)
        return run

    def _hidden(self, run: Run, made: Plan) -> Array:
        rows, value = run.sides["target"], made.numbers[made.program.hidden]
        hidden_BTD: Array = run.values[value].reshape(rows.B, rows.T, -1)
        return hidden_BTD

    def _logits(self, run: Run, head: str, made: Plan) -> Array:
        """Return a head's output: (B, T, V), or (B, V) for one row of each sequence."""
        rows, logits_MV = run.sides["target"], run.values[made.output(head)]
        one = self.spec.head(head).readout is not None
        shaped: Array = logits_MV if one else logits_MV.reshape(rows.B, rows.T, -1)
        return shaped

    # --- backward -----------------------------------------------------------------------------

    def backward(
        self,
        dlogits: Mapping[str, Array],
        tape: Tape,
        *,
        dbalance: Mapping[str, float] | None = None,
        tap_grads: dict[str, Array] | None = None,
        accumulate: bool = False,
    ) -> None:
        """Fill `grads` from the gradients of the logits; `accumulate` adds to existing gradients.

        `dbalance` has the slope of the objective in each layer's load-balancing loss.
        """
        if tape is not self._recorded:
            raise InputError(
                "a later pass has overwritten what this tape recorded",
                hint="call backward before the next record or loss_and_grads",
            )
        run = tape.run
        run.context.tap_grads = tap_grads
        run.dbalance = dict(dbalance or {})
        if accumulate:
            if self._before is None:
                self._before = np.empty_like(self.grad_vector)
            np.copyto(self._before, self.grad_vector)
        tape.plan.backward(run, dlogits)
        if accumulate and self._before is not None:
            self.grad_vector += self._before

    # --- loss ---------------------------------------------------------------------------------

    def loss_and_grads(
        self,
        inputs: Inputs,
        *,
        targets: Mapping[str, Array],
        weights: Array | Mapping[str, Array] | None = None,
        head_weights: Mapping[str, float] | None = None,
        label_smoothing: float = 0.0,
        rng: np.random.Generator | None = None,
        taps: dict[str, Array] | None = None,
        tap_grads: dict[str, Array] | None = None,
        accumulate: bool = False,
        scale: float = 1.0,
        balance_shares: Mapping[str, float] | None = None,
    ) -> Losses:
        """Return the losses and fill `grads`. `scale` multiplies the gradients, not the losses.

        `balance_shares` are the weights of this batch's load-balancing losses by layer (1 each).
        """
        logits, tape = self.record(inputs, rng=rng, taps=taps)
        losses = head_losses(
            logits,
            targets=targets,
            model=self.spec,
            weights=weights,
            valid_BT=inputs.target.valid_BT,
            label_smoothing=label_smoothing,
            ws=self.workspace,
            cross_entropy=self.table.cross_entropy,
        )
        factors, dlogits = head_weights or {}, {}
        for name, (_, cache) in losses.items():
            d_MC = self.table.cross_entropy_backward(scale * factors.get(name, 1.0), cache)
            dlogits[name] = d_MC.reshape(logits[name].shape)
        slopes = balance_slopes(self.spec, shares=balance_shares)
        self.backward(
            dlogits,
            tape,
            dbalance={layer: scale * slope for layer, slope in slopes.items()},
            tap_grads=tap_grads,
            accumulate=accumulate,
        )
        return total_loss(
            losses,
            head_weights=factors,
            penalty=penalty(self.spec, self.params, grads=self.grads, scale=scale),
            logits=logits,
            balances=tape.run.balances,
            balance_slopes=slopes,
        )

    def loss(
        self,
        inputs: Inputs,
        *,
        targets: Mapping[str, Array],
        weights: Array | Mapping[str, Array] | None = None,
        head_weights: Mapping[str, float] | None = None,
        label_smoothing: float = 0.0,
    ) -> Losses:
        """Return the same losses without gradients or dropout."""
        logits, run = self._run(inputs, PassContext(Workspace(self.dtype)), self.plan)
        losses = head_losses(
            logits,
            targets=targets,
            model=self.spec,
            weights=weights,
            valid_BT=inputs.target.valid_BT,
            label_smoothing=label_smoothing,
            cross_entropy=self.table.cross_entropy,
        )
        return total_loss(
            losses,
            head_weights=head_weights or {},
            penalty=penalty(self.spec, self.params),
            logits=logits,
            balances=run.balances,
            balance_slopes=balance_slopes(self.spec),
        )
