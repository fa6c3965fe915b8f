"""`Subject`: a model that `verify` checks, given as a name and a few functions.

Our models, adapters, live modules of any library and `package.module:factory` become subjects here;
a foreign module is called by the argument names of its forward. Only `logits` is required: what a
subject does not offer is reported as "not offered", never as passed.
"""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.load import adapt
from glassformer.byhand.layers import Transformer as HandTransformer
from glassformer.byhand.model import Model as HandModel
from glassformer.checks.measure import NotOffered, seeded
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, model_of
from glassformer.models.state import load_weights, weights_of
from glassformer.nn.cache import FixedCache
from glassformer.nn.taps import Taps
from glassformer.quant.contents import is_model_quantized
from glassformer.quant.convert import dequantize_model
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec
from glassformer.store.checkpoint import load_checkpoint, save_checkpoint

# B batch, T length

Logits = Callable[[Tensor, Tensor | None], Tensor]


def through_state_dict(module: nn.Module) -> nn.Module:
    """Return a copy whose tensors were erased and reloaded from the state dict."""
    twin = copy.deepcopy(module)
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(saved)
    return twin


#: The names that libraries give to the token ids and the mask (True or 1 = real token).
TOKEN_ARGUMENTS = ("input_ids", "tokens", "x", "ids", "idx", "token_ids")
MASK_ARGUMENTS = ("attention_mask", "valid", "mask")


