"""What can go wrong between a checkpoint and the data it speaks of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from forebay.errors import ForebayError, UsageError

__all__ = ["DataLossFound", "own_position", "with_hints"]


@contextlib.contextmanager
def with_hints() -> Iterator[None]:
    """Spark shows of an error what a traceback shows: so the hint goes along as a note, once."""
    try:
        yield
    except ForebayError as error:
        note = f"hint: {error.hint}"
        if error.hint and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


@contextlib.contextmanager
def own_position(engine: str) -> Iterator[None]:
    """Raise `UsageError` for a position in a checkpoint that another engine wrote."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"the position in the checkpoint is not one of the engine {engine!r}",
            hint="it was begun with other options; give those, or begin with a new checkpoint",
        ) from error


class DataLossFound(ForebayError):
    """Records that a query was about to read are not there any more: trimmed, or their topic was deleted."""

    def __init__(self, subject: str, *, start: int, earliest: int | None, reason: str = "") -> None:
        gone = "its topic is gone" if earliest is None else f"the earliest offset is {earliest}"
        super().__init__(
            f"{subject}: offset {start} cannot be read any more, {reason or gone}",
            hint="failOnDataLoss=false skips forward and reports it; or begin with a new checkpoint",
        )
        self.subject = subject
        self.start = start
        self.earliest = earliest
        """Where reading could go on; None where there is nothing."""
