"""The writing half of the embedded coordinator: who does a write, and when.

A lone small write is done by the event loop in place (see `_sqlite_in_place`). All others wait in a queue for
one thread: while it syncs a commit the next requests gather, and when it comes back it takes everything that
is there into one transaction. Batches therefore follow the load without a timer: alone, a request pays one
fdatasync; a thousand of them pay about the same. All results of a batch go back to the event loop in one
wake-up, since the hop between threads costs as much as several statements.

Whoever waited for a turn and was refused keeps it for a moment (`forebay.kit.second_tries` says why). The
thread hands the kept turn to the loop along with the refusal: the caller reads again, and its second try is
done in place. A caller who then goes on without letting the loop run may do a few more writes, since they
need neither a hop nor a change of process; the moment the loop runs, the turn goes to the next in line.

Invariants:

* The turn is held by one of us: by the thread, or by the loop through its own descriptor, or it is kept
  (`_kept`). A kept turn is the thread's lock, and whoever sets `_kept` to false under `_hand` lets it go.
* A kept turn ends: after `WRITES_PER_TURN` writes, when the loop comes round, or when the thread has waited
  `SECOND_TRY_S`, whatever the loop does meanwhile. Only a commit under way is waited for.
* While requests of ours are with the thread, nothing is done in place, and a kept turn is theirs: no caller
  overtakes another of this process, and the queue empties into the turn that is there.
* After a turn we had to wait for, the next request goes to the thread and stands in line: a loop that asks at
  once would be faster than the process the kernel has just woken, and the same one would win for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable
from typing import Any

from forebay.coordination._api import Put
from forebay.coordination._sqlite_commit import Committer, Request, fail
from forebay.coordination._sqlite_file import SqliteFile, close_turn, end_turn, take_turn, try_turn
from forebay.coordination._sqlite_in_place import InPlace
from forebay.coordination._sqlite_transaction import Transaction
from forebay.errors import Closed, Unavailable
from forebay.kit.second_tries import SECOND_TRY_S, SecondTries

__all__ = ["Writer"]

BATCH_OPERATIONS_MAX = 1_000
"""Operations after which a transaction takes no further request, so that other processes get their turn."""
QUEUE_OPERATIONS_MAX = 50_000
QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Bounds of what waits for the thread; callers over it wait in line on the event loop."""
WRITES_PER_TURN = 4
"""Writes in place in one kept turn. A process that does only one gets a quarter of what the others get, not
less; and the loop is blocked for four syncs at most before it runs again."""
EXPIRY_INTERVAL_S = 0.25
"""How often an idle thread looks for sessions that are over."""


