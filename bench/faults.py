"""`python -m bench faults`: one-line mistakes in models of other libraries, and who sees them.

Each mistake is planted into the source of a class in `bench/foreign_models.py` and breaks an
equality that the model promises. `gf.verify` is asked without a word; so is pytest-torch 1.1.1
(`--torch-model`), which is told the inputs' names. `--write` puts the table into docs/verify.md.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

from bench.clock import said
from bench.museum import ROOT, install

SOURCE = Path(__file__).parent / "foreign_models.py"
PAGE = ROOT / "docs" / "verify.md"
PEER = "pytest-torch==1.1.1"
#: The inputs of each model in pytest-torch's words.
INPUTS = {
    "gpt": "idx=long:4x16:41",
    "seq2seq": "input_ids=long:4x16:41,attention_mask=mask:4x16,decoder_input_ids=long:4x16:41",
}
USUAL = "input_ids=long:4x16:41,attention_mask=mask:4x16"


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake: the model, the class or function, what stands there, what is put instead."""

    name: str
    model: str
    where: str
    old: str
    new: str


COUNTED = "(valid.long().cumsum(1) - 1).clamp(min=0)[:, -T:]"
REAL = "attention_mask.bool()"
ALLOW = "near_TS[None, None] & valid_BS[:, None, None, :]"
FUSED = "F.scaled_dot_product_attention(q, k, v, attn_mask=bias)"
PLACES = "torch.arange(before, before + T)"
FAULTS = (
    Fault("positions restart in each call", "llama", "Llama", COUNTED, "(valid.long().cumsum(1) - 1).clamp(min=0)[:, :T]"),
    Fault("positions one ahead behind a prompt", "llama", "Llama", COUNTED, f"{COUNTED} + (before > 0)"),
    Fault("positions stretched to the length", "llama", "Llama", COUNTED, f"{COUNTED} * (64 / (before + T))"),
    Fault("mask of the first row for all rows", "llama", "Llama", REAL, "attention_mask[:1].expand(B, -1).bool()"),
    Fault("mask reversed in time", "llama", "Llama", REAL, "attention_mask.flip(1).bool()"),
    Fault("mask ignored behind a prompt", "llama", "Llama", REAL, "attention_mask.bool() | (before > 0)"),
    Fault("long rows see their future", "llama", "Attention", "(distance_TS >= 0)", "((distance_TS >= 0) | (S > 9))"),
    Fault("causal mask aligned to the first key", "llama", "Attention", "torch.arange(S - T, S)[:, None]", "torch.arange(T)[:, None]"),
    Fault("no causal mask where there is padding", "llama", "Attention", ALLOW, "(valid_BS[:, None, None, :] if not valid_BS.all() else near_TS[None, None]).expand(B, 1, T, S)"),
    Fault("minus infinity where weights are read", "llama", "Attention", "masked_fill(~allow, torch.finfo(scores.dtype).min)", "masked_fill(~allow, -math.inf)"),
    Fault("fused kernel: causal flag instead of the mask", "llama", "Attention", FUSED, "F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)"),
    Fault("fused kernel ignores the window", "llama", "Attention", "masked_fill(~allow, torch.finfo(q.dtype).min)", "masked_fill(~(allow | (valid_BS[:, None, None, :] & (distance_TS >= self.window))), -1e30)"),
    Fault("cache cut to the window, positions too", "llama", "Attention", "kept = (k, v)", "kept = (k[:, :, -self.window + 1 :], v[:, :, -self.window + 1 :])"),
    Fault("another scale where weights are read", "llama", "Attention", "q @ k.transpose(-1, -2) / math.sqrt(H)", "q @ k.transpose(-1, -2) / math.sqrt(D)"),
    Fault("padding ignored where weights are read", "llama", "Attention", "scores.masked_fill(~allow,", "scores.masked_fill(~near_TS,"),
    Fault("heads in another order where weights are read", "llama", "Attention", "weights @ v", "weights @ v.roll(1, 1)"),
    Fault("new keys before old ones", "llama", "Attention", "torch.cat((past[0], k), 2)", "torch.cat((k, past[0]), 2)"),
    Fault("new values before old ones", "llama", "Attention", "torch.cat((past[1], v), 2)", "torch.cat((v, past[1]), 2)"),
    Fault("cache of the first layer for all", "llama", "Llama", "past_key_values[i]", "past_key_values[0]"),
    Fault("cache kept in bfloat16", "llama", "Attention", "kept = (k, v)", "kept = (k.bfloat16(), v.bfloat16())"),
    Fault("keys rotated by their place in the call", "llama", "Attention", "self.rotary(k, positions_BT)", "self.rotary(k, torch.arange(T).expand(B, T))"),
    Fault("angles remembered by shape", "llama", "Rotary", "angle = positions_BT[:, None, :, None] * self.frequencies", "angle = self.__dict__.setdefault(str(positions_BT.shape), positions_BT[:, None, :, None] * self.frequencies)"),
    Fault("a random table that is not saved", "llama", "Rotary", "10_000.0 ** (-torch.arange(H // 2) / (H // 2))", "torch.rand(H // 2)"),
    Fault("a table that decays in every call", "llama", "Rotary", "cos, sin = angle.cos(), angle.sin()", "cos, sin = angle.cos(), angle.sin()\n        self.frequencies.mul_(0.999)"),
    Fault("dropout without its mode", "llama", "Layer", "self.dropout(mixed)", "F.dropout(mixed, 0.1)"),
    Fault("norm over the batch", "llama", "RMSNorm", ".mean(-1, keepdim=True)", ".mean((0, -1), keepdim=True)"),
    Fault("a copy instead of a tied head", "llama", "Llama", "self.head.weight = self.embed.weight", "self.head.weight = nn.Parameter(self.embed.weight.detach().clone())"),
    Fault("checkpointing cuts the gradient", "llama", "Llama", "checkpoint(layer, *given,", "checkpoint(layer, x.detach(), *given[1:],"),
    Fault("checkpointing forgets positions", "llama", "Llama", "checkpoint(layer, *given,", "checkpoint(layer, x, 0 * position_ids, *given[2:],"),
    Fault("the last logits but one", "llama", "Llama", "x[:, -logits_to_keep:]", "x[:, -logits_to_keep - 1 : -1]"),
    Fault("norm skipped where states are read", "llama", "Llama", "x = self.norm(x)", "x = x if output_hidden_states else self.norm(x)"),
    Fault("embeddings normalised where given", "llama", "Llama", "else inputs_embeds", "else F.normalize(inputs_embeds, dim=-1)"),
    Fault("labels shifted twice", "llama", "Llama", "logits[:, :-1], labels[:, 1:]", "logits[:, :-2], labels[:, 2:]"),
    Fault("loss averaged over ignored labels", "llama", "mean_loss", "each.sum() / count", "each.mean()"),
    Fault("label smoothing left on", "llama", "mean_loss", 'reduction="none"', 'reduction="none", label_smoothing=0.1'),
    Fault("logits depend on the batch size", "llama", "Llama", "x = self.norm(x)", "x = self.norm(x) * (1 + 0.01 * B)"),
    Fault("gate without a gradient", "llama", "MLP", "F.silu(self.gate(x_BTD))", "F.silu(self.gate(x_BTD)).detach()"),
    Fault("a wrong derivative written by hand", "llama", "MLP", "F.silu(self.gate(x_BTD))", "_WrongSiLU.apply(self.gate(x_BTD))"),
    Fault("experts' weights summed over the batch", "moe", "Experts", "best / best.sum(-1, keepdim=True)", "best / best.sum()"),
    Fault("tokens beyond a capacity dropped", "moe", "Experts", "total = total + share", "share = share * ((share > 0).flatten().cumsum(0) <= 8).view_as(share)\n            total = total + share"),
    Fault("router noise in eval", "moe", "Experts", "self.router(x_BTD).softmax(-1)", "(self.router(x_BTD) + 0.01 * torch.randn(x_BTD.shape[:2] + (4,))).softmax(-1)"),
    Fault("router normalised over time", "moe", "Experts", "self.router(x_BTD).softmax(-1)", "self.router(x_BTD).softmax(1)"),
    Fault("router without a gradient", "moe", "Experts", "(best * (which == e))", "(best.detach() * (which == e))"),
    Fault("positions restart in each call", "gpt", "GPT", PLACES, "torch.arange(T)"),
    Fault("positions reversed within a call", "gpt", "GPT", PLACES, f"{PLACES}.flip(0)"),
    Fault("cache length read from another axis", "gpt", "GPT", "past[0].shape[3]", "past[0].shape[2]"),
    Fault("causal mask aligned to the first key", "gpt", "GPT", ".tril(before)", ".tril()"),
    Fault("one token of the future", "gpt", "GPT", ".tril(before)", ".tril(before + 1)"),
    Fault("cache holds the newest keys only", "gpt", "GPT", "torch.stack((k, v))", "torch.stack((k[:, :, -T:], v[:, :, -T:]))"),
    Fault("functional dropout", "gpt", "GPT", "self.drop(self.wte(idx) + self.wpe(places))", "F.dropout(self.wte(idx) + self.wpe(places), 0.1)"),
    Fault("another norm with a cache", "gpt", "GPT", "self.norms[2 * i](x)", "self.norms[2 * i if past is None else 0](x)"),
    Fault("logits divided by the batch's largest", "gpt", "GPT", "return self.head(x), present", "logits = self.head(x)\n        return logits / logits.abs().max(), present"),
    Fault("no scale for a single token", "gpt", "GPT", "attn_mask=allow)", "attn_mask=allow, scale=None if T > 1 else 1.0)"),
    Fault("embedding without a gradient", "gpt", "GPT", "self.wte(idx)", "self.wte(idx).detach()"),
    Fault("mask too weak", "bert", "Bert", "-1e9", "-10.0"),
    Fault("mask behind the softmax", "bert", "Bert", "scores = scores.masked_fill(~valid[:, None, None, :], -1e9)\n            weights = scores.softmax(-1)", "weights = scores.softmax(-1).masked_fill(~valid[:, None, None, :], 0.0)"),
    Fault("mask on the queries' side", "bert", "Bert", "~valid[:, None, None, :]", "~valid[:, None, :, None]"),
    Fault("mask added as a number", "bert", "Bert", "scores.masked_fill(~valid[:, None, None, :], -1e9)", "scores + valid[:, None, None, :]"),
    Fault("positions counted from the end", "bert", "Bert", "torch.arange(T).expand(B, T)", "torch.arange(T).flip(0).expand(B, T)"),
    Fault("mean over time, padding included", "bert", "Bert", "self.head(x)", "self.head(x - x.mean(1, keepdim=True))"),
    Fault("the last column for the last token", "bert", "Bert", "self.head(x)", "self.head(x + x[:, -1:])"),
    Fault("labels shifted", "bert", "Bert", 'mean_loss(result["logits"], labels)', 'mean_loss(result["logits"][:, :-1], labels[:, 1:])'),
    Fault("no positions where embeddings are given", "bert", "Bert", "self.places(position_ids)", "self.places(position_ids) * (inputs_embeds is None)"),
    Fault("weights changed in place where read", "bert", "Bert", "read.append(weights)", "read.append(weights.mul_(1.01) if output_attentions else weights)"),
    Fault("random token types", "bert", "Bert", "torch.zeros(B, T, dtype=torch.long)", "torch.randint(0, 2, (B, T))"),
    Fault("source padding attended to", "seq2seq", "Seq2Seq", "attn_mask=source[:, None, None, :]", "attn_mask=None"),
    Fault("encoder ignores its mask", "seq2seq", "Encoder", "attn_mask=valid[:, None, None, :]", "attn_mask=None"),
    Fault("source positions counted from the end", "seq2seq", "Encoder", "self.places(torch.arange(S))", "self.places(torch.arange(S).flip(0))"),
    Fault("source read in the first call only", "seq2seq", "Seq2Seq", "self.pair[i](encoder_outputs)", "self.pair[i](encoder_outputs * (before == 0))"),
    Fault("one token of the target's future", "seq2seq", "Seq2Seq", ".tril(before)", ".tril(before + 1)"),
    Fault("target positions restart", "seq2seq", "Seq2Seq", PLACES, "torch.arange(T)"),
    Fault("values of the first layer in every layer", "seq2seq", "Seq2Seq", "past_key_values[i][1]", "past_key_values[0][1]"),
    Fault("given encoder outputs normalised again", "seq2seq", "Seq2Seq", "assert decoder_input_ids is not None", "if input_ids is None:\n            encoder_outputs = self.encoder.norm(encoder_outputs)\n        assert decoder_input_ids is not None"),
    Fault("labels shifted too", "seq2seq", "Seq2Seq", 'mean_loss(result["logits"], labels)', 'mean_loss(result["logits"][:, :-1], labels[:, 1:])'),
    Fault("sources mixed over the batch", "seq2seq", "Encoder", "return self.norm(x + ", "return self.norm(x - x.mean(0, keepdim=True) + "),
    Fault("sum forgotten between calls", "recurrence", "Recurrence", "torch.zeros(B, D).to(x) if state is None else state[1]", "torch.zeros(B, D).to(x)"),
    Fault("convolution forgets between calls", "recurrence", "Recurrence", "torch.zeros(B, 2, D).to(x) if state is None else state[0]", "torch.zeros(B, 2, D).to(x)"),
    Fault("the first tokens kept for the convolution", "recurrence", "Recurrence", "row[:, -2:]", "row[:, :2]"),
    Fault("mask read from its beginning", "recurrence", "Recurrence", "attention_mask[:, -T:, None]", "attention_mask[:, :T, None]"),
    Fault("PAD updates the state", "recurrence", "Recurrence", "        keep = torch.where(real > 0, keep, torch.ones_like(keep))\n        new = new * real\n", ""),
    Fault("PAD enters the convolution", "recurrence", "Recurrence", "        x = x * real\n", ""),
    Fault("divided by the place in the call", "recurrence", "Recurrence", "columns.append(total)", "columns.append(total / (t + 1))"),
    Fault("state one token behind", "recurrence", "Recurrence", "(row[:, -2:], total)", "(row[:, -2:], columns[max(0, T - 2)])"),
    Fault("states read from the end", "recurrence", "Recurrence", "torch.stack(columns, 1)", "torch.stack(columns[::-1], 1)"),
)  # fmt: skip


