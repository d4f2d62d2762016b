"""`forebay produce`: from stdin or files into a topic.

Input is read as it comes and cut at the delimiter, so a slow writer is not kept waiting and a fast one is not
read faster than records become durable. The command ends when everything is: exit code 0 says that all of it
is durable, 1 that something is not, and the message says whether that is certain.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import typer

from forebay.cli import _output as out
from forebay.cli._door import DoorChoice, door_options
from forebay.cli._options import CommandGroup
from forebay.cli._record_text import delimiter
from forebay.cli._run import wait_for
from forebay.errors import LimitExceeded, UsageError
from forebay.formats.http_messages import Base64

__all__ = ["app"]

app = CommandGroup(help="Send lines of stdin or files to a topic.")

READ_BYTES = 1024 * 1024
"""Bytes read from the input at a time, at most."""
RECORD_BYTES_MAX = 16 * 1024 * 1024
"""Largest record: input without a delimiter must not fill the memory."""


@dataclass(slots=True)
class Columns:
    """Records that go to one partition, or to any."""

    partition: int | None
    values: list[bytes] = field(default_factory=list)
    keys: list[bytes | None] | None = None
    timestamps_ms: list[int | None] | None = None
    headers: list[list[tuple[str, bytes | None]] | None] | None = None
    """Pairs: a name may come more than once."""


class JsonRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of `-F json`: what `forebay consume -o json` prints can be sent again."""

    value: str | Base64
    key: str | Base64 | None = None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: dict[str, str | Base64 | None] | list[tuple[str, str | Base64 | None]] | None = None
    topic: str | None = None
    offset: int | None = None


@app.command("produce")
@door_options
def produce(
    door: DoorChoice,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    delimiter_text: Annotated[
        str, typer.Option("--delimiter", "-D", metavar="TEXT", help="What ends a record.")
    ] = "\\n",
    key_delimiter: Annotated[
        str | None,
        typer.Option(
            "--key-delimiter", "-K", metavar="TEXT", help="What parts key and value.", show_default=False
        ),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition", "-p", metavar="N", min=0, help="Else by key, or in turn.", show_default=False
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", "-F", metavar="FORM", help="raw, or json: a document per record.")
    ] = "raw",
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-l", metavar="FILE", help="Read files in place of stdin.", show_default=False
        ),
    ] = None,
    linger_ms: Annotated[
        int, typer.Option("--linger-ms", metavar="MS", min=0, help="Wait so long for more to send at once.")
    ] = 20,
) -> None:
    """Send lines of stdin or files to a topic.

    One record per line. Done when all of them are durable. JSON: a line per acknowledged batch.
    """
    if form not in ("raw", "json"):
        raise UsageError(f"{form!r} is no format of records", hint="raw or json")
    if form == "json" and key_delimiter is not None:
        raise UsageError("-K and -F json exclude each other", hint="in JSON the key is a field")
    key_end = None if key_delimiter is None else delimiter(key_delimiter)
    reading = _Reading(delimiter(delimiter_text), key_end, form, partition)

    async def work() -> int:
        async with door.open(create=True) as opened, opened.producer(linger_ms) as producer:
            return await _send_all(producer, topic, reading, files or [])

    count = wait_for(work())
    if sys.stderr.isatty() and not out.is_json():
        sys.stderr.write(f"{count:,} records are durable in {topic}\n")


async def _send_all(producer: Any, topic: str, reading: _Reading, files: list[Path]) -> int:
    receipts: deque[Any] = deque()
    printing = out.is_json()
    count = 0
    async for columns in reading.batches(files):
        await producer.room()
        receipt = producer.send(
            topic,
            columns.values,
            partition=columns.partition,
            keys=columns.keys,
            timestamps_ms=columns.timestamps_ms,
            headers=columns.headers,
        )
        count += len(columns.values)
        receipts.append(receipt)
        while receipts and receipts[0].done():
            await _tell(receipts.popleft(), printing)
    with suppress(Exception):
        await producer.flush()  # What went wrong is told by the receipts, in order.
    while receipts:
        await _tell(receipts.popleft(), printing)
    return count


