"""What a model costs before it is built: FLOPs, memory, time, parameters."""
