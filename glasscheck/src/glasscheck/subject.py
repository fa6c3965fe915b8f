"""`Subject`: a model that `verify` checks, given as a name and a few functions.

Live modules of any library and `package.module:factory` become subjects here. Only `logits` is
required: what a subject does not offer is reported as "not offered", never as passed.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from glasscheck.errors import FileError, InputError, nearest
from glasscheck.foreign import (
    MARKS_PADDING,
    TRIED,
    Foreign,
    computed_in,
    config_of,
    first_position,
    foreign_of,
    longest,
    number,
    says_unused,
    vocabulary_of,
)
from glasscheck.measure import (
    LARGEST,
    TOLERANCE,
    UNITS,
    NotOffered,
    rounding_noise,
    seeded,
    short,
)

# B batch, T length

Logits = Callable[[Tensor, Tensor | None], Tensor]

#: A context below this is tried to its end.
SMALL = 300


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
    `foreign` is how a live module is called; `pad` fills padding, and tokens of `specials` are
    never drawn. `windows` are how many positions its attention sees, where it does not see all;
    `routed` are parameters of experts, to which no token may go. A library with own rows gives them
    its `model`; of a quantized one, `quantized`, `model` and all else are its float twin, whose
    weights are exactly those that it uses.
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
    quantized: Any = None
    model: Any = None
    foreign: Foreign | None = None
    pad: int = 0
    specials: frozenset[int] = frozenset()
    windows: tuple[int, ...] = ()
    routed: frozenset[str] = frozenset()
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

    def ours(self) -> Any:
        """Return the model that rows of a library know; otherwise the check is not offered."""
        if self.model is None:
            raise NotOffered("not one of our models")
        return self.model

    def parameter_count(self) -> int | None:
        """Count the parameters; None where the subject does not show them."""
        if self.parameters is None:
            return None
        return sum(p.numel() for p in self.parameters.values())


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
    call: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
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
    foreign = foreign_of(
        module, vocab_size=vocab_size, causal=causal, fresh=fresh, call=call, names=names
    )
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
    max_length = _fitting(foreign, max_length)
    per_position = len(shape) == 3 and lead == 0
    mask = foreign.mask_name
    foreign = replace(foreign, marks_padding=per_position and _marks_padding(foreign))

    def double() -> Subject:
        return _of_foreign(foreign.doubled(), name=name, max_length=max_length)

    window = number(config_of(module), "sliding_window", "attention_window_size")
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
        windows=() if window is None else (window,),
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


@torch.no_grad()
def _fitting(foreign: Foreign, stated: int) -> int:
    """Return a stated context, less the first positions where its table keeps them for PAD."""
    for length in range(stated, max(stated - 4, TRIED[0]), -1) if stated < SMALL else ():
        with contextlib.suppress(Exception):  # a stranger's model may raise anything
            foreign.logits(foreign.draw(1, length, seed=60))
            return length
    return stated


@torch.no_grad()
def _marks_padding(foreign: Foreign) -> bool:
    """True if the mask, inverted, hides what it marks, and as it is said to be does not."""
    if foreign.mask_name is None or foreign.mask_name in MARKS_PADDING:
        return False
    tokens = foreign.draw(2, 5, seed=56)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[:, 3:] = False
    other = torch.cat((tokens[:, :3], foreign.draw(2, 2, seed=57)), 1)
    begun = torch.cat((foreign.draw(2, 3, seed=58), tokens[:, 3:]), 1)
    with contextlib.suppress(Exception):  # a stranger's model may raise anything
        plain, changed = foreign.logits(tokens, valid), foreign.logits(other, valid)
        turned = replace(foreign, marks_padding=True)
        hidden, same = turned.logits(tokens, valid), turned.logits(other, valid)
        real = turned.logits(begun, valid)
        # a causal model never sees what stands behind: the mask must change something
        heeds = not torch.equal(plain[:, :3], hidden[:, :3])
        left = torch.ones_like(valid)
        left[:, :2] = False
        before = torch.cat((other[:, 3:], tokens[:, 2:]), 1)
        after = torch.cat((tokens[:, 3:], tokens[:, 2:]), 1)
        leaks = not torch.equal(
            foreign.logits(before, left)[:, 2:], foreign.logits(after, left)[:, 2:]
        )
        holds = torch.equal(turned.logits(before, left)[:, 2:], turned.logits(after, left)[:, 2:])
        reads = not torch.equal(real[:, :3], hidden[:, :3])
        leaks |= not torch.equal(plain[:, :3], changed[:, :3])
        return heeds and leaks and holds and reads and torch.equal(hidden[:, :3], same[:, :3])
    return False


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
    call: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> Subject:
    """Make a subject of a Subject, or of any module."""
    match thing:
        case Subject():
            return replace(thing, name=name) if name else thing
        case nn.Module():
            return subject_of_module(
                thing.eval(),
                name=name,
                logits=logits,
                vocab_size=vocab_size,
                max_length=max_length,
                causal=causal,
                fresh=fresh,
                call=call,
                names=names,
            )
    raise InputError(
        f"cannot verify a {type(thing).__name__}",
        hint="give a model, an nn.Module, or a Subject",
    )


def of_its_library(function: str, thing: object) -> Callable[..., Any] | None:
    """Return `verify` or `diff` of the library that a model's class comes from, if it has one.

    A library names it by an entry point, `mylibrary = "mylibrary.certificate:verify"` in the group
    `glasscheck.verify`: a function with the options of ours. Nothing is imported for others.
    """
    homes = {cls.__module__.partition(".")[0] for cls in type(thing).__mro__}
    for entry in importlib.metadata.entry_points(group=f"glasscheck.{function}"):
        if entry.name in homes:
            found: Callable[..., Any] = entry.load()
            return found
    return None


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
            with _beside(Path(place).resolve().parent):
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


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let a file import the modules beside it, as Python does for a script.

    They come first while the file is imported, and last afterwards, for imports inside functions.
    """
    place = str(folder)
    sys.path.insert(0, place)
    importlib.invalidate_caches()  # a file may be newer than what was listed of its folder
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)


def called(reference: str) -> tuple[Any, Callable[[], Any] | None]:
    """Return what `package.module:factory` makes, and the factory; `file.py:factory` likewise.

    It is called without arguments. A module or a subject of that name is taken as it is.
    """
    return made_by(named(reference), reference)


def made_by(factory: Any, reference: str) -> tuple[Any, Callable[[], Any] | None]:
    """Return what a factory of this name makes, and the factory."""
    if isinstance(factory, (nn.Module, Subject)):
        return factory, None
    if not callable(factory):
        raise InputError(
            f"{reference} is a {type(factory).__name__}, not a function",
            where=reference,
            hint="name a function that returns a module or a Subject",
        )
    try:
        made = seeded_call(factory)
    except Exception as error:
        raise InputError(
            f"the factory raised {short(error)}",
            where=reference,
            hint="it is called without arguments and returns a module or a Subject",
        ) from error
    return made, (lambda: seeded_call(factory)) if isinstance(made, nn.Module) else None


def seeded_call(factory: Callable[[], Any]) -> Any:
    """Call a factory with every generator seeded, so that it makes the same weights each time."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            return factory()
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def subject_of_factory(reference: str, *, causal: bool | None = None) -> Subject:
    """Make a subject of what `package.module:factory` returns."""
    made, fresh = called(reference)
    return subject_of(made, name=reference, causal=causal, fresh=fresh)
