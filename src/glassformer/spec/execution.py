"""Constants of the torch engine that the cost estimates need too."""

#: Fused attention on a GPU needs a head width that is a multiple of this many float32 numbers.
GPU_HEAD_MULTIPLE = 4
#: Logits with more entries than this are computed in chunks, and recomputed in the backward pass.
PIECE = 1 << 25
