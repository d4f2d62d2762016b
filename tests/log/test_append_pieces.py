"""What callers bring in different forms is one append: frames, lists and columns of one partition."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from tests.log.hand_log import HandLog
from tests.log.writing import group, read_log, writer_of

from forebay.coordination import MemoryCoordinator
from forebay.errors import UsageError
from forebay.formats import bytes_batch
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.bytes_batch_piece import Piece, open_piece
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, LogWriter, MemoryTailCache
from forebay.log import _upload as upload_module
from forebay.storage import MemoryStore


def frame(*records: bytes, codec: bytes_batch.Codec = "none") -> AppendGroup:
    return AppendGroup("t", 0, open_piece(bytes_batch.encode(list(records), codec=codec)))


async def test_frames_lists_and_columns_of_one_flush_are_one_slice_in_their_order() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    columns = AppendGroup("t", 0, BytesBatch.of(pa.array([b"d", b"e"], pa.binary())))
    groups = [frame(b"a", b"b"), group("t", 0, b"c"), columns, frame(b"f", codec="zstd")]
    results = await writer_of(store, coordinator).append_shared(groups)
    assert [result.start_offset for result in results] == [1, 3, 4, 6]
    assert len({result.index_key for result in results}) == 1
    assert await read_log(store, coordinator) == [b"a", b"b", b"c", b"d", b"e", b"f"]


async def test_a_lone_frame_is_stored_as_the_bytes_that_came() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    encoded = bytes_batch.encode([b"a"], keys=[b"k"], headers=[{"h": b"v"}])
    [result] = await writer_of(store, coordinator).append_shared([AppendGroup("t", 0, open_piece(encoded))])
    assert result.wal_uri is not None
    blob = (await store.get(result.wal_uri.partition("://")[2].lstrip("/"))).data
    assert bytes(blob).endswith(encoded)


def test_lists_of_bytes_are_pieces_and_everything_else_is_columns() -> None:
    assert isinstance(AppendGroup.of("t", 0, [b"a"], keys=[None], timestamps_ms=[5]).batch, Piece)
    for records in (pa.array([b"a"]), (b"a",)):
        assert isinstance(AppendGroup.of("t", 0, records).batch, BytesBatch)
    assert isinstance(AppendGroup.of("t", 0, [b"a"], headers=[None]).batch, BytesBatch)
    with pytest.raises(UsageError):
        AppendGroup.of("t", 0, ["a"])


async def test_columns_of_another_length_fail_their_own_group_alone() -> None:
    wrong = [
        AppendGroup.of("t", 0, [b"a"], keys=[b"k", b"l"]),
        AppendGroup.of("t", 0, [b"a"], timestamps_ms=[]),
    ]
    *refused, good = await writer_of().append_shared([*wrong, group("t", 0, b"b")])
    assert [isinstance(result.error, UsageError) for result in refused] == [True, True]
    assert good.start_offset == 1


@pytest.mark.parametrize("viewed_bytes_max", [0, 1 << 20])
async def test_a_cached_batch_is_what_the_log_returns_whether_viewed_or_copied(
    monkeypatch: pytest.MonkeyPatch, viewed_bytes_max: int
) -> None:
    monkeypatch.setattr(upload_module, "VIEWED_BYTES_MAX", viewed_bytes_max)
    log, clock = HandLog(), SystemClock()
    cache = MemoryTailCache(clock)
    writer = LogWriter(
        log.store,
        log.coordinator,
        clock=clock,
        ids=IdSource(),
        randomness=random.Random(1),
        tail_cache=cache,
    )
    keyed = AppendGroup.of("orders", 0, [b"b", b"c"], keys=[b"k", None], headers=[None, {"h": None}])
    await writer.append_shared([AppendGroup.of("orders", 0, [b"a"], timestamps_ms=[5]), keyed])
    cached, direct = [await log.reader(cache=one).read("orders", 0, 1) for one in (cache, None)]
    assert cached.from_cache and not direct.from_cache
    assert [each.to_arrow() for each in cached.batches] == [each.to_arrow() for each in direct.batches]
