"""docs/findings.md is its results and nothing else; a cell changes one thing, and runs."""

import json
import math
from argparse import Namespace

import numpy as np
import pytest
import torch
from bench import findings
from bench.findings import allocation, page, results, surgery, training
from bench.findings.cells import CELLS, SEEDS, TASKS, Job, compared, jobs
from bench.findings.results import Score, score, verdict

from glassformer.data.batch import Batch
from glassformer.lab.recipes import recipe
from glassformer.models.model import build
from glassformer.spec import presets
from glassformer.spec.errors import FileError
from tests.contracts.test_bench import FIELDS
from tests.contracts.test_docs import ROOT

QUICK = {job.key: job for job in jobs(quick=True)}


def ran(tmp_path, *, only, **settings):
    return list(
        findings.run_cells(list(QUICK.values()), path=tmp_path / "f.json", only=only, **settings)
    )


# --- the page -----------------------------------------------------------------------------------


def test_the_page_is_what_its_results_make():
    text = (ROOT / "docs" / page.PAGE).read_text(encoding="utf-8")
    assert page.filled(text, results.read(ROOT / results.FILE)) == text
    for part in page.PARTS:
        assert f"<!-- made: {part} -->" in text


def test_results_are_of_the_settings_that_are_here():
    """A cell that was changed since must be run again before the page is believed."""
    found = results.read(ROOT / results.FILE)["results"]
    every = {job.key: job for job in jobs()}
    assert found.keys() <= every.keys()
    stale = [
        key for key, entry in found.items() if entry["settings"] != training.settings(every[key])
    ]
    assert not stale


def test_a_page_is_rendered_with_figures(tmp_path):
    (tmp_path / page.PAGE).write_text((ROOT / "docs" / page.PAGE).read_text(encoding="utf-8"))
    found = made_up({"positions / none": 0.6})
    written = list(page.render(found, tmp_path))
    assert [name for name in written if name.startswith("images/")] == [
        "images/findings-ablations.png",
        "images/findings-training.png",
    ]
    text = (tmp_path / page.PAGE).read_text(encoding="utf-8")
    assert "positions **none** is worse on digits: 60.0 % against 90.0 % (sinusoidal)." in text
    assert "| none | 60.0 % (59.8 to 60.2) **worse** |" in text
    assert "heads **1 head**" not in text
    every = "1 head; 2 heads; 8 heads"
    assert f"| heads | {every} | {every} | {every} |" in text
    assert "| positions | learned; rotary | learned; rotary | learned; rotary |" in text
    assert "| not measured |" not in text
    with pytest.raises(FileError, match="no part is called 'luck'"):
        page.filled("<!-- made: luck -->\n<!-- end: luck -->", found)
    with pytest.raises(FileError, match="no page to fill"):
        list(page.render(found, tmp_path / "elsewhere"))


def made_up(means):
    """Results of every job: 0.9 unless said otherwise, 0.002 apart between seeds."""
    entries = {}
    for job in jobs():
        name = f"{job.cell.group} / {job.cell.name}"
        share = means.get(name, 0.9) + 0.002 * (job.seed - 1)
        split = {"examples": 2000, "exact": share, "loss": 0.1, "by": {}}
        entries[job.key] = {
            "settings": "",
            "cpu_seconds": 1.0,
            "diverged": False,
            "splits": {"test": split, "longer": split, "train": split},
        }
    return {"machine": {}, "results": entries}


# --- the rule -----------------------------------------------------------------------------------


def test_a_difference_is_outside_the_noise_or_not_told():
    base = score([0.90, 0.91, 0.92], 2000)
    assert base.mean == pytest.approx(0.91)
    assert (base.low, base.high) == (0.90, 0.92)
    assert base.half == pytest.approx(4.303 * 0.01 / math.sqrt(3), rel=1e-3)
    assert verdict(score([0.93, 0.94, 0.95], 2000), base) == "no difference seen"
    assert verdict(score([0.97, 0.975, 0.98], 2000), base) == "better"
    assert verdict(score([0.60, 0.61, 0.62], 2000), base) == "worse"
    assert verdict(None, base) == "not measured"
    assert score([0.9], 2000) is None


def test_three_equal_scores_are_no_certainty():
    """All right three times: of 2,000 examples that is not proof against one wrong in 2,000."""
    perfect = score([1.0, 1.0, 1.0], 2000)
    assert perfect.half > 0
    assert verdict(score([0.9995, 0.9995, 0.9995], 2000), perfect) == "no difference seen"


def test_settings_that_are_alike_are_seldom_told_apart():
    """The page's figure for the rule: about one comparison in 250 between equals."""
    rng, found = np.random.default_rng(0), 0
    draws = 0.9 + 0.01 * rng.standard_normal((20_000, 2, 3))
    for ours, theirs in draws:
        found += not score(ours.tolist(), 10**9).overlaps(score(theirs.tolist(), 10**9))
    assert 1 / 500 < found / len(draws) < 1 / 150
    assert not Score(0.5, 0.4, 0.6, 0.01).overlaps(Score(0.6, 0.5, 0.7, 0.01))


# --- cells --------------------------------------------------------------------------------------


def test_every_cell_is_one_of_its_kind():
    assert len(QUICK) == len(CELLS) * len(TASKS) * len(SEEDS)
    for task in TASKS:
        made = {training.settings(Job(task, cell, 0)) for cell in CELLS}
        assert len(made) == len(CELLS)
        base = recipe(task).task
        assert all(Job(task, cell, seed).run().task == base for cell in CELLS for seed in SEEDS)
    assert [cell.group for cell in CELLS if compared(cell) is None] == ["baseline"]


