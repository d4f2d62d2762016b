"""`forebay topics`: create, list, describe, change and delete topics."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from forebay.cli import _output as out
from forebay.cli._asking import ask
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._log_parts import LogParts, open_log
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import StorageDamaged, UsageError
from forebay.kit.limits import format_bytes, parse_bytes, parse_duration_ms

if TYPE_CHECKING:
    from forebay.log import Topic, TopicSettings
    from forebay.log._topics import CatalogSurvey

__all__ = ["app"]

app = CommandGroup(help="Create, list, describe, change and delete topics.")

FOREVER = "none"
"""What takes a bound away."""

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
Retention = Annotated[
    str | None,
    typer.Option("--retention", metavar="TIME", help="Keep records so long, or none.", show_default=False),
]
RetentionBytes = Annotated[
    str | None,
    typer.Option(
        "--retention-bytes", metavar="SIZE", help="Keep so much per partition, or none.", show_default=False
    ),
]
Compaction = Annotated[
    bool | None,
    typer.Option("--compaction/--no-compaction", help="Fold small appends into large objects."),
]
MinAge = Annotated[
    str | None,
    typer.Option(
        "--compact-min-age", metavar="TIME", help="Leave younger appends alone.", show_default=False
    ),
]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="SIZE", help="Size of a compacted object.", show_default=False),
]


@app.command("create")
@deployment_options
def create(
    deployment: Deployment,
    topic: Name,
    partitions: Annotated[
        int, typer.Option("--partitions", "-p", metavar="N", min=1, help="How many partitions.")
    ] = 1,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    compaction: Compaction = None,
    compact_min_age: MinAge = None,
    target: Target = None,
) -> None:
    """Create a topic."""
    from forebay.log import TopicSettings

    changes = _changes(retention, retention_bytes, compaction, compact_min_age, target)

    async def work() -> Topic:
        async with open_log(deployment, create=True) as parts:
            settings = _changed(TopicSettings(), changes)
            return await parts.catalog().create(topic, partitions=partitions, settings=settings)

    _print_topic(wait_for(work()), "created")


@app.command("list")
@deployment_options
def list_topics(deployment: Deployment) -> None:
    """Every topic. JSON: a line per topic. An entry that cannot be read is named on stderr."""

    async def work() -> CatalogSurvey:
        async with open_log(deployment) as parts:
            return await parts.catalog().survey()

    found = wait_for(work())
    topics = found.topics
    for error in found.damaged:
        out.warning(f"a topic is left out: {error.message}")
    if out.is_json():
        for topic in topics:
            out.document(_facts(topic))
        return
    rows = [
        [each.topic, str(each.partitions), out.time_text(each.created_at_ms), _settings_text(each)]
        for each in topics
    ]
    out.table(["topic", "partitions", "created", "settings"], rows, right=["partitions"])


@app.command("describe")
@deployment_options
def describe(deployment: Deployment, topic: Name) -> None:
    """Settings of a topic, and where each partition begins, ends and is compacted.

    A partition that cannot be read is named, the rest is shown, and the exit code is 1.
    """
    damaged: list[StorageDamaged] = []

    async def work() -> tuple[Topic, list[dict[str, Any]]]:
        partitions = []
        async with open_log(deployment) as parts:
            found = await parts.catalog().describe(topic)
            for number in range(found.partitions):
                try:
                    partitions.append(await _partition(parts, found, number))
                except StorageDamaged as error:
                    damaged.append(error)
        return found, partitions

    found, partitions = wait_for(work())
    if out.is_json():
        problems = [error.message for error in damaged]
        out.document({**_facts(found), "partitions": partitions, "problems": problems})
    else:
        _print_partitions(found, partitions)
    for error in damaged:
        out.warning(f"{error.message}; {error.hint}")
    if damaged:
        raise typer.Exit(EXIT_FAILED)


def _print_partitions(found: Topic, partitions: list[dict[str, Any]]) -> None:
    out.line(f"{found.topic}: {_partitions_text(found)}, {_settings_text(found)}")
    columns = ["partition", "earliest", "next", "records", "compacted below", "state", "epoch"]
    names = ["partition", "earliest", "next", "records", "cursor", "state", "epoch"]
    rows = [[str(each[name]) for name in names] for each in partitions]
    out.table(columns, rows, right=[name for name in columns if name != "state"])


async def _partition(parts: LogParts, topic: Topic, number: int) -> dict[str, Any]:
    from forebay.log._keys import PartitionKeys
    from forebay.log._meta import read_meta
    from forebay.log._records import Control

    meta = await read_meta(parts.coordinator, PartitionKeys(topic.topic, number))
    control = meta.control
    if control is None or control.is_left_over(topic.state, topic.first_offset):
        # Before the first append the catalog says where it will begin: behind a deleted topic of this name.
        control = Control.of_new(topic.first_offset)
        meta = replace(meta, control=control, cursor=max(meta.cursor, topic.first_offset))
    return {
        "partition": number,
        "earliest": meta.earliest,
        "next": meta.next,
        "records": meta.next - meta.earliest,
        "cursor": meta.cursor,
        "not_compacted": meta.lag,
        "state": control.log_state,
        "epoch": control.epoch,
    }


@app.command("alter")
@deployment_options
def alter(
    deployment: Deployment,
    topic: Name,
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", metavar="N", min=1, help="Add some.", show_default=False),
    ] = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    compaction: Compaction = None,
    compact_min_age: MinAge = None,
    target: Target = None,
) -> None:
    """Change settings, or add partitions. What is not named stays as it is."""
    changes = _changes(retention, retention_bytes, compaction, compact_min_age, target)
    if not changes and partitions is None:
        raise UsageError("nothing to change", hint="name a setting, as --retention 7d")

    async def work() -> Topic:
        async with open_log(deployment) as parts:
            catalog = parts.catalog()
            found = await catalog.describe(topic)
            settings = _changed(found.settings, changes) if changes else None
            return await catalog.alter(topic, settings=settings, partitions=partitions)

    _print_topic(wait_for(work()), "changed")


@app.command("delete")
@deployment_options
def delete(
    deployment: Deployment,
    topic: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a topic with all its records. Objects it shares with others go with the next vacuum."""
    if not yes:
        ask(f"Delete {topic} with all its records?")

    async def work() -> None:
        async with open_log(deployment) as parts:
            await parts.catalog().delete(topic)

    wait_for(work())
    if out.is_json():
        out.document({"topic": topic, "deleted": True})
    else:
        out.line(f"{topic} deleted")


