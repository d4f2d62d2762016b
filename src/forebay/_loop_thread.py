"""An event loop on a thread of its own, for code that is not asynchronous.

Any number of threads may call in at once. The thread is a daemon, so a forgotten bay never keeps a process
alive; what was sent is not forgotten for that: whatever is still open is closed when the interpreter ends.

A forked child has the object but not the thread, and connections it must not share. Every call says so
instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from forebay.errors import Closed, UsageError

__all__ = ["LoopThread", "close_at_exit"]

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self.owner: object = None
        """What lives as long as the thread does, also where nobody else holds it any more."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def running(self) -> bool:
        """Whether calls are answered: not after `stop`, and not in a forked child."""
        return self._pid == os.getpid() and self._thread.is_alive() and not self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. An interrupted wait cancels it."""
        try:
            self.check()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin a coroutine and do not wait for it: from any thread, also from that of the loop.

        For tidying up, which may be asked for by the garbage collector wherever it happens to run.
        """
        if self.running:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            work.close()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a plain function on the loop, without waiting for it."""
        self.check()
        self._loop.call_soon_threadsafe(function, *arguments)

    def check(self) -> None:
        """Raise where a call would wait for ever."""
        if self._pid != os.getpid():
            raise UsageError(
                "this bay was opened before a fork", hint="call forebay.connect in the child process"
            )
        if threading.current_thread() is self._thread:
            raise UsageError("a call would wait for itself", hint="use forebay.aio inside asyncio code")
        if not self.running:
            raise Closed("this bay is closed", hint="call forebay.connect again")

    def stop(self) -> None:
        """End the loop and its thread. What still runs on it is cancelled."""
        if not self.running:
            return
        try:
            self.run(_cancel_others())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()


class Closable(Protocol):
    """Something with a close."""

    def close(self) -> None:
        """Let go."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(item: Closable, thread: LoopThread) -> None:
    """Close it when the interpreter ends, if nobody did before.

    It lives until then: a bay that a function has forgotten may have sent what is not durable yet.
    """
    thread.owner = item
    _open.add(item)


def _close_all() -> None:
    for item in list(_open):
        item.close()


def _register() -> None:
    """Have `_close_all` called while thread pools still take work.

    They stop at the beginning of the shutdown, before any `atexit` function, through a hook that runs its
    functions last in, first out. It has no public name; without it a forgotten bay is closed too late to
    write, and says so.
    """
    import concurrent.futures.thread  # Its own function must be registered before ours.  # noqa: F401

    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


_register()
