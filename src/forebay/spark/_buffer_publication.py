"""Batches of a queue in two steps by different processes: many stage, one enqueues all of them, once.

The queue has no coordinator, so what was decided lies in the store, an object for each query or write:

    {prefix}/forebay-publications/{name}     {batch, state, revision, floor, former, entries}

    absent | DONE, batch < n  ->  ENQUEUEING, batch n, with the entries                the decision
    ENQUEUEING, batch n       ->  all entries in one write of the manifest             the effect
                              ->  DONE, batch n

Invariant: of all attempts to publish (name, n) exactly one list of entries is decided at a time, and it is in
the queue at most once, all of it or nothing. Whether it is there is told by its locations, which name nothing
else, as long as nobody has consumed what was enqueued since the decision: `floor` is the next sequence at
that moment. What is consumed leaves no trace in a queue. So one case stays open, a crash or a lost reply
between the effect and DONE whose entries, or as many others, are consumed before anybody looks: then it is
`CommitUnknown`, and never guessed, unless the option `onUnknown` says how.

Order is what makes it safe with two publishers at once (a driver that was thought dead). A write of the
manifest is made on the condition of a version that was loaded *before* the record was seen to be one's own.
Whoever takes over makes the record its own first, and its effect changes the version; so either the write of
the other fails, or it came first and is seen.

Crash points: before the decision, objects that nobody names are left to garbage collection. Between the
decision and DONE, the next attempt at this batch or a later one finishes the list. Staged objects that are
older than garbage collection allows are copied under new names first; the old names are remembered, since a
write that carries them may still be under way.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from forebay.buffer import BufferConfig, CommitFailed, CommitUnknown, ManifestLost, QueueFull
from forebay.errors import FormatError, NotFound, OutcomeUnknown, PreconditionFailed, Unavailable, UsageError
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import EMPTY, Manifest, Metadata, NewEntry
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy
from forebay.storage import ObjectStore

__all__ = ["OnUnknown", "QueuePublications", "StagedBatch"]

OnUnknown = Literal["fail", "append_again", "skip"]
ATTEMPTS_MAX: Final = 100
"""Writes of the manifest or of the record that others may beat before a publication is given up."""
PACE: Final = RetryPolicy(attempts_max=ATTEMPTS_MAX, base_ms=10, cap_ms=1_000)

_PLAIN: Final = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch that lies in the store and in no queue yet. May be pickled."""

    entry: NewEntry
    staged_at_ms: int


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    location: str
    metadata: list[tuple[int, int, bytes]]
    tail: bytes


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    state: Literal["ENQUEUEING", "DONE"]
    revision: str
    """Of the publisher whose turn it is."""
    floor: int
    """Next sequence of the queue when the list was decided; of a finished one at least that."""
    staged_at_ms: int = 0
    former: list[str] = []
    """Locations that the entries had before."""
    entries: list[_Entry] = []


@dataclass(slots=True)
class _Seen:
    """The manifest as it was loaded."""

    manifest: Manifest
    version: str | None


