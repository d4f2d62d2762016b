"""`forebay log`: is a log whole, where does a record lie, and let go of old ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._log_parts import open_log, parse_time_ms
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.cli._verifying import run_verify
from forebay.errors import UsageError
from forebay.kit.limits import format_bytes

if TYPE_CHECKING:
    from forebay.log import Explanation, FenceState
    from forebay.log._retention import RetentionReport
    from forebay.log._trim import Trimmed

__all__ = ["app"]

app = CommandGroup(help="Verify a log, explain a record, let go of old ones.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
Partition = Annotated[int, typer.Argument(metavar="PARTITION", min=0, help="The partition.")]


@app.command("verify")
@deployment_options
def verify(
    deployment: Deployment,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic.", show_default=False)
    ] = None,
) -> None:
    """Prove from objects and keys alone that no record is missing or damaged; list orphans.

    Exit code 1 where something is wrong. Orphans do no harm; `forebay vacuum` removes them.
    """
    run_verify(deployment, topic)


@app.command("explain")
@deployment_options
def explain(
    deployment: Deployment,
    topic: Topic,
    partition: Partition,
    offset: Annotated[int, typer.Argument(metavar="OFFSET", min=1, help="The record's offset.")],
) -> None:
    """Where one record lies: object, byte range, batch, writer, commit time, and what finding it cost."""

    async def work() -> Explanation:
        from forebay.log import explain

        async with open_log(deployment) as parts:
            return await explain(
                parts.store,
                parts.coordinator,
                topic,
                partition,
                offset,
                clock=parts.clock,
                randomness=parts.randomness,
            )

    found = wait_for(work())
    if out.is_json():
        out.document(found.as_json())
        return
    for name, value in _described(found):
        out.line(f"{name:<10} {value}")


def _described(found: Explanation) -> list[tuple[str, str]]:
    last = found.byte_offset + found.byte_length - 1
    timestamp = found.timestamp_ms if found.timestamp_ms is not None else found.committed_at_ms
    requests = ", ".join(f"{count} {name}" for name, count in found.requests.items())
    return [
        ("record", f"{found.topic}:{found.partition} offset {found.offset}, {found.value_bytes:,} bytes"),
        ("time", out.time_text(timestamp)),
        ("object", out.printable(found.object)),
        ("bytes", f"{found.byte_offset:,} to {last:,} ({format_bytes(found.byte_length)})"),
        (
            "batch",
            f"offsets {found.batch_start} to {found.batch_end}, {found.batch_records} records, "
            f"this is number {found.place}",
        ),
        ("source", f"{found.source}, {found.index_key or 'the last append, named by the control record'}"),
        ("writer", found.writer or ("many: compacted" if found.source == "COMPACTED" else "unnamed")),
        ("committed", out.time_text(found.committed_at_ms)),
        ("log", f"offsets {found.earliest} to {found.next - 1}, compacted below {found.cursor}"),
        ("requests", f"{requests}; {found.stepped_over} index entries stepped over"),
    ]


Epoch = Annotated[
    int | None,
    typer.Option("--epoch", metavar="N", min=1, help="The new epoch; else the next.", show_default=False),
]


@app.command("fence")
@deployment_options
def fence(deployment: Deployment, topic: Topic, partition: Partition, epoch: Epoch = None) -> None:
    """Refuse all appends to a partition from now on, under a new epoch."""

    async def work() -> FenceState:
        async with open_log(deployment) as parts:
            return await parts.fencing().fence(topic, partition, epoch=epoch)

    _print_state(wait_for(work()))


@app.command("unfence")
@deployment_options
def unfence(
    deployment: Deployment,
    topic: Topic,
    partition: Partition,
    epoch: Annotated[int, typer.Argument(metavar="EPOCH", min=1, help="The epoch that the fence gave.")],
) -> None:
    """Take appends again. Only under the present epoch; writers with an older one stay shut out."""

    async def work() -> FenceState:
        async with open_log(deployment) as parts:
            return await parts.fencing().unfence(topic, partition, epoch)

    _print_state(wait_for(work()))


@app.command("state")
@deployment_options
def state(deployment: Deployment, topic: Topic, partition: Partition) -> None:
    """Whether a partition takes appends, under which epoch, and its next offset."""

    async def work() -> FenceState:
        async with open_log(deployment) as parts:
            return await parts.fencing().state(topic, partition)

    _print_state(wait_for(work()))


def _print_state(found: FenceState) -> None:
    if out.is_json():
        out.document(
            {
                "topic": found.topic,
                "partition": found.partition,
                "log_state": found.log_state,
                "epoch": found.epoch,
                "next_offset": found.next_offset,
            }
        )
    else:
        out.line(
            f"{found.topic}:{found.partition} is {found.log_state.lower()}, epoch {found.epoch}, "
            f"next offset {found.next_offset}"
        )


@app.command("trim")
@deployment_options
def trim(
    deployment: Deployment,
    topic: Topic,
    partition: Partition,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="OFFSET", min=0, help="Make this the earliest.", show_default=False),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="TIME", help="Let go of what is older.", show_default=False),
    ] = None,
) -> None:
    """Let go of the oldest records of a partition. Offsets go on where they were."""
    if (to is None) == (before is None):
        raise UsageError("a trim needs one place", hint="give --to OFFSET, or --before TIME")

    async def work() -> Trimmed:
        async with open_log(deployment) as parts:
            offset = to
            if offset is None:
                assert before is not None
                offset = await parts.reader().offset_for_time(topic, partition, parse_time_ms(before))
            return await parts.trimmer().trim(topic, partition, offset)

    _print_trimmed([wait_for(work())])


@app.command("retain")
@deployment_options
def retain(
    deployment: Deployment,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Trim every partition to what its topic keeps, by age and size."""

    async def work() -> RetentionReport:
        from forebay.log._retention import Retention

        async with open_log(deployment) as parts:
            catalog = parts.catalog()
            if topic is not None:
                await catalog.describe(topic)
            retention = Retention(
                parts.reader(), catalog, parts.trimmer(), clock=parts.clock, randomness=parts.randomness
            )
            return await retention.run_once(topics=None if topic is None else [topic], dry_run=dry_run)

    report = wait_for(work())
    if out.is_json():
        failed = {place: error.message for place, error in report.failed.items()}
        trimmed = [_trimmed_facts(each) for each in report.trimmed]
        out.document({"dry_run": dry_run, "trimmed": trimmed, "failed": failed})
    else:
        for each in report.trimmed:
            out.line(_trimmed_line(each))
        for place, error in report.failed.items():
            out.line(f"{place}: {error.message}")
        out.line(f"{report.records:,} records {'would go' if dry_run else 'trimmed'}")
    if report.failed:
        raise typer.Exit(EXIT_FAILED)


def _print_trimmed(trimmed: list[Trimmed]) -> None:
    for each in trimmed:
        if out.is_json():
            out.document(_trimmed_facts(each))
        else:
            out.line(_trimmed_line(each))


def _trimmed_line(each: Trimmed) -> str:
    return f"{each.topic}:{each.partition}: {each.records:,} records trimmed, the earliest is {each.earliest}"


def _trimmed_facts(each: Trimmed) -> dict[str, Any]:
    return {
        "topic": each.topic,
        "partition": each.partition,
        "before": each.before,
        "earliest": each.earliest,
        "next": each.next,
        "records": each.records,
    }
