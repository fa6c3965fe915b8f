"""A look against the model's own numbers, made again by hand; shapes, targets, and refusals."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer.data.batch import Batch, Source
from glassformer.lens.capture import MOST_MAPS
from glassformer.lens.heads import HeadName, attentions, kinds_of
from glassformer.lens.inspection import inspect
from glassformer.lens.measure.patching import patch_activations
from glassformer.lens.measure.predictions import KEPT
from glassformer.nn.taps import trace
from glassformer.spec.errors import InputError
from glassformer.spec.model import Dropout, LayerNorm
from tests.lens.models import ANSWERING, DECODERS, ENCODED, EXACT, by_hand, inputs_of, model_of
from tests.planting import Call, Choice, Return, catches
from tests.tiny import D_MODEL, VOCAB, S, T, built, tiny, token_ids


@catches("transposed map", "lens.measure.attention:KindMaps._map", Return(), arg=0, to="{it}.T")
def test_attention_is_softmax_of_scores():
    """Against softmax(q k^T / sqrt(H)) made here from the taps q and k, masks made by hand."""
    for name in (*DECODERS, *ENCODED, "answer"):
        for padded in (False, True):
            model, inputs = model_of(name), inputs_of(name, padded=padded)
            seen = inspect(model, inputs)
            with trace(model, read=["*.q", "*.k"]) as taps, torch.no_grad():
                model(inputs)
            for kind in kinds_of(model.spec):
                for layer, attention in enumerate(attentions(model.spec, kind)):
                    allow_TS = allowed_by_hand(attention, kind, inputs)
                    part = HeadName(kind, layer, 0).tap(model.spec, "{}")
                    q_NTH, k_KSH = taps[part.format("q")][0], taps[part.format("k")][0]
                    for head in range(attention.n_heads):
                        k_SH = k_KSH[head * len(k_KSH) // attention.n_heads]
                        scores_TS = q_NTH[head] @ k_SH.T / math.sqrt(k_SH.shape[-1])
                        wanted_TS = torch.zeros_like(scores_TS)
                        for t, row in enumerate(allow_TS):
                            wanted_TS[t, row] = torch.softmax(scores_TS[t, row], -1)
                        heat = seen.attention.of(kind)[layer, head]
                        assert torch.equal(heat.allowed, allow_TS), (name, kind, layer)
                        assert (heat.tensor - wanted_TS).abs().max() < EXACT, (name, kind, layer)


def allowed_by_hand(attention, kind, inputs):
    """Cell by cell, from the words of the spec."""
    tokens, source = inputs.tokens_BT[0], inputs.source_BS
    queries = source[0] if kind == "encoder" else tokens
    keys = tokens if kind == "self" else source[0]
    valid_q = inputs.source_valid_BS if kind == "encoder" else inputs.valid_BT
    valid_k = inputs.valid_BT if kind == "self" else inputs.source_valid_BS
    allow = torch.ones(len(queries), len(keys), dtype=torch.bool)
    for t in range(len(queries)):
        for s in range(len(keys)):
            real_q = valid_q is None or bool(valid_q[0, t])
            real_k = valid_k is None or bool(valid_k[0, s])
            late = attention.causal and s > t
            far = attention.window is not None and abs(t - s) >= attention.window
            allow[t, s] = real_q and real_k and not late and not far
    return allow


def test_means_are_means():
    """By layer, and over all heads."""
    for name in ("decoder", "encoder-decoder"):
        seen = inspect(model_of(name), inputs_of(name))
        for kind in seen.kinds:
            maps = seen.attention.of(kind)
            layers, heads = maps.shape
            for layer in range(layers):
                wanted = sum(maps[layer, head].tensor for head in range(heads)) / heads
                assert (maps.mean(layer).tensor - wanted).abs().max() < EXACT
            wanted = sum(heat.tensor for heat in maps.heads()) / (layers * heads)
            assert (maps.mean().tensor - wanted).abs().max() < EXACT


def test_the_final_row_is_the_model():
    """Its distribution bit for bit, and a divergence of exactly 0."""
    for name in (*DECODERS, *ENCODED, "several heads"):
        model, inputs = model_of(name), inputs_of(name)
        seen = inspect(model, inputs)
        with trace(model, read="*.weights"):  # the explicit attention: the fused rounds otherwise
            logp_TV = by_hand(model, inputs, "next")
        assert bool((seen.lens.kl[-1] == 0).all())
        for t in range(T):
            ids, _, shares = zip(*seen.next(t, VOCAB), strict=True)
            assert list(shares) == logp_TV[t, list(ids)].exp().tolist(), (name, t)
            assert sorted(ids) == list(range(VOCAB))


@catches("missing final norm", "lens.measure.predictions:read_lens", Choice(), to="{body}")
@catches(
    "wrong KL direction",
    "lens.measure.predictions:read_predictions",
    Call("divergence"),
    to="{func}({args[1]}, {args[0]})",
)
def test_every_row_is_the_model_cut_off():
    """The lens against a copy of the model that ends there: later sublayers add nothing."""
    for name in ("decoder", "grouped", "bare", "encoder-decoder"):  # pre-norm: x + part(norm(x))
        model, inputs = model_of(name), inputs_of(name)
        seen = inspect(model, inputs)
        final_TV = by_hand(model, inputs, "next")
        for row, label in enumerate(seen.lens.row_names):
            cut = copy.deepcopy(model)
            silence_after(cut, label)
            wanted_TV = by_hand(cut, inputs, "next")
            wanted_kl = F.kl_div(wanted_TV, final_TV, log_target=True, reduction="none").sum(-1)
            assert (seen.lens.kl[row] - wanted_kl).abs().max() < EXACT, (name, label)
            for t in range(T):
                ids, _, shares = zip(*seen.lens.choices(t, 3, row=label), strict=True)
                wanted = wanted_TV[t].topk(3)
                assert list(ids) == wanted.indices.tolist(), (name, label, t)
                apart = torch.tensor(shares, dtype=torch.float64) - wanted.values.exp()
                assert apart.abs().max() < EXACT, (name, label, t)
            entropy_T = -(wanted_TV.exp() * wanted_TV).sum(-1)
            assert (seen.lens.entropy[row] - entropy_T).abs().max() < EXACT


def silence_after(model, label):
    """Zero the output of every sublayer of the answering stack that comes after a row."""
    found = label == "embed"
    for layer, block in enumerate(getattr(model, "decoder", model).blocks):
        for part, holder, leaf in (
            ("attn", block.attn, "o_proj"),
            ("cross", block.cross, "o_proj"),
            ("mlp", block.ffn, "down_proj"),
        ):
            if holder is not None and found:
                for parameter in getattr(holder, leaf).parameters():
                    parameter.data.zero_()
            found = found or label == f"L{layer} {part}"


def test_post_norm_rows_are_read_as_they_stand():
    """A row is the head's reading of the residual itself where there is no final norm."""
    for name in ("post-norm", "post encoder-decoder"):
        model, inputs = model_of(name), inputs_of(name)
        seen = inspect(model, inputs)
        at = "decoder." if "encoder" in name else ""
        with trace(model, read=f"{at}blocks.1.resid_mid") as taps, torch.no_grad():
            model(inputs)
            logits = model.project(taps[f"{at}blocks.1.resid_mid"], "next")[0]
        wanted = F.kl_div(
            torch.log_softmax(logits, -1),
            by_hand(model, inputs, "next"),
            log_target=True,
            reduction="none",
        ).sum(-1)
        row = seen.lens.row_names.index("L1 attn")
        assert (seen.lens.kl[row] - wanted).abs().max() < EXACT


