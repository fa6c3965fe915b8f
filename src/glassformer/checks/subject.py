"""`Subject`: a model that `verify` checks, given as a name and a few functions.

Our models, adapters, live modules of any library and `package.module:factory` become subjects here.
Only `logits` is required: what a subject does not offer is reported as "not offered", never as
passed.
"""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.adapters.base import BaseAdapter, Outline
from glassformer.adapters.load import adapt
from glassformer.byhand.layers import Transformer as HandTransformer
from glassformer.byhand.model import Model as HandModel
from glassformer.checks.foreign import (
    TRIED,
    Foreign,
    computed_in,
    first_position,
    foreign_of,
    longest,
    says_unused,
    vocabulary_of,
)
from glassformer.checks.measure import (
    LARGEST,
    TOLERANCE,
    UNITS,
    NotOffered,
    rounding_noise,
    seeded,
    short,
)
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, model_of
from glassformer.models.weights import load_weights, weights_of
from glassformer.nn.cache import FixedCache
from glassformer.nn.taps import Taps
from glassformer.quant.contents import is_model_quantized
from glassformer.quant.convert import dequantize_model
from glassformer.spec.errors import FileError, InputError, nearest
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import neighbours
from glassformer.store.checkpoint import load_checkpoint, save_checkpoint

# B batch, T length

Logits = Callable[[Tensor, Tensor | None], Tensor]


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
    twin, whose weights are exactly those that it uses. `foreign` is how a live module of another
    library is called; `pad` fills padding, and tokens of `specials` are never drawn.
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
    foreign: Foreign | None = None
    pad: int = 0
    specials: frozenset[int] = frozenset()
    #: The dtype of its results inside, where that is narrower than its weights' (autocast).
    precision: torch.dtype | None = None
    _noise: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    #: What another seed changes in a model that computes with random numbers, once measured.
    chance: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    def stranger(self) -> Foreign:
        """Return the module if it is another library's; otherwise the check is not offered."""
        if self.foreign is None:
            raise NotOffered("not a live module of another library")
        return self.foreign

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return how far apart, relative to the largest, two computations of logits may be.

        A multiple of the model's own rounding noise, measured once; where the parameters are not
        shown, the tolerance of a model of a few layers.
        """
        if not self.parameters:
            return TOLERANCE[dtype]
        if not self._noise:
            tokens = self.draw(3, 11, seed=59)
            with torch.no_grad():
                self._noise.append(
                    rounding_noise(
                        lambda: self.logits(tokens, None),
                        list(self.parameters.values()),
                        precision=self.precision,
                    )
                )
        dtype = self.precision or dtype
        return min(LARGEST[dtype], UNITS[dtype] * self._noise[0])

    def draw(self, rows: int, length: int, *, seed: int) -> Tensor:
        """Return random tokens within the vocabulary and the context, none of them special."""
        shape = (rows, min(length, self.max_length))
        if not self.specials:
            return torch.randint(0, self.vocab_size, shape, generator=seeded(seed))
        allowed = torch.tensor([i for i in range(self.vocab_size) if i not in self.specials])
        return allowed[torch.randint(0, len(allowed), shape, generator=seeded(seed))]

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
    per_position = all(head.readout is None for head in spec.heads)
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
    causal: bool | None = None,
    fresh: Callable[[], nn.Module] | None = None,
) -> Subject:
    """Make a subject of any module, called by `logits` or by its forward's argument names."""
    if logits is not None:  # a function of the caller's is bound to its module, not to a copy
        vocab_size = vocab_size or vocabulary_of(module)
        return Subject(
            name=name or type(module).__name__,
            logits=logits,
            vocab_size=vocab_size,
            max_length=max_length or 64,
            causal=causal is not False,
            size=f"V{vocab_size}",
            parameters=dict(module.named_parameters()),
            train=module.train,
        )
    foreign = foreign_of(module, vocab_size=vocab_size, causal=causal, fresh=fresh)
    length = longest(foreign, told=max_length)
    return _of_foreign(foreign, name=name or type(module).__name__, max_length=length)


