"""A seeded event loop on virtual time: the scheduler of the simulated world.

It stands on asyncio's own base loop, so tasks, futures, timeouts, queues and task groups are the real ones.
What it replaces is the outside: there is no selector, no self-pipe and no thread. When nothing is ready, time
jumps to the next timer. A run is therefore as fast as the code in it, and the same seed gives the same run.

**What order is free.** asyncio promises that `call_soon` callbacks run first in, first out, and its loop
keeps that promise for task steps too; real networks and real machines do not. The loop takes everything that
is ready as one batch, as asyncio does, and orders the batch like this:

* Steps of tasks may run in any order. One task has at most one step waiting, so its own order is untouched.
* Plain callbacks of one process (done callbacks, `call_soon`, timers) keep their order among themselves, and
  may be mixed in any way with steps and with callbacks of other processes.
* What becomes ready while a batch runs belongs to the next batch: `sleep(0)` lets every ready task run once.

Each process draws its places from its own random stream, one draw per callback, so that adding a process
leaves the relative order of the others as it was.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from asyncio import events
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Executor
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

from forebay.testing.sim_process import CURRENT, Process, SimTask, end

__all__ = [
    "Deadlock",
    "Forbidden",
    "SimLoop",
    "SimulationError",
    "StepLimit",
    "TimeLimit",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Handle = events.Handle

STEPS_MAX = 5_000_000
"""Callbacks that one run may take unless told otherwise."""
SECONDS_MAX = 86_400.0
"""Virtual seconds that one run may take unless told otherwise."""
_COLLECT_EVERY_STEPS = 200_000
"""Steps between two garbage collections. The collector's own timing would differ from run to run."""
_CANCELLED_TIMERS_MAX = 1_000
"""Cancelled timers that may lie in the heap before it is rebuilt without them."""
_PENDING_SHOWN_MAX = 12


class SimulationError(RuntimeError):
    """The simulation itself cannot go on, or the code in it left the simulated world."""


class Deadlock(SimulationError):
    """Nothing is ready and no timer is set, but the main coroutine is not done."""


class StepLimit(SimulationError):
    """The run took more steps than allowed: mostly a loop that never lets time pass."""


class TimeLimit(SimulationError):
    """The run took more virtual time than allowed: mostly something that is retried for ever."""


class Forbidden(SimulationError):
    """Code in the simulation asked for a thread, a socket, a process or a signal."""


