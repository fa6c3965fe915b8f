"""`.tiktoken` files: byte strings and their ranks, turned into the pieces and merges of BPE.

A token's rank is also the order in which it was merged, so the pair that made it is what remains
of its bytes when every merge of a lower rank has been done.
"""

import base64
import binascii
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from glassformer.adapters.folder.files import read_text
from glassformer.spec.errors import FileError

MOST_TOKENS = 1_000_000
LONGEST_TOKEN = 1_024

#: Qwen-1 numbers its special tokens after its ranks, and names them in code, not in a file.
QWEN_1_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
)


def pieces_of_ranks(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return pieces by id and merges in order, spelled as in byte-level BPE."""
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    return vocab, [(spelled[left], spelled[right]) for left, right in merges_of(ranks)]


def read_ranks(path: Path, *, limit: int) -> dict[bytes, int]:
    """Read lines of a base64 token and its rank; all 256 bytes must occur, ranks without gaps."""
    ranks: dict[bytes, int] = {}
    lines = read_text(path, limit=limit).split("\n")
    if len(lines) > MOST_TOKENS:
        raise FileError(f"more than {MOST_TOKENS:,} tokens", where=str(path))
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        where = f"{path}, line {number + 1}"
        try:
            token, rank = line.split()
            piece = base64.b64decode(token, validate=True)
            place = int(rank)
        except (ValueError, binascii.Error) as error:
            raise FileError("not a token in base64 and its rank", where=where) from error
        if not piece or len(piece) > LONGEST_TOKEN or piece in ranks:
            raise FileError("a token that is empty, too long or there twice", where=where)
        ranks[piece] = place
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise FileError("the ranks have gaps, or two are equal", where=str(path))
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise FileError("not all of the 256 bytes are tokens", where=str(path))
    return ranks


def merges_of(ranks: dict[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """Return the pair that made each token: its bytes after merging all lower ranks."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            best = min(found)
            if best >= rank:
                break
            place = found.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]
        elif len(parts) > 2:
            raise FileError(f"no two tokens make token {rank}")


def byte_letters() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]
