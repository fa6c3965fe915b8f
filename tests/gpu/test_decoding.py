"""The same tokens on a GPU; skipped where there is none."""

import pytest
import torch

from glassformer.adapters.executors import fastest_stepper, make_slots, rewinding_stepper
from glassformer.adapters.generate import generate, stream_tokens
from glassformer.data.automata.library import brackets
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.generation.batching import Batcher
from glassformer.generation.beam import beam_search
from glassformer.generation.constraint import Constraint
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.derived_step import lacks
from glassformer.gpu.recorded_slots import RecordedSlots
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.prompts import Prompts
from glassformer.spec import presets
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from tests.generation import checks
from tests.tiny import built

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", checks.SPECS)
def test_the_gpu_gives_the_tokens_of_the_cpu(name):
    model = built(checks.SPECS[name])
    prompts = checks.prompts_for(model)
    sampled = DecodeSpec(max_new_tokens=12, temperature=1.1, top_p=0.9, repetition_penalty=1.2)
    beams = BeamSpec(max_new_tokens=8, eos=(1,), groups=2, diversity=0.5)
    names = Vocab(("PAD", "BOS", "EOS", "(", ")"))
    legal = DecodeSpec(max_new_tokens=9, temperature=1.0, eos=(2,))

    def answers(stepper):
        bound = Constraint(brackets(3), tokenizer=names)
        yield [g.tokens for g in generate_batch(stepper, prompts, spec=sampled)]
        yield [h.tokens for b in beam_search(stepper, prompts, spec=beams) for h in b.hypotheses]
        yield [g.tokens for g in generate_batch(stepper, prompts, spec=legal, constraint=bound)]

    want = list(answers(NaiveStepper(model)))
    model.cuda()
    for make in (TorchStepper, RecordedStepper):
        assert list(answers(make(model))) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_end_leave_the_others_as_they_were(dtype):
    """Batches that shrink go through several recorded graphs; a second call finds them again."""
    model = built(checks.SPECS["rotary"]).to(dtype).cuda()
    draw = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(model.spec.vocab_size, (3 + n % 5,), generator=draw).tolist()
        for n in range(13)
    ]
    ends = tuple(range(0, model.spec.vocab_size, 4))
    spec = DecodeSpec(max_new_tokens=16, temperature=1.0, eos=ends)
    want = [g.tokens for g in generate_batch(TorchStepper(model), prompts, spec=spec)]
    assert len({len(tokens) for tokens in want}) > 3
    decoder = RecordedStepper(model)
    for _ in range(2):
        assert [g.tokens for g in generate_batch(decoder, prompts, spec=spec)] == want
    assert [
        g.tokens for g in generate_batch(RecordedStepper(model, graph=False), prompts, spec=spec)
    ] == want


@pytest.mark.parametrize("name", checks.SPECS)
def test_slots_on_the_gpu_give_the_tokens_of_the_cpu(name):
    """More sequences than slots, some ending early: recorded steps, launched ahead."""
    model = built(checks.SPECS[name])
    if model.spec.encoder is not None or lacks(model.spec):
        return
    draw = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(model.spec.vocab_size, (2 + n % 5,), generator=draw).tolist()
        for n in range(13)
    ]
    specs = [
        DecodeSpec(max_new_tokens=4 + n % 9, temperature=n % 2 * 1.1, eos=(1,), seed=n)
        for n in range(13)
    ]
    want = [
        list(generate_batch(TorchStepper(model), [prompt], spec=spec)[0].tokens)
        for prompt, spec in zip(prompts, specs, strict=True)
    ]
    batcher = Batcher(RecordedSlots(model.cuda(), slots=5))
    rows = [
        batcher.add(batcher.prepare(prompt, spec=spec))
        for prompt, spec in zip(prompts, specs, strict=True)
    ]
    list(batcher.run())
    assert [row.tokens for row in rows] == want


@pytest.mark.parametrize("name", checks.SPECS)
def test_tokens_that_the_gpu_chooses_are_those_of_the_cpu(name):
    """Float32, so that our kernels run: greedy runs whose rows end, and beams by an index."""
    model = built(checks.SPECS[name]).float()
    prompts = checks.prompts_for(model)
    ends = tuple(range(0, model.spec.vocab_size, 4))
    specs = (
        DecodeSpec(max_new_tokens=20),
        DecodeSpec(max_new_tokens=20, forbidden=(3, 4), eos=ends),
        DecodeSpec(max_new_tokens=20, min_new_tokens=5, eos=ends, forced=(7,)),
    )
    searches = (
        BeamSpec(width=4, max_new_tokens=20, n_best=1, eos=(5, 7), alpha=1.0),
        BeamSpec(width=5, max_new_tokens=20, eos=(5,), min_new_tokens=9, forbidden=(1, 8)),
        BeamSpec(width=3, max_new_tokens=20, n_best=2, eos=(5, 7), alpha=-2.0),
        BeamSpec(width=2, max_new_tokens=20),
        BeamSpec(width=18, max_new_tokens=6, eos=(5,)),
    )

    def answers(stepper):
        for spec in specs:
            made = generate_batch(stepper, prompts, spec=spec)
            yield [g.tokens for g in made], [x for g in made for x in g.logprobs]
        for spec in searches:
            found = beam_search(stepper, prompts, spec=spec, record=True)
            trees = [[(*node[:3], node.finish) for node in one.tree] for one in found]
            yield trees, [node.total for one in found for node in one.tree]

    want = list(answers(TorchStepper(model)))
    decoder = RecordedStepper(model.cuda())
    for _ in range(2):  # the second time everything is recorded
        for (tokens, numbers), (expected, values) in zip(answers(decoder), want, strict=True):
            assert tokens == expected
            assert torch.allclose(torch.tensor(numbers), torch.tensor(values), atol=1e-4)


