"""The budget solver: counts, limits, preferences and refusals, against every design one by one."""

import dataclasses
import functools
import itertools
import math
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glassformer.budget import counting
from glassformer.budget.counting import Widths, heads_of
from glassformer.budget.design import solve
from glassformer.budget.infeasible import InfeasibleBudget
from glassformer.budget.question import NORMS, POSITIONS, WISHES, Budget, Sizes, build_spec
from glassformer.budget.search import Search
from glassformer.lab import budget_report
from glassformer.models.model import build
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_active_parameters, count_parameters
from glassformer.spec.model import Norm, Position, Rotary
from glassformer.spec.options import options_of
from glassformer.spec.position import OwnPosition, RelativeBias
from tests.budget import brute
from tests.planting import If, Unary, catches

#: The classic shape, whose widths are free: what these tests know by heart.
classic = functools.partial(Budget, shape="classic")
design = functools.partial(budget_report.design, shape="classic")

RATIOS, EXPANSIONS = (0.25, 0.35, 0.45), (2.0, 2.66, 3.0, 4.0)
SOURCE = [(tied, r, g) for tied in (True, False) for r in RATIOS for g in EXPANSIONS]


def wishes(name, exact_values, values, limits):
    """The options of a wish that is free, exact, or limited."""
    exact, within = WISHES[name]
    return st.one_of(
        st.just({name: "free"}),
        st.fixed_dictionaries({name: st.sampled_from(exact_values), exact: st.just(True)}),
        st.fixed_dictionaries({name: st.sampled_from(values), within: st.sampled_from(limits)}),
    )


SPECIAL = {
    "embedding_ratio": wishes("embedding_ratio", [0.1, 0.4], [0.1, 0.4], [0.004, 0.03]),
    "glu_expansion": wishes("glu_expansion", [0.5, 2.0, 2.66], [0.5, 2.66], [0.02, 0.2]),
    "tolerance": st.sampled_from([0.0005, 0.002, 0.2]),
    "multiple": st.just(4),
    "ffn_multiple": st.sampled_from([3, 8]),
    "min_layers": st.sampled_from([2, 3]),
    "max_layers": st.sampled_from([3, 6]),
    "min_aspect": st.sampled_from([0.7, 3.0]),
    "max_aspect": st.sampled_from([3.0, 6.0]),
    "rank": st.sampled_from([2, "any"]),
    "ratio_covers": st.just("input"),
    "free_head_width": st.just(True),
    "experts": st.fixed_dictionaries(
        {
            "experts": st.sampled_from([2, 3]),
            "experts_per_token": st.sampled_from([None, 1, 2]),
            "shared_expert": st.booleans(),
        }
    ),
}


@st.composite
def small_budgets(draw):
    """Totals small enough to try every design; a few of the options at a time."""
    chosen = draw(st.lists(st.sampled_from(sorted(SPECIAL)), max_size=3, unique=True))
    special = {}
    for name in chosen:
        value = draw(SPECIAL[name])
        special |= value if isinstance(value, dict) else {name: value}
    special.setdefault("ffn_multiple", 1)
    if special.get("rank") == "any" and special.get("embedding_ratio") == "free":
        del special["rank"]
    heads = draw(st.sampled_from([1, 2, 3, 4] + ["any"] * ("free_head_width" not in special)))
    groups = [None, 1] if heads == "any" else [None, *(n for n in (1, 2) if heads % n == 0)]
    plain = {
        "tolerance": 0.01,
        "embedding_ratio": draw(st.sampled_from([0.1, 0.25, 0.4, 0.6])),
        "glu_expansion": draw(st.sampled_from([0.5, 2.0, 2.66])),
    }
    return classic(
        **{
            **plain,
            "vocab": draw(st.integers(2, 40)),
            "params": draw(st.integers(200, 1200)),
            "heads": heads,
            "tied": draw(st.booleans()),
            "length": draw(st.integers(1, 12)),
            "position": draw(st.sampled_from(["learned", "rotary", "none"])),
            "bias": draw(st.sampled_from(["none", "qkv", "all", "no_key"])),
            "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
            "kv_heads": draw(st.sampled_from(groups)),
            **special,
        },
    )


