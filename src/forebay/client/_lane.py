"""One partition as a producer sees it: what waits, what is under way, what must be sent again.

    waiting --cut--> batch (sequence n) --request--> in flight --answer--> told
                          ^                             |
                          +------ again <-- not done, or answer lost

Sequences are the memory that makes a repetition harmless: the partition knows a producer's last few batches
by their numbers and takes the numbers only one after the other. What follows from that:

* A batch is numbered when it is cut and keeps its number, its records and its id through every attempt.
* Batches go out in the order of their numbers. Several may be under way; where one overtakes another on the
  way the partition refuses it, which is certain and cheap, and it is sent again.
* Nothing is sent so far ahead of a batch that is not told yet that the partition could forget its number.
* A batch that is given up leaves a hole that nothing can pass. The lane is then `broken`: it sends nothing
  until all that is under way has been answered, and goes on under a new id from number 0. Batches that were
  certainly not appended are numbered again; one whose answer was lost can not be, since under another number
  the partition would not recognise it. It keeps its old number and is told as unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from forebay.client._receipts import Delivered
from forebay.errors import ForebayError
from forebay.formats import bytes_batch
from forebay.formats.bytes_batch import BytesBatch, Frame
from forebay.formats.bytes_batch_join import merge
from forebay.formats.bytes_batch_piece import piece_of

__all__ = ["Batch", "Lane", "Part"]

GATHERED_BYTES_MIN: Final = 4 * 1024
"""Bytes that the sends of a batch have on average, where it is sent from where they lie. Smaller ones are put
together first: a copy of a few bytes costs less than a buffer of its own."""


@dataclass(slots=True, eq=False)
class Part:
    """Records of one send for one partition."""

    batch: BytesBatch
    size_bytes: int
    tell: Callable[[Delivered], None]
    deadline: float = 0.0
    """On the monotonic clock: no new attempt begins after it."""


@dataclass(slots=True, eq=False)
class Batch:
    """Parts that share a number and a fate."""

    lane: Lane
    parts: list[Part]
    size_bytes: int
    producer_id: str
    sequence: int
    place: int
    """Among all batches of the lane, whatever their ids: the order they are sent in."""
    count: int = 0
    frame: Frame | None = None
    attempts: int = 0
    lost: str = ""
    """Why the answer to an earlier attempt is missing; empty: every attempt certainly did nothing."""
    out_of_sequence_since: float | None = None
    """When the broker first refused its number after an answer was lost, on the monotonic clock."""

    @property
    def deadline(self) -> float:
        """That of its oldest part."""
        return self.parts[0].deadline

    def encoded(self, time_ms: int) -> Frame:
        """The records as one frame, made at the first attempt: a repetition sends the same bytes.

        Of large parts it is made without a copy: the kernel is the first to make one.
        """
        if self.frame is None:
            batches = [part.batch for part in self.parts]
            if self.size_bytes >= GATHERED_BYTES_MIN * len(batches):
                self.frame = merge([piece_of(batch) for batch in batches], time_ms=time_ms)
            else:
                joined = bytes_batch.merge(batches, time_ms=time_ms)
                self.frame = bytes_batch.sealed_frame(bytes_batch.encode_batch(joined))
        return self.frame

    def succeed(self, start_offset: int) -> None:
        """Tell every sender where its records are."""
        lane = self.lane
        for part in self.parts:
            end = start_offset + len(part.batch) - 1
            part.tell(Delivered(lane.topic, lane.partition, start_offset, end, len(part.batch)))
            start_offset = end + 1

    def fail(self, error: ForebayError) -> None:
        """Tell every sender what went wrong."""
        lane = self.lane
        for part in self.parts:
            part.tell(Delivered(lane.topic, lane.partition, None, None, len(part.batch), error))


@dataclass(slots=True, eq=False)
class Lane:
    """One partition."""

    topic: str
    partition: int
    new_id: Callable[[], str]
    producer_id: str = ""
    next_sequence: int = 0
    next_place: int = 0
    waiting: deque[Part] = field(default_factory=deque)
    waiting_bytes: int = 0
    due: bool = False
    """What waits has waited long enough."""
    again: list[Batch] = field(default_factory=list)
    """To be sent again, by number."""
    in_flight: set[Batch] = field(default_factory=set)
    leaving: bool = False
    """A batch of it is not out of our hands yet; the next one must not overtake it."""
    paused: bool = False
    """It waits before the next attempt."""
    broken: bool = False

    def __post_init__(self) -> None:
        self.producer_id = self.new_id()

    def add(self, part: Part) -> None:
        """One more part at the end."""
        self.waiting.append(part)
        self.waiting_bytes += part.size_bytes

    def take(self, batch_bytes: int, in_flight_max: int) -> Batch | None:
        """The batch to be sent next, now in flight; None where there is none or it has to wait."""
        if self.leaving or self.paused:
            return None
        if self.broken:
            if self.in_flight:
                return None
            self._renew()
        if self.again:
            # One at a time: whatever made the first attempt fail may be there still.
            return (
                None if any(batch.attempts > 1 for batch in self.in_flight) else self._sent(self.again.pop(0))
            )
        if self._ahead() >= in_flight_max or not (self.due or self.waiting_bytes >= batch_bytes):
            return None
        return self._sent(self._cut(batch_bytes)) if self.waiting else None

    def _ahead(self) -> int:
        """How many numbers the next batch is ahead of the oldest that is not told.

        Not the count of those under way: while one waits for its answer others may come and go, and the
        partition forgets its number once too many have followed it.
        """
        numbers = [batch.sequence for batch in self.in_flight if batch.producer_id == self.producer_id]
        return self.next_sequence - min(numbers, default=self.next_sequence)

    def _sent(self, batch: Batch) -> Batch:
        self.in_flight.add(batch)
        return batch

    def _cut(self, batch_bytes: int) -> Batch:
        parts: list[Part] = []
        size = 0
        while self.waiting and (not parts or size + self.waiting[0].size_bytes <= batch_bytes):
            part = self.waiting.popleft()
            parts.append(part)
            size += part.size_bytes
        self.waiting_bytes -= size
        if not self.waiting:
            self.due = False
        batch = Batch(self, parts, size, self.producer_id, self.next_sequence, self.next_place)
        batch.count = sum([len(part.batch) for part in parts])
        self.next_sequence += 1
        self.next_place += 1
        return batch

    def put_back(self, batch: Batch) -> None:
        """It is to be sent again, in the order of the numbers."""
        self.in_flight.discard(batch)
        self.again.append(batch)
        self.again.sort(key=lambda each: each.place)

    def is_first(self, batch: Batch) -> bool:
        """Whether no batch with a lower number of the same id is still to be told."""
        others = [*self.in_flight, *self.again]
        return all(
            each.sequence > batch.sequence
            for each in others
            if each is not batch and each.producer_id == batch.producer_id
        )

    def give_up(self, batch: Batch) -> None:
        """It will not be sent again: its number stays a hole."""
        self.in_flight.discard(batch)
        self.broken = self.broken or batch.producer_id == self.producer_id

    def expired(self, now: float) -> list[Part]:
        """Take out what has waited beyond its deadline without ever being sent."""
        parts = []
        while self.waiting and self.waiting[0].deadline <= now:
            part = self.waiting.popleft()
            self.waiting_bytes -= part.size_bytes
            parts.append(part)
        return parts

    def _renew(self) -> None:
        self.broken = False
        self.producer_id, self.next_sequence = self.new_id(), 0
        for batch in self.again:
            if not batch.lost:
                batch.producer_id, batch.sequence = self.producer_id, self.next_sequence
                self.next_sequence += 1
