"""Constraints: every output is a string of the machine; what allows nothing is refused."""

import re

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models

from glassformer.adapters.tokenizers.folder_tokenizer import FolderTokenizer
from glassformer.data.automata.library import brackets, machine_named, modulo
from glassformer.data.automata.machine import Machine
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Bytes, Characters, Vocab
from glassformer.generation.beam import beam_search
from glassformer.generation.constraint import Constraint
from glassformer.generation.loop import decode
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from tests.generation import checks
from tests.tiny import VOCAB, built, tiny

NAMES = Vocab(("PAD", "BOS", "EOS", "SEP", "(", ")", "0", "1", "a", "b", "c"))
EOS = NAMES.id("EOS")


def everything_is_legal(*, count: int = 100) -> int:
    """Sampled, greedy and by beams, with an end token and without; how many were made."""
    stepper = TorchStepper(built(checks.SPECS["learned"]))
    made = 0
    for name in ("brackets-3", "mod-3", "partial-5", "regex:(ab|c)*", "regex:a+b?"):
        machine = machine_named(name)
        constraint = Constraint(machine, tokenizer=NAMES)
        for eos, least, most in (((EOS,), 0, 8), ((EOS,), 3, 6), ((), 2, 6)):
            rules = {"eos": eos, "min_new_tokens": least, "max_new_tokens": most}
            strategies = [
                DecodeSpec(temperature=2.0, seed=3, **rules),
                DecodeSpec(temperature=1.0, top_k=2, **rules),
                DecodeSpec(repetition_penalty=1.5, **rules),
            ]
            for spec in strategies:
                rows = [[1]] * count if spec.temperature > 1 else [[1], [4, 5]]
                for sequence in generate_batch(stepper, rows, spec=spec, constraint=constraint):
                    assert_legal(machine, sequence.tokens, rules)
                    made += 1
            for groups in (1, 2):
                spec = BeamSpec(width=4, groups=groups, **rules)
                found = beam_search(stepper, [[1], [2, 6]], spec=spec, constraint=constraint)
                for beams in found:
                    assert beams.hypotheses
                    for hypothesis in beams.hypotheses:
                        assert_legal(machine, hypothesis.tokens, rules)
                        made += 1
    return made


def assert_legal(machine, tokens, rules) -> None:
    """A string of the machine, ended where the rules want it."""
    assert rules["min_new_tokens"] <= len(tokens) <= rules["max_new_tokens"]
    if rules["eos"]:
        assert tokens[-1] in rules["eos"]
        tokens = tokens[:-1]
    words = [NAMES.names[token] for token in tokens]
    assert machine.accepts(words), words


def test_everything_is_legal():
    assert everything_is_legal() > 1_500


def test_forced_and_forbidden_tokens_go_along():
    machine = brackets(2)
    constraint = Constraint(machine, tokenizer=NAMES)
    model = built(checks.SPECS["learned"])
    opening = NAMES.id("(")
    spec = DecodeSpec(
        temperature=3.0, eos=(EOS,), forced=(opening, opening), max_new_tokens=7, min_new_tokens=6
    )
    for sequence in generate_batch(
        RecordedStepper(model), [[1]] * 20, spec=spec, constraint=constraint
    ):
        assert sequence.tokens[:2] == (opening, opening)
        assert machine.accepts(NAMES.detokenize(sequence.tokens[:-1]).split())


@pytest.mark.parametrize(
    "tokenizer",
    [
        Characters("-.0123456789ab"),
        Bytes(),
        BytePairs.train(["12 -3.14 -15.5 99.9 10.0 100"], vocab_size=270),
    ],
    ids=["characters", "bytes", "bpe"],
)
def test_a_regex_over_text(tokenizer):
    model = built(tiny(vocab_size=tokenizer.vocab_size + 3))  # a model may know more tokens
    end = tokenizer.vocab_size
    pattern = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"
    constraint = Constraint.of_regex(pattern, tokenizer=tokenizer)
    spec = DecodeSpec(temperature=1.0, eos=(end,), max_new_tokens=9)
    texts = set()
    for sequence in generate_batch(
        TorchStepper(model), [[1]] * 60, spec=spec, constraint=constraint
    ):
        text = tokenizer.decode(sequence.tokens[:-1])
        assert re.fullmatch(pattern, text), text
        texts.add(text)
    assert len(texts) > 3


def test_a_constraint_changes_nothing_that_it_allows():
    model = built(checks.SPECS["learned"])
    names = Vocab(tuple(f"t{i}" for i in range(VOCAB)))
    spec = DecodeSpec(max_new_tokens=10)
    free = generate_batch(TorchStepper(model), checks.PROMPTS, spec=spec)
    anything = Machine(
        alphabet=names.names, transitions=((0,) * VOCAB,), classes=(0,), class_names=("all",)
    )
    bound = Constraint(anything, tokenizer=names)
    assert generate_batch(TorchStepper(model), checks.PROMPTS, spec=spec, constraint=bound) == free