@given(small_budgets())
@settings(max_examples=400)
def test_an_answer_exists_where_one_exists_and_none_is_better(budget):
    answer_is_there_and_best(budget)


def answer_is_there_and_best(budget):
    slack = brute.decimal(budget.tolerance) * budget.params
    low, high = math.ceil(budget.params - slack), math.floor(budget.params + slack)
    every = list(brute.candidates(budget, low=low, high=high))
    found = Search(budget).best()
    assert Search(budget).is_feasible() == (found is not None) == bool(every)
    if found is None:
        return
    sizes = found.frame.sizes(found.n_layers, found.d_ff)
    ours = [m for m in every if sizes_of(m) == sizes]
    assert len(ours) == 1
    assert found.frame.count(found.n_layers, found.d_ff) == ours[0].count
    least = min(brute.preference(budget, made) for made in every)
    assert brute.preference(budget, ours[0]) == least


def sizes_of(made):
    return Sizes(
        d_model=made.d_model,
        n_heads=made.n_heads,
        d_head=made.d_head,
        d_ff=made.d_ff,
        n_layers=made.n_layers,
        rank=made.rank,
    )


def near_budgets():
    """Many d_ff at few depths, many ranks, and one d_ff at many depths."""
    wish = {"embedding_ratio": 0.3, "vocab": 11, "length": 3, "glu_expansion": 2.0}
    wide = {"tolerance": 0.2, "glu_within": 0.6}
    deep = {"tolerance": 0.05, "exact_expansion": True, "multiple": 4, "ffn_multiple": 1}
    for total in range(300, 900, 23):
        for heads, rank in ((1, None), (2, None), (1, "any")):
            yield classic(params=total, heads=heads, rank=rank, **wide, **wish)
        yield classic(params=total + 2000, heads=1, max_aspect=1.0, **deep, **wish)


def test_the_nearest_count_is_the_nearest():
    for budget in near_budgets():
        low, high = budget.bounds
        every = [made.count for made in brute.candidates(budget, low=low, high=high)]
        found = Search(budget).closest(budget.params)
        assert (found is None) == (not every)
        if found is not None:
            least = min(abs(count - budget.params) for count in every)
            assert abs(found.count - budget.params) == least
            assert abs(Search(budget).nearest(budget.params).count - budget.params) == least


#: Wishes that no width can meet, so that a thousand widths and depths drift alike.
WIDE_OPEN = {
    "any heads": classic(params=2 * 10**9, vocab=256, heads="any"),
    "any heads and rank": classic(params=10**8, vocab=256, heads="any", rank="any"),
    "a deep and narrow wish": Budget(
        shape="classic", params=10**9, vocab=256, heads=1, embedding_ratio=0.001
    ),
    "ten billion, all free": classic(
        params=10**10,
        vocab=2,
        heads="any",
        embedding_ratio="free",
        glu_expansion="free",
    ),
    "a narrow width of a million depths": classic(
        params=10**7,
        vocab=151_936,
        heads="any",
        length=1,
        embedding_ratio=0.001,
        glu_expansion=4.0,
    ),
    "one count alone": classic(params=24_276_609, vocab=4, tolerance=1e-7),
}


@pytest.mark.parametrize("name", WIDE_OPEN)
def test_a_search_evaluates_few_of_the_designs(name):
    """Every width at every depth would be 10^5 to 10^9 evaluations."""
    budget = WIDE_OPEN[name]
    for kind in ("best", "deepest", "widest", "is_feasible"):
        search = Search(budget)
        assert getattr(search, kind)()
        assert search.evaluations < 40_000, kind
    search = Search(budget)
    assert search.nearest(budget.params) is not None
    assert search.evaluations < 12_000


def test_a_refusal_evaluates_few_of_the_designs():
    search = Search(
        classic(
            params=10**10,
            vocab=20,
            heads=1,
            embedding_ratio=0.35,
            ratio_within=0.01,
        )
    )
    assert not search.is_feasible()
    assert search.evaluations < 1000


@given(small_budgets())
@settings(max_examples=60)
def test_every_answer_is_built_and_counted_again(budget):
    assume(Search(budget).is_feasible())
    answer = solve(budget)
    low, high = budget.bounds
    for made in (answer.best, *answer.alternatives):
        model = build(made.spec, device="meta")
        assert sum(p.numel() for p in model.parameters()) == made.params
        assert low <= made.params <= high
    assert solve(budget) == answer


