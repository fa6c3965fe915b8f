"""Mutated model files: only our errors, nothing executed, within seconds and megabytes."""

import contextlib
import copy
import hashlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.attack import Found, Plan, chance, many_in_child

WORLD = Path("build/attack/world")
WORDS = (
    "the cat sat on a mat and saw one small red dog run over green grass while rain fell on walls"
)
TINY = (
    "train.batch_size=4",
    "train.evaluate_examples=8",
    "train.checkpoint_every=2",
    "train.steps=6",
)
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_models(folder: Path = WORLD) -> Path:
    """Make small runs of four tasks, and one language model in every format; once."""
    if folder.is_dir():
        return folder.resolve()
    beside = folder.with_name(f".{folder.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    r = random.Random(0)
    words = WORDS.split()
    documents = [" ".join(r.choices(words, k=60)) + "." for _ in range(60)]
    (beside / "text.txt").write_text("\n\n".join(documents))
    (beside / "documents.jsonl").write_text(
        "".join(json.dumps({"text": d}) + "\n" for d in documents)
    )
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
    (beside / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    with contextlib.chdir(beside), contextlib.redirect_stdout(io.StringIO()):
        _train_and_convert()
    beside.rename(folder)
    return folder.resolve()


def _train_and_convert() -> None:
    import glassformer as gf
    from glassformer.lab.api import train

    train("digits", name="digits", overrides=["task.examples=200", *TINY])
    train("copy", name="copy", overrides=["task.examples=100", *TINY])
    train("parity", name="parity", overrides=["task.examples=100", *TINY])
    text = ("task.path=text.txt", "task.length=32", "task.vocab_size=300", "model.d_model=32")
    train("lm-modern", name="lm", overrides=[*text, *TINY])
    shutil.copy("runs/digits/config.toml", "config.toml")
    for form, name in (("hf", "exported"), ("gguf", "lm.gguf"), ("native", "native")):
        gf.export(gf.load("runs/lm"), Path(name), to=form)
    gf.save(gf.quantize(gf.load("runs/lm"), bits=8), "quantized")
    gf.save(gf.quantize(gf.load("runs/lm"), bits=4, group=32), "quantized-4")
    gf.prepare(["documents.jsonl"], "corpus", vocab_size=300, shard_size=5000)
    template = Path("exported") / "chat_template.jinja"
    template.write_text(CHAT)
    with (Path("exported") / "SHA256SUMS").open("a") as sums:
        sums.write(f"{hashlib.sha256(CHAT.encode()).hexdigest()}  {template.name}\n")
    _shard(Path("exported"), Path("sharded"))


def _shard(folder: Path, sharded: Path) -> None:
    """Write the same model in two files, and an index that says which tensor is where."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder, sharded)
    for name in ("model.safetensors", "SHA256SUMS"):
        (sharded / name).unlink()
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    index: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, sharded / file)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (sharded / "model.safetensors.index.json").write_text(text)


# --- mutations ------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    -1,
    2,
    255,
    65_536,
    2**31 - 1,
    2**31,
    2**32,
    2**63,
    10**20,
    0.5,
    -0.0,
    1e308,
    5e-324,
)
TEXTS = (
    *(
        "",
        " ",
        "a" * 10_000,
        "../../etc/passwd",
        "/dev/zero",
        "\x00",
        "\x1b]0;x\x07",
        "é\u202e",
        "F64",
    ),
    *(
        "{{ 7 * 7 }}",
        "__import__('os').system('touch canary')",
        "os:system",
        "llama",
        "\ud800",
        "%n",
    ),
)


def _hostile(r: random.Random) -> Any:
    """Return any value that JSON can hold."""
    match r.randrange(6):
        case 0 | 1:
            return r.choice(NUMBERS)
        case 2:
            return r.choice(TEXTS)
        case 3:
            return r.choice((None, True, False, [], {}, float("nan"), float("inf")))
        case 4:
            return [r.choice(NUMBERS)] * r.choice((1, 3, 10_000))
        case _:
            return {r.choice(TEXTS): r.choice(NUMBERS), "type": r.choice(TEXTS)}


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container below a value with every key of it; of long ones only a few."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys[:200]:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _nodes(value[key])


def mutated_json(text: bytes, r: random.Random) -> bytes:
    """Change one to three values, keys or brackets of a JSON text."""
    data = json.loads(text)
    for _ in range(r.choice((1, 1, 2, 3))):
        nodes = list(_nodes(data))
        if not nodes:
            break
        holder, key = r.choice(nodes)
        match r.randrange(5):
            case 0 | 1:
                holder[key] = _hostile(r)
            case 2:
                del holder[key]
            case 3:
                other, twin = r.choice(nodes)
                with contextlib.suppress(KeyError, IndexError):  # a part that is gone
                    holder[key] = copy.deepcopy(other[twin])
            case _ if isinstance(holder, dict):
                holder[r.choice((*TEXTS, "type", f"{key}x"))] = holder[key]
            case _:
                holder.insert(0, _hostile(r))
    made = json.dumps(data)
    if r.random() < 0.1:
        deep = r.choice((100, 5_000, 100_000))
        made = made.replace("null", "[" * deep + "]" * deep, 1)
    if r.random() < 0.05:
        made = made[:-1] + "," + made[1:]  # every key twice
    return made.encode("utf-8", "surrogatepass")


def mutated_bytes(data: bytes, r: random.Random, *, first: int | None = None) -> bytes:
    """Flip, cut, insert, repeat or overwrite bytes; of `first` ones only, if given."""
    made = bytearray(data)
    end = max(1, min(len(made), first or len(made)))
    for _ in range(r.choice((1, 1, 2, 4))):
        at = r.randrange(end)
        match r.randrange(7):
            case 0 | 1:
                made[at % len(made)] ^= 1 << r.randrange(8)
            case 2:
                made[at : at + 8] = r.choice((b"\xff", b"\x00", b"\x7f")) * 8
            case 3:
                made[at : at + 4] = r.randbytes(4)
            case 4:
                del made[at : at + r.choice((1, 8, 1000))]
            case 5:
                made[at:at] = made[at : at + r.choice((1, 8, 1000))]
            case _:
                del made[at:]
        if not made:
            return b""
        end = max(1, min(len(made), first or len(made)))
    return bytes(made)


def mutated_tensors(data: bytes, r: random.Random) -> bytes:
    """Change the header of a safetensors file, with its length made right, or any of its bytes."""
    if r.random() < 0.4:
        return mutated_bytes(data, r, first=r.choice((16, 4_000, None)))
    size = int.from_bytes(data[:8], "little")
    header = mutated_json(data[8 : 8 + size], r)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def mutated_template(text: bytes, r: random.Random) -> bytes:
    """Put a hostile piece into a chat template."""
    pieces = (
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{% set x = [] %}{% for i in range(99999) %}{{ x.append(x) }}{% endfor %}{{ x }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | tojson * 10**6 }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{{ 2 ** 10 ** 9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ messages[0].content.format(messages[0].content.__class__) }}",
        "{{ range(10**12) | list }}",
        "{{ namespace(x=lipsum) }}",
    )
    at = r.randrange(len(text) + 1)
    return (
        text[:at] + r.choice(pieces).encode() + text[at:]
        if r.random() < 0.7
        else mutated_bytes(text, r)
    )


# --- cases ----------------------------------------------------------------------------------------

#: How often each: (folder or file of the world, the file that is changed, how).
TARGETS: dict[str, tuple[int, str, str, Callable[[bytes, random.Random], bytes]]] = {
    "safetensors": (5, "exported", "model.safetensors", mutated_tensors),
    "config": (5, "exported", "config.json", mutated_json),
    "tokenizer": (5, "exported", "tokenizer.json", mutated_json),
    "tokenizer_config": (2, "exported", "tokenizer_config.json", mutated_json),
    "gguf": (
        5,
        "lm.gguf",
        "",
        lambda d, r: mutated_bytes(d, r, first=r.choice((32, 2_000, 20_000))),
    ),
    "index": (4, "sharded", "model.safetensors.index.json", mutated_json),
    "spec": (4, "native", "spec.json", mutated_json),
    "quantization": (3, "quantized", "quantization.json", mutated_json),
    "weights": (3, "quantized-4", "model.safetensors", mutated_tensors),
    "run": (3, "runs/lm/checkpoints/step-000006", "run.json", mutated_json),
    "text of any": (3, "exported", "config.json", mutated_bytes),
    "template": (1, "exported", "chat_template.jinja", mutated_template),
}


def attack(plan: Plan, cases: Iterable[int]) -> Iterator[tuple[int, Found]]:
    """Open each mutated model in a process with bounds, and use it if it opens."""
    world = make_models()
    watch()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:

        def judge(case: int) -> Found:
            return judged(world, Path(name), chance("files", plan.seed, case))

        judge(0)  # what is imported late is imported before the watch counts
        yield from many_in_child(judge, cases, seconds=SECONDS * 3, megabytes=MEGABYTES)


#: Seconds of processor time and megabytes that a file may cost.
SECONDS, MEGABYTES = 10.0, 2_000.0
#: What was seen of that by the watch.
opened: list[str] = []


def watch() -> None:
    """Note from now on what a file must never cause: code, processes, connections, writing."""
    watched = {"os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect"}

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in watched or (
            event == "subprocess.Popen" and "chat/worker" not in str(arguments)
        ):
            opened.append(f"{event} {str(arguments)[:100]}")

    sys.addaudithook(note)


def judged(world: Path, place: Path, r: random.Random) -> Found:
    """Mutate a file of a model, open it, encode, predict and decode; judge what came of it."""
    kind = r.choices(list(TARGETS), [target[0] for target in TARGETS.values()])[0]
    _, source, name, mutate = TARGETS[kind]
    original = world / source / name if name else world / source
    folder = planted(world, place, source, name, mutate(original.read_bytes(), r))
    opened.clear()
    began = time.process_time()
    outcome = use_model(folder, chat=kind == "template")
    seconds = time.process_time() - began
    happened = caused(place)
    return Found(f"{kind}: {outcome}", bool(happened) or seconds > SECONDS, seconds, happened)


def planted(world: Path, place: Path, source: str, name: str, data: bytes) -> Path:
    """Copy a model or a run, with other bytes in one of its files; its hashes are right."""
    folder = place / f"case{Path(source).suffix}"
    if folder.is_dir():
        shutil.rmtree(folder)
    if not name:
        folder.write_bytes(data)
        return folder
    shutil.copytree(world / source, folder, copy_function=shutil.copyfile)
    path = folder / name
    path.write_bytes(data)
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    if path.name != "MANIFEST.json" and (path.parent / "MANIFEST.json").is_file():
        _hash_again(path.parent)  # hostile, not damaged
    return folder


def caused(place: Path) -> str:
    """Return what a file did that it must not: nothing, if all is well."""
    return "; ".join([*opened, *(["the canary is there"] if (place / "canary").exists() else [])])


def use_model(folder: Path, *, chat: bool = False) -> str:
    """Open a model, or its chat template; encode, predict and decode."""
    from glassformer.adapters.chat.template import read_chat
    from glassformer.adapters.load import load
    from glassformer.spec.errors import FileError, GlassError, InputError, MachineError

    try:
        if chat:
            template = read_chat(folder)
            try:
                template.render([{"role": "user", "content": "the cat"}])
            finally:
                template.close()
            return "used"
        model = load(folder)
        tokenizer = model.get_tokenizer()
        text = "the cat sat"
        if tokenizer is not None:
            tokenizer.decode(tokenizer.encode(text)[:50])
        model.generate([1, 2, 3], max_new_tokens=2)
    except FileError:
        return "refused as a bad file"
    except InputError:
        return "refused as bad input"
    except MachineError:
        return "refused: more than the machine has"
    except GlassError as error:
        return f"refused: {type(error).__name__}"
    return "used"


def _hash_again(folder: Path) -> None:
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
