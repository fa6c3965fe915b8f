"""`WrappedAdapter`: a module of transformers behind the contract of our models, computed by itself.

`load(folder, backend="transformers")` opens any causal language model that the installed
transformers has a class for, read by our adapters or not: text in and out, decoding, sentence
vectors, suites and verify work on it. There is no cache of ours, so each new token reads the
sequence once more. Rows of several lengths are computed without padding, a length at a time: what a
module does at padding (positions, states of recurrent layers) is its own matter.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.adapters.base import BaseAdapter, valid_of
from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config
from glassformer.adapters.folder.files import read_sidecar
from glassformer.adapters.folder.origin import read_origin
from glassformer.adapters.folder.scaled import folder_weights
from glassformer.adapters.folder.weights import folder_files
from glassformer.adapters.registry import adapter_for
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.inputs import Inputs
from glassformer.models.weights import tensor_view
from glassformer.spec.checks import one_of
from glassformer.spec.disk import check_new
from glassformer.spec.errors import FileError, GlassError, InputError, MachineError
from glassformer.spec.model import MLP, Attention, Block, Layers, ModelSpec, RMSNorm, Stack
from glassformer.store.tensors import read_header

# B batch, T length, D d_model, V vocab

#: The names of a config's context length, and of its number of layers.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_blocks")
#: The context of a model whose config names none, as recurrent ones.
UNNAMED_LENGTH = 32_768


class WrappedAdapter(BaseAdapter):
    """A transformers module that computes.

    `spec` describes the same model in our parts where an adapter of ours reads its config;
    otherwise (`outline`) its sizes alone are the model's: vocabulary, width, layers, context.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        spec: ModelSpec,
        architecture_type: str,
        outline: bool = False,
        origin: Path | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(model.eval(), spec=spec, origin=origin, tokenizer=tokenizer)
        self.wrapped_type = architecture_type
        self.outline = outline

    def __repr__(self) -> str:
        if not self.outline:
            return super().__repr__()
        spec = self.spec
        return (
            f"<{type(self).__name__}: {type(self.model).__name__} computed by transformers, "
            f"{self.get_num_parameters():,} parameters, {spec.n_layers} layers, "
            f"d_model {spec.d_model}, vocabulary {spec.vocab_size:,}, {self._held_as()}>"
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        head: str | None = None,
    ) -> Tensor:
        """Return the module's own logits, 0 at padding; its only head is `next`."""
        one_of("head", head or "next", ("next",))
        valid = valid_of(input_ids, attention_mask, valid)
        logits_BTV = self._by_length(partial(_logits, self.model), input_ids, valid)
        return logits_BTV[..., : self.spec.vocab_size]

    def hidden_states(self, inputs: Inputs) -> Tensor:
        """Return the states of the module's body, after its last norm."""
        return self._by_length(partial(_states, self.model), inputs.tokens_BT, inputs.valid_BT)

    def _by_length(
        self, compute: Callable[[Tensor], Tensor], ids_BT: Tensor, valid_BT: Tensor | None
    ) -> Tensor:
        """Compute rows of equal lengths together, without their padding; put zeros at padding."""
        ids_BT = ids_BT.to(self.device)
        if valid_BT is None or bool(valid_BT.all()):
            return compute(ids_BT)
        valid_BT = valid_BT.to(self.device)
        counts = valid_BT.sum(1)
        whole: Tensor | None = None
        for count in counts.unique().tolist():
            rows = (counts == count).nonzero().flatten()
            if count == 0:
                continue
            read = valid_BT[rows]
            part = compute(ids_BT[rows][read].reshape(len(rows), count))
            if whole is None:
                whole = part.new_zeros(*ids_BT.shape, part.shape[-1])
            where = torch.zeros_like(valid_BT)
            where[rows] = read
            whole[where] = part.reshape(-1, part.shape[-1])
        if whole is None:
            raise InputError("every token is padding", hint="1 = real token")
        return whole

    def get_architecture_type(self) -> str:
        """Return the type of the adapter that would read it natively, or else its model_type."""
        return self.wrapped_type

    def get_config(self) -> dict[str, Any]:
        """Return the module's config as plain data."""
        return Config.of_module(self.model).data

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a Hugging Face folder with transformers; the tokenizer's files are copied."""
        folder = Path(path)
        check_new(folder)
        module: Any = self.model
        module.save_pretrained(folder)
        for name, data in ({} if self.origin is None else read_origin(self.origin)).items():
            if not (folder / name).exists():
                (folder / name).parent.mkdir(exist_ok=True)
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
                parameter.copy_(tensor_view(weights.read(name, again=True)))
        self.origin = folder


