"""Mutated model files: only our errors, nothing executed, within seconds and megabytes."""

import contextlib
import io
import json
import random
import shutil
from pathlib import Path

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
    (Path("exported") / "chat_template.jinja").write_text(CHAT)
