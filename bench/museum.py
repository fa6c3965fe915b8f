"""`python -m bench museum`: bugs that packages shipped, and the rows that see them.

Each release is installed into a folder of its own under build/museum (`pip install --target
--no-deps`), and a process with that folder first on its path builds a model and verifies it. The
process is told which model to build, not what to look for. `--write` makes docs/museum.md.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.clock import said

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "museum.md"
SHELF = ROOT / "build" / "museum"

CACHED = "cached = uncached, token by token"
FUTURE = "the future changes no bit of the past"
EXTRAS = "attentions, hidden states, a cache read, same logits"
CHUNKS = "a prompt in chunks = at once"
STATIC = "generate: static cache = growing cache"
BATCH = "generate: a batch = each prompt alone"
BEAMS = "generate: beams, cache on = off"
WINDOW = "past the sliding window, cached = uncached"
FUSED = "fused attention = eager attention"
EMBEDS = "embeddings given = token ids"
LOSS = "loss = cross entropy by hand"
FOLDER = "save_pretrained and back, same bits"
MERGED = "adapters merged = beside the weights"
RIGHT = "more padding on the right changes nothing"


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A bug: the releases with and without it, the model that shows it, the row that turns red."""

    package: str
    bad: str
    good: str
    builder: str
    settings: dict[str, Any]
    row: str
    trigger: str
    seen: str
    beside: tuple[str, ...] = field(default=())  # other packages, the same for both releases


def _hf(
    class_name: str, bad: str, good: str, row: str, trigger: str, seen: str, **settings: Any
) -> Exhibit:
    given = {"class_name": class_name, **settings}
    return Exhibit("transformers", bad, good, "transformers", given, row, trigger, seen)


def _x(bad: str, good: str, row: str, trigger: str, seen: str, **settings: Any) -> Exhibit:
    return Exhibit("x-transformers", bad, good, "x-transformers", settings, row, trigger, seen)


