"""The demo as a list of steps on one stage. Each does one thing and tells what it did."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forebay.cli.demo.broker import Broker, Pipeline
from forebay.cli.demo.events import TOPICS, Event, make_events
from forebay.cli.demo.pipeline import table_of
from forebay.cli.demo.proof import Proof, ask_duckdb, dead_letters, prove, same_answers

__all__ = ["STEPS", "Outcome", "Stage", "Step"]

SEND_RECORDS: Final = 500
"""Records of one send."""
SEED: Final = 20260301


@dataclass(slots=True)
class Stage:
    """What the steps share."""

    directory: Path
    mode: str
    """`spark`, or `local` where there is no Java."""
    records: int
    broker: Broker | None = None
    pipeline: Pipeline | None = None
    events: dict[str, list[Event]] = field(default_factory=dict)
    exported: list[dict[str, Any]] = field(default_factory=list)
    """Reports of the exports, in the order they came."""
    killed_after: str = ""
    answers: dict[str, dict[str, list[list[Any]]]] = field(default_factory=dict)
    """By engine."""
    proofs: list[Proof] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def logs(self, name: str) -> Path:
        """Where a process writes its stderr."""
        folder = self.directory / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{name}.log"

    def close(self) -> None:
        """End what still runs."""
        for process in (self.pipeline, self.broker):
            if process is not None:
                process.kill()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did."""

    records: int
    detail: str
    wrong: int = 0
    """Records that are missing, doubled or changed, and answers that differ."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its name, its share of the progress bar, and the work."""

    name: str
    weight: int
    work: Callable[[Stage], Outcome]


def serve(stage: Stage) -> Outcome:
    """Start a broker on the embedded default, and the pipeline beside it."""
    stage.broker = Broker(stage.directory, stage.logs("broker"))
    from forebay.client import connect

    with connect(stage.broker.url) as bay:
        for topic in TOPICS:
            bay.topics.create(topic.name, partitions=topic.partitions)
    stage.pipeline = Pipeline(stage.directory, stage.mode, stage.logs("pipeline"))
    return Outcome(0, f"broker on {stage.broker.url}, pipeline on {stage.mode}")


def produce(stage: Stage) -> Outcome:
    """Send the first two thirds over HTTP, every record acknowledged."""
    for topic in TOPICS:
        count = int(stage.records * topic.share)
        stage.events[topic.name] = list(make_events(topic, count, SEED))
    sent = _send(stage, 0.0, 0.66)
    late = sum(event.late for events in stage.events.values() for event in events)
    return Outcome(sent, f"orders, clicks and telemetry over HTTP; {late:,} late")


def _send(stage: Stage, low: float, high: float) -> int:
    from forebay.client import connect

    assert stage.broker is not None
    receipts, sent = [], 0
    with connect(stage.broker.url) as bay, bay.producer() as out:
        for topic in TOPICS:
            events = stage.events[topic.name]
            events = events[int(len(events) * low) : int(len(events) * high)]
            for partition in range(topic.partitions):
                mine = [event.value for event in events if event.partition == partition]
                for first in range(0, len(mine), SEND_RECORDS):
                    part = mine[first : first + SEND_RECORDS]
                    receipts.append(out.send(topic.name, part, partition=partition))
                    sent += len(part)
        for receipt in receipts:
            receipt.result(timeout=120)
    return sent


def crash(stage: Stage) -> Outcome:
    """Kill the pipeline with -9 between the files and the commit of a table that has rows already."""
    assert stage.pipeline is not None
    commits, files = 0, 0
    while True:
        fact = stage.pipeline.next_fact()
        if fact is None:
            raise stage.pipeline.failed()
        commits += fact.get("step") == "committed"
        files += fact.get("step") == "written"
        if "exported" in fact:
            stage.exported.append(fact)
        if fact.get("step") == "written" and commits:
            stage.killed_after = str(fact["table"])
            break
    stage.pipeline.kill()
    stage.pipeline = None
    rows = sum(_rows(stage.directory, topic.name) for topic in TOPICS)
    after = "one commit" if commits == 1 else f"{commits} commits"
    return Outcome(rows, f"kill -9 after {after}, with files of {stage.killed_after} not committed")


