"""The smallest log that keeps the promise: immutable batch objects, and one head object that lists them.

A batch is acknowledged when the compare-and-set of the head that names it is done. Nothing else counts: a
batch that was uploaded and never named is no loss, since nobody was told about it. This is how the engines to
come work as well; here it is a hundred lines, to be seen through.

Three outcomes of a head write, three answers: done is an acknowledgement; `PreconditionFailed` means another
writer was first, so the head is read and the append tried on what is there now; `OutcomeUnknown` is raised.
The token in the head makes each body, and so each version, one of a kind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from forebay.cli.demo.records import checksum, make_batch, wrong_records
from forebay.errors import NotFound, PreconditionFailed
from forebay.kit.ids import IdSource
from forebay.storage import ABSENT, ObjectStore

__all__ = ["Counts", "Entry", "Journal"]

APPEND_ATTEMPTS_MAX = 200
"""Tries of one append against other writers; each one that fails means that another one succeeded."""


@dataclass(slots=True)
class Counts:
    """What a piece of work cost."""

    requests: int = 0
    conflicts: int = 0
    """Appends that found another writer first and tried again."""
    bytes: int = 0
    """Bytes of batches, written or read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch as the head names it."""

    writer: str
    batch: int
    key: str
    crc: int


@dataclass(slots=True)
class Journal:
    """One writer's or reader's view of the demo's log."""

    store: ObjectStore
    prefix: str
    """First part of every key, different for each run."""
    ids: IdSource = field(default_factory=IdSource)
    counts: Counts = field(default_factory=Counts)
    _head: tuple[Any, list[Entry]] = (ABSENT, [])

    async def append(self, writer: str, batch: int) -> None:
        """Make one batch durable and name it in the head. It is acknowledged when this returns."""
        data = make_batch(writer, batch)
        entry = Entry(writer, batch, f"{self.prefix}/batch/{self.ids.ulid()}", checksum(data))
        await self.store.put(entry.key, data, ABSENT)
        self.counts.requests += 1
        self.counts.bytes += len(data)
        for _ in range(APPEND_ATTEMPTS_MAX):
            if await self._name(entry):
                return
            self.counts.conflicts += 1
            await self.read_head()
        raise PreconditionFailed(self._head_key, expected=self._head[0])

    async def _name(self, entry: Entry) -> bool:
        version, entries = self._head
        changed = [*entries, entry]
        self.counts.requests += 1
        try:
            self._head = await self.store.put(self._head_key, self._encode(changed), version), changed
        except PreconditionFailed:
            return False
        return True

    async def read_head(self) -> list[Entry]:
        """The batches that are acknowledged now."""
        self.counts.requests += 1
        try:
            stored = await self.store.get(self._head_key)
        except NotFound:
            self._head = ABSENT, []
        else:
            self._head = stored.version, [Entry(*fields) for fields in json.loads(stored.data)["entries"]]
        return self._head[1]

    async def damaged_records(self, entry: Entry) -> int:
        """Read one batch back and count the records that are not as they were written."""
        self.counts.requests += 1
        try:
            data = (await self.store.get(entry.key)).data
        except NotFound:
            data = b""
        self.counts.bytes += len(data)
        wrong = wrong_records(entry.writer, entry.batch, data)
        return max(wrong, 1) if checksum(data) != entry.crc else wrong

    async def keys(self) -> list[str]:
        """Every object of this run, named in the head or not."""
        return [info.key async for info in self.store.list(f"{self.prefix}/")]

    @property
    def _head_key(self) -> str:
        return f"{self.prefix}/head"

    def _encode(self, entries: list[Entry]) -> bytes:
        rows = [[entry.writer, entry.batch, entry.key, entry.crc] for entry in entries]
        return json.dumps({"token": self.ids.token(), "entries": rows}).encode()
