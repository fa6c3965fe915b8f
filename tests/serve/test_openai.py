"""OpenAI's client against the server: what it sends is understood, what it gets it can read."""

import asyncio
import json

import openai
import pytest

import glassformer.serve.engine
from glassformer.serve.answers import Answer, Completion
from glassformer.serve.app import Limits
from glassformer.serve.request import completion_request
from glassformer.spec.decoding import DecodeSpec
from tests.adapters.folders import write_model
from tests.planting import If, Keyword, Name, catches
from tests.serve.conftest import HELLO, House

SAMPLED = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 5, "temperature": 0.8}


def test_a_chat(house):
    async def work(client):
        return await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=7)

    found = house.run(work)
    assert found.object == "chat.completion"
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason in ("stop", "length")
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert 1 <= found.usage.completion_tokens <= 7


def test_the_tokens_are_those_of_generate(house):
    """Row 0 samples as the offline loop does, from the same logits."""
    served = house.served
    ids = served.tokenizer.encode(served.chat_text(HELLO))
    spec = DecodeSpec(
        max_new_tokens=12, temperature=0.8, top_p=0.9, top_k=20, seed=5, eos=served.eos,
        forbidden=served.nameless,
    )  # fmt: skip
    from glassformer.generation.streaming import generate_batch

    (alone,) = generate_batch(
        served.adapter.stepper(), [ids], spec=spec, tokenizer=served.tokenizer
    )

    async def work(client):
        return await client.chat.completions.create(**SAMPLED)

    assert house.run(work).choices[0].message.content == alone.text


def test_a_stream_is_the_whole_in_pieces(house):
    async def work(client):
        whole = await client.chat.completions.create(**SAMPLED, n=2, logprobs=True)
        pieces = [
            chunk
            async for chunk in await client.chat.completions.create(
                **SAMPLED, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}
            )
        ]
        return whole, pieces

    whole, pieces = house.run(work)
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    for place in range(2):
        own = [c.choices[0] for c in pieces if c.choices and c.choices[0].index == place]
        assert own[0].delta.role == "assistant"
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == whole.choices[place].message.content
        assert own[-1].finish_reason == whole.choices[place].finish_reason
        given = [one for choice in own if choice.logprobs for one in choice.logprobs.content]
        assert given == whole.choices[place].logprobs.content


def test_logprobs_are_the_models_own(house):
    async def work(client):
        return await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
        )

    for one in house.run(work).choices[0].logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob  # greedy
        assert one.logprob < 0
        if one.bytes is not None:
            assert bytes(one.bytes).decode() == one.token


@catches("a stop string is shown", "generation.streaming:RowText.__init__", Name("stop"), to="()")
def test_a_stop_string_ends_and_is_not_shown(house):
    async def work(client):
        whole = await client.chat.completions.create(**SAMPLED)
        text = whole.choices[0].message.content
        stop = text[3:5]
        cut = await client.chat.completions.create(**SAMPLED, stop=stop)
        return text, stop, cut.choices[0]

    text, stop, cut = house.run(work)
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


@catches("choices share a seed", "serve.app:_Api.rows", Keyword("row"), to="0")
def test_choices_differ_and_seeds_repeat(house):
    async def work(client):
        first = await client.chat.completions.create(**SAMPLED, n=3)
        again = await client.chat.completions.create(**SAMPLED, n=3)
        other = await client.chat.completions.create(**{**SAMPLED, "seed": 6})
        return [[c.message.content for c in one.choices] for one in (first, again, other)]

    first, again, other = house.run(work)
    assert first == again
    assert len(set(first)) == 3
    assert other[0] != first[0]


def complete(house: House, **asked):
    async def work(client):
        return await client.completions.create(**{"model": "tiny", "prompt": "the cat", **asked})

    return house.run(work)


def test_without_a_seed_nothing_repeats(house):
    texts = {complete(house, max_tokens=12, temperature=1).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_a_token_that_a_bias_forces_is_as_unlikely_as_before(house):
    word = str(house.served.tokenizer.encode("cat")[0])
    found = complete(house, max_tokens=3, logit_bias={word: 100}, logprobs=0)
    assert max(found.choices[0].logprobs.token_logprobs) < -0.5


def test_usage_counts_every_choice(house):
    """Two choices of five tokens each, none of which may be the end."""
    ends = {str(token): -100 for token in house.served.eos}
    found = complete(house, max_tokens=5, n=2, logit_bias=ends)
    ids = house.served.text_ids("the cat")[0]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), 10)
    assert found.usage.total_tokens == len(ids) + 10
    assert [choice.finish_reason for choice in found.choices] == ["length"] * 2


