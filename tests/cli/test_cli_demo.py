"""The demo: what it proves, how it fails, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from forebay.cli import demo as demo_module
from forebay.cli.demo import steps
from forebay.cli.demo.broker import Broker
from forebay.cli.demo.events import TOPICS, Event, expected_rows, make_events
from forebay.cli.demo.proof import Proof, compare, same_answers
from forebay.cli.demo.questions import QUESTIONS
from forebay.cli.demo.report import bars, draw
from forebay.cli.demo.steps import Done, Outcome, Stage
from forebay.errors import ForebayError, Unsupported

Run = Callable[..., Any]

ORDERS = TOPICS[0]


def events(count: int = 500) -> list[Event]:
    return list(make_events(ORDERS, count, 1))


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def dead(made: list[Event]) -> list[bytes]:
    return [event.value for event in made if event.row is None]


# -- events


def test_events_are_the_same_for_the_same_seed_and_mostly_good() -> None:
    made = events()
    assert made == events()
    assert made != list(make_events(ORDERS, 500, 2))
    good = expected_rows(made)
    assert 450 < len(good) < 500
    assert any(event.late for event in made)
    assert len({row["id"] for row in good}) == len(good)
    for event in made[:50]:
        if event.row is not None:
            assert json.loads(event.value)["id"] == event.row["id"]


# -- the proof


def test_a_table_that_holds_every_row_once_is_proven() -> None:
    made = events()
    proof = compare(ORDERS, made, table(expected_rows(made)), dead(made))
    assert proof.ok
    assert (proof.sent, proof.rows + proof.dead_letters) == (500, 500)


def test_a_missing_a_doubled_a_changed_and_a_foreign_row_are_found() -> None:
    made = events()
    rows = expected_rows(made)
    assert compare(ORDERS, made, table(rows[1:]), dead(made)).missing == 1
    assert compare(ORDERS, made, table([*rows, rows[3]]), dead(made)).doubled == 1
    assert compare(ORDERS, made, table([*rows, rows[3] | {"id": "alien"}]), dead(made)).doubled == 1
    changed = [rows[0] | {"amount": -1.0}, *rows[1:]]
    assert compare(ORDERS, made, table(changed), dead(made)).changed == 1
    for proof in (
        compare(ORDERS, made, table(rows[1:]), dead(made)),
        compare(ORDERS, made, table(changed), dead(made)),
    ):
        assert not proof.ok


def test_lost_and_doubled_dead_letters_are_found() -> None:
    made, rows = events(), expected_rows(events())
    letters = dead(made)
    assert letters
    assert compare(ORDERS, made, table(rows), letters[1:]).dead_missing == 1
    assert compare(ORDERS, made, table(rows), [*letters, letters[0]]).dead_missing == 1


def test_answers_agree_up_to_a_cent_and_not_beyond() -> None:
    answers: dict[str, list[list[Any]]] = {name: [["AT", 3, 10.0]] for name in QUESTIONS}
    close = {name: [["AT", 3, 10.01]] for name in QUESTIONS}
    assert same_answers(answers, close)
    for wrong in ([["AT", 3, 11.0]], [["AT", 4, 10.0]], []):
        assert not same_answers(answers, close | {next(iter(QUESTIONS)): wrong})


# -- the report


def test_the_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "local", 100, left_out=["Spark: <none>"])
    stage.proofs.append(Proof("orders", 10, 9, 1, 2, 0, 0, 0, 0))
    stage.answers["DuckDB"] = {"revenue": [["AT", 1, 2.5]], "one": [[7]]}
    page = draw(stage, [Done("serve", Outcome(1, "a < b"), 0.5)], True)
    assert "http" not in page and "<script" not in page and "src=" not in page
    assert "a &lt; b" in page and "Spark: &lt;none&gt;" in page
    assert "Every record arrived exactly once." in page
    assert "exactly once" not in draw(stage, [], False)


def test_a_chart_is_a_well_formed_drawing_with_longer_bars_for_more() -> None:
    text = bars("t", [("a", 1.0), ("b", 2.0), ("c", 0.0)], "{:.0f}")
    for loose in ("x", "y", "width", "height", "rx", "role", "font-weight"):
        import re

        text = re.sub(rf" {loose}=([^\s\"'>]+)", rf' {loose}="\1"', text)
    drawing = ElementTree.fromstring(text)
    widths = [float(bar.attrib["width"]) for bar in drawing.iter("rect")]
    assert widths[0] < widths[1] and widths[2] == 1


# -- the command


def test_the_demo_without_spark_proves_every_record_and_leaves_only_its_report(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = forebay("demo", "--local", "--records", 1200, "-o", "json")
    assert ran.code == 0, ran.err
    document = ran.document
    assert (document["ok"], document["lost"], document["doubled"], document["mode"]) == (True, 0, 0, "local")
    assert document["records"] == document["rows"] + document["dead_letters"] == 1200
    assert [step["name"] for step in document["steps"]] == [step.name for step in steps.STEPS]
    assert document["left_out"]
    assert [path.name for path in tmp_path.iterdir()] == ["forebay-demo-report"]
    assert "exactly once" in Path(document["report"]).read_text()


def with_steps(monkeypatch: pytest.MonkeyPatch, work: Callable[[Stage], Outcome]) -> None:
    monkeypatch.setattr(steps, "STEPS", (steps.Step("only", 1, work),))


def test_a_demo_that_finds_something_wrong_says_so_and_fails(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_steps(monkeypatch, lambda stage: Outcome(1, "one is missing", 1))
    ran = forebay("demo", "--local")
    assert ran.code == 1
    assert "LOST" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["forebay-demo-report"]


def test_a_demo_that_breaks_off_cleans_up_too(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(stage: Stage) -> Outcome:
        (stage.directory / "something").touch()
        raise ForebayError("broken on purpose")

    monkeypatch.chdir(tmp_path)
    with_steps(monkeypatch, broken)
    ran = forebay("demo", "--local")
    assert (ran.code, ran.err) == (1, "error: broken on purpose\n")
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import os, signal, sys
from forebay.cli import run
from forebay.cli.demo import steps
from forebay.cli.demo.broker import Broker

def work(stage):
    stage.broker = Broker(stage.directory, stage.logs("broker"))
    print(stage.broker._process.pid, flush=True)
    os.kill(os.getpid(), signal.{signal})
    signal.pause()

steps.STEPS = (steps.Step("only", 1, work),)
sys.exit(run(["demo", "--local"]))
"""


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_nothing_outlives_a_demo_that_is_told_to_end(tmp_path: Path, name: str) -> None:
    """Its broker has a group of its own, and went on for ever."""
    script = INTERRUPTED.replace("{signal}", name)
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, timeout=120, check=False
    )
    broker = int(ran.stdout)
    survives = is_alive(broker)
    if survives:
        os.kill(broker, signal.SIGKILL)
    assert not survives
    assert (ran.returncode, list(tmp_path.iterdir())) == (130, [])


