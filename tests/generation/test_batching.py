"""Continuous batching: a sequence's tokens and logits are those that it has alone, bit for bit."""

import random
from dataclasses import replace

import pytest
import torch

from glassformer.generation import batching
from glassformer.generation.batching import WORTH_WAITING, Batcher, Continuation
from glassformer.generation.native.stepper import unavailable
from glassformer.generation.samplers import settings_of
from glassformer.generation.slots import NativeSlots, OneByOneSlots
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_slots import RecordedSlots
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Slots, Span
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.spec.model import MLP, RMSNorm, Rotary, SwiGLU
from glassformer.spec.options import Option, options_of
from glassformer.spec.presets import preset
from tests.planting import Assign, Call, Name, catches
from tests.tiny import tiny

MODELS = {
    "learned, GELU of an odd width": tiny(ffn=MLP(d_ff=100, activation="gelu")),
    "rotary, gated, grouped": tiny(
        attention={"n_heads": 4, "n_kv_heads": 2},
        ffn=SwiGLU(d_ff=37),
        norm=RMSNorm(),
        position=Rotary(),
    ),
    "a window": tiny(attention={"window": 5}, position=Rotary()),
    "alibi": preset("alibi-lm"),
    "experts": preset("moe"),
    "factorized": preset("fsm-factorized"),
}


