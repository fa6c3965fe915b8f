"""The table executor x row: no empty cell, and a fault in each one's own code that its rows see."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import glassformer
from glassformer.byhand.model import Model as HandModel
from glassformer.checks.catalogue import PART_CHECKS, SUBJECT_CHECKS
from glassformer.checks.executors import CLAIMS, EXECUTORS, Executor, lacking, table
from glassformer.spec.model import RelativeBias
from glassformer.spec.presets import PRESETS, preset
from tests.checks.c_faults import FAULTS as C_FAULTS
from tests.checks.faults import FAULTS
from tests.checks.foreign_faults import ELSEWHERE, IN_LIBRARIES, IN_MODELS
from tests.checks.interfaces import MODELS, OF_GENERATE
from tests.checks.strangers import FAULTS as STRANGE
from tests.command import glass
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


def test_every_row_has_a_planted_fault() -> None:
    seen = {row for *_, row in faults()} | set(IN_MODELS) | set(STRANGE.values())
    seen |= {fault.caught_by for fault in IN_LIBRARIES} | set(OF_GENERATE.values())
    seen |= {row for _, mistakes in MODELS.values() for row in mistakes.values()}
    assert ROWS - seen == set(ELSEWHERE)


def test_what_an_executor_lacks_is_derived_from_the_program() -> None:
    relative = replace(preset("core"), position=RelativeBias())
    found = {name: why for name, why in lacking(relative).items() if why}
    assert found["native step"] == "the native step has no RelativeBias (relative)"
    assert not {"by hand", "torch modules", "models trained as one"} & found.keys()
    routed = lacking(preset("moe"))["models trained as one"]
    assert routed == "Route (blocks.0.ffn)", routed
    assert not any(lacking(preset("gemma")).values())
    digits = lacking(preset("digits"))
    assert digits["native step"] == digits["cached steps in torch"] == "it predicts no next token"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_what_runs_by_hand_and_in_a_stack_can_be_built(name: str) -> None:
    lacks = lacking(preset(name))
    assert not lacks["by hand"]
    assert not lacks["models trained as one"] or preset(name).mixtures()
    HandModel(preset(name), params=None, dtype="float32")


def test_the_command_lists_them() -> None:
    done = glass("show", "digits", "--executors")
    assert done.stdout.splitlines()[0] == "torch modules              runs"
    found = json.loads(glass("show", "qwen", "--executors", "--json").stdout)
    assert found["executors"] == lacking(preset("qwen"))
    assert glass("show", "qwen", "--executors", "--program").returncode == 2
