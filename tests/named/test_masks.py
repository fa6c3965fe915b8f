"""Masks of the documents' parts: each combination has one meaning, or an error that says which.

Sizes are mostly batch = seq, where a mask [batch, seq] has the shape of one [seq, seq].
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer.named import budget_lm, core, fsm_probe, seq2seq
from glassformer.named.seq2seq import causal_mask, padding_mask, scaled_dot_product_attention

LENGTHS = torch.tensor([3, 2, 1])
#: Hidden tokens differ from what [batch, seq] read as [seq, seq] would hide.
VALID = torch.arange(3) < LENGTHS[:, None]
FUTURE = torch.ones(3, 3, dtype=torch.bool).tril()


def x(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(q, allow):
    """PyTorch's attention with an explicit [batch, seq, seq]."""
    return F.scaled_dot_product_attention(q, q, q, attn_mask=allow)


#: Masks of a batch of 3 with 3 tokens, and what each allows: (3, 3, 3).
FORMS = {
    "padding": (lambda: padding_mask(LENGTHS), VALID[:, None].expand(3, 3, 3)),
    "a list of lengths": (lambda: padding_mask([3, 2, 1]), VALID[:, None].expand(3, 3, 3)),
    "padding of own": (lambda: VALID[:, None], VALID[:, None].expand(3, 3, 3)),
    "padding by index": (lambda: padding_mask(LENGTHS)[:, None], VALID[:, None].expand(3, 3, 3)),
    "causal": (lambda: causal_mask(3), FUTURE.expand(3, 3, 3)),
    "causal of 001": (lambda: budget_lm.causal_mask(3), FUTURE.expand(3, 3, 3)),
    "causal of own": (lambda: FUTURE[None], FUTURE.expand(3, 3, 3)),
    "both": (lambda: causal_mask(3) & padding_mask(LENGTHS), FUTURE & VALID[:, None]),
    "both, the other way": (
        lambda: padding_mask(LENGTHS) & causal_mask(3),
        FUTURE & VALID[:, None],
    ),
    "logical_and": (
        lambda: torch.logical_and(causal_mask(3), padding_mask(LENGTHS)),
        FUTURE & VALID[:, None],
    ),
    "product": (lambda: padding_mask(LENGTHS) * causal_mask(3), FUTURE & VALID[:, None]),
    "either": (lambda: causal_mask(3) | padding_mask(LENGTHS), FUTURE | VALID[:, None]),
    "padding twice": (
        lambda: padding_mask(LENGTHS) & padding_mask([1, 2, 1], max_length=3) & causal_mask(3),
        FUTURE & (torch.arange(3) < torch.tensor([1, 2, 1])[:, None])[:, None],
    ),
    "causal, own padding": (lambda: causal_mask(3) & VALID[:, None], FUTURE & VALID[:, None]),
    "own triangle, padding": (
        lambda: FUTURE[None] & padding_mask(LENGTHS),
        FUTURE & VALID[:, None],
    ),
    "moved and copied": (
        lambda: copy.deepcopy(causal_mask(3)).to("cpu") & padding_mask(LENGTHS).clone().detach(),
        FUTURE & VALID[:, None],
    ),
    "joined in place": (lambda: joined(causal_mask(3)), FUTURE & VALID[:, None]),
}


def joined(mask):
    mask &= padding_mask(LENGTHS)
    return mask


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_mask_means_what_it_says_where_batch_is_seq(name):
    make, allow = FORMS[name]
    q = x(3, 3, 4)
    out, weights = scaled_dot_product_attention(q, q, q, make())
    torch.testing.assert_close(out, expected(q, allow))
    assert not weights[~allow].any()
    heads = x(3, 2, 3, 4)
    out, _ = scaled_dot_product_attention(heads, heads, heads, make())
    torch.testing.assert_close(out, expected(heads, allow[:, None]))
    part, vectors = seq2seq.MultiHeadAttention(8, 2), x(3, 3, 8)
    want = part(vectors, None, allow)
    torch.testing.assert_close(part(vectors, None, make()), want)
    torch.testing.assert_close(part(vectors, vectors, make()), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("ca")])