def test_norms_are_lengths():
    """What the taps hold, at the right layer."""
    for name in ("decoder", "post-norm", "encoder-decoder"):
        model, inputs = model_of(name), inputs_of(name)
        seen = inspect(model, inputs)
        at = "decoder." if "encoder" in name else ""
        with trace(model, read=f"{at}*") as taps, torch.no_grad():
            model(inputs)

        def length(tap, taps=taps, at=at):
            return taps[f"{at}{tap}"][0].pow(2).sum(-1).sqrt()

        found = dict(zip(seen.norms.row_names, seen.norms.residual, strict=True))
        assert (found["embed"] - length("embed")).abs().max() < EXACT
        for layer in range(model.spec.n_layers):
            here = f"blocks.{layer}."
            assert (found[f"L{layer} attn"] - length(here + "resid_mid")).abs().max() < EXACT
            assert (found[f"L{layer} mlp"] - length(here + "resid_post")).abs().max() < EXACT
            apart = seen.norms.attention[layer] - length(here + "attn.out")
            assert apart.abs().max() < EXACT
            assert (seen.norms.mlp[layer] - length(here + "ffn.out")).abs().max() < EXACT
            if seen.norms.cross is not None:
                apart = seen.norms.cross[layer] - length(here + "cross.out")
                assert apart.abs().max() < EXACT


