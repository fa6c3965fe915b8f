"""Tasks as values: what a model is trained on. `data` builds the examples that they describe.

`PrepareSpec` is how a corpus is prepared: `glass prepare`, `gf.prepare` and `task.path` share it.
"""

from pathlib import Path
from typing import Literal

from glassformer.spec.checks import at_least, one_of, positive, size, spec
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.machines import MachineTable
from glassformer.spec.options import check_options, option
from glassformer.spec.own import OwnTask, OwnTokenizer, installed_parts, is_source
from glassformer.spec.units import parse_count, parse_share

#: The least share of a corpus in a mixture: a row in every few thousand.
SMALLEST_SHARE = 0.001
#: The longest example that is made, the most of them, and the most symbols.
LONGEST, MOST_EXAMPLES, MOST_SYMBOLS = 65_536, 100_000_000, 1_000_000
OPERATIONS = ("FIRST", "SECOND", "LAST", "MAX", "MIN", "LENGTH", "SUM")


def _lengths(shortest: int, longest: int, *, least: int = 1, longer: int = 0) -> None:
    at_least("min_length", shortest, least)
    at_least("max_length", longest, 1, most=LONGEST)
    at_least("longer", longer, 0, most=LONGEST)
    if longest < shortest:
        raise InputError(
            f"max_length {longest} is below min_length {shortest}",
            hint=f"the nearest valid max_length is {shortest}",
        )


@spec
class DigitsTask:
    """An operation and digits in, one digit out; SUM is modulo 10."""

    min_length: int = 2
    max_length: int = 6
    examples: int = 10_000
    operations: tuple[str, ...] = OPERATIONS
    seed: int = 0

    def __post_init__(self) -> None:
        _lengths(self.min_length, self.max_length, least=2)
        if self.max_length > 9:
            raise InputError(
                f"max_length {self.max_length}: LENGTH must be one digit", hint="9 is the largest"
            )
        at_least("examples", self.examples, 10, most=MOST_EXAMPLES)
        for operation in self.operations:
            one_of("operation", operation, OPERATIONS)
        if not self.operations or len(set(self.operations)) < len(self.operations):
            raise InputError("operations must be named once each, and at least one")


Rearrangement = Literal["copy", "reverse", "sort"]


@spec
class SequenceTask:
    """Symbols in, the same symbols copied, reversed or sorted out.

    `vocab_size` counts PAD, BOS and EOS too. `longer` further lengths form the split that tests
    generalisation.
    """

    operation: Rearrangement = "reverse"
    vocab_size: int = 20
    min_length: int = 4
    max_length: int = 10
    examples: int = 20_000
    longer: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("vocab_size", self.vocab_size, 5, most=MOST_SYMBOLS)
        _lengths(self.min_length, self.max_length, longer=self.longer)
        at_least("examples", self.examples, 10, most=MOST_EXAMPLES)


@spec
class FsmTask:
    """Walks of a finite-state machine, with the state and class at each position.

    `machine` is `parity`, `mod-K`, `permutations-N`, `brackets-D`, `random-N` (N states, `symbols`
    symbols, sampled with `machine_seed`), `partial-N` (the same, but not every symbol is legal in
    every state), `regex:PATTERN`, or a machine of your own: a `MachineTable`, as a setting also
    FILE.json.
    `order` "uniform" makes every legal symbol equally likely; "weighted" samples weights for each
    state; a machine that has probabilities keeps them. Walks are cut after `max_length` symbols,
    and `longer` ones later.
    """

    machine: str | MachineTable = "parity"
    symbols: int = 3
    machine_seed: int = 0
    order: Literal["uniform", "weighted"] = "weighted"
    min_length: int = 1
    max_length: int = 16
    examples: int = 20_000
    longer: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("symbols", self.symbols, 2, most=MOST_SYMBOLS)
        _lengths(self.min_length, self.max_length, longer=self.longer)
        at_least("examples", self.examples, 10, most=MOST_EXAMPLES)


@spec
class RecallTask:
    """Associative recall: pairs of a key and a value, then each key again, to be answered.

    There are `keys` keys, of which an example has `min_pairs` to `max_pairs`, and `values` values;
    `longer` larger numbers of pairs form the split that tests generalisation.
    """

    min_pairs: int = 2
    max_pairs: int = 8
    keys: int = 32
    values: int = 16
    examples: int = 20_000
    longer: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("min_pairs", self.min_pairs, 1)
        at_least("max_pairs", self.max_pairs, self.min_pairs, most=LONGEST)
        at_least("longer", self.longer, 0, most=LONGEST)
        at_least("keys", self.keys, self.max_pairs + self.longer, most=MOST_SYMBOLS)
        at_least("values", self.values, 2, most=MOST_SYMBOLS)
        at_least("examples", self.examples, 10, most=MOST_EXAMPLES)