def test_a_mask_of_the_budget_model(name):
    make, allow = FORMS[name]
    for part in (budget_lm.MultiHeadAttention(8, 2), budget_lm.TransformerBlock(8, 2, 5)):
        torch.testing.assert_close(part(x(3, 3, 8), make()), part(x(3, 3, 8), allow))


@pytest.mark.parametrize(("B", "T"), [*itertools.product((1, 2, 3), repeat=2)])
def test_padding_is_padding_for_every_batch_and_length(B, T):
    q, lengths = x(B, T, 4), torch.arange(B) % T + 1
    valid = torch.arange(T) < lengths[:, None]
    out, _ = scaled_dot_product_attention(q, q, q, padding_mask(lengths, max_length=T))
    torch.testing.assert_close(out, expected(q, valid[:, None].expand(B, T, T)))
    both = causal_mask(T) & padding_mask(lengths, max_length=T)
    assert type(both) is torch.Tensor and both.shape == (B, T, T)
    out, _ = scaled_dot_product_attention(q, q, q, both)
    torch.testing.assert_close(out, expected(q, causal_mask(T) & valid[:, None]))


def test_padding_of_a_memory_of_another_length():
    q, k, valid = x(3, 3, 4), x(3, 5, 4, seed=2), padding_mask([5, 2, 4])
    out, weights = scaled_dot_product_attention(q, k, k, valid)
    allow = torch.tensor(valid.tolist())[:, None].expand(3, 3, 5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, k, attn_mask=allow))
    assert not weights[1, :, 2:].any()
    part = seq2seq.MultiHeadAttention(4, 2)
    torch.testing.assert_close(part(q, k, valid), part(q, k, allow))


