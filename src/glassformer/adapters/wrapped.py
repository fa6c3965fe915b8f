"""`WrappedAdapter`: a live transformers module behind the same interface, computed by itself.

`load(folder, backend="transformers")` returns one, to measure against; `adapt` wraps a module that
is already in memory.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from glassformer.adapters.base import BaseAdapter, valid_of
from glassformer.adapters.config import Config
from glassformer.adapters.folder.origin import read_origin
from glassformer.adapters.folder.weights import folder_weights
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.model import ModelSpec

Backend = Literal["native", "transformers"]


class WrappedAdapter(BaseAdapter):
    """A transformers module that computes; `spec` describes the same model in our parts."""

    def __init__(
        self,
        model: nn.Module,
        *,
        spec: ModelSpec,
        architecture_type: str,
        origin: Path | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(model.eval(), spec=spec, origin=origin, tokenizer=tokenizer)
        self.wrapped_type = architecture_type

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        head: str | None = None,
    ) -> Tensor:
        """Return the module's own logits; its only head is `next`."""
        one_of("head", head or "next", ("next",))
        valid = valid_of(input_ids, attention_mask, valid)
        mask = None if valid is None else valid.long()
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=mask).logits
        return logits

    def get_architecture_type(self) -> str:
        """Return the type of the adapter that would read it natively."""
        return self.wrapped_type

    def get_config(self) -> dict[str, Any]:
        """Return the module's config as plain data."""
        return Config.of_module(self.model).data

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a Hugging Face folder with transformers; the tokenizer's files are copied."""
        folder = Path(path)
        if folder.exists():
            raise InputError(f"{folder} exists", hint="choose another name, or remove it first")
        module: Any = self.model
        module.save_pretrained(folder)
        for name, data in ({} if self.origin is None else read_origin(self.origin)).items():
            if not (folder / name).exists():
                (folder / name).write_bytes(data)

    def load_checkpoint(self, path: str | Path) -> None:
        """Copy all weights of a Hugging Face folder into this module."""
        folder = Path(path)
        weights = folder_weights(folder)
        own = dict(self.model.named_parameters())
        if set(weights.shapes) != set(own):
            odd = sorted(set(weights.shapes) ^ set(own))
            raise InputError(f"the weights do not fit the module: {odd[0]}", where=str(folder))
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights.read(name, again=True))
        self.origin = folder


def open_with_transformers(folder: Path, *, dtype: torch.dtype | None = None) -> Any:
    """Open a folder with transformers, without network, pickle or the folder's own code."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MachineError(
            "transformers is not installed", hint="pip install 'glassformer[hf]'"
        ) from error
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype or "auto",
    ).eval()
