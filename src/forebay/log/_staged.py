"""Appends in two steps by different processes: many stage, one publishes everything, once.

A distributed job (Spark) writes in tasks that may be tried again, killed and split differently the next time,
and says only at the end, on its driver, that a batch is to count. So tasks upload slices that belong to no
partition yet, and the driver publishes the slices of a batch under a name and a number:

    llog-publications/{name}     {batch, state, revision, objects, appends}

    absent | DONE, batch < n  ->  PUBLISHING, batch n, with the list of what is to be appended    the decision
    PUBLISHING, batch n       ->  every append of the list, each with producer id and sequence    the effect
                              ->  DONE, batch n

Invariant: of all attempts to publish (name, n) exactly one list is decided, and every append of that list is
applied exactly once. A later attempt, with whatever it staged itself, finds the decided list and finishes it;
after DONE it finds that there is nothing to do. Batches below the recorded one are done.

The list says for each partition which sequence numbers its appends have, following what the partition
remembered of this producer when the decision was made. Sequences of a producer have no gaps, so the last one
that a partition remembers tells which appends of the list it has. Any number of publishers may work on one
list at the same time.

Crash points: before the decision, slices that nobody names are left to the vacuum. Between the decision and
DONE, whoever publishes the same or a later number finishes first. After DONE nothing is left to do. An abort
must never delete: it also follows a publication whose reply was lost.

Staged objects are named by nobody until they are appended, and the vacuum takes what nobody names after its
grace. So what is older than `STAGED_AGE_MS_MAX` is copied under a new name before it is appended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import pyarrow as pa

from forebay.coordination import Coordinator
from forebay.errors import LimitExceeded, NotFound, OutcomeUnknown, PreconditionFailed, UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.shared_blob import Slice
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.log._append import AppendGroup, AppendResult, Unit
from forebay.log._errors import Contended, DataLost, OutOfSequence
from forebay.log._keys import PartitionKeys, escaped, shared_wal_key, validate_group
from forebay.log._records import PRODUCERS_MAX, Control, decode_record, encode_record
from forebay.log._upload import Uploaded
from forebay.log._uris import key_of, uri_of
from forebay.log._writer import LogWriter
from forebay.storage import ObjectStore

__all__ = ["Publications", "Published", "StagedAppend", "stage"]

STAGED_AGE_MS_MAX: Final = 20 * 60_000
"""Age at which a staged object is copied before it is appended: far below the grace of the vacuum."""
COMMIT_S_MAX: Final = 20 * 60.0
"""Seconds a commit may take from then on, still far below the grace."""
PUBLICATION_BYTES_MAX: Final = 900_000
"""Largest list of appends: it is one record of the coordinator, about 9,000 appends."""
ATTEMPTS_MAX: Final = 50
"""Tries against others that publish under the same name; each that fails means that another succeeded."""
NAME_CHARS_MAX: Final = 58
"""Names up to this length are part of the producer id as they are; longer ones as their hash."""


@dataclass(frozen=True, slots=True)
class StagedAppend:
    """A slice that lies in the store and belongs to no partition yet. May be pickled."""

    topic: str
    partition: int
    count: int
    uri: str
    byte_offset: int
    byte_length: int
    crc32c: int | None
    encoding: str
    append_id: str
    staged_at_ms: int


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a batch."""

    duplicate: bool
    """Whether it had been published before; then nothing was appended."""
    results: tuple[AppendResult, ...] = ()
    """One per append that this call made."""
    topics: tuple[str, ...] = ()
    """Where the batch went, whoever published it; empty where that is not known."""


