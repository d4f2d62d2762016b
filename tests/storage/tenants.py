"""Stores under test, all driven in the same way: a check gets a `Site` and says what must hold.

The simulated store lives on its own event loop with virtual time, so a tenant does not hand out a store but
runs a check. `@behaviour` makes a test of it that runs once per tenant.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forebay.storage import ObjectStore, open_store
from forebay.testing.s3_faults import S3FaultServer
from forebay.testing.world import World

if TYPE_CHECKING:
    from forebay.testing.servers import SeaweedServer

_prefixes = itertools.count()


@dataclass
class Site:
    """Some storage, empty at first, and as many handles of it as a check wants."""

    opener: Callable[[], ObjectStore]
    refuses_conflicts: bool
    """Whether a key that is a directory of another is refused; buckets do not look."""
    keeps_empty_directories: bool = False
    """Whether a directory stays in the way when its last key is gone."""
    opened: list[ObjectStore] = field(default_factory=list)

    def open(self) -> ObjectStore:
        """A new handle, closed after the check."""
        self.opened.append(self.opener())
        return self.opened[-1]


Check = Callable[[Site, ObjectStore], Awaitable[None]]


class Tenant(Protocol):
    """Runs checks on one kind of store."""

    def run(self, check: Check) -> None: ...


def behaviour(check: Check) -> Callable[[Tenant], None]:
    """Turn a check into a test that takes the fixture `tenant`."""

    def test(tenant: Tenant) -> None:
        tenant.run(check)

    test.__name__ = check.__name__
    test.__qualname__ = check.__qualname__
    test.__module__ = check.__module__
    return test


async def run_on(site: Site, check: Check) -> None:
    """Open a store, check, close everything."""
    try:
        await check(site, site.open())
    finally:
        for store in site.opened:
            await store.close()


class MemoryTenant:
    def run(self, check: Check) -> None:
        name = f"memory://behaviour-{next(_prefixes)}"
        asyncio.run(run_on(Site(lambda: open_store(name), True), check))


@dataclass
class LocalTenant:
    root: Path

    def run(self, check: Check) -> None:
        asyncio.run(run_on(Site(lambda: open_store(self.root), True), check))


class SimulatedTenant:
    def run(self, check: Check) -> None:
        async def main(world: World) -> None:
            actors = itertools.count()
            await run_on(Site(lambda: world.store(f"actor-{next(actors)}"), True), check)

        World(seed=1).run(main)


class FaultServerTenant:
    """The in-process S3 server, here without faults: fast, and in byte order unlike SeaweedFS."""

    def run(self, check: Check) -> None:
        with S3FaultServer() as server:
            asyncio.run(run_on(Site(lambda: open_store(server.url("some/prefix")), False), check))


@dataclass
class SeaweedTenant:
    server: SeaweedServer

    def run(self, check: Check) -> None:
        url = self.server.url(f"behaviour/{next(_prefixes)}")
        asyncio.run(run_on(Site(lambda: open_store(url), False, keeps_empty_directories=True), check))
