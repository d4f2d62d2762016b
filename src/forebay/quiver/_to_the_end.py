"""Work that is not left in the middle, whoever gives up waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["on_its_own", "to_the_end"]

T = TypeVar("T")


async def to_the_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await `work()`. Whoever is cancelled in the meantime hears of it when that is over, and not before."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def on_its_own(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which goes on where nobody waits any more: a thread is not stopped by that, and what it
    does must be counted when it is through."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_seen)
    return await asyncio.shield(task)


def _seen(task: asyncio.Task[Any]) -> None:
    """An error that nobody waits for is not told by the event loop either."""
    if not task.cancelled():
        task.exception()
