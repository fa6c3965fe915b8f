"""Tests are tested: one planted mistake, and the named check turns red."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glassformer.data.automata.library import machine_named, weighted_walk
from glassformer.data.tasks.seq2seq import written
from glassformer.spec.errors import GlassError
from tests.data import (
    test_corpus,
    test_digits,
    test_library,
    test_machine,
    test_rng,
    test_seq2seq,
    test_text,
    test_translation,
)
from tests.planting import (
    Assign,
    Call,
    Compare,
    Constant,
    Fault,
    For,
    Name,
    Return,
    mutate,
    planted,
)


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        with TemporaryDirectory() as name:
            (Path(name) / "a.txt").write_text(test_text.LINES, encoding="utf-8")
            check(Path(name))

    return run


def in_a_corpus(check: Callable[[Path], None]) -> Callable[[], None]:
    """The corpus is prepared with the fault."""

    def run() -> None:
        with TemporaryDirectory() as name:
            root = Path(name)
            test_corpus.prepare(test_corpus.written("jsonl", root), root / "prepared")
            check(root / "prepared")

    return run


def fresh(check: Callable[[], None]) -> Callable[[], None]:
    """Words that were written before a fault was planted are not remembered."""

    def run() -> None:
        written.cache_clear()
        try:
            check()
        finally:
            written.cache_clear()

    return run


def exact_entropy() -> None:
    walk = weighted_walk(machine_named("brackets-3"), min_length=1, max_length=6, seed=0)
    test_library.entropy_is_exact(walk, 5)


CHECKS: dict[str, Callable[[], None]] = {
    "digits": lambda: test_digits.splits_are_unique_and_right(),
    "sequence padding": test_seq2seq.padding_has_no_weight,
    "translation splits": fresh(test_translation.nothing_held_out_is_trained_on),
    "entropy": exact_entropy,
    "equivalence": test_machine.test_counterexample_is_the_first_by_brute_force,
    "epochs differ": test_rng.epochs_and_seeds_differ,
    "text targets": in_a_folder(test_text.targets_are_the_tokens_one_later),
    "corpus windows": in_a_corpus(test_corpus.windows_are_the_shards_with_documents_apart),
}

FAULTS = (
    Fault("text labels not shifted", mutate("data.tasks.text:Text.batch", Return(), arg="targets", to="{{{keys[0]}: window_BT[:, :-1]}}"), "text targets"),
    Fault("seq2seq PAD weighted", mutate("data.task:answered_batch", Call("astype"), to="np.ones(valid_BT.shape, dtype={args[0]})"), "sequence padding"),
    Fault("test is val too", mutate("data.task:tenths", Compare("==", nth=1), to="{left} >= 8"), "digits"),
    Fault("pairs split, not values", mutate("data.tasks.seq2seq:_divided", For("number", nth=1), to="{func}(len(values))[:len({args[0]})]"), "translation splits"),
    Fault("entropy in bits", mutate("data.automata.library:Walk.entropies", Name("log"), to="np.log2"), "entropy"),
    Fault("counterexample not shortest", mutate("data.automata.machine:counterexample", Assign("pair"), to="queue.pop()"), "equivalence"),
    Fault("every epoch alike", mutate("data.rng:Sampler._batches_of", Assign("rng"), to="{func}({args[0]}, {args[1]})"), "epochs differ"),
    Fault("a document predicts the next one's first token", mutate("data.corpus.windows:Corpus.batch", Constant(0.0), drop=True), "corpus windows"),
)  # fmt: skip
#: What a check says when it is red; anything else is a fault that is not one.
RED = (AssertionError, GlassError, IndexError, ValueError)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes_without_a_fault(name):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()
