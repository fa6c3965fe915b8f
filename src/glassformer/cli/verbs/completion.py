"""`glass completion`: print the script by which a shell completes `glass`; no torch."""

from typing import Annotated

import typer

from glassformer.spec.errors import InputError, nearest

SHELLS = ("bash", "zsh", "fish")


def completion(
    shell: Annotated[
        str,
        typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=lambda: SHELLS),
    ],
) -> None:
    """Print the script that completes `glass` in your shell.

    Examples:

      eval "$(glass completion bash)"

      glass completion zsh > ~/.zfunc/_glass

      glass completion fish > ~/.config/fish/completions/glass.fish
    """
    if shell not in SHELLS:
        raise InputError(f"no completion for '{shell}'", hint=nearest(shell, SHELLS))
    # typer's own, which it does not list among its exports
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="glass", complete_var="_GLASS_COMPLETE", shell=shell)
    typer.echo(script)
