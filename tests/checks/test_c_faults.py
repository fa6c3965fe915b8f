"""Faults planted in the C code that a default runs: each turns a row of `glass verify` red.

All are compiled into one library, each behind a number: a fault is on while `glass_fault` has its.
"""

import ctypes
import shutil
from collections.abc import Iterator

import pytest

from glassformer.checks.catalogue import SUBJECT_CHECKS, Finding, run_subject_check
from glassformer.checks.preset_subjects import sample_subject
from glassformer.kernels import c_library
from glassformer.kernels.build import FLAGS, HEADERS, HERE, SOURCES, build
from tests.checks.c_faults import FAULTS, CFault


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.c_int]:
    """Compile the library with every fault, use it, and return the number that chooses one."""
    folder = tmp_path_factory.mktemp("faulty")
    for name in SOURCES + HEADERS:
        shutil.copy(HERE / name, folder / name)
    for number, fault in enumerate(FAULTS, 1):
        file = folder / fault.file
        text = file.read_text()
        assert text.count(fault.old) == 1, f"{fault.name}: the line to damage is gone"
        new = fault.new.replace("FAULT", f"(glass_fault == {number})")
        file.write_text(text.replace(fault.old, new))
    header, main = folder / "native.h", folder / "native.c"
    declared = "#include <stdint.h>\n"
    assert declared in header.read_text()
    header.write_text(header.read_text().replace(declared, f"{declared}extern int glass_fault;\n"))
    main.write_text(f"{main.read_text()}\nEXPORT int glass_fault = 0;\n")
    flags = ["-O1" if flag == "-O3" else flag for flag in FLAGS]  # a third of the time to compile
    made = build(source=folder, target=folder / "faulty.so", flags=flags)
    found = c_library.open_library(made)
    plain = c_library._loaded
    c_library._loaded = lambda: (found, "")
    yield ctypes.c_int.in_dll(found, "glass_fault")
    c_library._loaded = plain


def finding_of(fault: CFault) -> Finding:
    check = next(check for check in SUBJECT_CHECKS if check.name == fault.caught_by)
    return run_subject_check(check, sample_subject(fault.preset))


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1), ids=lambda n: FAULTS[n - 1].name)
def test_a_fault_in_c_turns_its_row_red(switch: ctypes.c_int, number: int) -> None:
    switch.value = number
    try:
        found = finding_of(FAULTS[number - 1])
    finally:
        switch.value = 0
    assert found.failed, found


@pytest.mark.parametrize(("row", "preset"), sorted({(f.caught_by, f.preset) for f in FAULTS}))
def test_the_row_is_green_without_them(switch: ctypes.c_int, row: str, preset: str) -> None:
    found = finding_of(CFault("", "", "", "", row, preset))
    assert found.verdict == "passed", found
