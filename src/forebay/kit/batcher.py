"""Accumulate and flush: the one loop between many small calls and few large writes.

    add -> [open batch] -> close -> [upload] -> [ready] -> [commit] -> answers
            by bytes, count,         several     waits     one at a time, in the order
            age, flush, pressure     at once     its turn  of closing, many per commit

A caller adds an item and gets a ticket, a future that is answered when the item is durable, or names a
function that is told so. What "upload" and "commit" mean is the engine's: an object per batch and one
conditional write for all batches that are ready, say. Invariants, whatever fails:

* Every accepted item is answered exactly once, and with success only after its commit returned.
* Batches are committed in the order they were closed, items keep the order they were added.
* Unanswered calls and bytes never exceed their bounds; waiting callers are served first come, first served.
* A failed upload answers its own batch and holds up nobody. A failed commit answers the batches in it.
* An open batch is closed once its first item is `age_ms` old. While all upload slots are busy, closing it
  would gain nothing, so it goes on filling up to `batch_bytes` and is closed the moment a slot is free.

The age is checked at every `add` as well as by a timer: a loop that is never idle cannot starve the flush.
Rejected: a queue and a background task that drains it. It needs a wake-up per item, and under load the drain
competes with the callers that fill it.

Use from one event loop. The engine's commit must not let a later batch overtake one whose outcome is unknown;
the batcher only promises to call it for one group at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

from forebay.errors import Backpressure, Closed, LimitExceeded, OutcomeUnknown, UsageError
from forebay.kit.clock import Clock

__all__ = ["Batcher", "BatcherConfig", "BatcherStats", "Outcome", "Tell", "Ticket"]

Item = TypeVar("Item")
Uploaded = TypeVar("Uploaded")
Result = TypeVar("Result")

Ticket: TypeAlias = asyncio.Future[Result]
"""Answered with the item's result once it is durable, or with what went wrong."""
Tell: TypeAlias = Callable[[Result | Exception], None]
"""Called once with the item's result, or with what went wrong, in the step that answers its batch. What it
raises is logged and goes no further."""
Outcome: TypeAlias = Exception | Sequence[Result | Exception]
"""What a commit says of one batch: an error for all of its items, or one answer per item."""

_log = logging.getLogger(__name__)
_TIMER_GRACE_S = 0.001
"""How late the timer of an open batch may be before `add` does its work: a busy loop runs it late."""


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    """When to flush, and how much may wait."""

    batch_bytes: int = 8 * 1024 * 1024
    """Bytes at which an open batch is closed. A batch is larger only by its last item. At least 1."""
    batch_side_bytes: int = 0
    """Bytes of a second kind, such as what goes into an index, that one batch may hold: an item that would
    pass the bound begins a new batch. A single item may be larger. 0: no bound."""
    batch_items: int = 100_000
    """Items at which an open batch is closed. At least 1."""
    age_ms: int = 100
    """Milliseconds from the first item of an open batch to its closing. 0: once ready tasks have run."""
    pending_items_max: int = 100_000
    """Items accepted and not yet answered. At the bound `add` waits and the open batch is closed early."""
    pending_bytes_max: int = 256 * 1024 * 1024
    """Bytes accepted and not yet answered; also the largest single item."""
    uploads_max: int = 4
    """Uploads under way at once."""
    commit_batches_max: int = 64
    """Most batches in one commit."""

    def __post_init__(self) -> None:
        for name in ("age_ms", "batch_side_bytes"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="it is at least 0")
        names = (
            "batch_bytes",
            "batch_items",
            "pending_items_max",
            "pending_bytes_max",
            "uploads_max",
            "commit_batches_max",
        )
        for name in names:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="it is at least 1")


@dataclass(slots=True)
class BatcherStats:
    """Plain counts since the start, for metrics and tests."""

    closed: Counter[str] = field(default_factory=Counter)
    """Batches by why they were closed: bytes, side bytes, items, age, flush, pressure."""
    commits: int = 0
    """Calls of the engine's commit."""
    batches_committed: int = 0
    batches_failed: int = 0
    """Batches whose upload or commit failed as a whole."""
    items_failed: int = 0
    waits: int = 0
    """Calls of `add` that had to wait for room."""


@dataclass(slots=True, eq=False)
class _Batch(Generic[Item, Uploaded, Result]):
    items: list[Item]
    tickets: list[Ticket[Result] | Tell[Result]]
    size_bytes: int
    side_bytes: int = 0
    opened_at: float = 0.0
    ready: bool = False
    uploaded: Uploaded | None = None
    error: Exception | None = None
    answered: bool = False


