"""Sessions: proof of life that a server checks by its clock and we check, more strictly, by ours.

A server keeps sessions shard by shard. Ours is one session to the caller: it begins on the lowest shard,
whose id it takes, and extends to another shard when the first ephemeral key goes there. If one part ends,
all of it has ended.

Time is counted from the moment a renewal was *sent*, because the server cannot have received it earlier. A
renewal counts only if its answer arrives within the timeout of the last one that counted: while a 0.14
server is expiring a session it still answers renewals, so a later answer proves nothing. A session is
called alive for a safe part of the timeout only, and ephemeral puts are refused locally outside of it; put
and expiry must not meet on the server, where 0.14 would leave a record that nobody ever removes. (A server
that stalls with the put already in its hands can still do so. Whoever claims by ephemeral keys should be
able to break a claim by age.)

Creating and closing a session are writes on the server, hence the moment of quiet on the shard's write
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from forebay.coordination._api import Session
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._calls import Caller
from forebay.coordination._oxia._channels import Service
from forebay.coordination._oxia._deadline import Deadline
from forebay.coordination._oxia._errors import Trouble, TroubleKind
from forebay.errors import NotDone, OutcomeUnknown
from forebay.kit.clock import Clock

__all__ = ["Lease", "OxiaSession", "Quiet", "SessionOwner"]

RENEWALS_PER_TIMEOUT = 3
"""Renewals within one timeout: two may be lost before the session is over."""
ALIVE_PART = 0.7
"""Part of the timeout in which the last renewal proves life. The rest is for puts that are under way."""

Quiet = Callable[[int, Deadline], AbstractAsyncContextManager[None]]
"""`quiet(shard, deadline)`: a moment without writes under way on a shard."""


class Lease:
    """One session on one shard of the server, renewed by a task."""

    def __init__(
        self, shard: int, session_id: int, timeout_ms: int, begun: float, caller: Caller, clock: Clock
    ) -> None:
        self.shard = shard
        self.id = session_id
        self._timeout_s = timeout_ms / 1000
        self._caller = caller
        self._clock = clock
        self._renewed = begun
        """When the last renewal that counted was sent."""
        self._ended = False
        self._task = asyncio.create_task(self._renew(), name=f"oxia session {session_id} on shard {shard}")

    @classmethod
    async def begin(
        cls, shard: int, timeout_ms: int, caller: Caller, clock: Clock, quiet: Quiet, deadline: Deadline
    ) -> Lease:
        """Create it on the server. Raises `Trouble`."""
        request = pb.CreateSessionRequest(
            shard=shard, session_timeout_ms=timeout_ms, client_identity="forebay"
        )
        begun = clock.monotonic()

        async def call(service: Service, left_s: float) -> pb.CreateSessionResponse:
            nonlocal begun
            begun = clock.monotonic()
            return await service.create_session(request, timeout=left_s)

        async with quiet(shard, deadline):
            response = await caller.on_leader(shard, deadline, call)
        return cls(shard, response.session_id, timeout_ms, begun, caller, clock)

    @property
    def alive(self) -> bool:
        """Whether it is certainly valid for a while yet."""
        return not self._ended and self._clock.monotonic() - self._renewed < self._timeout_s * ALIVE_PART

    async def stop(self) -> None:
        """Stop renewing; no longer alive."""
        self._ended = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def end(self, quiet: Quiet, deadline: Deadline) -> None:
        """End it on the server, with its keys. Raises `Trouble`, but not where it has ended already."""
        await self.stop()
        request = pb.SessionRequest(shard=self.shard, session_id=self.id)

        async def call(service: Service, left_s: float) -> None:
            await service.close_session(request, timeout=left_s)

        try:
            async with quiet(self.shard, deadline):
                await self._caller.on_leader(self.shard, deadline, call)
        except Trouble as trouble:
            if trouble.kind is not TroubleKind.SESSION_GONE:
                raise

    async def _renew(self) -> None:
        interval = self._timeout_s / RENEWALS_PER_TIMEOUT
        while not self._ended:
            await self._clock.sleep(interval if self._renewed_lately(interval) else interval / 4)
            await self._renew_once()

    def _renewed_lately(self, interval: float) -> bool:
        return self._clock.monotonic() - self._renewed < interval

    async def _renew_once(self) -> None:
        sent = self._clock.monotonic()
        # One attempt that hangs must not use up all the time there is.
        left = min(self._renewed + self._timeout_s - sent, self._timeout_s / RENEWALS_PER_TIMEOUT)
        request = pb.SessionRequest(shard=self.shard, session_id=self.id)

        async def call(service: Service, left_s: float) -> None:
            nonlocal sent
            sent = self._clock.monotonic()
            await service.keep_alive(request, timeout=left_s)

        try:
            await self._caller.on_leader(self.shard, Deadline(left), call)
        except Trouble as trouble:
            if trouble.kind is TroubleKind.SESSION_GONE:
                self._ended = True
        except NotDone:
            pass  # The shard is just not to be found: the next attempt, or the timeout, will tell.
        else:
            if self._clock.monotonic() - self._renewed < self._timeout_s:
                self._renewed = sent
        if self._clock.monotonic() - self._renewed >= self._timeout_s:
            self._ended = True


class OxiaSession(Session):
    """One session to the caller, a lease on each shard that holds keys of it."""

    def __init__(self, home: Lease, timeout_ms: int, owner: SessionOwner) -> None:
        self.id = home.id
        self.timeout_ms = timeout_ms
        self.owner = owner
        self._leases = {home.shard: home}
        self._changing = asyncio.Lock()
        """Held while parts are added or ended."""
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether all parts of it are certainly valid by our own clock."""
        return not self._closed and all(lease.alive for lease in self._leases.values())

    def alive_on(self, shard: int) -> bool:
        """Whether an ephemeral put may be sent to this shard now."""
        return shard in self._leases and self.alive

    def id_on(self, shard: int) -> int:
        """The id by which the server of this shard knows it."""
        return self._leases[shard].id

    async def extend(self, shard: int, deadline: Deadline) -> None:
        """See that it exists on a shard. Raises a `NotDone` error."""
        if shard in self._leases:
            return
        async with self._changing:
            if shard in self._leases or not self.alive:
                return
            try:
                lease = await self.owner.begin_lease(shard, self.timeout_ms, deadline)
            except Trouble as trouble:
                raise trouble.error(f"opening a session on shard {shard}") from None
            self._leases[shard] = lease

    async def close(self) -> None:
        """End it now. Its ephemeral keys are gone when this returns."""
        self._closed = True
        async with self._changing:
            leases, self._leases = self._leases, {}
            deadline = self.owner.deadline()
            ending = [self.owner.end_lease(lease, deadline) for lease in leases.values()]
            results = await asyncio.gather(*ending, return_exceptions=True)
            self.owner.forget(self)
        for result in results:
            if isinstance(result, Trouble):
                left = f"its keys vanish by themselves within {self.timeout_ms} ms"
                # A wedged shard does not expire sessions either.
                hint = result.hint if result.kind is TroubleKind.WEDGED else left
                raise OutcomeUnknown(f"closing session {self.id}", reason=result.text, hint=hint)
            if isinstance(result, BaseException):
                raise result


