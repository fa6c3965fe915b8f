"""Tests are tested: a planted mistake in the solver or the costs, and the named check turns red."""

import itertools
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from glassformer.budget import counting
from glassformer.budget.counting import heads_of
from glassformer.budget.question import Budget
from glassformer.budget.search import Search
from glassformer.costs.parameter_table import format_allocation
from glassformer.spec.errors import GlassError
from glassformer.spec.presets import budget_lm
from glassformer.spec.train import SGD, AdamW, Muon
from tests.budget import test_budget, test_limited_search
from tests.costs import test_estimates
from tests.planting import Binary, Constant, Fault, If, Unary, mutate, planted

#: Failing examples are not shrunk: a red check has said enough.
SEARCHED = settings(
    max_examples=300,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def answers() -> None:
    @SEARCHED
    @given(test_budget.small_budgets())
    def search(budget):
        test_budget.answer_is_there_and_best(budget)

    search()


def limits() -> None:
    """A wide tolerance, so that the ratio's own limit decides."""
    for total in range(200, 1200, 20):
        for wish in ({"exact_ratio": True}, {"ratio_within": 0.003}):
            budget = Budget(shape="classic", 
                params=total, tolerance=0.1, vocab=29, length=3, heads=2, max_layers=2,
                embedding_ratio=0.31, **wish, glu_expansion=2.0, exact_expansion=True,
            )  # fmt: skip
            test_budget.answer_is_there_and_best(budget)
        for multiple in (3, 5):
            budget = Budget(shape="classic", 
                params=total, tolerance=0.1, vocab=7, length=3, heads=1,
                ffn_multiple=multiple, max_layers=1, embedding_ratio="free",
            )  # fmt: skip
            test_budget.answer_is_there_and_best(budget)


def halves() -> None:
    """Wide tolerances, so that depths and d_ffs are halved often; and a limit on the expansion."""
    for params, tolerance, ratio, glu in itertools.product(
        range(300, 1500, 120), (0.01, 0.1), (0.1, 0.4, "free"), (0.5, 2.0)
    ):
        budget = Budget(shape="classic", 
            params=params, tolerance=tolerance, vocab=7, length=3, heads=2, embedding_ratio=ratio,
            glu_expansion=glu,
        )  # fmt: skip
        test_budget.answer_is_there_and_best(budget)
    for params in range(300, 1500, 60):
        budget = Budget(shape="classic", 
            params=params, tolerance=0.01, vocab=7, length=3, heads=1, max_layers=2,
            embedding_ratio="free", glu_expansion=2.0, glu_within=0.05,
        )  # fmt: skip
        test_budget.answer_is_there_and_best(budget)


def certificates() -> None:
    found = []

    @settings(SEARCHED, max_examples=60)
    @given(test_budget.small_budgets())
    def collect(budget):
        found.append(budget)

    collect()
    for budget in [b for b in found if not Search(b).is_feasible()][:12]:
        test_budget.certificate_is_true(budget)


def laws() -> None:
    draw = random.Random(0)
    for tied in (True, False):
        for position in ("rotary", "none"):
            budget = Budget(
                shape="classic", tied=tied, position=position, kv_heads=2, rank=3, bias="all"
            )
            sizes = [draw.randint(2, 9) for _ in range(5)]
            test_budget.laws_are_counts(budget, *sizes[:2], 6, *sizes[2:])


def grouped() -> None:
    budget = Budget(shape="classic", 
        params=60_000, vocab=50, length=8, heads="any", kv_heads=2, tolerance=0.02,
        embedding_ratio="free", max_layers=1,
    )  # fmt: skip
    found = Search(budget).best()
    assert found is not None
    assert found.frame.n_heads % 2 == 0
    for d_model in (16, 17, 48):
        for heads, _ in heads_of(budget, d_model):
            assert heads % 2 == 0


def freed() -> None:
    """Every head width within two of an even share, and no other."""
    for n_heads, d_model in ((3, 7), (8, 100), (4, 64)):
        budget = Budget(shape="classic", heads=n_heads, free_head_width=True)
        near = [h for h in range(1, d_model) if abs(h - d_model / n_heads) <= 2]
        assert heads_of(budget, d_model) == [(n_heads, h) for h in near]


def ranked() -> None:
    """One count alone, so that most ranks are solved for; and many counts."""
    for total, tolerance in itertools.product(range(1500, 4500, 150), (0.0003, 0.03)):
        budget = Budget(shape="classic", 
            params=total, tolerance=tolerance, vocab=5, length=3, heads=1, rank="any",
            embedding_ratio=0.2, max_layers=2,
        )  # fmt: skip
        test_budget.answer_is_there_and_best(budget)


def nearest() -> None:
    test_budget.test_the_nearest_count_is_the_nearest()


def limited() -> None:
    @settings(SEARCHED, max_examples=80)
    @given(test_budget.small_budgets())
    def search(budget):
        for most in (1, 20, 80):
            test_limited_search.limited_is_honest(budget, most)
            test_limited_search.limited_is_near(budget, most, 700)

    search()


def efforts() -> None:
    test_limited_search.test_a_part_of_an_effort_is_taken_from_the_whole()


def certified() -> None:
    budget = Budget(shape="classic", params=1000, vocab=900, length=8, heads=2, tolerance=0.01)
    for most in (10, 100, 300, 1000):
        test_limited_search.limited_certificate_is_true(budget, most)


def runs() -> None:
    @settings(SEARCHED, max_examples=100)
    @given(test_budget.small_budgets())
    def search(budget):
        test_limited_search.runs_are_every_design(budget)

    search()


def sparse() -> None:
    test_limited_search.test_widths_without_a_d_ff_are_left_out_and_no_others()


def residues() -> None:
    test_limited_search.test_what_counts_leave_is_what_designs_have()


def ordered() -> None:
    test_limited_search.nearest_are_ordered()


def experts() -> None:
    test_budget.test_experts_count_in_the_total_and_a_token_uses_fewer()


def flop_counts() -> None:
    for name in ("budget-lm", "qwen", "fsm-factorized"):
        test_estimates.test_training_is_three_forwards(name)
    spec = test_estimates.calm(test_estimates.SMALLER["seq2seq"])
    said = test_estimates.flops(
        spec, length=test_estimates.T, source_length=test_estimates.S
    ).forward
    assert test_estimates.B * said == test_estimates.counted(spec, backward=False)


def kept() -> None:
    for name in ("budget-lm", "qwen", "digits"):
        test_estimates.test_activations_of_the_presets(name)


def table() -> None:
    spec = budget_lm(vocab_size=97, d_model=24, d_ff=31, n_layers=5, n_heads=3, max_seq_len=41)
    rows = re.findall(r"^( *\S[^\d\n]*?) +([\d,]+) +([\d.]+)%", format_allocation(spec), re.M)
    counts = {name: int(count.replace(",", "")) for name, count, _ in rows}
    total = counts.pop("total")
    inside = [count for name, count in counts.items() if name.startswith(" ")]
    assert sum(inside) == counts["layers"]
    assert sum(counts.values()) - sum(inside) == total
    for name, _, share in rows[:-1]:
        assert float(share) == pytest.approx(100 * counts[name] / total, abs=0.006)


def optimizers() -> None:
    for optimizer in (SGD(momentum=0.9), AdamW(), Muon()):
        test_estimates.test_optimizer_state_is_what_torch_holds(optimizer)


CHECKS: dict[str, Callable[[], None]] = {
    "answers": answers,
    "limits": limits,
    "halves": halves,
    "laws": laws,
    "grouped": grouped,
    "freed": freed,
    "ranked": ranked,
    "nearest": nearest,
    "certificates": certificates,
    "limited": limited,
    "efforts": efforts,
    "certified": certified,
    "runs": runs,
    "sparse": sparse,
    "residues": residues,
    "ordered": ordered,
    "experts": experts,
    "flops": flop_counts,
    "activations": kept,
    "optimizers": optimizers,
    "table": table,
}

FAULTS = (
    Fault("what is tied counts twice", mutate("budget.counting:_size", If(), to="p.size"), "laws"),
    Fault("a token uses every expert", mutate("budget.design:_design", Unary("not"), to="False"), "experts"),
    Fault("attention over half the keys", mutate("costs.estimates:flops", Constant(4), to="2"), "flops"),
    Fault("Adam with one moment", mutate("costs.estimates:optimizer_bytes", Binary("+"), to="p.size + 1"), "optimizers"),
)  # fmt: skip
RED = (AssertionError, GlassError, ValueError, IndexError, pytest.fail.Exception)


@pytest.fixture(autouse=True)
def fresh_laws():
    """What is remembered from one budget to the next: a planted mistake must reach it."""
    for remembered in (counting._laws, counting._laws_of, counting._any_heads):
        remembered.cache_clear()
    yield
    for remembered in (counting._laws, counting._laws_of, counting._any_heads):
        remembered.cache_clear()


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes_without_a_fault(name):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()
