from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.buffer import BufferConfig, Consumer, Producer
from forebay.cli._recognize import batch_or_manifest
from forebay.errors import FormatError
from forebay.formats import buffer_batch, buffer_manifest
from forebay.storage import open_store

Run = Callable[..., Any]


def fill(directory: Path, batches: int = 3) -> list[str]:
    """A queue of batches with the records a0 and b0, a1 and b1, ...; their locations."""

    async def work() -> list[str]:
        config = BufferConfig(url=str(directory), flush_interval_ms=0)
        async with Producer(config) as out:
            places = []
            for number in range(batches):
                handle = await out.produce([b"a%d" % number, b"b%d" % number], b"meta")
                places.append(await handle.watcher.await_durable())
        return [place.location for place in places]

    return asyncio.run(work())


def consume(directory: Path, batches: int) -> None:
    async def work() -> None:
        config = BufferConfig(url=str(directory), gc_enabled=False)
        async with Consumer(config) as consumer:
            await consumer.initialize()
            for _ in range(batches):
                batch = await consumer.next_batch()
                assert batch is not None
                await consumer.ack(batch.sequence)

    asyncio.run(work())


def test_inspect_prints_a_batch_as_the_contract_says(forebay: Run, tmp_path: Path) -> None:
    for compression in ("none", "zstd"):
        file = tmp_path / f"{compression}.batch"
        file.write_bytes(buffer_batch.encode([b"hello", b"", b"\xff"], compression))
        assert forebay("buffer", "inspect", file, "-o", "json").document == {
            "kind": "batch",
            "compression": compression,
            "records": 3,
            "data": ["aGVsbG8=", "", "/w=="],
        }


def test_inspect_prints_a_manifest_as_the_contract_says(forebay: Run, tmp_path: Path) -> None:
    [location] = fill(tmp_path, 1)
    found = forebay("buffer", "inspect", tmp_path / "ingest" / "manifest", "-o", "json").document
    [entry] = found.pop("entries")
    assert found == {"kind": "manifest", "version": 1, "epoch": 0, "next_sequence": 1}
    [item] = entry.pop("metadata")
    assert entry == {"sequence": 0, "location": location}
    assert item.pop("ingestion_time_ms") > 1_700_000_000_000
    assert item == {"start_index": 0, "payload": base64.b64encode(b"meta").decode()}


def test_inspect_takes_a_file_url_and_shows_records_in_text(forebay: Run, tmp_path: Path) -> None:
    file = tmp_path / "b"
    file.write_bytes(buffer_batch.encode([b"hello", b"\x00\x1b[2J", b"\xff"]))
    ran = forebay("buffer", "inspect", f"file://{file}", "--records")
    assert ran.code == 0
    assert "3 records" in ran.out
    assert "hello" in ran.out
    assert "\x1b" not in ran.out
    assert "hello" not in forebay("buffer", "inspect", file).out


def test_inspect_shows_a_manifest_as_a_table(forebay: Run, tmp_path: Path) -> None:
    fill(tmp_path, 2)
    ran = forebay("buffer", "inspect", tmp_path / "ingest" / "manifest")
    assert "next sequence 2" in ran.out
    assert "sequence" in ran.out


