"""Tables: the first operation that takes an op's fields serves it, what it lacks falls back."""

from dataclasses import replace

import numpy as np
import pytest

from glassformer.byhand.model import Model
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.table import Operation, Table
from glassformer.spec.errors import InputError
from glassformer.spec.lacking import ANY
from glassformer.spec.program import KINDS, Attend, Norm, program
from tests.byhand.witness import OSS, PRESETS, T5, case_for


def before(operation: Operation) -> Table:
    """NumPy's table behind one more operation."""
    return replace(NUMPY, name="another table", operations=(operation, *NUMPY.operations))


def test_numpy_serves_every_kind() -> None:
    assert {one.kind for one in NUMPY.operations} == set(KINDS)
    for spec in (*PRESETS.values(), T5, OSS):
        assert NUMPY.lacking(program(spec, training=True)) == ()


def test_fields_decide_who_serves() -> None:
    """A norm that knows one formula alone serves it, and the other falls back."""
    (norm,) = (one for one in NUMPY.operations if one.kind is Norm)
    served: list[str] = []

    def forward(step, inputs, run):
        served.append(step.kind.form)
        return norm.forward(step, inputs, run)

    table = before(replace(norm, forward=forward, runs={Norm: {"eps": ANY}}))
    for name, forms in (("qwen", {"rms"}), ("core", set()), ("gemma", set())):
        spec, case = PRESETS[name], case_for(PRESETS[name])
        plain = Model(spec, rng=np.random.default_rng(1))
        other = Model(spec, params=plain.params, table=table)
        served.clear()
        for model in (plain, other):
            model.loss_and_grads(case.inputs(model), targets=case.targets)
        assert set(served) == forms, name  # gemma's gain has an offset, which is not declared
        np.testing.assert_array_equal(plain.grad_vector, other.grad_vector)


def test_the_loss_belongs_to_the_table() -> None:
    def doubled(*args, **options):
        loss, cache = NUMPY.cross_entropy(*args, **options)
        return 2 * loss, cache

    spec, case = PRESETS["core"], case_for(PRESETS["core"])
    plain = Model(spec, rng=np.random.default_rng(1))
    other = Model(spec, params=plain.params, table=replace(NUMPY, cross_entropy=doubled))
    one, two = (m.loss(case.inputs(m), targets=case.targets).total for m in (plain, other))
    assert two == 2 * one


def test_what_no_operation_takes_is_refused_by_its_name() -> None:
    without = tuple(one for one in NUMPY.operations if one.kind is not Attend)
    table = replace(NUMPY, name="a table without attention", operations=without)
    assert table.lacking(program(PRESETS["core"])) == ("Attend (blocks.0.attn)",)
    with pytest.raises(InputError, match=r"no operation in a table without attention for Attend"):
        Model(PRESETS["core"], table=table)
