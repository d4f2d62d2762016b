"""An actor of the simulated world: a process that can crash, come back, stand still and have a wrong clock.

An actor is a name with a history of lives. What belongs to the machine stays across lives: its clock, its
source of ids, its random streams, its wires. What belongs to the process is gone with it: tasks, memory,
sessions. A crash is a power cut between two awaits: no `except` and no `finally` of the dead process runs
while the world goes on. An actor whose function returns has ended as well, like a process whose main function
returned: what it left running is gone, and its sessions run out.

Python ends the left-over coroutines when the world is closed; by then nothing they do reaches the world, its
history or its trace.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from forebay.kit.ids import IdSource
from forebay.testing.sim_coordinator import SimCoordinator
from forebay.testing.sim_loop import SimLoop, SimulationError
from forebay.testing.sim_process import CURRENT, Process
from forebay.testing.sim_store import SimStore

if TYPE_CHECKING:
    from forebay.testing.world import World

__all__ = ["Actor", "ActorCrashed", "SimClock"]

P = ParamSpec("P")

EPOCH_MS = 1_750_000_000_000
"""What clocks without skew show when a world begins, in milliseconds since the Unix epoch."""


class ActorCrashed(SimulationError):
    """The actor one waits for crashed and will not come back by itself."""


class SimClock:
    """A clock on virtual time. `now_ms` may be skewed, drift and step; `monotonic` may only drift."""

    def __init__(self, loop: SimLoop, *, skew_ms: int = 0, drift_ppm: float = 0.0) -> None:
        self.skew_ms = skew_ms
        """How far `now_ms` is ahead, in milliseconds."""
        self._rate = 1.0 + drift_ppm / 1e6
        self._loop = loop

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, as this machine believes."""
        return EPOCH_MS + self.skew_ms + int(self._loop.time() * self._rate * 1000)

    def monotonic(self) -> float:
        """Seconds since the world began, as this machine counts them."""
        return self._loop.time() * self._rate

    def step(self, ms: int) -> None:
        """Let the wall clock jump, forward or back."""
        self.skew_ms += ms

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds / self._rate)