def test_an_empty_manifest_and_an_empty_batch_are_told_apart(forebay: Run, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(buffer_manifest.encode([], next_sequence=7, epoch=3))
    (tmp_path / "b").write_bytes(buffer_batch.encode([]))
    found = forebay("buffer", "inspect", tmp_path / "m", "-o", "json").document
    assert found == {"kind": "manifest", "version": 1, "epoch": 3, "next_sequence": 7, "entries": []}
    found = forebay("buffer", "inspect", tmp_path / "b", "-o", "json").document
    assert found == {"kind": "batch", "compression": "none", "records": 0, "data": []}


@pytest.mark.parametrize("junk", [b"", b"x", b"\0" * 100, b"\xff" * 30, b'{"pending": []}', b"\1\0" * 50])
def test_inspect_refuses_junk_with_exit_code_1(forebay: Run, tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "junk").write_bytes(junk)
    ran = forebay("buffer", "inspect", tmp_path / "junk", "-o", "json")
    assert ran.code == 1
    assert "neither a manifest" in ran.error["message"]


@given(st.binary(max_size=120))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_bytes_make_inspect_crash(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        batch_or_manifest(data, "x")


@pytest.mark.parametrize("what", ["nowhere", ".", "s3://bucket", "ftp://x/y"])
def test_inspect_of_what_is_no_object_fails_plainly(forebay: Run, tmp_path: Path, what: str) -> None:
    ran = forebay("buffer", "inspect", tmp_path / what if "://" not in what else what)
    assert ran.code in (1, 2)
    assert "unexpected" not in ran.err


def test_stats_tell_length_and_age(forebay: Run, tmp_path: Path) -> None:
    fill(tmp_path)
    found = forebay("buffer", "stats", tmp_path, "--sizes", "-o", "json").document
    assert (found["entries"], found["next_sequence"], found["epoch"]) == (3, 3, 0)
    assert found["pending_bytes"] > 0
    assert found["missing_batches"] == 0
    assert found["oldest_entry_age_s"] >= found["newest_entry_age_s"] >= 0
    assert "entries" in forebay("buffer", "stats", tmp_path).out


@pytest.mark.parametrize("words", [("stats",), ("verify",), ("tail",)])
def test_a_queue_that_is_not_there_is_an_error(forebay: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = forebay("buffer", *words, tmp_path, "--manifest", "typo/manifest")
    assert ran.code == 1
    assert "typo/manifest" in ran.err


def test_tail_prints_records_without_taking_them(forebay: Run, tmp_path: Path) -> None:
    fill(tmp_path)
    assert forebay("buffer", "tail", tmp_path).out.split() == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert forebay("buffer", "tail", tmp_path, "--from", 1, "-n", 3).out.split() == ["a1", "b1", "a2"]
    documents = forebay("buffer", "tail", tmp_path, "-o", "json").documents
    assert [(each["sequence"], each["index"]) for each in documents] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert base64.b64decode(documents[0]["data"]) == b"a0"
    assert base64.b64decode(documents[0]["metadata"]) == b"meta"
    assert forebay("buffer", "stats", tmp_path, "-o", "json").document["epoch"] == 0


def test_tail_follows_until_the_limit(forebay: Run, tmp_path: Path) -> None:
    fill(tmp_path, 1)
    assert forebay("buffer", "tail", tmp_path, "-f", "--poll", "1ms", "-n", 2).out.split() == ["a0", "b0"]


def test_gc_says_what_goes_and_what_stays_and_why(forebay: Run, tmp_path: Path) -> None:
    locations = fill(tmp_path)
    consume(tmp_path, 2)
    dry = forebay("buffer", "gc", tmp_path, "--grace", "0ms", "--dry-run", "-o", "json").document
    assert dry["deleted"] == locations[:2]
    assert dry["dry_run"] is True
    young = forebay("buffer", "gc", tmp_path, "-o", "json").document
    assert young["deleted"] == []
    assert young["kept_counts"]["young"] == 2
    ran = forebay("buffer", "gc", tmp_path, "--grace", "0ms")
    assert ran.code == 0
    assert "safe only while none of them runs" in ran.err
    assert "kept, referenced: 1" in ran.out
    assert "2 batches deleted" in ran.out
    assert [path.name for path in (tmp_path / "ingest").glob("*.batch")] == [Path(locations[2]).name]


def test_gc_of_a_mistyped_manifest_deletes_nothing_and_fails(forebay: Run, tmp_path: Path) -> None:
    fill(tmp_path)
    ran = forebay("buffer", "gc", tmp_path, "--manifest", "ingest/manifset", "--grace", "0ms", "-o", "json")
    assert ran.code == 1
    assert ran.document["deleted"] == []
    assert "no manifest" in ran.document["refused"]


def test_verify_reads_every_batch(forebay: Run, tmp_path: Path) -> None:
    fill(tmp_path)
    ran = forebay("buffer", "verify", tmp_path, "-o", "json")
    assert ran.code == 0
    assert ran.document == {"ok": True, "entries": 3, "records": 6, "bytes": 12, "problems": []}
    assert forebay("buffer", "verify", tmp_path).out.startswith("ok: 3 batches, 6 records")


def test_verify_names_missing_and_damaged_batches(forebay: Run, tmp_path: Path) -> None:
    locations = fill(tmp_path)

    async def damage() -> None:
        async with open_store(str(tmp_path)) as store:
            await store.delete([locations[0]])
            await store.put(locations[1], b"junk")

    asyncio.run(damage())
    ran = forebay("buffer", "verify", tmp_path, "-o", "json")
    assert ran.code == 1
    assert [problem["sequence"] for problem in ran.document["problems"]] == [0, 1]
    assert locations[0] in json.dumps(ran.document)
    assert "2 problems" in forebay("buffer", "verify", tmp_path).out


def test_verify_names_a_batch_that_is_there_twice(forebay: Run, tmp_path: Path) -> None:
    [location] = fill(tmp_path, 1)
    twice = [buffer_manifest.Entry(0, location), buffer_manifest.Entry(1, location)]

    async def write() -> None:
        async with open_store(str(tmp_path)) as store:
            await store.put("ingest/manifest", buffer_manifest.encode(twice))

    asyncio.run(write())
    [problem] = forebay("buffer", "verify", tmp_path, "-o", "json").document["problems"]
    assert problem["sequence"] == 1


@pytest.mark.parametrize("name", ["01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", "copy"])
def test_three_records_that_look_like_an_empty_manifest_are_a_batch(
    forebay: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(buffer_batch.encode([b"", b"", b"abc"]))
    found = forebay("buffer", "inspect", tmp_path / name, "-o", "json").document
    assert found == {"kind": "batch", "compression": "none", "records": 3, "data": ["", "", "YWJj"]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_commit_broker_answers_and_ends_when_it_is_told_to(tmp_path: Path, number: int) -> None:
    socket = tmp_path / "b"
    command = [sys.executable, "-m", "forebay.cli", "-o", "json", "buffer", "broker"]
    with subprocess.Popen(
        [*command, str(tmp_path / "queue"), "--socket", "b"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"socket": "b", "manifest": "ingest/manifest"}
        assert socket.is_socket()
        process.send_signal(number)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert not socket.exists()