@spec
class CopyingTask:
    """Selective copying: `marked` symbols among blanks, to be written again in their order.

    The number of positions before the answer is the length; `longer` further ones form the split
    that tests generalisation.
    """

    marked: int = 6
    symbols: int = 8
    min_length: int = 12
    max_length: int = 32
    examples: int = 20_000
    longer: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("marked", self.marked, 1)
        at_least("symbols", self.symbols, 2, most=MOST_SYMBOLS)
        _lengths(self.min_length, self.max_length, least=self.marked, longer=self.longer)
        at_least("examples", self.examples, 10, most=MOST_EXAMPLES)


@spec
class HopsTask:
    """Chained induction: find the latest earlier copy of a symbol, step one on, `hops` times over.

    The label of a position is the symbol where the chain ends.
    """

    hops: int = 2
    symbols: int = 8
    min_length: int = 16
    max_length: int = 48
    examples: int = 20_000
    longer: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("hops", self.hops, 1, most=1_000)
        at_least("symbols", self.symbols, 3, most=MOST_SYMBOLS)
        _lengths(self.min_length, self.max_length, least=2, longer=self.longer)
        at_least("examples", self.examples, 10, most=MOST_EXAMPLES)


@spec
class TextTask:
    """Next-token prediction over the text of a file or folder; no path: Python's own manuals.

    `path` is text, Markdown, JSON lines (the text under `text_field`), a table, a saved dataset, or
    a corpus that `glass prepare` made; `mixture` names several of those, `FOLDER=WEIGHT`.
    `vocab_size` is that of BPE; characters and bytes have a size of their own. `tokenizer` may be a
    user's own. `packing`: documents that share a row are kept `apart`, or `joined`; by default text
    in memory is joined, and a corpus kept apart.
    """

    path: str = ""
    tokenizer: Literal["characters", "bytes", "bpe"] | OwnTokenizer = "bpe"
    vocab_size: int = 2_000
    length: int = 128
    held_out: float = 0.1
    seed: int = 0
    mixture: tuple[str, ...] = ()
    packing: Literal["apart", "joined"] | None = None
    text_field: str = "text"

    def __post_init__(self) -> None:
        size("vocab_size", self.vocab_size, 256 if self.tokenizer == "bpe" else 2)
        size("length", self.length, 2)
        positive("held_out", self.held_out)
        if self.held_out > 0.5:
            raise InputError(f"held_out {self.held_out} is more than half of the text", hint="0.1")
        if self.mixture and self.path:
            raise InputError(
                "a path and a mixture", hint="give the corpora in task.mixture, and no task.path"
            )
        self.shares()

    def shares(self) -> tuple[tuple[str, float], ...]:
        """Return the corpora of the mixture with their weights; 1 where none is given."""
        found: dict[str, float] = {}
        for text in self.mixture:
            path, equals, weight = text.rpartition("=")
            path, weight = (path, weight) if equals else (text, "1")
            value = parse_share(f"the weight of {path}", weight)
            positive(f"the weight of {path}", value)
            if not path or path in found:
                raise InputError(
                    f"the mixture names {path or 'nothing'} {'twice' if path else ''}".rstrip(),
                    hint='task.mixture=["corpora/prose=3","corpora/code=1"]',
                )
            found[path] = value
        smallest = min(found.values(), default=1.0) / (sum(found.values()) or 1.0)
        if smallest < SMALLEST_SHARE:
            raise InputError(
                f"a weight is {smallest:.2g} of all", hint=f"{SMALLEST_SHARE} is the least"
            )
        return tuple(found.items())


LANGUAGES = ("de", "en", "es", "fr")


@spec
class TranslationTask:
    """Numbers and dates between figures and the words of two languages, every way round.

    Numbers have 1 to `digits` digits, dates cover complete years; half of the `examples` are of
    each kind, and no number or date occurs twice. `pieces` is the vocabulary's size.
    """

    languages: tuple[str, ...] = ("en", "de")
    digits: int = 6
    first_year: int = 1900
    last_year: int = 2099
    examples: int = 60_000
    pieces: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        for language in self.languages:
            one_of("language", language, LANGUAGES)
        if len(set(self.languages)) != 2 or len(self.languages) != 2:
            raise InputError(
                f"languages {', '.join(self.languages)}: two different ones are needed",
                hint='task.languages=["en","de"]',
            )
        at_least("digits", self.digits)
        if self.digits > 6:
            raise InputError(f"digits {self.digits}: words end at 999,999", hint="6 is the most")
        at_least("first_year", self.first_year, 1000)
        at_least("last_year", self.last_year, self.first_year)
        if self.last_year > 9999:
            raise InputError(f"last_year {self.last_year} has five digits", hint="9999 is the last")
        at_least("examples", self.examples, 100, most=MOST_EXAMPLES)
        at_least("pieces", self.pieces, 259, most=MOST_SYMBOLS)


