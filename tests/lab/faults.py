"""Planted faults in training and runs: one line of damage each, and the check that turns red."""

from tests.checks.faults import Fault

APPLY, LOSS = "training.torch_engine:TorchEngine.apply", "training.torch_engine:TorchEngine._loss"
BY_HAND = "training.numpy_engine:NumpyEngine.step"
FIT, SUMS = "training.fit:fit", "training.losses:_sums"
RESUME, EVENTS = "lab.runs.run:TrainingRun.resume", "lab.runs.run:TrainingRun.after"
WATCH, SAVE = "lab.runs.run:TrainingRun._watch", "lab.runs.run:TrainingRun._snapshot"
RUNDIR, ADD = "store.rundir:RunDirectory", "lab.measure.evaluate:_Tally.add"
FINITE = "applied = math.isfinite({}) and math.isfinite(size)"

FAULTS = (
    # losses
    Fault("PAD in the loss", "training.engine:loss_weights", "return batch.valid.astype(np.float32)", "return np.ones(target.shape, dtype=np.float32)", "weights"),
    Fault("the batch's weights ignored", "training.engine:loss_weights", "return np.asarray(batch.weights, dtype=np.float32)", "return np.ones(target.shape, dtype=np.float32)", "weights"),
    Fault("what does not count is read", "training.losses:head_loss", "weights.flatten() > 0", "weights.flatten() >= 0", "hidden by weight 0"),
    Fault("smoothing in the reported nll", SUMS, "(nll_M.detach() * weights_M)", "(smoothed_M.detach() * weights_M)", "smoothed sums"),
    Fault("smoothing over all but the label", SUMS, "logp_MV.mean(1)", "logp_MV.sum(1) / (logp_MV.shape[1] - 1)", "smoothed sums"),
    Fault("weights forgotten in the plain loss", SUMS, 'reduction="none") * weights_M).sum()', 'reduction="none")).sum()', "plain sums"),
    Fault("pieces overlap", "training.losses:_ChunkedLoss.forward", "at = slice(start, start + step)", "at = slice(start, start + step + 1)", "pieces"),
    Fault("the label's gradient is forgotten", "training.losses:loss_and_gradient", "(smoothing - 1) * weight_C1)", "0.0 * weight_C1)", "pieces"),
    Fault("pieces that are computed again overlap", "training.losses:head_loss", "at = slice(start, start + step)", "at = slice(start, start + step + 1)", "pieces computed again"),
    # accumulation
    Fault("mean of means", LOSS, "loss.smoothed / (count or 1.0)", "loss.smoothed / float(loss_weights(batch, head).sum()) / 4", "accumulation, torch"),
    Fault("mean of means, by hand", BY_HAND, "float(weights[head].sum(dtype=np.float64)) / count if count else 0.0", "1 / many", "accumulation, numpy"),
    Fault("gradients of the last batch only", BY_HAND, "accumulate=i > 0", "accumulate=False", "accumulation, numpy"),
    Fault("penalty once a batch", "training.torch_engine:TorchEngine._objective", "self.model.penalty() / parts", "self.model.penalty()", "penalty, torch"),
    Fault("penalty once a batch, by hand", BY_HAND, "scale=1.0 / many", "scale=1.0", "penalty, numpy"),
    # steps
    Fault("no look before the step", APPLY, FINITE.format("total + added"), "applied = True", "not finite, torch"),
    Fault("no look before the step, by hand", BY_HAND, FINITE.format("loss + balance_term"), "applied = True", "not finite, numpy"),
    Fault("only the loss is looked at", APPLY, FINITE.format("total + added"), "applied = math.isfinite(total)", "gradient too large, torch"),
    Fault("decay on biases", "training.torch_engine:_adamw", '"params": rest, "weight_decay": 0.0', '"params": rest, "weight_decay": adam.weight_decay', "decay"),
    Fault("no decay at all", "training.torch_engine:_adamw", '"params": decayed, "weight_decay": adam.weight_decay', '"params": decayed, "weight_decay": 0.0', "engines, AdamW"),
    Fault("clipping forgotten", BY_HAND, "if self.train.clip:", "if False:", "engines, clipping"),
    Fault("smoothing forgotten", BY_HAND, "label_smoothing=self.train.label_smoothing", "label_smoothing=0.0", "engines, smoothing"),
    Fault("rate not passed on", "training.torch_engine:TorchEngine._update", 'group["lr"] = lr * share', 'group["lr"] = self.train.lr', "engines, AdamW"),
    Fault("dropout from torch's own generator", "training.torch_engine:TorchEngine._dropout_from", "torch.default_generator.manual_seed(seed)", "pass", "dropout"),
    # the loop
    Fault("sampler restarted on resume", FIT, "first = step * train.accumulate", "first = (step - start) * train.accumulate", "step by number"),
    Fault("schedule restarted on resume", FIT, "train.learning_rate(step)", "train.learning_rate(step - start)", "step by number"),
    Fault("dropout seed not tied to the step", FIT, "step_seed(train.seed, step)", "step_seed(train.seed, 0)", "chance by step"),
    Fault("the same batch for each part of a step", FIT, "order.rows(first + i)", "order.rows(first)", "epoch"),
    Fault("warmup starts at 0", "spec.train:_warm", "(step + 1) / warmup", "step / warmup", "warmup"),
    Fault("cosine one step short", "spec.train:CosineSchedule.share", "steps - 1 - self.warmup", "steps - self.warmup", "cosine"),
    # resume
    Fault("optimizer state dropped on load", RESUME, 'self.engine.load_state(read_tensors(folder / "state.safetensors"))', "pass", "resume, torch"),
    Fault("weights dropped on load", RESUME, "self.engine.load_weights(weights)", "pass", "resume, torch"),
    Fault("step count dropped on load", "training.numpy_engine:NumpyEngine.load_state", 'steps=int(arrays["steps"])', "steps=0", "resume, numpy"),
    Fault("moments dropped on load", "training.torch_engine:TorchEngine.load_state", "if name in own and own[name] in held:", 'if kind == "step" and name in own:', "resume, torch"),
    Fault("metrics not cut back", RESUME, "self.directory.cut(self.directory.metrics, self.progress.metrics_bytes)", "pass", "resume, torch"),
    Fault("metrics measured before they are written", EVENTS, "self.directory.sync(log)", "pass", "resume, torch"),
    Fault("early stop forgotten", "lab.runs.run:TrainingRun._gave_up", "self.progress.stale >= patience", "self.progress.stale == patience + 1", "early stop"),
    Fault("a damaged checkpoint is used", f"{RUNDIR}.newest_whole", "verify_folder(self.step_folder(step))", "pass", "damage"),
    Fault("another run's checkpoint is used", RESUME, 'if not is_of_spec(folder, state["spec"], self.spec):', "if False:", "other spec"),
    # the run
    Fault("two writers", f"{RUNDIR}._taken", "self._take_lock(handle)", "pass", "lock"),
    Fault("the best one is pruned", f"{RUNDIR}.prune", 'self.pointed("best")', "None", "pruning"),
    Fault("bad steps counted for ever", WATCH, "progress.unapplied = 0", "pass", "bad steps"),
    Fault("spikes below the mean", WATCH, "if record.objective > mean:\n            spread = math.sqrt(math.fsum((loss - mean) ** 2 for loss in recent) / WINDOW)\n            if record.objective > mean + SPIKE * spread", "if True:\n            spread = math.sqrt(math.fsum((loss - mean) ** 2 for loss in recent) / WINDOW)\n            if abs(record.objective - mean) > SPIKE * spread", "spikes"),
    Fault("spikes before the window is full", WATCH, "if len(recent) == WINDOW:", "if len(recent) > 2:", "spikes"),
    # evaluation
    Fault("PAD counted in accuracy", ADD, "sums[1] += float((right * weights).sum())", "sums[1] += float(right.sum())", "evaluation"),
    Fault("exact match of PAD too", ADD, "counted = (weights > 0).reshape(len(exact), -1)", "counted = (weights >= 0).reshape(len(exact), -1)", "exact match"),
    Fault("half the loss of a short last chunk", "lab.measure.evaluate:_chunks", "min(start + size, count)", "start + size - 1", "chunks"),
    Fault("entropy everywhere", "lab.measure.evaluate:_Tally.add_truth", "self.entropy += float((truth.entropy * weights).sum())", "self.entropy += float(truth.entropy.sum())", "evaluation"),
    Fault("the rate that breaks is suggested", "training.fit:_read", "suggestion = min(usable[steepest][0], high)", "suggestion = usable[-1][0]", "rates"),
)  # fmt: skip
