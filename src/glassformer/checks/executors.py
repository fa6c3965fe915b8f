"""Who computes a model, what each of them lacks, and the rows of `glass verify` that hold them.

A default never reaches an executor that has no row here: a test prints the table and fails on an
empty cell, and plants a fault in the code of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from glassformer.byhand.c_table import C
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.table import Table
from glassformer.generation.native.lowering import unknown_part
from glassformer.spec.lacking import Runs
from glassformer.spec.model import ModelSpec
from glassformer.spec.program import missing, program
from glassformer.training import stacked

#: What is claimed of an executor: its numbers, its gradients and update, several rows at once, and
#: sequences longer than a page, a tile or a window of its code.
Claim = Literal["values", "gradients", "batch", "long"]
CLAIMS: tuple[Claim, ...] = ("values", "gradients", "batch", "long")


def runs_all(model: ModelSpec) -> str:
    """Return nothing: no part of a model is lacking."""
    return ""


def derived(runs: Runs) -> Callable[[ModelSpec], str]:
    """Return what an executor that declares these kinds and fields lacks for a model."""

    def lacks(model: ModelSpec) -> str:
        return ", ".join(missing(program(model), runs))

    return lacks


def in_no_table(table: Table) -> Callable[[ModelSpec], str]:
    """Return what no operation of a table, or of the one on which it falls back, runs."""

    def lacks(model: ModelSpec) -> str:
        return ", ".join(table.lacking(program(model, training=True)))

    return lacks


def continues(model: ModelSpec) -> str:
    """Return why a model continues no sequence; empty if it does."""
    causal = all(block.mixer.causal for block in model.decoder.blocks())
    if "next" in model.head_names() and causal:
        return ""
    return "it predicts no next token"


def served_together(model: ModelSpec) -> str:
    """Return why sequences of a model are served one by one; empty if they share steps."""
    if model.encoder is not None:
        return "an encoder-decoder is served one sequence at a time"
    return continues(model)


def rounded(model: ModelSpec) -> str:
    """Return what the native step lacks with keys and values in 8 bits."""
    return unknown_part(model, kv_cache="int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """A way to compute a model, what takes it by default, its files, and its rows by claim.

    In the place of a row, `-` and a reason: what it never does. `lacks` says what it cannot run of
    a model, from its spec alone; whoever asks it goes on with another one.
    """

    name: str
    default: str
    code: tuple[str, ...]
    precision: str
    rows: dict[Claim, str]
    lacks: Callable[[ModelSpec], str] = runs_all


_NO_TRAINING = "- it does not train"

EXECUTORS = (
    Executor(
        name="torch modules",
        default="gf.load, glass evaluate, every forward in Python",
        code=("nn", "models"),
        precision="as loaded",
        rows={
            "values": "encoder-decoder = nn.Transformer",
            "gradients": "by hand: every gradient = autograd's",
            "batch": "a batch = each sequence alone",
            "long": "explicit attention = F.scaled_dot_product_attention",
        },
    ),
    Executor(
        name="training step in torch",
        default="glass train engine=torch, and what the native engine lacks",
        code=("training.torch_engine", "training.losses"),
        precision="float32",
        rows={
            "values": "a training step = plain torch, its update the formula",
            "gradients": "a training step = plain torch, its update the formula",
            "batch": "a training step = plain torch, its update the formula",
            "long": "a training step = plain torch, its update the formula",
        },
    ),
    Executor(
        name="native training step",
        lacks=in_no_table(C),
        default="glass train",
        code=("byhand.c_table", "kernels.training", "kernels/train", "training.numpy_engine"),
        precision="float32",
        rows={
            "values": "a native training step = plain torch, its update the formula",
            "gradients": "a native training step = plain torch, its update the formula",
            "batch": "a native training step = plain torch, its update the formula",
            "long": "a native training step = plain torch, its update the formula",
        },
    ),
    Executor(
        name="by hand",
        lacks=in_no_table(NUMPY),
        default="glass train engine=numpy, gf.byhand",
        code=("byhand",),
        precision="float64",
        rows={
            "values": "by hand: every tap = torch's",
            "gradients": "by hand: every gradient = autograd's",
            "batch": "by hand: every tap = torch's",
            "long": "- loops over positions in no kernel of its own",
        },
    ),
    Executor(
        name="cached steps in torch",
        lacks=continues,
        default="glass generate where there is no native step",
        code=("generation.stepper", "nn.cache"),
        precision="as loaded",
        rows={
            "values": "every decoding step = uncached",
            "gradients": _NO_TRAINING,
            "batch": "a batch decodes as its rows, padded left or right",
            "long": "native step = plain step",
        },
    ),
    Executor(
        name="native step",
        lacks=unknown_part,
        default="glass generate and chat on a CPU",
        code=("generation.native.arrays", "generation.native.lowering", "kernels/step"),
        precision="float32, bfloat16",
        rows={
            "values": "native step = plain step",
            "gradients": _NO_TRAINING,
            "batch": "native step = plain step",
            "long": "native step = plain step",
        },
    ),
    Executor(
        name="batches of requests",
        lacks=served_together,
        default="glass serve",
        code=("generation.batching", "generation.slots"),
        precision="as loaded",
        rows={
            "values": "served in company = alone, bit for bit",
            "gradients": _NO_TRAINING,
            "batch": "served in company = alone, bit for bit",
            "long": "served in company = alone, bit for bit",
        },
    ),
    Executor(
        name="speculation",
        lacks=unknown_part,
        default="glass generate --speculate, glass serve",
        code=("generation.speculative",),
        precision="as loaded",
        rows={
            "values": "guesses read ahead change no token",
            "gradients": _NO_TRAINING,
            "batch": "- one sequence at a time",
            "long": "guesses read ahead change no token",
        },
    ),
    Executor(
        name="prompts kept on disk",
        lacks=unknown_part,
        default="--prompt-cache",
        code=("generation.native.prompt_cache", "generation.turns"),
        precision="as loaded",
        rows={
            "values": "prompts kept on disk change no bit",
            "gradients": _NO_TRAINING,
            "batch": "- one prompt at a time",
            "long": "prompts kept on disk change no bit",
        },
    ),
    Executor(
        name="keys and values in 8 bits",
        lacks=rounded,
        default="--kv-cache int8",
        code=("nn.cache", "kernels/step_attention"),
        precision="int8",
        rows={
            "values": "8-bit cache: native step = torch step",
            "gradients": _NO_TRAINING,
            "batch": "8-bit cache = all read again, rounded",
            "long": "8-bit cache: native step = torch step",
        },
    ),
    Executor(
        name="quantized products",
        default="what glass quantize wrote",
        code=("quant", "kernels.integer", "kernels/integer"),
        precision="int8, int4",
        rows={
            "values": "quantized: backends within their bound",
            "gradients": "- only LoRA on top of it trains",
            "batch": "quantized: a row is the same in any batch",
            "long": "- a product is of rows, whatever their positions",
        },
    ),
    Executor(
        name="models trained as one",
        lacks=derived(stacked.RUNS),
        default="glass sweep of small models",
        code=("training.stacked", "training.stacked_step"),
        precision="float32",
        rows={
            "values": "trained together = trained alone",
            "gradients": "trained together = trained alone",
            "batch": "trained together = trained alone",
            "long": "- its attention is the modules' own",
        },
    ),
    Executor(
        name="several processes",
        default="torchrun … glass train",
        code=("training.distributed",),
        precision="float32",
        rows={
            "values": "trained by two processes = by one",
            "gradients": "trained by two processes = by one",
            "batch": "trained by two processes = by one",
            "long": "- each computes by the modules",
        },
    ),
)


def table() -> str:
    """Return the executors, what takes them by default, and the row of each claim."""
    lines = []
    for one in EXECUTORS:
        lines.append(f"{one.name} ({one.precision}): {one.default}")
        lines += [f"  {claim:<9} {one.rows.get(claim, '')}" for claim in CLAIMS]
    return "\n".join(lines)


def lacking(model: ModelSpec) -> dict[str, str]:
    """Return what each executor lacks for a model; empty where it runs it."""
    return {one.name: one.lacks(model) for one in EXECUTORS}
