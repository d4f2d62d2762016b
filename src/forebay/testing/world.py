"""A whole deployment in one thread: actors, clocks, a bucket and a coordinator, all from one seed.

    async def writer(me: Actor) -> None:
        await me.store.put("greeting", b"hello")

    async def main(world: World) -> None:
        world.spawn("writer", writer)
        await world.join()

    World(seed=7).run(main)

Every random decision comes from a stream named for its purpose and its actor, so that adding an actor, or
letting one ask for more random numbers, does not reshuffle what the others draw. The same seed gives the same
trace in every process, whatever the hash seed; `trace_hash` is the fingerprint to compare.

Code in a world must keep to three rules, which engines keep anyway: time, ids and randomness come from the
actor; nothing is decided by the order of a set or by `hash` of text; no threads and no sockets.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from forebay.coordination._memory import MemoryCoordinator
from forebay.coordination._memory_state import MemoryState
from forebay.kit.ids import IdSource
from forebay.storage import MemoryStore
from forebay.testing.actor import Actor, SimClock, world_context
from forebay.testing.faults import S3_LIKE, Faults, FaultSchedule, Latencies, Uniform
from forebay.testing.history import History
from forebay.testing.sim_coordinator import SimCoordinator
from forebay.testing.sim_link import TIMEOUT_S, Link
from forebay.testing.sim_loop import SECONDS_MAX, STEPS_MAX, SimLoop, SimulationError
from forebay.testing.sim_process import CURRENT, Process
from forebay.testing.sim_store import SimStore
from forebay.testing.trace import Event, Requests, TraceLine, digest

__all__ = ["MAIN", "World", "run_seeds", "seeds"]

T = TypeVar("T")
P = ParamSpec("P")

MAIN = "main"
"""Name of the actor that runs `main`: a spectator, never crashed, on wires without faults."""
SEEDS_DEFAULT = 200
"""Seeds per test unless FOREBAY_SEEDS says otherwise."""

_COORDINATOR_LIKE = Latencies(Uniform(1, 6))


class World:
    """See the module. One world is one run."""

    def __init__(
        self,
        seed: int = 0,
        *,
        faults: Faults | None = None,
        rotate_s: float = 0.0,
        quiet: float = 0.25,
        store_latencies: Latencies = S3_LIKE,
        coordinator_latencies: Latencies = _COORDINATOR_LIKE,
        coordinator_shards: int = 1,
        skew_ms: int = 0,
        drift_ppm: float = 0.0,
        timeout_s: float = TIMEOUT_S,
        steps_max: int = STEPS_MAX,
        seconds_max: float = SECONDS_MAX,
    ) -> None:
        """A world from a seed.

        `faults`, `rotate_s`, `quiet`: as in `inject`, from the start. `skew_ms`, `drift_ppm`: bounds, either
        way, of each actor's clock error, drawn by actor. `timeout_s`: how long a call behind a partition
        waits. `steps_max`, `seconds_max`: bounds of the run in callbacks and in virtual seconds.
        """
        self.seed = seed
        self._streams: dict[tuple[str, str], random.Random] = {}
        self.loop = SimLoop(
            Process("world", self.randomness("order", "")), steps_max=steps_max, seconds_max=seconds_max
        )
        self.context = world_context()
        self.trace: list[TraceLine] = []
        """Every effect, crash and pause, in order; `events` gives the same with names."""
        self.requests = Requests()
        """Requests and bytes by actor and operation."""
        self.history = History(self.loop.time, self._recorder)
        """What actors asked and were told; for the checkers."""
        self._clock = SimClock(self.loop)
        self.bucket = MemoryStore(self._clock, IdSource(self._clock, self.randomness("ids", "")))
        """The bucket itself: no latency, no faults, not counted. For preparing and for looking."""
        self._state = MemoryState(self._clock, coordinator_shards)
        self._shards = coordinator_shards
        self.keys = MemoryCoordinator(state=self._state)
        """The coordinator's keys themselves: no latency, no faults, not counted."""
        self._latencies = {"store": store_latencies, "coordinator": coordinator_latencies}
        self._skew_ms, self._drift_ppm = skew_ms, drift_ppm
        self._timeout_s = timeout_s
        self.actors: dict[str, Actor] = {}
        """By name."""
        self._links: dict[tuple[str, str], Link] = {}
        self._clocks: dict[str, SimClock] = {}
        self._ids: dict[str, IdSource] = {}
        self._stores: dict[tuple[str, int], SimStore] = {}
        self._coordinators: dict[tuple[str, int], SimCoordinator] = {}
        self._schedules: dict[str, FaultSchedule] = {}
        self._ran = False
        self._main = Process(MAIN, self.randomness("order", MAIN))
        self.inject(faults or Faults(), rotate_s=rotate_s, quiet=quiet)

    # Streams, clocks, identity.

    def randomness(self, purpose: str, actor: str = "") -> random.Random:
        """The random stream of one purpose and actor."""
        stream = self._streams.get((purpose, actor))
        if stream is None:
            stream = self._streams[purpose, actor] = random.Random(f"{self.seed}/{purpose}/{actor}")
        return stream

    def clock(self, actor: Actor | str = MAIN) -> SimClock:
        """The clock of an actor."""
        name = _name(actor)
        if name not in self._clocks:
            draw = self.randomness("clock", name)
            skew_ms = draw.randint(-self._skew_ms, self._skew_ms)
            drift_ppm = draw.uniform(-self._drift_ppm, self._drift_ppm)
            if name == MAIN:
                skew_ms, drift_ppm = 0, 0.0
            self._clocks[name] = SimClock(self.loop, skew_ms=skew_ms, drift_ppm=drift_ppm)
        return self._clocks[name]

    def ids(self, actor: Actor | str = MAIN) -> IdSource:
        """The source of ids of an actor."""
        name = _name(actor)
        if name not in self._ids:
            self._ids[name] = IdSource(self.clock(name), self.randomness("ids", name))
        return self._ids[name]

    @property
    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self.loop.time()

    # Services.

    def store(self, actor: Actor | str = MAIN) -> SimStore:
        """An actor's view of the bucket; a new one for each of its lives, or if the last was closed."""
        life = self._life(actor)
        view = self._stores.get(life)
        if view is None or view.closed:
            view = self._stores[life] = SimStore(self.bucket, self.link(actor, "store"))
        return view

    def coordinator(self, actor: Actor | str = MAIN) -> SimCoordinator:
        """An actor's view of the coordinator; a new one for each of its lives, or if the last was closed."""
        life = self._life(actor)
        view = self._coordinators.get(life)
        if view is None or view.closed:
            link = self.link(actor, "coordinator")
            view = SimCoordinator(self._state, link, self.clock(actor), self._shards)
            self._coordinators[life] = view
        return view

    def _life(self, actor: Actor | str) -> tuple[str, int]:
        name = _name(actor)
        known = self.actors.get(name)
        return name, known.lives if known else 0

    def link(self, actor: Actor | str, service: str) -> Link:
        """The wire between an actor and a service (`store` or `coordinator`)."""
        name = _name(actor)
        link = self._links.get((name, service))
        if link is None:
            link = self._links[name, service] = Link(
                self.loop,
                name,
                service,
                randomness=self.randomness(service, name),
                latencies=self._latencies[service],
                trace=self.trace,
                requests=self.requests,
                context=self.context,
                timeout_s=self._timeout_s,
            )
            if name != MAIN:
                link.schedule = self._schedules[service]
        return link

    # Faults.

    def inject(self, faults: Faults, *, on: str = "both", rotate_s: float = 0.0, quiet: float = 0.25) -> None:
        """From now on let requests of all actors fail, `on` the `store`, the `coordinator` or both.

        With `rotate_s`, a random subset of the kinds holds for so many virtual seconds at a time, and none at
        all in a share `quiet` of the time.
        """
        for service in _services(on):
            seed = f"{self.seed}/faults/{service}"
            schedule = FaultSchedule(faults, seed=seed, rotate_s=rotate_s, quiet=quiet)
            self._schedules[service] = schedule
            for (name, kind), link in self._links.items():
                if kind == service and name != MAIN:
                    link.schedule = schedule

    def fail_next(
        self, actor: Actor | str, operation: str, kind: str, *, on: str = "store", times: int = 1
    ) -> None:
        """Let the next requests of one actor and operation meet one kind of fault for certain."""
        Faults().only(kind)
        self.link(actor, on).force(operation, kind, times)

    def partition(
        self,
        actor: Actor | str,
        on: str = "both",
        *,
        replies_only: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Cut an actor off from a service or both, for some seconds or until `heal`.

        With `replies_only` its requests arrive, but it never learns what became of them.
        """
        for service in _services(on):
            link = self.link(actor, service)
            link.cut = "replies" if replies_only else "both"
            self.note(link.actor, "partition", service)
            if seconds is not None:
                self.loop.call_later(seconds, self._mend, link, context=self.context)

    def _mend(self, link: Link) -> None:
        link.cut = ""
        self.note(link.actor, "mended", link.service)

    def heal(self) -> None:
        """End all faults, partitions, pauses and random crashes. What is crashed stays crashed."""
        self.inject(Faults())
        for link in self._links.values():
            if link.cut:
                self._mend(link)
        for actor in self.actors.values():
            actor.crash_randomly(0.0)
            actor.resume()

    # Actors.

    def spawn(
        self,
        name: str,
        function: Callable[Concatenate[Actor, P], Coroutine[Any, Any, Any]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Actor:
        """Start an actor that runs `function(actor, *arguments)`."""
        if name in self.actors or name in (MAIN, ""):
            raise ValueError(f"there is an actor {name!r} already; restart it, or take another name")
        actor = self.actors[name] = Actor(self, name)
        actor.start(function, *arguments, **named)
        return actor

    def crash_at(self, actor: Actor, *, step: int, in_flight: bool | None = None) -> None:
        """See `Actor.crash_at`."""
        actor.crash_at(step, in_flight)

    def crash_randomly(
        self, actor: Actor, rate: float, *, restart_after_s: float | None = None, crashes_max: int = 1_000
    ) -> None:
        """See `Actor.crash_randomly`."""
        actor.crash_randomly(rate, restart_after_s=restart_after_s, crashes_max=crashes_max)

    async def join(self, *actors: Actor) -> None:
        """Wait until these actors, or all, are done; a crash counts as done, a failure is raised."""
        for actor in actors or tuple(self.actors.values()):
            await actor.settled()
            actor.failure_seen = True
            if actor.failure is not None:
                raise actor.failure

    def note(self, actor: str, what: str, subject: str, outcome: str = "") -> None:
        """Put a line of your own into the trace."""
        self.trace.append((self.loop.time(), actor, what, subject, outcome))

    @property
    def events(self) -> list[Event]:
        """The trace with names for its columns."""
        return [Event(*line) for line in self.trace]

    def trace_hash(self) -> str:
        """The fingerprint of what happened so far."""
        steps = [(actor.name, actor.lives, actor.steps) for actor in self.actors.values()]
        return digest([*self.trace, *steps])

    def _recorder(self) -> str | None:
        process = CURRENT.get()
        if self.loop.is_closed() or (process is not None and not process.alive):
            return None
        return process.name if process is not None else MAIN

    # The run.

    def run(self, main: Callable[[World], Coroutine[Any, Any, T]]) -> T:
        """Run `main(world)` to its end and return its result; then the world is over.

        Raises what `main` raised, the failure of an actor that nobody joined, an exception that nobody
        handled, or a `SimulationError`; each with the seed in a note.
        """
        if self._ran:
            raise SimulationError("a world runs once; make a new one from the same seed")
        if asyncio._get_running_loop() is not None:
            raise SimulationError("a world cannot run inside a running loop; call it from a plain function")
        self._ran = True
        try:
            return self._run(main)
        except BaseException as error:
            error.add_note(f"in the simulated world of seed {self.seed}, at {self.now:.3f} s")
            raise
        finally:
            self.loop.close()

    def _run(self, main: Callable[[World], Coroutine[Any, Any, T]]) -> T:
        context = world_context(self._main)
        task = self.loop.create_task(context.run(main, self), name=MAIN, context=context)
        try:
            result = self.loop.run_until_complete(task)
        except SimulationError as error:
            raise error from self._failure()
        failure = self._failure()
        if failure is not None:
            raise failure
        return result

    def _failure(self) -> BaseException | None:
        """What went wrong without being told to anybody."""
        actors = self.actors.values()
        unseen = [actor.failure for actor in actors if actor.failure is not None and not actor.failure_seen]
        lives = [self._main, *(actor.process for actor in actors if not actor.crashed)]
        silent = [task.exception() for life in lives for task in life.tasks if task.failed_unseen]
        found = [*self.loop.violations, *unseen, *silent, *self.loop.unhandled]
        return found[0] if found else None

    def close(self) -> None:
        """Let go of a world that was never run. `run` does it by itself."""
        self.loop.close()


def seeds(default: int = SEEDS_DEFAULT) -> range:
    """The seeds a test tries: as many as the environment variable FOREBAY_SEEDS says, or `default`."""
    return range(int(os.environ.get("FOREBAY_SEEDS", default)))


def run_seeds(scenario: Callable[[int], T], chosen: Iterable[int] | None = None) -> Iterator[T]:
    """`scenario(seed)` for every seed; an exception carries the seed in a note."""
    for seed in seeds() if chosen is None else chosen:
        try:
            result = scenario(seed)
        except Exception as error:
            error.add_note(f"the scenario failed with seed {seed}")
            raise
        yield result


def _name(actor: Actor | str) -> str:
    return actor if isinstance(actor, str) else actor.name


def _services(on: str) -> tuple[str, ...]:
    if on not in ("both", "store", "coordinator"):
        raise ValueError(f"on={on!r} is not store, coordinator or both")
    return ("store", "coordinator") if on == "both" else (on,)
