import pytest

from glassformer.spec.errors import (
    CheckFailed,
    DivergedError,
    FileError,
    GlassError,
    InputError,
    MachineError,
    nearest,
)


def test_a_message_has_at_most_three_lines():
    error = InputError("d_model 7 is odd", where="spec.json", hint="use 8")
    assert str(error).splitlines() == ["d_model 7 is odd", "  at: spec.json", "hint: use 8"]
    assert str(InputError("alone")) == "alone"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(CheckFailed, 1), (InputError, 2), (FileError, 3), (DivergedError, 4), (MachineError, 5)],
)
def test_exit_codes_are_the_designs(kind, code):
    assert kind.exit_code == code
    assert issubclass(kind, GlassError)


def test_bad_input_is_a_value_error():
    assert issubclass(InputError, ValueError)


def test_nearest_names_one_choice_or_all():
    assert nearest("d_modle", ["d_model", "d_ff"]) == "did you mean 'd_model'?"
    assert nearest("zzz", ["d_ff", "d_model"]) == "known: d_ff, d_model"
    assert nearest("zzz", []) == "nothing is known here"


def test_options_are_spelled_as_the_reader_would_type_them():
    error = InputError("{--a|a=1} is odd", where="{x}", hint="use {--b-c|b_c=True}, not {d, e}")
    assert str(error) == "a=1 is odd\n  at: {x}\nhint: use b_c=True, not {d, e}"
    assert str(error.in_command()) == "--a is odd\n  at: {x}\nhint: use --b-c, not {d, e}"
    assert error.args == ("a=1 is odd",)