#: Widths that the kernels for some rows take: multiples of 64.
WIDE = {
    "qwen": presets.qwen(
        d_model=128, d_ff=192, n_layers=3, n_heads=4, n_kv_heads=2, d_head=32, vocab_size=301
    ),
    "seq2seq": presets.seq2seq(d_model=128, n_heads=4, n_layers=2, vocab_size=301),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 5, 130])
@pytest.mark.parametrize("name", WIDE)
def test_half_precision_is_as_near_as_the_plain_step(name, rows, dtype):
    """Logits of both steps against float64 of the same weights, token after token."""
    exact = built(WIDE[name]).to(dtype).double()
    half = built(WIDE[name]).to(dtype).cuda()
    vocab, draw = exact.spec.vocab_size, torch.Generator().manual_seed(3)
    given = torch.randint(vocab, (rows, 7), generator=draw).tolist()
    prompts = Prompts.of(given, sources=None if exact.spec.encoder is None else given)
    steppers = TorchStepper(exact), TorchStepper(half), RecordedStepper(half)
    started = [stepper.start(prompts, room=5) for stepper in steppers]
    logits = [logits_BV for logits_BV, _ in started]
    for turn in range(4):
        want, *both = (x.detach().cpu().double() for x in logits)
        plain, fast = (float((x - want).norm() / want.norm()) for x in both)
        assert fast < 1.5 * plain + 1e-3, turn
        tokens_B = torch.randint(vocab, (rows,), generator=draw)
        logits = [
            stepper.step(tokens_B, past=past)
            for stepper, (_, past) in zip(steppers, started, strict=True)
        ]


def test_the_recorded_step_is_the_default():
    """By `generate` too, also while another stream has not ended, and with guesses."""
    model = built(checks.SPECS["rotary"]).float()
    want = generate(model, [3, 1, 4], max_new_tokens=20).tokens
    other = generate(model, [5, 1], max_new_tokens=20).tokens
    model.cuda()
    assert isinstance(fastest_stepper(model), RecordedStepper)
    assert isinstance(rewinding_stepper(model), TorchStepper)
    assert generate(model, [3, 1, 4], max_new_tokens=20).tokens == want
    first, second = (stream_tokens(model, p, max_new_tokens=20) for p in ([3, 1, 4], [5, 1]))
    pairs = [(a.token, b.token) for a, b in zip(first, second, strict=True)]
    assert pairs == list(zip(want, other, strict=True))
    guessed = generate(model, [3, 1, 4], max_new_tokens=20, speculate=True)
    assert guessed.tokens == want and not guessed.speculation.why_not
    model.blocks[0].register_forward_hook(lambda *_: None)
    assert isinstance(fastest_stepper(model), TorchStepper)


def test_an_encoder_decoder_is_served_one_by_one():
    """Its slots are decoded in turn, which a recorded step's one memory would not allow."""
    model = built(checks.SPECS["encoder"]).cuda()
    slots = make_slots(model, lambda: pytest.fail("not ours"), model.spec, slots=2)
    assert isinstance(slots.stepper, TorchStepper)


@pytest.mark.parametrize("name", ["rotary", "window", "encoder"])
def test_keys_and_values_in_8_bits_are_those_of_the_cpu(name):
    """The cached step keeps them on a GPU; the recorded one and slots hold them as computed."""
    model = built(checks.SPECS[name])
    prompts = checks.prompts_for(model)
    greedy = DecodeSpec(max_new_tokens=12)
    beams = BeamSpec(max_new_tokens=8, eos=(1,))
    want = NaiveStepper(model, kv_cache="int8")
    tokens = [g.tokens for g in generate_batch(want, prompts, spec=greedy)]
    found = [h.tokens for b in beam_search(want, prompts, spec=beams) for h in b.hypotheses]
    model.cuda()
    stepper = fastest_stepper(model, kv_cache="int8")
    assert isinstance(stepper, TorchStepper) and stepper.kv_cache == "int8"
    assert [g.tokens for g in generate_batch(stepper, prompts, spec=greedy)] == tokens
    again = beam_search(stepper, prompts, spec=beams)
    assert [h.tokens for b in again for h in b.hypotheses] == found
    with pytest.raises(InputError, match="served on a CPU"):
        make_slots(
            model, lambda: TorchStepper(model), model.spec, slots=2, context=9, kv_cache="int8"
        )
