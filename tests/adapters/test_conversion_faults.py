"""The tests are tested: every planted fault is seen, as other logits or as a named error."""

from dataclasses import replace

import pytest
import torch

from glassformer.adapters.families.llama import LLAMA
from glassformer.adapters.load import load
from glassformer.adapters.registry import LlamaAdapter
from glassformer.adapters.table import Row, Table
from glassformer.spec.errors import FileError
from tests.adapters.checkpoints import folder_of, live, tokens
from tests.planting import Call, Fault, Keyword, Name, mutate, planted

FAULTS = (
    Fault("theta forgotten", mutate("adapters.families.rotary:read_rotary", Keyword("base"), to="THETA"), "qwen2 tied"),
    Fault("order of key-value heads", mutate("nn.attention:MultiHeadAttention.forward", Call("_by_head", nth=2), to="{it}.flip(1)"), "llama"),
    Fault("tied head taken for its own", mutate("adapters.keys:spec_of", Call("part_of"), to="NextHead(tied=False)"), "qwen2 tied"),
    Fault("matrices not transposed", mutate("adapters.table:Columns.split", Name("T"), to="{value}.reshape({it}.shape)"), "gpt2"),
    Fault("gelu of the other kind", mutate("adapters.keys:stack_of", Call("part_of", nth=2), to="replace({it}, activation='gelu')"), "gpt2"),
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@torch.no_grad()
def agrees(case: str, folder) -> bool:
    """Opened, and the logits are transformers'; a named error is a fault that was seen."""
    ids = tokens(2, 64)
    try:
        return float((load(folder)(ids) - live(case)(ids).logits).abs().max()) <= 1e-5
    except FileError:
        return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_seen(fault: Fault, tmp_path):
    folder = folder_of(fault.caught_by, tmp_path)
    live(fault.caught_by)
    assert agrees(fault.caught_by, folder), "red before the fault was planted"
    with torch.no_grad():
        expected = live(fault.caught_by)(tokens(2, 64)).logits
    with planted(fault):
        try:
            with torch.no_grad():
                gap = float((load(folder)(tokens(2, 64)) - expected).abs().max())
        except FileError:
            gap = float("inf")
    assert gap > 1e-5
    assert agrees(fault.caught_by, folder), "the fault was not taken out"


SWAPS = {
    "the two norms": ("input_layernorm", "post_attention_layernorm"),
    "gate and up": ("mlp.gate_proj", "mlp.up_proj"),
    "k and v": ("self_attn.k_proj", "self_attn.v_proj"),
}


@pytest.mark.parametrize("names", SWAPS.values(), ids=SWAPS)
def test_a_table_with_two_names_swapped_is_seen(names, tmp_path, monkeypatch):
    one, other = names
    folder = folder_of("llama", tmp_path)

    def swapped(row: Row) -> Row:
        if one in row.theirs:
            return replace(row, theirs=row.theirs.replace(one, other))
        return replace(row, theirs=row.theirs.replace(other, one))

    table = Table(tuple(map(swapped, LLAMA.table.rows)), LLAMA.table.ignored)
    assert agrees("llama", folder)
    monkeypatch.setattr(LlamaAdapter, "families", (replace(LLAMA, table=table),))
    assert not agrees("llama", folder)
