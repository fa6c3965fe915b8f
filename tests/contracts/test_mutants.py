"""`python -m bench mutants`: what it changes, which tests it runs, and that a survivor is one."""

import ast
from collections import Counter
from dataclasses import replace

import pytest
from bench import mutants

TEXT = '''
"""A file."""
LIMIT = 3


class Thing:
    def least(self, x: int = 2, *, near: "Thing" = None) -> int:
        """At least 1."""
        if x <= 0:
            raise ValueError(f"{x + 1} is too small")
        self.size = x * 2
        total = -x if near else max(1.5, x)
        return total and total - 1
'''


@pytest.fixture
def found(tmp_path, monkeypatch):
    (tmp_path / "thing.py").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(mutants, "SOURCE", tmp_path)
    return mutants.mutants_of(tmp_path / "thing.py")


def test_operators_boundaries_constants_conditions_and_statements_are_changed(found):
    changes = Counter((one.kind, one.old, one.new) for one in found)
    assert changes == Counter(
        [
            ("constant", "2", "(3)"),  # a default is computed with
            ("boundary", "x <= 0", "(x < 0)"),
            ("constant", "0", "(1)"),
            ("statement", "self.size = x * 2", "pass"),
            ("operator", "x * 2", "(x + 2)"),
            ("constant", "2", "(3)"),
            ("condition", "near", "(not near)"),
            ("operator", "-x", "(x)"),
            ("constant", "1.5", "(2.25)"),
            ("operator", "total and total - 1", "(total or total - 1)"),
            ("operator", "total - 1", "(total + 1)"),
            ("constant", "1", "(2)"),
        ]
    )
    assert {one.function for one in found} == {"Thing.least"}
    for one in found:
        assert TEXT[one.start : one.end] == one.old
        ast.parse(TEXT[: one.start] + one.new + TEXT[one.end :])


def test_a_sample_is_the_same_for_a_seed_and_stays_in_its_package():
    one, again, other = (mutants.sample("spec", 30, seed) for seed in (1, 1, 2))
    assert one == again and one != other
    assert {mutant.file.split("/")[0] for mutant in one} == {"spec"}
    assert len({mutant.key for mutant in one}) == 30


def test_the_nearest_tests_of_a_module_come_first():
    rows = mutants.tests_of("checks/rows/parts.py", "feed_forward", 8)
    assert "tests/checks/test_verify.py" in rows


def test_a_change_that_no_test_sees_survives(tmp_path):
    """One that its tests see, and one that means the same."""
    every = mutants.mutants_of(mutants.SOURCE / "spec/train.py")
    mutant = next(one for one in every if one.function == "_warm" and one.old == "step + 1")
    bench = mutants.Bench(tmp_path, files=1, seconds=100)
    tests = ["tests/spec/test_train.py"]
    assert bench.judge(mutant, tests)[0] == "caught"
    assert bench.judge(replace(mutant, new=f"({mutant.old})"), tests) == ("survives", "")
    assert bench.judge(mutant, []) == ("untested", "")
