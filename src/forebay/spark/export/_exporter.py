"""The driver: plan, have the tasks run, keep the bad records, commit, and again until the head is reached.

    load the table -> positions          the handle that is committed through
    look at the source -> ranges         from each position to the head, as frozen when the export began
    cut into tasks, run them             anywhere; each returns descriptions of files
    check that nothing is missing        every position of every range was read, exactly once
    keep the bad records                 idempotent: see `_dead`
    commit files and positions           atomic: see `_tables`

Order matters in one place: bad records are kept before the commit. After a crash between the two they are
there already, and are recognised; the other way round they would be lost.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from forebay.errors import LimitExceeded, NotDone, UsageError
from forebay.kit.retry import RetryPolicy
from forebay.spark.export._clients import Clients, clients
from forebay.spark.export._config import ExportConfig
from forebay.spark.export._dead import DeadLetters, open_dead_letters
from forebay.spark.export._decode import Seen, add_seen, fields_beside
from forebay.spark.export._errors import BadRecords, CommitConflict, RecordsTrimmed
from forebay.spark.export._facts import DEAD_SCHEMA, EXAMPLES_MAX, METADATA, Span, Task, TaskResult
from forebay.spark.export._partitioning import Partitioning
from forebay.spark.export._sources import Lane, Source, open_source
from forebay.spark.export._tables import Commit, Handle, commit_once, open_table
from forebay.spark.export._task import decoder_of, joined
from forebay.spark.export._types import (
    COLUMNS_MAX,
    choose,
    columns_in,
    grown,
    is_name,
    schema_of,
    table_schema,
)

__all__ = ["ExportReport", "Exporter", "Runner", "Step"]

Step: TypeAlias = Callable[[str, int, int], None]
"""Hears what is being done, how far it is, and how far it goes."""
Runner: TypeAlias = Callable[[ExportConfig, Sequence[Task], str, Callable[[], None]], list[TaskResult]]
"""Runs tasks somewhere; calls the last argument after each that is done."""

INFER_RECORDS: Final = 10_000
"""Records looked at to find the columns of a new table."""
RAW: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])
"""Columns of values that are left as they are."""
COMMIT_DEAD_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of bad records that the driver takes for one commit, from more than one task. Where there are more,
the commit is made of fewer tasks."""
CONFLICT_POLICY: Final = RetryPolicy(attempts_max=100, base_ms=50, cap_ms=2_000)


