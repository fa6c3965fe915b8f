"""A real model against transformers and llama.cpp: `python -m bench real_models --model PATH`.

A decoder (a GGUF file or a folder) continues ten texts greedily: logits and tokens are compared
with transformers', which reads the same file itself, and text in, text out with llama.cpp, which
also brings its own tokenizer. llama.cpp rounds activations to eight bits beside packed weights, so
it is run twice: on the file, and on the same numbers in float32 (of a folder: on our export). Where
tokens part, the row says how much less likely its token was here. An encoder's states and cosines
are compared with transformers', and with sentence-transformers' where that is installed. What is
exported must open in transformers with nothing missing or unexpected.

Packages that carry real weights, and how to unpack them, are in docs/models-supported.md.
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.clock import Row, installed, said
from bench.families import completions
from glassformer.adapters.embed import embed
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.gguf.export_gguf import export_gguf
from glassformer.adapters.load import load
from glassformer.adapters.native import NativeAdapter
from glassformer.adapters.tokenizers.folder_tokenizer import end_ids
from glassformer.generation.streaming import generate_batch
from glassformer.models.inputs import Inputs
from glassformer.models.prompts import text_prompt
from glassformer.spec.decoding import DecodeSpec

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "In 1969, Neil Armstrong",
    "Der schnellste Weg nach Berlin ist",
    "La música clásica me gusta porque",
)
SENTENCES = (
    "A cat sits on the mat.",
    "A kitten is resting on a rug.",
    "The stock market fell sharply on Monday after weak earnings reports.",
    "Shares dropped at the start of the week.",
    "How do I reset my password?",
    "I forgot my login details; what should I do?",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Plants make food from sunlight.",
    "Le chat est assis sur le tapis.",
    "e = mc²",
    "Ünïcödé, emoji 🙂 and CJK 漢字 in one sentence?!",
    "No.",
)


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, action="append", required=True, help="file or folder")
    parser.add_argument("--new", type=int, default=32, help="tokens after each prompt")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the ten")


def run(*, asked: argparse.Namespace) -> Iterator[Row]:
    """Rows of every model."""
    for path in asked.model:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            adapter = load(path)
            assert isinstance(adapter, NativeAdapter)
            causal = "next" in adapter.spec.head_names()
            texts = PROMPTS[: asked.prompts]
            rows = decoder(adapter, path, texts, asked.new) if causal else encoder(adapter, path)
            for words in rows:
                yield said("real_models", path.name, words)


def theirs(path: Path, kind: str) -> Any:
    """Return what transformers reads from a folder or GGUF file, in float32."""
    import transformers

    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    transformers.logging.disable_progress_bar()
    made = getattr(transformers, kind).from_pretrained(**where, dtype=torch.float32)
    return made.eval()


# --- decoders -------------------------------------------------------------------------------------


def decoder(adapter: NativeAdapter, path: Path, texts: Sequence[str], new: int) -> Iterator[str]:
    """Logits, tokens and texts of a decoder."""
    module = theirs(path, "AutoModelForCausalLM")
    tokenizer = adapter.tokenizer
    prompts = [list(text_prompt(adapter.spec, tokenizer, text).tokens[0]) for text in texts]
    made = [greedy(adapter, prompt, new) for prompt in prompts]
    rows = [torch.tensor([[*p, *m]]) for p, m in zip(prompts, made, strict=True)]
    gap = max(relative(adapter(ids), module(ids).logits) for ids in rows)
    yield f"transformers: {gap:.1e} of the largest logit, {sum(map(len, made))} tokens and prompts"
    same = 0
    for prompt, ours in zip(prompts, made, strict=True):
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        out = module.generate(
            given, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=10**7
        )
        same += out[0, len(prompt) :].tolist() == ours
    yield f"transformers: {same} of {len(prompts)} greedy continuations of {new} tokens equal"
    with TemporaryDirectory() as place:
        yield opened(adapter, module, rows[0], Path(place) / "folder", "AutoModelForCausalLM")
        if not installed("xllamacpp"):
            yield "llama.cpp: xllamacpp is not installed"
            return
        del module
        file, kind = Path(place) / "f32.gguf", "its numbers in float32"
        if path.is_file():
            yield f"llama.cpp, this file: {beside(adapter, path, texts, prompts, made)}"
            unpacked(path, file)
        else:
            export_gguf(adapter, file)
            kind = "our float32 export"
        yield f"llama.cpp, {kind}: {beside(adapter, file, texts, prompts, made)}"


def unpacked(path: Path, out: Path) -> None:
    """Write a GGUF file again with the library alone: tensors in float32, all else as it is."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {field.name: field for field in reader.fields.values()}
    writer = gguf.GGUFWriter(out, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def greedy(adapter: NativeAdapter, prompt: Sequence[int], new: int) -> list[int]:
    """Return the most likely tokens, ends among them."""
    spec = DecodeSpec(max_new_tokens=new)
    return list(generate_batch(adapter.stepper(), [list(prompt)], spec=spec)[0].tokens)


def beside(
    adapter: NativeAdapter,
    file: Path,
    given: Sequence[str],
    prompts: list[list[int]],
    made: list[list[int]],
) -> str:
    """Compare with llama.cpp's continuation of the texts, which it cuts into tokens itself."""
    new = len(made[0])
    ends = end_ids(adapter.tokenizer)
    texts, tokens, total, least = 0, 0, 0, 0.0
    found = completions(file, given, new=new, context=256)
    for (words, steps), prompt, ours in zip(found, prompts, made, strict=True):
        ids = [step["id"] for step in steps]
        wanted = ours[: len(ids)]
        total += len(ids)
        if ids == wanted and (len(ids) == new or ours[len(ids)] in ends):
            texts += words == adapter.tokenizer.decode([i for i in ids if i not in ends])
            tokens += len(ids)
            continue
        pairs = zip(ids, wanted, strict=True)
        first = next((t for t, (one, two) in enumerate(pairs) if one != two), len(ids))
        tokens += first
        logs = torch.log_softmax(adapter(torch.tensor([[*prompt, *ours[:first]]]))[0, -1], -1)
        if first < len(ids):
            least = max(least, float(logs[ours[first]] - logs[ids[first]]))
    parted = f"; where they part, its token is {least:.4f} nats less likely here" if least else ""
    return f"{texts} of {len(made)} texts equal, {tokens} of {total} tokens{parted}"


# --- encoders -------------------------------------------------------------------------------------


def encoder(adapter: NativeAdapter, path: Path) -> Iterator[str]:
    """Tokens, states and cosines of an encoder."""
    import transformers

    module = theirs(path, "AutoModel")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    own: Any = adapter.tokenizer
    same = sum(own.encode_marked(s)[0] == tokenizer(s)["input_ids"] for s in SENTENCES)
    yield f"transformers: tokens of {same} of {len(SENTENCES)} sentences equal"
    given = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    real = given["attention_mask"].bool()
    states = module(**given).last_hidden_state
    ours = adapter.model.hidden(adapter.model.inputs(Inputs(given["input_ids"], real)))
    yield f"transformers: {relative(ours[real], states[real]):.1e} of the largest state"
    mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    cosines = embed(adapter, SENTENCES, pooling="mean").cosines()
    yield f"transformers, mean of states: cosines within {worst(cosines, angles(mean)):.1e}"
    if installed("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        vectors = SentenceTransformer(str(path)).encode(list(SENTENCES), convert_to_tensor=True)
        found = worst(embed(adapter, SENTENCES).cosines(), angles(vectors))
        yield f"sentence-transformers: cosines within {found:.1e}"
    with TemporaryDirectory() as place:
        yield opened(adapter, module, given["input_ids"][:1], Path(place) / "folder", "AutoModel")


# --- both -----------------------------------------------------------------------------------------


def opened(adapter: NativeAdapter, module: Any, ids: Tensor, folder: Path, kind: str) -> str:
    """Export, and let transformers open that folder."""
    import transformers

    made = export_hf(adapter, folder).folder
    again, info = getattr(transformers, kind).from_pretrained(
        made, dtype=torch.float32, output_loading_info=True
    )
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    odd = {key: sorted(info[key])[:3] for key in keys if info[key]}
    results = [each.eval()(ids)[0] for each in (again, module)]
    words = "; ".join(f"{key}: {', '.join(names)}" for key, names in odd.items())
    return (
        f"exported and opened by transformers: {words or 'nothing missing or unexpected'}, "
        f"{relative(*results):.1e} of the largest result"
    )


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the worst difference as a share of the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def angles(vectors: Tensor) -> np.ndarray:
    """Return the cosines between all vectors."""
    unit = torch.nn.functional.normalize(vectors.float().cpu(), dim=-1)
    return (unit @ unit.T).numpy()


def worst(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference."""
    return float(np.abs(ours - theirs).max())
