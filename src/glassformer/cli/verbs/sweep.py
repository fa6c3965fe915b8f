"""`glass sweep`: its options, those of a budget among them; `actions.sweep` does the work."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from glassformer.budget.question import Budget
from glassformer.cli.shell.options import AsJson, Device, takes
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.options import Option, options_of
from glassformer.spec.sweep import SweepSpec
from glassformer.spec.tasks import check_task_name

#: Options of a budget that the task decides, and the one that has three spellings here.
_ELSEWHERE = ("vocab", "length", "tied")


def _as_list(option: Option) -> Option:
    """Return an option of a budget that takes several values, which the solver's own code reads."""
    if option.typed is bool:
        return option
    return replace(
        option,
        type=str,
        typed=str,
        parse=None,
        help=f"Budget: {option.help[:1].lower()}{option.help[1:]}",
        metavar="VALUES",
        show_default=option.name != "params",
        at_least=None,
        above=None,
        at_most=None,
        below=None,
        choices=(),
    )


LISTS = tuple(_as_list(each) for each in options_of(Budget) if each.name not in _ELSEWHERE)


@takes(SweepSpec, into="options")
@takes(LISTS, into="budget")
def sweep(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|CONFIG|SWEEP",
            help="A task of `glass list`, a run's config, a sweep's .toml, or a sweep's folder, "
            "which goes on.",
        ),
    ],
    options: dict[str, Any],
    budget: dict[str, Any],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING=VALUES",
            help="train.lr=1e-3,3e-3 model.d_model=64,96 train.steps=500 ...; a range is sampled: "
            "log:1e-4..1e-2, 0.0..0.3, 32..128/16.",
        ),
    ] = None,
    tied: Annotated[bool, typer.Option("--tied", help="Budget: tied embeddings.")] = False,
    untied: Annotated[
        bool, typer.Option("--untied", help="Budget: an output head of its own weights.")
    ] = False,
    both: Annotated[bool, typer.Option("--tied,--untied", help="Budget: vary the two.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the sweep; by default the task's.")
    ] = None,
    sweeps: Annotated[
        str, typer.Option("--sweeps", metavar="FOLDER", help="The folder of the sweeps.")
    ] = "sweeps",
    device: Device = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of each run.")] = 1,
    jobs: Annotated[
        int | None,
        typer.Option(help="Runs at a time, a process each; by default one per core, one on a GPU."),
    ] = None,
    stack: Annotated[
        bool | None,
        typer.Option(
            "--stack/--no-stack",
            help="Train runs of one shape as one; by default on a GPU.",
            show_default=False,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Train on a Ray cluster: its address, auto for the one that runs here, local to "
            "start one.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a sweep that was stopped.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the sweep of this name and start anew.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the cells, their parameters and the time; no runs."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm a very large sweep.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train many settings with several seeds each, and rank them.

    It can be killed at any moment, and --resume goes on. Runs that fail are results. Examples:

      glass sweep digits train.lr=1e-3,3e-3,1e-2 train.steps=500 --seeds 5

      glass sweep text train.lr=log:1e-4..1e-2 --sampler random --draws 20 --seeds 3

      glass sweep text --params 300k --embedding-ratio 0.25,0.35,0.45 --tied,--untied --dry-run

      glass sweep sweeps/text
    """
    if not what.endswith(".toml") and not Path(what).is_dir():
        check_task_name(what)  # before torch is imported
    one_blas_thread()
    from glassformer.cli.actions.sweep import run

    wish = ["true"] * tied + ["false"] * untied if not both else ["true", "false"]
    design = {key: str(value) for key, value in budget.items()}
    design |= {"tied": ",".join(wish)} if wish else {}
    code = run(
        what,
        list(settings or []),
        options=options,
        design=design,
        name=name,
        sweeps=Path(sweeps),
        device=device,
        threads=threads,
        jobs=jobs,
        ray=ray,
        stack=stack,
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)
