"""Compile the C files into one shared library beside this module: at install, or on request.

Standard library only, as setup.py takes sources and flags from here. The digest of the sources is
compiled in, so that a library older than its sources is detected before it is called.
"""

import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from glassformer.spec.errors import MachineError

HERE = Path(__file__).parent
SOURCES = ("native.c", "floating.c", "integer.c", "packed.c", "grids.c", "step.c", "train.c")
HEADERS = (
    *("native.h", "rounding.h", "floating_block.h", "integer_x86.h", "each_width.h", "lanes.h"),
    *("step_parts.h", "step_attention.h", "train_parts.h", "train_attention.h"),
)
#: The files that the bits of a training step depend on.
TRAINING = ("train.c", "train_parts.h", "train_attention.h", "lanes.h", "each_width.h")
LIBRARY = HERE / ("_native" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
#: No contraction to fused operations: every variant does exactly the operations in the source.
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
COMPILERS = ("cc", "gcc", "clang")
COMMAND = "python -m glassformer.kernels build"


def digest(names: Sequence[str] = SOURCES + HEADERS) -> str:
    """Return the digest of C sources, headers and flags: of all, or of some."""
    made = hashlib.sha256("\0".join(FLAGS).encode())
    for name in names:
        made.update((HERE / name).read_bytes())
    return made.hexdigest()[:16]


def build(
    *,
    compiler: str | None = None,
    source: Path = HERE,
    target: Path = LIBRARY,
    flags: Sequence[str] = FLAGS,
) -> Path:
    """Compile the library and move it to `target` in one step, complete or not at all."""
    found = compiler or next((name for name in COMPILERS if shutil.which(name)), None)
    if found is None or shutil.which(found) is None:
        raise MachineError(
            f"there is no C compiler: looked for {found or ', '.join(COMPILERS)}",
            hint="install gcc or clang; without the library torch's routines are used",
        )
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    line = [found, *flags, f'-DGLASS_SOURCE="{digest()}"', "-fPIC", "-shared", "-o", str(beside)]
    try:
        done = subprocess.run(
            [*line, *(str(source / name) for name in SOURCES), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
            raise MachineError(f"{found} could not compile the kernels: {said[0]}", where=str(HERE))
        beside.replace(target)
    except OSError as error:
        raise MachineError(f"cannot write {target}: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
    return target
