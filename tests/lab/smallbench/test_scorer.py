"""Scores against a slow way: one text at a time, the whole of it, plain sums."""

import math

import numpy as np
import pytest
import torch

from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Bytes, Characters, Vocab
from glassformer.lab.smallbench import question as module
from glassformer.lab.smallbench.question import (
    Examinee,
    Group,
    NotOffered,
    Question,
    examinee_of,
    mark,
)
from glassformer.lab.smallbench.suite import EXAMS, encode_length, manuals, questions_of
from glassformer.models.model import build
from glassformer.spec.errors import InputError
from glassformer.spec.presets import preset
from tests.lab.smallbench.readers import random_model, uniform
from tests.planting import Binary, Name, catches

TEXT = "the value of the lists is here. (a b) [c d] " * 40 + "\n"


@pytest.fixture(scope="module")
def pieces():
    return BytePairs.train([TEXT], vocab_size=280)


def log_probability(examinee, ids):
    """The score of a whole sequence after its first token."""
    tokens = np.array([ids[:-1]])
    logits = examinee.logits(tokens, np.ones(tokens.shape, dtype=bool))[0].astype(np.float64)
    total = 0.0
    for place in range(len(ids) - 1):
        row = logits[place]
        total += row[ids[place + 1]] - math.log(np.exp(row - row.max()).sum()) - row.max()
    return total


def slow_marks(examinee, groups):
    marks, said = [], 0
    for group in groups:
        for one in group.questions:
            texts = [examinee.ids(one.context + choice) for choice in one.choices]
            scores = np.array([log_probability(examinee, ids) for ids in texts])
            marks.append(float(scores.argmax() == one.right))
            assert np.ptp(np.sort(scores)[-2:]) > 1e-4, "no tie, and no matter of rounding"
            right, context = texts[one.right], examinee.ids(one.context)
            assert right[: len(context)] == context, "here, no piece crosses the border"
            logits = examinee.logits(np.array([right]), np.ones((1, len(right)), dtype=bool))[0]
            greedy = logits.argmax(-1)
            said += all(greedy[p - 1] == right[p] for p in range(len(context), len(right)))
    return marks, said


def scores_are_the_slow_ones(name, tokenizer):
    groups = questions_of(EXAMS[name], items=1, seed=3)[:2]
    examinee = random_model(0, tokenizer, loud=True)
    expected, said = slow_marks(examinee, groups)
    singly = [Group((one,), str(i)) for i, one in enumerate(asked_in(groups))]
    marks = mark(examinee, singly)
    by_number = np.argsort([str(i) for i in range(len(singly))])
    assert marks.points.tolist() == np.array(expected)[by_number].tolist()
    assert marks.exact == said
    assert mark(examinee, groups).points.sum() == sum(expected)


def asked_in(groups):
    return [one for group in groups for one in group.questions]


@pytest.mark.parametrize("name", EXAMS)
def test_scores_are_the_slow_ones_with_bytes(name):
    scores_are_the_slow_ones(name, Bytes())


@pytest.mark.parametrize("name", ["recall", "agreement", "brackets"])
def test_scores_are_the_slow_ones_with_pieces(name, pieces):
    scores_are_the_slow_ones(name, pieces)


def test_batches_change_nothing(monkeypatch):
    groups = questions_of(EXAMS["recall"], items=1, seed=0)[:2]
    examinee = random_model(1, loud=True)
    whole = mark(examinee, groups)
    monkeypatch.setattr(module, "ROOM", 1)
    alone = mark(examinee, groups)
    np.testing.assert_array_equal(whole.points, alone.points)
    assert whole.exact == alone.exact


def lone(context="one two", choices=(" a", " b"), right=0):
    return [Group((Question(context=context, choices=choices, right=right),), "lone")]


