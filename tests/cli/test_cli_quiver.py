"""`forebay quiver`: a store's directory on the command line."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.quiver.harness import batch, drain

from forebay.quiver import Quiver, QuiverConfig


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with Quiver(tmp_path / "q") as quiver:
            await quiver.register("a")
            await quiver.register("b")
            for number in range(3):
                await quiver.ingest(batch(number), signal="traces")
                await quiver.flush()
            assert await drain(quiver, "a", timeout_s=0.1) == [0, 1, 2]

    asyncio.run(fill())
    return tmp_path / "q"


def test_inspect_shows_segments_and_positions_and_changes_nothing(
    forebay: Callable[..., Any], directory: Path
) -> None:
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    ran = forebay("quiver", "inspect", directory, "--output", "json")
    [facts] = ran.documents
    assert [(each["segment"], each["signal"], each["rows"]) for each in facts["segments"]] == [
        (number, "traces", 10) for number in (1, 2, 3)
    ]
    assert {each["name"]: each["high_water"] for each in facts["subscribers"]} == {"a": 3, "b": 0}
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    assert "segment 2" in forebay("quiver", "inspect", directory).out


def test_inspect_of_one_file_shows_its_metadata(forebay: Callable[..., Any], directory: Path) -> None:
    path = directory / "segments" / "0000000000000002.arrow"
    [facts] = forebay("quiver", "inspect", path, "--output", "json").documents
    assert (facts["kind"], facts["segment"], facts["rows"]) == ("segment", 2, 10)
    assert facts["event_ns"] == [1_000, 1_009]
    assert facts["bad_parts"] == []


def test_stats_show_lag_and_losses(forebay: Callable[..., Any], directory: Path) -> None:
    [facts] = forebay("quiver", "stats", directory, "--output", "json").documents
    assert (facts["segments"], facts["rows"], facts["next_segment"], facts["losses"]) == (3, 30, 4, {})
    assert {each["name"]: each["lag_segments"] for each in facts["subscribers"]} == {"a": 0, "b": 3}
    assert "3 segments behind" in forebay("quiver", "stats", directory).out


def test_verify_finds_a_flipped_bit_and_fails(forebay: Callable[..., Any], directory: Path) -> None:
    ran = forebay("quiver", "verify", directory, "--output", "json")
    assert (ran.code, ran.documents[0]["ok"]) == (0, True)
    path = directory / "segments" / "0000000000000002.arrow"
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.chmod(0o640)
    path.write_bytes(data)
    ran = forebay("quiver", "verify", directory, "--output", "json")
    assert ran.code == 1
    assert ran.documents[0]["problems"] == ["segment 2: parts [0] are damaged"]


def test_tail_prints_the_last_rows(forebay: Callable[..., Any], directory: Path) -> None:
    documents = forebay("quiver", "tail", directory, "--lines", 12).documents
    assert len(documents) == 12
    assert [each["number"] for each in documents] == [1, 1, *[2] * 10]


def test_tail_prints_bytes_so_that_a_program_can_read_them(
    forebay: Callable[..., Any], tmp_path: Path
) -> None:
    async def fill() -> None:
        async with Quiver(tmp_path / "bytes") as quiver:
            await quiver.ingest(pa.record_batch({"request": [b"\x00\xff"]}))

    asyncio.run(fill())
    assert forebay("quiver", "tail", tmp_path / "bytes").documents == [{"request": "AP8="}]


def test_tail_shows_values_that_python_and_json_have_no_form_for(
    forebay: Callable[..., Any], tmp_path: Path
) -> None:
    far = 1 << 62
    text = pa.StringArray.from_buffers(2, *pa.array([b"\xff", b"ok"]).buffers()[1:])
    columns = {
        "time": pa.array([far, 1], pa.timestamp("s")),
        "day": pa.array([(1 << 31) - 1, 1], pa.date32()),
        "span": pa.array([far, 1], pa.duration("s")),
        "where": pa.array([1, 1], pa.timestamp("us", tz="Nowhere/At_all")),
        "nested": pa.array([[1.5, math.nan], [math.inf]]),
        "text": text,
    }

    async def fill() -> None:
        async with Quiver(tmp_path / "odd") as quiver:
            await quiver.ingest(pa.record_batch(columns))

    asyncio.run(fill())
    ran = forebay("quiver", "tail", tmp_path / "odd")
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in ran.out.splitlines())
    assert (first["nested"], second["nested"]) == ([1.5, "NaN"], ["Infinity"])
    assert (first["span"], first["text"], second["text"]) == (str(far), "/w==", "ok")
    assert (second["time"], second["day"]) == ("1970-01-01 00:00:01", "1970-01-02")


def test_tail_takes_the_column_of_event_times(forebay: Callable[..., Any], tmp_path: Path) -> None:
    async def fill() -> None:
        async with Quiver(tmp_path / "q", QuiverConfig(event_time_column="ts")) as quiver:
            await quiver.ingest(pa.record_batch({"ts": [1, 2, 3]}))

    asyncio.run(fill())
    tail = ("quiver", "tail", tmp_path / "q", "--event-from", 2)
    assert [each["ts"] for each in forebay(*tail, "--event-column", "ts").documents] == [2, 3]
    ran = forebay(*tail)
    assert (ran.code, ran.out) == (2, "")
    assert "'timestamp' is no column of event times" in ran.err


def test_directory_that_is_no_store_is_refused_with_a_hint(
    forebay: Callable[..., Any], tmp_path: Path
) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        ran = forebay("quiver", "stats", path)
        assert ran.code == 1
        assert "Quiver store" in ran.err


def test_tail_shows_the_rows_of_a_time(forebay: Callable[..., Any], directory: Path) -> None:
    rows = forebay("quiver", "tail", directory, "--event-from", 1_008, "--event-to", 2_000).documents
    assert [row["timestamp"] for row in rows] == [1_008, 1_009, 2_000]
    assert forebay("quiver", "tail", directory, "--signal", "logs").documents == []
    assert forebay("quiver", "tail", directory, "--ingested-to", 1).documents == []


def test_repair_says_what_it_did(forebay: Callable[..., Any], directory: Path) -> None:
    [facts] = forebay("quiver", "repair", directory, "--unregister", "b", "--output", "json").documents
    assert (facts["rewritten"], facts["unregistered"]) == ([], ["b"])
    assert "0 segments made whole" in forebay("quiver", "repair", directory).out


def test_forward_sends_what_the_subscriber_has_not_had(
    forebay: Callable[..., Any], directory: Path, tmp_path: Path
) -> None:
    words = ("quiver", "forward", directory, tmp_path / "bucket", "--source", "edge", "--subscriber", "b")
    [facts] = forebay(*words, "--output", "json").documents
    assert (facts["segments"], facts["rows"], facts["failures"]) == (3, 30, 0)
    assert len(list((tmp_path / "bucket" / "quiver").rglob("*.arrow"))) == 3
    assert "0 segments" in forebay(*words).out


def test_name_of_a_signal_cannot_move_the_cursor(forebay: Callable[..., Any], tmp_path: Path) -> None:
    async def fill() -> None:
        async with Quiver(tmp_path / "q") as quiver:
            await quiver.ingest(batch(1), signal="\x1b[2Jlogs")

    asyncio.run(fill())
    out = forebay("quiver", "inspect", tmp_path / "q").out
    assert "\x1b" not in out
    assert "logs" in out


@pytest.mark.parametrize("end", ["--event-to", "--ingested-to"])
def test_tail_takes_an_end_beyond_all_times(forebay: Callable[..., Any], directory: Path, end: str) -> None:
    assert len(forebay("quiver", "tail", directory, "-n", 3, end, 10**30).documents) == 3