def _logits(module: nn.Module, ids_BT: Tensor) -> Tensor:
    logits: Tensor = module(input_ids=ids_BT, **_without_cache(module)).logits
    return logits


def _states(module: nn.Module, ids_BT: Tensor) -> Tensor:
    """Return the states after the last norm: what the body of a module returns."""
    body: nn.Module = getattr(module, "base_model", module)
    if body is not module:
        found = body(input_ids=ids_BT, **_without_cache(body))
        states: Tensor | None = getattr(found, "last_hidden_state", None)
        if states is not None:
            return states
    found = module(input_ids=ids_BT, output_hidden_states=True, **_without_cache(module))
    last: Tensor = found.hidden_states[-1]
    return last


def _without_cache(module: nn.Module) -> dict[str, bool]:
    taken = inspect.signature(module.forward).parameters
    return {"use_cache": False} if "use_cache" in taken else {}


def open_wrapped(folder: Path, *, dtype: torch.dtype | None, device: str) -> WrappedAdapter:
    """Open a Hugging Face folder with transformers."""
    config = Config.of_folder(folder)
    kind, spec = _read_by_us(config)
    for file in folder_files(folder).values():  # our limits, before another library opens them
        read_header(file)
    _check_sizes(config)
    if spec is not None and ("next" not in spec.head_names() or spec.encoder is not None):
        raise InputError(
            f"a model of model_type '{kind}' continues no text by itself, and transformers "
            "computes causal language models here",
            where=str(folder),
            hint='{leave out --backend|backend="native"}: our adapters read it',
        )
    module = open_with_transformers(folder, dtype=dtype).to(device)
    if (outline := spec is None) or spec is None:
        with _quietly():  # a first call is when some models say which kernels they lack
            spec = outline_of(module, folder)
    return WrappedAdapter(module, spec=spec, architecture_type=kind, outline=outline, origin=folder)


def _read_by_us(config: Config) -> tuple[str, ModelSpec | None]:
    """Return the architecture and spec of a config that an adapter reads; else its model_type."""
    try:
        adapter, family = adapter_for(config)
        return adapter.architecture_type, family.spec_of(config)
    except GlassError:
        return str(config.data.get("model_type", ""))[:60], None


def wrapped(module: nn.Module) -> WrappedAdapter:
    """Return a live module of transformers behind our contract, computed by itself."""
    kind, spec = _read_by_us(Config.of_module(module))
    return WrappedAdapter(
        module,
        spec=outline_of(module, None) if spec is None else spec,
        architecture_type=kind,
        outline=spec is None,
    )


def _check_sizes(config: Config) -> None:
    """Refuse numbers that would make transformers build something huge before it reads weights."""
    nested = [value for value in config.data.values() if isinstance(value, dict)]
    for data in (config.data, *nested):
        for names, most in ((LAYERS, MOST_LAYERS), (LENGTHS, MOST_POSITIONS)):
            for name in names:
                value = data.get(name)
                if isinstance(value, (int, float)) and not 0 <= value <= most:
                    raise config.bad(name, value, f"a number up to {most:,}")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers' progress bars and notes out of a command's output."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def opener_of(folder: Path) -> str:
    """Return the class with which transformers opens a folder's architecture."""
    named = Config.of_folder(folder).data.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return next((opener for end, opener in OPENERS.items() if name.endswith(end)), CAUSAL)