EXHIBITS = (
    _hf(
        "BertLMHeadModel",
        "4.24.0",
        "4.25.1",
        CACHED,
        "BERT as decoder, relative positions, cache",
        "other text with the cache than without (pull request 20203)",
        position_embedding_type="relative_key_query",
    ),
    _hf(
        "BertLMHeadModel",
        "4.45.2",
        "4.48.0",
        BATCH,
        "BERT as decoder, prompts of mixed lengths",
        "a prompt continues otherwise in a batch; so with ELECTRA, RemBERT, Megatron-BERT",
    ),
    _hf(
        "MistralForCausalLM",
        "4.39.3",
        "4.40.0",
        WINDOW,
        "Mistral, longer than the sliding window",
        "the fused kernel ignored the window (pull request 30127), in three other models too",
    ),
    _hf(
        "LlamaForCausalLM",
        "4.40.0",
        "4.41.2",
        EXTRAS,
        "Llama, attention weights asked for",
        "`output_attentions=True` dropped the causal mask; so in Cohere",
    ),
    _hf(
        "LlamaForCausalLM",
        "4.40.0",
        "4.41.2",
        STATIC,
        "Llama, static cache",
        "other text with the static cache; so with Cohere",
    ),
    _hf(
        "LlamaForCausalLM",
        "4.39.3",
        "4.41.2",
        "generate: cache on = off",
        "Llama, `generate` without a cache",
        "other text without the cache",
    ),
    _hf(
        "Mamba2ForCausalLM",
        "4.45.2",
        "4.48.0",
        FUTURE,
        "Mamba-2",
        "a token's logits depended on the tokens after it",
        chunk_size=4,
        state_size=8,
        n_groups=1,
    ),
    _hf(
        "Mamba2ForCausalLM",
        "4.48.0",
        "5.16.1",
        BEAMS,
        "Mamba-2, beams",
        "beams find other hypotheses with the cache than without",
        chunk_size=4,
        state_size=8,
        n_groups=1,
    ),
    _hf(
        "DogeForCausalLM",
        "5.16.1",
        "5.22.2",
        FUTURE,
        "Doge with the fused kernel",
        "a token attended to the tokens after it (issue 48748)",
    ),
    _hf(
        "Qwen3NextForCausalLM",
        "4.57.1",
        "5.12.1",
        CHUNKS,
        "Qwen3-Next, a prompt read in chunks",
        "chunked prefill lost the state of the linear attention",
    ),
    _hf(
        "XGLMForCausalLM",
        "4.48.0",
        "4.51.3",
        LOSS,
        "XGLM, labels",
        "a label of PAD counted in the loss",
    ),
    _hf(
        "XGLMForCausalLM",
        "4.40.0",
        "4.45.2",
        EMBEDS,
        "XGLM, embeddings given",
        "`inputs_embeds` and token ids gave other logits; so in BioGPT",
    ),
    _hf(
        "Gemma2ForCausalLM",
        "4.53.3",
        "4.57.1",
        FUSED,
        "Gemma-2, fused against eager attention",
        "the fused kernel computed without soft-capping",
    ),
    _hf(
        "JetMoeForCausalLM",
        "4.57.1",
        "5.22.2",
        STATIC,
        "JetMoe, static cache",
        "other text with the static cache",
    ),
    _hf(
        "MoshiForCausalLM",
        "5.16.1",
        "5.22.2",
        FUSED,
        "Moshi's decoder without a mask",
        "eager and fused attention disagreed",
    ),
    _hf(
        "RecurrentGemmaForCausalLM",
        "5.0.0",
        "5.5.4",
        FOLDER,
        "RecurrentGemma, saved and loaded",
        "a loaded model gave other logits",
    ),
    _hf(
        "OpenAIGPTLMHeadModel",
        "4.57.1",
        "5.22.2",
        BATCH,
        "GPT, prompts of mixed lengths",
        "a prompt continues otherwise in a batch",
    ),
    _hf(
        "FalconForCausalLM",
        "5.22.2",
        "4.57.1",
        EXTRAS,
        "Falcon, attention weights asked for",
        "`output_attentions=True` drops the causal mask: today, and not in an older release",
    ),
    _x(
        "1.16.0",
        "1.17.3",
        RIGHT,
        "flash attention, padding",
        "the padding mask was ignored",
        attn_flash=True,
    ),
    _x(
        "1.22.0",
        "1.24.0",
        CACHED,
        "ALiBi, cache",
        "other logits with the cache",
        alibi_pos_bias=True,
    ),
    _x(
        "1.22.0",
        "1.24.0",
        CACHED,
        "flash attention, cache",
        "other logits with the cache (issue 187)",
        attn_flash=True,
    ),
    _x(
        "1.32.15",
        "1.37.10",
        FUTURE,
        "sparse attention, top k",
        "a token's logits depended on the tokens after it",
        attn_sparse_topk=3,
    ),
    Exhibit(
        "rotary-embedding-torch",
        "0.2.6",
        "0.2.7",
        "rotary",
        {},
        CACHED,
        "rotation with an offset",
        "stored frequencies forgot the offset (issue 11)",
    ),
    Exhibit(
        "hourglass-transformer-pytorch",
        "0.0.2",
        "0.0.3",
        "hourglass",
        {},
        FUTURE,
        "tokens shortened by two",
        "a shortened token held the one after it",
    ),
    Exhibit(
        "peft",
        "0.19.1",
        "0.21.0",
        "adapter",
        {"use_dora": True},
        MERGED,
        "DoRA on GPT-2's Conv1D, merged and unmerged",
        "after unmerging the model was another (issue 3531)",
    ),
)


#: Bugs that were tried and are not told apart by their row, so that they are no exhibits.
LEFT_OUT = {
    "transformers 4.46.3, Nemotron with a cache": "its forward returns none, so no row is offered",
    "transformers 4.48.0, Cohere-2 with a window of 4, a batch": "green in 4.53.3 and in 4.48.0",
    "transformers 4.45.2, Gemma-2 with a window of 4, a batch": "green in 4.53.3 and in 4.45.2",
    "transformers 4.57.1, Apertus saved and loaded": "green in 5.22.2 and in 4.57.1",
    "peft 0.10.0, DoRA merged": "red in 0.14.0 too, as the row also unmerges, mended in 0.21.0",
}