def made(name: str) -> torch.nn.Module:
    """A model of float32 whose numbers are large enough that a wrong bit shows."""
    spec = MODELS[name] if name in MODELS else preset(name)
    model = build(spec, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def prompts_of(model, count: int, longest: int = 20) -> list[tuple[int, ...]]:
    """Prompts of many lengths, some of which begin alike."""
    chance = random.Random(1)
    vocab = model.spec.vocab_size
    shared = [chance.randrange(vocab) for _ in range(longest)]
    rows = []
    for _ in range(count):
        begin = shared[: chance.randrange(longest)] if chance.random() < 0.5 else []
        rest = chance.randrange(1, longest + 1 - len(begin))
        rows.append((*begin, *(chance.randrange(vocab) for _ in range(rest))))
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_company_or_cuts(name):
    model = made(name)
    if unavailable(model):
        assert name in ("experts", "factorized")
        return
    slots = NativeSlots(model, slots=8, context=model.spec.max_seq_len)
    prompts = prompts_of(model, 7, longest=min(20, model.spec.max_seq_len - 1))
    together_RV = slots.read([Span(place, 0, row) for place, row in enumerate(prompts)])
    for place, row in enumerate(prompts):
        alone_1V = slots.read([Span(7, 0, row)])
        for at, token in enumerate(row):
            cut_1V = slots.read([Span(7, at, (token,))])
        assert torch.equal(alone_1V, cut_1V)
        assert torch.equal(alone_1V[0], together_RV[place])
    # and they are the model's
    plain_RV = torch.cat([TorchStepper(model).start(Prompts((row,)), room=1)[0] for row in prompts])
    torch.testing.assert_close(together_RV, plain_RV, rtol=1e-3, atol=1e-3)


def answers(
    model, jobs, *, slots: int, step_tokens: int, between: int = 0, kind=NativeSlots
) -> list[list[int]]:
    """The tokens of every job; new ones join while others run."""
    batcher = Batcher(kind(model, slots=slots, context=40), step_tokens=step_tokens)
    rows = []
    for place, (prompt, spec) in enumerate(jobs):
        rows.append(batcher.add(batcher.prepare(prompt, spec=spec, owner=str(place % 3))))
        for _ in range(place % (between + 1)):
            batcher.step()
    list(batcher.run())
    assert batcher.running == batcher.waiting == 0
    assert all(row.finish == "length" for row in rows)
    return [row.tokens for row in rows]


def jobs_of(model, count: int) -> list[tuple[tuple[int, ...], DecodeSpec]]:
    chance = random.Random(2)
    return [
        (
            prompt,
            DecodeSpec(
                max_new_tokens=chance.randrange(1, 9),
                temperature=chance.choice((0.0, 0.7, 1.3)),
                top_p=chance.choice((1.0, 0.8)),
                repetition_penalty=chance.choice((1.0, 1.2)),
                seed=seed,
            ),
        )
        for seed, prompt in enumerate(prompts_of(model, count))
    ]


@catches(
    "the wrong row's logits",
    "generation.batching:Batcher.step",
    Call("_sampled"),
    arg=1,
    to="{value}[:1]",
)
def test_alone_is_together():
    """Alone, in few slots, in many, with prompts cut into single tokens."""
    model = build(preset("qwen"), generator=torch.Generator().manual_seed(0))
    jobs = jobs_of(model, 40)
    alone = [answers(model, [job], slots=1, step_tokens=128)[0] for job in jobs]
    for slots, step_tokens, between in ((3, 1, 0), (5, 17, 2), (16, 64, 1)):
        found = answers(model, jobs, slots=slots, step_tokens=step_tokens, between=between)
        assert found == alone


@pytest.mark.parametrize("name", MODELS)
def test_recorded_slots_give_the_logits_of_the_model(name):
    """Whole prompts together, and prompts token by token beside others: rounding apart."""
    model = made(name)
    slots = RecordedSlots(model, slots=8, context=model.spec.max_seq_len)
    prompts = prompts_of(model, 7, longest=min(20, model.spec.max_seq_len - 1))
    plain_RV = torch.cat([TorchStepper(model).start(Prompts((row,)), room=1)[0] for row in prompts])
    together_RV = slots.read([Span(place, 0, row) for place, row in enumerate(prompts)])
    torch.testing.assert_close(together_RV, plain_RV, rtol=1e-4, atol=1e-3)
    for place, row in enumerate(prompts):
        for at, token in enumerate(row):
            beside = [Span(place, 0, row)] if at % 2 else []
            cut_RV = slots.read([Span(7, at, (token,)), *beside])
        torch.testing.assert_close(cut_RV[0], plain_RV[place], rtol=1e-4, atol=1e-3)


def test_a_step_ahead_changes_no_token():
    """Sequences that end early, by an end token or a limit, and join while others run."""
    model = build(preset("qwen"), generator=torch.Generator().manual_seed(0)).double()
    ends = tuple(range(0, model.spec.vocab_size, 7))
    jobs = [(prompt, replace(spec, eos=ends)) for prompt, spec in jobs_of(model, 40)]
    want = [
        list(generate_batch(TorchStepper(model), [prompt], spec=spec)[0].tokens)
        for prompt, spec in jobs
    ]
    assert len({len(tokens) for tokens in want}) > 3
    for slots, step_tokens, between in ((1, 128, 0), (3, 1, 0), (5, 17, 2), (40, 64, 1)):
        batcher = Batcher(RecordedSlots(model, slots=slots, context=40), step_tokens=step_tokens)
        rows = []
        for place, (prompt, spec) in enumerate(jobs):
            asked = {"logprobs": place % 5 == 0}
            rows.append(batcher.add(batcher.prepare(prompt, spec=spec, **asked)))
            for _ in range(place % (between + 1)):
                batcher.step()
        list(batcher.run())
        assert [row.tokens for row in rows] == want
        assert batcher.running == batcher.waiting == 0 and not batcher.busy


def other_value(each: Option) -> object:
    """A valid value of an option that is not its default."""
    for value in (0.5, 2, 7):
        try:
            DecodeSpec(**{each.name: value})
        except InputError:
            continue
        return value
    raise AssertionError(f"no value for {each.name}")


RULES = [each for each in options_of(DecodeSpec) if each.group == "sampling"]


@pytest.mark.parametrize("rule", RULES, ids=lambda each: each.name)
def test_sequences_sampled_together_have_every_rule_in_common(rule):
    """Two requests that differ in one rule only: each has the tokens that it has alone."""
    model = made("qwen").double()
    base = DecodeSpec(temperature=1.5, max_new_tokens=20)
    specs = [base, replace(base, **{rule.name: other_value(rule)})]
    if rule.name != "seed":
        assert settings_of(specs[0]) != settings_of(specs[1])
    prompt = (3, 1, 4)
    want = [
        list(generate_batch(TorchStepper(model), [prompt], spec=spec)[0].tokens) for spec in specs
    ]
    assert want[0] != want[1]
    batcher = Batcher(RecordedSlots(model, slots=2, context=40))
    rows = [batcher.add(batcher.prepare(prompt, spec=spec)) for spec in specs]
    list(batcher.run())
    assert [row.tokens for row in rows] == want


def test_sequences_of_other_seeds_and_lengths_are_sampled_together():
    spec = DecodeSpec(temperature=1.0, top_k=5)
    other = replace(spec, seed=3, max_new_tokens=7, eos=(1,), stop=("end",))
    assert settings_of(spec) == settings_of(other)


def test_several_greedy_steps_in_one_call_change_no_token(monkeypatch):
    """Sequences that end by an end token or a limit, beside ones that are sampled, and alone."""
    model = made("qwen")
    ends, closed = (tuple(range(n, model.spec.vocab_size, 7)) for n in (0, 1))
    jobs = []
    for place, (prompt, spec) in enumerate(jobs_of(model, 30)):
        sampled = {} if place % 3 else {"temperature": 0.0, "repetition_penalty": 1.0}
        jobs.append((prompt, replace(spec, eos=ends, max_new_tokens=12, **sampled)))
    jobs += [(prompt, replace(spec, forbidden=closed)) for prompt, spec in jobs[::3]]

    def run(slots: int, between: int) -> tuple[list[list[int]], list[str | None], int, int]:
        batcher = Batcher(NativeSlots(model, slots=slots, context=40))
        rows, calls = [], 0
        for place, (prompt, spec) in enumerate(jobs):
            rows.append(batcher.add(batcher.prepare(prompt, spec=spec, owner=str(place % 3))))
            for _ in range(between if place % 2 else 0):
                batcher.step()
        while batcher.busy:
            batcher.step()
            calls += 1
        made = sum(len(row.tokens) for row in rows)
        assert batcher.made_tokens == made
        return [row.tokens for row in rows], [row.finish for row in rows], calls, batcher.steps

    for slots, between in ((1, 0), (2, 3), (5, 1)):
        *several, calls, steps = run(slots, between)
        assert slots > 1 or calls < steps
        with monkeypatch.context() as patch:
            patch.setattr(NativeSlots, "run_greedy", Slots.run_greedy)
            *one_by_one, _, _ = run(slots, between)
        assert several == one_by_one
    assert set(several[1]) == {"eos", "length"}


@pytest.mark.parametrize("kind", ["native", "recorded", "one by one"])
def test_a_scored_prompt_has_the_log_probabilities_of_the_model(kind):
    """It has them beside others, in pieces, after the same prompt, and with nothing generated."""
    model = made("rotary, gated, grouped")
    spec = model.spec
    longest = spec.max_seq_len - 1
    slots = {
        "native": lambda: NativeSlots(model, slots=3),
        "recorded": lambda: RecordedSlots(model, slots=3),
        "one by one": lambda: OneByOneSlots(
            TorchStepper(model), spec, slots=3, context=spec.max_seq_len
        ),
    }[kind]()
    batcher = Batcher(slots, step_tokens=7)
    prompts = [row for row in prompts_of(model, 9, longest=min(20, longest)) if len(row) > 1]
    prompts.append(prompts[0][:1])
    decoding = DecodeSpec(max_new_tokens=1)
    for _ in range(2):
        rows = [
            batcher.prepare(
                row, spec=decoding, top_logprobs=2, score_prompt=True, is_continued=n % 2
            )
            for n, row in enumerate(prompts)
        ]
        beside = [batcher.prepare(row, spec=decoding) for row in prompts]
        for pair in zip(rows, beside, strict=True):
            for row in pair:
                batcher.add(row)
        list(batcher.run())
        assert [len(row.tokens) for row in rows] == [n % 2 for n in range(len(rows))]
        assert {row.finish for row in rows} == {"length"}
        for row in rows:
            with torch.inference_mode():
                logits_1TV = model(torch.tensor([row.prompt]))["next"]
            wanted_TV = logits_1TV[0].double().log_softmax(-1)
            assert len(row.scores) == len(row.prompt) - 1
            for place, (logprob, top) in enumerate(row.scores):
                want = float(wanted_TV[place, row.prompt[place + 1]])
                assert logprob == pytest.approx(want, abs=2e-3)
                assert [x for _, x in top] == pytest.approx(
                    wanted_TV[place].topk(2).values.tolist(), abs=2e-3
                )
        if slots.invariant:  # and the same bits alone
            alone = batcher.add(batcher.prepare(prompts[2], top_logprobs=2, score_prompt=True))
            list(batcher.run())
            assert alone.scores == rows[2].scores
    assert batcher.running == batcher.waiting == 0


def test_pages_are_shared_and_never_more_than_the_bound():
    """Slots that begin alike hold the same pages, and all of them are back at the end."""
    model = build(preset("qwen"), generator=torch.Generator().manual_seed(0))
    slots = NativeSlots(model, slots=3, context=48)
    bound = slots.memory_bytes
    prompt = tuple(range(1, 40))
    first_1V = slots.read([Span(0, 0, prompt)])
    used = slots.stepper.pages.used
    slots.copy(0, 1, length=38)
    assert slots.stepper.pages.used == used
    assert torch.equal(slots.read([Span(1, 38, prompt[38:])]), first_1V)
    assert slots.stepper.pages.used == used + 1  # the page that was written to
    other = tuple(range(50, 97))
    slots.read([Span(place, 0, other) for place in range(3)])
    assert torch.equal(slots.read([Span(0, 0, prompt)]), first_1V)
    assert slots.memory_bytes == bound


def batcher_of(model, **options) -> Batcher:
    return Batcher(NativeSlots(model, slots=2, context=40), **options)


def test_a_prompt_that_begins_alike_is_not_read_again():
    model = build(preset("qwen"))
    batcher = batcher_of(model)
    first = batcher.add(batcher.prepare(range(20), spec=DecodeSpec(max_new_tokens=3)))
    list(batcher.run())
    again = batcher.add(
        batcher.prepare([*range(20), *first.tokens, 7], spec=DecodeSpec(max_new_tokens=1))
    )
    same = batcher.add(batcher.prepare(range(20), spec=DecodeSpec(max_new_tokens=3)))
    list(batcher.run())
    assert again.reused == 22  # the prompt and two tokens; the third was never read
    assert same.reused == 19
    assert same.tokens == first.tokens


def test_choices_of_one_prompt_read_it_once():
    model = build(preset("qwen"))
    batcher = batcher_of(model, step_tokens=8)
    spec = DecodeSpec(max_new_tokens=2)
    rows = [batcher.add(batcher.prepare(range(30), spec=spec, row=n)) for n in range(2)]
    list(batcher.run())
    assert rows[0].reused == 0
    assert 29 - WORTH_WAITING < rows[1].reused <= 29
    assert rows[0].tokens == rows[1].tokens


def test_a_long_prompt_does_not_stall_the_others():
    model = build(preset("qwen"))
    batcher = batcher_of(model, step_tokens=17)
    quick = batcher.add(batcher.prepare([1, 2], spec=DecodeSpec(max_new_tokens=5)))
    batcher.step()
    slow = batcher.add(batcher.prepare(range(1, 38), spec=DecodeSpec(max_new_tokens=1)))
    made = []
    while slow.finish is None:
        before = batcher.read_tokens
        made += [row for row, _ in batcher.step()]
        assert batcher.read_tokens - before <= 17
    assert made.count(quick) == 3  # one in each of the three steps that the prompt took


def test_owners_take_turns():
    model = build(preset("qwen"))
    batcher = Batcher(NativeSlots(model, slots=1, context=40))
    spec = DecodeSpec(max_new_tokens=1)
    rows = [batcher.prepare([n + 1], spec=spec, owner="greedy") for n in range(3)]
    rows += [batcher.prepare([9], spec=spec, owner="modest")]
    for row in rows:
        batcher.add(row)
    order = [row.prompt[0] for row, _ in batcher.run()]
    assert order == [1, 9, 2, 3]


@catches("nobody is put back", "generation.batching:Batcher._least_loss", Call("min"), to="None")
@catches(
    "tokens are forgotten when put back",
    "generation.batching:Batcher._span",
    Name("known"),
    to="(*user.prompt, *user.tokens[:1] * len(user.tokens))",
)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_has_no_slot_gets_one_in_the_next_step(temperature, alone, monkeypatch):
    """One owner's sequences are put back for another's, and no bit of their answers changes."""
    monkeypatch.setattr(batching, "TURN", 5)
    model = made("rotary, gated, grouped")

    def prepared(batcher, prompt, count, owner, **more):
        spec = DecodeSpec(max_new_tokens=count, temperature=temperature, seed=sum(prompt))
        return batcher.prepare(prompt, spec=spec, owner=owner, top_logprobs=3, **more)

    def seen(batcher, rows):
        found = {id(row): [] for row in rows}
        for row, new in batcher.run():
            found[id(row)].append((new.token, new.logprob, new.top))
        return [found[id(row)] for row in rows]

    jobs = [((n + 1, n + 2, 2 * n), 17 + n) for n in range(4)]
    wanted = []
    for prompt, count in jobs:
        single = Batcher(NativeSlots(model, slots=1, context=29))
        wanted += seen(single, [single.add(prepared(single, prompt, count, "x"))])
    batcher = Batcher(NativeSlots(model, slots=2, context=29), step_tokens=7)
    many = [
        batcher.add(prepared(batcher, *job, str(n) if alone else "many", score_prompt=n == 1))
        for n, job in enumerate(jobs)
    ]
    taken = [batcher.step() for _ in range(6)]
    late = batcher.add(prepared(batcher, (9,), 3, "late"))
    while not late.tokens:
        taken.append(batcher.step())
    assert len(taken) <= (6 + batching.TURN if alone else 7)
    assert sum(row.was_put_back for row in many) == (3 if alone else 1)
    assert batcher.running == 2
    made_so_far = {id(row): [] for row in many}
    for row, new in (one for step in taken for one in step if one[0] is not late):
        made_so_far[id(row)].append((new.token, new.logprob, new.top))
    rest = seen(batcher, [*many, late])
    assert [made_so_far[id(row)] + rest[n] for n, row in enumerate(many)] == wanted
    assert len(many[1].scores) == 2
    assert (batcher.running, batcher.waiting, batcher.busy) == (0, 0, False)
    assert {row.finish for row in many} == {"length"}


@catches(
    "what is on hold goes on", "generation.batching:Batcher.hold", Assign("on_hold"), to="False"
)
def test_what_is_on_hold_is_in_nobodys_way():
    """It gives its slot to its own owner's next, too, and goes on where it was."""
    model = build(preset("qwen"), generator=torch.Generator().manual_seed(0))
    spec = DecodeSpec(max_new_tokens=9)
    alone = Batcher(NativeSlots(model, slots=1, context=40))
    wanted = [alone.add(alone.prepare([n, n + 1], spec=spec)) for n in range(3)]
    list(alone.run())
    batcher = batcher_of(model)
    rows = [batcher.add(batcher.prepare([n, n + 1], spec=spec)) for n in range(3)]
    batcher.step()
    for row in rows[:2]:
        batcher.hold(row)
    before = [len(row.tokens) for row in rows[:2]]
    list(batcher.run())
    assert rows[2].finish == "length"
    assert [len(row.tokens) for row in rows[:2]] == before
    assert (batcher.busy, batcher.waiting) == (False, 0)
    assert set(batcher.everyone()) == set(rows[:2])
    batcher.go_on(rows[0])
    batcher.cancel(rows[1])
    list(batcher.run())
    assert [row.tokens for row in (rows[0], rows[2])] == [wanted[0].tokens, wanted[2].tokens]
    assert rows[1].finish == "cancelled"
    assert not batcher.everyone()


def test_nobody_is_put_back_for_his_own_or_where_it_would_change_bits():
    model = build(preset("qwen"))
    spec = DecodeSpec(max_new_tokens=9)
    slots = OneByOneSlots(TorchStepper(model), model.spec, slots=1, context=40)
    for batcher, owners in ((batcher_of(model), "aaa"), (Batcher(slots), "ab")):
        rows = [
            batcher.add(batcher.prepare([n], spec=spec, owner=owner))
            for n, owner in enumerate(owners)
        ]
        list(batcher.run())
        assert not any(row.was_put_back for row in rows)
    batcher = batcher_of(model)  # nor two owners for one another, before their turn is over
    rows = [batcher.add(batcher.prepare([n], spec=spec, owner=str(n))) for n in range(3)]
    list(batcher.run())
    assert not any(row.was_put_back for row in rows)


def test_who_leaves_frees_the_slot():
    model = build(preset("qwen"))
    batcher = batcher_of(model)
    spec = DecodeSpec(max_new_tokens=30)
    rows = [batcher.add(batcher.prepare([n + 1], spec=spec, owner=str(n))) for n in range(4)]
    batcher.step()
    assert (batcher.running, batcher.waiting) == (2, 2)
    batcher.cancel(rows[0])
    batcher.cancel(rows[3])
    batcher.step()
    assert (batcher.running, batcher.waiting) == (2, 0)
    assert (rows[0].finish, rows[3].finish) == ("cancelled", "cancelled")
    list(batcher.run())
    assert rows[1].finish == rows[2].finish == "length"


def test_logits_that_are_no_numbers_end_one_sequence():
    model = build(preset("qwen"))
    with torch.no_grad():
        model.embed.weight[5] = float("nan")
    batcher = batcher_of(model)
    bad = batcher.add(batcher.prepare([5], spec=DecodeSpec(temperature=1.0)))
    good = batcher.add(
        batcher.prepare([6], spec=DecodeSpec(max_new_tokens=2, forbidden=(5,), temperature=1.0))
    )
    list(batcher.run())
    assert bad.finish == "error"
    # Tied weights: the logit of token 5 is no number, so that nothing can be sampled.
    assert good.finish in ("error", "length")


def test_any_stepper_serves_one_sequence_at_a_time():
    spec = preset("seq2seq")
    model = build(spec, generator=torch.Generator().manual_seed(0))
    stepper = TorchStepper(model)
    decoding = DecodeSpec(max_new_tokens=5, temperature=1.0)
    sources = [(3, 4, 5), (6, 7), (3, 4, 5, 8)]

    def run(sources: list[tuple[int, ...]], slots: int) -> list[Continuation]:
        batcher = Batcher(OneByOneSlots(stepper, spec, slots=slots, context=16))
        rows = [
            batcher.add(batcher.prepare([1], spec=decoding, source=source)) for source in sources
        ]
        list(batcher.run())
        return rows

    alone = [run([source], 1)[0].tokens for source in sources]
    assert [row.tokens for row in run(sources, 2)] == alone


def test_what_cannot_be_read_is_refused_before_any_work():
    batcher = batcher_of(build(preset("qwen")))
    for prompt in ([], [10**9], list(range(40))):
        with pytest.raises(InputError):
            batcher.prepare(prompt)
    with pytest.raises(InputError):
        NativeSlots(build(preset("qwen")), slots=0)
    with pytest.raises(InputError):
        NativeSlots(build(preset("qwen")), slots=1, context=10**6)
