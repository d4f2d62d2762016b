"""What only the claiming queue can say.

CommitFailed     NotDone          the manifest was not written, and will not be
QueueFull        NotDone          the producer manifest is at its bound
CommitUnknown    OutcomeUnknown   nobody can tell whether the manifest was written
ClaimLost        NotDone          the batch is, or may be, in the hands of another collector
ManifestLost     ForebayError     a manifest that was there is gone
BatchMissing     NotFound         a batch that waits has no object
PrefixTaken      UsageError       the prefix belongs to another manifest
"""

from __future__ import annotations

from forebay.errors import Backpressure, ForebayError, NotDone, NotFound, OutcomeUnknown, UsageError

__all__ = [
    "BatchMissing",
    "ClaimLost",
    "CommitFailed",
    "CommitUnknown",
    "ManifestLost",
    "PrefixTaken",
    "QueueFull",
]


class CommitFailed(NotDone):
    """The manifest was not written within the attempts and the time allowed, and no late write can follow."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"{key!r} was not written: {reason}", hint="try again; if it persists, see the store"
        )
        self.key = key
        self.reason = reason


class QueueFull(Backpressure):
    """The producer manifest has reached its bound: collectors do not keep up, or none is running."""

    def __init__(self, key: str, *, limit: int, actual: int) -> None:
        super().__init__(
            f"{key!r} would have {actual:,} bytes, more than {limit:,}",
            hint="let collectors catch up, or raise manifest_bytes_max",
        )
        self.key = key
        self.limit = limit
        self.actual = actual


class CommitUnknown(OutcomeUnknown):
    """The manifest may have been written, or may be still. Entries sent again may then arrive twice."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"the write of {key!r}", reason=reason)
        self.key = key


class ClaimLost(NotDone):
    """The claim lapsed or was taken over: another collector has the batch, or will get it."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(
            f"the claim on {location!r} is lost: {reason}",
            hint="do not use the batch any more; a sink that got it already must deduplicate by location",
        )
        self.location = location
        self.reason = reason


class ManifestLost(ForebayError):
    """A manifest that this process has seen is gone. It is never made anew: that would hide the loss."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"manifest {key!r} has been deleted while it was in use",
            hint="restore it from a copy (the batches it named are there), or start anew on another path",
        )
        self.key = key


class BatchMissing(NotFound):
    """A batch is named by the queue, but its object is gone."""

    def __init__(self, location: str) -> None:
        super().__init__(location, hint="restore the object, or set missing='skip' to go on without it")
        self.location = location


class PrefixTaken(UsageError):
    """The data prefix belongs to another manifest. Two queues on one would delete each other's batches."""

    def __init__(self, prefix: str, owner: str, manifest_path: str) -> None:
        super().__init__(
            f"prefix {prefix!r} belongs to manifest {owner!r}, not to {manifest_path!r}",
            hint="give every queue a data_path_prefix of its own",
        )
        self.prefix = prefix
        self.owner = owner
        self.manifest_path = manifest_path
