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
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from glasscheck.errors import InputError
from glasscheck.measure import NotOffered, relative_gap, seeded, short

# B batch, T length, S source length, V vocab

Kind = Literal["decoder", "encoder", "encoder-decoder"]
AnyModule = TypeVar("AnyModule", bound=nn.Module)

#: The names that libraries give to the token ids and the mask (True or 1 = real token).
TOKEN_ARGUMENTS = (
    "input_ids",
    "tokens",
    "x",
    "ids",
    "idx",
    "token_ids",
    "inputs",
    "input",
    "input_tokens",
    "src",
    "text",
)
MASK_ARGUMENTS = ("attention_mask", "valid", "mask", "padding_mask", "key_padding_mask", "pad_mask",
                  "src_key_padding_mask")  # fmt: skip
#: Masks that by convention mark padding, not tokens.
MARKS_PADDING = ("padding_mask", "key_padding_mask", "pad_mask", "src_key_padding_mask",
                 "tgt_key_padding_mask", "memory_key_padding_mask")  # fmt: skip
LABEL_ARGUMENTS = ("labels", "targets", "target", "y", "lm_labels", "label")
POSITION_ARGUMENTS = ("position_ids", "positions", "pos", "pos_ids")
#: Source and target of an encoder-decoder, and the masks of both.
SOURCES = (("input_ids", "decoder_input_ids"), ("src", "tgt"), ("source", "target"))
SOURCE_MASKS = ("attention_mask", "src_key_padding_mask", "src_mask", "source_mask")
TARGET_MASKS = ("decoder_attention_mask", "tgt_key_padding_mask")
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
    "mems",
    "hx",
    "hidden",
    "hidden_state",
    "past_kv_cache",
    "incremental_state",
    "inference_params",
    "input_pos",
)
#: What a module is asked to make its caches with, where they are its own.
SETUPS = ("setup_caches", "set_kv_cache")
#: Modules whose classes say nothing of how a cache begins.
PLAIN = ("builtins", "types", "typing", "collections", "collections.abc")
#: What makes a state for a number of rows, where a forward must be given one.
BEGINNINGS = ("init_hidden", "init_state", "initial_state", "get_initial_state", "begin_state",
              "zero_state")  # fmt: skip
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
#: Context lengths that are tried, the longest first, where none is stated.
UNSTATED = (271, 131, 64)
#: Lengths of which a module may take multiples alone.
MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
#: Tokens for which caches of a fixed size have room.
ROOM = 320
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


def copied(module: AnyModule) -> AnyModule:
    """Return a deep copy, of a module that kept results of its last call too."""
    memo: dict[int, Any] = {}

    def detach(value: Any) -> None:
        if isinstance(value, Tensor):
            if not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        elif isinstance(value, (list, tuple)):
            for one in value:
                detach(one)
        elif isinstance(value, dict):
            for one in value.values():
                detach(one)

    for part in module.modules():
        detach({k: v for k, v in vars(part).items() if k not in ("_parameters", "_modules")})
    return copy.deepcopy(module, memo)


def has_replaced_forward(module: nn.Module) -> bool:
    """True if a forward was exchanged on this object: no other object of its class has that."""
    return any("forward" in vars(part) for part in module.modules())


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def precision_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first parameter of numbers; float32 where there is none."""
    held = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(held, torch.float32)


def parts_of(result: Any) -> dict[str, Any]:
    """Return the parts of a result by name: a mapping's, a dataclass's, a tuple's by number."""
    if isinstance(result, Mapping):
        return dict(result)
    if is_dataclass(result) and not isinstance(result, type):
        return {field.name: getattr(result, field.name) for field in fields(result)}
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        return dict(result._asdict())
    if isinstance(result, (tuple, list)):
        return {str(i): part for i, part in enumerate(result)}
    held = getattr(result, "__dict__", {})
    return {} if isinstance(result, Tensor) else dict(held)


