"""`diff` names the first module that differs, and why; and it is silent where nothing differs."""

import copy
import json

import pytest
import torch
from bench import diff as faults
from torch import nn
from typer.testing import CliRunner

import glassformer as gf
from glasscheck import causes
from glasscheck.causes import gap_of
from glasscheck.following import CLEAR
from glassformer.adapters.load import adapt
from glassformer.checks.diff import diff
from glassformer.checks.preset_subjects import perturb
from glassformer.cli.main import app
from glassformer.spec import presets
from tests.checks.port import Port


@pytest.fixture(scope="module")
def made():
    return faults.models()


@pytest.mark.parametrize("plant", faults.PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_and_named(made, plant):
    """In one of our models and in another library's, where the fault exists there."""
    for name in ("ours, Llama shape", "Llama"):
        model, parts = made[name]
        twin, draw = copy.deepcopy(model), faults.random.Random(3)
        with torch.no_grad():
            module, cause = plant(twin, parts, 1, draw)
        found = diff(model, twin)
        assert faults.is_right(module, found), f"{name}: {found}"
        assert faults.is_named(cause, found), f"{name}: {found}"


def test_two_implementations_of_one_model_do_not_differ():
    """Ours and transformers' Llama, with other names, in float32: forwards and backwards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 101}
    theirs = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    ).eval()
    ours = adapt(theirs)
    found = diff(ours, theirs)
    assert found.same and found.compared > 15 and found.gap < 1e-5
    with torch.no_grad():
        theirs.model.layers[1].mlp.up_proj.weight[3] += 1
    found = diff(ours, theirs)
    assert found.module == "blocks.1.ffn.up_proj" and found.second == "model.layers.1.mlp.up_proj"
    assert "other values in 1 of 80 rows" in found.causes[0]


def with_an_outlier(**settings):
    """transformers' Llama with a channel that is a small difference of large numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 101}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **settings))
    model = perturb(model, dtype=torch.float32, seed=1).eval()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[1] = mlp.gate_proj.weight[0]
        mlp.up_proj.weight[1] = mlp.up_proj.weight[0] * (1 + 1e-4)
        mlp.down_proj.weight[7, 0], mlp.down_proj.weight[7, 1] = 1e4, -1e4
    return model


@pytest.fixture(scope="module")
def outlier():
    theirs = with_an_outlier()
    return adapt(theirs), theirs


def test_rounding_at_an_outlier_is_no_difference(outlier):
    ours, theirs = outlier
    tokens = torch.randint(101, (2, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert float((ours(tokens) - theirs(tokens).logits).abs().max()) > 1e-5  # without a mistake
    for first, second in ((ours, theirs), (theirs, ours)):
        found = diff(first, second)
        assert found.same and found.times < CLEAR, found


@pytest.mark.parametrize(
    ("module", "change", "place"),
    [
        ("layers.2.self_attn", lambda m: setattr(m, "scaling", m.scaling * 1.01), "blocks.2.attn"),
        ("layers.2.self_attn", lambda m: setattr(m, "scaling", m.scaling * 1.5), "blocks.2.attn"),
        (
            "layers.2.input_layernorm",
            lambda m: setattr(m, "variance_epsilon", 1e-3),
            "blocks.2.attn_norm",
        ),
        ("norm", lambda m: setattr(m, "variance_epsilon", 1e-4), "final_norm"),
        (
            "layers.2.mlp.down_proj",
            lambda m: m.weight.data[3].mul_(1.0001),
            "blocks.2.ffn.down_proj",
        ),
        ("layers.1", lambda m: doubled(m.mlp), "blocks.1"),
    ],
)
def test_a_mistake_behind_an_outlier_is_placed(outlier, module, change, place):
    """Small ones too: each step is compared on the same inputs, so rounding does not add up."""
    ours, theirs = outlier[0], copy.deepcopy(outlier[1])
    change(theirs.model.get_submodule(module))
    found = diff(ours, theirs)
    assert not found.same and found.module == place, found
    assert found.times > 2 * CLEAR


def doubled(module):
    plain = module.forward
    module.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)


def test_a_window_is_compared_behind_its_end():
    """Rows of 11 positions do not reach a window of 16; another row does."""
    from transformers import MistralConfig, MistralForCausalLM

    def made(window):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 53}
        config = MistralConfig(**sizes, **heads, sliding_window=window, max_position_embeddings=64)
        return MistralForCausalLM(config).eval()

    assert diff(adapt(made(16)), made(16)).same
    found = diff(adapt(made(16)), made(15))
    assert found.module == "blocks.0.attn" and "window" in found.causes[0], found


def test_a_pooled_vector_is_compared_with_an_encoder_of_transformers(tmp_path):
    """Ours adds positions in a module and pools in one; transformers has other modules for both."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 53}
    BertModel(BertConfig(**sizes, num_attention_heads=4)).eval().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["diff", str(tmp_path)])
    assert result.exit_code == 0 and "no difference" in result.output, result.output
    ours, theirs = gf.load(tmp_path), BertModel.from_pretrained(tmp_path).eval()
    for first, second in ((ours, theirs), (theirs, ours)):
        found = diff(first, second)
        assert found.same and "gradients are not compared" in str(found), found
    with torch.no_grad():
        theirs.embeddings.position_embeddings.weight[3] += 0.1
    found = diff(ours, theirs)
    assert (found.first, found.second) == ("position", "embeddings.position_embeddings"), found


class Joined(nn.Module):
    """A port with joined projections and another layout of names, as people write it."""

    def __init__(self, model, *, up_first=False):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(model.embed.weight.detach().clone())
        self.blocks, self.last = copy.deepcopy(model.blocks), copy.deepcopy(model.final_norm)
        self.rotary, self.up_first = copy.deepcopy(model.rotary), up_first
        for block in self.blocks:
            weights = [getattr(block.attn, f"{x}_proj").weight.detach() for x in "qkv"]
            block.attn.wqkv = nn.Linear(1, 1, bias=False)
            block.attn.wqkv.weight = nn.Parameter(torch.cat(weights))
            del block.attn.q_proj, block.attn.k_proj, block.attn.v_proj

    def forward(self, tokens):
        from glassformer.nn.attention import attend, join_heads, split_heads
        from glassformer.nn.mask import Mask
        from glassformer.nn.operations import rotate

        x = self.table(tokens)
        turns = next(iter(self.rotary.values())).at(slice(0, tokens.shape[1]))
        for block in self.blocks:
            attn, y = block.attn, block.attn_norm(x)
            q, k, v = (split_heads(z, 8) for z in attn.wqkv(y).split([48, 16, 16], -1))
            heads = attend(rotate(q, *turns), rotate(k, *turns), v, mask=Mask(causal=True))
            x = x + attn.o_proj(join_heads(heads))
            y = block.ffn_norm(x)
            gate, up = block.ffn.gate_proj(y), block.ffn.up_proj(y)
            if self.up_first:
                gate, up = up, gate
            x = x + block.ffn.down_proj(nn.functional.silu(gate) * up)
        return self.last(x) @ self.table.weight.T


@pytest.fixture(scope="module")
def original(made):
    return made["ours, Llama shape"][0]


def test_joined_weights_and_other_names_are_paired_by_value(original):
    found = diff(original, Joined(original), backward=False)
    assert found.same and found.gap < 1e-5, found
    found = diff(original, Joined(original, up_first=True))
    assert found.module == "blocks.0.ffn"
    assert found.causes == ("activation: SiLU(first) x second beside SiLU(second) x first",)


def test_a_model_is_left_as_it_was(original):
    model = copy.deepcopy(original).train()
    model.blocks[1].eval()
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    diff(model, original)
    assert [block.training for block in model.blocks] == [True, False, True] and model.training
    assert model.embed.weight.grad.sum() == model.embed.weight.numel()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(part._forward_hooks for part in model.modules())


def test_gradients_are_compared_where_forwards_agree(original):
    twin = copy.deepcopy(original)
    part = twin.blocks[1].ffn.down_proj
    plain = part.forward
    part.forward = lambda x: plain(2 * x - x.detach())
    found = diff(original, twin)
    assert found.stage == "backward" and not found.same
    assert diff(original, twin, backward=False).same


def test_gaps_do_not_depend_on_the_layout():
    x = torch.randn(2, 11, 3, 5)
    assert gap_of(x.flatten(2), x.transpose(1, 2)) == 0.0
    assert gap_of(x.flatten(2), x.flatten(2).transpose(0, 1)) == 0.0
    assert gap_of(x.flatten(2), -x.flatten(2)) > 1


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import glassformer as gf\n"
        "def right(): return gf.build(gf.preset('qwen', n_layers=1), seed=0)\n"
        "def wrong():\n"
        "    model = right()\n"
        "    model.model.final_norm.eps = 0.1\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def glass(*words):
        result = CliRunner().invoke(app, ["diff", *words])
        return result.exit_code, result.output

    code, text = glass("mine:right", "mine:right")
    assert code == 0 and "no difference" in text
    code, text = glass("mine:right", "mine:wrong")
    assert code == 1 and "epsilon: 1e-06 beside 0.1" in text
    code, text = glass("mine:right", "mine:wrong", "--json")
    assert code == 1 and json.loads(text)["module"] == "final_norm"
    assert glass("mine:right", "nowhere")[0] != 0


def test_a_quantized_model_is_compared_module_by_module(original):
    small = gf.quantize(original, bits=8)
    found = diff(original, small, names=("A", "B"))
    assert not found.same and found.first == found.second and 0 < found.gap < 0.1
    assert diff(small, copy.deepcopy(small)).compared > 5


def test_other_sizes_are_a_difference_not_a_crash(original):
    other = gf.build(
        presets.modern_lm(vocab_size=101, d_model=24, d_ff=40, n_layers=1, n_heads=3, n_kv_heads=3)
    )
    assert not diff(original, other).same


def test_another_embedding_is_a_difference_of_its_weights(original):
    twin = copy.deepcopy(original)
    with torch.no_grad():
        twin.embed.weight.add_(torch.randn_like(twin.embed.weight))
    found = diff(original, twin)
    assert found.module == "embed" and found.causes[0].startswith("weights: embed.weight has other")


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("rotation before the norm", "side turns it before blocks.0.qn: rotation of halves"),
        ("scale of d_model", "scale 1 / √d_model beside scale 1 / √d_head"),
        ("softmax over queries", "a softmax over the queries beside a causal mask"),
        ("heads not joined", "heads not joined by position"),
        ("values turned", "of values too"),
        ("epsilon outside", "epsilon outside the root beside RMS norm"),
        ("layer norm", "layer norm beside RMS norm"),
        ("no final norm", "the first side does not compute norm (RMS)"),
        ("a layer missing", "the first side does not compute blocks.1.n1 to blocks.1.down"),
    ],
)
def test_mistakes_of_a_port_whose_queries_are_normed(wrong, cause):
    found = gf.diff(Port(wrong), Port())
    assert found.causes, found
    assert cause in found.causes[0], found.causes


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda port: port.blocks.pop(2), "missing layer: final_norm has the weights of last"),
        (
            lambda port: port.blocks.pop(1),
            "before which the other side computes blocks.1.attn_norm",
        ),
        (
            lambda port: port.blocks[1].load_state_dict(port.blocks[0].state_dict()),
            "weights: blocks.1.attn_norm holds what blocks.0.attn_norm holds",
        ),
        (
            lambda port: port.blocks[0].load_state_dict(port.blocks[1].state_dict()),
            "weights: blocks.0.attn_norm holds what blocks.1.attn_norm holds",
        ),
    ],
)
def test_layers_of_a_port_that_joins_weights(original, change, cause):
    """Its modules are others: a layer is known by its norms, from whichever side."""
    port = Joined(original)
    change(port)
    for first, second, side in ((original, port, "first"), (port, original, "second")):
        found = diff(first, second, backward=False)
        text = found.causes[0]
        if cause.startswith("weights"):
            assert text == f"{cause} on the {side} side", found
        else:
            assert text.startswith("missing layer: ") and "before which" in text, found
    assert cause in text or not cause.startswith("before"), found


def test_a_forgotten_layer_of_a_new_model_is_named():
    """All norms are ones, and equal: the layer is known by what the rest of the weights are."""
    model = gf.build(gf.preset("modern-lm", d_model=32, d_ff=48, n_layers=3, n_heads=4,
        n_kv_heads=2, vocab_size=61), seed=1).model  # fmt: skip
    for layer in (0, 2):
        twin = copy.deepcopy(model)
        twin.blocks[layer].forward = lambda x, **_: x
        found = diff(model, twin, backward=False)
        assert f"the second side does not compute blocks.{layer}.attn_norm" in found.causes[0], (
            found
        )
        found = diff(twin, model, backward=False)
        assert f"the first side does not compute blocks.{layer}.attn_norm" in found.causes[0], found


@pytest.mark.parametrize("exchange", ["kv", "qk", "qv"])
def test_exchanged_projections_of_heads_that_are_all_alike(exchange):
    spec = gf.preset("budget-lm", d_model=32, d_ff=48, n_layers=2, n_heads=4, vocab_size=61)
    model = perturb(gf.build(spec, seed=1).model, dtype=torch.float32, seed=1).eval()
    twin = copy.deepcopy(model)
    one, other = (twin.get_submodule(f"blocks.1.attn.{x}_proj") for x in exchange)
    one.weight, other.weight, one.bias, other.bias = other.weight, one.weight, other.bias, one.bias
    words = {"q": "queries", "k": "keys", "v": "values"}
    named = " and ".join(words[x] for x in exchange) + " exchanged"
    for first, second in ((model, twin), (twin, model)):
        found = diff(first, second, backward=False)
        assert found.module == "blocks.1.attn" and named in found.causes[0], found


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda frequencies: frequencies / 4, "base 10000, positions divided by 4"),
        (lambda frequencies: frequencies**1.1, "the same with base 25119"),
    ],
)
def test_other_angles_are_named(made, change, cause):
    model = made["Llama"][0]
    twin = copy.deepcopy(model)
    for name, buffer in twin.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(change(buffer))
    found = diff(model, twin, backward=False)
    assert found.module == "model.layers.0.self_attn" and cause in found.causes[0], found


def test_capped_scores_are_named(made):
    model, parts = made["Llama"]

    def capped(kernel, q, k, v, **_):
        k, v = (x if x.shape == q.shape else x.repeat_interleave(3, 1) for x in (k, v))
        scores = 2 * torch.tanh(q @ k.mT / 8**0.5 / 2)
        return (
            scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e9).softmax(-1) @ v
        )

    twin = copy.deepcopy(model)
    twin.get_submodule(parts.attention.format(1)).attn_logit_softcapping = 2.0
    faults._with_attention(twin, parts.attention.format(1), capped)
    assert "scores capped at 2" in diff(model, twin, backward=False).causes[0]


def test_the_same_port_is_the_same():
    assert gf.diff(Port(), Port()).same


def test_other_logits_of_equal_states_are_a_difference():
    # Where the head is tied, no module of its own computes the logits, and none reads them.
    original = gf.build(gf.preset("modern-lm", d_model=32, d_ff=48, n_layers=1, n_heads=4,
        n_kv_heads=2, vocab_size=61, tied=True), seed=1)  # fmt: skip
    port = copy.deepcopy(original)
    port.model.register_forward_hook(lambda _, a, r: {name: 1.05 * x for name, x in r.items()})
    found = gf.diff(original, port)
    assert not found.same
    assert found.first == "logits"


def test_a_small_gap_that_leaves_a_position_alone_is_not_half_precision():
    """Other angles leave position 0 as it is; rounding leaves none."""
    a = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    assert causes._half(a, a.bfloat16().float())
    turned = a * (1 + 1e-3 * torch.arange(5)[:, None])
    assert not causes._half(a, turned)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("rounded", "the first side rounds it to bfloat16"),
        ("half", "the first side computes it in bfloat16"),
        ("noise", ""),
        ("dropout", "differs from itself: dropout is left on"),
    ],
)
def test_half_precision_is_named_only_where_rounding_makes_the_gap(wrong, said):
    port, model = Port(), Port()
    down = port.blocks[1].down

    def changed(_, inputs, out):
        if wrong == "rounded":
            return out.bfloat16().float()
        if wrong == "half":
            x, w = inputs[0].bfloat16(), down.weight.bfloat16()
            return torch.nn.functional.linear(x, w).float()
        if wrong == "dropout":
            return torch.nn.functional.dropout(out, 0.2)
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        return out * (1 + 3e-3 * noise)

    down.register_forward_hook(changed)
    found = diff(port, model)
    assert found.module == "blocks.1.down", found
    assert (said in "; ".join(found.causes)) if said else not found.causes, found