class Writer:
    """The thread, its queue, and the loop's own way. Made on the event loop that will use it."""

    def __init__(
        self,
        file: SqliteFile,
        loop: asyncio.AbstractEventLoop,
        connection: sqlite3.Connection,
        *,
        now_ms: Callable[[], int],
        boot_id: str,
        on_commit: Callable[[], None],
    ) -> None:
        """`connection` is the loop's own: it waits for no lock, and is closed by its owner."""
        self._file = file
        self._loop = loop
        self._second_tries = SecondTries()
        # Weak, so that the thread does not keep a coordinator alive that nobody closed.
        self._on_commit = weakref.WeakMethod(on_commit)
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._operations = 0
        self._size = 0
        self._room = asyncio.Event()
        self._room.set()
        self._stopping = False
        self._ended = asyncio.Event()
        self._hand = threading.Lock()
        self._kept = False
        self._kept_writes = 0
        self._stands_in_line = False
        self._loop_descriptor = file.open_turn()
        self._descriptor = file.open_turn()
        self._committer = Committer(file, file.connect(), now_ms=now_ms, boot_id=boot_id)
        self._in_place = InPlace(Committer(file, connection, now_ms=now_ms, boot_id=boot_id), loop)
        self._thread = threading.Thread(target=self._run, name=f"forebay {file.path.name}", daemon=True)
        self._thread.start()

    async def submit(
        self,
        apply: Callable[[Transaction], Any],
        *,
        operations: int = 1,
        size: int = 0,
        put: Put | None = None,
    ) -> Any:
        """Run `apply` in the next transaction and return its result once that is durable.

        `put` says that this is all it does, so that it can be refused without a transaction.
        """
        while self._operations >= QUEUE_OPERATIONS_MAX or self._size >= QUEUE_BYTES_MAX:
            self._room.clear()
            await self._room.wait()
        # A kept turn is short by itself, and ends when the loop runs.
        if not self._kept and self._in_place.breath.is_due():
            await asyncio.sleep(0)
        if self._stopping:
            raise Closed(f"the coordinator on {self._file.path} is closed", hint="open a new one")
        request = Request(apply, operations, size, put)
        if self._operations == 0 and self._do_in_place(request):
            self._committed()
            return request.unwrap()
        request.future = self._loop.create_future()
        self._operations += operations
        self._size += size
        self._queue.put(request)
        return await request.future

    async def breathe(self) -> None:
        """Let the loop run, if that is due."""
        if self._in_place.breath.is_due():
            await asyncio.sleep(0)

    def stop(self) -> None:
        """Let the thread end after what is queued. Safe from any thread."""
        self._stopping = True
        self._queue.put(None)

    async def join(self) -> None:
        """Return when the thread has let go of everything."""
        await self._ended.wait()
        self._thread.join()

    # -- on the event loop

    def _do_in_place(self, request: Request) -> bool:
        if self._kept:
            return self._use_kept_turn(request)
        if self._stands_in_line:
            self._stands_in_line = False
            return False
        # An error of the lock itself is met, and named, by the thread.
        if not self._in_place.allows(request) or not try_turn(self._loop_descriptor):
            return False
        try:
            return self._in_place.commit(request)
        finally:
            end_turn(self._loop_descriptor)

    def _use_kept_turn(self, request: Request) -> bool:
        """Do it in the turn the thread keeps. Otherwise it goes to the thread, which waits for it."""
        if not self._hand.acquire(blocking=False):
            return False
        try:
            first = self._kept_writes == 0
            if not self._kept or not self._in_place.allows(request, own_callbacks=0 if first else 1):
                return False
            if not self._in_place.commit(request):
                return False
            self._kept_writes += 1
            if first:
                self._second_tries.used()
            if self._kept_writes == WRITES_PER_TURN or request.refused():
                self._end_kept_turn()
            elif first:
                self._loop.call_soon(self._let_go)
            return True
        finally:
            self._hand.release()

    def _let_go(self) -> None:
        """The caller let the loop run: it has written what it had to write."""
        with self._hand:
            if self._kept and self._kept_writes:
                self._end_kept_turn()

    def _end_kept_turn(self) -> None:
        self._kept = False
        self._stands_in_line = True
        end_turn(self._descriptor)

    def _deliver(self, batch: list[Request]) -> None:
        for request in batch:
            self._operations -= request.operations
            self._size -= request.size
            future = request.future
            assert future is not None
            if future.done():
                continue
            if request.error is not None:
                future.set_exception(request.error)
            else:
                future.set_result(request.result)
        self._room.set()
        self._committed()

    def _committed(self) -> None:
        on_commit = self._on_commit()
        if on_commit is not None:
            on_commit()

    # -- in the thread

    def _run(self) -> None:
        batch: list[Request] | None = []
        try:
            while (batch := batch or self._take_within(EXPIRY_INTERVAL_S)) is not None:
                if batch:
                    batch = self._serve(batch)
                else:
                    self._tidy()
        finally:
            self._committer.close()
            close_turn(self._descriptor)
            close_turn(self._loop_descriptor)
            self._call(self._ended.set)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # The loop may be gone when its owner never closed the coordinator; then nobody waits either.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _take_within(self, seconds: float) -> list[Request] | None:
        """What is queued, up to the bound. Empty when that time is over; None: there will be no more."""
        try:
            first = self._queue.get(timeout=seconds)
        except queue.Empty:
            return []
        if first is None:
            return None
        batch = [first]
        operations = first.operations
        while operations < BATCH_OPERATIONS_MAX and not self._queue.empty():
            request = self._queue.get()
            if request is None:
                # Nothing is queued after the sentinel: serve what came before it, then meet it again.
                self._queue.put(None)
                break
            batch.append(request)
            operations += request.operations
        return batch

    def _serve(self, batch: list[Request]) -> list[Request]:
        """Do the batch in our turn; what is to be done next, where that is known already."""
        try:
            waited = take_turn(self._descriptor)
        except OSError as error:
            # The lock itself failed, so nothing was begun.
            fail(batch, Unavailable(f"{self._file.turn_path}: {error.strerror}", hint="see the system log"))
            self._call(self._deliver, batch)
            return []
        # Only after a wait: without others there is nobody who could have come between.
        if not (waited and self._committer.refuse(batch)):
            self._committer.commit(batch)
        # Before the turn is handed to anybody: in a long fight the thread has no other moment.
        self._checkpoint()
        self._stands_in_line = waited
        if waited and all(request.refused() for request in batch) and self._second_tries.is_due():
            return self._keep_turn(batch)
        end_turn(self._descriptor)
        # Only now: the next process is at work while this one hands the answers over.
        self._call(self._deliver, batch)
        return []

    def _keep_turn(self, batch: list[Request]) -> list[Request]:
        """Keep the turn while the callers get their answers, for what they come back with."""
        self._kept_writes = 0
        self._kept = True
        self._call(self._deliver, batch)
        again = self._take_within(SECOND_TRY_S)
        with self._hand:
            ours, self._kept = self._kept, False
        if again is None:
            self._queue.put(None)
            again = []
        if not ours:
            return again
        if again:
            self._committer.commit(again)
            self._second_tries.used()
        elif not self._kept_writes:
            self._second_tries.unused()
        end_turn(self._descriptor)
        if again:
            self._call(self._deliver, again)
        return []

    def _checkpoint(self) -> None:
        """In our turn: no commit adds to the log meanwhile, so the next one can begin it anew."""
        theirs = self._in_place.committer
        if theirs.checkpoint_due:
            theirs.checkpoint_due = False
            self._committer.checkpoint()

    def _tidy(self) -> None:
        """Nobody writes: look for sessions that are over, and at the log of what was written in place."""
        try:
            expired = self._committer.has_expired()
            if not expired and not self._in_place.committer.checkpoint_due:
                return
            take_turn(self._descriptor)
        except (sqlite3.Error, OSError):
            return
        if expired:
            self._committer.expire()
        self._checkpoint()
        end_turn(self._descriptor)
        if expired:
            self._call(self._committed)
