"""What a model is made of, read off its program: parts in the order of the computation, in words.

The diagram draws this list, the explorer's Model page and `print` show it. A part's parameters are
the manifest's: those whose names begin with the part's key.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

from glassformer.spec.manifest import (
    Parameter,
    count_active_parameters,
    count_parameters,
    manifest,
)
from glassformer.spec.model import ALiBi, ModelSpec, RelativeBias, Sinusoidal
from glassformer.spec.own import OwnPosition
from glassformer.spec.program import (
    Activate,
    Add,
    AddRows,
    Attend,
    Bias,
    Embed,
    Gate,
    Linear,
    Norm,
    Op,
    Program,
    ReadOut,
    Rotate,
    Route,
    block_runs,
    program,
)

Kind = Literal["embed", "position", "norm", "attn", "cross", "ffn", "head"]

# --- what an outline says -------------------------------------------------------------------------


@dataclass(frozen=True)
class Attending:
    """The inside of an attention.

    `treated` is what happens to queries and keys before their scores, `bias` what is added to the
    scores; a crossing one reads the encoder.
    """

    d_model: int
    d_head: int
    op: Attend
    treated: tuple[Norm | Rotate, ...]
    bias: ALiBi | RelativeBias | None
    sinks: bool
    crossing: bool


@dataclass(frozen=True)
class Dense:
    """The inside of a feed-forward: its widths, and its activation or its gate."""

    d_model: int
    d_ff: int
    act: Activate | Gate

    def words(self) -> "ActWords":
        """Say how many matrices lead to d_ff, and what is between them and the last."""
        match self.act:
            case Activate(function=function):
                name = ACTIVATIONS[function]
                return ActWords(1, function, name, name + FORMULAS.get(function, ""))
            case Gate(function=function, limit=limit):
                name, gate = ("SwiGLU", "silu") if function == "silu" else ("GeGLU", "gelu")
                clamped = "" if limit is None else f" clamped at {limit:g}"
                within = "" if limit is None else f", within ±{limit:g}"
                return ActWords(2, name, name + clamped, f"{name}: {gate}(gate) × up{within}")
            case _ as unreachable:
                assert_never(unreachable)


class ActWords(NamedTuple):
    """An activation in words: the matrices before it, a short name, a longer one, a formula."""

    matrices: int
    short: str
    name: str
    formula: str


@dataclass(frozen=True)
class Mixture:
    """The inside of a mixture of experts: its router, an expert, and the shared one."""

    d_model: int
    n_experts: int
    route: Route
    expert: Dense
    shared: Dense | None
    shared_gate: bool


@dataclass(frozen=True)
class Part:
    """One part of a model: `key` is the prefix of its parameters' names, `note` a line on it.

    A part `on_stream` writes the residual stream itself; others branch off it.
    """

    key: str
    kind: Kind
    title: str
    note: str
    parameters: tuple[Parameter, ...] = ()
    tied: str = ""
    on_stream: bool = False
    inside: Attending | Dense | Mixture | None = None

    @property
    def count(self) -> int:
        """Parameters that it owns; tied ones are counted where they are owned."""
        return sum(each.size for each in self.parameters if each.tied_to is None)


@dataclass(frozen=True)
class Layer:
    """Equal blocks that are drawn once: the first one's branches, and how many blocks there are.

    A branch is a sublayer with its norms. `together`: every branch reads the block's input.
    """

    prefix: str
    first: int
    count: int
    branches: tuple[tuple[Part, ...], ...]
    together: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of every branch, in order."""
        return tuple(part for branch in self.branches for part in branch)

    @property
    def parameters(self) -> int:
        """Parameters of one of them."""
        return sum(part.count for part in self.parts)


@dataclass(frozen=True)
class Column:
    """One stack, from its tokens on: what comes before the layers, the layers, what follows."""

    prefix: str
    before: tuple[Part, ...]
    layers: tuple[Layer, ...]
    after: tuple[Part, ...]

    def parts(self) -> Iterator[Part]:
        """Yield every part, in the order of the computation."""
        yield from self.before
        for layer in self.layers:
            yield from layer.parts
        yield from self.after


# --- reading it off the program -------------------------------------------------------------------


