"""`glass generate`: greedy, beams, constraints, JSON, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from glassformer.spec.errors import InputError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An encoder-decoder, a decoder and an answering model, hardly trained."""
    place = tmp_path_factory.mktemp("runs")
    short = ["train.batch_size=8", "train.evaluate_every=3"]
    gf.train("reverse", steps=3, runs=place, overrides=[*short, "task.examples=300"])
    gf.train("parity", steps=3, runs=place, overrides=[*short, "task.examples=500"])
    gf.train("digits", steps=3, runs=place, overrides=[*short, "task.examples=500"])
    return str(place)


def glass(runs, *words, stdin=None):
    result = CliRunner().invoke(app, ["generate", *words, "--runs", runs], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_json_tells_text_tokens_probabilities_and_why_it_ended(runs):
    found = json.loads(glass(runs, "reverse", "3 1 4", "--max-new", "6", "--json"))
    assert set(found) == {"text", "tokens", "logprobs", "finish"}
    assert len(found["tokens"]) == len(found["logprobs"]) <= 6
    assert found["finish"] in ("eos", "length")


def test_the_cache_changes_nothing_and_stdin_is_read(runs):
    words = ("reverse", "3 1 4", "--max-new", "6")
    assert glass(runs, *words) == glass(runs, *words, "--no-cache")
    assert glass(runs, *words) == glass(runs, "reverse", "-", "--max-new", "6", stdin="3 1 4")


def test_one_beam_is_greedy_and_more_are_a_list(runs):
    greedy = json.loads(glass(runs, "reverse", "3 1 4", "--max-new", "6", "--json"))
    one = json.loads(glass(runs, "reverse", "3 1 4", "--max-new", "6", "--beams", "1", "--json"))
    assert one["hypotheses"][0]["tokens"] == greedy["tokens"]
    three = json.loads(glass(runs, "reverse", "3 1 4", "--max-new", "4", "--beams", "3", "--json"))
    scores = [row["score"] for row in three["hypotheses"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert "EOS" not in three["hypotheses"][0]["text"]


def test_the_seed_decides_a_draw(runs):
    words = ("parity", "0", "--temperature", "1", "--max-new", "12")
    draws = [glass(runs, *words, "--seed", str(seed)) for seed in (5, 5, 6, 7)]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reverse", ""), "an empty prompt"),
        (("reverse", "elephant"), "not in the vocabulary"),
        (("reverse", "3 1", "--temperature", "-1"), "temperature"),
        (("reverse", "3 1", "--top-p", "0"), "top_p"),
        (("reverse", "3 1", "--beams", "0"), "width"),
        (("reverse", "3 1", "--max-new", "0"), "max_new_tokens"),
        (("digits", "FIRST 1 2 SEP"), "no next-token head"),
        (("nowhere", "3 1"), "there is no folder"),
    ],
)
def test_bad_input_is_refused_before_work_starts(runs, words, message):
    with pytest.raises(InputError, match=message):
        glass(runs, *words)
