"""The native step: the plain step's logits, rows that come and go, pages that are given back."""

import inspect
from functools import partial

import pytest
import torch

from glassformer.adapters.executors import fastest_stepper
from glassformer.generation.native import lowering
from glassformer.generation.native.stepper import NativeStepper, unavailable
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.kernels import c_library
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.quant.convert import quantize_model
from glassformer.spec import presets
from glassformer.spec import program as kinds
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import DivergedError, InputError
from glassformer.spec.program import ANY
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4, Int8
from tests.generation import checks
from tests.kernels.faults import STEP_FAULTS, damaged_library, new_memory_is_nan
from tests.tiny import built

CHECKS = {
    check.__name__: check
    for check in (
        checks.native_is_uncached,
        checks.long_rows_are_uncached,
        checks.long_rows_have_their_own_bits,
        checks.what_comes_later_is_not_read,
        checks.native_runs_are_steps,
        checks.native_beams_are_plain,
        checks.pages_hold_the_defined_codes,
        checks.rounded_attention_is_of_the_rounded_numbers,
        checks.what_is_no_number_stays_none,
        checks.rounded_is_uncached,
        checks.native_beam_runs_are_steps,
        checks.threads_change_no_step,
    )
}


@pytest.mark.parametrize("name", CHECKS)
def test_native(name):
    with new_memory_is_nan():
        CHECKS[name]()


@pytest.mark.parametrize("fault", STEP_FAULTS, ids=lambda fault: fault.name)
def test_every_fault_of_an_operation_is_caught(fault, tmp_path, monkeypatch):
    if fault.needs not in c_library.variants():
        pytest.skip("this machine cannot run the damaged line")
    damaged = c_library.open_library(damaged_library(fault, tmp_path))
    monkeypatch.setattr(c_library, "_loaded", lambda: (damaged, ""))
    one = partial(checks.native_is_uncached, variants=("portable",), specs=(fault.caught_by,))
    # Numbers that were never written are NaN here, and beam search says so by name.
    with new_memory_is_nan(), pytest.raises((AssertionError, DivergedError)):
        CHECKS.get(fault.caught_by, one)()


SMALL = {"vocab_size": 97, "d_model": 48, "n_layers": 2, "n_heads": 4, "d_ff": 40}
SMALL_SEQ2SEQ = presets.seq2seq(d_model=64, n_heads=4, n_layers=2, vocab_size=97)
#: Presets that continue no sequence.
SILENT = {"digits"}


@pytest.mark.parametrize("name", sorted(presets.PRESETS.keys() - SILENT))
def test_every_preset_gives_the_plain_tokens(name):
    known = inspect.signature(presets.PRESETS[name]).parameters
    sizes = {size: number for size, number in SMALL.items() if size in known}
    if "n_kv_heads" in known:
        sizes["n_kv_heads"] = 2
    model = build(presets.preset(name, **sizes), generator=torch.Generator().manual_seed(3))
    tokens = [[(5 * i + r) % model.spec.vocab_size for i in range(3 + r)] for r in range(3)]
    sources = None if model.spec.encoder is None else tokens
    prompts = Prompts.of(tokens, sources=sources)
    spec = DecodeSpec(max_new_tokens=8)
    stepper = fastest_stepper(model)
    assert isinstance(stepper, NativeStepper), unavailable(model)
    found = generate_batch(stepper, prompts, spec=spec)
    expected = generate_batch(TorchStepper(model), prompts, spec=spec)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.parametrize("scheme", [Int8(), Int4(), Int4(symmetric=False)], ids=str)
def test_quantized_weights_give_the_plain_logits(scheme):
    for spec in (presets.qwen(d_model=64, d_ff=96, n_layers=2), SMALL_SEQ2SEQ):
        model = build(spec, generator=torch.Generator().manual_seed(1))
        model = quantize_model(model, QuantSpec(scheme=scheme))
        sources = None if spec.encoder is None else [[1, 2, 3], [4, 5]]
        prompts = Prompts.of([[3, 1, 4], [1, 5, 9, 2, 6]], sources=sources)
        ours, plain = NativeStepper(model), TorchStepper(model)
        found_BV, past = ours.start(prompts, room=4)
        expected_BV, other = plain.start(prompts, room=4)
        for _ in range(3):
            # A rounding of an activation may fall either way: a small step of a small weight.
            assert float((found_BV - expected_BV).abs().max()) <= 1e-2 * float(expected_BV.std())
            tokens_B = expected_BV.argmax(-1)
            found_BV = ours.step(tokens_B, past=past)
            expected_BV = plain.step(tokens_B, past=other)


def test_bfloat16_weights_are_read_as_they_are():
    """Activations are float32 in the native step: it is closer to the exact logits than torch."""
    exact = build(presets.qwen(), generator=torch.Generator().manual_seed(1)).bfloat16().float()
    half = build(presets.qwen(), generator=torch.Generator().manual_seed(1)).bfloat16()
    prompts = Prompts.of([[3, 1, 4], [1, 5, 9, 2, 6]])
    want_BV, _ = NaiveStepper(exact).start(prompts, room=1)
    found_BV, _ = NativeStepper(half).start(prompts, room=1)
    assert torch.allclose(found_BV, want_BV, atol=1e-5)


