"""The pytest plugin of glasscheck by its older name, `-p glassformer.checks.plugin`."""

from typing import Any

pytest_plugins = ("glasscheck.plugin",)


def __getattr__(name: str) -> Any:
    from glasscheck import plugin  # when it is asked for: pytest registers it first

    return getattr(plugin, name)
