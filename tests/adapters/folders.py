"""Small tokenizer and model folders as Hugging Face lays them out, in every form that is read."""

import base64
import json
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from glassformer.adapters.tokenizers.files import QWEN_WORDS, byte_letters

SAMPLE = (
    "The cat sat on the mat, didn't it? 12 345 def f(x):\n    return x\n naïve 你好 👩🏽\u200d🚀 é "
) * 4
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = 310  # of the tiny vocabulary, without the marks

#: The dialogue form of Qwen's models, as a template of our own.
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)


@cache
def engine() -> Tokenizer:
    """Byte-level BPE cut as Qwen cuts, trained on a few lines, three marks after the pieces."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([SAMPLE], trainer)
    made.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return made


def data() -> dict:
    """`tokenizer.json` of the tiny engine, as data to be changed."""
    return json.loads(engine().to_str())


def ranks() -> dict[bytes, int]:
    """The tiny vocabulary as byte strings and ranks."""
    back = {letter: byte for byte, letter in enumerate(byte_letters())}
    pieces = data()["model"]["vocab"]
    return {bytes(back[letter] for letter in piece): i for piece, i in pieces.items()}


def write(folder: Path, name: str, content: object) -> None:
    """A text or a JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


def write_json_form(folder: Path, *, merges: str = "lists") -> Path:
    """`tokenizer.json`, its merges as pairs or as strings."""
    made = data()
    if merges == "strings":
        made["model"]["merges"] = [" ".join(pair) for pair in made["model"]["merges"]]
    write(folder, "tokenizer.json", made)
    write_names(folder)
    return folder


def write_merges_form(folder: Path) -> Path:
    """`vocab.json` + `merges.txt`."""
    model = data()["model"]
    write(folder, "vocab.json", model["vocab"])
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    write(folder, "merges.txt", "\n".join(lines))
    write_names(folder)
    return folder


def write_ranks_form(folder: Path) -> Path:
    """`.tiktoken` ranks, as Qwen-1 has them."""
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items())
    write(folder, "qwen.tiktoken", "\n".join([*lines, ""]))
    return folder


def write_names(folder: Path, **more: object) -> None:
    """`tokenizer_config.json` as transformers 4 writes it."""
    marks = {
        str(PIECES + place): {"content": mark, "special": True} for place, mark in enumerate(MARKS)
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|endoftext|>"},
        "add_bos_token": False,
        "added_tokens_decoder": marks,
        "chat_template": CHATML,
    }
    write(folder, "tokenizer_config.json", {**config, **more})


def llama_engine() -> Tokenizer:
    """A SentencePiece-like BPE: spaces as ▁, bytes for what has no piece, BOS before every text."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"thecasonm", "th", "the", "▁the", "ca", "at", "cat", "▁cat"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("a", "t"), ("ca", "t")]
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens([AddedToken(w, normalized=False) for w in ("<unk>", "<s>", "</s>")])
    return made


@cache
def _weights(kind: str) -> tuple[dict, dict]:
    """config.json and tensors of a tiny Qwen2 that talks nonsense, the same every time."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=320,  # rounded up from 313, as Qwen's tables are
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        tie_word_embeddings=True,
        eos_token_id=PIECES + 2,
        pad_token_id=PIECES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Qwen2ForCausalLM(config)
    state = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i))
        for i, (name, tensor) in enumerate(module.state_dict().items())
        if name != "lm_head.weight"
    }
    return config.to_dict(), state


def write_model(folder: Path) -> Path:
    """A whole tiny Qwen2 folder: weights, tokenizer, chat template, generation settings."""
    from safetensors.torch import save_file

    config, state = _weights("qwen2")
    config = {**config, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    write(folder, "config.json", json.loads(json.dumps(config, default=str)))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json_form(folder)
    write(
        folder,
        "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "eos_token_id": [PIECES + 2, PIECES],
        },
    )
    return folder
