"""`forebay demo`: the whole pipeline on this machine, killed in the middle, and proven at the end.

A broker on the embedded default, an event stream with late and malformed records, an export into Delta tables
on Spark, `kill -9`, a restart, compaction, the same questions to Spark SQL and DuckDB, and a comparison of
every row with what was sent. Nothing in it is simulated.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import _output as out
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._options import CommandGroup
from forebay.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from forebay.cli.demo.steps import Done, Stage

__all__ = ["app"]

app = CommandGroup(help="The demo.")

RECORDS = 60_000
RECORDS_MIN = 400
"""Fewest events of a demo: with fewer none would be late or malformed."""
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the demo."""
REPORT = Path("forebay-demo-report", "index.html")


@app.command("demo")
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="Where to write, new or empty; else a new one.", show_default=False
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data for a look at it.")] = False,
    records: Annotated[
        int, typer.Option("--records", metavar="N", min=RECORDS_MIN, help="Events to produce.")
    ] = RECORDS,
    report: Annotated[Path, typer.Option("--report", metavar="FILE", help="Where the report goes.")] = REPORT,
    local: Annotated[bool, typer.Option("--local", help="The pipeline without Spark.")] = False,
) -> None:
    """The whole pipeline, killed with -9 and proven record by record.

    Produce, export, kill -9, resume, compact, query, prove. Every event that was acknowledged is looked for
    in the Delta tables and among the dead letters. Exit code 1 if one is missing, doubled or changed.
    Without Java the pipeline runs without Spark, and the demo says so.
    """
    from forebay.cli.demo.report import draw
    from forebay.cli.demo.steps import STEPS, Stage, play

    if report.is_dir():
        raise UsageError(f"{report} is a directory", hint="name a file for --report")
    mode, reason = ("local", "Spark, as asked by --local") if local else _mode()
    with _interruptible(), _place(data, keep=keep) as directory:
        stage = Stage(directory, mode, records, left_out=[reason] if reason else [])
        try:
            with out.progress() as bar:
                task = bar.add_task("", total=sum(step.weight for step in STEPS))
                done = play(stage, lambda name, far: bar.update(task, description=name, completed=far))
        finally:
            stage.close()
        ok = not any(each.outcome.wrong for each in done)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(draw(stage, done, ok))
        _print(stage, done, ok, report, directory if keep else None)
    if not ok:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Whoever ends the demo ends its processes, too: they are in groups of their own. The first signal is an
    interruption, and those that follow do not keep it from cleaning up."""

    def interrupt(*_: object) -> None:
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _mode() -> tuple[str, str]:
    """Whether the pipeline runs on Spark, and if not, why."""
    try:
        import pyspark

        from forebay.spark._java import find_java

        del pyspark
        find_java()
    except ImportError:
        return "local", "Spark: PySpark is not installed (pip install 'forebay[spark]')"
    except Unsupported as error:
        return "local", f"Spark: {error.message} ({error.hint})"
    return "spark", ""


@contextmanager
def _place(data: Path | None, *, keep: bool) -> Iterator[Path]:
    """The directory to play in. It is gone afterwards, unless it is to be kept."""
    if data is None:
        directory = Path(tempfile.mkdtemp(prefix="forebay-demo-", dir=Path.cwd()))
    else:
        if data.exists() and any(data.iterdir()):
            raise UsageError(f"{data} is not empty", hint="name a new directory for --data")
        data.mkdir(parents=True, exist_ok=True)
        directory = data.absolute()
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _print(stage: Stage, done: list[Done], ok: bool, report: Path, kept: Path | None) -> None:
    if out.is_json():
        out.document(
            {
                "ok": ok,
                "mode": stage.mode,
                "records": sum(each.sent for each in stage.proofs),
                "rows": sum(each.rows for each in stage.proofs),
                "dead_letters": sum(each.dead_letters for each in stage.proofs),
                "lost": sum(each.missing + each.dead_missing for each in stage.proofs),
                "doubled": sum(each.doubled for each in stage.proofs),
                "steps": [each.as_json() for each in done],
                "left_out": stage.left_out,
                "report": str(report),
                "data": None if kept is None else str(kept),
            }
        )
        return
    columns = ("step", "records", "seconds", "what happened")
    rows = [
        [
            each.name,
            f"{each.outcome.records:,}" if each.outcome.records else "",
            f"{each.seconds:.1f}",
            each.outcome.detail,
        ]
        for each in done
    ]
    out.table(columns, rows, right=columns[1:3])
    out.line("")
    proof = ("topic", "sent", "rows", "dead letters", "missing", "doubled", "changed")
    out.table(
        proof,
        [
            [
                each.topic,
                *(
                    f"{n:,}"
                    for n in (
                        each.sent,
                        each.rows,
                        each.dead_letters,
                        each.missing + each.dead_missing,
                        each.doubled,
                        each.changed,
                    )
                ),
            ]
            for each in stage.proofs
        ],
        right=proof[1:],
    )
    out.line("")
    out.line("Every record arrived exactly once." if ok else "LOST: records are missing, doubled or changed.")
    for each in stage.left_out:
        out.line(f"Left out: {each}")
    out.line(f"Report: {report}")
    if kept is not None:
        out.line(f"Kept: forebay topics list --data {kept}")
