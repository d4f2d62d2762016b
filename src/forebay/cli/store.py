"""`forebay store`: look into an object store, with nothing between the eye and the objects."""

from __future__ import annotations

import base64
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import PreconditionFailed, UsageError
from forebay.kit.limits import format_bytes

if TYPE_CHECKING:
    from forebay.storage import ObjectInfo, ObjectStore

__all__ = ["app"]

app = CommandGroup(help="Look into an object store.")

WHOLE_BYTES_MAX = 64 * 1024 * 1024
"""Largest object `cat` holds in memory at once. Larger ones are read in pieces of this size."""
WRITE_BYTES = 64 * 1024
"""Bytes of one write to stdout: what a pipe holds."""

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A directory, s3://bucket/prefix?endpoint=..., gs://..., az://..."),
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The object's key.")]


@app.command("ls")
def ls(
    url: Url,
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only keys that start with it.")] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=0, metavar="N", help="Stop after N keys.")
    ] = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="Also the version of each object.")] = False,
    exact: Annotated[bool, typer.Option("--bytes", "-b", help="Sizes in bytes, not in KiB and MiB.")] = False,
) -> None:
    """List keys in byte order, with time and size. JSON: one document per line."""

    async def work() -> None:
        async with _open(url) as store:
            async for info in _first(store.list(prefix), limit):
                if out.is_json():
                    out.document(_facts(info))
                else:
                    out.line(_listed(info, long=long, exact=exact))

    wait_for(work())


@app.command("cat")
def cat(
    url: Url,
    key: Key,
    byte_range: Annotated[
        str | None,
        typer.Option("--range", metavar="START:LENGTH", help="Only LENGTH bytes from byte START on."),
    ] = None,
) -> None:
    """Write an object to stdout, byte for byte. JSON: key, size, version, and the data in base64."""
    part = None if byte_range is None else _parse_range(byte_range)

    async def work() -> None:
        async with _open(url) as store:
            info = await store.head(key)
            pieces = _pieces(store, info, *(part or (0, info.size)), whole=part is None)
            if out.is_json():
                data = b"".join([piece async for piece in pieces])
                out.document(
                    {
                        "key": key,
                        "size": info.size,
                        "version": info.version,
                        "data": base64.b64encode(data).decode(),
                    }
                )
                return
            async for piece in pieces:
                _write(piece)

    wait_for(work())


@app.command("stat")
def stat(url: Url, key: Key) -> None:
    """Size, version and time of one object."""

    async def work() -> ObjectInfo:
        async with _open(url) as store:
            return await store.head(key)

    info = wait_for(work())
    if out.is_json():
        out.document(_facts(info))
        return
    out.line(f"key       {out.printable(info.key)}")
    out.line(f"size      {info.size:,} bytes ({format_bytes(info.size)})")
    out.line(f"version   {info.version}")
    out.line(f"modified  {out.time_text(info.last_modified_ms)}")


def _open(url: str) -> ObjectStore:
    from forebay.storage import open_store

    return open_store(url)


async def _first(items: AsyncIterator[ObjectInfo], limit: int | None) -> AsyncIterator[ObjectInfo]:
    left = limit
    if left == 0:
        return
    async for item in items:
        yield item
        if left is not None:
            left -= 1
            if left == 0:
                return


async def _pieces(
    store: ObjectStore, info: ObjectInfo, start: int, length: int, *, whole: bool
) -> AsyncIterator[bytes]:
    """The bytes of one write: in one read, or in several and a last look that they were of the same."""
    if whole and length <= WHOLE_BYTES_MAX:
        yield (await store.get(info.key)).data
        return
    end = start + length
    for position in range(start, end, WHOLE_BYTES_MAX):
        yield await store.get_range(info.key, position, min(WHOLE_BYTES_MAX, end - position))
    now = await store.head(info.key)
    if now.version != info.version:
        raise PreconditionFailed(info.key, expected=f"version {info.version} to the end", actual=now.version)


def _write(data: bytes) -> None:
    """Write to stdout in steps, so that a reader who has gone is noticed early."""
    view = memoryview(data)
    for position in range(0, len(view), WRITE_BYTES):
        sys.stdout.buffer.write(view[position : position + WRITE_BYTES])
    sys.stdout.buffer.flush()


def _parse_range(text: str) -> tuple[int, int]:
    start, colon, length = text.partition(":")
    if not (colon and start.isdecimal() and length.isdecimal()):
        raise UsageError(
            f"{text!r} is not a range", hint="--range START:LENGTH, both in bytes, as in --range 0:100"
        )
    return int(start), int(length)


def _facts(info: ObjectInfo) -> dict[str, Any]:
    return {
        "key": info.key,
        "size": info.size,
        "version": info.version,
        "last_modified_ms": info.last_modified_ms,
    }


def _listed(info: ObjectInfo, *, long: bool, exact: bool) -> str:
    size = str(info.size) if exact else format_bytes(info.size)
    version = f"  {info.version}" if long else ""
    return f"{out.time_text(info.last_modified_ms)}  {size:>12}{version}  {out.printable(info.key)}"
