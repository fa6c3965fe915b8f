"""`python -m bench audit`: the certificate on every language model class of transformers.

Each class is built tiny from its config and verified in a process of its own with a time limit.
`--write` puts the table into docs/audit.md, with a reason for each red row; a row without a reason
is listed as such.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.audit_reproductions import reproduced
from bench.clock import said
from bench.tiny_models import Entry, entries

PAGE = Path(__file__).parents[1] / "docs" / "audit.md"
REASONS = Path(__file__).parent / "audit_reasons.json"
INTRODUCTION = """# The certificate on other libraries' models

Every causal, masked and encoder-decoder language model class of transformers {transformers}
(torch {torch}, CPU, float32) that builds from its default config made tiny, with random weights of
unit scale. This page is written by `python -m bench audit --write`; the models are made in
`bench/tiny_models.py`. A prefix model that reads its whole input both ways is verified with
`causal=False`, which its config does not say: {told}.

| kind | verified | no failure | rows offered: fewest, median | mean CPU seconds |
|---|---|---|---|---|
"""
RED_ROWS = """## Red rows

*again*: the same comparison by `python -m bench.audit_reproductions KIND TYPE`, with torch and
transformers alone: a relative gap, or the number of generated tokens that differ. *defect*: two
ways of computing the same thing disagree in this release. *by design*: the model does what its
authors meant. *open*: not explained yet.

| model | row | gap | again | what it is |
|---|---|---|---|---|
"""
#: Found on models that are not in the table, each with lines of torch and the library alone.
ELSEWHERE = """## Found elsewhere

The same certificate on models in wrappers and other precisions, red for a reason that a few lines
of torch and the library show:

- peft 0.21.2, C3A: *gradients = central differences*. The backward of its circular convolution is
  that of the transposed one:

      x = torch.randn(1, 2, 8, dtype=torch.float64, requires_grad=True)
      w = torch.randn(1, 1, 8, dtype=torch.float64, requires_grad=True)
      convolve = BlockCircularConvolution.apply
      torch.autograd.gradcheck(convolve, (x, w), raise_exception=False)  # False

- peft 0.21.2, Lily: *the future changes no bit of the past*. Its router averages over all tokens of
  a batch, so that another last token moves the logits before it.
- transformers 5.22.2, a Llama in float64 with eager attention: *fused attention = eager attention*.
  Behind padding on the left every logit is NaN: the mask holds float64's smallest number, and the
  softmax runs in float32.

      model(tokens, attention_mask=two_zeros_then_ones).logits[0, 2:].isnan().all()  # True
"""
#: Seconds after which a model is given up.
LIMIT = 300
#: What a caller must say, since no config does: these read their whole input both ways.
TOLD: dict[str, dict[str, Any]] = {"cpmant": {"causal": False}}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--write", action="store_true", help="write docs/audit.md")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, one thread each")


def verify_one(entry: Entry) -> dict[str, Any]:
    """Build and verify one model; return what the report says."""
    import torch
    from transformers.utils import logging

    import glassformer as gf
    from bench.tiny_models import build

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found: dict[str, Any] = {
        "kind": entry.kind,
        "type": entry.model_type,
        "class": entry.class_name,
    }
    try:
        model = build(entry)
    except Exception as error:
        return {**found, "unbuilt": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    start = time.process_time()
    try:
        report = gf.verify(model, **TOLD.get(entry.model_type, {}))
    except gf.spec.errors.GlassError as error:
        return {**found, "refused": str(error), "seconds": time.process_time() - start}
    except Exception:
        return {**found, "crashed": traceback.format_exc(), "seconds": time.process_time() - start}
    return {**found, "seconds": time.process_time() - start, **report.to_dict()}


def _child(pipe: Any, entry: Entry) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    pipe.send(verify_one(entry))


def results(chosen: list[Entry], *, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Verify each class in a process of its own, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch._dynamo",  # a few seconds, on first use
            "transformers.generation.utils",
            "transformers.models.llama.modeling_llama",
            "glassformer.checks.report",
        ]
    )

    def verified(entry: Entry) -> dict[str, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, entry))
        process.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(LIMIT) else _lost(entry, f"more than {LIMIT} s")
        except EOFError:
            return _lost(entry, "the process ended")
        finally:
            process.kill()
            process.join()

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(verified, chosen)


def _lost(entry: Entry, why: str) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "type": entry.model_type,
        "class": entry.class_name,
        "crashed": why,
    }


def offered(found: dict[str, Any]) -> int:
    """Count the rows that were offered."""
    return sum(c["verdict"] not in ("not offered", "error") for c in found["checks"])


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of model, after all were verified."""
    wanted = set(filter(None, asked.only.split(",")))
    sample = ("llama", "gpt2", "bert", "t5")
    chosen = [
        e
        for e in entries()
        if (e.model_type in wanted) or (not wanted and (not quick or e.model_type in sample))
    ]
    found = []
    for one in results(chosen, jobs=asked.jobs):
        found.append(one)
        yield said(
            "audit",
            f"{one['kind']} {one['type']}",
            summary(one),
            1000 * one["seconds"] if "seconds" in one else None,
        )
    verified = [one for one in found if "checks" in one]
    for kind in dict.fromkeys(one["kind"] for one in verified):
        of_kind = [one for one in verified if one["kind"] == kind]
        rows = [offered(one) for one in of_kind]
        yield said(
            "audit",
            f"{kind}: {len(of_kind)} verified",
            f"rows offered: median {statistics.median(rows):.0f}, fewest {min(rows)}",
            1000 * statistics.mean(one["seconds"] for one in of_kind),
        )
    if asked.write:
        PAGE.write_text(page(found), encoding="utf-8")


