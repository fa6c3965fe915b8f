"""`takes`: a spec's options on the command line, and which of them were typed."""

import subprocess
import sys
from typing import Annotated

import pytest
import typer
from typer.core import TyperCommand
from typer.main import get_command
from typer.testing import CliRunner

from glassformer.cli.main import app
from glassformer.cli.shell.help import Verb
from glassformer.cli.shell.options import AsJson, takes
from glassformer.spec.checks import spec
from glassformer.spec.options import option
from tests.spec.test_options import Sample


@spec
class Other:
    """Shares a field with `Sample`."""

    count: int = option(3, help="The same count.", flag="--how-many")
    width: int = option(4, help="A width.", at_least=1)


def run(*words: str):
    own, got = typer.Typer(rich_markup_mode=None), []

    @own.command()
    @takes(Sample, Other, into="given")
    def verb(name: str, given: dict[str, object], as_json: AsJson = False) -> None:
        """Do it."""
        got.append((name, given, as_json))

    result = CliRunner().invoke(own, list(words), env={"COLUMNS": "200"})
    return result, got


def test_only_what_was_typed_arrives():
    result, got = run("x")
    assert result.exit_code == 0
    assert got == [("x", {}, False)]


def test_values_have_the_types_of_the_fields():
    words = "x --how-many 3 --share 1 --heads 2k --untied --stops a --stops b --width 9 --json"
    result, got = run(*words.split())
    assert result.exit_code == 0, result.output
    given = {"count": 3, "share": 1.0, "heads": 2000, "tied": False, "stops": ("a", "b")}
    assert got == [("x", given | {"width": 9}, True)]
    assert type(got[0][1]["share"]) is float


def test_a_typed_default_is_typed():
    assert run("x", "--how-many", "5")[1] == [("x", {"count": 5}, False)]


def test_help_lists_every_option_once_with_limits_and_default():
    text = run("--help")[0].output
    assert text.count("--how-many") == 1
    assert "A share. [default: 1; 0 < x <= 1]" in text
    assert text.index("--how-many") < text.index("--width") < text.index("--json")
    assert "unlisted" not in text


def test_text_where_a_number_belongs_is_refused():
    result, got = run("x", "--how-many", "many")
    assert (result.exit_code, got) == (2, [])


def test_two_flags_for_one_field_are_a_mistake_of_ours():
    @spec
    class Clash:
        count: int = option(3, help="Another flag.")

    with pytest.raises(AssertionError):
        takes(Sample, Clash, into="given")


def converted(cls: type, *words: str):
    own, got = typer.Typer(rich_markup_mode=None), []

    @own.command(cls=cls)
    def verb(
        name: str,
        more: list[str] | None = None,
        count: int | None = None,
        share: float = 0.5,
        at_least_one: Annotated[int, typer.Option(min=1)] = 1,
        is_on: bool | None = None,
    ) -> None:
        got.append((name, more, count, share, at_least_one, is_on))

    return CliRunner().invoke(own, list(words)), got


@pytest.mark.parametrize(
    "words",
    [
        "x",
        "7 --count 3 --share 2 --more a --more b",
        "x --at-least-one 2 --is-on",
        "x --no-is-on --share 1e-3",
        "x --at-least-one 0",
        "x --count 1.5",
        "x --share half",
    ],
)
def test_values_are_read_as_typer_reads_them(words):
    (ours, got), (plain, wanted) = (
        converted(Verb, *words.split()),
        converted(TyperCommand, *words.split()),
    )
    assert got == wanted
    assert [type(value) for each in got for value in each] == [
        type(value) for each in wanted for value in each
    ]
    assert ours.exit_code == plain.exit_code
    if "1.5" in words or "half" in words:
        assert "is not a " in ours.output


COMPUTING = (
    *("demo", "design", "lr-find", "train", "finetune", "evaluate", "report", "generate", "chat"),
    *("serve", "explore", "inspect", "extract", "verify", "diff", "quantize"),
)


def test_every_verb_that_computes_takes_the_same_device():
    verbs, texts = get_command(app).commands, set()
    for verb in COMPUTING:
        (device,) = [param for param in verbs[verb].params if param.name == "device"]
        texts.add((tuple(device.opts), device.metavar, device.help, device.default))
    assert len(texts) == 1, texts


@pytest.mark.parametrize("words", ["demo --runs {}", "diff core core", "explore {}"])
def test_an_unknown_device_is_refused_before_anything_happens(words, tmp_path):
    result = CliRunner().invoke(app, [*words.format(tmp_path).split(), "--device", "tpu"])
    assert "unknown device 'tpu'" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_options_need_no_torch():
    code = "import sys, glassformer.cli.main; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False"
