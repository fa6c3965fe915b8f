"""What is read off the last hidden states: a head for each kind of answer."""

from typing import Literal, get_args

from glassformer.spec.base import at_least, one_of, spec

Readout = Literal["last", "first", "mean"]


@spec
class NextHead:
    """Logits of the next token at each position; tied shares the embedding's weights."""

    tied: bool = True
    bias: bool = False


@spec
class ClassHead:
    """Logits of a class at each position."""

    num_classes: int
    bias: bool = True

    def __post_init__(self) -> None:
        at_least("num_classes", self.num_classes)


@spec
class StateHead:
    """Logits of a machine's state at each position."""

    num_states: int
    bias: bool = True

    def __post_init__(self) -> None:
        at_least("num_states", self.num_states)


@spec
class AnswerHead:
    """Logits of one answer for a whole sequence: at its last or first token, or their mean."""

    readout: Readout = "last"
    bias: bool = True

    def __post_init__(self) -> None:
        one_of("readout", self.readout, get_args(Readout))


Head = NextHead | ClassHead | StateHead | AnswerHead

HEAD_NAMES: dict[type, str] = {
    NextHead: "next",
    ClassHead: "class",
    StateHead: "state",
    AnswerHead: "answer",
}
