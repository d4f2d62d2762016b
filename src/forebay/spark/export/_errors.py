"""What can go wrong with an export, beside what its source and its table say themselves.

ForebayError
├── NotDone
│   ├── CommitConflict     another commit was first: read the table again
│   ├── RecordsTrimmed     records are gone that the table does not have
│   └── BadRecords         records that cannot be decoded, and no place for them
└── OutcomeUnknown
    └── CommitUnknown      the table may or may not have taken it
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import NotDone, OutcomeUnknown

__all__ = ["BadRecords", "CommitConflict", "CommitUnknown", "RecordsTrimmed"]


class CommitConflict(NotDone):
    """Another commit was first; nothing of ours is in the table."""

    def __init__(self, table: str, reason: str = "") -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"{table}: another commit was first{because}", hint="run the export again")
        self.table = table


class CommitUnknown(OutcomeUnknown):
    """The reply to a commit was lost. The table's own positions tell whether it is in."""


class RecordsTrimmed(NotDone):
    """The source no longer has records that the table does not have."""

    final = True
    """A second attempt of the task would meet it again."""

    def __init__(self, lane: str, *, position: int, earliest: int) -> None:
        super().__init__(
            f"{lane}: the table has everything below {position:,}, but the source goes on at {earliest:,}",
            hint="go on behind the gap with --on-data-loss skip, and keep records longer than exports take",
        )
        self.lane = lane
        self.position = position
        self.earliest = earliest


class BadRecords(NotDone):
    """Records that cannot be decoded, where nothing says what should become of them."""

    def __init__(self, count: int, examples: Sequence[str]) -> None:
        super().__init__(
            f"{count:,} records cannot be decoded: {'; '.join(examples)}",
            hint="give --dead-letter topic:NAME or delta:PATH for them, or check --format",
        )
        self.count = count
        self.examples = tuple(examples)
