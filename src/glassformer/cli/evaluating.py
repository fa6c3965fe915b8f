"""What `glass evaluate` does without a suite: measure a run, keep the result, tell it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glassformer.cli.device import check_device
from glassformer.cli.finding import find_run
from glassformer.lab import session
from glassformer.lab.confusion import confusion_csv, confusion_text
from glassformer.lab.evaluate import Evaluation
from glassformer.store.rundir import RunDirectory, plain_numbers


def evaluate_run(
    text: str, *, runs: Path, split: str | None, device: str, threads: int | None
) -> Evaluation:
    """Measure a run's checkpoint on a split, and leave the result in its eval folder."""
    check_device(device)
    path = find_run(text, runs)
    result = session.evaluate(path, split=split, device=device, threads=threads)
    directory = RunDirectory(Path(path.partition("@")[0]))
    split = result.split
    directory.write_json(f"eval/{split}.json", result.to_dict())
    lines = (json.dumps(error) for error in result.errors)
    directory.write(f"eval/{split}-errors.jsonl", "".join(f"{line}\n" for line in lines))
    for group, table in result.confusion.items():
        directory.write(f"eval/{split}-confusion-{group}.csv", confusion_csv(table))
    return result


def evaluation_json(evaluation: Evaluation) -> str:
    """The result for scripts; a number that is not finite is a text."""
    return json.dumps(plain_numbers(evaluation.to_dict()), allow_nan=False)


def evaluation_text(evaluation: Evaluation, *, width: int = 80) -> str:
    """The result for people, no wider than their terminal."""
    lines = [
        f"{evaluation.split}: {evaluation.examples:,} examples",
        f"  loss {evaluation.loss:.4f}  accuracy {evaluation.accuracy:.2%}  "
        f"exact match {evaluation.exact_match:.2%}",
    ]
    for head, values in evaluation.heads.items():
        lines.append(f"  {head}: loss {values['loss']:.4f}, accuracy {values['accuracy']:.2%}")
    for name, value in evaluation.oracle.items():
        lines.append(f"  {name} {value:.4f}")
    for group, labels in evaluation.by.items():
        lines.append(f"by {group}")
        for label, share in labels.items():
            count = evaluation.counts[group][label]
            lines.append(f"  {label:<12}{share:>9.2%}  of {count:,}")
    lines += decoded_lines(evaluation.decoded)
    for group, table in evaluation.confusion.items():
        lines += ["", confusion_text(group, table, width=width)]
    return "\n".join(lines)


def decoded_lines(decoded: Mapping[str, Any]) -> list[str]:
    """The answers that the model gave on its own; nothing where it was not asked."""
    if not decoded:
        return []
    scores = {"chrf": "chrF", "bleu": "BLEU"}
    told = "".join(f"  {scores[key]} {decoded[key]:.2f}" for key in scores if key in decoded)
    lines = ["decoded, from the source alone", f"  exact match {decoded['exact_match']:.2%}{told}"]
    for group, labels in decoded["by"].items():
        shares = ", ".join(f"{label} {share:.1%}" for label, share in labels.items())
        lines.append(f"  by {group}: {shares}")
    return lines
