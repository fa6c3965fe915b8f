"""Random command lines and configs: documented exit codes, no traceback, no hang.

Verbs, options and settings are read from the program itself; values come from a pool of what users
mistype and attackers try. Each case runs in a forked process, in a copy of a small world (runs,
models, texts, configs), with bounded memory. A command that works on after its time must end when
it is asked to.
"""

import dataclasses
import functools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.attack import Ended, Found, Plan, chance, in_child, warm
from glassformer.cli.main import OUR_FAULT, VERBS, _command, main
from glassformer.spec.serialize import to_dict

#: Seconds after which a command is asked to end, and in which it must end then; its memory.
SECONDS, MEGABYTES = 20.0, 4000.0
#: Seconds after which one that may work on is asked to, more where the machine is crowded.
WORKING = 1.5
#: Exit codes as documented; 141 is a reader that has gone.
CODES = {0, 1, 2, 3, 4, 5, 130, 141, 143}
#: Verbs that may work for as long as they are let.
LONG = ("train", "finetune", "sweep", "demo", "explore", "lr-find", "verify", "doctor", "serve")
#: Options that reach outside of the world, or start hundreds of processes.
LEFT_OUT = (
    "--ray",
    "--download",
    "--own-code",
    "--runs",
    "--sweeps",
    "--tasks-dir",
    "--nproc",
    "--jobs",
)

NUMBERS = (
    *("0", "1", "2", "-1", "3", "7", "64", "1.5", "-0.0", "1e-308", "1e308", "1e400", "nan", "inf"),
    *("-inf", "2147483647", "2147483648", "9223372036854775808", "1" + "0" * 26, "9" * 400, "0x10"),
    *("1_000", "١٢", "10M", "0.5%", "1k", "1e9G", "5e-324", "00", "+3", " 4", "1e3", "100000"),
)
TEXTS = (
    *(
        "",
        " ",
        "\t",
        "\n",
        "a",
        "None",
        "null",
        "true",
        "{}",
        "[]",
        "a,b",
        "a=b",
        "=",
        "@",
        "..",
        ".",
    ),
    *(
        "../..",
        "-",
        "--",
        "-o",
        "%s%n",
        "$(id)",
        "`id`",
        "<script>alert(1)</script>",
        "\x1b[2J",
        "\x07",
    ),
    *(
        "é" * 20,
        "\udc80",
        "😀",
        "a" * 5000,
        "(" * 200,
        "(a+)+$",
        "[a-z]*",
        ".*",
        "\\",
        "'",
        '"',
        "\u202e",
    ),
    *(
        "SECOND 7 3 9",
        "MAX 1 2",
        "the cat",
        "1 2 3",
        "auto",
        "all",
        "best",
        "last",
        "cpu",
        "cuda",
        "mps",
    ),
)
OUTPUTS = (
    *(
        "/",
        "",
        ".",
        "..",
        "/dev/null",
        "/dev/full",
        "/proc/1/mem",
        "out.png",
        "out.html",
        "out.svg",
    ),
    *(
        "out.json",
        "out.md",
        "out.csv",
        "out.toml",
        "no/such/folder/x.png",
        "runs",
        "out",
        "out.gguf",
    ),
    *(
        "x" * 300,
        "a\nb.html",
        "out.PNG",
        "out.",
        ".png",
        "runs/digits",
        "runs/digits/config.json",
        "-",
    ),
)
MODELS = (
    *("runs/digits", "digits", "digits@last", "digits@best", "digits@6", "digits@0", "digits@-1"),
    *(
        "digits@999999999999999999999",
        "copy",
        "lm",
        "quantized",
        "exported",
        "lm.gguf",
        "llama",
        "parity",
    ),
    *(
        "runs",
        "nothing",
        "text.txt",
        "config.toml",
        "org/name",
        "torch.nn:Linear",
        "os:getcwd",
        "sys:exit",
    ),
    *(
        "builtins:int",
        "torch:nothing",
        "nothing:nothing",
        ":",
        "a:",
        "builtins:print",
        "corpus",
        "chat.jsonl",
    ),
    *("digits", "lm", "copy", "parity", "qwen", "moe", "seq2seq"),
)
TASKS = (
    "digits",
    "copy",
    "reverse",
    "sort",
    "parity",
    "mod-3",
    "brackets",
    "fsm",
    "translate",
    "text",
)
#: What a line that could well work is made of.
GOOD_MODELS = ("runs/digits", "digits@last", "copy", "lm", "parity", "quantized", "exported")
GOOD_TEXTS = ("SECOND 7 3 9", "the cat", "1 2 3", "a cat sat", "é 😀")
#: How many of the lines have only such words and values.
GOOD = 0.25
#: Settings that keep a real training small; a random one may follow and override them.
SMALL = ("model.d_model=8", "model.max_seq_len=32", "train.batch_size=4", "train.steps=2")


