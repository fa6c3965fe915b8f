"""Errors for users: what happened, where, and what to do about it.

Each class carries the exit code that the command line returns for it, so that a script can tell a
failed check from a bad file without reading the message.
"""

import difflib
import re
from collections.abc import Iterable

#: `{on the command line|in Python}`
_EITHER = re.compile(r"\{([^{}|]+)\|([^{}|]+)\}")


class GlassError(Exception):
    """An error for users: what went wrong, where, and a hint of what to do; at most three lines.

    An option is named as the reader would type it: `{--resume|resume=True}` in a text is the first
    on the command line and the second in Python.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self._texts = (what, where, hint)
        self.what, self.where, self.hint = (_spelled(text, 2) for text in self._texts)
        super().__init__(self.what)

    def in_command(self) -> "GlassError":
        """Return an error of the same texts with its options spelled as on the command line."""
        what, where, hint = (_spelled(text, 1) for text in self._texts)
        return GlassError(what, where=where, hint=hint)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def _spelled(text: str, which: int) -> str:
    return _EITHER.sub(lambda found: found[which], text)


class CheckFailed(GlassError):
    """A check that the caller requested did not hold."""

    exit_code = 1


class InputError(GlassError, ValueError):
    """A value that breaks a rule: the message names both, and the nearest valid value."""


class FileError(GlassError):
    """A file that is damaged, hostile, or not what it claims to be."""

    exit_code = 3


class DivergedError(GlassError):
    """Training diverged: the loss or a gradient is no longer finite."""

    exit_code = 4


class MachineError(GlassError):
    """The machine cannot do it: memory, disk, a lock held by another process, a missing library."""

    exit_code = 5


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `did you mean 'd_model'?`, or the list of known names if none is near."""
    choices = sorted(set(known))
    close = difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(choices)}" if choices else "nothing is known here"


#: Settings by other words that people type for them, those of other libraries among them.
OTHER_WORDS = {
    "learning_rate": "train.lr",
    "rate": "train.lr",
    "batch": "train.batch_size",
    "bs": "train.batch_size",
    "epochs": "train.steps",
    "iters": "train.steps",
    "max_steps": "train.steps",
    "eval_every": "train.evaluate_every",
    "save_every": "train.checkpoint_every",
    "dtype": "train.precision",
    "bf16": "train.precision",
    "grad_clip": "train.clip",
    "weight_decay": "train.optimizer.weight_decay",
    "momentum": "train.optimizer.momentum",
    "warmup": "train.schedule.warmup",
    "layers": "model.decoder.layers.count",
    "n_layers": "model.decoder.layers.count",
    "depth": "model.decoder.layers.count",
    "heads": "model.decoder.layers.block.attention.n_heads",
    "n_heads": "model.decoder.layers.block.attention.n_heads",
    "d_ff": "model.decoder.layers.block.ffn.d_ff",
    "ffn": "model.decoder.layers.block.ffn.d_ff",
    "norm": "model.decoder.layers.block.norm",
    "dropout": "model.decoder.dropout",
    "d_model": "model.d_model",
    "width": "model.d_model",
    "dim": "model.d_model",
    "hidden_size": "model.d_model",
    "embed_dim": "model.d_model",
    "position": "model.position",
    "max_seq_len": "model.max_seq_len",
    "context": "model.max_seq_len",
    "vocab": "task.vocab_size",
    "vocab_size": "task.vocab_size",
    "length": "task.length",
    "seq_len": "task.length",
    "max_length": "task.max_length",
    "data": "task.path",
    "path": "task.path",
    "examples": "task.examples",
    "rank": "lora",
    "num_layers": "model.decoder.layers.count",
    "num_hidden_layers": "model.decoder.layers.count",
    "n_layer": "model.decoder.layers.count",
    "num_heads": "model.decoder.layers.block.attention.n_heads",
    "num_attention_heads": "model.decoder.layers.block.attention.n_heads",
    "n_head": "model.decoder.layers.block.attention.n_heads",
    "num_key_value_heads": "model.decoder.layers.block.attention.n_kv_heads",
    "head_dim": "model.decoder.layers.block.attention.d_head",
    "intermediate_size": "model.decoder.layers.block.ffn.d_ff",
    "dim_feedforward": "model.decoder.layers.block.ffn.d_ff",
    "n_inner": "model.decoder.layers.block.ffn.d_ff",
    "hidden_act": "model.decoder.layers.block.ffn.activation",
    "hidden_dim": "model.d_model",
    "n_embd": "model.d_model",
    "embedding_dim": "model.d_model",
    "max_position_embeddings": "model.max_seq_len",
    "block_size": "model.max_seq_len",
    "n_positions": "model.max_seq_len",
    "tie_word_embeddings": "model.heads.tied",
    "per_device_train_batch_size": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.accumulate",
    "grad_accum": "train.accumulate",
    "max_grad_norm": "train.clip",
    "gradient_clip_val": "train.clip",
    "max_iters": "train.steps",
    "num_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "warmup_steps": "train.schedule.warmup",
    "warmup_iters": "train.schedule.warmup",
    "min_lr": "train.schedule.floor",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "adam_beta1": "train.optimizer.beta1",
    "adam_beta2": "train.optimizer.beta2",
    "adam_epsilon": "train.optimizer.eps",
    "optim": "train.optimizer",
    "label_smoothing_factor": "train.label_smoothing",
    "eval_steps": "train.evaluate_every",
    "eval_interval": "train.evaluate_every",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep",
    "early_stopping_patience": "train.patience",
    "torch_compile": "train.compile",
}