def test_a_quick_cell_runs_is_kept_and_not_run_again(tmp_path):
    first = ran(tmp_path, only="reverse / baseline / as the recipe / seed 0")
    assert all(set(row) == FIELDS for row in first)
    (key,) = [row["case"] for row in first if row["case"] in QUICK]
    found = results.read(tmp_path / "f.json")
    entry = found["results"][key]
    assert set(entry["splits"]) == {"test", "longer", "train"}
    assert len(entry["insides"]["heads"]) == 24  # six attentions of four heads
    looks = [head["looks"] for head in entry["insides"]["heads"].values() if "looks" in head]
    assert len(looks) == 8
    assert all(0 < look < 1 for look in looks)
    again = ran(tmp_path, only=key)
    assert [row["name"] for row in again] == ["1 asked for, 1 already there"]
    entry["settings"] = "other"
    results.write(tmp_path / "f.json", found)
    assert len(ran(tmp_path, only=key)) == 2


def test_the_same_cell_twice_gives_the_same(tmp_path):
    key = "digits / heads / 1 head / seed 1"
    one, two = (training.learn(QUICK[key]) for _ in range(2))
    assert one["splits"] == two["splits"]


def test_a_deadline_starts_nothing_more(tmp_path):
    rows = ran(tmp_path, only="seed 0", deadline=-1.0)
    assert rows[-1]["name"] == f"{len(CELLS) * len(TASKS)} not run: the deadline came first"
    assert not (tmp_path / "f.json").exists()


def test_the_command_takes_its_options(tmp_path):
    asked = Namespace(
        render=False, sweep="", file=tmp_path / "f.json", jobs=1, deadline=None, again=False,
        only="digits / feed-forward / none / seed 2",
    )  # fmt: skip
    assert len(list(findings.run(asked=asked, quick=True))) == 2
    assert len(json.loads((tmp_path / "f.json").read_text())["results"]) == 1
    (tmp_path / "f.json").write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        results.read(tmp_path / "f.json")


# --- what is taken out of a model ---------------------------------------------------------------


def tiny(*, pre):
    spec = presets.seq2seq(
        vocab_size=11, d_model=16, n_heads=2, n_layers=2, max_seq_len=16, dropout=0.0, pre_norm=pre
    )
    model = build(spec, generator=torch.Generator().manual_seed(0)).double()
    source = Batch.of([[3, 4, 5, 6, 2]])
    target = Batch.of([[1, 6, 5, 4]])
    return model, Batch(tokens=target.tokens, valid=target.valid, source=source)


def test_without_residuals_each_part_stands_alone():
    model, batch = tiny(pre=True)
    surgery.operate(model, ("residual",))
    inputs = model.inputs(batch)
    seen = {}
    with torch.no_grad():
        for block in (*model.encoder.blocks, *model.decoder.blocks):
            for name, part in block.named_children():
                part.register_forward_hook(
                    lambda m, a, out, key=(block, name): seen.update({key: out})
                )
        model.hidden(inputs)
        first, second = model.encoder.blocks
        # What the second block's first norm read is the first block's feed-forward alone.
        torch.testing.assert_close(
            seen[second, "attn_norm"], second.attn_norm(seen[first, "ffn"]), rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            seen[first, "ffn_norm"], first.ffn_norm(seen[first, "attn"]), rtol=0, atol=1e-12
        )


def test_without_scale_norm_and_feed_forward():
    model, batch = tiny(pre=False)
    plain = model(batch)["next"]
    for what in ("scale", "norm", "ffn"):
        changed, _ = tiny(pre=False)
        surgery.operate(changed, (what,))
        assert not torch.allclose(changed(batch)["next"], plain)
    scaled, _ = tiny(pre=False)
    with torch.no_grad():  # the same by the weights: queries sqrt(8) longer
        for block in (*scaled.encoder.blocks, *scaled.decoder.blocks):
            for attention in filter(None, (block.attn, block.cross)):
                for parameter in attention.q_proj.parameters():
                    parameter *= math.sqrt(8)
    changed, _ = tiny(pre=False)
    surgery.operate(changed, ("scale",))
    torch.testing.assert_close(changed(batch)["next"], scaled(batch)["next"])
    fed, _ = tiny(pre=False)
    surgery.operate(fed, ("ffn",))
    fed(batch)["next"].sum().backward()
    for name, parameter in fed.named_parameters():
        assert (".ffn." in name) == (parameter.grad is None), name


# --- where the parameters go --------------------------------------------------------------------


class Here:
    """A pool of no processes."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    map = staticmethod(map)


def test_a_sweep_at_one_size_is_ranked_by_bits_and_by_exams(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog again and again\n" * 300)
    tiny = {
        "what": "text",
        "vary": {"train.lr": ["1e-3", "1e-2"]},
        "overrides": [
            "train.steps=2",
            "train.batch_size=2",
            "train.evaluate_every=2",
            "train.evaluate_examples=4",
            "train.probes=0",
            f"task.path={text}",
            "task.vocab_size=270",
            "task.length=32",
            "model.d_model=8",
        ],
    }
    monkeypatch.setitem(allocation.QUESTIONS, "tiny", tiny)
    monkeypatch.setattr(allocation, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(allocation, "ITEMS", 1)
    found = allocation.answer("tiny", device="cpu", seeds=2, folder=tmp_path, jobs=1)
    file = tmp_path / "sweeps.json"
    allocation.keep("tiny", found, file)
    assert allocation.read(file) == json.loads(json.dumps({"tiny": found}))
    text = allocation.section("tiny", found)
    assert "SmallBench above chance" in text and "| 2 | lr=" in text
    assert f"{found['shapes']['0']['width']} x {found['shapes']['0']['layers']}" in text
    assert len(found["exams"]["rows"]) == len(found["bits"]["rows"]) == 2
