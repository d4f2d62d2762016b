"""Work that must not be left in the middle, whoever gives up waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["to_the_end"]

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
