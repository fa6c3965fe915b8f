"""Keys and values in 8 bits, as a whole: options, memory, batches, beams, guesses, kept prompts."""

import pytest
import torch

import glassformer as gf
from glassformer.adapters.executors import (
    check_own_cache,
    fastest_stepper,
    make_slots,
    rewinding_stepper,
)
from glassformer.adapters.generate import make_stepper
from glassformer.costs.estimates import cache_bytes
from glassformer.generation.beam import beam_search
from glassformer.generation.native.arrays import ArrayStepper
from glassformer.generation.native.lowering import PAGE, ArraySource
from glassformer.generation.native.stepper import NativeStepper, unavailable
from glassformer.generation.slots import NativeSlots, OneByOneSlots
from glassformer.generation.speculative import SpeculativeStepper
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.generation.turns import Turns
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Span
from glassformer.models.weights import model_digest, weights_of
from glassformer.spec import presets
from glassformer.spec.decoding import BeamSpec, DecodeSpec, StepSpec
from glassformer.spec.errors import InputError

SPEC = presets.qwen(
    vocab_size=97, d_model=32, d_ff=64, n_layers=2, n_heads=4, n_kv_heads=2, d_head=40
)
ROW = tuple((7 * i) % 97 for i in range(53))
GREEDY = DecodeSpec(max_new_tokens=12)


def model_of(spec=SPEC, seed=0):
    return build(spec, generator=torch.Generator().manual_seed(seed))


def tokens_of(stepper, prompts, spec=GREEDY):
    return [one.tokens for one in generate_batch(stepper, prompts, spec=spec)]


def test_generate_takes_the_option_and_rounds():
    model = model_of()
    prompt = list(ROW)
    made = gf.generate(model, prompt, max_new_tokens=12, kv_cache="int8")
    assert [made.tokens] == tokens_of(NaiveStepper(model, kv_cache="int8"), [prompt])
    plain = gf.generate(model, prompt, max_new_tokens=12)
    assert made.logprobs != plain.logprobs, "something was rounded"
    assert made.logprobs == pytest.approx(plain.logprobs, abs=0.05)
    best = gf.beam_search(model, prompt, width=3, max_new_tokens=6, kv_cache="int8")
    spec = BeamSpec(width=3, max_new_tokens=6)
    (want,) = beam_search(NaiveStepper(model, kv_cache="int8"), Prompts.of([prompt]), spec=spec)
    assert [one.tokens for one in best] == [one.tokens for one in want.hypotheses]


def test_memory_is_what_the_spec_predicts():
    model = model_of()
    per_position = {}
    for kv_cache in ("float", "int8"):
        stepper = NativeStepper(model, kv_cache=kv_cache)
        stepper.start(Prompts((ROW,)), room=1)
        positions = stepper.pages.form.pages * PAGE
        want = cache_bytes(SPEC, batch=1, length=positions, itemsize=4, kv_cache=kv_cache)
        assert stepper.memory_bytes == want
        per_position[kv_cache] = want / positions
    assert per_position == {"float": 2 * 2 * 2 * 40 * 4, "int8": 2 * 2 * 2 * (40 + 2 * 4)}


def test_steps_without_such_a_cache_are_refused():
    with pytest.raises(InputError, match=r"kv_cache.* int8 is for the default step"):
        StepSpec(kv_cache="int8", cached=False)


def test_other_forms_and_other_libraries_are_refused():
    with pytest.raises(InputError, match="kv_cache"):
        StepSpec(kv_cache="int4")
    with pytest.raises(InputError, match="another library's"):
        check_own_cache("int8")
    check_own_cache("float")


def test_the_native_step_is_taken_where_it_can_be():
    model = model_of()
    for make in (fastest_stepper, rewinding_stepper):
        found = make(model, kv_cache="int8")
        assert isinstance(found, NativeStepper) and found.kv_cache == "int8"
    model.blocks[0].ffn.register_forward_hook(lambda *_: None)
    found = fastest_stepper(model, kv_cache="int8")
    assert isinstance(found, TorchStepper) and found.kv_cache == "int8"
    wide = model_of(presets.qwen(vocab_size=11, d_model=8, n_heads=1, n_kv_heads=1, d_head=514))
    assert unavailable(wide) == "" and "heads of 514" in unavailable(wide, kv_cache="int8")
    found = fastest_stepper(wide, kv_cache="int8")
    assert isinstance(found, TorchStepper) and found.kv_cache == "int8"


def test_plain_arrays_are_decoded_alike():
    """The step that `glass generate` takes without torch."""
    model = model_of()
    arrays = ArrayStepper(SPEC, ArraySource(SPEC, weights_of(model)), kv_cache="int8")
    found = tokens_of(arrays, [list(ROW)])
    assert found == tokens_of(NativeStepper(model, kv_cache="int8"), [list(ROW)])
    assert arrays.pages.page == NativeStepper(model, kv_cache="int8").empty(1).own.pages.page