class SimLoop(asyncio.BaseEventLoop):
    """See the module. `world` is the process of everything that belongs to no actor."""

    _closed: bool

    def __init__(
        self, world: Process, *, steps_max: int = STEPS_MAX, seconds_max: float = SECONDS_MAX
    ) -> None:
        super().__init__()
        self._world = world
        self._now = 0.0
        self._queue: list[Any] = []
        self._timers: list[tuple[float, int, Any]] = []  # TimerHandle, or place and action
        self._timers_set = 0
        self._timers_cancelled = 0
        self._tasks_made = 0
        self._tasks_named: dict[str, int] = {}
        self._thread = threading.get_ident()
        self._steps_max = steps_max
        self._seconds_max = seconds_max
        self._collect_at = _COLLECT_EVERY_STEPS
        self._look_at = 0
        self._batches = 0
        self.steps = 0
        """Callbacks run so far, of all processes."""
        self.violations: list[Forbidden] = []
        """Calls that have no place in a simulation, kept in case the code under test swallowed the error."""
        self.unhandled: list[BaseException] = []
        """Exceptions that nobody looked at."""

    # Time and callbacks.

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> _Handle:
        """Run `callback` with the next batch."""
        handle = _Handle(callback, args, self, context)
        if not self._closed:
            self._queue.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> _Handle:
        """`call_soon`; there is only one thread."""
        if threading.get_ident() != self._thread:
            raise self._forbid("another thread called into the simulation")
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> events.TimerHandle:
        """Run `callback` at a virtual time."""
        timer = events.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]  # what cancel() looks at
        self._timers_set += 1
        if not self._closed:
            heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def act_at(self, when: float, place: float, action: Callable[[], None]) -> None:
        """Let the world itself do something at a virtual time: no handle, no context, no way back.

        `place`, from 0 to 1, is where it comes among what is ready at the same moment.
        """
        self._timers_set += 1
        heappush(self._timers, (when, self._timers_set, (place, action)))

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> events.TimerHandle:
        """Run `callback` after `delay` virtual seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        self._timers_cancelled += 1
        if self._timers_cancelled > _CANCELLED_TIMERS_MAX:
            self._timers = [timer for timer in self._timers if not _is_cancelled(timer[2])]
            heapify(self._timers)
            self._timers_cancelled = 0

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        """A task, named for its process unless the caller names it: messages are the same in every run."""
        process = (context.get(CURRENT) if context is not None else CURRENT.get()) or self._world
        if name is None:
            number = self._tasks_named[process.name] = self._tasks_named.get(process.name, 0) + 1
            name = f"{process.name}/{number}"
        self._tasks_made += 1
        task = SimTask(self._tasks_made, process, coro, loop=self, name=str(name), context=context, **options)
        process.keep(task)
        return task

    # The run.

    def run_forever(self) -> None:
        """Run until stopped, with the garbage collector on a schedule of steps."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            super().run_forever()
        finally:
            if collecting:
                gc.enable()

    def _run_once(self) -> None:
        queue = self._queue
        if not queue:
            self._jump()
        if self._timers and self._timers[0][0] <= self._now:
            self._take_due(queue)
        self._queue = []
        if len(queue) == 1:
            [entry] = queue
            if type(entry) is tuple:
                entry[1]()
            else:
                process = entry._context.get(CURRENT) or self._world
                process.place()
                self._step(entry, process)
        elif queue:
            for _, _, entry, owner in self._shuffled(queue):
                if owner is None:
                    entry[1]()
                else:
                    self._step(entry, owner)
        self.steps += len(queue)
        if self.steps >= self._look_at:
            self._look_around()

    def _take_due(self, queue: list[Any]) -> None:
        timers, now = self._timers, self._now
        while timers and timers[0][0] <= now:
            due = heappop(timers)[2]
            if type(due) is not tuple:
                due._scheduled = False
                if due._cancelled:
                    self._timers_cancelled -= 1
                    continue
            queue.append(due)

    def _look_around(self) -> None:
        """What need not be done after every batch."""
        if self.steps > self._steps_max:
            raise StepLimit(
                f"over {self._steps_max:,} steps at {self._now:.3f} s of virtual time; {self._pending()}"
            )
        if self.steps >= self._collect_at:
            self._collect_at += _COLLECT_EVERY_STEPS
            gc.collect()
        self._look_at = min(self._collect_at, self._steps_max + 1)

    def _shuffled(self, batch: list[Any]) -> list[tuple[float, int, Any, Process | None]]:
        self._batches += 1
        placed: list[tuple[float, int, Any, Process | None]] = []
        for index, entry in enumerate(batch):
            if type(entry) is tuple:
                placed.append((entry[0], index, entry, None))
                continue
            process: Process = entry._context.get(CURRENT) or self._world
            if isinstance(getattr(entry._callback, "__self__", None), asyncio.Task):
                place = process.place()
            else:
                place = process.place_in_order(self._batches)
            placed.append((place, index, entry, process))
        placed.sort()
        return placed

    def _step(self, handle: Any, process: Process) -> None:
        if handle._cancelled or not process.alive:
            return
        if process.paused:
            process.held.append(handle)
            return
        if process.crash_after_steps == process.steps:
            self._crash(process)
            return
        process.steps += 1
        handle._run()
        if process.crash_after_steps == process.steps or (
            process.crash_rate and process.crash_random() < process.crash_rate
        ):
            self._crash(process)

    def _crash(self, process: Process) -> None:
        if process.alive and process.on_crash is not None:
            process.on_crash()

    def resume(self, process: Process) -> None:
        """Let a paused process go on; what it missed is ready now."""
        process.paused = False
        self._queue.extend(process.held)
        process.held.clear()

    def _jump(self) -> None:
        timers = self._timers
        while timers and _is_cancelled(timers[0][2]):
            heappop(timers)
            self._timers_cancelled -= 1
        if not timers:
            raise Deadlock(f"nothing can happen any more at {self._now:.3f} s; {self._pending()}")
        when = timers[0][0]
        if when > self._seconds_max:
            raise TimeLimit(f"over {self._seconds_max:,.0f} s of virtual time; {self._pending()}")
        self._now = max(self._now, when)

    # What is left, and the end.

    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not done, by name."""
        return sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())

    def _pending(self) -> str:
        tasks = [task for task in self.tasks() if not isinstance(task, SimTask) or task.process.alive]
        shown = "; ".join(_describe(task) for task in tasks[:_PENDING_SHOWN_MAX])
        more = f"; and {len(tasks) - _PENDING_SHOWN_MAX} more" if len(tasks) > _PENDING_SHOWN_MAX else ""
        return f"pending: {shown or 'no task'}{more}"

    def close(self) -> None:
        """Forget every callback, then end what is left without letting it act. Idempotent."""
        if self.is_closed():
            return
        left = self.tasks()
        self._queue.clear()
        self._timers.clear()
        super().close()
        for task in left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # as run_until_complete does
            end(task)

    def __del__(self) -> None:  # no descriptor is held, so nothing can leak
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody handled; the world raises it at the end."""
        error = context.get("exception")
        self.unhandled.append(error if error is not None else SimulationError(str(context.get("message"))))

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return

    # What has no place here.

    def _forbid(self, what: str) -> Forbidden:
        error = Forbidden(
            f"{what}; in a simulation everything is one thread on virtual time: hand in a simulated part"
        )
        self.violations.append(error)
        return error

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Refused: a thread ends determinism."""
        raise self._forbid(f"run_in_executor({getattr(func, '__qualname__', func)!r}) needs a thread")


_REAL_WORLD = [
    "add_reader",
    "add_writer",
    "remove_reader",
    "remove_writer",
    "add_signal_handler",
    "remove_signal_handler",
    "create_connection",
    "create_server",
    "create_datagram_endpoint",
    "create_unix_connection",
    "create_unix_server",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "getaddrinfo",
    "getnameinfo",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
]


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: SimLoop, *args: Any, **options: Any) -> Any:
        raise self._forbid(f"loop.{name} needs the real world")

    refuse.__name__ = name
    refuse.__doc__ = "Refused: it needs the real world."
    return refuse


for _name in _REAL_WORLD:
    setattr(SimLoop, _name, _refuse(_name))


def _is_cancelled(timer: Any) -> bool:
    return type(timer) is not tuple and timer._cancelled


def _describe(task: asyncio.Task[Any]) -> str:
    where = ""
    frames: Sequence[Any] = task.get_stack(limit=1)
    if frames:
        frame = frames[-1]
        where = f" in {frame.f_code.co_qualname} line {frame.f_lineno}"
    paused = ", paused," if isinstance(task, SimTask) and task.process.paused else ""
    return f"{task.get_name()}{paused}{where}"
