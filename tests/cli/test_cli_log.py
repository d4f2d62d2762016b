"""`forebay log`, `topics`, `groups`, `compact`, `vacuum` and `verify` on an embedded deployment."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import connect as bay_of
from forebay.coordination import open_coordinator
from forebay.kit import IdSource, SystemClock
from forebay.log import AppendGroup, Fenced, LogReader, LogWriter
from forebay.log._group_records import TopicPartition
from forebay.log._groups import Groups
from forebay.log._keys import CATALOG_PARTITION_KEY, GroupKeys, PartitionKeys, group_key, topic_key
from forebay.log._meta import read_meta
from forebay.storage import open_store

Run = Callable[..., Any]
SECONDS_MAX = 60


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two topics: `orders` with two partitions of 12 records in 6 appends, `clicks` with one append."""
    directory = tmp_path / "data"

    async def fill() -> None:
        clock = SystemClock()
        async with open_store(directory) as store, open_coordinator(directory) as coordinator:
            writer = LogWriter(
                store,
                coordinator,
                clock=clock,
                ids=IdSource(clock),
                randomness=random.Random(1),
                name="filler",
            )
            async with writer:
                for number in range(6):
                    records = [b"%d" % number, b"%d again" % number]
                    groups = [AppendGroup.of("orders", partition, records) for partition in (0, 1)]
                    for result in await writer.append_shared(groups):
                        assert result.error is None
                await writer.append_shared([AppendGroup.of("clicks", 0, [b"click"])])

    asyncio.run(fill())
    return directory


def wal_objects(data: Path) -> list[Path]:
    """In no order: their names are random."""
    return list((data / "llog" / "wal-shared").iterdir())


def object_of(forebay: Run, data: Path, offset: int) -> Path:
    """The object that holds this offset of orders:1."""
    found = forebay("log", "explain", "orders", "1", str(offset), "--data", data, "-o", "json")
    return Path(found.document["object"].removeprefix("file://"))


# -- verify


def test_verify_of_a_whole_log_says_so_in_exactly_the_promised_form(forebay: Run, data: Path) -> None:
    ran = forebay("log", "verify", "--data", data, "-o", "json")
    assert ran.code == 0
    assert ran.document == {
        "ok": True,
        "partitions": [
            {"topic": "clicks", "partition": 0, "records": 1, "problems": []},
            {"topic": "orders", "partition": 0, "records": 12, "problems": []},
            {"topic": "orders", "partition": 1, "records": 12, "problems": []},
        ],
        "orphans": [],
    }


def test_verify_of_one_topic_looks_at_that_topic_alone(forebay: Run, data: Path) -> None:
    document = forebay("log", "verify", "--topic", "clicks", "--data", data, "-o", "json").document
    assert [each["topic"] for each in document["partitions"]] == ["clicks"]


def test_verify_of_everything_is_verify(forebay: Run, data: Path) -> None:
    assert (
        forebay("verify", "--data", data, "-o", "json").document
        == forebay("log", "verify", "--data", data, "-o", "json").document
    )


def test_verify_ends_with_code_one_where_a_slice_is_damaged(forebay: Run, data: Path) -> None:
    victim = object_of(forebay, data, 5)
    body = bytearray(victim.read_bytes())
    body[-6] ^= 0xFF
    victim.write_bytes(body)
    ran = forebay("verify", "--data", data, "-o", "json")
    assert ran.code == 1 and ran.document["ok"] is False
    [problem] = [problem for each in ran.document["partitions"] for problem in each["problems"]]
    assert "offsets 5 to 6" in problem and "checksum" in problem
    text = forebay("verify", "--data", data)
    assert text.code == 1 and "DAMAGED" in text.out


