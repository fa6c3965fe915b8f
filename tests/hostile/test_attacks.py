"""A few cases of every attack of `python -m bench attack`, from a fixed seed, in process."""

import json
from pathlib import Path

import pytest
from bench import attack_files, attack_flips, attack_guided, attack_serve, attack_server
from bench.attack import Found, Ledger, Plan, chance, crowding, in_child, many_in_child
from bench.attack_guided import Guide
from bench.supply import bill_of_materials, core_packages, pinned

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return attack_files.make_models(tmp_path_factory.mktemp("attack") / "world")


@pytest.fixture(autouse=True)
def same_world(world, monkeypatch):
    for module in (attack_files, attack_flips, attack_serve, attack_server):
        monkeypatch.setattr(module, "make_models", lambda: world)


def faults(found) -> list[str]:
    return [f"{case}: {one.outcome} {one.detail}" for case, one in found if one.fault]


def test_mutated_files_give_only_our_errors(world, tmp_path):
    found = [
        (case, attack_files.judged(world, tmp_path, chance("files", 1, case))) for case in range(60)
    ]
    assert not faults(found)
    assert len({one.outcome for _, one in found}) > 8


def test_mutants_that_reach_new_lines_are_kept_and_give_only_our_errors(world, tmp_path):
    guide = Guide(world, tmp_path / "kept")
    found = [
        (case, attack_guided.judged(guide, tmp_path, chance("guided", 1, case)))
        for case in range(30)
    ]
    assert not faults(found)
    assert sum(map(len, guide.corpus.values())) > len(guide.corpus) + 5
    assert len(list((tmp_path / "kept").glob("*/*"))) > 5


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


def test_glass_serve_answers_the_same_whatever_happens(monkeypatch):
    for name, few in {"EVERY": 4, "CROWD": 20, "KILLED": 3, "IDLE": 30}.items():
        monkeypatch.setattr(attack_serve, name, few)
    slow = attack_serve.slow  # its clients are waited for ten seconds
    monkeypatch.setattr(attack_serve, "EVENTS", [e for e in attack_serve.EVENTS if e is not slow])
    found = list(attack_serve.attack(Plan((), {}, seed=1), [*range(20), 49]))
    assert not faults(found)
    seen = {one.outcome for _, one in found}
    assert {"event: crowd", "event: killed", "event: idle", "event: deleted"} <= seen


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


def test_a_ledger_begins_anew_unless_it_is_resumed_and_names_the_trees(tmp_path):
    plan = Plan((), {}, ledger=tmp_path)
    first = Ledger(plan, "lines")
    first.begin()
    first.add(0, Found("fine", kills=2))
    rows = [row["name"] for row in Ledger(plan, "lines").rows("lines")]
    assert "1 cases, 2 kills: 0 faults" in rows and rows[-1].startswith("tree ")
    anew = Ledger(plan, "lines", resume=False)
    assert anew.missing(2) == [0, 1] and (tmp_path / "lines-0.before").is_file()


def test_a_child_is_asked_to_end_then_killed_and_a_crowd_gives_it_longer(tmp_path, monkeypatch):
    import signal
    import time

    def stubborn() -> int:
        time.sleep(60)
        return 0

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a child inherits
    try:
        ended = in_child(stubborn, folder=tmp_path, seconds=0.3, megabytes=500, grace=0.2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.stopped and ended.over and ended.code == -signal.SIGKILL
    monkeypatch.setattr("bench.attack.crowding", lambda _: 50.0)
    patient = in_child(
        lambda: time.sleep(0.6) or 0, folder=tmp_path, seconds=0.1, megabytes=500, crowded=True
    )
    assert patient.code == 0 and not patient.stopped and patient.seconds >= 0.6
    assert crowding(-1) >= 1.0


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
