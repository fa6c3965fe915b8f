"""Examples to fine-tune on: files read line by line, cut with a word, packed without leaking."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.data.tokenizers.vocab import Bytes
from glassformer.lab.finetune import (
    Chat,
    Example,
    Examples,
    Plain,
    Prompted,
    packed,
    read_records,
)
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.train import TrainSpec
from glassformer.training.engine import loss_weights
from glassformer.training.losses import head_loss
from glassformer.training.torch_engine import TorchEngine
from tests.planting import Name, Subscript, catches
from tests.tiny import built

QWEN = presets.qwen(
    vocab_size=256, d_model=12, n_heads=3, n_kv_heads=1, d_head=4, d_ff=17, n_layers=2, window=5
)
LEARNED = presets.budget_lm(
    vocab_size=256, d_model=12, n_heads=3, d_ff=17, n_layers=2, max_seq_len=64
)
#: Packed against separate, relative. Worst seen 1.3e-16 and 7.7e-8; of gradients 7.4e-16, 2.7e-7.
SEPARATE = {torch.float64: 1e-12, torch.float32: 1e-6}


def answered(prompt: str, answer: str, *, where: str = "here") -> Example:
    ids = np.array([*prompt.encode(), *answer.encode()], dtype=np.int64)
    return Example(ids_N=ids, learned_N=np.arange(len(ids)) >= len(prompt.encode()), where=where)


GIVEN = [
    answered(
        f"{i} plus {i * i % 13} is ", f"{i + i * i % 13}{'!' * (i % 5)}", where=f"line {i + 1}"
    )
    for i in range(40)
]


def made(examples=GIVEN, **fields) -> Examples:
    task = FinetuneTask(path="some.jsonl", **{"length": 50, "held_out": 0.2, **fields})
    return Examples(task, examples, tokenizer=Bytes())


def everything(task: Examples, split: str):
    return task.batch(split, np.arange(task.sizes()[split]))


# --- what is learned ------------------------------------------------------------------------------


@catches(
    "mask one too early",
    "lab.finetune:_rows",
    Subscript("learned_N"),
    to="{value}[:-1]",
    case="True",
)
@pytest.mark.parametrize("packing", [True, False])
def test_every_answer_is_learned_once_and_nothing_else(packing: bool) -> None:
    """Whatever the rows look like: the counted targets are the answers, each after its own past."""
    task = made(packing=packing)
    learned, contexts = [], []
    for split in ("train", "val"):
        batch = everything(task, split)
        for row in range(len(batch.tokens)):
            segments = batch.valid[row] * 0 if batch.segments is None else batch.segments[row]
            for number in set(segments[batch.valid[row]].tolist()):
                at = batch.valid[row] & (segments == number)
                tokens, targets = batch.tokens[row, at], batch.targets["next"][row, at]
                counts = batch.weights[row, at] > 0
                np.testing.assert_array_equal(targets[:-1], tokens[1:])
                learned.append(bytes(targets[counts].tolist()).decode())
                contexts.append(bytes(tokens[: int(counts.argmax()) + 1].tolist()).decode())
    want = sorted(
        (
            bytes(e.ids_N[~e.learned_N].tolist()).decode(),
            bytes(e.ids_N[e.learned_N].tolist()).decode(),
        )
        for e in GIVEN
    )
    assert sorted(zip(contexts, learned, strict=True)) == want


def test_padding_counts_for_nothing():
    for split in ("train", "val"):
        batch = everything(made(), split)
        assert not batch.valid.all()
        assert not batch.weights[~batch.valid].any()
        assert set(np.unique(batch.weights)) == {0.0, 1.0}


# --- packing --------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 30), max_size=60), capacity=st.integers(1, 40))
def test_packing_holds_everything_once_and_overfills_nothing(sizes, capacity):
    bins = packed(sizes, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    for items in bins:
        assert len(items) == 1 or sum(sizes[item] for item in items) <= capacity
    fitting = [size for size in sizes if size <= capacity]
    half_full = [items for items in bins if 2 * sum(sizes[i] for i in items) <= capacity]
    assert len(half_full) <= 1, "two bins that are half empty would have been one"
    assert len(bins) <= len(sizes) - len(fitting) + max(1, 2 * sum(fitting) // capacity + 1)


def test_rows_are_fewer_when_packed():
    whole, apart = made(), made(packing=False)
    assert apart.sizes()["train"] == 32
    assert whole.sizes()["train"] < 20
    assert whole.sizes()["val"] == apart.sizes()["val"] == 8  # exact match is of one example
    assert whole.lengths("train").max() <= 50
    assert whole.facts()["learned_tokens"] == apart.facts()["learned_tokens"]


@catches("segments not in the mask", "nn.mask:build_mask", Name("same"), drop=True, case="rotary")
@pytest.mark.parametrize("dtype", SEPARATE, ids=str)
@pytest.mark.parametrize("spec", [QWEN, LEARNED], ids=["rotary, window", "learned positions"])
def test_packed_is_separate(spec, dtype) -> None:
    """Sums of the losses and of every gradient: several examples in a row, or each alone."""
    engine = TorchEngine(built(spec).to(dtype), TrainSpec())
    found = []
    for task in (made(), made(packing=False)):
        batch = everything(task, "train")
        inputs = engine.model.inputs(batch)
        engine.model.zero_grad()
        loss = head_loss(
            engine.model,
            engine.model.hidden(inputs),
            "next",
            torch.as_tensor(batch.targets["next"]),
            torch.as_tensor(loss_weights(batch, "next")),
        ).smoothed
        mean = loss / float(batch.weights.sum())
        mean.backward()
        grads = torch.cat([p.grad.flatten() for p in engine.model.parameters()])
        found.append((float(mean.detach()), grads))
    (ours, our_grads), (theirs, their_grads) = found
    assert abs(ours - theirs) <= SEPARATE[dtype] * max(1.0, abs(theirs))
    largest = float(their_grads.abs().max())
    assert float((our_grads - their_grads).abs().max()) / largest <= 10 * SEPARATE[dtype]


def test_other_examples_of_a_row_can_be_changed_without_a_trace():
    """Bit for bit: what stands in the other segments is not read."""
    model, task = built(QWEN), made()
    batch = everything(task, "train")
    row = int(batch.segments.max(axis=1).argmax())
    own = batch.segments[row] == 1
    other = batch.tokens.copy()
    other[row, ~own] = (other[row, ~own] + 7) % 256
    logits = [
        model(type(batch)(tokens=tokens, valid=batch.valid, segments=batch.segments))["next"]
        for tokens in (batch.tokens, other)
    ]
    assert own.sum() > 5
    assert torch.equal(logits[0][row, own], logits[1][row, own])
    assert not torch.equal(logits[0][row, ~own], logits[1][row, ~own])


# --- cuts and splits ------------------------------------------------------------------------------


def test_what_is_cut_or_left_out_is_told():
    long = [
        answered("short: ", "yes", where="line 1"),
        answered("long: ", "y" * 30, where="line 2"),
        answered("q" * 30, "never reached", where="line 3"),
        answered("nothing: ", "", where="line 4"),
        answered("another: ", "no", where="line 5"),
    ]
    task = made(long, length=16)
    facts, (cut, left_out) = task.facts(), task.notes()
    assert (facts["records"], facts["cut"], facts["left_out"]) == (5, 2, 2)
    assert facts["cut_tokens"] == (36 - 17) + (43 - 17)
    assert "2 of 5" in cut
    assert "(line 2, line 3)" in cut
    assert "task.length=16" in cut
    assert "45 tokens" in cut
    assert "(line 3, line 4)" in left_out
    assert max(task.lengths("train").max(), task.lengths("val").max()) == 16
    assert made().notes() == []


def test_text_goes_on_in_the_next_example_and_loses_nothing():
    text = "".join(f"sentence {i}. " for i in range(40))
    ids = np.array([*text.encode()], dtype=np.int64)
    example = Example(ids_N=ids, learned_N=np.ones(len(ids), dtype=bool), where="a", goes_on=True)
    task = made([example], length=32)
    assert task.notes() == []
    facts = task.facts()
    assert sum(facts["learned_tokens"].values()) == len(ids) - 1
    pieces = sorted(
        (text.index(task.describe(split, row)), task.describe(split, row))
        for split in ("train", "val")
        for row in range(task.sizes()[split])
    )
    assert "".join(piece[i > 0 :] for i, (_, piece) in enumerate(pieces)) == text


def test_equal_examples_stay_in_one_split():
    task = made(GIVEN * 3)
    assert task.facts()["repeated"] == 80
    assert "80 examples occur more than once" in task.notes()[0]
    texts = {
        split: {task.describe(split, row) for row in range(size)}
        for split, size in made(GIVEN * 3, packing=False).sizes().items()
        if (task := made(GIVEN * 3, packing=False))
    }
    assert not texts["train"] & texts["val"]
    assert len(texts["val"]) == 8


@pytest.mark.parametrize(
    ("examples", "words"),
    [([GIVEN[0]] * 3, "alike"), ([answered("only asked", "")], "anything to learn"), ([], "none")],
)
def test_too_little_is_refused(examples, words):
    with pytest.raises(InputError, match=words):
        made(examples)


def test_the_task_is_a_function_of_its_spec():
    assert made().facts() == made().facts()
    assert made().facts()["sha256"] != made(seed=1).facts()["sha256"]
    assert made().facts()["sha256"] != made(packing=False).facts()["sha256"]
    json.dumps(made().facts(), allow_nan=False)
    assert made().oracle("val", np.arange(2)) is None
    assert made().groups("val", np.arange(2)) == {}
    with pytest.raises(InputError, match="no row 99"):
        made().batch("val", np.array([99]))
    assert "\n---\n" in made().describe("train", 0)


# --- files ----------------------------------------------------------------------------------------


def test_the_three_forms_and_text(tmp_path):
    file = tmp_path / "a.jsonl"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = [{"messages": said}, {"prompt": "a", "completion": "b", "id": 7}, {"text": "c\n"}]
    file.write_text(
        "\n".join(json.dumps(line) for line in lines[:2]) + "\n\n" + json.dumps(lines[2])
    )
    assert read_records(str(file)) == [
        Chat(where="line 1", messages=tuple(said)),
        Prompted(where="line 2", prompt="a", completion="b"),
        Plain(where="line 4", text="c\n"),
    ]
    (tmp_path / "b.txt").write_text("plain\n\ntext\n")
    assert read_records(str(tmp_path / "b.txt")) == [Plain(where="b.txt", text="plain\n\ntext\n")]


BAD = {
    b'{"text": "a"': "not JSON",
    b"\xff\xfe": "not JSON",
    b'{"text": "a", "text": "b"}': "not JSON: a key occurs twice",
    b"[1]": "a list, not an object",
    b'{"content": "a"}': "and it has content",
    b'{"text": "a", "prompt": "b"}': "it has prompt and text",
    b'{"prompt": "a"}': "'completion' is missing",
    b'{"prompt": 1, "completion": "a"}': "'prompt' is not a text",
    b'{"text": "\\ud800"}': "half of a character",
    b'{"messages": []}': "not a list of messages",
    b'{"messages": "hello"}': "not a list of messages",
    b'{"messages": [3]}': "message 0 is not an object",
    b'{"messages": [{"role": "assistant"}]}': "message 0: its 'content' is missing",
    b'{"messages": [{"role": "user", "content": "a"}]}': "nothing to learn",
    b'{"messages": [{"role": "assistant", "content": [1]}]}': "'content' is not a text",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("line", "words"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_line_is_named(line, words, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(InputError) as caught:
        read_records(str(file))
    assert "1 bad lines:\n  line 3: " in str(caught.value)
    assert words in str(caught.value)


def test_many_bad_lines_are_told_together(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([*BAD][:8]))
    with pytest.raises(InputError, match=r"8 bad lines(.|\n)*line 5(.|\n)*and 3 more lines"):
        read_records(str(file))


def test_a_file_without_examples_or_none_at_all(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match="no examples"):
        read_records(str(tmp_path / "a.jsonl"))
    with pytest.raises(InputError, match="cannot be read"):
        read_records(str(tmp_path / "b.jsonl"))
    with pytest.raises(InputError, match="no such file"):
        read_records(str(tmp_path / "b.txt"))


@pytest.mark.parametrize(
    "fields", [{"path": ""}, {"length": 1}, {"held_out": 0.0}, {"held_out": 0.6}]
)
def test_the_spec_is_checked(fields):
    with pytest.raises(InputError):
        FinetuneTask(**{"path": "a", **fields})