def outline(model: ModelSpec, *, every_block: bool = False) -> tuple[Column, ...]:
    """List the parts of a model: a column for a decoder, two for an encoder-decoder."""
    reader = _Reader(model)
    return tuple(reader.column(prefix, every_block=every_block) for prefix in model.stacks())


class _Reader:
    """Groups the operations of a program by the part in which they stand."""

    def __init__(self, model: ModelSpec) -> None:
        self.made: Program = program(model)
        self.writers = {op.writes: op for op in self.made.ops if op.writes is not None}
        self.groups: dict[str, list[Op]] = {}
        for op in self.made.ops:
            if (key := _key(op)) is not None:
                self.groups.setdefault(key, []).append(op)
        self.owned: dict[str, list[Parameter]] = {}
        self.named: dict[str, Parameter] = {}
        for parameter in manifest(model):
            self.named[parameter.name] = parameter
            words = parameter.name.split(".")
            for length in range(1, len(words)):
                self.owned.setdefault(".".join(words[:length]), []).append(parameter)
        self.runs = block_runs(self.made)
        self.rotates = any(isinstance(op.kind, Rotate) for op in self.made.ops)

    def column(self, prefix: str, *, every_block: bool) -> Column:
        """Read one stack; the heads belong to the last."""
        source = prefix == "encoder."
        stream = self.stream(prefix)
        outside = [
            (key, ops)
            for key, ops in self.groups.items()
            if ops[0].layer is None and key.startswith("encoder.") == source
        ]
        heads = (
            () if source else tuple(self.head(key[6:], ops) for key, ops in outside if _heads(key))
        )
        single = [self.part(key, ops, stream) for key, ops in outside if not _heads(key)]
        last = f"{prefix}final_norm"
        before = tuple(part for part in single if part.key != last)
        after = tuple(part for part in single if part.key == last)
        layers: list[Layer] = []
        for run in (run for run in self.runs if run[0].startswith(f"{prefix}blocks.")):
            for names in [(name,) for name in run] if every_block else [run]:
                layers.append(self.layer(prefix, names, stream))
        return Column(prefix, before, tuple(layers), (*after, *heads))

    def stream(self, prefix: str) -> frozenset[str]:
        """Return the values of the residual stream: those that lead to a stack's last state."""
        found: set[str] = set()
        value = self.made.hidden
        if prefix == "encoder.":
            value = next(
                op.writes
                for op in reversed(self.made.ops)
                if op.part.startswith(prefix) and op.writes is not None
            )
        while value in self.writers:
            found.add(value)
            value = self.writers[value].reads[0]
        return frozenset(found)

    def layer(self, prefix: str, names: Sequence[str], stream: frozenset[str]) -> Layer:
        """Read equal blocks: the parts of the first, by the sublayer to which they belong."""
        at = f"{names[0]}."
        branches: dict[str, list[Part]] = {}
        begins: dict[str, str] = {}  # what the first operation of a branch reads
        for key, ops in self.groups.items():
            if key.startswith(at):
                name = key.removeprefix(at).partition("_")[0]
                branches.setdefault(name, []).append(self.part(key, ops, stream))
                begins.setdefault(name, ops[0].reads[0])
        sums = {
            op.writes
            for op in self.made.ops
            if op.writes in stream
            and op.part.startswith(at.removesuffix("."))
            and op.layer is not None
        }
        *others, last = begins.values()
        return Layer(
            prefix=prefix,
            first=int(names[0].rpartition(".")[2]),
            count=len(names),
            branches=tuple(map(tuple, branches.values())),
            together=bool(others) and last not in sums,
        )

    def part(self, key: str, ops: Sequence[Op], stream: frozenset[str]) -> Part:
        """Read one part: its kind by its name, its words by its operations."""
        leaf = key.rpartition(".")[2]
        first = ops[0].kind
        kind: Kind
        inside: Attending | Dense | Mixture | None = None
        tied = ""
        match leaf:
            case "attn" | "cross":
                kind = "attn" if leaf == "attn" else "cross"
                inside = self.attention(ops)
                title = "Self-attention" if leaf == "attn" else "Cross-attention"
                note = self.attention_note(inside)
            case "ffn":
                kind, inside = "ffn", self.feed_forward(key, ops)
                title, note = _inside_words(inside)
            case "embed":
                kind, title, note = "embed", "Token embedding", self.embedding_note(ops)
                tied = "" if ops[0].weights[0].startswith(f"{key}.") else "the encoder's table"
            case _ if isinstance(first, Norm):
                kind, title, note = "norm", norm_name(first), _norm_note(ops[0])
                where = {"embed_norm": "Embedding ", "final_norm": "Final "}
                title = f"{where.get(leaf, '')}{title}"
            case _:
                kind = "position"
                title, note = self.position_words(ops[0])
        return Part(
            key,
            kind,
            title,
            note,
            tuple(self.owned.get(key, ())),
            tied,
            on_stream=ops[-1].writes in stream,
            inside=inside,
        )

    def rows(self, op: Op) -> tuple[int, int]:
        """Return the sizes of the table that an operation reads."""
        rows, columns = self.named[op.weights[0]].shape
        return rows, columns

    def embedding_note(self, ops: Sequence[Op]) -> str:
        """Say how a token becomes a row: looked up, scaled, or by two factors."""
        vocab, width = self.rows(ops[0])
        if len(ops) > 1:
            return f"{vocab:,} × {width} times {width} × {self.width(ops[-1].writes)}"
        note, embed = f"one row of {vocab:,} × {width}", ops[0].kind
        assert isinstance(embed, Embed)
        if embed.scale == 1.0:
            return f"{note} for each token"
        return f"{note}, times {f'√{width}' if embed.scale == width**0.5 else f'{embed.scale:g}'}"

    def position_words(self, op: Op) -> tuple[str, str]:
        """Say what is added to the embedding or to the scores."""
        match op.kind:
            case AddRows(by="type"):
                return "Token types", f"a learned row for each of {self.rows(op)[0]} kinds"
            case AddRows(table=None, offset=offset):
                rows = self.rows(op)[0] - offset
                return "Learned positions", f"a learned row for each of {rows:,} positions"
            case AddRows(table=Sinusoidal()):
                return "Sinusoidal positions", "sines and cosines, not learned"
            case AddRows(table=OwnPosition(class_name=name)):
                return f"Positions: {name}", "a part of yours"
            case Bias(form=RelativeBias(buckets=buckets)):
                note = f"by {buckets} ranges of distance, for the scores of every layer"
                return "Relative position biases", note
            case _:
                raise AssertionError(f"{op.part} is no part of an outline")

    def width(self, value: str | None) -> int:
        """Return the width of a value."""
        return self.made.values[value or ""].width

    def attention(self, ops: Sequence[Op]) -> Attending:
        """Read an attention off its operations."""
        at = next(i for i, op in enumerate(ops) if isinstance(op.kind, Attend))
        op, attend = ops[at], ops[at].kind
        assert isinstance(attend, Attend)
        bias: ALiBi | RelativeBias | None = None
        if len(op.reads) > 1:
            added = self.writers[op.reads[1]].kind
            assert isinstance(added, Bias)
            bias = added.form
        treated: list[Norm | Rotate] = []
        value = op.reads[0]
        while not isinstance(kind := self.writers[value].kind, Linear):
            assert isinstance(kind, Norm | Rotate)
            treated.insert(0, kind)
            value = self.writers[value].reads[0]
        sources = [one.reads[0] for one in ops if isinstance(one.kind, Linear)]
        return Attending(
            d_model=self.width(ops[-1].writes),
            d_head=self.width(op.writes) // attend.heads,
            op=attend,
            treated=tuple(treated),
            bias=bias,
            sinks=bool(op.weights),
            crossing=sources[0] != sources[1],
        )

    def attention_note(self, inside: Attending) -> str:
        """Say in a line how an attention attends."""
        op, note = inside.op, f"{counted(inside.op.heads, 'head')} of {inside.d_head}"
        if op.kv_heads != op.heads:
            note += f" ({op.kv_heads} K/V)"
        if inside.crossing:
            return f"{note}; reads the encoder"
        words = [note, "causal" if op.after == 0 else "bidirectional"]
        if op.before is not None:
            words[1] = f"window {op.before + 1:,}"
        turns = [each for each in inside.treated if isinstance(each, Rotate)]
        if inside.bias is not None:
            words.append("ALiBi" if isinstance(inside.bias, ALiBi) else "relative biases")
        elif turns:
            words.append("rotary" if turns[0].share == 1.0 else f"{turns[0].share:.0%} rotary")
        elif self.rotates:
            words.append("no positions")
        if op.softcap is not None:
            words.append(f"scores capped at {op.softcap:g}")
        if inside.sinks:
            words.append("a sink")
        return ", ".join(words)

    def feed_forward(self, key: str, ops: Sequence[Op]) -> Dense | Mixture:
        """Read a feed-forward, or a router and its experts."""
        routes = [op.kind for op in ops if isinstance(op.kind, Route)]
        if not routes:
            return self.dense(ops)
        shared = [op for op in ops if op.part == f"{key}.shared_expert"]
        return Mixture(
            d_model=self.width(ops[-1].writes),
            n_experts=self.width(ops[0].writes),
            route=routes[0],
            expert=self.dense([op for op in ops if op.part == f"{key}.experts.0"]),
            shared=self.dense(shared) if shared else None,
            shared_gate=any(op.kind == Gate(function="sigmoid") for op in shared),
        )

    def dense(self, ops: Sequence[Op]) -> Dense:
        """Read the widths of a feed-forward."""
        act = next(op for op in ops if isinstance(op.kind, Activate | Gate))
        assert isinstance(act.kind, Activate | Gate)
        down = next(op for op in ops if act.writes in op.reads)
        return Dense(self.width(down.writes), self.width(act.writes), act.kind)

    def head(self, name: str, ops: Sequence[Op]) -> Part:
        """Read what one head predicts, and where it reads."""
        D, key = self.width(self.made.hidden), f"heads.{name}"
        output = self.made.outputs[name]
        size = f"{D} → {self.width(output):,}"
        read = next((op.kind.place for op in ops if isinstance(op.kind, ReadOut)), None)
        at = {"last": "the last token", "first": "the first token", "mean": "the mean", None: ""}
        before = [op.kind for op in ops if op.part.startswith("transforms.")]
        linear = [op for op in ops if isinstance(op.kind, Linear) and op.part == key]
        if name == "vector":
            size = f"tanh of {size}" if linear else f"{D} numbers"
        title, note = HEADS[name]
        words = note.format(size=size, at=at[read])
        for each in before:
            words += f", after a {each.function} layer" if isinstance(each, Activate) else ""
            words += f" and {norm_name(each)}" if isinstance(each, Norm) else ""
        parameters = *self.owned.get(key, ()), *self.owned.get(f"transforms.{name}", ())
        owned = all(weight.startswith(key) for op in linear for weight in op.weights[:1])
        return Part(key, "head", title, words, parameters, "" if owned else "the embedding")


