"""The table executor x row: no empty cell, and a fault in each one's own code that its rows see."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import glassformer
from glassformer.checks.catalogue import PART_CHECKS, SUBJECT_CHECKS
from glassformer.checks.executors import CLAIMS, EXECUTORS, Executor, table
from tests.checks.c_faults import FAULTS as C_FAULTS
from tests.checks.faults import FAULTS
from tests.training.ranks import FAULTS as RANK_FAULTS

ROWS = {check.name for check in (*PART_CHECKS, *SUBJECT_CHECKS)}
PACKAGE = Path(glassformer.__file__).parent


def test_the_table_has_no_empty_cell() -> None:
    print(table())
    for one in EXECUTORS:
        assert set(one.rows) == set(CLAIMS), one.name
        for claim, row in one.rows.items():
            assert row in ROWS or row.startswith("- "), f"{one.name}, {claim}: {row}"
        assert one.rows["values"] in ROWS, one.name


@pytest.mark.parametrize("one", EXECUTORS, ids=lambda one: one.name)
def test_its_code_is_there(one: Executor) -> None:
    for name in one.code:
        at = PACKAGE / name.replace(".", "/")
        found = [*at.parent.glob(f"{at.name}*.[ch]"), at.with_suffix(".py"), at / "__init__.py"]
        assert any(file.exists() for file in found), name


def faults() -> Iterator[tuple[str, str, str]]:
    """Yield the name of every planted fault, where it is planted, and the row that sees it."""
    for fault in FAULTS:
        yield fault.name, fault.where, fault.caught_by
    for c_fault in C_FAULTS:
        yield c_fault.name, f"kernels/{c_fault.file}", c_fault.caught_by
    for fault in RANK_FAULTS:
        yield fault.name, fault.where, "trained by two processes = by one"


@pytest.mark.parametrize("one", EXECUTORS, ids=lambda one: one.name)
def test_a_fault_in_its_own_code_turns_one_of_its_rows_red(one: Executor) -> None:
    own = [
        name
        for name, where, row in faults()
        if row in one.rows.values() and where.startswith(one.code)
    ]
    assert own, f"no fault is planted in {', '.join(one.code)}"