def test_verify_ends_with_code_one_where_an_object_is_missing(forebay: Run, data: Path) -> None:
    object_of(forebay, data, 1).unlink()
    ran = forebay("verify", "--data", data, "-o", "json")
    problems = [each["problems"] for each in ran.document["partitions"]]
    assert ran.code == 1
    assert [len(each) for each in problems] == [0, 1, 1]
    assert "missing" in problems[1][0]


def test_verify_lists_orphans_and_is_still_content(forebay: Run, data: Path) -> None:
    orphan = data / "llog" / "wal-shared" / "nobody"
    orphan.write_bytes(b"left over")
    ran = forebay("verify", "--data", data, "-o", "json")
    assert ran.code == 0 and ran.document["orphans"] == ["llog/wal-shared/nobody"]
    assert "orphan: llog/wal-shared/nobody" in forebay("verify", "--data", data).out


def test_one_damaged_topic_is_named_and_the_others_are_listed(forebay: Run, data: Path) -> None:
    async def damage() -> None:
        async with open_coordinator(data) as coordinator:
            await coordinator.put(topic_key("orders"), b"torn", partition_key=CATALOG_PARTITION_KEY)

    asyncio.run(damage())
    listed = forebay("topics", "list", "--data", data, "-o", "json")
    assert listed.code == 0 and listed.document["topic"] == "clicks"
    assert "warning: " in listed.err and "llog-catalog/topics/orders" in listed.err
    ran = forebay("verify", "--data", data, "-o", "json")
    assert ran.code == 1 and "llog-catalog/topics/orders" in ran.document["problems"][0]
    text = forebay("verify", "--data", data)
    assert text.code == 1 and "catalog: " in text.out


