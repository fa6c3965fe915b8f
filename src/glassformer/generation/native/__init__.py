"""The native step: a model as operations of `kernels/step.c`, over arrays or a torch model."""
