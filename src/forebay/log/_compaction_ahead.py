"""The run after the one that is being written, read while the store is busy with it.

    fold k | upload k, read back, steps of k          | fold k+1 | ...
           | select k+1, fetch and check its slices   |

Reading ahead changes nothing anywhere, so it may stop at any point and be forgotten; a crash leaves no trace.
What was read is used only where the next call, having finished what was in the slot and read the records of
the partition anew, finds the cursor exactly at its start and nothing trimmed above. That is as good as having
selected it then: entries from the cursor on are only changed by a compaction, which moves the cursor, and a
compactor that reads slowly takes the same time between its selection and its commit. Everything else is
decided by the steps.

An error while reading ahead is forgotten too: the call that needs these slices asks for them itself, and if
it still fails, says so.

Memory: the object of run k and the slices of run k+1, then these and the object made of them. Never three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forebay.errors import ForebayError
from forebay.log._compaction_rewrite import Source
from forebay.log._compaction_run import Run

__all__ = ["Ahead", "ReadAhead"]


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """A run, and its slices."""

    run: Run
    source: Source


class Ahead:
    """At most one run, being read or read already."""

    def __init__(self) -> None:
        self._task: asyncio.Task[ReadAhead | None] | None = None

    def begin(self, reading: Callable[[], Awaitable[ReadAhead | None]]) -> None:
        """Read on, in a task of its own. What was read before and not taken is forgotten."""
        self.forget()
        self._task = asyncio.create_task(_quietly(reading))

    async def take(self, cursor: int) -> ReadAhead | None:
        """The run that starts at the cursor, once it is read; None: there is none."""
        task, self._task = self._task, None
        if task is None:
            return None
        try:
            found = await task
        except BaseException:
            task.cancel()
            raise
        return found if found is not None and found.run.start_offset == cursor else None

    def forget(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Stop reading, and wait until it has."""
        task = self._task
        self.forget()
        if task is not None:
            await asyncio.wait([task])


async def _quietly(reading: Callable[[], Awaitable[ReadAhead | None]]) -> ReadAhead | None:
    try:
        return await reading()
    except ForebayError:
        return None
