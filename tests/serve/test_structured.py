"""Answers with a form: JSON schemas as patterns, and tool calls in a text."""

import asyncio
import json
import os
import re
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from glassformer.data.tokenizers.vocab import Characters
from glassformer.serve import patterns, structured
from glassformer.serve.app import Limits
from glassformer.serve.patterns import json_pattern
from glassformer.serve.structured import ToolReader
from glassformer.serve.structured import _Builder as Builder
from glassformer.spec.errors import InputError
from tests.serve.conftest import HELLO, House

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "who"},
        "age": {"type": ["integer", "null"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", 3]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"home": {"type": "object", "properties": {"city": {"const": "Zürich"}}}},
}
GOOD = (
    '{"name": "x \\" y", "age": 3}',
    '{"name":"","age":null,"tags":["a","b c"]}',
    '{"name": "x", "age": -10, "tags": [], "home": {"city": "Z\\u00fcrich"}}',
    '{"name": "x", "age": 0, "home": {}}',
)
WRONG = (
    '{"age": 3}',
    '{"name": "x", "age": 1.5}',
    '{"name": "x", "age": 01}',
    '{"name": "x", "age": 1, "tags": [3, 3, 3]}',
    '{"name": "x", "age": 1, "other": 1}',
    '{"name": "x" "age": 1}',
    '{"name": "x, "age": 1}',
    '{"name": "x", "age": 1,}',
)


def test_a_schema_is_a_pattern():
    pattern = json_pattern(PERSON)
    for text in GOOD:
        json.loads(text)
        assert re.fullmatch(pattern, text), text
    for text in WRONG:
        assert not re.fullmatch(pattern, text), text


@pytest.mark.parametrize("least", range(3))
@pytest.mark.parametrize("most", [None, 0, 2, 3])
def test_arrays_have_as_many_items_as_they_may(least, most):
    if most is not None and most < least:
        return
    limits = {"minItems": least} | ({} if most is None else {"maxItems": most})
    pattern = json_pattern({"type": "array", "items": {"type": "integer"}, **limits})
    for count in range(5):
        fits = count >= least and (most is None or count <= most)
        assert bool(re.fullmatch(pattern, json.dumps([7] * count))) == fits


REFUSED = {
    "a keyword": ({"type": "string", "pattern": "a"}, "'pattern'"),
    "a word that limits": ({"type": "integer", "minimum": 3}, "'minimum'"),
    "itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "contains itself"),
    "another document": ({"$ref": "http://x"}, "another document"),
    "no such definition": ({"$ref": "#/$defs/b"}, "not there"),
    "no type": ({"type": "text"}, "'text'"),
    "a requirement without a schema": (
        {"type": "object", "properties": {}, "required": ["a"]}, "'a'",
    ),
    "many items": ({"type": "array", "minItems": 10**9}, "items"),
}  # fmt: skip


def nested(levels, **limits):
    """Arrays of arrays of integers."""
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, **limits}
    return schema


def referring(count, levels, **more):
    """Definitions of which each refers to the next one often."""
    defs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * count} for n in range(levels)}
    defs[f"d{levels}"] = {"type": "null"}
    return {"$defs": defs, "$ref": "#/$defs/d0", **more}


EMPTY = {"type": "array", "maxItems": 0}
HUGE = {
    "items that are copied at each level": nested(12, minItems=16, maxItems=16),
    "items that may be there, at each level": nested(12, minItems=1, maxItems=16),
    "references to references": referring(40, 5),
    "references whose patterns are empty": {
        "$defs": {"a": {**EMPTY, "items": {"anyOf": [{"$ref": "#/$defs/b"}] * 40}},
                  "b": {**EMPTY, "items": {"anyOf": [{"$ref": "#/$defs/c"}] * 40}},
                  "c": {**EMPTY, "items": {"anyOf": [{"$ref": "#/$defs/d"}] * 40}},
                  "d": {**EMPTY, "items": {"anyOf": [{"type": "null"}] * 40}}},
        "$ref": "#/$defs/a",
    },
    "many values": {"enum": list(range(300_000))},
    "a long value": {"const": "x" * 3_000_000},
    "many properties": {
        "type": "object", "properties": {f"p{n}": True for n in range(100_000)},
        "required": [f"p{n}" for n in range(100_000)],
    },
    "properties that may be left out": {
        "type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(1_000)},
    },
    "many types": {"type": ["null"] * 300_000},
    "a long reference": {"$ref": "#" + "/a" * 1_000_000},
}  # fmt: skip


HUGE_NEST = HUGE["items that are copied at each level"]


@pytest.mark.parametrize("case", HUGE)
def test_a_schema_is_refused_as_soon_as_it_is_too_much_work(case):
    schema = HUGE[case]
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(InputError):
        json_pattern(schema)
    seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 2
    assert peak < 100e6


def test_names_of_required_properties_are_texts():
    with pytest.raises(InputError, match="requires"):
        json_pattern({"type": "object", "properties": {"a": True}, "required": [["a"]]})


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_refused_by_name(case):
    schema, word = REFUSED[case]
    with pytest.raises(InputError, match=re.escape(word)):
        json_pattern(schema)


