"""A log is what JSON makes of each of its lines, to the last bit, or its refusal."""

import itertools
import json
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.lab.runs.curves import BadLine, Lines, read_lines

NUMBERS = (
    "0", "-0", "7", "-3", "0.25", "-0.0", "1e5", "1E-7", "2.5e+3", "0.1", "1e22", "1e23",
    "5e-324", "2.2250738585072011e-308", "1.7976931348623157e308", "1e299", "1e300", "-1e301",
    "1e400", "-1e400", "123456789012345678", "0.30000000000000004", "9007199254740993",
    "9007199254740993.0", "8.41470984807896506652502321630", "1" + "0" * 288, "1" + "0" * 310,
    "68719476736", "68719476735", "3.9",
)  # fmt: skip
#: What JSON refuses as a number, and what it takes for one although it is none.
NO_NUMBERS = ("01", "+1", ".5", "1.", "1e", "--1", "0x10", "1_000", "1 2", "", "-", "e5", "1.2.3")
OTHERS = ("NaN", "Infinity", "-Infinity", "true", "null", '"nan"', '"-inf"', '"x"', "[1, 2]", "{}")
KEYS = (
    "loss", "nll", "lr", "tokens", "seconds", "tokens_per_second", "e", "ee", "1", "L1H3", "a.b",
    "val", "examples", "1e5", "-", "a b", "e, ", "x}, ", ": ", "é", 'q"', "inf", "step",
    "a, ", ": 1, ",
)  # fmt: skip


def one_by_one(data: bytes) -> dict[str, list[tuple[int, float]]] | int:
    """Every line as json has it: the values of each name, or the number of the first bad line."""
    found: dict[str, list[tuple[int, float]]] = {}
    for number, text in enumerate(data.split(b"\n")[:-1]):
        try:
            read = json.loads(text)
            step = read["step"]
            if type(step) is not int or not 0 <= step < 1 << 62:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            return number + 1
        tokens, seconds = (
            None if "val" in read else value_of(read.get(name)) for name in ("tokens", "seconds")
        )
        spent = [x if x is not None and 0 <= x < 1 << 36 else 0.0 for x in (tokens, seconds)]
        for name, value in (("STEP", step), ("TOKENS", int(spent[0])), ("SECONDS", spent[1])):
            found.setdefault(name, []).append((number, value))
        if tokens and seconds:
            found.setdefault("tokens_per_second", []).append((number, tokens / seconds))
        heads = read.get("nll")
        if (
            isinstance(heads, dict)
            and len(heads) > 1
            and "loss" in read
            and "objective" not in read
        ):
            read |= {"loss": next(iter(heads.values())), "objective": read["loss"]}
        for name, value in leaves("", read):
            found.setdefault(name, []).append((number, value))
    return found


def value_of(thing: Any) -> float | None:
    """A number as the curves have it."""
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    if isinstance(thing, str):
        return words.get(thing)
    if isinstance(thing, bool) or not isinstance(thing, int | float):
        return None
    if isinstance(thing, int) and abs(thing) >= 1 << 1000:
        return None
    return math.copysign(math.inf, thing) if abs(thing) >= 1e300 else float(thing)


def leaves(name: str, thing: Any):
    """Names with dots."""
    if isinstance(thing, dict):
        for key, item in thing.items():
            if key not in (("examples",) if name else ("step", "tokens", "seconds")):
                yield from leaves(f"{name}.{key}" if name else key, item)
    elif (value := value_of(thing)) is not None:
        yield name, value


def bits(values: Any) -> list[bytes]:
    """-0.0 is not 0.0, and NaN is itself."""
    return [b"nan" if x != x else np.float64(x).tobytes() for x in values]


def read(data: bytes) -> Lines | int:
    """At once, or the number of the line that is refused."""
    try:
        return read_lines(data)
    except BadLine as error:
        return error.number


