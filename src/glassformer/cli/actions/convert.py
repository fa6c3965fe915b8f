"""Run `glass convert`: open a model of any known format, and write it in another one."""

import json
from pathlib import Path
from typing import cast, get_args

from glassformer.adapters.any_model import Format, export
from glassformer.adapters.gguf.export_gguf import DTYPES
from glassformer.adapters.load import load_native
from glassformer.cli.shell.output import end
from glassformer.cli.shell.terminal import tell
from glassformer.lab.next_steps import after_converting, model_prompt
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError


def convert(model: str, folder: Path, *, to: str, dtype: str | None, as_json: bool) -> None:
    """Read the model, write it, and print what was written."""
    one_of("--to", to, get_args(Format))
    if dtype is not None:
        if to != "gguf":
            raise InputError(f"--dtype does not go with --to {to}", hint="it is for --to gguf")
        one_of("--dtype", dtype, DTYPES)
    adapter = load_native(model)
    tell(f"read {model}: {adapter.report}")
    written = export(adapter, folder, to=cast(Format, to), dtype=dtype)
    result = {
        "folder": str(folder),
        "to": to,
        "architecture": adapter.get_architecture_type(),
        "parameters": adapter.get_num_parameters(),
        "dtype": (dtype or "f32") if to == "gguf" else str(adapter.dtype).removeprefix("torch."),
    }
    if to != "native":
        result |= {"model_type": written.model_type, "notes": list(written.notes)}
    for note in written.notes:
        tell(f"note: {note}")
    if as_json:
        print(json.dumps(result))
        return
    kind = f", model_type {result['model_type']}" if "model_type" in result else ""
    print(f"{folder}: {result['parameters']:,} parameters, {result['dtype']}{kind}", flush=True)
    end("", after_converting(folder, to, model_prompt(adapter.get_tokenizer())))
