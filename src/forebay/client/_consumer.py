"""A consumer: poll, work, commit. Long polls, Arrow batches, committed offsets of a group.

A broker has no members: a consumer reads every partition of its topics (or those it is told), and a group is
a name under which offsets are committed. Two consumers of one group over HTTP would read the same records;
groups whose members share partitions are `forebay.connect`'s. What was handed out and not committed comes
again: at least once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from forebay.client._reading import Fetcher, OffsetOutOfRange, TopicPartition
from forebay.errors import ForebayError, UsageError

__all__ = ["Consumer"]

Begin = Callable[[], Awaitable[dict[TopicPartition, int]]]
Commit = Callable[[Mapping[TopicPartition, int]], Awaitable[None]]


class Consumer:
    """Reads on and on. One task polls and commits."""

    def __init__(
        self, fetcher: Fetcher, begin: Begin, *, commit: Commit | None = None, max_wait_ms: int
    ) -> None:
        self._fetcher = fetcher
        self._begin = begin
        self._commit = commit
        self._max_wait_ms = max_wait_ms
        self._positions: dict[TopicPartition, int] | None = None
        self._committed: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}

    async def start(self) -> None:
        """Find out where to begin."""
        if self._positions is None:
            self._positions = await self._begin()
            if not self._positions:
                raise UsageError("there are no partitions to read", hint="name a topic that exists")
            self._committed = dict(self._positions)

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """Next offset to be handed out, by partition."""
        return dict(self._positions or {})

    @property
    def at_end(self) -> bool:
        """Whether the last poll saw the end of every partition, and everything before it was handed out."""
        positions = self._positions or {}
        return bool(positions) and all(self._ends.get(place, -1) == at for place, at in positions.items())

    async def poll(
        self, *, timeout_s: float | None = None, max_bytes: int | None = None
    ) -> list[pa.RecordBatch]:
        """Records of any of its partitions, as Arrow; empty where none came within the timeout.

        A partition that was trimmed beyond its position goes on at the earliest offset.
        """
        await self.start()
        assert self._positions is not None
        wait_ms = self._max_wait_ms if timeout_s is None else int(timeout_s * 1000)
        answers = await self._fetcher.fetch(self._in_turn(), max_wait_ms=wait_ms, max_bytes=max_bytes)
        batches: list[pa.RecordBatch] = []
        for answer in answers:
            if answer.error is not None:
                self._positions[answer.place] = _after_trim(answer.error, self._positions[answer.place])
                continue
            self._positions[answer.place] = answer.next_offset
            self._ends[answer.place] = answer.high_watermark
            batches += answer.batches
        return batches

    def _in_turn(self) -> dict[TopicPartition, int]:
        """The positions, another one first each time: the bound of an answer must not starve the last."""
        assert self._positions is not None
        places: Sequence[TopicPartition] = list(self._positions)
        first = self._positions.pop(places[0])
        self._positions[places[0]] = first
        return dict(self._positions)

    async def commit(self) -> None:
        """Commit everything that was handed out."""
        if self._commit is None:
            raise UsageError(
                "this consumer has no group", hint="groups.consumer(group, topics) makes one that has"
            )
        positions = self._positions or {}
        changed = {place: at for place, at in positions.items() if at != self._committed.get(place)}
        if changed:
            await self._commit(changed)
            self._committed.update(changed)

    async def close(self) -> None:
        """Nothing is open; here so that code for the embedded consumer works unchanged."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _after_trim(error: ForebayError, position: int) -> int:
    """The earliest offset, where the records at `position` were trimmed; else raises the error."""
    if isinstance(error, OffsetOutOfRange) and error.earliest is not None and error.earliest > position:
        return error.earliest
    raise error
