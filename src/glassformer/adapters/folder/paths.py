"""Find the folder or file of a model by its path, and its tokenizer. Imports no torch."""

from pathlib import Path

from glassformer.adapters.folder.files import SIDECAR_LIMIT, read_object
from glassformer.adapters.folder.origin import find_tokenizer, is_native
from glassformer.adapters.gguf.header import SUFFIX, is_gguf
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.errors import FileError, InputError
from glassformer.store.checkpoint import verify_sums
from glassformer.store.rundir import RunDirectory, RunRef

#: The file of settings of PEFT's adapters.
ADAPTER = "adapter_config.json"


def folder_of(path: str | Path) -> Path:
    """Resolve a path to a Hugging Face folder, a GGUF file, or the checkpoint of a run."""
    folder = Path(path)
    if is_gguf(folder):
        return folder
    if folder.suffix.lower() == SUFFIX and not folder.exists():
        raise InputError(f"there is no file {folder}")
    described = (folder / "config.json").is_file() and not is_native(folder)
    is_run = bool(RunDirectory(folder).steps())  # which has a config.json too
    return folder if described and not is_run else checkpoint_of(path)


def checkpoint_of(path: str | Path) -> Path:
    """Resolve a path to a checkpoint folder: itself, a run's best, `RUN@last` or `RUN@120`."""
    ref = RunRef.parse(path)
    folder = ref.folder
    if not folder.exists():
        raise InputError(f"there is no folder {folder}", hint="give a checkpoint or a run")
    if is_native(folder):
        return folder
    if not ref.directory.steps():
        if folder.is_file():
            raise FileError(
                f"a file, and models are folders or files that end with {SUFFIX}",
                where=str(folder),
                hint="give the folder that the file is in, if it is a model's",
            )
        if (folder / ADAPTER).is_file():
            base = read_object(folder / ADAPTER, limit=SIDECAR_LIMIT)
            named = str(base.get("base_model_name_or_path", "a model that it does not name"))[:200]
            raise FileError(
                f"an adapter of PEFT, which corrects {named}, and no model by itself",
                where=str(folder),
                hint="open the base and load_adapter(model.model, folder) (docs/finetuning.md)",
            )
        raise FileError(
            "not a glassformer checkpoint, nor a run with one, nor a Hugging Face folder: "
            "MANIFEST.json and config.json are missing",
            where=str(folder),
            hint="glassformer.save(model, folder) writes one",
        )
    return ref.checkpoint()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer that a model came with; raise where there is none."""
    folder = folder_of(path)
    verify_sums(folder, weights=False)
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise InputError(
            "the model has no tokenizer",
            where=str(path),
            hint="{glass generate MODEL '1 403 25' --ids|give token ids}",
        )
    return tokenizer