@catches(
    "the token itself is asked for",
    "lens.measure.predictions:_next_tokens",
    Call("where"),
    arg=1,
    to="{value}[:-1]",
)
def test_losses_are_of_the_next_token():
    """Position t is asked for token t + 1, and the last one for nothing."""
    for name in ("decoder", "encoder-decoder"):
        model, inputs = model_of(name), inputs_of(name)
        seen = inspect(model, inputs)
        logp_TV = by_hand(model, inputs, "next")
        tokens = inputs.tokens_BT[0]
        for t in range(T - 1):
            assert abs(float(seen.losses[t] + logp_TV[t, tokens[t + 1]])) < EXACT
            assert seen.target(t)[0] == int(tokens[t + 1])
        assert math.isnan(seen.losses[T - 1]) and seen.target(T - 1) is None
        assert abs(seen.loss - float(seen.losses[:-1].mean())) < EXACT
        wanted = -(logp_TV.exp() * logp_TV).sum(-1)
        assert (seen.entropy - wanted).abs().max() < EXACT


def test_answers_are_read_where_the_head_reads():
    """Last, first and mean readouts, padded too: the answer is the model's own."""
    for name in ANSWERING:
        for padded in (False, True):
            model, inputs = model_of(name), inputs_of(name, padded=padded)
            seen = inspect(model, inputs, targets=5)
            with torch.no_grad():
                logp_V = torch.log_softmax(model(inputs)["answer"][0], -1)
            token, _, share = seen.answer
            assert token == int(logp_V.argmax()) and abs(share - float(logp_V.max().exp())) < EXACT
            assert abs(seen.loss + float(logp_V[5])) < EXACT
            assert int((~seen.losses.isnan()).sum()) == 1
            assert float(seen.lens.kl[-1, seen.readout.position]) == 0.0


def test_a_look_is_of_the_model_as_it_was():
    """After a step of training, a look refuses to be compared with the new weights."""
    model = copy.deepcopy(model_of("decoder"))
    seen = inspect(model, inputs_of("decoder"))
    seen.ablate("L0H1")
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    for act in (lambda: seen.ablate("L0H1"), seen.ranking):
        with pytest.raises(InputError, match="changed"):
            act()
    for change in (_replaced, lambda model: model.float()):  # neither writes to a tensor
        model = copy.deepcopy(model_of("decoder"))
        seen = inspect(model, inputs_of("decoder"))
        change(model)
        with pytest.raises(InputError, match="changed"):
            seen.ablate("L0H1")


def _replaced(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


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
            assert abs(share - float(shares[t].max())) < EXACT
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
    assert abs(short.loss - padded.loss) < EXACT
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
    assert (whole.lens.kl - pieces.lens.kl).abs().max() < EXACT
    assert torch.equal(whole.lens.predictions.ids, pieces.lens.predictions.ids)
    apart = whole.ablate("L0H1").kl - pieces.ablate("L0H1").kl
    assert apart.abs().max() < EXACT
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
