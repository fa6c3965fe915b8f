"""`python -m glassformer.kernels [build]`: compile the C kernels, or print the variant in use."""

import argparse
import sys

from glassformer.kernels import build, c_library
from glassformer.spec.errors import GlassError


def main() -> int:
    """Return 0, or the exit code of the error; 1 if there is no library to show."""
    reader = argparse.ArgumentParser(prog="python -m glassformer.kernels", description=__doc__)
    reader.add_argument("job", nargs="?", choices=("show", "build"), default="show")
    reader.add_argument("--compiler", help="default: the first of cc, gcc, clang")
    given = reader.parse_args()
    try:
        if given.job == "build":
            print(build.build(compiler=given.compiler))
    except GlassError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not c_library.available():
        print(c_library.unavailable())
        return 1
    pool = "torch's" if c_library.shares_threads() else "none: one thread"
    print(
        f"variant: {c_library.variant()} of {', '.join(c_library.variants())}; thread pool: {pool}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