@dataclass(slots=True)
class ExportReport:
    """What an export did."""

    records: int = 0
    """Records read; of a buffer, batches."""
    rows: int = 0
    """Rows added to the table."""
    dead_letters: int = 0
    """Bad records met, and kept."""
    files: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    commits: int = 0
    conflicts: int = 0
    """Rounds that were planned again because another exporter was first."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Positions by lane that were gone before they were exported."""
    added_columns: list[str] = field(default_factory=list)
    ignored_columns: list[str] = field(default_factory=list)
    """Left out: what differs from a column only in case, has the name of one of ours, or no name."""
    positions: dict[str, int] = field(default_factory=dict)
    """Where every lane stands now."""
    version: str = ""
    """Version of the table after the last commit."""
    seconds: float = 0.0
    task_cpu_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Exporter:
    """Exports a source into a table, any number of times."""

    def __init__(self, config: ExportConfig, runner: Runner, *, parallelism: int, step: Step | None = None):
        """`step` hears of every step; what it raises ends the export there, as a crash would."""
        self.config = config
        self._runner = runner
        self._parallelism = parallelism
        self._step: Step = step or (lambda what, done, total: None)
        self._clients: Clients = clients()
        self._partitioning = Partitioning.parse(config.partition_by)
        self._table = open_table(config.target, config.name, self._clients)
        self._source: Source = open_source(config.source, self._clients)
        self._dead: DeadLetters | None = open_dead_letters(config, self._clients)

    def run_once(self) -> ExportReport:
        """Export everything that is there now."""
        began = time.monotonic()
        report = ExportReport()
        self._added = ()
        goal = {lane.name: lane for lane in self._source.lanes()}
        conflicts = 0
        while True:
            try:
                if not self._round(goal, report):
                    break
                conflicts = 0
            except (CommitConflict, RecordsTrimmed) as error:
                if isinstance(error, RecordsTrimmed) and not self._is_overtaken(error):
                    # Between the plan and the read: planned again, it is a gap like any other.
                    now = self._with_gaps(goal)
                    if self.config.on_data_loss == "fail" or now == goal:
                        raise
                    goal = now
                    continue
                conflicts += 1
                report.conflicts += 1
                if conflicts >= self.config.attempts_max:
                    raise
                time.sleep(CONFLICT_POLICY.wait_s(conflicts, self._clients.randomness))
        report.seconds = time.monotonic() - began
        return report

    def _is_overtaken(self, error: RecordsTrimmed) -> bool:
        """Whether the table has by now what is gone: another exporter was faster, and acknowledged it."""
        handle = self._table.load()
        return handle is not None and (handle.position(error.lane) or 0) > error.position

    def _with_gaps(self, goal: Mapping[str, Lane]) -> dict[str, Lane]:
        """The goal with the beginnings that the lanes have now."""
        now = {lane.name: lane.earliest for lane in self._source.lanes()}
        return {
            name: Lane(name, min(max(now.get(name, 0), lane.earliest), lane.next), lane.next)
            for name, lane in goal.items()
        }

    def _round(self, goal: Mapping[str, Lane], report: ExportReport) -> bool:
        """One commit; whether there was anything to commit."""
        handle = self._table.load()
        if handle is None:
            handle = self._create(goal)
            if handle is None:
                return False
        self._check(handle)
        plan = self._plan(handle, goal, report)
        if not plan:
            return False
        tasks = self._tasks(handle, plan)
        plan = _first(plan, sum(len(task.spans) for task in tasks))
        results = self._run(handle, tasks)
        if results is None:
            report.added_columns += [name for name in self._added if name not in report.added_columns]
            return True
        if any(result.has_too_many_dead for result in results):
            self._tasks_max = max(COMMIT_DEAD_BYTES_MAX // self.config.dead_letter_bytes_max, 1)
            return True
        self._tasks_max = min(2 * self._tasks_max, sys.maxsize)
        self._check_complete(plan, results)
        self._keep_dead(plan, results)
        self._commit(handle, plan, results, report)
        return True

    # -- the table

    def _create(self, goal: Mapping[str, Lane]) -> Handle | None:
        """A new table, with the columns of the first records where none were given."""
        payload = self.config.schema
        taken = {*METADATA.names, *(each.name for each in self._partitioning.fields())}
        if payload is None:
            payload = self._infer(goal)
            if payload is None:
                return None
            # What cannot be a column is left out and named in the report, as it is later on.
            payload = _without(payload, {name.lower() for name in taken})
        columns = table_schema(payload)
        if clash := taken & set(columns.names):
            raise UsageError(f"the values have a column {min(clash)!r} of their own", hint="rename it")
        _check_columns(columns.types)
        schema = pa.schema([*columns, *METADATA, *self._partitioning.fields()])
        self._partitioning.check(schema)
        self._table.create(schema, self._partitioning.columns)
        self._step("created", 0, 0)
        return self._table.load()

    def _infer(self, goal: Mapping[str, Lane]) -> pa.Schema | None:
        if self.config.format == "avro":
            from forebay.spark.export._avro import arrow_schema_of

            return arrow_schema_of(self.config.avro_schema or "")
        if self.config.format == "raw":
            return RAW
        decoder = decoder_of(self.config)
        seen: Seen = {}
        for lane in goal.values():
            end = min(lane.next, lane.earliest + INFER_RECORDS)
            spans = self._source.spans(lane.name, lane.earliest, end) if end > lane.earliest else []
            for span in joined(spans):
                for some in self._source.read(span):
                    values = pa.chunked_array([batch.column("value") for batch in some])
                    add_seen(seen, decoder.look(values.combine_chunks()))
        if not seen and all(lane.next <= lane.earliest for lane in goal.values()):
            return None
        if not seen and self.config.new_columns == "ignore":
            raise UsageError("no record has a column to begin with", hint="give --schema")
        # Without a column yet there are bad records to keep and positions to remember all the same.
        return schema_of(seen)

    def _check(self, handle: Handle) -> None:
        """Whether the table is one that this export can write to."""
        payload = RAW if self.config.format == "raw" else ()
        for wanted in (*payload, *METADATA, *self._partitioning.fields()):
            found = handle.schema.get_field_index(wanted.name)
            if found < 0 or handle.schema.field(found).type != wanted.type:
                raise UsageError(
                    f"{self.config.target.location} has no column {wanted.name!r} of type {wanted.type}",
                    hint="export into a table of its own, or add the column",
                )
        if handle.partition_by != self._partitioning.columns:
            raise UsageError(
                f"the table is partitioned by {_listed(handle.partition_by)}, "
                f"the export by {_listed(self._partitioning.columns)}",
                hint="partitioning is decided when the table is created: give the --partition-by of then",
            )

    # -- the plan

    def _plan(self, handle: Handle, goal: Mapping[str, Lane], report: ExportReport) -> list[_Range]:
        ranges = []
        followed = {name.rpartition(":")[0] for name in goal if handle.position(name) is not None}
        for lane in goal.values():
            known = handle.position(lane.name)
            # A partition that was added to a topic that the table follows is read from its beginning.
            is_new = lane.name.rpartition(":")[0] not in followed
            first = lane.next if self.config.start == "latest" and is_new else lane.earliest
            start = first if known is None else known
            if self.config.acknowledge and known is not None and lane.earliest < known:
                # By a run that ended between its commit and this, or was not told to.
                self._source.committed(lane.name, known)
            report.positions[lane.name] = start
            if start > lane.next:
                raise UsageError(
                    f"{lane.name}: the table is at {start:,}, the source ends at {lane.next:,}",
                    hint="another source under the same name? give the export a --name of its own",
                )
            gone = max(lane.earliest - start, 0)
            if gone and self.config.on_data_loss == "fail":
                raise RecordsTrimmed(lane.name, position=start, earliest=lane.earliest)
            if start + gone < lane.next or gone or (known is None and self.config.start == "latest"):
                ranges.append(_Range(lane.name, known, start, start + gone, lane.next))
        for each in ranges:
            each.spans = self._source.spans(each.lane, each.start, each.end) if each.start < each.end else []
            if each.gone and self.config.on_data_loss == "fail":
                _end_at_gap(each)
        return _within(ranges, self.config.commit_bytes_max)

    def _tasks(self, handle: Handle, plan: Sequence[_Range]) -> list[Task]:
        spans = [span for each in plan for span in each.spans]
        total = sum(span.bytes for span in spans)
        share = -(-total // (2 * self._parallelism))
        # A share and the span in which it ends: exactly as many tasks as there are shares, where they fit.
        ending = max((span.bytes for span in spans), default=0)
        size = min(max(share + ending, self.config.task_bytes_min), self.config.task_bytes_max)
        floors: dict[str, int] = {}
        if self._dead is not None:
            self._dead.begin(handle)
            floors = {each.lane: self._dead.floor(each.lane) for each in plan}
        bundles = _bundled(spans, size, self._parallelism)[: self._tasks_max]
        # One alone may have all that a task may have: there is none that could be left to the next commit.
        dead = COMMIT_DEAD_BYTES_MAX // len(bundles) if len(bundles) > 1 else sys.maxsize
        return [Task(number, tuple(some), handle.schema, floors, dead) for number, some in enumerate(bundles)]

    # -- the work

    _added: Sequence[str] = ()

    _tasks_max: int = sys.maxsize
    """Tasks of one commit: few where there were too many bad records for more, and then twice as many each
    time."""

    def _run(self, handle: Handle, tasks: Sequence[Task]) -> list[TaskResult] | None:
        """The results of all tasks; None where columns had to be added first."""
        self._step("planned", 0, len(tasks))
        done = 0

        def told() -> None:
            nonlocal done
            done += 1
            self._step("task", done, len(tasks))

        results = self._runner(self.config, tasks, self._table.store, told) if tasks else []
        if {result.number for result in results} != {task.number for task in tasks}:
            raise NotDone("tasks did not report", hint="run the export again")
        missing = [result.missing_columns for result in results if result.missing_columns]
        if missing:
            self._add_columns(handle, missing)
            return None
        self._step("written", len(tasks), len(tasks))
        return results

    def _add_columns(
        self, handle: Handle, missing: Sequence[Mapping[str, Mapping[pa.DataType, int]]]
    ) -> None:
        seen: Seen = {}
        for each in missing:
            add_seen(seen, each)
        known = {each.name: each.type for each in handle.schema}
        added: dict[str, pa.Field] = {}
        names: list[str] = []
        for name, kinds in sorted(seen.items()):
            kind = known.get(name)
            if kind is None:
                # Of two that differ only in case the first; the other is left out from then on.
                if added.setdefault(name.lower(), pa.field(name, choose(kinds))).name == name:
                    names.append(name)
                continue
            for each in sorted(kinds, key=lambda each: (-kinds[each], str(each))):
                kind = grown(kind, each)
            names += fields_beside(name, kind, known[name])
            added[name.lower()] = pa.field(name, kind)
        _check_columns({**known, **{each.name: each.type for each in added.values()}}.values())
        if names == self._added:
            raise NotDone(
                f"{self.config.target.location}: columns were added and are not there: {', '.join(names)}",
                hint="--new-columns ignore goes on without them",
            )
        handle.add_columns(list(added.values()))
        self._added = names
        self._step("columns", 0, 0)

    def _check_complete(self, plan: Sequence[_Range], results: Sequence[TaskResult]) -> None:
        """Every position was read once. What is missing here would be lost for good by the commit."""
        if not self._source.gapless:
            return
        for each in plan:
            read = sum(result.records.get(each.lane, 0) for result in results)
            if read != each.end - each.start:
                raise NotDone(
                    f"{each.lane}: {read:,} of {each.end - each.start:,} records were read",
                    hint="run `forebay verify`; nothing was committed",
                )

    def _keep_dead(self, plan: Sequence[_Range], results: Sequence[TaskResult]) -> None:
        count = sum(result.dead_count for result in results)
        if not count:
            return
        tables = [pa.ipc.open_stream(each.dead).read_all() for each in results if each.dead]
        dead = pa.concat_tables(tables) if tables else DEAD_SCHEMA.empty_table()
        if self._dead is None:
            rows = dead.slice(0, EXAMPLES_MAX).to_pylist()
            shown = [f"{row['topic']}:{row['partition']} {row['offset']}: {row['reason']}" for row in rows]
            raise BadRecords(count, shown)
        self._dead.keep(dead, {each.lane: each.end for each in plan})
        self._step("dead", count, count)

    def _commit(
        self, handle: Handle, plan: Sequence[_Range], results: Sequence[TaskResult], report: ExportReport
    ) -> None:
        files = [file for result in results for file in result.files]
        positions = {each.lane: each.end for each in plan}
        expected = {each.lane: each.known for each in plan}
        marks = {} if self._dead is None else self._dead.marks()
        commit = Commit(files, positions | marks, expected, uuid.uuid4().hex)
        report.version = commit_once(self._table, handle, commit, positions) or report.version
        self._added = ()
        self._step("committed", len(files), len(files))
        report.commits += 1
        report.files += len(files)
        report.positions.update(positions)
        for each in plan:
            if each.gone:
                report.skipped[each.lane] = report.skipped.get(each.lane, 0) + each.gone
        report.bytes_written += sum(file.size for file in files)
        for result in results:
            report.records += sum(result.records.values())
            report.rows += result.rows
            report.dead_letters += result.dead_count
            report.bytes_read += result.bytes_read
            report.task_cpu_s += result.cpu_s
        ignored = {name for result in results for name in result.ignored_columns}
        report.ignored_columns = sorted({*report.ignored_columns, *ignored})
        if self.config.acknowledge:
            for lane, end in positions.items():
                self._source.committed(lane, end)


def _without(schema: pa.Schema, taken: set[str]) -> pa.Schema:
    """The fields that can be columns: whose names are some, and free, whatever their case."""
    kept: dict[str, pa.Field] = {}
    for each in schema:
        if is_name(each.name) and each.name.lower() not in taken:
            kept.setdefault(each.name.lower(), each)
    return pa.schema(list(kept.values()))


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "nothing"


def _check_columns(kinds: Iterable[pa.DataType]) -> None:
    """Raise `LimitExceeded` where a table would get too many columns: names that are values, most likely."""
    count = columns_in(kinds)
    if count > COLUMNS_MAX:
        raise LimitExceeded(
            "columns of a table",
            limit=COLUMNS_MAX,
            actual=count,
            hint="--new-columns ignore, or --schema with the columns you want",
        )


@dataclass(slots=True)
class _Range:
    """What one round exports of one lane."""

    lane: str
    known: int | None
    """What the table says."""
    begin: int
    """Where the round before it ended."""
    start: int
    """The first position from there on that the source can have: it begins there, or before."""
    end: int
    spans: list[Span] = field(default_factory=list)

    @property
    def gone(self) -> int:
        """Positions that the source does not have: before the start, or between the spans."""
        return self.end - self.begin - sum(span.end - span.start for span in self.spans)


def _end_at_gap(each: _Range) -> None:
    """Cut a range where its first gap begins; raise `RecordsTrimmed` where there is nothing before it."""
    end, before = each.start, 0
    for span in each.spans:
        if span.start != end:
            break
        end, before = span.end, before + 1
    if not before:
        following = each.spans[0].start if each.spans else each.end
        raise RecordsTrimmed(each.lane, position=each.start, earliest=following)
    each.spans, each.end = each.spans[:before], end


def _within(ranges: list[_Range], bytes_max: int) -> list[_Range]:
    """The ranges cut so that together they stay within the bound, each lane with its share."""
    share = max(bytes_max // max(len(ranges), 1), 1)
    for each in ranges:
        size = 0
        for number, span in enumerate(each.spans):
            size += span.bytes
            if size > share and number:
                each.spans = each.spans[:number]
                each.end = each.spans[-1].end
                break
    return ranges


def _first(ranges: list[_Range], count: int) -> list[_Range]:
    """The ranges with the first so many spans of all; those that have none to read stay."""
    kept = []
    for each in ranges:
        if len(each.spans) > count:
            each.spans = each.spans[:count]
            if not count:
                continue
            each.end = each.spans[-1].end
        count -= len(each.spans)
        kept.append(each)
    return kept


def _bundled(spans: Sequence[Span], size: int, slots: int = 1) -> list[list[Span]]:
    """Neighbouring spans together, up to `size` bytes unless one alone is larger. All have about the same,
    and there are as many for each slot, so that no slot waits for the others' last task."""
    total = sum(span.bytes for span in spans) or 1
    largest = max((span.bytes for span in spans), default=0)
    count = -(-total // max(size - largest, size // 2, 1))
    if count > slots:
        count = -(-count // slots) * slots
    bundles: list[list[Span]] = []
    done = bound = room = 0
    for span in spans:
        # Each takes its share of the whole and the span in which it ends.
        if done >= bound or room < span.bytes:
            bundles.append([])
            bound, room = (done // total + 1) * total, size
        bundles[-1].append(span)
        done += span.bytes * count
        room -= span.bytes
    return bundles