def _of_foreign(foreign: Foreign, *, name: str, max_length: int) -> Subject:
    module = foreign.module
    with torch.no_grad():
        tokens = foreign.draw(2, min(TRIED[0], max_length), seed=60)  # a length that it takes
        first = foreign.logits(tokens)
        if not first.is_floating_point():
            raise InputError(
                f"the module returned whole numbers ({str(first.dtype).removeprefix('torch.')})",
                hint="pass logits=lambda tokens, valid: ... that returns logits",
            )
        shape = first.shape
        lead = shape[1] - tokens.shape[1] if len(shape) == 3 else 0
        longer = lead > 0 and foreign.logits(tokens[:, 1:]).shape[1] == shape[1] - 1
    if longer:  # positions of its own come before the tokens'
        return _of_foreign(replace(foreign, lead=lead), name=name, max_length=max_length)
    per_position = len(shape) == 3 and lead == 0
    mask = foreign.mask_name

    def double() -> Subject:
        twin = foreign.twin(copy.deepcopy(module).double())
        return _of_foreign(twin, name=name, max_length=max_length)

    refused = _refused_mask(foreign, tokens)

    def logits(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        if valid_BT is not None and refused:
            raise NotOffered(refused)
        return foreign.logits(tokens_BT, valid_BT)

    return Subject(
        name=name,
        logits=logits,
        vocab_size=foreign.vocab_size,
        max_length=max_length,
        causal=foreign.kind != "encoder",
        per_position=per_position,
        size=f"V{foreign.vocab_size}",
        parameters=dict(module.named_parameters()),
        train=module.train,
        reload=lambda: _of_foreign(foreign.reloaded(), name=name, max_length=max_length),
        double=double,
        foreign=replace(
            foreign,
            mask_name=None if refused else mask,
            first_position=first_position(foreign),
        ),
        pad=foreign.pad,
        specials=foreign.specials,
        precision=computed_in(foreign, tokens),
    )


@torch.no_grad()
def _refused_mask(foreign: Foreign, tokens_BT: Tensor) -> str:
    """Return why a mask of shape (B, T) is not taken; empty where it is."""
    if foreign.mask_name is None:
        return "its forward takes no mask"
    valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    valid_BT[0, -1] = False
    try:
        masked = foreign.logits(tokens_BT, valid_BT)
        if torch.equal(masked, foreign.logits(tokens_BT)) and says_unused(foreign):
            return "its forward says that the mask is not used"
        if foreign.mask_name not in foreign.arguments:  # swallowed, perhaps, by **kwargs
            heeded = not torch.equal(masked, foreign.logits(tokens_BT))
            return "" if heeded else "its forward takes no mask"
    except Exception as error:  # a stranger's model may raise anything
        if foreign.mask_name not in foreign.arguments:
            return "its forward takes no mask"
        return f"a mask of shape (B, T) is refused: the model raised {short(error)}"
    return ""


# --- adapters -----------------------------------------------------------------------------------


def subject_of_adapter(adapter: BaseAdapter, *, name: str = "") -> Subject:
    """Make a subject of the model in an adapter; the module it was made of is its reference."""
    name = name or adapter.get_architecture_type()
    if isinstance(adapter.model, Model):
        subject = subject_of_model(adapter.model.eval(), name=name)
    else:
        adapter.eval()
        subject = subject_of_module(
            # A module that no spec describes is called as its adapter calls it.
            adapter if isinstance(adapter.spec, Outline) else adapter.model,
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
        reference=foreign_of(reference.eval()).logits,
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
    max_length: int | None = None,
    causal: bool | None = None,
    fresh: Callable[[], nn.Module] | None = None,
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
                thing.eval(),
                name=name,
                logits=logits,
                vocab_size=vocab_size,
                max_length=max_length,
                causal=causal,
                fresh=fresh,
            )
    raise InputError(
        f"cannot verify a {type(thing).__name__}",
        hint="give a model, an nn.Module, or a Subject",
    )


def named(reference: str) -> Any:
    """Return what `package.module:name` or `file.py:name` names; the current folder counts too."""
    place, _, attribute = reference.rpartition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        if place.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            with neighbours(Path(place).resolve().parent):
                found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except FileNotFoundError as error:
        raise InputError(f"there is no file {place}", where=reference) from error
    except ModuleNotFoundError as error:
        raise InputError(f"no module named '{error.name}'", where=reference) from error
    except Exception as error:  # a stranger's file may raise anything
        raise FileError(f"it cannot be imported: {short(error)}", where=reference) from error
    if not hasattr(module, attribute):
        raise InputError(
            f"'{place}' has no '{attribute}'",
            where=reference,
            hint=nearest(attribute, [n for n in vars(module) if not n.startswith("_")]),
        )
    return getattr(module, attribute)


def called(reference: str) -> tuple[Any, Callable[[], Any] | None]:
    """Return what `package.module:factory` makes, and the factory; `file.py:factory` likewise.

    It is called without arguments. A module or a subject of that name is taken as it is.
    """
    factory = named(reference)
    if isinstance(factory, (nn.Module, Subject)):
        return factory, None
    if not callable(factory):
        raise InputError(
            f"{reference} is a {type(factory).__name__}, not a function",
            where=reference,
            hint="name a function that returns a module or a glassformer Subject",
        )
    try:
        made = factory()
    except Exception as error:
        raise InputError(
            f"the factory raised {short(error)}",
            where=reference,
            hint="it is called without arguments and returns a module or a glassformer Subject",
        ) from error
    return made, factory if isinstance(made, nn.Module) else None


def subject_of_factory(reference: str, *, causal: bool | None = None) -> Subject:
    """Make a subject of what `package.module:factory` returns."""
    made, fresh = called(reference)
    return subject_of(made, name=reference, causal=causal, fresh=fresh)
