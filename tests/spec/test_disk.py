"""Files appear complete or not at all; what a kill left is removed, what is written now stays."""

import contextlib
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from glassformer.spec.disk import check_new, create, folder_beside, replace_file, replacing
from glassformer.spec.errors import InputError
from glassformer.spec.units import pasted


def folder(path: Path) -> None:
    with folder_beside(path) as beside:
        (beside / "half").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGSTOP)


def file(path: Path) -> None:
    with replacing(path) as beside:
        beside.write(b"x" * 100_000)
        os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def stopped_in(write, path: Path):
    """A process that has written half."""
    child = multiprocessing.get_context("fork").Process(target=write, args=(path,))
    child.start()
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    yield
    child.kill()
    child.join()


def do(write, path: Path) -> None:
    if write is folder:
        with folder_beside(path) as beside:
            beside.rename(path)
    else:
        replace_file(path, b"new")


@pytest.mark.parametrize("write", [folder, file])
@pytest.mark.parametrize("name", ["out", "ou[t]*", "x" * 255, ".tmp-out"])
def test_what_a_kill_left_is_removed_by_the_same_command(write, name, tmp_path):
    path = tmp_path / name
    with stopped_in(write, path):
        assert len(os.listdir(tmp_path)) == 1
    do(write, path)
    assert os.listdir(tmp_path) == [name]
    if write is folder:
        assert os.listdir(path) == []


@pytest.mark.parametrize("write", [folder, file])
def test_what_a_living_process_writes_stays(write, tmp_path):
    with stopped_in(write, tmp_path / "out"):
        before = set(os.listdir(tmp_path))
        do(write, tmp_path / "out")
        assert set(os.listdir(tmp_path)) == before | {"out"}
    do(write, tmp_path / "other")
    with pytest.raises(InputError, match="out exists"):
        check_new(tmp_path / "out")
    if write is folder:
        assert set(os.listdir(tmp_path)) == {"out", "other"}


def test_a_link_in_place_of_a_temporary_name_is_removed_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"old")
    (tmp_path / ".out.tmp").symlink_to(tmp_path / "precious")
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "out", b"new")
    with create(tmp_path / "log") as log:
        log.write(b"new")
    assert (tmp_path / "precious").read_bytes() == b"old"
    assert (tmp_path / "out").read_bytes() == (tmp_path / "log").read_bytes() == b"new"
    assert not (tmp_path / ".out.tmp").is_symlink()


def test_a_link_that_leads_nowhere_exists(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists"):
        check_new(tmp_path / "out")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "out") as beside:
        beside.write(b"new" * (1 // 0))
    assert (tmp_path / "out").read_bytes() == b"old" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("path", "typed"), [("-dash/c", "./-dash/c"), ("a b", "'a b'"), ("runs/x", "runs/x")]
)
def test_a_path_is_pasted_as_a_path(path, typed):
    assert pasted(path) == typed
