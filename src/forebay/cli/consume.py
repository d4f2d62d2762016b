"""`forebay consume`: from a topic to stdout, and on as records come.

Without `-e`, `-c` or `--to` it never ends: it waits at the end of the log for more. Whatever was read is
flushed before the next wait, so a pipe behind it sees records as they come. With a group, offsets are
committed after their records were written and flushed: at least once.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._door import Door, DoorChoice, Follower, door_options
from forebay.cli._options import CommandGroup
from forebay.cli._record_text import Formatter, Place, as_json, as_values, parse_place
from forebay.cli._run import wait_for
from forebay.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Wanted", "app", "run"]

app = CommandGroup(help="Write the records of a topic to stdout.")

POLL_S = 5.0
"""Seconds of one long poll at the end of the log."""
END_POLL_S = 0.05
"""The same where the end is all that is wanted; not nothing: a member may still wait for a partition."""

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
Partition = Annotated[
    int | None,
    typer.Option("--partition", "-p", metavar="N", min=0, help="Only this one.", show_default=False),
]
FormatText = Annotated[
    str | None,
    typer.Option(
        "--format",
        "-f",
        metavar="FORMAT",
        help=r"As '%t %p %o %T %k %s\n'; else a value per line.",
        show_default=False,
    ),
]
Count = Annotated[
    int | None,
    typer.Option("--count", "-c", metavar="N", min=1, help="End after N records.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read, and when to end."""

    topic: str
    partition: int | None
    start: Place
    end: Place | None = None
    count: int | None = None
    to_end: bool = False
    group: str | None = None
    write: Callable[[pa.RecordBatch], bytes] = as_values


@app.command("consume")
@door_options
def consume(  # noqa: PLR0913, PLR0917 - a parameter per option
    door: DoorChoice,
    topic: Topic,
    start: Annotated[
        str, typer.Option("--from", metavar="PLACE", help="earliest, latest, N, -N (the last N) or @TIME.")
    ] = "earliest",
    end: Annotated[
        str | None,
        typer.Option("--to", metavar="PLACE", help="End before this place.", show_default=False),
    ] = None,
    partition: Partition = None,
    count: Count = None,
    to_end: Annotated[bool, typer.Option("--exit", "-e", help="End at the end of the log.")] = False,
    format_text: FormatText = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group", "-G", metavar="GROUP", help="Go on where it stopped, and commit.", show_default=False
        ),
    ] = None,
) -> None:
    """Write the records of a topic to stdout.

    And wait for more. JSON: a line per record.
    """
    if group is not None and (partition is not None or end is not None):
        raise UsageError("--group reads whole topics, on and on", hint="leave --partition and --to out")
    wanted = Wanted(
        topic,
        partition,
        parse_place(start),
        None if end is None else parse_place(end),
        count,
        to_end,
        group,
        writer(format_text),
    )
    wait_for(run(door, wanted))


def writer(format_text: str | None) -> Callable[[pa.RecordBatch], bytes]:
    """How a batch is written."""
    if out.is_json():
        if format_text is not None:
            raise UsageError("-f and -o json exclude each other", hint="leave one of them out")
        return as_json
    return as_values if format_text is None else Formatter(format_text)


async def run(choice: DoorChoice, wanted: Wanted) -> None:
    """Open the door and read until the end that was asked for."""
    async with choice.open() as door, AsyncExitStack() as stack:
        if wanted.group is not None:
            if wanted.start.kind not in ("earliest", "latest"):
                raise UsageError(
                    f"--from {wanted.start.text} with --group",
                    hint="earliest or latest; else reset the group",
                )
            follower = await stack.enter_async_context(
                door.group(wanted.group, wanted.topic, wanted.start.kind)
            )
            ends: dict[int, int] = {}
        else:
            follower, ends = await _follow(door, wanted)
        await _while_read(_Loop(door, wanted, follower, ends).run())


async def _while_read(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; raises `BrokenPipeError` as soon as nobody reads stdout any more.

    A write would notice, but whoever waits at the end of a log does not write.
    """
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    working = loop.create_task(work)
    try:
        descriptor = sys.stdout.fileno()
        watched = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if watched:
            # The write end of a pipe becomes readable when its last reader has gone.
            loop.add_reader(descriptor, gone.cancel)
    except (OSError, ValueError):
        watched = False  # Not a file at all, as in tests.
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise BrokenPipeError
        await working
    finally:
        if watched:
            loop.remove_reader(descriptor)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _follow(door: Door, wanted: Wanted) -> tuple[Follower, dict[int, int]]:
    if wanted.partition is not None:
        partitions = [wanted.partition]
    else:
        partitions = list(range(await door.partitions(wanted.topic)))
    if len(partitions) > 1 and "offset" in (wanted.start.kind, wanted.end.kind if wanted.end else ""):
        raise UsageError("an offset belongs to one partition", hint="name it with -p")
    ends = {} if wanted.end is None else await _resolved(door, wanted.topic, partitions, wanted.end)
    starts = await _resolved(door, wanted.topic, partitions, wanted.start)
    return door.follow(wanted.topic, starts), ends


async def _resolved(door: Door, topic: str, partitions: list[int], place: Place) -> dict[int, int]:
    found = await asyncio.gather(*(place.resolve(door, topic, number) for number in partitions))
    return dict(zip(partitions, found, strict=True))


class _Loop:
    """Polls, writes, flushes, commits."""

    def __init__(self, door: Door, wanted: Wanted, follower: Follower, ends: Mapping[int, int]) -> None:
        self._door = door
        self._wanted = wanted
        self._follower = follower
        self._ends = ends
        self._left = wanted.count
        self._written: dict[int, int] = {}
        """Next offset by partition, of records written since the last commit."""
        self._stdout = sys.stdout.buffer

    async def run(self) -> None:
        wanted = self._wanted
        while self._left != 0 and not self._passed_ends():
            batches = await self._follower.poll(END_POLL_S if wanted.to_end else POLL_S)
            for batch in batches:
                self._write(batch)
            self._stdout.flush()
            if wanted.group is not None and self._written:
                await self._follower.commit(self._written)
                self._written = {}
            if not batches and wanted.to_end and await self._at_end():
                return

    def _passed_ends(self) -> bool:
        positions = self._follower.positions()
        return bool(self._ends) and all(positions[place] >= end for place, end in self._ends.items())

    async def _at_end(self) -> bool:
        positions = self._follower.positions()
        if not positions:
            return False  # A member of a group that has no partition yet.
        topic = self._wanted.topic
        ends = await asyncio.gather(*(self._door.ends(topic, number) for number in positions))
        return all(at >= end[1] for at, end in zip(positions.values(), ends, strict=True))

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._ends:
            end = self._ends[batch.column("partition")[0].as_py()]
            batch = batch.slice(0, max(0, end - batch.column("offset")[0].as_py()))
        if self._left is not None:
            batch = batch.slice(0, self._left)
            self._left -= len(batch)
        if len(batch):
            self._stdout.write(self._wanted.write(batch))
            place, last = (batch.column(name)[-1].as_py() for name in ("partition", "offset"))
            self._written[place] = last + 1
