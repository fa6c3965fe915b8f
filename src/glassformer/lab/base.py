"""`Base`: a model to fine-tune, with all that decides how text becomes its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from glassformer.adapters.chat import read_chat, read_templates
from glassformer.adapters.load import load
from glassformer.adapters.native import NativeAdapter
from glassformer.data.examples import Examples
from glassformer.data.records import Message, read_records
from glassformer.lab.conversations import Render, Speech, examples_of
from glassformer.models.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.spec.tasks import FinetuneTask

#: What a template takes for the present: a date in a prompt must not change from run to run.
PRESENT = datetime(2025, 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The model, how it speaks, and its files that every checkpoint carries on."""

    model: Model
    speech: Speech
    files: Mapping[str, bytes]

    def task(self, spec: FinetuneTask) -> Examples:
        """The data of a file, in this model's tokens."""
        records = read_records(spec.path, seed=spec.seed)
        examples = examples_of(records, self.speech, answers_only=spec.answers_only)
        return Examples(spec, examples, tokenizer=self.speech.tokenizer)


def open_base(path: str) -> Base:
    """A run, a checkpoint or a Hugging Face folder, ready to be tuned."""
    adapter = load(path)
    if not isinstance(adapter, NativeAdapter):
        raise InputError(f"{path} is not computed by our own parts, so it cannot be tuned here")
    if adapter.spec.encoder is not None or "next" not in adapter.spec.head_names():
        raise InputError(
            f"{path} does not continue a text: fine-tuning needs a decoder with a next-token head"
        )
    if not set(stored(adapter.spec)) <= {name for name, _ in adapter.model.named_parameters()}:
        raise InputError(
            f"the weights of {path} are quantized, so they cannot be trained",
            hint="fine-tune the model that it was made of, and quantize afterwards",
        )
    speech = Speech(tokenizer=adapter.tokenizer, ends=adapter.end_ids(), render=_render(adapter))
    return Base(model=adapter.model, speech=speech, files=adapter.files())


def _render(adapter: NativeAdapter) -> Render | None:
    """The chat template of the folder that the base came from, if it has one."""
    if adapter.origin is None or not read_templates(adapter.origin):
        return None
    chat = read_chat(adapter.origin)

    def render(messages: Sequence[Message], *, begin: bool) -> str:
        return chat.render(messages, add_generation_prompt=begin, now=PRESENT)

    return render
