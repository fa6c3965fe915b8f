"""`glass generate`: greedy, draws, beams, constraints, JSON, and what it refuses."""

import json
import sys

import pytest
from typer.testing import CliRunner

import glassformer as gf
from glassformer.adapters import array_model, executors, generate
from glassformer.cli import main as command
from glassformer.cli.main import app
from glassformer.data.automata.library import parity


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


def test_a_text_that_repeats_itself_is_told_from_one_that_does_not(runs):
    from glassformer.cli.verbs.generate import repeats

    assert repeats([5, 9] + [3, 1, 4] * 12)
    assert not repeats([3] * 16)  # too short to say
    assert not repeats([*range(40)])
    assert not repeats([3, 1, 4] * 12 + [7])
    words = ["generate", "parity", "1 0 1", "--runs", runs, "--max-new", "60", "--min-new", "60"]
    shown = CliRunner().invoke(app, words)
    tokens = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["tokens"]
    assert ("it repeats itself" in shown.output) == repeats(tokens)


def test_the_cache_changes_nothing_and_stdin_is_read(runs):
    words = ("reverse", "3 1 4", "--max-new", "6")
    assert glass(runs, *words) == glass(runs, "reverse", "3 1 4", "--max-new-tokens", "6")
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


def test_beams_take_their_options(runs):
    words = ("reverse", "3 1 4", "--max-new", "4", "--beams", "4", "--json")
    plain = json.loads(glass(runs, *words))["hypotheses"]
    best = json.loads(glass(runs, *words, "--n-best", "2"))["hypotheses"]
    assert [row["tokens"] for row in best] == [row["tokens"] for row in plain[:2]]
    short = json.loads(glass(runs, *words, "--penalty", "power", "--length-penalty", "-2"))
    for row in short["hypotheses"]:
        assert row["score"] == pytest.approx(sum(row["logprobs"]) * len(row["tokens"]) ** 2)
    apart = json.loads(glass(runs, *words, "--groups", "4", "--diversity", "50"))["hypotheses"]
    assert len({row["tokens"][0] for row in apart}) == 4


def test_the_seed_decides_a_draw(runs):
    words = ("parity", "0", "--temperature", "1", "--max-new", "12")
    draws = [glass(runs, *words, "--seed", str(seed)) for seed in (5, 5, 6, 7)]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 1


def test_tokens_are_forbidden_forced_and_stopped_at(runs):
    words = ("parity", "0", "--temperature", "1", "--max-new", "12", "--min-new", "12", "--json")
    free = json.loads(glass(runs, *words, "--seed", "4"))
    assert len(free["tokens"]) == 12
    assert "1" in free["text"]
    without = json.loads(glass(runs, *words, "--forbid", "1"))
    assert "1" not in without["text"]
    begun = json.loads(glass(runs, *words, "--force", "1 1 0"))
    assert begun["text"].startswith("1 1 0")
    cut = json.loads(glass(runs, *words, "--seed", "4", "--stop", "1"))
    assert cut["text"] == free["text"].partition("1")[0]
    assert cut["finish"] == "stop"


def test_a_machine_or_a_pattern_is_kept_to(runs):
    """Beams and draws alike; symbols of the vocabulary are the machine's."""
    words = ("parity", "0", "--max-new", "9", "--machine", "parity", "--json")
    drawn = json.loads(glass(runs, *words, "--temperature", "3"))["text"]
    found = [row["text"] for row in json.loads(glass(runs, *words, "--beams", "3"))["hypotheses"]]
    for text in (drawn, *found):
        assert parity().accepts(text.split())
    exact = glass(runs, "parity", "0", "--constrain", "1(01)?0", "--max-new", "9")
    assert exact.split() in (["1", "0"], ["1", "0", "1", "0"])


def test_options_without_effect_are_told(runs, capsys):
    glass(runs, "reverse", "3 1", "--max-new", "2", "--top-p", "0.9")
    result = CliRunner().invoke(app, ["generate", "reverse", "3 1", "--top-k", "3", "--runs", runs])
    assert "note: --top-k" in result.stderr


