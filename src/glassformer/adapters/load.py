"""`load(path)`: the one door to models on disk, and `save`, its inverse for our own."""

from pathlib import Path

from glassformer.models.build import build
from glassformer.models.model import Model
from glassformer.models.state import load_weights, weights_of
from glassformer.spec.errors import FileError, InputError
from glassformer.store.checkpoint import MANIFEST, load_checkpoint, save_checkpoint


def load(path: str | Path) -> Model:
    """The model in a checkpoint folder, verified, in eval mode."""
    folder = Path(path)
    if not folder.exists():
        raise InputError(f"there is no folder {folder}", hint="give the path of a checkpoint")
    if not (folder / MANIFEST).is_file():
        raise FileError(
            "not a glassformer checkpoint: MANIFEST.json is missing",
            where=str(folder),
            hint="glassformer.save(model, folder) writes one",
        )
    spec, arrays = load_checkpoint(folder)
    model = build(spec, device="meta").to_empty(device="cpu")
    load_weights(model, arrays, where=str(folder))
    return model.eval()


def save(model: Model, path: str | Path) -> Path:
    """Write a checkpoint folder that `load` opens; one that exists is never overwritten."""
    folder = Path(path)
    save_checkpoint(folder, model.spec, weights_of(model))
    return folder