@functools.cache
def world() -> Path:
    """Make the small world once: runs of four tasks, and models in all formats."""
    from bench.attack_files import make_models

    return make_models()


def _value(option: str, r: random.Random) -> str:
    if option in ("-o", "--out", "--output", "--png", "--save", "--junit", "--markdown", "--badge"):
        return r.choice(OUTPUTS)
    pools = (NUMBERS, NUMBERS, TEXTS) if r.random() < 0.8 else (OUTPUTS, MODELS)
    return r.choice(r.choice(pools))


@functools.cache
def settings() -> tuple[str, ...]:
    """Return the paths of all settings of a few runs, down to the leaves."""
    from glassformer.lab.recipes import plan_run

    found: set[str] = set()
    for task in ("digits", "copy", "parity"):
        for path in _leaves(to_dict(plan_run(task, []).spec), ""):
            found.add(path)
    return tuple(sorted(found))


def _leaves(value: Any, prefix: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list):
        yield prefix
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}.{place}")
    else:
        yield prefix


def _setting(r: random.Random) -> str:
    path = r.choice(settings())
    if r.random() < 0.1:
        path = r.choice((path + "x", path.rpartition(".")[0], "model", "a.b.c", "", path.upper()))
    return f"{path}={r.choice(NUMBERS if r.random() < 0.8 else TEXTS)}"


#: What an option takes whose type alone does not say it.
GOOD_VALUES = {
    **dict.fromkeys(("-o", "--out", "--png", "--save"), ("out.png", "out.html", "out.json", "out")),
    **dict.fromkeys(("--bits", "--head-bits"), ("4", "8")),
    **dict.fromkeys(("--group", "--multiple", "--ffn-multiple"), ("0", "8", "32")),
    **dict.fromkeys(("--heads", "--kv-heads", "--rank", "--experts", "--threads"), ("1", "2", "4")),
    **dict.fromkeys(("--params", "--vocab", "--length"), ("1k", "10M", "100", "3000")),
    **dict.fromkeys(("--text", "--calibrate", "--data"), ("text.txt", "chat.jsonl")),
    "--device": ("cpu",),
    "--engine": ("numpy", "torch"),
    "--port": ("0",),
}


def _good_value(option: str, kind: object, r: random.Random) -> str:
    """Return a small value that an option may well take."""
    if option in GOOD_VALUES:
        return r.choice(GOOD_VALUES[option])
    if kind is int:
        return r.choice(("0", "1", "2", "5"))
    if kind is float:
        return r.choice(("0", "0.1", "0.5", "1"))
    return r.choice((*GOOD_TEXTS, *GOOD_MODELS, "1", "2", "0.5"))


def words_of(r: random.Random) -> list[str]:
    """Return one command line, from the verb on."""
    if r.random() < GOOD:
        return _good_words(r)
    verb = r.choice([name for name in VERBS if name != "runs"])
    command = _command(verb)
    made = [verb]
    for param in command.params:
        if param.param_type_name == "argument":
            made += _arguments(verb, param.name, r)
    if verb == "explore":
        made.append("--no-open")
    options = [p for p in command.params if p.param_type_name == "option"]
    for option in r.sample(options, min(len(options), r.choice((0, 1, 1, 2, 3)))):
        name = r.choice(option.opts)
        if name in LEFT_OUT:
            continue
        made.append(name)
        if not option.is_flag:
            made.append(_value(name, r))
    if r.random() < 0.05:
        made.insert(r.randrange(len(made) + 1), r.choice(TEXTS))
    return [word for word in made if "\x00" not in word]


