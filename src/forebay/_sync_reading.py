"""Record batches for threads, from a stream of them on an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator

import pyarrow as pa

from forebay._loop_thread import LoopThread
from forebay.errors import ForebayError

__all__ = ["pulled"]

PULL_BYTES = 4 * 1024 * 1024
"""Bytes of record batches taken from the loop at a time: a hop between threads costs more than a batch."""


def pulled(thread: LoopThread, stream: AsyncIterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches of a stream that belongs to the loop of `thread`."""
    batches = aiter(stream)
    try:
        while True:
            found, error = thread.run(_next(batches))
            yield from found
            if error is not None:
                raise error
            if not found:
                return
    finally:
        thread.start(_closed(batches))


async def _next(batches: AsyncIterator[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], ForebayError | None]:
    """The next few batches; none at the end. What went wrong comes with those before it."""
    found: list[pa.RecordBatch] = []
    size = 0
    try:
        while size < PULL_BYTES:
            batch = await anext(batches)
            found.append(batch)
            size += batch.get_total_buffer_size()
    except StopAsyncIteration:
        pass
    except ForebayError as error:
        return found, error
    return found, None


async def _closed(batches: AsyncIterator[pa.RecordBatch]) -> None:
    if isinstance(batches, AsyncGenerator):
        await batches.aclose()
