"""`glass convert`: open a model of any known format, and write it in another one."""

import json
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from glassformer.cli.shell.options import AnyModel, AsJson, Runs
from glassformer.cli.shell.resolve import find_model
from glassformer.cli.shell.terminal import end, tell
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.options import option


def convert(
    model: AnyModel,
    folder: Annotated[
        str | None,
        typer.Argument(metavar="OUT", help="The same as -o.", hidden=True),
    ] = None,
    to: str = option("hf", metavar="FORMAT", help="hf, native or gguf."),
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--out", metavar="OUT", help="The folder, or .gguf file; it must not exist."
        ),
    ] = None,
    dtype: str | None = option(
        None, metavar="TYPE", help="gguf: f32 (the default), f16, q8_0, q4_0 or q4_k."
    ),
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Write a model as Hugging Face's, GGUF or our own format.

    What was imported goes back byte for byte. Examples:

      glass convert runs/lm-modern --to hf -o exported

      glass convert runs/lm-modern --to gguf --dtype q8_0 -o lm.gguf

      glass convert path/to/Qwen3-0.6B --to native -o mine
    """
    target = out or folder
    if target is None or (out is not None and folder is not None):
        raise InputError(
            "where to?" if target is None else "two folders to write to",
            hint=f"glass convert {model} --to {to} -o FOLDER",
        )
    place, path = Path(target), find_model(model, runs=Path(runs))
    from glassformer.adapters.any_model import Format, export
    from glassformer.adapters.gguf.export_gguf import DTYPES
    from glassformer.adapters.load import load_native
    from glassformer.lab.next_steps import after_converting, model_prompt

    one_of("--to", to, get_args(Format))
    if dtype is not None:
        if to != "gguf":
            raise InputError(f"--dtype does not go with --to {to}", hint="it is for --to gguf")
        one_of("--dtype", dtype, DTYPES)
    adapter = load_native(path)
    tell(f"read {path}: {adapter.report}")
    written = export(adapter, place, to=cast(Format, to), dtype=dtype)
    result = {
        "folder": str(place),
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
    print(f"{place}: {result['parameters']:,} parameters, {result['dtype']}{kind}", flush=True)
    continues = "next" in adapter.spec.head_names()
    prompt = model_prompt(adapter.get_tokenizer())
    end("", after_converting(place, to, prompt, continues=continues))