@catches("what is tied counts twice", "budget.counting:_size", If(), to="p.size")
@pytest.mark.usefixtures("fresh_laws")
@given(
    small_budgets(),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_laws_are_the_manifests_own_counts(budget, d, per_group, d_head, d_ff, rank, layers):
    assume(not isinstance(budget.position_part, Rotary) or d_head % 2 == 0)
    laws_are_counts(budget, d, per_group, d_head, d_ff, rank, layers)


def laws_are_counts(budget, d, per_group, d_head, d_ff, rank, layers):
    heads = per_group * (budget.kv_heads or 1)
    used = None if budget.rank is None else rank
    frame = Widths(budget).frame(d, (heads, d_head), used)
    sizes = Sizes(d_model=d, n_heads=heads, d_head=d_head, d_ff=d_ff, n_layers=layers, rank=used)
    assert frame.count(layers, d_ff) == count_parameters(build_spec(budget, sizes))


# --- the source's own grid ----------------------------------------------------------------------


@pytest.mark.parametrize("free", [False, True])
def test_the_sources_default_and_grid_are_met(free):
    near = 0
    for tied, ratio, glu in SOURCE:
        budget = classic(
            tied=tied,
            embedding_ratio=ratio,
            glu_expansion=glu,
            free_head_width=free,
        )
        best = solve(budget, alternatives=False).best
        assert abs(best.error) <= 0.005
        near += abs(best.ratio_drift) <= 0.01 and abs(best.glu_drift) <= 0.05
        if not free:
            assert best.sizes.n_heads * best.sizes.d_head == best.sizes.d_model
    assert near == 24 if free else near >= 18


def test_the_default_is_told_in_full():
    answer = design(params=10e6, vocab=16000)
    sizes = answer.best.sizes
    assert (sizes.d_model, sizes.d_ff, sizes.n_layers, sizes.d_head) == (216, 607, 11, 27)
    assert answer.best.params == count_parameters(answer.spec) == 9_956_088
    assert [line.split(":")[0] for line in answer.gave_way] == ["embedding ratio", "GLU expansion"]
    names = ", ".join(made.name for made in answer.alternatives)
    for name in ("exact total", "exact expansion", "multiples of 64", "deepest", "widest"):
        assert name in names
    assert "d_model 216" in repr(answer)
    assert "gave way: GLU expansion: requested 2.66, got 2.810 (+5.6%)" in repr(answer)


def test_alternatives_are_best_at_what_they_say():
    answer = design("10M", 16000, free_head_width=True)
    by_name = {n: d for d in answer.alternatives for n in d.name.split(", ")}
    near = [answer.best, *(d for n, d in by_name.items() if n in ("deepest", "widest"))]
    assert by_name["deepest"].sizes.n_layers == max(d.sizes.n_layers for d in near)
    assert by_name["widest"].sizes.d_model == max(d.sizes.d_model for d in near)
    assert abs(by_name["exact total"].error) < 1e-5
    assert round(2.66 * 218) == by_name["exact expansion"].sizes.d_ff
    sizes = by_name["multiples of 64"].sizes
    assert sizes.d_model % 64 == sizes.d_ff % 64 == 0


def test_the_law_a_lower_ratio_is_narrower_and_deeper():
    """With the vocabulary fixed, the ratio decides the width, and the rest goes into depth."""
    widths, depths = [], []
    for ratio in (0.2, 0.3, 0.4, 0.5):
        sizes = design("10M", 16000, embedding_ratio=ratio).best.sizes
        widths.append(sizes.d_model)
        depths.append(sizes.n_layers)
    assert widths == sorted(set(widths))
    assert depths == sorted(set(depths), reverse=True)


def test_untied_the_ratio_covers_both_tables_unless_told_otherwise():
    both = design("10M", 16000, tied=False).best
    assert both.embedding_ratio == pytest.approx(2 * both.input_ratio)
    assert abs(both.embedding_ratio - 0.35) < 0.01
    one = design("10M", 16000, tied=False, ratio_covers="input").best
    assert one.embedding_ratio == one.input_ratio
    assert abs(one.embedding_ratio - 0.35) < 0.02


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"multiple": 8}, lambda s: s.d_model % 8 == s.d_ff % 8 == 0),
        ({"ffn_multiple": 64}, lambda s: s.d_ff % 64 == 0),
        ({"heads": "any"}, lambda s: 16 <= s.d_head <= 128),
        ({"kv_heads": 2}, lambda s: s.n_heads == 8),
        ({"rank": "any"}, lambda s: s.rank is not None),
        ({"rank": 64}, lambda s: s.rank == 64),
        ({"experts": 8}, lambda s: s.d_ff < 1000),
        ({"experts": 4, "experts_per_token": 1, "shared_expert": True}, lambda s: s.d_ff < 1000),
        ({"max_layers": 4}, lambda s: s.n_layers <= 4),
        ({"min_layers": 20}, lambda s: s.n_layers >= 20),
        ({"max_aspect": 10.0}, lambda s: s.d_model <= 10 * s.n_layers),
        ({"embedding_ratio": "free", "min_aspect": 30.0}, lambda s: s.d_model >= 30 * s.n_layers),
        ({"position": "rotary"}, lambda s: s.d_head % 2 == 0),
    ],
)
def test_options_are_kept(options, check):
    answer = design("10M", 16000, **options)
    assert check(answer.best.sizes)
    assert all(check(made.sizes) for made in answer.alternatives)
    assert abs(answer.best.error) <= 0.005


