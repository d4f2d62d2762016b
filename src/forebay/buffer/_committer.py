"""Making uploaded batches part of the queue: the compare-and-set of the manifest.

Invariant: a batch is answered "committed" only with a sequence at which the manifest held one of its
locations, and "failed" only when no request that could still put it there is under way. A location is unique,
so it is the batch's identity: whatever a store answers, reading the manifest tells what really happened.

    attempt   the manifest at version V has next sequence S; all batches are appended at S, S+1, ... and the
              whole is put on the condition that V still lies there
    success   they are committed
    anything  load the manifest and look at S+i, for each batch i:
    else          not there yet             it did not land; try again
                  one of our locations      it landed, the reply was lost
                  another location          somebody else was faster; try again
                  removed already           it was consumed, or it never was there: unknown

A request that lands late is harmless. It names V, and so does every further attempt until the version
changes, so at most one of them wins; and all of them carry the same batches at the same sequences, which is
how a late one is recognized (a later attempt may carry further ones behind them). Once another version was
seen, none of them can win any more; so a write that takes far longer than usual, as some stores let those do
that overlap, is not waited for once the manifest has another version.

A commit that has to wait or to try again takes along the batches that have become ready meanwhile. Whoever
waits for one of them is told at once; `commit` repeats the answer when the batch is handed in.

A batch that waited so long that garbage collection might take it is uploaded once more under a new name. Both
names count as the batch until the old attempt can no longer land.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from forebay.buffer._config import BufferConfig
from forebay.buffer._errors import CommitFailed, CommitUnknown, ManifestLost, QueueFull
from forebay.buffer._manifest_file import ManifestFile
from forebay.buffer._metrics import BufferMetrics
from forebay.buffer._pace import Pace
from forebay.errors import ForebayError, FormatError, NotDone, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import NewEntry
from forebay.kit.clock import Clock

__all__ = ["Committed", "Committer", "ManifestCommitter", "Upload"]


class Committed(NamedTuple):
    """Where a batch is in the queue."""

    sequence: int
    location: str


Answer: TypeAlias = Committed | Exception


@dataclass(slots=True, eq=False)
class Upload:
    """A batch that lies in the store and is to be enqueued."""

    entry: NewEntry
    """As it will stand in the manifest."""
    uploaded_at: float
    """When its upload began, on the monotonic clock of this process."""
    waiting_since: float
    """When its batch was closed, on the same clock."""
    renew: Callable[[], Awaitable[Upload]] | None = None
    """Uploads the same batch under a new name."""
    number: int = -1
    """Place of its first input among all that the producer accepted; -1 where nobody counts."""
    following: int = -1
    """Place of the first input of the next batch."""
    on_commit: Callable[[Committed], None] | None = None
    """Told at the moment it is known to be committed, which may be before `commit` returns."""
    answer: Answer | None = None
    """What became of it, once that is known."""
    owner: object = None
    """Whose numbers these are, where several producers commit together."""
    metrics: BufferMetrics | None = None
    """Where to count what becomes of it; None: where the committer counts."""


class Committer(Protocol):
    """Whoever enqueues uploaded batches: the producer itself, or a broker for many of them."""

    def ready(self, upload: Upload) -> None:
        """A batch is uploaded and will be handed to `commit` when its turn in the order has come."""
        ...

    async def commit(self, uploads: Sequence[Upload]) -> Sequence[Answer]:
        """Enqueue these batches in order; an answer for each. Never called twice at the same time."""
        ...

    async def close(self) -> None:
        """No further commits."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A batch on its way into the manifest."""

    first: Upload
    """As it was handed in: this is where the answer goes."""
    upload: Upload
    """As it lies in the store now."""
    names: set[str]
    """Every location that an attempt which may still land has carried."""
    came: Literal["handed in", "from the line", "was ready"] = "handed in"
    """How it came into the group: with the commit itself, or taken along."""
    tried: bool = False
    """Whether such an attempt has carried it at all; a batch that was taken along later has not been."""


@dataclass(slots=True, eq=False)
class _Group:
    """The batches of one commit, and what is known of the attempts at the present version."""

    waiting: list[_Waiting] = field(default_factory=list)
    sequence: int | None = None
    """First sequence of the attempts that may still land; None where there are none."""
    version: str | None = None
    """The version they named."""
    doubtful: bool = False
    """Whether one of them ended without a certain answer."""

    def add(
        self, upload: Upload, came: Literal["handed in", "from the line", "was ready"] = "handed in"
    ) -> None:
        self.waiting.append(_Waiting(upload, upload, {upload.entry.location}, came))

    def answer(self, item: _Waiting, answer: Answer) -> None:
        upload = item.first
        upload.answer = answer
        self.waiting.remove(item)
        if upload.on_commit is not None and isinstance(answer, Committed):
            upload.on_commit(answer)

    def settle(self) -> None:
        """No attempt is under way any more."""
        self.sequence, self.doubtful = None, False
        for item in self.waiting:
            item.names = {item.upload.entry.location}
            item.tried = False