def _good_words(r: random.Random) -> list[str]:
    """Return a command line whose arguments exist and whose values are of the right types."""
    verb = r.choice([name for name in VERBS if name != "runs"])
    made = [verb]
    options = []
    for param in _command(verb).params:
        if param.param_type_name == "option":
            options.append(param)
        else:
            made += _good_arguments(verb, param.name, r)
    if verb == "explore":
        made.append("--no-open")
    for option in r.sample(options, min(len(options), r.choice((0, 1, 2, 3)))):
        name = r.choice(option.opts)
        if name not in LEFT_OUT:
            made += (
                [name]
                if option.is_flag
                else [name, _good_value(name, option.type_descriptor.annotation, r)]
            )
    return made


def _good_arguments(verb: str, name: str, r: random.Random) -> list[str]:
    match name:
        case "overrides" | "settings":
            return list(SMALL) if verb in ("train", "sweep", "lr-find", "doctor") else []
        case "what" if verb in ("train", "doctor", "lr-find", "sweep"):
            return [r.choice((*TASKS, "config.toml"))]
        case "what" | "model" | "run" | "first" | "second":
            return [r.choice(GOOD_MODELS)]
        case "names":
            return r.sample(GOOD_MODELS, r.choice((1, 2, 3)))
        case "paths" | "data":
            return [r.choice(("text.txt", "chat.jsonl"))]
        case _:
            return [r.choice(GOOD_TEXTS)]


def _arguments(verb: str, name: str, r: random.Random) -> list[str]:
    if name in ("overrides", "settings"):
        small = list(SMALL) if verb in ("train", "sweep", "lr-find", "doctor") else []
        return [*small, *(_setting(r) for _ in range(r.choice((0, 1, 1, 2))))]
    if r.random() < 0.05:
        return []
    match name:
        case "what" if verb in ("train", "doctor", "lr-find", "sweep"):
            return [
                r.choice(TASKS)
                if r.random() < 0.6
                else r.choice(("config.toml", "bad.toml", "bad.toml", "bad.toml", "", "/"))
            ]
        case "what" | "model" | "run" | "first" | "second":
            return [r.choice(MODELS)]
        case "names":
            return [r.choice(MODELS) for _ in range(r.choice((1, 2, 3)))]
        case "paths":
            return [
                r.choice(("text.txt", "runs", "nothing", "", "/dev/null", "chat.jsonl", "bad.toml"))
            ]
        case "data":
            return [r.choice(("chat.jsonl", "text.txt", "nothing", "bad.toml", ""))]
        case _:
            return [r.choice(TEXTS)]


def config_of(r: random.Random) -> str:
    """Return a config file with one to three lines changed for the worse."""
    lines = (world() / "config.toml").read_text().splitlines()
    for _ in range(r.randint(1, 3)):
        at = r.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        match r.randrange(5):
            case 0 if equals:
                lines[at] = f"{key}= {r.choice(NUMBERS)}"
            case 1 if equals:
                lines[at] = f"{key}= {json.dumps(r.choice(TEXTS))}"
            case 2:
                lines[at] = lines[at][: r.randrange(len(lines[at]) + 1)]
            case 3:
                lines.insert(at, lines[r.randrange(len(lines))])
            case _:
                lines[at] = r.choice(("[" * 500, "a = {}", "x", "[model]", "\ufeff", "count = 1e9"))
    return "\n".join(lines) + "\n"


def attack(plan: Plan, cases: Iterable[int]) -> Iterator[tuple[int, Found]]:
    """Run each command line in a process of its own; yield what became of it."""
    for name in VERBS:
        _command(name)
    settings()
    world()
    warm()
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))
        for case in cases:
            r = chance("lines", plan.seed, case)
            words, config = words_of(r), config_of(r)
            yield case, run_line(words, config, place)


