"""The commit broker: one process enqueues for all producers of a machine, so that they contend as one.

    producer --\\                        group of requests
    producer ---> line of requests -> [ one compare-and-set ] -> answers
    producer --/

Producers upload their batches themselves and hand over only what goes into the manifest. The broker keeps
nothing that matters: it may be killed at any point, and producers then commit for themselves.

Invariants, which hold wherever it is killed, paused or cut off:

* A request is one unit. Its entries are appended in order by one write, so they are all in the queue or none.
* A request carries a deadline on the machine's monotonic clock, which all its processes share. The broker
  sends no write for it later. A write that was sent before and lands late names the version it was built on,
  so it lands only if nobody has written since.
* A producer without an answer waits for the deadline, and then looks before every attempt of its own: it
  appends only to a version in which it has looked for its locations and not found them. So a late write of
  the broker and an attempt of the producer exclude each other, and the one that lost is recognized.

What cannot be seen is reported: entries that were enqueued and taken out again before the producer could look
are `CommitUnknown`.

The alternative, an election and a session per broker, would need a coordinator; the buffer does without.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec

from forebay.buffer._committer import Answer, Committed, ManifestCommitter, Upload
from forebay.buffer._config import BufferConfig
from forebay.buffer._errors import CommitFailed, CommitUnknown, ManifestLost, QueueFull
from forebay.buffer._manifest_file import ManifestFile
from forebay.buffer._metrics import BufferMetrics
from forebay.errors import NotDone, UsageError
from forebay.formats.buffer_manifest import Manifest, Metadata, NewEntry
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.storage import ObjectStore

__all__ = ["CommitBroker", "CommitReply", "CommitRequest", "ReplyKind", "WireEntry", "as_wire"]

REQUESTS_WAITING_MAX: Final = 10_000
"""Requests in line. One more is refused, and its producer commits for itself."""

_U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_I64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
WireMetadata = tuple[_U32, _I64, bytes]
WireEntry = tuple[str, tuple[WireMetadata, ...], bytes]
"""Location, metadata items and tail of an entry, as they travel."""


class CommitRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a producer hands over: entries to be enqueued together."""

    number: int
    """Of this request on its connection."""
    deadline: float
    """Last moment at which a write may be sent, on the machine's monotonic clock, in seconds."""
    entries: tuple[WireEntry, ...]


class ReplyKind:
    """How a request ended."""

    COMMITTED = "committed"
    NOT_DONE = "not done"
    """Certainly not in the queue, and no write is under way: the producer may go on by itself."""
    UNKNOWN = "unknown"
    """The producer has to look."""
    FULL = "full"
    LOST = "lost"
    """The manifest is gone."""


