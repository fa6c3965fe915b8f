"""The answer to a parameter budget: the best design, alternatives, and the wishes not fully met."""

from dataclasses import field, replace
from typing import Any

from glassformer.budget.question import Budget, Sizes
from glassformer.spec.checks import spec
from glassformer.spec.model import ModelSpec


@spec
class Portability:
    """Whether a model can leave, as the code that exports and quantizes decides.

    exports_as: the Hugging Face architecture that computes it; gguf: the GGUF one. Empty if none
    does; then `why_not_exported` has the reason, and `why_not_int4` the one why int4 does not fit.
    change: options of the budget that make both true, tried; {} if none are needed, or known.
    """

    exports_as: str
    gguf: str
    why_not_exported: str
    why_not_int4: str
    change: dict[str, Any] = field(default_factory=dict)

    @property
    def int4(self) -> bool:
        """True if every layer can be cut to int4."""
        return not self.why_not_int4

    def verdict(self) -> str:
        """Return yes or no to both, on one line: `exports as Llama: yes · int4: yes`."""
        exported = f"exports as {self.exports_as or 'Llama'}: {'yes' if self.exports_as else 'no'}"
        if self.exports_as and not self.gguf:
            exported += " (GGUF: no)"
        return f"{exported} · int4: {'yes' if self.int4 else 'no'}"

    def reasons(self) -> list[str]:
        """Return a line for each no."""
        named = {"export": self.why_not_exported, "int4": self.why_not_int4}
        return [f"{name}: {why}" for name, why in named.items() if why]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "exports_as": self.exports_as or None,
            "gguf": self.gguf or None,
            "int4": self.int4,
        }


@spec
class Design:
    """One design, counted by the manifest.

    `name` says what it is best at, and `options` are those that request it, {} if none do.
    `active_params` are those that one token uses: fewer than `params` with a mixture of experts.
    The drifts are the differences from the wishes (relative for the expansion), None if free.
    `portability` is None until `glassformer.design` has judged it.
    """

    name: str
    sizes: Sizes
    spec: ModelSpec
    target: int
    params: int
    active_params: int
    embedding_ratio: float
    input_ratio: float
    ratio_drift: float | None
    glu_drift: float | None
    tied: bool
    options: dict[str, Any] = field(default_factory=dict)
    portability: Portability | None = None

    @property
    def error(self) -> float:
        """Relative difference from the requested total."""
        return self.params / self.target - 1.0

    @property
    def miss(self) -> str:
        """The error as text: a percentage, or the difference where that would be 0.00 %."""
        if abs(self.error) >= 5e-5:
            return f"{self.error:+.2%}"
        return f"{self.params - self.target:+,}" if self.params != self.target else "exactly"

    @property
    def glu_expansion(self) -> float:
        """d_ff / d_model."""
        return self.sizes.d_ff / self.sizes.d_model

    @property
    def aspect(self) -> float:
        """d_model / n_layers."""
        return self.sizes.d_model / self.sizes.n_layers

    def renamed(self, name: str) -> "Design":
        """Return the same design under another name."""
        return replace(self, name=name)

    def parts(self) -> tuple[str, ...]:
        """Return the summary in its parts: count, d_model, d_ff, layers, heads and the rest."""
        sizes = self.sizes
        return (
            f"{self.params:,} parameters ({self.miss})",
            f"d_model {sizes.d_model}",
            f"d_ff {sizes.d_ff} ({self.glu_expansion:.2f}x)",
            f"{sizes.n_layers} layer{'s' if sizes.n_layers > 1 else ''}",
            f"{sizes.n_heads} heads of {sizes.d_head}",
            *(() if sizes.rank is None else (f"rank {sizes.rank}",)),
            *(() if self.active_params == self.params else (f"{self.active_params:,} active",)),
            f"embeddings {self.embedding_ratio:.2%}",
        )

    def __str__(self) -> str:
        count, *rest = self.parts()
        return f"{count}: {', '.join(rest)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the design as plain data."""
        sizes = self.sizes
        return {
            "target": self.target,
            "params": self.params,
            "active_params": self.active_params,
            "error": self.error,
            "d_model": sizes.d_model,
            "d_head": sizes.d_head,
            "d_ff": sizes.d_ff,
            "n_layers": sizes.n_layers,
            "n_heads": sizes.n_heads,
            "embedding_ratio": self.embedding_ratio,
            "glu_expansion": self.glu_expansion,
            "tied": self.tied,
            **({} if self.portability is None else self.portability.to_dict()),
        }

    def text(self, budget: Budget) -> str:
        """Return the count beside the target, and the two values that were wished for."""
        lines = [
            f"{self.params - self.target:+,} from the target of {self.target:,} "
            f"({self.error:+.2%}; {budget.tolerance * 100:g}% is allowed)"
        ]
        line = f"embedding ratio {self.embedding_ratio:.2%}"
        if not budget.tied and budget.ratio_covers == "both":
            line += f" with the head, {self.input_ratio:.2%} without"
        elif not budget.tied:
            line += " without the head"
        lines.append(f"{line}   GLU expansion {self.glu_expansion:.3f}")
        if budget.kv_heads is not None:
            lines.append(f"{budget.kv_heads} heads for keys and values")
        if budget.experts is not None:
            shared = " and a shared one" if budget.shared_expert else ""
            lines.append(
                f"{budget.experts} experts of d_ff {self.sizes.d_ff}{shared}; a token passes "
                f"through {budget.chosen_experts} and uses {self.active_params:,} parameters"
            )
        return "\n".join(lines)


