"""How a corpus is prepared, as a value: `glass prepare`, `gf.prepare` and `task.path` share it."""

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.options import check_options, option
from glassformer.spec.units import parse_count, parse_share

#: Tokenizers that are made for a corpus; any other name is that of a model, run or corpus.
OWN_TOKENIZERS = ("bpe", "bytes", "characters")
#: The smallest byte-pair vocabulary: 256 bytes and the end of a document.
SMALLEST_VOCABULARY = 257


@spec
class PrepareSpec:
    """What becomes of the documents of a corpus on their way to token shards.

    Everything that the shards depend on besides the text: the same spec and the same text give the
    same bits, on any machine and however often the work was interrupted.
    """

    tokenizer: str = option(
        "bpe",
        help="bpe, bytes or characters: made for this text; or a model, run or prepared corpus "
        "whose tokens to use.",
        metavar="NAME|MODEL",
    )
    vocab_size: int = option(
        16_000,
        help="Tokens of a bpe tokenizer made for this text, the end of a document included.",
        at_least=SMALLEST_VOCABULARY,
        parse=parse_count,
        metavar="N",
    )
    sample: int = option(
        32_000_000,
        help="Bytes of text that a bpe tokenizer is trained on, from the beginning of every file.",
        at_least=1_000,
        parse=parse_count,
        metavar="BYTES",
    )
    held_out: float = option(
        0.05,
        help="Share of the documents that validate; a hash of the document decides.",
        above=0.0,
        at_most=0.5,
        parse=parse_share,
        metavar="SHARE",
    )
    seed: int = option(0, help="Part of that hash: another seed holds out other documents.")
    text_field: str = option(
        "text", help="The key of JSON lines, or the column of a table, that holds the text."
    )
    shard_size: int = option(
        256_000_000,
        help="Bytes of text in a shard; what a kill interrupts is read again from its beginning.",
        at_least=1_000,
        parse=parse_count,
        metavar="BYTES",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("tokenizer", "text_field"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty", hint="leave it out for the default")