TOO_LONG = " ".join(["3"] * 70)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reverse", ""), "an empty prompt"),
        (("reverse", "   "), "an empty prompt"),
        (("reverse", TOO_LONG), "a source of 71 tokens exceeds max_seq_len 64"),
        (("parity", " ".join(["1"] * 40)), "a prompt of 41 tokens leaves no room"),
        (("reverse", "elephant"), "not in the vocabulary"),
        (("reverse", "3 1", "--temperature", "-1"), "temperature -1.0"),
        (("reverse", "3 1", "--temperature", "nan"), "temperature nan"),
        (("reverse", "3 1", "--temperature", "inf"), "temperature inf"),
        (("reverse", "3 1", "--top-p", "0"), "--top-p 0.0 is outside"),
        (("reverse", "3 1", "--top-p", "nan"), "--top-p nan"),
        (("reverse", "3 1", "--top-k", "0"), "--top-k 0"),
        (("reverse", "3 1", "--beams", "0"), "--beams 0 is below 1"),
        (("reverse", "3 1", "--max-new", "0"), "--max-new 0"),
        (("reverse", "3 1", "--constrain", "[a-z]+"), "no token of the vocabulary"),
        (("parity", "0", "--constrain", "1" * 50), "the constraint allows no sequence"),
        (("parity", "0", "--constrain", "(1"), "a ( that is not closed"),
        (("parity", "0", "--machine", "parrot"), "machine 'parrot' is not known"),
        (("parity", "0", "--machine", "parity", "--constrain", "1"), "two constraints"),
        (("reverse", "3 1", "--forbid", "elephant"), "not in the vocabulary"),
        (("reverse", "3 1", "--forbid", ""), "--forbid '' has no token"),
        (("reverse", "3 1", "--force", ""), "--force '' has no token"),
        (("reverse", "3 1", "--n-best", "2"), "--n-best belongs to a beam search"),
        (("reverse", "3 1", "--beams", "2", "--temperature", "1"), "does not go with --beams"),
        (("reverse", "3 1", "--beams", "2", "--penalty", "long"), "--penalty 'long'"),
        (("reverse", "3 1", "--no-cache", "--speculate"), "--speculate is for the default step"),
        (("reverse", "3 1", "--device", "tpu"), "unknown device 'tpu'"),
        (("digits", "FIRST 1 2 SEP"), "glass inspect shows what it predicts"),
        (("nowhere", "3 1"), "there is no folder"),
    ],
)
def test_bad_input_is_three_lines_before_work_starts(runs, words, message, monkeypatch, capsys):
    """Exit code 2, nothing on stdout, and no model has made a step."""
    work = []
    for place, name in (
        (array_model, "ArrayStepper"),
        (executors, "NativeStepper"),
        (generate, "NaiveStepper"),
    ):
        stepper = getattr(place, name)
        seen = type(name, (stepper,), {"start": lambda self, *_, **__: work.append(self)})
        monkeypatch.setattr(place, name, seen)
    monkeypatch.setattr(sys, "argv", ["glass", "generate", *words, "--runs", runs])
    with pytest.raises(SystemExit) as ended:
        command.main()
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.strip().splitlines()) <= 3
    assert not work


def test_ctrl_c_ends_a_stream_cleanly(runs, monkeypatch, capsys):
    """What was made stays on stdout; the exit code is a signal's."""

    class Interrupted(array_model.ArrayStepper):
        def step(self, tokens_B, *, past):
            if self.positions > 3:
                raise KeyboardInterrupt
            return super().step(tokens_B, past=past)

    monkeypatch.setattr(array_model, "ArrayStepper", Interrupted)
    words = ["glass", "generate", "parity", "0", "--min-new", "9", "--runs", runs]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        command.main()
    shown = capsys.readouterr()
    assert ended.value.code == 130
    assert len(shown.out.split()) == 3
    assert shown.err.strip() == "stopped"
