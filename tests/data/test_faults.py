"""Tests are tested: one planted mistake, and the named check turns red."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glassformer.data.automata.library import machine_named, weighted_walk
from glassformer.data.tasks.seq2seq import written
from glassformer.spec.errors import GlassError
from tests.checks.faults import planted
from tests.data import (
    test_corpus,
    test_digits,
    test_fsm,
    test_machine,
    test_regex,
    test_sampler,
    test_sequences,
    test_tasks,
    test_text,
    test_translation,
    test_walk,
)
from tests.data.faults import FAULTS


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        with TemporaryDirectory() as name:
            folder = Path(name)
            if check is not test_text.pieces_are_learned_from_the_training_part:
                (folder / "b").mkdir()
                (folder / "a.txt").write_text(test_text.LINES, encoding="utf-8")
                (folder / "b" / "c.txt").write_text(test_text.LINES.upper(), encoding="utf-8")
            check(folder)

    return run


def in_a_corpus(check: Callable[..., None], *, room: bool = False) -> Callable[[], None]:
    """The corpus is prepared with the fault; `room` for what the check writes itself."""

    def run() -> None:
        with TemporaryDirectory() as name:
            root = Path(name)
            test_corpus.prepare(test_corpus.written("jsonl", root), root / "prepared")
            (root / "room").mkdir()
            check(root / "prepared", *([root / "room"] if room else []))

    return run


def stopped_corpus(folder: Path, room: Path) -> None:
    test_corpus.stopping_anywhere_changes_no_bit(room, folder, every=60)


def fresh(check: Callable[[], None]) -> Callable[[], None]:
    """Words that were written before a fault was planted are not remembered."""

    def run() -> None:
        written.cache_clear()
        try:
            check()
        finally:
            written.cache_clear()

    return run


def exact_walk() -> None:
    walk = weighted_walk(machine_named("brackets-3"), min_length=1, max_length=6, seed=0)
    test_walk.entropy_is_exact(walk, 5)


def drawn_walk() -> None:
    walk = weighted_walk(machine_named("random-5"), min_length=1, max_length=8, seed=5)
    test_walk.draws_follow_the_walk(walk)


def sequences() -> None:
    for kind in test_sequences.KINDS:
        test_sequences.batches_say_what_the_task_says(kind)


CHECKS: dict[str, Callable[[], None]] = {
    "digits": lambda: test_digits.splits_are_unique_and_right(),
    "digit batches": test_digits.batches_are_the_sources_own,
    "sequences": sequences,
    "sequence padding": test_sequences.padding_has_no_weight,
    "sequence splits": test_sequences.no_source_is_in_two_splits,
    "translations": fresh(test_translation.pairs_mean_the_same),
    "translation batches": test_translation.batches_say_what_is_described,
    "translation splits": test_translation.nothing_held_out_is_trained_on,
    "rows": lambda: test_fsm.rows_say_what_the_machine_does("brackets-4"),
    "FSM padding": test_fsm.padding_has_no_weight_and_no_truth,
    "FSM splits": test_fsm.no_string_is_in_two_splits,
    "train follows the walk": test_fsm.train_follows_the_walk,
    "counted targets are draws from the oracle": test_fsm.counted_targets_are_draws_from_the_oracle,
    "oracle": lambda: test_fsm.oracle_is_the_walk("brackets-4"),
    "perfect model": lambda: test_fsm.test_a_perfect_model_has_no_excess_and_only_legal_mass(
        "brackets-4"
    ),
    "row hashes": test_tasks.test_row_hashes_read_the_row_and_nothing_behind_it,
    "entropy": exact_walk,
    "draws": drawn_walk,
    "Hopcroft": lambda: (
        test_machine.test_minimised_is_as_small_as_brute_force_says_and_says_the_same(),
        test_machine.test_minimised_finds_hidden_copies(),
    ),
    "equivalence": test_machine.test_counterexample_is_the_first_by_brute_force,
    "legal": test_machine.test_legal_symbols_are_those_that_can_still_end,
    "regex": lambda: [test_regex.check_against_re(p) for p in ("a+", "a*", "[^a]*", "(ab|c)*")],
    "every row once": lambda: test_sampler.every_row_once(23, 5, 0, False),
    "epochs differ": test_sampler.epochs_and_seeds_differ,
    "step alone decides": lambda: test_sampler.order_of_asking_does_not_matter(
        (23, 5, 0, True), [0, 17, 4, 99]
    ),
    "like length": test_sampler.batches_are_of_like_length,
    "text targets": in_a_folder(test_text.targets_are_the_tokens_one_later),
    "text parts": in_a_folder(test_text.parts_are_the_text_in_two),
    "pieces": in_a_folder(test_text.pieces_are_learned_from_the_training_part),
    "corpus documents": in_a_corpus(test_corpus.documents_are_encoded_and_split_by_their_hash),
    "corpus windows": in_a_corpus(test_corpus.windows_are_the_shards_with_documents_apart),
    "corpus stopped": in_a_corpus(stopped_corpus, room=True),
    "corpus damage": in_a_corpus(test_corpus.damage_is_found_before_it_is_used, room=True),
    "corpus epochs": test_corpus.an_epoch_is_a_permutation,
    "corpus mixture": test_corpus.a_mixture_has_its_shares,
}
#: What a check says when it is red; anything else is a fault that is not one.
RED = (AssertionError, GlassError, IndexError, ValueError)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes_without_a_fault(name):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()


def test_there_are_enough_faults_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
