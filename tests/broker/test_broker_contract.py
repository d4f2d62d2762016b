"""The specification's HTTP contract, field by field, over a real socket."""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.broker.bed import Client, parts, serving

from forebay.formats import bytes_batch
from forebay.formats.http_messages import (
    ARROW,
    ARROW_RESULTS_KEY,
    MSGPACK,
    ConsumeRequest,
    ConsumeResponsePacked,
    ProducePartitionPacked,
    ProduceRequestPacked,
    ProduceResponse,
)
from forebay.log import ProducerConfig


async def test_health_has_the_fields_of_the_specification() -> None:
    async with serving(broker_id="broker-9") as (broker, client):
        answer = await client.get("/health")
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/json"
        found = answer.json()
        assert list(found) == ["status", "broker_id", "host", "port", "started_at_ms"]
        assert found["status"] == "ok"
        assert (found["broker_id"], found["host"], found["port"]) == ("broker-9", "127.0.0.1", client.port)
        assert found["started_at_ms"] == broker.status.started_at_ms


async def test_produce_answers_with_offsets_and_references() -> None:
    async with serving() as (_, client):
        answer = await client.produce("orders", 0, ["alpha", {"base64": "AAE="}])
        assert answer.status == 200
        found = answer.json()
        assert list(found) == ["results", "success_count", "error_count"]
        assert (found["success_count"], found["error_count"]) == (1, 0)
        [result] = found["results"]
        assert list(result) == [
            "topic",
            "partition",
            "ok",
            "start_offset",
            "end_offset",
            "count",
            "index_key",
            "wal_uri",
        ]
        assert result["index_key"] == "llog/orders/partitions/0/index/00000000000000000002"
        assert "llog/wal-shared/" in result["wal_uri"]
        assert (result["ok"], result["start_offset"], result["end_offset"], result["count"]) == (
            True,
            1,
            2,
            2,
        )


async def test_consume_answers_records_with_offsets_and_where_to_read_on() -> None:
    raw = b"\xff\x00\xfe"
    async with serving() as (_, client):
        await client.produce("orders", 0, ["alpha", {"base64": base64.b64encode(raw).decode()}, "é"])
        answer = await client.consume("orders", 0, 2)
        assert answer.status == 200
        found = answer.json()
        assert (found["success_count"], found["error_count"]) == (1, 0)
        [result] = found["results"]
        assert result["ok"] is True
        assert [record["offset"] for record in result["records"]] == [2, 3]
        assert [record["value"] for record in result["records"]] == [
            {"base64": base64.b64encode(raw).decode()},
            "é",
        ]
        assert all(record["timestamp_ms"] > 1_700_000_000_000 for record in result["records"])
        assert (result["next_offset"], result["high_watermark"], result["earliest_offset"]) == (4, 4, 1)


async def test_several_partitions_share_one_blob_and_one_answer() -> None:
    async with serving(producer=ProducerConfig(batch_max_delay_ms=100)) as (_, client):
        batches = [{"topic": "orders", "partition": number, "records": [f"r{number}"]} for number in range(5)]
        found = (await client.post("/produce", {"topic_partitions": batches})).json()
        assert found["success_count"] == 5
        assert len({result["wal_uri"] for result in found["results"]}) == 1
        assert [result["partition"] for result in found["results"]] == [0, 1, 2, 3, 4]


async def test_shared_blob_is_downloaded_once_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(uuid.uuid4())
    slow = ProducerConfig(batch_max_delay_ms=100)
    async with serving(made_of=parts(name), producer=slow) as (_, client):
        batches = [{"topic": "orders", "partition": number, "records": [f"r{number}"]} for number in range(5)]
        await client.post("/produce", {"topic_partitions": batches})
        await client.produce("orders", 0, ["later"])
    reading = parts(name)
    fetched: list[str] = []
    get_ranges = reading.store.get_ranges

    async def counted(key: str, ranges: Any) -> list[bytes]:
        fetched.append(key)
        return await get_ranges(key, ranges)

    monkeypatch.setattr(reading.store, "get_ranges", counted)
    async with serving(made_of=reading, roles=("read",)) as (_, client):
        places = [{"topic": "orders", "partition": number, "fetch_offset": 1} for number in range(5)]
        answer = await client.post("/consume", {"topic_partitions": places})
        assert [len(result["records"]) for result in answer.json()["results"]] == [2, 1, 1, 1, 1]
        assert len(fetched) == len(set(fetched)) == 2


