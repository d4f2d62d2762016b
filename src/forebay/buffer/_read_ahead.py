"""Fetching batches before they are asked for, within a bound of batches and one of bytes.

What is wanted next is known from the manifest, so fetches of the next few batches run while the caller works
on the present one. The sizes of objects are unknown until they are read, unless their entry tells; the
largest one seen lately stands for those that are under way. The batch that is asked for is always fetched,
whatever its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forebay.buffer._batches import BatchDescriptor, ConsumedBatch
from forebay.buffer._config import BufferConfig
from forebay.buffer._fetch import Fetcher
from forebay.buffer._metrics import BufferMetrics
from forebay.errors import FormatError
from forebay.kit.clock import Clock

__all__ = ["ReadAhead"]


class ReadAhead:
    """Batches that are fetched, or being fetched, ahead of time."""

    def __init__(
        self, fetcher: Fetcher, config: BufferConfig, *, clock: Clock, metrics: BufferMetrics
    ) -> None:
        self._fetcher = fetcher
        self._bytes_max = config.read_ahead_bytes
        self._clock = clock
        self._metrics = metrics
        self._tasks: dict[int, asyncio.Task[ConsumedBatch]] = {}
        self._guess = 0

    def want(self, upcoming: Sequence[BatchDescriptor]) -> None:
        """Begin to fetch these, the first of them in any case, the others as far as the bounds allow."""
        wanted = {batch.sequence for batch in upcoming}
        for sequence in [sequence for sequence in self._tasks if sequence not in wanted]:
            self._tasks.pop(sequence).cancel()
        total = 0
        for place, batch in enumerate(upcoming):
            task = self._tasks.get(batch.sequence)
            size = self._size(task, batch)
            if place and total + size > self._bytes_max:
                return
            total += size
            if task is None or (place == 0 and _has_failed(task)):
                self._tasks[batch.sequence] = task = asyncio.create_task(self.fetch(batch))
                task.add_done_callback(_has_failed)

    def _size(self, task: asyncio.Task[ConsumedBatch] | None, batch: BatchDescriptor) -> int:
        if task is not None and task.done() and not _has_failed(task):
            return task.result().entries.stored_bytes
        try:
            extension = batch.entry.extension() if batch.entry is not None else None
        except FormatError:
            return self._guess  # Whoever asks for this batch is told; those before it are not held up.
        told = extension.object_bytes if extension is not None else None
        return self._guess if told is None else told

    async def take(self, batch: BatchDescriptor) -> ConsumedBatch:
        """One batch that was wanted. A failed fetch is forgotten, so that the next call tries again."""
        task = self._tasks[batch.sequence]
        try:
            return await asyncio.shield(task)
        finally:
            if task.done():
                self._tasks.pop(batch.sequence, None)

    async def fetch(self, batch: BatchDescriptor) -> ConsumedBatch:
        """One batch, now."""
        began = self._clock.monotonic()
        consumed = await self._fetcher.fetch(batch)
        self._metrics.fetch_duration.observe(self._clock.monotonic() - began)
        self._guess = max(consumed.entries.stored_bytes, self._guess * 9 // 10)
        return consumed

    async def close(self) -> None:
        """Stop what is under way and wait for it."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _has_failed(task: asyncio.Task[ConsumedBatch]) -> bool:
    """Whether a fetch ended without a batch. Asking also marks its error as seen: it may be fetched again."""
    return task.done() and (task.cancelled() or task.exception() is not None)