#: Kinds of parts by other words for them, letters and digits only, without `schedule` or `lr` at
#: the end; the second is what to know where ours is only the nearest to it.
OTHER_KINDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("cos", "cosinewithwarmup", "cosineannealing", "cosinedecay", "warmupcosine"),
        ("CosineSchedule", ""),
    ),
    **dict.fromkeys(("constantwithwarmup", "warmup", "none", "fixed"), ("ConstantSchedule", "")),
    **dict.fromkeys(
        ("noam", "invsqrt", "rsqrt", "inversesquareroot", "vaswani"), ("InverseSqrtSchedule", "")
    ),
    **dict.fromkeys(
        ("wsd", "warmupstabledecay", "trapezoid", "trapezoidal"),
        (
            "ConstantSchedule",
            "which warms up and stays, without the decay at the end; your own: my_file.py:WSD",
        ),
    ),
    **dict.fromkeys(
        ("linear", "lineardecay", "linearwithwarmup", "polynomial", "poly", "onecycle"),
        ("CosineSchedule", "which falls to its floor too, as half a cosine"),
    ),
    **dict.fromkeys(
        ("adam", "adamwtorch", "adamwtorchfused", "fusedadamw", "adamwhf", "pagedadamw"),
        ("AdamW", ""),
    ),
    **dict.fromkeys(("adamw8bit", "adamwbnb8bit"), ("AdamW", "which keeps 32 bits")),
    **dict.fromkeys(("momentum", "sgdm", "nesterov"), ("SGD", "with optimizer.momentum")),
    **dict.fromkeys(
        ("lion", "adafactor", "adagrad", "rmsprop", "lamb", "sophia", "shampoo", "soap"),
        ("AdamW", "or an optimizer of your own: FILE.py:Class"),
    ),
    **dict.fromkeys(("rope", "rotaryembedding"), ("Rotary", "")),
    **dict.fromkeys(("nope", "no", "nopos"), ("NoPosition", "")),
    **dict.fromkeys(("absolute", "learnedabsolute", "embedding"), ("Learned", "")),
    **dict.fromkeys(("sin", "sine", "sincos", "fixedsinusoidal"), ("Sinusoidal", "")),
    **dict.fromkeys(("t5", "relative", "relativepositionbias"), ("RelativeBias", "")),
}


def nearest_kind(name: str, kinds: Iterable[str]) -> str:
    """Return a hint for a kind of part that is unknown: ours by another word, or the nearest.

    A word that all kinds have in common, such as `Schedule`, makes no two of them alike.
    """
    choices = sorted(set(kinds))
    stems = {_stem(kind): kind for kind in choices}
    stem = _stem(name)
    kind, remark = OTHER_KINDS.get(stem, ("", ""))
    if kind in choices:
        return f"did you mean '{kind}'?" if not remark else f"the nearest is '{kind}', {remark}"
    close = difflib.get_close_matches(stem, stems, n=1)
    return f"did you mean '{stems[close[0]]}'?" if close else f"known: {', '.join(choices)}"


def _stem(kind: str) -> str:
    """Return a kind's name in small letters and digits, without what says only what it is."""
    word = re.sub(r"[^a-z0-9]", "", kind.lower())
    for ending in ("scheduler", "schedule", "optimizer", "lr"):
        word = word.removesuffix(ending) or word
    return word
