"""The C kernels as an optional extension; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent / "src"))

from glassformer.kernels.build import FLAGS, HEADERS, SOURCES, digest

HERE = "src/glassformer/kernels"

setup(
    ext_modules=[
        Extension(
            "glassformer.kernels._native",
            [f"{HERE}/{name}" for name in SOURCES],
            depends=[f"{HERE}/{name}" for name in HEADERS],
            define_macros=[("GLASS_SOURCE", f'"{digest()}"')],
            # without debug information, which holds the folder: two builds give the same bytes
            extra_compile_args=[*FLAGS, "-g0"],
            libraries=["m"],
            optional=True,  # without a compiler the install goes on, and torch's routines serve
        )
    ]
)