async def test_unknown_paths_are_404_and_wrong_methods_405() -> None:
    async with serving() as (_, client):
        answer = await client.get("/nothing/here")
        assert answer.status == 404
        assert answer.json()["error"]["type"] == "NotFound"
        answer = await client.get("/produce")
        assert answer.status == 405
        assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        '{"topic_partitions": []}',
        '{"topic_partitions": [{}]}',
        '{"topic_partitions": [{"topic": "", "partition": 0, "records": ["a"]}]}',
        '{"topic_partitions": [{"topic": "a/b", "partition": 0, "records": ["a"]}]}',
        '{"topic_partitions": [{"topic": "a\\n", "partition": 0, "records": ["a"]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": -1, "records": ["a"]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 1e30, "records": ["a"]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 12345678901234567890123, "records": ["a"]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": "0", "records": ["a"]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": []}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": "a"}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": [1]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": [null]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": [{"base64": "A"}]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": [{"base64": "!!!!"}]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": [{"base64": "AA==", "x": 1}]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": [{}]}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"], "keys": []}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"], "sequence": 1}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"], "recrods": 1}]}',
        '{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["\\ud800"]}]}',
        '{"topic_partitions": ' + "[" * 5000,
    ],
)
async def test_malformed_produce_is_400_and_appends_nothing(body: str) -> None:
    async with serving() as (_, client):
        answer = await client.request(
            "POST", "/produce", body.encode("utf-8", "surrogatepass"), {"Content-Type": "application/json"}
        )
        assert answer.status == 400, answer.body
        error = answer.json()["error"]
        assert list(error) == ["type", "message", "hint", "request_id"]
        assert error["request_id"] == answer.headers["X-Request-Id"]
        assert (await client.get("/topics")).json() == {"topics": []}


@pytest.mark.parametrize(
    "change",
    [
        {"fetch_offset": -1},
        {"fetch_offset": 1 << 63},
        {"fetch_offset": "1"},
        {"partition_max_bytes": 0},
        {"partition_max_bytes": -5},
        {"offset": 1},
    ],
)
async def test_malformed_consume_is_400(change: dict[str, object]) -> None:
    async with serving() as (_, client):
        place = {"topic": "t", "partition": 0, "fetch_offset": 1, **change}
        answer = await client.post("/consume", {"topic_partitions": [place]})
        assert answer.status == 400
        for name in ("max_wait_ms", "min_bytes", "max_bytes"):
            sound = {"topic": "t", "partition": 0, "fetch_offset": 1}
            answer = await client.post("/consume", {"topic_partitions": [sound], name: -1})
            assert answer.status == 400


async def test_partial_failure_is_409_with_an_error_per_batch() -> None:
    async with serving() as (_, client):
        await client.produce("orders", 0, ["a"])
        await client.produce("orders", 1, ["a"])
        await client.post("/topics/orders/partitions/1/fence", {})
        batches = [{"topic": "orders", "partition": number, "records": ["b"]} for number in (0, 1)]
        answer = await client.post("/produce", {"topic_partitions": batches})
        assert answer.status == 409
        found = answer.json()
        assert (found["success_count"], found["error_count"]) == (1, 1)
        good, bad = found["results"]
        assert good["ok"] is True and good["start_offset"] == 2
        assert bad["ok"] is False and bad["error_type"] == "Fenced"
        assert "FENCED" in bad["error"]
        assert "start_offset" not in bad


