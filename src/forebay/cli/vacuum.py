"""`forebay vacuum`: delete objects that nobody names any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._log_parts import open_log
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.kit.limits import format_bytes, parse_duration_ms

if TYPE_CHECKING:
    from forebay.log import VacuumReport

__all__ = ["app"]

app = CommandGroup(help="Vacuum.")


@app.command("vacuum")
@deployment_options
def vacuum(
    deployment: Deployment,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Leave younger objects alone.")
    ] = "1h",
    gap: Annotated[
        str, typer.Option("--gap", metavar="TIME", help="From the first mark to the deletion.")
    ] = "10m",
) -> None:
    """Delete objects that nobody names any more.

    An object goes when two runs, at least --gap apart, found it without a name: the first run marks it, a
    later one deletes it. --grace must be well above the time that writers and compactors may take to commit.
    """

    from forebay.log import VacuumConfig

    config = VacuumConfig(grace_ms=parse_duration_ms(grace), mark_gap_ms=parse_duration_ms(gap))
    if config.grace_ms < VacuumConfig().grace_ms and not dry_run:
        out.warning(
            "writers, compactors and Spark jobs may name what they uploaded up to 40 minutes ago; a shorter "
            "grace than the default is safe only while none of them runs"
        )

    async def work() -> VacuumReport:
        async with open_log(deployment) as parts:
            with out.progress() as bar:
                task = bar.add_task("listing objects", total=None)
                sweeper = parts.vacuum(config)
                sweeper.progress = lambda what, count: bar.update(task, description=f"{what}: {count:,}")
                return await sweeper.run_once(dry_run=dry_run)

    report = wait_for(work())
    if out.is_json():
        out.document(report.as_json())
    else:
        _print(report)
    if report.failed:
        raise typer.Exit(EXIT_FAILED)


def _print(report: VacuumReport) -> None:
    verb = "would be deleted" if report.dry_run else "deleted"
    for key in report.deleted_keys:
        out.line(f"{verb}: {out.printable(key)}")
    for failure in report.failed:
        out.line(f"failed: {out.printable(failure)}")
    for reason, count in sorted(report.kept.items()):
        out.line(f"kept, {reason}: {count:,}")
    for partition in report.stalled:
        out.line(f"a compaction of {partition} stalls: forebay compact {partition.replace(':', ' ')}")
    size = format_bytes(report.deleted_bytes)
    out.line(f"{report.deleted:,} of {report.objects:,} objects {verb}, {size}")
