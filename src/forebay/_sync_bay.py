"""What every bay for threads has in common, embedded or over HTTP: a loop of its own, and an orderly end.

Closing refuses further sends, hands on what was sent, closes the bay on the loop, which waits until that is
durable, and ends the loop. Whoever still waits for a receipt then is told that its outcome is not known.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from forebay._loop_thread import LoopThread, close_at_exit
from forebay._sync_producer import SyncSending

__all__ = ["SyncBay"]


class _Opened(Protocol):
    """A bay on an event loop."""

    async def open(self) -> Any: ...

    async def close(self) -> None: ...


B = TypeVar("B", bound=_Opened)
P = TypeVar("P", bound=SyncSending[Any, Any])


class SyncBay(Generic[B, P]):
    """Opens a bay on a thread of its own. A context manager, to be shared by any number of threads."""

    def __init__(self, bay: B, thread_name: str) -> None:
        self._bay = bay
        self._thread = LoopThread(thread_name)
        try:
            self._thread.run(bay.open())
        except BaseException:
            self._thread.stop()
            raise
        self._producers: weakref.WeakSet[P] = weakref.WeakSet()
        close_at_exit(self, self._thread)

    def _kept(self, producer: P) -> P:
        """The producer, which is closed with the bay."""
        self._producers.add(producer)
        return producer

    def close(self) -> None:
        """Flush and close the producers, then let go of everything. Closing twice is fine."""
        if not self._thread.running:
            return
        producers = list(self._producers)
        try:
            for producer in producers:
                producer.shut()
                self._thread.run(producer.take_over())
            self._thread.run(self._bay.close())
        finally:
            self._thread.stop()
            for producer in producers:
                producer.abandon()

    def __enter__(self) -> Self:
        self._thread.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
