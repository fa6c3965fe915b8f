"""Mistakes in the examples: ids, splits, truncated texts, rare classes."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from glasscheck.foreign import config_of
from glasscheck.measure import NotOffered
from glasscheck.patients import Patient
from glasscheck.setups import (
    IGNORED,
    Symptom,
    ids_in,
    labels_in,
    mistake,
    passed,
    shown,
    warning,
)

# B batch, T length, V classes


def vocabulary(p: Patient) -> Symptom:
    """Ids, tokenizer, embedding, classes and special tokens fit each other."""
    tokens = [ids for batch in p.need_batches() if (ids := ids_in(batch)) is not None]
    if not tokens:
        raise NotOffered("no token ids in the batches")
    top, low, rows = max(int(t.max()) for t in tokens), min(int(t.min()) for t in tokens), p.classes
    if top >= rows or low < 0:
        wrong = top if top >= rows else low
        return mistake(
            f"the batches hold the id {wrong}, the model embeds 0 to {rows - 1}",
            f"model.resize_token_embeddings({top + 1})  # or the tokenizer that belongs to it",
        )
    labels = [found for batch in p.batches if (found := labels_in(batch)) is not None]
    width = _classes_of(p)
    if labels and width is not None:
        highest = max(int(found.max()) for found in labels)
        lowest = min(
            int(found[found != IGNORED].min()) for found in labels if (found != IGNORED).any()
        )
        if highest >= width or lowest < 0:
            wrong = highest if highest >= width else lowest
            return mistake(
                f"the labels hold the class {wrong}, the model predicts 0 to {width - 1}",
                f"num_labels={highest + 1}  # or labels that begin at 0",
            )
    size = _size_of(p.tokenizer)
    if size is None:
        return passed(f"ids up to {top} of {rows}; no tokenizer was given")
    if size > rows:
        return mistake(
            f"the tokenizer has {size} ids, the model embeds {rows}",
            f"model.resize_token_embeddings({size})",
        )
    if top >= size:
        return mistake(
            f"the batches hold the id {top}, the tokenizer has 0 to {size - 1}",
            "tokenize the data again with this tokenizer",
        )
    # Tables are filled up to a multiple of 64 or 128; rows beyond that belong to another tokenizer.
    if rows > 1.25 * size + 128:
        return warning(
            f"the tokenizer has {size} ids, the model embeds {rows}: {rows - size} are never used",
            f"vocab_size={size}",
        )
    config = config_of(p.model)
    for name in ("eos", "pad", "bos"):
        theirs = getattr(config, f"{name}_token_id", None)
        ours = getattr(p.tokenizer, f"{name}_token_id", None)
        if isinstance(theirs, int) and isinstance(ours, int) and theirs != ours:
            return mistake(
                f"{name} is {ours} in the tokenizer and {theirs} in the model's config",
                f"model.config.{name}_token_id = tokenizer.{name}_token_id",
            )
    unknown = getattr(p.tokenizer, "unk_token_id", None)
    if isinstance(unknown, int):
        every = torch.cat([t.reshape(-1) for t in tokens])
        share = float((every == unknown).float().mean())
        # A tokenizer of the same language knows nearly all of it.
        if share > 0.1:
            return mistake(
                f"{share:.0%} of the tokens are unknown to the tokenizer (id {unknown})",
                "train the tokenizer on this data, or use one of bytes",
            )
    return passed(f"ids up to {top}, tokenizer {size}, embedding {rows}")


def _size_of(tokenizer: Any) -> int | None:
    if tokenizer is None:
        return None
    try:
        return len(tokenizer)
    except TypeError:
        found = getattr(tokenizer, "vocab_size", None)
        return found if isinstance(found, int) else None


def _classes_of(p: Patient) -> int | None:
    """Return the width of the logits, where a call without a loss gives it."""
    try:
        logits = p.logits(p.smaller(p.batches[0])).logits
    except Exception:  # a stranger's model may raise anything; other checks report it
        return None
    return None if logits is None else logits.shape[-1]


def split_leak(p: Patient) -> Symptom:
    """No example of the validation is in the training, and few examples are there twice."""
    train = p.rows("train")
    if len(train) < 8:
        raise NotOffered("fewer than 8 examples were given")
    likely = _coincidence(train.tokens)
    every, val = Counter(train.tokens), p.rows("val")
    common = [row for row in val.tokens if row in every]

    def copied(row: tuple[int, ...]) -> bool:
        return len(train) * likely ** len(row) < 0.01

    twice = sum(count - 1 for row, count in every.items() if copied(row))
    leaked = [row for row in common if copied(row)]
    across = f"{len(common)} of {len(val)} validation examples are among {len(train)} of training"
    if len(leaked) > max(1, 0.01 * len(val)):
        return mistake(
            f"{across}, such as {shown(leaked[0], p.tokenizer)}",
            "split distinct examples: train = [x for x in train if x not in set(val)]",
        )
    size = _gram(train.tokens)
    parts = {gram for row in train.tokens for gram in _grams(row, size)}
    shared = [row for row in val.tokens if _covered(row, parts, size) > 0.5]
    # Manuals and licences repeat themselves: 14 % of the longest windows of Python's do.
    if val.tokens and len(shared) > max(1, 0.3 * len(val)):
        return mistake(
            f"{len(shared)} of {len(val)} validation examples share more than half of their text "
            f"with the training, such as {shown(shared[0], p.tokenizer)}",
            "split the documents before they are cut into windows",
        )
    labels: dict[tuple[int, ...], set[int | None]] = {}
    for row, answer in zip(train.tokens, train.answers, strict=True):
        labels.setdefault(row, set()).add(answer)
    torn = sum(every[row] for row, answers in labels.items() if len(answers) > 1)
    if torn > 0.05 * len(train):
        return mistake(
            f"{torn} of {len(train)} examples have the same text as another with another answer",
            "look at them: [x for x, answers in by_text.items() if len(answers) > 1]",
        )
    repeated = len(train) - len(every)
    again = f"{repeated} of {len(train)} training examples are repetitions"
    if twice > 0.05 * len(train):
        return mistake(again, "train = list(dict.fromkeys(train))")
    found = [
        again + _excused(repeated - twice, repeated),
        across + _excused(len(common) - len(leaked), len(common))
        if val.tokens
        else "no validation batches",
    ]
    return passed("; ".join(found))


def _excused(likely: int, found: int) -> str:
    """Say how many of the equal rows are not held against a set-up: short ones, of few symbols."""
    if not likely:
        return ""
    return f" ({'as' if likely == found else f'{likely} as'} rows so short coincide by chance)"


def _coincidence(rows: Sequence[Sequence[int]]) -> float:
    """Return the probability that two rows that agree so far agree in the next token too.

    Estimated from pairs of neighbours: the sum over tokens of p(a) * sum p(b | a) ** 2. Short rows
    of few symbols repeat by chance; only those that hardly would are called repetitions.
    """
    pairs: dict[int, Counter[int]] = {}
    for row in rows[:500]:
        for a, b in pairwise(row):
            pairs.setdefault(a, Counter())[b] += 1
    total = sum(sum(c.values()) for c in pairs.values())
    same = sum(sum(n * n for n in c.values()) / sum(c.values()) for c in pairs.values())
    return min(0.999, same / total) if total else 0.999


def _gram(rows: Sequence[Sequence[int]]) -> int:
    """Return the tokens of a piece that two texts have in common by copying, not by chance.

    16 for a text; in short rows half of them, if so many tokens hardly agree by chance.
    """
    usual = round(statistics.median(len(row) for row in rows))
    total = sum(len(row) for row in rows)
    rare = math.ceil(math.log(0.01 / total) / math.log(_coincidence(rows)))
    return max(rare, min(16, usual // 2))


def _grams(row: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(row[i : i + size]) for i in range(len(row) - size + 1))


def _covered(row: Sequence[int], parts: set[tuple[int, ...]], size: int) -> float:
    """Return the share of a row that lies in pieces known from elsewhere."""
    covered, end = 0, 0
    for i, gram in enumerate(_grams(row, size)):
        if gram in parts:
            covered += i + size - max(i, end)
            end = i + size
    return covered / max(1, len(row))


def truncation(p: Patient) -> Symptom:
    """Examples are not cut at a limit: they end as the short ones end, and have an answer."""
    rows = p.rows("train")
    if len(rows) < 8:
        raise NotOffered("fewer than 8 examples were given")
    lengths = [len(row) for row in rows.tokens]
    longest = max(lengths)
    empty = [length for length, count in zip(lengths, rows.counted, strict=True) if count == 0]
    full_ones = empty.count(longest)  # cut at the limit; others may have none by chance
    if full_ones > 0.02 * len(rows) and 2 * full_ones > len(empty):
        return mistake(
            f"{full_ones} of {len(rows)} examples have {longest} tokens and no target that counts: "
            "the answer is cut away",
            f"max_length={2 * longest}  # or drop what does not fit: labels.ne(-100).any(1)",
        )
    limit = p.context
    if limit is not None and rows.longest > limit:
        return mistake(
            f"examples have up to {rows.longest} tokens, the model takes {limit}",
            f"max_position_embeddings={rows.longest}  # or shorter examples",
        )
    if p.knows_truth:
        raise NotOffered("the task knows the truth of every target, also where a walk is cut")
    full = [row for row in rows.tokens if len(row) == longest]
    short_ones = [row for row in rows.tokens if len(row) < longest and row]
    if len(full) == len(rows) or len(short_ones) < 8 or longest < 8:
        raise NotOffered("all examples have the same length: windows of a text, or very few")
    end, count = Counter(row[-1] for row in short_ones).most_common(1)[0]
    inside = sum(row[:-1].count(end) for row in short_ones) / sum(map(len, short_ones))
    usual = count / len(short_ones) if inside < 0.01 else 0.0  # a token that only ends
    cut_off = [row for row in full if row[-1] != end]
    share = len(cut_off) / len(rows)
    fix = f"max_length={2 * longest}  # or cut the prompt, never the end"
    if usual > 0.9 and share > 0.02:
        return mistake(
            f"{len(cut_off)} of {len(rows)} examples have {longest} tokens and do not end with "
            f"{shown((end,), p.tokenizer)}, as {usual:.0%} of the shorter ones do",
            fix,
        )
    # A text with one answer and no end token: a peak that the lengths just below do not announce.
    near = sum(0.8 * longest <= length < longest for length in lengths)
    per_length = near / max(1, longest - math.ceil(0.8 * longest))
    answered = rows.answers[0] is not None and usual <= 0.9
    if answered and share > 0.1 and len(full) > 8 * max(per_length, 1.0):
        return mistake(
            f"{len(full)} of {len(rows)} examples have exactly {longest} tokens, and only "
            f"{per_length:.1f} each of the lengths just below",
            fix,
        )
    return passed(f"{len(cut_off)} of {len(rows)} end at the longest length, {longest}")


def rare_class(p: Patient) -> Symptom:
    """A step sees every class: with n targets a step it misses one of share f with (1 - f)^n."""
    rows = p.rows("train")
    known = [answer for answer in rows.answers if answer is not None and answer != IGNORED]
    targets = p.accumulate * _rows_of(p)
    if not known:
        found = [v for v in p.views() if v.per_position and v.shift()[1] < 0.5]
        if not found or found[0].logits.shape[-1] > FEW_CLASSES:
            raise NotOffered("no classes: the answers are tokens")
        seen = [int(t) for v in found for t in v.targets[v.counted]]
        known = list(rows.labels.elements()) or seen
        targets = p.accumulate * round(len(seen) / len(found))
    counts = Counter(known)
    torn = [labels_in(batch) for batch in p.batches if not p.ours]
    single = [len(t.unique()) == 1 for t in torn if t is not None and t.ndim == 1 and len(t) > 3]
    if len(single) > 2 and all(single) and max(counts.values()) < 0.9 * len(known):
        return mistake(
            f"each of {len(single)} batches holds one class only, of {len(counts)}",
            "DataLoader(..., shuffle=True)",
        )
    if len(counts) > FEW_CLASSES:
        raise NotOffered(f"{len(counts)} classes: words rather than labels")
    if len(counts) == 1:
        return mistake(
            f"all of {len(known)} targets are class {known[0]}", "shuffle: DataLoader(shuffle=True)"
        )
    unseen = sorted(set(filter(None, p.rows("val").answers)) - set(counts))
    if unseen and len(known) >= 100:
        return mistake(
            f"class {unseen[0]} is in the validation and in none of {len(known)} training examples",
            "train_test_split(..., stratify=labels)",
        )
    rare, count = min(counts.items(), key=lambda kv: kv[1])
    share = count / len(known)
    missed = (1 - share) ** targets
    said = (
        f"class {rare} is {share:.2%} of the targets; a step of {targets} misses it in {missed:.0%}"
    )
    # Nine steps of ten without it: its gradient comes as rare, large jolts.
    if missed > 0.9:
        wanted = math.ceil(math.log(0.5) / math.log1p(-share))
        fix = f"train.batch_size={wanted}" if p.ours else f"batch_size={wanted}"
        return mistake(said, f"{fix}  # half of the steps see it; or WeightedRandomSampler")
    return passed(said)


FEW_CLASSES = 20


def _rows_of(p: Patient) -> int:
    sizes = [len(ids) for batch in p.need_batches() if (ids := ids_in(batch)) is not None]
    return round(statistics.mean(sizes)) if sizes else 1
