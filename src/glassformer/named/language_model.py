"""`LanguageModel`: (logits, loss) of a decoder of any spec.

Labels are aligned with the logits: shifting is done by the data. `presets.budget_lm` is the
document's model (learned positions, LayerNorm); `presets.modern_lm` has rotary positions, RMSNorm
and grouped keys and values behind the same interface.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.lab.api import result_of, train
from glassformer.models.build import build
from glassformer.named.parameter_budget import ModelConfig
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError
from glassformer.spec.train import RunSpec

#: A label of this value is left out of the loss.
IGNORED = -100


class LanguageModel(nn.Module):
    """model(ids) -> (logits, None); model(ids, labels=...) -> (logits, mean cross-entropy).

    Where every label is IGNORED, the loss is 0 and so are its gradients.
    """

    def __init__(
        self,
        described: spec.ModelSpec | ModelConfig,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config = described if isinstance(described, ModelConfig) else None
        self.described = described.spec() if isinstance(described, ModelConfig) else described
        self.model = build(self.described, generator=generator)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.model(ids)["next"]
        if labels is None:
            return logits, None
        if labels.shape != ids.shape:
            raise InputError(f"labels have shape {tuple(labels.shape)}, the ids {tuple(ids.shape)}")
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return logits, total / (labels != IGNORED).sum().clamp(min=1)


def shift_for_lm(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and aligned labels of next-token prediction: ids[:, :-1] and ids[:, 1:]."""
    return ids[:, :-1], ids[:, 1:]


def run_experiment(config: RunSpec, folder: str | Path) -> dict[str, Any]:
    """Train a complete run in a folder and return its results."""
    path = Path(folder)
    return result_of(train(config, name=path.name, runs=path.parent))
