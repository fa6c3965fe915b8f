"""llama.cpp's names of our parameters: one more key table.

Its Llama turns neighbouring rows of q and k, ours (and Hugging Face's) a row and the one half a
head further: those rows are reordered, both ways. Its Qwen turns as ours does.
"""

from glassformer.adapters.table import Interleaved, Layout, Row, Rows, Table
from glassformer.spec.model import ModelSpec

LAYER, BLOCK = "blk.{}.", "blocks.{}."
#: Divisors of rotary frequencies: no parameter; `settings` reads them.
FACTORS = "rope_freqs.weight"
PARTS = {
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.o_proj",
    "ffn_gate": "ffn.gate_proj",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
NORMS = {
    "attn_norm": "attn_norm",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "ffn_norm": "ffn_norm",
}
TURNED = ("attn_q", "attn_k")


def table_of(kind: str, spec: ModelSpec) -> Table:
    """The rows of an architecture; the width of a head decides how Llama's are reordered."""
    width = next(spec.decoder.blocks()).attention.head_width(spec.d_model)

    def layout(part: str) -> Layout:
        return Interleaved(width) if kind == "llama" and part in TURNED else Rows()

    return Table(
        rows=(
            Row("token_embd.weight", "embed.weight"),
            *(Row(f"{LAYER}{one}.weight", f"{BLOCK}{our}.weight") for one, our in NORMS.items()),
            *(
                Row(f"{LAYER}{part}.{leaf}", f"{BLOCK}{our}.{leaf}", layout(part))
                for part, our in PARTS.items()
                for leaf in ("weight", "bias")
            ),
            Row("output_norm.weight", "final_norm.weight"),
            Row("output.weight", "heads.next.weight"),
        ),
        ignored=(FACTORS,),
    )
