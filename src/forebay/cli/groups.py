"""`forebay groups`: consumer groups, how far behind they are, and how to move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from forebay.cli import _output as out
from forebay.cli._asking import ask
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._log_parts import LogParts, is_number, open_log, parse_time_ms
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import ForebayError, NotFound, UsageError

if TYPE_CHECKING:
    from forebay.log._group_records import TopicPartition
    from forebay.log._groups import GroupDescription, GroupReset, Groups, ResetTo

__all__ = ["app"]

app = CommandGroup(help="Consumer groups: lag, reset, delete.")

Name = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
Force = Annotated[bool, typer.Option("--force", help="Also while members are alive.")]


@app.command("list")
@deployment_options
def list_groups(deployment: Deployment) -> None:
    """Every group. JSON: a line per group, with its lag. What cannot be read of them is named on stderr."""

    async def work() -> list[GroupDescription]:
        async with open_log(deployment) as parts:
            groups = parts.groups()
            names = await groups.list()
            return [found for name in names if (found := await _described(groups, name)) is not None]

    found = wait_for(work())
    for each in found:
        for error in each.damaged:
            out.warning(f"group {each.group!r}: {error.message}")
    if out.is_json():
        for each in found:
            out.document(
                {
                    "group": each.group,
                    "members": len(each.members),
                    "lag_records": each.records,
                    "lag_seconds": each.seconds,
                    "problems": [error.message for error in each.damaged],
                }
            )
        return
    rows = [
        [each.group, str(len(each.members)), f"{each.records:,}", f"{each.seconds:.1f}"] for each in found
    ]
    out.table(["group", "members", "lag records", "lag seconds"], rows, right=["members", "lag records"])


async def _described(groups: Groups, name: str) -> GroupDescription | None:
    try:
        return await groups.describe(name)
    except NotFound:
        return None  # Deleted meanwhile.
    except UsageError as error:
        out.warning(f"group {name[:100]!r} is left out: {error.message}")
        return None


@app.command("describe")
@deployment_options
def describe(deployment: Deployment, group: Name) -> None:
    """Members of a group, and how far it is behind in each partition.

    What cannot be read is named, the rest is shown, and the exit code is 1.
    """

    async def work() -> GroupDescription:
        async with open_log(deployment) as parts:
            return await parts.groups().describe(group)

    found = wait_for(work())
    if out.is_json():
        out.document(
            {
                "group": found.group,
                "generation": found.generation,
                "members": [msgspec.to_builtins(member) for member in found.members],
                "partitions": [asdict(each) for each in found.partitions],
                "lag_records": found.records,
                "lag_seconds": found.seconds,
                "problems": [error.message for error in found.damaged],
            }
        )
    else:
        _print_description(found)
    _name_damage(found.damaged)


def _name_damage(damaged: Sequence[ForebayError]) -> None:
    """Name what could not be read, and end with code 1 if there is something."""
    for error in damaged:
        out.warning(f"{error.message}; {error.hint}" if error.hint else error.message)
    if damaged:
        raise typer.Exit(EXIT_FAILED)


def _print_description(found: GroupDescription) -> None:
    out.line(f"{found.group}: {len(found.members)} members, generation {found.generation}")
    rows = [
        [
            f"{each.topic}:{each.partition}",
            "-" if each.committed is None else str(each.committed),
            str(each.next),
            f"{each.records:,}",
            f"{each.seconds:.1f}",
            each.owner or "-",
        ]
        for each in found.partitions
    ]
    columns = ["partition", "committed", "next", "lag records", "lag seconds", "owner"]
    out.table(columns, rows, right=columns[1:5])


@app.command("reset")
@deployment_options
def reset(
    deployment: Deployment,
    group: Name,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PLACE", help="earliest, latest or an offset.", show_default=False),
    ] = None,
    to_time: Annotated[
        str | None,
        typer.Option("--to-time", metavar="TIME", help="The first record from then on.", show_default=False),
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic.", show_default=False)
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition", metavar="N", min=0, help="Only this partition of --topic.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    force: Force = False,
) -> None:
    """Move a group to another place. JSON: a line per partition.

    What cannot be read is named and left where it is, the others are moved, and the exit code is 1.
    """
    if (to is None) == (to_time is None):
        raise UsageError("a reset goes to one place", hint="give --to earliest, latest or N, or --to-time")
    if partition is not None and topic is None:
        raise UsageError("--partition without --topic", hint="name the topic as well")
    damaged: list[ForebayError] = []

    async def work() -> list[GroupReset]:
        async with open_log(deployment) as parts:
            return await parts.groups().reset(
                group,
                await _places(parts, topic, partition),
                to=None if to is None else _place(to),
                to_time_ms=None if to_time is None else parse_time_ms(to_time),
                dry_run=dry_run,
                force=force,
                damaged=damaged,
            )

    plan = wait_for(work())
    for each in plan:
        if out.is_json():
            out.document({**asdict(each), "dry_run": dry_run})
        else:
            before = "-" if each.before is None else str(each.before)
            verb = "would go" if dry_run else "goes"
            out.line(f"{each.topic}:{each.partition} {verb} from {before} to {each.after}")
    _name_damage(damaged)


async def _places(parts: LogParts, topic: str | None, partition: int | None) -> list[TopicPartition] | None:
    from forebay.log._group_records import TopicPartition

    if topic is None:
        return None
    found = await parts.catalog().describe(topic)
    if partition is not None:
        found.check_partition(partition)
        return [TopicPartition(topic, partition)]
    return [TopicPartition(topic, number) for number in range(found.partitions)]


def _place(text: str) -> ResetTo:
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if is_number(text):
        return int(text)
    raise UsageError(f"{text[:100]!r} is no place in a log", hint="earliest, latest or an offset")


@app.command("delete")
@deployment_options
def delete(
    deployment: Deployment,
    group: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Force = False,
) -> None:
    """Forget a group and what it committed."""
    if not yes:
        ask(f"Forget group {group} and what it committed?")

    async def work() -> None:
        async with open_log(deployment) as parts:
            await parts.groups().delete(group, force=force)

    wait_for(work())
    result: dict[str, Any] = {"group": group, "deleted": True}
    if out.is_json():
        out.document(result)
    else:
        out.line(f"{group} deleted")
