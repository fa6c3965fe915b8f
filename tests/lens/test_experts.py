"""Router choices: read from the pass itself, shown by layer and token, absent without experts."""

import json
from dataclasses import replace

import torch

from glassformer.lens.inspection import inspect
from glassformer.nn.taps import Taps
from glassformer.spec.model import MoE, SwiGLU
from tests.tiny import built, tiny, token_ids

E, T = 5, 7
MIXED = MoE(n_experts=E, experts_per_token=2, expert=SwiGLU(d_ff=7))


def seen():
    model = built(tiny(ffn=MIXED, layers=3))
    ids = token_ids(1, T)[0]
    return model, ids, inspect(model, ids)


def test_choices_and_loads_are_those_of_the_pass():
    model, ids, found = seen()
    taps = Taps(read="*.ffn.routing")
    with torch.no_grad():
        model(ids[None], taps=taps)
    experts = found.experts
    assert experts is not None
    assert (experts.layers, experts.sizes) == ((0, 1, 2), (E, E, E))
    assert experts.tensor.shape == (3, T, E)
    for layer in range(3):
        routing_TE = taps.seen[f"blocks.{layer}.ffn.routing"][0].float()
        torch.testing.assert_close(experts.weights[layer], routing_TE)
        for t in range(T):
            chosen = experts.chosen(layer, t)
            assert [e for e, _ in chosen] == routing_TE[t].topk(2).indices.tolist()
        counts = [sum(e in dict(experts.chosen(layer, t)) for t in range(T)) for e in range(E)]
        torch.testing.assert_close(experts.load[layer], torch.tensor(counts) / T)
    assert experts.load.sum(1).tolist() == [2.0] * 3


def test_it_is_shown_with_the_inspection(tmp_path):
    _, _, found = seen()
    experts = found.experts
    assert experts is not None and experts.text() in found.text()
    assert "L2" in experts.text() and len(experts.rows()) == 3 * T
    assert "load of the experts of layer 1" in found.html()
    assert json.loads(json.dumps(found.record()))["experts"] == experts.rows()
    for ending in ("png", "svg", "html", "json", "csv"):
        assert experts.save(tmp_path / f"experts.{ending}").stat().st_size > 100


def test_layers_may_differ_and_a_model_without_experts_has_none():
    assert inspect(built(tiny()), token_ids(1, 3)[0]).experts is None
    spec = tiny(ffn=MIXED, layers=1)
    run = spec.decoder.layers[0]
    small = replace(run.block, ffn=replace(MIXED, n_experts=3, experts_per_token=3))
    dense = replace(run.block, ffn=SwiGLU(d_ff=7))
    runs = (run, replace(run, block=dense), replace(run, block=small))
    mixed = replace(spec, decoder=replace(spec.decoder, layers=runs))
    found = inspect(built(mixed), token_ids(1, T)[0]).experts
    assert found is not None
    assert (found.layers, found.sizes) == ((0, 2), (E, 3))
    assert found.load[1].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
