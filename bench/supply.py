"""What is delivered: a bill of materials, pinned hashes, and a wheel that two builds make alike.

The bill of materials (CycloneDX 1.6) lists the core dependencies as they are installed, each with
its licence and, where hashes.txt has them, the SHA-256 of its files: build/sbom.json.
`python -m bench supply --hashes` writes hashes.txt again with uv, which asks the index.
"""

import argparse
import hashlib
import importlib.metadata as metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from bench.clock import said

HERE = Path(__file__).parents[1]
HASHES = HERE / "hashes.txt"
SBOM = HERE / "build" / "sbom.json"
#: What hashes.txt leaves out: torch comes as a build for the machine, with its own libraries, and
#: glasscheck from this repository.
ELSEWHERE = re.compile(r"(torch|triton|setuptools|nvidia-.*|cuda-.*|-e .*|.*glasscheck.*)$")
HEAD = """\
# The core dependencies with the SHA-256 of every file that the index offers, made by `make hashes`.
# torch is left out: its CPU build comes from where you choose. To install by hashes alone:
#   pip install torch==2.13.0
#   pip install --require-hashes -r hashes.txt
#   pip install --no-deps ./glasscheck .
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add what this can be told."""
    parser.add_argument("--hashes", action="store_true", help="write hashes.txt again, with uv")
    parser.add_argument("--no-wheel", action="store_true", help="do not build the wheel twice")


def run(*, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each thing delivered."""
    if asked.hashes:
        HASHES.write_text(fresh_hashes())
    known = pinned()
    yield row("hashes.txt", f"{len(known)} packages, {sum(map(len, known.values()))} hashes")
    bill = bill_of_materials()
    SBOM.parent.mkdir(exist_ok=True)
    SBOM.write_text(json.dumps(bill, indent=2) + "\n")
    yield row("build/sbom.json", f"{len(bill['components'])} packages, CycloneDX 1.6")
    if not asked.no_wheel:
        first, second = wheel_hash("one"), wheel_hash("another-folder")
        yield row("wheel, built twice", "equal" if first == second else "DIFFERENT")


row = partial(said, "supply")


def pinned(text: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the hashes of each `name==version` of hashes.txt."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in (HASHES.read_text() if text is None else text).splitlines():
        if line[:1].isalpha():
            name = line.partition(" ")[0]
            found[name] = []
        elif "--hash=sha256:" in line:
            found[name].append(line.partition("sha256:")[2].rstrip(" \\"))
    return {name: tuple(hashes) for name, hashes in found.items()}


def fresh_hashes() -> str:
    """Return hashes.txt for the versions of constraints.txt, as the index has them now."""
    words = ["-m", "uv", "pip", "compile", "-q", "pyproject.toml", "-c", "constraints.txt"]
    words += ["--generate-hashes", "--no-annotate", "--no-header", "--python-version", "3.11"]
    done = subprocess.run(
        [sys.executable, *words], cwd=HERE, check=True, capture_output=True, text=True
    )
    blocks = re.split(r"\n(?=[a-zA-Z])", done.stdout.strip())
    kept = [block for block in blocks if not ELSEWHERE.match(block.partition("==")[0])]
    return HEAD + "\n".join(kept) + "\n"


def core_packages() -> list[metadata.Distribution]:
    """Return the installed core dependencies, and what they need in turn, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(text).name for text in _core_requirements()]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform
        found[name] = package
        for text in package.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return [found[name] for name in sorted(found)]


def _core_requirements() -> list[str]:
    import tomllib

    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def bill_of_materials() -> dict[str, Any]:
    """Return the core dependencies in CycloneDX's form, always in the same order."""
    from glassformer import __version__

    hashes = pinned()
    components = []
    for package in core_packages():
        name, version = package.metadata["Name"], package.version
        licence = (
            package.metadata.get("License-Expression") or package.metadata.get("License") or ""
        )
        purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
        entry: dict[str, Any] = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
        }
        if licence and len(licence) < 100:
            entry["licenses"] = [{"license": {"name": licence.splitlines()[0]}}]
        known = hashes.get(f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}", ())
        if known:
            link = {"type": "distribution", "url": f"https://pypi.org/project/{name}/{version}/"}
            listed = [{"alg": "SHA-256", "content": one} for one in known]
            entry["externalReferences"] = [{**link, "hashes": listed}]
        components.append(entry)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "name": "glassformer", "version": __version__}
        },
        "components": components,
    }


def wheel_hash(name: str) -> str:
    """Build a wheel of the files that git knows, in a folder of that name; return its SHA-256."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout
    when = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / name
        for file in filter(None, listed.split("\0")):
            if file.startswith("src/") or "/" not in file:
                (source / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(HERE / file, source / file)
        words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
        subprocess.run(
            [sys.executable, *words, "-w", place],
            cwd=source,
            check=True,
            env={**os.environ, "SOURCE_DATE_EPOCH": when or "0"},
        )
        (wheel,) = Path(place).glob("*.whl")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()
