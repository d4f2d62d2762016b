"""`forebay compact`: fold small appends into large objects, once or for as long as the process runs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._log_parts import LogParts, open_log
from forebay.cli._options import CommandGroup
from forebay.cli._run import on_ending, wait_for
from forebay.errors import ForebayError, Unavailable, UsageError
from forebay.kit.limits import format_bytes, parse_bytes, parse_duration_ms

if TYPE_CHECKING:
    from forebay.log import CompactionResult, CompactorConfig, CompactorService

__all__ = ["app"]

app = CommandGroup(help="Compact.")

LOOPBACK = "127.0.0.1"
"""Where `--listen` binds if it names no host."""


@app.command("compact")
@deployment_options
def compact(
    deployment: Deployment,
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic.", show_default=False)
    ] = None,
    partition: Annotated[
        int | None,
        typer.Argument(metavar="[PARTITION]", min=0, help="Only this partition.", show_default=False),
    ] = None,
    service: Annotated[
        bool, typer.Option("--service/--once", help="Until it is stopped, or what is there now.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="SIZE", help="Size of a compacted object.", show_default="64MiB"),
    ] = None,
    min_age: Annotated[
        str | None,
        typer.Option("--min-age", metavar="TIME", help="Leave younger appends alone.", show_default="2m"),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Partitions at once, with --service.")
    ] = 2,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="[HOST:]PORT",
            help="Serve /health and /metrics there, with --service.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fold small appends into large objects.

    With --once (the default) all that is old enough is folded, small runs too, and the command ends. With
    --service it goes on until SIGTERM or Ctrl-C, finds new topics by itself, waits for full objects, and
    vacuums now and then. Several may run at once, on any number of machines. --listen opens GET /health,
    /metrics and /metrics/prometheus, on 127.0.0.1 unless a host is named.
    """
    from forebay.log import CompactorConfig

    config = CompactorConfig()
    if target is not None:
        config = replace(config, target_bytes=parse_bytes(target))
    if min_age is not None:
        config = replace(config, min_age_ms=parse_duration_ms(min_age))
    if service:
        if topic is not None:
            raise UsageError("--service looks after all topics", hint="leave TOPIC out, or use --once")
        wait_for(_serve(deployment, config, workers, None if listen is None else _address(listen)))
        return
    if listen is not None:
        raise UsageError("--listen belongs to --service", hint="add --service, or leave it out")
    lines = wait_for(_once(deployment, topic, partition, replace(config, wait_for_full_ms=0)))
    if out.is_json():
        out.document({"partitions": lines})
    else:
        _print(lines)
    if any(line["error"] for line in lines):
        raise typer.Exit(EXIT_FAILED)


async def _once(
    deployment: Deployment, topic: str | None, partition: int | None, config: CompactorConfig
) -> list[dict[str, Any]]:
    async with open_log(deployment) as parts:
        places = await _places(parts, topic, partition)
        compactor = parts.compactor(config)
        lines = []
        with out.progress() as bar:
            task = bar.add_task("compacting", total=len(places))
            for name, number in places:

                def told(result: CompactionResult, place: str = f"{name}:{number}") -> None:
                    bar.update(task, description=f"{place}: {result.outcome}, {result.lag_records:,} left")

                error = ""
                results: list[CompactionResult] = []
                try:
                    results = await compactor.compact_all(name, number, progress=told)
                except ForebayError as failure:
                    error = failure.message
                lines.append(_line(name, number, results, error))
                bar.advance(task)
        return lines


async def _places(parts: LogParts, topic: str | None, partition: int | None) -> list[tuple[str, int]]:
    catalog = parts.catalog()
    topics = await catalog.list() if topic is None else [await catalog.describe(topic)]
    if partition is not None:
        topics[0].check_partition(partition)
        return [(topics[0].topic, partition)]
    # A topic that is named is compacted whatever its settings say: somebody asked for it.
    return [
        (each.topic, number)
        for each in topics
        if topic is not None or each.settings.compaction
        for number in range(each.partitions)
    ]


def _line(topic: str, partition: int, results: list[CompactionResult], error: str) -> dict[str, Any]:
    last = asdict(results[-1]) if results else {}
    return {
        "topic": topic,
        "partition": partition,
        "runs": sum(each.outcome == "compacted" for each in results),
        "resumed": sum(each.outcome == "resumed" for each in results),
        "records": sum(each.records for each in results),
        "entries": sum(each.entries for each in results),
        "bytes_read": sum(each.bytes_read for each in results),
        "bytes_written": sum(each.bytes_written for each in results),
        "lag_records": last.get("lag_records", 0),
        "reason": last.get("reason", ""),
        "error": error,
    }


def _print(lines: list[dict[str, Any]]) -> None:
    rows = [
        [
            f"{line['topic']}:{line['partition']}",
            f"{line['runs'] + line['resumed']:,}",
            f"{line['records']:,}",
            f"{line['entries']:,}",
            format_bytes(line["bytes_written"]),
            f"{line['lag_records']:,}",
            line["error"] or line["reason"],
        ]
        for line in lines
    ]
    columns = ["partition", "runs", "records", "entries", "written", "left", "then"]
    out.table(columns, rows, right=columns[1:6])


def _address(text: str) -> tuple[str, int]:
    """Host and port of `--listen`; the host may be left out, and one of IPv6 stands in brackets."""
    host, colon, number = text.rpartition(":")
    if not (number.isascii() and number.isdecimal() and len(number) <= 5) or (colon and not host):
        raise UsageError(f"--listen {text!r}", hint="as 9090, 127.0.0.1:9090 or [::1]:9090")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(number)


async def _serve(
    deployment: Deployment, config: CompactorConfig, workers: int, address: tuple[str, int] | None
) -> None:
    from forebay.log import CompactorService, CompactorServiceConfig

    stop = asyncio.Event()
    on_ending(stop.set)
    async with contextlib.AsyncExitStack() as stack:
        parts = await stack.enter_async_context(open_log(deployment, create=True))
        service = CompactorService(
            parts.store,
            parts.coordinator,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
            config=CompactorServiceConfig(compaction=config, workers=workers),
        )
        await stack.enter_async_context(service)
        url = None if address is None else await _open_door(stack, service, parts, address)
        if out.is_json():
            out.document({"store": parts.store.url, "workers": workers, "url": url})
        else:
            shown = "" if url is None else f", health and metrics on {url}"
            out.line(f"compacting {parts.store.url}, {workers} partitions at once{shown}")
        sys.stdout.flush()
        await stop.wait()
        await stack.aclose()
        if out.is_json():
            out.document(service.health().as_json())


async def _open_door(
    stack: contextlib.AsyncExitStack, service: CompactorService, parts: LogParts, address: tuple[str, int]
) -> str:
    """Listen until the stack ends; the address."""
    from forebay.broker import ServiceDoor

    door = ServiceDoor(service, service.metrics, clock=parts.clock)
    try:
        await door.start(*address)
    except Unavailable as error:
        raise Unavailable(error.message, hint="another process may have the port; name another") from error
    await stack.enter_async_context(door)
    return door.url
