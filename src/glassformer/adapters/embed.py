"""Sentence vectors: `embed(model, texts)` gives one vector for each text, from any model.

Hidden states after the last norm are read at one position or averaged over the real tokens: as the
folder says where it came from sentence-transformers (`adapters.sentence`), else the mean for
attention in both directions and the last token for causal attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.folder.origin import origin_of
from glassformer.adapters.generate import evaluating
from glassformer.adapters.sentence import Pooling, SentenceModel, read_sentence_model
from glassformer.adapters.tokenizers.folder_tokenizer import FolderTokenizer
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.inputs import Inputs
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, repr=False)
class Embeddings:
    """`vectors` (N, D) float32, one row for each text; `tokens` read of each, marks included.

    `pooling` says where they were read, `normalized` whether their length is 1, `limit` how many
    tokens of a text are read at most, `shortened` how many texts were longer.
    """

    vectors: NDArray[np.float32]
    tokens: tuple[int, ...]
    pooling: str
    normalized: bool
    limit: int
    shortened: int = 0

    def __repr__(self) -> str:
        count, width = self.vectors.shape
        cut = f", {self.shortened} shortened to {self.limit} tokens" if self.shortened else ""
        scaled = "of length 1" if self.normalized else "as they are"
        many = "1 vector" if count == 1 else f"{count} vectors"
        return f"<Embeddings: {many} of {width} numbers, {self.pooling}, {scaled}{cut}>"

    def cosines(self) -> NDArray[np.float32]:
        """Return (N, N): the cosine of the angle between every two vectors."""
        lengths = np.linalg.norm(self.vectors, axis=1, keepdims=True)
        unit = self.vectors / np.where(lengths > 0, lengths, 1)
        return np.asarray(unit @ unit.T, dtype=np.float32)


def embed(
    model: BaseAdapter,
    texts: str | Sequence[str],
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
    max_length: int | None = None,
    batch: int = 32,
) -> Embeddings:
    """Return a vector for each text; equal texts have a cosine of 1.

    `pooling` is mean, first, last, max, mean_sqrt or weighted_mean; None: what the model's folder
    says, else mean (last for causal attention). A text of more than `max_length` tokens is
    shortened; None: the folder's limit (`max_seq_length`), the model's context at most.
    """
    if no_vectors(model):
        raise InputError(no_vectors(model), hint="give an encoder or a decoder")
    spec, tokenizer = model.spec, model.get_tokenizer()
    if tokenizer is None:
        raise InputError("the model has no tokenizer", hint="model.with_tokenizer(...)")
    given = [texts] if isinstance(texts, str) else list(texts)
    if not given:
        raise InputError("no text", hint="give at least one")
    at_least("batch", batch)
    if max_length is not None:
        at_least("max_length", max_length)
    sentence = sentence_model(spec, model.origin).with_pooling(pooling)
    limit = min(max_length or sentence.max_length or spec.max_seq_len, spec.max_seq_len)
    if sentence.lower_case and isinstance(tokenizer, FolderTokenizer):
        tokenizer = tokenizer.lower_case
    rows = [_ids(tokenizer, sentence.prompt + text, limit) for text in given]
    prompt_tokens = _prompt_tokens(tokenizer, sentence, limit)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    vectors = np.empty((len(rows), sentence.width(spec.d_model)), np.float32)
    with evaluating(model), torch.no_grad():
        for start in range(0, len(order), batch):
            here = order[start : start + batch]
            inputs = _padded([rows[i][0] for i in here])
            hidden_BTD = model.hidden_states(inputs).cpu()
            assert inputs.valid_BT is not None
            read = sentence.vectors(
                hidden_BTD, inputs.valid_BT, prompt_tokens=prompt_tokens, normalize=normalize
            )
            vectors[here] = read.numpy()
    return Embeddings(
        vectors,
        tuple(len(ids) for ids, _ in rows),
        "+".join(sentence.poolings or ()),
        normalize,
        limit,
        sum(cut for _, cut in rows),
    )


def no_vectors(model: BaseAdapter) -> str:
    """Return why `embed` reads no vectors from a model, or ""."""
    if model.spec.encoder is not None:
        return "vectors of an encoder-decoder are not read here"
    return ""


def vector_width(model: BaseAdapter) -> int:
    """Return how many numbers a vector of this model has."""
    return sentence_model(model.spec, model.origin).width(model.spec.d_model)


def vector_limit(model: BaseAdapter) -> int:
    """Return how many tokens of a text are read at most, marks included."""
    own = sentence_model(model.spec, model.origin).max_length
    return min(own or model.spec.max_seq_len, model.spec.max_seq_len)


def sentence_model(spec: ModelSpec, origin: Path | None) -> SentenceModel:
    """Return what is done around a model: its folder's own, with what is usual for the rest."""
    folder = None if origin is None else origin_of(origin)
    found = SentenceModel() if folder is None else read_sentence_model(folder)
    if found.poolings is not None:
        return found
    causal = any(block.mixer.causal for block in spec.decoder.blocks())
    return replace(found, poolings=("last",) if causal else ("mean",))


def _prompt_tokens(tokenizer: Tokenizer, sentence: SentenceModel, limit: int) -> int:
    """Return how many tokens a text's prompt has: with the mark before it, not the one after."""
    if not sentence.prompt or sentence.pools_prompt:
        return 0
    ids, _ = _ids(tokenizer, sentence.prompt, limit)
    if isinstance(tokenizer, FolderTokenizer) and ids[-1] in tokenizer.special_ids:
        return len(ids) - 1
    return len(ids)


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