def companions(release: str) -> tuple[str, ...]:
    """Return the packages that a release of transformers wants in other versions than today's."""
    first, second = (int(part) for part in release.split(".")[:2])
    if (first, second) >= (5, 22):
        return ()
    tokenizers = {
        (4, 34): "0.13.3",
        (4, 40): "0.15.2",
        (4, 45): "0.19.1",
        (4, 47): "0.20.3",
        (4, 57): "0.21.4",
        (5, 16): "0.22.1",
    }
    wanted = next((v for until, v in tokenizers.items() if (first, second) < until), None)
    hub = "0.23.5" if (first, second) < (4, 40) else "0.36.0" if first < 5 else "1.5.0"
    client = ("httpx==0.28.1", "httpcore==1.0.9") if first >= 5 else ()
    own = () if wanted is None else (f"tokenizers=={wanted}",)
    return (*own, f"huggingface_hub=={hub}", *client)


def packages(exhibit: Exhibit, release: str) -> tuple[str, ...]:
    """Return every package that the process of this release needs."""
    own = f"{exhibit.package}=={release}"
    others = exhibit.beside
    for package in (own, *others):
        name, _, version = package.partition("==")
        if name == "transformers":
            others = (*others, *companions(version))
    return (own, *others)


def install(package: str) -> Path:
    """Install one release without its dependencies into its own folder, once."""
    folder = SHELF / package.replace("==", "-")
    if not folder.exists():
        SHELF.mkdir(parents=True, exist_ok=True)
        part = folder.with_name(folder.name + ".part")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
                *("--disable-pip-version-check", "--target", str(part), package),
            ],
            check=True,
            capture_output=True,
        )
        part.rename(folder)
    return folder


Model = tuple[str, str]  # the builder, and its settings as JSON


def model_of(exhibit: Exhibit) -> Model:
    """Return what the process of a release is told."""
    return exhibit.builder, json.dumps(exhibit.settings)


def certificates(wanted: tuple[str, ...], models: list[Model]) -> dict[Model, dict[str, Any]]:
    """Verify models in one process with these packages first on its path."""
    path = [*(SHELF / package.replace("==", "-") for package in wanted), ROOT / "src", ROOT]
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    listed = json.dumps([[builder, json.loads(settings)] for builder, settings in models])
    done = subprocess.run(
        [sys.executable, "-m", "bench.museum_models", listed],
        env=given,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    lost = {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}
    found = [json.loads(line) for line in lines]
    return dict(zip(models, found + [lost] * (len(models) - len(found)), strict=True))


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="", help="exhibits whose package or trigger has this")
    parser.add_argument("--write", action="store_true", help="write docs/museum.md")


@dataclass(frozen=True, slots=True)
class Shown:
    """An exhibit and its two certificates."""

    exhibit: Exhibit
    bad: dict[str, Any]
    good: dict[str, Any]

    def verdict(self, side: dict[str, Any]) -> str:
        """Return the verdict of the exhibit's row."""
        if "error" in side:
            return f"error: {side['error']}"
        return str(side["rows"].get(self.exhibit.row, {"verdict": "missing"})["verdict"])

    def gap(self, side: dict[str, Any]) -> str:
        """Return the gap of the exhibit's row."""
        worst = side.get("rows", {}).get(self.exhibit.row, {}).get("worst")
        return "no match" if worst is None else "0" if worst == 0 else f"{worst:.1e}"

    @property
    def told_apart(self) -> bool:
        """True if the row is red on the bad release and passes on the good one."""
        return self.verdict(self.bad) == "bug" and self.verdict(self.good) == "passed"


