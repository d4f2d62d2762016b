"""What is wrong with a dataflow file, each with its place.

A file is read to its end and everything that is wrong with it is said at once: whoever mends five mistakes
should not start the process five times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.errors import FormatError

__all__ = ["DataflowInvalid", "Problem", "Problems"]

PROBLEMS_MAX = 100
"""Most problems that are kept; a file with more is not the file that was meant."""
SHOWN_CHARS_MAX = 80
"""Longest piece of the file in a message."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong."""

    line: int
    """From 1."""
    column: int
    """From 1."""
    where: str
    """The path of keys to it, as in `nodes.persistence.config.wal`."""
    message: str
    hint: str = ""
    """What to write instead."""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        remedy = f" ({self.hint})" if self.hint else ""
        return f"{self.line}:{self.column}: {where}{self.message}{remedy}"


class DataflowInvalid(FormatError):
    """A dataflow file that cannot run. `problems` has all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: list[Problem] = sorted(problems)
        first = self.problems[0]
        more = f", and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
        super().__init__(f"line {first}{more}", hint="forebay dataflow check FILE lists all problems")


class Problems:
    """A list that stops growing, of problems and of remarks that stop nobody."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self.remarks: list[Problem] = []

    def add(self, place: tuple[int, int], where: str, message: str, hint: str = "") -> None:
        """Something is wrong at `place` (line and column). Said once, however many readers come by."""
        problem = Problem(*place, where, message, hint)
        if len(self.found) < PROBLEMS_MAX and problem not in self.found:
            self.found.append(problem)

    def remark(self, place: tuple[int, int], where: str, message: str, hint: str = "") -> None:
        """Something may not be what was meant."""
        if len(self.remarks) < PROBLEMS_MAX:
            self.remarks.append(Problem(*place, where, message, hint))


def shown(text: str) -> str:
    """A piece of the file for a message: quoted, on one line, not too long."""
    quoted = repr(text)
    return quoted if len(quoted) <= SHOWN_CHARS_MAX else f"{quoted[:SHOWN_CHARS_MAX]}..."
