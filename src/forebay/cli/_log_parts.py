"""What the commands around the log share: an open deployment, and how times and settings are written."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.cli._deployment import COORDINATION_FILE, Deployment
from forebay.errors import UsageError
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource

if TYPE_CHECKING:
    from forebay.coordination import Coordinator
    from forebay.log import Catalog, Compactor, CompactorConfig, Fencing, LogReader, Vacuum, VacuumConfig
    from forebay.log._groups import Groups
    from forebay.log._trim import Trimmer
    from forebay.storage import ObjectStore

__all__ = ["LogParts", "check_there", "is_number", "open_log", "parse_time_ms"]

DIGITS_MAX = 20
"""Digits of a number on the command line: as many as any offset or time has, far below what `int` takes."""


@dataclass(frozen=True, slots=True)
class LogParts:
    """A store, a coordinator, and what everything on them is made with."""

    store: ObjectStore
    coordinator: Coordinator
    clock: SystemClock
    ids: IdSource
    randomness: random.Random

    def catalog(self) -> Catalog:
        """The topics."""
        from forebay.log import Catalog

        return Catalog(
            self.store, self.coordinator, clock=self.clock, ids=self.ids, randomness=self.randomness
        )

    def reader(self) -> LogReader:
        """A reader."""
        from forebay.log import LogReader

        return LogReader(self.store, self.coordinator, clock=self.clock, randomness=self.randomness)

    def trimmer(self) -> Trimmer:
        """Moves the start of partitions."""
        from forebay.log._trim import Trimmer

        return Trimmer(self.coordinator, clock=self.clock, randomness=self.randomness)

    def fencing(self) -> Fencing:
        """Shuts writers out of partitions."""
        from forebay.log import Fencing

        return Fencing(self.coordinator, self.catalog(), clock=self.clock, randomness=self.randomness)

    def compactor(self, config: CompactorConfig) -> Compactor:
        """A compactor."""
        from forebay.log import Compactor

        return Compactor(
            self.store,
            self.coordinator,
            clock=self.clock,
            ids=self.ids,
            randomness=self.randomness,
            config=config,
        )

    def vacuum(self, config: VacuumConfig) -> Vacuum:
        """A vacuum."""
        from forebay.log import Vacuum

        return Vacuum(
            self.store,
            self.coordinator,
            clock=self.clock,
            ids=self.ids,
            randomness=self.randomness,
            config=config,
        )

    def groups(self) -> Groups:
        """The consumer groups."""
        from forebay.log._groups import Groups

        return Groups(
            self.coordinator,
            self.reader(),
            self.catalog(),
            clock=self.clock,
            ids=self.ids,
            randomness=self.randomness,
        )


def check_there(deployment: Deployment, *, log: bool = True) -> None:
    """Raise `UsageError` for a data directory that is not there, or with `log` holds no log.

    A directory without the coordinator's file is none, whatever lies in it: opened all the same, it would
    look like an empty log, and everything in it like garbage.
    """
    if deployment.data is None:
        return
    if not deployment.data.is_dir():
        raise UsageError(
            f"{deployment.data}: there is no such directory",
            hint="check --data; a directory is made by the first `forebay topics create`",
        )
    if log and not (deployment.data / COORDINATION_FILE).exists():
        raise UsageError(
            f"{deployment.data} holds no deployment: there is no {COORDINATION_FILE}",
            hint="check --data; one is made by the first `forebay topics create`",
        )


@asynccontextmanager
async def open_log(deployment: Deployment, *, create: bool = False) -> AsyncIterator[LogParts]:
    """Open both sides. Only with `create` a deployment that is not there is made."""
    if not create:
        await asyncio.to_thread(check_there, deployment)
    clock = SystemClock()
    async with deployment.open_store() as store, deployment.open_coordinator() as coordinator:
        yield LogParts(store, coordinator, clock, IdSource(clock), random.Random())


def is_number(text: str) -> bool:
    """Whether it is an offset or a number of milliseconds, as people write them."""
    return text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX


def parse_time_ms(text: str) -> int:
    """Milliseconds since the Unix epoch: such a number, or an ISO 8601 time, in UTC unless it says more."""
    if is_number(text):
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{text[:100]!r} is not a time",
            hint="as 2026-11-16T09:30:00Z, or milliseconds since the Unix epoch",
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return int(moment.timestamp() * 1000)
