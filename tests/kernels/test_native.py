"""The library itself: one thread pool, variants, and what is said when it cannot be used."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glassformer.kernels import build, c_library
from glassformer.kernels.__main__ import main
from glassformer.spec.errors import InputError, MachineError

#: Compiled in a second.
QUICK = ("-O0", "-std=gnu11", "-DGLASS_PORTABLE_ONLY", "-DGLASS_NO_INLINE")


def test_it_is_there_and_fresh():
    assert c_library.available(), c_library.unavailable()
    assert c_library.variant() == c_library.variants()[-1]


def test_there_is_one_openmp_runtime():
    """Ours adds none: torch's own is the only one that is mapped because of these imports."""
    script = """
import torch
from glassformer.kernels import c_library as native
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
    best = c_library.variant()
    for name in c_library.variants():
        with c_library.use_variant(name):
            assert c_library.variant() == name
    assert c_library.variant() == best
    with pytest.raises(InputError, match="no variant 'neon'"), c_library.use_variant("neon"):
        pass


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A place without a library; the real one is used again afterwards."""
    path = tmp_path / "_native.so"
    monkeypatch.setattr(c_library, "LIBRARY", path)
    c_library._loaded.cache_clear()
    yield path
    c_library._loaded.cache_clear()


def test_without_the_library_it_is_said_how_to_get_it(elsewhere):
    assert not c_library.available()
    assert build.COMMAND in c_library.unavailable()
    with pytest.raises(MachineError, match="not compiled"):
        c_library.library()


def test_a_library_of_other_sources_is_not_used(elsewhere, monkeypatch):
    monkeypatch.setattr(build, "digest", lambda: "other")
    build.build(target=elsewhere, flags=QUICK)
    assert "other sources" in c_library.unavailable()


def test_a_damaged_library_is_not_used(elsewhere):
    elsewhere.write_bytes(b"not a library")
    assert "cannot be loaded" in c_library.unavailable()


def test_building_fails_with_a_reason(tmp_path):
    with pytest.raises(MachineError, match="no C compiler: looked for nobody"):
        build.build(compiler="nobody", target=tmp_path / "x.so")
    with pytest.raises(MachineError, match="could not compile"):
        build.build(target=tmp_path / "x.so", flags=("-include", "nothing.h"))
    with pytest.raises(MachineError, match=r"could not compile|cannot write"):
        build.build(target=tmp_path / "none" / "x.so", flags=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_what_is_in_use_and_how_building_failed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels"])
    assert main() == 0
    assert c_library.variant() in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kernels", "build", "--compiler", "nobody"])
    assert main() == 5
    assert "no C compiler" in capsys.readouterr().err


def test_torch_is_where_the_pool_is_looked_for():
    assert (Path(torch.__file__).parent / "lib").is_dir()
    assert c_library.shares_threads()
