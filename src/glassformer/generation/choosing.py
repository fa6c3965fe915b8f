"""`Chooser`: how the decoding loop gets tokens from a step's logits; random numbers of rows.

`samplers.SamplingChooser` has every rule. `LikeliestChooser` is greedy decoding by the C routine
that runs of the native step use: with and without torch, the first token's numbers are those of
the others. Imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.kernels import c_library
from glassformer.spec.decoding import DecodeSpec

# B rows, V vocab

NOTHING = -1  # no token
_MASK = (1 << 64) - 1

#: The likeliest tokens of one row with their log-probabilities, best first.
Likeliest = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens of one step: for the next step at once, and for the caller when they are there.

    `fetch` waits and returns tokens (NOTHING where none can be chosen), log-probabilities (NaN if
    not requested) and the likeliest of each row; `is_remote`: on a device that works meanwhile.
    """

    tokens_B: Any
    is_remote: bool
    fetch: Callable[[], tuple[list[int], list[float], list[Likeliest]]]


class Chooser(ABC):
    """Choose tokens, for one decoding; arrays are of the kind that its stepper takes and gives."""

    @abstractmethod
    def choose(
        self,
        logits_BV: Any,
        *,
        step: int,
        rows: Sequence[int],
        allow_BV: NDArray[np.bool_] | None,
    ) -> Chosen:
        """Choose the tokens at new position `step`, from 0, of the rows with these names.

        `allow_BV` are the tokens that a constraint allows.
        """

    @abstractmethod
    def note(self, tokens: Sequence[int]) -> None:
        """Take note of the tokens that were chosen, a row for each line."""

    @abstractmethod
    def keep(self, lines: Any) -> None:
        """Go on with these lines only."""

    @abstractmethod
    def lines(self, logits_BV: Any, lines: Any) -> Any:
        """Return the logits of these lines."""

    @abstractmethod
    def array(self, numbers: NDArray[Any]) -> Any:
        """Return numbers as the stepper takes them."""


class LikeliestChooser(Chooser):
    """Greedy decoding on a CPU: the first of the likeliest tokens that are not closed."""

    def __init__(
        self, spec: DecodeSpec, *, logprobs: bool, array: Callable[[NDArray[Any]], Any]
    ) -> None:
        assert self.covers(spec)
        self.spec, self.logprobs, self._array = spec, logprobs, array

    @staticmethod
    def covers(spec: DecodeSpec) -> bool:
        """Return True if each token is the likeliest of those that are allowed at its position."""
        return spec.greedy and spec.repetition_penalty == 1.0 and not spec.forced

    def choose(
        self,
        logits_BV: Any,
        *,
        step: int,
        rows: Sequence[int],
        allow_BV: NDArray[np.bool_] | None,
    ) -> Chosen:
        numbers_BV = np.asarray(logits_BV, dtype=np.float32).copy()  # closed in here
        closed = {*self.spec.forbidden}
        if step + 1 < self.spec.min_new_tokens:
            closed.update(self.spec.eos)
        tokens = np.empty(len(rows), dtype=np.int64)
        values = np.full(len(rows), np.nan, dtype=np.float32)
        for line in range(len(rows)):
            never = np.array(sorted(closed), dtype=np.int64)
            if allow_BV is not None:
                never = np.union1d(never, np.flatnonzero(~allow_BV[line]))
            tokens[line] = c_library.library().glass_likeliest(
                numbers_BV[line].ctypes.data,
                numbers_BV.shape[1],
                never.ctypes.data,
                len(never),
                values[line:].ctypes.data if self.logprobs else None,
            )
        made: tuple[list[int], list[float], list[Likeliest]] = (
            tokens.tolist(),
            values.tolist(),
            [],
        )
        return Chosen(self.array(np.maximum(tokens, 0)), False, lambda: made)

    def note(self, tokens: Sequence[int]) -> None:
        pass

    def keep(self, lines: Any) -> None:
        pass

    def lines(self, logits_BV: Any, lines: Any) -> Any:
        return logits_BV[lines]

    def array(self, numbers: NDArray[Any]) -> Any:
        return self._array(numbers)


# --- random numbers -------------------------------------------------------------------------------


def is_plain(spec: DecodeSpec) -> bool:
    """Return True if the rules look at the logits alone, not at what came before."""
    return spec.repetition_penalty == 1.0 and not spec.forced and spec.min_new_tokens <= 1


def uniform(seed: int, row: int, step: int) -> float:
    """Return a random number in [0, 1) from these three alone (SplitMix64 over each in turn).

    No state is carried, so a row samples the same tokens in any batch, and after any resumption.
    """
    mixed = 0
    for part in (seed, row, step):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return float((mixed >> 11) * 2.0**-53)


def uniforms(seeds: Sequence[int], rows: Sequence[int], steps: Sequence[int]) -> list[float]:
    """Return `uniform` of many rows at once."""
    mixed = np.zeros(len(seeds), np.uint64)
    for parts in (seeds, rows, steps):
        given = np.array([part & _MASK for part in parts], np.uint64)
        mixed = mixed + given + np.uint64(0x9E3779B97F4A7C15)  # modulo 2**64, as above
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    found: list[float] = ((mixed >> np.uint64(11)) * 2.0**-53).tolist()
    return found