def call_by_signature(module: nn.Module) -> Logits:
    """Call `module(tokens, mask)` under the names that its forward uses."""
    arguments = list(inspect.signature(module.forward).parameters.values())
    names = [argument.name for argument in arguments]
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    token_name = next((n for n in TOKEN_ARGUMENTS if n in names), None)
    mask_name = next((n for n in MASK_ARGUMENTS if n in names), "mask" if takes_any else None)
    if token_name is None:
        raise InputError(
            f"cannot tell which argument of {type(module).__name__}.forward takes token ids",
            where=f"forward({', '.join(names)})",
            hint="pass logits=lambda tokens, valid: ..., or let the factory return a Subject",
        )

    def logits(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        call = {token_name: tokens_BT}
        if valid_BT is not None:
            if mask_name is None:
                raise NotOffered("its forward takes no mask")
            as_number = mask_name == "attention_mask"
            call[mask_name] = valid_BT.long() if as_number else valid_BT
        return tensor_of(module(**call))

    return logits


def step_by_signature(module: nn.Module) -> Logits | None:
    """Return a function that runs token by token through `past_key_values`, if there is one."""
    names = inspect.signature(module.forward).parameters
    if not {"input_ids", "attention_mask", "past_key_values", "use_cache"} <= set(names):
        return None

    def step(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if valid_BT is None else valid_BT
        past, columns = None, []
        for t in range(tokens_BT.shape[1]):
            result = module(
                input_ids=tokens_BT[:, t : t + 1],
                attention_mask=valid_BT[:, : t + 1].long(),
                past_key_values=past,
                use_cache=True,
            )
            past = result.past_key_values
            columns.append(result.logits)
        return torch.cat(columns, 1)

    return step


def tensor_of(result: Any) -> Tensor:
    """Return the logits in what a forward returned."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping) and isinstance(result.get("logits"), Tensor):
        return cast(Tensor, result["logits"])
    if isinstance(result, (tuple, list)) and isinstance(result[0], Tensor):
        return result[0]
    raise InputError(
        f"the module returned a {type(result).__name__}",
        hint="pass logits=lambda tokens, valid: ... that returns a tensor",
    )


def vocabulary_of(module: nn.Module) -> int:
    """Return the number of rows of the module's first embedding."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            return part.num_embeddings
    raise InputError(
        f"{type(module).__name__} has no nn.Embedding, so its vocabulary is unknown",
        hint="pass vocab_size=",
    )


# B batch, T length, S source length, V logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model to be checked.

    logits(tokens_BT, valid_BT) returns (B, T, V), or (B, V) where `per_position` is False; valid is
    True for real tokens, and None means that all are. The rest is optional:
    parameters by name (for gradient flow), names whose gradient is zero by theory, `train` to
    switch the mode, `step` for logits computed one token at a time through a cache, `reload` for
    the model saved and loaded again, `double` for the same model in float64, `weights` for
    the attention weights by tap name, `reference` for logits of another library's same model.
    For a quantized model of ours, `quantized` is that model; `model` and all else are its float
    twin, whose weights are exactly those that it uses.
    """

    name: str
    logits: Logits
    vocab_size: int
    max_length: int
    causal: bool = True
    per_position: bool = True
    size: str = ""
    parameters: Mapping[str, Tensor] | None = None
    zero_by_theory: Mapping[str, str] | None = None
    train: Callable[[bool], Any] | None = None
    step: Logits | None = None
    reload: Callable[[], "Subject"] | None = None
    double: Callable[[], "Subject"] | None = None
    weights: Callable[[Tensor, Tensor | None], dict[str, Tensor]] | None = None
    reference: Logits | None = None
    quantized: Model | None = None
    model: Model | None = None

    def ours(self) -> Model:
        """Return the model if it is one of ours; otherwise the check is not offered."""
        if self.model is None:
            raise NotOffered("not one of our models")
        return self.model

    def parameter_count(self) -> int | None:
        """Count the parameters; None where the subject does not show them."""
        if self.parameters is None:
            return None
        return sum(p.numel() for p in self.parameters.values())


# --- our own models -----------------------------------------------------------------------------


def subject_of_model(model: Model, *, name: str) -> Subject:
    """Make a subject of our model; an encoder-decoder is checked with a fixed source."""
    if is_model_quantized(model):
        twin = dequantize_model(copy.deepcopy(model))
        return replace(subject_of_model(twin, name=name), quantized=model)
    spec = model.spec

    def inputs(tokens_BT: Tensor, valid_BT: Tensor | None) -> Inputs:
        return with_source(spec, tokens_BT, valid_BT)

    def logits(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        return torch.cat(list(model(inputs(tokens_BT, valid_BT)).values()), -1)

    def step(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        cache, columns = FixedCache(tokens_BT.shape[1]), []
        for t in range(tokens_BT.shape[1]):
            column = slice(t, t + 1)
            valid = None if valid_BT is None else valid_BT[:, column]
            answers = model(inputs(tokens_BT[:, column], valid), cache=cache)
            columns.append(torch.cat(list(answers.values()), -1))
        return torch.cat(columns, 1)

    def reload() -> Subject:
        with TemporaryDirectory() as place:
            folder = Path(place) / "checkpoint"
            save_checkpoint(folder, spec, weights_of(model))
            spec_again, arrays = load_checkpoint(folder)
        again = type(model)(spec_again).to(next(model.parameters())).eval()
        load_weights(again, arrays)
        return subject_of_model(again, name=name)

    causal = all(block.attention.causal for block in spec.decoder.blocks())
    per_position = "answer" not in spec.head_names()
    zero = {p.name: p.zero_gradient for p in manifest(spec) if p.zero_gradient}
    return Subject(
        name=name,
        logits=logits,
        vocab_size=spec.vocab_size,
        max_length=spec.max_seq_len,
        causal=causal,
        per_position=per_position,
        size=size_of(spec),
        parameters=dict(model.named_parameters()),
        zero_by_theory=zero,
        train=model.train,
        step=step if causal and per_position else None,
        reload=reload,
        double=lambda: subject_of_model(copy.deepcopy(model).double(), name=name),
        weights=lambda tokens, valid: _weights(model, inputs(tokens, valid)),
        model=model,
    )


def with_source(spec: ModelSpec, tokens_BT: Tensor, valid_BT: Tensor | None) -> Inputs:
    """Return inputs of our model; with an encoder, every row gets the same random source."""
    if spec.encoder is None:
        return Inputs(tokens_BT, valid_BT)
    length = min(7, spec.max_seq_len)
    source_1S = torch.randint(0, spec.source_vocab, (1, length), generator=seeded(51))
    valid_1S = torch.ones(1, length, dtype=torch.bool)
    valid_1S[0, length // 2 + 1 :] = False
    rows = len(tokens_BT)
    return Inputs(tokens_BT, valid_BT, None, source_1S.repeat(rows, 1), valid_1S.repeat(rows, 1))


def _weights(model: Model, inputs: Inputs) -> dict[str, Tensor]:
    taps = Taps(read="*.weights")
    model(inputs, taps=taps)
    return taps.seen


def size_of(spec: ModelSpec) -> str:
    """Return `d64 L2 h4 V99`, with both depths for an encoder-decoder."""
    heads = next(spec.decoder.blocks()).attention.n_heads
    encoder = "" if spec.encoder is None else f"{spec.encoder.n_layers}+"
    return f"d{spec.d_model} L{encoder}{spec.n_layers} h{heads} V{spec.vocab_size}"


# --- live modules -------------------------------------------------------------------------------


def subject_of_module(
    module: nn.Module,
    *,
    name: str = "",
    logits: Logits | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    causal: bool = True,
) -> Subject:
    """Make a subject of any module, called by `logits` or by its forward's argument names."""
    vocab_size = vocab_size or vocabulary_of(module)
    call = logits or call_by_signature(module)

    def again(twin: nn.Module) -> Subject:
        return subject_of_module(
            twin, name=name, vocab_size=vocab_size, max_length=max_length, causal=causal
        )

    plain = logits is None  # a function of the caller's is bound to its module, not to a copy
    return Subject(
        name=name or type(module).__name__,
        logits=call,
        vocab_size=vocab_size,
        max_length=max_length or 64,
        causal=causal,
        size=f"V{vocab_size}",
        parameters=dict(module.named_parameters()),
        train=module.train,
        step=step_by_signature(module) if plain else None,
        reload=(lambda: again(through_state_dict(module))) if plain else None,
        double=(lambda: again(copy.deepcopy(module).double())) if plain else None,
    )


# --- adapters -----------------------------------------------------------------------------------


def subject_of_adapter(adapter: BaseAdapter, *, name: str = "") -> Subject:
    """Make a subject of the model in an adapter; the module it was made of is its reference."""
    name = name or adapter.get_architecture_type()
    if isinstance(adapter.model, Model):
        subject = subject_of_model(adapter.model.eval(), name=name)
    else:
        subject = subject_of_module(
            adapter.model.eval(),
            name=name,
            vocab_size=adapter.spec.vocab_size,
            max_length=adapter.spec.max_seq_len,
        )
    return _compared(subject, adapter.reference)


def _compared(subject: Subject, reference: nn.Module | None) -> Subject:
    """Add a reference to a subject, in float64 too."""
    if reference is None:
        return subject
    again = subject.double

    def double() -> Subject:
        assert again is not None
        return _compared(again(), copy.deepcopy(reference).double())

    return replace(
        subject,
        reference=call_by_signature(reference.eval()),
        double=None if again is None else double,
    )


def subject_of_hand(hand: HandModel, *, name: str) -> Subject:
    """Make a subject of a by-hand model: the same weights in torch, and by hand as the reference.

    The rows that compare every tap and every gradient with autograd's use these weights too.
    """
    model = model_of(adapt(hand)).float()  # as the certificate's other subjects

    def logits(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        inputs = with_source(model.spec, tokens_BT, valid_BT)

        def array(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.numpy()

        answers = hand.forward(
            inputs.tokens_BT.numpy(),
            valid_BT=array(inputs.valid_BT),
            source_tokens_BS=array(inputs.source_BS),
            source_valid_BS=array(inputs.source_valid_BS),
        )
        return torch.cat([torch.from_numpy(answer) for answer in answers.values()], -1)

    return replace(subject_of_model(model, name=name), reference=logits)


# --- anything -----------------------------------------------------------------------------------


def subject_of(
    thing: object,
    *,
    name: str = "",
    logits: Logits | None = None,
    vocab_size: int | None = None,
    causal: bool = True,
) -> Subject:
    """Make a subject of a Subject, of what gf.build and gf.load return, or of any module."""
    match thing:
        case Subject():
            return replace(thing, name=name) if name else thing
        case Model():
            return subject_of_model(thing.eval(), name=name or type(thing).__name__)
        case BaseAdapter():
            return subject_of_adapter(thing, name=name)
        case HandModel():
            return subject_of_hand(thing, name=name or "by hand")
        case HandTransformer():
            return subject_of_hand(thing.model, name=name or "by hand")
        case nn.Module():
            return subject_of_module(
                thing.eval(), name=name, logits=logits, vocab_size=vocab_size, causal=causal
            )
    raise InputError(
        f"cannot verify a {type(thing).__name__}",
        hint="give a model, an nn.Module, or a Subject",
    )


def subject_of_factory(reference: str, *, causal: bool = True) -> Subject:
    """Call `package.module:factory`, without arguments; the current folder is searched too."""
    module_name, _, attribute = reference.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"no module named '{error.name}'", where=reference) from error
    except ImportError as error:
        raise FileError(f"the module cannot be imported: {error}", where=reference) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise InputError(
            f"'{module_name}' has no function '{attribute}'",
            where=reference,
            hint="name a function that returns a module or a glassformer Subject",
        )
    return subject_of(factory(), name=reference, causal=causal)
