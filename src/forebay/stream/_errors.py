"""What can go wrong with a stream beyond what its store and coordinator say themselves."""

from __future__ import annotations

from forebay.errors import ForebayError, NotDone, NotFound, Unavailable

__all__ = [
    "Deposed",
    "Diverged",
    "FragmentMissing",
    "OffsetOutOfRange",
    "Overtaken",
    "RecordMissing",
    "RootMissing",
    "SegmentChanged",
    "StreamDeleted",
    "StreamMissing",
]


class StreamMissing(NotFound):
    """No such stream is in the remote tier."""

    def __init__(self, stream: str, *, hint: str = "") -> None:
        super().__init__(stream, hint=hint or "forebay stream ls shows which streams there are")
        self.message = f"stream {stream!r} is not in the remote tier"
        self.args = (self.message,)
        self.stream = stream


class RecordMissing(StreamMissing):
    """Objects of the stream are in the remote tier, and the record that names its root is not."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            stream, hint="tier its log again, which writes the record anew, or restore it from its fragments"
        )
        self.message = f"stream {stream!r} has fragments in the remote tier and no record"
        self.args = (self.message,)


class StreamDeleted(NotDone):
    """The stream was deleted. Its id is never used again."""

    def __init__(self, stream: str) -> None:
        super().__init__(f"stream {stream!r} was deleted", hint="a stream made anew has another id")
        self.stream = stream


class Deposed(NotDone):
    """A writer of a higher epoch has taken the stream over."""

    def __init__(self, stream: str, *, own_epoch: int, epoch: int) -> None:
        super().__init__(
            f"stream {stream!r} is written by epoch {epoch}, this writer has {own_epoch}",
            hint="stand down; the newer writer goes on with the same data",
        )
        self.stream = stream
        self.own_epoch = own_epoch
        self.epoch = epoch


class Diverged(NotDone):
    """Remote tier and local log hold different data at the same offset. Nothing is joined or removed."""

    def __init__(self, stream: str, *, offset: int, reason: str) -> None:
        super().__init__(
            f"stream {stream!r} at offset {offset}: {reason}",
            hint="compare with the other replicas; the remote tier keeps what it has and takes nothing new",
        )
        self.stream = stream
        self.offset = offset
        self.reason = reason


class SegmentChanged(NotDone):
    """A segment is not what it was when a fragment was cut from it: its broker removed it, or its end."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"{segment}: {reason}", hint="look at the log again and cut anew")
        self.segment = segment


class RootMissing(Unavailable):
    """The manifest root that the record names cannot be read: an error, never an empty stream."""

    def __init__(self, stream: str, key: str, reason: str) -> None:
        super().__init__(
            f"stream {stream!r}: root {key!r}: {reason}",
            hint="try again; if it stays, forebay stream verify tells what is left and restore rebuilds it",
        )
        self.stream = stream
        self.key = key


class FragmentMissing(Unavailable):
    """A fragment that the current root names cannot be found: an error, never the end of a stream."""

    def __init__(self, stream: str, *, offset: int) -> None:
        super().__init__(
            f"stream {stream!r}: the fragment with offset {offset} is named and not there",
            hint="try again; if it stays, forebay stream verify tells what is left",
        )
        self.stream = stream
        self.offset = offset


class OffsetOutOfRange(ForebayError):
    """An absolute offset that the stream does not hold: below `first_offset`, or not written yet."""

    def __init__(self, stream: str, *, offset: int, first_offset: int, next_offset: int) -> None:
        super().__init__(
            f"stream {stream!r} holds offsets {first_offset} to {next_offset}, not {offset}",
            hint="offset:N attaches to what is there instead",
        )
        self.stream = stream
        self.offset = offset
        self.first_offset = first_offset
        self.next_offset = next_offset
        """Behind the last one."""


class Overtaken(ForebayError):
    """Records the reader had not read yet are gone: retention was faster, or they never reached the bucket.

    The reader stands at `resume_offset` now; reading on from there is its owner's decision.
    """

    def __init__(self, stream: str, *, offset: int, resume_offset: int) -> None:
        super().__init__(
            f"stream {stream!r}: offsets {offset} to {resume_offset} are gone",
            hint=f"read on to skip them, from offset {resume_offset}",
        )
        self.stream = stream
        self.offset = offset
        """First offset that is missing."""
        self.resume_offset = resume_offset
        """First offset that is there again."""