def test_a_directory_that_is_not_there_is_not_made(forebay: Run, tmp_path: Path) -> None:
    ran = forebay("verify", "--data", tmp_path / "nothing")
    assert ran.code == 2 and "no such directory" in ran.err
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("words", ["verify", "log verify", "topics list", "groups list", "compact", "vacuum"])
def test_a_directory_without_a_deployment_is_neither_whole_nor_made_into_one(
    forebay: Run, data: Path, tmp_path: Path, words: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ran = forebay(*words.split(), "--data", other, "-o", "json")
    assert ran.code == 2 and "holds no deployment" in ran.error["message"]
    assert list(other.iterdir()) == []
    # The same where the records are there, and the coordinator's file was lost.
    for path in (data / ".forebay").glob("coordination.db*"):
        path.unlink()
    ran = forebay(*words.split(), "--data", data, "-o", "json")
    assert ran.code == 2 and "holds no deployment" in ran.error["message"]


def test_verify_of_an_unknown_topic_fails(forebay: Run, data: Path) -> None:
    ran = forebay("log", "verify", "--topic", "nothing", "--data", data, "-o", "json")
    assert ran.code == 1 and ran.error["type"] == "UnknownTopic"


def test_a_topic_created_again_is_described_as_it_will_go_on(forebay: Run, tmp_path: Path) -> None:
    data, lines = tmp_path / "again", tmp_path / "lines"
    lines.write_text("a\nb\n")
    for words in (
        ("topics", "create", "t"),
        ("produce", "t", "--file", lines),
        ("topics", "delete", "t", "--yes"),
        ("topics", "create", "t"),
    ):
        assert forebay(*words, "--data", data).code == 0
    [partition] = forebay("topics", "describe", "t", "--data", data, "-o", "json").document["partitions"]
    assert (partition["earliest"], partition["next"], partition["records"]) == (3, 3, 0)


# -- explain


def test_explain_names_object_range_batch_writer_and_time(forebay: Run, data: Path) -> None:
    found = forebay("log", "explain", "orders", 1, 4, "--data", data, "-o", "json").document
    assert (found["batch_start"], found["batch_end"], found["place"]) == (3, 4, 1)
    assert found["writer"] == "filler" and found["source"] == "WAL"
    assert found["value_bytes"] == len(b"1 again")
    assert found["requests"] == {"control": 1, "index": 1, "object": 1}
    path = Path(found["object"].removeprefix("file://"))
    piece = path.read_bytes()[found["byte_offset"] : found["byte_offset"] + found["byte_length"]]
    assert b"1 again" in piece and piece.startswith(b"FBB1")
    text = forebay("log", "explain", "orders", 1, 4, "--data", data).out
    assert "offsets 3 to 4, 2 records" in text and "filler" in text


def test_explain_names_the_process_that_wrote_through_connect(forebay: Run, tmp_path: Path) -> None:
    with bay_of(tmp_path) as bay:
        bay.topics.create("orders", partitions=1)
        with bay.producer() as out:
            out.send("orders", [b"one"]).result(timeout=30)
    found = forebay("log", "explain", "orders", 0, 1, "--data", tmp_path, "-o", "json").document
    assert found["writer"] == f"{socket.gethostname()}:{os.getpid()}"


def test_explain_of_what_is_not_there_says_what_is(forebay: Run, data: Path) -> None:
    ran = forebay("log", "explain", "orders", 0, 13, "--data", data)
    assert ran.code == 1 and "the next to be written 13" in ran.err


# -- compact, vacuum


def test_compact_then_vacuum_then_everything_is_still_there(forebay: Run, data: Path) -> None:
    lines = forebay("compact", "--min-age", "0s", "--data", data, "-o", "json").document["partitions"]
    assert {(line["topic"], line["records"], line["lag_records"]) for line in lines} == {
        ("orders", 12, 0),
        ("clicks", 0, 1),
    }
    objects = len(wal_objects(data))
    dry = forebay("vacuum", "--grace", "0s", "--gap", "0s", "--dry-run", "--data", data, "-o", "json")
    assert dry.document["deleted"] == 0 and dry.document["kept"]["waits for its second mark"] == 5
    forebay("vacuum", "--grace", "0s", "--gap", "0s", "--data", data)
    dry = forebay("vacuum", "--grace", "0s", "--gap", "0s", "--dry-run", "--data", data, "-o", "json")
    assert dry.document["deleted"] == 5 and len(wal_objects(data)) == objects
    ran = forebay("vacuum", "--grace", "0s", "--gap", "0s", "--data", data)
    assert ran.code == 0 and "5 of" in ran.out
    assert len(wal_objects(data)) == objects - 5
    document = forebay("verify", "--data", data, "-o", "json").document
    assert document["ok"] and document["orphans"] == []
    found = forebay("log", "explain", "orders", 0, 4, "--data", data, "-o", "json").document
    assert found["source"] == "COMPACTED" and found["writer"] is None


def test_compact_leaves_young_appends_alone_unless_told(forebay: Run, data: Path) -> None:
    [line] = forebay("compact", "orders", 0, "--data", data, "-o", "json").document["partitions"]
    assert line["runs"] == 0 and line["reason"] == "no entry is old enough"


def test_compact_of_a_target_size_makes_several_objects(forebay: Run, data: Path) -> None:
    words = ("compact", "orders", 0, "--min-age", "0s", "--target", "80B", "--data", data, "-o", "json")
    [line] = forebay(*words).document["partitions"]
    assert line["runs"] > 1 and line["records"] == 12


def test_compact_with_a_damaged_source_fails_and_goes_on_with_the_others(forebay: Run, data: Path) -> None:
    victim = object_of(forebay, data, 5)
    body = bytearray(victim.read_bytes())
    body[-6] ^= 0xFF
    victim.write_bytes(body)
    ran = forebay("compact", "orders", "--min-age", "0s", "--data", data, "-o", "json")
    assert ran.code == 1
    assert sorted(bool(line["error"]) for line in ran.document["partitions"]) == [False, True]


def test_compact_of_an_unknown_partition_fails(forebay: Run, data: Path) -> None:
    assert forebay("compact", "orders", 7, "--data", data).code == 1
    assert forebay("compact", "orders", "--service", "--data", data).code == 2


def test_the_service_compacts_until_it_is_told_to_stop(data: Path) -> None:
    words = ("compact", "--service", "--min-age", "0s", "--target", "1B")
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", *words, "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "compacting" in process.stdout.readline()
        asyncio.run(asyncio.wait_for(_until_compacted(data), SECONDS_MAX))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, err) == (0, ""), out
    finally:
        process.kill()
        process.communicate()


