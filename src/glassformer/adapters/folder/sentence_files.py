"""The files of a folder of sentence-transformers: which modules it lists, and where they are."""

import json
from pathlib import Path, PurePosixPath

from glassformer.adapters.folder.files import find_sidecar, read_text
from glassformer.spec.errors import FileError

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
PROMPTS = "config_sentence_transformers.json"
#: The settings of the first module; older folders name the file after the architecture.
SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
WEIGHTS = "model.safetensors"
LONGEST = 1_000_000  # bytes of modules.json
MOST = 64  # modules


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """Return the path and the type of each module, in order."""
    place = find_sidecar(folder, MODULES)
    if place is None:
        pooling = find_sidecar(folder, POOLING) is not None
        return [("1_Pooling", "Pooling")] if pooling else []
    try:
        listed = json.loads(read_text(place, limit=LONGEST))
        paths = [PurePosixPath(one["path"]) for one in listed]
        found = [
            (path.name, one["type"].rsplit(".", 1)[-1])
            for path, one in zip(paths, listed, strict=True)
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FileError(f"{MODULES} is no list of modules", where=str(place)) from error
    if len(found) > MOST:
        raise FileError(f"{MODULES} lists {len(found)} modules", where=str(place))
    for path in paths:
        if path.is_absolute() or len(path.parts) > 1 or path.name == "..":
            raise FileError(
                f"{MODULES} has the path {str(path)[:60]!r}, not the name of a folder beside it",
                where=str(place),
            )
    return found


def module_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files that the modules of a folder are in, as far as they exist."""
    places = [path for path, _ in modules_of(folder) if path]
    names = [f"{place}/{name}" for place in places for name in ("config.json", WEIGHTS)]
    return tuple(name for name in (*SETTINGS, PROMPTS, *names) if (folder / name).is_file())