def test_free_wishes_settle_at_a_usual_shape():
    best = design("10M", 256, embedding_ratio="free", glu_expansion="free").best
    assert 16 <= best.aspect <= 64
    assert 2 <= best.glu_expansion <= 4
    assert abs(design("10M", 256, embedding_ratio="free").best.glu_drift) < 0.0125


@pytest.mark.parametrize(
    ("params", "vocab"),
    [
        *(("100k", 256), ("350k", 2000), ("1M", 8000), ("3M", 16000), ("10M", 4096)),
        *(("10M", 16000), ("30M", 16000), ("124M", 50257), ("1G", 32000), ("7G", 32000)),
    ],
)
@pytest.mark.parametrize("ratio", ["usual", "free"])
def test_a_design_that_no_ratio_is_requested_of_has_a_usual_shape(params, vocab, ratio):
    answer = budget_report.design(params, vocab, embedding_ratio=ratio)
    made = [answer.best, *(each for each in answer.alternatives if "ratio" not in each.name)]
    assert all(12 <= each.aspect <= 64 and each.sizes.n_layers >= 2 for each in made)
    assert not answer.not_proven


def test_the_usual_ratio_gives_way_in_words_and_a_requested_one_does_not():
    answer = budget_report.design("3M", 16000)
    assert (answer.best.sizes.d_model, answer.best.sizes.n_layers) == (128, 5)
    assert answer.gave_way[0] == (
        "embedding ratio: usual 35.00%, got 68.46% (+33.46 points), for a usual shape; requesting "
        "0.35 gives 40 layers of width 64"
    )
    deep = budget_report.design("3M", 16000, embedding_ratio=0.35)
    assert abs(deep.best.ratio_drift) < 0.01
    assert deep.best.sizes.d_model == 64
    # limits that were requested come before the shape that was not
    for wish in ({"min_layers": 30}, {"max_layers": 1}, {"min_aspect": 0.1, "max_aspect": 3.0}):
        best = budget_report.design("3M", 16000, **wish).best
        assert not 12 <= best.aspect <= 64 or best.sizes.n_layers == 1
    # the classic shape has no such preference
    assert design("3M", 16000).best == design("3M", 16000, embedding_ratio=0.35).best


def test_exact_is_as_near_as_whole_numbers_allow():
    best = design("10M", 16000, exact_ratio=True).best
    assert abs(best.ratio_drift) <= 8 * 16000 / 2 / best.params
    best = design("10M", 16000, exact_expansion=True).best
    assert best.sizes.d_ff == round(2.66 * best.sizes.d_model)


def test_limits_are_kept():
    best = design("10M", 16000, glu_within="1%").best
    assert abs(best.glu_drift) <= 0.01
    best = design("10M", 16000, ratio_within="0.5%").best
    assert abs(best.ratio_drift) <= 0.005


