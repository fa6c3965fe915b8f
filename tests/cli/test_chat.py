"""`glass generate MODEL --chat`: over a pipe, at a terminal, and with a Ctrl-C in the middle."""

import io
import json
import os
import signal
import sys

import pytest
from typer.testing import CliRunner

import glassformer as gf
from glassformer.adapters import array_model
from glassformer.adapters.folder.paths import load_tokenizer
from glassformer.cli.main import app
from glassformer.cli.verbs import generate
from glassformer.kernels import c_library
from glassformer.spec.errors import InputError
from tests.adapters import folders

GREEDY = ("--temperature", "0", "--max-new", "9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(folders.write_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def small(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("small") / "model"
    gf.save(gf.quantize(gf.load(folder), bits=8), place)
    return str(place)


def glass(folder, *words, lines=()):
    """stdout and stderr of a chat over a pipe."""
    stdin = "".join(f"{line}\n" for line in lines)
    result = CliRunner().invoke(app, ["generate", folder, "--chat", *words], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout, result.stderr


def answers(folder, *words, lines=()):
    """The answers as JSON."""
    stdout, _ = glass(folder, *words, "--json", lines=lines)
    return [json.loads(line) for line in stdout.splitlines()]


def test_every_line_is_a_question_and_the_end_is_the_end(folder):
    one, two = answers(folder, *GREEDY, lines=["the cat", "", "on the mat"])
    assert set(one) == {"text", "tokens", "finish", "dropped"}
    assert len(one["tokens"]) <= 9
    assert one["finish"] in ("eos", "length")
    assert one["text"] != two["text"]
    stdout, stderr = glass(folder, *GREEDY, lines=["the cat", "on the mat"])
    assert stdout == f"{generate.visible(one['text'])}\n{generate.visible(two['text'])}\n"
    assert stderr.count("cut off") == [one["finish"], two["finish"]].count("length")


def test_the_prompt_is_the_first_question(folder):
    first, second = answers(folder, "the cat", *GREEDY, lines=["on the mat"])
    assert [first, second] == answers(folder, *GREEDY, lines=["the cat", "on the mat"])


def test_history_matters_until_it_is_forgotten(folder):
    lines = ["the cat", "the mat", "/reset", "the mat", "/quit", "x"]
    found = answers(folder, *GREEDY, lines=lines)
    alone = answers(folder, *GREEDY, lines=["the mat"])
    assert len(found) == 3
    assert found[2]["text"] == alone[0]["text"] != found[1]["text"]


def test_the_systems_words_come_first(folder):
    plain, told = answers(folder, *GREEDY, lines=["cat", "/reset", "/system the mat", "cat"])
    assert plain["tokens"] != told["tokens"]
    assert answers(folder, *GREEDY, "--system", "the mat", lines=["cat"]) == [told]


def test_the_folders_settings_are_used_unless_others_are_given(folder):
    conversation = generate.open_conversation(folder, {}, generate.Opening())
    spec = conversation.spec
    assert (spec.temperature, spec.top_p, spec.top_k) == (0.7, 0.9, 20)
    assert spec.eos == (312, 310)
    assert spec.forbidden == tuple(range(313, 320))
    given = {"temperature": 0.0, "max_new_tokens": 5, "stop": ("x",)}
    spec = generate.open_conversation(folder, given, generate.Opening()).spec
    assert (spec.temperature, spec.top_p, spec.max_new_tokens) == (0.0, 0.9, 5)
    assert spec.stop == ("x",)
    drawn = [answers(folder, "--seed", str(seed), lines=["the cat"]) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_options_without_effect_are_mentioned(folder):
    _, stderr = glass(folder, "--temperature", "0", "--top-k", "3")
    assert "note: --top-k" in stderr
    assert "note" not in glass(folder, "--temperature", "1", "--top-k", "3")[1]


def test_a_plain_prompt_ends_at_any_end_and_meets_no_nameless_id(folder):
    spec = generate.read_options({"forbidden": ("the",)}, load_tokenizer(folder)).decoding
    assert spec.eos == (312, 310)
    assert set(range(313, 320)) < set(spec.forbidden)


def test_options_reach_the_template(folder):
    options = ["enable_thinking=false", "name=Ada"]
    talk = generate.open_conversation(folder, {}, generate.Opening(chat_option=options))
    assert talk.options == {"enable_thinking": False, "name": "Ada"}


@pytest.mark.parametrize("drawn", [("--seed", "2"), GREEDY])
@pytest.mark.parametrize("which", ["folder", "small"])
def test_a_chat_without_torch_says_what_one_with_it_says(which, drawn, request, monkeypatch):
    folder = request.getfixturevalue(which)
    found = array_model.open_stepper(folder, in_turns=True)
    assert (found is not None) == c_library.available()
    lines = ["the cat", "on the mat", "/reset", "the mat"]
    wanted = answers(folder, *drawn, lines=lines)
    opened = []
    monkeypatch.setattr(array_model, "open_stepper", lambda *_, **__: opened.append(1))
    assert answers(folder, *drawn, lines=lines) == wanted
    assert opened


def test_a_cache_that_there_is_not_is_refused_by_name(folder):
    with pytest.raises(InputError, match="is not one of float, int8"):
        generate.open_conversation(folder, {"kv_cache": "int9"}, generate.Opening())


def test_in_python_a_model_chats_and_streams(folder):
    model = gf.load(folder)
    talk = model.chat(temperature=0.0, max_new_tokens=9, system="the mat")
    first = talk("the cat")
    pieces = list(talk.ask("on the mat"))
    found = answers(folder, *GREEDY, "--system", "the mat", lines=["the cat", "on the mat"])
    assert [first, "".join(pieces)] == [one["text"] for one in found]
    assert len(pieces) == len(found[1]["tokens"])
    assert [line.split(":")[0] for line in repr(talk).splitlines() if ": " in line][:3] == [
        "system",
        "user",
        "assistant",
    ]
    whole = model.generate("the cat", max_new_tokens=6)
    assert "".join(model.stream("the cat", max_new_tokens=6)) == whole
    ids = model.tokenizer.encode("the cat")
    assert list(model.stream(ids, max_new_tokens=6)) == model.generate(ids, max_new_tokens=6)
    told = list(gf.stream_tokens(model, "the cat", max_new_tokens=6))
    assert "".join(map(str, told)) == whole
    with pytest.raises(InputError, match="a chat has no option 'width'"):
        model.chat(width=3)
    with pytest.raises(InputError, match="came from no folder"):
        gf.build(gf.preset("core", vocab_size=300)).chat()


def test_turns_out_of_sight_are_told(folder):
    _, stderr = glass(folder, *GREEDY, lines=[f"the cat sat {n}" for n in range(8)])
    assert "no longer fit" in stderr


def test_save_and_help(folder, tmp_path):
    file = tmp_path / "talk.jsonl"
    lines = ["the cat", f"/save {file}", "/help", "//etc is a folder"]
    found, stderr = glass(folder, *GREEDY, "--json", lines=lines)
    assert len(found.splitlines()) == 2
    assert "/reset" in stderr
    messages = json.loads(file.read_text())["messages"]
    assert messages[0] == {"role": "user", "content": "the cat"}


@pytest.mark.parametrize(
    ("words", "lines", "message"),
    [
        (("--beams", "4"), (), "--beams does not go with --chat"),
        (("--constrain", "a"), (), "--constrain does not go with --chat"),
        (("--chat-option", "x"), (), "--chat-option 'x' is not NAME=VALUE"),
        (("--raw",), (), "--raw does not go with --chat"),
        (("--temperature", "-1"), (), "temperature"),
        ((), ("/rest",), "'/rest' is no command"),
        ((), ("/save",), "needs a file"),
        ((), ("你好" * 90,), "of a context of"),
    ],
)
def test_what_a_chat_refuses(folder, words, lines, message):
    with pytest.raises(InputError, match=message):
        glass(folder, *words, lines=lines)


def test_what_belongs_to_a_chat_alone(folder):
    for words in (["x", "--system", "y"], [], ["x", "--chat-option", "a=1"]):
        result = CliRunner().invoke(app, ["generate", folder, *words])
        assert isinstance(result.exception, InputError)


def test_a_model_without_a_template_is_told_so(tmp_path):
    folder = folders.write_model(tmp_path / "base")
    folders.write_names(folder, chat_template=None)
    with pytest.raises(InputError, match="no chat template"):
        glass(str(folder), lines=["x"])


# --- at a terminal ------------------------------------------------------------------------------


class Typed(io.StringIO):
    """Lines that a person types; a line that is an exception is what a key does."""

    def __init__(self, *lines):
        super().__init__()
        self.lines = list(lines)

    def isatty(self):
        return True

    def readline(self, size=-1):
        line = self.lines.pop(0) if self.lines else ""
        if isinstance(line, BaseException):
            raise line
        return line


def test_errors_at_a_terminal_do_not_end_the_conversation(folder, monkeypatch, capsys):
    talk = generate.open_conversation(
        folder, {"temperature": 0.0, "max_new_tokens": 4}, generate.Opening()
    )
    typed = Typed("/nothing\n", KeyboardInterrupt(), "the cat\n")
    monkeypatch.setattr(sys, "stdin", typed)
    assert generate.converse(talk) == 0
    seen = capsys.readouterr()
    assert "is no command" in seen.err
    assert "/quit or Ctrl-D leaves" in seen.err
    assert len(talk.messages) == 2
    assert generate.visible(talk.messages[1]["content"]) in seen.out


def test_ctrl_c_ends_the_answer_and_not_the_conversation(folder, capsys):
    talk = generate.open_conversation(
        folder, {"temperature": 0.0, "max_new_tokens": 40}, generate.Opening()
    )
    before = signal.getsignal(signal.SIGINT)
    heard = 0
    for _ in generate.answering(talk, "the cat"):
        heard += 1
        if heard == 3:
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == 3
    assert talk.last.finish == "stopped"
    assert signal.getsignal(signal.SIGINT) is before
    assert len(list(generate.answering(talk, "the mat"))) > 0


def test_a_second_ctrl_c_is_not_held_back(folder):
    talk = generate.open_conversation(
        folder, {"temperature": 0.0, "max_new_tokens": 40}, generate.Opening()
    )

    def twice():
        for _ in generate.answering(talk, "the cat"):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
