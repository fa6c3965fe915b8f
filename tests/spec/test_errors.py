from typing import get_args

import pytest

import glassformer as gf
from glassformer.lab.recipes import recipe
from glassformer.spec.errors import (
    OTHER_KINDS,
    OTHER_WORDS,
    CheckFailed,
    DivergedError,
    FileError,
    GlassError,
    InputError,
    MachineError,
    nearest,
    nearest_kind,
)
from glassformer.spec.model import Position
from glassformer.spec.train import CosineSchedule, Optimizer, Schedule, TrainSpec, check_settings


def test_a_message_has_at_most_three_lines():
    error = InputError("d_model 7 is odd", where="spec.json", hint="use 8")
    assert str(error).splitlines() == ["d_model 7 is odd", "  at: spec.json", "hint: use 8"]
    assert str(InputError("alone")) == "alone"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(CheckFailed, 1), (InputError, 2), (FileError, 3), (DivergedError, 4), (MachineError, 5)],
)
def test_exit_codes_are_the_designs(kind, code):
    assert kind.exit_code == code
    assert issubclass(kind, GlassError)


def test_bad_input_is_a_value_error():
    assert issubclass(InputError, ValueError)


def test_nearest_names_one_choice_or_all():
    assert nearest("d_modle", ["d_model", "d_ff"]) == "did you mean 'd_model'?"
    assert nearest("zzz", ["d_ff", "d_model"]) == "known: d_ff, d_model"
    assert nearest("zzz", []) == "nothing is known here"


def test_options_are_spelled_as_the_reader_would_type_them():
    error = InputError("{--a|a=1} is odd", where="{x}", hint="use {--b-c|b_c=True}, not {d, e}")
    assert str(error) == "a=1 is odd\n  at: {x}\nhint: use b_c=True, not {d, e}"
    assert str(error.in_command()) == "--a is odd\n  at: {x}\nhint: use --b-c, not {d, e}"
    assert error.args == ("a=1 is odd",)


# --- hints name what was meant --------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    return recipe("digits")


def hint_of(make) -> str:
    with pytest.raises(InputError) as caught:
        make()
    return caught.value.hint


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("model.n_layers=3", "model.decoder.layers.count"),
        ("n_layers=3", "model.decoder.layers.count"),
        ("model.num_hidden_layers=3", "model.decoder.layers.count"),
        ("model.d_ff=3", "model.decoder.layers.block.ffn.d_ff"),
        ("model.decoder.n_heads=2", "model.decoder.layers.block.attention.n_heads"),
        ("model.d_modl=3", "d_model"),
        ("train.learning_rate=1", "train.lr"),
        ("train.warmup_steps=1", "train.schedule.warmup"),
        ("train.lrr=1", "lr"),
    ],
)
def test_a_key_that_is_not_there_names_the_one_that_was_meant(digits, typed, meant):
    assert hint_of(lambda: gf.override(digits, typed)) == f"did you mean '{meant}'?"


def test_the_path_is_that_of_what_is_changed():
    model = recipe("digits").model
    assert (
        hint_of(lambda: gf.override(model, "n_layer=3")) == "did you mean 'decoder.layers.count'?"
    )


def test_every_word_stands_for_a_setting_that_there_is():
    model = gf.override(gf.preset("core"), "decoder.layers.block.attention.n_kv_heads=1")
    for full in set(OTHER_WORDS.values()):
        first, _, rest = full.partition(".")
        if first not in ("model", "train") or rest == "optimizer.momentum":  # of SGD
            continue
        node = model if first == "model" else TrainSpec(schedule=CosineSchedule())
        told = ""
        try:
            gf.override(node, f"{rest}=null")
        except InputError as error:
            told = error.what
        assert "unknown key" not in told, full


def test_an_option_of_a_function_that_is_not_there_names_the_nearest():
    assert hint_of(lambda: gf.build("core", sead=1)) == "did you mean 'seed'?"
    assert hint_of(lambda: gf.train("digits", stepz=1)) == "did you mean 'steps'?"
    assert hint_of(lambda: gf.load("x", devise="cpu")) == "did you mean 'device'?"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("train.lr=abc", "train.lr: 'abc' is not a number"),
        ("train.steps=1.5", "train.steps: 1.5 is not a whole number"),
        ("model.d_model=wide", "model.d_model: 'wide' is not a whole number"),
        ("model.n_layers=3", "unknown key 'n_layers'"),
    ],
)
def test_typos_are_found_without_a_task(typed, message):
    with pytest.raises(InputError, match=message):
        check_settings([typed])


def test_what_may_be_right_is_left_to_the_plan():
    check_settings(
        ["train.optimizer=my.py:Lion", "train.schedule.floor=0.1", "model.heads.0.tied=1"]
    )
    check_settings(["train.lr=1e-3", "task.anything=3", "train.steps=5"])


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("train.schedule=Cosine", "did you mean 'CosineSchedule'?"),
        ("train.schedule=CosineAnnealingLR", "did you mean 'CosineSchedule'?"),
        ("train.schedule=cosine_with_warmup", "did you mean 'CosineSchedule'?"),
        ("train.schedule=noam", "did you mean 'InverseSqrtSchedule'?"),
        ("train.schedule=Constnt", "did you mean 'ConstantSchedule'?"),
        ("train.schedule=WSDSchedule", "the nearest is 'ConstantSchedule', which warms up and"),
        ("train.schedule=warmup_stable_decay", "the nearest is 'ConstantSchedule'"),
        ("train.schedule=LinearLR", "the nearest is 'CosineSchedule'"),
        ("train.schedule=BananaSchedule", "known: ConstantSchedule, CosineSchedule"),
        ("train.optimizer=Adam", "did you mean 'AdamW'?"),
        ("train.optimizer=adamw_torch_fused", "did you mean 'AdamW'?"),
        ("train.optimizer=Lion", "or an optimizer of your own: FILE.py:Class"),
        ("train.optimizer=mun", "did you mean 'Muon'?"),
        ("model.position=rope", "did you mean 'Rotary'?"),
        ("model.position=ailbi", "did you mean 'ALiBi'?"),
    ],
)
def test_a_kind_by_another_librarys_name_is_ours(digits, typed, hint):
    with pytest.raises(InputError, match="unknown kind") as caught:
        gf.override(digits, typed)
    assert hint in str(caught.value)


def test_every_other_word_for_a_kind_names_one_that_there_is():
    kinds = {cls.__name__ for union in (Schedule, Optimizer, Position) for cls in get_args(union)}
    assert {kind for kind, _ in OTHER_KINDS.values()} <= kinds
    for word, (kind, _) in OTHER_KINDS.items():
        assert f"'{kind}'" in nearest_kind(word, kinds), word
