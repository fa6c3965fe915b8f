"""A batch of sources and answers: what the decoder reads is what it should say, one place later.

Targets are shifted here and nowhere else (ruling C-16).
"""

import numpy as np

from glassformer.data.batch import Batch, Ints, Source
from glassformer.data.splits import padded_to_longest

# N rows, B the same, cut to the longest of them, S source length, T answer length

PAD, BOS, EOS = range(3)


def answered_batch(
    source_NS: Ints, source_lengths_N: Ints, *, answer_NT: Ints, answer_lengths_N: Ints
) -> Batch:
    """The source; BOS and the answer; the answer and its EOS as the target of head `next`."""
    source_BS, source_valid_BS = padded_to_longest(source_NS, source_lengths_N)
    next_BT, valid_BT = padded_to_longest(answer_NT, answer_lengths_N)
    # What the decoder reads at a place is what it should have said at the place before.
    tokens_BT = np.full_like(next_BT, BOS)
    tokens_BT[:, 1:] = next_BT[:, :-1]
    tokens_BT[~valid_BT] = PAD
    return Batch(
        tokens=tokens_BT,
        valid=valid_BT,
        targets={"next": next_BT},
        weights=valid_BT.astype(np.float32),
        source=Source(tokens=source_BS, valid=source_valid_BS),
    )
