"""`load(path)`: the one door to models on disk, and `save`, its inverse for our own."""

from pathlib import Path

from glassformer.data.tokenizer import tokenizer_from_json
from glassformer.data.vocab import Tokenizer
from glassformer.models.build import build
from glassformer.models.model import Model
from glassformer.models.state import dtype_of, load_weights, weights_of
from glassformer.spec.errors import FileError, InputError
from glassformer.store.checkpoint import MANIFEST, load_checkpoint, save_checkpoint
from glassformer.store.rundir import RunDirectory


def checkpoint_of(path: str | Path) -> Path:
    """The checkpoint folder that a path means: itself, or a run's best, `RUN@last`, `RUN@120`."""
    text, _, which = str(path).partition("@")
    folder = Path(text)
    if not folder.exists():
        raise InputError(f"there is no folder {folder}", hint="give a checkpoint or a run")
    if (folder / MANIFEST).is_file():
        return folder
    run = RunDirectory(folder)
    if not run.steps():
        raise FileError(
            "not a glassformer checkpoint, nor a run with one: MANIFEST.json is missing",
            where=str(folder),
            hint="glassformer.save(model, folder) writes one",
        )
    if which in ("", "best", "last"):
        step = run.pointed(which or "best") or run.pointed("last") or run.steps()[-1]
    elif which.isdigit() and int(which) in run.steps():
        step = int(which)
    else:
        known = ", ".join(map(str, run.steps()))
        raise InputError(f"no checkpoint '{which}' in {folder}", hint=f"best, last, {known}")
    return run.step_folder(step)


def load(path: str | Path) -> Model:
    """The model in a checkpoint folder or a run, verified, in eval mode."""
    folder = checkpoint_of(path)
    spec, arrays = load_checkpoint(folder)
    model = build(spec, device="meta").to_empty(device="cpu").to(dtype_of(arrays))
    load_weights(model, arrays, where=str(folder))
    return model.eval()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that a checkpoint holds; without one, tokens have no names."""
    file = checkpoint_of(path) / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            "the checkpoint holds no tokenizer.json", where=str(path), hint="give token ids"
        )
    return tokenizer_from_json(file.read_text(encoding="utf-8"))


def save(model: Model, path: str | Path) -> Path:
    """Write a checkpoint folder that `load` opens; one that exists is never overwritten."""
    folder = Path(path)
    save_checkpoint(folder, model.spec, weights_of(model))
    return folder
