"""Printing, in the form the settings ask for.

Lines that stream are written plainly, one by one. Tables and progress bars are rich's, which is imported only
where something is drawn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from forebay.cli._settings import OutputForm, settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "console",
    "document",
    "is_json",
    "line",
    "note",
    "printable",
    "progress",
    "table",
    "time_text",
    "warning",
]


def is_json() -> bool:
    """Whether the output is for a program."""
    return settings().output is OutputForm.JSON


def document(value: Any) -> None:
    """Print one JSON document on one line."""
    line(json.dumps(value))


def line(text: str) -> None:
    """Print one line of text."""
    sys.stdout.write(text + "\n")


def warning(text: str) -> None:
    """Print what the caller should know on stderr, whatever the form of the output."""
    sys.stderr.write(f"warning: {printable(text)}\n")


def note(text: str) -> None:
    """Print what goes on, where it may take a while, on stderr."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def console(stream: IO[str] | None = None) -> Console:
    """A rich console on stdout (or `stream`) that obeys the colour setting."""
    from rich.console import Console

    color = settings().color
    return Console(
        file=stream or sys.stdout,
        force_terminal=True if color else None,
        color_system=None if color is False else "auto",
        highlight=False,
        emoji=False,
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print a table. The columns named in `right` are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*[Text(cell) for cell in row])
    console().print(drawn)


def progress() -> Progress:
    """A progress bar on stderr that goes away when done, and is silent where nobody watches."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console(sys.stderr),
        transient=True,
        disable=is_json() or not sys.stderr.isatty(),
    )


def time_text(time_ms: int) -> str:
    """A moment for people, in UTC: `2026-11-16 09:30:00Z`."""
    import datetime

    try:
        moment = datetime.datetime.fromtimestamp(time_ms / 1000, tz=datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"  # Whoever appends a record may give it any time, also one without a date.
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


def printable(text: str) -> str:
    """`text` with everything that could move the cursor or break the line written out."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
