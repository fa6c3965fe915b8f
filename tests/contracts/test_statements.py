"""Statements of the docs that name what the code can do, compared with the code."""

import json
import re

import pytest
from bench import audit, llama
from bench.families import CASES, without_native_step
from bench.families import spec_of as read_as

from glassformer.adapters.registry import ADAPTERS
from glassformer.generation.native.lowering import unknown_part
from glassformer.spec.model import ALiBi, ModelSpec, MoE
from glassformer.spec.presets import PRESETS
from tests.contracts.test_docs import ROOT

DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# --- the audit ----------------------------------------------------------------------------------


def red_rows() -> list[list[str]]:
    """The rows of the audit's table of failures: model, check, gap, again, what it is."""
    part = page("audit.md").split("## Red rows")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in re.findall(r"^\| .* \|$", part, re.M)][1:]


def test_the_audit_counts_causes_and_not_only_failures():
    defects = [row for row in red_rows() if row[-1].startswith("defect: ")]
    counts = (
        len(red_rows()),
        len(defects),
        len({row[-1] for row in defects}),
        len({row[0].split()[0] for row in defects}),
    )
    said = re.search(
        r"^(\d+) failures: (\d+) show defects, which have (\d+) causes in (\d+) model types",
        page("audit.md"),
        re.M,
    )
    assert said is not None and tuple(map(int, said.groups())) == counts
    lines = [f"| {' | '.join(row)} |" for row in red_rows()]
    kinds = [row[-1].split(":")[0] for row in red_rows()]
    assert audit.total(lines, audit.Counter(kinds)) in page("audit.md")


@pytest.mark.parametrize(
    "name", ["README.md", "docs/figures.md", "docs/index.md", "docs/verify.md"]
)
def test_who_counts_failures_of_the_audit_counts_their_causes_too(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "47 defects" not in text
    for line in text.splitlines():
        if re.search(r"\b47\b.*defects", line):
            assert "19 causes" in line


# --- families and parts ---------------------------------------------------------------------------


def written_with(has) -> set[str]:
    """The model types that are read and written, and whose spec has something."""
    both = {f.model_type for one in ADAPTERS.values() for f in one.families if f.written}
    return {c.model_type for c in CASES.values() if c.model_type in both and has(read_as(c))}


def has_experts(spec: ModelSpec) -> bool:
    return any(isinstance(block.ffn, MoE) for block in spec.decoder.blocks())


@pytest.mark.filterwarnings("ignore")
def test_the_families_with_experts_and_linear_biases_are_named():
    experts = written_with(has_experts)
    (line,) = re.findall(r"^- \*\*Hugging Face.*?\n(?=\n|- )", page("models.md"), re.M | re.S)
    assert experts and set(re.findall(r"`(\w+)`", line)) == experts
    biases = written_with(lambda spec: isinstance(spec.position, ALiBi))
    line = next(li for li in page("spec.md").splitlines() if "have linear biases" in li)
    assert biases and set(re.findall(r"`(\w+)`", line)) == biases


@pytest.mark.filterwarnings("ignore")
def test_the_models_without_a_native_step_are_named():
    refused = ", ".join(f"`{kind}`" for kind in without_native_step())
    assert f"of the table but {refused}:\n" in page("models-supported.md")


def test_every_preset_that_continues_text_has_a_native_step():
    """As docs/kernels.md says."""
    continuing = {name: make() for name, make in PRESETS.items() if name != "digits"}
    assert not {name: why for name, spec in continuing.items() if (why := unknown_part(spec))}
    assert len(continuing) == 13  # docs/learn/05-masks.md counts them


# --- figures --------------------------------------------------------------------------------------


def test_make_figures_runs_every_benchmark_but_those_that_the_page_names():
    text = page("figures.md")
    introduction, _, table = text.partition("| what |")
    needed = set(re.findall(r"python -m bench (\w+)", table))
    made = set(re.findall(r"-m bench (\w+)", (ROOT / "Makefile").read_text()))
    _, _, apart = introduction.partition("Run by their own commands")
    assert needed - made == set(re.findall(r"`(\w+)`", apart))


def test_the_chapter_on_training_quotes_the_findings_on_warmup():
    results = json.loads(page("findings.json"))["results"]

    def exact(task: str, part: str) -> list[float]:
        found = [
            results[f"{task} / {part} / seed {n}"]["splits"]["test"]["exact"] for n in range(3)
        ]
        return [100 * share for share in found]

    with_it = exact("reverse", "baseline / as the recipe")
    without = exact("reverse", "warmup / none")
    assert all(more > less for more, less in zip(with_it, without, strict=True))
    means = [f"{sum(found) / 3:.1f} %" for found in (with_it, without)]
    text = page("learn/06-training.md").replace("\n", " ")
    assert f"{means[0]} of the answers are right with warmup and {means[1]} without" in text


def test_the_table_of_llama_cpp_is_made_from_what_was_measured():
    """A build for the machine has a figure wherever the wheel has one."""
    kept = json.loads(llama.KEPT.read_text(encoding="utf-8"))
    (shown,) = llama.TABLE.findall(page("kernels.md"))
    assert shown == llama.table(kept)
    wheel = {key.removesuffix("AVX2") for key in kept if key.endswith("AVX2")}
    assert wheel == {key.removesuffix(llama.WIDE) for key in kept if key.endswith(llama.WIDE)}


@pytest.mark.parametrize(
    ("built", "words"), [(llama.WIDE, "built for the machine"), ("AVX2", "wheel of x")]
)
def test_the_figures_of_llama_cpp_are_those_that_were_measured(built, words):
    kept = json.loads(llama.KEPT.read_text(encoding="utf-8"))
    ratios = [
        f"{found['ours_over_it']:.2f}"
        for case in ("decode", "prefill")
        for ours in ("float32", "INT8", "INT4")
        for key, found in kept.items()
        if f", {ours}, 1 thread, {case}, " in key and key.endswith(f"CPU time, llama.cpp, {built}")
    ]
    rows = [line for line in page("figures.md").splitlines() if words in line.split(" | ")[0]]
    row = next(line for line in rows if "llama" in line)
    assert f"| {', '.join(ratios[:3])}; {', '.join(ratios[3:])} of its time" in row


@pytest.mark.parametrize("name", ["figures.md", "serve.md"])
def test_a_fair_build_of_llama_cpp_comes_before_the_wheel(name):
    """A row with our time or rate over llama.cpp's says what that was built for."""
    first = [line.split(" | ")[0] for line in page(name).splitlines() if line.startswith("|")]
    rows = [cell for cell in first if "llama" in cell and ("over " in cell or "beside" in cell)]
    assert rows and all("built for" in cell for cell in rows)
    assert "this machine" in rows[0] or "the machine" in rows[0]
