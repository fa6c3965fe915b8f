"""`python -m bench NAME [--json] [--device cpu|cuda] [--quick]`: rows, with ratios to a peer.

A benchmark may have options of its own; `python -m bench NAME --help` lists them.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
from pathlib import Path

from glassformer.kernels.threads import sleep_soon_while_waiting, widest_blas

sleep_soon_while_waiting()
widest_blas()  # as `glass` does, before NumPy is loaded

import torch

import bench


def main() -> None:
    """Run one benchmark and print its rows."""
    parts = ("attack_lines", "families")  # of `attack` and `adapters`
    names = [
        module.name
        for module in pkgutil.iter_modules(bench.__path__)
        if module.name not in parts and _runs(Path(bench.__path__[0]), module.name)
    ]
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("name", nargs="?")
    chosen = first.parse_known_args()[0].name
    parser = argparse.ArgumentParser(prog="python -m bench", description=bench.__doc__)
    parser.add_argument("name", choices=names)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    module = importlib.import_module(f"bench.{chosen}") if chosen in names else None
    own = getattr(module, "options", None)
    if own is not None:
        own(parser)
    arguments = parser.parse_args()
    assert module is not None, "the parser ends where no benchmark has that name"
    if arguments.device == "cpu":
        torch.set_num_threads(2)
    devices = {"device": arguments.device} if arguments.device != "cpu" else {}
    if arguments.quick and "quick" not in inspect.signature(module.run).parameters:
        parser.error(f"{arguments.name} has no quick sizes")
    sizes = {"quick": True} if arguments.quick else {}
    asked = {} if own is None else {"asked": arguments}
    for row in module.run(**devices, **sizes, **asked):
        print(json.dumps(row) if arguments.json else show(row), flush=True)


def _runs(folder: Path, name: str) -> bool:
    """Return True for a benchmark: a module, or the front of a package, with a function `run`."""
    file = folder / f"{name}.py"
    text = (file if file.exists() else folder / name / "__init__.py").read_text(encoding="utf-8")
    return "\ndef run(" in text


def show(row: dict[str, object]) -> str:
    """A row for people."""
    time = f"{row['median_ms']:>9.3f} ms" if row["median_ms"] is not None else " " * 12
    ratio = f"{row['ratio']:>8.3f}" if row["ratio"] is not None else " " * 8
    limit = f"  {row['of_limit']:.0%} of the limit" if row["of_limit"] is not None else ""
    return f"{row['case']!s:<52}{row['name']!s:<42}{time}{ratio}{limit}"


if __name__ == "__main__":
    main()
