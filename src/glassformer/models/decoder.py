"""`DecoderLM`: one stack and heads. Budget LM, FSM probe, digits and Qwen are specs of it."""

from torch import Tensor

from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, build_heads
from glassformer.models.stack import add_stack_parts, run_stack
from glassformer.nn.cache import Cache
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.taps import Taps
from glassformer.spec.model import ModelSpec


class DecoderLM(Model):
    """embed -> blocks -> final norm -> heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        add_stack_parts(self, spec, spec.decoder, vocab_size=spec.vocab_size)
        self.heads = build_heads(spec)

    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
        recompute: bool = False,
    ) -> Tensor:
        return run_stack(
            self,
            inputs.tokens_BT,
            valid_BT=inputs.valid_BT,
            segments_BT=inputs.segments_BT,
            cache=cache,
            taps=taps,
            recompute=recompute,
        )

    def output_embedding(self) -> TokenEmbedding | FactorizedTokenEmbedding:
        return self.embed
