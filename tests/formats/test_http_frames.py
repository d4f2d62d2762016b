"""A request that was put together around its frames is the one that the encoder would have made."""

from __future__ import annotations

import msgspec
import pytest

from forebay.formats import bytes_batch
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.bytes_batch_join import merge
from forebay.formats.bytes_batch_piece import piece_of
from forebay.formats.http_frames import request_of_frames
from forebay.formats.http_messages import ProducePartitionPacked, ProduceRequestPacked


@pytest.mark.parametrize("count", [1, 2, 15, 16, 300])
def test_the_broker_reads_what_was_put_together_as_what_was_encoded(count: int) -> None:
    entries, frames = [], []
    for number in range(count):
        batches = [
            BytesBatch.of([b"a" * number, b"b"]),
            BytesBatch.of([b"c"], keys=[b"k"], headers=[{"h": b"v"}]),
        ]
        frame = merge([piece_of(batch) for batch in batches], time_ms=7)
        frames.append(bytes_batch.encode_batch(bytes_batch.merge(batches, time_ms=7)))
        entry = ProducePartitionPacked(topic="t" * (1 + number % 40), partition=number)
        if number % 2:
            entry.producer_id, entry.sequence = "p", number * 1_000
        entries.append((entry, frame))
    parts = request_of_frames(entries)
    assert len(parts) > 2 * count, "a frame was copied into one buffer"
    read = msgspec.msgpack.decode(b"".join(parts), type=ProduceRequestPacked).topic_partitions
    assert [(each.topic, each.partition, each.producer_id, each.sequence) for each in read] == [
        (entry.topic, entry.partition, entry.producer_id, entry.sequence) for entry, _ in entries
    ]
    assert [bytes(each.frame or b"") for each in read] == frames
