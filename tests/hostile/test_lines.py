"""Command lines that once ended in a traceback or a hang, and a few random ones, in process."""

import pytest
from bench.attack import chance
from bench.attack_lines import words_of

from tests.command import glass

#: The line, and its exit code.
LINES = {
    "inspect {run} SECOND -o /": 2,
    "report {run} -o ": 2,
    "compare {run} -o  --json": 2,
    "design --params 1k --heads 2147483648": 2,
    "design --params 1k --heads 65536": 1,
    "design --params 10M --glu-expansion 1e-308 --no-time": 0,
    "design --params 10M --multiple 100000000000000000000000000": 2,
    "verify torch.nn:Linear": 2,
    "train digits model.max_seq_len=100000000000 --engine numpy": 2,
    "train copy task.max_length=100000": 2,
    "train copy task.max_length=60000": 2,
    "train parity task.max_length=60000": 2,
    "train copy task.vocab_size=1000000000": 2,
    "generate {run} x --beams 100000": 2,
    "serve {run} --api-key twenty-one-letters-é-": 2,
}


@pytest.mark.parametrize("line", LINES)
def test_what_once_broke_is_three_lines_and_an_exit_code(line, tmp_path):
    run = "tests/fixtures/older-run"
    done = glass(*(run if word == "{run}" else word for word in line.split(" ")))
    assert done.returncode == LINES[line]
    assert "Traceback" not in done.stderr and "our fault" not in done.stderr
    assert done.returncode == 0 or len(done.stderr.strip().splitlines()) <= 3


def test_random_lines_are_the_same_for_the_same_seed():
    first, second = (
        [words_of(chance("lines", seed, case)) for case in range(40)] for seed in (0, 0)
    )
    assert first == second and len({words[0] for words in first}) > 10