def planted(fault: Fault | None) -> str:
    """Return the source of the models with one mistake, or clean."""
    source = SOURCE.read_text(encoding="utf-8")
    if fault is None:
        return source
    begin = re.search(rf"^(class|def) {fault.where}\b", source, re.MULTILINE)
    assert begin is not None, fault.where
    end = re.search(r"^(class|def) ", source[begin.end() :], re.MULTILINE)
    stop = len(source) if end is None else begin.end() + end.start()
    part = source[begin.start() : stop]
    assert part.count(fault.old) == 1, f"{fault.name}: found {part.count(fault.old)} times"
    return source[: begin.start()] + part.replace(fault.old, fault.new) + source[stop:]


def module_of(fault: Fault | None) -> ModuleType:
    """Return the models with one mistake, as a module of its own."""
    name = "bench_fault_" + re.sub(r"\W+", "_", "clean" if fault is None else fault.name)
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(planted(fault), f"{name}.py", "exec"), module.__dict__)
    return module


def certified(fault: Fault | None, model: str) -> list[str]:
    """Return the rows that fail on a model with one mistake."""
    import glassformer as gf

    report = gf.verify(getattr(module_of(fault), model)())
    return [f.name for f in report.findings if f.failed]


def peer(faults: tuple[Fault | None, ...], model: str) -> dict[str, list[str]]:
    """Return the tests of pytest-torch that fail, for each mistake in one model."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={folder / 'out.xml'}", "--rootdir", place]
        command += [f"--torch-model-inputs={INPUTS.get(model, USUAL)}"]
        files = {}
        for number, fault in enumerate(faults):
            file = folder / f"m{number}.py"
            file.write_text(planted(fault), encoding="utf-8")
            files[f"m{number}.py"] = "clean" if fault is None else fault.name
            command.append(f"--torch-model={file}:{model}")
        path = os.pathsep.join((str(install(PEER)), str(ROOT)))
        subprocess.run(
            command,
            cwd=place,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=False,
        )
        failed: dict[str, list[str]] = {name: [] for name in files.values()}
        tree = ElementTree.parse(folder / "out.xml")
        for case in tree.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                found = re.search(r"(m\d+\.py)", case.get("name") or "")
                if found is not None:
                    test = (case.get("name") or "").split("[")[0].removeprefix("test_")
                    failed[files[found.group(1)]].append(test)
        return failed


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="", help="a model, or part of a mistake's name")
    parser.add_argument("--alone", action="store_true", help="without pytest-torch")
    parser.add_argument("--write", action="store_true", help="write the table in docs/verify.md")


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each mistake, then the sums."""
    import torch

    torch.set_num_threads(1)
    chosen = [f for f in FAULTS if asked.only in f"{f.model}: {f.name}"]
    chosen = chosen[::8] if quick else chosen
    models = list(dict.fromkeys(f.model for f in chosen))
    theirs: dict[str, dict[str, list[str]]] = {m: {} for m in models}
    alone = asked.alone or quick
    if not alone:
        for m in models:
            theirs[m] = peer((None, *(f for f in chosen if f.model == m)), m)

    row = partial(said, "faults")
    table = []
    for m in models:
        clean = certified(None, m)
        said = "" if alone else f"; pytest-torch: {', '.join(theirs[m]['clean']) or 'green'}"
        yield row(f"{m}, no mistake", f"{', '.join(clean) or 'green'}{said}")
        assert not clean, f"the model without a mistake fails {clean}"
    for fault in chosen:
        ours = certified(fault, fault.model)
        their = [] if alone else theirs[fault.model][fault.name]
        their = [] if alone else [t for t in their if t not in theirs[fault.model]["clean"]]
        table.append((fault, ours, their))
        said = "" if alone else f" | pytest-torch: {', '.join(their) or 'passes'}"
        yield row(f"{fault.model}: {fault.name}", f"{'; '.join(ours) or 'MISSED'}{said}")
    mine, other = (sum(bool(one[i]) for one in table) for i in (1, 2))
    said = "" if alone else f"; pytest-torch: {other}"
    yield row(f"{len(table)} mistakes", f"seen: {mine} ({mine / len(table):.1%}){said}")
    if asked.write and not alone:
        write(table)


BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def write(table: list[tuple[Fault, list[str], list[str]]]) -> None:
    """Put the table into docs/verify.md."""
    models = list(dict.fromkeys(fault.model for fault, _, _ in table))
    lines = [BEGIN, "", "| model | mistakes | seen by verify | by pytest-torch 1.1.1 |"]
    lines.append("|---|---|---|---|")
    for m in models:
        rows = [one for one in table if one[0].model == m]
        mine, other = (sum(bool(one[i]) for one in rows) for i in (1, 2))
        lines.append(f"| {m} | {len(rows)} | {mine} | {other} |")
    mine, other = (sum(bool(one[i]) for one in table) for i in (1, 2))
    lines += [f"| all | {len(table)} | {mine} ({mine / len(table):.0%}) | {other} |", ""]
    missed = [f"{fault.model}: {fault.name}" for fault, ours, _ in table if not ours]
    lines += [f"Missed: {'; '.join(missed) or 'none'}.", "", END]
    text = PAGE.read_text(encoding="utf-8")
    with contextlib.suppress(ValueError):
        text = text[: text.index(BEGIN)] + "\n".join(lines) + text[text.index(END) + len(END) :]
    PAGE.write_text(text, encoding="utf-8")
