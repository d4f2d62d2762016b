"""The front door on a real bucket and a real Oxia: topics, producers, reads, groups, times and trims."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import forebay
from forebay.log import GroupConfig, OffsetOutOfRange, ProducerConfig, TopicPartition
from forebay.testing.servers import OxiaServer, SeaweedServer

FAST = ProducerConfig(batch_max_delay_ms=5)


def test_the_front_door_on_a_bucket_and_oxia(seaweed: SeaweedServer, oxia: OxiaServer) -> None:
    config = GroupConfig(session_timeout_ms=5_000)
    with forebay.connect(seaweed.url("front-door"), coordinator=oxia.url(), group_config=config) as bay:
        topic = f"orders.{datetime.now(UTC).timestamp():.6f}"
        bay.topics.create(topic, partitions=3)
        with bay.producer(FAST) as out:
            receipts = [out.send(topic, [b"%d" % number] * 10, partition=number % 3) for number in range(30)]
        assert sorted(receipt.result(0).start_offset for receipt in receipts)[:3] == [1, 1, 1]
        table = bay.read(topic).read_all()
        assert table.num_rows == 300
        assert bay.read(topic, partition=1, start=95, end=99).read_all().num_rows == 4
        assert bay.read(topic, start=datetime.now(UTC) - timedelta(hours=1)).read_all().num_rows == 300
        assert bay.read(topic, start=datetime.now(UTC) + timedelta(hours=1)).read_all().num_rows == 0
        read = 0
        with bay.groups.consumer("billing", [topic]) as consumer:
            while read < 300:
                read += sum(batch.num_rows for batch in consumer.poll(timeout_s=10))
            consumer.commit()
        assert bay.groups.describe("billing").records == 0
        assert bay.groups.committed("billing")[TopicPartition(topic, 2)].offset == 101
        bay.trim(topic, partition=0, offset=50)
        assert bay.offsets(topic, 0).earliest == 50
        try:
            bay.read(topic, partition=0, start=49).read_all()
        except OffsetOutOfRange as error:
            assert error.earliest == 50
        else:
            raise AssertionError("a trimmed offset was served")
        bay.groups.delete("billing", force=True)
        bay.topics.delete(topic)
        assert topic not in [each.topic for each in bay.topics.list()]