IMPOSSIBLE = {
    "too long for the limit": ("regex:aaaaa", {"max_new_tokens": 5, "eos": (EOS,)}, "no sequence"),
    "too short": ("regex:ab", {"min_new_tokens": 4, "eos": (EOS,)}, "no sequence of 4"),
    "its symbols forbidden": ("regex:a+", {"forbidden": (8,), "eos": (EOS,)}, "no sequence"),
    "its end forbidden": ("regex:a+", {"forbidden": (EOS,), "eos": (EOS,)}, "every end is"),
    "forced out of it": ("regex:a+", {"forced": (9,), "eos": (EOS,)}, "begins with"),
    "odd brackets": ("brackets-2", {"min_new_tokens": 3, "max_new_tokens": 3}, "no sequence"),
}


@pytest.mark.parametrize(("machine", "fields", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_allows_nothing_is_refused_before_any_work(machine, fields, message):
    stepper = TorchStepper(built(checks.SPECS["learned"]))
    constraint = Constraint(machine_named(machine), tokenizer=NAMES)
    with pytest.raises(InputError, match=message):
        decode(stepper, [[1]], spec=DecodeSpec(**fields), constraint=constraint)
    if "forced" not in fields:
        with pytest.raises(InputError, match=message):
            beam_search(stepper, [[1]], spec=BeamSpec(**fields), constraint=constraint)
    assert stepper.positions == 0


def test_constraints_of_other_vocabularies_are_refused():
    with pytest.raises(InputError, match="no token of the vocabulary"):
        Constraint(modulo(2), tokenizer=Characters("xyz"))
    stepper = TorchStepper(built(checks.SPECS["learned"]))
    with pytest.raises(InputError, match="the model 19"):
        decode(stepper, [[1]], constraint=Constraint.of_regex("a*", tokenizer=Bytes()))
    with pytest.raises(InputError, match="an empty sequence"):
        decode(stepper, [[1]], constraint=Constraint.of_regex("b?c?", tokenizer=NAMES),
               spec=DecodeSpec(forbidden=(9, 10)))  # fmt: skip


def test_a_space_that_a_later_token_brings_is_a_symbol_too():
    """Such tokenizers write no space before the first token, and one before each that has it."""
    words = ["<unk>", "a", "b", "ab", "\u2581a", "\u2581ab"]
    engine = Engine(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = FolderTokenizer(engine, names={})
    constraint = Constraint.of_regex("(ab)+", tokenizer=tokenizer)
    stepper = TorchStepper(built(tiny(vocab_size=len(words))))
    spec = DecodeSpec(temperature=3.0, max_new_tokens=4)
    made = generate_batch(
        stepper, [[1]] * 60, spec=spec, constraint=constraint, tokenizer=tokenizer
    )
    assert all(re.fullmatch("(ab)+", row.text) for row in made), {row.text for row in made}
    assert {words[row.tokens[0]] for row in made} == {"a", "ab", "\u2581a", "\u2581ab"}


def reachable_ends(constraint, target_QV, rules):
    """By its definition, step by step: can an end be reached after this many tokens?"""
    shortest, longest, ends, forced = (rules[k] for k in ("shortest", "longest", "eos", "forced"))
    can = np.zeros((longest + 2, len(target_QV)), dtype=bool)
    for made in range(longest, -1, -1):
        for state, row in enumerate(target_QV):
            if made < longest:
                tokens = forced[made : made + 1] or range(len(row))
                can[made, state] = any(row[t] >= 0 and can[made + 1, row[t]] for t in tokens)
            may_end = constraint.ends_Q[state]
            if ends:
                on_time = shortest <= made + 1 <= longest
                can[made, state] |= (
                    may_end and on_time and (made >= len(forced) or forced[made] in ends)
                )
            else:
                can[made, state] |= may_end and made >= max(shortest, len(forced))
    return can[: longest + 1]


@pytest.mark.parametrize("pattern", ["(ab|c)*", "(aa)*", "a?b?c?", "(aab)*|c", "ab(c|a)*b"])
@pytest.mark.parametrize("eos", [(), (EOS,)])
@pytest.mark.parametrize(("shortest", "longest"), [(0, 4), (1, 1), (3, 9), (8, 9), (7, 5)])
@pytest.mark.parametrize("forced", [(), (8,), (8, 9), (EOS,)])
def test_ends_are_reachable_where_the_definition_says(pattern, eos, shortest, longest, forced):
    constraint = Constraint.of_regex(pattern, tokenizer=NAMES)
    rules = {"shortest": shortest, "longest": longest, "eos": eos, "forced": forced}
    target_QV = constraint.target_QV.copy()
    target_QV[:, list(eos)] = -1
    meant = reachable_ends(constraint, target_QV, rules)
    if not meant[0, constraint.start]:
        with pytest.raises(InputError, match="no sequence"):
            constraint.within(vocab_size=NAMES.vocab_size, **rules)
        return
    bounded = constraint.within(vocab_size=NAMES.vocab_size, **rules)
    for made in range(longest + 1):
        assert (bounded.can(made) == meant[made]).all(), made


def test_the_choices_of_a_request_share_their_masks():
    constraint = Constraint.of_regex("(ab)*", tokenizer=NAMES)
    rules = {"shortest": 0, "longest": 5, "vocab_size": NAMES.vocab_size, "eos": (EOS,)}
    first = constraint.within(**rules)
    assert constraint.within(**rules) is first
    assert constraint.within(**{**rules, "longest": 6}) is not first