def _asked(url: str, method: str = "GET") -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=SECONDS_MAX) as found:
            return found.status, found.headers["Content-Type"], found.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def test_the_service_tells_its_health_and_metrics_over_http(data: Path) -> None:
    words = ("compact", "--service", "--min-age", "0s", "--target", "1B", "--listen", "0", "-o", "json")
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", *words, "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        began = json.loads(process.stdout.readline())
        assert began["url"].startswith("http://127.0.0.1:") and began["workers"] == 2
        asyncio.run(asyncio.wait_for(_until_compacted(data), SECONDS_MAX))
        status, kind, body = _asked(began["url"] + "/health")
        health = json.loads(body)
        assert (status, kind, health["status"]) == (200, "application/json", "healthy")
        assert health["details"]["targets"] == 3
        status, _, body = _asked(began["url"] + "/metrics")
        metrics = json.loads(body)
        assert status == 200 and metrics["series"]["counters"]["log.compaction.records"][0]["value"] >= 10
        assert metrics["billing"]["request_dollars"] >= 0
        status, kind, body = _asked(began["url"] + "/metrics/prometheus")
        assert status == 200 and kind.startswith("text/plain") and b"log_compaction_runs" in body
        assert _asked(began["url"] + "/produce")[0] == 404
        assert _asked(began["url"] + "/health", "POST")[0] == 405
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, err) == (0, ""), out
        assert json.loads(out)["status"] == "stopped"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("wrong", ["", "nine", ":9090", "127.0.0.1:", "1:2:x", "99999", "123456"])
def test_an_address_to_listen_on_must_be_one(forebay: Run, data: Path, wrong: str) -> None:
    ran = forebay("compact", "--service", "--listen", wrong, "--data", data)
    assert ran.code == 2, ran.err
    assert forebay("compact", "--listen", "0", "--data", data).code == 2