class ManifestCommitter:
    """Enqueues by writing the manifest itself. One commit at a time."""

    def __init__(
        self,
        file: ManifestFile,
        config: BufferConfig,
        *,
        clock: Clock,
        randomness: random.Random,
        metrics: BufferMetrics,
        more: Callable[[int], Sequence[Upload]] | None = None,
    ) -> None:
        """`more` gives further uploads for a commit under way, at most as many as asked for."""
        self._file = file
        self._config = config
        self._clock = clock
        self._random = randomness
        self._metrics = metrics
        self._pace = Pace(clock, randomness)
        self._more = more
        self._ready: dict[tuple[object, int], Upload] = {}

    @property
    def pace(self) -> Pace:
        """How contended the queue looks from here."""
        return self._pace

    def ready(self, upload: Upload) -> None:
        """Remember it: a commit that is still trying takes along what follows its own batches."""
        if upload.number >= 0:
            self._ready[upload.owner, upload.number] = upload

    def forget(self, owner: object) -> None:
        """Take along nothing more of this owner."""
        for key in [key for key in self._ready if key[0] is owner]:
            del self._ready[key]

    async def close(self) -> None:
        """Nothing is kept open."""

    async def commit(self, uploads: Sequence[Upload]) -> Sequence[Answer]:
        """See the module."""
        began = self._clock.monotonic()
        is_new = any(upload.answer is None for upload in uploads)
        await self.commit_since(uploads, began)
        if is_new:
            self._metrics.enqueue_duration.observe(self._clock.monotonic() - began)
        answers = [upload.answer for upload in uploads if upload.answer is not None]
        assert len(answers) == len(uploads), "every batch is answered"
        return answers

    async def commit_since(self, uploads: Sequence[Upload], began: float) -> None:
        """Answer every upload. The time allowed is counted from `began`."""
        group = _Group()
        for upload in uploads:
            self._ready.pop((upload.owner, upload.number), None)
            if upload.answer is None:
                group.add(upload)
        if group.waiting:
            await self._commit(group, began)

    def _take_along(self, group: _Group) -> None:
        """Add what else waits for a commit, and the batches that follow on those of the group."""
        room = self._config.commit_batches_max - len(group.waiting)
        if self._more is not None and room > 0:
            for upload in self._more(room):
                self._ready.pop((upload.owner, upload.number), None)
                group.add(upload, "from the line")
        if not self._ready:
            return
        ends = {item.first.owner: item.first.following for item in group.waiting}
        for owner, end in ends.items():
            following = end
            while (owner, following) in self._ready and len(group.waiting) < self._config.commit_batches_max:
                upload = self._ready.pop((owner, following))
                group.add(upload, "was ready")
                following = upload.following

    def _metrics_of(self, group: _Group) -> BufferMetrics:
        """Where to count an attempt: with whoever comes first in it, so that it counts once."""
        first = group.waiting[0].first if group.waiting else None
        return self._metrics if first is None or first.metrics is None else first.metrics

    async def _commit(self, group: _Group, began: float) -> None:
        policy = self._config.commit_retry
        deadline = began + policy.deadline_ms / 1000
        attempt = 0
        await self._pace.turn()
        while group.waiting:
            attempt += 1
            try:
                self._take_along(group)
                await self._prepare(group)
                if group.waiting:
                    await self._attempt(group)
                return
            except ForebayError as error:
                problem = error
            if not group.waiting:
                return
            wait = self._pace.wait_after(problem, attempt, group.waiting[0].upload.waiting_since, policy)
            late = attempt >= policy.attempts_max or self._clock.monotonic() + wait >= deadline
            if late or not _may_pass(problem):
                await self._give_up(group, problem)
            else:
                await self._clock.sleep(wait)

    async def _prepare(self, group: _Group) -> None:
        """Know the manifest, settle earlier attempts, renew what is too old, leave out what does not fit."""
        if not self._file.known or self._pace.is_stale(self._file.seen_at):
            await self._load(group)
        if await self._renew(group) and self._pace.is_stale(self._file.seen_at):
            await self._load(group)
        if self._overflow(group) and self._clock.monotonic() > self._file.seen_at:
            await self._load(group)  # The consumer may have made room since we last looked.
        limit = self._config.manifest_append_bytes_max
        for item, size in self._overflow(group):
            if not item.tried:  # Those that were are in front, and keep their places.
                group.answer(item, QueueFull(self._file.path, limit=limit, actual=size))

    async def _load(self, group: _Group) -> None:
        began = self._clock.monotonic()
        manifest = await self._file.load()
        self._pace.read_took(self._clock.monotonic() - began)
        self._pace.saw(manifest.next_sequence, len(group.waiting))
        metrics = self._metrics_of(group)
        metrics.queue_length.set(len(manifest))
        metrics.manifest_bytes.set(len(manifest.data))
        if group.sequence is None:
            return
        for index, item in enumerate(list(group.waiting)):
            sequence = group.sequence + index
            if sequence >= manifest.next_sequence or not item.tried:
                continue
            entry = manifest.entry(sequence)
            if entry is None:
                self._consumed(group, item)
            elif entry.location in item.names:
                group.answer(item, Committed(sequence, entry.location))
        if self._file.version != group.version:
            group.settle()

    def _consumed(self, group: _Group, item: _Waiting) -> None:
        """The entry at our sequence was removed before we could look whose it was."""
        (item.first.metrics or self._metrics).commit_unknown.inc()
        if self._config.on_unknown == "fail":
            reason = "its place in the queue was consumed before the outcome could be seen"
            group.answer(item, CommitUnknown(item.upload.entry.location, reason))

    async def _renew(self, group: _Group) -> bool:
        """Upload again what garbage collection might take before it is enqueued. Whether there was any."""
        limit = self._config.upload_age_s_max
        now = self._clock.monotonic()
        old = [item for item in group.waiting if now - item.upload.uploaded_at >= limit]
        for item in old:
            if item.upload.renew is not None:
                (item.first.metrics or self._metrics).reuploads.inc()
                item.upload = await item.upload.renew()
                item.upload.number, item.upload.following = item.first.number, item.first.following
                item.names.add(item.upload.entry.location)
        return bool(old)

    def _overflow(self, group: _Group) -> list[tuple[_Waiting, int]]:
        """Batches that would make the manifest too large, with its size then.

        What follows on one of them from the same producer is held back with it; others are not.
        """
        limit = self._config.manifest_append_bytes_max
        total = wanted = len(self._file.manifest.data)
        found: list[tuple[_Waiting, int]] = []
        held: list[object] = []
        for item in group.waiting:
            size = buffer_manifest.encoded_entry_bytes(item.upload.entry)
            wanted += size
            if total + size > limit or item.first.owner in held:
                found.append((item, wanted))
                held.append(item.first.owner)
            else:
                total += size
        return found

    async def _attempt(self, group: _Group) -> None:
        base = self._file.manifest
        group.sequence, group.version = base.next_sequence, self._file.version
        manifest = buffer_manifest.append(base, [item.upload.entry for item in group.waiting])
        for item in group.waiting:
            item.tried = True
        metrics = self._metrics_of(group)
        metrics.commit_batches.observe(len(group.waiting))
        metrics.writes.attempted()
        began = self._clock.monotonic()
        try:
            await self._file.write(manifest, patience_s=self._pace.patience_s)
        except PreconditionFailed:
            metrics.writes.conflicted()
            group.doubtful = True  # Until a look shows another version: a server may have sent it twice.
            raise
        except NotDone:
            raise
        except BaseException:
            group.doubtful = True
            raise
        finally:
            self._pace.write_took(self._clock.monotonic() - began)
        self._pace.succeeded(base.next_sequence, len(group.waiting))
        metrics.queue_length.set(len(manifest))
        metrics.manifest_bytes.set(len(manifest.data))
        for index, item in enumerate(list(group.waiting)):
            group.answer(item, Committed(base.next_sequence + index, item.upload.entry.location))

    async def _give_up(self, group: _Group, problem: ForebayError) -> None:
        """Answer what is left, with certainty where a last look gives it."""
        if not self._file.known and not isinstance(problem, (ManifestLost, FormatError)):
            try:
                await self._load(group)
            except ForebayError as error:
                problem = error
        for item in list(group.waiting):
            if item.came == "handed in" or item.tried:
                group.answer(item, self._verdict(group, item, problem))
            elif item.came == "was ready":  # It has time of its own, in the commit it will be handed to.
                self.ready(item.first)

    def _verdict(self, group: _Group, item: _Waiting, problem: ForebayError) -> Exception:
        location = item.upload.entry.location
        if isinstance(problem, ManifestLost):
            return problem
        metrics = item.first.metrics or self._metrics
        if group.doubtful:
            metrics.commit_unknown.inc()
            return CommitUnknown(location, str(problem))
        metrics.commit_failed.inc()
        failed = CommitFailed(location, str(problem))
        failed.__cause__ = problem
        return failed


def _may_pass(error: ForebayError) -> bool:
    """Whether trying again can help."""
    if isinstance(error, ManifestLost):
        return False
    return isinstance(error, (PreconditionFailed, Unavailable, OutcomeUnknown))
