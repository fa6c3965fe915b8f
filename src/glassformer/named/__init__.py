"""The five source documents' own names, one module each, imported when it is first used.

    000  fsm_probe    ModelConfig, SingleLayerTransformer, ...: the probe of finite-state machines
    001  budget_lm    ModelConfig, LanguageModel, ...: a language model for a parameter budget
    002  core         Transformer, prepare_model_for_quantization, QwenAdapter, ...: the model core
    003  by_hand      Linear, Transformer, train_one_epoch, ...: NumPy, gradients by hand
    004  seq2seq      Transformer, greedy_decode, beam_search, ...: the encoder-decoder of 2017

Two documents that give one name to two things have a module each. Every model here is taken by
every function of the package: `gf.verify`, `gf.trace`, `gf.inspect`, `gf.quantize`, `gf.save`, ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassformer.named import budget_lm as budget_lm
    from glassformer.named import by_hand as by_hand
    from glassformer.named import core as core
    from glassformer.named import fsm_probe as fsm_probe
    from glassformer.named import seq2seq as seq2seq

__all__ = ["budget_lm", "by_hand", "core", "fsm_probe", "seq2seq"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"glassformer.named has no '{name}'; it has {', '.join(__all__)}")
    return import_module(f"glassformer.named.{name}")


def __dir__() -> list[str]:
    return __all__