def spoken(scores, *, begin=None):
    """A byte model whose logits are the same everywhere."""
    plain = uniform(Bytes(), begin=begin)

    def logits(tokens_BT, valid_BT):
        row = np.zeros(256, dtype=np.float32)
        for text, score in scores.items():
            row[ord(text)] = score
        return np.broadcast_to(row, (*tokens_BT.shape, 256))

    return Examinee(
        name="spoken",
        encode=plain.encode,
        decode=plain.decode,
        logits=logits,
        vocab_size=256,
        max_length=64,
        begin=begin,
    )


def test_ties_share_the_point():
    assert mark(spoken({"a": 1.0}), lone()).points.tolist() == [1.0]
    assert mark(spoken({"b": 1.0}), lone()).points.tolist() == [0.0]
    assert mark(spoken({}), lone()).points.tolist() == [0.5]
    three = lone(choices=(" a", " b", " c"))
    assert mark(spoken({"a": 1.0, "b": 1.0}), three).points.tolist() == [0.5]


@catches("mean instead of sum", "lab.smallbench.question:_asked", Name("sum"), to="{value}.mean")
def test_whole_choices_count():
    """Two letters: the second decides here, and a longer choice pays for each of its letters."""
    both = lone(choices=(" xa", " xb"), right=1)
    assert mark(spoken({"b": 1.0}), both).points.tolist() == [1.0]
    uneven = lone(choices=(" a", " bbb"), right=1)
    assert mark(spoken({"b": 0.5}), uneven).points.tolist() == [0.0]
    assert mark(spoken({"b": 9.0}), uneven).points.tolist() == [1.0]
    late = lone(choices=(" ac", " bd"), right=1)
    assert mark(spoken({"a": 1.0, "d": 3.0}), late).points.tolist() == [1.0]


def test_said_means_the_whole_answer():
    likely = {" ": 5.0, "a": 9.0}
    assert mark(spoken(likely), lone(choices=("a", "b"))).exact == 1
    assert mark(spoken(likely), lone(choices=(" a", " b"))).exact == 0  # no space would be said
    assert mark(spoken(likely), lone(choices=("a", "b"), right=1)).exact == 0


# --- what cannot be asked -------------------------------------------------------------------------


def test_what_a_tokenizer_cannot_read_is_not_asked():
    digits = Vocab(("PAD", "BOS", *"0123456789"))
    with pytest.raises(NotOffered, match=r"cannot read 'jar: .*not in the vocabulary"):
        mark(uniform(digits), questions_of(EXAMS["recall"], items=1, seed=0))
    letters = Characters.of(["abcdefghijklmnopqrstuvwxyz "])
    assert mark(uniform(letters), questions_of(EXAMS["induction"], items=1, seed=0)).exact == 0
    with pytest.raises(NotOffered, match="cannot read"):
        mark(uniform(letters), questions_of(EXAMS["copy"], items=1, seed=0))


def test_a_tokenizer_that_changes_the_text_is_not_asked():
    groups = lone(context="One two")
    lowered = uniform(Bytes())
    lossy = Examinee(
        name="lossy",
        encode=lambda text: list(text.lower().encode()),
        decode=lowered.decode,
        logits=lowered.logits,
        vocab_size=256,
        max_length=64,
    )
    with pytest.raises(NotOffered, match="makes 'one two a' of 'One two a'"):
        mark(lossy, groups)


def test_a_context_that_is_too_short_or_missing_is_told():
    with pytest.raises(NotOffered, match="reads 8 tokens, a question has"):
        mark(uniform(Bytes(), max_length=8), lone("x" * 9))
    with pytest.raises(NotOffered, match="nothing stands before it"):
        mark(uniform(Bytes()), lone(context="", choices=("a", "b")))
    begun = mark(spoken({"a": 1.0}, begin=0), lone(context="", choices=("a", "b")))
    assert begun.points.tolist() == [1.0]