def test_beams_share_pages_and_give_them_back():
    for name in ("rotary", "encoder"):
        model = checks.single(name)
        stepper, prompts = NativeStepper(model), checks.prompts_for(model)
        _, past = stepper.start(prompts, room=1)
        used = stepper.pages.used
        past.reorder(torch.tensor([0, 0, 0, 1, 2]))
        assert stepper.pages.used == used, "beams of one row share its pages"
        stepper.step(torch.tensor([3, 4, 5, 6, 7]), past=past)
        assert used < stepper.pages.used <= 5 * used
        del past
        assert stepper.pages.used == 0


def test_rows_come_and_go():
    """Three requests, each joining the batch while the others are under way, then leaving it."""
    for name in ("window", "encoder"):
        model = checks.single(name)
        stepper, prompts = NativeStepper(model), checks.prompts_for(model)
        spec = DecodeSpec(max_new_tokens=9)
        expected = [one.tokens for one in generate_batch(NaiveStepper(model), prompts, spec=spec)]
        made: dict[int, list[int]] = {}
        batch, going = None, []
        for turn in range(12):
            if turn % 2 == 0 and turn // 2 < len(prompts):
                row = turn // 2
                source = None if prompts.sources is None else (prompts.sources[row],)
                one = Prompts((prompts.tokens[row],), source)
                logits_BV, past = stepper.start(one, room=9)
                made[row] = [int(logits_BV.argmax())]
                if batch is None:
                    batch = past
                else:
                    batch.join(past)
                going.append(row)
            logits_BV = stepper.step(torch.tensor([made[row][-1] for row in going]), past=batch)
            for row, token in zip(going, logits_BV.argmax(-1).tolist(), strict=True):
                made[row].append(token)
            stay = [line for line, row in enumerate(going) if len(made[row]) < 9]
            batch.reorder(torch.tensor(stay, dtype=torch.long))
            going = [going[line] for line in stay]
            if not going:
                break
        assert [tuple(made[row]) for row in range(len(prompts))] == expected
        assert stepper.pages.used == 0


def test_several_tokens_at_once_and_taken_back():
    """What speculation needs: logits after each of several new tokens, and a row cut short."""
    model = checks.single("rotary")
    stepper, plain = NativeStepper(model), NaiveStepper(model)
    _, past = stepper.start(Prompts.of([[3, 1, 4], [1]]), room=9)
    logits = stepper.read_all([[5, 9, 2], [7]], past=past)
    for place, row in enumerate(([3, 1, 4, 5], [3, 1, 4, 5, 9], [3, 1, 4, 5, 9, 2], [1, 7])):
        want_BV, _ = plain.start(Prompts.of([row]), room=1)
        assert float((logits[place] - want_BV[0]).abs().max()) <= 1e-5
    past.cut([4, 1])
    logits = stepper.read([[8], [6, 2]], past=past)
    for place, row in enumerate(([3, 1, 4, 5, 8], [1, 6, 2])):
        want_BV, _ = plain.start(Prompts.of([row]), room=1)
        assert float((logits[place] - want_BV[0]).abs().max()) <= 1e-5


def test_new_weights_are_noticed():
    model = checks.single("rotary")
    stepper = NativeStepper(model)
    before, _ = stepper.start(Prompts.of([[1, 2]]), room=1)
    with torch.no_grad():
        model.blocks[0].attn_norm.weight.mul_(2.0)
    after, _ = stepper.start(Prompts.of([[1, 2]]), room=1)
    want, _ = NaiveStepper(model).start(Prompts.of([[1, 2]]), room=1)
    assert not torch.allclose(before, after)
    assert torch.allclose(after, want, atol=1e-5)


def test_weights_that_are_no_numbers_are_reported():
    model = checks.single("learned")
    with torch.no_grad():
        model.blocks[1].ffn.down_proj.weight[2, 3] = torch.nan
    with pytest.raises(DivergedError):
        generate_batch(NativeStepper(model), [[1, 2]], spec=DecodeSpec(max_new_tokens=5))


def test_what_it_does_not_know_is_left_to_others(monkeypatch):
    with monkeypatch.context() as unknown:
        unknown.delitem(lowering.RUNS, kinds.Route)
        assert "has no Route" in unavailable(checks.single("moe"))
        unknown.setitem(lowering.RUNS, kinds.Rotate, {"base": ANY, "scaling": ANY})
        assert "has no Rotate share=0.5" in unavailable(checks.single("neox"))
    assert "float64" in unavailable(built(checks.SPECS["rotary"]))
    hooked = checks.single("rotary")
    hooked.blocks[0].ffn.register_forward_hook(lambda *_: None)
    assert "hook" in unavailable(hooked)
    assert isinstance(fastest_stepper(hooked), TorchStepper)
    with pytest.raises(InputError, match="no native step"):
        NativeStepper(hooked)

    class Odd(torch.nn.Dropout):
        pass

    changed = checks.single("rotary")
    changed.blocks[0].dropout = Odd()
    assert "Odd" in unavailable(changed)


def test_a_field_that_it_does_not_know_is_not_passed_over(monkeypatch):
    """Behave as if `softcap` had been added to attention after the native step was written."""
    capped, plain = checks.single("gemma"), checks.single("learned")
    assert not unavailable(capped) and not unavailable(plain)
    older = {"before": ANY, "after": {0, None}}
    monkeypatch.setitem(lowering.RUNS, kinds.Attend, older)
    assert "Attend softcap=" in unavailable(capped)
    assert not unavailable(plain), "it has the default"
    monkeypatch.delitem(lowering.RUNS, kinds.AddRows)
    assert "AddRows" in unavailable(plain)
