"""Compaction that looks after itself: a scheduler, a few workers, and as many such services as one likes.

    pass:  refresh the targets when it is time -> shuffle them -> workers take one after the other
    one:   look (one request) -> nothing to do: next -> claim -> compact while there is progress -> release
           without progress (too young, too little): rest for a while, longer each time

Services of several processes share the work without talking to each other: passes are shuffled, so they
start at different ends, and a claim keeps two from folding the same range. Neither is needed for safety.

A partition that fails is reported in `health` and in the metrics and tried again with the next pass; it never
holds up the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from forebay.coordination import Coordinator
from forebay.errors import ForebayError, UsageError
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.periodic import PeriodicConfig, PeriodicService
from forebay.kit.service import Health, HealthStatus, Service, ServiceGroup
from forebay.log._billing import CountingStore, estimate
from forebay.log._claims import Claims
from forebay.log._compactor import CompactionResult, Compactor, CompactorConfig
from forebay.log._compactor_metrics import CompactorMetrics
from forebay.log._discovery import Targets
from forebay.log._keys import PartitionKeys
from forebay.log._meta import PartitionMeta
from forebay.log._topics import Catalog, TopicSettings
from forebay.log._vacuum import Vacuum, VacuumConfig, VacuumReport
from forebay.storage import ObjectStore

__all__ = ["CompactorService", "CompactorServiceConfig"]

_log = logging.getLogger(__name__)

FAILING_SHOWN: Final = 10
"""Failing partitions named in a health report."""


@dataclass(frozen=True, slots=True)
class CompactorServiceConfig:
    """How often, and how many at once."""

    interval_ms: int = 5_000
    """Milliseconds between two passes. At least 1."""
    discovery_interval_ms: int = 30_000
    """Milliseconds between two looks into the catalog. At least 0."""
    workers: int = 2
    """Partitions compacted at once. Each needs memory for one run. At least 1."""
    runs_per_claim: int = 16
    """Runs of one partition before others get their turn. At least 1."""
    rest_ms_max: int = 30_000
    """Milliseconds after which a partition with too little to do is looked at again, at the latest. At least
    0."""
    claim_age_ms: int = 900_000
    """Milliseconds after which the claim of another counts as forgotten. At least 1."""
    session_timeout_ms: int = 15_000
    """Milliseconds after which the claims of a dead process vanish. 2,000 to 300,000."""
    vacuum_interval_ms: int = 600_000
    """Milliseconds between two runs of vacuum. 0: never."""
    compaction: CompactorConfig = field(default_factory=CompactorConfig)
    """How to compact, where the settings of a topic do not say otherwise."""
    vacuum: VacuumConfig = field(default_factory=VacuumConfig)
    seed: tuple[tuple[str, int], ...] = ()
    """Partitions to look after whatever the catalog says."""
    name: str = "compactor"
    """For messages, health reports and claims."""

    def __post_init__(self) -> None:
        low = min(self.interval_ms, self.workers, self.runs_per_claim, self.claim_age_ms)
        if low < 1 or min(self.discovery_interval_ms, self.vacuum_interval_ms, self.rest_ms_max) < 0:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")
        deadline_ms = self.compaction.commit_deadline_ms
        if self.vacuum_interval_ms and self.vacuum.grace_ms < 2 * deadline_ms:
            raise UsageError(
                f"a grace of {self.vacuum.grace_ms} ms where commits may take {deadline_ms} ms",
                hint="vacuum must leave objects alone for at least twice the commit deadline",
            )


class CompactorService(Service):
    """Compacts, and vacuums, a whole deployment until it is stopped."""

    def __init__(
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        config: CompactorServiceConfig | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        self.config = config or CompactorServiceConfig()
        self.name = name = self.config.name
        self.metrics = metrics or MetricsRegistry()
        """What the service counts, for a Prometheus page or a JSON view."""
        self._clock = clock
        self._random = randomness
        self._base = self.config.compaction
        self._counts = CompactorMetrics(self.metrics)
        counted = CountingStore(store, self.metrics)
        self.compactor = Compactor(
            counted,
            coordinator,
            clock=clock,
            ids=ids,
            randomness=randomness,
            config=self._base,
            on_stage=self._counts.stage,
        )
        """The compactor that the workers use."""
        self.vacuum = Vacuum(
            counted, coordinator, clock=clock, randomness=randomness, ids=ids, config=self.config.vacuum
        )
        self.targets = Targets(
            Catalog(counted, coordinator, clock=clock, ids=ids, randomness=randomness), self.config.seed
        )
        self._claims = Claims(
            coordinator,
            f"{name}-{ids.token()[:8]}",
            clock=clock,
            max_age_ms=self.config.claim_age_ms,
            session_timeout_ms=self.config.session_timeout_ms,
        )
        self._discovered: float | None = None
        self._failing: dict[PartitionKeys, str] = {}
        self._resting: dict[PartitionKeys, tuple[float, int]] = {}
        self._last: dict[str, int] = {}
        self.last_vacuum: VacuumReport | None = None
        """What vacuum last reported."""
        self._chores = ServiceGroup(f"{name} chores", self._periodic())

    def _periodic(self) -> list[Service]:
        def service(name: str, work: Callable[[], Any], interval_ms: int) -> Service:
            return PeriodicService(
                name, work, PeriodicConfig(interval_ms), clock=self._clock, randomness=self._random
            )

        services = [service("compaction", self.run_pass, self.config.interval_ms)]
        if self.config.vacuum_interval_ms:
            services.append(service("vacuum", self.run_vacuum, self.config.vacuum_interval_ms))
        return services

    async def start(self) -> None:
        """Begin."""
        await self._chores.start()

    async def stop(self) -> None:
        """Let the work under way end, and give the claims back."""
        await self._chores.stop()
        await self._claims.close()

    def health(self) -> Health:
        """Degraded while partitions fail, or topics cannot be read."""
        chores = self._chores.health()
        details = {
            **chores.details,
            "targets": len(self.targets),
            "last_pass": dict(self._last),
            "failing": {str(keys): text for keys, text in list(self._failing.items())[:FAILING_SHOWN]},
            "billing": estimate(self.metrics),
        }
        status, reasons = chores.status, list(chores.reasons)
        damaged = self.targets.damaged
        if (self._failing or damaged) and status is HealthStatus.HEALTHY:
            status = HealthStatus.DEGRADED
        if damaged and status is not HealthStatus.STOPPED:
            reasons.append(f"{len(damaged)} topics cannot be read: {damaged[0].message}")
        if self._failing and status is not HealthStatus.STOPPED:
            keys, text = next(iter(self._failing.items()))
            reasons.append(f"{len(self._failing)} partitions fail, as {keys}: {text}")
        return Health(status, tuple(reasons), details)

    async def run_vacuum(self) -> VacuumReport:
        """One run of vacuum, now."""
        self.last_vacuum = await self.vacuum.run_once()
        return self.last_vacuum

    async def run_pass(self) -> list[CompactionResult]:
        """Look at every target once. The service does this by itself; call it for one-shot work."""
        await self._discover()
        waiting = sorted(self.targets.known, key=str)
        self._random.shuffle(waiting)
        results: list[CompactionResult] = []

        async def work() -> None:
            while waiting:
                results.extend(await self._attend(waiting.pop()))

        await asyncio.gather(*(work() for _ in range(self.config.workers)))
        self._counts.passes.inc()
        self._last = {}
        for result in results:
            self._last[result.outcome] = self._last.get(result.outcome, 0) + 1
        return results

    async def _discover(self) -> None:
        now = self._clock.monotonic()
        due_s = self.config.discovery_interval_ms / 1000
        if self._discovered is not None and now < self._discovered + due_s:
            return
        _, gone = await self.targets.refresh()
        self._discovered = now
        for keys in gone:
            self._counts.forget(keys)
            self._failing.pop(keys, None)
            self._resting.pop(keys, None)
        self._counts.targets.set(len(self.targets))

    async def _attend(self, keys: PartitionKeys) -> list[CompactionResult]:
        """One partition: look, claim, compact, release. Errors end here."""
        until, _ = self._resting.get(keys, (0.0, 0))
        if self._clock.monotonic() < until:
            return []
        try:
            meta = await self.compactor.steps.meta(keys)
            self._counts.seen(keys, lag=meta.lag, pending=_is_pending(meta))
            if meta.compaction is None and meta.lag == 0:
                self._failing.pop(keys, None)
                return []
            results = await self._with_claim(keys)
        except ForebayError as error:
            self._failing[keys] = error.message
            self._counts.failed()
            _log.warning("compaction of %s failed: %s (%s)", keys, error.message, error.hint)
            return []
        except Exception as error:
            # A defect of ours that one partition brings to light is no reason to leave the others alone.
            self._failing[keys] = repr(error)
            self._counts.failed()
            _log.exception("compaction of %s failed", keys)
            return []
        self._failing.pop(keys, None)
        self._rest(keys, results)
        return results

    def _rest(self, keys: PartitionKeys, results: list[CompactionResult]) -> None:
        """A partition that has work, but not enough or not yet, is asked less and less often."""
        if not results or results[0].progressed:
            self._resting.pop(keys, None)
            return
        _, last_ms = self._resting.get(keys, (0.0, 0))
        wait_ms = min(max(2 * last_ms, self.config.interval_ms), self.config.rest_ms_max)
        self._resting[keys] = (self._clock.monotonic() + wait_ms / 1000, wait_ms)

    async def _with_claim(self, keys: PartitionKeys) -> list[CompactionResult]:
        broken = self._claims.broken
        claim = await self._claims.acquire(keys)
        if claim is None:
            self._counts.claim("busy")
            return []
        self._counts.claim("broken" if self._claims.broken > broken else "taken")
        config = _settled(self._base, self.targets.settings(keys))
        try:
            results = await self.compactor.compact_all(
                keys.topic,
                keys.partition,
                config=config,
                progress=self._counts.ran,
                runs_max=self.config.runs_per_claim,
            )
        except Exception:
            await self._claims.release(keys, claim)
            raise
        await self._claims.release(keys, claim)
        return results


def _is_pending(meta: PartitionMeta) -> bool:
    return meta.control is not None and meta.control.pending is not None


def _settled(base: CompactorConfig, settings: TopicSettings) -> CompactorConfig:
    """The configuration for one topic: what its settings say goes, where they differ from the defaults."""
    defaults = TopicSettings()
    changes: dict[str, int] = {}
    if settings.compact_min_age_ms != defaults.compact_min_age_ms:
        changes["min_age_ms"] = settings.compact_min_age_ms
    if settings.target_bytes != defaults.target_bytes:
        changes["target_bytes"] = settings.target_bytes
    return replace(base, **changes) if changes else base  # type: ignore[arg-type]
