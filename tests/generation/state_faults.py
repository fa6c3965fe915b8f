"""Mistakes in what a state can do, each found by random sequences on the kind that it names."""

from tests.planting import Assign, Call, Fault, For, mutate

NATIVE, ROWS = "generation.native.arrays:NativePast", "generation.native.arrays:Rows"
COLUMNS = "spec.state:Memories"
#: `caught_by` names a kind of memory and a stepper.
FAULTS = (
    Fault("rewound one too far, in pages", mutate(f"{NATIVE}.rewind", Call("minimum"), to="np.maximum({it} - 1, 0)"), "full, native"),
    Fault("rewound one too little, in columns", mutate(f"{COLUMNS}.rewind", Assign("ends"), to="[n + 1 for n in found]"), "full, torch"),
    Fault("a fork that writes into shared pages", mutate(f"{ROWS}.fork", Call("share"), drop=True), "grouped, native"),
    Fault("a fork with the memory of the other", mutate(f"{COLUMNS}.fork", Call("copied"), to="memory"), "full, numpy"),
    Fault("a layer that is not reordered", mutate(f"{COLUMNS}.reorder", For("memory"), to="list({it})[1:]"), "window, torch"),
    Fault("sources that are not reordered", mutate(f"{NATIVE}.reorder", For("part"), to="[self.own]"), "cross, native"),
    Fault("saved without the last positions", mutate(f"{ROWS}.arrays", Call("copy"), to="self.length // 16 * 16"), "8 bits, native"),
    Fault("saved without what is padding", mutate(f"{COLUMNS}.arrays", Call("_valid"), to="self.library.true({it}, {it}.shape)"), "grouped, torch"),
    Fault("a turn that shares one token too many", mutate("generation.turns:Turns.start", Call("shared_length"), to="min({it} + 1, len(held.ids), len(ids) - 1)"), "full, native"),
)  # fmt: skip
