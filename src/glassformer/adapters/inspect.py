"""`gf.inspect` and `gf.patch_activations`: the lens for any model, by text or by token ids."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.load import adapt
from glassformer.data.batch import Batch
from glassformer.lens.capture import tapped_model
from glassformer.lens.heads import HeadName
from glassformer.lens.inspection import Inspection
from glassformer.lens.measure import patching
from glassformer.lens.measure.patching import Metric, Patching, Run, Sites
from glassformer.lens.show.text import Names
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model

Tokens = Batch | Inputs | Tensor | np.ndarray | Sequence[int]


def inspect(
    model: BaseAdapter | Model,
    text: str | Tokens,
    *,
    target: str | None = None,
    targets: int | Sequence[int | None] | np.ndarray | Tensor | None = None,
    ablate: Sequence[str | HeadName] = (),
    head: str | None = None,
    words: Sequence[str] | None = None,
    source_words: Sequence[str] | None = None,
    names: Names | Sequence[str] | None = None,
) -> Inspection:
    """Run one sequence and keep everything: attention, logit lens, norms, losses.

    A text: `target` is what should follow; the loss is then of its tokens alone, else of the
    text's own. Token ids, Inputs, or a Batch of one row: `targets` are ids by position, `head` is
    the output head to read; `words`, `source_words` and `names` label the tokens. `ablate`
    switches attention heads off.
    """
    return adapt(model).inspect(
        text,
        target=target,
        targets=targets,
        ablate=ablate,
        head=head,
        words=words,
        source_words=source_words,
        names=names,
    )


def patch_activations(
    model: BaseAdapter | Model,
    clean: str | Run,
    corrupt: str | Run,
    *,
    sites: Sites = "residual",
    kind: str = "self",
    metric: Metric = "logit_difference",
    answers: tuple[int, int] | None = None,
    position: int | None = None,
    head: str | None = None,
) -> Patching:
    """Measure how much of the clean prediction each activation restores in the corrupt run.

    Activations of the run on `clean` replace those of the run on `corrupt`, one site at a time:
    the residual stream by layer and position, or the output of each attention head. `answers`: ids
    of the right and the wrong answer; without them, what both runs predict at `position`.
    """
    adapter = adapt(model)
    pair = [adapter.inspect(one) if isinstance(one, str) else one for one in (clean, corrupt)]
    return patching.patch_activations(
        tapped_model(adapter),
        *pair,
        sites=sites,
        kind=kind,
        metric=metric,
        answers=answers,
        position=position,
        head=head,
    )
