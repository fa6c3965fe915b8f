"""`Foreign`: a live module of any library, called by the argument names of its forward.

No library is named here: what a module offers is read from its signature, from its config where it
has one, and from a first call. Its state (weights, gradients, modes, buffers, attributes, random
generators) is put back when the checks end.
"""

import contextlib
import copy
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from glasscheck.errors import InputError
from glasscheck.measure import NotOffered, relative_gap, seeded, short

# B batch, T length, S source length, V vocab

Kind = Literal["decoder", "encoder", "encoder-decoder"]

#: The names that libraries give to the token ids and the mask (True or 1 = real token).
TOKEN_ARGUMENTS = ("input_ids", "tokens", "x", "ids", "idx", "token_ids")
MASK_ARGUMENTS = ("attention_mask", "valid", "mask")
#: The names of a cache, as argument and in the result.
CACHE_ARGUMENTS = (
    "past_key_values",
    "cache_params",
    "state",
    "past_buckets_states",
    "past",
    "layer_past",
    "kv_cache",
    "cache",
)
#: The names of a config's or a module's context length.
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_seq_len",
    "max_sequence_length",
    "block_size",
    "n_ctx",
    "context_length",
)
#: Lengths at which a module is tried when it does not say its own.
TRIED = (23, 16, 11, 8, 5, 3)
SOURCE_LENGTH = 7


# --- what a module is ---------------------------------------------------------------------------


def inner(module: nn.Module) -> nn.Module:
    """Return the module whose forward names its arguments, inside compiled or adapted ones."""
    while True:
        kinds = {p.kind for p in inspect.signature(module.forward).parameters.values()}
        if not kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            return module
        deeper = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
        base = getattr(module, "get_base_model", None)
        deeper = base() if deeper is None and callable(base) else deeper
        children = list(module.children())
        deeper = children[0] if deeper is None and len(children) == 1 else deeper
        if not isinstance(deeper, nn.Module):
            return module
        module = deeper


def configured(module: nn.Module) -> nn.Module:
    """Return the part that has a config: the module, or the only one in it that does."""
    plain = inner(module)
    if getattr(plain, "config", None) is None:
        parts = [part for part in plain.children() if getattr(part, "config", None) is not None]
        return parts[0] if len(parts) == 1 else plain
    return plain


def config_of(module: nn.Module, *, decoder: bool = False) -> Any:
    """Return the config of the text model, or None."""
    return _text_config(getattr(configured(module), "config", None), decoder=decoder)


def _text_config(config: Any, *, decoder: bool = False) -> Any:
    pick = getattr(config, "get_text_config", None)
    if callable(pick):
        with contextlib.suppress(Exception):
            return pick(decoder=decoder)
    return config


def number(config: Any, *names: str) -> int | None:
    """Return the first of these attributes that is a positive whole number."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # configs that refuse a general answer for all layers
            value = None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def vocabulary_of(module: nn.Module, *, decoder: bool = False) -> int:
    """Return the number of token ids: the input embedding's rows, or what the config says."""
    plain = inner(module)
    config = config_of(module, decoder=decoder)
    table = getattr(plain, "get_input_embeddings", None)
    found = number(config, "tgt_vocab_size", "vocab_size")
    if callable(table) and not decoder:
        with contextlib.suppress(Exception):
            found = int(table().weight.shape[0]) if found is None else found
    if found is not None:
        return found
    seen = _embedding_of_ids(plain)
    if seen is not None:
        return seen
    for part in plain.modules():
        if isinstance(part, nn.Embedding):
            return part.num_embeddings
    raise InputError(
        f"{type(module).__name__} has no nn.Embedding, so its vocabulary is unknown",
        hint="pass vocab_size=",
    )


@torch.no_grad()
def _embedding_of_ids(module: nn.Module) -> int | None:
    """Return the rows of the embedding that receives the token ids in a call."""
    names = list(inspect.signature(module.forward).parameters)
    token_name = next((n for n in TOKEN_ARGUMENTS if n in names), None)
    parts = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    if token_name is None or len(parts) < 2:
        return None
    ids, rows = torch.tensor([[1, 0, 1]], device=device_of(module)), []

    def note(part: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and torch.equal(args[0].reshape(-1), ids[0]):
            rows.append(cast(nn.Embedding, part).num_embeddings)

    handles = [part.register_forward_pre_hook(note) for part in parts]
    try:
        module(**{token_name: ids})
    except Exception:  # the first real call reports it
        return None
    finally:
        for handle in handles:
            handle.remove()
    return rows[0] if rows else None


def refuse_what_cannot_run(module: nn.Module) -> None:
    """Refuse a module without numbers, or one that cannot be copied and looked into."""
    name = type(module).__name__
    if any(p.is_meta for p in module.parameters()):
        raise InputError(f"{name} has no weights: it is on the meta device", hint="load them first")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is TorchScript, which shows neither its arguments nor its parts",
            hint="verify the module that it was made of",
        )


