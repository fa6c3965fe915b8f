"""Threads: what work is worth, who decides, and that a run goes on with as many as it had."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.kernels.threads import (
    CORE,
    FLOPS,
    OPENMP,
    SPINS,
    WEIGHTS,
    check_threads,
    sleep_soon_while_waiting,
    taking,
    threads_for,
    threads_of_decoding,
    widest_blas,
)
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.process import recorded_threads, threads_of_run
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import override
from tests.lab.runs import rewritten, sample, trained


@pytest.fixture
def cores(monkeypatch):
    """A machine of 64 cores, as far as the rule can see; nothing computes on them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def test_a_thread_for_each_grain_of_work_and_never_more_than_there_are(cores):
    assert [threads_for(work, 100) for work in (0, 1, 149, 151, 1000, 1e12)] == [1, 1, 1, 2, 10, 64]


def test_small_recipes_take_one_thread_on_any_machine(cores):
    for name in ("digits", "reverse", "parity"):
        spec = recipe(name, ["task.examples=300"])
        task = build_task(spec.task)
        assert threads_of_run(spec, task) == 1
        assert threads_of_run(spec, task, asked=3) == 3
    large = override(spec, ["train.batch_size=100000"])
    assert threads_of_run(large, task) > 8
    assert threads_of_run(large, task, device="cuda") == 64, "a GPU's host is left as it is"
    assert FLOPS > WEIGHTS


def test_decoding_counts_the_weights_that_are_read(cores):
    assert threads_of_decoding(presets.digits()) == 1
    assert threads_of_decoding(presets.digits(), asked=4) == 4
    wide = presets.budget_lm(vocab_size=16_000)
    assert 1 < threads_of_decoding(wide) < 64


def test_what_cannot_be_taken_is_refused(cores):
    for asked, message in ((0, "below 1"), (-3, "below 1"), (65, "more than this machine")):
        with pytest.raises(InputError, match=message):
            check_threads(asked)
    with pytest.raises(InputError, match="NumPy") as caught:
        check_threads(2, engine="numpy")
    assert "OPENBLAS_NUM_THREADS=2" in caught.value.hint
    check_threads(None, engine="numpy")


def test_the_scope_gives_back_what_was_there():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), taking(before):
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_the_newest_whole_state_tells_how_many_there_were(tmp_path, cores):
    assert recorded_threads(tmp_path / "none") is None
    run = trained(sample("torch", "train.steps=4", "train.checkpoint_every=2"), tmp_path / "run")
    state = json.loads((run.directory.step_folder(4) / "state.json").read_text())
    assert state["fingerprint"]["threads"] == 64
    for had, wanted in ((3, 3), (65, None), (0, None), ("many", None)):
        state["fingerprint"]["threads"] = had
        rewritten(tmp_path / "run", 4, state__json=json.dumps(state).encode())
        assert recorded_threads(tmp_path / "run") == wanted
    rewritten(tmp_path / "run", 4, state__json=b"{")
    assert recorded_threads(tmp_path / "run") == 64, "a damaged one is passed over"


RESUMED = """
import io, json, sys, contextlib
from pathlib import Path
import torch
from glassformer.cli.verbs.train import Beginning, Machine, run_training

def go(*, steps, name, resume=False, threads=None):
    told = io.StringIO()
    words = ["task.examples=60", "train.batch_size=8", f"train.steps={steps}"]
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        code = run_training("copy", words, Beginning(name=name, resume=resume),
            Machine(runs=sys.argv[1], threads=threads, as_json=True))
    assert code == 0 and torch.get_num_threads() == 2
    record = json.loads((Path(sys.argv[1]) / name / "run.json").read_text())
    return record["fingerprint"]["threads"], told.getvalue()

torch.set_num_threads(2)
seen = [go(steps=4, name="a"), go(steps=6, name="a", resume=True)]
seen += [go(steps=4, name="b", threads=2), go(steps=6, name="b", resume=True)]
seen += [go(steps=8, name="b", resume=True, threads=1)]
print(json.dumps(seen))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_run_goes_on_with_as_many_as_it_had_or_says_so(tmp_path):
    # In a process of its own: a fork after work on two threads may hang, and other tests fork.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RESUMED), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [count for count, _ in seen] == [1, 1, 2, 2, 1]
    assert ["not bit-exact: threads changed" in told for _, told in seen] == [False] * 4 + [True]


def test_threads_sleep_soon_while_they_wait_unless_someone_knows_better(monkeypatch):
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)
    sleep_soon_while_waiting()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPINS)
    for name in OPENMP:
        for other in OPENMP:
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, "own")
        sleep_soon_while_waiting()
        assert [os.environ.get(other) for other in OPENMP].count(None) == len(OPENMP) - 1
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("vendor", "flags", "told"),
    [
        ("AuthenticAMD", "fma avx512f avx512bw avx512dq avx512vl avx512cd", "SkylakeX"),
        ("AuthenticAMD", "fma avx512f avx512bw avx512dq avx512vl", None),  # Not all of them
        ("GenuineIntel", "fma avx512f avx512bw avx512dq avx512vl avx512cd", None),  # OpenBLAS knows
        ("", "", None),
    ],
)
def test_avx512_of_amd_is_told_to_numpys_products(vendor, flags, told, tmp_path, monkeypatch):
    monkeypatch.delenv(CORE, raising=False)
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\nprocessor : 1\n")
    widest_blas(str(file))
    assert os.environ.get(CORE) is None  # NumPy is loaded: too late
    monkeypatch.delitem(sys.modules, "numpy")
    widest_blas(str(tmp_path / "none"))
    assert os.environ.get(CORE) is None
    widest_blas(str(file))
    assert os.environ.get(CORE) == told
    monkeypatch.setenv(CORE, "Haswell")
    widest_blas(str(file))
    assert os.environ[CORE] == "Haswell"


def test_the_command_decides_before_torch_is_loaded():
    code = (
        "import os, sys; import glassformer.cli.main as main; sys.argv = ['glass', 'list'];"
        "before = 'torch' in sys.modules\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "assert not before and os.environ['GOMP_SPINCOUNT'] == '1000'"
    )
    clean = {name: value for name, value in os.environ.items() if name not in OPENMP}
    subprocess.run([sys.executable, "-c", code], check=True, env=clean, capture_output=True)