def test_a_port_that_is_taken_is_told(forebay: Run, data: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = forebay("compact", "--service", "--listen", place, "--data", data)
    assert ran.code == 1 and place in ran.err


async def _until_compacted(data: Path) -> None:
    """With such a target every append is a run of its own; the last one waits for company."""
    keys = PartitionKeys("orders", 1)
    async with open_coordinator(data) as coordinator, coordinator.watch(f"{keys.root}/meta") as watch:
        while (await read_meta(coordinator, keys)).cursor < 11:
            await watch.changed()


# -- trim and retention


def test_a_fenced_partition_refuses_appends_until_it_is_unfenced(forebay: Run, data: Path) -> None:
    fenced = forebay("log", "fence", "orders", 0, "--data", data, "-o", "json").document
    assert fenced == {
        "topic": "orders",
        "partition": 0,
        "log_state": "FENCED",
        "epoch": 1,
        "next_offset": 13,
    }
    with bay_of(str(data)) as bay, bay.producer() as out:
        with pytest.raises(Fenced):
            out.send("orders", [b"late"], partition=0).result(SECONDS_MAX)
        assert out.send("orders", [b"fine"], partition=1).result(SECONDS_MAX).start_offset == 13
    assert forebay("log", "fence", "orders", 0, "--epoch", 1, "--data", data).code == 1
    assert forebay("log", "unfence", "orders", 0, 7, "--data", data).code == 1
    assert "open, epoch 1" in forebay("log", "unfence", "orders", 0, 1, "--data", data).out
    with bay_of(str(data)) as bay, bay.producer() as out:
        assert out.send("orders", [b"again"], partition=0).result(SECONDS_MAX).start_offset == 13
    assert forebay("log", "state", "orders", 0, "--data", data).out.endswith("next offset 14\n")


def test_the_state_of_a_partition_that_is_not_there_names_those_that_are(forebay: Run, data: Path) -> None:
    run = forebay("log", "state", "clicks", 4, "--data", data)
    assert run.code == 1
    assert "topic 'clicks' has no partition 4" in run.err
    assert "0 to 0" in run.err


def test_trim_to_an_offset(forebay: Run, data: Path) -> None:
    document = forebay("log", "trim", "orders", 0, "--to", 5, "--data", data, "-o", "json").document
    assert (document["records"], document["earliest"], document["next"]) == (4, 5, 13)
    assert forebay("log", "trim", "orders", 0, "--to", 99, "--data", data).code == 1
    assert forebay("verify", "--data", data).code == 0


def test_trim_before_a_time(forebay: Run, data: Path) -> None:
    words = ("log", "trim", "orders", 0, "--before", "2100-01-01T00:00:00Z", "--data", data)
    assert "12 records trimmed" in forebay(*words).out
    assert forebay("log", "trim", "orders", 1, "--before", "1000", "--data", data).code == 0
    assert forebay("log", "trim", "orders", 1, "--before", "yesterday", "--data", data).code == 2
    assert forebay("log", "trim", "orders", 1, "--data", data).code == 2


def test_retain_trims_what_the_settings_no_longer_keep(forebay: Run, data: Path) -> None:
    assert forebay("log", "retain", "--data", data, "-o", "json").document["trimmed"] == []
    forebay("topics", "alter", "orders", "--retention-bytes", "1B", "--data", data)
    dry = forebay("log", "retain", "--dry-run", "--data", data, "-o", "json").document
    assert [each["records"] for each in dry["trimmed"]] == [10, 10]
    ran = forebay("log", "retain", "--topic", "orders", "--data", data)
    assert "20 records trimmed" in ran.out
    assert forebay("log", "retain", "--topic", "nothing", "--data", data).code == 1


# -- topics


def test_topics_are_created_described_changed_and_deleted(forebay: Run, tmp_path: Path) -> None:
    data = tmp_path / "new"
    words = ("--partitions", 3, "--retention", "7d", "--retention-bytes", "1GiB", "--no-compaction")
    made = forebay("topics", "create", "logs.raw", *words, "--data", data, "-o", "json").document
    assert (made["topic"], made["partition_count"], made["state"]) == ("logs.raw", 3, "ACTIVE")
    assert made["settings"] == {
        "retention_ms": 7 * 86_400_000,
        "retention_bytes": 1 << 30,
        "compaction": False,
        "compact_min_age_ms": 120_000,
        "target_bytes": 64 * 1024 * 1024,
    }
    assert forebay("topics", "create", "logs.raw", "--data", data).code == 1
    [listed] = forebay("topics", "list", "--data", data, "-o", "json").documents
    assert listed == made
    assert "kept 7d, 1.00 GiB, not compacted" in forebay("topics", "list", "--data", data).out
    changes = ("--retention", "none", "--compaction", "--target", "1MiB", "--compact-min-age", "5s", "-p", 4)
    changed = forebay("topics", "alter", "logs.raw", *changes, "--data", data, "-o", "json").document
    assert changed["settings"]["retention_ms"] is None and changed["settings"]["compaction"]
    assert changed["settings"]["retention_bytes"] == 1 << 30
    assert (changed["partition_count"], changed["settings"]["compact_min_age_ms"]) == (4, 5_000)
    found = forebay("topics", "describe", "logs.raw", "--data", data, "-o", "json").document
    assert [each["partition"] for each in found["partitions"]] == [0, 1, 2, 3]
    assert {each["state"] for each in found["partitions"]} == {"OPEN"}
    assert forebay("topics", "delete", "logs.raw", "--yes", "--data", data, "-o", "json").document["deleted"]
    assert forebay("topics", "describe", "logs.raw", "--data", data).code == 1
    assert forebay("topics", "alter", "logs.raw", "--data", data).code == 2


def test_describe_shows_where_partitions_begin_end_and_are_compacted(forebay: Run, data: Path) -> None:
    forebay("compact", "orders", 0, "--min-age", "0s", "--data", data)
    found = forebay("topics", "describe", "orders", "--data", data, "-o", "json").document["partitions"]
    assert [(each["next"], each["cursor"], each["not_compacted"]) for each in found] == [
        (13, 13, 0),
        (13, 1, 12),
    ]
    assert "compacted below" in forebay("topics", "describe", "orders", "--data", data).out


def test_objects_of_a_deleted_topic_are_vacuumed(forebay: Run, data: Path) -> None:
    forebay("compact", "orders", "--min-age", "0s", "--data", data)
    assert forebay("topics", "delete", "orders", "-y", "--data", data).code == 0
    for _ in range(2):
        forebay("vacuum", "--grace", "0s", "--gap", "0s", "--data", data)
    assert len(wal_objects(data)) == 1
    assert forebay("verify", "--data", data, "-o", "json").document["orphans"] == []


def test_a_deletion_asks_first(forebay: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert forebay("topics", "delete", "orders", "--data", data).code == 130
    assert forebay("topics", "describe", "orders", "--data", data).code == 0


# -- groups


@pytest.fixture
def group(data: Path) -> str:
    async def commit() -> None:
        clock = SystemClock()
        parts: dict[str, Any] = {"clock": clock, "randomness": random.Random(1)}
        async with open_store(data) as store, open_coordinator(data) as coordinator:
            reader = LogReader(store, coordinator, **parts)
            catalog = LogWriter(store, coordinator, ids=IdSource(clock), **parts).catalog
            groups = Groups(coordinator, reader, catalog, ids=IdSource(clock), **parts)
            await groups.commit("billing", {TopicPartition("orders", 0): 5})

    asyncio.run(commit())
    return "billing"


def test_groups_are_listed_and_described_with_their_lag(forebay: Run, data: Path, group: str) -> None:
    [listed] = forebay("groups", "list", "--data", data, "-o", "json").documents
    assert (listed["group"], listed["members"], listed["lag_records"]) == ("billing", 0, 8)
    found = forebay("groups", "describe", group, "--data", data, "-o", "json").document
    [place] = [each for each in found["partitions"] if each["partition"] == 0]
    assert (place["committed"], place["next"], place["records"]) == (5, 13, 8)
    assert "orders:0" in forebay("groups", "describe", group, "--data", data).out


def test_groups_are_reset_first_dry_then_for_good(forebay: Run, data: Path, group: str) -> None:
    words = ("groups", "reset", group, "--to", "earliest", "--topic", "orders", "--data", data, "-o", "json")
    dry = forebay(*words, "--dry-run").documents
    assert [(each["before"], each["after"]) for each in dry] == [(5, 1), (None, 1)]
    assert forebay("groups", "list", "--data", data, "-o", "json").documents[0]["lag_records"] == 8
    assert forebay(*words).code == 0
    found = forebay("groups", "describe", group, "--data", data, "-o", "json").document
    assert {each["committed"] for each in found["partitions"]} == {1}
    ran = forebay(
        "groups", "reset", group, "--to", "7", "--topic", "orders", "--partition", 1, "--data", data
    )
    assert "orders:1 goes from 1 to 7" in ran.out
    assert "13" in forebay("groups", "reset", group, "--to-time", "2100-01-01", "--data", data).out


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        ("--to", "somewhere"),
        ("--to", "1", "--to-time", "1"),
        ("--to", "1", "--partition", "1"),
        ("--to", "9" * 5_000),
        ("--to-time", "9" * 5_000),
    ],
    ids=["nowhere", "somewhere", "two places", "no topic", "long offset", "long time"],
)
def test_a_reset_that_makes_no_sense_is_refused(
    forebay: Run, data: Path, group: str, wrong: tuple[str, ...]
) -> None:
    assert forebay("groups", "reset", group, *wrong, "--data", data).code == 2


