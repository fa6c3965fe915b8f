"""`glass` as a command in a process of its own, forked: torch is loaded already, which takes most
of the time of a command that starts from nothing."""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from glassformer.cli.main import main
from glassformer.data.own_code import forget_own_code

#: Seconds after which a command that does not end is ended.
PATIENCE = 120


def glass(
    *words: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in that folder, with these variables instead of ours; wait for its end."""
    importlib.import_module("torch._dynamo")  # seconds, which every child that trains would take
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _run(words, folder, environment, out.fileno(), err.fileno())
            finally:
                os._exit(code)  # nothing of pytest's may run here
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(
        ["glass", *words], os.waitstatus_to_exitcode(status), stdout=texts[0], stderr=texts[1]
    )


def _run(
    words: tuple[str, ...],
    folder: Path | None,
    environment: Mapping[str, str] | None,
    out: int,
    err: int,
) -> int:
    """Make this process one that was started as `glass`, and return its exit code."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for own, usual in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(own, usual)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    signal.alarm(PATIENCE)
    warnings.resetwarnings()  # in pytest they are errors
    torch.set_num_threads(1)  # a fork has no other thread: what waits for one would wait for ever
    forget_own_code()  # a new process has given none
    sys.argv = ["glass", *words]
    if folder is not None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))  # as `python -m` does
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