@spec
class FinetuneTask:
    """Chats, prompts with completions, or plain text, in the tokens of the model that is tuned.

    `path`: JSON lines with `messages`, `prompt` and `completion`, or `text`; other files are text.
    An example has at most `length` positions: an answer is cut there, and the cut is reported; text
    goes on in the next example. `packing` puts several into one row, which do not see each other.
    `answers_only`: the user's turns are read, but not trained on.
    """

    path: str
    length: int = 512
    packing: bool = True
    answers_only: bool = True
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise InputError("no data to fine-tune on", hint="data=FILE")
        size("length", self.length, 2)
        positive("held_out", self.held_out)
        if self.held_out > 0.5:
            raise InputError(f"held_out {self.held_out} is more than half of the data", hint="0.1")


Task = (
    DigitsTask
    | SequenceTask
    | FsmTask
    | RecallTask
    | CopyingTask
    | HopsTask
    | TextTask
    | TranslationTask
    | FinetuneTask
    | OwnTask
)

#: Tasks that `glass train NAME` knows; `data.build_task` builds them.
NAMED_TASKS: dict[str, Task] = {
    "digits": DigitsTask(),
    "copy": SequenceTask(operation="copy"),
    "reverse": SequenceTask(operation="reverse"),
    "sort": SequenceTask(operation="sort"),
    "translate": TranslationTask(),
    "parity": FsmTask(machine="parity"),
    "mod-3": FsmTask(machine="mod-3"),
    "brackets": FsmTask(machine="brackets-4"),
    "fsm": FsmTask(machine="random-4", max_length=32),
    "permutations": FsmTask(machine="permutations-5", order="uniform", max_length=24),
    "recall": RecallTask(),
    "selective-copy": CopyingTask(),
    "hops": HopsTask(),
    "text": TextTask(),
}

#: What `glass train NAME` knows, in a line each: the tasks above, and the recipes that
#: `lab.recipes` makes of them.
TASK_SUMMARIES: dict[str, str] = {
    "digits": "answer FIRST, LAST, MAX, SUM ... of a few digits",
    "copy": "write a row of symbols again; encoder-decoder",
    "reverse": "write a row of symbols backwards; encoder-decoder",
    "sort": "write a row of symbols in order; encoder-decoder",
    "translate": "figures, English and German words for numbers and dates",
    "parity": "follow a two-state machine, with exact answers",
    "mod-3": "follow a machine that counts modulo 3, with exact answers",
    "brackets": "follow nested brackets, four deep, with exact answers",
    "fsm": "follow a random machine of four states, with exact answers",
    "permutations": "compose swaps of five things, 120 states, exact answers",
    "recall": "pairs of key and value, then the keys: which value was it?",
    "selective-copy": "write the symbols again that stood among blanks",
    "hops": "look up what followed last time, twice in a row",
    "text": "predict a text: Python's manuals, or task.path=PATH",
    "lm": "a language model of 0.3 M parameters, minutes on a CPU",
    "lm-modern": "the same with rotary positions and grouped keys",
    "lm-moe": "the same with a mixture of experts",
    "lm-10m": "the same with 10 M parameters, for a GPU",
    "finetune": "train a model further: glass finetune MODEL FILE",
}


def is_config(what: object) -> bool:
    """Return True if this names a file, not a task."""
    return str(what).endswith((".toml", ".json"))


def check_task_name(name: str) -> None:
    """Refuse what is neither a task, nor a config file, nor a source or part of the user's own."""
    file, _, _ = name.rpartition(":")
    if file.endswith(".py") and not Path(file).is_file():
        raise InputError(f"there is no file {file}", where=name)
    if name in TASK_SUMMARIES or is_config(name) or is_source(name):
        return
    own = installed_parts()
    if name not in own:
        raise InputError(f"no task '{name[:80]}'", hint=nearest(name, [*TASK_SUMMARIES, *own]))


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
        hint="0.05 holds out one document in twenty",
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