def test_limits_of_the_ratio_and_of_d_ff_decide() -> None:
    """A wide tolerance, so that the ratio's own limit decides."""
    for total in range(200, 1200, 20):
        for wish in ({"exact_ratio": True}, {"ratio_within": 0.003}):
            budget = Budget(shape="classic", 
                params=total, tolerance=0.1, vocab=29, length=3, heads=2, max_layers=2,
                embedding_ratio=0.31, **wish, glu_expansion=2.0, exact_expansion=True,
            )  # fmt: skip
            answer_is_there_and_best(budget)
        for multiple in (3, 5):
            budget = Budget(shape="classic", 
                params=total, tolerance=0.1, vocab=7, length=3, heads=1,
                ffn_multiple=multiple, max_layers=1, embedding_ratio="free",
            )  # fmt: skip
            answer_is_there_and_best(budget)


def test_wide_tolerances_are_searched_by_halves() -> None:
    """Wide tolerances, so that depths and d_ffs are halved often; and a limit on the expansion."""
    for params, tolerance, ratio, glu in itertools.product(
        range(300, 1500, 120), (0.01, 0.1), (0.1, 0.4, "free"), (0.5, 2.0)
    ):
        budget = Budget(shape="classic", 
            params=params, tolerance=tolerance, vocab=7, length=3, heads=2, embedding_ratio=ratio,
            glu_expansion=glu,
        )  # fmt: skip
        answer_is_there_and_best(budget)
    for params in range(300, 1500, 60):
        budget = Budget(shape="classic", 
            params=params, tolerance=0.01, vocab=7, length=3, heads=1, max_layers=2,
            embedding_ratio="free", glu_expansion=2.0, glu_within=0.05,
        )  # fmt: skip
        answer_is_there_and_best(budget)


def test_grouped_heads_are_divided_by_their_groups() -> None:
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


def test_a_free_head_width_is_within_two_of_an_even_share() -> None:
    """Every head width within two of an even share, and no other."""
    for n_heads, d_model in ((3, 7), (8, 100), (4, 64)):
        budget = Budget(shape="classic", heads=n_heads, free_head_width=True)
        near = [h for h in range(1, d_model) if abs(h - d_model / n_heads) <= 2]
        assert heads_of(budget, d_model) == [(n_heads, h) for h in near]


def test_any_rank_of_one_count_and_of_many() -> None:
    """One count alone, so that most ranks are solved for; and many counts."""
    for total, tolerance in itertools.product(range(1500, 4500, 150), (0.0003, 0.03)):
        budget = Budget(shape="classic", 
            params=total, tolerance=tolerance, vocab=5, length=3, heads=1, rank="any",
            embedding_ratio=0.2, max_layers=2,
        )  # fmt: skip
        answer_is_there_and_best(budget)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        ({"embedding_ratio": 0.0}, "outside (0, 1)", "0.01"),
        ({"embedding_ratio": 35}, "outside (0, 1)", "35%"),
        ({"embedding_ratio": -0.1}, "outside (0, 1)", "0.01"),
        ({"embedding_ratio": "a third"}, "is not a number", "0.35"),
        ({"glu_expansion": 0}, "not a positive number", "2.66"),
        ({"tolerance": 0}, "a tolerance of 0", "the nearest that works here is 0.00001%"),
        ({"tolerance": -0.1}, "outside (0, 1)", "0.5%"),
        ({"tolerance": "200%"}, "outside (0, 1)", "0.99"),
        ({"heads": 0}, "heads 0 is below 1", "1"),
        ({"vocab": -5}, "vocab -5 is below 1", "1"),
        ({"params": 0}, "params 0 is below 1", "1"),
        ({"params": "10Q"}, "params '10Q' is not a number", "10M"),
        ({"params": "1e400"}, "too large", "1e+15"),
        ({"params": 10.5}, "not a whole number", "10"),
        ({"experts": 1}, "experts 1 is below 2", "2"),
        ({"experts": 4, "experts_per_token": 5}, "5 is above experts 4", "4"),
        ({"experts_per_token": 2}, "experts_per_token needs a number of experts", "8"),
        ({"shared_expert": True}, "shared_expert needs a number of experts", "8"),
        ({"kv_heads": 3}, "does not divide heads 8", "2"),
        ({"heads": "any", "free_head_width": True}, "needs a number of heads", "8"),
        ({"max_layers": 2, "min_layers": 3}, "max_layers 2 is below", "3"),
        ({"position": "rotery"}, "is not one of", "rotary"),
        ({"norm": "batch"}, "is not one of", "norm"),
        ({"bias": "some"}, "is not one of", "none"),
        ({"rank": "any", "embedding_ratio": "free"}, "leave the rank open", "value"),
        ({"embedding_ratio": "free", "exact_ratio": True}, "free, and yet limited", "limit"),
        ({"ratio_within": 0}, "ratio_within 0.0 is not a positive number", "exact"),
        ({"exact_expansion": True, "glu_within": "1%"}, "exact, and glu_within too", "one"),
        ({"max_aspect": 2.0, "min_aspect": 3.0}, "max_aspect 2.0 is below", "32"),
        ({"min_aspect": -1.0}, "min_aspect -1.0 is not a finite number of 0 or more", "0"),
        ({"length": 0}, "length 0 is below 1", "1"),
        ({"multiple": 0}, "multiple 0 is below 1", "1"),
    ],
)
def test_bad_input_names_the_rule_and_the_nearest_that_works(options, what, hint):
    given_ = {"params": "10M", "vocab": 16000} | options
    with pytest.raises(InputError) as caught:
        design(**given_)
    assert what in caught.value.what
    assert hint in caught.value.hint