def answer_of(house, *, tokens, seconds):
    """A request that waits in the queue, before anybody reads its answer."""
    house.engine.start()
    served = house.served
    asked = completion_request({"model": "tiny", "prompt": "the", "max_tokens": tokens})
    row = served.batcher.prepare(served.text_ids("the")[0], spec=DecodeSpec(max_new_tokens=tokens))
    answer = Answer(house.engine, Completion(served, [row], asked, ""), seconds=seconds)
    answer.begin()
    return answer, row


def test_who_reads_after_the_last_token_gets_every_one(house, monkeypatch):
    """Also where several tokens arrive together, as they do in a crowd."""
    monkeypatch.setattr(glassformer.serve.engine, "EVENT_SECONDS", 10.0)

    async def read_at_the_end():
        answer, row = answer_of(house, tokens=12, seconds=30)
        while row.finish is None:
            await asyncio.sleep(0.01)
        read = [len(tokens) async for _, tokens, _ in answer.pieces()]
        answer.end()
        return len(row.tokens), sum(read)

    made, read = asyncio.run(read_at_the_end())
    assert made == read


def test_who_goes_away_from_the_queue_is_computed_for_no_longer(house):
    async def work():
        answer, row = answer_of(house, tokens=150, seconds=10)
        answer.end()
        await house.engine.call("tiny", lambda: None)
        return row.finish

    assert asyncio.run(work()) == "cancelled"


@catches("the queue has no end", "serve.app:_Api.check_room", If("count"), to="False")
def test_the_queue_is_bounded(folder):
    house = House(folder, slots=1, limits=Limits(seconds=10, queue=2))
    try:
        complete(house, n=3, max_tokens=2)
        with pytest.raises(openai.RateLimitError):
            complete(house, n=4, max_tokens=2)
    finally:
        house.close()


def test_completions_take_texts_and_ids(house):
    ids = house.served.text_ids("the mat")[0]

    async def work(client):
        one = await client.completions.create(
            model="tiny", prompt="the mat", max_tokens=6, temperature=0, logprobs=2
        )
        same = await client.completions.create(
            model="tiny", prompt=[list(ids), list(ids)], max_tokens=6, temperature=0, echo=True
        )
        return one, same

    one, same = house.run(work)
    assert [choice.text for choice in same.choices] == ["the mat" + one.choices[0].text] * 2
    logprobs = one.choices[0].logprobs
    assert "".join(logprobs.tokens) == one.choices[0].text
    assert len(logprobs.top_logprobs[0]) == 2
    assert logprobs.text_offset[0] == 0


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ([1, 10**6], "1000000"),
        ([[1], [2, -1]], "-1"),
        ([1, 2**70], str(2**70)[:20]),
        ([[1], []], None),
        ([[]], None),
        ([[1], "text", [2.0]], None),
        ([1, True], None),
        ([1, "2"], None),
    ],
)
def test_ids_that_are_none_are_named(house, prompt, name):
    async def work(client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt=prompt)
        return caught.value

    error = house.run(work)
    assert error.param == "prompt"
    if name is not None:
        last = house.served.spec.vocab_size - 1
        assert f"{name} is no token of 'tiny'; ids go from 0 to {last}" in error.message


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A model's folder without its tokenizer, beside one that has it."""
    place = tmp_path_factory.mktemp("bare")
    (place / "ids").mkdir()
    kept = ("config.json", "generation_config.json", "model.safetensors")
    for file in write_model(place / "ids").iterdir():
        if file.name not in kept:
            file.unlink()
    (place / "texts").mkdir()
    made = House(write_model(place / "texts"), place / "ids")
    yield made
    made.close()


def test_a_model_without_a_tokenizer_continues_ids(bare):
    """The same ids as with one; its texts are the ids."""
    served = bare.engine.models["ids"]
    assert served.capabilities() == ["tokens"]
    assert "no tokenizer" in served.described()
    assert served.eos
    prompt = list(bare.served.text_ids("the mat")[0])
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1}

    async def work(client):
        texts = await client.completions.create(model="tiny", **asked)
        ids = await client.completions.create(model="ids", **asked, echo=True)
        parts = [
            part.choices[0].text
            async for part in await client.completions.create(
                model="ids", prompt=[prompt, prompt], max_tokens=6, temperature=0, stream=True
            )
            if part.choices[0].index == 1
        ]
        return texts.choices[0], ids.choices[0], "".join(parts)

    text, ids, streamed = bare.run(work)
    made = list(map(int, ids.text.split()))
    assert made[: len(prompt)] == prompt
    assert bare.served.tokenizer.decode(made[len(prompt) :]) == text.text
    assert list(map(int, streamed.split())) == made[len(prompt) :]
    assert ids.logprobs.tokens[: len(prompt)] == list(map(str, prompt))
    assert ids.finish_reason == text.finish_reason


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {"prompt": "the"}, "give token ids"),
        ("completions", {"prompt": [1], "stop": "x"}, "stop strings need a tokenizer"),
        (
            "completions",
            {"prompt": [1], "response_format": {"type": "json_object"}},
            "no tokenizer",
        ),
        ("chat/completions", {"messages": HELLO}, "no chat template"),
        ("embeddings", {"input": "the"}, "no tokenizer"),
    ],
)
def test_what_needs_texts_is_refused_without_a_tokenizer(bare, path, body, words):
    async def work(client):
        return await client.post(f"/v1/{path}", json={"model": "ids", **body})

    found = bare.ask(work)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]


