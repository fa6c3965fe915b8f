"""lm-evaluation-harness over a tiny model: local YAML tasks, offline, checked numbers."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from glassformer.adapters.load import load
from glassformer.cli.main import app
from glassformer.lab.measure.scores import Answerer, run_harness
from glassformer.spec.errors import InputError, MachineError
from tests.adapters import folders

# The harness and its libraries warn about themselves when they are imported.
pytestmark = pytest.mark.filterwarnings("default")

QUESTIONS = [
    {"question": "the cat sat on the", "choices": [" mat", " cat", " return"], "answer": 0},
    {"question": "def f(x):", "choices": [" return x", " naïve"], "answer": 1},
    {"question": "it is 12", "choices": [" 345", " 12", " it", " on"], "answer": 2},
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WRITING = """
task: tiny_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model and a folder of tasks."""
    here = tmp_path_factory.mktemp("harness")
    folders.write_model(here / "model")
    data = here / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("choice", CHOICE), ("text", ROLLING), ("writing", WRITING)):
        filled = text.format(data=data, cache=here / "cache")
        folders.write(here / "tasks", f"{name}.yaml", filled)
    return here


@pytest.fixture(scope="module")
def adapter(place):
    return load(place / "model")


def by_hand(adapter, context, rest):
    """Log-probabilities of a continuation from one plain forward, and whether greedy says it."""
    logits = adapter(torch.tensor([[*context, *rest][:-1]])).double().log_softmax(-1)[0]
    values = [float(logits[len(context) - 1 + i, token]) for i, token in enumerate(rest)]
    best = [int(logits[len(context) - 1 + i].argmax()) for i in range(len(rest))]
    return sum(values), best == list(rest)


@torch.no_grad()
def test_likelihoods_are_those_of_a_plain_forward(adapter):
    answerer = Answerer(adapter)
    pairs = [([5, 6, 7], [8]), ([9], [10, 11, 12]), (list(range(100)), list(range(40)))]
    for (context, rest), found in zip(pairs, answerer.likelihoods(pairs), strict=True):
        wanted = by_hand(adapter, context, rest)
        assert found[0] == pytest.approx(wanted[0], abs=1e-4)
        assert found[1] == wanted[1]
    (first,) = answerer.continuations(["the cat"], {"max_gen_toks": 3})
    greedy = adapter.tokenizer.encode(first)
    if adapter.tokenizer.decode(greedy) == first and len(greedy) == 3:
        assert answerer.likelihoods([(answerer.encode("the cat", begun=True), greedy)])[0][1]


@torch.no_grad()
def test_a_long_context_loses_its_beginning_and_a_long_text_is_cut_in_windows(adapter):
    answerer, longest = Answerer(adapter), adapter.spec.max_seq_len
    ids = torch.randint(300, (longest + 30,), generator=torch.Generator().manual_seed(0)).tolist()
    (found,) = answerer.likelihoods([(ids[:-5], ids[-5:])])
    assert found == answerer.likelihoods([(ids[-longest - 1 : -5], ids[-5:])])[0]
    text = "the cat sat on the mat " * 60
    tokens = adapter.tokenizer.encode(text)
    assert len(tokens) > 2 * longest
    whole = 0.0
    for first in range(0, len(tokens), longest):
        window = tokens[first : first + longest]
        before = [adapter.tokenizer.eos, *tokens[:first]][-(longest + 1 - len(window)) :]
        whole += by_hand(adapter, before, window)[0]
    assert answerer.rolling(text) == pytest.approx(whole, rel=1e-4)
    with pytest.raises(InputError, match="tokens to score"):
        answerer.likelihoods([([1], list(range(longest + 1)))])


def test_the_harness_asks_and_is_answered(place, adapter):
    names = ["tiny_choice", "tiny_text", "tiny_writing"]
    found = run_harness(adapter, names, tasks_dir=place / "tasks")
    answerer = Answerer(adapter)
    right = 0
    for question in QUESTIONS:
        context = answerer.encode(question["question"], begun=True)
        scores = []
        for choice in question["choices"]:
            whole = answerer.encode(question["question"] + choice, begun=True)
            scores.append(answerer.likelihoods([(context, whole[len(context) :])])[0][0])
        right += scores.index(max(scores)) == question["answer"]
    assert found["tasks"]["tiny_choice"]["acc"] == pytest.approx(right / 3)
    texts = [question["question"] for question in QUESTIONS]
    nats = sum(answerer.rolling(text) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    bits = -nats / size / 0.6931471805599453
    assert found["tasks"]["tiny_text"]["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert found["tasks"]["tiny_writing"]["exact_match"] == 0.0
    assert found["examples"] == dict.fromkeys(names, 3)


def test_the_command_prints_what_was_measured(place):
    words = ["evaluate", str(place / "model"), "--suite", "lm-eval", "--limit", "2"]
    words += ["--tasks", "tiny_choice", "--tasks-dir", str(place / "tasks")]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert found["examples"] == {"tiny_choice": 2}
    assert "acc" in found["tasks"]["tiny_choice"]
    assert "tiny_choice: 2 examples" in CliRunner().invoke(app, words).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "lm-evil"], "no suite"),
        (["--suite", "lm-eval"], "no tasks"),
        (["--suite", "lm-eval", "--tasks", "x", "--tasks-dir", "nowhere"], "no folder"),
        (["--suite", "lm-eval", "--split", "test"], "--split"),
        (["--tasks", "x"], "are a suite's"),
    ],
)
def test_what_the_command_refuses(place, words, message):
    result = CliRunner().invoke(app, ["evaluate", str(place / "model"), *words])
    assert isinstance(result.exception, InputError)
    assert message in result.exception.what


def test_an_unknown_task_and_an_unknown_setting_are_refused(place, adapter):
    with pytest.raises(InputError, match="no task 'tiny_choise'"):
        run_harness(adapter, ["tiny_choise"], tasks_dir=place / "tasks")
    with pytest.raises(InputError, match="num_beams"):
        Answerer(adapter).continuations(["x"], {"num_beams": 4})
    with pytest.raises(InputError, match="no context"):
        Answerer(adapter).continuations(["x"], {"max_gen_toks": 500})


def test_without_the_extra_its_name_is_told(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MachineError, match="lm-evaluation-harness") as caught:
        run_harness(adapter, ["x"])
    assert "pip install lm-eval" in caught.value.hint
