"""Puts in threads: each takes the turn of its key, and may hand it to the caller's next try.

`forebay.kit.second_tries` says why a caller who waited and was refused keeps the turn for a moment. Here the
thread of the refused put keeps it: it answers, waits, and does the next put of the same key that this store
is asked for. The lock is let go by that thread alone, so a caller whose event loop stands still cannot hold
it, and the second try needs no other thread, which might itself wait for this lock.

Only a put that named a version gets the offer. Who wanted to be the first and was not goes elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from forebay.errors import PreconditionFailed
from forebay.kit.second_tries import SECOND_TRY_S, SecondTries
from forebay.storage._api import When
from forebay.storage._local._files import Body, LocalFiles, Turn

__all__ = ["Writers"]


class _Put:
    """One call of `put`, from the loop to a thread and back."""

    def __init__(self, body: Body, when: When) -> None:
        self._body = body
        self.when = when
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[str] = self._loop.create_future()
        self._version = ""
        self.error: BaseException | None = None

    def attempt(self, turn: Turn) -> None:
        """Do it. A cancelled call is left alone: nothing of it was begun."""
        if not self.future.cancelled():
            self._version = turn.put(self._body, self.when)

    def answer(self) -> None:
        """Tell the caller. The loop may be gone with all who waited on it."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self._version)


class _KeptTurn:
    """Where the thread that keeps a turn meets the put that comes back for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived = threading.Semaphore(0)
        self._put: _Put | None = None
        self._over = False

    def take(self, put: _Put) -> bool:
        """On the loop: whether the turn is still kept; the thread then does `put`."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            self._put = put
        self._arrived.release()
        return True

    def wait(self, seconds: float) -> _Put | None:
        """In the thread: the put that came back in time."""
        self._arrived.acquire(timeout=seconds)
        with self._lock:
            self._over = True
            return self._put


class Writers:
    """The threads that put."""

    def __init__(self, files: LocalFiles, pool: ThreadPoolExecutor) -> None:
        self._files = files
        self._pool = pool
        self._kept: dict[str, _KeptTurn] = {}
        self._second_tries = SecondTries()

    async def put(self, key: str, body: Body, when: When) -> str:
        """Replace the object durably if `when` holds; the new version."""
        put = _Put(body, when)
        kept = self._kept.pop(key, None)
        if kept is None or not kept.take(put):
            self._pool.submit(self._serve, key, put)
        return await put.future

    def _serve(self, key: str, put: _Put) -> None:
        if put.future.cancelled():
            return
        try:
            with self._files.turn(key) as turn:
                try:
                    put.attempt(turn)
                except PreconditionFailed as refusal:
                    # Its frames hold this put: a ring for every refusal, which only a collection would end.
                    put.error = refusal.with_traceback(None)
                    if not (turn.waited and isinstance(put.when, str) and self._second_tries.is_due()):
                        return
                    again = self._keep_turn(key, put)
                    if again is not None:
                        put = again
                        put.attempt(turn)
        except BaseException as error:
            put.error = error
        finally:
            # After the turn: the next process is at work while this one hands over. Twice does no harm.
            put.answer()

    def _keep_turn(self, key: str, refused: _Put) -> _Put | None:
        kept = self._kept[key] = _KeptTurn()
        refused.answer()
        again = kept.wait(SECOND_TRY_S)
        # Still our turn, so this is ours or nobody's.
        self._kept.pop(key, None)
        if again is None:
            self._second_tries.unused()
        else:
            self._second_tries.used()
        return again
