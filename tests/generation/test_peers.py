"""Other libraries with our weights: the same tokens, greedy and with beams, on both families."""

import pytest
import torch
from bench.peers import BOS, EOS, fresh, marian_twin, qwen_pair
from bench.translation import first_tokens, marian, ours_crossed

from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.prompts import Prompts
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.presets import seq2seq

TINY = {
    "n_layers": 2, "d_model": 128, "n_heads": 2, "n_kv_heads": 1, "d_ff": 96, "vocab_size": 101,
}  # fmt: skip
NEW = 12


def steppers(model):
    return TorchStepper(model), RecordedStepper(model)


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_greedy_ids_are_transformers_own():
    model, theirs = qwen_pair(TINY, length=32, device="cpu")
    tokens_BT = torch.randint(101, (3, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        made = theirs.generate(
            tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            max_new_tokens=NEW,
            do_sample=False,
        )
    expected = made[:, 7:].tolist()
    assert len({token for row in expected for token in row}) > 3
    for stepper in steppers(model):
        found = generate_batch(stepper, tokens_BT.tolist(), spec=DecodeSpec(max_new_tokens=NEW))
        assert [list(one.tokens) for one in found] == expected


def test_nothing_comes_after_an_end():
    """The end is the last token, and the text before it is that of a run without one."""
    model, _ = qwen_pair(TINY, length=32, device="cpu")
    free = generate_batch(TorchStepper(model), [[1, 2, 3]], spec=DecodeSpec(max_new_tokens=NEW))[0]
    end = free.tokens[4]
    bound = DecodeSpec(max_new_tokens=NEW, eos=(end,))
    found = generate_batch(TorchStepper(model), [[1, 2, 3]], spec=bound)[0]
    assert found.tokens == free.tokens[: free.tokens.index(end) + 1]
    assert found.finish == "eos"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("width", [1, 3])
def test_an_encoder_decoder_gives_marians_tokens(width):
    spec = seq2seq(vocab_size=61, d_model=32, n_heads=4, n_layers=2, max_seq_len=40)
    model = fresh(spec, device="cpu")
    theirs = marian_twin(model, device="cpu")
    source_BS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    prompts = Prompts.of([[BOS]] * 2, sources=source_BS.tolist())
    with torch.no_grad():
        expected = first_tokens(marian(theirs, source_BS, width, NEW)())
    assert EOS not in expected
    for stepper in steppers(model):
        assert first_tokens(ours_crossed(stepper, prompts, width, NEW)()) == expected
