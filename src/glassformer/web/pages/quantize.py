"""The page Quantize: what fewer bits change of a model's text.

Float32 beside every quantization scheme, on the same text. Nothing is written: the copies live in
memory, and their sizes are those of the files that `glass quantize` would write. Speed is asked for
apart, since measuring it takes a while.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from glassformer.spec.quantization import coverage
from glassformer.spec.schemes import SCHEMES
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route, TooLarge
from glassformer.web.app.workspace import Workspace

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.lab.measure.precision import Precision, Prompted, Speed

#: Tokens that are compared: each is a row of every table.
MOST_TOKENS = 512
#: Positions that are listed as the worst.
WORST = 8
TWINS = "quantize: the copies"


def quantize(query: Query, lab: Workspace) -> dict[str, Any]:
    """What each precision says of a text, how far they are apart, and what they weigh."""
    query.only("run", "step", "text")
    from glassformer.lab.measure.precision import prompted

    run, step = query.text("run"), query.text("step", default="best", most=20)
    text = query.text("text", most=limits.PROMPT_CHARACTERS)
    with lab.working(run, step) as adapter:
        length = len(adapter.tokenizer.encode(text))
        if length > MOST_TOKENS:
            raise TooLarge(f"{length:,} tokens, at most {MOST_TOKENS:,} are compared")
        precisions = _copies(adapter, lab)
        return _told(prompted(adapter, precisions, text))


def quantize_speed(query: Query, lab: Workspace) -> dict[str, Any]:
    """Tokens a second of each, measured in turn, some rounds; slower is said to be slower."""
    query.only("run", "step")
    from glassformer.lab.measure.precision import NEW, PREFILL, ROUNDS, precision_speeds

    run, step = query.text("run"), query.text("step", default="best", most=20)
    with lab.working(run, step) as adapter:
        found = precision_speeds(_copies(adapter, lab))
        limit = adapter.spec.max_seq_len
        return {
            "rounds": ROUNDS,
            "prefill_tokens": min(PREFILL, limit),
            "new_tokens": min(NEW, limit - 1),
            "speeds": {
                name: {"prefill": _speed(prefill), "decode": decode and _speed(decode)}
                for name, (prefill, decode) in found.items()
            },
        }


def _speed(speed: "Speed") -> dict[str, Any]:
    return asdict(speed) | {"slower": speed.ratio > 1.0}


def _copies(adapter: "BaseAdapter", lab: Workspace) -> "tuple[Precision, ...]":
    """Made once for the model in view; those of the one before are let go."""
    from glassformer.lab.measure.precision import in_precisions

    kept = lab.results.find(TWINS)
    if kept is None or kept[0] is not adapter:
        kept = (adapter, in_precisions(adapter))
        lab.results.put(kept, key=TWINS, model=adapter)
    copies: tuple[Precision, ...] = kept[1]
    return copies


def _told(found: "Prompted") -> dict[str, Any]:
    from glassformer.lens.show.text import shown

    look, reading = found.look, found.look.readout
    spec = found.precisions[0].model.spec
    names = [one.name for one in found.precisions]
    source = look.source_words
    return {
        "head": look.head,
        "words": [shown(word) for word in look.words],
        "source_words": None if source is None else [shown(word) for word in source],
        "positions": list(found.positions),
        "precisions": [
            {
                "name": one.name,
                "scheme": one.scheme,
                "schemes": one.schemes,
                "backends": list(one.backends),
            }
            | {"file_bytes": one.file_bytes, "resident_bytes": one.resident_bytes}
            for one in found.precisions
        ],
        "missing": [
            f"{scheme.name} is not possible: {coverage(spec, scheme()).why()}"
            for scheme in SCHEMES
            if scheme.name not in {one.scheme for one in found.precisions}
        ],
        "answers": [
            [
                {"id": i, "word": shown(reading.word(i)), "p": dict(zip(names, p, strict=True))}
                for i, p in at.items()
            ]
            for at in found.answers
        ],
        "against": {
            name: {
                "there": list(one.there),
                "back": list(one.back),
                "same": list(one.same),
                "layers": one.layers,
                # indices into `positions`, the largest divergence first
                "worst": sorted(range(len(one.there)), key=lambda i: (-one.there[i], i))[:WORST],
            }
            for name, one in found.against.items()
        },
    }


ROUTES: tuple[Route, ...] = (
    ("POST", "/api/quantize", quantize),
    ("POST", "/api/quantize/speed", quantize_speed),
)
