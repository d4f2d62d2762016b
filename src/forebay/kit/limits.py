"""Named limits, and the sizes and durations that people write in configuration files.

A limit that has a name can be looked up, documented and met in an error message. `Limit.check` is the one way
over it: `LimitExceeded` with name, limit, actual value and remedy.

Sizes and durations are read strictly, because a guess about a unit is off by a factor of a thousand. `MB` is
10**6 and `MiB` 2**20. A size without a unit is in bytes; a duration without one is refused. `10m` is ten
minutes and never ten megabytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from forebay.errors import LimitExceeded, UsageError

__all__ = ["Limit", "format_bytes", "parse_bytes", "parse_duration_ms"]

_BYTE_UNITS: Final = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
_DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES_HINT: Final = "write a number and B, KB, MB, GB, TB, PB or KiB, MiB, GiB, TiB, PiB, as in 32MB"
_DURATION_HINT: Final = "write a number and ms, s, m, h or d, as in 25ms"
_QUANTITY: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([A-Za-z]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper bound with a name."""

    name: str
    """As it stands in the documentation, like `RECORD_BYTES_MAX`."""
    value: int
    """The highest value allowed. At least 0."""
    hint: str = ""
    """What to do where it is passed, in one sentence."""

    def __post_init__(self) -> None:
        if self.value < 0:
            raise UsageError(f"limit {self.name} is {self.value}", hint="a limit is at least 0")

    def check(self, actual: int) -> int:
        """Return `actual`, or raise `LimitExceeded` where it is above the limit."""
        if actual > self.value:
            raise LimitExceeded(self.name, limit=self.value, actual=actual, hint=self.hint)
        return actual


BYTES_LIMIT: Final = Limit("BYTES_LIMIT", 2**63 - 1, "sizes are signed 64-bit numbers everywhere")
"""Largest size `parse_bytes` returns."""
DURATION_MS_LIMIT: Final = Limit("DURATION_MS_LIMIT", 2**48 - 1, "times are 48-bit milliseconds everywhere")
"""Longest duration `parse_duration_ms` returns, some nine thousand years."""


def parse_bytes(value: str | int) -> int:
    """Bytes from `32MB`, `64MiB`, `1.5GiB`, or a plain number of bytes. Raises `UsageError`."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise UsageError(f"{value} is not a size: it is negative", hint=_BYTES_HINT)
        return BYTES_LIMIT.check(value)
    return BYTES_LIMIT.check(_parse(value, _BYTE_UNITS, "size", "bytes", _BYTES_HINT))


def parse_duration_ms(value: str) -> int:
    """Milliseconds from `25ms`, `1.5s`, `10m`, `72h` or `7d`. Raises `UsageError`."""
    return DURATION_MS_LIMIT.check(
        _parse(value, _DURATION_UNITS_MS, "duration", "milliseconds", _DURATION_HINT)
    )


def _parse(value: object, units: dict[str, int], noun: str, smallest: str, hint: str) -> int:
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise UsageError(f"{_shown(value)} is not a {noun}", hint=hint)
    number, unit = match.groups()
    if unit not in units:
        problem = f"the unit {unit!r} is unknown" if unit else "it has no unit"
        raise UsageError(f"{_shown(value)} is not a {noun}: {problem}", hint=hint)
    # Exact arithmetic: floats lose the last bytes of large sizes.
    total, rest = divmod(Fraction(number) * units[unit], 1)
    if rest:
        raise UsageError(
            f"{_shown(value)} is not a {noun}: it is not a whole number of {smallest}", hint=hint
        )
    return total


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def format_bytes(size: int) -> str:
    """A size for people: three or four digits and a binary unit, as in `1.50 MiB`. Rounded."""
    if size < 0:
        raise UsageError(f"{size} is not a size: it is negative", hint="sizes are at least 0")
    if size < 1024:
        return f"{size} B"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        amount /= 1024
        # Rounding must not give "1024 KiB" where it is "1.00 MiB".
        if amount < 1023.5 or unit == "PiB":
            break
    digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{digits}f} {unit}"
