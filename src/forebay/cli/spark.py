"""`forebay spark`: exports to tables, and the work of one machine spread over many.

Every command does what its local namesake does, by the same code; Spark only says where. With --local the
same tasks run on threads of this process, and neither Spark nor Java is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._log_parts import check_there, parse_time_ms
from forebay.cli._options import CommandGroup
from forebay.cli._run import hold_endings
from forebay.errors import ForebayError, UsageError
from forebay.kit.limits import format_bytes, parse_bytes, parse_duration_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from forebay.spark.export import ExportConfig, ExportReport
    from forebay.spark.jobs import Place

__all__ = ["app"]

app = CommandGroup(help="Export to tables; compact, vacuum, verify and replay on Spark.")

Local = Annotated[bool, typer.Option("--local", help="On threads of this process, without Spark.")]
Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Spark master; else all cores here.", show_default=False),
]


@contextmanager
def spark_of(*, local: bool, master: str | None) -> Iterator[SparkSession | None]:
    """A session, or None where none is wanted. It is stopped at the end."""
    if local:
        if master is not None:
            raise UsageError("--local and --master exclude each other", hint="leave one of them out")
        yield None
        return
    from forebay.spark import session

    conf: dict[str, Any] = {} if master is None else {"spark.master": master}
    if master is not None and not master.startswith("local"):
        out.note(f"connecting to {master}")
    spark = session("forebay-cli", **conf)
    try:
        yield spark
    finally:
        spark.stop()


@app.command("export")
@deployment_options
def export(  # noqa: PLR0913, PLR0917 - a command's options
    deployment: Deployment,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="TOPIC[,TOPIC...], buffer:MANIFEST or stream:NAME.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="TABLE", help="delta:PATH, parquet:PATH or iceberg:CATALOG/NAME."),
    ],
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="What values are: raw, json, avro or arrow.")
    ] = "raw",
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            metavar="TEXT|FILE",
            help="Columns, as `id long, at timestamp`, or a file with them; for Avro an .avsc file.",
            show_default=False,
        ),
    ] = None,
    partition_by: Annotated[
        str | None,
        typer.Option(
            "--partition-by", metavar="A,B", help="Columns, date, date(COLUMN).", show_default=False
        ),
    ] = None,
    dead_letter: Annotated[
        str | None,
        typer.Option(
            "--dead-letter",
            metavar="PLACE",
            help="topic:NAME or a table, for bad records.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of this export.")] = "forebay",
    start: Annotated[
        str, typer.Option("--from", metavar="END", help="earliest or latest, for what is new to the table.")
    ] = "earliest",
    new_columns: Annotated[
        str, typer.Option("--new-columns", metavar="add|ignore", help="Fields that the table lacks.")
    ] = "add",
    on_data_loss: Annotated[
        str, typer.Option("--on-data-loss", metavar="fail|skip", help="Records trimmed before their export.")
    ] = "fail",
    acknowledge: Annotated[
        bool, typer.Option("--acknowledge", help="Acknowledge a buffer's batches after the commit.")
    ] = False,
    continuous: Annotated[bool, typer.Option("--continuous", help="Until SIGTERM or Ctrl-C.")] = False,
    interval: Annotated[
        str, typer.Option("--interval", metavar="TIME", help="Pause between rounds, with --continuous.")
    ] = "10s",
    task_bytes: Annotated[
        str | None,
        typer.Option("--task-bytes", metavar="SIZE", help="Most bytes of one task.", show_default="64MiB"),
    ] = None,
    local: Local = False,
    master: Master = None,
) -> None:
    """Export records into a Delta, Parquet or Iceberg table, exactly once.

    The table itself keeps the positions, so there is no checkpoint to lose: run it again, after a crash or at
    the next full hour, and it goes on where the table ends. Records that cannot be decoded go to
    --dead-letter with the reason; without it the first of them ends the export.
    """
    words = {"format": format_, "new_columns": new_columns, "on_data_loss": on_data_loss, "start": start}
    config = _config(deployment, source, to, words, schema)
    from dataclasses import replace

    from forebay.spark.export import DeadLetterSpec

    config = replace(
        config,
        partition_by=tuple(word.strip() for word in (partition_by or "").split(",") if word.strip()),
        dead_letter=None if dead_letter is None else DeadLetterSpec.parse(dead_letter),
        name=name,
        acknowledge=acknowledge,
    )
    if task_bytes is not None:
        size = parse_bytes(task_bytes)
        config = replace(config, task_bytes_max=size, task_bytes_min=min(size, config.task_bytes_min))
    interval_s = parse_duration_ms(interval) / 1000 if continuous else None
    with spark_of(local=local, master=master) as spark:
        _export(config, spark, interval_s)


CHOICES = {
    "format": ("raw", "json", "avro", "arrow"),
    "new_columns": ("add", "ignore"),
    "on_data_loss": ("fail", "skip"),
    "start": ("earliest", "latest"),
}


def _config(
    deployment: Deployment, source: str, to: str, words: dict[str, Any], schema: str | None
) -> ExportConfig:
    from forebay.spark.export import ExportConfig, SourceSpec, TargetSpec, parse_schema

    for option, word in words.items():
        if word not in CHOICES[option]:
            known = ", ".join(CHOICES[option])
            name = "from" if option == "start" else option.replace("_", "-")
            raise UsageError(f"{word!r} is no value of --{name}", hint=f"known are {known}")
    coordinator = None if deployment.data is not None else deployment.coordinator
    spec = SourceSpec.parse(source, deployment.store_url, coordinator)
    check_there(deployment, log=spec.kind == "log")
    if schema is not None:
        schema = _schema_text(schema, avro=words["format"] == "avro")
    avro = schema if words["format"] == "avro" else None
    columns = None if schema is None or avro is not None else parse_schema(schema)
    return ExportConfig(spec, TargetSpec.parse(to), schema=columns, avro_schema=avro, **words)


def _schema_text(given: str, *, avro: bool) -> str:
    """What --schema says itself, or what the file says that it names."""
    try:
        named = Path(given).is_file()
    except OSError:  # Longer than the name of a file can be.
        named = False
    if named:
        return Path(given).read_text()
    if avro and not given.lstrip().startswith(("{", "[", '"')):
        raise UsageError(f"there is no file {given!r}", hint="give the .avsc file, or its text")
    return given


def _export(config: ExportConfig, spark: SparkSession | None, interval_s: float | None) -> None:
    from forebay.spark.export import export as run
    from forebay.spark.export import export_forever

    with out.progress() as bar:
        row = bar.add_task("planning", total=None)

        def step(what: str, done: int, total: int) -> None:
            bar.update(row, description=what, completed=done, total=total or None)

        if interval_s is None:
            report = run(config, spark=spark, step=step)
        else:
            stop = threading.Event()
            hold_endings(lambda *_: stop.set())

            waits = ""

            def each(report: ExportReport) -> None:
                nonlocal waits
                waits = ""
                if report.commits:
                    _print(report, config)

            def waiting(error: ForebayError) -> None:
                nonlocal waits
                if error.message != waits:  # Once for an outage, not once for every attempt.
                    waits = error.message
                    out.warning(f"{waits}; it is tried again every {interval_s:g} s")

            export_forever(
                config, interval_s=interval_s, stop=stop, spark=spark, step=step, each=each, waiting=waiting
            )
            return
    _print(report, config)


def _print(report: ExportReport, config: ExportConfig) -> None:
    if out.is_json():
        out.document(report.as_json())
        return
    records = "batches" if config.source.kind == "buffer" else "records"
    out.line(
        f"{report.records:,} {records}, {report.rows:,} rows in {report.files:,} files "
        f"({format_bytes(report.bytes_written)}), {report.dead_letters:,} dead letters, "
        f"{report.commits:,} commits, {report.seconds:.1f} s"
    )
    for lane, count in sorted(report.skipped.items()):
        out.line(f"{lane}: {count:,} positions were gone before they were exported")
    # Whoever produces records chooses the names.
    if report.added_columns:
        out.line(f"new columns: {out.printable(', '.join(report.added_columns))}")
    if report.ignored_columns:
        left_out = out.printable(", ".join(report.ignored_columns))
        out.line(f"left out, for no column can have the name, or one has it, if in another case: {left_out}")


def _job_place(deployment: Deployment) -> Place:
    from forebay.spark.jobs import Place

    check_there(deployment)
    return Place(deployment.store_url, None if deployment.data is not None else deployment.coordinator_url)


@contextmanager
def _counting(what: str) -> Iterator[Callable[[], None]]:
    """A bar that moves at every call."""
    with out.progress() as bar:
        row = bar.add_task(what, total=None)
        yield lambda: bar.advance(row)


@app.command("compact")
@deployment_options
def compact(
    deployment: Deployment,
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic.", show_default=False)
    ] = None,
    min_age: Annotated[
        str, typer.Option("--min-age", metavar="TIME", help="Leave younger appends alone.")
    ] = "2m",
    local: Local = False,
    master: Master = None,
) -> None:
    """Fold small appends of many partitions into large objects, a task per partition."""
    from dataclasses import asdict

    from forebay.log import CompactorConfig
    from forebay.spark.jobs import compact as run

    config = CompactorConfig(min_age_ms=parse_duration_ms(min_age))
    place = _job_place(deployment)
    with spark_of(local=local, master=master) as spark, _counting("compacting") as told:
        found = run(place, topic=topic, config=config, spark=spark, told=told)
    if out.is_json():
        out.document({"partitions": [asdict(each) for each in found]})
    else:
        columns = ["partition", "runs", "records", "entries", "written", "left", "error"]
        rows = [
            [
                f"{each.topic}:{each.partition}",
                f"{each.runs:,}",
                f"{each.records:,}",
                f"{each.entries:,}",
                format_bytes(each.bytes_written),
                f"{each.lag_records:,}",
                each.error,
            ]
            for each in found
        ]
        out.table(columns, rows, right=columns[1:6])
    if any(each.error for each in found):
        raise typer.Exit(EXIT_FAILED)


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
    local: Local = False,
    master: Master = None,
) -> None:
    """Delete objects that nobody names any more: found by a join, deleted after two marks."""
    from forebay.cli.vacuum import _print as print_report
    from forebay.log import VacuumConfig
    from forebay.spark.jobs import vacuum as run

    config = VacuumConfig(grace_ms=parse_duration_ms(grace), mark_gap_ms=parse_duration_ms(gap))
    place = _job_place(deployment)
    with spark_of(local=local, master=master) as spark, _counting("looking for orphans"):
        report = run(place, config=config, dry_run=dry_run, spark=spark)
    if out.is_json():
        out.document(report.as_json())
    else:
        print_report(report)
    if report.failed:
        raise typer.Exit(EXIT_FAILED)


@app.command("verify")
@deployment_options
def verify(
    deployment: Deployment,
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic.", show_default=False)
    ] = None,
    local: Local = False,
    master: Master = None,
) -> None:
    """Prove that nothing is missing or damaged, a task per partition."""
    from forebay.cli._verifying import _print as print_report
    from forebay.spark.jobs import verify as run

    place = _job_place(deployment)
    with spark_of(local=local, master=master) as spark, _counting("verifying") as told:
        report = run(place, topic=topic, spark=spark, told=told)
    if out.is_json():
        out.document(report.as_json())
    else:
        print_report(report)
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)


@app.command("replay")
@deployment_options
def replay(
    deployment: Deployment,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Topic to read.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Topic to append to; it must exist.")],
    job: Annotated[
        str, typer.Option("--job", metavar="ID", help="Names this replay: run again, it changes nothing.")
    ],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Time behind the last, ISO 8601 or ms.")],
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="First time, ISO 8601 or ms.")] = "0",
    local: Local = False,
    master: Master = None,
) -> None:
    """Append what was appended to a topic in a time range to another one, every record once."""
    from dataclasses import asdict

    from forebay.spark.jobs import replay as run

    place, from_ms, to_ms = _job_place(deployment), parse_time_ms(start), parse_time_ms(end)
    with spark_of(local=local, master=master) as spark, _counting("replaying") as told:
        found = run(
            place,
            source,
            target,
            job=job,
            from_ms=from_ms,
            to_ms=to_ms,
            spark=spark,
            told=told,
        )
    if out.is_json():
        out.document({"partitions": [asdict(each) for each in found]})
        return
    for each in found:
        out.line(f"{each.topic}:{each.partition}: {each.appended:,} appended, {each.found:,} were there")
    out.line(f"{sum(each.appended for each in found):,} records appended to {target}")


@app.command("loadtest")
def loadtest(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of load-test runs.")],
    local: Local = False,
    master: Master = None,
) -> None:
    """Add up the ledgers of load-test runs: outcomes, throughput, latency by percentile."""
    from forebay.spark.jobs import analyse_loadtest

    with spark_of(local=local, master=master) as spark, _counting("reading ledgers") as told:
        found = analyse_loadtest(runs, spark=spark, told=told).as_json()
    if out.is_json():
        out.document(found)
        return
    records = ", ".join(f"{count:,} {name}" for name, count in found["records"].items())
    out.line(f"{found['requests']:,} requests in {found['ledgers']:,} ledgers; records: {records}")
    out.line(f"{found['records_per_s']:,.0f} acknowledged records/s; {found['retried']:,} requests retried")
    waits = [f"{name} {wait:.1f}" for name, wait in found["latency_ms"].items() if wait is not None]
    out.line(f"latency, ms: {', '.join(waits)}")
