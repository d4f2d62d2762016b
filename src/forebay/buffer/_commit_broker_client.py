"""The producer's side of the commit broker: hand over, or do it oneself, and never both.

`BrokeredCommitter` takes the place of the producer's own committer. While the broker answers, a commit is one
message. When it is not there, the producer's own committer does the work as if there were no broker. The case
between is the one that matters: a request was sent and no certain answer came. Then

1. nothing is done until the deadline of the request has passed, after which the broker sends no write for it;
2. the manifest is read and searched for the locations, which name their batches and nothing else;
3. found: committed. Not found, although everything that was enqueued since the request is still to be seen:
   appended, on condition that exactly this version is still there; if it is not, back to 2.
   Not found, but some of what was enqueued since has been consumed: unknown.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Final, Protocol

from forebay.buffer._commit_broker import CommitReply, CommitRequest, ReplyKind, as_wire
from forebay.buffer._committer import Answer, Committed, ManifestCommitter, Upload
from forebay.buffer._config import BufferConfig
from forebay.buffer._errors import CommitUnknown, ManifestLost, QueueFull
from forebay.buffer._manifest_file import ManifestFile
from forebay.buffer._metrics import BufferMetrics
from forebay.errors import ForebayError, NotDone, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import Manifest
from forebay.kit.clock import Clock
from forebay.storage import ObjectStore

__all__ = ["PERMISSION_MS", "BrokerGone", "BrokerLink", "BrokeredCommitter"]

PERMISSION_MS: Final = 5_000
"""Milliseconds for which a broker may work on a request: also how long a producer waits for a dead one."""
PERMISSION_S_MIN: Final = 0.2
"""Seconds below which a request is not worth sending: its batches are about to become too old."""

_log = logging.getLogger(__name__)


class BrokerGone(NotDone):
    """The broker cannot be reached, and this request was not sent."""


class BrokerLink(Protocol):
    """A way to a broker."""

    async def request(self, request: CommitRequest) -> CommitReply:
        """Raises `BrokerGone` where nothing was sent, `OutcomeUnknown` where no answer will come."""
        ...

    async def close(self) -> None:
        """Let go of it."""
        ...


class BrokeredCommitter:
    """A `Committer` that lets a broker do the work as long as there is one."""

    def __init__(
        self,
        link: BrokerLink,
        store: ObjectStore,
        config: BufferConfig,
        *,
        clock: Clock,
        randomness: random.Random,
        metrics: BufferMetrics | None = None,
        permission_ms: int = PERMISSION_MS,
    ) -> None:
        """The store is the producer's."""
        self._link = link
        self._config = config
        self._clock = clock
        self._random = randomness
        self._permission_s = permission_ms / 1000
        self._file = ManifestFile(store, config.manifest_path, clock, bytes_max=config.manifest_bytes_max)
        self._own = ManifestCommitter(
            self._file,
            config,
            clock=clock,
            randomness=randomness,
            metrics=metrics or BufferMetrics(None, "producer", "brokered"),
        )
        self._floor: int | None = None
        """Everything that a request still open may have enqueued is at or above this sequence."""
        self._numbers = 0
        self.brokered = 0
        """Commits that the broker did."""
        self.alone = 0
        """Commits that were done without it."""
        self.settled = 0
        """Commits that were sent without a certain answer and then settled by looking."""

    def ready(self, upload: Upload) -> None:
        """Nothing is prepared: the broker gathers what comes while it writes."""

    async def close(self) -> None:
        """Let go of the broker."""
        await self._link.close()

    async def commit(self, uploads: Sequence[Upload]) -> Sequence[Answer]:
        """Enqueue these batches in order."""
        deadline = self._deadline(uploads)
        if deadline is None or not await self._know_floor():
            return await self._alone(uploads)
        self._numbers += 1
        request = CommitRequest(self._numbers, deadline, tuple(as_wire(each.entry) for each in uploads))
        try:
            reply = await self._ask(request)
        except BrokerGone as error:
            _log.debug("committing without a broker: %s", error)
            return await self._alone(uploads)
        except OutcomeUnknown as error:
            reply = CommitReply(request.number, ReplyKind.UNKNOWN, reason=str(error))
        return await self._answers(uploads, reply, deadline)

    def _deadline(self, uploads: Sequence[Upload]) -> float | None:
        """Until when the broker may work on these; None where they are too old to be given away."""
        now = self._clock.monotonic()
        oldest = min(upload.uploaded_at for upload in uploads)
        # Seconds are compared, never moments: now + 0.02 - now may be less than 0.02.
        allowed_s = min(self._permission_s, oldest - now + self._config.upload_age_s_max)
        return now + allowed_s if allowed_s >= min(PERMISSION_S_MIN, self._permission_s) else None

    async def _know_floor(self) -> bool:
        if self._floor is None:
            try:
                self._floor = (await self._file.load()).next_sequence
            except ForebayError:
                return False  # Our own committer meets the same problem and knows what to do about it.
        return True

    async def _ask(self, request: CommitRequest) -> CommitReply:
        asking = asyncio.ensure_future(self._link.request(request))
        timer = asyncio.ensure_future(self._clock.sleep(request.deadline - self._clock.monotonic()))
        try:
            await asyncio.wait({asking, timer}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise OutcomeUnknown("a commit by the broker", reason="no answer before its deadline")
        finally:
            asking.cancel()
            timer.cancel()

    async def _answers(
        self, uploads: Sequence[Upload], reply: CommitReply, deadline: float
    ) -> Sequence[Answer]:
        if reply.kind == ReplyKind.COMMITTED:
            self.brokered += 1
            return self._committed(uploads, reply.sequence)
        if reply.kind == ReplyKind.NOT_DONE:
            return await self._alone(uploads)
        if reply.kind == ReplyKind.FULL:
            full = QueueFull(self._config.manifest_path, limit=reply.limit, actual=reply.actual)
            return self._failed(uploads, full)
        if reply.kind == ReplyKind.LOST:
            return self._failed(uploads, ManifestLost(self._config.manifest_path, reply.reason))
        await self._clock.sleep(max(0.0, deadline - self._clock.monotonic()))
        self.settled += 1
        return await self._settle(uploads)

    async def _alone(self, uploads: Sequence[Upload]) -> Sequence[Answer]:
        self.alone += 1
        answers = await self._own.commit(uploads)
        committed = [answer.sequence for answer in answers if isinstance(answer, Committed)]
        if committed:
            self._floor = max(committed) + 1
        return answers

    def _committed(self, uploads: Sequence[Upload], sequence: int) -> list[Answer]:
        answers: list[Answer] = []
        for index, upload in enumerate(uploads):
            answer = Committed(sequence + index, upload.entry.location)
            upload.answer = answer
            if upload.on_commit is not None:
                upload.on_commit(answer)
            answers.append(answer)
        self._floor = sequence + len(uploads)
        return answers

    def _failed(self, uploads: Sequence[Upload], error: Exception) -> list[Answer]:
        for upload in uploads:
            upload.answer = error
        return [error] * len(uploads)

    # -- settling

    async def _settle(self, uploads: Sequence[Upload]) -> Sequence[Answer]:
        policy = self._config.commit_retry
        until = self._clock.monotonic() + policy.deadline_ms / 1000
        attempt = 0
        while open_ones := [upload for upload in uploads if upload.answer is None]:
            attempt += 1
            try:
                await self._settle_once(open_ones)
                continue
            except (PreconditionFailed, Unavailable) as error:
                problem: ForebayError = error
            except OutcomeUnknown as error:
                if isinstance(error, ManifestLost | CommitUnknown):
                    self._failed([upload for upload in uploads if upload.answer is None], error)
                    break
                problem = error
            wait = policy.wait_s(attempt, self._random)
            if attempt >= policy.attempts_max or self._clock.monotonic() + wait >= until:
                self._failed(open_ones, CommitUnknown(open_ones[0].entry.location, problem.message))
                break
            await self._clock.sleep(wait)
        return [upload.answer for upload in uploads if upload.answer is not None]

    async def _settle_once(self, uploads: Sequence[Upload]) -> None:
        """Answer what is in the queue, and enqueue the rest."""
        manifest = await self._file.load()
        found = self._find(manifest, uploads)
        if found is not None:
            landed = _landed(manifest, uploads, found)
            self._committed(uploads[:landed], found)
            # A broker that met a full queue has cut the request in two: the rest was not enqueued.
            uploads = uploads[landed:]
        if not uploads:
            return
        assert self._floor is not None
        location = uploads[0].entry.location
        if manifest.first_sequence > self._floor:
            raise CommitUnknown(location, "what was enqueued since then has been consumed already")
        age = self._clock.monotonic() - min(upload.uploaded_at for upload in uploads)
        if age >= self._config.upload_age_s_max:
            raise CommitUnknown(location, "the batch became too old while its broker was gone")
        wanted = buffer_manifest.append(manifest, [upload.entry for upload in uploads])
        if len(wanted.data) > self._config.manifest_append_bytes_max:
            raise CommitUnknown(location, "the queue is full, and an earlier write may still land")
        await self._file.write(wanted)
        self._committed(uploads, manifest.next_sequence)

    def _find(self, manifest: Manifest, uploads: Sequence[Upload]) -> int | None:
        """The sequence of the first upload, if any of them is there: they were appended side by side."""
        places = {upload.entry.location: index for index, upload in enumerate(uploads)}
        assert self._floor is not None
        for sequence in range(max(self._floor, manifest.first_sequence), manifest.next_sequence):
            entry = manifest.entry(sequence)
            if entry is not None and entry.location in places:
                return sequence - places[entry.location]
        return None


def _landed(manifest: Manifest, uploads: Sequence[Upload], first: int) -> int:
    """How many of the uploads stand in the queue from `first` on. Those before its first entry did."""
    for index, upload in enumerate(uploads):
        sequence = first + index
        if sequence < manifest.first_sequence:
            continue
        entry = manifest.entry(sequence)
        if entry is None or entry.location != upload.entry.location:
            return index
    return len(uploads)
