"""`Family`: one Hugging Face `model_type`, its config to a spec and back, and its key table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from glassformer.adapters.config import Config
from glassformer.adapters.table import Table
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import MLP, FeedForward, ModelSpec, MoE, SwiGLU


@dataclass(frozen=True, slots=True)
class Family:
    """How to read and write the folders of one `model_type`.

    `read` reads every key that it understands; the rest must be `harmless` or have their `idle`
    value. `write` returns the keys from which `read` makes the same spec; a family without it is
    read only. `remote_code`: its folders always refer to code of their own, which is not needed.
    """

    model_type: str
    architecture: str
    table: Table
    read: Callable[[Config], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]] | None = None
    harmless: tuple[str, ...] = ()
    idle: Mapping[str, Any] = field(default_factory=dict)
    remote_code: bool = False

    def spec_of(self, config: Config) -> ModelSpec:
        """Return the spec that a config describes; an unknown key is refused by name."""
        named = config.data.get("architectures") or [self.architecture]
        if not isinstance(named, list) or self.architecture not in named:
            raise FileError(
                f"config.json names the architecture {str(named)[:80]}",
                where=config.where,
                hint=f"of model_type '{self.model_type}' this reads {self.architecture}",
            )
        try:
            spec = self.read(config)
        except InputError as error:
            raise FileError(
                f"{config.file}: {error.what}", where=config.where, hint=error.hint
            ) from error
        harmless = (*self.harmless, "auto_map") if self.remote_code else self.harmless
        config.finish(harmless=harmless, idle=self.idle)
        return spec

    def config_of(self, spec: ModelSpec, *, dtype: str = "float32") -> dict[str, Any]:
        """Return the complete config.json of a spec, readable by transformers 4.x and 5.x."""
        assert self.write is not None, "a family that is read only"
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.write(spec),
            "dtype": dtype,
            "torch_dtype": dtype,
        }


def dense(ffn: FeedForward) -> MLP | SwiGLU:
    """A feed-forward that every token passes through; a family without experts refuses others."""
    match ffn:
        case MLP() | SwiGLU():
            return ffn
        case MoE():
            raise InputError(
                "feed-forward: MoE here, one for every token there",
                hint="no family that is written has experts",
            )
        case _ as unreachable:
            assert_never(unreachable)
