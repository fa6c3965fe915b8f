"""SmallBench: what a small language model can do, offline, with chance and oracle beside it."""
