"""What can go wrong with a queue, beyond what stores and formats say themselves.

ForebayError
├── UsageError
│   ├── AckOutOfOrder          acknowledgements are in order and only of what was handed out
│   ├── NotInitialized         a consumer is used before `initialize`
│   └── ResumeRefused          the position to resume from does not fit this queue
├── NotDone
│   ├── CommitFailed           the batch is certainly not in the queue
│   ├── UploadFailed           the same, and it was not even uploaded
│   ├── QueueFull              the manifest has reached its bound: the consumer is behind
│   └── Fenced                 a newer consumer has taken over; this one is finished
├── OutcomeUnknown
│   ├── CommitUnknown          nobody can tell whether the batch is, or was, in the queue
│   └── ManifestLost           the manifest is gone or went back in time
└── BatchMissing               the queue names an object that is not there
"""

from __future__ import annotations

from forebay.errors import Backpressure, ForebayError, NotDone, OutcomeUnknown, UsageError

__all__ = [
    "AckOutOfOrder",
    "BatchMissing",
    "CommitFailed",
    "CommitUnknown",
    "Fenced",
    "ManifestLost",
    "NotInitialized",
    "QueueFull",
    "ResumeRefused",
    "UploadFailed",
]


class AckOutOfOrder(UsageError):
    """Acknowledgements come in order, and only for batches that were handed out."""

    def __init__(self, *, expected: int | None, got: int) -> None:
        wanted = "none, nothing was handed out" if expected is None else str(expected)
        super().__init__(
            f"acknowledged sequence {got}, expected {wanted}",
            hint="acknowledge batches in the order they were handed out; nothing was changed",
        )
        self.expected = expected
        """The one sequence that may be acknowledged now; None where there is none."""
        self.got = got


class NotInitialized(UsageError):
    """A consumer that has not taken over the queue yet."""

    def __init__(self) -> None:
        super().__init__("the consumer is not initialized", hint="await consumer.initialize(...) first")


class ResumeRefused(UsageError):
    """The position to resume from does not fit the queue. The queue was not changed."""

    def __init__(self, reason: str, *, last_acked: int, first: int, following: int, hint: str) -> None:
        super().__init__(f"cannot resume after sequence {last_acked}: {reason}", hint=hint)
        self.last_acked = last_acked
        self.first_sequence = first
        """The first sequence that is still there, or the next one where none is."""
        self.next_sequence = following


class CommitFailed(NotDone):
    """The batch was uploaded but is certainly not in the queue. Producing it again is safe."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(f"{location!r} was not enqueued: {reason}", hint="produce it again")
        self.location = location
        self.reason = reason


class UploadFailed(NotDone):
    """The batch could not be uploaded, so it is certainly not in the queue."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(f"{location!r} was not uploaded: {reason}", hint="produce it again")
        self.location = location
        self.reason = reason


class QueueFull(Backpressure):
    """The manifest has reached its bound; nothing was enqueued."""

    def __init__(self, path: str, *, limit: int, actual: int) -> None:
        super().__init__(
            f"the manifest {path!r} would have {actual:,} bytes, its bound is {limit:,}",
            hint="see why the consumer is behind, or raise manifest_append_bytes_max",
        )
        self.limit = limit
        self.actual = actual


class Fenced(NotDone):
    """A newer consumer has taken over. This one can do nothing any more, and nothing it tried was done."""

    def __init__(self, *, own_epoch: int, epoch: int) -> None:
        super().__init__(
            f"fenced: this consumer holds epoch {own_epoch}, the queue is at {epoch}",
            hint="stop this consumer; another one has taken over",
        )
        self.own_epoch = own_epoch
        self.epoch = epoch


class CommitUnknown(OutcomeUnknown):
    """Nobody can tell whether the batch is, or was, in the queue."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(
            f"enqueueing {location!r}",
            reason=reason,
            hint="the consumer may have seen it; produce it again only if duplicates are acceptable",
        )
        self.location = location


class ManifestLost(OutcomeUnknown):
    """The manifest is gone, or an older one lies in its place. It is never made anew under a live queue."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"reading the manifest {path!r}",
            reason=reason,
            hint="restore the manifest, or use a new path for a new queue",
        )
        self.path = path


class BatchMissing(ForebayError):
    """The queue names an object that is not there."""

    def __init__(self, sequence: int, location: str) -> None:
        super().__init__(
            f"batch {sequence} is missing: {location!r} does not exist",
            hint="restore the object, or set missing_batch='skip' to go on without it",
        )
        self.sequence = sequence
        self.location = location
