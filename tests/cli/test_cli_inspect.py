from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forebay as front
from forebay.formats import bytes_batch, ingest_batch, ingest_manifest, shared_blob
from forebay.formats.osiris_chunk import encode as encode_chunk
from forebay.formats.osiris_file import SEGMENT_HEADER
from forebay.quiver import Quiver

Run = Callable[..., Any]
OSIRIS = Path(__file__).resolve().parents[3] / "shared" / "data" / "osiris"


def copy_if_there(source: str, target: str) -> None:
    """Files of a store in use may go while they are copied."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def blob() -> bytes:
    parts = [
        shared_blob.Part(topic, 0, 2, bytes_batch.encode([b"one", topic.encode()])) for topic in ("a", "b")
    ]
    data, _ = shared_blob.encode(parts, created_at_ms=1_700_000_000_000)
    return data


def test_object_of_a_log_is_shown_with_every_partition_in_it(forebay: Run, tmp_path: Path) -> None:
    file = tmp_path / "object"
    file.write_bytes(blob())
    ran = forebay("inspect", file, "-o", "json")
    assert ran.code == 0
    assert ran.document["kind"] == "shared blob"
    assert [(row["topic"], row["records"], row["problem"]) for row in ran.document["partitions"]] == [
        ("a", 2, ""),
        ("b", 2, ""),
    ]
    assert "shared blob" in forebay("inspect", file).out


def test_damaged_slice_of_an_object_is_named_and_the_exit_code_says_so(forebay: Run, tmp_path: Path) -> None:
    file = tmp_path / "object"
    data = bytearray(blob())
    data[-6] ^= 1
    file.write_bytes(data)
    ran = forebay("inspect", file, "-o", "json")
    assert ran.code == 1
    assert [bool(row["problem"]) for row in ran.document["partitions"]] == [False, True]


def test_object_that_a_producer_really_wrote_is_recognized(forebay: Run, tmp_path: Path) -> None:
    with front.connect(tmp_path) as bay:
        bay.topics.create("orders")
        with bay.producer() as out:
            out.send("orders", [b"alpha", b"beta"], partition=0).result(timeout=60)
    [file] = [path for path in (tmp_path / "llog").rglob("*") if path.is_file()]
    [row] = forebay("inspect", file, "-o", "json").document["partitions"]
    assert (row["topic"], row["records"]) == ("orders", 2)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes_batch.encode([b"x", b"y"], keys=[b"k", None]), {"kind": "bytes batch", "records": 2}),
        (ingest_batch.encode([b"x"]), {"kind": "ingest batch", "records": 1}),
        (ingest_manifest.encode(ingest_manifest.ProducerManifest(["a"])), {"pending": ["a"]}),
        (ingest_manifest.encode(ingest_manifest.ConsumerManifest({"a": 1}, ["b"])), {"done": ["b"]}),
    ],
)
def test_small_formats_are_told_apart(
    forebay: Run, tmp_path: Path, data: bytes, expected: dict[str, Any]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    assert expected.items() <= forebay("inspect", file, "-o", "json").document.items()


def test_segment_with_a_chunk_still_being_written_says_how_much_is_incomplete(
    forebay: Run, tmp_path: Path
) -> None:
    chunk = encode_chunk([b"one", b"two"], chunk_id=7, timestamp=1_700_000_000_000, epoch=3)
    file = tmp_path / "segment"
    file.write_bytes(SEGMENT_HEADER + chunk + chunk[:-1])
    document = forebay("inspect", file, "-o", "json").document
    assert document["kind"] == "stream segment"
    assert (document["first_offset"], document["next_offset"], document["epochs"]) == (7, 9, [3])
    assert document["incomplete_bytes"] == len(chunk) - 1


def test_flipped_bit_in_a_chunk_is_found(forebay: Run, tmp_path: Path) -> None:
    data = bytearray(SEGMENT_HEADER + encode_chunk([b"one"], chunk_id=0, timestamp=1, epoch=1))
    data[-1] ^= 1
    file = tmp_path / "segment"
    file.write_bytes(data)
    ran = forebay("inspect", file, "-o", "json")
    assert ran.code == 1
    assert "checksum" in ran.error["message"].lower() or "crc" in ran.error["message"].lower()


@pytest.mark.skipif(not OSIRIS.is_dir(), reason="the files of a real RabbitMQ are not beside the checkout")
def test_files_of_a_real_rabbitmq_are_recognized(forebay: Run) -> None:
    [one] = [path for path in OSIRIS.rglob("*.segment") if "__one" in str(path)]
    assert forebay("inspect", one, "-o", "json").document["records"] == 1
    assert forebay("inspect", one.with_suffix(".index"), "-o", "json").document["chunks"] == 1


def test_every_file_of_a_quiver_store_is_recognized(forebay: Run, tmp_path: Path) -> None:
    async def work() -> None:
        batch = pa.RecordBatch.from_pydict({"n": [1, 2, 3]})
        async with Quiver(tmp_path / "store") as store:
            await store.register("all")
            await store.ingest(batch)
            await store.flush()
            await store.ingest(batch)
            # As a crash would leave it: a clean end keeps nothing in the WAL.
            shutil.copytree(tmp_path / "store", tmp_path / "copy", copy_function=copy_if_there)

    asyncio.run(work())
    files = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    ran = [forebay("inspect", file, "-o", "json") for file in files]
    kinds = {each.document["kind"] for each in ran if each.code == 0}
    assert {"quiver segment", "quiver WAL", "quiver ack.log"} <= kinds


def test_arrow_and_parquet_show_their_columns(forebay: Run, tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2]})
    pq.write_table(table, tmp_path / "p")
    with pa.OSFile(str(tmp_path / "a"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert forebay("inspect", tmp_path / "p", "-o", "json").document["schema"] == {"n": "int64"}
    assert forebay("inspect", tmp_path / "a", "-o", "json").document["schema"] == {"n": "int64"}


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"LLS1", b"PAR1", b"ARROW1", b"OSIR", b"FBYQWAL\0", b"{", b"[1"]
)
def test_what_is_none_of_ours_is_one_clear_error(forebay: Run, tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    ran = forebay("inspect", file, "-o", "json")
    assert ran.code == 1
    assert json.loads(ran.err)["error"]["message"]


def test_plan_is_dearer_the_shorter_the_flush_interval(forebay: Run) -> None:
    plan = forebay("cost", "--rate", "1MB", "--flush", "200ms", "--brokers", 2, "-o", "json").document
    dollars = [each["dollars_per_month"] for each in plan["intervals"]]
    assert dollars == sorted(dollars, reverse=True)
    [asked] = [each for each in plan["intervals"] if each["asked"]]
    assert asked["flushes_per_second"] == 10


def test_cost_of_what_lies_in_a_store_is_summed_by_prefix(forebay: Run, tmp_path: Path) -> None:
    with front.connect(tmp_path) as bay:
        bay.topics.create("orders")
        with bay.producer() as out:
            out.send("orders", [b"alpha"], partition=0).result(timeout=60)
    found = forebay("cost", "--data", tmp_path, "-o", "json").document
    assert sorted(each["prefix"] for each in found["prefixes"]) == ["llog", "llog-catalog"]
    assert found["objects"] == 2
    assert found["bytes"] > 0


def test_cost_without_anything_to_price_says_what_to_give(forebay: Run) -> None:
    ran = forebay("cost")
    assert ran.code == 2
    assert "--rate" in ran.err