def _key(op: Op) -> str | None:
    """Return the part of an operation; None of sums, and of biases that have no weights."""
    if isinstance(op.kind, Add) and op.part.rpartition(".")[2].isdigit():
        return None
    if isinstance(op.kind, Bias) and not op.weights:
        return None
    part = op.part.partition(".experts.")[0].removesuffix(".shared_expert")
    return part.replace("transforms.", "heads.", 1) if part.startswith("transforms.") else part


def _heads(key: str) -> bool:
    return key.startswith("heads.")


# --- words ----------------------------------------------------------------------------------------

#: What each head is called, and what it predicts.
HEADS = {
    "next": ("Next-token head", "{size} logits at each position"),
    "class": ("Class head", "{size} classes at each position"),
    "state": ("State head", "{size} states at each position"),
    "answer": ("Answer head", "{size} logits, read at {at}"),
    "masked": ("Masked-token head", "{size} logits of the token itself"),
    "vector": ("Vector of the sequence", "{size}, read at {at}"),
}

#: An activation as it is written.
ACTIVATIONS = {
    "relu": "ReLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU",
    "silu": "SiLU",
    "relu2": "ReLU²",
    "tanh": "tanh",
}
#: The formula of an activation, where it is short.
FORMULAS = {"relu": ": max(0, x)", "silu": ": x sigmoid(x)", "relu2": ": max(0, x)²"}