async def test_full_queue_is_503_with_retry_after_and_appends_nothing() -> None:
    tight = ProducerConfig(batch_max_delay_ms=60_000, pending_max_bytes=1_000, batch_max_bytes=100_000)
    async with serving(producer=tight) as (broker, client):
        first = await client.open()
        body = json.dumps({"topic_partitions": [{"topic": "t", "partition": 0, "records": ["x" * 900]}]})
        await first.send("POST", "/produce", body.encode())
        while not broker.engines.producer.pending_bytes:
            await client.get("/health")
        answer = await client.produce("t", 0, ["y" * 900])
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        [result] = answer.json()["results"]
        assert result["error_type"] == "BackPressureRejected"
        await broker.engines.producer.flush()
        assert (await first.answer()).status == 200
        await first.close()
        assert (await client.consume("t", 0, 1)).json()["results"][0]["high_watermark"] == 2


async def test_reading_outside_of_the_log_says_where_it_is() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        answer = await client.consume("t", 0, 77)
        assert answer.status == 409
        [result] = answer.json()["results"]
        assert (result["ok"], result["error_type"]) == (False, "OffsetOutOfRange")
        assert (result["earliest_offset"], result["high_watermark"]) == (1, 2)
        answer = await client.consume("nothing", 0, 1)
        assert answer.status == 409
        assert answer.json()["results"][0]["error_type"] == "UnknownTopic"


async def test_bounds_in_bytes_hold_for_a_partition_and_for_the_whole() -> None:
    async with serving() as (_, client):
        for partition in (0, 1):
            await client.produce("t", partition, ["x" * 100] * 10)
        one = {"topic": "t", "partition": 0, "fetch_offset": 1, "partition_max_bytes": 350}
        answer = await client.post("/consume", {"topic_partitions": [one]})
        assert len(answer.json()["results"][0]["records"]) == 3
        places = [{"topic": "t", "partition": number, "fetch_offset": 1} for number in (0, 1)]
        answer = await client.post("/consume", {"topic_partitions": places, "max_bytes": 1_250})
        first, second = answer.json()["results"]
        assert (len(first["records"]), len(second["records"])) == (10, 2)
        assert second["next_offset"] == 3
        answer = await client.post("/consume", {"topic_partitions": places, "max_bytes": 1})
        first, second = answer.json()["results"]
        assert (len(first["records"]), len(second["records"])) == (1, 0)  # At least one, however large.
        assert second["next_offset"] == 1


async def test_idempotent_batch_is_appended_once() -> None:
    async with serving() as (_, client):
        first = (await client.produce("t", 0, ["a", "b"], producer_id="p", sequence=0)).json()["results"][0]
        again = (await client.produce("t", 0, ["a", "b"], producer_id="p", sequence=0)).json()["results"][0]
        assert (again["start_offset"], again["end_offset"], again["duplicate"]) == (
            first["start_offset"],
            first["end_offset"],
            True,
        )
        skipped = await client.produce("t", 0, ["c"], producer_id="p", sequence=5)
        assert skipped.status == 409
        assert skipped.json()["results"][0]["error_type"] == "OutOfSequence"
        assert (await client.consume("t", 0, 1)).json()["results"][0]["high_watermark"] == 3


async def test_keys_times_and_headers_go_in_and_come_out() -> None:
    async with serving() as (_, client):
        await client.produce(
            "t",
            0,
            ["a", "b"],
            keys=["k", None],
            timestamps_ms=[5, 6],
            headers=[[["h", "v"], ["n", None]], None],
        )
        first, second = (await client.consume("t", 0, 1)).json()["results"][0]["records"]
        assert first == {
            "offset": 1,
            "timestamp_ms": 5,
            "value": "a",
            "key": "k",
            "headers": [["h", "v"], ["n", None]],
        }
        assert second == {"offset": 2, "timestamp_ms": 6, "value": "b"}


# -- binary bodies


async def _packed(client: Client, batch: ProducePartitionPacked) -> ProduceResponse:
    body = msgspec.msgpack.encode(ProduceRequestPacked([batch]))
    answer = await client.request("POST", "/produce", body, {"Content-Type": MSGPACK})
    assert answer.headers["Content-Type"] == MSGPACK
    return msgspec.msgpack.decode(answer.body, type=ProduceResponse)


