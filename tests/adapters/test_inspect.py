"""`inspect` on whatever an adapter loads: native, imported, quantized, answering, translating."""

import pytest
import torch

import glassformer as gf
from glassformer.adapters.load import adapt
from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.data.tasks.digits import VOCAB as DIGITS
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.lens.inspection import inspect
from glassformer.models.model import build
from glassformer.spec.errors import InputError
from glassformer.spec.presets import digits, fsm_probe, seq2seq
from tests.adapters import checkpoints, folders

LETTERS = Vocab(("PAD", "BOS", "EOS", "SEP", *"abcdefg"))


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def translator():
    spec = seq2seq(
        vocab_size=LETTERS.vocab_size, d_model=24, n_heads=3, n_layers=2, max_seq_len=23, d_ff=40
    )
    return CustomTransformerAdapter(build(spec, generator=drawn()), tokenizer=LETTERS)


@pytest.mark.parametrize("case", ["qwen3 wide heads", "qwen2 window", "llama3 biases", "gpt2"])
def test_attention_and_residual_are_those_of_transformers(case):
    module = checkpoints.live(case)
    adapter = adapt(module)
    ids = checkpoints.tokens(1, 13)
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            theirs = module(ids, output_attentions=True, output_hidden_states=True)
    finally:
        module.set_attn_implementation(before)
    seen = inspect(adapter.model, ids)
    for layer, weights in enumerate(theirs.attentions):
        ours = seen.attention.of("self").weights[layer]
        assert (ours - weights[0]).abs().max() < 2e-6, (case, layer)
        assert bool((weights[0][:, ~seen.attention[layer, 0].allowed] == 0).all())
    *body, last = theirs.hidden_states
    rows = [0, *range(2, len(seen.norms.row_names), 2)]
    for row, hidden in zip(rows, body, strict=False):
        apart = seen.norms.residual[row] - hidden[0].norm(dim=-1)
        assert apart.abs().max() < 1e-4, (case, row)
    assert (seen.tensor - last[0]).abs().max() < 2e-5
    logp = torch.log_softmax(theirs.logits[0], -1)
    token, _, share = seen.next(5, 1)[0]
    assert token == int(logp[5].argmax()) and abs(share - float(logp[5].max().exp())) < 1e-5


def test_a_folder_with_its_tokenizer_and_quantized(tmp_path):
    adapter = gf.load(folders.write_model(tmp_path))
    seen = adapter.inspect("The cat sat on the mat, жq")
    ids = adapter.prompt("The cat sat on the mat, жq").tokens[0]
    assert seen.ids == ids and seen.attention.shape == (2, 4)
    assert any(word.startswith("<id ") for word in seen.words)  # pieces of a character
    assert " " in "".join(seen.words) and "cat" in "".join(seen.words).replace(" ", "")
    assert [seen.target(t)[0] for t in range(len(ids) - 1)] == list(ids[1:])
    for bits, options in ((8, {}), (4, {"group": 32, "indivisible": "int8"})):
        small = gf.quantize(adapter, bits=bits, **options)
        again = small.inspect("The cat sat on the mat, жq")
        with torch.no_grad():
            logits = small(torch.tensor([ids]))[0]
        assert again.next(3, 1)[0][0] == int(logits[3].argmax())
        assert 0 < abs(again.loss - seen.loss) < 1.0
        assert len(again.ranking().heads) == 8


def test_a_target_is_what_should_follow(tmp_path):
    adapter = gf.load(folders.write_model(tmp_path))
    tokenizer = adapter.tokenizer
    text, target = "The cat", " sat on"
    wanted = tokenizer.encode(target)
    seen = adapter.inspect(text, target=target)
    prompt = list(adapter.prompt(text).tokens[0])
    assert list(seen.ids) == prompt + wanted[:-1]
    asked = [seen.target(t) and seen.target(t)[0] for t in range(len(seen.ids))]
    assert asked == [None] * (len(prompt) - 1) + wanted
    assert adapter.inspect(text, target=target, ablate=["L1H2"]).ablated[0].layer == 1


def test_a_model_that_answers():
    adapter = CustomTransformerAdapter(build(digits(), generator=drawn()), tokenizer=DIGITS)
    seen = adapter.inspect("SECOND 7 3 9", target="3")
    assert seen.words == ("SECOND", "7", "3", "9", "SEP") and seen.head == "answer"
    assert seen.answer[1] == adapter.answer("SECOND 7 3 9")
    assert seen.target() == (3, "3") and seen.loss > 0
    assert adapter.inspect("SECOND 7 3 9 SEP").ids == seen.ids
    assert adapter.inspect("SECOND 7 3 9").loss is None
    with pytest.raises(InputError, match="a target of 2 tokens"):
        adapter.inspect("SECOND 7 3 9", target="3 4")


def test_a_model_with_several_heads():
    spec = fsm_probe()
    names = ("PAD", "BOS", "EOS", *(f"s{i}" for i in range(spec.vocab_size - 3)))
    adapter = CustomTransformerAdapter(build(spec, generator=drawn()), tokenizer=Vocab(names))
    seen = adapter.inspect("s0 s1 s2")
    assert seen.words == ("BOS", "s0", "s1", "s2") and seen.head == "next"
    assert set(seen.others) == {"class", "state"}


def test_a_translator_is_seen_on_both_sides():
    adapter = translator().train()
    seen = adapter.inspect("c a b", target="b a c")
    assert seen.source_words == ("c", "a", "b", "EOS")
    assert seen.words == ("BOS", "b", "a", "c")
    assert [seen.target(t)[1] for t in range(4)] == ["b", "a", "c", "EOS"]
    assert seen.attention.of("cross")[1, 2].tensor.shape == (4, 4)
    own = adapter.inspect("c a b")
    said = adapter.eval().generate("c a b")
    assert adapter.inspect("c a b").ids == own.ids
    spoken = [own.target(t)[1] for t in range(len(own.words))]
    assert " ".join(word for word in spoken if word != "EOS") == said
    for t in range(len(own.words)):
        assert own.next(t, 1)[0][:2] == own.target(t)
    assert adapter.inspect("c a b", target="").words == ("BOS",)


def test_what_computes_by_itself_offers_no_taps():
    wrapped = adapt(checkpoints.live("llama"), backend="transformers")
    with pytest.raises(InputError, match="not offered") as caught:
        wrapped.inspect("a")
    assert "native" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "empty"),
        ("c z", {}, "not in the vocabulary"),
        ("c a", {"target": "z"}, "not in the vocabulary"),
        ("c a", {"ablate": ["cross.L5H0"]}, "2 layers"),
        ("c a " * 30, {}, "exceeds|tokens"),
    ],
)
def test_bad_texts_are_refused(text, options, message):
    with pytest.raises(InputError, match=message):
        translator().inspect(text, **options)


def test_without_a_tokenizer_there_is_no_text():
    adapter = adapt(checkpoints.live("gpt2"))
    with pytest.raises(InputError, match="has no tokenizer"):
        adapter.inspect("a")
