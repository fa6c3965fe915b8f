"""`python -m tests.kernels.sanitized`: every check of the C files under AddressSanitizer and UBSan.

The library is compiled beside with both sanitizers, which end the process at the first read or
write outside of memory, overflow, bad shift or misaligned access, and the checks run on it in a
process that has the sanitizers' runtime loaded first. What torch and Python leak is not looked for.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from glassformer.kernels import c_library
from glassformer.kernels.build import COMPILERS, FLAGS, build

SANITIZERS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"),
    "-DGLASS_NO_INLINE",  # compiles in a fraction of the time, and stack traces name every function
)
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def main() -> int:
    """Compile, then run this module again with the runtime loaded; return its exit code."""
    if len(sys.argv) > 1:
        return _check(Path(sys.argv[1]))
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        print("there is no C compiler")
        return 1
    with tempfile.TemporaryDirectory() as place:
        flags = (*(flag for flag in FLAGS if flag != "-O3"), *SANITIZERS)
        library = build(compiler=compiler, target=Path(place) / "sanitized.so", flags=flags)
        runtimes = [
            subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        environment = os.environ | OPTIONS | {"LD_PRELOAD": ":".join(runtimes)}
        line = [sys.executable, "-m", "tests.kernels.sanitized", str(library)]
        return subprocess.run(line, env=environment, check=False).returncode


def _check(path: Path) -> int:
    library = c_library.open_library(path)
    c_library._loaded = lambda: (library, "")  # type: ignore[assignment]
    from tests.generation.test_native import CHECKS as STEPS
    from tests.kernels.checks import CHECKS

    for name, check in (CHECKS | STEPS).items():
        check()
        print(f"{name}: clean", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
