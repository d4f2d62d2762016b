"""Plain Parquet with a commit log of our own, for readers that know nothing but files.

    <table>/part-<random>.parquet                 data; below column=value/ where it is partitioned
    <table>/_forebay/commits/<number>.json        one object per commit, 20 digits, from 0, without a gap

A commit:

    {"format": 1, "number": 7, "commit": "<random>", "created_at_ms": ...,
     "partition_by": [...], "schema": "<base64 of the Arrow schema>",
     "positions": {"<export>/<lane>": <next position>, ...},      all of them, not only those that moved
     "files": [{"path", "size", "rows", "partition": {column: text}}, ...]}

A commit is made by putting its object under the next number if no object has it. That is the one step that is
atomic on every store, so of two commits on the same state one is refused. The files of the table are those
named by commits; `live_files` lists them. A reader that globs *.parquet instead sees orphans of crashes too.

A number that is free may also be one of a table that was deleted, files and all, since it was loaded. So the
commit before is looked at first. Who deletes between that look and the put leaves a commit without those
before it: no table, and told as what it is.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from forebay.errors import FormatError, NotDone, NotFound, OutcomeUnknown, PreconditionFailed, UsageError
from forebay.spark.export._clients import Clients
from forebay.spark.export._errors import CommitConflict, CommitUnknown
from forebay.spark.export._facts import DataFile
from forebay.spark.export._tables import Commit, Handle, Table
from forebay.storage import ABSENT, ObjectStore

__all__ = ["ParquetTable"]

PREFIX: Final = "_forebay/commits/"
FORMAT: Final = 1
DIGITS: Final = 20


class _File(msgspec.Struct, frozen=True):
    path: str
    size: int
    rows: int
    partition: dict[str, str | None]


class _Commit(msgspec.Struct, frozen=True):
    format: int
    number: int
    commit: str
    created_at_ms: int
    partition_by: list[str]
    schema: str
    positions: dict[str, int]
    files: list[_File]


class ParquetTable(Table):
    """A directory of Parquet files."""

    def __init__(self, location: str, name: str, clients: Clients) -> None:
        self._store = location if "://" in location else str(Path(location).absolute())
        if Path(self._store).is_file():
            raise UsageError(
                f"{location} is a file", hint="a Parquet table is a directory: choose another place"
            )
        self._name = name
        self._clients = clients

    @property
    def store(self) -> str:
        """The table's own directory."""
        return self._store

    def load(self) -> ParquetHandle | None:
        """The last commit."""
        store = self._clients.store(self.store)
        last = self._clients.run(_last(store))
        return None if last is None else ParquetHandle(last, store, self._name, self._clients)

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Commit 0, without files."""
        store = self._clients.store(self.store)
        if self._clients.run(_has(store, "_delta_log/")):
            raise UsageError(
                f"{self._store} is a Delta table", hint="delta:PATH exports into it; or choose another place"
            )
        first = _Commit(
            FORMAT,
            0,
            self._clients.ids.token(),
            self._clients.clock.now_ms(),
            list(partition_by),
            _text_of(schema),
            {},
            [],
        )
        try:
            self._clients.run(_put(store, first))
        except PreconditionFailed:
            return


class ParquetHandle(Handle):
    """The table at one commit."""

    def __init__(self, last: _Commit, store: ObjectStore, name: str, clients: Clients) -> None:
        self._last = last
        self._store = store
        self._name = name
        self._clients = clients
        self.schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(last.schema)))
        self.partition_by = tuple(last.partition_by)

    def position(self, lane: str) -> int | None:
        """As the last commit says."""
        return self._last.positions.get(f"{self._name}/{lane}")

    def commit(self, commit: Commit) -> str:
        """The next number, if nobody has it."""
        positions = {f"{self._name}/{lane}": position for lane, position in commit.positions.items()}
        self._next(commit.commit_id, self._last.schema, positions, commit.files)
        return str(self._last.number + 1)

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """A commit with more columns, or more fields inside of them, and no files."""
        columns = {each.name: each for each in self.schema} | {each.name: each for each in fields}
        self._next(self._clients.ids.token(), _text_of(pa.schema(list(columns.values()))), {}, ())

    def _next(
        self, commit_id: str, schema: str, positions: Mapping[str, int], files: Sequence[DataFile]
    ) -> None:
        last = self._last
        following = _Commit(
            FORMAT,
            last.number + 1,
            commit_id,
            self._clients.clock.now_ms(),
            last.partition_by,
            schema,
            last.positions | dict(positions),
            [_File(file.path, file.size, file.rows, dict(file.partition)) for file in files],
        )
        if not self._clients.run(_is_there(self._store, last)):
            raise CommitConflict(self._store.url, "the table was deleted meanwhile")
        try:
            self._clients.run(_put(self._store, following))
        except OutcomeUnknown as error:
            raise CommitUnknown(f"commit to {self._store.url}", reason=error.message) from error
        except PreconditionFailed as error:
            raise CommitConflict(self._store.url) from error

    def live_files(self) -> dict[str, int]:
        """The files of all commits up to this one."""
        return self._clients.run(self._live_files())

    async def _live_files(self) -> dict[str, int]:
        found = {}
        for number in range(self._last.number + 1):
            commit = await _read(self._store, _key(number))
            found.update({file.path: file.rows for file in commit.files})
        return found


def _text_of(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _key(number: int) -> str:
    return f"{PREFIX}{number:0{DIGITS}d}.json"


async def _put(store: ObjectStore, commit: _Commit) -> None:
    await store.put(_key(commit.number), msgspec.json.encode(commit), ABSENT)


async def _has(store: ObjectStore, prefix: str) -> bool:
    async for _ in store.list(prefix):
        return True
    return False


async def _is_there(store: ObjectStore, commit: _Commit) -> bool:
    """Whether a commit that was read is still part of the table."""
    try:
        return (await _read(store, _key(commit.number))).commit == commit.commit
    except NotFound:
        return False


async def _last(store: ObjectStore) -> _Commit | None:
    first = last = None
    count = 0
    async for info in store.list(PREFIX):
        first, last = first or info.key, info.key
        count += 1
    if last is None:
        return None
    commit = await _read(store, last)
    if first != _key(0):
        raise NotDone(
            f"{store.url}: the first commits of this table are gone, and number {commit.number} is there: it "
            "was deleted while an export wrote to it, or not all of it was",
            hint=f"delete what is left, at least everything under {PREFIX}, and the next export makes the "
            "table anew from the earliest record on; or bring back what was deleted",
        )
    if commit.number != count - 1:
        raise NotDone(
            f"{store.url}: {count} commits, the last is number {commit.number}",
            hint=f"commits under {PREFIX} were deleted; restore them, or export into a new table",
        )
    return commit


async def _read(store: ObjectStore, key: str) -> _Commit:
    data: Any = (await store.get(key)).data
    try:
        commit = msgspec.json.decode(data, type=_Commit)
    except msgspec.DecodeError as error:
        raise FormatError(f"{key} is no commit: {error}", hint="restore the object") from error
    if commit.format != FORMAT:
        raise FormatError(f"{key} has format {commit.format}", hint="use a newer Forebay")
    return commit
