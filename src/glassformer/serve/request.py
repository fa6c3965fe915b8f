"""A request's JSON as checked values: OpenAI's fields, their types and their limits.

A field that is not known, or that this server cannot honour, is refused by name and never ignored.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from glassformer.generation.batching import Shift
from glassformer.serve.fields import QUOTED, Fields
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.model import Readout
from glassformer.spec.options import options_of

MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_BIASES = 16, 4, 200, 1_024
MOST_TOP, MOST_PROMPTS, MOST_MESSAGES, MOST_TOOLS = 20, 64, 2_000, 128
#: Texts of one request for embeddings, as OpenAI allows.
MOST_INPUTS = 2_048
#: Sampling options of `DecodeSpec` that OpenAI's interface does not have; Hugging Face's has them.
OPENAIS = ("temperature", "top_p")
OURS = tuple(each for each in options_of(DecodeSpec) if each.hf and each.name not in OPENAIS)
#: Fields of an answer's message that say nothing here.
OF_ANSWERS = ("refusal", "annotations", "audio", "function_call")
ROLES = ("system", "developer", "user", "assistant", "tool")


# --- what both endpoints share --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generation:
    """How a request wants its text made; `settings` go to `DecodeSpec` by name."""

    model: str
    choices: int
    stream: bool
    include_usage: bool
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    settings: Mapping[str, float | int]
    shift: Shift
    owner: str


SHARED = (
    "model",
    "n",
    "stream",
    "stream_options",
    "seed",
    "max_tokens",
    "stop",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "user",
    *(each.name for each in OURS),
)
#: Other names and hints of newer clients that change no answer.
HINTS = ("safety_identifier", "prompt_cache_key")


def _generation(fields: Fields, *, limit: int | None) -> Generation:
    stream = fields.flag("stream")
    include_usage = False
    options = fields.object_("stream_options")
    if options is not None:
        if not stream:
            raise fields.unsupported("stream_options", "it goes with stream=true")
        options.only(("include_usage", "include_obfuscation"))
        include_usage = options.flag("include_usage")
        if options.flag("include_obfuscation"):
            raise options.unsupported("include_obfuscation", "not offered")
    seed = fields.integer("seed", None, low=-(2**63), high=2**63 - 1)
    settings: dict[str, float | int] = {}
    if fields.has("temperature"):
        settings["temperature"] = fields.number("temperature", 1.0, low=0, high=2)
    if fields.has("top_p"):
        top_p = fields.number("top_p", 1.0, low=0, high=1)
        # The nucleus of no probability is the likeliest token.
        settings |= {"top_p": top_p} if top_p > 0 else {"temperature": 0.0}
    for option in (each for each in OURS if fields.has(each.name)):
        if option.type is int:
            found = fields.integer(option.name, None, low=int(option.at_least or 0), high=2**31)
            assert found is not None
            settings[option.name] = found
        else:
            settings[option.name] = fields.number(option.name, 0.0, low=0, high=100)
    return Generation(
        model=fields.text("model"),
        choices=fields.integer("n", 1, low=1, high=MOST_CHOICES) or 1,
        stream=stream,
        include_usage=include_usage,
        seed=secrets.randbits(48) if seed is None else seed % 2**63,
        max_tokens=limit,
        stop=_stops(fields),
        settings=settings,
        shift=Shift(
            bias=_bias(fields),
            presence=fields.number("presence_penalty", 0.0, low=-2, high=2),
            frequency=fields.number("frequency_penalty", 0.0, low=-2, high=2),
        ),
        owner=fields.text("user", fields.text("safety_identifier", ""))[:QUOTED],
    )


def _bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Return what is added to logits, by token id; JSON's keys are texts."""
    found = fields.object_("logit_bias")
    if found is None:
        return ()
    if len(found.values) > MOST_BIASES:
        raise fields.wrong("logit_bias", f"at most {MOST_BIASES} tokens")
    made = {}
    for key in found.values:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise fields.wrong("logit_bias", "an object whose names are token ids")
        if found.has(key):
            made[int(key)] = found.number(key, 0.0, low=-100, high=100)
    return tuple(made.items())


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    parts = [value] if isinstance(value, str) else fields.list_("stop", most=MOST_STOPS)
    for part in parts:
        if not isinstance(part, str) or not 0 < len(part) <= LONGEST_STOP:
            raise fields.wrong("stop", f"strings of 1 to {LONGEST_STOP} characters")
        Fields({"stop": part}).text("stop")
    return tuple(parts)


