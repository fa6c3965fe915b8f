"""A few cases of every attack of `python -m bench attack`, from a fixed seed, in process."""

import json
from pathlib import Path

import pytest
from bench import attack_files, attack_flips, attack_server
from bench.attack import Found, Ledger, Plan, chance, many_in_child
from bench.supply import bill_of_materials, core_packages, pinned

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return attack_files.make_models(tmp_path_factory.mktemp("attack") / "world")


@pytest.fixture(autouse=True)
def same_world(world, monkeypatch):
    for module in (attack_files, attack_flips, attack_server):
        monkeypatch.setattr(module, "make_models", lambda: world)


def faults(found) -> list[str]:
    return [f"{case}: {one.outcome} {one.detail}" for case, one in found if one.fault]


def test_mutated_files_give_only_our_errors(world, tmp_path):
    found = [
        (case, attack_files.judged(world, tmp_path, chance("files", 1, case))) for case in range(60)
    ]
    assert not faults(found)
    assert len({one.outcome for _, one in found}) > 8


def test_a_flipped_bit_is_noticed_or_harmless():
    found = list(attack_flips.attack(Plan((), {}, seed=1), range(40)))
    assert not faults(found)
    assert sum("refused" in one.outcome or "told" in one.outcome for _, one in found) > 20


def test_a_flip_that_nobody_notices_is_a_fault(world, tmp_path):
    def blind(folder: Path) -> object:
        return sorted(file.read_bytes() for file in folder.iterdir() if file.is_file())

    attack_flips.TARGETS["blind"] = (1, "native", blind)
    try:
        whole = blind(world / "native")
        found = attack_flips.flipped(
            "blind", world / "native", tmp_path / "case", whole, chance("flips", 1, 0)
        )
    finally:
        del attack_flips.TARGETS["blind"]
    assert found.fault and "SILENCE" in found.outcome


def test_the_server_answers_what_is_bad_with_4xx_and_goes_on():
    found = list(attack_server.attack(Plan((), {}, seed=1), range(60)))
    assert not faults(found)


def test_a_case_that_hangs_or_dies_is_a_fault_and_the_next_one_is_judged():
    import os
    import time

    def judge(case: int) -> Found:
        if case == 1:
            time.sleep(60)
        if case == 2:
            os._exit(7)
        if case == 3:
            raise RuntimeError("ours")
        return Found("fine")

    found = dict(many_in_child(judge, range(5), seconds=0.5, megabytes=500))
    outcomes = [found[case].outcome for case in range(5)]
    assert outcomes == ["fine", "hang", "process ended 7", "traceback RuntimeError", "fine"]


def test_a_ledger_goes_on_where_it_was(tmp_path):
    plan = Plan((), {}, ledger=tmp_path)
    Ledger(plan, "lines").add(1, Found("fine"))
    with (tmp_path / "lines-0.jsonl").open("a") as file:
        file.write('{"case": 2, "outc')  # a kill
    again = Ledger(plan, "lines")
    assert again.missing(4) == [0, 2, 3]


# --- what is delivered ----------------------------------------------------------------------------


def test_hashes_are_of_the_versions_that_the_tests_run_with():
    constraints = {
        line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for entry, hashes in pinned().items():
        name, _, version = entry.partition("==")
        assert hashes and all(len(one) == 64 for one in hashes)
        assert constraints.get(name, version) == version


def test_the_bill_of_materials_lists_every_core_package():
    bill = bill_of_materials()
    names = {entry["name"].lower() for entry in bill["components"]}
    assert {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "uvicorn"} <= names
    assert len(bill["components"]) == len(core_packages())
    assert json.dumps(bill) == json.dumps(bill_of_materials())
