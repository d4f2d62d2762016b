"""`forebay tail`: the last records of a topic, and those that come, until interrupted."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli._door import DoorChoice, door_options
from forebay.cli._options import CommandGroup
from forebay.cli._record_text import Place
from forebay.cli._run import wait_for
from forebay.cli.consume import Count, FormatText, Partition, Topic, Wanted, run, writer

__all__ = ["app"]

app = CommandGroup(help="Follow the end of a topic.")


@app.command("tail")
@door_options
def tail(
    door: DoorChoice,
    topic: Topic,
    last: Annotated[
        int, typer.Option("--last", "-n", metavar="N", min=0, help="Begin with the last N of each partition.")
    ] = 10,
    partition: Partition = None,
    count: Count = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more.")] = True,
    format_text: FormatText = None,
) -> None:
    """Follow the end of a topic.

    The last records first, and then those that come. JSON: a line per record.
    """
    start = Place(f"-{last}", "last", last)
    wanted = Wanted(topic, partition, start, count=count, to_end=not follow, write=writer(format_text))
    wait_for(run(door, wanted))
