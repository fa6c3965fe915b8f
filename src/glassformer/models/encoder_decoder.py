"""`EncoderDecoder`: decode(encode(source)). The encoder's output goes to every decoder layer."""

from torch import Tensor

from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, build_heads
from glassformer.models.stack import Stack, run_stack
from glassformer.nn.cache import Cache
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.taps import Taps
from glassformer.spec.model import ModelSpec

# B batch, T target length, S source length, D d_model


class EncoderDecoder(Model):
    """The 2017 transformer: every decoder layer reads the end of the encoder."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert spec.encoder is not None
        self.encoder = Stack(spec, spec.encoder, vocab_size=spec.source_vocab)
        self.decoder = Stack(spec, spec.decoder, vocab_size=spec.vocab_size)
        if spec.share_embedding:
            self.decoder.embed = self.encoder.embed
        self.heads = build_heads(spec)

    def encode(
        self, inputs: Inputs, *, taps: Taps | None = None, recompute: bool = False
    ) -> Tensor:
        """The memory (B, S, D) that every decoder layer reads."""
        assert inputs.source_BS is not None
        return run_stack(
            self.encoder,
            inputs.source_BS,
            valid_BT=inputs.source_valid_BS,
            taps=taps,
            prefix="encoder.",
            recompute=recompute,
        )

    def decode(
        self,
        inputs: Inputs,
        memory_BSD: Tensor,
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Hidden states (B, T, D) of the target tokens; with a cache, of the new ones."""
        return run_stack(
            self.decoder,
            inputs.tokens_BT,
            valid_BT=inputs.valid_BT,
            memory_BSD=memory_BSD,
            memory_valid_BS=inputs.source_valid_BS,
            cache=cache,
            taps=taps,
            prefix="decoder.",
            recompute=recompute,
        )

    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
        recompute: bool = False,
    ) -> Tensor:
        memory_BSD = self.encode(inputs, taps=taps, recompute=recompute)
        return self.decode(inputs, memory_BSD, cache=cache, taps=taps, recompute=recompute)

    def output_embedding(self) -> TokenEmbedding | FactorizedTokenEmbedding:
        return self.decoder.embed
