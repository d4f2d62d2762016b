"""`forebay quiver`: look into a store's directory without opening it; repair it; send it to a bucket.

`inspect`, `stats`, `verify` and `tail` only read. They may run beside the process that has the store open;
what that process writes or deletes in the meantime may then be missing from the answer. `repair` and
`forward` open the store, and are refused while another process has it.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import ForebayError, NotFound
from forebay.kit.limits import format_bytes

if TYPE_CHECKING:
    from forebay.quiver import DirectoryView, Forwarded, Repaired

__all__ = ["app"]

app = CommandGroup(help="Look into a Quiver store on disk, repair it, forward it.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a store.")]


class FileFormat(enum.Enum):
    """What a forwarded object is."""

    ARROW = "arrow"
    PARQUET = "parquet"


class Damaged(ForebayError):
    """A verification that found something; its answer was printed already."""


def _view(directory: Path) -> DirectoryView:
    from forebay.quiver import DirectoryView

    if not directory.is_dir():
        raise NotFound(str(directory), hint="give the directory of a Quiver store")
    return DirectoryView.read(directory)


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A store's directory, or one segment file.")],
) -> None:
    """Show what is in a store, or in one segment file."""
    from forebay.quiver import describe_segment

    facts: dict[str, Any] = describe_segment(path) if path.is_file() else _view(path).describe()
    if out.is_json():
        out.document(facts)
        return
    segments = facts.pop("segments", [])
    for name, value in facts.items():
        out.line(f"{name:<16} {out.printable(json.dumps(value))}")
    for each in segments:
        out.line(
            f"segment {each['segment']:<8} {out.printable(each['signal']):<10} {each['rows']:>10,} rows  "
            f"{format_bytes(each['file_bytes'])}"
        )


@app.command("stats")
def stats(directory: Directory) -> None:
    """Show sizes, positions, lags and losses."""
    facts = _view(directory).stats()
    if out.is_json():
        out.document(facts)
        return
    subscribers = facts.pop("subscribers")
    for name, value in facts.items():
        out.line(f"{name:<16} {json.dumps(value)}")
    for each in subscribers:
        out.line(
            f"{each['name']:<16} resolved to {each['high_water']}, {each['lag_segments']} segments behind"
        )


@app.command("verify")
def verify(directory: Directory) -> None:
    """Compare every checksum of every file. Ends with 1 where something is damaged."""
    view = _view(directory)
    problems = view.verify()
    if out.is_json():
        report = asdict(view.found.report)
        out.document({"ok": not problems, "problems": problems, "recovery": report})
    else:
        for problem in problems:
            out.line(f"problem: {out.printable(problem)}")
        out.line(f"{len(view.found.segments):,} segments, {len(problems)} problems")
    if problems:
        raise Damaged(f"{len(problems)} problems", hint="opening the store puts damaged parts aside")


@app.command("tail")
def tail(
    directory: Directory,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", help="Rows to show.", min=1)] = 10,
    event_from: Annotated[
        int | None, typer.Option(metavar="NS", help="First event time, in nanoseconds.")
    ] = None,
    event_to: Annotated[int | None, typer.Option(metavar="NS", help="Last event time.")] = None,
    event_column: Annotated[
        str, typer.Option(metavar="NAME", help="The column of event times, as the store was told.")
    ] = "timestamp",
    ingested_from: Annotated[
        int | None, typer.Option(metavar="MS", help="First ingestion time, in milliseconds.")
    ] = None,
    ingested_to: Annotated[int | None, typer.Option(metavar="MS", help="Last ingestion time.")] = None,
    signal: Annotated[str | None, typer.Option(metavar="NAME", help="One signal type only.")] = None,
) -> None:
    """Print the last rows of the finished segments, a JSON document per line; bytes are base64."""
    from forebay.quiver import Selection

    selection = Selection(
        event_ns=None if event_from is event_to is None else (event_from, event_to),
        ingested_ms=None if ingested_from is ingested_to is None else (ingested_from, ingested_to),
        signal=signal,
    )
    for row in _view(directory).last_rows(lines, selection, event_column):
        sys.stdout.write(json.dumps(_finite(row), default=_as_text) + "\n")


def _finite(value: Any) -> Any:
    """NaN and infinity by their names: as numbers they would be no JSON."""
    match value:
        case float() if not math.isfinite(value):
            return json.dumps(value)
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


def _as_text(value: object) -> str:
    """What JSON has no form for."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


@app.command("repair")
def repair(
    directory: Directory,
    unregister: Annotated[
        list[str] | None,
        typer.Option("--unregister", metavar="NAME", help="Remove a subscriber that nobody serves any more."),
    ] = None,
) -> None:
    """Take damaged parts out of a store for good. They go to its quarantine directory."""

    async def work() -> Repaired:
        from forebay.quiver import repair as repair_store

        return await repair_store(directory, unregister=unregister or [])

    done = wait_for(work())
    if out.is_json():
        out.document(asdict(done))
        return
    out.line(
        f"{len(done.rewritten)} segments made whole, {len(done.put_aside)} put aside, "
        f"{done.rows_lost:,} rows lost, {done.report.damaged_ranges} damaged ranges in the logs"
    )
    for name in done.unregistered:
        out.line(f"removed subscriber {out.printable(name)}")


@app.command("forward")
def forward(
    directory: Directory,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A bucket or a directory, as for other commands.")
    ],
    source: Annotated[
        str, typer.Option("--source", metavar="NAME", help="This store among all in the bucket.")
    ],
    subscriber: Annotated[
        str, typer.Option(metavar="NAME", help="The subscriber that it reads as.")
    ] = "forward",
    prefix: Annotated[str, typer.Option(metavar="PREFIX", help="Where the objects go.")] = "quiver",
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Segments as they are, or Parquet.")
    ] = FileFormat.ARROW,
) -> None:
    """Send every segment that the subscriber has not had to a bucket, then end."""

    async def work() -> Forwarded:
        from forebay.quiver import Forwarder, Quiver, QuiverConfig
        from forebay.storage import open_store

        # The store's own settings are not known here: nothing is dropped for want of space.
        config = QuiverConfig(
            size_cap_bytes=1 << 60,
            wal_spare_files=0,
            segment_open_ms=100,
            dead_letter_bytes_max=1 << 50,
        )
        async with open_store(url) as store, Quiver(directory, config) as quiver:
            sender = Forwarder(
                quiver,
                store,
                source=source,
                subscriber=subscriber,
                prefix=prefix,
                file_format=file_format.value,
            )
            await sender.register()
            await quiver.flush()
            done = await sender.run(0)
            if done.failures:
                raise ForebayError(
                    f"{done.failures} uploads failed, the last one for {done.problem}",
                    hint="run it again, nothing is lost; what Parquet cannot hold goes with --format arrow",
                )
            return done

    _view(directory)
    done = wait_for(work())
    if out.is_json():
        out.document(asdict(done))
        return
    out.line(
        f"{done.segments:,} segments, {done.rows:,} rows, {format_bytes(done.bytes)} forwarded "
        f"that subscriber {out.printable(subscriber)} had not had"
    )
