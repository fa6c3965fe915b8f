"""`WarmStepper`: the native step of a conversation with a torch model.

With `prompt_cache` a turn's beginning may also come from a prompt that is kept on disk.
"""

from pathlib import Path

from glassformer.generation.fast.native_stepper import NativeStepper
from glassformer.generation.fast.turns import Turns
from glassformer.models.model import Holder, Model
from glassformer.spec.decoding import KVCache


class WarmStepper(Turns, NativeStepper):
    """`Turns` over a torch model, which may change between turns."""

    def __init__(
        self,
        model: Model | Holder,
        *,
        prompt_cache: Path | None = None,
        kv_cache: KVCache = "float",
    ) -> None:
        NativeStepper.__init__(self, model, prompt_cache=prompt_cache, kv_cache=kv_cache)
        self._begin_turns(self.model.spec)
