"""What the lens must hold, as functions that planted faults can turn red."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from glassformer.lens.heads import HeadName, attentions, heads_of, kinds_of
from glassformer.lens.inspection import inspect
from glassformer.nn.taps import trace
from glassformer.spec.errors import InputError
from tests.lens.models import ANSWERING, DECODERS, ENCODED, inputs_of, model_of
from tests.tiny import VOCAB, T

EXACT = 1e-12  # float64: the same sums in another order


def by_hand(model, inputs, head):
    """log p of every position, from the model's own forward."""
    with torch.no_grad():
        return torch.log_softmax(model(inputs)[head][0], dim=-1)


def attention_is_softmax_of_scores():
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


def means_are_means():
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


def the_final_row_is_the_model():
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


def every_row_is_the_model_cut_off():
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


def post_norm_rows_are_read_as_they_stand():
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


def norms_are_lengths():
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


def losses_are_of_the_next_token():
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


def answers_are_read_where_the_head_reads():
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


def without_columns(model, heads):
    """A copy whose o_proj has no columns for these heads."""
    cut = copy.deepcopy(model)
    for head in heads:
        stack = cut if model.spec.encoder is None else cut.decoder
        stack = cut.encoder if head.kind == "encoder" else stack
        block = stack.blocks[head.layer]
        part = block.cross if head.kind == "cross" else block.attn
        width = part.d_head
        part.o_proj.weight.data[:, head.head * width : (head.head + 1) * width] = 0.0
    return cut


def ablation_is_a_head_without_columns():
    """Every head of every kind, one by one, against a forward by hand; and two at once."""
    for name in ("decoder", "post-norm", "grouped", "encoder-decoder", "post encoder-decoder"):
        model, inputs = model_of(name), inputs_of(name)
        seen = inspect(model, inputs)
        before_TV = by_hand(model, inputs, "next")
        tokens = inputs.tokens_BT[0]
        groups = [[head] for head in heads_of(model.spec)]
        groups.append([groups[0][0], groups[-1][0]])
        for heads in groups:
            made = seen.ablate(*map(str, heads))
            after_TV = by_hand(without_columns(model, heads), inputs, "next")
            kl = F.kl_div(after_TV, before_TV, log_target=True, reduction="none").sum(-1)
            assert (made.kl - kl).abs().max() < EXACT, (name, heads)
            wanted = [
                float(before_TV[t, tokens[t + 1]] - after_TV[t, tokens[t + 1]])
                for t in range(T - 1)
            ]
            assert abs(made.loss_change - sum(wanted) / len(wanted)) < EXACT, (name, heads)
            assert made.after.ablated == tuple(heads)


def ranking_is_every_ablation():
    """The batched pass gives what one ablation after another gives, in order of size."""
    for name in ("decoder", "grouped", "encoder-decoder"):
        seen = inspect(model_of(name), inputs_of(name)).ablate("L1H2").after
        ranking = seen.ranking()
        assert set(ranking.heads) == set(heads_of(seen.model.spec)) - set(seen.ablated)
        for head, change, kl in zip(ranking.heads, ranking.loss_changes, ranking.kls, strict=True):
            alone = seen.ablate(head)
            assert abs(alone.loss_change - change) < EXACT, (name, str(head))
            assert abs(float(alone.kl[T - 1]) - kl) < EXACT, (name, str(head))
        sizes = [abs(effect) for effect in ranking.effects]
        assert sizes == sorted(sizes, reverse=True)
        unasked = inspect(model_of(name), inputs_of(name), targets=[None] * T).ranking()
        assert unasked.loss_changes == (None,) * len(unasked.heads)
        assert list(unasked.effects) == sorted(unasked.kls, reverse=True)


def a_look_is_of_the_model_as_it_was():
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
