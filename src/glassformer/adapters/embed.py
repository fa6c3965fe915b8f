"""Sentence vectors: `embed(model, texts)` gives one vector for each text, from any model.

Hidden states after the last norm are read at one position or averaged over the real tokens: as the
folder says where it came from sentence-transformers (`1_Pooling/config.json`), else the mean for
attention in both directions and the last token for causal attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.folder.files import read_sidecar
from glassformer.adapters.folder.origin import origin_of
from glassformer.adapters.native import NativeAdapter
from glassformer.adapters.tokenizers.folder_tokenizer import FolderTokenizer
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.generate import evaluating
from glassformer.models.inputs import Inputs
from glassformer.nn.embedding import read_out
from glassformer.spec.checks import at_least, one_of
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import ModelSpec, Readout

POOLING = "1_Pooling/config.json"
#: sentence-transformers' words for where a vector is read.
MODES: dict[str, Readout] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """`vectors` (N, D) float32, one row for each text; `tokens` read of each, marks included.

    `pooling` says where they were read, `normalized` whether their length is 1, `shortened` how
    many texts were longer than the model's context.
    """

    vectors: NDArray[np.float32]
    tokens: tuple[int, ...]
    pooling: Readout
    normalized: bool
    shortened: int = 0

    def cosines(self) -> NDArray[np.float32]:
        """Return (N, N): the cosine of the angle between every two vectors."""
        lengths = np.linalg.norm(self.vectors, axis=1, keepdims=True)
        unit = self.vectors / np.where(lengths > 0, lengths, 1)
        return np.asarray(unit @ unit.T, dtype=np.float32)


def embed(
    model: BaseAdapter,
    texts: str | Sequence[str],
    *,
    pooling: Readout | None = None,
    normalize: bool = True,
    max_length: int | None = None,
    batch: int = 32,
) -> Embeddings:
    """Return a vector for each text; equal texts have a cosine of 1.

    `pooling` is mean, first or last; None: what the model's folder says, else mean (last for causal
    attention). A text of more than `max_length` tokens (the model's context at most) is shortened.
    """
    if not isinstance(model, NativeAdapter):
        raise InputError(no_vectors(model), hint='backend="native"')
    if no_vectors(model):
        raise InputError(no_vectors(model), hint="give an encoder or a decoder")
    spec, tokenizer = model.spec, model.get_tokenizer()
    if tokenizer is None:
        raise InputError("the model has no tokenizer", hint="model.with_tokenizer(...)")
    given = [texts] if isinstance(texts, str) else list(texts)
    if not given:
        raise InputError("no text", hint="give at least one")
    at_least("batch", batch)
    where = model.origin
    chosen = pooling or pooling_of(spec, where)
    one_of("pooling", chosen, get_args(Readout))
    limit = min(max_length or spec.max_seq_len, spec.max_seq_len)
    rows = [_ids(tokenizer, text, limit) for text in given]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    vectors = np.empty((len(rows), spec.d_model), np.float32)
    with evaluating(model), torch.no_grad():
        for start in range(0, len(order), batch):
            here = order[start : start + batch]
            inputs = model.model.inputs(_padded([rows[i][0] for i in here]))
            hidden_BTD = model.model.hidden(inputs)
            read = read_out(hidden_BTD, inputs.valid_BT, readout=chosen).float()
            if normalize:
                read = torch.nn.functional.normalize(read, dim=-1)
            vectors[here] = read.cpu().numpy()
    return Embeddings(
        vectors,
        tuple(len(ids) for ids, _ in rows),
        chosen,
        normalize,
        sum(cut for _, cut in rows),
    )


def no_vectors(model: BaseAdapter) -> str:
    """Return why `embed` reads no vectors from a model, or ""."""
    if not isinstance(model, NativeAdapter):
        return "vectors are read from our own models"
    if model.spec.encoder is not None:
        return "vectors of an encoder-decoder are not read here"
    return ""


def pooling_of(spec: ModelSpec, origin: Path | None) -> Readout:
    """Return where a model's vectors are read: its folder's word, its vector head's, or usual."""
    folder = None if origin is None else origin_of(origin)
    config: dict[str, Any] = {}
    if folder is not None and folder.is_dir():
        config = read_sidecar(folder, POOLING)
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if on:
        if len(on) > 1 or on[0] not in MODES:
            raise FileError(
                f"{POOLING} reads vectors by {', '.join(on)[:80]}",
                where=str(folder),
                hint=f"read here: {', '.join(MODES)}, one of them",
            )
        return MODES[on[0]]
    causal = any(block.attention.causal for block in spec.decoder.blocks())
    return "last" if causal else "mean"


def _ids(tokenizer: Tokenizer, text: str, limit: int) -> tuple[list[int], bool]:
    """Return the ids of a text with its marks, and whether it was shortened."""
    if isinstance(tokenizer, FolderTokenizer):
        ids, _ = tokenizer.encode_marked(text, limit=limit)
        cut = len(ids) == limit and len(tokenizer.encode_marked(text)[0]) > limit
    else:
        begin = [] if tokenizer.bos is None else [tokenizer.bos]
        full = [*begin, *tokenizer.encode(text)]
        ids, cut = full[:limit], len(full) > limit
    if not ids:
        raise InputError(f"no token in the text {text[:40]!r}", hint="give at least one word")
    return ids, cut


def _padded(rows: Sequence[Sequence[int]]) -> Inputs:
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    valid = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        valid[i, : len(row)] = True
    return Inputs(tokens, valid)
