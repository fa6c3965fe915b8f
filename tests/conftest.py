"""How every test runs: one thread, and properties searched the same way each time."""

import os

# Two thread pools on two cores wait for each other; OpenBLAS reads this when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "glassformer",
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("glassformer")
