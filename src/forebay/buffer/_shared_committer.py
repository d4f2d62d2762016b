"""Producers of one process commit as one, without being told to.

    producer --\\                       [ one compare-and-set ] -> answers
    producer ---> line of commits ->   at most one under way
    producer --/                       takes along whatever stands in line

Producers that write to the same manifest through the same store, on one event loop, find each other here.
They upload for themselves, side by side; what goes into the manifest stands in one line. Conditional writes
of one object exclude each other anyway, so sending several at once only buys conflicts, and some stores stall
for seconds over them.

Invariants:

* A producer's batches stay in the order it handed them in: it has one commit in line at a time, and what is
  taken along follows directly on what the commit carries.
* Whoever is told of a failure had batches in the attempt that failed, or its own time was up. A commit that
  was only taken along, and that no attempt which may still land has carried, goes back to its place in line.
* A commit that nobody waits for any more leaves the line, unless an attempt has it already.
* A producer may leave at any time: the line then goes on through the store of another. It ends with the last.

The line is known by weak reference only, so it also ends with producers that were dropped. In a simulated
world every actor has a store of its own, so actors never share a line; each of them is a process.

Settings of commits are part of what producers must share, so nobody is bound by the limits of another.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from forebay.buffer._committer import Answer, ManifestCommitter, Upload
from forebay.buffer._config import BufferConfig
from forebay.buffer._manifest_file import ManifestFile
from forebay.buffer._metrics import BufferMetrics
from forebay.errors import Closed, OutcomeUnknown
from forebay.kit.clock import Clock, SystemClock
from forebay.storage import ObjectStore

__all__ = ["SharedCommitter"]

_Key: TypeAlias = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Commit:
    """What one producer handed in."""

    uploads: Sequence[Upload]
    since: float
    done: asyncio.Future[None]

    @property
    def is_answered(self) -> bool:
        return all(upload.answer is not None for upload in self.uploads)


class SharedCommitter:
    """A producer's place among those of its process that write the same manifest. A `Committer`."""

    def __init__(
        self,
        store: ObjectStore,
        config: BufferConfig,
        *,
        is_store_own: bool,
        clock: Clock,
        randomness: random.Random,
        metrics: BufferMetrics,
    ) -> None:
        """A store that the producer opened by itself is known by its address, another one as the object."""
        self.store = store
        self.config = config
        self.clock = clock
        self.randomness = randomness
        self.metrics = metrics
        by_address = is_store_own and not store.url.startswith("memory:")
        self._place: Any = store.url if by_address else id(store)
        self._line: _Line | None = None

    def ready(self, upload: Upload) -> None:
        """A commit under way takes it along if it follows on what the commit carries."""
        upload.owner, upload.metrics = self, self.metrics
        self._joined().committer.ready(upload)

    async def commit(self, uploads: Sequence[Upload]) -> Sequence[Answer]:
        """Enqueue these batches in order, together with those of others."""
        for upload in uploads:
            upload.owner, upload.metrics = self, self.metrics
        began = self.clock.monotonic()
        await self._joined().commit(self, uploads)
        self.metrics.enqueue_duration.observe(self.clock.monotonic() - began)
        answers = [upload.answer for upload in uploads if upload.answer is not None]
        assert len(answers) == len(uploads), "every batch is answered"
        return answers

    async def close(self) -> None:
        """Leave the others."""
        if self._line is not None:
            self._line.leave(self)
            self._line = None

    def _joined(self) -> _Line:
        """The line, from the first use on: only then is it certain which event loop it is on."""
        if self._line is None:
            loop = asyncio.get_running_loop()
            key = (id(loop), self._place, *_commit_settings(self.config), _identity(self.clock))
            line = _LINES.get(key)
            if line is None or line.loop is not loop:  # a new loop may have the id of one that is gone
                line = _LINES[key] = _Line(key, self, loop)
            line.members[self] = None
            self._line = line
        return self._line


class _Line:
    """Commits of all members, one attempt at a time."""

    def __init__(self, key: _Key, first: SharedCommitter, loop: asyncio.AbstractEventLoop) -> None:
        self._key = key
        self.loop = loop
        self.members: WeakKeyDictionary[SharedCommitter, None] = WeakKeyDictionary()
        config = first.config
        self._file = ManifestFile(
            first.store, config.manifest_path, first.clock, bytes_max=config.manifest_bytes_max
        )
        self._clock = first.clock
        self.committer = ManifestCommitter(
            self._file,
            config,
            clock=first.clock,
            randomness=first.randomness,
            metrics=first.metrics,
            more=self._more,
        )
        self._waiting: deque[_Commit] = deque()
        self._taken: list[_Commit] = []
        self._worker: asyncio.Task[None] | None = None

    def leave(self, member: SharedCommitter) -> None:
        """Go on without a member. What it had ready and nobody took stays behind."""
        self.members.pop(member, None)
        self.committer.forget(member)
        other = next(iter(self.members), None)
        if other is not None:
            self._file.use(other.store)
        elif _LINES.get(self._key) is self:
            del _LINES[self._key]  # Its store may be closed now: whoever comes next begins a new one.

    async def commit(self, member: SharedCommitter, uploads: Sequence[Upload]) -> None:
        """Return once every upload is answered."""
        commit = _Commit(uploads, self._clock.monotonic(), self.loop.create_future())
        self._waiting.append(commit)
        if self._worker is None or self._worker.done():
            self._worker = self.loop.create_task(self._work())
        try:
            await commit.done
        except asyncio.CancelledError:
            if commit in self._waiting:
                self._waiting.remove(commit)
            self.committer.forget(member)
            raise

    async def _work(self) -> None:
        while self._waiting:
            head = self._waiting.popleft()
            self._taken = [head]
            try:
                await self.committer.commit_since(head.uploads, head.since)
            except Exception as error:
                _tell(self._taken, error)
            except BaseException:
                _tell(self._taken, OutcomeUnknown("commit", reason="it was cancelled"))
                _tell(self._waiting, Closed("the commit was cancelled before it was tried"))
                self._waiting.clear()
                raise
            self._waiting.extendleft(
                commit for commit in reversed(self._taken) if not _end(commit) and not commit.done.done()
            )
            self._taken = []

    def _more(self, room: int) -> list[Upload]:
        """Uploads of the next in line, as far as they fit as a whole."""
        found: list[Upload] = []
        while self._waiting:
            pending = [upload for upload in self._waiting[0].uploads if upload.answer is None]
            if len(found) + len(pending) > room:
                break
            self._taken.append(self._waiting.popleft())
            found += pending
        return found


def _end(commit: _Commit) -> bool:
    """Wake whoever waits for the commit, if all of it is answered."""
    if commit.is_answered and not commit.done.done():
        commit.done.set_result(None)
    return commit.is_answered


def _tell(commits: Sequence[_Commit] | deque[_Commit], error: Exception) -> None:
    for commit in commits:
        if not _end(commit) and not commit.done.done():
            commit.done.set_exception(error)


def _commit_settings(config: BufferConfig) -> tuple[Any, ...]:
    return (
        config.manifest_path,
        config.commit_batches_max,
        config.commit_retry,
        config.upload_age_s_max,
        config.on_unknown,
        config.manifest_append_bytes_max,
        config.manifest_bytes_max,
    )


def _identity(clock: Clock) -> object:
    """Every `SystemClock` shows the same time; of others each is its own."""
    return SystemClock if isinstance(clock, SystemClock) else id(clock)


_LINES: WeakValueDictionary[_Key, _Line] = WeakValueDictionary()