class _Append(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    sequence: int
    count: int
    object: int
    byte_offset: int
    byte_length: int
    crc32c: int | None
    encoding: str
    append_id: str


class _Publication(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    state: Literal["PUBLISHING", "DONE"]
    revision: str
    staged_at_ms: int = 0
    objects: list[str] = []
    appends: list[_Append] = []
    topics: list[str] = []
    """Of a finished one: where it went."""


async def stage(writer: LogWriter, groups: Sequence[AppendGroup], clock: Clock) -> list[StagedAppend]:
    """Upload groups into one object, for `Publications.publish`. Raises the first error; then none counts."""
    staged_at_ms = clock.now_ms()
    uploaded = await writer.upload(groups)
    for answer in uploaded.answers:
        if answer is not None:
            answer.unwrap()
    return [_staged(unit, staged_at_ms) for unit in uploaded.units]


def _staged(unit: Unit, staged_at_ms: int) -> StagedAppend:
    assert unit.slice is not None
    where = unit.slice
    return StagedAppend(
        unit.keys.topic,
        unit.keys.partition,
        unit.count,
        unit.uri,
        where.body_offset,
        where.body_length,
        where.crc32c,
        where.encoding,
        unit.append_id,
        staged_at_ms,
    )


class Publications:
    """Publishes staged appends by name and number."""

    def __init__(
        self,
        writer: LogWriter,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        self._writer = writer
        self._store = store
        self._coordinator = coordinator
        self._clock = clock
        self._ids = ids

    async def publish(self, name: str, batch: int, staged: Sequence[StagedAppend]) -> Published:
        """Append everything that was staged, unless this name has published this number before.

        Raises what kept it from happening. Whatever it raises, calling it again with the same name and number
        is right, with the same or with other slices.
        """
        validate_group(name)
        if batch < 0:
            raise UsageError(f"batch {batch}", hint="batches are counted from 0")
        results: list[AppendResult] = []
        for _ in range(ATTEMPTS_MAX):
            found, version = await self._read(name)
            if found is not None and (
                found.batch > batch or (found.batch == batch and found.state == "DONE")
            ):
                where = tuple(found.topics) if found.batch == batch else ()
                return Published(duplicate=not results, results=tuple(results), topics=where)
            fresh = found is None or found.state == "DONE"
            if fresh:
                if not staged:
                    return Published(duplicate=False)
                found = await self._decide(name, batch, staged)
                version = await self._put(name, found, version)
            if version is None or found is None:
                continue  # Somebody else decided, or the reply was lost: what is there now tells.
            mine = staged if found.batch == batch else ()
            made, finished = await self._finish(name, found, version, fresh=fresh, instead=mine)
            if found.batch == batch:
                results += made
                if finished:
                    where = tuple(_topics(found))
                    return Published(duplicate=not results, results=tuple(results), topics=where)
        raise Contended(f"publication {name!r}", attempts=ATTEMPTS_MAX)

    async def last(self, name: str) -> int | None:
        """The last batch that is decided under a name; None where there is none."""
        found, _ = await self._read(name)
        return None if found is None else found.batch

    async def forget(self, name: str) -> None:
        """Remove the record of a name that nobody will publish under again."""
        key = _key(name)
        await self._coordinator.delete(key, partition_key=key)

    # -- the record

    async def _read(self, name: str) -> tuple[_Publication | None, int | None]:
        key = _key(name)
        record = await self._coordinator.get(key, partition_key=key)
        if record is None:
            return None, None
        return decode_record(_Publication, key, record.value), record.version

    async def _put(self, name: str, record: _Publication, version: int | None) -> int | None:
        """The new version, or None where it is not known to be ours."""
        key, value = _key(name), encode_record(record)
        if len(value) > PUBLICATION_BYTES_MAX:
            raise LimitExceeded(
                "PUBLICATION_BYTES_MAX",
                limit=PUBLICATION_BYTES_MAX,
                actual=len(value),
                hint="fewer rows, tasks or partitions per batch: each object has an append per partition",
            )
        try:
            when = ABSENT if version is None else version
            return await self._coordinator.put(key, value, when, partition_key=key)
        except (PreconditionFailed, OutcomeUnknown):
            return None

    # -- the decision

    async def _decide(self, name: str, batch: int, staged: Sequence[StagedAppend]) -> _Publication:
        """The list: what is to be appended, with the sequence each append will have."""
        producer = _producer_id(name)
        partitions = list(dict.fromkeys(PartitionKeys(each.topic, each.partition) for each in staged))
        controls = await self._controls(partitions)
        following = {
            keys: 0 if (last := _last(control, producer)) is None else last + 1
            for keys, control in controls.items()
        }
        objects = list(dict.fromkeys(each.uri for each in staged))
        numbers = {uri: number for number, uri in enumerate(objects)}
        appends = []
        for each in staged:
            keys = PartitionKeys(each.topic, each.partition)
            appends.append(
                _Append(
                    each.topic,
                    each.partition,
                    following[keys],
                    each.count,
                    numbers[each.uri],
                    each.byte_offset,
                    each.byte_length,
                    each.crc32c,
                    each.encoding,
                    each.append_id,
                )
            )
            following[keys] += 1
        return _Publication(
            batch=batch,
            state="PUBLISHING",
            revision=self._ids.uuid(),
            staged_at_ms=min(each.staged_at_ms for each in staged),
            objects=objects,
            appends=appends,
        )

    async def _controls(self, partitions: Sequence[PartitionKeys]) -> dict[PartitionKeys, Control | None]:
        records = await self._coordinator.get_many(
            [(each.control, each.partition_key) for each in partitions]
        )
        return {
            keys: None if record is None else decode_record(Control, record.key, record.value)
            for keys, record in zip(partitions, records, strict=True)
        }

    # -- the effect

    async def _finish(
        self,
        name: str,
        record: _Publication,
        version: int,
        *,
        fresh: bool,
        instead: Sequence[StagedAppend],
    ) -> tuple[list[AppendResult], bool]:
        """Apply what is missing of a decided list and mark it done; False where somebody else went on."""
        results: list[AppendResult] = []
        # Just decided: nothing of it is there yet, and if a helper was faster the sequences tell.
        missing = record.appends if fresh else await self._missing(name, record, fresh=False)
        for _ in range(ATTEMPTS_MAX):
            if not missing:
                done = await self._put(name, _done(record, self._ids.uuid()), version)
                return results, done is not None
            if self._clock.now_ms() - record.staged_at_ms > STAGED_AGE_MS_MAX:
                renewed = await self._renewed(name, record, missing, instead)
                new_version = await self._put(name, renewed, version)
                if new_version is None:
                    return results, False
                record, version = renewed, new_version
                missing = await self._missing(name, record, fresh=fresh)
                continue
            answers = await self._append(name, record, missing)
            results += [answer for answer in answers if answer.ok and not answer.duplicate]
            for answer in answers:
                # Out of sequence: another publisher has come further with the same list. Look again.
                if answer.error is not None and not isinstance(answer.error, OutOfSequence):
                    raise answer.error
            again = any(not answer.ok for answer in answers)
            missing = await self._missing(name, record, fresh=fresh) if again else []
        raise Contended(f"publication {name!r}", attempts=ATTEMPTS_MAX)

    async def _missing(self, name: str, record: _Publication, *, fresh: bool) -> list[_Append]:
        producer = _producer_id(name)
        first: dict[PartitionKeys, int] = {}
        for each in record.appends:
            first.setdefault(PartitionKeys(each.topic, each.partition), each.sequence)
        controls = await self._controls(list(first))
        last: dict[PartitionKeys, int] = {}
        for keys, control in controls.items():
            known = _last(control, producer)
            crowded = control is not None and len(control.producers) >= PRODUCERS_MAX
            if known is None and (first[keys] > 0 or (crowded and not fresh)):
                raise OutcomeUnknown(
                    f"publishing batch {record.batch} of {name!r} to {keys}",
                    reason=f"the partition has forgotten it among {PRODUCERS_MAX} other producers",
                    hint=f"see whether the records are there, then delete the key {_key(name)!r}",
                )
            last[keys] = -1 if known is None else known
        return [
            each for each in record.appends if each.sequence > last[PartitionKeys(each.topic, each.partition)]
        ]

    async def _append(
        self, name: str, record: _Publication, missing: Sequence[_Append]
    ) -> list[AppendResult]:
        answers: list[AppendResult | None] = [None] * len(missing)
        now = self._clock.monotonic()
        units = []
        for place, each in enumerate(missing):
            # A group without its records: they lie in the object, and only their number is asked for here.
            hollow = BytesBatch(pa.nulls(each.count, pa.binary()))
            group = AppendGroup(each.topic, each.partition, hollow, _producer_id(name), each.sequence)
            unit = Unit(PartitionKeys(each.topic, each.partition), None, answers)
            unit.add(group, place)
            unit.append_id, unit.uri = each.append_id, record.objects[each.object]
            unit.slice = Slice(
                topic=each.topic,
                partition=each.partition,
                msg_count=each.count,
                encoding=each.encoding,
                body_offset=each.byte_offset,
                body_length=each.byte_length,
                crc32c=each.crc32c,
            )
            unit.uploaded_at = now + COMMIT_S_MAX
            units.append(unit)
        [results] = await self._writer.commit([Uploaded(answers, units, now)])
        return results

    async def _renewed(
        self,
        name: str,
        record: _Publication,
        missing: Sequence[_Append],
        instead: Sequence[StagedAppend],
    ) -> _Publication:
        """The same list over copies of its objects; over what this call staged, if that is all there is."""
        needed = sorted({each.object for each in missing})
        now_ms = self._clock.now_ms()
        try:
            copies = await asyncio.gather(*[self._copy(record.objects[number]) for number in needed])
        except NotFound as error:
            if len(missing) == len(record.appends) and instead:
                return await self._decide(name, record.batch, instead)
            raise DataLost(
                f"batch {record.batch} of {name!r} was half published when its objects were removed: {error}",
                hint=f"write what is missing by hand, then delete the coordinator's key {_key(name)!r}",
            ) from error
        objects = list(record.objects)
        for number, uri in zip(needed, copies, strict=True):
            objects[number] = uri
        return msgspec.structs.replace(
            record, objects=objects, staged_at_ms=now_ms, revision=self._ids.uuid()
        )

    async def _copy(self, uri: str) -> str:
        data = await self._store.get(key_of(self._store, uri))
        key = shared_wal_key(self._ids.uuid())
        await self._store.put(key, data.data)
        return uri_of(self._store, key)


def _key(name: str) -> str:
    return f"llog-publications/{escaped(name)}"


def _producer_id(name: str) -> str:
    short = (
        name if len(name) <= NAME_CHARS_MAX else hashlib.sha256(name.encode()).hexdigest()[:NAME_CHARS_MAX]
    )
    return f"pub:{short}"


def _last(control: Control | None, producer: str) -> int | None:
    appends = None if control is None else control.producers.get(producer)
    return appends[-1].sequence if appends else None


def _done(record: _Publication, revision: str) -> _Publication:
    return _Publication(batch=record.batch, state="DONE", revision=revision, topics=_topics(record))


def _topics(record: _Publication) -> list[str]:
    return sorted({append.topic for append in record.appends})
