"""What strangers' clients send: every field works or is refused by name; encoders give vectors."""

import json
from collections import Counter

import numpy as np
import openai
import pytest
import torch

from glassformer.adapters.embed import embed
from glassformer.adapters.load import load
from tests.serve.conftest import HELLO

GREEDY = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a tool",
            "parameters": {
                "type": "object",
                "properties": {"at": {"enum": ["a", "b"]}},
                "required": ["at"],
            },
        },
    }
    for name in ("look", "go")
]


def chat(house, **more):
    """The answer to one chat."""

    async def work(client):
        return await client.chat.completions.create(**{**GREEDY, **more})

    return house.run(work)


def post(house, path, body):
    """The status and JSON of a bare request, whatever a client would make of it."""

    async def work(client):
        return await client.post(path, json=body)

    found = house.ask(work)
    return found.status_code, found.json()


# --- embeddings -----------------------------------------------------------------------------------


def test_an_encoder_gives_the_vectors_of_embed(zoo):
    texts = ["the cat sat .", "a dog", "the cat sat ."]

    async def work(client):
        return [
            await client.embeddings.create(model="bert", input=texts, **form)
            for form in ({"encoding_format": "float"}, {})  # the client's own way is base64
        ]

    want = [embed(load(zoo.engine.models["bert"].adapter.origin), text) for text in texts]
    for found in zoo.run(work):
        got = np.array([one.embedding for one in found.data], np.float32)
        assert np.array_equal(got, np.concatenate([one.vectors for one in want]))
        assert found.usage.prompt_tokens == sum(one.tokens[0] for one in want)
        assert [one.index for one in found.data] == [0, 1, 2]


def test_an_encoder_continues_no_text(zoo):
    for call in ("/v1/chat/completions", "/v1/completions"):
        asked = {"messages": HELLO} if "chat" in call else {"prompt": "the cat"}
        status, body = post(zoo, call, {"model": "bert", **asked})
        assert status == 400
        assert body["error"]["code"] == "unsupported_model"
        assert "/v1/embeddings" in body["error"]["message"]


def test_models_are_found_by_name(zoo):
    async def work(client):
        return [one.id async for one in client.models.list()]

    assert zoo.run(work) == ["tiny", "bert", "tools"]
    status, body = post(zoo, "/v1/embeddings", {"model": "Bert", "input": "the"})
    assert (status, body["error"]["param"]) == (404, "model")


EMBEDDING_ERRORS = {
    "ids": ({"input": [[1, 2]]}, "input"),
    "one row of ids": ({"input": [1, 2]}, "input"),
    "nothing": ({"input": []}, "input"),
    "another width": ({"dimensions": 7}, "dimensions"),
    "another form": ({"encoding_format": "int8"}, "encoding_format"),
    "too many": ({"input": ["a"] * 2_049}, "input"),
    "a word too much": ({"truncate": True}, "truncate"),
}


@pytest.mark.parametrize("case", EMBEDDING_ERRORS)
def test_requests_for_vectors_are_checked(zoo, case):
    change, param = EMBEDDING_ERRORS[case]
    status, body = post(zoo, "/v1/embeddings", {"model": "bert", "input": "the", **change})
    assert (status, body["error"]["param"]) == (400, param)


def test_the_models_own_width_may_be_named(zoo):
    width = zoo.engine.models["bert"].spec.d_model
    status, body = post(
        zoo, "/v1/embeddings", {"model": "bert", "input": "the", "dimensions": width}
    )
    assert (status, len(body["data"][0]["embedding"])) == (200, width)


def test_a_text_that_is_too_long_is_refused(zoo):
    status, body = post(zoo, "/v1/embeddings", {"model": "bert", "input": "the " * 2_000})
    assert status == 400 and "tokens" in body["error"]["message"]


