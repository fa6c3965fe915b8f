"""The fast decoding step: derived weights, kernels, CUDA graphs."""
