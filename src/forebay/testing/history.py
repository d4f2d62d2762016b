"""What actors asked, when, and what they were told: the input of the checkers.

    with world.history.append("orders", [b"a", b"b"], epoch=3) as call:
        call.ok(offset=await log.append(...))

Leaving the block with `NotDone` means failed: it certainly did not happen. Leaving it in any other way
without `ok` means unknown, and so does a crash, which never leaves the block at all.

Each event has a place in one total order besides its time, because much happens at the same virtual moment.
Records of the dead are ignored: what a process did not live to say was not said.

Values must be unique within a stream, or nothing could be told apart; put an actor and a number into them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from types import TracebackType
from typing import Self

from forebay.errors import NotDone

__all__ = ["Call", "Final", "History", "Status"]

NEVER = 1 << 62
"""The place of a return that was never seen."""


class Status(Enum):
    """What the caller knows of a call."""

    UNKNOWN = "unknown"
    OK = "ok"
    FAILED = "failed"


class Call:
    """One call. A context manager that records how it ended; see the module."""

    __slots__ = (
        "_history",
        "actor",
        "called",
        "called_at",
        "epoch",
        "group",
        "kind",
        "offset",
        "returned",
        "returned_at",
        "status",
        "stream",
        "tail",
        "values",
    )

    def __init__(
        self,
        history: History,
        kind: str,
        actor: str,
        stream: str,
        *,
        values: Sequence[Hashable] = (),
        offset: int | None = None,
        epoch: int | None = None,
        group: str = "",
    ) -> None:
        self._history: History | None = history
        self.kind = kind
        """`append`, `read`, `fence` or `ack`."""
        self.actor = actor
        self.stream = stream
        self.values: tuple[Hashable, ...] = tuple(values)
        """What was to be appended, or what was read."""
        self.offset = offset
        """Of the first value; of an ack the offset acknowledged; of a fence the first one behind it."""
        self.tail: int | None = None
        """What a read believed to be the next free offset."""
        self.epoch = epoch
        self.group = group
        self.status = Status.UNKNOWN
        self.called, self.called_at = history.tick()
        """Place in the total order, and virtual seconds."""
        self.returned, self.returned_at = NEVER, float("inf")

    def ok(
        self,
        *,
        offset: int | None = None,
        values: Iterable[Hashable] | None = None,
        tail: int | None = None,
    ) -> None:
        """It was done. For an append the offset of its first value; for a read what it saw."""
        if self._end(Status.OK):
            self.offset = self.offset if offset is None else offset
            self.values = self.values if values is None else tuple(values)
            self.tail = tail

    def failed(self) -> None:
        """It certainly was not done and never will be."""
        self._end(Status.FAILED)

    def unknown(self) -> None:
        """Nobody can tell."""
        self._end(Status.UNKNOWN)

    def _end(self, status: Status) -> bool:
        history = self._history
        if history is None or history.recorder() is None:
            return False
        self._history = None
        self.status = status
        self.returned, self.returned_at = history.tick()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, NotDone):
            self.failed()
        else:
            self.unknown()

    def __repr__(self) -> str:
        what = f" {list(self.values)!r:.80}" if self.values else ""
        where = "" if self.offset is None else f" at {self.offset}"
        epoch = "" if self.epoch is None else f" epoch {self.epoch}"
        return (
            f"<{self.actor} {self.kind} {self.stream}{what}{where}{epoch}: {self.status.value}, "
            f"{self.called_at:.3f} to {self.returned_at:.3f} s>"
        )


class Final:
    """The whole stream as it was read when everything had come to rest."""

    __slots__ = ("offsets", "start", "values")

    def __init__(
        self, values: Iterable[Hashable], start: int = 0, offsets: Iterable[int] | None = None
    ) -> None:
        self.values: tuple[Hashable, ...] = tuple(values)
        self.start = start
        """The first offset that is still there; what lies below was trimmed."""
        self.offsets: tuple[int, ...] = (
            tuple(range(start, start + len(self.values))) if offsets is None else tuple(offsets)
        )
        if len(self.offsets) != len(self.values):
            raise ValueError(f"{len(self.offsets)} offsets for {len(self.values)} values")


class History:
    """Calls in the order they were made, and the final content of each stream."""

    def __init__(
        self, now: Callable[[], float] = lambda: 0.0, recorder: Callable[[], str | None] = lambda: "test"
    ) -> None:
        """`now` gives seconds; `recorder` names who speaks, or None for somebody who is not to be heard."""
        self._now = now
        self.recorder = recorder
        self._ticks = 0
        self.calls: list[Call] = []
        self.finals: dict[str, Final] = {}
        """By stream."""

    def tick(self) -> tuple[int, float]:
        """The next place in the total order, and the time."""
        self._ticks += 1
        return self._ticks, self._now()

    def append(
        self, stream: str, values: Sequence[Hashable], *, epoch: int | None = None, actor: str = ""
    ) -> Call:
        """Somebody is about to append (or send) these values, as one atomic batch."""
        return self._record(Call(self, "append", self._actor(actor), stream, values=values, epoch=epoch))

    def read(self, stream: str, *, actor: str = "") -> Call:
        """Somebody is about to read: `ok(offset=, values=)`, and `tail=` if it claims to know the end."""
        return self._record(Call(self, "read", self._actor(actor), stream))

    def fence(self, stream: str, epoch: int, *, actor: str = "") -> Call:
        """Somebody is about to shut out all epochs below `epoch`."""
        return self._record(Call(self, "fence", self._actor(actor), stream, epoch=epoch))

    def ack(
        self, stream: str, offset: int, *, epoch: int | None = None, group: str = "", actor: str = ""
    ) -> Call:
        """A consumer is about to acknowledge everything up to `offset`."""
        name = self._actor(actor)
        return self._record(Call(self, "ack", name, stream, offset=offset, epoch=epoch, group=group))

    def final(
        self,
        stream: str,
        values: Iterable[Hashable],
        *,
        start: int = 0,
        offsets: Iterable[int] | None = None,
    ) -> None:
        """What the stream holds at the end: read once, when nothing can arrive any more."""
        self.finals[stream] = Final(values, start, offsets)

    def _actor(self, actor: str) -> str:
        return actor or self.recorder() or ""

    def _record(self, call: Call) -> Call:
        if self.recorder() is not None:
            self.calls.append(call)
        return call

    @property
    def streams(self) -> list[str]:
        """Every stream that was mentioned."""
        return sorted({call.stream for call in self.calls} | set(self.finals))
