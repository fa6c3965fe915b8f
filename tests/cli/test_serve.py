"""`glass serve`: the key of a server, from the command line and from the environment."""

import os

import pytest

from tests.adapters.folders import write_model
from tests.command import glass

HINT = "openssl rand -hex 16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder."""
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("short-k", "an API key of fewer than 8 characters"),
        ("secret-of-21-charactér", "a character that a header cannot carry"),
        ("secret with blanks in it", "a character that a header cannot carry"),
        ("secret-with-an-end\n", "a character that a header cannot carry"),
        ("secret\tand-a-tab", "a character that a header cannot carry"),
    ],
)
@pytest.mark.parametrize("by", ["the command line", "the environment"])
def test_a_key_that_cannot_work_is_refused_and_not_shown(folder, key, words, by):
    words_of = ["--api-key", key] if by == "the command line" else []
    more = {} if words_of else {"GLASS_API_KEY": key}
    found = glass(
        "serve", str(folder), "--port", "0", *words_of, environment={**os.environ, **more}
    )
    assert found.returncode == 2
    assert words in found.stderr
    assert HINT in found.stderr
    assert key.strip() not in found.stdout + found.stderr


def test_an_empty_variable_is_no_key(folder):
    """As it is elsewhere; other machines are then not served."""
    environment = {**os.environ, "GLASS_API_KEY": ""}
    found = glass("serve", str(folder), "--port", "0", "--host", "0.0.0.0", environment=environment)
    assert found.returncode == 2
    assert "can be reached from other machines" in found.stderr


def test_the_help_does_not_print_the_key():
    found = glass(
        "serve", "--help", environment={**os.environ, "GLASS_API_KEY": "a-secret-of-mine"}
    )
    assert found.returncode == 0
    assert "GLASS_API_KEY" in found.stdout
    assert "a-secret" not in found.stdout
