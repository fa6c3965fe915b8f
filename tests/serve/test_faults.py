"""Every planted fault turns its named check red, and every check is green without one."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

import glassformer.serve.engine
from glassformer.generation.batching import Batcher
from glassformer.generation.slots import NativeSlots
from glassformer.models.model import build
from glassformer.serve.answers import Answer, Completion
from glassformer.serve.app import Limits
from glassformer.serve.request import completion_request
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.presets import preset
from tests.generation import test_batching
from tests.planting import Assign, Call, Fault, If, Keyword, Name, mutate, planted
from tests.serve import test_echo, test_limits, test_openai, test_surface
from tests.serve.conftest import House

#: A damaged batch may also fail outright.
RED = (
    AssertionError,
    IndexError,
    KeyError,
    ZeroDivisionError,
    openai.APIError,
    pytest.fail.Exception,
)


@dataclass(frozen=True)
class Bench:
    """What checks are made with."""

    folder: Path
    zoo: House
    monkeypatch: pytest.MonkeyPatch

    @contextmanager
    def house(self, **options) -> Iterator[House]:
        """One of its own, that a fault cannot damage for others."""
        made = House(self.folder, limits=Limits(seconds=10, **options.pop("limits", {})), **options)
        yield made
        made.close()


def batch(count: int, *, slots: int, new: int = 3) -> tuple[Batcher, list]:
    """Sequences of different owners in a queue."""
    batcher = Batcher(NativeSlots(build(preset("qwen")), slots=slots, context=40))
    spec = DecodeSpec(max_new_tokens=new)
    rows = [batcher.prepare([n + 1], spec=spec, owner=str(n)) for n in range(count)]
    return batcher, [batcher.add(row) for row in rows]


def slots_are_free_again(bench: Bench) -> None:
    batcher, rows = batch(5, slots=2)
    for _ in range(30):
        batcher.step()
    assert [row.finish for row in rows] == ["length"] * 5
    assert (batcher.running, batcher.waiting, batcher.busy) == (0, 0, False)


def who_leaves_frees_the_slot(bench: Bench) -> None:
    batcher, rows = batch(4, slots=2, new=9)
    batcher.step()
    batcher.cancel(rows[0])
    batcher.cancel(rows[3])
    for _ in range(25):
        batcher.step()
    assert [row.finish for row in rows] == ["cancelled", "length", "length", "cancelled"]
    assert len(rows[0].tokens) == 1 and not rows[3].tokens
    assert (batcher.running, batcher.waiting) == (0, 0)


def complete(house: House, **asked):
    async def work(client):
        return await client.completions.create(**{"model": "tiny", "prompt": "the cat", **asked})

    return house.run(work)


def seeds(bench: Bench) -> None:
    with bench.house() as house:
        test_openai.test_choices_differ_and_seeds_repeat(house)


def no_seed(bench: Bench) -> None:
    with bench.house() as house:
        texts = {complete(house, max_tokens=12, temperature=1).choices[0].text for _ in range(3)}
        assert len(texts) == 3


def penalties(bench: Bench) -> None:
    with bench.house() as house:
        for given in ({"presence": 2.0}, {"frequency": 0.5}, {"presence": -1.0}):
            test_surface.test_penalties_are_their_definition(house, given)


def logprobs_are_the_models(bench: Bench) -> None:
    """A token that a bias forces is as unlikely as before."""
    with bench.house() as house:
        word = str(house.served.tokenizer.encode("cat")[0])
        found = complete(house, max_tokens=3, logit_bias={word: 100}, logprobs=0)
        assert max(found.choices[0].logprobs.token_logprobs) < -0.5


def usage(bench: Bench) -> None:
    """Two choices of five tokens each, none of which may be the end."""
    with bench.house() as house:
        ends = {str(token): -100 for token in house.served.eos}
        found = complete(house, max_tokens=5, n=2, logit_bias=ends)
        ids = house.served.text_ids("the cat")[0]
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), 10)
        assert found.usage.total_tokens == len(ids) + 10
        assert [choice.finish_reason for choice in found.choices] == ["length"] * 2


def streams(bench: Bench) -> None:
    """Also where several tokens arrive together, as they do in a crowd."""
    bench.monkeypatch.setattr(glassformer.serve.engine, "EVENT_SECONDS", 10.0)
    with bench.house() as house:
        test_openai.test_a_stream_is_the_whole_in_pieces(house)
    with bench.house() as house:
        made, read = asyncio.run(read_at_the_end(house))
        assert made == read


async def read_at_the_end(house: House) -> tuple[int, int]:
    """Return how many tokens were made, and how many a reader gets who reads after the last."""
    house.engine.start()
    served = house.served
    asked = completion_request({"model": "tiny", "prompt": "the", "max_tokens": 12})
    row = served.batcher.prepare(served.text_ids("the")[0], spec=DecodeSpec(max_new_tokens=12))
    answer = Answer(house.engine, Completion(served, [row], asked, ""), seconds=30)
    answer.begin()
    while row.finish is None:
        await asyncio.sleep(0.01)
    read = [len(tokens) async for _, tokens, _ in answer.pieces()]
    answer.end()
    return len(row.tokens), sum(read)


def gone(bench: Bench) -> None:
    """Whoever goes away as soon as the request is queued is computed for no longer."""

    async def work(house: House) -> str | None:
        house.engine.start()
        served = house.served
        asked = completion_request({"model": "tiny", "prompt": "the", "max_tokens": 150})
        row = served.batcher.prepare(served.text_ids("the")[0], spec=DecodeSpec(max_new_tokens=150))
        answer = Answer(house.engine, Completion(served, [row], asked, ""), seconds=10)
        answer.begin()
        answer.end()
        await house.engine.call("tiny", lambda: None)
        return row.finish

    with bench.house() as house:
        assert asyncio.run(work(house)) == "cancelled"


def the_queue_is_bounded(bench: Bench) -> None:
    with bench.house(slots=1, limits={"queue": 2}) as house:
        complete(house, n=3, max_tokens=2)
        with pytest.raises(openai.RateLimitError):
            complete(house, n=4, max_tokens=2)


def the_key(bench: Bench) -> None:
    with bench.house(api_key="a-long-key", slots=1) as house:
        test_limits.test_the_key_is_needed_everywhere_but_for_health(house)


def a_stop(bench: Bench) -> None:
    made = House(bench.folder, limits=Limits(seconds=1))
    made.engine.closing = True
    found = test_limits.post(made, test_limits.CHAT)
    assert "stopping" in found.json()["error"]["message"]


def unknown_fields(bench: Bench) -> None:
    test_openai.test_errors_have_openais_shape(bench.zoo, "an unknown field")


CHECKS: dict[str, Callable[[Bench], object]] = {
    "slots are free again": slots_are_free_again,
    "who leaves frees the slot": who_leaves_frees_the_slot,
    "owners take turns": lambda b: test_batching.test_owners_take_turns(),
    "long prompts are cut": lambda b: test_batching.test_a_long_prompt_does_not_stall_the_others(),
    "alone is together": lambda b: test_batching.test_alone_is_together(),
    "prompts are read once": lambda b: (
        test_batching.test_a_prompt_that_begins_alike_is_not_read_again()
    ),
    "several steps at once": lambda b: (
        test_batching.test_several_greedy_steps_in_one_call_change_no_token(b.monkeypatch)
    ),
    "seeds differ": seeds,
    "choices differ": seeds,
    "no seed, no repetition": no_seed,
    "penalties": penalties,
    "a bias": lambda b: test_surface.test_a_bias_forbids_and_forces(b.zoo),
    "log-probabilities": lambda b: test_openai.test_logprobs_are_the_models_own(b.zoo),
    "log-probabilities are the model's": logprobs_are_the_models,
    "an echo is one forward": lambda b: (
        test_echo.test_a_prompt_alone_has_the_log_probabilities_of_one_forward(b.zoo)
    ),
    "no company changes scores": lambda b: (
        test_echo.test_company_and_what_a_slot_holds_change_no_score(b.zoo)
    ),
    "an end has its score": lambda b: test_echo.test_an_end_that_is_made_has_its_log_probability(
        b.zoo
    ),
    "stop strings": lambda b: test_openai.test_a_stop_string_ends_and_is_not_shown(b.zoo),
    "usage": usage,
    "streams are complete": streams,
    "who goes away is dropped": gone,
    "time is limited": lambda b: test_limits.test_an_answer_that_takes_too_long_is_given_up(
        b.folder
    ),
    "the queue is bounded": the_queue_is_bounded,
    "the key": the_key,
    "unknown fields": unknown_fields,
    "a stop takes no more": a_stop,
    "models by name": lambda b: test_surface.test_models_are_found_by_name(b.zoo),
    "vectors": lambda b: test_surface.test_an_encoder_gives_the_vectors_of_embed(b.zoo),
    "tool choice": lambda b: test_surface.test_a_call_that_must_be_made_is_made(b.zoo, False),
}

FAULTS = (
    Fault("the wrong row's logits", mutate("generation.batching:Batcher.step", Call("_sampled"), arg=1, to="{value}[:1]"), "alone is together"),
    Fault("choices share a seed", mutate("serve.app:_Api.rows", Keyword("row"), to="0"), "choices differ"),
    Fault("a stop string is shown", mutate("generation.streaming:RowText.__init__", Name("stop"), to="()"), "stop strings"),
    Fault("the queue has no end", mutate("serve.app:_Api.check_room", If("count"), to="False"), "the queue is bounded"),
    Fault("the beginning of the key is enough", mutate("serve.app:_Guard.check_secret", Assign("right"), to="{args[0]}[:0] == {args[1]}[:0]"), "the key"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault: Fault, folder, zoo, monkeypatch) -> None:
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by](Bench(folder, zoo, monkeypatch))


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_is_green_without_one(check, folder, zoo, monkeypatch) -> None:
    CHECKS[check](Bench(folder, zoo, monkeypatch))