def test_a_deleted_group_is_forgotten(forebay: Run, data: Path, group: str) -> None:
    assert forebay("groups", "delete", group, "--yes", "--data", data).code == 0
    assert forebay("groups", "list", "--data", data, "-o", "json").documents == []


@pytest.mark.parametrize("value", [b"torn", b'{"topic": "../x", "partition": 0}'], ids=["torn", "misplaced"])
def test_a_damaged_group_hides_no_other_and_can_be_deleted(
    forebay: Run, data: Path, group: str, value: bytes
) -> None:
    keys = GroupKeys("broken")

    async def damage() -> None:
        async with open_coordinator(data) as coordinator:
            home = keys.partition_key
            await coordinator.put(keys.offset("orders", 0), value, partition_key=home)
            await coordinator.put(group_key("broken"), b"broken", partition_key=CATALOG_PARTITION_KEY)

    asyncio.run(damage())
    listed = forebay("groups", "list", "--data", data, "-o", "json")
    assert listed.code == 0 and [each["group"] for each in listed.documents] == [group, "broken"]
    assert "broken" in listed.err and keys.offset("orders", 0) in listed.err
    shown = forebay("groups", "describe", "broken", "--data", data)
    assert shown.code == 1 and "forebay groups delete" in shown.err
    shown = forebay("groups", "describe", "broken", "--data", data, "-o", "json")
    [problem] = shown.document["problems"]
    assert shown.code == 1 and keys.offset("orders", 0) in problem
    assert forebay("groups", "delete", "broken", "--yes", "--data", data).code == 0
    assert forebay("groups", "list", "--data", data).err == ""


