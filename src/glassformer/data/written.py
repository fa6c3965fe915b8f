"""A number or a date as people write it: in figures, or in the words of a language.

The words are num2words' and Babel's, whose languages do not depend on the machine's own. Figures
are plain digits and the ISO 8601 date.
"""

import datetime
import functools
from importlib.metadata import version
from typing import Literal

from glassformer.spec.errors import MachineError

Kind = Literal["number", "date"]

#: The form that is no language.
FIGURES = "digits"
NEEDED = ("num2words", "babel")


@functools.lru_cache(maxsize=1 << 18)
def written(kind: Kind, value: int, form: str) -> str:
    """A number, or a date by its ordinal (day 1 is the first of January of year 1)."""
    if kind == "date":
        date = datetime.date.fromordinal(value)
        return date.isoformat() if form == FIGURES else _date(date, form)
    return str(value) if form == FIGURES else _number(value, form)


def writers() -> dict[str, str]:
    """The libraries that write, with their versions: other ones may word things differently."""
    try:
        import babel  # noqa: F401
        import num2words  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise MachineError(
            f"the translation task needs {error.name}, which is not installed",
            hint="pip install 'glassformer[translate]'",
        ) from error
    return {name: version(name) for name in NEEDED}


def _number(value: int, language: str) -> str:
    from num2words import num2words

    text: str = num2words(value, lang=language)
    return text


def _date(date: datetime.date, language: str) -> str:
    from babel.dates import format_date

    # The long form; a full one names the weekday, which is arithmetic and no translation.
    text: str = format_date(date, "long", locale=language)
    return text