def _changes(
    retention: str | None,
    retention_bytes: str | None,
    compaction: bool | None,
    compact_min_age: str | None,
    target: str | None,
) -> dict[str, Any]:
    """What the options say, by the names of the settings."""
    changes: dict[str, Any] = {}
    if retention is not None:
        changes["retention_ms"] = None if retention == FOREVER else parse_duration_ms(retention)
    if retention_bytes is not None:
        changes["retention_bytes"] = None if retention_bytes == FOREVER else parse_bytes(retention_bytes)
    if compaction is not None:
        changes["compaction"] = compaction
    if compact_min_age is not None:
        changes["compact_min_age_ms"] = parse_duration_ms(compact_min_age)
    if target is not None:
        changes["target_bytes"] = parse_bytes(target)
    return changes


def _changed(settings: TopicSettings, changes: dict[str, Any]) -> TopicSettings:
    return msgspec.structs.replace(settings, **changes)


def _facts(topic: Topic) -> dict[str, Any]:
    names = ("retention_ms", "retention_bytes", "compaction", "compact_min_age_ms", "target_bytes")
    return {
        "topic": topic.topic,
        "topic_id": topic.topic_id,
        "partition_count": topic.partitions,
        "created_at_ms": topic.created_at_ms,
        "state": topic.state,
        "settings": {name: getattr(topic.settings, name) for name in names},
    }


def _partitions_text(topic: Topic) -> str:
    return "1 partition" if topic.partitions == 1 else f"{topic.partitions} partitions"


def _settings_text(topic: Topic) -> str:
    settings = topic.settings
    age = "for ever" if settings.retention_ms is None else _duration_text(settings.retention_ms)
    size = "" if settings.retention_bytes is None else f", {format_bytes(settings.retention_bytes)}"
    folded = "compacted" if settings.compaction else "not compacted"
    state = "" if topic.state == "ACTIVE" else ", being deleted"
    return f"kept {age}{size}, {folded}{state}"


def _duration_text(ms: int) -> str:
    """As the command line takes it: in the largest unit that fits."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def _print_topic(topic: Topic, what: str) -> None:
    if out.is_json():
        out.document(_facts(topic))
    else:
        out.line(f"{topic.topic} {what}: {_partitions_text(topic)}, {_settings_text(topic)}")
