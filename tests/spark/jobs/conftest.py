from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.spark.export import close_clients
from forebay.spark.jobs import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A log of two topics with small appends."""
    with forebay.connect(tmp_path / "bay") as bay:
        bay.topics.create("orders", partitions=3)
        bay.topics.create("clicks", partitions=1)
        with bay.producer() as out:
            for append in range(4):
                for topic, partitions in (("orders", 3), ("clicks", 1)):
                    for partition in range(partitions):
                        records = [b"%d-%d-%d" % (partition, append, number) for number in range(5)]
                        keys = [b"k%d" % number for number in range(5)]
                        out.send(topic, records, partition=partition, keys=keys).result(timeout=60)
    yield Place(str(tmp_path / "bay"))
    close_clients()
