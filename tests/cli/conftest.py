"""The command as most tests call it: in this process, with what it printed and its exit code."""

import sys
from collections.abc import Callable

import pytest

import glassformer.__main__ as command

Glass = Callable[..., tuple[int, str, str]]


@pytest.fixture
def glass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Glass:
    """`glass(*words)`: exit code, stdout, stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["glass", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run
