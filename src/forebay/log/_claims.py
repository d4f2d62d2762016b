"""Who compacts which partition: an ephemeral key, so that two services do not do the same work twice.

A claim saves work and promises nothing. Its holder may stall, its session may run out, and the next one takes
the partition while the first still believes it has it; the steps of a compaction are safe then too. A claim
that is older than `max_age_ms` is taken over whatever its session says: a server was seen to keep for ever an
ephemeral key that was put just as its session ran out.
"""

from __future__ import annotations

from forebay.coordination import ABSENT, Coordinator, Session
from forebay.errors import NotDone, OutcomeUnknown, PreconditionFailed, SessionExpired
from forebay.kit.clock import Clock
from forebay.log._keys import PartitionKeys
from forebay.log._records import Claim, decode_record, encode_record

__all__ = ["Claims"]


class Claims:
    """Takes and releases claims under one session, which is opened when first needed."""

    def __init__(
        self,
        coordinator: Coordinator,
        compactor_id: str,
        *,
        clock: Clock,
        max_age_ms: int,
        session_timeout_ms: int,
    ) -> None:
        self._coordinator = coordinator
        self._id = compactor_id
        self._clock = clock
        self._max_age_ms = max_age_ms
        self._session_timeout_ms = session_timeout_ms
        self._session: Session | None = None
        self.broken = 0
        """Claims of others that were taken over for their age."""

    async def acquire(self, keys: PartitionKeys) -> int | None:
        """The version of our claim, or None where somebody else has the partition."""
        try:
            return await self._put(keys)
        except SessionExpired:
            self._session = None
            return await self._put(keys)

    async def _put(self, keys: PartitionKeys) -> int | None:
        session = await self._alive_session()
        found = await self._coordinator.get(keys.claim, partition_key=keys.partition_key)
        when: int | None = None
        if found is not None:
            claim = decode_record(Claim, found.key, found.value)
            age_ms = self._clock.now_ms() - claim.claimed_at_ms
            # From the future, by a clock that is wrong, it would not be old for as long.
            if claim.compactor_id != self._id and abs(age_ms) <= self._max_age_ms:
                return None
            self.broken += claim.compactor_id != self._id
            when = found.version
        mine = Claim(compactor_id=self._id, claimed_at_ms=self._clock.now_ms())
        try:
            return await self._coordinator.put(
                keys.claim,
                encode_record(mine),
                ABSENT if when is None else when,
                session=session,
                partition_key=keys.partition_key,
            )
        except (PreconditionFailed, OutcomeUnknown):
            # Somebody was faster, or nobody knows: either way there is other work to do. A claim of ours that
            # did arrive is found as ours at the next call.
            return None

    async def release(self, keys: PartitionKeys, version: int) -> None:
        """Give the partition back, unless somebody took it over."""
        try:
            await self._coordinator.delete(keys.claim, version, partition_key=keys.partition_key)
        except (NotDone, OutcomeUnknown):
            return  # Gone, taken over, or left to the end of the session.

    async def _alive_session(self) -> Session:
        if self._session is None or not self._session.alive:
            self._session = await self._coordinator.open_session(self._session_timeout_ms)
        return self._session

    async def close(self) -> None:
        """End the session: all claims are gone."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
