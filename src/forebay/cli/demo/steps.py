"""The demo as a list of steps. Each gets the stage, does one thing and tells what it did.

A step that belongs to a later part of Forebay is a function here and a line in `STEPS`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from forebay.cli.demo.journal import Counts, Journal
from forebay.cli.demo.records import BATCH_RECORDS
from forebay.errors import Unavailable
from forebay.kit.clock import Clock
from forebay.storage import ObjectStore

__all__ = ["STEPS", "Outcome", "Stage", "Step"]

WRITE_BATCHES = 20
RACE_WRITERS = 4
RACE_BATCHES = 3
"""Batches of each racing writer."""
KILLS = 4
KILL_AFTER_BATCHES = 2
"""Acknowledgements to wait for before a writer is killed; it is in the middle of the next append then."""
KILL_STEP_SECONDS = 0.003
"""Seconds by which each kill comes later into that append than the one before."""
CHILD_SECONDS_MAX = 60.0
"""Seconds a writer process has for its first acknowledgements."""

Advance = Callable[[], None]


@dataclass(slots=True)
class Stage:
    """What the steps share."""

    store: ObjectStore
    directory: Path
    prefix: str
    clock: Clock
    acknowledged: set[tuple[str, int]] = field(default_factory=set)
    """Writer and number of every batch somebody was told is durable."""

    def journal(self) -> Journal:
        """A fresh view that knows nothing yet, as a new process would have."""
        return Journal(self.store, self.prefix)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did."""

    records: int
    counts: Counts
    detail: str
    lost: int = 0
    """Acknowledged records that are not there, or not as they were written."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its name, how often it will call `advance`, and the work."""

    name: str
    advances: int
    work: Callable[[Stage, Advance], Awaitable[Outcome]]


async def write(stage: Stage, advance: Advance) -> Outcome:
    """One writer appends batches one after the other."""
    journal = stage.journal()
    for batch in range(WRITE_BATCHES):
        await journal.append("writer", batch)
        stage.acknowledged.add(("writer", batch))
        advance()
    return Outcome(WRITE_BATCHES * BATCH_RECORDS, journal.counts, "one writer")


async def race(stage: Stage, advance: Advance) -> Outcome:
    """Several writers append to the same head at once; compare-and-set lets one win at a time."""
    journals = [stage.journal() for _ in range(RACE_WRITERS)]

    async def one(writer: str, journal: Journal) -> None:
        await journal.read_head()
        for batch in range(RACE_BATCHES):
            await journal.append(writer, batch)
            stage.acknowledged.add((writer, batch))
            advance()

    await asyncio.gather(*[one(f"racer{number}", journal) for number, journal in enumerate(journals)])
    counts = _sum([journal.counts for journal in journals])
    detail = f"{counts.conflicts} conflicts solved"
    return Outcome(RACE_WRITERS * RACE_BATCHES * BATCH_RECORDS, counts, detail)


async def crash(stage: Stage, advance: Advance) -> Outcome:
    """Kill writer processes with SIGKILL in the middle of an append."""
    before = len(stage.acknowledged)
    for number in range(KILLS):
        writer = f"killed{number}"
        batches = await _kill_one(stage, writer, delay_s=number * KILL_STEP_SECONDS)
        stage.acknowledged |= {(writer, batch) for batch in batches}
        advance()
    records = (len(stage.acknowledged) - before) * BATCH_RECORDS
    return Outcome(records, Counts(), f"{KILLS} writers killed")


async def _kill_one(stage: Stage, writer: str, delay_s: float) -> list[int]:
    """Start a writer, kill it after some acknowledgements, and return all it gave until it died."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay.cli.demo.writer", str(stage.directory), stage.prefix, writer,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    lines: list[bytes] = []
    try:
        async with asyncio.timeout(CHILD_SECONDS_MAX):
            while len(lines) < KILL_AFTER_BATCHES:
                line = await child.stdout.readline()
                if not line:
                    raise Unavailable("a writer process ended by itself", hint="its own message is above")
                lines.append(line)
        await stage.clock.sleep(delay_s)
    finally:
        if child.returncode is None:
            child.kill()
        rest = await child.stdout.read()
        await child.wait()
    whole = [line for line in (b"".join(lines) + rest).splitlines(keepends=True) if line.endswith(b"\n")]
    return [int(line) for line in whole]


async def verify(stage: Stage, advance: Advance) -> Outcome:
    """Read everything back with a fresh eye and compare record by record with what was acknowledged."""
    journal = stage.journal()
    entries = await journal.read_head()
    damaged = 0
    for entry in entries:
        damaged += await journal.damaged_records(entry)
        advance()
    found = [(entry.writer, entry.batch) for entry in entries]
    missing = len(stage.acknowledged - set(found))
    doubled = len(found) - len(set(found))
    # Uploads that the killed never came to commit: nobody was told of them, so nobody misses them.
    unnamed = len(await journal.keys()) - len(entries) - 1
    detail = f"{unnamed} unfinished uploads"
    return Outcome(
        len(entries) * BATCH_RECORDS, journal.counts, detail, damaged + (missing + doubled) * BATCH_RECORDS
    )


def _sum(counts: list[Counts]) -> Counts:
    return Counts(
        sum(each.requests for each in counts),
        sum(each.conflicts for each in counts),
        sum(each.bytes for each in counts),
    )


STEPS = (
    Step("write", WRITE_BATCHES, write),
    Step("race", RACE_WRITERS * RACE_BATCHES, race),
    Step("kill -9", KILLS, crash),
    Step("verify", WRITE_BATCHES + RACE_WRITERS * RACE_BATCHES + KILLS * KILL_AFTER_BATCHES, verify),
)
