"""What `glass convert` does: open a model, whoever wrote it, and write it in another format."""

import json
from pathlib import Path

from glassformer.adapters.folder.export import export
from glassformer.adapters.gguf.export import DTYPES, export_gguf
from glassformer.adapters.load import load, save
from glassformer.adapters.native import NativeAdapter
from glassformer.cli.shell.progress import tell
from glassformer.cli.shell.resolve import find_model
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError

FORMATS = ("hf", "native", "gguf")


def convert(
    model: str, folder: Path, *, to: str, dtype: str | None, runs: Path, as_json: bool
) -> None:
    """Read, write, and say what became of it."""
    one_of("--to", to, FORMATS)
    if dtype is not None:
        if to != "gguf":
            raise InputError(f"--dtype does not go with --to {to}", hint="it is for --to gguf")
        one_of("--dtype", dtype, DTYPES)
    adapter = load(find_model(model, runs=runs))
    assert isinstance(adapter, NativeAdapter)
    tell(f"read {model}: {adapter.report}")
    result = {
        "folder": str(folder),
        "to": to,
        "architecture": adapter.get_architecture_type(),
        "parameters": adapter.get_num_parameters(),
        "dtype": str(next(adapter.parameters()).dtype).removeprefix("torch."),
    }
    if to == "native":
        save(adapter, folder)
    else:
        if to == "gguf":
            result["dtype"] = dtype or "f32"
            written = export_gguf(adapter, folder, dtype=result["dtype"])
        else:
            written = export(adapter, folder)
        result |= {"model_type": written.model_type, "notes": list(written.notes)}
        for note in written.notes:
            tell(f"note: {note}")
    if as_json:
        print(json.dumps(result))
        return
    kind = f", model_type {result['model_type']}" if "model_type" in result else ""
    print(f"{folder}: {result['parameters']:,} parameters, {result['dtype']}{kind}")