def _inside_words(inside: Dense | Mixture) -> tuple[str, str]:
    match inside:
        case Dense():
            return "Feed-forward", dense_words(inside)
        case Mixture(route=route):
            shared = ", and a shared one" if inside.shared is not None else ""
            chosen = f"{route.chosen} of {inside.n_experts}"
            return "Mixture of experts", f"each token: {chosen} experts{shared}"
        case _ as unreachable:
            assert_never(unreachable)


def dense_words(inside: Dense) -> str:
    """Return the widths of a feed-forward and its activation."""
    words = inside.words()
    up = f"{inside.d_ff:,}" if words.matrices == 1 else f"{words.matrices} × {inside.d_ff:,}"
    return f"{inside.d_model} → {up} → {inside.d_model}, {words.name}"


def norm_name(norm: Norm) -> str:
    """LayerNorm or RMSNorm."""
    return "LayerNorm" if norm.form == "layer" else "RMSNorm"


def _norm_note(op: Op) -> str:
    assert isinstance(op.kind, Norm)
    if op.kind.form == "layer":
        return f"mean 0, variance 1, then gain{' and bias' if len(op.weights) > 1 else ''}"
    return "mean square 1, then 1 + gain" if op.kind.offset else "mean square 1, then gain"


def counted(count: int, noun: str) -> str:
    """`1 head`, `8 heads`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_count(count: int) -> str:
    """`12,704`, and from a million on `1.24 M`."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}" if count < 1000 * size else f"{count:,}"
    return f"{count:,}"


