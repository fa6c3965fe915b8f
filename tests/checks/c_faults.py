"""Faults to plant in the C code: what a line becomes, and the row of `glass verify` that sees it."""

from dataclasses import dataclass

STEP = "a native training step = plain torch, its update the formula"
ARRAYS = "a native training step = plain torch, its update the formula"
NATIVE = "native step = plain step"
COMPANY = "served in company = alone, bit for bit"
QUANTIZED = "quantized: backends within their bound"
ROUNDED = "8-bit cache: native step = torch step"


@dataclass(frozen=True)
class CFault:
    """`old` becomes `new` in a file, in which FAULT is 1 while it is on; then this row is red."""

    name: str
    file: str
    old: str
    new: str
    caught_by: str
    preset: str


FAULTS = (
    CFault("the target without its smoothing", "train_parts.h", "row[loss->targets[m]] -= (1.0f - loss->smoothing) * weight;", "row[loss->targets[m]] -= (FAULT ? 1.0f : 1.0f - loss->smoothing) * weight;", STEP, "core"),
    CFault("a loss of the plain kind only", "train_parts.h", "loss->smoothing * (lse - mean / (float)V)) * weight;", "(FAULT ? 0.0f : loss->smoothing) * (lse - mean / (float)V)) * weight;", STEP, "core"),
    CFault("a norm's gradient without its projection", "train_parts.h", "FILL(SUM(along) / (float)D);", "FILL(FAULT ? 0.0f : SUM(along) / (float)D);", STEP, "qwen"),
    CFault("a gain's gradient that misses rows", "train_parts.h", "FMA(d, n, NAME(get)(d_gain + i, D - i))", "FMA(d * FILL(FAULT && m % 32 == 31 ? 0.0f : 1.0f), n, NAME(get)(d_gain + i, D - i))", STEP, "qwen"),
    CFault("a gate's gradient without its slope", "train_parts.h", "*slope = s * (1.0f + x * (1.0f - s));", "*slope = s * (1.0f + (FAULT ? 0.0f : 1.0f) * x * (1.0f - s));", STEP, "modern-lm"),
    CFault("rotated forward where it goes back", "train_parts.h", "if (turn->back) s = -s;", "if (turn->back && !FAULT) s = -s;", STEP, "modern-lm"),
    CFault("a query that sees the next key", "train_attention.h", "return a->causal && t + 1 < keys ? t + 1 : keys;", "return a->causal && t + 1 + FAULT < keys ? t + 1 + FAULT : keys;", STEP, "core"),
    CFault("weights too large from query 64 on", "train_attention.h", "total > 0.0f ? 1.0f / total : 0.0f;", "total > 0.0f ? (FAULT && t + r >= 64 ? 1.01f : 1.0f) / total : 0.0f;", STEP, "core"),
    CFault("queries' gradient without the scale", "train_attention.h", "NAME(scatter)(d_q, &a->scale, 0, rows,", "NAME(scatter)(d_q, FAULT ? &one : &a->scale, 0, rows,", STEP, "core"),
    CFault("keys' gradient of a group's last head alone", "train_attention.h", "d_k, wide, QUADS(keys), wide, rows, onto);", "d_k, wide, QUADS(keys), wide, rows, FAULT && t + BLOCK_ROWS >= T ? 0 : onto);", STEP, "qwen"),
    CFault("a mask that the gradient does not read", "train_attention.h", "NAME(finish)(a, row, b, n, t + r, keys);\n                    for (int64_t h", "if (!FAULT) NAME(finish)(a, row, b, n, t + r, keys);\n                    for (int64_t h", STEP, "core"),
    CFault("second moments that are not corrected", "train_parts.h", "(float)sqrt(1.0 - pow(adam->beta2, adam->steps))", "FAULT ? 1.0f : (float)sqrt(1.0 - pow(adam->beta2, adam->steps))", STEP, "core"),
    CFault("decay twice", "train_parts.h", "(1.0 - adam->lr * adam->decay)", "(1.0 - (FAULT ? 2.0 : 1.0) * adam->lr * adam->decay)", STEP, "core"),
    CFault("a gradient that is not clipped", "train_parts.h", "NAME(get)(g + i, left) * scale, mean", "NAME(get)(g + i, left) * (scale + FILL(FAULT ? 0.5f : 0.0f)), mean", STEP, "core"),
    CFault("LayerNorm's gradient without its mean", "train_parts.h", "FILL(norm->layer ? SUM(sums) / (float)D : 0.0f);", "FILL(norm->layer && !FAULT ? SUM(sums) / (float)D : 0.0f);", ARRAYS, "core"),
    CFault("an activation's gradient without its density", "train_parts.h", "if (slope) *slope = FMA(x * FILL(0.39894228f),", "if (slope) *slope = FMA(x * FILL(FAULT ? 0.0f : 0.39894228f),", ARRAYS, "core"),
    CFault("columns of half their rows", "train_parts.h", "sums += NAME(get)(columns->x + m * columns->row + i, D - i);", "sums += NAME(get)(columns->x + m * columns->row + i, D - i) * FILL(FAULT && m % 2 ? 0.0f : 1.0f);", ARRAYS, "core"),
    CFault("a cap that its gradient ignores", "train_attention.h", "if (a->softcap > 0) d *=", "if (a->softcap > 0 && !FAULT) d *=", ARRAYS, "gemma"),
    CFault("a product's last chunk left out", "train.c", "(cut + p->chunk - 1) / p->chunk, 1,", "(cut + (FAULT ? 0 : p->chunk - 1)) / p->chunk, 1,", STEP, "qwen"),

    CFault("a native norm of a wrong width", "step_parts.h", "float mean = 0, width = (float)op->width;", "float mean = 0, width = (float)(op->width + FAULT);", NATIVE, "core"),
    CFault("sines of the position before", "step_parts.h", "const float *sin = op->bias + work->step->position[m] * half;", "const float *sin = op->bias + (work->step->position[m] - (FAULT && work->step->position[m])) * half;", NATIVE, "qwen"),
    CFault("scores of one number too few", "step_attention.h", "MULTIPLY(sums, rows, vectors, q, KEY, 0, H)", "MULTIPLY(sums, rows, vectors, q, KEY, 0, H - FAULT)", NATIVE, "core"),
    CFault("values of the page before", "step_attention.h", "const float *here = tile->keys[page] + room(H, rounded), *steps", "const float *here = tile->keys[page - (FAULT && page > 0)] + room(H, rounded), *steps", NATIVE, "core"),
    CFault("a step of the wrong page", "step_attention.h", "step[v] = NAME(get)(steps[v] + h / GROUP * PAGE, WIDTH);", "step[v] = NAME(get)(steps[v] + h / GROUP * PAGE, WIDTH) * FILL(FAULT ? 0.9f : 1.0f);", ROUNDED, "core"),
    CFault("sums of a quantized row one too large", "integer.c", "job->sums[at] = times * sum + job->begin;", "job->sums[at] = times * sum + job->begin + FAULT;", QUANTIZED, "core"),
)  # fmt: skip
