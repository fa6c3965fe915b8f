"""A look against the model's own numbers, made again by hand; shapes, targets, and refusals."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.data.batch import Batch, Source
from glassformer.lens.capture import MOST_MAPS
from glassformer.lens.inspection import inspect
from glassformer.lens.measure.patching import patch_activations
from glassformer.lens.measure.predictions import KEPT
from glassformer.spec.errors import InputError
from glassformer.spec.model import Dropout, LayerNorm
from tests.lens import checks
from tests.lens.models import inputs_of, model_of
from tests.tiny import D_MODEL, VOCAB, S, T, built, tiny, token_ids


def test_attention_is_softmax_of_scores():
    checks.attention_is_softmax_of_scores()


def test_means_are_means():
    checks.means_are_means()


def test_the_final_row_is_the_model():
    checks.the_final_row_is_the_model()


def test_every_row_is_the_model_cut_off():
    checks.every_row_is_the_model_cut_off()


def test_post_norm_rows_are_read_as_they_stand():
    checks.post_norm_rows_are_read_as_they_stand()


def test_norms_are_lengths():
    checks.norms_are_lengths()


def test_losses_are_of_the_next_token():
    checks.losses_are_of_the_next_token()


def test_answers_are_read_where_the_head_reads():
    checks.answers_are_read_where_the_head_reads()


def test_a_look_is_of_the_model_as_it_was():
    checks.a_look_is_of_the_model_as_it_was()


def test_shapes():
    seen = inspect(model_of("encoder-decoder"), inputs_of("encoder-decoder"))
    rows = 2 + 3 * 2
    assert seen.kinds == ("encoder", "self", "cross")
    assert seen.lens.row_names[:4] == ("embed", "L0 attn", "L0 cross", "L0 mlp")
    assert seen.lens.kl.shape == seen.lens.entropy.shape == (rows, T)
    assert seen.norms.residual.shape == (rows - 1, T)
    assert seen.norms.attention.shape == seen.norms.cross.shape == seen.norms.mlp.shape == (2, T)
    assert seen.tensor.shape == (T, D_MODEL)
    assert seen.attention.of("cross").tensor.shape == (2, 3, T, S)
    assert seen.attention.of("encoder").tensor.shape == (2, 3, S, S)
    assert seen.attention.shape == (2, 3)
    assert seen.losses.shape == seen.entropy.shape == (T,)
    assert len(seen.words) == T and len(seen.source_words) == S
    plain = inspect(model_of("decoder"), token_ids(T))
    assert plain.kinds == ("self",) and plain.norms.cross is None and plain.source_words is None
    assert plain.lens.row_names == ("embed", "L0 attn", "L0 mlp", "L1 attn", "L1 mlp", "final")


def test_ids_may_come_in_any_form():
    ids = token_ids(T)
    model = model_of("decoder")
    batch = Batch(tokens=ids[None].numpy(), valid=np.ones((1, T), np.bool_))
    forms = (ids, ids[None], ids.tolist(), ids.numpy(), batch, gf.Inputs(ids[None]))
    losses = {inspect(model, form).loss for form in forms}
    assert len(losses) == 1


def test_dropout_is_off_and_the_mode_is_kept():
    model = built(tiny(dropout=Dropout.from_number(0.5), final_norm=LayerNorm())).train()
    first, second = inspect(model, token_ids(T)), inspect(model, token_ids(T))
    assert model.training and torch.equal(first.tensor, second.tensor)
    assert not first.tensor.requires_grad


def test_other_heads_speak_too():
    model, inputs = model_of("several heads"), inputs_of("several heads")
    seen = inspect(model, inputs)
    with torch.no_grad():
        answers = model(inputs)
    for head in ("class", "state"):
        shares = torch.softmax(answers[head][0], -1)
        for t in range(T):
            token, word, share = seen.next(t, 1, head=head)[0]
            assert token == int(shares[t].argmax()) and word == f"{head} {token}"
            assert abs(share - float(shares[t].max())) < checks.EXACT
        own = inspect(model, inputs, head=head)
        assert own.next(3, 99) == seen.next(3, 99, head=head)
        assert own.loss is None and math.isnan(own.losses[0])
    assert seen.rows()[2]["class"].startswith("class ")


def test_targets_of_a_batch_are_taken_with_their_weights():
    ids = token_ids(1, T).numpy()
    targets = token_ids(1, T, seed=9).numpy()
    weights = np.ones((1, T), np.float32)
    weights[0, 2] = 0.0
    batch = Batch(
        tokens=ids, valid=np.ones_like(ids, np.bool_), targets={"next": targets}, weights=weights
    )
    seen = inspect(model_of("decoder"), batch)
    assert [seen.target(t) and seen.target(t)[0] for t in range(T)] == [
        None if t == 2 else int(targets[0, t]) for t in range(T)
    ]
    given = inspect(
        model_of("decoder"), ids, targets=[None if t == 2 else int(targets[0, t]) for t in range(T)]
    )
    assert given.loss == seen.loss
    assert str(given.losses) == str(seen.losses)


def test_answers_of_a_batch():
    ids = token_ids(1, T).numpy()
    batch = Batch(tokens=ids, valid=ids >= 0, targets={"answer": np.array([4])})
    seen = inspect(model_of("answer"), batch)
    assert seen.target()[0] == 4 and seen.loss == inspect(model_of("answer"), ids, targets=4).loss


def test_padding_and_segments_ask_for_nothing():
    padded = inspect(model_of("decoder"), inputs_of("decoder", padded=True))
    real = T - 2
    assert padded.readout.position == real - 1
    assert [math.isnan(x) for x in padded.losses] == [t >= real - 1 for t in range(T)]
    assert [math.isnan(x) for x in padded.entropy] == [t >= real for t in range(T)]
    short = inspect(model_of("decoder"), inputs_of("decoder").tokens_BT[:, :real])
    assert abs(short.loss - padded.loss) < checks.EXACT
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    packed = inspect(model_of("decoder"), gf.Inputs(token_ids(1, T), segments_BT=segments))
    assert [math.isnan(x) for x in packed.losses] == [t in (2, T - 1) for t in range(T)]
    assert not packed.attention[0, 0].allowed[3:, :3].any()


def test_words_are_kept_and_the_vocabulary_is_named():
    vocabulary = [f"w{i}" for i in range(VOCAB)]
    seen = inspect(model_of("decoder"), token_ids(T), names=vocabulary)
    assert seen.words == tuple(f"w{i}" for i in token_ids(T).tolist())
    token, word, _ = seen.next(2)[0]
    assert word == f"w{token}" == seen.lens.top(2, 1)[0][0]
    assert seen.lens.at(2, 3)["final"] == seen.lens.top(2, 3)
    named = inspect(model_of("decoder"), token_ids(T), words=list("abcdefg"), names=str)
    assert named.words == tuple("abcdefg")
    source = Source(tokens=token_ids(1, S).numpy(), valid=np.ones((1, S), np.bool_))
    batch = Batch(tokens=token_ids(1, T).numpy(), valid=np.ones((1, T), np.bool_), source=source)
    both = inspect(model_of("encoder-decoder"), batch, source_words=list("ABCDEFGHIJK"))
    assert both.attention.of("cross")[0, 0].columns_words == tuple("ABCDEFGHIJK")
    assert both.attention.of("encoder")[0, 0].rows_words == tuple("ABCDEFGHIJK")


def test_a_large_vocabulary_is_read_in_pieces(monkeypatch):
    model, ids = model_of("grouped"), token_ids(T)
    whole = inspect(model, ids)
    monkeypatch.setattr(
        "glassformer.lens.measure.predictions.PIECE", 2 * VOCAB
    )  # two positions at once
    pieces = inspect(model, ids)
    assert (whole.lens.kl - pieces.lens.kl).abs().max() < checks.EXACT
    assert torch.equal(whole.lens.predictions.ids, pieces.lens.predictions.ids)
    apart = whole.ablate("L0H1").kl - pieces.ablate("L0H1").kl
    assert apart.abs().max() < checks.EXACT
    wide = built(tiny(vocab_size=KEPT + 5, final_norm=LayerNorm()))
    assert inspect(wide, [1, 2]).lens.predictions.ids.shape == (6, 2, KEPT)
    with pytest.raises(InputError, match="likeliest"):
        inspect(wide, [1, 2]).next(0, KEPT + 1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda m: inspect(m, token_ids(2, T)), "2 sequences"),
        (lambda m: inspect(m, [1, 99]), "outside the vocabulary"),
        (lambda m: inspect(m, []), "tokens has shape|empty"),
        (lambda m: inspect(m, [1, 2], words=["a"]), "1 words for 2 tokens"),
        (lambda m: inspect(m, [1, 2], targets=[1]), "1 targets for 2"),
        (lambda m: inspect(m, [1, 2], targets=[1, 50]), "target 50"),
        (lambda m: inspect(m, [1, 2], targets=[1, 0.5]), "whole numbers"),
        (lambda m: inspect(m, [1, 2], targets=[1, 10**30]), "whole numbers"),
        (lambda m: inspect(m, [1, 2], targets=np.float64(1)), "whole numbers"),
        (lambda m: inspect(m, [1, 2], targets=True), "whole numbers"),
        (lambda m: inspect(m, [1, 2], targets=object()), "whole numbers"),
        (lambda m: inspect(m, [[1, 2], [3]]), "different lengths"),
        (lambda m: inspect(m, [1, 2], ablate=[3]), "'3' is not the name of a head"),
        (lambda m: inspect(m, [1, 2], head="answer"), "no head"),
        (lambda m: inspect(m, [1, 2], ablate=["L9H0"]), "there are 2 layers"),
        (lambda m: inspect(m, [1, 2], ablate=["L0H7"]), "has 3 heads"),
        (lambda m: inspect(m, [1, 2], ablate=["cross.L0H0"]), "no attention of kind 'cross'"),
        (lambda m: inspect(m, [1, 2]).attention[5, 0], "no layer 5"),
        (lambda m: inspect(m, [1, 2]).attention[0, 5], "no head 5"),
        (lambda m: inspect(m, [1, 2]).attention.of("cross"), "no attention of kind"),
        (lambda m: inspect(m, [1, 2]).next(7), "no position 7"),
        (lambda m: inspect(m, [1, 2]).lens.top(0, row="L7 mlp"), "no row"),
        (lambda m: inspect(m, [1, 2]).ablate(), "no head to ablate"),
        (lambda m: inspect(m, [1, 2]).next(0, head="answer"), "no head"),
    ],
)
def test_what_is_refused(act, message):
    with pytest.raises(InputError, match=message):
        act(model_of("decoder"))


def test_maps_too_large_for_memory_are_refused_before_they_are_made():
    spec = tiny(max_seq_len=40_000, layers=2)
    with pytest.raises(InputError, match=r"would take \d+ GiB") as caught:
        inspect(built(spec), torch.zeros(40_000, dtype=torch.long))
    fewer = int(caught.value.hint.split()[1])
    assert 4 * 6 * fewer**2 <= MOST_MAPS < 4 * 6 * (fewer + 2) ** 2


def test_half_precision_and_copies():
    model = copy.deepcopy(model_of("decoder")).to(torch.bfloat16)
    seen = inspect(model, token_ids(T))
    assert seen.lens.kl.dtype == seen.attention[0, 0].tensor.dtype == torch.float32
    assert float(seen.lens.kl[-1].max()) == 0.0


def test_one_target_may_be_a_number_of_any_library():
    model = model_of("decoder")
    for target in (3, np.int64(3), torch.tensor(3)):
        assert inspect(model, [1, 2], targets=target).target() == (3, "3")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_look_knows_its_model_in_every_form(bits):
    """`state_dict` and copies bring the stored form back; only other weights are a change."""
    model = gf.build(gf.preset("core"), generator=torch.Generator().manual_seed(0))
    small = gf.quantize(model, bits=bits, indivisible="int8")
    other = gf.quantize(
        gf.build(gf.preset("core"), generator=torch.Generator().manual_seed(1)),
        bits=bits,
        indivisible="int8",
    )
    seen = inspect(small, [1, 2, 3])
    before = seen.ablate("L0H1").loss_change
    for again in (small.state_dict, lambda: copy.deepcopy(small), lambda: inspect(small, [4, 5])):
        again()
        assert seen.ablate("L0H1").loss_change == before
    held = dict(small.named_parameters())
    levels = {name: x for name, x in other.state_dict().items() if name not in held}
    small.load_state_dict(levels, strict=False)
    inspect(small, [1, 2, 3])  # makes the running form of the new weights
    with pytest.raises(InputError, match="changed"):
        seen.ranking()


def test_a_loaded_model_is_inspected_like_the_model_inside_it():
    model, ids = model_of("decoder"), token_ids(T)
    held = SimpleNamespace(model=model)
    assert torch.equal(inspect(held, ids).tensor, inspect(model, ids).tensor)
    clean, corrupt = token_ids(T), token_ids(T, seed=5)
    bare, inside = (patch_activations(one, clean, corrupt, answers=(3, 8)) for one in (model, held))
    assert torch.equal(bare.tensor, inside.tensor)
    with pytest.raises(InputError, match="another library's module and has no taps"):
        inspect(SimpleNamespace(model=torch.nn.Linear(2, 2)), ids)
