"""Records as text, and places in a log as words: what kcat's users have in their fingers.

    -f FORMAT   %t topic, %p partition, %o offset, %k key, %s value, %h headers, %T time in ms, %S bytes of
                the value, %K bytes of the key (-1: none), %% a percent sign; \\n \\t \\r \\0 \\xNN
    --from      earliest, latest, N (an offset), -N (the last N of each partition), @TIME

Text is written as bytes: a value that is not UTF-8 goes through a pipe as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.cli._log_parts import parse_time_ms
from forebay.errors import UsageError
from forebay.formats.http_messages import TailEvent, TextOrBytes, as_text_or_bytes

if TYPE_CHECKING:
    import pyarrow as pa

    from forebay.cli._door import Door

__all__ = ["Formatter", "Place", "as_json", "as_values", "delimiter", "parse_place"]

_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_PIECES: Final = re.compile(r"%(.)|\\x([0-9a-fA-F]{2})|\\(.)|([^%\\]+)", re.DOTALL)
_FORMAT_HINT: Final = r"known are %t %p %o %k %s %h %T %S %K %% and \n \t \r \0 \xNN"

Row = tuple[str, int, int, int, bytes | None, bytes, list[dict[str, bytes | str | None]] | None]


def _headers(row: Row) -> bytes:
    pairs = [(str(each["key"]), each["value"]) for each in row[6] or ()]
    return b",".join(
        [name.encode() + b"=" + (value if isinstance(value, bytes) else b"") for name, value in pairs]
    )


_FIELDS: Final[dict[str, Callable[[Row], bytes]]] = {
    "t": lambda row: row[0].encode(),
    "p": lambda row: b"%d" % row[1],
    "o": lambda row: b"%d" % row[2],
    "T": lambda row: b"%d" % row[3],
    "k": lambda row: row[4] or b"",
    "K": lambda row: b"%d" % (-1 if row[4] is None else len(row[4])),
    "s": lambda row: row[5],
    "S": lambda row: b"%d" % len(row[5]),
    "h": _headers,
}


class Formatter:
    """A format string, understood once."""

    def __init__(self, text: str) -> None:
        self._pieces: list[bytes | Callable[[Row], bytes]] = []
        at = 0
        for match in _PIECES.finditer(text):
            if match.start() != at:
                break
            at = match.end()
            self._pieces.append(_piece(text, *match.groups()))
        if at != len(text):
            raise UsageError(f"{text[at:]!r} in a format", hint=_FORMAT_HINT)

    def __call__(self, batch: pa.RecordBatch) -> bytes:
        """The records of a batch, one after the other."""
        pieces = self._pieces
        return b"".join(
            [piece if isinstance(piece, bytes) else piece(row) for row in rows(batch) for piece in pieces]
        )


def _piece(
    text: str, field: str | None, code: str | None, escape: str | None, plain: str | None
) -> bytes | Callable[[Row], bytes]:
    if plain is not None:
        return plain.encode()
    if code is not None:
        return bytes([int(code, 16)])
    if field == "%":
        return b"%"
    if field in _FIELDS:
        return _FIELDS[field]
    if escape in _ESCAPES:
        return _ESCAPES[escape]
    raise UsageError(f"{'%' + field if field else chr(92) + str(escape)!r} in {text!r}", hint=_FORMAT_HINT)


def rows(batch: pa.RecordBatch) -> list[Row]:
    """The records as tuples: topic, partition, offset, time in ms, key, value, headers."""
    import pyarrow as pa

    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    names = ("topic", "partition", "offset")
    columns = [batch.column(name).to_pylist() for name in names] + [times]
    columns += [batch.column(name).to_pylist() for name in ("key", "value", "headers")]
    return list(zip(*columns, strict=True))


def as_values(batch: pa.RecordBatch) -> bytes:
    """The values, a line each."""
    return b"\n".join([*batch.column("value").to_pylist(), b""])


def as_json(batch: pa.RecordBatch) -> bytes:
    """A document per line."""
    lines = [msgspec.json.encode(_event(row)) for row in rows(batch)]
    return b"\n".join([*lines, b""])


def _event(row: Row) -> TailEvent:
    topic, partition, offset, time_ms, key, value, headers = row
    return TailEvent(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp_ms=time_ms,
        value=as_text_or_bytes(value),
        key=None if key is None else as_text_or_bytes(key),
        headers=None if not headers else [_header(each) for each in headers],
    )


def _header(entry: dict[str, bytes | str | None]) -> tuple[str, TextOrBytes | None]:
    value = entry["value"]
    return str(entry["key"]), as_text_or_bytes(value) if isinstance(value, bytes) else None


def delimiter(text: str) -> bytes:
    """A delimiter as people type it: `\\n`, `\\t`, `\\x1e`, or any text."""
    pieces = []
    for match in _PIECES.finditer(text):
        field, code, escape, plain = match.groups()
        if field is not None:
            pieces.append(f"%{field}".encode())
        else:
            found = _piece(text, None, code, escape, plain)
            assert isinstance(found, bytes)
            pieces.append(found)
    joined = b"".join(pieces)
    if not joined:
        raise UsageError("an empty delimiter", hint=r"for example -D '\n' or -K :")
    return joined


@dataclass(frozen=True, slots=True)
class Place:
    """A place in every partition of a topic."""

    text: str
    kind: str
    """earliest, latest, offset, last or time."""
    number: int = 0

    async def resolve(self, door: Door, topic: str, partition: int) -> int:
        """The offset it means now."""
        if self.kind == "time":
            return await door.at_time(topic, partition, self.number)
        if self.kind == "offset":
            return self.number
        earliest, next_offset = await door.ends(topic, partition)
        if self.kind == "last":
            return max(earliest, next_offset - self.number)
        return earliest if self.kind == "earliest" else next_offset


def parse_place(text: str) -> Place:
    """From `earliest`, `latest`, `N`, `-N` or `@TIME`."""
    if text in ("earliest", "beginning"):
        return Place(text, "earliest")
    if text in ("latest", "end"):
        return Place(text, "latest")
    if text.startswith("@"):
        return Place(text, "time", parse_time_ms(text[1:]))
    if text.isdecimal():
        return Place(text, "offset", int(text))
    if text.startswith("-") and text[1:].isdecimal():
        return Place(text, "last", int(text[1:]))
    raise UsageError(f"{text!r} is no place in a log", hint="earliest, latest, N, -N or @TIME")
