"""`forebay spark`: the commands without Spark, which is tested with the jobs themselves."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay as forebay_package
from forebay.errors import Unavailable, UsageError
from forebay.spark.export import Exporter, ExportReport, close_clients

Run = Callable[..., Any]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "bay"
    with forebay_package.connect(directory) as bay:
        bay.topics.create("orders", partitions=2)
        bay.topics.create("again", partitions=2)
        with bay.producer() as out:
            for partition in range(2):
                records = [json.dumps({"id": number, "amount": number / 2}).encode() for number in range(10)]
                out.send("orders", records, partition=partition).result(timeout=60)
                out.send("orders", [b"{bad"], partition=partition).result(timeout=60)
    yield directory
    close_clients()


def test_an_export_without_spark_tells_what_it_did(forebay: Run, data: Path, tmp_path: Path) -> None:
    words = [
        "spark", "export", "orders", "--data", data, "--to", f"delta:{tmp_path / 'table'}",
        "--format", "json", "--partition-by", "date", "--dead-letter", "topic:dead", "--local",
        "--task-bytes", "64KiB",
    ]  # fmt: skip
    ran = forebay(*words, "-o", "json")
    assert ran.code == 0, ran.err
    assert (ran.document["records"], ran.document["rows"], ran.document["dead_letters"]) == (22, 20, 2)
    again = forebay(*words)
    assert again.out.startswith("0 records, 0 rows")


def test_an_export_takes_its_columns_from_text_or_a_file(forebay: Run, data: Path, tmp_path: Path) -> None:
    columns = tmp_path / "columns.txt"
    columns.write_text("id long, amount decimal(10,2)")
    wide = ", ".join(f"a_column_with_a_rather_long_name_{number} string" for number in range(20))
    for number, schema in enumerate((columns, "id long, amount decimal(10,2)", f"{wide}, id long")):
        table = f"parquet:{tmp_path / f'table{number}'}"
        ran = forebay(
            "spark", "export", "orders", "--data", data, "--to", table, "--format", "json", "--local",
            "--schema", schema, "--new-columns", "ignore", "--dead-letter", f"topic:dead{number}",
            "-o", "json",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        assert ran.document["rows"] == 20


@pytest.mark.parametrize(
    "words",
    [
        ["orders", "--to", "delta"],
        ["orders", "--to", "what:x"],
        ["orders", "--to", "delta:t", "--format", "xml"],
        ["orders", "--to", "delta:t", "--format", "avro"],
        ["orders", "--to", "delta:t", "--format", "avro", "--schema", "not-there.avsc"],
        ["orders", "--to", "delta:t", "--format", "json", "--schema", "id decimal(60,2)"],
        ["orders", "--to", "delta:t", "--schema", "id long"],
        ["orders", "--to", "delta:taken"],
        ["orders", "--to", "iceberg:not-configured/db.table"],
        ["orders", "--to", "delta:t", "--on-data-loss", "shrug"],
        ["buffer:a,b", "--to", "delta:t"],
        ["orders", "--to", "delta:t", "--acknowledge"],
        ["orders", "--to", "delta:t", "--master", "local[1]"],
        ["orders", "--to", "delta:t", "--continuous", "--interval", "1ms"],
    ],
)
def test_wrong_usage_is_refused_before_anything_happens(
    forebay: Run, data: Path, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file")
    ran = forebay("spark", "export", *words, "--data", data, "--local", "-o", "json")
    assert ran.code == 2, ran.err
    assert ran.error["hint"]


def test_a_master_that_does_not_answer_is_named(
    forebay: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.spark._session._is_running", lambda: False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        master = f"spark://127.0.0.1:{taken.getsockname()[1]}"
        ran = forebay("spark", "verify", "--data", data, "--master", master)
    assert ran.code == 1
    assert ran.err.startswith(f"connecting to {master}\n")
    assert "no Spark master answers at 127.0.0.1" in ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "5"], "--from"),
        (["--name", "a/b"], "name is 'a/b'"),
        (["--task-bytes", "0"], "task_bytes_max is 0"),
        (["--format", "avro", "--schema", "not-there.avsc"], "no file"),
    ],
)
def test_wrong_usage_is_told_in_one_short_sentence(
    forebay: Run, data: Path, tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = forebay(
        "spark", "export", "orders", "--to", "delta:t", *words, "--data", data, "--local", "-o", "json"
    )
    assert ran.code == 2, ran.err
    assert message in ran.error["message"] + ran.error["hint"]
    assert len(ran.error["message"]) < 100


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["compact"],
        ["vacuum"],
        ["replay", "orders", "again", "--job", "j", "--to", "5"],
        ["export", "orders", "--to", "delta:t"],
        ["export", "buffer:ingest/manifest", "--to", "delta:t"],
    ],
)
def test_a_directory_that_is_not_there_is_refused_and_not_made(
    forebay: Run, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = forebay("spark", *words, "--data", tmp_path / "typo", "--local", "-o", "json")
    assert ran.code == 2, ran.err
    assert "no such directory" in ran.error["message"]
    assert not (tmp_path / "typo").exists()


def test_a_queue_that_is_not_there_is_no_empty_one(forebay: Run, data: Path, tmp_path: Path) -> None:
    ran = forebay(
        "spark", "export", "buffer:typo/manifest", "--to", f"delta:{tmp_path / 't'}", "--data", data,
        "--local", "-o", "json",
    )  # fmt: skip
    assert ran.code == 1
    assert "typo/manifest" in ran.error["message"]


def test_bad_records_without_a_place_end_the_export_with_the_remedy(
    forebay: Run, data: Path, tmp_path: Path
) -> None:
    table = f"delta:{tmp_path / 'table'}"
    ran = forebay("spark", "export", "orders", "--data", data, "--to", table, "--format", "json", "--local")
    assert ran.code == 1
    assert "orders:0 11" in ran.err and "--dead-letter" in ran.err


def test_jobs_without_spark_are_the_local_commands(forebay: Run, data: Path) -> None:
    ran = forebay("spark", "compact", "--data", data, "--min-age", "0s", "--local", "-o", "json")
    assert ran.code == 0, ran.err
    assert sum(each["records"] for each in ran.document["partitions"]) == 22
    assert "orders:1" in forebay("spark", "compact", "orders", "--data", data, "--local").out
    verified = forebay("spark", "verify", "--data", data, "--local", "-o", "json").document
    assert verified == forebay("verify", "--data", data, "-o", "json").document
    assert "22 records" in forebay("spark", "verify", "--data", data, "--local").out
    ran = forebay("spark", "vacuum", "--data", data, "--dry-run", "--local", "-o", "json")
    assert ran.code == 0 and ran.document["dry_run"]


def test_a_replay_is_run_twice_and_appends_once(forebay: Run, data: Path) -> None:
    words = [
        "spark",
        "replay",
        "orders",
        "again",
        "--job",
        "j1",
        "--to",
        "2100-01-01",
        "--data",
        data,
        "--local",
    ]
    first = forebay(*words, "-o", "json").document
    assert sum(each["appended"] for each in first["partitions"]) == 22
    assert forebay(*words).out.endswith("0 records appended to again\n")


def test_names_of_columns_do_not_reach_the_terminal_as_they_are(
    forebay: Run, data: Path, tmp_path: Path
) -> None:
    words = [
        "spark", "export", "orders", "--data", data, "--to", f"delta:{tmp_path / 'table'}",
        "--format", "json", "--dead-letter", "topic:dead", "--local",
    ]  # fmt: skip
    assert forebay(*words).code == 0
    with forebay_package.connect(data) as bay, bay.producer() as out:
        record = json.dumps({"id": 1, "\x1b[2J": 1, "ID": 2, "a\0b": 3}).encode()
        out.send("orders", [record], partition=0).result(timeout=60)
    ran = forebay(*words)
    assert ran.code == 0
    assert "new columns: \\x1b[2J\n" in ran.out
    assert "left out, for no column can have the name, or one has it" in ran.out
    assert ran.out.rstrip().endswith("ID, a\\x00b")


def test_a_continuous_export_says_once_what_it_waits_for(
    forebay: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said nothing, however long the store was down."""
    rounds: list[int] = []

    def run_once(self: Exporter) -> ExportReport:
        rounds.append(len(rounds))
        if len(rounds) in (1, 2, 4):
            raise Unavailable("the table cannot be reached")
        if len(rounds) == 5:
            raise UsageError("enough")
        return ExportReport()

    monkeypatch.setattr("signal.signal", lambda *_: None)  # Those of the tests stay.
    monkeypatch.setattr(Exporter, "run_once", run_once)
    ran = forebay(
        "spark", "export", "orders", "--data", data, "--to", f"delta:{tmp_path / 'table'}", "--local",
        "--continuous", "--interval", "100ms",
    )  # fmt: skip
    line = "warning: the table cannot be reached; it is tried again every 0.1 s\n"
    assert ran.err == line * 2 + "error: enough\n"
