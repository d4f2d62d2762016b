"""What `forebay log verify` and `forebay verify` do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import Deployment
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._log_parts import open_log
from forebay.cli._run import wait_for

if TYPE_CHECKING:
    from forebay.log import VerifyReport

__all__ = ["run_verify"]

SHOWN_MAX = 20
"""Orphans named in text; JSON names all of them."""


def run_verify(deployment: Deployment, topic: str | None) -> None:
    """Verify, print, and end with code 1 where something is wrong."""
    report = wait_for(_verify(deployment, topic))
    if out.is_json():
        out.document(report.as_json())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)


async def _verify(deployment: Deployment, topic: str | None) -> VerifyReport:
    from forebay.log import verify

    async with open_log(deployment) as parts:
        with out.progress() as bar:
            task = bar.add_task("listing objects", total=None)

            def told(partition: str, records: int) -> None:
                bar.update(task, description=f"{partition}: {records:,} records")

            return await verify(
                parts.store,
                parts.coordinator,
                clock=parts.clock,
                randomness=parts.randomness,
                topic=topic,
                progress=told,
            )


def _print(report: VerifyReport) -> None:
    rows = [
        [each.topic, str(each.partition), f"{each.records:,}", "ok" if not each.problems else "DAMAGED"]
        for each in report.partitions
    ]
    if rows:
        out.table(["topic", "partition", "records", "state"], rows, right=["partition", "records"])
    for each in report.partitions:
        for problem in each.problems:
            out.line(f"{each.topic}:{each.partition}: {out.printable(problem)}")
        if each.leftover:
            out.line(f"{each.topic}:{each.partition}: left over: {out.printable(each.leftover)}")
    for problem in report.problems:
        out.line(f"catalog: {out.printable(problem)}")
    for key in report.orphans[:SHOWN_MAX]:
        out.line(f"orphan: {out.printable(key)}")
    more = len(report.orphans) - SHOWN_MAX
    if more > 0:
        out.line(f"and {more:,} orphans more")
    records = sum(each.records for each in report.partitions)
    verdict = "whole" if report.ok else "DAMAGED"
    out.line(f"{records:,} records in {len(report.partitions)} partitions: {verdict}")
