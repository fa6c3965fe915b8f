"""Checkpoint folders: whole or not at all, every bit accounted for."""

import errno
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.manifest import stored
from glassformer.spec.serialize import to_json
from glassformer.store.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    verify_folder,
    write_folder,
)
from glassformer.store.tensors import BFLOAT16, tensor_bytes
from tests.tiny import tiny

SPEC = tiny(layers=1)


def weights(dtype="<f4"):
    draw = np.random.default_rng(0)
    shapes = {name: p.shape for name, p in stored(SPEC).items()}
    if dtype == BFLOAT16:
        return {n: draw.integers(0, 0x4000, s).astype("<u2").view(dtype) for n, s in shapes.items()}
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "c", SPEC, weights(), files={"origin/config.json": b"{}\n"})
    return tmp_path / "c"


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", BFLOAT16], ids=str)
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, dtype):
    save_checkpoint(tmp_path / "deep" / "c", SPEC, weights(dtype))
    spec, arrays = load_checkpoint(tmp_path / "deep" / "c")
    assert spec == SPEC
    want = weights(dtype)
    assert arrays.keys() == want.keys()
    for name, array in want.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].tobytes() == array.tobytes()


def test_the_folder_is_what_the_design_says(folder):
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert files == ["MANIFEST.json", "model.safetensors", "origin/config.json", "spec.json"]
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["format"] == 1
    assert sorted(manifest["files"]) == files[1:]
    assert (folder / "spec.json").read_text() == to_json(SPEC)
    assert verify_folder(folder) == manifest
    assert os.listdir(folder.parent) == ["c"]


def test_the_same_weights_give_the_same_bytes(tmp_path, folder):
    save_checkpoint(tmp_path / "d", SPEC, weights(), files={"origin/config.json": b"{}\n"})
    for name in ("MANIFEST.json", "spec.json", "model.safetensors"):
        assert (tmp_path / "d" / name).read_bytes() == (folder / name).read_bytes()


def test_one_that_exists_is_never_overwritten(folder):
    before = (folder / "MANIFEST.json").read_bytes()
    with pytest.raises(InputError, match="exists"):
        save_checkpoint(folder, SPEC, weights())
    assert (folder / "MANIFEST.json").read_bytes() == before


def test_a_misfit_names_each_tensor_before_anything_is_written(tmp_path):
    arrays = weights()
    del arrays["embed.weight"]
    arrays["stranger"] = np.zeros(2, "<f4")
    arrays["heads.next.bias"] = np.zeros(3, "<f4")
    with pytest.raises(InputError) as caught:
        save_checkpoint(tmp_path / "c", SPEC, arrays)
    for words in ("missing: embed.weight", "unexpected: stranger", "heads.next.bias (3,) instead"):
        assert words in str(caught.value)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../out", "{here}/out", "a/../../out", "", "MANIFEST.json", "spec.json", "model.safetensors"],
)
def test_a_file_may_not_leave_the_folder_or_take_a_reserved_name(tmp_path, name):
    name = name.format(here=tmp_path)
    with pytest.raises(InputError, match="cannot be the name"):
        save_checkpoint(tmp_path / "c", SPEC, weights(), files={name: b""})
    assert not os.listdir(tmp_path)


# --- a write that fails, and a kill -------------------------------------------------------------


def test_a_write_that_fails_at_any_sync_leaves_nothing_or_all(tmp_path, monkeypatch):
    real, calls = os.fsync, 0

    def failing(at, error):
        def fsync(handle):
            nonlocal calls
            calls += 1
            if calls == at:
                raise error
            real(handle)

        return fsync

    endings = set()
    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        for at in range(1, 20):
            calls, place = 0, tmp_path / f"{type(error).__name__}-{at}"
            monkeypatch.setattr(os, "fsync", failing(at, error))
            expected = MachineError if isinstance(error, OSError) else KeyboardInterrupt
            try:
                write_folder(place / "c", {"a": b"1", "b": b"2", "sub/c": b"3"})
                assert calls < at
                endings.add("done")
                break
            except expected:
                assert os.listdir(place) in ([], ["c"])
            if (place / "c").exists():
                verify_folder(place / "c")
                endings.add("whole")
            else:
                endings.add("nothing")
    assert endings == {"done", "whole", "nothing"}


def test_a_write_that_cannot_be_made_leaves_no_temporary(tmp_path):
    with pytest.raises(MachineError, match="could not write"):
        write_folder(tmp_path / "c", {"a": b"a file", "a/b": b"below a file"})
    assert not os.listdir(tmp_path)