AMBIGUOUS = {
    "a triangle": FUTURE,
    "tokens that are not PAD": VALID,
    "a triangle and a window": causal_mask(3) & ~FUTURE.tril(-2),
    "a mask turned round": ~padding_mask(LENGTHS),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_two_axes_that_do_not_say_which_they_are_raise(name):
    mask, q = AMBIGUOUS[name], x(3, 3, 4)
    calls = (
        lambda: scaled_dot_product_attention(q, q, q, mask),
        lambda: scaled_dot_product_attention(q[:, None], q[:, None], q[:, None], mask),
        lambda: seq2seq.MultiHeadAttention(4, 2)(q, None, mask),
        lambda: budget_lm.MultiHeadAttention(4, 2)(q, mask),
        lambda: budget_lm.TransformerBlock(4, 2, 5)(q, mask),
    )
    for call in calls:
        with pytest.raises(
            gf.GlassError, match=r"ambiguous(.|\n)*mask\[None\](.|\n)*mask\[:, None"
        ):
            call()


def test_two_axes_are_seq_and_seq_where_nothing_else_fits():
    q = x(2, 3, 4)
    out, _ = scaled_dot_product_attention(q, q, q, FUTURE)
    torch.testing.assert_close(out, expected(q, FUTURE.expand(2, 3, 3)))
    with pytest.raises(gf.GlassError, match=r"shape \(2, 3\) does not fit(.|\n)*mask\[:, None\]"):
        scaled_dot_product_attention(q, q, q, VALID[:2])


def test_padding_and_a_mask_of_its_own_shape_raise():
    with pytest.raises(gf.GlassError, match="ambiguous"):
        padding_mask(LENGTHS) & VALID
    two = padding_mask([3, 1]) & VALID[:2]  # [batch, seq], both
    assert two.tolist() == [[True, True, True], [True, False, False]]
    assert scaled_dot_product_attention(x(2, 3, 4), x(2, 3, 4), x(2, 3, 4), two)[0].isfinite().all()


MISFITS = {
    "another batch": lambda: padding_mask([3, 2]),
    "another length": lambda: padding_mask([2, 2, 2]),
    "another triangle": lambda: causal_mask(4),
    "another form": lambda: torch.ones(3, 2, 3, 3, dtype=torch.bool),
    "one axis": lambda: torch.ones(3, dtype=torch.bool),
    "five axes": lambda: torch.ones(3, 1, 1, 3, 3, dtype=torch.bool),
    "added to scores": lambda: torch.zeros(3, 3),
    "0 and 1": lambda: VALID.long()[:, None],
    "a list": lambda: VALID[:, None].tolist(),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_mask_that_does_not_fit_raises_a_message(name):
    q = x(3, 3, 4)
    with pytest.raises(gf.GlassError, match="hint: "):
        scaled_dot_product_attention(q, q, q, MISFITS[name]())
    with pytest.raises(gf.GlassError, match="hint: "):
        seq2seq.MultiHeadAttention(4, 1)(q, None, MISFITS[name]())
    with pytest.raises(gf.GlassError, match="hint: "):
        budget_lm.MultiHeadAttention(4, 1)(q, MISFITS[name]())


def test_masks_that_do_not_combine_raise_a_message():
    for call in (
        lambda: causal_mask(4) & padding_mask(LENGTHS),
        lambda: causal_mask(4) & causal_mask(3),
        lambda: causal_mask(5) & torch.ones(2, 5, dtype=torch.bool),
        lambda: padding_mask(LENGTHS).logical_and_(causal_mask(3)),
        lambda: padding_mask([3, 2]) & padding_mask([3]),
    ):
        with pytest.raises(gf.GlassError, match="hint: "):
            call()


#: Parts that take which tokens are real, [batch, seq].
TOKEN_MASKS = {
    "EncoderLayer": lambda valid: seq2seq.EncoderLayer(4, 2)(x(3, 3, 4), valid),
    "Encoder": lambda valid: seq2seq.Encoder(1, 4, 2)(x(3, 3, 4), valid),
    "DecoderLayer": lambda valid: seq2seq.DecoderLayer(4, 2)(x(3, 2, 4), x(3, 3, 4), valid),
    "Decoder": lambda valid: seq2seq.Decoder(1, 4, 2)(x(3, 2, 4), x(3, 3, 4), valid),
    "CausalSelfAttention": lambda valid: fsm_probe.CausalSelfAttention(4, 2)(x(3, 3, 4), valid),
    "TransformerBlock": lambda valid: fsm_probe.TransformerBlock(4, 2, 5)(x(3, 3, 4), valid),
    "SingleLayerTransformer": lambda valid: fsm_probe.SingleLayerTransformer(
        fsm_probe.ModelConfig(vocab_size=7, num_classes=2, d_model=4, n_heads=2, d_mlp=5)
    )(torch.ones(3, 3, dtype=torch.long), valid)["next_logits"],
    "Transformer": lambda valid: seq2seq.Transformer(7, 7, d_model=4, N=1, heads=2)(
        torch.ones(3, 3, dtype=torch.long), torch.ones(3, 2, dtype=torch.long), valid
    ),
    "masked_cross_entropy": lambda valid: seq2seq.masked_cross_entropy(
        x(3, 3, 5), torch.ones(3, 3, dtype=torch.long), valid
    ),
    "greedy_decode": lambda valid: torch.tensor(
        [
            len(row)
            for row in seq2seq.greedy_decode(
                seq2seq.Transformer(7, 7, d_model=4, N=1, heads=2),
                torch.ones(3, 3, dtype=torch.long),
                bos=1,
                eos=2,
                max_length=2,
                source_valid=valid,
            )
        ],
        dtype=torch.float,
    ),
}


@pytest.mark.parametrize("name", TOKEN_MASKS)
def test_a_mask_of_tokens_is_batch_and_seq(name):
    call = TOKEN_MASKS[name]
    assert call(padding_mask(LENGTHS)).isfinite().all()
    for bad in (
        causal_mask(3),
        causal_mask(3) & padding_mask(LENGTHS),
        padding_mask([3, 2]),
        padding_mask(LENGTHS)[:, None],
        VALID.float(),
        VALID.tolist(),
    ):
        with pytest.raises(gf.GlassError):
            call(bad)


def test_marks_survive_what_does_not_change_the_mask():
    mask = padding_mask(LENGTHS)
    for same in (mask.clone(), pickle.loads(pickle.dumps(mask)), copy.copy(mask), mask.cpu()):
        assert torch.equal(same & causal_mask(3), FUTURE & VALID[:, None])
    for other in (~mask, mask[0], mask.float(), mask.sum(), x(3, 3, 4)[mask], mask.T):
        assert type(other) is torch.Tensor
    assert mask.tolist() == VALID.tolist() and bool((mask == VALID).all())
    assert "True" in repr(mask)


@pytest.mark.parametrize("lengths", [[], [[1, 2]], [1.5], [True], [-1, 2], "ab", [None], [5, 2]])
def test_lengths_that_are_none_raise(lengths):
    with pytest.raises(gf.GlassError, match="lengths"):
        padding_mask(lengths, max_length=4)


#: A part alone, given what does not fit it: a message of ours, not torch's.
UNFIT = {
    "width of attention": lambda: seq2seq.MultiHeadAttention(8, 2)(x(3, 3, 7)),
    "memory of another batch": lambda: seq2seq.MultiHeadAttention(8, 2)(x(3, 3, 8), x(2, 3, 8)),
    "memory of another width": lambda: seq2seq.DecoderLayer(8, 2)(x(3, 3, 8), x(3, 3, 7)),
    "two axes": lambda: seq2seq.EncoderLayer(8, 2)(x(3, 8)),
    "whole numbers": lambda: fsm_probe.TransformerBlock(8, 2, 5)(torch.ones(1, 2, 8).long()),
    "feed-forward": lambda: seq2seq.FeedForward(8)(x(3, 3, 7)),
    "mlp of 000": lambda: fsm_probe.MLP(8, 5)(x(3, 3, 7)),
    "mlp of 002": lambda: core.MLP(8, 5)(x(3, 3, 7)),
    "attention of 002": lambda: core.MultiHeadAttention(8, 2)(x(3, 3, 7)),
    "block of 002": lambda: core.TransformerBlock(8, 2, 5)(x(3, 7)),
    "swiglu": lambda: budget_lm.SwiGLU(8, 5)(x(3, 3, 7)),
    "positions": lambda: seq2seq.PositionalEncoding(8)(x(3, 3, 1)),
    "positions of 000": lambda: fsm_probe.PositionalEncoding(8)(x(3, 3, 1)),
    "an id": lambda: seq2seq.TokenEmbedding(7, 4)(torch.tensor([[7]])),
    "an id below": lambda: fsm_probe.TokenEmbedding(7, 4)(torch.tensor([[-1]])),
    "an id of factors": lambda: fsm_probe.FactorizedEmbedding(7, 4, 2)(torch.tensor([[7]])),
    "d_k": lambda: scaled_dot_product_attention(x(2, 3, 4), x(2, 3, 5), x(2, 3, 5)),
    "length of v": lambda: scaled_dot_product_attention(x(2, 3, 4), x(2, 5, 4), x(2, 3, 4)),
    "batch of k": lambda: scaled_dot_product_attention(x(2, 3, 4), x(1, 3, 4), x(1, 3, 4)),
    "dtypes": lambda: scaled_dot_product_attention(x(2, 3, 4), x(2, 3, 4).double(), x(2, 3, 4)),
    "no heads": lambda: seq2seq.MultiHeadAttention(8, 0),
    "no heads to split": lambda: seq2seq.split_heads(x(2, 3, 8), 0),
    "targets": lambda: seq2seq.masked_cross_entropy(x(2, 3, 5), torch.full((2, 3), 5)),
    "targets of another length": lambda: seq2seq.masked_cross_entropy(
        x(2, 3, 5), torch.ones(2, 4, dtype=torch.long)
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_a_part_raises_a_message(name):
    with pytest.raises(gf.GlassError):
        UNFIT[name]()


def test_what_padding_holds_is_no_target():
    logits, targets = x(2, 3, 5), torch.tensor([[1, 2, -100], [3, 99, 99]])
    valid = padding_mask([2, 1], max_length=3)
    real = torch.tensor(valid.tolist())
    expected = F.cross_entropy(logits[real], targets[real])
    torch.testing.assert_close(seq2seq.masked_cross_entropy(logits, targets, valid), expected)
