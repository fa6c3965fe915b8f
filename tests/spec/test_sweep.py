"""Sweeps as values: what is varied, ranges, files, and everything that is refused."""

import pytest

from glassformer.spec.errors import InputError
from glassformer.spec.serialize import from_dict, to_dict
from glassformer.spec.sweep import (
    Choices,
    Factor,
    Range,
    SweepSpec,
    is_sweep,
    parse_values,
    read_sweep,
    split_settings,
    split_values,
    with_settings,
)


def made(*settings, **options):
    factors, fixed = split_settings(settings)
    return SweepSpec(what="digits", factors=factors, fixed=fixed, **options)


def test_a_grid_has_every_combination_in_order():
    sweep = made("train.lr=1e-3,3e-3", "model.d_model=16,32,48", "train.steps=5")
    cells = list(sweep.cells())
    assert sweep.count() == len(cells) == 6
    assert cells[0] == {"train.lr": "1e-3", "model.d_model": "16"}
    assert cells[4] == {"train.lr": "3e-3", "model.d_model": "32"}
    assert sweep.fixed == ("train.steps=5",)
    assert from_dict(SweepSpec, to_dict(sweep)) == sweep


def test_commas_in_brackets_and_quotes_separate_nothing():
    assert split_values('a,{"x": [1, 2], "y": "p,q"},b') == ["a", '{"x": [1, 2], "y": "p,q"}', "b"]


def test_samples_are_different_reproducible_and_inside_their_ranges():
    sweep = made("train.lr=log:1e-4..1e-2", "model.d_model=32..128/16", "engine=torch,numpy",
                 sampler="random", draws=40)  # fmt: skip
    cells = list(sweep.cells())
    assert cells == list(sweep.cells())
    assert len({tuple(cell.values()) for cell in cells}) == 40
    assert all(1e-4 <= float(cell["train.lr"]) <= 1e-2 for cell in cells)
    assert sum(float(cell["train.lr"]) < 1e-3 for cell in cells) in range(10, 31)  # a log scale
    widths = {int(cell["model.d_model"]) for cell in cells}
    assert widths <= set(range(32, 129, 16))
    assert len(widths) > 4
    other = made("train.lr=log:1e-4..1e-2", sampler="random", draws=3, draw_seed=1)
    assert next(iter(other.cells()))["train.lr"] != cells[0]["train.lr"]


def test_both_ends_of_a_range_are_included():
    whole = parse_values("x", "3..7")
    assert {whole.at(share / 100) for share in range(100)} == {"3", "4", "5", "6", "7"}
    assert parse_values("x", "0.0..0.5").at(0.5) == "0.25"


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (["train.lr="], {}, "train.lr=: a list of values is empty"),
        (["train.lr=1,,2"], {}, "empty"),
        (["train.lr=1,1"], {}, "listed twice"),
        (["train.lr"], {}, "not a setting"),
        (["train.lr=2..1"], {}, "not a range"),
        (["train.lr=log:0..1"], {}, "no logarithm"),
        (["train.lr=a..b"], {}, "not a range"),
        (["train.lr=1..9"], {}, "of which a grid has no end"),
        (["train.lr=1,2"], {"draws": 4}, "every combination"),
        (["train.lr=1,2"], {"sampler": "random"}, "needs a number of cells"),
        (["train.lr=1,2"], {"sampler": "grit"}, "did you mean 'grid'"),
        (["train.lr=1,2", "train.lr=3"], {}, "train.lr is given twice"),
        (["train.lr=1,2"], {"seeds": 0}, "seeds 0 is below 1"),
        (["train.lr=1,2"], {"rungs": (5, 3)}, "do not rise"),
        (["train.lr=1,2"], {"metric": "los"}, "did you mean 'loss'"),
        (["train.lr=1,2"], {"keep": 1.0}, "keep"),
        (["train.lr=1,2"], {"sampler": "tpe", "draws": 4, "rungs": (3,)}, "two searches"),
    ],
)
def test_bad_input_is_refused(settings, options, message):
    with pytest.raises(InputError) as found:
        made(*settings, **options)
    assert message in str(found.value)


def test_more_different_cells_than_there_are_is_refused():
    with pytest.raises(InputError, match="only 2 different cells"):
        list(made("train.lr=1,2", sampler="random", draws=3).cells())


def test_a_million_cells_are_counted_without_listing_them():
    values = Choices(values=tuple(map(str, range(1000))))
    factors = (Factor(path="train.lr", values=values), Factor(path="train.clip", values=values))
    sweep = SweepSpec(what="digits", factors=factors)
    with pytest.raises(InputError, match="5,000,000 runs") as found:
        sweep.check_size(confirmed=False)
    assert "yes" in str(found.value)
    sweep.check_size(confirmed=True)
    many = SweepSpec(
        what="digits",
        factors=(*factors, Factor(path="train.seed", values=Choices(values=("1", "2")))),
    )
    with pytest.raises(InputError, match="too many to list"):
        many.check_size(confirmed=True)


FILE = """
what = "text"
seeds = 3
rungs = [250, 500]
[vary]
train.lr = [1e-3, 3e-3]
model.position = ["Rotary", "Learned"]
[set]
train.steps = 1000
[design]
params = "300k"
tied = [true, false]
"""


def test_a_file_is_the_same_sweep():
    sweep = read_sweep(FILE)
    assert is_sweep(FILE)
    assert not is_sweep("[train]\nlr = 1")
    assert sweep.seeds == 3
    assert sweep.rungs == (250, 500)
    assert [factor.path for factor in sweep.factors] == ["train.lr", "model.position"]
    assert sweep.factors[0].values == Choices(values=("0.001", "0.003"))
    assert sweep.fixed == ("train.steps=1000",)
    assert sweep.designs[1].values == Choices(values=("true", "false"))
    changed = with_settings(sweep, ["train.lr=1e-2,1e-1", "train.steps=7"])
    assert changed.fixed == ("train.steps=7",)
    assert changed.factors[1].values == Choices(values=("1e-2", "1e-1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what = ", "cannot be read as TOML"),
        ('what = "text"\nsead = 3', "did you mean 'seeds'"),
        ('what = "text"\n[vary]\ntrain.lr = []', "train.lr has no values"),
        ('what = "text"\nvary = 3', "vary is not a table"),
        ("[vary]\ntrain.lr = [1, 2]", "nothing to sweep over"),
    ],
)
def test_a_bad_file_is_refused(text, message):
    with pytest.raises(InputError) as found:
        read_sweep(text, where="s.toml")
    assert message in str(found.value)
    assert "s.toml" in str(found.value)


def test_ranges_are_values():
    assert Range(low=1.0, high=2.0) != Range(low=1.0, high=2.0, log=True)
