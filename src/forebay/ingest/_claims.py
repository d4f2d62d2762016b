"""Claims: which collector may process which batch, decided by compare-and-set on the consumer manifest.

A claim is a location with a number, the draft's heartbeat timestamp. The map names no owner, so the number is
the proof of ownership. Invariant: **of all collectors, at most one can acknowledge a location**, whatever the
clocks say, and nobody loses a claim that it keeps alive.

* Every write of a claim sets `max(now, old + 1)`: of two writers in a row no two write the same number.
* A heartbeat or an acknowledgement is valid only if the manifest still holds the number the collector wrote
  last, checked in the same compare-and-set. Otherwise the claim is lost.
* A collector counts a claim as its own only after a write that was answered. If the answer was lost and the
  number is found, it may be another's who claimed in the same millisecond: the number is replaced once more,
  and the answer to *that* write decides.
* An owner stops using a claim `OWN_SHARE` of the timeout after it sent the last write that succeeded. Others
  take a claim over only after they have seen the same number for the whole timeout. Both measure on their own
  monotonic clocks, so wrong wall clocks cannot make a live claim look dead; the share left over allows for
  clocks that run at different speeds.

Crash points: after the claim was written and before anybody heard of it, it goes stale and is taken over. A
claim on a location that is not in `pending` any more is left over from a late write; whoever finds it stale
drops it.

The order of reading matters: first the consumer manifest, then the producer manifest. The other way round
both removals of a cleanup could be missed, and a finished location claimed. Where versions are hashes even
this is not enough (the manifest may be empty *again*), so the collector looks at `pending` once more when it
has its claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from forebay.formats.ingest_manifest import ConsumerManifest
from forebay.ingest._errors import ClaimLost, CommitFailed, CommitUnknown
from forebay.ingest._manifest_file import Manifests
from forebay.kit.clock import Clock

__all__ = ["OWN_SHARE", "Claim", "Claims"]

OWN_SHARE: Final = 0.95
"""Share of the timeout for which an owner trusts its last heartbeat."""
TOO_LATE: Final = "no heartbeat was stored in time"
TAKEN_OVER: Final = "another collector has taken it over"


@dataclass(slots=True, eq=False)
class Claim:
    """One location in the hands of this collector."""

    location: str
    number: int
    """As last written and answered."""
    confirmed: float
    """When that write was sent, on the monotonic clock."""
    numbers: set[int] = field(default_factory=set)
    """Numbers that may stand in the manifest: the confirmed one and those of writes without an answer."""
    acking: bool = False
    """An acknowledgement was sent and may have happened."""
    acked: bool = False
    """It was acknowledged: a further acknowledgement has nothing to do."""
    taken_over: bool = False
    lost: str = ""
    """Why it is lost; empty while it is not."""

    def holds(self, found: int | None) -> bool:
        """Whether a number in the manifest is ours."""
        return found is not None and found in self.numbers


@dataclass(slots=True)
class _Sighting:
    number: int
    since: float


class Claims:
    """Takes, keeps and gives back claims. Knows the manifests, not the batches."""

    def __init__(
        self,
        manifests: Manifests,
        *,
        clock: Clock,
        timeout_ms: int,
    ) -> None:
        self._producers = manifests.producers
        self._consumers = manifests.consumers
        self._clock = clock
        self._timeout_s = timeout_ms / 1000
        self.held: dict[str, Claim] = {}
        """What this collector has claimed and not acknowledged, by location."""
        self._seen: dict[str, _Sighting] = {}
        self._found_last = False

    # -- taking

    async def take(self, without: Iterable[str] = ()) -> Claim | None:
        """Claim the next location: a stale claim first, then the first in `pending` that is free."""
        # After a success the remembered manifest is probably the newest; an idle queue is asked.
        claim = await self._take(frozenset(without), refresh=not self._found_last)
        if claim is None and self._found_last:
            claim = await self._take(frozenset(without), refresh=True)
        self._found_last = claim is not None
        if claim is not None:
            self.held[claim.location] = claim
        return claim

    async def _take(self, without: frozenset[str], *, refresh: bool) -> Claim | None:
        choice: Claim | None = None

        async def change(manifest: ConsumerManifest, maybe: bool) -> ConsumerManifest | None:
            nonlocal choice
            pending = (await self._producers.load()).pending
            stale = self._stale(manifest)
            there = set(pending)
            dead = {location for location in stale if location not in there}
            claimed = {key: value for key, value in manifest.claimed.items() if key not in dead}
            mine = choice is not None and maybe and choice.holds(claimed.get(choice.location))
            location = choice.location if mine and choice else self._pick(pending, manifest, stale, without)
            if location is None:
                choice = None
                return ConsumerManifest(claimed, manifest.done) if dead else None
            numbers = choice.numbers if choice is not None and choice.location == location else set()
            choice = self._claim(location, claimed, numbers)
            return ConsumerManifest(claimed, manifest.done)

        await self._consumers.update(change, refresh=refresh)
        if choice is not None:
            choice.numbers = {choice.number}
            self._seen.pop(choice.location, None)
        return choice

    def _claim(self, location: str, claimed: dict[str, int], numbers: set[int]) -> Claim:
        old = claimed.get(location)
        number = self._next_number(old)
        claimed[location] = number
        return Claim(
            location,
            number,
            self._clock.monotonic(),
            numbers | {number},
            taken_over=old is not None and old not in numbers,
        )

    def _pick(
        self,
        pending: list[str],
        manifest: ConsumerManifest,
        stale: set[str],
        without: frozenset[str],
    ) -> str | None:
        there = set(pending)
        abandoned = [key for key in stale if key in there and key not in without]
        if abandoned:
            return min(abandoned, key=lambda key: (manifest.claimed[key], key))
        taken = {*manifest.claimed, *manifest.done, *without}
        return next((location for location in pending if location not in taken), None)

    def _stale(self, manifest: ConsumerManifest) -> set[str]:
        """Claims of others that have shown the same number for the whole timeout."""
        now = self._clock.monotonic()
        seen: dict[str, _Sighting] = {}
        for location, number in manifest.claimed.items():
            if location in self.held:
                continue
            before = self._seen.get(location)
            same = before is not None and before.number == number
            seen[location] = before if same and before is not None else _Sighting(number, now)
        self._seen = seen
        return {key for key, sighting in seen.items() if now - sighting.since >= self._timeout_s}

    def _next_number(self, old: int | None) -> int:
        now = self._clock.now_ms()
        return max(now, 0) if old is None else max(now, old + 1)

    # -- keeping

    def expired(self, claim: Claim) -> bool:
        """Whether another collector may have taken it over already."""
        return self._clock.monotonic() - claim.confirmed >= self._timeout_s * OWN_SHARE

    async def heartbeat(self) -> int:
        """Renew every claim with one write. Returns how many there were; lost ones are let go."""
        renewed: dict[str, int] = {}
        sent = 0.0

        async def change(manifest: ConsumerManifest, maybe: bool) -> ConsumerManifest | None:
            nonlocal sent
            renewed.clear()
            claimed = dict(manifest.claimed)
            sent = self._clock.monotonic()
            for claim in list(self.held.values()):
                number = self._renew(claim, claimed.get(claim.location))
                if number is not None:
                    renewed[claim.location] = claimed[claim.location] = number
            return ConsumerManifest(claimed, manifest.done) if renewed else None

        await self._consumers.update(change)
        for location, number in renewed.items():
            claim = self.held[location]
            claim.number, claim.numbers, claim.confirmed = number, {number}, sent
        for claim in list(self.held.values()):
            if claim.lost:
                del self.held[claim.location]
        return len(renewed)

    def _renew(self, claim: Claim, found: int | None) -> int | None:
        if claim.lost:
            return None
        if self.expired(claim):
            claim.lost = TOO_LATE
            return None
        if not claim.holds(found):
            if not claim.acking:
                claim.lost = TAKEN_OVER
            return None
        number = self._next_number(found)
        claim.numbers.add(number)
        return number

    # -- ending

    async def finish(self, claim: Claim) -> ConsumerManifest:
        """From claimed to done. A failure changes nothing, so that it can be tried again."""
        doubt = claim.acking
        if claim.acked:
            return self._consumers.value

        async def change(manifest: ConsumerManifest, maybe: bool) -> ConsumerManifest | None:
            location = claim.location
            mine = claim.holds(manifest.claimed.get(location))
            may_be_done = (maybe or doubt) and not mine
            if claim.lost or self.expired(claim):
                if may_be_done:
                    raise CommitUnknown(
                        self._consumers.key, f"{location!r} was acknowledged by us or taken over by another"
                    )
                raise self._drop(claim, claim.lost or TOO_LATE)
            if may_be_done:
                return None  # Within our time nobody else can have removed our number.
            if not mine:
                raise self._drop(claim, TAKEN_OVER)
            claim.acking = True
            claimed = {key: value for key, value in manifest.claimed.items() if key != location}
            done = manifest.done if location in manifest.done else [*manifest.done, location]
            return ConsumerManifest(claimed, done)

        try:
            manifest = await self._consumers.update(change)
        except CommitFailed:
            claim.acking = doubt
            raise
        claim.acked = True
        self.held.pop(claim.location, None)
        return manifest

    async def give_back(self, claims: Iterable[Claim]) -> None:
        """Let others have them at once. Claims that are lost already are only forgotten."""
        leaving = list(claims)
        for claim in leaving:
            self.held.pop(claim.location, None)

        async def change(manifest: ConsumerManifest, maybe: bool) -> ConsumerManifest | None:
            ours = {
                claim.location
                for claim in leaving
                if not self.expired(claim) and claim.holds(manifest.claimed.get(claim.location))
            }
            if not ours:
                return None
            claimed = {key: value for key, value in manifest.claimed.items() if key not in ours}
            return ConsumerManifest(claimed, manifest.done)

        if leaving:
            await self._consumers.update(change)

    async def is_ours(self, claim: Claim) -> bool:
        """Ask the manifest whether a claim still stands."""
        manifest = await self._consumers.load()
        return not self.expired(claim) and claim.holds(manifest.claimed.get(claim.location))

    def _drop(self, claim: Claim, reason: str) -> ClaimLost:
        self.held.pop(claim.location, None)
        return ClaimLost(claim.location, reason)
