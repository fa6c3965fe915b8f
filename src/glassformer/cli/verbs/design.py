"""`glass design`: the options of a parameter budget. `designing` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson
from glassformer.spec.checks import at_least
from glassformer.spec.units import parse_count


def design(
    params: Annotated[str, typer.Option(help="Parameters in all: 10M, 350k.")],
    vocab: Annotated[str, typer.Option(help="Tokens of the vocabulary.")] = "16000",
    tolerance: Annotated[str, typer.Option(help="How far the count may be off.")] = "0.5%",
    heads: Annotated[str, typer.Option(help="Attention heads, or any.")] = "8",
    untied: Annotated[
        bool, typer.Option("--untied", help="A head with weights of its own.")
    ] = False,
    length: Annotated[int, typer.Option(help="Longest sequence, in tokens.")] = 512,
    position: Annotated[str, typer.Option(help="learned, rotary, sinusoidal or none.")] = "learned",
    bias: Annotated[str, typer.Option(help="none, qkv, all or no_key.")] = "none",
    norm: Annotated[str, typer.Option(help="layernorm or rmsnorm.")] = "layernorm",
    embedding_ratio: Annotated[
        str, typer.Option(help="Share of the parameters in embeddings (and head), or free.")
    ] = "0.35",
    exact_ratio: Annotated[
        bool, typer.Option("--exact-ratio", help="As near as whole widths allow.")
    ] = False,
    ratio_within: Annotated[
        str | None, typer.Option(help="The most it may drift: 1% is a point.")
    ] = None,
    ratio_covers: Annotated[
        str, typer.Option(help="both (embedding and head) or input (embedding alone).")
    ] = "both",
    glu_expansion: Annotated[str, typer.Option(help="d_ff / d_model, or free.")] = "2.66",
    exact_expansion: Annotated[
        bool, typer.Option("--exact-expansion", help="As near as a whole d_ff allows.")
    ] = False,
    glu_within: Annotated[
        str | None, typer.Option(help="The most it may drift, relative to itself.")
    ] = None,
    multiple: Annotated[int, typer.Option(help="Of d_model and d_ff: 8, 64.")] = 1,
    ffn_multiple: Annotated[int | None, typer.Option(help="Of d_ff alone.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of keys and values.")] = None,
    free_head_width: Annotated[
        bool, typer.Option("--free-head-width", help="heads x d_head need not be d_model.")
    ] = False,
    rank: Annotated[
        str | None, typer.Option(help="Factorize the embedding; any: as the ratio asks.")
    ] = None,
    min_layers: Annotated[int, typer.Option(help="Layers at least.")] = 1,
    max_layers: Annotated[int | None, typer.Option(help="Layers at most.")] = None,
    min_aspect: Annotated[float, typer.Option(help="d_model / layers at least.")] = 0.0,
    max_aspect: Annotated[float | None, typer.Option(help="d_model / layers at most.")] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Search to the end, however long it takes.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Sequences, for memory and time.")] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda, for memory and time.")] = "cpu",
    no_time: Annotated[
        bool, typer.Option("--no-time", help="Do not calibrate: no predicted step time.")
    ] = False,
    save: Annotated[str | None, typer.Option(help="Write a config for `glass train`.")] = None,
    png: Annotated[str | None, typer.Option(help="Draw allocation and landscape.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the dimensions that meet a parameter budget.

    The count is met, and every wish that gave way is named. Exit 1 if no design exists; the
    reason and the nearest changes that work are printed. A search ends after about half a second:
    what is not proven by then is said, and exit 5 if nothing was found. Examples:

      glass design --params 10M --vocab 16000

      glass design --params 350k --vocab 2000 --length 128 --heads 4 --save small.toml

      glass design --params 10M --vocab 256 --embedding-ratio free --multiple 64
    """
    from glassformer.budget.design import design as solve
    from glassformer.budget.infeasible import InfeasibleBudget, Undecided
    from glassformer.cli.actions import design as designing

    at_least("batch", batch)
    try:
        answer = solve(
            params,
            vocab,
            tolerance=tolerance,
            heads="any" if heads == "any" else parse_count("heads", heads),
            tied=not untied,
            length=length,
            position=position,
            bias=bias,
            norm=norm,
            embedding_ratio=embedding_ratio,
            exact_ratio=exact_ratio,
            ratio_within=ratio_within,
            ratio_covers=ratio_covers,
            glu_expansion=glu_expansion,
            exact_expansion=exact_expansion,
            glu_within=glu_within,
            multiple=multiple,
            ffn_multiple=ffn_multiple,
            kv_heads=kv_heads,
            free_head_width=free_head_width,
            rank=rank if rank in (None, "any") else parse_count("rank", rank),
            min_layers=min_layers,
            max_layers=max_layers,
            min_aspect=min_aspect,
            max_aspect=max_aspect,
            thorough=thorough,
        )
    except InfeasibleBudget as error:
        tell = designing.infeasible_json if as_json else designing.infeasible_text
        typer.echo(tell(error))
        raise typer.Exit(1) from None
    except Undecided as error:
        if as_json:
            typer.echo(designing.undecided_json(error))
            raise typer.Exit(error.exit_code) from None
        raise
    if as_json:
        typer.echo(designing.design_json(answer))
    else:
        typer.echo(designing.design_text(answer, batch=batch, device=device))
        if not no_time:
            typer.echo(designing.time_text(answer, batch=batch, device=device))
    if save is not None:
        designing.save(answer, Path(save), batch=batch)
    if png is not None:
        designing.draw(answer, Path(png))