def test_an_answer_has_the_schemas_form(house):
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2]}, "b": {"type": "null"}},
        "required": ["yes", "n"],
    }

    async def work(client):
        found = await client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=60,
            n=4,
            seed=1,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
        return [choice.message.content for choice in found.choices]

    for text in house.run(work):
        found = json.loads(text)
        assert isinstance(found["yes"], bool)
        assert found["n"] in (1, 2)
        assert found.keys() <= {"yes", "n", "b"}


@pytest.mark.parametrize("size", [1, 3, 7, 1_000])
def test_tool_calls_are_read_however_the_text_is_cut(size):
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    text = f"a < b <tool{call}c<tool_call>no json</tool_call>{call.removesuffix('</tool_call>')}"
    reader = ToolReader()
    shown = "".join(reader.push(text[at : at + size]) for at in range(0, len(text), size))
    shown += reader.flush()
    assert shown == "a < b <toolc<tool_call>no json</tool_call>"
    assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == [
        ("f", {"x": 1}),
        ("f", {"x": 1}),
    ]


STUCK = "[\u0100-\u01f0]?" * 2_800


def ask(house, form, **more):
    async def work(client):
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 3, "response_format": form}
        return await client.post("/v1/completions", json={**body, **more}, timeout=60)

    return house.ask(work)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "regex", "pattern": STUCK}, "steps to build"),
        ({"type": "regex", "pattern": "(a"}, "not closed"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": HUGE_NEST}},
            "more than 20,000 characters",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"const": "x" * 250_000}},
            },
            "at most 200,000",
        ),
    ],
    ids=["a pattern", "a mistake", "a schema", "a long schema"],
)
def test_what_costs_too_much_is_refused_and_the_next_is_served(house, form, words):
    found = ask(house, form)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
    assert found.json()["error"]["param"] == "response_format"
    good = ask(house, {"type": "regex", "pattern": "(a|t|the|cat)*"})
    assert good.status_code == 200


def test_a_pattern_is_built_beside_everything_else(folder, monkeypatch):
    """A process that does not answer: others are served, its client leaves, and it is ended."""
    idle = [sys.executable, "-I", "-c", "import sys; sys.stdin.read()"]
    monkeypatch.setattr(structured, "command", lambda: idle)
    made = House(folder)
    started = []
    monkeypatch.setattr(structured, "_Builder", lambda: started.append(Builder()) or started[-1])

    async def work(client):
        form = {"type": "regex", "pattern": "a*"}
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 3}
        stuck = [
            asyncio.create_task(
                client.post("/v1/completions", json={**body, "response_format": form}, timeout=60)
            )
            for _ in range(structured.PROCESSES + 1)
        ]
        while len(started) < structured.PROCESSES:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert not any(one.done() for one in stuck)
        for one in stuck:
            one.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    made.ask(work)
    assert [one._process.poll() for one in started] == [-9] * structured.PROCESSES
    made.close()


def test_a_pattern_has_a_deadline(folder, monkeypatch):
    idle = [sys.executable, "-I", "-c", "import sys; sys.stdin.read()"]
    monkeypatch.setattr(structured, "command", lambda: idle)
    made = House(folder, limits=Limits(seconds=0.2))
    found = ask(made, {"type": "regex", "pattern": "a*"})
    assert found.status_code == 503
    assert found.json()["error"]["code"] == "timeout"
    made.close()


def test_a_process_that_ends_is_one_refusal(folder, monkeypatch):
    made = House(folder)
    with monkeypatch.context() as patch:
        patch.setattr(structured, "command", lambda: [sys.executable, "-I", "-c", ""])
        found = ask(made, {"type": "regex", "pattern": "a*"})
        assert found.status_code == 400
        assert "2 seconds of CPU time" in found.json()["error"]["message"]
    assert ask(made, {"type": "regex", "pattern": "(a|t|the|cat)*"}).status_code == 200
    made.close()


def test_formats_are_kept_until_others_need_the_room(folder, monkeypatch):
    made = House(folder)
    formats = made.app.state.formats["tiny"]
    form = {"type": "regex", "pattern": "(a|t|the|cat)*"}
    assert ask(made, form).status_code == 200
    (kept,) = formats._kept.values()
    assert ask(made, form).status_code == 200
    assert list(formats._kept.values()) == [kept]
    monkeypatch.setattr(structured, "KEPT_BYTES", kept.target_QV.nbytes)
    assert ask(made, {"type": "regex", "pattern": "(t|a|the|cat)*"}).status_code == 200
    assert len(formats._kept) == 1
    assert kept not in formats._kept.values()
    made.close()


def test_the_process_knows_no_key_and_its_limits_are_real(monkeypatch):
    monkeypatch.setenv("GLASS_API_KEY", "a-long-secret-key")
    builder = Builder()
    pid = builder._process.pid
    formats = structured.Formats("m", Characters("ab"))
    asked = json.dumps({"model": formats.name, "kind": "regex", "pattern": "a*b"})
    assert builder.build(formats, asked).vocab_size == 2
    assert b"GLASS_API_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(rf"Max address space +{patterns.MEGABYTES << 20} ", limits)
    assert os.getpriority(os.PRIO_PROCESS, pid) >= patterns.YIELDS
    builder.close()