# --- what is added to logits ----------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"presence": 2.0}, {"frequency": 0.5}, {"presence": -1.0}])
def test_penalties_are_their_definition(house, given):
    """OpenAI's formula over the model's own logits, recomputed from the start at every token."""
    served = house.served
    ids, made = served.tokenizer.encode(served.chat_text(HELLO)), []
    closed = list(served.nameless)
    with torch.no_grad():
        while len(made) < 24 and not set(made) & set(served.eos):
            logits_V = served.adapter(torch.tensor([ids + made]))[0, -1].double()
            for token, count in Counter(made).items():
                logits_V[token] -= given.get("presence", 0.0)
                logits_V[token] -= count * given.get("frequency", 0.0)
            logits_V[closed] = -torch.inf
            made.append(int(logits_V.argmax()))
    asked = {f"{name}_penalty": value for name, value in given.items()}
    found = chat(house, **asked, logprobs=True, max_tokens=24).choices[0].logprobs.content
    texts = [served.tokenizer.decode([token]) for token in made if token not in served.eos]
    assert [one.token for one in found] == texts
    plain = chat(house, logprobs=True, max_tokens=24).choices[0].logprobs.content
    assert [one.token for one in plain] != texts or given.get("presence", 0) < 0


def test_a_bias_forbids_and_forces(house):
    vocab = house.served.tokenizer
    first = chat(house, max_tokens=1, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
    (token,) = vocab.encode(first.token)
    biased = chat(house, max_tokens=1, logit_bias={str(token): -100}, logprobs=True)
    assert biased.choices[0].logprobs.content[0].token == first.top_logprobs[1].token
    word = vocab.encode("cat")[0]
    forced = chat(house, max_tokens=4, logit_bias={str(word): 100})
    assert forced.choices[0].message.content == vocab.decode([word]) * 4


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_made_is_made(zoo, stream):
    named = {"type": "function", "function": {"name": "go"}}

    async def work(client):
        calls = []
        for choice in ("required", named):
            asked = {**GREEDY, "model": "tools", "tools": TOOLS, "tool_choice": choice}
            asked |= {"max_tokens": 90, "temperature": 1, "seed": 3}
            if not stream:
                (found,) = (await client.chat.completions.create(**asked)).choices
                assert found.finish_reason == "tool_calls" and found.message.content is None
                calls.append([call.function for call in found.message.tool_calls])
                continue
            got = []
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                got += [call.function for call in chunk.choices[0].delta.tool_calls or []]
                assert not chunk.choices[0].delta.content
            assert chunk.choices[0].finish_reason == "tool_calls"
            calls.append(got)
        return calls

    (either,), (go,) = zoo.run(work)
    assert either.name in ("look", "go") and go.name == "go"
    for call in (either, go):
        assert json.loads(call.arguments)["at"] in ("a", "b")


def test_one_call_is_enough_where_they_may_not_be_parallel(zoo):
    """A model that writes nothing but call after call, by its constraint."""
    call = r'<tool_call>\{"name": "go", "arguments": \{\}\}</tool_call>'
    asked = {"model": "tools", "tools": TOOLS, "max_tokens": 120}
    asked["extra_body"] = {"response_format": {"type": "regex", "pattern": f"{call}{call}"}}
    both = chat(zoo, **asked).choices[0]
    assert len(both.message.tool_calls) == 2
    one = chat(zoo, **asked, parallel_tool_calls=False).choices[0]
    assert one.message.tool_calls[0].function == both.message.tool_calls[0].function
    assert (len(one.message.tool_calls), one.finish_reason) == (1, "tool_calls")


def test_an_answer_can_be_sent_back_as_it_is(zoo):
    async def work(client):
        asked = {**GREEDY, "model": "tools", "tools": TOOLS, "max_tokens": 90}
        first = await client.chat.completions.create(**asked, tool_choice="required")
        call = first.choices[0].message.tool_calls[0]
        told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        turns = [*HELLO, first.choices[0].message, told]
        again = await client.chat.completions.create(**{**asked, "messages": turns})
        dumped = [*HELLO, first.choices[0].message.model_dump(), told]
        same = await client.chat.completions.create(**{**asked, "messages": dumped})
        return again, same

    again, same = zoo.run(work)
    assert again.usage.prompt_tokens == same.usage.prompt_tokens
    assert again.choices[0].message.content == same.choices[0].message.content


# --- everything else ------------------------------------------------------------------------------

SAME = {
    "nulls": {
        "logit_bias": None, "stop": None, "tools": None, "response_format": None, "user": None,
        "functions": None, "function_call": None, "top_logprobs": None, "seed": None,
    },
    "neutral values": {
        "n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
        "stop": [], "logprobs": False, "top_p": 1, "tool_choice": "none", "store": False,
        "response_format": {"type": "text"}, "service_tier": "auto", "modalities": ["text"],
    },
    "labels": {
        "user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y",
    },
    "the newer limit": {"max_completion_tokens": 12},
    "parts of text": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "the cat"}, {"type": "text", "text": " sat"}],
            }
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_what_says_nothing_changes_nothing(house, case):
    status, plain = post(house, "/v1/chat/completions", GREEDY)
    status, found = post(house, "/v1/chat/completions", {**GREEDY, **SAME[case]})
    assert status == 200, found
    assert found["choices"] == plain["choices"]


