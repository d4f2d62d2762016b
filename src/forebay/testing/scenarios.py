"""A small log as a scenario: many writers append to one object by compare-and-set.

It is the smallest thing that has all the problems of the big engines: races, lost replies, retries, crashes.
It shows how a simulated test is written, it measures the simulation, and its blind variant shows that the
checkers see what they should: a writer that repeats an append of unknown outcome without looking first
duplicates it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.errors import NotFound, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.conditions import ABSENT
from forebay.storage._api import When
from forebay.testing.actor import Actor
from forebay.testing.checkers import Problem, check
from forebay.testing.faults import Faults
from forebay.testing.world import World

__all__ = ["CasLog", "CasLogResult", "CasLogScenario", "run_cas_log"]

LOG_KEY = "log"
STREAM = "log"


class CasLog:
    """A log in one object: one line per append, replaced as a whole by compare-and-set.

    Each line is the id of its append, so that a writer that does not know whether it was done can look. The
    version after an own write is remembered: an append without a race costs one request.
    """

    def __init__(self, me: Actor, *, blind: bool = False, attempts_max: int = 200) -> None:
        self._store = me.store
        self._clock = me.clock
        self._random = me.random
        self._blind = blind
        self._attempts_max = attempts_max
        self._lines: list[str] = []
        self._version: When | None = None

    async def append(self, line: str) -> int:
        """Append one line and return its offset."""
        for attempt in range(self._attempts_max):
            try:
                if self._version is None:
                    await self._load()
                if line in self._lines and not self._blind:
                    return self._lines.index(line)
                return await self._try(line)
            except (PreconditionFailed, OutcomeUnknown, Unavailable) as error:
                if not (self._blind and isinstance(error, Unavailable)):
                    self._version = None
                await self._clock.sleep(self._random.random() * 0.02 * min(attempt + 1, 10))
        raise OutcomeUnknown("append", reason=f"no success in {self._attempts_max} attempts")

    async def read(self) -> list[str]:
        """Every line, as of now."""
        for attempt in range(self._attempts_max):
            try:
                await self._load()
                return list(self._lines)
            except Unavailable:
                await self._clock.sleep(self._random.random() * 0.02 * min(attempt + 1, 10))
        raise Unavailable(f"no success in {self._attempts_max} attempts", hint="heal the world")

    async def _try(self, line: str) -> int:
        assert self._version is not None
        lines = [*self._lines, line]
        self._version = await self._store.put(LOG_KEY, "\n".join(lines).encode(), self._version)
        self._lines = lines
        return len(lines) - 1

    async def _load(self) -> None:
        try:
            found = await self._store.get(LOG_KEY)
        except NotFound:
            self._lines, self._version = [], ABSENT
        else:
            self._lines, self._version = found.data.decode().split("\n"), found.version


@dataclass(frozen=True, slots=True)
class CasLogScenario:
    """How big, and how bad."""

    writers: int = 4
    """Actors that append."""
    appends: int = 20
    """Appends per writer."""
    read_every: int = 5
    """Appends between two reads of a writer. 0: none."""
    faults: Faults = field(default_factory=lambda: Faults.all(0.02))
    """Faults of the store."""
    rotate_s: float = 1.0
    """Virtual seconds between two choices of faults. 0: all of them all the time."""
    crash_rate: float = 0.002
    """Probability of a crash after each step. The writer comes back and goes on with its next append."""
    blind: bool = False
    """Writers repeat appends of unknown outcome without looking: the bug to be found."""


@dataclass(frozen=True, slots=True)
class CasLogResult:
    """What a run showed."""

    problems: list[Problem]
    trace_hash: str
    requests: int
    appended: int
    """Lines in the log at the end."""
    crashes: int
    seconds: float
    """Virtual."""


def run_cas_log(seed: int, scenario: CasLogScenario | None = None) -> CasLogResult:
    """Run the scenario from a seed and check its history."""
    plan = scenario or CasLogScenario()
    world = World(seed, faults=plan.faults, rotate_s=plan.rotate_s)
    return world.run(lambda world: _main(world, plan))


async def _main(world: World, plan: CasLogScenario) -> CasLogResult:
    next_append: dict[str, int] = {}
    for number in range(plan.writers):
        writer = world.spawn(f"writer-{number}", _write, plan, next_append)
        writer.crash_randomly(plan.crash_rate, restart_after_s=0.5, crashes_max=5)
    await world.join()
    world.heal()
    await world.clock().sleep(plan.faults.late_ms_max / 1000 + 60)
    try:
        lines = (await world.bucket.get(LOG_KEY)).data.decode().split("\n")
    except NotFound:
        lines = []
    world.history.final(STREAM, lines)
    return CasLogResult(
        problems=check(world.history),
        trace_hash=world.trace_hash(),
        requests=world.requests.count(),
        appended=len(lines),
        crashes=sum(actor.crashes for actor in world.actors.values()),
        seconds=world.now,
    )


async def _write(me: Actor, plan: CasLogScenario, next_append: dict[str, int]) -> None:
    log = CasLog(me, blind=plan.blind)
    history = me.world.history
    while next_append.setdefault(me.name, 0) < plan.appends:
        number = next_append[me.name]
        next_append[me.name] += 1
        line = f"{me.name}/{number}"
        with history.append(STREAM, [line]) as call:
            call.ok(offset=await log.append(line))
        if plan.read_every and number % plan.read_every == 0:
            with history.read(STREAM) as call:
                lines = await log.read()
                call.ok(offset=0, values=lines, tail=len(lines))
