"""Constants of the torch engine that the cost estimates need too."""

#: Fused attention on a GPU needs a head width that is a multiple of this many float32 numbers.
GPU_HEAD_MULTIPLE = 4
#: Logits with more entries than this are computed in chunks, and recomputed in the backward pass.
PIECE = 1 << 25
#: An expert's group of tokens is filled up to a multiple of this many rows. Matrix products of
#: fewer than four rows round differently on a CPU; filled up, a token's result does not depend on
#: how many others chose the same expert, and changing the future changes no bit of the past (seen
#: for layers of a dozen inputs and more; in smaller ones a row's index in the group matters too).
GROUP_ROWS = 8
