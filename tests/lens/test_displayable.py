"""Every value can be read, listed, drawn, saved and shown; long ones stay small."""

import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from PIL import Image

import glassformer as gf
from glassformer.lens.inspection import inspect
from glassformer.lens.show.displayable import CELL_BYTES
from glassformer.spec.errors import InputError
from tests.lens.models import inputs_of, model_of
from tests.lens.test_svg import HOSTILE, Seen, inert
from tests.tiny import S, T, built, tiny


def values_of(name):
    """Every kind of value, of one look at hostile words."""
    words = [HOSTILE[t % len(HOSTILE)] for t in range(T)]
    source = [HOSTILE[s % len(HOSTILE)] for s in range(S)] if "encoder" in name else None
    model = model_of(name)
    seen = inspect(
        model,
        inputs_of(name),
        words=words,
        source_words=source,
        names=lambda i: HOSTILE[i % len(HOSTILE)],
    )
    yield from (seen, seen.attention, seen.attention[1, 2], seen.attention.mean(), seen.lens)
    yield from (seen.norms, seen.ablate("L0H1", "L1H1"), seen.ranking())
    yield from (seen.attention.of(kind) for kind in seen.kinds)
    yield gf.patch_activations(model, seen, inspect(model, inputs_of(name, seed=5)), answers=(3, 8))
    yield seen.token_path(2)


CASES = [
    pytest.param(value, id=f"{name} {type(value).__name__} {number}")
    for name in ("decoder", "encoder-decoder")
    for number, value in enumerate(values_of(name))
]


@pytest.mark.parametrize("value", CASES)
def test_a_value_shows_itself(value, tmp_path):
    assert repr(value) == value.text() and len(value.text()) > 20
    assert not any(ord(c) < 32 and c != "\n" for c in value.text())
    assert isinstance(value.tensor, torch.Tensor)
    rows = value.rows()
    assert rows and all(set(row) == set(rows[0]) for row in rows)
    bundle = value._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    seen = inert(bundle["text/html"])
    assert "table" in seen.tags and {"svg", "img"} & set(seen.tags)


#: Each kind of value once: drawing is slow.
SAVED = [CASES[number] for number in (0, 1, 2, 4, 5, 6, 7, 9, 10)]


@pytest.mark.parametrize("value", SAVED)
def test_a_value_saves_itself(value, tmp_path):
    with Image.open(value.save(tmp_path / "x.png")) as png:
        assert png.format == "PNG" and min(png.size) > 100
    ElementTree.parse(value.save(tmp_path / "x.svg"))
    page = value.save(tmp_path / "x.html").read_text()
    assert page.startswith("<!doctype html>")
    inert(page)
    data = json.loads(value.save(tmp_path / "x.json").read_text())
    assert len(data["rows"]) == len(value.rows())
    with value.save(tmp_path / "x.CSV").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(value.rows()) and list(lines[0]) == list(value.rows()[0])


def test_numbers_on_file_are_the_numbers(tmp_path):
    seen = inspect(model_of("decoder"), inputs_of("decoder"))
    data = json.loads(seen.save(tmp_path / "look.json").read_text())
    assert data["loss"] == seen.loss and data["rows"][-1]["loss"] is None
    kept = torch.tensor(data["attention"]["self"], dtype=torch.float64)
    assert torch.equal(kept, seen.attention.tensor)
    cells = list(csv.DictReader(io.StringIO(seen.attention[1, 0].encoded("csv").decode())))
    assert len(cells) == T * (T + 1) // 2
    for cell in cells:
        t, s = int(cell["query"]), int(cell["key"])
        assert float(cell["weight"]) == float(seen.attention[1, 0].tensor[t, s])


def test_figures_are_the_same_every_time():
    heat = inspect(model_of("decoder"), inputs_of("decoder")).attention[0, 1]
    assert heat.encoded("png") == heat.encoded("png")
    assert heat.encoded("svg") == heat.encoded("svg")


def test_a_file_that_cannot_be(tmp_path):
    seen = inspect(model_of("decoder"), inputs_of("decoder"))
    with pytest.raises(InputError, match=r"cannot save as '\.gif'"):
        seen.save(tmp_path / "x.gif")
    with pytest.raises(InputError, match="cannot write"):
        seen.lens.save(tmp_path / "nowhere" / "x.csv")


def test_a_long_look_stays_under_the_cap():
    """512 tokens, 6 layers x 8 heads."""
    model = built(tiny(layers=6, attention={"n_heads": 8}, max_seq_len=512, vocab_size=997)).float()
    seen = inspect(model, torch.arange(512))
    text = seen.html()
    assert len(text.encode()) < CELL_BYTES + 1_000
    assert Seen(text).tags.count("img") == 48 and "the last 40 of 512 positions" in text
    assert "the strongest" in repr(seen.attention[5, 7]) and len(repr(seen)) < 4_000
    heat = seen.attention[5, 7]
    assert len(heat.html().encode()) < CELL_BYTES and "the 200 strongest of 131,328" in heat.html()
    # What is kept of the residual rows is small, whatever the vocabulary.
    assert seen.lens.predictions.ids.shape == (14, 512, 32)
    cut = seen.html(most=30_000)
    assert "more parts were left out" in cut and len(cut.encode()) < 31_000


def test_an_empty_source_attends_to_nothing():
    inputs = inputs_of("encoder-decoder", padded=True)
    inputs.source_valid_BS[:] = False
    seen = inspect(model_of("encoder-decoder"), inputs)
    maps = seen.attention.of("cross")
    assert not maps[0, 0].allowed.any() and float(maps[0, 0].tensor.abs().max()) == 0.0
    assert "nothing may be attended to" in maps[0, 0].summary()
    assert maps.rows()[0]["weight"] == 0.0
    inert(seen.html())
