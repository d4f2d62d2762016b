"""What runs in the child processes of the kill tests."""

from __future__ import annotations

from pathlib import Path

from tests.spark.export.bed import open_bed

from forebay.spark.export import Exporter, local_runner
from forebay.testing.kill import Report


def export_in_pieces(report: Report, directory: str, kind: str) -> None:
    """An export of many small commits, which tells every step."""

    def step(what: str, done: int, total: int) -> None:
        report.crash_point(what)
        if what == "planned":
            report.mark("ready")

    config = open_bed(Path(directory)).config(kind, dead_letter="topic:dead", commit_bytes_max=2_000)
    Exporter(config, local_runner(1), parallelism=2, step=step).run_once()
