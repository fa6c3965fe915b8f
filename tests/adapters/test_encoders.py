"""Encoders compute what transformers computes: masked-token logits, pooled vectors, and files."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import glassformer as gf
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.load import adapt, load
from glassformer.cli.main import app
from glassformer.models.inputs import Inputs
from glassformer.spec.errors import InputError
from tests.adapters.checkpoints import perturbed
from tests.planting import Binary, If, catches

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
DISTIL = {
    "vocab_size": 97,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 40,
}
MODERN = SIZES | {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}
BIASES = {
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
    "tie_word_embeddings": False,
    "hidden_activation": "silu",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
#: Name: (prefix of the classes, fields of the config, class of the model).
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("Bert", SIZES, "ForMaskedLM"),
    "bert relu": ("Bert", SIZES | {"hidden_act": "relu", "type_vocab_size": 3}, "ForMaskedLM"),
    "bert body": ("Bert", SIZES, "Model"),
    "roberta": ("Roberta", SIZES | {"layer_norm_eps": 1e-5}, "ForMaskedLM"),
    "xlm-roberta body": ("XLMRoberta", SIZES | {"type_vocab_size": 1}, "Model"),
    "distilbert": ("DistilBert", DISTIL, "ForMaskedLM"),
    "distilbert untied": ("DistilBert", DISTIL | {"tie_word_embeddings": False}, "ForMaskedLM"),
    "distilbert body": ("DistilBert", DISTIL, "Model"),
    "modernbert": ("ModernBert", MODERN, "ForMaskedLM"),
    "modernbert biases": ("ModernBert", MODERN | BIASES, "ForMaskedLM"),
    "modernbert body": ("ModernBert", MODERN, "Model"),
}
TOLERANCE = 1e-5


@cache
def live(case: str) -> Any:
    import transformers

    name, fields, kind = CASES[case]
    config = getattr(transformers, f"{name}Config")(**fields)
    return perturbed(getattr(transformers, f"{name}{kind}")(config)).eval()


def batch(case: str, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids without the padding id, and a mask with rows of three lengths, padded on one side."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 97, (3, 24), generator=draw)
    valid = torch.ones_like(ids)
    for row, length in ((1, 9), (2, 17)):
        gap = slice(0, 24 - length) if side == "left" else slice(length, 24)
        valid[row, gap] = 0
    pad = live(case).config.pad_token_id
    return ids.where(valid.bool(), torch.tensor(pad)), valid


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= TOLERANCE * max(1.0, float(theirs.abs().max()))


@catches(
    "position 0 is row 0",
    "nn.position:LearnedPosition.rows_of",
    If(),
    to="True",
    case="roberta-right",
)
@catches(
    "a window one too narrow",
    "adapters.families.encoders:_read_windows",
    Binary("+"),
    to="{left}",
    case="modernbert-right",
)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_results_are_transformers(case, side, tmp_path):
    module = live(case)
    module.save_pretrained(tmp_path / "theirs")
    adapter = load(tmp_path / "theirs")
    ids, valid = batch(case, side)
    kinds = torch.randint(
        0, max(adapter.spec.token_types, 1), ids.shape, generator=torch.Generator().manual_seed(1)
    )
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": valid}
    if side == "left" and "roberta" not in case:  # which counts by itself
        given["position_ids"] = (valid.cumsum(1) - 1).clamp(min=0)
    if adapter.spec.token_types:
        given["token_type_ids"] = kinds
    theirs = module(**given)
    inputs = Inputs(ids, valid.bool(), types_BT=kinds if adapter.spec.token_types else None)
    real = valid.bool()
    hidden = adapter.model.hidden(adapter.model.inputs(inputs))
    if "body" in case:
        assert close(hidden[real], theirs.last_hidden_state[real])
        vector = adapter(inputs)
        if getattr(theirs, "pooler_output", None) is None:
            share = valid.float() / valid.sum(1, keepdim=True)
            assert close(vector, (theirs.last_hidden_state * share[..., None]).sum(1))
        elif side == "right":  # transformers' pooler reads column 0, whatever is there
            assert close(vector, theirs.pooler_output)
    else:
        assert close(adapter(inputs)[real], theirs.logits[real])
    if side == "right":
        assert torch.equal(adapt(module).forward(inputs), adapter(inputs))


@pytest.mark.parametrize("case", ["bert relu", "roberta"])
@torch.no_grad()
def test_an_untied_head_is_read_with_the_bias_that_is_used(case, tmp_path, monkeypatch):
    """Its files hold another one, which nothing reads: it is ignored, and no folder is written."""
    kind, fields, ending = CASES[case]
    case = f"{case} untied"
    monkeypatch.setitem(CASES, case, (kind, fields | {"tie_word_embeddings": False}, ending))
    module = live(case)
    module.save_pretrained(tmp_path / "theirs")
    adapter = load(tmp_path / "theirs")
    ids, valid = batch(case, "right")
    real = valid.bool()
    theirs = module(ids, attention_mask=valid).logits
    assert close(adapter(Inputs(ids, real))[real], theirs[real])
    assert [name.rsplit(".", 1)[1] for name in adapter.report.ignored] == ["bias"]
    with pytest.raises(InputError, match="no Hugging Face architecture"):
        export_hf(adapter, tmp_path / "back")


@pytest.mark.parametrize("case", CASES)
def test_the_folder_comes_back_byte_for_byte(case, tmp_path):
    live(case).save_pretrained(tmp_path / "theirs")
    first = load(tmp_path / "theirs")
    assert first.report.complete and not first.report.notes
    native = load(gf.save(first, tmp_path / "native"))
    folder = export_hf(native, tmp_path / "back").folder
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "theirs" / name).read_bytes() == (folder / name).read_bytes(), name
    bare = gf.build(first.spec)
    bare.model.load_state_dict(first.model.state_dict())
    written = export_hf(bare, tmp_path / "written")
    _, found = type(live(case)).from_pretrained(written.folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_older_names_and_what_a_pre_training_left_behind(tmp_path):
    """The first BERTs: gamma and beta, a pooler and a sentence head beside the masked one."""
    from safetensors.torch import load_file, save_file

    live("bert").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    plain = load(tmp_path).model
    for name in [name for name in state if "LayerNorm" in name]:
        other = name.replace("weight", "gamma").replace("bias", "beta")
        state[other] = state.pop(name)
    state |= {
        "bert.pooler.dense.weight": torch.ones(32, 32),
        "bert.pooler.dense.bias": torch.ones(32),
    }
    state |= {
        "cls.seq_relationship.weight": torch.ones(2, 32),
        "cls.seq_relationship.bias": torch.ones(2),
    }
    state["cls.predictions.decoder.weight"] = state[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    save_file(state, tmp_path / "model.safetensors")
    adapter = load(tmp_path)
    assert adapter.report.complete and len(adapter.report.ignored) == 4
    ids = torch.randint(0, 97, (2, 9))
    assert torch.equal(adapter.model(ids)["masked"], plain(ids)["masked"])


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "sat", "the", "##s", "."]


def sentence_folder(place, **pooling):
    """A tiny BERT with a vocabulary and, as sentence-transformers writes it, its pooling."""
    live("bert body").save_pretrained(place)
    (place / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    names = {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")}
    (place / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer"} | names)
    )
    if pooling:
        (place / "1_Pooling").mkdir()
        (place / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return place


TEXTS = ["the cats sat.", "a dog", "the cats sat.", "a cat sat the dog . a cat sat . the cat"]


@torch.no_grad()
def test_sentence_vectors_are_the_mean_of_transformers_states(tmp_path):
    import transformers

    folder = sentence_folder(tmp_path / "mini")
    adapter = load(folder)
    found = gf.embed(adapter, TEXTS, batch=2)
    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    given = tokenizer(TEXTS, padding=True, return_tensors="pt")
    states, valid = live("bert body")(**given).last_hidden_state, given.attention_mask
    mean = (states * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    wanted = torch.nn.functional.normalize(mean, dim=-1)
    assert float((torch.from_numpy(found.vectors) - wanted).abs().max()) <= TOLERANCE
    assert (found.pooling, found.tokens) == ("mean", tuple(valid.sum(1).tolist()))
    cosines = found.cosines()
    assert abs(cosines[0, 2] - 1) < 1e-5 and abs(cosines - cosines.T).max() < 1e-6
    plain = gf.embed(adapter, TEXTS[0], normalize=False, pooling="first")
    assert abs(plain.vectors[0] - states[0, 0].numpy()).max() <= TOLERANCE
    short = gf.embed(adapter, TEXTS, max_length=5)
    assert short.tokens == (5, 4, 5, 5) and short.shortened == 3
    with pytest.raises(InputError, match="pooling"):
        gf.embed(adapter, "a cat", pooling="median")


def test_a_folder_s_own_pooling_is_kept_through_a_checkpoint(tmp_path):
    folder = sentence_folder(tmp_path / "cls", pooling_mode_cls_token=True)
    first = gf.embed(load(folder), TEXTS)
    assert first.pooling == "first"
    native = load(gf.save(load(folder), tmp_path / "native"))
    again = gf.embed(native, TEXTS)
    assert again.pooling == "first" and (first.vectors == again.vectors).all()
    back = export_hf(native, tmp_path / "back").folder
    assert gf.embed(load(back), TEXTS).pooling == "first"


def test_the_command_prints_cosines(tmp_path):
    folder = str(sentence_folder(tmp_path / "mini"))
    shown = CliRunner().invoke(app, ["embed", folder, "a cat", "a dog"])
    assert shown.exit_code == 0, shown.output
    assert "2 vectors of 32 numbers, read at: mean" in shown.stdout and " 1.00" in shown.stdout
    data = json.loads(CliRunner().invoke(app, ["embed", folder, "a cat", "--json"]).stdout)
    assert len(data["vectors"][0]) == 32 and data["tokens"] == [4]


@torch.no_grad()
def test_a_decoder_is_read_at_its_last_token(tmp_path):
    from tests.adapters.folders import write_model

    adapter = load(write_model(tmp_path / "model"))
    found = gf.embed(adapter, ["The cat", "The cat sat on the mat"])
    assert found.pooling == "last"
    ids = torch.tensor([adapter.get_tokenizer().encode("The cat")])
    alone = adapter.model.hidden(adapter.model.inputs(ids))[0, -1]
    unit = torch.nn.functional.normalize(alone, dim=-1).numpy()
    assert abs(found.vectors[0] - unit).max() <= TOLERANCE


def test_an_encoder_is_inspected_with_its_marks(tmp_path):
    folder = sentence_folder(tmp_path / "body")
    live("bert").save_pretrained(tmp_path / "masked")
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / "masked" / name).write_bytes((folder / name).read_bytes())
    seen = load(tmp_path / "masked").inspect("a cat [MASK] the dog")
    assert seen.words == ("[CLS]", "a", "cat", "[MASK]", "the", "dog", "[SEP]")
    assert seen.head == "masked"
    with pytest.raises(InputError, match="a vector is no prediction"):
        load(folder).inspect("a cat")