class Batcher(Generic[Item, Uploaded, Result]):
    """Turns many `add` calls into few uploads and fewer commits."""

    def __init__(
        self,
        upload: Callable[[Sequence[Item]], Awaitable[Uploaded]],
        commit: Callable[[Sequence[Uploaded]], Awaitable[Sequence[Outcome[Result]]]],
        *,
        config: BatcherConfig,
        clock: Clock,
    ) -> None:
        """`upload` makes one batch durable but invisible; `commit` makes several visible, in order."""
        self._upload_batch = upload
        self._commit_batches = commit
        self._config = config
        self._clock = clock
        self.stats = BatcherStats()
        self.pending_items = 0
        """Items accepted, or promised to a waiting caller, and not yet answered."""
        self.pending_bytes = 0
        """Their bytes."""
        self._open: _Batch[Item, Uploaded, Result] = _Batch([], [], 0)
        self._due: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._to_upload: deque[_Batch[Item, Uploaded, Result]] = deque()
        self._line: deque[_Batch[Item, Uploaded, Result]] = deque()
        self._uploading = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._committing = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._granted = 0
        """Callers that were given room and have not run yet. Nobody may overtake them."""
        self._unanswered: deque[_Batch[Item, Uploaded, Result]] = deque()
        """Closed, in that order. After an abort some may be answered while one before them is not."""
        self._flushes: deque[tuple[_Batch[Item, Uploaded, Result], asyncio.Future[None]]] = deque()
        """The last batch that each call of `flush` waits for."""
        self._failure: Exception | None = None
        self._closed = False
        self.aborted = False
        """Whether it ended by cancellation: what was not handed to a commit then is answered as not done."""

    # -- what is going on

    @property
    def uploading(self) -> int:
        """Uploads under way."""
        return self._uploading

    @property
    def batches_waiting(self) -> int:
        """Batches that are closed and wait for an upload slot."""
        return len(self._to_upload)

    @property
    def batches_unanswered(self) -> int:
        """Batches that are closed and not answered yet."""
        return len([batch for batch in self._unanswered if not batch.answered])

    def oldest_age_s(self) -> float:
        """Seconds since the first item of the oldest batch that is not answered; 0 where there is none."""
        batch = self._unanswered[0] if self._unanswered else self._open
        return self._clock.monotonic() - batch.opened_at if batch.items else 0.0

    # -- taking items in

    async def add(self, item: Item, size_bytes: int, side_bytes: int = 0) -> Ticket[Result]:
        """Accept an item, waiting for room if there is none. Cancelling the wait leaves nothing behind."""
        self._check(size_bytes)
        if self._must_wait(size_bytes):
            await self._wait_for_room(size_bytes)
            ticket = self._ticket()
            self._accept(item, size_bytes, side_bytes, ticket)
            self._release(0, 0)  # whoever came meanwhile stood in line behind this item
            return ticket
        self._reserve(size_bytes)
        ticket = self._ticket()
        self._accept(item, size_bytes, side_bytes, ticket)
        return ticket

    def add_nowait(self, item: Item, size_bytes: int, side_bytes: int = 0) -> Ticket[Result]:
        """Accept an item, or raise `Backpressure` if there is no room now."""
        self._reserve_now(size_bytes)
        ticket = self._ticket()
        self._accept(item, size_bytes, side_bytes, ticket)
        return ticket

    def add_told(self, item: Item, size_bytes: int, tell: Tell[Result]) -> None:
        """As `add_nowait`, for callers whose answer needs no task to wait for it: `tell` gets it."""
        self._reserve_now(size_bytes)
        self._accept(item, size_bytes, 0, tell)

    @staticmethod
    def _ticket() -> Ticket[Result]:
        return asyncio.get_running_loop().create_future()

    def _reserve_now(self, size_bytes: int) -> None:
        self._check(size_bytes)
        if self._must_wait(size_bytes):
            self._press()
            raise Backpressure(
                f"{self.pending_items:,} items with {self.pending_bytes:,} bytes are not durable yet",
                hint="wait for earlier writes, or raise pending_items_max or pending_bytes_max",
            )
        self._reserve(size_bytes)

    def _check(self, size_bytes: int) -> None:
        if self._closed:
            raise Closed("the batcher is closed")
        if not 0 <= size_bytes <= self._config.pending_bytes_max:
            raise LimitExceeded("pending_bytes_max", limit=self._config.pending_bytes_max, actual=size_bytes)

    def _must_wait(self, size_bytes: int) -> bool:
        return bool(self._waiting or self._granted) or not self._has_room(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        config = self._config
        return (
            self.pending_items < config.pending_items_max
            and self.pending_bytes + size_bytes <= config.pending_bytes_max
        )

    def _reserve(self, size_bytes: int) -> None:
        self.pending_items += 1
        self.pending_bytes += size_bytes

    def _release(self, items: int, size_bytes: int) -> None:
        self.pending_items -= items
        self.pending_bytes -= size_bytes
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if not self._has_room(size):
                    if not self._granted:  # else the open batch is about to get their items too
                        self._press()
                    return
                self._reserve(size)
                self._granted += 1
                turn.set_result(None)
            self._waiting.popleft()

    async def _wait_for_room(self, size_bytes: int) -> None:
        self.stats.waits += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        if not self._granted:
            self._press()
        try:
            await turn
        except asyncio.CancelledError:
            has_place = turn.done() and not turn.cancelled() and turn.exception() is None
            self._granted -= has_place
            # Without a place too: those behind a large item that gave up may fit now.
            self._release(1 if has_place else 0, size_bytes if has_place else 0)
            raise
        self._granted -= 1
        if self._closed:
            self._release(1, size_bytes)
            raise _closed_while_waiting()

    def _accept(
        self, item: Item, size_bytes: int, side_bytes: int, ticket: Ticket[Result] | Tell[Result]
    ) -> None:
        config, now = self._config, self._clock.monotonic()
        age_s = config.age_ms / 1000
        if self._open.items and now >= self._open.opened_at + age_s + _TIMER_GRACE_S:
            self._close_when_slot_is_free("age")
        if side_bytes and 0 < config.batch_side_bytes < self._open.side_bytes + side_bytes:
            self._close_open("side bytes")
        batch = self._open
        if not batch.items:
            batch.opened_at = now
        batch.items.append(item)
        batch.tickets.append(ticket)
        batch.size_bytes += size_bytes
        batch.side_bytes += side_bytes
        if batch.size_bytes >= config.batch_bytes:
            self._close_open("bytes")
        elif len(batch.items) >= config.batch_items:
            self._close_open("items")
        elif len(batch.items) == 1:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(age_s, self._close_when_slot_is_free, "age")

    # -- closing and uploading

    def _press(self) -> None:
        if self._open.items:
            self._close_when_slot_is_free("pressure")

    def _close_when_slot_is_free(self, reason: str) -> None:
        if self._uploading < self._config.uploads_max and not self._to_upload:
            self._close_open(reason)
        else:
            self._due = reason

    def _close_open(self, reason: str) -> None:
        batch = self._open
        if not batch.items:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._open, self._due = _Batch([], [], 0), None
        self.stats.closed[reason] += 1
        self._unanswered.append(batch)
        self._to_upload.append(batch)
        self._line.append(batch)
        self._start_uploads()

    def _start_uploads(self) -> None:
        while self._uploading < self._config.uploads_max:
            if not self._to_upload:
                if self._due is None:
                    return
                self._close_open(self._due)
                return
            self._uploading += 1
            self._start(self._upload(self._to_upload.popleft()))

    async def _upload(self, batch: _Batch[Item, Uploaded, Result]) -> None:
        """Upload it, and after it what waits for this slot: a task per batch would cost more than a turn."""
        try:
            while True:
                try:
                    batch.uploaded = await self._upload_batch(batch.items)
                except Exception as error:
                    batch.error = error
                batch.ready = True
                self._start_committing()
                if self._to_upload:
                    # Uploads that never have to wait would keep everybody else waiting.
                    await asyncio.sleep(0)
                if not self._to_upload:
                    break
                batch = self._to_upload.popleft()
        except BaseException:
            self._abort()
            raise
        self._uploading -= 1
        self._start_uploads()

    # -- committing

    def _start_committing(self) -> None:
        if not self._committing and self._line and self._line[0].ready:
            self._committing = True
            self._start(self._commit_ready())

    async def _commit_ready(self) -> None:
        try:
            while group := self._take_ready():
                await self._commit(group)
        finally:
            self._committing = False

    def _take_ready(self) -> list[_Batch[Item, Uploaded, Result]]:
        """The ready batches at the head of the line; those that failed to upload are answered on the way."""
        group: list[_Batch[Item, Uploaded, Result]] = []
        while self._line and self._line[0].ready and len(group) < self._config.commit_batches_max:
            batch = self._line.popleft()
            if batch.error is None:
                group.append(batch)
            else:
                self._answer(batch, batch.error)
        return group

    async def _commit(self, group: list[_Batch[Item, Uploaded, Result]]) -> None:
        self.stats.commits += 1
        # `uploaded` is set wherever `error` is not; None may be a legitimate value of its type.
        uploads: list[Uploaded] = [batch.uploaded for batch in group]  # type: ignore[misc]
        outcomes: Sequence[Outcome[Result]]
        try:
            outcomes = await self._commit_batches(uploads)
            if len(outcomes) != len(group):
                raise OutcomeUnknown("commit", reason=f"{len(outcomes)} answers for {len(group)} batches")
        except Exception as error:
            outcomes = [error] * len(group)
        except BaseException:
            for batch in group:
                self._answer(batch, OutcomeUnknown("commit", reason="it was cancelled"))
            self._abort()
            raise
        for batch, outcome in zip(group, outcomes, strict=True):
            self._answer(batch, outcome)

    def _answer(self, batch: _Batch[Item, Uploaded, Result], outcome: Outcome[Result]) -> None:
        if not isinstance(outcome, Exception) and len(outcome) != len(batch.items):
            outcome = OutcomeUnknown("commit", reason=f"{len(outcome)} answers for {len(batch.items)} items")
        if isinstance(outcome, Exception):
            self.stats.batches_failed += 1
            answers: Sequence[Result | Exception] = [outcome] * len(batch.items)
        else:
            self.stats.batches_committed += 1
            answers = outcome
        for ticket, answer in zip(batch.tickets, answers, strict=True):
            if isinstance(answer, Exception):
                self.stats.items_failed += 1
                self._failure = self._failure or answer
            if isinstance(ticket, asyncio.Future):
                _settle(ticket, answer)
            else:
                _tell(ticket, answer)
        self._release(len(batch.items), batch.size_bytes)
        self._set_answered(batch)

    def _set_answered(self, batch: _Batch[Item, Uploaded, Result]) -> None:
        assert not batch.answered, "a batch was answered twice"
        batch.answered = True
        while self._unanswered and self._unanswered[0].answered:
            last = self._unanswered.popleft()
            while self._flushes and self._flushes[0][0] is last:
                _, flushed = self._flushes.popleft()
                if not flushed.done():
                    flushed.set_result(None)

    # -- flushing and closing

    async def flush(self) -> None:
        """Close the open batch and wait until everything accepted before this call is answered.

        Raises the first failure since the last flush, also one whose ticket nobody looked at.
        """
        self._close_open("flush")
        if self._unanswered:
            flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushes.append((self._unanswered[-1], flushed))
            await flushed
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Refuse new items, flush, and raise what a flush would raise. Closing twice is fine."""
        self._closed = True
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(_closed_while_waiting())
        await self.flush()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _abort(self) -> None:
        """A task of ours was cancelled: what was not handed to a commit is certainly not done."""
        self._closed = self.aborted = True
        if self._open.items:
            batch, self._open, self._due = self._open, _Batch([], [], 0), None
            self._unanswered.append(batch)
            self._line.append(batch)
        if self._timer is not None:
            self._timer.cancel()
        self._to_upload.clear()
        while self._line:
            batch = self._line.popleft()
            if self._committing and batch.ready and batch.error is None:
                # The engine knows of it, and a commit that takes along what is ready may carry it.
                self._answer(batch, OutcomeUnknown("commit", reason="it was cancelled"))
            else:
                self._answer(batch, Closed("the batcher was cancelled before the commit"))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _settle(ticket: Ticket[Result], answer: Result | Exception) -> None:
    if ticket.done():
        return
    if isinstance(answer, Exception):
        ticket.set_exception(answer)
        ticket.exception()  # marks it as seen: flush and close report it to whoever dropped the ticket
    else:
        ticket.set_result(answer)


def _tell(tell: Tell[Result], answer: Result | Exception) -> None:
    try:
        tell(answer)
    except Exception:  # The others of its batch are answered all the same.
        _log.exception("an answer could not be told")


def _closed_while_waiting() -> Closed:
    return Closed("the batcher was closed while the caller waited for room")