def test_a_developer_is_the_system(house):
    ids = []
    for role in ("developer", "system"):
        status, body = post(
            house,
            "/v1/chat/completions",
            {**GREEDY, "messages": [{"role": role, "content": "be"}, *HELLO]},
        )
        ids.append((status, body["choices"], body["usage"]["prompt_tokens"]))
    assert ids[0] == ids[1]


REFUSED = {
    "a bias in words": ({"logit_bias": {"cat": 1}}, "logit_bias"),
    "a bias beyond 100": ({"logit_bias": {"3": 101}}, "logit_bias.3"),
    "a bias on no token": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "a penalty beyond 2": ({"presence_penalty": 2.1}, "presence_penalty"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "thinking harder": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "sound": ({"modalities": ["text", "audio"]}, "modalities"),
    "store": ({"store": True}, "store"),
    "another tier": ({"service_tier": "flex"}, "service_tier"),
    "options of no stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "a part with something else": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        "messages[0].content[0].x",
    ),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    "a message in words": ({"messages": ["hello"]}, "messages"),
    "an old call": (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    "a number as a flag": ({"logprobs": 3}, "logprobs"),
    "a schema without one": (
        {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
    ),
    "tools and a form": (
        {
            "tools": TOOLS, "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "response_format",
    ),
    "a tool that is not there": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
        "tool_choice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(house, case):
    change, param = REFUSED[case]
    status, body = post(house, "/v1/chat/completions", {**GREEDY, **change})
    assert status == 400, body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param


COMPLETIONS_REFUSED = {
    "a suffix": ({"suffix": "."}, "suffix"),
    "the best of many": ({"best_of": 2}, "best_of"),
    "no new token, no echo": ({"max_tokens": 0}, "max_tokens"),
    "no token": ({"prompt": [10**6]}, "prompt"),
    "an empty text": ({"prompt": ""}, "prompt"),
    "a long one": ({"prompt": "cat " * 400}, "prompt"),
    "half a list": ({"prompt": ["a", 3]}, "prompt"),
    "messages": ({"messages": HELLO}, "messages"),
}


@pytest.mark.parametrize("case", COMPLETIONS_REFUSED)
def test_completions_refuse_by_name_too(house, case):
    change, param = COMPLETIONS_REFUSED[case]
    status, body = post(house, "/v1/completions", {"model": "tiny", "prompt": "the", **change})
    assert (status, body["error"]["param"]) == (400, param), body


def test_choices_stream_beside_each_other(house):
    """`n` with a stream and usage: the texts of each choice, and one count at the end."""

    async def work(client):
        asked = {"model": "tiny", "prompt": ["the cat", "the mat"], "max_tokens": 6, "seed": 4}
        whole = await client.completions.create(**asked, n=2)
        texts: dict[int, str] = {}
        usage = None
        async for chunk in await client.completions.create(
            **asked, n=2, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
            usage = chunk.usage or usage
        return whole, texts, usage

    whole, texts, usage = house.run(work)
    assert [texts[n] for n in range(4)] == [choice.text for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_an_unknown_address_has_openais_shape(house):
    async def work(client):
        await client.responses.create(model="tiny", input="hello")

    with pytest.raises(openai.NotFoundError) as caught:
        house.run(work)
    assert caught.value.code == "unknown_url"