class CommitReply(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request."""

    number: int
    kind: str
    sequence: int = 0
    """Of the first entry, where it is committed."""
    reason: str = ""
    limit: int = 0
    actual: int = 0


class _Expired(NotDone):
    """A deadline has passed; nothing was sent."""


class _GuardedFile(ManifestFile):
    """Sends no write after a deadline."""

    deadline = float("inf")

    async def write(self, manifest: Manifest, *, patience_s: float | None = None) -> None:
        if self._clock.monotonic() >= self.deadline:
            raise _Expired("the time allowed for this commit is over", hint="the producer goes on by itself")
        await super().write(manifest, patience_s=patience_s)


@dataclass(slots=True, eq=False)
class _Waiting:
    request: CommitRequest
    since: float
    reply: asyncio.Future[CommitReply]


class CommitBroker:
    """Takes requests from any number of producers of this machine. Transport is somebody else's."""

    def __init__(
        self,
        store: ObjectStore,
        config: BufferConfig,
        *,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        ids: IdSource | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        """The store is the caller's and stays open."""
        self._clock = clock = clock or SystemClock()
        self._config = config
        randomness = randomness or random.SystemRandom()
        self._file = _GuardedFile(store, config.manifest_path, clock, bytes_max=config.manifest_bytes_max)
        self._committer = ManifestCommitter(
            self._file,
            config,
            clock=clock,
            randomness=randomness,
            metrics=BufferMetrics(metrics, "producer", (ids or IdSource(clock, randomness)).ulid()),
        )
        self._line: deque[_Waiting] = deque()
        self._worker: asyncio.Task[None] | None = None
        self.commits = 0
        """Groups handed to a compare-and-set."""
        self.batches = 0
        """Batches enqueued."""

    async def commit(self, request: CommitRequest) -> CommitReply:
        """Enqueue the entries of a request, together with those of others."""
        if not request.entries:
            raise UsageError("a request without entries", hint="send at least one")
        if len(self._line) >= REQUESTS_WAITING_MAX:
            return CommitReply(request.number, ReplyKind.NOT_DONE, reason="too many requests are waiting")
        reply: asyncio.Future[CommitReply] = asyncio.get_running_loop().create_future()
        self._line.append(_Waiting(request, self._clock.monotonic(), reply))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())
        # Whoever stops waiting does not take the entries back: they may be in a write already.
        return await asyncio.shield(reply)

    async def close(self) -> None:
        """Finish the write under way; what waits behind it is handed back as not done."""
        waiting = list(self._line)
        self._line.clear()
        for item in waiting:
            self._reply(item, CommitReply(item.request.number, ReplyKind.NOT_DONE, reason="the broker ends"))
        if self._worker is not None:
            await asyncio.wait({self._worker})

    async def _work(self) -> None:
        while group := self._take():
            uploads = [_uploads(item) for item in group]
            self._file.deadline = min(item.request.deadline for item in group)
            self.commits += 1
            answers = iter(await self._committer.commit([upload for unit in uploads for upload in unit]))
            again = []
            for item, unit in zip(group, uploads, strict=True):
                reply = _reply_to(item.request.number, [next(answers) for _ in unit])
                if reply is not None:
                    self.batches += len(unit) if reply.kind == ReplyKind.COMMITTED else 0
                    self._reply(item, reply)
                elif item.request.deadline <= self._clock.monotonic():
                    self._reply(item, _too_late(item))
                else:
                    again.append(item)  # Another request of the group was too old; this one is not.
            self._line.extendleft(reversed(again))

    def _take(self) -> list[_Waiting]:
        """The next group: requests in the order they came, as many as one write may hold."""
        group: list[_Waiting] = []
        size = 0
        while self._line:
            item = self._line[0]
            if item.request.deadline <= self._clock.monotonic():
                self._reply(self._line.popleft(), _too_late(item))
                continue
            size += len(item.request.entries)
            if group and size > self._config.commit_batches_max:
                break
            group.append(self._line.popleft())
        return group

    def _reply(self, item: _Waiting, reply: CommitReply) -> None:
        if not item.reply.done():
            item.reply.set_result(reply)


def _uploads(item: _Waiting) -> list[Upload]:
    entries = [
        NewEntry(location, tuple(Metadata(*each) for each in metadata), tail)
        for location, metadata, tail in item.request.entries
    ]
    # Their age is in the deadline: the producer has allowed no more than they may still wait.
    return [Upload(entry, float("inf"), item.since) for entry in entries]


def _too_late(item: _Waiting) -> CommitReply:
    return CommitReply(item.request.number, ReplyKind.NOT_DONE, reason="its deadline has passed")


def _reply_to(number: int, answers: Sequence[Answer]) -> CommitReply | None:
    """One answer for the unit; None: not done because of a deadline, its own or another's."""
    first = answers[0]
    problem = next((answer for answer in answers if isinstance(answer, Exception)), None)
    if isinstance(first, Committed) and problem is None:
        return CommitReply(number, ReplyKind.COMMITTED, sequence=first.sequence)
    if isinstance(first, Committed) or isinstance(problem, CommitUnknown):
        # A full queue can cut a unit in two. The producer sees by looking what is there.
        return CommitReply(number, ReplyKind.UNKNOWN, reason=str(problem))
    if isinstance(problem, QueueFull):
        return CommitReply(number, ReplyKind.FULL, limit=problem.limit, actual=problem.actual)
    if isinstance(problem, ManifestLost):
        return CommitReply(number, ReplyKind.LOST, reason=problem.reason)
    if isinstance(problem, CommitFailed) and isinstance(problem.__cause__, _Expired):
        return None
    return CommitReply(number, ReplyKind.NOT_DONE, reason=str(problem))


def as_wire(entry: NewEntry) -> WireEntry:
    """An entry as it travels."""
    items = tuple((item.start_index, item.ingestion_time_ms, item.payload) for item in entry.metadata)
    return entry.location, items, entry.tail


def with_permission(config: BufferConfig, permission_ms: int) -> BufferConfig:
    """The configuration of a broker that gives up when its producers do."""
    return replace(config, commit_retry=replace(config.commit_retry, deadline_ms=permission_ms))
