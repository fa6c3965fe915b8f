"""Encoder-decoders compute what transformers computes: logits, greedy, beams, and files."""

import json
from functools import cache
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.load import adapt, load
from glassformer.generation.beam import beam_search
from glassformer.generation.streaming import generate_batch
from glassformer.models.inputs import Inputs
from glassformer.models.prompts import Prompts
from glassformer.nn.cache import GrowingCache
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from tests.adapters.checkpoints import perturbed

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 40,
}
MARIAN = {"pad_token_id": 60, "decoder_start_token_id": 60, "eos_token_id": 0}
#: Name: (config, model, fields).
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", {}),
    "bart scaled relu": (
        "BartConfig",
        "BartForConditionalGeneration",
        {"scale_embedding": True, "activation_function": "relu"},
    ),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", {"decoder_start_token_id": 2}),
    "marian": (
        "MarianConfig",
        "MarianMTModel",
        MARIAN | {"activation_function": "swish", "scale_embedding": True},
    ),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", {"scale_embedding": True}),
    "m2m-100": ("M2M100Config", "M2M100ForConditionalGeneration", {}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {}),
    "t5 gated": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
T5_SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 0,
}
TOLERANCE = 1e-5


@cache
def live(case: str) -> Any:
    import transformers

    config, model, fields = CASES[case]
    sizes = T5_SIZES if case.startswith("t5") else SIZES | {"forced_eos_token_id": None}
    module = perturbed(
        getattr(transformers, model)(getattr(transformers, config)(**(sizes | fields)))
    )
    module.eval()
    body = getattr(module, "model", module)
    for side in (body.encoder, body.decoder):  # sines, which are not learned
        if hasattr(getattr(side, "embed_positions", None), "create_weight"):
            side.embed_positions.weight.data = side.embed_positions.create_weight()
    if hasattr(module, "final_logits_bias"):
        module.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2))
    module.generation_config.forced_eos_token_id = None
    return module


@cache
def folder(case: str, place: Any) -> Any:
    live(case).save_pretrained(place)
    return place


def pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources of three lengths padded on the right with id 1, their mask, and targets."""
    draw = torch.Generator().manual_seed(4)
    source = torch.randint(3, 59, (3, 13), generator=draw)
    valid = torch.ones_like(source)
    valid[1, 6:] = 0
    valid[2, 9:] = 0
    return source, valid, torch.randint(3, 59, (3, 11), generator=draw)


def padded(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source, valid, target = pairs()
    pad = torch.tensor(live(case).config.pad_token_id)
    return source.where(valid.bool(), pad), valid, target


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= TOLERANCE * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_transformers(case, tmp_path):
    adapter = load(folder(case, tmp_path / "theirs"))
    source, valid, target = padded(case)
    theirs = live(case)(input_ids=source, attention_mask=valid, decoder_input_ids=target).logits
    inputs = Inputs(target, source_BS=source, source_valid_BS=valid.bool())
    assert close(adapter(inputs), theirs)
    # Padding on the left of the source is the same source.
    moved = torch.stack(
        [row.roll(int((v == 0).sum())) for row, v in zip(source, valid, strict=True)]
    )
    gone = torch.stack([v.roll(int((v == 0).sum())) for v in valid]).bool()
    assert close(adapter(Inputs(target, source_BS=moved, source_valid_BS=gone)), theirs)
    assert torch.equal(adapt(live(case)).forward(inputs), adapter(inputs))
    model, cache = adapter.model, GrowingCache()
    columns = [
        model(
            Inputs(target[:, t : t + 1], source_BS=source, source_valid_BS=valid.bool()),
            cache=cache,
        )
        for t in range(target.shape[1])
    ]
    assert close(torch.cat([column["next"] for column in columns], 1), theirs)


@pytest.mark.parametrize("case", CASES)
def test_greedy_and_beams_are_transformers(case, tmp_path):
    adapter, module = load(folder(case, tmp_path / "theirs")), live(case)
    source, valid, _ = padded(case)
    start, eos = module.config.decoder_start_token_id, module.config.eos_token_id
    rows = [row[v.bool()].tolist() for row, v in zip(source, valid, strict=True)]
    prompts = Prompts.of([[start]] * 3, sources=rows)
    given = {"input_ids": source, "attention_mask": valid, "max_new_tokens": 16, "do_sample": False}
    given |= {"bad_words_ids": None, "forced_bos_token_id": None}
    theirs = module.generate(**given, num_beams=1)
    spec = DecodeSpec(max_new_tokens=16, eos=(eos,))
    for row, made in enumerate(generate_batch(adapter.stepper(), prompts, spec=spec)):
        wanted = theirs[row, 1:].tolist()
        assert list(made.tokens) == wanted[: len(made.tokens)]
        assert len(made.tokens) == 16 or made.tokens[-1] == eos
    # A finished hypothesis keeps its beam here and leaves it there: compared while none ends.
    best = module.generate(**given, num_beams=4, length_penalty=1.0, eos_token_id=999)
    for row in range(3):
        one = Prompts.of([[start]], sources=[rows[row]])
        beams = BeamSpec(width=4, max_new_tokens=16, penalty="power", alpha=1.0)
        found = beam_search(adapter.stepper(), one, spec=beams)[0].hypotheses[0]
        assert list(found.tokens) == best[row, 1:].tolist()


@pytest.mark.parametrize("case", [case for case in CASES if case != "pegasus"])
def test_the_folder_comes_back_byte_for_byte(case, tmp_path):
    theirs = folder(case, tmp_path / "theirs")
    first = load(theirs)
    assert first.report.complete
    native = load(gf.save(first, tmp_path / "native"))
    back = export_hf(native, tmp_path / "back").folder
    for name in ("config.json", "model.safetensors"):
        assert (theirs / name).read_bytes() == (back / name).read_bytes(), name
    bare = gf.build(first.spec)
    bare.model.load_state_dict(first.model.state_dict())
    written = export_hf(bare, tmp_path / "written")
    _, found = type(live(case)).from_pretrained(written.folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_pegasus_stores_its_sines_and_is_read_only(tmp_path):
    adapter = load(folder("pegasus", tmp_path / "theirs"))
    assert len(adapter.report.ignored) == 2
    with pytest.raises(InputError, match="no Hugging Face architecture"):
        export_hf(adapter, tmp_path / "back")


def test_text_is_translated_as_transformers_does(tmp_path):
    """Text in, text out: marks around the source, the start, the forced token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {
        word: i
        for i, word in enumerate(
            ["<s>", "<pad>", "</s>", "<unk>", *(chr(97 + i) for i in range(57))]
        )
    }
    engine = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    place = folder("bart", tmp_path / "theirs")
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names)
    tokenizer.save_pretrained(place)
    settings = {"decoder_start_token_id": 2, "forced_bos_token_id": 0, "eos_token_id": 2}
    (place / "generation_config.json").write_text(json.dumps(settings | {"pad_token_id": 1}))
    adapter = load(place)
    module = type(live("bart")).from_pretrained(place)
    theirs = module.generate(**tokenizer("a b c", return_tensors="pt"), max_new_tokens=9)[0]
    made = adapter.generated("a b c", max_new_tokens=8)[0]
    assert [2, 0, *made.tokens] == theirs.tolist()[: 2 + len(made.tokens)]
    source = adapter.get_tokenizer().encode_source("a b c")
    assert source == tokenizer("a b c").input_ids


@torch.no_grad()
def test_a_head_of_its_own_is_read_as_transformers_reads_it(tmp_path):
    """Folders of T5 1.1 and Flan-T5 have one, and a config that transformers 5 no longer writes."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSeq2SeqLM

    live("t5 gated").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = torch.randn(T5_SIZES["vocab_size"], T5_SIZES["d_model"])
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"tie_word_embeddings": False}
    del config["scale_decoder_outputs"]
    file.write_text(json.dumps(config))
    module = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    source, valid, target = padded("t5 gated")
    theirs = module(input_ids=source, attention_mask=valid, decoder_input_ids=target).logits
    inputs = Inputs(target, source_BS=source, source_valid_BS=valid.bool())
    assert close(load(tmp_path)(inputs), theirs)
