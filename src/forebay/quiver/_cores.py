"""One instance per core on one directory: `core_<id>/` below a root, and shards that nobody opens any more.

Python has one interpreter lock per process, so a core is mostly a process; several in one process work as
well. Each instance has its own WAL, `ack.log`, segments and lock: no core waits for another. They have the
disk in common: with `static` each has an even part of `size_cap_bytes`, with `shared` they divide it by need
(`_budget`).

**Fewer cores than before.** A shard `core_<id>` with an id that no core has is *adopted* by core `id mod N`:
it takes nothing new, its data is finalized and delivered to the subscribers of that core, which are
registered there where they are not, and when the last of it is gone, so is the directory. Rejected and
damaged files in it move to the adopter first.

**Crash points.** Adoption writes nothing of its own, so a crash means adopting again. The WAL is removed
first, and that is synced, because without `ack.log` its entries would count as new; what is left then is a
store without data, and the next adoption removes the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import pyarrow as pa

from forebay.errors import Closed, ForebayError, UsageError
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver._budget import CORES_MAX, Budget, OwnBudget, SharedBudget
from forebay.quiver._config import QuiverConfig
from forebay.quiver._delivery import Delivery
from forebay.quiver._errors import DirectoryInUse, from_os_error
from forebay.quiver._local_disk import make_directories, sync_directory
from forebay.quiver._metrics import QuiverMetrics
from forebay.quiver._quiver import Quiver
from forebay.quiver._retention import RESERVE_BYTES
from forebay.quiver._submission import Receipt

__all__ = ["QuiverCore"]

_log = logging.getLogger(__name__)
ADOPTED_POLL_S: Final = 0.1
"""Seconds between two looks at adopted shards, while there are any."""
_NAME: Final = re.compile(r"core_(\d{1,3})")


def _shard(root: Path, core: int) -> Path:
    return root / f"core_{core}"


class QuiverCore:
    """What one core of `cores` sees: its own instance, and the shards it adopted."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        core: int,
        cores: int,
        config: QuiverConfig | None = None,
        *,
        sharing: Literal["static", "shared"] = "static",
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        if not 1 <= cores <= CORES_MAX or not 0 <= core < cores:
            raise UsageError(
                f"core {core} of {cores}", hint=f"core is 0 to cores - 1, cores 1 to {CORES_MAX}"
            )
        if sharing not in ("static", "shared"):
            raise UsageError(f"sharing is {sharing!r}", hint="one of static, shared")
        self._root = Path(path)
        self._core, self._cores, self._sharing = core, cores, sharing
        self._whole = config or QuiverConfig()
        self._clock = clock or SystemClock()
        self._random = randomness
        self._metrics = metrics or MetricsRegistry()
        self._config = self._shared() if sharing == "shared" else self._slice()
        self._budgets: dict[int, Budget] = {}
        self._adopted: dict[int, Quiver] = {}
        self._is_open = False
        self.own: Quiver
        """The instance of this core, once it is open."""

    def _shared(self) -> QuiverConfig:
        # Dead letters are kept whoever is short of space, so each core has its part of the bound.
        whole = self._whole
        return dataclasses.replace(whole, dead_letter_bytes_max=whole.aside_bytes_max // self._cores)

    def _slice(self) -> QuiverConfig:
        share = self._whole.size_cap_bytes // self._cores
        try:
            return dataclasses.replace(self._whole, size_cap_bytes=share)
        except UsageError as error:
            raise UsageError(
                f"{self._cores} cores have {share:,} bytes each",
                hint="each needs wal_bytes_max + 2 segment_bytes: fewer cores, or a larger size_cap_bytes",
            ) from error

    # Opening and closing.

    async def open(self) -> Self:
        """Open this core's instance and adopt what is its to adopt. Raises `DirectoryInUse`."""
        if self._is_open:
            raise UsageError("the core is open already", hint="open it once")
        try:
            make_directories(self._root)
            self.own = self._instance(self._core)
            self._is_open = True
            await self.own.open()
            await self._adopt()
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise from_os_error("making the directory", error) from error
            raise
        return self

    def _instance(self, core: int) -> Quiver:
        whole = self._whole
        budget: Budget
        if self._sharing == "static":
            budget = OwnBudget(self._config.size_cap_bytes)
        else:
            reserve = whole.wal_bytes_max + 2 * whole.segment_bytes + whole.ack_rotation_bytes + RESERVE_BYTES
            budget = SharedBudget(
                self._root / "usage",
                core=core,
                cores=self._cores,
                cap_bytes=whole.size_cap_bytes,
                reserve_bytes=reserve,
                clock=self._clock,
            )
            budget.forget_absent({number for number, _ in self._shards()})
        self._budgets[core] = budget
        return Quiver(
            _shard(self._root, core),
            self._config,
            clock=self._clock,
            randomness=self._random,
            metrics=self._metrics,
            budget=budget,
            core=core,
            is_adopted=core != self._core,
        )

    def _shards(self) -> list[tuple[int, Path]]:
        found = [(_NAME.fullmatch(each.name), each) for each in sorted(self._root.iterdir())]
        return [(int(match[1]), path) for match, path in found if match]

    async def _adopt(self) -> None:
        for number, _ in self._shards():
            if not self._cores <= number < CORES_MAX or number % self._cores != self._core:
                continue
            try:
                self._adopted[number] = adopted = await self._instance(number).open()
            except DirectoryInUse:
                # A process of the time with more cores may still be there: it keeps its shard.
                self._budgets.pop(number).close()
                continue
            for each in self.own.stats().subscribers:
                try:
                    await adopted.register(each.name)
                except ForebayError as error:
                    # A full disk, say. The data stays, and the next opening tries again.
                    _log.warning("quiver.core.not_registered: %s in core_%d: %s", each.name, number, error)

    async def close(self) -> None:
        """Close everything."""
        stores = (*self._adopted.values(), self.own) if self._is_open else ()
        self._is_open = False
        try:
            # All of them, also where one cannot be closed or whoever waits gives up.
            ends = await asyncio.gather(*(each.close() for each in stores), return_exceptions=True)
        finally:
            self._adopted = {}
            for budget in self._budgets.values():
                budget.close()
            self._budgets = {}
        for end in ends:
            if end is not None:
                raise end

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # What a store does.

    @property
    def adopted(self) -> list[int]:
        """Shards of cores that are no more, and still have data."""
        return sorted(self._adopted)

    async def ingest(
        self, batch: pa.RecordBatch, *, signal: str = "logs", context: Mapping[str, str] | None = None
    ) -> Receipt:
        """As `Quiver.ingest`, into this core's instance."""
        return await self.own.ingest(batch, signal=signal, context=context)

    async def register(self, name: str, start: str | int = "earliest") -> None:
        """Add a subscriber to this core, and to what it adopted."""
        await self.own.register(name, start)
        for number, each in self._present():
            with self._unless_released(number):
                await each.register(name, start if isinstance(start, str) else "earliest")

    async def unregister(self, name: str) -> bool:
        """Remove a subscriber from this core, and from what it adopted."""
        found = await self.own.unregister(name)
        for number, each in self._present():
            with self._unless_released(number):
                found = await each.unregister(name) or found
        return found

    def activate(self, name: str) -> None:
        """As `Quiver.activate`, here and in what it adopted."""
        for each in self._having(name):
            each.activate(name)

    def deactivate(self, name: str) -> None:
        """As `Quiver.deactivate`, here and in what it adopted."""
        for each in self._having(name):
            each.deactivate(name)

    def _having(self, name: str) -> list[Quiver]:
        return [self.own, *(each for each in self._adopted.values() if each.has_subscriber(name))]

    async def next(self, name: str, timeout_s: float | None = None) -> Delivery | None:
        """The next segment for a subscriber: adopted ones first, they are older."""
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while self._adopted:
            for number, each in self._present():
                with self._unless_released(number):
                    if each.has_subscriber(name) and (found := await each.next(name, 0)) is not None:
                        return found
            left = ADOPTED_POLL_S if deadline is None else deadline - self._clock.monotonic()
            if (found := await self.own.next(name, max(0.0, min(left, ADOPTED_POLL_S)))) is not None:
                return found
            await self.release_adopted()
            if deadline is not None and self._clock.monotonic() >= deadline:
                return None
        left_s = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
        return await self.own.next(name, left_s)

    async def flush(self) -> None:
        """Finalize what is open, here and in adopted shards."""
        await self.own.flush()
        for number, each in self._present():
            with self._unless_released(number):
                await each.flush()

    async def maintain(self) -> None:
        """One pass of cleanup, and the end of adopted shards that are empty."""
        await self.own.maintain()
        for number, each in self._present():
            with self._unless_released(number):
                await each.maintain()
        await self.release_adopted()

    async def release_adopted(self) -> None:
        """Remove adopted shards whose data everybody has had. Without subscribers they stay."""
        for number, each in self._present():
            stats = each.stats()
            if stats.segments or stats.open_bytes:
                continue
            del self._adopted[number]
            try:
                # Locked until it is gone: a process that takes the shard now would ingest into it.
                await each._close(keeps_lock=True)
                self._remove(number)
            except OSError as error:
                # It has no data any more: the next opening adopts it again, and removes the rest.
                _log.warning("quiver.core.not_removed: core_%d: %s", number, error)
            finally:
                each._disk.unlock()

    def _present(self) -> Iterator[tuple[int, Quiver]]:
        """The adopted shards, without those that another task releases in the meantime."""
        for number in list(self._adopted):
            if (each := self._adopted.get(number)) is not None:
                yield number, each

    @contextlib.contextmanager
    def _unless_released(self, number: int) -> Iterator[None]:
        """A shard that another task releases under our hands had nothing for anybody any more."""
        try:
            yield
        except Closed:
            if number in self._adopted:
                raise

    def _remove(self, number: int) -> None:
        place, own = _shard(self._root, number), _shard(self._root, self._core)
        for directory in ("dead", "quarantine"):
            for file in sorted((place / directory).glob("*")):
                size = file.stat().st_size
                file.rename(own / directory / f"core_{number}-{file.name}")
                self.own._deliveries.aside_bytes += size
        shutil.rmtree(place / "wal")
        sync_directory(place)
        shutil.rmtree(place)
        sync_directory(self._root)
        budget = self._budgets.pop(number, None)  # none where the core was closed in the meantime
        if isinstance(budget, SharedBudget):
            budget.forget()
        if budget is not None:
            budget.close()
        QuiverMetrics(self._metrics).core_bytes.remove(str(number))
