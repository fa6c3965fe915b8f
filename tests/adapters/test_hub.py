"""`org/name` in a local cache: found by its references, never fetched, never led astray."""

import sys
from pathlib import Path

import pytest

from glassformer.adapters.folder import hub
from glassformer.cli.shell import resolve
from glassformer.spec.errors import FileError, GlassError, InputError, MachineError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def make_cache(tmp_path):
    """A cache with two snapshots of one model."""
    home = tmp_path / "hub" / "models--Org--Name-0.5B"
    for commit in (COMMIT, OTHER):
        (home / "snapshots" / commit).mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    (home / "refs" / "v2").write_text(OTHER + "\n")
    return tmp_path / "hub"


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path)


def test_a_name_is_its_main_snapshot(cache):
    home = cache / "models--Org--Name-0.5B" / "snapshots"
    assert hub.resolve("Org/Name-0.5B", cache=cache) == home / COMMIT
    assert hub.resolve("Org/Name-0.5B@v2", cache=cache) == home / OTHER
    assert hub.resolve(f"Org/Name-0.5B@{OTHER}", cache=cache) == home / OTHER


def test_a_path_that_exists_is_itself(cache, tmp_path, monkeypatch):
    assert hub.resolve(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Org" / "Name-0.5B").mkdir(parents=True)
    assert hub.resolve("Org/Name-0.5B", cache=cache) == Path("Org/Name-0.5B")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder beside which there is nothing."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "text",
    [
        "Org/Other",
        "Org/Name-0.5B@v3",
        "../x",
        "Org/../../x",
        "a/b/c",
        "Org--x/y",
        "",
        "Org/",
        "/x/y",
    ],
)
def test_what_is_not_there_is_said(text, cache):
    if text == "":
        text = "nothing-here"
    with pytest.raises(InputError, match=r"not in the local cache|there is no folder"):
        hub.resolve(text, cache=cache)


@pytest.mark.parametrize("revision", ["../../x", "a/../b", "x" * 300, "-x", "a\nb"])
def test_revisions_lead_nowhere_else(revision, cache):
    with pytest.raises(InputError, match="revision"):
        hub.find_snapshot("Org/Name-0.5B", cache=cache, revision=revision)


@pytest.mark.parametrize("content", ["../../../etc", "", "g" * 40, COMMIT[:-1]])
def test_a_reference_must_be_a_commit(content, cache):
    (cache / "models--Org--Name-0.5B" / "refs" / "main").write_text(content)
    with pytest.raises(FileError, match="names no commit"):
        hub.resolve("Org/Name-0.5B", cache=cache)


def test_what_a_name_can_be():
    assert hub.is_name("Org/Name-0.5B")
    # Two names must not mean one folder, and none a folder elsewhere.
    assert not any(map(hub.is_name, ("Org--x/y", "Org/..", "../x", "a/b/c", "a", "a/", "-a/b")))


def test_without_a_cache_only_paths_are_known():
    with pytest.raises(InputError, match="no folder"):
        hub.resolve("Org/Name-0.5B")


def test_where_the_cache_is():
    assert resolve.hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert resolve.hub_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert resolve.hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert resolve.hub_cache({}) == Path.home() / ".cache/huggingface/hub"


def test_a_word_on_the_command_line(cache, tmp_path):
    runs = tmp_path / "runs"
    (runs / "mine").mkdir(parents=True)
    assert resolve.find_model("mine@7", runs=runs) == str(runs / "mine@7")
    assert resolve.find_model(str(runs), runs=runs) == str(runs)
    found = resolve.find_model("Org/Name-0.5B", runs=runs, cache=cache)
    assert found.endswith(COMMIT)
    with pytest.raises(InputError, match="not in the local cache"):
        resolve.find_model("Org/Other", runs=runs, cache=cache)


class Terminal:
    """A person who types one line."""

    def __init__(self, line):
        self.line = line

    def isatty(self):
        return True

    def readline(self):
        return self.line


def test_a_download_asks_first(cache, tmp_path, monkeypatch, capsys):
    wanted = []
    monkeypatch.setattr(hub, "download", lambda name, **rest: wanted.append(name) or cache)
    ask = {"runs": tmp_path, "download": True, "cache": cache}
    with pytest.raises(InputError, match="no terminal to ask at"):
        resolve.find_model("Org/Other", **ask)
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    with pytest.raises(InputError, match="nothing was downloaded"):
        resolve.find_model("Org/Other", **ask)
    assert wanted == []
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert resolve.find_model("Org/Other", **ask) == str(cache)
    assert wanted == ["Org/Other"]
    assert "download Org/Other from huggingface.co" in capsys.readouterr().err


def test_a_download_that_cannot_be_is_three_lines(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MachineError, match="needs huggingface_hub"):
        hub.download("Org/Other", cache=cache)
    with pytest.raises(GlassError, match="no model's name"):
        hub.download("../x", cache=cache)