def test_a_broker_whose_start_is_interrupted_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[int] = []

    def interrupted(self: Broker) -> str:
        processes.append(self._process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(Broker, "next_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Broker(tmp_path / "data", tmp_path / "log")
    [broker] = processes
    survives = is_alive(broker)
    if survives:
        os.kill(broker, signal.SIGKILL)
    assert not survives


def test_the_data_is_kept_where_asked(forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with_steps(monkeypatch, lambda stage: Outcome(0, ""))
    ran = forebay("demo", "--local", "--data", tmp_path / "kept", "--keep", "-o", "json")
    assert ran.document["data"] == str(tmp_path / "kept")
    assert (tmp_path / "kept").is_dir()


def test_a_directory_with_something_in_it_is_left_alone(forebay: Run, filled: Path) -> None:
    ran = forebay("demo", "--data", filled, "-o", "json")
    assert ran.code == 2 and "not empty" in ran.error["message"]


def test_a_directory_as_the_report_is_refused_before_anything_happens(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Stage] = []

    def work(stage: Stage) -> Outcome:
        played.append(stage)
        return Outcome(0, "")

    with_steps(monkeypatch, work)
    ran = forebay("demo", "--local", "--data", tmp_path / "data", "--report", tmp_path, "-o", "json")
    assert (ran.code, played) == (2, []) and "is a directory" in ran.error["message"]


def test_without_java_the_demo_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise Unsupported("there is no Java", hint="install it")

    monkeypatch.setattr("forebay.spark._java.find_java", none)
    assert demo_module._mode() == ("local", "Spark: there is no Java (install it)")


def test_a_late_event_is_one_whose_own_time_is_long_before_its_neighbours() -> None:
    made = [event for event in events() if event.row is not None]
    late = [event for event in made if event.late]
    on_time = [event for event in made if not event.late]
    assert max(event.row["event_time"] for event in late if event.row) < min(
        event.row["event_time"] for event in on_time if event.row
    )
    assert replace(late[0], late=False) != late[0]
