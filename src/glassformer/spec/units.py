"""Numbers as people write them (`10M`, `0.5%`), bytes, FLOPs, seconds, and text made visible."""

import re
import shlex
from decimal import Decimal, InvalidOperation
from pathlib import PurePath

from glassformer.spec.errors import InputError

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
#: The longest number worth reading: `1e400` as an exact integer would fill the memory.
LARGEST = 10**15


def parse_count(name: str, value: int | float | str) -> int:
    """Parse a whole number from `10M`, `350k`, `1.5G`, `16_000`, `1e7`, or from a number."""
    hint = "write it like 350k, 10M, 1.5G or 16000"
    text = str(value).strip().lower()
    factor = SUFFIXES.get(text[-1:], 1)
    number = _decimal(name, text[:-1] if factor > 1 else text, shown=value, hint=hint) * factor
    if abs(number) > LARGEST:
        raise InputError(f"{name} {value} is too large", hint=f"{LARGEST:.0e} is the most")
    if number != int(number):
        raise InputError(
            f"{name} {value} is not a whole number", hint=f"the nearest is {round(number)}"
        )
    return int(number)


def parse_share(name: str, value: float | str) -> float:
    """Parse a fraction from `0.35`, `35%`, or from a number."""
    hint = "write it like 0.35 or 35%"
    text = str(value).strip()
    percent = text.endswith("%")
    number = _decimal(name, text.removesuffix("%"), shown=value, hint=hint)
    if abs(number) > LARGEST:
        raise InputError(f"{name} {value} is too large", hint=hint)
    return float(number / 100 if percent else number)


def plain_digits(text: str) -> int | None:
    """Parse `0`, `7` or `000120`; None for everything else, also for digits such as `²` and `٣`."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _decimal(name: str, text: str, *, shown: object, hint: str) -> Decimal:
    try:
        number = Decimal(text.replace("_", "").strip())
    except InvalidOperation:
        raise InputError(f"{name} '{shown}' is not a number", hint=hint) from None
    if not number.is_finite():
        raise InputError(f"{name} '{shown}' is not a finite number", hint=hint)
    return number


def format_bytes(count: float) -> str:
    """Format a size as `38.2 MB`: powers of ten, three digits."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_flops(count: float) -> str:
    """Format a count as `21.4 MFLOP`."""
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def format_seconds(seconds: float) -> str:
    """Format a duration as `1.2 s`, `38 ms` or `640 us`."""
    if seconds >= 1:
        return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def _scaled(count: float, units: tuple[str, ...]) -> str:
    size = float(count)
    for unit in units[:-1]:
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} {units[-1]}"


def pasted(path: str | PurePath) -> str:
    """Return a path as a shell takes it: quoted where it must be, and never read as an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


#: What a terminal would act on: control characters but for line ends and tabs.
CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f]"


def visible(text: str) -> str:
    """Escape control characters except line ends and tabs: a terminal would obey them."""
    return re.sub(CONTROL, lambda found: f"\\x{ord(found[0]):02x}", text)