class Place:
    """A copy of the world that commands run in, made again when one has changed it."""

    def __init__(self, folder: Path) -> None:
        self.world, self.temporary = folder / "world", folder / "temporary"
        self.names: list[tuple[object, ...]] = []

    def ready(self, config: str) -> None:
        """Make the copy the world again, with this config in it."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        if not self.names or self.names != self._listed():
            shutil.rmtree(self.world, ignore_errors=True)
            shutil.copytree(world(), self.world, symlinks=True)
            (self.world / "bad.toml").touch()
            self.names = self._listed()
        (self.world / "bad.toml").write_text(config, errors="surrogatepass")

    def _listed(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for path in sorted(self.world.rglob("*")):
            known = path.lstat()
            if path.name != "bad.toml":
                found.append((str(path), known.st_mode, known.st_ino, known.st_size))
                found.append((known.st_mtime_ns,))
        return found


def run_line(words: list[str], config: str, place: Place) -> Found:
    """Run one command line in a copy of the world, and judge its end."""
    place.ready(config)

    def work() -> int:
        os.chdir(place.world)
        tempfile.tempdir = str(place.temporary)
        sys.argv = ["glass", *words]
        sys.path.insert(0, str(place.world))
        main()
        return 0

    return judged(words, _ended(work, words, place.temporary), place.temporary)


def _ended(work: Callable[[], int], words: list[str], place: Path) -> Ended:
    """Let a command end, or ask it to; repeat one that took too long, as the rule has it."""
    works_on = bool(words) and words[0] in LONG
    patience = WORKING if works_on else SECONDS
    limits = {"seconds": patience, "megabytes": MEGABYTES, "grace": SECONDS}
    ended = in_child(work, folder=place, **limits, crowded=works_on)
    if ended.over or (ended.stopped and not works_on):
        ended = in_child(work, folder=place, **limits, crowded=True)
        if ended.cpu > patience + SECONDS:
            ended = dataclasses.replace(ended, over=True)
    return ended


def judged(words: list[str], ended: Ended, place: Path) -> Found:
    """Return what a command's end comes to."""
    line = " ".join(json.dumps(word)[1:-1] if len(word) < 200 else word[:200] for word in words)
    told = ended.err[-1500:]
    incidents = [file.read_text()[-2500:] for file in place.glob("glass-*.txt")]
    verb = words[0] if words else ""
    code = 128 - ended.code if ended.code in (-2, -15) else ended.code  # as a shell sees it
    detail, outcome, fault = f"glass {line}", f"exit {code}", False
    if incidents or ended.code == OUR_FAULT:
        outcome, fault = "mistake of ours", True
        detail += "\n" + "\n".join(incidents)
    elif "Traceback (most recent" in ended.err and "--debug" not in words:
        outcome, fault = "traceback", True
    elif code not in CODES:
        outcome, fault = f"undocumented exit {ended.code}", True
    elif ended.over:
        outcome, fault = f"more than {SECONDS:.0f} s", True
    elif ended.stopped:
        outcome = "still at work, ended when asked"
        fault = verb not in LONG  # its code may be its own: it can end while it is being asked
    elif asks_for_json(words) and ended.code == 0 and not is_json(ended.out):
        outcome, fault = "--json prints something else", True
    if fault:
        detail += f"\n{told}"
    seconds, cpu = round(ended.seconds, 3), round(ended.cpu, 3)
    return Found(outcome, fault, seconds, detail, round(ended.megabytes), cpu)


def asks_for_json(words: list[str]) -> bool:
    """Return True if `--json` is an option of a command that answers, not of a list of options."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options and not {"--settings", "--help", "-h"} & set(options)


def is_json(text: str) -> bool:
    """Return True for one object, or one a line; NaN is none."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    def parses(part: str) -> bool:
        try:
            json.loads(part, parse_constant=refuse)
        except ValueError:
            return False
        return True

    return parses(text) or all(parses(line) for line in text.splitlines())
