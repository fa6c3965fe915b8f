"""Decoding and training steps on a GPU: graphs, Triton and CUDA C++, and the derived step."""