async def _fetch_packed(client: Client, *, frames: bool) -> ConsumeResponsePacked:
    request = ConsumeRequest(
        topic_partitions=[msgspec.convert({"topic": "t", "partition": 0, "fetch_offset": 1}, type=_place())],
        frames=frames,
    )
    answer = await client.request(
        "POST", "/consume", msgspec.msgpack.encode(request), {"Content-Type": MSGPACK, "Accept": MSGPACK}
    )
    assert answer.status == 200
    return msgspec.msgpack.decode(answer.body, type=ConsumeResponsePacked)


def _place() -> type:
    from forebay.formats.http_messages import ConsumePartition

    return ConsumePartition


async def test_msgpack_records_and_frames_are_the_same_log() -> None:
    async with serving() as (_, client):
        records = [b"\x00\xff", b"", b"text"]
        views = [memoryview(record) for record in records]
        done = await _packed(client, ProducePartitionPacked(topic="t", partition=0, records=views))
        assert done.success_count == 1
        frame = memoryview(bytes_batch.encode(records, keys=[b"k", None, b""], codec="zstd"))
        done = await _packed(client, ProducePartitionPacked(topic="t", partition=0, frame=frame))
        assert (done.results[0].start_offset, done.results[0].end_offset) == (4, 6)

        plain = await _fetch_packed(client, frames=False)
        assert [bytes(record.value) for record in plain.results[0].records or []] == records * 2
        assert bytes((plain.results[0].records or [])[3].key or b"") == b"k"
        framed = await _fetch_packed(client, frames=True)
        batches = framed.results[0].batches or []
        assert [
            value for batch in batches for value in bytes_batch.decode(batch.frame).records()
        ] == records * 2
        assert [batch.start_offset for batch in batches] == [1, 4]
        assert framed.results[0].next_offset == 7


@pytest.mark.parametrize("damage", ["flip", "cut", "magic", "bomb", "both", "none"])
async def test_damaged_frame_is_400_and_appends_nothing(damage: str) -> None:
    frame = bytearray(bytes_batch.encode([b"a" * 100] * 10))
    if damage == "flip":
        frame[40] ^= 1
    elif damage == "cut":
        frame = frame[:-3]
    elif damage == "magic":
        frame[:4] = b"XXXX"
    elif damage == "bomb":
        frame[12:16] = (2**31 - 1).to_bytes(4, "little")
    batch: dict[str, object] = {"topic": "t", "partition": 0, "frame": bytes(frame)}
    if damage == "both":
        batch["records"] = [b"a"]
    elif damage == "none":
        del batch["frame"]
    async with serving() as (_, client):
        body = msgspec.msgpack.encode({"topic_partitions": [batch]})
        answer = await client.request("POST", "/produce", body, {"Content-Type": MSGPACK})
        assert answer.status == 400, answer.body
        assert (await client.get("/topics")).json() == {"topics": []}


