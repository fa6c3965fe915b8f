"""`glass finetune`: its options; `actions.train` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import (
    AnyModel,
    AsJson,
    Device,
    Fsdp,
    Nproc,
    Overrides,
    Runs,
    Threads,
)
from glassformer.kernels.threads import one_blas_thread


def finetune(
    model: AnyModel,
    data: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="JSON lines of messages, prompt and completion, or text."
        ),
    ],
    overrides: Overrides = None,
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train LoRA of this rank, not all weights.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; by default finetune.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Short for train.steps=N; by default three epochs.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Short for train.seed=N.")] = None,
    device: Device = "cpu",
    threads: Threads = None,
    nproc: Nproc = None,
    fsdp: Fsdp = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run of this name and start anew.")
    ] = False,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Go on training a model on your own examples.

    All weights train, or with --lora a correction of low rank. The result is a run. Examples:

      glass finetune Qwen/Qwen3-0.6B chats.jsonl --lora 8 --name helper

      glass finetune runs/lm notes.txt --steps 200 train.lr=1e-4
    """
    from glassformer.cli.shell.resolve import find_data, find_model

    base = find_model(model, runs=Path(runs))
    given = [f"base={base}", f"data={find_data(data)}", *(overrides or [])]
    given += [f"lora={lora}"] if lora is not None else []
    given += [f"train.steps={steps}"] if steps is not None else []
    given += [f"train.seed={seed}"] if seed is not None else []
    one_blas_thread()
    if nproc is not None:
        from glassformer.cli.shell.ranks import launch

        raise typer.Exit(launch(nproc))
    from glassformer.cli.actions import train as training

    code = training.train(
        "finetune",
        given,
        name=name,
        runs=Path(runs),
        device=device,
        threads=threads,
        fsdp=fsdp,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)