class Actor:
    """See the module. Made by `World.spawn`, and handed to the function it runs."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.lives = 0
        """How often it was started."""
        self.crashes = 0
        """How often it crashed."""
        self.process = Process(name, world.randomness("order", name))
        self._dead: list[Process] = []
        self.task: asyncio.Task[Any] | None = None
        self._function: Callable[..., Coroutine[Any, Any, Any]] | None = None
        self._arguments: tuple[Any, ...] = ()
        self._waiters: list[asyncio.Future[None]] = []
        self._crash_rate = 0.0
        self._crash_random = world.randomness("crash", name)
        self._crashes_max = 0
        self._restart_after_s: float | None = None
        self._restarting = False
        self._crashed = False
        self.failure_seen = False
        """Whether somebody joined it and so learned of its failure."""

    # What its machine has.

    @property
    def clock(self) -> SimClock:
        """Its own clock."""
        return self.world.clock(self)

    @property
    def ids(self) -> IdSource:
        """Its own source of ids; it does not repeat itself after a restart."""
        return self.world.ids(self)

    @property
    def random(self) -> random.Random:
        """Its own random stream."""
        return self.world.randomness("actor", self.name)

    @property
    def store(self) -> SimStore:
        """Its view of the bucket."""
        return self.world.store(self)

    @property
    def coordinator(self) -> SimCoordinator:
        """Its view of the coordinator."""
        return self.world.coordinator(self)

    # Its life.

    @property
    def steps(self) -> int:
        """Steps of its present or last life: callbacks run, which is at least one per await that waited."""
        return self.process.steps

    @property
    def crashed(self) -> bool:
        """Whether it crashed and was not started again."""
        return self._crashed

    @property
    def done(self) -> bool:
        """Whether it finished, well or not, or crashed for good."""
        return (self.crashed and not self._restarting) or (self.task is not None and self.task.done())

    def start(
        self,
        function: Callable[Concatenate[Actor, P], Coroutine[Any, Any, Any]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        """Begin a life running `function(actor, *arguments)`. `World.spawn` calls this."""
        assert not named, "arguments of actors are positional"
        self._function, self._arguments = function, arguments
        self._begin()

    def _begin(self) -> None:
        assert self._function is not None
        world = self.world
        self._restarting = self._crashed = False
        if self.lives:
            self._dead.append(self.process)
            self.process = Process(self.name, world.randomness("order", self.name))
        self.lives += 1
        process = self.process
        process.on_crash = self.crash
        process.crash_random = self._crash_random.random
        process.crash_rate = self._crash_rate if self.crashes < self._crashes_max else 0.0
        context = world.context.copy()
        context.run(CURRENT.set, process)
        coroutine = context.run(self._function, self, *self._arguments)
        self.task = world.loop.create_task(coroutine, context=context)
        self.task.add_done_callback(self._finished, context=world.context)
        world.note(self.name, "spawn", str(self.lives))

    def _finished(self, task: asyncio.Task[Any]) -> None:
        if task is self.task and not self._crashed:
            self.process.alive = False
            self.process.held.clear()
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def crash(self, in_flight: bool | None = None) -> None:
        """Cut the power now. Requests in flight arrive (True), do not (False), or a coin decides (None)."""
        process = self.process
        if not process.alive or self.task is None or self.task.done():
            return
        process.alive = False
        self._crashed = True
        if in_flight is not None:
            process.in_flight = in_flight
        process.held.clear()
        self.crashes += 1
        self.world.note(self.name, "crash", str(process.steps))
        if self._restart_after_s is not None and self.crashes <= self._crashes_max:
            self._restarting = True
            wait = self._restart_after_s * (0.5 + self._crash_random.random())
            self.world.loop.call_later(wait, self._come_back, process, context=self.world.context)
        else:
            self._wake()

    def _come_back(self, process: Process) -> None:
        if self.process is process and self._restarting:
            self._begin()

    def crash_at(self, step: int, in_flight: bool | None = None) -> None:
        """Crash as soon as `step` steps of the present life have run; 0 before the first."""
        if step < self.process.steps:
            raise ValueError(f"{self.name} has already run {self.process.steps} steps")
        self.process.crash_after_steps = step
        self.process.in_flight = in_flight

    def crash_randomly(
        self, rate: float, *, restart_after_s: float | None = None, crashes_max: int = 1_000
    ) -> None:
        """Crash after any step with this probability, also in later lives.

        With `restart_after_s` it comes back by itself after about that long, running the same function again.
        """
        if not 0 <= rate <= 1:
            raise ValueError(f"{rate} is not a probability")
        self._crash_rate, self._crashes_max = rate, crashes_max
        self._restart_after_s = restart_after_s
        self.process.crash_rate = rate if self.crashes < crashes_max else 0.0

    def restart(
        self, function: Callable[..., Coroutine[Any, Any, Any]] | None = None, *arguments: Any
    ) -> None:
        """Begin a new life, with a new function or the same again. If it still runs, it crashes first."""
        self.crash()
        if function is not None:
            self._function, self._arguments = function, arguments
        self._begin()

    def pause(self, seconds: float | None = None) -> None:
        """Stand still, as under SIGSTOP, for some virtual seconds or until `resume`."""
        process = self.process
        process.paused = True
        self.world.note(self.name, "pause", str(seconds))
        if seconds is not None:
            self.world.loop.call_later(seconds, self._resume, process, context=self.world.context)

    def resume(self) -> None:
        """Go on."""
        self._resume(self.process)

    def _resume(self, process: Process) -> None:
        if process.paused and process.alive:
            self.world.loop.resume(process)
            self.world.note(self.name, "resume", "")

    async def settled(self) -> None:
        """Wait until it is done, however it ended."""
        while not self.done:
            waiter: asyncio.Future[None] = self.world.loop.create_future()
            self._waiters.append(waiter)
            await waiter

    async def join(self) -> Any:
        """Wait until it is done; its result, its exception, or `ActorCrashed`."""
        await self.settled()
        self.failure_seen = True
        assert self.task is not None
        if self.crashed:
            raise ActorCrashed(f"{self.name} crashed after {self.steps} steps")
        return self.task.result()

    @property
    def failure(self) -> BaseException | None:
        """The exception it ended with, if it did."""
        if self.task is None or not self.task.done() or self.task.cancelled():
            return None
        return self.task.exception()

    def __repr__(self) -> str:
        state = "crashed" if self.crashed else "done" if self.done else "running"
        return f"<Actor {self.name}, {state}, life {self.lives}, {self.steps} steps>"


def world_context(process: Process | None = None) -> Context:
    """A context in which callbacks belong to `process`, or to the world."""
    context = copy_context()
    context.run(CURRENT.set, process)
    return context
