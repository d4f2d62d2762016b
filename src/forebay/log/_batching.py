"""The producer: many small calls in, few large flushes out.

Calls from any number of tasks go into one open batch, which becomes one object and one round trip to the
coordinator: by bytes, by age, or on `flush`. Groups of one partition that meet in a batch become one slice
and one index entry; every caller still gets exactly its own offsets.

While one flush commits, the next ones upload. Commits are in the order of the batches, so the appends of one
caller to one partition keep their order. An acknowledgement follows the commit, never the upload. Nothing is
flushed while nobody calls: an idle producer costs no request.

A group that could not be appended fails its own ticket with the error and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from forebay.errors import Backpressure, LimitExceeded, UsageError
from forebay.kit.batcher import Batcher, BatcherConfig, BatcherStats, Outcome, Tell, Ticket
from forebay.kit.clock import Clock
from forebay.kit.periodic import PeriodicService
from forebay.log._append import FLUSH_BYTES_MAX, GROUPS_PER_CALL_MAX, AppendGroup, AppendResult
from forebay.log._upload import Uploaded
from forebay.log._writer import LogWriter

__all__ = ["BatchingProducer", "ProducerConfig"]


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """When to flush, and how much may wait."""

    batch_max_bytes: int = 4 * 1024 * 1024
    """Bytes of records at which a batch is flushed. 1 to 256 MiB."""
    batch_max_delay_ms: int = 100
    """Milliseconds from the first group of a batch to its flush. At least 0."""
    batch_max_groups: int = 50_000
    """Groups at which a batch is flushed. 1 to 100,000."""
    pending_max_bytes: int = 128 * 1024 * 1024
    """Bytes accepted and not yet acknowledged; also the largest group. Callers wait above it. At least 1."""
    pending_max_groups: int = 100_000
    """Groups accepted and not yet acknowledged. Callers wait above it. At least 1."""
    uploads_max: int = 8
    """Uploads under way at once. At least 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch_max_groups <= GROUPS_PER_CALL_MAX:
            raise UsageError(
                f"batch_max_groups is {self.batch_max_groups}", hint=f"1 to {GROUPS_PER_CALL_MAX:,}"
            )
        # A batch is larger than its bound by its last group at most.
        if self.batch_max_bytes > FLUSH_BYTES_MAX // 2 or self.pending_max_bytes > FLUSH_BYTES_MAX // 2:
            raise UsageError(
                f"batch_max_bytes is {self.batch_max_bytes}, pending_max_bytes {self.pending_max_bytes}",
                hint=f"both are at most {FLUSH_BYTES_MAX // 2:,}",
            )

    def batcher(self) -> BatcherConfig:
        """The same in the words of the batcher, which checks the rest."""
        return BatcherConfig(
            batch_bytes=self.batch_max_bytes,
            batch_items=self.batch_max_groups,
            age_ms=self.batch_max_delay_ms,
            pending_items_max=self.pending_max_groups,
            pending_bytes_max=self.pending_max_bytes,
            uploads_max=self.uploads_max,
            # Flushes of different partitions share a round trip. Those of the same partition cannot, and
            # are acknowledged together at the end: not too many.
            commit_batches_max=8,
        )


class BatchingProducer:
    """Coalesces the appends of many tasks of one event loop. The writer belongs to the caller."""

    def __init__(self, writer: LogWriter, *, clock: Clock, config: ProducerConfig | None = None) -> None:
        self._writer = writer
        self._config = config or ProducerConfig()
        self._batcher: Batcher[AppendGroup, Uploaded, AppendResult] = Batcher(
            writer.upload, self._commit, config=self._config.batcher(), clock=clock
        )
        self._background: PeriodicService | None = None

    @property
    def stats(self) -> BatcherStats:
        """Flushes and failures since the start."""
        return self._batcher.stats

    @property
    def pending_groups(self) -> int:
        """Groups accepted and not yet answered."""
        return self._batcher.pending_items

    @property
    def pending_bytes(self) -> int:
        """Their bytes."""
        return self._batcher.pending_bytes

    async def append(self, groups: Sequence[AppendGroup]) -> list[Ticket[AppendResult]]:
        """Accept groups, waiting for room if there is none; one ticket per group.

        A ticket gives the result once the records are durable, or raises what went wrong. If the wait is cut
        short, groups that were accepted before stay accepted.
        """
        _check(groups)
        return [await self._batcher.add(group, group.size_bytes) for group in groups]

    def append_nowait(self, groups: Sequence[AppendGroup]) -> list[Ticket[AppendResult]]:
        """Accept all groups, or none and raise `Backpressure`."""
        add = self._batcher.add_nowait
        if len(groups) == 1:
            return [add(groups[0], groups[0].size_bytes)]
        _check(groups)
        sizes = [group.size_bytes for group in groups]
        self._check_room(len(sizes), sum(sizes))
        return [add(group, size) for group, size in zip(groups, sizes, strict=True)]

    def append_told(self, groups: Sequence[AppendGroup], tells: Sequence[Tell[AppendResult]]) -> None:
        """As `append_nowait`, with a function per group that is told its result, or what went wrong."""
        add = self._batcher.add_told
        if len(groups) == 1:
            add(groups[0], groups[0].size_bytes, tells[0])
            return
        _check(groups)
        sizes = [group.size_bytes for group in groups]
        self._check_room(len(sizes), sum(sizes))
        for group, size, tell in zip(groups, sizes, tells, strict=True):
            add(group, size, tell)

    def _check_room(self, groups: int, size_bytes: int) -> None:
        batcher, config = self._batcher, self._config
        if (
            batcher.pending_items + groups > config.pending_max_groups
            or batcher.pending_bytes + size_bytes > config.pending_max_bytes
        ):
            raise Backpressure(
                f"{batcher.pending_items:,} groups with {batcher.pending_bytes:,} bytes are not durable yet",
                hint="wait for earlier appends, or raise pending_max_groups or pending_max_bytes",
            )

    async def _commit(self, uploads: Sequence[Uploaded]) -> list[Outcome[AppendResult]]:
        answers = await self._writer.commit(uploads)
        return [[result.error or result for result in results] for results in answers]

    async def flush(self) -> None:
        """Flush what is open and wait until everything accepted before is answered; raises its failures."""
        await self._batcher.flush()

    async def start(self) -> None:
        """Begin to put the index entries of idle partitions in the background. Optional; see `LogWriter`."""
        if self._background is None:
            self._background = self._writer.background()
            await self._background.start()

    async def close(self) -> None:
        """Refuse new groups, flush, put the last index entries. Raises what a flush would raise."""
        background, self._background = self._background, None
        try:
            await self._batcher.close()
        finally:
            if background is not None:
                await background.stop()
        await self._writer.materialize_idle(idle_ms=0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _check(groups: Sequence[AppendGroup]) -> None:
    if len(groups) > GROUPS_PER_CALL_MAX:
        raise LimitExceeded(
            "GROUPS_PER_CALL_MAX", limit=GROUPS_PER_CALL_MAX, actual=len(groups), hint="append in parts"
        )