def test_guesses_change_no_token():
    model, prompt = model_of(), [*ROW[:9], *ROW[:9]]
    plain = make_stepper(model, StepSpec(kv_cache="int8"))
    guessing = make_stepper(model, StepSpec(kv_cache="int8", speculate=True))
    assert isinstance(guessing, SpeculativeStepper) and guessing.inner.kv_cache == "int8"
    for stepper in (guessing, SpeculativeStepper(plain, draft=plain, clock=lambda: 0.0)):
        for temperature in (0.0, 1.0):
            spec = DecodeSpec(max_new_tokens=30, temperature=temperature, seed=3)
            assert tokens_of(stepper, [prompt], spec) == tokens_of(plain, [prompt], spec)


@pytest.mark.parametrize("make", [TorchStepper, NativeStepper])
def test_what_is_taken_back_is_as_if_it_had_not_been(make):
    stepper = make(model_of(), kv_cache="int8")
    _, past = stepper.start(Prompts((ROW[:20],)), room=9)
    first = stepper.extend([5, 6, 7], past=past, every=True).clone()
    assert past.rewind([20]) == [20]
    stepper.extend([9, 9, 9, 9], past=past, every=True)
    assert past.rewind([20]) == [20]
    again = stepper.extend([5, 6, 7], past=past, every=True)
    assert torch.equal(first, again)


def test_kept_prompts_belong_to_one_form(tmp_path):
    model = model_of()
    assert model_digest(model, kind="float") != model_digest(model, kind="int8")
    for kv_cache in ("int8", "float"):
        want, _ = NativeStepper(model, kv_cache=kv_cache).start(Prompts((ROW,)), room=1)
        for reused in (0, 48):
            keeping = NativeStepper(model, prompt_cache=tmp_path, kv_cache=kv_cache)
            found, _ = keeping.start(Prompts((ROW,)), room=1)
            assert keeping.reused == reused and torch.equal(found, want)
    assert len(list(tmp_path.iterdir())) == 2
    small, large = sorted(entry.stat().st_size for entry in tmp_path.iterdir())
    assert small < 0.35 * large


def test_a_conversation_goes_on_from_rounded_keys():
    model = model_of()
    plain = TorchStepper(model, cache="growing", kv_cache="int8")
    for talk in (Turns(NativeStepper(model, kv_cache="int8")), Turns(plain)):
        talk.start(Prompts((ROW[:30],)), room=9)
        found, _ = talk.start(Prompts((ROW,)), room=9)
        want, _ = NaiveStepper(model, kv_cache="int8").start(Prompts((ROW,)), room=9)
        assert talk.reused == 30
        torch.testing.assert_close(found, want, rtol=0, atol=2e-4)


def test_served_in_company_is_alone_bit_for_bit():
    model = model_of()
    slots = make_slots(
        model, lambda: TorchStepper(model), SPEC, slots=3, context=64, kv_cache="int8"
    )
    assert isinstance(slots, NativeSlots)
    held = slots.slots + slots.spare
    assert held == 4
    assert slots.memory_bytes == cache_bytes(
        SPEC, batch=held, length=64, itemsize=4, kv_cache="int8"
    )
    alone = slots.read([Span(0, 0, ROW)]).clone()
    slots.copy(0, 1, length=33)  # shares pages, the last of them in part
    together = slots.read([Span(1, 33, ROW[33:]), Span(2, 0, (1, 2, 3))]).clone()
    assert torch.equal(together[:1], alone)
    slots.read([Span(1, 33, (4, 5, 6))])  # a copy of the shared page is written, not the page
    again = slots.read([Span(0, len(ROW) - 1, ROW[-1:])])
    assert torch.equal(again, alone)


def test_an_encoder_decoder_is_served_one_by_one():
    spec = presets.seq2seq(d_model=64, n_heads=4, n_layers=2, vocab_size=97)
    model = model_of(spec)
    slots = make_slots(
        model, lambda: TorchStepper(model), spec, slots=2, context=16, kv_cache="int8"
    )
    assert isinstance(slots, OneByOneSlots) and slots.stepper.kv_cache == "int8"
    slots.begin(0, (3, 4, 5))
    found = slots.read([Span(0, 0, (1, 2))])
    want, _ = NaiveStepper(model, kv_cache="int8").start(
        Prompts.of([[1, 2]], sources=[[3, 4, 5]]), room=1
    )
    torch.testing.assert_close(found, want, rtol=0, atol=2e-4)


def test_another_librarys_module_is_served_with_its_own_cache():
    with pytest.raises(InputError, match="another library's"):
        make_slots(None, lambda: None, SPEC, slots=1, kv_cache="int8")