# --- /v1/chat/completions -------------------------------------------------------------------------

CHAT = (
    *SHARED,
    *HINTS,
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "modalities",
    "chat_template_kwargs",
    "store",
    "metadata",
    "service_tier",
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked conversation."""

    generation: Generation
    messages: tuple[dict[str, Any], ...]
    logprobs: bool
    top_logprobs: int
    response_format: "ResponseFormat"
    tools: tuple[dict[str, Any], ...]
    #: Names of the tools of which one must be called; () where the model decides.
    must_call: tuple[str, ...]
    #: False: at most one call.
    parallel: bool
    template_options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the answer must be: any text, a regular expression's, JSON, or a schema's."""

    kind: Literal["text", "regex", "json_object", "json_schema"] = "text"
    pattern: str = ""
    schema: Any = field(default_factory=dict)


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Check the body of a chat request."""
    fields = Fields(body).only(CHAT)
    if fields.flag("store"):
        raise fields.unsupported("store", "nothing is stored here")
    if fields.text("service_tier", "auto") not in ("auto", "default"):
        raise fields.unsupported("service_tier", "there is one tier")
    fields.object_("metadata")
    for key in HINTS:
        fields.text(key, "")
    if fields.has("modalities") and fields.list_("modalities", most=4) != ["text"]:
        raise fields.unsupported("modalities", 'the models here write text: ["text"]')
    older = fields.integer("max_tokens", None, low=1, high=2**31)
    newer = fields.integer("max_completion_tokens", None, low=1, high=2**31)
    if older is not None and newer is not None and older != newer:
        raise fields.wrong("max_tokens", "the same number as max_completion_tokens")
    logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, low=0, high=MOST_TOP) or 0
    if top and not logprobs:
        raise fields.unsupported("top_logprobs", "it goes with logprobs=true")
    tools = tuple(_tool(one, place) for place, one in enumerate(_tools(fields)))
    options = fields.object_("chat_template_kwargs")
    use_tools, must_call = _tool_choice(fields, tools)
    form = _format(fields)
    if must_call and form.kind != "text":
        raise fields.unsupported("response_format", "a call that must be made is no such text")
    return ChatRequest(
        generation=_generation(fields, limit=older if newer is None else newer),
        messages=_messages(fields),
        logprobs=logprobs,
        top_logprobs=top,
        response_format=form,
        tools=tools if use_tools else (),
        must_call=must_call,
        parallel=fields.flag("parallel_tool_calls", default=True),
        template_options=_switches(fields, options),
    )


def _switches(fields: Fields, options: Fields | None) -> Mapping[str, Any]:
    """Return variables of the template: plain values, and none of those that a request has."""
    if options is None:
        return {}
    for key, value in options.values.items():
        taken = ("messages", "tools", "documents", "add_generation_prompt")
        if key in taken or not key.isidentifier() or len(key) > QUOTED:
            raise options.unsupported(key[:QUOTED], "no variable of that name can be set")
        if not isinstance(value, str | int | float | bool | None):
            raise options.wrong(key, "a string, a number or a boolean")
    return options.values


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    given = fields.list_("messages", most=MOST_MESSAGES)
    if not given:
        raise fields.wrong("messages", "an array of at least one message")
    made = []
    for place, one in enumerate(given):
        if not isinstance(one, dict):
            raise fields.wrong("messages", "an array of objects")
        made.append(_message(Fields(one, f"messages[{place}]")))
    return tuple(made)


def _message(message: Fields) -> dict[str, Any]:
    known = ("role", "content", "name", "tool_calls", "tool_call_id")
    message.only((*known, *OF_ANSWERS))
    for key in OF_ANSWERS:  # an answer that is sent back has them, empty
        if message.values.get(key):
            raise message.unsupported(key, "the models here read text")
    role = message.text("role")
    if role not in ROLES:
        raise message.wrong("role", f"one of {', '.join(ROLES)}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.list_("tool_calls", most=MOST_TOOLS)
    if message.has("content") or not (role == "assistant" and calls):
        made["content"] = _content(message)
    else:
        made["content"] = ""
    if message.has("name"):
        made["name"] = message.text("name")
    if role == "tool":
        made["tool_call_id"] = message.text("tool_call_id")
    if calls:
        if role != "assistant":
            raise message.unsupported("tool_calls", "only an assistant calls tools")
        made["tool_calls"] = [_call(message, place, one) for place, one in enumerate(calls)]
    return made


def _content(message: Fields) -> str:
    """Return the text of a message: a string, or parts of text; images and sounds are refused."""
    value = message.values.get("content")
    if not isinstance(value, list):
        return message.text("content")
    texts = []
    for place, part in enumerate(message.list_("content", most=MOST_MESSAGES)):
        fields = Fields(part if isinstance(part, dict) else {}, f"{message.path}.content[{place}]")
        kind = fields.text("type")
        if kind != "text":
            raise fields.unsupported("type", f"{kind[:QUOTED]!r}; the models here read text")
        fields.only(("type", "text"))
        texts.append(fields.text("text"))
    return "".join(texts)


def _call(message: Fields, place: int, one: Any) -> dict[str, Any]:
    """Return an earlier tool call as templates read it, with its arguments as an object."""
    path = f"{message.path}.tool_calls[{place}]"
    fields = Fields(one if isinstance(one, dict) else {}, path)
    fields.only(("id", "type", "function", "index"))
    function = fields.object_("function")
    if function is None:
        raise fields.wrong("function", "an object")
    function.only(("name", "arguments"))
    text = function.text("arguments")
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        raise function.wrong("arguments", "JSON") from None
    called = {"name": function.text("name"), "arguments": arguments}
    return {"id": fields.text("id", ""), "type": "function", "function": called}


def _tools(fields: Fields) -> list[Any]:
    for key in ("functions", "function_call"):
        if fields.has(key):
            raise fields.unsupported(key, "use tools")
    return fields.list_("tools", most=MOST_TOOLS)


def _tool(one: Any, place: int) -> dict[str, Any]:
    fields = Fields(one if isinstance(one, dict) else {}, f"tools[{place}]")
    if fields.text("type") != "function":
        raise fields.wrong("type", '"function"')
    function = fields.object_("function")
    if function is None:
        raise fields.wrong("function", "an object")
    fields.only(("type", "function"))
    name = function.only(("name", "description", "parameters", "strict")).text("name")
    if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
        raise function.wrong("name", "1 to 64 letters, digits, _ - .")
    return {"type": "function", "function": dict(function.values)}


def _tool_choice(
    fields: Fields, tools: Sequence[Mapping[str, Any]]
) -> tuple[bool, tuple[str, ...]]:
    """Return whether the model sees the tools, and the names of which it must call one."""
    value = fields.values.get("tool_choice")
    names = tuple(tool["function"]["name"] for tool in tools)
    if value is not None and value != "none" and not tools:
        raise fields.unsupported("tool_choice", "it goes with tools")
    match value:
        case None | "auto":
            return True, ()
        case "none":
            return False, ()
        case "required":
            return True, names
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return True, (name,)
        case _:
            raise fields.wrong("tool_choice", "none, auto, required or one of the tools")


def _format(fields: Fields) -> ResponseFormat:
    found = fields.object_("response_format")
    if found is None:
        return ResponseFormat()
    kind = found.text("type")
    match kind:
        case "text":
            found.only(("type",))
            return ResponseFormat()
        case "json_object":
            found.only(("type",))
            return ResponseFormat("json_object")
        case "regex":
            found.only(("type", "pattern"))
            return ResponseFormat("regex", pattern=found.text("pattern"))
        case "json_schema":
            found.only(("type", "json_schema"))
            inner = found.object_("json_schema")
            if inner is None:
                raise found.wrong("json_schema", "an object")
            inner.only(("name", "description", "schema", "strict"))
            schema = inner.values.get("schema")
            if not isinstance(schema, dict | bool):
                raise inner.wrong("schema", "a JSON schema")
            return ResponseFormat("json_schema", schema=schema)
        case _:
            raise found.wrong("type", "text, json_object, json_schema or regex")


# --- /v1/completions ------------------------------------------------------------------------------

COMPLETION = (*SHARED, "prompt", "echo", "logprobs", "best_of", "suffix", "response_format")


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked completion; a prompt is a text or token ids.

    With `echo` the prompt comes first, and with `logprobs` too its tokens have theirs.
    """

    generation: Generation
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    logprobs: int | None
    response_format: ResponseFormat

    @property
    def scores_prompt(self) -> bool:
        """True if the log-probabilities of the prompt's tokens are wanted."""
        return self.echo and self.logprobs is not None


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Check the body of a completion request."""
    fields = Fields(body).only(COMPLETION)
    choices = fields.integer("n", 1, low=1, high=MOST_CHOICES)
    if fields.integer("best_of", choices, low=1, high=MOST_CHOICES) != choices:
        raise fields.unsupported("best_of", "the same as n")
    if fields.text("suffix", ""):
        raise fields.unsupported("suffix", "a text is continued, not filled in")
    logprobs = fields.integer("logprobs", None, low=0, high=MOST_TOP)
    echo = fields.flag("echo")
    least = 0 if echo else 1  # a prompt alone is echoed for its log-probabilities
    limit = fields.integer("max_tokens", 16, low=least, high=2**31)  # OpenAI's default
    return CompletionRequest(
        generation=_generation(fields, limit=limit),
        prompts=text_or_ids(fields, "prompt"),
        echo=echo,
        logprobs=logprobs,
        response_format=_format(fields),
    )


def text_or_ids(
    fields: Fields, key: str, *, most: int = MOST_PROMPTS
) -> tuple[str | tuple[int, ...], ...]:
    """Return texts or rows of token ids: one, or a list of them."""
    value = fields.values.get(key)
    wanted = "a string, an array of strings, of token ids, or of arrays of them"
    if isinstance(value, str):
        return (fields.text(key),)
    if not isinstance(value, list) or not value:
        raise fields.wrong(key, wanted)
    if all(type(one) is int for one in value):
        return (tuple(value),)
    if len(value) > most:
        raise fields.wrong(key, f"at most {most}")
    made: list[str | tuple[int, ...]] = []
    for one in value:
        if isinstance(one, str):
            made.append(Fields({key: one}).text(key))
        elif isinstance(one, list) and one and all(type(token) is int for token in one):
            made.append(tuple(one))
        else:
            raise fields.wrong(key, wanted)
    return tuple(made)


# --- /v1/embeddings -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Checked texts; `pooling` is ours: where vectors are read, None as the folder says."""

    model: str
    texts: tuple[str, ...]
    base64: bool
    dimensions: int | None
    pooling: Readout | None


def embedding_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Check the body of a request for embeddings."""
    fields = Fields(body).only(
        ("model", "input", "encoding_format", "dimensions", "user", "pooling")
    )
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise fields.wrong("encoding_format", "float or base64")
    pooling = fields.values.get("pooling")
    if pooling is not None and pooling not in get_args(Readout):
        raise fields.wrong("pooling", " or ".join(get_args(Readout)))
    given = text_or_ids(fields, "input", most=MOST_INPUTS)
    texts = tuple(one for one in given if isinstance(one, str))
    if len(texts) < len(given):
        # Clients that send ids have cut the text by OpenAI's tokenizer, whatever the model's is.
        raise fields.unsupported(
            "input", "token ids; give texts (LangChain: check_embedding_ctx_length=False)"
        )
    return EmbeddingRequest(
        model=fields.text("model"),
        texts=texts,
        base64=form == "base64",
        dimensions=fields.integer("dimensions", None, low=1, high=2**31),
        pooling=pooling,
    )
