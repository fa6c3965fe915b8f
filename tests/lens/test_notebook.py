"""A notebook shows the pictures, and its export needs no script to show them again."""

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from tests.lens.test_svg import Seen

CELLS = (
    "import torch, glassformer as gf\n"
    'model = gf.build(gf.preset("digits"), generator=torch.Generator().manual_seed(0))\n'
    'words = ["<script>alert(1)</script>", "7", "3", "9", "SEP"]\n'
    "seen = gf.inspect(model, [12, 7, 3, 9, 18], words=words)",
    "seen",
    "seen.attention[1, 3]",
    "seen.figure()",
    'run = gf.train("digits", steps=4, overrides=["task.examples=50"])\nrun',
    "run.model.spec",
)


@pytest.mark.filterwarnings("ignore")  # of jupyter's own libraries
def test_pictures_survive_the_export(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(book, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    _, first, second, drawn, trained, told = book.cells
    assert drawn.outputs[0].data["image/png"].startswith("iVBOR")
    bar, run = trained.outputs
    assert (
        "<progress max='4' value='4'>" in bar.data["text/html"] and "left" in bar.data["text/html"]
    )
    assert "run digits: 4 of 4 steps" in run.data["text/plain"]
    assert told.outputs[0].data["text/plain"].startswith("ModelSpec(\n    vocab_size=20,")
    book.cells = [first, second]
    shown = [cell.outputs[0].data["text/html"] for cell in book.cells]
    assert Seen(shown[0]).tags.count("img") == 8 and "svg" in Seen(shown[1]).tags
    page, _ = HTMLExporter(template_name="basic").from_notebook_node(book)
    exported, made = Seen(page), [Seen(text) for text in shown]
    assert "script" not in exported.tags
    for tag in ("img", "svg", "image", "table", "details", "text"):
        assert exported.tags.count(tag) == sum(each.tags.count(tag) for each in made), tag
    pictures = [value for _, name, value in exported.attributes if name in ("src", "href")]
    wanted = [
        value for each in made for _, name, value in each.attributes if name in ("src", "href")
    ]
    assert set(wanted) <= set(pictures) and len(wanted) == 9
    words = [text for text in exported.text if "alert(1)" in text]
    assert words and not any("<script>" in tag for tag in exported.tags)
