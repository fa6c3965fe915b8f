"""Patterns and schemas made to cost: 300 requests against `glass serve`, and how it ends.

Each is sent to a server of its own with a small model, two at a time, while another client asks for
short answers. Written down: the CPU seconds and the peak memory of the processes that build, what
the server itself grew by, the other client's seconds before and meanwhile, and the seconds from
SIGTERM to the end in five states.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.attack_serve import GOOD, LONG, Endpoint, make_folder
from bench.attack_server import HOST
from bench.clock import said

#: Seconds of the other client alone, and between two of its requests.
ALONE, PAUSE = 8.0, 0.05


def options(parser: argparse.ArgumentParser) -> None:
    """Add what the benchmark can be told."""
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="another model, as one with many tokens")


# --- what is sent ---------------------------------------------------------------------------------


def cases(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and response formats, each kind in turn, sizes by chance."""
    chance = random.Random(seed)
    kinds = [name.removeprefix("_case_") for name in globals() if name.startswith("_case_")]
    for number in range(count):
        kind = kinds[number % len(kinds)]
        found = globals()[f"_case_{kind}"](chance)
        name = f"{kind.replace('_', ' ')} {number}"
        if isinstance(found, str):
            yield name, {"type": "regex", "pattern": found}
        else:
            yield name, {"type": "json_schema", "json_schema": {"name": "x", "schema": found}}


def _letters(count: int, first: int = 0x4E00) -> list[str]:
    return [chr(first + n) for n in range(count)]


def _case_choices_that_may_be_left_out(chance: random.Random) -> str:
    low = chance.randrange(0x100, 0x3000)
    return f"[{chr(low)}-{chr(low + chance.randrange(2, 250))}]?" * chance.randrange(100, 2_800)