class SessionOwner:
    """What a session needs of its coordinator."""

    def __init__(self, caller: Caller, clock: Clock, quiet: Quiet, timeout_s: float) -> None:
        self._caller = caller
        self._clock = clock
        self._quiet = quiet
        self._timeout_s = timeout_s
        self._sessions: set[OxiaSession] = set()

    async def open(self, timeout_ms: int) -> OxiaSession:
        """Begin a session on the lowest shard."""
        deadline = self.deadline()
        shards = await self._caller.assignments.current(deadline)
        try:
            home = await self.begin_lease(shards.ids[0], timeout_ms, deadline)
        except Trouble as trouble:
            raise trouble.error("opening a session") from None
        session = OxiaSession(home, timeout_ms, self)
        self._sessions.add(session)
        return session

    def deadline(self) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self._timeout_s)

    async def begin_lease(self, shard: int, timeout_ms: int, deadline: Deadline) -> Lease:
        """Begin a part of a session. Raises `Trouble`."""
        return await Lease.begin(shard, timeout_ms, self._caller, self._clock, self._quiet, deadline)

    async def end_lease(self, lease: Lease, deadline: Deadline) -> None:
        """End a part of a session. Raises `Trouble`."""
        await lease.end(self._quiet, deadline)

    def forget(self, session: OxiaSession) -> None:
        """A session that was closed needs no closing any more."""
        self._sessions.discard(session)

    async def close(self) -> None:
        """End all sessions. Those that cannot be ended now run out by themselves."""
        await asyncio.gather(*[session.close() for session in list(self._sessions)], return_exceptions=True)