#: How a folder is opened that says nothing else.
CAUSAL = "AutoModelForCausalLM"
#: How an architecture is opened, by how its name ends.
OPENERS = {
    "HeadModel": CAUSAL,
    "HeadsModel": CAUSAL,
    "ForMaskedLM": "AutoModelForMaskedLM",
    "Model": "AutoModel",
}


def open_with_transformers(
    folder: Path, *, dtype: torch.dtype | None = None, opener: str = CAUSAL
) -> Any:
    """Open a folder with transformers, without network, pickle or the folder's own code.

    `opener` is one of its classes that open by a config. A weight that the files lack would be
    random numbers: such a folder is refused.
    """
    try:
        import transformers
    except ImportError as error:
        raise MachineError(
            "transformers is not installed", hint="pip install transformers"
        ) from error
    loader: Any = getattr(transformers, opener)
    try:
        with _quietly():
            module, report = loader.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=dtype or "auto",
                output_loading_info=True,
            )
    except ImportError as error:
        raise MachineError(
            f"transformers needs another library for this model: {_short(error)}",
            where=str(folder),
        ) from error
    except Exception as error:  # a folder may be anything, and so may what is raised
        raise FileError(
            f"transformers {transformers.__version__} does not open this with {opener}: "
            f"{_short(error)}",
            where=str(folder),
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        if report.get(what):
            name = sorted(map(str, report[what]))[0]
            raise FileError(
                f"the files have no weight {name[:80]} that {type(module).__name__} could read",
                where=str(folder),
                hint=f"{len(report[what])} in all; transformers would fill them with random ones",
            )
    return module.eval()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


@torch.no_grad()
def outline_of(module: nn.Module, folder: Path | None) -> ModelSpec:
    """Return the sizes of a module that no adapter reads, as a spec; its parts are not meant."""
    whole: Any = getattr(module, "config", None)
    if getattr(whole, "is_encoder_decoder", False):
        raise InputError(
            f"{type(module).__name__} is an encoder-decoder, and transformers computes causal "
            "language models here",
            where=str(folder or ""),
        )
    pick = getattr(whole, "get_text_config", None)
    config = pick() if callable(pick) else whole
    try:
        table: Any = module.get_input_embeddings().weight  # type: ignore[operator]
        ids = torch.tensor([[3, 4], [3, 5]], device=table.device).clamp(max=len(table) - 1)
        logits_BTV = _logits(module, ids)
        width = _states(module, ids).shape[-1]
    except Exception as error:
        raise FileError(
            f"{type(module).__name__} does not continue token ids: {_short(error)}",
            where=str(folder or ""),
            hint="a causal language model is meant",
        ) from error
    first_BV = logits_BTV[:, 0].float()
    gap, rounding = float((first_BV[0] - first_BV[1]).abs().max()), torch.finfo(logits_BTV.dtype)
    if gap > 32 * rounding.eps * float(first_BV.abs().max()):
        raise InputError(
            f"{type(module).__name__} attends to later tokens, so it continues no text",
            where=str(folder or ""),
            hint="a causal language model is meant",
        )
    length = _number(config, LENGTHS)
    if length is None and folder is not None:
        named = read_sidecar(folder, "tokenizer_config.json").get("model_max_length")
        length = named if type(named) is int and 0 < named <= MOST_POSITIONS else None
    block = Block(mixer=Attention(n_heads=1), ffn=MLP(d_ff=width), norm=RMSNorm())
    return ModelSpec(
        vocab_size=min(logits_BTV.shape[-1], len(table)),
        d_model=width,
        max_seq_len=length or UNNAMED_LENGTH,
        decoder=Stack(layers=(Layers(count=_number(config, LAYERS) or 1, block=block),)),
    )
