"""Batches out, one claim at a time: the reading side of the claiming queue.

Any number of collectors share one queue. Each batch is claimed by one of them, kept by heartbeats from the
claim until the acknowledgement is stored, and given back where it could not be read. Delivery is at least
once: a collector that was out of touch for the timeout loses its claims and learns it from `ack`, and another
one delivers those batches again. A sink that minds deduplicates by `location`, which never names two batches.

Order holds within one collector's claims only: with several of them no order is promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from forebay.errors import Closed, ForebayError, NotFound
from forebay.formats import ingest_batch
from forebay.ingest._claims import Claim, Claims
from forebay.ingest._cleanup import Cleanup
from forebay.ingest._config import CollectorConfig
from forebay.ingest._errors import BatchMissing, ClaimLost
from forebay.ingest._manifest_file import Manifests
from forebay.ingest._metrics import CollectorMetrics
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import retry
from forebay.storage import ObjectStore

__all__ = ["CollectedBatch", "Collector"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class CollectedBatch:
    """A batch this collector has claimed."""

    entries: list[bytes]
    """In the order of ingestion."""
    location: str
    """Its name in the bucket: the key to deduplicate by."""
    _claim: Claim = field(repr=False)

    @property
    def lost(self) -> bool:
        """Whether the claim is known to be lost: what is not done yet is better left to the next."""
        return bool(self._claim.lost)


class Collector:
    """Claims batches, reads them, and marks them as done. Use it as an async context manager."""

    def __init__(
        self,
        store: ObjectStore,
        config: CollectorConfig | None = None,
        *,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        """The store is the caller's and stays open. Nothing is read or written before `next_batch`."""
        self._config = config = config or CollectorConfig()
        self._store = store
        self._clock = clock = clock or SystemClock()
        self._random = randomness = randomness or random.Random()
        registry = metrics or MetricsRegistry()
        self._metrics = CollectorMetrics(registry)
        self._manifests = Manifests.of(
            store,
            config.manifest_path,
            "collector",
            clock=clock,
            randomness=randomness,
            policy=config.commit,
            registry=registry,
        )
        self._claims = Claims(self._manifests, clock=clock, timeout_ms=config.heartbeat_timeout_ms)
        self._cleanup = Cleanup(store, self._manifests)
        self._heart: asyncio.Task[None] | None = None
        self._closed = False

    # -- batches

    async def next_batch(self) -> CollectedBatch | None:
        """Claim and read the next batch; None where nothing is free now."""
        self._check_open()
        tried: list[str] = []
        while True:
            claim = await self._claims.take(tried)
            self._metrics.queue_length.set(len(self._manifests.producers.value.pending))
            if claim is None:
                await self._clean_if_due()
                return None
            self._keep_alive()
            if claim.taken_over:
                self._metrics.taken_over.inc()
                _log.info("claim on %s was stale and is taken over", claim.location)
            batch = await self._read(claim)
            if batch is not None:
                return batch
            tried.append(claim.location)

    async def ack(self, batch: CollectedBatch) -> None:
        """Mark a batch as done. Raises `ClaimLost` where it is another's by now; a failure may be retried."""
        self._check_open()
        try:
            manifest = await self._claims.finish(batch._claim)
        except ClaimLost:
            self._metrics.lost.inc()
            raise
        self._metrics.acks.inc()
        if len(manifest.done) >= self._config.done_cleanup_threshold:
            await self._clean()

    async def give_back(self, batch: CollectedBatch) -> None:
        """Let any collector have the batch at once: for whoever cannot process it now."""
        self._check_open()
        await self._claims.give_back([batch._claim])

    @property
    def in_flight(self) -> int:
        """Batches claimed and not acknowledged."""
        return len(self._claims.held)

    async def cleanup(self) -> int:
        """Remove what is done from the bucket and both manifests now. Returns how many batches."""
        self._check_open()
        removed = await self._cleanup.run()
        self._metrics.cleaned.inc(removed)
        return removed

    async def close(self) -> None:
        """Stop the heartbeat and give back what was not acknowledged. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait({self._heart})
        try:
            await self._claims.give_back(list(self._claims.held.values()))
        except ForebayError as error:
            # They go stale by themselves.
            _log.warning("claims were not given back: %s", error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- reading

    async def _read(self, claim: Claim) -> CollectedBatch | None:
        """The claimed batch, or None where it turned out to be finished or another's."""
        began = self._clock.monotonic()
        try:
            entries = await self._fetch(claim)
        except asyncio.CancelledError:
            # Nobody will acknowledge it: without heartbeats it goes stale.
            self._claims.held.pop(claim.location, None)
            raise
        except Exception:
            with contextlib.suppress(ForebayError):
                await self._claims.give_back([claim])
            raise
        if entries is None:
            return None
        if claim.lost or self._claims.expired(claim):
            # The read took so long that another collector may have the batch by now.
            self._claims.held.pop(claim.location, None)
            self._metrics.lost.inc()
            return None
        self._metrics.fetch_seconds.observe(self._clock.monotonic() - began)
        self._metrics.batches.inc()
        self._metrics.entries.inc(len(entries))
        self._metrics.bytes.inc(sum(map(len, entries)))
        return CollectedBatch(entries, claim.location, claim)

    async def _fetch(self, claim: Claim) -> list[bytes] | None:
        # A manifest may be equal to a former one, so that a finished location was claimed: it is not pending.
        if claim.location not in (await self._manifests.producers.load()).pending:
            await self._claims.give_back([claim])
            return None
        try:
            found = await retry(
                lambda: self._store.get(claim.location),
                policy=self._config.read,
                clock=self._clock,
                randomness=self._random,
            )
        except NotFound:
            await self._missing(claim)
            return None
        return ingest_batch.decode(found.data, name=claim.location)

    async def _missing(self, claim: Claim) -> None:
        if not await self._claims.is_ours(claim):
            # Another collector has finished it and cleaned up.
            claim.lost = claim.lost or "its batch was finished by another collector"
            self._claims.held.pop(claim.location, None)
            self._metrics.lost.inc()
            return
        self._metrics.missing.inc()
        if self._config.missing == "raise":
            raise BatchMissing(claim.location)
        _log.error("batch %s has no object; it is skipped", claim.location)
        await self._claims.finish(claim)

    # -- keeping claims alive

    def _keep_alive(self) -> None:
        if self._heart is None:
            self._heart = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        interval = self._config.heartbeat_timeout_ms / 3000
        while True:
            await self._clock.sleep(interval)
            if not self._claims.held:
                continue
            try:
                if await self._claims.heartbeat():
                    self._metrics.heartbeats.inc()
            except ForebayError as error:
                # The claims lapse if this goes on, and `ack` says so then.
                self._metrics.heartbeats_failed.inc()
                _log.warning("heartbeat was not stored: %s", error)

    # -- cleaning up

    async def _clean_if_due(self) -> None:
        """Finish what a collector that died while cleaning left behind."""
        if len(self._manifests.consumers.value.done) >= self._config.done_cleanup_threshold:
            await self._clean()

    async def _clean(self) -> None:
        try:
            await self.cleanup()
        except ForebayError as error:
            # The acknowledgement is stored. The next cleanup finds everything where this one left it.
            self._metrics.cleanups_failed.inc()
            _log.warning("cleanup was not finished: %s", error)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the collector is closed", hint="open a new one; its claims were given back")
