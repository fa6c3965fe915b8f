"""The tests are tested: planted faults of reading and writing GGUF, against files of others."""

import gguf
import numpy as np
import pytest
import torch

from glassformer.adapters.gguf.export_gguf import export_gguf
from glassformer.adapters.gguf.header import _read_head
from glassformer.adapters.load import load
from glassformer.spec.errors import FileError, InputError
from tests.adapters.checkpoints import folder_of, live, tokens
from tests.adapters.gguf.files import write_foreign
from tests.planting import Fault, Name, Return, mutate, planted

READING = (
    Fault("rows not reordered", mutate("adapters.gguf.config:table_of", Name("turned"), to="False"), "llama"),
    Fault("dimensions not turned around", mutate("adapters.gguf.header:_Cursor.stored", Name("reversed"), to="list"), "llama"),
)  # fmt: skip

WRITING = (
    Fault("written as it is", mutate("adapters.table:Interleaved.join", Return(), to="{value}"), "llama"),
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@torch.no_grad()
def agrees(case, path) -> bool:
    """A named error is a fault that was seen."""
    _read_head.cache_clear()
    try:
        return (
            float((load(path)(tokens(2, 64)) - live(case)(tokens(2, 64)).logits).abs().max())
            <= 1e-5
        )
    except FileError:
        return False


@pytest.mark.parametrize("fault", READING, ids=lambda fault: fault.name)
def test_every_fault_of_reading_is_seen(fault, tmp_path):
    path = write_foreign(fault.caught_by, tmp_path / "m.gguf")
    assert agrees(fault.caught_by, path), "red before the fault was planted"
    with planted(fault):
        assert not agrees(fault.caught_by, path)
    assert agrees(fault.caught_by, path), "the fault was not taken out"


@pytest.mark.parametrize("fault", WRITING, ids=lambda fault: fault.name)
def test_every_fault_of_writing_is_seen(fault, tmp_path):
    """Other tensors than others write, or another spec when the file is read again."""
    adapter = load(folder_of(fault.caught_by, tmp_path))
    wanted = gguf.GGUFReader(write_foreign(fault.caught_by, tmp_path / "wanted.gguf"))
    with planted(fault):
        try:
            export_gguf(adapter, tmp_path / "m.gguf")
        except InputError:
            return
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert not all(np.array_equal(found[t.name], t.data) for t in wanted.tensors)