def results(chosen: list[Exhibit]) -> Iterator[Shown]:
    """Verify the models of each release in one process; return exhibits as they are complete."""
    processes: dict[tuple[str, ...], list[Model]] = {}
    for exhibit in chosen:
        for release in (exhibit.bad, exhibit.good):
            models = processes.setdefault(packages(exhibit, release), [])
            if model_of(exhibit) not in models:
                models.append(model_of(exhibit))
    for package in dict.fromkeys(p for wanted in processes for p in wanted):
        install(package)
    found: dict[tuple[tuple[str, ...], Model], dict[str, Any]] = {}
    waiting = list(chosen)
    with ThreadPoolExecutor(2) as pool:
        for wanted, sides in zip(
            processes, pool.map(lambda w: certificates(w, processes[w]), processes), strict=True
        ):
            found |= {(wanted, model): side for model, side in sides.items()}
            for exhibit in list(waiting):
                keys = [
                    (packages(exhibit, release), model_of(exhibit))
                    for release in (exhibit.bad, exhibit.good)
                ]
                if all(key in found for key in keys):
                    waiting.remove(exhibit)
                    yield Shown(exhibit, *(found[key] for key in keys))


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each exhibit, then their number."""
    chosen = [e for e in EXHIBITS if asked.only in f"{e.package} {e.trigger} {e.settings}"]
    if quick:
        chosen = chosen[:1]
    found = []
    for one in results(chosen):
        found.append(one)
        e = one.exhibit
        sides = f"{one.verdict(one.bad)} {one.gap(one.bad)} in {e.bad}"
        sides += f", {one.verdict(one.good)} {one.gap(one.good)} in {e.good}"
        yield said(
            "museum",
            f"{e.package}: {e.trigger}",
            f"{'told apart' if one.told_apart else 'MISSED'}: {e.row}: {sides}",
        )
    found.sort(key=lambda one: chosen.index(one.exhibit))
    count = sum(one.told_apart for one in found)
    names = {one.exhibit.package for one in found}
    yield said("museum", f"{len(found)} exhibits from {len(names)} packages", f"{count} told apart")
    if asked.write:
        PAGE.write_text(page(found), encoding="utf-8")


INTRODUCTION = """# A museum of bugs that shipped

Each exhibit is a bug in a release that people installed, and the row of the certificate that turns
red on it and green on the release without it. The certificate is not told what to look for: a
process with that release first on its path builds a tiny model and runs `gf.verify` on it.
`python -m bench museum` installs the releases into folders of their own and prints this table;
`--write` writes this page.

{count} of {total} bugs that were tried, from {packages} packages, are told apart; the others stand
below, with the reason. Each is another bug: where one mistake was copied into several models, one
stands for all. *gap*: relative to the largest logit; *no match*: other shapes, or NaN.

| package | with the bug | without | trigger | what users saw | row | gap with, without |
|---|---|---|---|---|---|---|
"""


def page(found: list[Shown]) -> str:
    """Return docs/museum.md."""
    names = {one.exhibit.package for one in found}
    count = sum(one.told_apart for one in found)
    lines = [
        INTRODUCTION.format(
            count=count, total=len(found) + len(LEFT_OUT), packages=len(names)
        ).rstrip("\n")
    ]
    for one in found:
        e = one.exhibit
        cells = (e.package, e.bad, e.good, e.trigger, e.seen, e.row)
        gaps = f"{one.gap(one.bad)}, {one.gap(one.good)}"
        mark = "" if one.told_apart else " (missed)"
        lines.append(f"| {' | '.join(cells)} | {gaps}{mark} |")
    lines += ["", "Other rows that are red, in the same certificates:", ""]
    for one in found:
        for release, side in ((one.exhibit.bad, one.bad), (one.exhibit.good, one.good)):
            others = [
                name
                for name, row in side.get("rows", {}).items()
                if row["verdict"] == "bug" and name != one.exhibit.row
            ]
            if others:
                what = f"{one.exhibit.package} {release}, {one.exhibit.trigger}"
                lines.append(f"- {what}: {'; '.join(others)}")
    lines += ["", "Tried, and not told apart:", ""]
    lines += [f"- {what}: {why}" for what, why in LEFT_OUT.items()]
    return "\n".join(lines) + "\n"
