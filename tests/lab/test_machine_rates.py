"""A machine's rates: the promised form, positive, and enough to predict a step from."""

import time

from glassformer.costs.timing import step_time
from glassformer.lab.measure.machine_rates import (
    ELEMENTS,
    HEADS,
    LENGTHS,
    LOGITS,
    WIDTHS,
    calibrate,
)
from glassformer.spec.presets import budget_lm


def test_rates_have_every_point_and_predict_a_step():
    rates = calibrate(seconds=0.05, clock=time.process_time)
    for curve, sizes in (
        (rates.products, WIDTHS),
        (rates.attention, LENGTHS),
        (rates.heads, HEADS),
        (rates.passes, ELEMENTS),
        (rates.logits, LOGITS),
    ):
        assert tuple(size for size, _ in curve) == sizes
        assert all(rate > 0 for _, rate in curve)
    assert rates.updates > 0
    assert 0 < rates.dispatch < 1
    spec = budget_lm(vocab_size=200, d_model=32, d_ff=64, n_layers=1, n_heads=2, max_seq_len=32)
    assert step_time(spec, rates, batch=2, length=32).total > 0