def _case_nested_repetitions(chance: random.Random) -> str:
    made = chance.choice("ab")
    for _ in range(chance.randrange(5, 48)):
        made = f"({made}{chance.choice('abc')}{chance.choice('*+?')}){chance.choice('*+?')}"
    return made * chance.randrange(1, 1 + 19_000 // len(made))


def _case_sets_that_double(chance: random.Random) -> str:
    return "(a|b)*a" + "(a|b)" * chance.randrange(5, 3_000)


def _case_repetitions_by_hand(chance: random.Random) -> str:
    made = "ab?"
    while len(made) < chance.randrange(200, 9_000):
        made = f"({made}){made}?" if chance.random() < 0.3 else f"({made})?({made})?"
    return made[:20_000]


def _case_counted_repetitions(chance: random.Random) -> str:
    return "((a{1,999}){1,999}){1,999}" * chance.randrange(1, 700)


def _case_many_words(chance: random.Random) -> str:
    words = ("".join(chance.choices(_letters(600), k=4)) for _ in range(3_900))
    return "|".join(words)[:20_000]


def _case_classes_of_all_but_one(chance: random.Random) -> str:
    end = chance.choice(["", "?", "*", "+"])
    return "".join(f"[^{one}]{end}" for one in _letters(chance.randrange(50, 3_900)))


def _case_overlapping_ranges(chance: random.Random) -> str:
    ranges = (
        f"[{chr(low)}-{chr(low + 250)}]"
        for low in (chance.randrange(0x4E00, 0x9000) for _ in range(chance.randrange(50, 3_900)))
    )
    return "".join(ranges)


def _case_any_symbol(chance: random.Random) -> str:
    named = "".join(_letters(chance.randrange(10, 10_000)))
    return named + chance.choice([".", ".?", ".*"]) * chance.randrange(1, 3_000)


def _case_stars_of_different_symbols(chance: random.Random) -> str:
    return "".join(f"{one}*" for one in _letters(chance.randrange(20, 9_000)))


def _case_searches(chance: random.Random) -> str:
    return "(" + "|".join(f".*{one}.*" for one in _letters(chance.randrange(2, 900))) + ")*"


def _case_nothing_at_all(chance: random.Random) -> str:
    return "(a||b|)" * chance.randrange(100, 2_800)


def _case_a_long_text(chance: random.Random) -> str:
    return "".join(chance.choices("abcdefgh ", k=chance.randrange(500, 100_000)))


def _case_what_is_no_pattern(chance: random.Random) -> str:
    return "".join(chance.choices("ab()[]|*+?\\^.-{}", k=chance.randrange(1, 20_000)))


def _case_arrays_of_arrays(chance: random.Random) -> Any:
    schema: Any = {"type": chance.choice(["integer", "string", "number", "null"])}
    for _ in range(chance.randrange(1, 12)):
        limits = {"minItems": chance.randrange(0, 17), "maxItems": 16}
        schema = {"type": "array", "items": schema, **limits}
    return schema


def _case_objects_in_objects(chance: random.Random) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(chance.randrange(1, 12)):
        names = [f"p{n}" for n in range(chance.randrange(1, 6))]
        schema = {"type": "object", "properties": dict.fromkeys(names, schema)}
        schema["required"] = names[: chance.randrange(0, len(names) + 1)]
    return schema


def _case_references_to_references(chance: random.Random) -> Any:
    count, levels = chance.randrange(2, 60), chance.randrange(1, 11)
    defs: Any = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * count} for n in range(levels)}
    return {"$defs": {**defs, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _case_references_to_itself(chance: random.Random) -> Any:
    part = {"anyOf": [{"$ref": "#"}] * chance.randrange(1, 30) + [{"type": "null"}]}
    return {"type": "array", "items": part} if chance.random() < 0.5 else part


def _case_huge_enumerations(chance: random.Random) -> Any:
    count = chance.randrange(100, 30_000)
    return {"enum": [chance.choice([n, f"value {n}", [n], {"n": n}]) for n in range(count)]}


def _case_long_texts(chance: random.Random) -> Any:
    text = "".join(chance.choices(["é", "x", '"', "\\", "漢"], k=chance.randrange(100, 90_000)))
    return chance.choice([{"const": text}, {"type": "object", "properties": {text: {}}}])


def _case_many_properties(chance: random.Random) -> Any:
    kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
    names = [f"p{n}" for n in range(chance.randrange(10, 5_000))]
    return {
        "type": "object",
        "properties": {name: {"type": chance.choice(kinds)} for name in names},
        "required": names if chance.random() < 0.5 else [],
    }


# --- what it costs --------------------------------------------------------------------------------


def _status(pid: int, name: str) -> float:
    """Return a field of a process in megabytes; 0 where it has gone."""
    try:
        found = Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2]
    except OSError:
        return 0.0
    return float(found.split()[0]) / 1024 if found else 0.0


def _builders(pid: int) -> list[int]:
    """Return the processes that a server has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(one) for one in (task / "children").read_text().split()]
    return found


def _cpu(pid: int) -> float:
    """Return the CPU seconds of all processes that a server has started."""
    ticks = 0
    for one, columns in ((pid, (15, 16)), *((child, (13, 14)) for child in _builders(pid))):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(words[column - 2]) for column in columns)
    return ticks / os.sysconf("SC_CLK_TCK")


class Other(threading.Thread):
    """Another client: the seconds of each of its short answers."""

    def __init__(self, server: Endpoint, body: dict[str, Any] = GOOD) -> None:
        super().__init__(daemon=True)
        self.server, self.request = server, server.completion(body)
        self.seconds, self.over, self.wrong = [0.0], threading.Event(), 0

    def run(self) -> None:
        """Ask until it is over."""
        while not self.over.wait(PAUSE):
            begin = time.perf_counter()
            self.wrong += self.server.read(self.request)[0] != 200
            self.seconds.append(time.perf_counter() - begin)

    def end(self) -> list[float]:
        """Return the seconds, sorted."""
        self.over.set()
        self.join()
        return sorted(self.seconds[1:])


def as_text(seconds: list[float]) -> str:
    """Return the median, the 99th percentile and the number of sorted seconds."""
    last = seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]
    middle = statistics.median(seconds)
    return f"{middle * 1e3:.1f} ms (p99 {last * 1e3:.1f}, {len(seconds)} answers)"


def _costs(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    server = Endpoint(folder)
    try:
        server.answer()
        server.read(server.completion({**GOOD, "response_format": {"type": "json_object"}}))
        other = Other(server)
        other.start()
        time.sleep(ALONE)
        alone, before = other.end(), server.megabytes()
        statuses: Counter[int] = Counter()
        worst = {"CPU s": (0.0, ""), "MB": (0.0, ""), "wall s": (0.0, "")}
        # Made before: what this process computes meanwhile is in the other client's way.
        sent = [(name, server.completion({**GOOD, "response_format": form}))
                for name, form in cases(count, seed)]  # fmt: skip
        other = Other(server)
        other.start()
        for name, request in sent:
            for one in _builders(server.child):
                Path(f"/proc/{one}/clear_refs").write_text("5")
            cpu, begin = _cpu(server.child), time.perf_counter()
            statuses[server.read(request)[0]] += 1
            seen = {
                "CPU s": _cpu(server.child) - cpu,
                "MB": max(_status(one, "VmHWM") for one in _builders(server.child)),
                "wall s": time.perf_counter() - begin,
            }
            worst = {key: max(worst[key], (seen[key], name)) for key in worst}
        meanwhile = other.end()
        yield "answers", ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items()))
        for key, (value, name) in worst.items():
            yield f"most {key} of a case", f"{value:.2f} ({name})"
        grown = server.megabytes() - before
        yield "the server itself", f"{before:.0f} MB, then {grown:+.0f} MB"
        yield "another client, before", as_text(alone)
        yield "another client, meanwhile", f"{as_text(meanwhile)}, {other.wrong} refused"
        with ThreadPoolExecutor(20) as crowd:  # many at once: the builders are always busy
            bodies = [{**GOOD, "response_format": form} for _, form in cases(60, seed + 1)]
            requests = [server.completion(body) for body in bodies]
            other = Other(server)
            other.start()
            asked = crowd.map(lambda request: server.read(request)[0], requests)
            seen_there = Counter(asked)
        shown = ", ".join(f"{status}: {n}" for status, n in sorted(seen_there.items()))
        yield "another client, beside 20 at once", f"{as_text(other.end())}; they got {shown}"
    finally:
        server.end()


# --- how it ends ----------------------------------------------------------------------------------

STUCK = {"type": "regex", "pattern": "[\u0100-\u01f0]?" * 2_800}


def _ends(folder: Path) -> Iterator[tuple[str, str]]:
    """SIGTERM in five states."""
    stream = {**LONG, "n": 16}

    def connect(server: Endpoint, body: dict[str, Any]) -> socket.socket:
        opened = socket.create_connection((HOST, server.port), timeout=60)
        opened.sendall(server.completion(body))
        return opened

    for state in ("idle", "generating", "compiling", "half-closed", "a slow reader"):
        server = Endpoint(folder)
        server.answer()
        opened = []
        if state == "generating":
            opened = [connect(server, stream) for _ in range(8)]
            for one in opened:
                one.recv(100)
        elif state == "compiling":
            opened = [connect(server, {**GOOD, "response_format": STUCK}) for _ in range(8)]
        elif state == "half-closed":
            opened = [connect(server, {**stream, "stream": False}) for _ in range(8)]
            for one in opened:
                one.shutdown(socket.SHUT_WR)
        elif state == "a slow reader":
            opened = [connect(server, {**stream, "logprobs": 20}) for _ in range(8)]
        time.sleep(0.3)
        begin = time.perf_counter()
        os.kill(server.child, signal.SIGTERM)
        while server.is_alive() and time.perf_counter() - begin < 60:
            time.sleep(0.01)
        yield f"SIGTERM, {state}", f"ended after {time.perf_counter() - begin:.2f} s"
        for one in opened:
            one.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            server.end()


def run(
    *, quick: bool = False, asked: argparse.Namespace | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each figure."""
    count = 21 if quick else 300 if asked is None else asked.count
    with tempfile.TemporaryDirectory() as name:
        folder = None if asked is None else asked.model
        folder = make_folder(Path(name)) if folder is None else folder
        for part in (_costs(folder, count, 0 if asked is None else asked.seed), _ends(folder)):
            for case, text in part:
                yield said("patterns", case, text)
