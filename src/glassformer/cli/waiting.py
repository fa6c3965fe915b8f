"""How threads wait for each other, decided before the libraries that have them are loaded.

An OpenMP thread that has nothing to do turns in a circle for milliseconds before it sleeps. Where
another program needs that core, the thread that everyone waits for does not run: steps of two
threads took up to 25 times as long as of one. Asleep at once, they lose on a quiet machine what a
second thread gains. So they turn for microseconds, then sleep: docs/training.md has the figures.
"""

import os
import sys

#: Turns of GNU's OpenMP, which torch has on Linux; others do not read it.
TURNS = 1_000
#: Whoever has set one of these knows better.
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def waiting_briefly() -> None:
    """Let OpenMP's threads, torch's and those of the C kernels, sleep soon while they wait."""
    if not any(name in os.environ for name in OPENMP):
        os.environ["GOMP_SPINCOUNT"] = str(TURNS)


def one_blas_thread() -> None:
    """Let NumPy's products have one thread, in verbs whose products are small: these do not sleep
    while they wait, and their number is read when NumPy is loaded.
    """
    if "numpy" not in sys.modules:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