async def _tell(receipt: Any, printing: bool) -> None:
    delivery = await receipt
    if printing:
        for part in delivery.parts:
            names = ("topic", "partition", "start_offset", "end_offset", "count")
            out.document({name: getattr(part, name) for name in names})
        sys.stdout.flush()


class _Reading:
    """Cuts input into records, and records into columns."""

    def __init__(self, end: bytes, key_end: bytes | None, form: str, partition: int | None) -> None:
        self._end = end
        self._key_end = key_end
        self._json = form == "json"
        self._partition = partition
        self._decoder = msgspec.json.Decoder(JsonRecord)
        self._number = 0

    async def batches(self, files: list[Path]) -> AsyncIterator[Columns]:
        if not files:
            async for columns in self._of(sys.stdin.buffer):
                yield columns
        for path in files:
            source = await asyncio.to_thread(path.open, "rb")
            with source:
                async for columns in self._of(source):
                    yield columns

    async def _of(self, source: IO[bytes]) -> AsyncIterator[Columns]:
        rest = b""
        read = getattr(source, "read1", source.read)
        while data := await asyncio.to_thread(read, READ_BYTES):
            *records, rest = (rest + data).split(self._end) if rest else data.split(self._end)
            if len(rest) > RECORD_BYTES_MAX:
                raise LimitExceeded(
                    "RECORD_BYTES_MAX", limit=RECORD_BYTES_MAX, actual=len(rest), hint="check -D"
                )
            for columns in self._columns(records):
                yield columns
        # The last line needs no end; an empty rest is none.
        for columns in self._columns([rest] if rest else []):
            yield columns

    def _columns(self, records: list[bytes]) -> Iterator[Columns]:
        if not records:
            return
        if self._json:
            yield from self._of_json(records)
        elif self._key_end is None:
            yield Columns(self._partition, records)
        else:
            parts = [record.partition(self._key_end) for record in records]
            # A record without the delimiter is all value.
            values = [value if found else key for key, found, value in parts]
            yield Columns(self._partition, values, [key if found else None for key, found, _ in parts])

    def _of_json(self, records: list[bytes]) -> Iterator[Columns]:
        by_partition: dict[int | None, Columns] = {}
        for record in records:
            self._number += 1
            if record.strip():
                found = self._decoded(record)
                place = self._partition if self._partition is not None else found.partition
                _add(by_partition.setdefault(place, Columns(place, [], [], [], [])), found)
        for columns in by_partition.values():
            yield _tidy(columns)

    def _decoded(self, record: bytes) -> JsonRecord:
        try:
            return self._decoder.decode(record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"record {self._number} is no JSON record: {error}",
                hint='as {"value": "text", "key": "k", "partition": 0}; bytes as {"base64": ...}',
            ) from None


def _bytes(value: str | Base64 | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else None if value is None else value.base64


def _add(columns: Columns, record: JsonRecord) -> None:
    value = _bytes(record.value)
    assert value is not None and columns.keys is not None
    assert columns.timestamps_ms is not None and columns.headers is not None
    columns.values.append(value)
    columns.keys.append(_bytes(record.key))
    columns.timestamps_ms.append(record.timestamp_ms)
    pairs = record.headers.items() if isinstance(record.headers, dict) else record.headers or ()
    columns.headers.append([(name, _bytes(each)) for name, each in pairs] or None)


def _tidy(columns: Columns) -> Columns:
    """Without the columns that nobody filled. Times are all given or all left to the broker."""
    if columns.keys is not None and not any(key is not None for key in columns.keys):
        columns.keys = None
    if columns.headers is not None and not any(columns.headers):
        columns.headers = None
    times = columns.timestamps_ms or []
    if all(time is None for time in times):
        columns.timestamps_ms = None
    elif any(time is None for time in times):
        raise UsageError("some records have a timestamp_ms and some have none", hint="give it to all")
    return columns
