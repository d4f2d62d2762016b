"""One life of an actor, as the event loop sees it, and the tasks that belong to it.

Callbacks find their process through a context variable, which child tasks and timers inherit. The callbacks
of a dead process are dropped, those of a paused one are kept for later; no line of a dead process runs again,
not even its `finally` blocks.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import events
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["CURRENT", "Process", "SimTask", "end"]

T = TypeVar("T")
_Handle = events.Handle

_TASKS_KEPT = 64
"""Done tasks that a process may hold before it looks for them."""
_CLOSE_ATTEMPTS_MAX = 100
"""How often a left-over coroutine is told to end before it is kept as it is."""


class Process:
    """One life of an actor, as the loop sees it."""

    __slots__ = (
        "_batch",
        "_place",
        "_tasks_max",
        "alive",
        "crash_after_steps",
        "crash_random",
        "crash_rate",
        "held",
        "in_flight",
        "name",
        "on_crash",
        "paused",
        "place",
        "steps",
        "tasks",
    )

    def __init__(self, name: str, order: random.Random) -> None:
        self.name = name
        self.place: Callable[[], float] = order.random
        self.alive = True
        self.paused = False
        self.held: list[_Handle] = []
        self.steps = 0
        self.crash_after_steps = -1
        self.crash_rate = 0.0
        self.crash_random: Callable[[], float] = order.random
        self.in_flight: bool | None = None
        """Whether requests in flight at the crash arrive. None: a coin per request."""
        self.on_crash: Callable[[], None] | None = None
        self.tasks: list[SimTask[Any]] = []
        """Its tasks. Kept, because a task that nobody holds ends as soon as its callbacks are dropped."""
        self._tasks_max = _TASKS_KEPT
        self._batch = -1
        self._place = 0.0

    def keep(self, task: SimTask[Any]) -> None:
        """Hold a task until it is done, or until the world ends."""
        self.tasks.append(task)
        if len(self.tasks) > self._tasks_max:
            self.tasks = [kept for kept in self.tasks if not kept.done()]
            self._tasks_max = _TASKS_KEPT + 2 * len(self.tasks)

    def place_in_order(self, batch: int) -> float:
        """A place after all that this method gave for the same batch."""
        after = self._place if self._batch == batch else 0.0
        self._batch = batch
        self._place = after + (1.0 - after) * self.place()
        return self._place


class SimTask(asyncio.Task[T]):
    """A task that knows its process, and whose hash is its number.

    asyncio keeps tasks in sets and walks through them, for instance to cancel what is left of a task group.
    With the hash of every object, its address, that order would differ from run to run.
    """

    def __init__(
        self,
        number: int,
        process: Process,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        **options: Any,
    ) -> None:
        self._number = number
        self.process = process
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    @property
    def failed_unseen(self) -> bool:
        """Whether it ended with an exception that nobody looked at."""
        return bool(self._log_traceback)


CURRENT: ContextVar[Process | None] = ContextVar("forebay_process", default=None)
"""The process that the running callback belongs to. None: the world itself."""


_UNENDING: list[object] = []


def end(task: asyncio.Task[Any]) -> None:
    """End the coroutine of a task behind the back of a closed loop. It may complain; nobody listens."""
    coroutine = task.get_coro()
    close = getattr(coroutine, "close", None)
    for _ in range(_CLOSE_ATTEMPTS_MAX):
        try:
            if close is not None:
                close()
        except RuntimeError:
            continue  # it awaited something in a `finally` block: end that too
        except BaseException:
            pass  # the dead may complain, nobody listens
        return
    _UNENDING.append(coroutine)