def check(data: bytes) -> None:
    """Read at once, and one by one."""
    expected = one_by_one(data)
    lines = read(data)
    if isinstance(expected, int) or isinstance(lines, int):
        assert lines == expected, "the line that is refused"
        return
    for name, got in (("STEP", lines.step), ("TOKENS", lines.tokens), ("SECONDS", lines.seconds)):
        assert bits(got) == bits(value for _, value in expected.pop(name, ())), name
    assert {*lines.columns} == {*expected}
    order = [name for name in expected if name != "tokens_per_second"]
    assert [name for name in lines.columns if name != "tokens_per_second"] == order
    for name, (number, values) in lines.columns.items():
        assert number.tolist() == [i for i, _ in expected[name]], name
        assert bits(values) == bits(value for _, value in expected[name]), name


def line(*pairs: tuple[str, str], step: str = "3") -> bytes:
    """An object of raw texts."""
    inside = ", ".join(f"{json.dumps(key)}: {text}" for key, text in (("step", step), *pairs))
    return f"{{{inside}}}\n".encode()


def test_every_odd_line_is_read_as_json_reads_it():
    plain = line(("loss", "1.5"), ("lr", "2"), ("tokens", "10"), ("seconds", "0.5"))
    for text in (*NUMBERS, *NO_NUMBERS, *OTHERS):
        odd = line(("loss", text), ("lr", "2"), ("tokens", "10"), ("seconds", "0.5"))
        spent = line(("loss", "1"), ("lr", "2"), ("tokens", text), ("seconds", "1e-290"))
        for both in (odd * 3 + plain * 2, plain * 3 + odd + plain + odd, plain * 2 + spent * 3):
            check(both)
        check(plain * 2 + line(("loss", "1.5"), step=text) + plain)
    for step in ("1.0", "1e3", "-1", "1000000000000000000", "99999999999999999999", "true"):
        check(line(("loss", "1.5")) * 2 + line(("loss", "1.5"), step=step))
    for one, other in itertools.product(KEYS, KEYS):
        check(line((one, "1"), (other, "2"), ("lr", "3")) * 3)
        check(line((one, "1"), ("in", f"{{{json.dumps(other)}: 2}}")) * 3)
    check(line(("in", '{"a": 1, "qe": 2}'), ("e", "null"), ("qe", "3")) * 3)
    check(line(("loss", "4"), ("nll", '{"a": 1, "b": 2}')) * 3)
    for tail in ("}", " }", "}\r", "} ", "},", "}}", "} {}", "\x01}"):
        check(plain * 2 + plain[:-2] + tail.encode() + b"\n")
    check(plain * 2 + b"\xef\xbb\xbf" + plain + plain)
    check(b"")
    check(plain * 2 + b"\n")


TEXTS = st.sampled_from(NUMBERS) | st.floats().map(json.dumps) | st.integers().map(str)
VALUES = st.recursive(
    TEXTS,
    lambda inside: st.lists(st.tuples(st.sampled_from(KEYS), inside), max_size=3).map(
        lambda pairs: "{" + ", ".join(f"{json.dumps(k)}: {v}" for k, v in pairs) + "}"
    ),
    max_leaves=5,
)


@st.composite
def files(draw: Any) -> bytes:
    """Lines of a few shapes in any order, each with numbers of its own."""
    shapes = draw(
        st.lists(
            st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=5), min_size=1, max_size=4
        )
    )
    made = []
    for _ in range(draw(st.integers(1, 12))):
        pairs = [
            (key, text if text.startswith("{") else draw(TEXTS))
            for key, text in draw(st.sampled_from(shapes))
        ]
        made.append(line(*pairs, step=str(draw(st.integers(0, 1 << 60) | st.integers(0, 20)))))
    return b"".join(made)


@settings(max_examples=150, deadline=None)
@given(files())
def test_any_file_is_read_as_json_reads_it(data):
    check(data)