def tensor_of(result: Any, vocab_size: int | None = None) -> Tensor:
    """Return the logits, or the last hidden state, in what a forward returned.

    Of several tensors (B, T, *) without a known name, the logits have a column for each token.
    """
    if isinstance(result, Tensor):
        return result
    parts = parts_of(result)
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        if isinstance(parts.get(name), Tensor):
            return cast(Tensor, parts[name])
    ends = [t for name, t in parts.items() if name.endswith("_logits") and t is not None]
    if ends and all(t.ndim == 2 and t.shape == ends[0].shape for t in ends):
        return torch.stack(ends, -1)  # where an answer starts and where it ends
    tensors = [t for t in parts.values() if isinstance(t, Tensor) and t.ndim >= 2]
    if isinstance(result, (tuple, list)) and tensors:
        return tensors[0]  # a loss may come before
    deep = [t for t in tensors if t.ndim == 3 and t.is_floating_point()]
    if len(deep) > 1:
        deep = [t for t in deep if t.shape[-1] == vocab_size]
    if len(deep) == 1:
        return deep[0]
    raise InputError(
        f"the module returned a {type(result).__name__}",
        hint="pass logits=lambda tokens, valid: ... that returns a tensor",
    )


def loss_of(result: Any) -> Tensor | None:
    """Return the loss in what a forward returned: of that name, or the only number."""
    parts = parts_of(result)
    found = parts.get("loss")
    if found is None:
        numbers = [t for t in parts.values() if isinstance(t, Tensor) and t.numel() == 1]
        found = numbers[0] if len(numbers) == 1 else None
    if isinstance(result, Tensor) and result.ndim == 0:
        found = result
    return found.reshape(()) if isinstance(found, Tensor) and found.numel() == 1 else None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: its arguments, its result, and the logits that were read in it."""

    module: nn.Module
    given: Mapping[str, Any]
    result: Any


@dataclass(slots=True)
class Log:
    """The calls of one row, while it is repeated to find out where it fails."""

    recording: bool = False
    calls: list[Call] = field(default_factory=list)

    def note(self, module: nn.Module, given: Mapping[str, Any], result: Any) -> None:
        """Keep a call, where calls are being recorded."""
        if self.recording:
            kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
            self.calls.append(Call(module, kept, result))


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
    marks_padding: bool = False  # True in its mask is padding
    lead: int = 0  # positions of its own that the results begin with (prompt tuning)
    source_name: str = "input_ids"
    source_mask: str | None = "attention_mask"
    position_name: str | None = None  # positions that every call must be given
    label_name: str | None = None
    labels_for_all: bool = False  # without labels it returns the last position alone
    state_name: str | None = None  # the argument of a cache
    state_needed: bool = False  # a state must be given, and the module makes the first
    rows_of_positions: bool = False  # `input_pos` has a row for each row of the batch
    time_first: bool = False  # (T, B), not (B, T)
    multiple: int = 1  # of how many tokens a row must be
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments of every call
    fresh: Callable[[], nn.Module] | None = None
    widened: bool = False  # a float64 copy: what its forward makes in float32 is widened too
    log: Log = field(default_factory=Log, repr=False, compare=False)  # shared with its twins

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
        if self.source_mask is not None:
            valid_1S[0, SOURCE_LENGTH // 2 + 2 :] = False
        tokens_1S = torch.cat((tokens_1S, torch.full((1, extra), self.pad)), 1)
        fill = torch.full_like(tokens_1S, self.pad) if pad is None else pad
        tokens_1S = torch.where(valid_1S, tokens_1S, fill)
        given = {self.source_name: self._laid(tokens_1S.repeat(rows, 1))}
        if self.source_mask is not None:
            given[self.source_mask] = self._mask(valid_1S.repeat(rows, 1), self.source_mask)
        return given

    def draw(self, rows: int, length: int, *, seed: int) -> Tensor:
        """Return random tokens that are no special ones."""
        allowed = torch.tensor([i for i in range(self.vocab_size) if i not in self.specials])
        at = torch.randint(0, len(allowed), (rows, length), generator=seeded(seed))
        return allowed[at]

    def call(
        self, tokens_BT: Tensor | None, valid_BT: Tensor | None = None, /, **extra: Any
    ) -> Any:
        """Call the module's forward and return its result as it is."""
        given: dict[str, Any] = dict(self.fixed)
        if tokens_BT is not None:
            extra = self._filled_too(extra, tokens_BT)
            tokens_BT, valid_BT = self._filled(tokens_BT, valid_BT)
            given[self.token_name] = self._laid(tokens_BT)
            if self.position_name is not None:
                at = torch.arange(tokens_BT.shape[1])
                every = self.position_name != "input_pos" or self.rows_of_positions
                given[self.position_name] = (
                    self._laid(at.repeat(len(tokens_BT), 1)) if every else at.to(self.device)
                )
            if self.state_needed and extra.get(str(self.state_name)) is None:
                extra = {**extra, str(self.state_name): first_state(self.module, len(tokens_BT))}
            if self.labels_for_all and self.label_name is not None:
                given[self.label_name] = self._laid(tokens_BT)
        if valid_BT is None and self.mask_needed and tokens_BT is not None:
            valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        if valid_BT is not None:
            if self.mask_name is None:
                raise NotOffered("its forward takes no mask")
            given[self.mask_name] = self._mask(valid_BT, self.mask_name)
        own = {self.source_name, "encoder_outputs"}
        if self.kind == "encoder-decoder" and not own & set(extra):
            rows = len(tokens_BT) if tokens_BT is not None else extra.get("rows", 1)
            given |= self.source(rows)
        given |= {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in extra.items()}
        module = self.module
        if self.caches_alone and tokens_BT is not None:  # its own would keep what others read
            module = with_caches(copied(module), len(tokens_BT))
        with _Masks() if self.widened else contextlib.nullcontext():
            result = module(**given)
        self.log.note(module, given, result)
        return result

    @property
    def caches_alone(self) -> bool:
        """True if it cannot be called without positions and caches of its own."""
        return self.state_name == "input_pos" == self.position_name

    def read(self, result: Any) -> Tensor:
        """Return the logits in what its forward returned."""
        return tensor_of(result, self.vocab_size)

    def _laid(self, tensor_BT: Tensor) -> Tensor:
        """Return a tensor of tokens in the module's layout, on its device."""
        return (tensor_BT.t() if self.time_first else tensor_BT).to(self.device)

    def _mask(self, valid_BT: Tensor, name: str) -> Tensor:
        """Return a mask in the module's convention: whole numbers, or booleans."""
        valid_BT = ~valid_BT if self.marks_padding or name in MARKS_PADDING else valid_BT
        return (valid_BT.long() if name.endswith("attention_mask") else valid_BT).to(self.device)

    def _filled(self, tokens_BT: Tensor, valid_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Fill rows on the right up to a length that the module takes."""
        missing = -tokens_BT.shape[1] % self.multiple
        if missing:
            if valid_BT is None and self.kind == "encoder":
                valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
            tokens_BT = torch.nn.functional.pad(tokens_BT, (0, missing), value=self.pad)
            if valid_BT is not None:
                valid_BT = torch.nn.functional.pad(valid_BT, (0, missing), value=False)
        return tokens_BT, valid_BT

    def _filled_too(self, extra: dict[str, Any], tokens_BT: Tensor) -> dict[str, Any]:
        """Fill labels and positions as their tokens are: the last ones count for nothing."""
        B, T = tokens_BT.shape
        missing = -T % self.multiple
        filled = dict(extra)
        for name, value in extra.items() if missing else ():
            if isinstance(value, Tensor) and value.shape == (B, T):
                more = torch.arange(T, T + missing).expand(B, missing)
                if name == self.label_name:
                    more = torch.full_like(more, -100)
                filled[name] = torch.cat((value.cpu(), more.to(value.dtype)), 1)
        return filled

    def logits(self, tokens_BT: Tensor, valid_BT: Tensor | None = None, /, **extra: Any) -> Tensor:
        """Return the logits of a call, on the CPU, without those of the module's own positions."""
        return self.cut(self.read(self.call(tokens_BT, valid_BT, **extra)), tokens_BT)

    def cut(self, logits: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return logits, on the CPU, without those of the module's own positions."""
        if self.time_first and logits.ndim == 3:
            logits = logits.transpose(0, 1)
        longer = logits.ndim == 3 and logits.shape[1] > tokens_BT.shape[1]
        if longer and self.lead:
            logits = logits[:, self.lead :]
        elif longer and self.multiple > 1:
            logits = logits[:, : tokens_BT.shape[1]]
        return logits.cpu()

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
        return None if self.kind == "encoder" else self.state_name

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
        if name in ("input_pos", "inference_params"):
            return self._feed_own(name, tokens_BT, valid_BT, past)
        if self.multiple > 1:
            raise NotOffered(f"it takes multiples of {self.multiple} tokens alone")
        if name == "incremental_state":
            return self._feed_incremental(tokens_BT, valid_BT, past)
        begun = past is not None
        if past is None and not self.offers("use_cache"):
            past = self._empty_cache(name)
        extra: dict[str, Any] = {name: past}
        if self.offers("use_cache") or self.any_argument:
            extra["use_cache"] = True
        if valid_BT is not None and self.offers("position_ids"):
            extra["position_ids"] = self.positions(valid_BT)[:, -tokens_BT.shape[1] :]
        elif self.position_name is not None and begun:
            raise NotOffered("positions behind its cache must be given, and none of its length is")
        result = self.call(tokens_BT, valid_BT, **extra)
        past = _state_in(result, name, past, self.vocab_size)
        if past is None:
            raise NotOffered(f"its result holds no {name}")
        logits = self.read(result)
        if self.lead and begun and logits.shape[1] > tokens_BT.shape[1]:
            raise NotOffered(f"each call of its forward begins with {self.lead} positions anew")
        return self.cut(logits, tokens_BT), past

    def _feed_own(
        self, name: str, tokens_BT: Tensor, valid_BT: Tensor | None, past: Any
    ) -> tuple[Tensor, Any]:
        """Read tokens where the module, or an object of the caller's, holds what went before."""
        if valid_BT is not None:
            raise NotOffered("its cache goes without a mask")
        B, T = tokens_BT.shape
        if name == "inference_params":
            past = past or SimpleNamespace(
                max_seqlen=ROOM,
                max_batch_size=B,
                seqlen_offset=0,
                batch_size_offset=0,
                key_value_memory_dict={},
                lengths_per_sample=None,
            )
            result = self.call(tokens_BT, inference_params=past)
            past.seqlen_offset += T
            return self.cut(self.read(result), tokens_BT), past
        if past is None:  # a module of its own, so that other calls have no cache
            past = (self.twin(with_caches(copied(self.module), B)), 0)
        twin, begun = past
        at = torch.arange(begun, begun + T)
        if self.rows_of_positions:
            at = at.expand(B, T)
        twin = replace(twin, position_name=None)
        result = twin.call(tokens_BT, input_pos=at)
        return twin.cut(twin.read(result), tokens_BT), (twin, begun + T)

    def _empty_cache(self, name: str) -> Any:
        """Return an object of the cache's own class, where the forward names one; else None."""
        forward = inspect.unwrap(inner(self.module).forward)
        with contextlib.suppress(Exception):  # annotations may name what cannot be found
            said = get_type_hints(forward).get(name)
            for kind in (said, *get_args(said)):
                known = isinstance(kind, type) and kind.__module__ not in PLAIN
                if known and not issubclass(kind, (Tensor, nn.Module)):
                    return kind()
        return None

    def _feed_incremental(
        self, tokens_BT: Tensor, valid_BT: Tensor | None, past: Any
    ) -> tuple[Tensor, Any]:
        """Read tokens where the forward wants all of them beside a mapping that it fills."""
        if valid_BT is not None:
            raise NotOffered("its cache goes without a mask")
        before_BT, state = (tokens_BT[:, :0], {}) if past is None else past
        whole_BT = torch.cat((before_BT, tokens_BT), 1)
        result = self.call(whole_BT, incremental_state=state)
        logits, T = self.cut(self.read(result), tokens_BT), tokens_BT.shape[1]
        if logits.shape[1] != T:
            raise NotOffered("with a state it returns the last position alone")
        return logits, (whole_BT, state)

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
        return self.read(result).cpu(), (whole_BT, result[1])

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

    def doubled(self) -> "Foreign":
        """Return the same way of calling a float64 copy."""
        return replace(self.twin(copied(self.module).double()), widened=True)

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
        try:
            again.load_state_dict(plain.state_dict())
        except RuntimeError as error:
            raise NotOffered("with another config it has other weights") from error
        return self.twin(again.to(device=device_of(plain), dtype=precision_of(plain)))

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
        if len(tensors) < len(state):
            raise NotOffered("its state holds more than tensors")
        if set(again.state_dict()) != set(state) or _hooks(again) != _hooks(plain):
            again = erased(plain)  # parts were added after it was built
        as_precise(again, plain).load_state_dict({**state, **_through_a_file(tensors)})
        return self.twin(again.to(device=device_of(plain)))


def _state_in(result: Any, name: str, past: Any, vocab_size: int) -> Any:
    """Return the cache in a result: of the argument's name, the next one's, or what is no logits.

    A cache that the caller gave and the forward filled need not be returned.
    """
    parts = parts_of(result)
    stem = name.removeprefix("past_").removesuffix("s")
    for key, value in parts.items():
        if value is not None and (key == name or stem in key) and key != "logits":
            return value
    logits = None if isinstance(result, Tensor) else tensor_of(result, vocab_size)
    others = [v for v in parts.values() if v is not None and v is not logits and _may_be_state(v)]
    return others[0] if isinstance(result, (tuple, list)) and others else past


def _may_be_state(value: Any) -> bool:
    return not isinstance(value, (bool, int, float, str)) and not (
        isinstance(value, Tensor) and value.ndim == 0
    )


def first_state(module: nn.Module, rows: int) -> Any:
    """Return the first state of a module whose forward must be given one."""
    plain = inner(module)
    make = next((getattr(plain, n) for n in BEGINNINGS if callable(getattr(plain, n, None))), None)
    if make is None:
        raise NotOffered("it must be given a state, and shows nothing that makes the first")
    return make(rows)


def with_caches(module: nn.Module, rows: int) -> nn.Module:
    """Let a module make caches of its own, for this many rows."""
    make = next((getattr(module, n) for n in SETUPS if callable(getattr(module, n, None))), None)
    if make is None:
        raise NotOffered("it takes input_pos, and shows nothing that makes its caches")
    wanted = number(getattr(module, "config", module), *LENGTHS) or ROOM
    known = {"dtype": precision_of(module), "device": device_of(module)}
    given: dict[str, Any] = {}
    for name, p in inspect.signature(make).parameters.items():
        if "batch" in name:
            given[name] = rows
        elif "len" in name and (p.default is p.empty or "max" in name):
            given[name] = min(wanted, ROOM)
        elif name in known:
            given[name] = known[name]
    make(**given)
    return module


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
    twin = copied(module)
    for tensor in twin.state_dict().values():
        if isinstance(tensor, Tensor):
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
    call: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> Foreign:
    """Read from its signature and config how a module is called.

    `call` are arguments of every call; `names` say what an argument is that no convention tells:
    {"tokens": ..., "mask": ..., "cache": ..., "labels": ...}.
    """
    plain, told = inner(module), dict(names or {})
    parameters = list(inspect.signature(plain.forward).parameters.values())
    arguments = frozenset(p.name for p in parameters)
    for what, name in told.items():
        if name not in arguments or what not in ("tokens", "mask", "cache", "labels"):
            raise InputError(
                f"{type(plain).__name__}.forward has no '{name}' to take for {what}",
                hint="names: tokens, mask, cache or labels, each an argument of the forward",
            )

    def pick(what: str, known: tuple[str, ...]) -> str | None:
        return told.get(what) or next((n for n in known if n in arguments), None)

    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = {p.name for p in parameters if p.default is p.empty}
    config = config_of(module)
    outer = getattr(configured(module), "config", None)
    source, target = next((pair for pair in SOURCES if set(pair) <= arguments), ("", ""))
    both = bool(target) and bool(getattr(outer, "is_encoder_decoder", True))
    both = both and (target != "target" or "target" in needed)  # else these are labels
    token_name = pick("tokens", TOKEN_ARGUMENTS) or _only(parameters)
    vocab = vocab_size or vocabulary_of(module, decoder=both)
    if token_name is None:
        raise InputError(
            f"cannot tell which argument of {type(plain).__name__}.forward takes token ids",
            where=f"forward({', '.join(p.name for p in parameters)})",
            hint="pass names={'tokens': ...}, or logits=lambda tokens, valid: ..., or let the "
            "factory return a Subject",
        )
    mask_name = pick("mask", MASK_ARGUMENTS) or ("mask" if takes_any else None)
    kind: Kind = (
        "decoder"
        if causal or (causal is None and _reads_forward_only(configured(plain)))
        else "encoder"
    )
    if both:
        kind, token_name = "encoder-decoder", target
        mask_name = pick("mask", TARGET_MASKS)
    pad = getattr(config, "pad_token_id", None)
    pad = getattr(outer, "pad_token_id", None) if pad is None else pad
    specials = _specials(config) | _specials(outer)
    if len([i for i in specials if 0 <= i < vocab]) > vocab // 2:
        specials = frozenset()
    pad = _padding_of(plain) if pad is None else pad
    pad = pad if isinstance(pad, int) and 0 <= pad < vocab else 0
    state_name = pick("cache", CACHE_ARGUMENTS)
    positions = next((n for n in (*POSITION_ARGUMENTS, "input_pos") if n in needed), None)
    fixed = dict(call or {})
    found = Foreign(
        module=module,
        kind=kind,
        arguments=arguments,
        any_argument=takes_any,
        token_name=token_name,
        mask_name=None if mask_name in fixed else mask_name,
        vocab_size=vocab,
        pad=pad,
        specials=specials | {pad} if vocab > 2 else frozenset(),
        mask_needed=mask_name in needed,
        fresh=fresh,
        source_name=source or "input_ids",
        source_mask=next((n for n in SOURCE_MASKS if n in arguments), None) if both else None,
        position_name=None if positions in fixed else positions,
        label_name=pick("labels", LABEL_ARGUMENTS),
        state_name=None if state_name in fixed else state_name,
        state_needed=state_name in needed and state_name not in ("input_pos", *fixed),
        fixed=fixed,
    )
    found = _of_its_lengths(_of_its_layout(_of_its_positions(found)))
    if kind == "encoder" and causal is None and _never_looks_ahead(found):
        return replace(found, kind="decoder")
    return found


def _padding_of(module: nn.Module) -> int | None:
    """Return the token whose embedding gets no gradient, if the embeddings agree on one."""
    found = {p.padding_idx for p in module.modules() if isinstance(p, nn.Embedding)} - {None}
    return found.pop() if len(found) == 1 else None


@torch.no_grad()
def _of_its_positions(foreign: Foreign) -> Foreign:
    """Return a module that takes `input_pos` with a row for each row of the batch as such.

    Its docstring says so, or positions of one row for all are refused and these are taken.
    """
    if foreign.state_name != "input_pos":
        return foreign
    said = inspect.unwrap(inner(foreign.module).forward).__doc__ or ""
    each = replace(foreign, rows_of_positions=True)
    if "[b x s]" in said or "[b" in said.partition("input_pos")[2][:200]:
        return each
    tokens = foreign.draw(2, 5, seed=54)
    for one in (foreign, each):
        with contextlib.suppress(Exception):  # the first real call reports it
            replace(one, kind="decoder").feed(tokens)  # its kind is found out later
            return one
    return foreign


#: What a forward says of tokens whose first axis is time.
TIME_FIRST = re.compile(
    r"\b(T|L|S|seq\w*|time\w*|length)\s*,\s*(B|N|bsz|batch\w*)\b", re.IGNORECASE
)


@torch.no_grad()
def _of_its_layout(foreign: Foreign) -> Foreign:
    """Return a module that takes (T, B) as such: where it says so, and computes so."""
    plain = inner(foreign.module)
    try:
        source = inspect.getsource(plain.forward)
    except (OSError, TypeError):
        source = ""
    said = TIME_FIRST.search(f"{plain.forward.__doc__}\n{source}")
    if not said and not foreign.state_needed:
        return foreign
    turned = replace(foreign, time_first=True)
    tokens = foreign.draw(5, 3, seed=54)
    changed = tokens.clone()
    changed[:, 0] = foreign.draw(5, 1, seed=55)[:, 0]
    with contextlib.suppress(Exception):
        if not said:  # a first state made for so many rows shows which axis they are
            foreign.call(tokens)
            return foreign
    with contextlib.suppress(Exception):  # the first real call reports it
        one, other = (turned.read(turned.call(ids)) for ids in (tokens, changed))
        if one.shape[:2] == (3, 5) and not torch.equal(one[1], other[1]):
            return turned
    return foreign


@torch.no_grad()
def _of_its_lengths(foreign: Foreign) -> Foreign:
    """Return a module that takes multiples of a length alone as such; rows are then filled up."""

    def takes(length: int) -> Tensor | None:
        with contextlib.suppress(Exception):  # a stranger's model may raise anything
            return foreign.logits(foreign.draw(2, length, seed=60))
        return None

    if foreign.kind != "decoder" and foreign.mask_name is None:
        return foreign
    first = takes(5)
    if first is not None:
        alone = first.ndim == 2 or first.shape[1] == 1
        if alone and foreign.label_name is not None:
            every = replace(foreign, labels_for_all=True)
            with contextlib.suppress(Exception):
                if every.logits(foreign.draw(2, 5, seed=60)).shape[1] == 5:
                    return every
        with training(foreign.module):  # where some want multiples only for gradients
            trains = takes(11) is not None
            again = [] if trains else [m for m in MULTIPLES if takes(m * (11 // m + 1)) is not None]
        return replace(foreign, multiple=again[0]) if again else foreign
    if any(takes(length) is not None for length in (3, 7, 11, 23)):
        return foreign
    stated = number(config_of(foreign.module), *LENGTHS) or number(inner(foreign.module), *LENGTHS)
    for length in (*MULTIPLES, *((stated,) if stated and stated <= ROOM else ())):
        if takes(length) is not None:
            return replace(foreign, multiple=length)
    return foreign


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


@torch.no_grad()
def _takes(foreign: Foreign, length: int) -> bool:
    """True if a row of this length is computed."""
    with contextlib.suppress(Exception):  # a stranger's model may raise anything
        return foreign.logits(foreign.draw(1, length, seed=60)).numel() > 0
    return False


def longest(foreign: Foreign, *, told: int | None = None) -> int:
    """Return the context length: told, read from the config, or found by trying."""
    config = config_of(foreign.module, decoder=foreign.kind == "encoder-decoder")
    said = told or number(config, *LENGTHS) or number(inner(foreign.module), *LENGTHS)
    said = said or next((n for n in UNSTATED if _takes(foreign, n)), UNSTATED[-1])
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


class _Dtypes(TorchDispatchMode):
    """Note the floating dtypes of everything that is computed from more than one number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and note the dtype of a result that came from numbers of some dtype."""
        result = func(*args, **(kwargs or {}))
        given = any(isinstance(a, Tensor) and a.is_floating_point() for a in args)
        kept = given and isinstance(result, Tensor) and result.is_floating_point()
        if kept and result.numel() > 1:
            self.seen.add(result.dtype)
        return result


@torch.no_grad()
def computed_in(foreign: Foreign, tokens_BT: Tensor) -> torch.dtype | None:
    """Return the dtype in which it computes somewhere, where that is narrower than its weights'.

    Seen operation by operation, so that a cast within a forward counts.
    """
    mode = _Dtypes()
    with mode:
        foreign.logits(tokens_BT)
    narrowest = min(mode.seen, key=lambda d: d.itemsize, default=None)
    held = {p.dtype.itemsize for p in foreign.module.parameters() if p.is_floating_point()}
    known = (torch.float16, torch.bfloat16, torch.float32)
    return narrowest if narrowest in known and held and narrowest.itemsize < min(held) else None


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


class _Masks(TorchFunctionMode):
    """Give masks of fused attention the dtype of its queries.

    torch 2.13's kernel for the CPU takes a float32 mask beside float64 queries, and reads it as if
    it were float64: from some length on (16 was seen) its results are wrong.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, with such a mask widened."""
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if isinstance(mask, Tensor) and mask.is_floating_point():
                query = args[0] if args else kwargs["query"]
                args, rest = args[:3], args[4:]
                kwargs |= {"attn_mask": mask.to(query.dtype)}
                kwargs |= dict(zip(("dropout_p", "is_causal"), rest, strict=False))
        return func(*args, **kwargs)


class _Counting(TorchFunctionMode):
    """Let a forward of one row, padded on the left, count its real tokens alone.

    Whatever it makes by `arange` over the row, or cuts to the row's length out of a table of its
    own, is read at the count of real tokens: positions, and the masks that are made of them.
    """

    def __init__(self, module: nn.Module, length: int, padding: int) -> None:
        super().__init__()
        self.length = length
        self.at = (torch.arange(length) - padding).clamp(min=0)
        self.own = {t.data_ptr() for t in chain(module.parameters(), module.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and read positions at the count of real tokens."""
        result = func(*args, **(kwargs or {}))
        if func is torch.arange and result.numel() == self.length and not float(result[0]):
            return self.at.to(result)
        cut = func is Tensor.__getitem__ and args[0].data_ptr() in self.own
        for axis in range(result.ndim if cut else 0):
            if result.shape[axis] == self.length:
                result = result.index_select(axis, self.at.to(result.device))
        return result


@torch.no_grad()
def counted_alone(foreign: Foreign, tokens_1T: Tensor, valid_1T: Tensor) -> Tensor:
    """Return logits of one row, padded on the left, whose forward counts real tokens alone."""
    padding = int((~valid_1T).sum())
    with _Counting(foreign.module, tokens_1T.shape[1], padding):
        return foreign.logits(tokens_1T, valid_1T)
