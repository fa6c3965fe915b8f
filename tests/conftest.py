"""How every test runs: one thread, one seed, and properties searched the same way each time.

`GLASS_TEST_SEED=7 make test` draws every model anew: a bound that only one draw keeps shows itself.
"""

import gc
import os
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Two thread pools on two cores wait for each other; OpenBLAS reads this when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from glassformer.kernels.threads import widest_blas

widest_blas()  # as the command does, so that a run of either has the same bits

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.planting import Fault, planted

torch.set_num_threads(1)

settings.register_profile(
    "glassformer",
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("glassformer")

SEED = int(os.environ.get("GLASS_TEST_SEED", "0"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's draws are its own: no other test, and no order of tests, changes them."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_initialized():  # else torch keeps a stack trace of each request for later
        torch.cuda.manual_seed_all(SEED)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test leaves one thread: a command that another test forks has no second one, and waits."""
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1, f"{item.nodeid} left torch on {left} threads"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser last: its server lives on in a thread, and some tests fork."""
    items[:] = [one for item in items for one in (item, *_faulty(item, items))]
    items.sort(key=lambda item: "/browser/" in item.path.as_posix())


def _faulty(item: pytest.Item, items: list[pytest.Item]) -> Iterator[pytest.Function]:
    """Yield the test once more for each fault that it must notice (`tests.planting.catches`)."""
    for mark in item.iter_markers("catches"):
        cases = [
            one for one in items if mark in one.own_markers and mark.kwargs["case"] in one.name
        ]
        if item in cases[:1]:
            assert isinstance(item, pytest.Function)
            (fault,) = mark.args
            yield pytest.Function.from_parent(
                item.parent,
                name=f"{item.name} with {fault.name}",
                callobj=item.obj,
                callspec=getattr(item, "callspec", None),
                fixtureinfo=item._fixtureinfo,
                originalname=item.originalname,
                keywords={"fault": fault},
            )


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_pyfunc_call")
def pytest_pyfunc_call_with_a_fault(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Turn the result around for a test that runs with a planted fault."""
    fault = pyfuncitem.keywords.get("fault")
    if not isinstance(fault, Fault):
        return (yield)
    with planted(fault), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged function may divide by zero
        try:
            yield
        except NameError:
            raise  # the fault itself cannot run
        except (Exception, pytest.fail.Exception):
            return True
    pytest.fail(f"nobody notices this fault of {fault.where}: {fault.name}", pytrace=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Hand out the tests by file, but the browser's one by one: they come last, and some are long.

    What their files share is made for the session. Two files have more than that in common.
    """
    return _OneByOneAtTheEnd(config, log) if config.getvalue("dist") == "loadfile" else None


class _OneByOneAtTheEnd(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        whole = ("test_errors.py", "test_report.py")
        return file if "/browser/" not in file or file.endswith(whole) else nodeid


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that counts bytes gets a process of its own, forked, with no other thread in it."""
    if pyfuncitem.get_closest_marker("alone") is None:
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            try:
                pyfuncitem.obj(**arguments)
            except BaseException:
                told.write(traceback.format_exc().encode())
                told.flush()
            finally:
                os._exit(0)  # nothing of pytest's may run here
        _, status = os.waitpid(child, 0)
        told.seek(0)
        failure = told.read().decode()
    assert status == 0 and not failure, failure or f"ended by signal {status}"
    return True


@pytest.fixture(scope="session")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds, in a folder of its own; a warning is an error."""
    folder = tmp_path_factory.mktemp("documentation") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
