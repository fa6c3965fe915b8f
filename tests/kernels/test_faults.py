"""The checks are checked: the C files are damaged, compiled beside, and held against them."""

import shutil

import pytest

from glassformer.kernels import c_library
from glassformer.kernels.build import HEADERS, HERE, SOURCES, build
from tests.kernels.checks import CHECKS
from tests.kernels.faults import FAULTS

#: Quick to compile; what is asked of the kernels does not depend on optimization.
PLAIN = ("-O0", "-std=gnu11", "-ffp-contract=off")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault, tmp_path, monkeypatch):
    if fault.needs not in c_library.variants():
        pytest.skip("this machine cannot run the damaged line")
    for name in SOURCES + HEADERS:
        shutil.copy(HERE / name, tmp_path / name)
    text = (tmp_path / fault.file).read_text()
    assert text.count(fault.old) == 1, f"the line to damage is gone: {fault.old}"
    (tmp_path / fault.file).write_text(text.replace(fault.old, fault.new))
    made = build(source=tmp_path, target=tmp_path / "damaged.so", flags=PLAIN)
    damaged = c_library.open_library(made)
    monkeypatch.setattr(c_library, "_loaded", lambda: (damaged, ""))
    with pytest.raises(AssertionError):
        CHECKS[fault.caught_by]()


def test_every_check_has_a_fault():
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