def has_replaced_forward(module: nn.Module) -> bool:
    """True if a forward was exchanged on this object: no other object of its class has that."""
    return any("forward" in vars(part) for part in module.modules())


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def tensor_of(result: Any) -> Tensor:
    """Return the logits, or the last hidden state, in what a forward returned."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        for name in ("logits", "prediction_logits", "last_hidden_state"):
            if isinstance(result.get(name), Tensor):
                return cast(Tensor, result[name])
        ends = [t for name, t in result.items() if name.endswith("_logits") and t is not None]
        if ends and all(t.ndim == 2 and t.shape == ends[0].shape for t in ends):
            return torch.stack(ends, -1)  # where an answer starts and where it ends
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        return result[0]
    raise InputError(
        f"the module returned a {type(result).__name__}",
        hint="pass logits=lambda tokens, valid: ... that returns a tensor",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A module of another library and how it is called.

    For an encoder-decoder `tokens` are the target's, and every call has the same source.
    """

    module: nn.Module
    kind: Kind
    arguments: frozenset[str]
    any_argument: bool
    token_name: str
    mask_name: str | None
    vocab_size: int
    pad: int
    specials: frozenset[int]
    first_position: int = 0
    mask_needed: bool = False
    lead: int = 0  # positions of its own that the results begin with (prompt tuning)
    fresh: Callable[[], nn.Module] | None = None

    # --- calling ---

    def offers(self, *names: str) -> bool:
        """True if the forward names all of these arguments."""
        return set(names) <= self.arguments

    def needs(self, *names: str) -> None:
        """Refuse a check whose arguments the forward does not take."""
        missing = [name for name in names if name not in self.arguments]
        if missing:
            raise NotOffered(f"its forward takes no {' and no '.join(missing)}")

    @property
    def device(self) -> torch.device:
        """The device on which the module is asked."""
        return device_of(self.module)

    def source(self, rows: int, *, extra: int = 0, pad: Tensor | None = None) -> dict[str, Tensor]:
        """Return the source of an encoder-decoder: the second half of the last rows is padding."""
        tokens_1S = self.draw(1, SOURCE_LENGTH, seed=51)
        valid_1S = torch.ones(1, SOURCE_LENGTH + extra, dtype=torch.bool)
        valid_1S[0, SOURCE_LENGTH // 2 + 2 :] = False
        tokens_1S = torch.cat((tokens_1S, torch.full((1, extra), self.pad)), 1)
        fill = torch.full_like(tokens_1S, self.pad) if pad is None else pad
        tokens_1S = torch.where(valid_1S, tokens_1S, fill)
        return {
            "input_ids": tokens_1S.repeat(rows, 1).to(self.device),
            "attention_mask": valid_1S.long().repeat(rows, 1).to(self.device),
        }

    def draw(self, rows: int, length: int, *, seed: int) -> Tensor:
        """Return random tokens that are no special ones."""
        allowed = torch.tensor([i for i in range(self.vocab_size) if i not in self.specials])
        at = torch.randint(0, len(allowed), (rows, length), generator=seeded(seed))
        return allowed[at]

    def call(
        self, tokens_BT: Tensor | None, valid_BT: Tensor | None = None, /, **extra: Any
    ) -> Any:
        """Call the module's forward and return its result as it is."""
        given: dict[str, Any] = {}
        if tokens_BT is not None:
            given[self.token_name] = tokens_BT.to(self.device)
        if valid_BT is None and self.mask_needed and tokens_BT is not None:
            valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        if valid_BT is not None:
            if self.mask_name is None:
                raise NotOffered("its forward takes no mask")
            as_number = self.mask_name.endswith("attention_mask")
            given[self.mask_name] = (valid_BT.long() if as_number else valid_BT).to(self.device)
        if self.kind == "encoder-decoder" and not {"input_ids", "encoder_outputs"} & set(extra):
            rows = len(tokens_BT) if tokens_BT is not None else extra.get("rows", 1)
            given |= self.source(rows)
        moved = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in extra.items()}
        return self.module(**{**given, **moved})

    def logits(self, tokens_BT: Tensor, valid_BT: Tensor | None = None, /, **extra: Any) -> Tensor:
        """Return the logits of a call, on the CPU, without those of the module's own positions."""
        return self.cut(tensor_of(self.call(tokens_BT, valid_BT, **extra)), tokens_BT)

    def cut(self, logits: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return logits, on the CPU, without those of the module's own positions."""
        longer = self.lead and logits.shape[1] > tokens_BT.shape[1]
        return (logits[:, self.lead :] if longer else logits).cpu()

    def positions(self, valid_BT: Tensor) -> Tensor:
        """Count the real tokens: the documented `position_ids` of a padded batch."""
        return positions_of(valid_BT) + self.first_position

    def at_positions(self, tokens_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """Return logits where the caller gives the position of each token."""
        self.needs("position_ids")
        return self.logits(tokens_BT, valid_BT, position_ids=self.positions(valid_BT))

    # --- the cache ---

    @property
    def cache_name(self) -> str | None:
        """The argument that takes a cache, or None."""
        if self.kind == "encoder":
            return None
        return next((name for name in CACHE_ARGUMENTS if name in self.arguments), None)

    def feed(
        self,
        tokens_BT: Tensor,
        valid_BT: Tensor | None = None,
        *,
        past: Any = None,
    ) -> tuple[Tensor, Any]:
        """Read tokens after a cache; return logits and cache. `valid_BT` covers the past too."""
        name = self.cache_name
        if name is None:
            raise NotOffered("its forward takes no cache")
        if self.offers("cache", "return_intermediates"):
            return self._feed_whole(tokens_BT, valid_BT, past)
        extra: dict[str, Any] = {name: past}
        begun = past is not None
        if self.offers("use_cache") or self.any_argument:
            extra["use_cache"] = True
        if valid_BT is not None and self.offers("position_ids"):
            extra["position_ids"] = self.positions(valid_BT)[:, -tokens_BT.shape[1] :]
        result = self.call(tokens_BT, valid_BT, **extra)
        if isinstance(result, tuple) and len(result) > 1:  # logits, cache
            past = result[1]
        else:
            past = result.get(name) if isinstance(result, Mapping) else None
        if past is None:
            raise NotOffered(f"its result holds no {name}")
        logits = tensor_of(result)
        if self.lead and begun and logits.shape[1] > tokens_BT.shape[1]:
            raise NotOffered(f"each call of its forward begins with {self.lead} positions anew")
        return self.cut(logits, tokens_BT), past

    def _feed_whole(
        self, tokens_BT: Tensor, valid_BT: Tensor | None, past: Any
    ) -> tuple[Tensor, Any]:
        """Read one more token where the forward wants all tokens beside the cache."""
        if valid_BT is not None:
            raise NotOffered("its cache goes without a mask")
        before_BT, cache = (tokens_BT[:, :0], None) if past is None else past
        if cache is not None and tokens_BT.shape[1] > 1:
            raise NotOffered("its cache takes one token at a time")
        whole_BT = torch.cat((before_BT, tokens_BT), 1)
        result = self.call(whole_BT, None, cache=cache, return_intermediates=True)
        if not isinstance(result, tuple):
            raise NotOffered("its result holds no cache")
        return tensor_of(result).cpu(), (whole_BT, result[1])

    def in_pieces(
        self, tokens_BT: Tensor, pieces: list[int], valid_BT: Tensor | None = None
    ) -> Tensor:
        """Return the logits of tokens that are read in pieces of these lengths, through a cache."""
        past, begin, columns = None, 0, []
        for length in pieces:
            end = begin + length
            valid = None if valid_BT is None else valid_BT[:, :end]
            logits, past = self.feed(tokens_BT[:, begin:end], valid, past=past)
            columns.append(logits)
            begin = end
        return torch.cat(columns, 1)

    # --- copies ---

    def twin(self, module: nn.Module) -> "Foreign":
        """Return the same way of calling another module of this kind."""
        return replace(self, module=module.eval())

    def rebuilt(self, **changes: Any) -> "Foreign":
        """Return a new object of the same class, its config changed, with the same weights."""
        plain = inner(self.module)
        config = getattr(plain, "config", None)
        if config is None:
            raise NotOffered("it has no config to build it from again")
        config = copy.deepcopy(config)
        for name, value in changes.items():
            for part in (config, _text_config(config, decoder=True)):
                if hasattr(part, name):
                    setattr(part, name, value)
        with torch.random.fork_rng(devices=[]):
            again = type(plain)(config)
        again.load_state_dict(plain.state_dict())
        like = next(plain.parameters())
        return self.twin(again.to(device=like.device, dtype=like.dtype))

    def reloaded(self) -> "Foreign":
        """Return a new object that read this one's state dict from a file.

        New is what the factory makes again, or the class builds from the config; otherwise a copy
        whose tensors were erased, in which attributes outside the state dict survive.
        """
        plain = inner(self.module)
        if has_replaced_forward(plain):
            raise NotOffered("its forward was exchanged on this object, and no file holds that")
        if self.fresh is not None:
            again = inner(self.fresh())
        else:
            again = built_again(plain) or erased(plain)
        state = plain.state_dict()
        tensors = {name: t for name, t in state.items() if isinstance(t, Tensor)}
        if set(again.state_dict()) != set(state) or _hooks(again) != _hooks(plain):
            again = erased(plain)  # parts were added after it was built
        as_precise(again, plain).load_state_dict({**state, **_through_a_file(tensors)})
        return self.twin(again.to(device=next(plain.parameters()).device))


def _through_a_file(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as they are read from a file to which their bytes were written."""
    with TemporaryDirectory() as place:
        file = Path(place) / "state.npz"
        held = [t.detach().cpu().contiguous().flatten() for t in tensors.values()]
        np.savez(file, *[t.view(torch.uint8).numpy() for t in held])
        with np.load(file, allow_pickle=False) as kept:
            read = [torch.from_numpy(kept[f"arr_{i}"]) for i in range(len(held))]
    return {
        name: raw.view(t.dtype).reshape(t.shape)
        for (name, t), raw in zip(tensors.items(), read, strict=True)
    }


def _hooks(module: nn.Module) -> int:
    """Count the hooks on a module's forwards."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def built_again(module: nn.Module) -> nn.Module | None:
    """Return a new object of the class, from the config; None where it takes more than that."""
    config = getattr(module, "config", None)
    if config is None:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            return type(module)(copy.deepcopy(config))
    except TypeError:
        return None


def as_precise(module: nn.Module, like: nn.Module) -> nn.Module:
    """Give each tensor the dtype that it has in another module."""
    wanted = {name: t.dtype for name, t in chain(like.named_parameters(), like.named_buffers())}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if name in wanted:
            tensor.data = tensor.data.to(wanted[name])
    return module


@torch.no_grad()
def erased(module: nn.Module) -> nn.Module:
    """Return a copy whose saved tensors are zero."""
    twin = copy.deepcopy(module)
    for tensor in twin.state_dict().values():
        tensor.zero_()
    return twin


def positions_of(valid_BT: Tensor) -> Tensor:
    """Count the real tokens from 0; padding before the first is 0 too."""
    return (valid_BT.long().cumsum(1) - 1).clamp(min=0)


def foreign_of(
    module: nn.Module,
    *,
    vocab_size: int | None = None,
    causal: bool | None = None,
    fresh: Callable[[], nn.Module] | None = None,
) -> Foreign:
    """Read from its signature and config how a module is called."""
    plain = inner(module)
    parameters = list(inspect.signature(plain.forward).parameters.values())
    names = frozenset(p.name for p in parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    config = config_of(module)
    outer = getattr(configured(module), "config", None)
    both = "decoder_input_ids" in names and bool(getattr(outer, "is_encoder_decoder", True))
    token_name = next((n for n in TOKEN_ARGUMENTS if n in names), None)
    if token_name is None and causal is not None:  # else nobody says which way it reads
        token_name = _only(parameters)
    mask_name = next((n for n in MASK_ARGUMENTS if n in names), "mask" if takes_any else None)
    vocab = vocab_size or vocabulary_of(module, decoder=both)
    if token_name is None:
        only = _only(parameters)
        raise InputError(
            f"cannot tell which argument of {type(plain).__name__}.forward takes token ids",
            where=f"forward({', '.join(p.name for p in parameters)})",
            hint="pass logits=lambda tokens, valid: ..., or let the factory return a Subject"
            + (f"; causal=True or causal=False takes '{only}' for them" if only else ""),
        )
    kind: Kind = (
        "decoder"
        if causal or (causal is None and _reads_forward_only(configured(plain)))
        else "encoder"
    )
    if both:
        kind, token_name = "encoder-decoder", "decoder_input_ids"
        mask_name = "decoder_attention_mask" if "decoder_attention_mask" in names else None
    pad = getattr(config, "pad_token_id", None)
    pad = getattr(outer, "pad_token_id", None) if pad is None else pad
    specials = _specials(config) | _specials(outer)
    if len([i for i in specials if 0 <= i < vocab]) > vocab // 2:
        specials = frozenset()
    pad = pad if isinstance(pad, int) and 0 <= pad < vocab else 0
    needed = any(p.name == mask_name and p.default is p.empty for p in parameters)
    found = Foreign(
        module=module,
        kind=kind,
        arguments=names,
        any_argument=takes_any,
        token_name=token_name,
        mask_name=mask_name,
        vocab_size=vocab,
        pad=pad,
        specials=specials | {pad} if vocab > 2 else frozenset(),
        mask_needed=needed and mask_name in names,
        fresh=fresh,
    )
    if kind == "encoder" and causal is None and _never_looks_ahead(found):
        return replace(found, kind="decoder")
    return found


@torch.no_grad()
def _never_looks_ahead(foreign: Foreign) -> bool:
    """True if the last tokens change their own logits alone, where no config says anything."""
    tokens = foreign.draw(2, 5, seed=54)
    changed = torch.cat((tokens[:, :3], foreign.draw(2, 2, seed=55)), 1)
    with contextlib.suppress(Exception):  # the first real call reports it
        one, other = foreign.logits(tokens), foreign.logits(changed)
        same = one.ndim == 3 and one.shape[1] == 5 and torch.equal(one[:, :3], other[:, :3])
        return same and not torch.equal(one, other)
    return False


def _only(parameters: list[inspect.Parameter]) -> str | None:
    """Return the one argument that must be given, whatever its name."""
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return needed[0].name if len(needed) == 1 else None


def _specials(config: Any) -> frozenset[int]:
    """Return every token id that a config gives a meaning of its own."""
    found: set[int] = set()
    for name in dir(config) if config is not None else ():
        if name.endswith(("token_id", "token_index", "token_ids")) and not name.startswith("_"):
            with contextlib.suppress(Exception):
                value = getattr(config, name)
                listed = value if isinstance(value, (list, tuple)) else [value]
                found |= {i for i in listed if isinstance(i, int) and not isinstance(i, bool)}
    return frozenset(found)


def _reads_forward_only(module: nn.Module) -> bool:
    """Tell a causal model from one that reads both ways, where nobody says.

    A config's word counts first (`causal`, `is_decoder`), then whether it can generate; a module
    without a config is taken for causal.
    """
    config = getattr(module, "config", None)
    if config is None:
        return True
    if getattr(config, "causal", None) is False:
        return False
    can = getattr(module, "can_generate", None)
    if callable(can) and can():
        return True
    return bool(getattr(config, "is_decoder", False)) or (
        "use_cache" in inspect.signature(module.forward).parameters
        and "past_key_values" in inspect.signature(module.forward).parameters
        and bool(getattr(config, "is_decoder", True))
    )


def longest(foreign: Foreign, *, told: int | None = None) -> int:
    """Return the context length: told, read from the config, or found by trying."""
    config = config_of(foreign.module, decoder=foreign.kind == "encoder-decoder")
    said = told or number(config, *LENGTHS) or number(inner(foreign.module), *LENGTHS) or 64
    reason: Exception | None = None
    for length in (length for length in TRIED if length <= said):
        try:
            with torch.no_grad():
                foreign.logits(foreign.draw(2, length, seed=60))
        except Exception as error:  # a stranger's model may raise anything
            reason = reason or error
        else:
            return said if length == TRIED[0] or length + 1 > said else length
    if reason is None:
        return said
    if isinstance(reason, InputError):
        raise reason
    raise InputError(
        f"the model raised {short(reason)}",
        where=f"forward({foreign.token_name} of shape (2, {min(said, TRIED[0])}))",
        hint="pass logits=lambda tokens, valid: ... if it is called in another way",
    ) from reason


# --- leaving no trace ---------------------------------------------------------------------------


@contextlib.contextmanager
def untouched(module: nn.Module, *, weights: bool = True) -> Iterator[None]:
    """Put everything back: weights, gradients, modes, buffers, attributes, configs, generators.

    Weights that nobody will change (`weights=False`) are not copied.
    """
    parts = list(module.modules())
    attributes = [dict(part.__dict__) for part in parts]
    tables = [
        {name: dict(part.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
        for part in parts
    ]
    tensors = [*(module.parameters() if weights else ()), *module.buffers()]
    values = [t.detach().clone() for t in tensors]
    gradients = [(p, p.grad, p.requires_grad) for p in module.parameters()]
    configs = [(config, dict(vars(config))) for config in _configs(module)]
    for p, _, _ in gradients:
        p.grad = None  # the caller's tensors stay as they are, out of reach
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), quiet():
        try:
            yield
        finally:
            for part, before, table in zip(parts, attributes, tables, strict=True):
                for name in set(part.__dict__) - set(before):
                    del part.__dict__[name]
                part.__dict__.update(before)
                for name, entries in table.items():
                    part.__dict__[name].clear()
                    part.__dict__[name].update(entries)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            for p, grad, required in gradients:
                p.requires_grad_(required)
                p.grad = grad
            for config, before in configs:
                vars(config).clear()
                vars(config).update(before)


def _configs(module: nn.Module) -> list[Any]:
    """Return the config objects of a module and those in them, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        is_plain = config is None or isinstance(config, (nn.Module, type, str))
        if is_plain or not hasattr(config, "__dict__") or id(config) in found:
            return
        found[id(config)] = config
        for name, value in vars(config).items():
            if name.endswith("config"):
                add(value)

    for part in module.modules():
        add(part.__dict__.get("config"))
        add(part.__dict__.get("generation_config"))
    return list(found.values())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log lines of libraries."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def looks_fresh(module: nn.Module) -> bool:
    """True if most vectors, or most of those beside no matrix (gains), are constant: untrained."""
    vectors, gains = [], []
    for part in module.modules():
        own = [p.detach() for p in part.parameters(recurse=False) if p.numel() > 1]
        flat = [bool((p == p[0]).all()) for p in own if p.ndim == 1]
        vectors += flat
        gains += flat if len(flat) == len(own) else []
    return any(bool(group) and 2 * sum(group) > len(group) for group in (vectors, gains))


@torch.no_grad()
def redraw(module: nn.Module) -> None:
    """Add noise of unit scale to fresh weights: zero biases and equal gains hide mistakes."""
    generator = seeded(86)
    for parameter in module.parameters():  # a frozen one may be a table that files leave out
        if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1
            parameter.add_((noise * scale).to(parameter))


@contextlib.contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Switch to training mode with every rate of dropout and jitter at 0; then restore."""
    changed: list[tuple[Any, str, object]] = []
    modes = [(part, part.training) for part in module.modules()]
    owners = [*module.modules(), *_configs(module)]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            is_rate = (
                "drop" in name
                or "jitter" in name
                or (name == "p" and "Dropout" in type(owner).__name__)
            )
            if is_rate and isinstance(value, float):
                changed.append((owner, name, value))
                owner.__dict__[name] = 0.0
    module.train()
    try:
        yield
    finally:
        for owner, name, value in changed:
            owner.__dict__[name] = value
        for part, mode in modes:
            part.training = mode


def seed_what_is_unseeded(module: nn.Module) -> list[str]:
    """Set every `..._seed` that a part or a config leaves open; return their names."""
    names = []
    for owner in (*module.modules(), *_configs(module)):
        for name, value in list(vars(owner).items()):
            if name.endswith("_seed") and value is None:
                owner.__dict__[name] = 1
                names.append(name)
    return list(dict.fromkeys(names))


def says_unused(foreign: Foreign) -> bool:
    """True if a forward tells its callers, in its docstring or a message, that no mask is used.

    A comment in its source, or a word there, is no promise to anyone.
    """
    said = re.compile(rf"{foreign.mask_name}\b[^\n]*\b(is|are) (unused|not used|ignored)\b")
    for kind in {type(part) for part in foreign.module.modules()}:
        forward = inspect.unwrap(kind.forward)
        texts = [forward.__doc__, *getattr(getattr(forward, "__code__", None), "co_consts", ())]
        if any(isinstance(t, str) and said.search(t.replace("`", "")) for t in texts):
            return True
    return False


@torch.no_grad()
def computed_in(foreign: Foreign, tokens_BT: Tensor) -> torch.dtype | None:
    """Return the dtype in which parts compute, where it is narrower than that of all weights."""
    seen: set[torch.dtype] = set()

    def note(part: nn.Module, _: object, result: Any) -> None:
        if isinstance(result, Tensor) and result.is_floating_point():
            seen.add(result.dtype)

    handles = [part.register_forward_hook(note) for part in foreign.module.modules()]
    try:
        foreign.logits(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    narrowest = min(seen, key=lambda d: d.itemsize, default=None)
    held = {p.dtype.itemsize for p in foreign.module.parameters() if p.is_floating_point()}
    both = (torch.float16, torch.bfloat16)
    return narrowest if narrowest in both and held and narrowest.itemsize < min(held) else None


# --- positions ----------------------------------------------------------------------------


@torch.no_grad()
def first_position(foreign: Foreign) -> int:
    """Return the position of the first token: some tables begin behind the row of PAD."""
    if not foreign.offers("position_ids") or foreign.kind == "encoder-decoder":
        return 0
    tokens = foreign.draw(1, 3, seed=53)
    plain, counted = foreign.logits(tokens), positions_of(torch.ones_like(tokens))
    for first in (0, foreign.pad + 1, 1, 2):
        with contextlib.suppress(Exception):  # a stranger's model may raise anything
            if relative_gap(foreign.logits(tokens, position_ids=counted + first), plain) < 1e-3:
                return first
    return 0


@torch.no_grad()
def position_tables(foreign: Foreign, tokens_BT: Tensor, valid_BT: Tensor) -> list[nn.Module]:
    """Return the parts whose results have a row for each position, whatever the tokens are."""
    seen: list[dict[int, tuple[Tensor, ...]]] = []
    for tokens in (tokens_BT, foreign.draw(*tokens_BT.shape, seed=52)):
        found: dict[int, tuple[Tensor, ...]] = {}

        def note(part: nn.Module, _: object, result: Any, found: Any = found) -> None:
            results = result if isinstance(result, tuple) else (result,)  # or cosines and sines
            tensors = [t for t in results if isinstance(t, Tensor)]
            if tensors and all(t.ndim >= 2 and t.is_floating_point() for t in tensors):
                found.setdefault(id(part), tuple(t.detach().clone() for t in tensors))

        handles = [p.register_forward_hook(note) for p in foreign.module.modules()]
        try:
            foreign.logits(tokens, valid_BT)
        finally:
            for handle in handles:
                handle.remove()
        seen.append(found)
    first, second = seen
    B, T = tokens_BT.shape
    tables = [
        part
        for part in foreign.module.modules()
        if (one := first.get(id(part))) is not None
        and (two := second.get(id(part))) is not None
        and all(t.shape[-2] == T + foreign.lead and t.shape[:-2].numel() in (1, B) for t in one)
        and len(one) == len(two)
        and all(torch.equal(t, u) for t, u in zip(one, two, strict=True))
        and not all(torch.equal(t[..., 0, :], t[..., 1, :]) for t in one)
    ]
    within = {id(deeper) for part in tables for deeper in part.modules() if deeper is not part}
    return [part for part in tables if id(part) not in within]


@torch.no_grad()
def counting_real_tokens(
    foreign: Foreign, tables: list[nn.Module], tokens_BT: Tensor, valid_BT: Tensor
) -> Tensor:
    """Return logits where each position table is read at the count of real tokens."""
    own = torch.arange(foreign.lead).expand(len(valid_BT), foreign.lead)
    at_BT = torch.cat((own, foreign.lead + positions_of(valid_BT)), 1).to(foreign.device)

    def moved(part: nn.Module, _: object, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(moved(part, _, one) for one in result)
        if not isinstance(result, Tensor):
            return result
        rows = result.reshape(-1, *result.shape[-2:])
        return torch.stack([rows[b % len(rows)][at_BT[b]] for b in range(len(at_BT))])

    handles = [part.register_forward_hook(moved) for part in tables]
    try:
        return foreign.logits(tokens_BT, valid_BT)
    finally:
        for handle in handles:
            handle.remove()
