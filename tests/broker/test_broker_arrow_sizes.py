"""Arrow streams that are small on the wire and large in memory are refused before they are."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.bed import serving

from forebay.broker import HttpLimits
from forebay.broker._arrow_sizes import spread_bytes, unpacked_bytes
from forebay.formats.http_messages import ARROW

MOST = 1 << 20


def _stream(table: pa.Table, compression: str | None = None) -> bytes:
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(out, table.schema, options=options) as writer:
        writer.write_table(table)
    return out.getvalue()


def _compressed() -> bytes:
    return _stream(pa.table({"value": pa.array([bytes(MOST)] * 8, pa.binary())}), "zstd")


def _compressed_dictionary() -> bytes:
    values = pa.array([bytes(4 * MOST)], pa.binary())
    column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), values)
    return _stream(pa.table({"value": column}), "lz4")


def _dictionary() -> bytes:
    values = pa.array([bytes(1_000)], pa.binary())
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10_000, np.int8)), values)
    return _stream(pa.table({"value": column}))


def _views() -> bytes:
    shown = pa.py_buffer(bytes(1_000))
    views = np.tile(np.array([1_000, 0, 0, 0], np.int32), 10_000)
    column = pa.Array.from_buffers(pa.binary_view(), 10_000, [None, pa.py_buffer(views), shown])
    return _stream(pa.table({"value": column}))


@pytest.mark.parametrize("make", [_compressed, _compressed_dictionary])
async def test_stream_that_unpacks_beyond_the_limit_is_never_unpacked(
    make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pa.ipc, "open_stream", None)
    await _refused(make())


@pytest.mark.parametrize("make", [_dictionary, _views])
async def test_stream_that_would_spread_beyond_the_limit_is_refused(make: Callable[[], bytes]) -> None:
    await _refused(make())


async def _refused(body: bytes) -> None:
    assert len(body) < MOST
    async with serving(limits=HttpLimits(body_max_bytes=MOST)) as (_, client):
        path, kind = "/produce?topic=t&partition=0", {"Content-Type": ARROW}
        answer = await client.request("POST", path, body, kind)
        assert answer.status == 400, answer.body
        assert "body_max_bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
@pytest.mark.parametrize("kind", ["binary", "string", "view", "dictionary"])
async def test_streams_of_every_form_within_the_limit_are_taken(compression: str | None, kind: str) -> None:
    values = pa.array(["aa", "bb", "aa"] * 50)
    forms = {
        "binary": values.cast(pa.binary()),
        "string": values,
        "view": values.cast(pa.string_view()),
        "dictionary": values.dictionary_encode(),
    }
    body = _stream(pa.table({"value": forms[kind]}), compression)
    async with serving(limits=HttpLimits(body_max_bytes=MOST)) as (_, client):
        answer = await client.request("POST", "/produce?topic=t&partition=0", body, {"Content-Type": ARROW})
        assert answer.status == 200, answer.body
        found = (await client.consume("t", 0, 1)).json()["results"][0]["records"]
        assert [record["value"] for record in found] == values.to_pylist()


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_the_size_told_beforehand_is_the_size_that_is_read(compression: str | None) -> None:
    table = pa.table({"value": pa.array([bytes(500)] * 300, pa.binary())})
    stream = _stream(table, compression)
    told = unpacked_bytes(stream, 1 << 40)
    read = sum(batch.nbytes for batch in pa.ipc.open_stream(stream))
    assert read <= told <= read + 1_024


def test_spread_values_are_counted_once_for_each_record() -> None:
    column = pa.array(["abc", None, "abc", "d"]).dictionary_encode()
    assert spread_bytes(column) == 7
    assert spread_bytes(pa.array(["abc", "de"], pa.string_view()).slice(1)) == 2


@pytest.mark.parametrize("seed", range(200))
def test_broken_streams_are_told_by_errors_of_two_kinds(seed: int) -> None:
    chance = random.Random(seed)
    body = bytearray(_compressed())
    for _ in range(chance.randint(1, 6)):
        body[chance.randrange(len(body))] = chance.randrange(256)
    with contextlib.suppress(ValueError, OSError, pa.ArrowException):
        unpacked_bytes(bytes(body), MOST)