def model_lines(model: ModelSpec) -> list[str]:
    """Return a model's shape and parts in two lines of words; of its blocks the first."""
    layer = outline(model)[-1].layers[0]
    feed = next(part.inside for part in layer.parts if part.kind == "ffn")
    assert isinstance(feed, Dense | Mixture)
    total, used = count_parameters(model), count_active_parameters(model)
    active = "" if used == total else f" ({used:,} used by a token)"
    if model.encoder is None:
        shape = counted(model.n_layers, "layer")
        causal = all(block.mixer.causal for block in model.decoder.blocks())
        kind = "decoder" if causal else "encoder"
    else:
        shape, kind = f"{model.encoder.n_layers} + {model.n_layers} layers", "encoder-decoder"
    heads = dict.fromkeys(
        counted(own.n_heads, "head")
        + ("" if own.kv_heads == own.n_heads else f" ({own.kv_heads} for keys and values)")
        for own in model.decoder.attentions().values()
    )
    norm = next(part.title for part in layer.parts if part.kind == "norm")
    return [
        f"model: {kind}, {total:,} parameters{active}, {shape} of width {model.d_model}, "
        f"{' and '.join(heads) or 'no attention'}",
        f"parts: {_feed_words(feed)}, {norm} {PLACEMENTS[_placement(layer)]}, "
        f"{model.positions()[0].summary}; vocabulary {model.vocab_size:,}, "
        f"up to {model.max_seq_len:,} tokens",
    ]


#: Where a block's norms are, in words: of each branch n for a norm, p for the part, s for a norm
#: of the stream itself; then whether the branches are parallel.
PLACEMENTS = {
    (frozenset({"np"}), False): "before each part",
    (frozenset({"ps"}), False): "after each part",
    (frozenset({"npn"}), False): "before and after each part",
    (frozenset({"pn"}), False): "on each part's output",
    (frozenset({"np"}), True): "before each of two parallel parts",
    (frozenset({"np", "p"}), True): "before two parallel parts",
    (frozenset({"np", "p"}), False): "before the feed-forward",
}


def _placement(layer: Layer) -> tuple[frozenset[str], bool]:
    def letter(part: Part) -> str:
        return "p" if part.kind != "norm" else "s" if part.on_stream else "n"

    return frozenset("".join(map(letter, each)) for each in layer.branches), layer.together


def _feed_words(feed: Dense | Mixture) -> str:
    if isinstance(feed, Dense):
        return f"feed-forward {feed.d_ff} ({feed.words().short})"
    chosen = f"{feed.route.chosen} of {counted(feed.n_experts, 'expert')}"
    return f"{chosen}, each {_feed_words(feed.expert)}"