@spec
class Answer:
    """The best design, alternatives, and a line for each wish that is not fully met.

    `not_proven` has a line for each design for which the search ended before it was proven that
    none is better. A thorough search leaves none.
    """

    budget: Budget
    best: Design
    alternatives: tuple[Design, ...]
    gave_way: tuple[str, ...]
    not_proven: tuple[str, ...] = ()

    @property
    def spec(self) -> ModelSpec:
        """The model spec of the best design."""
        return self.best.spec

    def __repr__(self) -> str:
        lines = [str(self.best)]
        if self.best.portability is not None:
            lines.append(f"  {self.best.portability.verdict()}")
        lines += [f"  gave way: {line}" for line in self.gave_way]
        lines += [f"  {design.name}: {design}" for design in self.alternatives]
        lines += [f"  not proven: {line}" for line in self.not_proven]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, as `glass design --json` prints it."""
        leaving = self.best.portability
        portable = (
            {}
            if leaving is None
            else {"why_not": list(leaving.reasons()), "change": leaving.change}
        )
        return (
            self.best.to_dict()
            | portable
            | {
                "gave_way": list(self.gave_way),
                "not_proven": list(self.not_proven),
                "alternatives": [
                    {"name": design.name, **design.to_dict()} for design in self.alternatives
                ],
            }
        )

    def table(self) -> str:
        """Return the best design and its alternatives, a line each."""
        width = max(26, *(len(design.name) + 2 for design in (self.best, *self.alternatives)))
        header = f"{'':<{width}}{'parameters':>12}{'off':>9}{'d_model':>9}{'d_ff':>7}{'layers':>8}"
        lines = [
            f"{header}{'ratio':>9}{'GLU':>7}{'' if self.best.portability is None else '  int4'}"
        ]
        for design in (self.best, *self.alternatives):
            sizes = design.sizes
            lines.append(
                f"{design.name:<{width}}{design.params:>12,}{design.miss:>9}{sizes.d_model:>9}"
                f"{sizes.d_ff:>7}{sizes.n_layers:>8}{design.embedding_ratio:>9.2%}"
                f"{design.glu_expansion:>7.2f}{self._int4(design):>6}"
            )
        return "\n".join(lines)

    @staticmethod
    def _int4(design: Design) -> str:
        return "" if design.portability is None else "yes" if design.portability.int4 else "no"