class QueuePublications:
    """Enqueues staged batches by name and number."""

    def __init__(
        self,
        store: ObjectStore,
        config: BufferConfig,
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        on_unknown: OnUnknown = "fail",
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._ids = ids
        self._random = randomness
        self._on_unknown = on_unknown

    async def publish(self, name: str, batch: int, staged: Sequence[StagedBatch]) -> bool:
        """Enqueue everything that was staged, unless this name has published this number before.

        Whether anything was left to do. Raises what kept it from happening; calling it again with the same
        name and number is right then, with the same or with other batches.
        """
        if batch < 0:
            raise UsageError(f"batch {batch}", hint="batches are counted from 0")
        key = self.key(name)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            found, version = await self._read(key)
            if found is not None and (
                found.batch > batch or (found.batch == batch and found.state == "DONE")
            ):
                return False
            if (found is None or found.state == "DONE") and not staged:
                return False
            seen = await self._load(found)
            mine, version = await self._own(key, found, version, batch, staged, seen)
            # What nobody ever tried to enqueue is not there, and needs no look.
            fresh = found is None or found.state == "DONE"
            if version is not None and await self._enqueue(key, mine, version, seen, staged, fresh=fresh):
                if mine.batch == batch:
                    return True
                continue  # An older batch was left behind; now the one that was asked for.
            await self._clock.sleep(PACE.wait_s(attempt, self._random))
        raise CommitFailed(key, f"others were faster {ATTEMPTS_MAX} times")

    async def forget(self, name: str) -> None:
        """Remove the record of a name that nobody will use again."""
        await self._store.delete([self.key(name)])

    def key(self, name: str) -> str:
        """Where the record lies: below the prefix, where garbage collection passes over it."""
        plain = name if _PLAIN.fullmatch(name) else "sha256-" + hashlib.sha256(name.encode()).hexdigest()
        return f"{self._config.data_path_prefix}/forebay-publications/{plain}"

    # -- the record

    async def _read(self, key: str) -> tuple[_Record | None, str | None]:
        try:
            found = await self._store.get(key)
        except NotFound:
            return None, None
        try:
            return msgspec.json.decode(found.data, type=_Record), found.version
        except msgspec.MsgspecError as error:
            raise FormatError(f"{key}: {error}", hint="it is not a record of this sink") from error

    async def _put(self, key: str, record: _Record, version: str | None) -> str | None:
        """The new version, or None where it is not known to be ours."""
        try:
            return await self._store.put(key, msgspec.json.encode(record), version or ABSENT)
        except (PreconditionFailed, OutcomeUnknown):
            return None

    async def _own(
        self,
        key: str,
        found: _Record | None,
        version: str | None,
        batch: int,
        staged: Sequence[StagedBatch],
        seen: _Seen,
    ) -> tuple[_Record, str | None]:
        """Decide, or take over what was decided; the version is None where somebody else was faster."""
        revision = self._ids.uuid()
        if found is None or found.state == "DONE":
            mine = _decided(batch, revision, seen, staged)
        else:
            mine = msgspec.structs.replace(found, revision=revision)
        return mine, await self._put(key, mine, version)

    # -- the manifest

    async def _load(self, record: _Record | None) -> _Seen:
        path = self._config.manifest_path
        try:
            found = await self._store.get(path)
        except NotFound:
            seen = _Seen(EMPTY, None)
        else:
            manifest = buffer_manifest.decode(
                found.data, name=path, deep=False, manifest_bytes_max=self._config.manifest_bytes_max
            )
            seen = _Seen(manifest, found.version)
        if record is not None and seen.manifest.next_sequence < record.floor:
            reason = f"its next sequence was {record.floor}, and is {seen.manifest.next_sequence}"
            raise ManifestLost(path, reason)
        return seen

    def _is_there(self, record: _Record, seen: _Seen, floor: int) -> bool:
        """Whether the entries are, or were, in the queue. Raises `CommitUnknown` where nobody can tell."""
        names = {each.location for each in record.entries}.union(record.former)
        if not names.isdisjoint(seen.manifest.locations()):
            return True
        if seen.manifest.first_sequence <= floor or self._on_unknown == "append_again":
            return False
        if self._on_unknown == "skip":
            return True
        raise CommitUnknown(
            record.entries[0].location,
            f"batch {record.batch} was being enqueued when its publisher ended, and the queue was consumed "
            "since; see whether the consumer has its records, then set onUnknown=skip or append_again, once",
        )

    # -- the effect

    async def _enqueue(
        self,
        key: str,
        record: _Record,
        version: str,
        seen: _Seen,
        staged: Sequence[StagedBatch],
        *,
        fresh: bool,
    ) -> bool:
        """Have the entries in the queue and the record done; False where somebody else took over."""
        # Once a write is in doubt it stays so: it may land as long as its version lies there. What is known
        # is that nothing of it was in the queue up to the last look, and that look becomes the floor.
        floor, doubtful = record.floor, not fresh
        for attempt in range(1, ATTEMPTS_MAX + 1):
            if doubtful and self._is_there(record, seen, floor):
                break
            floor = seen.manifest.next_sequence
            if self._clock.now_ms() - record.staged_at_ms > self._config.upload_age_s_max * 1000:
                renewed = await self._renewed(record, staged)
                owned = await self._put(key, renewed, version)
                if owned is None:
                    return False
                record, version = renewed, owned
            try:
                await self._append(record, seen)
                floor += len(record.entries)
                break
            except PreconditionFailed:
                pass
            except (OutcomeUnknown, Unavailable):
                doubtful = True
            await self._clock.sleep(PACE.wait_s(attempt, self._random))
            seen = await self._load(record)
            now, now_version = await self._read(key)
            if now is None or now_version != version:
                return False
        else:
            raise CommitFailed(record.entries[0].location, f"others were faster {ATTEMPTS_MAX} times")
        done = _Record(batch=record.batch, state="DONE", revision=self._ids.uuid(), floor=floor)
        return await self._put(key, done, version) is not None

    async def _append(self, record: _Record, seen: _Seen) -> None:
        entries = [_new_entry(each) for each in record.entries]
        manifest = buffer_manifest.append(seen.manifest, entries)
        limit = self._config.manifest_append_bytes_max
        if len(manifest.data) > limit:
            raise QueueFull(self._config.manifest_path, limit=limit, actual=len(manifest.data))
        await self._store.put(self._config.manifest_path, manifest.data, seen.version or ABSENT)

    async def _renewed(self, record: _Record, staged: Sequence[StagedBatch]) -> _Record:
        """The same entries under new names; or, where their objects are gone, what was staged now."""
        now_ms = self._clock.now_ms()
        try:
            entries = [await self._copied(each) for each in record.entries]
        except NotFound as error:
            age_ms = self._config.upload_age_s_max * 1000
            if not staged or min(each.staged_at_ms for each in staged) + age_ms < now_ms:
                raise CommitFailed(
                    record.entries[0].location,
                    "garbage collection took it before it was enqueued; raise gc_grace_period_ms, or write "
                    "less at a time",
                ) from error
            entries = [_entry(each) for each in staged]
            now_ms = min(each.staged_at_ms for each in staged)
        former = [*record.former, *(each.location for each in record.entries)]
        return msgspec.structs.replace(
            record, revision=self._ids.uuid(), entries=entries, former=former, staged_at_ms=now_ms
        )

    async def _copied(self, entry: _Entry) -> _Entry:
        data = (await self._store.get(entry.location)).data
        location = f"{self._config.data_path_prefix}/{self._ids.ulid()}.batch"
        await self._store.put(location, data)
        return msgspec.structs.replace(entry, location=location)


def _decided(batch: int, revision: str, seen: _Seen, staged: Sequence[StagedBatch]) -> _Record:
    return _Record(
        batch=batch,
        state="ENQUEUEING",
        revision=revision,
        floor=seen.manifest.next_sequence,
        staged_at_ms=min(each.staged_at_ms for each in staged),
        entries=[_entry(each) for each in staged],
    )


def _entry(staged: StagedBatch) -> _Entry:
    items = [(item.start_index, item.ingestion_time_ms, item.payload) for item in staged.entry.metadata]
    return _Entry(staged.entry.location, items, staged.entry.tail)


def _new_entry(entry: _Entry) -> NewEntry:
    return NewEntry(entry.location, tuple(Metadata(*item) for item in entry.metadata), entry.tail)