def test_a_model_and_a_tokenizer_that_do_not_belong_together():
    plain = uniform(Bytes())
    small = Examinee(
        name="small",
        encode=plain.encode,
        decode=plain.decode,
        logits=plain.logits,
        vocab_size=100,
        max_length=64,
    )
    with pytest.raises(InputError, match="the tokenizer gives id 111, the model has 100"):
        mark(small, lone())
    with pytest.raises(InputError, match=r"the logits have shape \(1, 8, 256\), not \(1, 8, 200\)"):
        mark(
            Examinee(
                name="wide",
                encode=plain.encode,
                decode=plain.decode,
                logits=plain.logits,
                vocab_size=200,
                max_length=64,
            ),
            lone(),
        )
    with pytest.raises(InputError, match="not finite"):
        mark(spoken({"a": math.nan}), lone())


@pytest.mark.parametrize("name", ["digits", "seq2seq"])
def test_models_that_continue_no_text_are_refused(name):
    model = build(preset(name), device="meta")
    with pytest.raises(InputError, match="does not continue a text"):
        examinee_of(model, Bytes(), name=name)


def test_a_module_of_another_library_is_two_functions():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=12, n_layer=2, n_head=2, n_positions=128
    )
    module = transformers.GPT2LMHeadModel(config).eval()

    @torch.no_grad()
    def logits(tokens_BT, valid_BT):
        mask = torch.from_numpy(valid_BT).long()
        return module(torch.from_numpy(tokens_BT), attention_mask=mask).logits.numpy()

    foreign = Examinee(
        name="gpt2",
        encode=Bytes().encode,
        decode=Bytes().decode,
        logits=logits,
        vocab_size=256,
        max_length=128,
    )
    groups = questions_of(EXAMS["brackets"], items=1, seed=0)[:2]
    expected, said = slow_marks(foreign, groups)
    marks = mark(foreign, groups)
    assert (marks.points.sum(), marks.exact) == (sum(expected), said)


# --- bits per byte --------------------------------------------------------------------------------


def test_bits_are_the_slow_ones():
    text = manuals(300)
    examinee = random_model(0)  # reads 128 bytes
    ids = examinee.ids(text)
    nats = math.log(256)
    for start in range(0, len(ids) - 1, 128):
        nats -= log_probability(examinee, ids[start : start + 129])
    code = encode_length(examinee, text)
    assert code.bits_per_byte == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)
    assert code.tokens == len(ids)
    assert code.bytes.sum() == pytest.approx(len(text.encode()))
    assert code.bits.sum() / code.bytes.sum() == pytest.approx(code.bits_per_byte)


@catches("nats called bits", "lab.smallbench.suite:encode_length", Binary("/"), to="{left}")
@pytest.mark.parametrize("begin", [None, 0])
def test_uniform_logits_cost_exactly_what_is_stated(pieces, begin):
    text = manuals(2_000)
    code = encode_length(uniform(pieces, begin=begin), text)
    count = len(pieces.encode(text))
    assert code.tokens == count
    assert code.uniform == count * math.log2(pieces.vocab_size) / len(text.encode())
    assert code.bits_per_byte == pytest.approx(code.uniform, rel=1e-12)


def test_bytes_cost_eight_bits_by_uniform_logits():
    assert encode_length(uniform(Bytes()), manuals(500)).bits_per_byte == pytest.approx(8.0)


def test_accents_are_two_bytes() -> None:
    code = encode_length(uniform(Bytes()), "naïve café\n" * 9)
    assert code.bits_per_byte == pytest.approx(8.0)


def test_texts_without_bits():
    with pytest.raises(InputError, match="empty text"):
        encode_length(uniform(Bytes()), " \n")
    with pytest.raises(NotOffered, match="a single token"):
        encode_length(uniform(Bytes()), "a")


def test_the_manuals_are_held_out_and_in_whole_lines():
    text = manuals(1_000)
    assert text.endswith("\n")
    assert 1_000 <= len(text.encode()) < 1_500
    assert manuals(2_000).startswith(text)
    assert len(manuals(10**9)) > 50_000
