"""The library itself: one thread pool, variants, and what is said when it cannot be used."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glassformer.kernels import build, native
from glassformer.kernels.__main__ import main
from glassformer.spec.errors import InputError, MachineError


def test_it_is_there_and_fresh():
    assert native.available(), native.why_not()
    assert native.variant() == native.variants()[-1]


def test_there_is_one_openmp_runtime():
    """Ours adds none: torch's own is the only one that is mapped because of these imports."""
    script = """
import torch
from glassformer.kernels import native
native.library()
assert native.shares_threads()
maps = open("/proc/self/maps").read().split()
print(len({part for part in maps if "omp" in part.rpartition("/")[2] and ".so" in part}))
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


def test_variants_can_be_forced_and_are_restored():
    best = native.variant()
    for name in native.variants():
        with native.use_variant(name):
            assert native.variant() == name
    assert native.variant() == best
    with pytest.raises(InputError, match="no variant 'neon'"), native.use_variant("neon"):
        pass


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A place without a library; the real one is used again afterwards."""
    path = tmp_path / "_native.so"
    monkeypatch.setattr(native, "LIBRARY", path)
    native._loaded.cache_clear()
    yield path
    native._loaded.cache_clear()


def test_without_the_library_it_is_said_how_to_get_it(elsewhere):
    assert not native.available()
    assert build.COMMAND in native.why_not()
    with pytest.raises(MachineError, match="not compiled"):
        native.library()


def test_a_library_of_other_sources_is_not_used(elsewhere, monkeypatch):
    monkeypatch.setattr(build, "digest", lambda: "other")
    build.build(target=elsewhere, flags=("-O0", "-std=gnu11"))
    assert "other sources" in native.why_not()


def test_a_damaged_library_is_not_used(elsewhere):
    elsewhere.write_bytes(b"not a library")
    assert "cannot be loaded" in native.why_not()


def test_building_fails_with_a_reason(tmp_path):
    with pytest.raises(MachineError, match="no C compiler: looked for nobody"):
        build.build(compiler="nobody", target=tmp_path / "x.so")
    with pytest.raises(MachineError, match="could not compile"):
        build.build(target=tmp_path / "x.so", flags=("-include", "nothing.h"))
    with pytest.raises(MachineError, match=r"could not compile|cannot write"):
        build.build(target=tmp_path / "none" / "x.so", flags=("-O0",))
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_what_is_in_use_and_how_building_failed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels"])
    assert main() == 0
    assert native.variant() in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kernels", "build", "--compiler", "nobody"])
    assert main() == 5
    assert "no C compiler" in capsys.readouterr().err


def test_torch_is_where_the_pool_is_looked_for():
    assert (Path(torch.__file__).parent / "lib").is_dir()
    assert native.shares_threads()
