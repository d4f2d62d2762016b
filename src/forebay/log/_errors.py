"""What can go wrong in a log, beside what the seams raise.

NotDone
├── Fenced                 the partition does not take appends, or not from this epoch
├── OutOfSequence          an idempotent producer skipped or rewound its sequence
└── Contended              other writers won every round; nothing was appended
UsageError
└── AnotherLog             the store belongs to another log than the coordinator
ForebayError
├── OffsetOutOfRange       trimmed away, or not written yet
├── UnknownTopic
└── DataLost               an object or index entry that must be there is not, or is damaged
"""

from __future__ import annotations

from forebay.errors import ForebayError, NotDone, UsageError

__all__ = [
    "AnotherLog",
    "Contended",
    "DataLost",
    "Fenced",
    "OffsetOutOfRange",
    "OutOfSequence",
    "UnknownTopic",
]


class AnotherLog(UsageError):
    """The store has the name of another log than the coordinator. Nothing was changed."""

    def __init__(self, store_url: str, name_object: str) -> None:
        super().__init__(
            f"the objects in {store_url} belong to another log than this coordinator's",
            hint=f"check the coordinator; if it is the right one, delete the object {name_object}",
        )


class Fenced(NotDone):
    """The partition does not take this append: it is fenced, or a newer epoch took over."""

    def __init__(self, partition: str, *, state: str, epoch: int, writer_epoch: int | None = None) -> None:
        mine = "" if writer_epoch is None else f"; this writer has epoch {writer_epoch}"
        super().__init__(
            f"{partition} is {state} at epoch {epoch}{mine}",
            hint="a newer writer took over; stop this one, or take a new epoch if it should write on",
        )
        self.partition = partition
        self.state = state
        self.epoch = epoch
        self.writer_epoch = writer_epoch


class OutOfSequence(NotDone):
    """An idempotent producer skipped or rewound its sequence: nothing was appended."""

    def __init__(self, partition: str, producer_id: str, *, expected: int, got: int) -> None:
        super().__init__(
            f"{partition}: producer {producer_id!r} sent sequence {got}, expected {expected}",
            hint="earlier appends are missing or too old to be recognised; begin under a new producer id",
        )
        self.partition = partition
        self.producer_id = producer_id
        self.expected = expected
        self.got = got


class Contended(NotDone):
    """Other writers won every round. Nothing was appended."""

    def __init__(self, partition: str, attempts: int) -> None:
        super().__init__(
            f"{partition}: {attempts} attempts to commit lost against other writers",
            hint="try again, or send a partition's records through fewer writers",
        )
        self.partition = partition
        self.attempts = attempts


class OffsetOutOfRange(ForebayError):
    """The offset asked for is not in the log: below `earliest` it was trimmed, from `next` on unwritten."""

    def __init__(self, partition: str, offset: int, *, earliest: int, next_offset: int) -> None:
        super().__init__(
            f"{partition}: offset {offset} is not between {earliest} and {next_offset}",
            hint=f"the earliest offset is {earliest}, the next to be written {next_offset}",
        )
        self.partition = partition
        self.offset = offset
        self.earliest = earliest
        self.next = next_offset


class UnknownTopic(ForebayError, LookupError):
    """There is no such topic, or no such partition of it."""

    def __init__(self, topic: str, *, hint: str = "") -> None:
        super().__init__(
            f"there is no topic {topic!r}", hint=hint or f"create it: forebay topics create {topic}"
        )
        self.topic = topic


class UnknownPartition(UnknownTopic):
    """The topic is there, but has no such partition."""

    def __init__(self, topic: str, partition: int, *, hint: str) -> None:
        ForebayError.__init__(self, f"topic {topic!r} has no partition {partition}", hint=hint)
        self.topic = topic
        self.partition = partition


class DataLost(ForebayError):
    """Something a committed offset needs is gone or damaged."""