@pytest.mark.parametrize(
    "query",
    [
        "partition=0",
        "topic=t",
        "topic=t&partition=x",
        "topic=t&partition=100000",
        "topic=a%2Fb&partition=0",
        "topic=a%0A&partition=0",
        f"topic={'x' * 300}&partition=0",
        "topic=t&partition=0&producer_id=p",
        "topic=t&partition=0&sequence=4",
        f"topic=t&partition=0&sequence=0&producer_id={'p' * 100}",
        "topic=t&partition=0&epoch=-1",
        "topic=t&partition=0&epcoh=3",
        "topic=t&partition=0&records=a",
        "topic=t&partition=0&frame=AAAA",
    ],
)
async def test_query_of_an_arrow_stream_is_as_strict_as_the_other_bodies(query: str) -> None:
    table = pa.table({"value": pa.array([b"a"], pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    async with serving() as (_, client):
        body = sink.getvalue().to_pybytes()
        answer = await client.request("POST", f"/produce?{query}", body, {"Content-Type": ARROW})
        assert answer.status == 400, answer.body
        assert (await client.get("/topics")).json() == {"topics": []}


async def test_arrow_stream_goes_in_and_comes_out() -> None:
    table = pa.table(
        {
            "value": pa.array([b"a", b"b"], pa.binary()),
            "key": pa.array([b"k", None], pa.binary()),
            "timestamp": pa.array([5, 6], pa.timestamp("ms", tz="UTC")),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body = sink.getvalue().to_pybytes()
    async with serving() as (_, client):
        answer = await client.request("POST", "/produce?topic=t&partition=3", body, {"Content-Type": ARROW})
        assert answer.status == 200, answer.body
        place = {"topic": "t", "partition": 3, "fetch_offset": 1}
        answer = await client.post("/consume", {"topic_partitions": [place]}, {"Accept": ARROW})
        assert answer.headers["Content-Type"] == ARROW
        found = pa.ipc.open_stream(answer.body).read_all()
        assert found.column_names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
        assert found["value"].to_pylist() == [b"a", b"b"]
        assert found["key"].to_pylist() == [b"k", None]
        assert found["timestamp"].cast(pa.int64()).to_pylist() == [5, 6]
        about = json.loads(found.schema.metadata[ARROW_RESULTS_KEY.encode()])
        assert about["results"][0]["next_offset"] == 3
        for path in ("/produce", "/produce?topic=t", "/produce?topic=t&partition=x", "/produce?partition=1"):
            refused = await client.request("POST", path, body, {"Content-Type": ARROW})
            assert refused.status == 400
        for bad in (b"", b"nonsense", body[:-30], body[:40]):
            answer = await client.request(
                "POST", "/produce?topic=t&partition=3", bad, {"Content-Type": ARROW}
            )
            assert answer.status == 400, bad


async def test_other_content_types_are_415_and_what_curl_sends_is_json() -> None:
    body = b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"]}]}'
    async with serving() as (_, client):
        for kind in ("text/plain", "application/xml", "multipart/form-data; boundary=x"):
            answer = await client.request("POST", "/produce", body, {"Content-Type": kind})
            assert answer.status == 415
        answer = await client.request("POST", "/produce", body, {"Content-Encoding": "gzip"})
        assert answer.status == 415
        curl = {"Content-Type": "application/x-www-form-urlencoded"}
        assert (await client.request("POST", "/produce", body, curl)).status == 200
        assert (await client.request("POST", "/produce", body)).status == 200


async def test_request_id_is_taken_over_or_made() -> None:
    async with serving() as (_, client):
        assert (await client.get("/health", {"X-Request-Id": "mine-1"})).headers["X-Request-Id"] == "mine-1"
        made = (await client.get("/health", {"X-Request-Id": "x" * 500})).headers["X-Request-Id"]
        again = (await client.get("/health")).headers["X-Request-Id"]
        assert 26 < len(made) <= 60 and made != again
        answer = await client.get("/nope", {"X-Request-Id": "mine-2"})
        assert answer.json()["error"]["request_id"] == "mine-2"


async def test_roles_bound_what_is_served() -> None:
    name = str(uuid.uuid4())
    async with serving(made_of=parts(name), roles=("write",)) as (_, client):
        assert (await client.produce("t", 0, ["a"])).status == 200
        assert (await client.consume("t", 0, 1)).status == 404
        assert (await client.get("/tail?topic=t")).status == 404
    async with serving(made_of=parts(name), roles=("read",)) as (_, client):
        assert (await client.produce("t", 0, ["a"])).status == 404
        assert (await client.consume("t", 0, 1)).json()["results"][0]["records"][0]["value"] == "a"
        assert (await client.get("/ready")).json()["roles"] == ["read"]


async def test_of_a_field_that_is_there_twice_the_last_one_counts() -> None:
    """As documented: the decoder cannot refuse it, and a second look would cost as much again."""
    async with serving() as (_, client):
        batch = b'{"topic": "t", "partition": 0, "records": ["a"], "records": ["b", "c"]}'
        answer = await client.request("POST", "/produce", b'{"topic_partitions": [%b]}' % batch)
        assert answer.status == 200
        [result] = (await client.consume("t", 0, 1)).json()["results"]
        assert [record["value"] for record in result["records"]] == ["b", "c"]