def _rows(directory: Path, topic: str) -> int:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        return int(DeltaTable(str(table_of(directory, topic))).count())
    except TableNotFoundError:
        return 0


def resume(stage: Stage) -> Outcome:
    """Start the pipeline again, send the rest meanwhile, and let it come to the end."""
    stage.pipeline = Pipeline(stage.directory, stage.mode, stage.logs("pipeline"))
    sent = _send(stage, 0.66, 1.0)
    stage.pipeline.tell("finish")
    done, commits = False, 0
    while (fact := stage.pipeline.next_fact()) is not None:
        commits += fact.get("step") == "committed"
        if "exported" in fact:
            stage.exported.append(fact)
        if "answers" in fact:
            stage.answers["Spark SQL"] = fact["answers"]
        done = done or "done" in fact
    if not done or stage.pipeline.wait():
        raise stage.pipeline.failed()
    stage.pipeline = None
    return Outcome(sent, f"goes on from the tables' own positions, {commits} commits more")


def compact(stage: Stage) -> Outcome:
    """Fold the log's small appends into large objects, and verify all of it."""
    from forebay.log import CompactorConfig
    from forebay.spark.export import close_clients
    from forebay.spark.jobs import Place, verify
    from forebay.spark.jobs import compact as run

    place = Place(str(stage.directory))
    try:
        folded = run(place, config=CompactorConfig(min_age_ms=0))
        report = verify(place)
    finally:
        close_clients()
    entries = sum(each.entries for each in folded)
    wrong = sum(bool(each.error) for each in folded) + sum(bool(each.problems) for each in report.partitions)
    records = sum(each.records for each in folded)
    return Outcome(records, f"{entries:,} appends folded, every record verified", wrong)


def query(stage: Stage) -> Outcome:
    """Ask DuckDB what Spark SQL was asked; the answers must agree."""
    answers = ask_duckdb(stage.directory, TOPICS)
    if answers is None:
        stage.left_out.append("DuckDB is not installed: pip install duckdb")
    else:
        stage.answers["DuckDB"] = answers
    if len(stage.answers) < 2:
        return Outcome(0, f"asked {', '.join(stage.answers) or 'nobody'}")
    one, other = stage.answers.values()
    agree = same_answers(one, other)
    detail = f"{' and '.join(stage.answers)} {'agree' if agree else 'DIFFER'} on {len(one)} questions"
    return Outcome(0, detail, 0 if agree else 1)


def prove_all(stage: Stage) -> Outcome:
    """Compare every row with what was sent."""
    assert stage.broker is not None
    for topic in TOPICS:
        dead = dead_letters(stage.broker.url, topic)
        stage.proofs.append(prove(stage.directory, topic, stage.events[topic.name], dead))
    wrong = sum(each.missing + each.doubled + each.changed + each.dead_missing for each in stage.proofs)
    total = sum(each.sent for each in stage.proofs)
    dead_count = sum(each.dead_letters for each in stage.proofs)
    verdict = (
        f"each record once; {dead_count:,} dead letters with reasons" if not wrong else f"{wrong:,} WRONG"
    )
    return Outcome(total, verdict, wrong)


STEPS = (
    Step("serve", 1, serve),
    Step("produce", 2, produce),
    Step("kill", 4, crash),
    Step("resume", 4, resume),
    Step("compact", 2, compact),
    Step("query", 1, query),
    Step("prove", 1, prove_all),
)


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was played."""

    name: str
    outcome: Outcome
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, **dataclasses.asdict(self.outcome), "seconds": round(self.seconds, 3)}


def play(stage: Stage, told: Callable[[str, int], None]) -> list[Done]:
    """All steps, one after the other. `told` hears the name of the one that begins, and how far it is."""
    done, weight = [], 0
    for step in STEPS:
        told(step.name, weight)
        began = time.monotonic()
        outcome = step.work(stage)
        done.append(Done(step.name, outcome, time.monotonic() - began))
        weight += step.weight
    told("done", weight)
    return done