def test_a_full_disk_is_told_with_what_is_needed(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError) as caught:
        write_folder(tmp_path / "c", {"a": bytes(12_345)})
    assert "No space left" in str(caught.value)
    assert "12,345 bytes" in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_kill_at_any_sync_leaves_the_old_or_the_whole_new(tmp_path):
    """A child is killed at its n-th sync, for every n; only store is imported, so it is quick."""
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from glassformer.store.checkpoint import verify_folder, write_folder
        place, real = Path(sys.argv[1]), os.fsync
        write_folder(place / "old", {"a": b"old"})
        for at in range(1, 20):
            child = os.fork()
            if child == 0:
                count = 0
                def fsync(handle):
                    global count
                    count += 1
                    if count == at:
                        os._exit(9)
                    real(handle)
                os.fsync = fsync
                write_folder(place / f"new-{at}", {"a": b"1" * 9999, "sub/b": b"2"})
                os._exit(0)
            _, status = os.waitpid(child, 0)
            verify_folder(place / "old")
            if (place / f"new-{at}").exists():
                verify_folder(place / f"new-{at}")
                print("whole" if status else "done")
            else:
                print("nothing")
            if status == 0:
                break
    """)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == {"nothing", "whole", "done"}


# --- damage -------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed(folder):
    """A sample over each file; all bits of the manifest's first lines."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        step = max(1, len(data) * 8 // 150)
        for flip in sorted({*range(0, len(data) * 8, step), len(data) * 8 - 1}):
            damaged = bytearray(data)
            damaged[flip // 8] ^= 1 << flip % 8
            path.write_bytes(damaged)
            with pytest.raises(FileError):
                load_checkpoint(folder)
        path.write_bytes(data)
    load_checkpoint(folder)


@pytest.mark.parametrize("name", ["MANIFEST.json", "spec.json", "model.safetensors"])
def test_every_truncation_is_noticed(folder, name):
    path = folder / name
    data = path.read_bytes()
    for part in range(64):
        path.write_bytes(data[: len(data) * part // 64])
        with pytest.raises(FileError):
            load_checkpoint(folder)
    path.write_bytes(data + b" ")
    if name != "MANIFEST.json":  # a blank after the manifest means the same manifest
        with pytest.raises(FileError, match="another size"):
            load_checkpoint(folder)


@pytest.mark.parametrize("name", ["MANIFEST.json", "spec.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileError, match=name):
        load_checkpoint(folder)


def test_no_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(FileError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "file")


def sealed(tmp_path, *, spec=None, weight_file=None):
    """A folder whose hashes are right: what an attacker would make."""
    contents = {"spec.json": to_json(SPEC).encode(), "model.safetensors": tensor_bytes(weights())}
    contents["spec.json"] = contents["spec.json"] if spec is None else spec
    contents["model.safetensors"] = (
        contents["model.safetensors"] if weight_file is None else weight_file
    )
    write_folder(tmp_path / "sealed", contents)
    return tmp_path / "sealed"


def test_a_sealed_misfit_names_every_tensor(tmp_path):
    arrays = weights()
    del arrays["embed.weight"], arrays["blocks.0.attn.q_proj.bias"]
    arrays["stranger"], arrays["other"] = np.zeros(2, "<f4"), np.zeros(2, "<f4")
    arrays["heads.next.bias"] = np.zeros(3, "<f4")
    with pytest.raises(FileError) as caught:
        load_checkpoint(sealed(tmp_path, weight_file=tensor_bytes(arrays)))
    message = str(caught.value)
    assert "missing: embed.weight, blocks.0.attn.q_proj.bias" in message
    assert "unexpected: other, stranger" in message
    assert "misshapen: heads.next.bias (3,) instead of (19,)" in message


def test_sealed_nan_weights_are_refused(tmp_path):
    arrays = weights()
    arrays["embed.weight"][3, 2] = np.nan
    with pytest.raises(FileError, match=r"embed\.weight holds NaN"):
        load_checkpoint(sealed(tmp_path, weight_file=tensor_bytes(arrays)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not text"),
        (b"[" * 100_000, "not JSON"),
        (b'{"vocab_size": ' + b"9" * 5_000 + b"}", "not JSON"),
        (to_json(SPEC).replace("d_model", "d_modle").encode(), "did you mean 'd_model'"),
        (b" " * 10_000_001, "too large"),
    ],
    ids=["cut", "not text", "deep", "huge number", "unknown key", "huge"],
)
def test_a_sealed_bad_spec_is_named(tmp_path, text, words):
    with pytest.raises(FileError) as caught:
        load_checkpoint(sealed(tmp_path, spec=text))
    assert "spec.json" in str(caught.value)
    assert words in str(caught.value)


HOSTILE_MANIFESTS = {
    "empty": "",
    "list": "[]",
    "null": "null",
    "deep": "[" * 100_000,
    "no files": '{"format": 1}',
    "files a number": '{"format": 1, "files": 3}',
    "files a list": '{"format": 1, "files": [[1, {"bytes": 1}]]}',
    "files empty": '{"format": 1, "files": {}}',
    "entry a number": '{"format": 1, "files": {"spec.json": 3}}',
    "other format": '{"format": 2, "files": {}}',
    "format is text": '{"format": "1", "files": {}}',
    "huge number": '{"format": ' + "9" * 5_000 + "}",
    "outside": '{"format": 1, "files": {"../old": {"bytes": 1}}}',
    "absolute": '{"format": 1, "files": {"/etc/passwd": {"bytes": 1}}}',
    "nul": '{"format": 1, "files": {"a\\u0000b": {"bytes": 1}}}',
    "long name": '{"format": 1, "files": {"' + "a" * 5_000 + '": {"bytes": 1}}}',
    "half a character": '{"format": 1, "files": {"\\ud800": {"bytes": 1}}}',
    "folder": '{"format": 1, "files": {"origin": {"bytes": 4096}}}',
}


@pytest.mark.parametrize("case", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_a_file_error(folder, case):
    (folder / "MANIFEST.json").write_text(HOSTILE_MANIFESTS[case])
    with pytest.raises(FileError):
        load_checkpoint(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path):
    outside = tmp_path / "outside"
    data = (folder / "spec.json").read_bytes()
    outside.write_bytes(data)
    (folder / "spec.json").unlink()
    (folder / "spec.json").symlink_to(outside)
    with pytest.raises(FileError, match=r"spec\.json. is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_model_that_diverged_is_not_saved(tmp_path, bad):
    arrays = weights()
    next(iter(arrays.values())).flat[0] = bad
    with pytest.raises(InputError, match="holds NaN or infinity, so the model is not saved"):
        save_checkpoint(tmp_path / "c", SPEC, arrays)
    assert not list(tmp_path.iterdir())
