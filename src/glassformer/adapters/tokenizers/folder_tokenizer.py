"""`read_tokenizer(folder)`: the tokenizer of a model's folder, behind our own protocol.

Ids are the folder's own. A model may have more ids than the tokenizer has tokens (its table is
padded to a round number): those decode to nothing and are listed in `unnamed`, so that decoding
can leave them out. A sequence may end with any of `eos_ids`.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers import models, normalizers

from glassformer.adapters.folder.files import need_folder, read_eos, read_sidecar
from glassformer.adapters.tokenizers.files import CONFIG, MOST_TOKENS, raise_if_panic, read_engine
from glassformer.data.tokenizers.vocab import Tokenizer, known_id, utf8
from glassformer.spec.errors import FileError

NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


def read_tokenizer(folder: Path) -> "FolderTokenizer":
    """Read `tokenizer.json`, or the older files in its place, and their sidecars.

    `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and `config.json`
    say which tokens begin, end and pad a text, and how many ids the model has.
    """
    need_folder(folder)
    engine = read_engine(folder)
    config = read_sidecar(folder, CONFIG)
    names = special_names(folder)
    if not names and engine.token_to_id("<|extra_0|>") is not None:
        names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}  # Qwen-1 names none
    size = read_sidecar(folder, "config.json").get("vocab_size", 0)
    if type(size) is not int or not 0 <= size <= 4 * MOST_TOKENS:
        raise FileError(f"vocab_size {str(size)[:40]!r}", where=str(folder / "config.json"))
    return FolderTokenizer(
        engine,
        names=names,
        eos_ids=read_eos(folder),
        model_ids=size,
        adds_bos=config.get("add_bos_token"),
        target_start=read_target_start(folder, max(size, 1)),
        where=str(folder),
    )


def read_target_start(folder: Path, size: int) -> tuple[int, ...]:
    """Return what an encoder-decoder's answers begin with: its start token, and a forced first."""
    found = read_sidecar(folder, "config.json") | read_sidecar(folder, "generation_config.json")
    if not read_sidecar(folder, "config.json").get("is_encoder_decoder"):
        return ()
    start = found.get("decoder_start_token_id")
    if start is None:
        return ()
    forced = found.get("forced_bos_token_id")
    ids = (start,) if forced is None else (start, forced)
    if not all(type(i) is int and 0 <= i < size for i in ids):
        raise FileError(f"answers begin with {str(ids)[:40]}", where=str(folder))
    return ids


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return all ids at which a text ends."""
    if isinstance(tokenizer, FolderTokenizer) and tokenizer.eos_ids:
        return tokenizer.eos_ids
    return () if tokenizer.eos is None else (tokenizer.eos,)


def nameless_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a model's table that its tokenizer has no text for."""
    return tokenizer.unnamed if isinstance(tokenizer, FolderTokenizer) else ()


def special_names(folder: Path) -> dict[str, str]:
    """Return the texts of `eos_token`, `bos_token` and the like."""
    found = _names(read_sidecar(folder, "special_tokens_map.json"))
    return found | _names(read_sidecar(folder, CONFIG))


def _names(found: dict[str, Any]) -> dict[str, str]:
    """Return the texts of named special tokens, written plain or as `{"content": …}`."""
    made = {}
    for name in NAMED:
        value = found.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            made[name] = text
    return made


class FolderTokenizer:
    """A `Tokenizer` over an engine of the `tokenizers` library, with the folder's special tokens.

    `bos` is the id that texts really begin with, None where nothing is put before them, whatever
    token is named; `encode` never adds it. Special tokens inside a text become their ids.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        names: dict[str, str],
        eos_ids: tuple[int, ...] = (),
        model_ids: int = 0,
        adds_bos: bool | None = None,
        target_start: tuple[int, ...] = (),
        where: str = "",
    ) -> None:
        self._engine = engine
        #: What an encoder-decoder's answers begin with; empty for other models.
        self.target_start = target_start
        self._where = where
        self.names = names
        known = engine.get_vocab(with_added_tokens=True)
        self._size = max(known.values()) + 1
        #: How many ids may be decoded: the model's, if it has more than there are tokens.
        self.model_ids = max(self._size, model_ids)
        self.unnamed = tuple(sorted(set(range(self.model_ids)) - set(known.values())))
        self._named = {name: self._id_of(name, text) for name, text in names.items()}
        ending = eos_ids or tuple(i for i in (self._named.get("eos_token"),) if i is not None)
        for i in ending:
            if i >= self.model_ids:
                raise FileError(f"eos token id {i} of {self.model_ids} ids", where=where)
        self.eos_ids = ending
        self._bos = self._begins(adds_bos)
        spelled = {f"<0x{byte:02X}>": byte for byte in range(256)}
        #: The byte that each token stands for, where the tokenizer falls back to bytes.
        self._bytes = {known[token]: byte for token, byte in spelled.items() if token in known}
        if isinstance(engine.model, models.BPE) and not engine.model.byte_fallback:
            self._bytes = {}

    def _id_of(self, name: str, text: str) -> int:
        found = self._engine.token_to_id(text)
        if found is None:
            raise FileError(f"{name} {text[:60]!r} is no token of the tokenizer", where=self._where)
        return int(found)

    def _begins(self, adds_bos: bool | None) -> int | None:
        if adds_bos is not None:
            return self._named.get("bos_token") if adds_bos else None
        begun: list[int] = self._ids("", special=True)
        return begun[0] if begun and begun[0] == self._named.get("bos_token") else None

    @cached_property
    def lower_case(self) -> "FolderTokenizer":
        """The same tokenizer, which writes a text in lower case first."""
        twin = copy.copy(self)
        twin.__dict__.pop("lower_case", None)
        engine = Engine.from_str(self._engine.to_str())
        own = [] if engine.normalizer is None else [engine.normalizer]
        engine.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        twin._engine = engine
        return twin

    @property
    def vocab_size(self) -> int:
        """The highest id that has a token, plus one."""
        return self._size

    @property
    def pad(self) -> int | None:
        """The id that fills short rows up."""
        return self._named.get("pad_token")

    @property
    def mask(self) -> int | None:
        """The id that stands for a hidden token, of a model that fills them in."""
        return self._named.get("mask_token")

    @property
    def bos(self) -> int | None:
        """The id that is put before every text, or None."""
        return self._bos

    @property
    def eos(self) -> int | None:
        """The id that ends a text; `eos_ids` holds all of them."""
        own = self._named.get("eos_token")
        return self.eos_ids[0] if own is None and self.eos_ids else own

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        added = self._engine.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; nothing is added before or after it."""
        utf8(text)
        return self._ids(text, special=False)

    def encode_marked(
        self, text: str, second: str | None = None, *, limit: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a text (or a pair) with the marks that the folder puts around it.

        `[CLS] text [SEP]` of BERT, `text </s>` of T5; beside them the type of each token: 0, and 1
        in the second text. With a `limit`, a text's end gives way, not its marks.
        """
        utf8(text)
        utf8(second or "")
        try:
            if limit is None or second is not None:
                found = self._engine.encode(text, second)
            else:
                found = self._engine.encode(text, add_special_tokens=False)
                found.truncate(max(limit - self._engine.num_special_tokens_to_add(False), 0))
                found = self._engine.post_process(found)
        except BaseException as error:
            raise_if_panic(error, where=self._where)
            raise
        return list(found.ids), list(found.type_ids)

    def encode_source(self, text: str) -> list[int]:
        """Return the ids of a source text, with the marks around it."""
        return self.encode_marked(text)[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, on all cores."""
        for text in texts:
            utf8(text)
        try:
            found = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            raise_if_panic(error, where=self._where)
            raise
        return [each.ids for each in found]

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            ids: list[int] = self._engine.encode(text, add_special_tokens=special).ids
        except BaseException as error:
            raise_if_panic(error, where=self._where)
            raise
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included; U+FFFD for an incomplete character."""
        known = [known_id(i, self.model_ids) for i in ids]
        try:
            if not self._bytes or not any(i in self._bytes for i in known):
                text: str = self._engine.decode(known, skip_special_tokens=False)
                return text
            return self._with_bytes(known)
        except BaseException as error:
            raise_if_panic(error, where=self._where)
            raise

    def _with_bytes(self, ids: list[int]) -> str:
        """Decode byte tokens so that a bad byte spoils only itself, not its complete run.

        So the text of a longer sequence begins with the text of a shorter one, up to an incomplete
        character, which streaming relies on.
        """
        tokens: list[str] = []
        run = bytearray()
        for i in [*ids, None]:
            if i is not None and i in self._bytes:
                run.append(self._bytes[i])
                continue
            if run:
                tokens.append(run.decode("utf-8", errors="replace"))
                run.clear()
            token = None if i is None else self._engine.id_to_token(i)
            if token is not None:
                tokens.append(token)
        decoder = self._engine.decoder
        text: str = " ".join(tokens) if decoder is None else decoder.decode(tokens)
        return text

    def to_json(self) -> str:
        """Return the library's own JSON."""
        text: str = self._engine.to_str(pretty=False)
        return text + "\n"