# --- refusals -----------------------------------------------------------------------------------


@given(small_budgets())
@settings(max_examples=80)
def test_a_certificate_names_changes_that_work_and_none_that_is_nearer(budget):
    assume(not Search(budget).is_feasible())
    certificate_is_true(budget)


def certificate_is_true(budget):
    with pytest.raises(InfeasibleBudget) as caught:
        solve(budget)
    nearest = caught.value.certificate.nearest
    assert caught.value.certificate.why
    for option, value in nearest.items():
        if value is not None:
            assert Search(_changed(budget, option, value)).is_feasible(), option
    _no_nearer_total(budget, nearest["params"])
    for option in ("vocab", "length"):
        found = nearest.get(option)
        start = getattr(budget, option)
        away = 12 if found is None else min(12, abs(found - start))
        for value in range(max(1, start - away + 1), start + away):
            assert not Search(_changed(budget, option, value)).is_feasible()
    tolerance = nearest["tolerance"]
    if tolerance is not None and tolerance > 2 / budget.params:
        assert not Search(_changed(budget, "tolerance", tolerance * 0.99)).is_feasible()


def _no_nearer_total(budget, found):
    away = 150 if found is None else abs(found - budget.params)
    for total in range(max(1, budget.params - min(away, 150) + 1), budget.params + min(away, 150)):
        assert not Search(_changed(budget, "params", total)).is_feasible(), total


def _changed(budget, option, value):
    """The budget with one option changed; a limit takes the place of `exact`."""
    exact = {within: {exact: False} for exact, within in WISHES.values()}
    return dataclasses.replace(budget, **exact.get(option, {}), **{option: value})


@pytest.fixture
def fresh_laws():
    """What is remembered from one budget to the next: a planted mistake must reach it."""
    for remembered in (counting._laws, counting._laws_of, counting._any_heads):
        remembered.cache_clear()
    yield
    for remembered in (counting._laws, counting._laws_of, counting._any_heads):
        remembered.cache_clear()


def refusal(*arguments, **options):
    with pytest.raises(InfeasibleBudget) as caught:
        design(*arguments, **options)
    assert caught.value.exit_code == 1
    return caught.value.certificate


def test_a_vocabulary_too_large_is_infeasible_not_bad_input():
    found = refusal("100k", 16000)
    assert found.bound == "embedding"
    assert "128,000 parameters for the embedding alone: 27,500 more than the 100,500" in found.why
    assert design("100k", found.nearest["vocab"]).best
    assert not Search(classic(params=100_000, vocab=found.nearest["vocab"] + 1)).is_feasible()
    assert design("100k", 16000, heads=found.nearest["heads"]).best
    assert found.nearest["length"] is None  # even without positions the table is too large