def summary(one: dict[str, Any]) -> str:
    """Return what happened to one model, in a few words."""
    for name in ("unbuilt", "refused", "crashed"):
        if name in one:
            return f"{name}: {one[name].splitlines()[-1][:80]}"
    red = [c["name"] for c in one["checks"] if c["verdict"] == "bug"]
    return f"{one['passed']} passed, {one['failed']} failed, {one['warnings']} warnings" + (
        f": {'; '.join(red)}" if red else ""
    )


def closest(verified: list[dict[str, Any]]) -> str:
    """Return the largest share of its tolerance that a passed row has."""
    shares = [
        check["worst"] / check["tolerance"]
        for one in verified
        for check in one["checks"]
        if check["verdict"] == "passed" and check["tolerance"] and check["worst"]
    ]
    shares.sort()
    return f"{shares[-1]:.2f} (99th percentile {shares[int(0.99 * len(shares))]:.2f})"


# --- the page -----------------------------------------------------------------------------------


def page(found: list[dict[str, Any]]) -> str:
    """Return docs/audit.md."""
    reasons: dict[str, dict[str, str]] = json.loads(REASONS.read_text(encoding="utf-8"))
    import torch
    import transformers

    verified = [one for one in found if "checks" in one]
    lines = INTRODUCTION.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        told=", ".join(TOLD),
    ).splitlines()
    for kind in dict.fromkeys(one["kind"] for one in verified):
        of_kind = [one for one in verified if one["kind"] == kind]
        rows = [offered(one) for one in of_kind]
        seconds = [one["seconds"] for one in of_kind]
        lines.append(
            f"| {kind} | {len(of_kind)} | {sum(not one['failed'] for one in of_kind)} "
            f"| {min(rows)}, {statistics.median(rows):.0f} | {statistics.mean(seconds):.1f} |"
        )
    seconds = [one["seconds"] for one in verified]
    crashes = sum("crashed" in one for one in found)
    lines += [
        "",
        f"All {len(verified)}: {statistics.mean(seconds):.1f} CPU seconds on average, "
        f"{statistics.median(seconds):.1f} at the median; {crashes} lost or given up after "
        f"{LIMIT} s. The largest agreeing gap is {closest(verified)} of its tolerance.",
        "",
        *RED_ROWS.splitlines(),
    ]
    counts: Counter[str] = Counter()
    for one in verified:
        for check in one["checks"]:
            if check["verdict"] == "bug":
                reason = reason_for(reasons, one, check["name"])
                counts[reason.split(":")[0]] += 1
                gap = "no match" if check["worst"] is None else f"{check['worst']:.1e}"
                bar = "exact" if not check["tolerance"] else f"{check['tolerance']:.1e}"
                again = reproduced(one["kind"], one["type"], check["name"])
                lines.append(
                    f"| {one['type']} ({one['kind']}) | {check['name']} | {gap} of {bar} | {again} "
                    f"| {reason} |"
                )
    lines += ["", total(lines, counts), ""]
    lines += [*ELSEWHERE.splitlines(), "", *warnings_of(verified), *left_out(found)]
    return "\n".join(lines) + "\n"


def total(lines: list[str], counts: Counter[str]) -> str:
    """Return how many failures there are, from how many causes, in how many model types."""
    rows = [line.split(" | ") for line in lines if line.endswith("|") and "| defect: " in line]
    causes = {row[-1] for row in rows}
    types = {row[0].split()[1] for row in rows}
    words = f"{sum(counts.values())} failures: {len(rows)} show defects, which have {len(causes)} "
    words += f"causes in {len(types)} model types (one cause can fail several checks of a model)"
    rest = ", ".join(f"{n} {name}" for name, n in counts.most_common() if name != "defect")
    return f"{words}; {rest}." if rest else f"{words}."


def reason_for(reasons: dict[str, dict[str, str]], one: dict[str, Any], row: str) -> str:
    """Return the reason that is written down for a red row."""
    own = reasons.get(f"{one['kind']} {one['type']}", reasons.get(one["type"], {}))
    return own.get(row) or own.get("*") or "open: not explained yet"


def warnings_of(verified: list[dict[str, Any]]) -> list[str]:
    """Return the warnings by row and note, with the number of models."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in verified:
        for check in one["checks"]:
            if check["verdict"] in ("limit", "rounding", "unclear"):
                note = "" if check["verdict"] != "limit" else generic(check["note"])
                counts[check["verdict"], check["name"], note] += 1
    lines = ["## Warnings", "", "| verdict | row | models | what |", "|---|---|---|---|"]
    for (verdict, name, note), n in counts.most_common():
        lines.append(f"| {verdict} | {name} | {n} | {note} |")
    return [*lines, ""]


def generic(note: str) -> str:
    """Return a note without names and counts of one model."""
    if note.startswith("this forward does not use"):
        return "this forward does not use all parameters"
    if " counts padding" in note:
        return "a position table counts padding, and no position_ids are taken: pad on the right"
    return note


def left_out(found: list[dict[str, Any]]) -> list[str]:
    """Return the list of what was not verified, and why."""
    lines = ["## Not verified", ""]
    for one in found:
        for name in ("unbuilt", "refused", "crashed"):
            if name in one:
                why = one[name].splitlines()[-1] if name == "crashed" else one[name].splitlines()[0]
                lines.append(f"- {one['kind']} {one['type']}: {name}, {why[:200]}")
    return lines