def test_a_regular_expression(house):
    async def work(client):
        return await client.chat.completions.create(
            **{**SAMPLED, "max_tokens": 40},
            extra_body={"response_format": {"type": "regex", "pattern": "(yes|no)(,(yes|no))*"}},
        )

    text = house.run(work).choices[0].message.content
    assert set(text.split(",")) <= {"yes", "no"}


def test_models_are_listed(house):
    async def work(client):
        return [model.id async for model in client.models.list()], await client.models.retrieve(
            "tiny"
        )

    names, one = house.run(work)
    assert names == ["tiny"]
    assert one.id == "tiny"


def test_embeddings_are_unit_vectors(house):
    async def work(client):
        packed = await client.embeddings.create(model="tiny", input=["the cat", "the mat"])
        plain = await client.embeddings.create(
            model="tiny", input="the cat", encoding_format="float", extra_body={"pooling": "last"}
        )
        return packed, plain

    packed, plain = house.run(work)
    for one in (*packed.data, *plain.data):
        assert len(one.embedding) == house.served.spec.d_model
        assert sum(x * x for x in one.embedding) == pytest.approx(1.0, abs=1e-5)
    assert packed.data[0].embedding != packed.data[1].embedding


def test_many_at_once_are_answered_as_alone(house):
    """More requests than slots, of different lengths; every answer is the one it gives alone."""

    def request(seed: int) -> dict:
        text = "the cat sat on the mat " * (seed % 4 + 1)
        return {**SAMPLED, "messages": [{"role": "user", "content": text}], "seed": seed}

    async def work(client):
        async def one(seed):
            found = await client.chat.completions.create(**request(seed))
            return found.choices[0].message.content

        alone = [await one(seed) for seed in range(12)]
        together = await asyncio.gather(*map(one, range(12)))
        return alone, together

    alone, together = house.run(work)
    assert alone == together


# --- errors ---------------------------------------------------------------------------------------

BAD = {
    "no such model": ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
    "a temperature of 3": ({"temperature": 3}, openai.BadRequestError, None, "temperature"),
    "a temperature in words": (
        {"temperature": "hot"}, openai.BadRequestError, "invalid_type", "temperature",
    ),
    "no messages": ({"messages": []}, openai.BadRequestError, None, "messages"),
    "a role that is none": (
        {"messages": [{"role": "cat", "content": "x"}]},
        openai.BadRequestError, "invalid_type", "messages[0].role",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        openai.BadRequestError, "unsupported_parameter", "messages[0].content[0].type",
    ),
    "a long prompt": (
        {"messages": [{"role": "user", "content": "cat " * 400}]},
        openai.BadRequestError, "context_length_exceeded", "messages",
    ),
    "an unknown field": (
        {"extra_body": {"temprature": 1}},
        openai.BadRequestError, "unknown_parameter", "temprature",
    ),
    "too many choices": ({"n": 99}, openai.BadRequestError, "invalid_type", "n"),
    "top without logprobs": (
        {"top_logprobs": 3}, openai.BadRequestError, "unsupported_parameter", "top_logprobs",
    ),
    "tools without a template": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        openai.BadRequestError, "unsupported_parameter", "tools",
    ),
    "a pattern that cannot be read": (
        {"extra_body": {"response_format": {"type": "regex", "pattern": "(a"}}},
        openai.BadRequestError, "invalid_value", "response_format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors_have_openais_shape(house, case):
    change, kind, code, param = BAD[case]

    async def work(client):
        await client.chat.completions.create(**{**SAMPLED, **change})

    with pytest.raises(kind) as caught:
        house.run(work)
    error = caught.value
    assert error.body["type"] == "invalid_request_error"
    assert error.param == param
    if code is not None:
        assert error.code == code
    assert str(house.served.adapter.origin) not in json.dumps(error.body)
