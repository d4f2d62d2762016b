"""`forebay buffer`: look at a queue, check it, clean up behind it. Nothing here fences a consumer."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._bytes_of import bytes_of
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._options import CommandGroup
from forebay.cli._recognize import batch_or_manifest
from forebay.cli._run import on_ending, wait_for
from forebay.errors import ForebayError, NotFound
from forebay.kit.limits import format_bytes, parse_duration_ms

if TYPE_CHECKING:
    from forebay.buffer import BufferConfig, BufferStats, ConsumedBatch, GcReport, Reader
    from forebay.formats.buffer_batch import Batch
    from forebay.formats.buffer_manifest import Manifest

__all__ = ["app"]

app = CommandGroup(help="Look at a queue of batches, check it, clean up behind it.")

READS_AT_ONCE = 8
"""Batches that `verify` reads at the same time."""
GRACE_MS = 600_000
"""Grace period of garbage collection in milliseconds, as queues have it by default."""
RECORD_CHARS_MAX = 200
"""Characters of a record that text output shows."""

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A directory, s3://bucket/prefix?endpoint=..., gs://..., az://..."),
]
ManifestPath = Annotated[str, typer.Option("--manifest", metavar="PATH", help="Key of the queue's manifest.")]
Prefix = Annotated[str, typer.Option("--prefix", metavar="PREFIX", help="Where the queue's batches lie.")]


@app.command("stats")
def stats(
    url: Url,
    manifest: ManifestPath = "ingest/manifest",
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Also the bytes of all batches, at a request per batch.")
    ] = False,
) -> None:
    """Length, age and size of a queue."""

    async def work() -> BufferStats:
        async with _reader(url, manifest) as reader:
            return _existing(await reader.stats(sizes=sizes), manifest)

    found = wait_for(work())
    if out.is_json():
        out.document(dataclasses.asdict(found))
        return
    for name, value in dataclasses.asdict(found).items():
        if value is not None and name != "exists":
            shown = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
            out.line(f"{name:<20} {shown}")


@app.command("inspect")
def inspect(
    file_or_url: Annotated[
        str, typer.Argument(metavar="FILE_OR_URL", help="A file, or an object: s3://bucket/key?endpoint=...")
    ],
    records: Annotated[bool, typer.Option("--records", help="In text, also every record.")] = False,
) -> None:
    """Show a batch or a manifest. JSON: all of it, records and payloads in base64."""
    from forebay.formats.buffer_batch import Batch

    data = wait_for(bytes_of(file_or_url))
    found = batch_or_manifest(data, file_or_url.partition("?")[0])
    if isinstance(found, Batch):
        _show_batch(found, len(data), records=records)
    else:
        _show_manifest(found, len(data))


@app.command("tail")
def tail(
    url: Url,
    manifest: ManifestPath = "ingest/manifest",
    start: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="N", help="First sequence; else the oldest there is."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Stop after N records.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further batches.")] = False,
    poll: Annotated[
        str, typer.Option("--poll", metavar="TIME", help="How often to look, with --follow.")
    ] = "1s",
) -> None:
    """Print the records that wait in a queue, without taking them. JSON: one document per record."""
    poll_s = parse_duration_ms(poll) / 1000

    async def work() -> None:
        left = limit
        async with _reader(url, manifest) as reader:
            if not follow:  # Who follows may well be there first.
                _existing(await reader.stats(), manifest)
            async for batch in _batches(reader, start, poll_s if follow else None):
                for index, record in enumerate(batch.entries):
                    _print_record(batch, index, record)
                    if left is not None:
                        left -= 1
                        if left == 0:
                            return

    wait_for(work())


@app.command("gc")
def gc(
    url: Url,
    manifest: ManifestPath = "ingest/manifest",
    prefix: Prefix = "ingest",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Leave younger batches alone.")
    ] = "10m",
    go_names: Annotated[bool, typer.Option("--go-names", help="Also batches of the Go producer.")] = False,
) -> None:
    """Delete batches that the queue does not name any more, and say what stays and why."""

    async def work() -> GcReport:
        from forebay.buffer import GarbageCollector

        config = _config(url, manifest, prefix=prefix, grace_ms=parse_duration_ms(grace), go_names=go_names)
        collector = GarbageCollector(config)
        try:
            return await collector.collect(dry_run=dry_run)
        finally:
            await collector.close()

    if parse_duration_ms(grace) < GRACE_MS and not dry_run:
        minutes = GRACE_MS // 120_000
        out.warning(
            f"producers may enqueue what they uploaded up to {minutes} minutes ago; a grace period "
            "of less than twice that is safe only while none of them runs, or where they are set to less"
        )
    report = wait_for(work())
    if out.is_json():
        out.document(report.as_json())
    else:
        _print_report(report)
    if report.refused or report.failed:
        raise typer.Exit(EXIT_FAILED)


@app.command("verify")
def verify(url: Url, manifest: ManifestPath = "ingest/manifest") -> None:
    """Read every batch of a queue and say what is missing or damaged. Exit code 1 if anything is."""

    async def work() -> dict[str, Any]:
        async with _reader(url, manifest) as reader:
            _existing(await reader.stats(), manifest)
            return await _verified(reader)

    report = wait_for(work())
    if out.is_json():
        out.document(report)
    else:
        for problem in report["problems"]:
            out.line(f"{problem['sequence']:>12}  {out.printable(problem['location'])}: {problem['problem']}")
        verdict = "ok" if report["ok"] else f"{len(report['problems']):,} problems"
        out.line(
            f"{verdict}: {report['entries']:,} batches, {report['records']:,} records, "
            f"{format_bytes(report['bytes'])}"
        )
    if not report["ok"]:
        raise typer.Exit(EXIT_FAILED)


@app.command("broker")
def broker(
    url: Url,
    socket: Annotated[Path, typer.Option("--socket", metavar="FILE", help="The Unix socket to listen on.")],
    manifest: ManifestPath = "ingest/manifest",
) -> None:
    """Commit for all producers of this machine, until SIGTERM or Ctrl-C. They go on by themselves without."""

    async def work() -> None:
        from forebay.buffer._commit_broker import CommitBroker, with_permission
        from forebay.buffer._commit_broker_client import PERMISSION_MS
        from forebay.buffer._commit_broker_socket import BrokerServer
        from forebay.storage import open_store

        stop = asyncio.Event()
        on_ending(stop.set)
        config = with_permission(_config(url, manifest), PERMISSION_MS)
        async with open_store(url) as store:
            serving = CommitBroker(store, config)
            async with BrokerServer(serving, socket, manifest_path=manifest, store=store.url):
                where = {"socket": str(socket), "manifest": manifest}
                out.document(where) if out.is_json() else out.line(f"listening on {socket}")
                await stop.wait()

    wait_for(work())


# -- opening


def _config(
    url: str, manifest: str, *, prefix: str = "ingest", grace_ms: int = GRACE_MS, go_names: bool = False
) -> BufferConfig:
    from forebay.buffer import BufferConfig

    return BufferConfig(
        url=url,
        manifest_path=manifest,
        data_path_prefix=prefix,
        gc_grace_period_ms=grace_ms,
        gc_go_names=go_names,
    )


def _reader(url: str, manifest: str) -> Reader:
    from forebay.buffer import Reader

    return Reader(_config(url, manifest))


def _existing(found: BufferStats, manifest: str) -> BufferStats:
    if not found.exists:
        raise NotFound(manifest, hint="there is no queue at this path; --manifest names it")
    return found


# -- showing


def _show_batch(batch: Batch, size: int, *, records: bool) -> None:
    if out.is_json():
        data = [base64.b64encode(record).decode() for record in batch.records()]
        out.document({"kind": "batch", "compression": batch.compression, "records": len(batch), "data": data})
        return
    out.line(f"batch, compression {batch.compression}, {len(batch):,} records, {format_bytes(size)}")
    if records:
        for index, record in enumerate(batch):
            out.line(f"{index:>8}  {_text(record)}")


def _show_manifest(manifest: Manifest, size: int) -> None:
    from forebay.buffer import manifest_as_json

    if out.is_json():
        out.document({"kind": "manifest", **manifest_as_json(manifest)})
        return
    out.line(
        f"manifest, version {manifest.version}, epoch {manifest.epoch}, next sequence "
        f"{manifest.next_sequence}, {len(manifest):,} entries, {format_bytes(size)}"
    )
    rows = []
    for entry in manifest.entries:
        items = entry.metadata
        first = out.time_text(items[0].ingestion_time_ms) if items else ""
        rows.append([str(entry.sequence), out.printable(entry.location), str(len(items)), first])
    if rows:
        out.table(["sequence", "location", "calls", "first"], rows, right=["sequence", "calls"])


def _print_record(batch: ConsumedBatch, index: int, record: bytes) -> None:
    if not out.is_json():
        out.line(_text(record))
        return
    item = batch.metadata_of(index)
    out.document(
        {
            "sequence": batch.sequence,
            "index": index,
            "location": batch.location,
            "ingestion_time_ms": None if item is None else item.ingestion_time_ms,
            "metadata": None if item is None else base64.b64encode(item.payload).decode(),
            "data": base64.b64encode(record).decode(),
        }
    )


def _print_report(report: GcReport) -> None:
    verb = "would be deleted" if report.dry_run else "deleted"
    for key in report.deleted:
        out.line(f"{verb}: {out.printable(key)}")
    for key, problem in report.failed.items():
        out.line(f"failed: {out.printable(key)}: {problem}")
    for reason, count in sorted(report.kept_counts.items()):
        out.line(f"kept, {reason}: {count:,}")
    if report.refused:
        out.line(f"nothing was deleted: {report.refused}")
    out.line(f"{len(report.deleted):,} batches {verb}, {format_bytes(report.deleted_bytes)}")


def _text(record: bytes) -> str:
    try:
        text = out.printable(record.decode())
    except UnicodeDecodeError:
        text = record[:RECORD_CHARS_MAX].hex()
    return text if len(text) <= RECORD_CHARS_MAX else f"{text[:RECORD_CHARS_MAX]}..."


# -- reading


async def _batches(reader: Reader, start: int | None, poll_s: float | None) -> AsyncIterator[ConsumedBatch]:
    """Batches from `start` on, in order; with `poll_s` also those to come. What is consumed is skipped."""
    following = start or 0
    while True:
        manifest = await reader.manifest()
        for sequence in range(max(following, manifest.first_sequence), manifest.next_sequence):
            entry = manifest.entry(sequence)
            if entry is not None:
                yield await reader.read(entry)
        following = max(following, manifest.next_sequence)
        if poll_s is None:
            return
        await asyncio.sleep(poll_s)


async def _verified(reader: Reader) -> dict[str, Any]:
    entries = await reader.entries()
    turns = asyncio.Semaphore(READS_AT_ONCE)
    totals = {"records": 0, "bytes": 0}
    seen: dict[str, int] = {}
    problems: list[dict[str, Any]] = []

    with out.progress() as bar:
        task = bar.add_task("reading batches", total=len(entries))

        async def check(entry: Any) -> None:
            async with turns:
                try:
                    batch = await reader.read(entry)
                    totals["records"] += len(batch)
                    totals["bytes"] += sum(map(len, batch.entries.records()))
                except ForebayError as error:
                    problems.append(_problem(entry, error.message))
            bar.advance(task)

        for entry in entries:
            if entry.location in seen:
                problems.append(_problem(entry, f"the same batch as sequence {seen[entry.location]}"))
            seen.setdefault(entry.location, entry.sequence)
        await asyncio.gather(*[check(entry) for entry in entries])
    problems.sort(key=lambda problem: problem["sequence"])
    return {"ok": not problems, "entries": len(entries), **totals, "problems": problems}


def _problem(entry: Any, text: str) -> dict[str, Any]:
    return {"sequence": entry.sequence, "location": entry.location, "problem": text}