def test_each_bound_is_named():
    assert refusal("10M", 16000, multiple=512).bound == "total"
    assert refusal("10M", 16000, exact_ratio=True, exact_expansion=True).bound == "embedding_ratio"
    assert refusal("10M", 20, ratio_within="1%").bound == "embedding_ratio"
    assert refusal("10M", 16000, max_layers=1, glu_within="1%", min_aspect=600).bound
    few = refusal("1000", 10, length=7, heads=3, tolerance="0.01%", glu_expansion=2, multiple=3)
    assert few.bound == "tolerance"
    assert "the nearest counts are" in few.why


def test_a_tolerance_is_met_exactly_at_its_edge():
    found = refusal("10M", 16000, exact_ratio=True, exact_expansion=True)
    need = found.nearest["tolerance"]
    options = {"exact_ratio": True, "exact_expansion": True}
    assert design("10M", 16000, tolerance=need, **options).best
    refusal("10M", 16000, tolerance=need * 0.99, **options)
    assert math.isclose(need, 0.0272, abs_tol=1e-4)  # the source's own miss at its default


# --- options ------------------------------------------------------------------------------------


def test_every_field_of_a_budget_is_an_option_with_a_help_text():
    options = options_of(Budget)
    assert [each.name for each in options] == [f.name for f in dataclasses.fields(Budget)]
    assert all(each.help.endswith(".") for each in options)
    assert len({each.flag for each in options}) == len(options)


def test_every_option_can_be_written_as_text():
    """What a default is written as is read as the same value."""
    for each in options_of(Budget):
        if each.parse is not None and each.default is not None:
            assert each.parse(each.name, str(each.default)) == each.default
    asked = {"params": "1.5M", "tolerance": "1%", "heads": "any", "rank": "7", "max_aspect": "40"}
    budget = Budget.from_options(asked)
    assert (budget.params, budget.tolerance, budget.heads) == (1_500_000, 0.01, "any")
    assert (budget.rank, budget.max_aspect) == (7, 40.0)


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(InputError) as caught:
        design("10M", 16000, head=4)
    assert "no option 'head'" in caught.value.what
    assert "'heads'" in caught.value.hint


def test_every_kind_of_position_and_norm_has_a_name():
    # A user's own part has no name of ours; T5's table has a size by heads, not by width.
    named = set(get_args(Position)) - {OwnPosition, RelativeBias}
    assert {type(each) for each in POSITIONS.values()} == named
    assert {type(each) for each in NORMS.values()} == set(get_args(Norm))
    hints = {each.name: each.choices for each in options_of(Budget)}
    assert set(hints["position"]) == set(POSITIONS)
    assert set(hints["norm"]) == set(NORMS)


def test_one_multiple_is_for_both_widths_unless_another_is_given():
    assert classic(multiple=8).ffn_step == 8
    assert classic(multiple=8, ffn_multiple=3).ffn_step == 3
    found = refusal("10M", 16000, multiple=512).nearest
    assert found["multiple"] < 512
    assert "ffn_multiple" not in found


@catches("a token uses every expert", "budget.design:_design", Unary("not"), to="False")
@pytest.mark.usefixtures("fresh_laws")
def test_experts_count_in_the_total_and_a_token_uses_fewer():
    answer = design("10M", 16000, experts=8, experts_per_token=2, shared_expert=True)
    best, (block,) = answer.best, {*answer.spec.decoder.blocks()}
    assert best.params == count_parameters(answer.spec)
    assert best.active_params == count_active_parameters(answer.spec) < best.params
    assert best.params - best.active_params == (
        best.sizes.n_layers * 6 * 3 * best.sizes.d_model * best.sizes.d_ff
    )
    assert block.ffn.n_experts == 8
    assert block.ffn.expert == block.ffn.shared
    assert "a token passes through 2" in best.text(answer.budget)
    assert f"{best.active_params:,} active" in str(best)
    dense = design("10M", 16000).best
    assert dense.active_params == dense.params
    assert "active" not in str(dense)


def test_too_many_experts_are_refused_with_a_number_that_works():
    options = {"length": 64, "exact_expansion": True}
    found = refusal("300k", 256, experts=620, **options).nearest["experts"]
    assert found < 620
    assert design("300k", 256, experts=found, **options).best