def test_a_damaged_partition_hides_no_other_of_its_topic(forebay: Run, data: Path) -> None:
    async def damage() -> None:
        async with open_coordinator(data) as coordinator:
            await coordinator.put("llog/orders/partitions/0/meta/control", b"torn", partition_key="orders:0")

    asyncio.run(damage())
    shown = forebay("topics", "describe", "orders", "--data", data, "-o", "json")
    assert shown.code == 1 and "partitions/0/meta/control" in shown.document["problems"][0]
    assert [each["partition"] for each in shown.document["partitions"]] == [1]
    assert "partitions/0" in shown.err


def test_a_topic_made_at_an_impossible_time_is_listed_all_the_same(forebay: Run, data: Path) -> None:
    key = topic_key("clicks")

    async def damage() -> None:
        async with open_coordinator(data) as coordinator:
            found = await coordinator.get(key, partition_key=CATALOG_PARTITION_KEY)
            assert found is not None
            changed = {**json.loads(found.value), "created_at_ms": 10**18}
            await coordinator.put(key, json.dumps(changed).encode(), partition_key=CATALOG_PARTITION_KEY)

    asyncio.run(damage())
    ran = forebay("topics", "list", "--data", data)
    assert ran.code == 0 and "orders" in ran.out and "clicks" in ran.out


def test_a_time_of_too_many_digits_is_wrong_usage(forebay: Run, data: Path) -> None:
    assert forebay("log", "trim", "orders", 0, "--before", "9" * 5_000, "--data", data).code == 2


def test_a_grace_that_is_short_for_running_writers_is_warned_of(forebay: Run, data: Path) -> None:
    short = ("vacuum", "--grace", "5m", "--data", data)
    assert "safe only while" in forebay(*short).err
    assert forebay(*short, "--dry-run").err == ""
    assert forebay("vacuum", "--data", data).err == ""
