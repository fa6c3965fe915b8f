"""Prompts that are echoed with their log-probabilities: what evaluations of a served model need."""

from types import SimpleNamespace

import pytest
import torch

from glassformer.lab.measure.scores import Answerer
from tests.serve.test_surface import post

TEXT = "the cat sat on the mat"


def completions(house, **asked):
    status, body = post(house, "/v1/completions", {"model": "tiny", "prompt": TEXT, **asked})
    assert status == 200, body
    return body


def by_hand(house, ids) -> torch.Tensor:
    """The log-probabilities after each token, from one plain forward."""
    with torch.inference_mode():
        return house.served.adapter(torch.tensor([list(ids)]))[0].double().log_softmax(-1)


def test_a_prompt_alone_has_the_log_probabilities_of_one_forward(house):
    found = completions(house, echo=True, logprobs=3, max_tokens=0)
    (choice,) = found["choices"]
    ids = house.served.text_ids(TEXT)[0]
    wanted_TV = by_hand(house, ids)
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == TEXT
    offsets = [len("".join(scores["tokens"][:n])) for n in range(len(ids))]
    assert scores["text_offset"] == offsets
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    for place, token in enumerate(ids[1:]):
        want = float(wanted_TV[place, token])
        assert scores["token_logprobs"][place + 1] == pytest.approx(want, abs=1e-4)
        best = sorted(scores["top_logprobs"][place + 1].values(), reverse=True)
        assert best[0] == pytest.approx(float(wanted_TV[place].max()), abs=1e-4)
        assert len(best) <= 3


def test_what_follows_is_what_follows_without_an_echo(house):
    asked = {"logprobs": 2, "max_tokens": 6, "seed": 3, "temperature": 0.9, "n": 2}
    plain = completions(house, **asked)
    echoed = completions(house, echo=True, **asked)
    read = len(house.served.text_ids(TEXT)[0])
    for one, other in zip(plain["choices"], echoed["choices"], strict=True):
        assert other["text"] == TEXT + one["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert other["logprobs"][name][read:] == one["logprobs"][name]
        moved = [offset + len(TEXT) for offset in one["logprobs"]["text_offset"]]
        assert other["logprobs"]["text_offset"][read:] == moved


def test_a_stream_brings_the_prompt_first(house):
    asked = {"echo": True, "logprobs": 1, "seed": 3, "temperature": 0.9, "n": 2}

    async def work(client):
        made = await client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=6, stream=True, **asked
        )
        return [chunk async for chunk in made]

    whole = completions(house, max_tokens=6, **asked)
    pieces = house.run(work)
    for place, choice in enumerate(whole["choices"]):
        parts = [one.choices[0] for one in pieces if one.choices[0].index == place]
        assert "".join(part.text for part in parts) == choice["text"]
        assert parts[0].text == TEXT
        for name, values in choice["logprobs"].items():
            streamed = [x for part in parts if part.logprobs for x in getattr(part.logprobs, name)]
            assert streamed == values


def test_company_and_what_a_slot_holds_change_no_score(house):
    alone = completions(house, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    completions(house, max_tokens=3)  # a slot holds the prompt now
    texts = [TEXT, "a dog", TEXT + " again", TEXT, "it is 12"]
    found = completions(house, prompt=texts, echo=True, logprobs=1, max_tokens=0)["choices"]
    assert found[0]["logprobs"] == found[3]["logprobs"] == alone["logprobs"]
    read = len(alone["logprobs"]["tokens"])
    assert found[2]["logprobs"]["token_logprobs"][:read] == alone["logprobs"]["token_logprobs"]


@pytest.mark.filterwarnings("default")  # the harness warns about itself
def test_the_harness_reads_the_likelihoods_that_we_score(house):
    """lm-evaluation-harness's own request and its own reading of the answer, beside `Answerer`."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    answerer = Answerer(house.served.adapter)
    pairs = []
    for context, rest in ((TEXT, " it"), ("def f(x):", " return x"), ("the cat", " sat on")):
        ids = answerer.encode(context, begun=True)
        pairs.append((ids, answerer.encode(context + rest, begun=True)[len(ids) :]))
    # and one that is the likeliest
    ids = answerer.encode("the cat", begun=True)
    greedy = []
    while len(greedy) < 3:
        greedy.append(int(by_hand(house, [*ids, *greedy])[-1].argmax()))
    pairs.append((ids, greedy))
    payload = LocalCompletionsAPI._create_payload(
        SimpleNamespace(model="tiny"), [[*context, *rest] for context, rest in pairs]
    )
    status, answer = post(house, "/v1/completions", payload)
    assert status == 200, answer
    lengths = [len(context) for context, _ in pairs]
    found = LocalCompletionsAPI.parse_logprobs(answer, ctxlens=lengths)
    wanted = answerer.likelihoods(pairs)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert found[-1][1]
    for (value, _), (want, _) in zip(found, wanted, strict=True):
        assert value == pytest.approx(want, abs=1e-4)


def test_an_end_that_is_made_has_its_log_probability(house):
    """The harness leaves out the last token: it must be the one that was made, also an end."""
    ends = {str(token): 100 for token in house.served.eos}
    found = completions(house, echo=True, logprobs=1, max_tokens=1, logit_bias=ends)["choices"][0]
    assert found["finish_reason"] == "stop" and found["text"] == TEXT
    assert len(found["logprobs"]["tokens"]) == len(house.served.text_ids(TEXT)[0]) + 1
